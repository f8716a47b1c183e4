//! Where the cgroup trees of this machine are, and where a path leads in them. Pure, but for `detect`.
//!
//! Promises to tell v1, v2 and the mix of both apart by what is mounted, never by the distribution.

use std::path::{Path, PathBuf};

use crate::error::{Context, Error, Kind, Result};
use crate::sys::mountinfo;

/// The layout of this machine, read from the mount table (each call to [`detect`](Layout::detect) reads anew).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Layout {
    /// One tree.
    V2 {
        /// Its mount point.
        root: PathBuf,
    },
    /// One tree per controller, or per set of controllers mounted together.
    V1 {
        /// (controllers, mount point); a tree without controllers is called by its name: "name=systemd".
        trees: Vec<(Vec<String>, PathBuf)>,
        /// A cgroup2 mount beside them (systemd's "hybrid"); it has no controllers.
        unified: Option<PathBuf>,
    },
}

impl Layout {
    /// Reads it from the mount table.
    ///
    /// # Errors
    /// Unsupported when no cgroup filesystem is mounted.
    pub fn detect() -> Result<Self> {
        let table = mountinfo::read().context(|| "read the mount table")?;
        Self::from_table(&table)
    }

    /// The same from a table already read.
    ///
    /// # Errors
    /// Unsupported when no cgroup filesystem is in it.
    pub fn from_table(table: &[mountinfo::Entry]) -> Result<Self> {
        let mut unified = None;
        let mut trees: Vec<(Vec<String>, PathBuf)> = Vec::new();
        for entry in table {
            // A part of a tree, bound somewhere for a container: paths from /proc/<pid>/cgroup do not start there.
            let whole = entry.root == Path::new("/");
            match entry.kind.as_str() {
                "cgroup2" if whole && unified.is_none() => unified = Some(entry.point.clone()),
                "cgroup" if whole => {
                    let controllers = controllers(&entry.super_options);
                    let seen = trees.iter().any(|(c, _)| *c == controllers);
                    if !controllers.is_empty() && !seen {
                        trees.push((controllers, entry.point.clone()));
                    }
                }
                _ => {}
            }
        }
        let real = trees
            .iter()
            .any(|(c, _)| c.iter().any(|c| !c.starts_with("name=")));
        match (real, unified) {
            (true, unified) => Ok(Self::V1 { trees, unified }),
            (false, Some(root)) => Ok(Self::V2 { root }),
            (false, None) => Err(Error::new(
                Kind::Unsupported,
                "find cgroups: none are mounted, mount cgroup2 at /sys/fs/cgroup",
            )),
        }
    }

    /// Whether one tree holds all controllers.
    pub fn is_v2(&self) -> bool {
        matches!(self, Self::V2 { .. })
    }

    /// Whether a cgroup2 mount sits beside v1 trees.
    pub fn is_hybrid(&self) -> bool {
        matches!(
            self,
            Self::V1 {
                unified: Some(_),
                ..
            }
        )
    }
}

/// The controllers among a v1 filesystem's options ("rw,cpu,cpuacct" or "rw,xattr,name=systemd").
fn controllers(options: &str) -> Vec<String> {
    let no_controller = [
        "rw",
        "ro",
        "xattr",
        "noprefix",
        "clone_children",
        "none",
        "cpuset_v2_mode",
        "favordynmods",
    ];
    options
        .split(',')
        .filter(|o| !o.is_empty() && !no_controller.contains(o) && !o.starts_with("release_agent="))
        .map(str::to_owned)
        .collect()
}

/// Checks a path below the mount points and brings it to the form `/a/b`; `/` is the root.
pub(super) fn check(path: &str) -> Result<String> {
    let bad =
        path.split('/').any(|p| p == "..") || path.contains(['\0', '\n']) || path.len() > 4000;
    if bad {
        let shown: String = path.chars().take(120).collect();
        return Err(Error::new(
            Kind::Invalid,
            format!("check cgroup path {shown:?}: use an absolute path without '..'"),
        ));
    }
    let parts: Vec<&str> = path
        .split('/')
        .filter(|p| !p.is_empty() && *p != ".")
        .collect();
    Ok(format!("/{}", parts.join("/")))
}

/// What `linux.cgroupsPath` means as a path: "/a/b" and "a/b" are that; "x-y.slice:prefix:name" is systemd's
/// `/x.slice/x-y.slice/prefix-name.scope`.
pub(super) fn expand(cgroups_path: &str) -> Result<String> {
    let parts: Vec<&str> = cgroups_path.split(':').collect();
    let [slice, prefix, name] = parts[..] else {
        return check(cgroups_path);
    };
    if cgroups_path.contains('/') {
        return check(cgroups_path);
    }
    let bad = || {
        Error::new(
            Kind::Invalid,
            format!("check cgroup path {cgroups_path:?}: write it as parent.slice:prefix:name"),
        )
    };
    let dirs = slice_dirs(if slice.is_empty() {
        "system.slice"
    } else {
        slice
    })
    .ok_or_else(bad)?;
    if name.is_empty() {
        return Err(bad());
    }
    let unit = match (name.ends_with(".slice"), prefix.is_empty()) {
        (true, _) => name.to_owned(),
        (false, true) => format!("{name}.scope"),
        (false, false) => format!("{prefix}-{name}.scope"),
    };
    check(&format!("{dirs}/{unit}"))
}

/// `a-b.slice` is `/a.slice/a-b.slice`: each dash is one level (systemd.slice(5)). `-.slice` is the root.
fn slice_dirs(slice: &str) -> Option<String> {
    let name = slice.strip_suffix(".slice")?;
    if name == "-" {
        return Some(String::new());
    }
    let mut dirs = String::new();
    let mut so_far = String::new();
    for part in name.split('-') {
        if part.is_empty() {
            return None;
        }
        if !so_far.is_empty() {
            so_far.push('-');
        }
        so_far.push_str(part);
        dirs.push_str(&format!("/{so_far}.slice"));
    }
    Some(dirs)
}

#[cfg(test)]
mod tests {
    use super::*;

    const V2: &str =
        "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n";
    const V1: &str = "31 23 0:28 / /sys/fs/cgroup ro - tmpfs tmpfs ro,mode=755\n\
        32 31 0:29 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,xattr,release_agent=/lib/x,name=systemd\n\
        33 31 0:30 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n\
        34 31 0:31 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n\
        35 31 0:31 /docker/x /other/memory rw - cgroup cgroup rw,memory\n\
        36 31 0:30 / /again rw - cgroup cgroup rw,cpu,cpuacct\n";
    const UNIFIED: &str = "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n";

    fn layout(text: &str) -> Layout {
        Layout::from_table(&mountinfo::parse(text.as_bytes())).unwrap()
    }

    #[test]
    fn one_tree_is_v2_also_beside_a_named_tree() {
        let root = PathBuf::from("/sys/fs/cgroup");
        assert_eq!(layout(V2), Layout::V2 { root: root.clone() });
        let named = "9 1 0:9 / /cg/systemd rw - cgroup cgroup rw,name=systemd\n";
        assert_eq!(layout(&format!("{named}{V2}")), Layout::V2 { root });
    }

    #[test]
    fn one_tree_per_controller_is_v1_and_with_cgroup2_beside_it_hybrid() {
        let Layout::V1 { trees, unified } = layout(V1) else {
            panic!("v1")
        };
        let names: Vec<String> = trees.iter().map(|(c, _)| c.join("+")).collect();
        assert_eq!(names, ["name=systemd", "cpu+cpuacct", "memory"]);
        assert_eq!(trees[1].1, PathBuf::from("/sys/fs/cgroup/cpu,cpuacct"));
        assert_eq!(unified, None);
        let hybrid = layout(&format!("{V1}{UNIFIED}"));
        assert!(hybrid.is_hybrid() && !hybrid.is_v2());
    }

    #[test]
    fn nothing_mounted_is_said() {
        assert_eq!(
            Layout::from_table(&[]).unwrap_err().kind(),
            Kind::Unsupported
        );
    }

    #[test]
    fn paths_are_checked_and_brought_to_one_form() {
        for (given, is) in [
            ("/a/b", "/a/b"),
            ("a/b/", "/a/b"),
            ("//a/./b", "/a/b"),
            ("/", "/"),
            ("/a:b:c", "/a:b:c"),
        ] {
            assert_eq!(expand(given).unwrap(), is);
        }
        for bad in ["/a/../b", "..", "/a\0b", "/a\nb"] {
            assert_eq!(check(bad).unwrap_err().kind(), Kind::Invalid, "{bad:?}");
        }
    }

    #[test]
    fn systemd_form_is_expanded_to_its_directories() {
        for (given, is) in [
            (
                "a-b.slice:prefix:name",
                "/a.slice/a-b.slice/prefix-name.scope",
            ),
            (
                "kubepods-burstable-podx_y.slice:cri-containerd:0f",
                "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-podx_y.slice/cri-containerd-0f.scope",
            ),
            (":docker:0f", "/system.slice/docker-0f.scope"),
            ("-.slice:p:n", "/p-n.scope"),
            ("user.slice::n", "/user.slice/n.scope"),
            ("a.slice:p:a-b.slice", "/a.slice/a-b.slice"),
        ] {
            assert_eq!(expand(given).unwrap(), is, "{given}");
        }
        for bad in [
            "a:b:c",
            "a--b.slice:p:n",
            "-a.slice:p:n",
            ".slice:p:n",
            "a.slice:p:",
        ] {
            assert_eq!(expand(bad).unwrap_err().kind(), Kind::Invalid, "{bad}");
        }
    }
}
