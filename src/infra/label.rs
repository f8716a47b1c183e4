//! SELinux labels of a pod: what the node's policy has for containers, and what the pod asks for, become one.
//!
//! Promise: where SELinux is off one file is looked at and nothing gets a label. Every word of a request is checked before
//! it becomes part of a mount option: none can smuggle in another one.

use std::fs::{self, OpenOptions};
use std::io::{self, Write as _};
use std::os::fd::AsFd;

use nix::sys::statfs::{SELINUX_MAGIC, statfs};
use nix::sys::statvfs::FsFlags;
use serde::{Deserialize, Serialize};

use crate::error::{Error, Kind, Result};
use crate::sys::xattr;

const SELINUXFS: &str = "/sys/fs/selinux";

/// Where a package of container tools puts its list, before that of the policy itself.
const TOOLS_LIST: &str = "/usr/share/containers/selinux/contexts";

/// The names that policies agree on, for one that came without a list.
const USUAL_PROCESS: &str = "system_u:system_r:container_t:s0";
const USUAL_FILE: &str = "system_u:object_r:container_file_t:s0";

/// Far more than any policy has; the kernel takes a page for the whole label.
const MAX_NAME: usize = 255;
const MAX_LEVEL: usize = 2048;

/// What a pod asks for (`selinux_options`); an empty word is the policy's.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct LabelOptions {
    /// SELinux user.
    pub user: String,
    /// Role, of processes alone.
    pub role: String,
    /// Type, of processes alone.
    pub kind: String,
    /// MLS level or range, `s0:c1,c2`.
    pub level: String,
    /// A privileged pod's processes are not confined: only its files get a label.
    pub privileged: bool,
}

/// Labels of one pod, as the kernel reads them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Labels {
    /// Of the pod's files and its shm.
    pub files: String,
    /// Of the infra process; `None`: as the policy decides.
    pub process: Option<String>,
}

impl LabelOptions {
    /// Nothing is asked for.
    pub fn is_empty(&self) -> bool {
        let words = [&self.user, &self.role, &self.kind, &self.level];
        words.iter().all(|word| word.is_empty())
    }

    /// Refuses (Invalid) what is no name or no level in any policy.
    pub fn check(&self) -> Result<()> {
        for (what, name) in [
            ("user", &self.user),
            ("role", &self.role),
            ("type", &self.kind),
        ] {
            if !name.is_empty() && !is_name(name) {
                return Err(Error::new(
                    Kind::Invalid,
                    format!(
                        "check selinux_options: {what} {name:?} is no name: use letters, digits, '_', '-' and '.'"
                    ),
                ));
            }
        }
        if !self.level.is_empty() && !is_level(&self.level) {
            return Err(Error::new(
                Kind::Invalid,
                format!(
                    "check selinux_options: level {:?} is no level: use one as s0, s0:c1,c2, s0:c0.c9 or s0-s1:c1",
                    self.level
                ),
            ));
        }
        Ok(())
    }

    /// The labels of a pod on this node; `None` where SELinux is off, and (with a line in the log) where its policy knows
    /// no containers.
    ///
    /// # Errors
    /// Invalid: the policy knows no such user, role, type or level. State: something is asked of a policy that has nothing
    /// for containers.
    pub fn labels(&self) -> Result<Option<Labels>> {
        if !is_on() {
            return Ok(None);
        }
        let Some(list) = List::of_node() else {
            if self.is_empty() {
                tracing::warn!(
                    "SELinux is on and its policy has no labels for containers: the pod's files keep those of their directory"
                );
                return Ok(None);
            }
            return Err(Error::new(
                Kind::State,
                format!(
                    "label the pod as selinux_options ask: the policy of this node has no list of labels for containers ({TOOLS_LIST}, or contexts/lxc_contexts of the policy) and does not know {USUAL_FILE}: install a policy for containers, or leave the options out"
                ),
            ));
        };
        let labels = self.over(&list);
        if !self.is_empty() {
            self.refuse_unknown(&labels.files)?;
            if let Some(process) = &labels.process {
                self.refuse_unknown(process)?;
            }
        }
        Ok(Some(labels))
    }

    /// User and level go to files, too, as the daemon's own controller has it: a policy may divide by either.
    fn over(&self, list: &List) -> Labels {
        let asked = !self.is_empty() && !self.privileged;
        Labels {
            files: merge(&list.file, [&self.user, "", "", &self.level]),
            process: asked.then(|| {
                let words = [&self.user, &self.role, &self.kind, &self.level];
                merge(&list.process, words.map(String::as_str))
            }),
        }
    }

    /// Who may not ask the policy hears of a wrong label when it is set.
    fn refuse_unknown(&self, label: &str) -> Result<()> {
        match look_up(label) {
            Err(e) if e.raw_os_error() == Some(libc::EINVAL) => Err(Error::new(
                Kind::Invalid,
                format!(
                    "label the pod {label:?}: the policy of this node has no such label: correct selinux_options ({}), or load a policy that has it",
                    self.words()
                ),
            )),
            _ => Ok(()),
        }
    }

    fn words(&self) -> String {
        let named = [
            ("user", &self.user),
            ("role", &self.role),
            ("type", &self.kind),
            ("level", &self.level),
        ];
        let given = named.iter().filter(|(_, word)| !word.is_empty());
        let texts: Vec<String> = given.map(|(what, word)| format!("{what} {word}")).collect();
        texts.join(", ")
    }
}

/// Gives an open file its label, as part of `what`. A filesystem that keeps none has one by its mount, which is not ours to
/// change.
pub(super) fn set(file: impl AsFd, label: &str, what: &str) -> Result<()> {
    match xattr::set(file.as_fd(), c"security.selinux", label.as_bytes()) {
        Err(e) if e.raw_os_error() != Some(libc::EOPNOTSUPP) => {
            let errno = e.raw_os_error().unwrap_or(0);
            Err(Error::io(told(what, Some(label), errno), e))
        }
        _ => Ok(()),
    }
}

/// `what` with the label that was part of it, when the answer may be about the label, and what to do then.
pub(super) fn told(what: &str, label: Option<&str>, errno: i32) -> String {
    match label {
        Some(label) if matches!(errno, libc::EACCES | libc::EPERM | libc::EINVAL) => format!(
            "{what} with SELinux label {label:?}: refused, perhaps by the policy of this node: look for what it denies {:?} in the audit log, and allow it or give another label by selinux_options",
            own_label()
        ),
        _ => what.to_owned(),
    }
}

/// What a policy has for containers: user, role, type and, with MLS, the level that has no categories.
#[derive(Debug, PartialEq, Eq)]
struct List {
    process: String,
    file: String,
}

impl List {
    fn of_node() -> Option<Self> {
        let found = fs::read_to_string(TOOLS_LIST).or_else(|_| {
            let config = fs::read_to_string("/etc/selinux/config").unwrap_or_default();
            let policy = policy_name(&config);
            fs::read_to_string(format!("/etc/selinux/{policy}/contexts/lxc_contexts"))
        });
        found.ok().and_then(|text| Self::parse(&text)).or_else(|| {
            look_up(USUAL_FILE).is_ok().then(|| Self {
                process: USUAL_PROCESS.to_owned(),
                file: USUAL_FILE.to_owned(),
            })
        })
    }

    /// Lines `key = "label"`; `None` unless it has both keys with labels that can be labels.
    fn parse(text: &str) -> Option<Self> {
        let of = |wanted: &str| {
            let value = assignments(text).find(|(key, _)| *key == wanted)?.1;
            is_label(value).then(|| value.to_owned())
        };
        Some(Self {
            process: of("process")?,
            file: of("file")?,
        })
    }
}

/// `SELINUXTYPE` of /etc/selinux/config; the library that all others use takes `targeted` without one.
fn policy_name(config: &str) -> &str {
    assignments(config)
        .filter(|(key, name)| *key == "SELINUXTYPE" && is_name(name) && !name.starts_with('.'))
        .last()
        .map_or("targeted", |(_, name)| name)
}

fn assignments(text: &str) -> impl Iterator<Item = (&str, &str)> {
    text.lines()
        .map(str::trim)
        .filter(|line| !line.starts_with(['#', ';']))
        .filter_map(|line| line.split_once('='))
        .map(|(key, value)| (key.trim(), value.trim().trim_matches('"')))
}

/// On: its filesystem is there and may be written (read-only is how containers are told that it is none of theirs), and a
/// policy is loaded: until then every process has the one label that needs none.
fn is_on() -> bool {
    statfs(SELINUXFS).is_ok_and(|s| {
        s.filesystem_type() == SELINUX_MAGIC && !s.flags().contains(FsFlags::ST_RDONLY)
    }) && own_label() != "kernel"
}

/// Of this process; empty when it cannot be read.
fn own_label() -> String {
    let text = fs::read_to_string("/proc/self/attr/current").unwrap_or_default();
    text.trim_end_matches(['\0', '\n']).to_owned()
}

/// Asks the loaded policy whether it has this label: EINVAL when not, EACCES for who may not ask.
fn look_up(label: &str) -> io::Result<()> {
    OpenOptions::new()
        .write(true)
        .open(format!("{SELINUXFS}/context"))?
        .write_all(label.as_bytes())
}

/// The words that are given, in the place of those of `base`.
fn merge(base: &str, words: [&str; 4]) -> String {
    let mut own = base.splitn(4, ':');
    let merged = words.map(|word| match (word, own.next()) {
        ("", own) => own.unwrap_or_default(),
        (word, _) => word,
    });
    // A policy without MLS has no level.
    merged.join(":").trim_end_matches(':').to_owned()
}

fn is_label(text: &str) -> bool {
    let mut parts = text.splitn(4, ':');
    let names = [parts.next(), parts.next(), parts.next()];
    names.iter().all(|name| name.is_some_and(is_name)) && parts.next().is_none_or(is_level)
}

fn is_name(text: &str) -> bool {
    (1..=MAX_NAME).contains(&text.len())
        && text
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'-' | b'.'))
}

/// One level, or a range of two with `-`: a sensitivity and, after ':', categories and ranges of them (`c0.c3`) with ','.
fn is_level(text: &str) -> bool {
    let word = |w: &str| !w.is_empty() && w.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_');
    let one = |level: &str| {
        let (sensitivity, categories) = match level.split_once(':') {
            Some((sensitivity, categories)) => (sensitivity, Some(categories)),
            None => (level, None),
        };
        let all = |list: &str| {
            list.split(',').all(|range| match range.split_once('.') {
                Some((from, to)) => word(from) && word(to),
                None => word(range),
            })
        };
        word(sensitivity) && categories.is_none_or(all)
    };
    text.len() <= MAX_LEVEL
        && match text.split_once('-') {
            Some((low, high)) => one(low) && one(high),
            None => one(text),
        }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(user: &str, role: &str, kind: &str, level: &str) -> LabelOptions {
        LabelOptions {
            user: user.to_owned(),
            role: role.to_owned(),
            kind: kind.to_owned(),
            level: level.to_owned(),
            privileged: false,
        }
    }

    #[test]
    fn words_that_are_no_part_of_a_label_are_refused() {
        options("", "", "", "").check().expect("nothing");
        options("system_u", "system_r", "my.app-1_t", "s0:c1,c2")
            .check()
            .expect("a label");
        let long = "a".repeat(256);
        for bad in [
            "a:b", "a\nb", "a\0b", "a b", "a,b", "a\"b", "a/b", "ä", &long,
        ] {
            for options in [
                options(bad, "", "", ""),
                options("", bad, "", ""),
                options("", "", bad, ""),
            ] {
                let error = options.check().expect_err(bad);
                assert_eq!(error.kind(), Kind::Invalid, "{bad:?}: {error}");
                assert!(!error.to_string().contains(['\n', '\0']), "{error}");
            }
        }
    }

    #[test]
    fn levels_are_sensitivities_with_categories_and_ranges_of_them() {
        for good in [
            "s0",
            "s15:c0.c1023",
            "s0:c1,c2",
            "s0-s1",
            "s0-s0:c0.c3,c7",
            "s0:c1-s2:c1,c2",
        ] {
            assert!(is_level(good), "{good}");
        }
        for bad in [
            "",
            ":",
            "s0:",
            "s0:c1,",
            "s0:,c1",
            "s0:c1.",
            "s0:c1.c2.c3",
            "s0-",
            "s0-s1-s2",
            "s0:c1:c2",
            "s0 ",
            "s0\n",
            "s0\0",
            "s0\",uid=0",
            "-s0",
        ] {
            assert!(!is_level(bad), "{bad:?}");
            assert!(bad.is_empty() || options("", "", "", bad).check().is_err());
        }
        assert!(!is_level(&format!("s0:{}c1", "c1,".repeat(1000))));
    }

    #[test]
    fn what_is_asked_for_takes_the_place_of_the_policys_words() {
        let list = List {
            process: "u:r:t:s0".to_owned(),
            file: "u:object_r:f:s0".to_owned(),
        };
        let labels = |o: LabelOptions| {
            let made = o.over(&list);
            (made.files, made.process)
        };
        assert_eq!(
            labels(options("", "", "", "")),
            ("u:object_r:f:s0".to_owned(), None)
        );
        assert_eq!(
            labels(options("", "", "", "s0:c1,c2")),
            (
                "u:object_r:f:s0:c1,c2".to_owned(),
                Some("u:r:t:s0:c1,c2".to_owned())
            )
        );
        assert_eq!(
            labels(options("me", "mine", "my_t", "")),
            (
                "me:object_r:f:s0".to_owned(),
                Some("me:mine:my_t:s0".to_owned())
            )
        );
        let privileged = LabelOptions {
            privileged: true,
            ..options("", "", "my_t", "s0:c1")
        };
        assert_eq!(labels(privileged), ("u:object_r:f:s0:c1".to_owned(), None));
    }

    #[test]
    fn a_policy_without_levels_has_labels_of_three_words() {
        let none = ["", "", "", ""];
        assert_eq!(merge("u:r:t", none), "u:r:t");
        assert_eq!(merge("u:r:t", ["", "", "", "s0"]), "u:r:t:s0");
        assert_eq!(
            merge("u:r:t:s0-s0:c0.c9", ["", "", "x", ""]),
            "u:r:x:s0-s0:c0.c9"
        );
    }

    #[test]
    fn the_list_of_a_policy_is_read_as_it_is_written() {
        let text = "# process = \"a:b:c\"\n;file=\"a:b:c\"\n\nprocess = \"u:r:t:s0\"\nfile=u:object_r:f:s0\nro_file = \"x\"\n";
        let list = List::parse(text).expect("a list");
        assert_eq!(
            (list.process.as_str(), list.file.as_str()),
            ("u:r:t:s0", "u:object_r:f:s0")
        );
        for bad in [
            "",
            "process = \"u:r:t:s0\"",
            "process = \"u:r:t:s0\"\nfile = \"f\"",
            "process = \"u:r:t:s0\"\nfile = \"u:r:f:s0,uid=0\"\n",
        ] {
            assert_eq!(List::parse(bad), None, "{bad:?}");
        }
    }

    #[test]
    fn the_policys_name_is_that_of_its_configuration() {
        assert_eq!(
            policy_name("#SELINUXTYPE=no\nSELINUX=enforcing\nSELINUXTYPE=mls \n"),
            "mls"
        );
        for without in ["", "SELINUX=disabled", "SELINUXTYPE=../x", "SELINUXTYPE=.."] {
            assert_eq!(policy_name(without), "targeted", "{without:?}");
        }
    }
}
