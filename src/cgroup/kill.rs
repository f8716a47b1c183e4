//! Emptying and removing a group.
//!
//! Promises that no fork escapes (the group is frozen, or the kernel kills it as one) and that no reused pid is hit: a
//! pid is signalled through a descriptor, and only after it was seen in the group with that descriptor open.

use std::fs;
use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::{Group, procs, walk, write};
use crate::error::{Error, Kind, Result};
use crate::sys::process::{pidfd_open, pidfd_send_signal, told};

/// First and longest pause between two looks at a group that is not empty, or a directory that is busy.
const FIRST_PAUSE: Duration = Duration::from_millis(1);
const LONGEST_PAUSE: Duration = Duration::from_millis(50);
/// How long a freeze may take before the signals are sent anyway (a task in uninterruptible sleep cannot freeze).
const FREEZE: Duration = Duration::from_millis(500);

pub(super) async fn kill_all(group: &Group, limit: Duration) -> Result<()> {
    let end = Instant::now() + limit;
    let mut pause = FIRST_PAUSE;
    loop {
        let pids = group.pids();
        if pids.is_empty() {
            return Ok(());
        }
        // A workload that was never moved is in our group: that is no reason to end ourselves and our neighbours.
        if pids
            .iter()
            .any(|pid| u32::try_from(*pid) == Ok(std::process::id()))
        {
            let text = format!(
                "kill cgroup {}: we are in it ourselves, kill its processes one by one",
                group.path()
            );
            return Err(Error::new(Kind::Invalid, text));
        }
        // Frozen v1 tasks die only when thawed, so each round thaws; then what forked before the freeze is seen.
        if !at_once(group) {
            round(group, end).await;
        }
        let left = group.pids();
        if left.is_empty() {
            return Ok(());
        }
        if Instant::now() >= end {
            let shown: Vec<String> = left.iter().take(8).map(|pid| told(*pid)).collect();
            let text = format!(
                "kill cgroup {}: {} left after {limit:?} ({})",
                group.path(),
                left.len(),
                shown.join(", ")
            );
            return Err(Error::new(Kind::Deadline, text));
        }
        sleep(pause.min(end - Instant::now())).await;
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

pub(super) async fn remove(group: &Group, limit: Duration) -> Result<()> {
    let end = Instant::now() + limit;
    let mut pause = FIRST_PAUSE;
    loop {
        let mut failed = None;
        for dir in group.owned() {
            if let Err(e) = remove_tree(&dir) {
                failed = Some((dir, e));
            }
        }
        let Some((dir, e)) = failed else {
            return Ok(());
        };
        // EBUSY also just after the last process ended: the kernel lets go of it a little later.
        if e.raw_os_error() != Some(libc::EBUSY) || Instant::now() >= end {
            let busy = e.raw_os_error() == Some(libc::EBUSY);
            let what = format!(
                "remove cgroup {} ({} processes in it)",
                dir.display(),
                group.pids().len()
            );
            let error = Error::io(what, e);
            return Err(if busy {
                error.as_kind(Kind::Busy)
            } else {
                error
            });
        }
        sleep(pause.min(end - Instant::now())).await;
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

/// Removes `dir` and what is below it, children first; absent is done. A group holds no files that could be removed.
fn remove_tree(dir: &Path) -> io::Result<()> {
    let mut all = Vec::new();
    walk(dir, &mut |dir| all.push(dir.to_owned()));
    for dir in all.iter().rev() {
        match fs::remove_dir(dir) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
            _ => {}
        }
    }
    Ok(())
}

/// Lets the kernel kill the whole subtree in one step (`cgroup.kill`, Linux 5.14, v2). True when it did.
pub(super) fn at_once(group: &Group) -> bool {
    group.v2
        && group
            .owned()
            .iter()
            .all(|dir| write(dir, "cgroup.kill", "1").is_ok())
}

/// Freezes, signals all, thaws.
async fn round(group: &Group, end: Instant) {
    let freezer = group.dir_of(if group.v2 { "" } else { "freezer" });
    if let Some(dir) = freezer.as_ref().filter(|dir| group.owned().contains(dir)) {
        freeze(group.v2, dir, end.min(Instant::now() + FREEZE)).await;
    }
    for dir in group.owned() {
        signal_tree(&dir);
    }
    if let Some(dir) = freezer {
        thaw(group.v2, &dir);
    }
}

async fn freeze(v2: bool, dir: &Path, end: Instant) {
    let (file, on) = if v2 {
        ("cgroup.freeze", "1")
    } else {
        ("freezer.state", "FROZEN")
    };
    if write(dir, file, on).is_err() {
        return;
    }
    let frozen = || {
        let state = if v2 { "cgroup.events" } else { "freezer.state" };
        let text = fs::read_to_string(dir.join(state)).unwrap_or_default();
        if v2 {
            text.lines().any(|l| l == "frozen 1")
        } else {
            text.trim() == "FROZEN"
        }
    };
    while !frozen() && Instant::now() < end {
        sleep(FIRST_PAUSE).await;
    }
}

/// Thaws the group, and on v1 also what was frozen below it by itself (a paused container).
fn thaw(v2: bool, dir: &Path) {
    let (file, off) = if v2 {
        ("cgroup.freeze", "0")
    } else {
        ("freezer.state", "THAWED")
    };
    walk(dir, &mut |dir: &Path| {
        let _ = write(dir, file, off);
    });
}

fn signal_tree(dir: &Path) {
    let mut dirs: Vec<PathBuf> = Vec::new();
    walk(dir, &mut |dir| dirs.push(dir.to_owned()));
    for dir in dirs {
        // A bounded number of descriptors at a time; the rest comes in the next round.
        let held: Vec<_> = procs(&dir)
            .into_iter()
            .take(256)
            .filter_map(|pid| Some((pid, pidfd_open(pid).ok()?)))
            .collect();
        let now = procs(&dir);
        for (pid, fd) in held.iter().filter(|(pid, _)| now.contains(pid)) {
            if let Err(e) = pidfd_send_signal(fd.as_fd(), libc::SIGKILL)
                && e.raw_os_error() != Some(libc::ESRCH)
            {
                tracing::warn!(pid, error = %e, "kill by cgroup");
            }
        }
    }
}
