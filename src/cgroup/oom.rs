//! Processes of a group that the kernel killed for want of memory: how many, and word of the next.
//!
//! Promises to count what happened in the group and below it, whoever's limit was hit, and nothing of its neighbours; and
//! to sleep while nothing happens. v2 counts the groups below in `memory.events` and wakes who polls that file. v1 has a
//! counter in each group, and an eventfd that is signalled *before* the kill, also for a limit of a parent's (the victim
//! may be a neighbour) and never for one of a group below: those kills are only found by looking.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::uio::pread;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use super::{Group, walk, write};
use crate::error::{Context, Error, Kind, Result};
use crate::sys;

/// v2: counters of the group and of what is below it.
const EVENTS: &str = "memory.events";
/// v1: counters and state of the group alone.
const CONTROL: &str = "memory.oom_control";

/// v1: charges are made in batches on each processor; a limit that is hit may have this much left, bytes.
const IN_ADVANCE: u64 = 1 << 20;

/// The counters of a group at the last look.
#[derive(Debug, Default)]
pub struct OomCount {
    seen: BTreeMap<PathBuf, Counters>,
}

/// Of one directory, since it was made.
#[derive(Clone, Copy, Debug, Default)]
struct Counters {
    kills: u64,
    /// v2: how often its own limit was hit. v1 has `failcnt` for that, which newer kernels leave at 0 where memory with
    /// swap has the same limit.
    hits: u64,
}

/// What is new since the last look.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OomNews {
    /// Processes that were killed.
    pub kills: u64,
    /// The limit of the group, or of one below it, was hit; else it was a parent's, or the machine's memory was used up.
    pub own_limit: bool,
    /// v1, with its killer off: processes wait for memory until somebody gives them more.
    pub stuck: bool,
}

impl OomCount {
    /// What the group has counted up to now is no news.
    pub fn of(group: &Group) -> Self {
        Self { seen: count(group) }
    }

    /// What happened since the last look. A group that is gone has no news.
    pub fn news(&mut self, group: &Group) -> OomNews {
        let mut now = count(group);
        let mut news = OomNews {
            stuck: is_stuck(group),
            ..OomNews::default()
        };
        for (dir, counters) in &mut now {
            let before = self.seen.get(dir).copied().unwrap_or_default();
            // Less than before: another group of the same name.
            let since = |now: u64, before: u64| now.checked_sub(before).unwrap_or(now);
            let kills = since(counters.kills, before.kills);
            news.kills += kills;
            // A hit may be seen before the kill that it leads to.
            match (kills, group.v2) {
                (0, _) => counters.hits = before.hits.min(counters.hits),
                (_, true) => news.own_limit |= since(counters.hits, before.hits) > 0,
                (_, false) => news.own_limit |= has_been_full(dir),
            }
        }
        self.seen = now;
        news
    }
}

/// Wakes when a process of the group may have been killed. Gives nothing back of what happened before.
#[derive(Debug)]
pub struct OomWatch {
    file: AsyncFd<OwnedFd>,
    v2: bool,
}

impl OomWatch {
    /// Watches `group`: one descriptor, and no inotify instance, of which root has 128 on a machine.
    ///
    /// # Errors
    /// NotFound when the group has no memory controller, else what the kernel says.
    pub fn of(group: &Group) -> Result<Self> {
        let dir = directory(group).ok_or_else(|| {
            let what = format!("watch the memory of cgroup {}: no such group", group.path());
            Error::new(Kind::NotFound, what)
        })?;
        let what = || format!("watch the memory of cgroup {}", dir.display());
        let (fd, interest) = match group.v2 {
            true => (events_of(&dir), Interest::PRIORITY),
            false => (signals_of(&dir), Interest::READABLE),
        };
        let file = fd.and_then(|fd| sys::fd::watch(fd, interest));
        Ok(Self {
            file: file.context(what)?,
            v2: group.v2,
        })
    }

    /// Whether word may come before the deed.
    pub fn is_early(&self) -> bool {
        !self.v2
    }

    /// Resolves when it is time to look. May be dropped.
    pub async fn fired(&self) {
        let interest = match self.v2 {
            true => Interest::PRIORITY,
            false => Interest::READABLE,
        };
        let woken = match self.file.ready(interest).await {
            Ok(mut ready) => {
                ready.clear_ready();
                true
            }
            Err(_) => false,
        };
        // Reading is what arms it again; where it fails the group is gone.
        if !woken || read(self.file.get_ref(), self.v2).is_err() {
            std::future::pending::<()>().await;
        }
    }
}

/// A file of the kernel's wakes who has read it.
fn events_of(dir: &Path) -> std::io::Result<OwnedFd> {
    let fd = OwnedFd::from(File::open(dir.join(EVENTS))?);
    read(&fd, true)?;
    Ok(fd)
}

fn signals_of(dir: &Path) -> std::io::Result<OwnedFd> {
    let signals = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
    let control = File::open(dir.join(CONTROL))?;
    let pair = format!("{} {}", signals.as_fd().as_raw_fd(), control.as_raw_fd());
    write(dir, "cgroup.event_control", &pair)?;
    Ok(signals.into())
}

fn read(fd: &OwnedFd, v2: bool) -> nix::Result<()> {
    let mut buffer = [0; 256];
    let read = match v2 {
        true => pread(fd, &mut buffer, 0),
        false => nix::unistd::read(fd, &mut buffer[..8]),
    };
    match read {
        Ok(_) | Err(nix::errno::Errno::EAGAIN) => Ok(()),
        Err(errno) => Err(errno),
    }
}

/// The group's directory with memory's files; none where that is somebody else's.
fn directory(group: &Group) -> Option<PathBuf> {
    let dir = group.dir_of(if group.v2 { "" } else { "memory" })?;
    (!group.is_root() && group.owned().contains(&dir)).then_some(dir)
}

fn count(group: &Group) -> BTreeMap<PathBuf, Counters> {
    let mut all = BTreeMap::new();
    let Some(dir) = directory(group) else {
        return all;
    };
    if group.v2 {
        let counters = Counters {
            kills: keyed(&dir, EVENTS, "oom_kill"),
            hits: keyed(&dir, EVENTS, "oom"),
        };
        all.insert(dir, counters);
        return all;
    }
    walk(&dir, &mut |dir| {
        let counters = Counters {
            kills: keyed(dir, CONTROL, "oom_kill"),
            hits: 0,
        };
        all.insert(dir.to_owned(), counters);
    });
    all
}

fn is_stuck(group: &Group) -> bool {
    let is_on = |dir: &Path| {
        keyed(dir, CONTROL, "oom_kill_disable") == 1 && keyed(dir, CONTROL, "under_oom") == 1
    };
    !group.v2 && directory(group).is_some_and(|dir| is_on(&dir))
}

/// v1: whether the group has ever used as much as it may, but for what the kernel hands out in advance.
fn has_been_full(dir: &Path) -> bool {
    let number = |file: String| -> Option<u64> {
        let text = fs::read_to_string(dir.join(file)).ok()?;
        text.trim().parse().ok()
    };
    ["memory", "memory.memsw"].iter().any(|kind| {
        let most = number(format!("{kind}.max_usage_in_bytes"));
        let limit = number(format!("{kind}.limit_in_bytes"));
        matches!((most, limit), (Some(most), Some(limit)) if most.saturating_add(IN_ADVANCE) >= limit)
    })
}

/// The number behind `key` in a file of `key number` lines; 0 where there is none.
fn keyed(dir: &Path, file: &str, key: &str) -> u64 {
    let text = fs::read_to_string(dir.join(file)).unwrap_or_default();
    let number = text.lines().find_map(|line| {
        let (name, number) = line.split_once(' ')?;
        (name == key).then(|| number.trim().parse().ok())?
    });
    number.unwrap_or(0)
}
