//! Who a process is: its pid and when it started, so that a later one with the same pid is told apart.
//!
//! Promise: [`Identity::signal`] reaches exactly this process or nobody.

use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use serde::{Deserialize, Serialize};
use tokio::io::Interest;

use crate::error::{Context, Error, Kind, Result};
use crate::sys;

/// A process that can be told from a later one with the same pid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Identity {
    /// Its pid, as this process sees it.
    pub pid: i32,
    /// Field 22 of `/proc/<pid>/stat`, clock ticks since boot.
    pub start_time: u64,
}

impl Identity {
    /// Reads it; NotFound when there is no such process. A zombie still has one.
    pub fn of(pid: i32) -> Result<Self> {
        let (_, start_time) = stat(pid)?;
        Ok(Self { pid, start_time })
    }

    /// Our own.
    pub fn own() -> Result<Self> {
        Self::of(std::process::id() as i32)
    }

    /// True while exactly this process lives; a zombie counts as dead.
    pub fn is_alive(&self) -> bool {
        matches!(stat(self.pid), Ok((state, start)) if start == self.start_time && !matches!(state, 'Z' | 'X' | 'x'))
    }

    /// Signals exactly this process through a pidfd (verified after opening). Ok(false): it is gone.
    pub fn signal(&self, signal: i32) -> Result<bool> {
        let Some(pidfd) = self.pidfd()? else {
            return Ok(false);
        };
        match sys::process::pidfd_send_signal(pidfd.as_fd(), signal) {
            Ok(()) => Ok(true),
            Err(e) if e.raw_os_error() == Some(libc::ESRCH) => Ok(false),
            Err(e) => Err(Error::io(
                format_args!("send signal {signal} to pid {}", self.pid),
                e,
            )),
        }
    }

    /// Waits (polling the pidfd; works for non-children; blocking) until it is gone; false at the deadline.
    pub fn wait_gone_blocking(&self, limit: Duration) -> bool {
        let end = Instant::now() + limit;
        let Ok(Some(pidfd)) = self.pidfd() else {
            return !self.is_alive();
        };
        loop {
            let left = end.saturating_duration_since(Instant::now());
            // Rounded up: a poll of 0 ms just before the deadline would spin.
            let millis = i32::try_from(left.as_millis().saturating_add(1)).unwrap_or(i32::MAX);
            let timeout = PollTimeout::try_from(millis).unwrap_or(PollTimeout::MAX);
            let mut fds = [PollFd::new(pidfd.as_fd(), PollFlags::POLLIN)];
            match poll(&mut fds, timeout) {
                Ok(0) | Err(nix::errno::Errno::EINTR) if Instant::now() < end => {}
                Ok(0) | Err(_) => return !self.is_alive(),
                Ok(_) => return true,
            }
        }
    }

    /// The same, async.
    pub async fn wait_gone(&self, limit: Duration) -> bool {
        let watched = match self.pidfd() {
            Ok(Some(pidfd)) => sys::fd::watch(pidfd, Interest::READABLE),
            Ok(None) | Err(_) => return !self.is_alive(),
        };
        let Ok(watched) = watched else {
            return !self.is_alive();
        };
        // A pidfd is readable from the moment its process has ended.
        match tokio::time::timeout(limit, watched.readable()).await {
            Ok(_) => true,
            Err(_) => !self.is_alive(),
        }
    }

    /// A pidfd of exactly this process, or None when it is gone.
    fn pidfd(&self) -> Result<Option<OwnedFd>> {
        let pidfd = match sys::process::pidfd_open(self.pid) {
            Ok(pidfd) => pidfd,
            Err(e) if e.raw_os_error() == Some(libc::ESRCH) => return Ok(None),
            Err(e) => {
                return Err(Error::io(
                    format_args!("open a pidfd of pid {}", self.pid),
                    e,
                ));
            }
        };
        // Read after opening: when the start time still is ours, the pidfd is ours too.
        match Self::of(self.pid) {
            Ok(now) if now == *self => Ok(Some(pidfd)),
            Ok(_) => Ok(None),
            Err(e) if e.is_gone() => Ok(None),
            Err(e) => Err(e),
        }
    }
}

/// Everything below `pid` in the tree of processes, a parent before its children; as complete as one look at a tree that
/// grows can be.
pub(super) fn descendants(pid: i32) -> Vec<Identity> {
    let mut found: Vec<Identity> = Vec::new();
    let mut parents = vec![pid];
    while let Some(parent) = parents.pop() {
        for child in children(parent) {
            if let Ok(identity) = Identity::of(child)
                && !found.contains(&identity)
            {
                found.push(identity);
                parents.push(child);
            }
        }
    }
    found
}

/// The pids of a process and of everything below it.
pub fn tree_of(pid: i32) -> Vec<i32> {
    let below = descendants(pid).into_iter().map(|identity| identity.pid);
    std::iter::once(pid).chain(below).collect()
}

/// Of every thread: a child belongs to the thread that forked it.
pub(super) fn children(pid: i32) -> Vec<i32> {
    let threads = fs::read_dir(format!("/proc/{pid}/task"));
    let of = |thread: fs::DirEntry| fs::read_to_string(thread.path().join("children")).ok();
    let lists = threads.into_iter().flatten().flatten().filter_map(of);
    lists
        .flat_map(|list| {
            let pids = list.split_ascii_whitespace().filter_map(|p| p.parse().ok());
            pids.collect::<Vec<i32>>()
        })
        .collect()
}

/// State and start time of a pid.
fn stat(pid: i32) -> Result<(char, u64)> {
    if pid <= 0 {
        return Err(Error::new(
            Kind::NotFound,
            format!("find process {pid}: a pid is positive"),
        ));
    }
    let path = format!("/proc/{pid}/stat");
    let text = sys::process::read_at_once(&path)
        // ESRCH: it was reaped between open and read.
        .map_err(|e| {
            if e.raw_os_error() == Some(libc::ESRCH) {
                io::ErrorKind::NotFound.into()
            } else {
                e
            }
        })
        .context(|| format!("read {path}"))?;
    parse_stat(&text)
        .ok_or_else(|| Error::new(Kind::Other, format!("parse {path}: it has no start time")))
}

/// The name may hold spaces and parentheses: fields are counted after the last one.
fn parse_stat(text: &str) -> Option<(char, u64)> {
    let (_, rest) = text.rsplit_once(')')?;
    let mut fields = rest.split_ascii_whitespace();
    let state = fields.next()?.chars().next()?;
    // State is field 3 and was taken; the start time is field 22.
    let start = fields.nth(18)?.parse().ok()?;
    Some((state, start))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_with_parentheses_does_not_shift_the_fields() {
        let text = "7 (a) b (c)) Z 1 7 7 0 -1 4194560 0 0 0 0 1 2 3 4 20 0 1 0 998877 0 0 1";
        assert_eq!(parse_stat(text), Some(('Z', 998_877)));
        assert_eq!(parse_stat("7 (a"), None);
        assert_eq!(parse_stat("7 (a) S 1"), None);
    }

    #[test]
    fn we_are_alive_and_another_start_time_is_not_us() {
        let own = Identity::own().expect("own identity");
        assert!(own.is_alive());
        let other = Identity {
            start_time: own.start_time + 1,
            ..own
        };
        assert!(!other.is_alive());
        // Signal 0 asks for existence only.
        assert!(!other.signal(0).expect("signal a stale identity"));
        assert!(own.signal(0).expect("signal ourselves"));
        assert!(other.wait_gone_blocking(Duration::from_secs(5)));
        assert!(!own.wait_gone_blocking(Duration::from_millis(5)));
    }

    #[test]
    fn there_is_no_process_zero() {
        for pid in [0, -1, i32::MIN] {
            assert_eq!(Identity::of(pid).map_err(|e| e.kind()), Err(Kind::NotFound));
        }
    }
}
