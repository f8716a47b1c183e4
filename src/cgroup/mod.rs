//! cgroup v1 and v2: the pod's own directories, kills, statistics, word of kills for want of memory.
//!
//! Owns how a path becomes one directory (v2) or one in each controller's tree (v1). Promises that making and removing
//! are idempotent, that a kill reaches what forks while it runs, and that the root group is never killed or removed.
//! Must never touch a group the caller did not name, nor one that only a part of a process' controllers is in.

mod kill;
mod layout;
mod metrics;
mod oom;
#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use protobuf::well_known_types::any::Any;

pub use layout::Layout;
pub use oom::{OomCount, OomNews, OomWatch};

use crate::error::{Context, Error, Kind, Result};

/// How often the directories of a group are begun anew when their parent goes away meanwhile.
const CREATE_TRIES: u32 = 10;

/// One cgroup by its path below the mount points ("/podvisor/<namespace>+<id>").
#[derive(Clone, Debug)]
pub struct Group {
    path: String,
    v2: bool,
    /// v2: one. v1: one for each tree, `name=systemd` included.
    trees: Vec<Tree>,
    /// The cgroup2 mount beside v1 trees; we make nothing there, but clean up what a runtime made.
    unified: Option<PathBuf>,
}

#[derive(Clone, Debug)]
struct Tree {
    controllers: Vec<String>,
    mount: PathBuf,
    /// Differs from the group's only when read from a process that somebody moved in one tree.
    path: String,
}

impl Tree {
    fn dir(&self) -> PathBuf {
        self.mount.join(self.path.trim_start_matches('/'))
    }
}

impl Group {
    /// The group at `path` (absolute, no ".."), whether it exists or not.
    ///
    /// # Errors
    /// Invalid for a path that could lead elsewhere.
    pub fn new(layout: &Layout, path: &str) -> Result<Self> {
        let path = layout::check(path)?;
        Ok(Self::build(layout, &path, |_| path.clone()))
    }

    /// As OCI's `linux.cgroupsPath`: "/a/b", "a/b" or "x-y.slice:prefix:name" (systemd form, expanded to directories).
    ///
    /// # Errors
    /// Invalid for what is none of these.
    pub fn from_spec(layout: &Layout, cgroups_path: &str) -> Result<Self> {
        Self::new(layout, &layout::expand(cgroups_path)?)
    }

    /// The group a process is in (v1: per controller). The root group is a valid answer.
    ///
    /// # Errors
    /// NotFound when there is no such process.
    pub fn of_process(layout: &Layout, pid: i32) -> Result<Self> {
        let file = format!("/proc/{pid}/cgroup");
        let text = fs::read_to_string(&file).context(|| format!("read {file}"))?;
        Self::from_proc(layout, &text)
    }

    fn from_proc(layout: &Layout, text: &str) -> Result<Self> {
        // "4:memory:/a", "1:name=systemd:/a", "0::/a"; the path may hold colons.
        let rows: Vec<(&str, String)> = text
            .lines()
            .filter_map(|line| {
                let mut parts = line.splitn(3, ':').skip(1);
                let controllers = parts.next()?;
                // The kernel adds this to the path of a group that was removed under a process that is ending.
                let path = parts.next()?.trim_end_matches(" (deleted)");
                layout::check(path).ok().map(|path| (controllers, path))
            })
            .collect();
        let of = |wanted: &str| {
            let row = rows
                .iter()
                .find(|(names, _)| names.split(',').any(|n| n == wanted));
            row.map(|(_, path)| path.clone())
        };
        let main = if layout.is_v2() {
            of("")
        } else {
            // Runtimes always set these. Should they differ, kills and removals stay with the first one's path.
            ["pids", "freezer", "memory", "cpu", "name=systemd"]
                .into_iter()
                .find_map(of)
        };
        let main = main.ok_or_else(|| {
            Error::new(
                Kind::Other,
                "find the cgroup of a process: no known tree is listed",
            )
        })?;
        Ok(Self::build(layout, &main, |tree| {
            tree.iter()
                .find_map(|c| of(c))
                .unwrap_or_else(|| "/".into())
        }))
    }

    fn build(layout: &Layout, path: &str, path_in: impl Fn(&[String]) -> String) -> Self {
        let (v2, trees, unified) = match layout {
            Layout::V2 { root } => (
                true,
                vec![Tree {
                    controllers: Vec::new(),
                    mount: root.clone(),
                    path: path.to_owned(),
                }],
                None,
            ),
            Layout::V1 { trees, unified } => {
                let each = trees.iter().map(|(controllers, mount)| Tree {
                    controllers: controllers.clone(),
                    mount: mount.clone(),
                    path: path_in(controllers),
                });
                (false, each.collect(), unified.clone())
            }
        };
        Self {
            path: path.to_owned(),
            v2,
            trees,
            unified,
        }
    }

    /// The path below the mount points, as "/a/b".
    pub fn path(&self) -> &str {
        &self.path
    }

    /// Whether it is the root, which holds the whole machine.
    pub fn is_root(&self) -> bool {
        self.path == "/"
    }

    /// Makes the directories (v2: enables the parents' controllers on the way; v1: in every controller's tree, where a
    /// new cpuset inherits cpus and mems). Idempotent.
    ///
    /// # Errors
    /// Those of mkdir. A controller that cannot be enabled is left out: the kernel says so to whoever sets a limit.
    pub fn create(&self) -> Result<()> {
        for tree in &self.trees {
            let mut tries = 1;
            while let Err(e) = self.create_in(tree) {
                // The last pod of another process may take an empty parent away between two of our steps.
                if e.kind() != io::ErrorKind::NotFound || tries == CREATE_TRIES {
                    return Err(Error::io(
                        format!("make cgroup {}", tree.dir().display()),
                        e,
                    ));
                }
                tries += 1;
            }
        }
        Ok(())
    }

    /// Gives the group the smallest share of processor time there is, where it has that controller: for processes that wait.
    pub fn take_least_shares(&self) {
        for dir in self.dirs() {
            for (file, least) in [("cpu.shares", "2"), ("cpu.weight", "1")] {
                // One of them at most is there.
                let _ = write(&dir, file, least);
            }
        }
    }

    /// Removes the group where nothing is in it, neither process nor group; anything else leaves it as it is. For a
    /// parent that pods share: the last one to go takes it along.
    pub fn remove_if_empty(&self) {
        if self.is_root() {
            return;
        }
        for dir in self.owned() {
            // The kernel refuses while anything is in it: that is the check.
            let _ = fs::remove_dir(dir);
        }
    }

    fn create_in(&self, tree: &Tree) -> io::Result<()> {
        let cpuset = tree.controllers.iter().any(|c| c == "cpuset");
        let mut dir = tree.mount.clone();
        for part in Path::new(tree.path.trim_start_matches('/')) {
            if self.v2 {
                enable_controllers(&dir);
            }
            let parent = dir.clone();
            dir.push(part);
            match fs::create_dir(&dir) {
                Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(e),
                _ => {}
            }
            if cpuset {
                inherit_cpuset(&parent, &dir)?;
            }
        }
        Ok(())
    }

    /// Directories whose `cgroup.procs` a process joins (v2 one, v1 one per tree).
    pub fn dirs(&self) -> Vec<PathBuf> {
        self.trees.iter().map(Tree::dir).collect()
    }

    /// Moves a process, with all its threads, into the group.
    ///
    /// # Errors
    /// NotFound when the group or the process is not there.
    pub fn add_process(&self, pid: i32) -> Result<()> {
        for dir in self.dirs() {
            write(&dir, "cgroup.procs", &pid.to_string()).map_err(|e| {
                let gone = e.raw_os_error() == Some(libc::ESRCH);
                let error = Error::io(
                    format!("move process {pid} into cgroup {}", dir.display()),
                    e,
                );
                if gone {
                    error.as_kind(Kind::NotFound)
                } else {
                    error
                }
            })?;
        }
        Ok(())
    }

    /// Whether a directory of it is there.
    pub fn exists(&self) -> bool {
        self.owned().iter().any(|dir| dir.is_dir())
    }

    /// All pids in it and below it, each once, in ascending order; empty when it does not exist.
    pub fn pids(&self) -> Vec<i32> {
        let mut all = BTreeSet::new();
        for dir in self.owned() {
            walk(&dir, &mut |dir| all.extend(procs(dir)));
        }
        all.into_iter().collect()
    }

    /// SIGKILL to everything in it and below: `cgroup.kill` where there is one, else freeze, signal, thaw, and again.
    /// Returns when it is empty. Absent is done.
    ///
    /// # Errors
    /// Deadline, with the pids left, when it is not empty after `limit`; Invalid for the root and for a group that we
    /// are in ourselves.
    pub async fn kill_all(&self, limit: Duration) -> Result<()> {
        self.refuse_root("kill")?;
        kill::kill_all(self, limit).await
    }

    /// Removes it and everything below, children first, retrying what is busy up to `limit`. Absent is done.
    ///
    /// # Errors
    /// What the kernel last said when it is still there after `limit` (Busy while processes are in it); Invalid for
    /// the root.
    pub async fn remove(&self, limit: Duration) -> Result<()> {
        self.refuse_root("remove")?;
        kill::remove(self, limit).await
    }

    /// containerd's statistics message (v1 or v2 type, bare type name), as complete as the files allow.
    ///
    /// # Errors
    /// NotFound when the group does not exist.
    pub fn metrics(&self) -> Result<Any> {
        metrics::metrics(self)
    }

    /// The directories that are this group's alone: where a process was moved elsewhere in one tree, the other place
    /// is somebody else's.
    fn owned(&self) -> Vec<PathBuf> {
        let beside = self
            .unified
            .iter()
            .map(|mount| mount.join(self.path.trim_start_matches('/')));
        self.trees
            .iter()
            .filter(|t| t.path == self.path)
            .map(Tree::dir)
            .chain(beside)
            .collect()
    }

    /// The directory in the tree that has this controller (v2: the one there is).
    fn dir_of(&self, controller: &str) -> Option<PathBuf> {
        let mut trees = self.trees.iter();
        let tree = trees.find(|t| self.v2 || t.controllers.iter().any(|c| c == controller));
        tree.map(Tree::dir).filter(|dir| dir.is_dir())
    }

    fn refuse_root(&self, verb: &str) -> Result<()> {
        if self.is_root() {
            return Err(Error::new(
                Kind::Invalid,
                format!("{verb} cgroup /: it holds the whole machine, name a group"),
            ));
        }
        Ok(())
    }
}

/// Lets children of `dir` have every controller `dir` has. One by one: one refusal must not hide the others.
fn enable_controllers(dir: &Path) {
    let wanted = fs::read_to_string(dir.join("cgroup.controllers")).unwrap_or_default();
    let now = fs::read_to_string(dir.join("cgroup.subtree_control")).unwrap_or_default();
    for name in wanted
        .split_whitespace()
        .filter(|w| !now.split_whitespace().any(|n| n == *w))
    {
        if let Err(e) = write(dir, "cgroup.subtree_control", &format!("+{name}")) {
            // EBUSY: processes sit in `dir` itself.
            tracing::debug!(dir = %dir.display(), controller = name, error = %e, "controller stays off");
        }
    }
}

/// A v1 cpuset starts empty, and no process can join it until both files say something.
fn inherit_cpuset(parent: &Path, dir: &Path) -> io::Result<()> {
    for file in ["cpuset.cpus", "cpuset.mems"] {
        let read = |dir: &Path| {
            fs::read_to_string(dir.join(file))
                .map(|s| s.trim().to_owned())
                .unwrap_or_default()
        };
        let above = read(parent);
        if read(dir).is_empty() && !above.is_empty() {
            write(dir, file, &above)?;
        }
    }
    Ok(())
}

/// Calls `each` for `dir` and every directory below it, parents first. What goes away meanwhile is left out.
fn walk(dir: &Path, each: &mut dyn FnMut(&Path)) {
    if !dir.is_dir() {
        return;
    }
    each(dir);
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|t| t.is_dir()) {
            walk(&entry.path(), each);
        }
    }
}

fn procs(dir: &Path) -> Vec<i32> {
    let text = fs::read_to_string(dir.join("cgroup.procs")).unwrap_or_default();
    // 0: a process of a pid namespace we do not see.
    text.lines()
        .filter_map(|line| line.trim().parse().ok())
        .filter(|pid| *pid > 0)
        .collect()
}

/// One write call; never makes the file (a plain directory in its place must not fill with files).
fn write(dir: &Path, file: &str, text: &str) -> io::Result<()> {
    use io::Write;
    fs::OpenOptions::new()
        .write(true)
        .open(dir.join(file))?
        .write_all(text.as_bytes())
}
