//! Whom a workload runs as: `USER[:GROUP]` by name or number, looked up in the container's own files.
//!
//! Promises never to leave the root file system, whatever its links say, and the rules people know from container engines: a user's
//! own group and further groups unless a group is given, group 0 for a number that no file knows.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use nix::fcntl::{OFlag, OpenHow, ResolveFlag, openat2};
use serde::Serialize;
use serde_json::{Value, json};

use crate::error::{Context, Error, Kind, Result};

/// Most bytes read of such a file.
const MOST: u64 = 4 << 20;

/// See the module. The default is root.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct User {
    /// User.
    pub uid: u32,
    /// First group.
    pub gid: u32,
    /// Further groups.
    pub groups: Vec<u32>,
}

impl User {
    /// The `user` object of an OCI process.
    pub fn document(&self) -> Value {
        let mut user = json!({ "uid": self.uid, "gid": self.gid });
        if !self.groups.is_empty() {
            user["additionalGids"] = json!(self.groups);
        }
        user
    }
}

/// The user that `text` stands for in the container whose files are at `rootfs`.
///
/// # Errors
/// NotFound for a name that is in no file; Invalid for what is no user.
pub fn find(rootfs: &Path, text: &str) -> Result<User> {
    let (user, group) = text
        .split_once(':')
        .map_or((text, None), |(u, g)| (u, Some(g)));
    if user.is_empty() || group.is_some_and(str::is_empty) {
        let what = format!("run as user {text:?}: write USER or USER:GROUP, names or numbers");
        return Err(Error::new(Kind::Invalid, what));
    }
    let people = read(rootfs, "etc/passwd")?;
    let found = lines(&people).find(|l| l.first() == Some(&user) || number(l.get(2)) == id(user));
    let uid = match (id(user), &found) {
        (Some(uid), _) => uid,
        (None, Some(line)) => number(line.get(2)).ok_or_else(|| unknown(text, "passwd"))?,
        (None, None) => return Err(unknown(text, "passwd")),
    };
    let teams = read(rootfs, "etc/group")?;
    if let Some(group) = group {
        let named = || lines(&teams).find(|l| l.first() == Some(&group));
        let gid = id(group).or_else(|| number(named()?.get(2)));
        let gid = gid.ok_or_else(|| unknown(text, "group"))?;
        let groups = Vec::new();
        return Ok(User { uid, gid, groups });
    }
    let Some(line) = found else {
        return Ok(User {
            uid,
            ..User::default()
        });
    };
    let (name, gid) = (line.first().copied(), number(line.get(3)).unwrap_or(0));
    let is_in = |l: &Vec<&str>| {
        let members = l.get(3).copied().unwrap_or_default();
        members.split(',').any(|m| Some(m) == name)
    };
    let groups = lines(&teams).filter(is_in).filter_map(|l| number(l.get(2)));
    Ok(User {
        uid,
        gid,
        groups: groups.filter(|g| *g != gid).collect(),
    })
}

fn unknown(text: &str, file: &str) -> Error {
    let what = format!(
        "run as user {text:?}: the container's /etc/{file} does not know that name; give a number, or a name that it has"
    );
    Error::new(Kind::NotFound, what)
}

/// A number that can be a user's or a group's; -1 means "no change" to the kernel.
fn id(text: &str) -> Option<u32> {
    let digits = text.bytes().all(|b| b.is_ascii_digit());
    text.parse().ok().filter(|n| digits && *n != u32::MAX)
}

fn number(field: Option<&&str>) -> Option<u32> {
    id(field?)
}

fn lines(text: &str) -> impl Iterator<Item = Vec<&str>> {
    text.lines().map(|line| line.split(':').collect())
}

/// A file of the container's; empty when it has none.
fn read(rootfs: &Path, name: &str) -> Result<String> {
    let what = || format!("read /{name} of rootfs {}", rootfs.display());
    let root = File::open(rootfs).context(what)?;
    // Its links are the workload's business; they must not lead us to the host's files, nor a FIFO keep us.
    let flags = OFlag::O_RDONLY | OFlag::O_CLOEXEC | OFlag::O_NONBLOCK | OFlag::O_NOCTTY;
    let how = OpenHow::new()
        .flags(flags)
        .resolve(ResolveFlag::RESOLVE_IN_ROOT | ResolveFlag::RESOLVE_NO_MAGICLINKS);
    let file = match openat2(&root, name, how) {
        Ok(file) => File::from(file),
        Err(nix::errno::Errno::ENOENT | nix::errno::Errno::ENOTDIR) => return Ok(String::new()),
        Err(e) => return Err(Error::sys(what(), e)),
    };
    if !file.metadata().context(what)?.is_file() {
        return Ok(String::new());
    }
    let mut bytes = Vec::new();
    file.take(MOST).read_to_end(&mut bytes).context(what)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn root() -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("etc")).unwrap();
        let etc =
            |name: &str, text: &str| fs::write(dir.path().join("etc").join(name), text).unwrap();
        etc(
            "passwd",
            "root:x:0:0::/:/bin/sh\nweb:x:33:34::/w:/bin/sh\nbad:x:y:z\n",
        );
        etc(
            "group",
            "root:x:0:\nweb:x:34:\nlog:x:40:web,x\naudio:x:41:web\nmine:x:34:web\n",
        );
        dir
    }

    fn user(uid: u32, gid: u32, groups: &[u32]) -> User {
        User {
            uid,
            gid,
            groups: groups.to_vec(),
        }
    }

    #[test]
    fn names_and_numbers_are_looked_up_as_container_engines_do() {
        let dir = root();
        for (text, found) in [
            ("root", user(0, 0, &[])),
            ("web", user(33, 34, &[40, 41])),
            ("33", user(33, 34, &[40, 41])),
            ("1000", user(1000, 0, &[])),
            ("web:log", user(33, 40, &[])),
            ("1000:1001", user(1000, 1001, &[])),
        ] {
            assert_eq!(find(dir.path(), text).unwrap(), found, "{text}");
        }
        for text in [
            "",
            ":",
            "web:",
            ":web",
            "nobody",
            "bad",
            "-1",
            "4294967295",
            "web:none",
        ] {
            assert!(find(dir.path(), text).is_err(), "{text}");
        }
        fs::remove_dir_all(dir.path().join("etc")).unwrap();
        assert_eq!(find(dir.path(), "7").unwrap(), user(7, 0, &[]));
        assert!(find(dir.path(), "web").is_err());
    }

    #[test]
    fn a_link_does_not_lead_to_the_hosts_files() {
        let dir = root();
        let (passwd, outside) = (dir.path().join("etc/passwd"), tempfile::tempdir().unwrap());
        let theirs = outside.path().join("passwd");
        fs::write(&theirs, "stranger:x:9:9::/:/bin/sh\n").unwrap();
        fs::remove_file(&passwd).unwrap();
        std::os::unix::fs::symlink(&theirs, &passwd).unwrap();
        assert!(find(dir.path(), "stranger").is_err());
    }
}
