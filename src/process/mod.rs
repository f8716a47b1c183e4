//! Processes: the only room that waits. STUB of the public surface; bodies to be written.
#![allow(missing_docs, unused_variables, clippy::todo)]
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};
use tokio::sync::watch;

use crate::error::Result;

/// A process that can be told from a later one with the same pid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Identity {
    pub pid: i32,
    /// Field 22 of /proc/<pid>/stat, clock ticks since boot.
    pub start_time: u64,
}

impl Identity {
    /// Reads it; NotFound when there is no such process.
    pub fn of(pid: i32) -> Result<Self> {
        todo!()
    }
    /// Our own.
    pub fn own() -> Result<Self> {
        todo!()
    }
    /// True while exactly this process lives; a zombie counts as dead.
    pub fn is_alive(&self) -> bool {
        todo!()
    }
    /// Signals exactly this process through a pidfd (verified after opening). Ok(false): it is gone.
    pub fn signal(&self, signal: i32) -> Result<bool> {
        todo!()
    }
    /// Waits (polling the pidfd; works for non-children; blocking) until it is gone; false at the deadline.
    pub fn wait_gone_blocking(&self, limit: Duration) -> bool {
        todo!()
    }
    /// The same, async.
    pub async fn wait_gone(&self, limit: Duration) -> bool {
        todo!()
    }
}

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exit {
    /// Exit code, or 128 + signal.
    pub code: u32,
    /// The signal that ended it.
    pub signal: Option<i32>,
    /// When we saw it.
    pub at: SystemTime,
}

/// The one owner of wait. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Reaper {}

impl Reaper {
    /// Becomes child subreaper and starts the SIGCHLD loop on the current tokio runtime.
    /// Unknown children (orphans handed to the subreaper) are reaped and logged at debug.
    pub fn start() -> Result<Self> {
        todo!()
    }
    /// Spawns; registered before anything else can be reaped.
    pub fn spawn(&self, command: std::process::Command) -> Result<Child> {
        todo!()
    }
    /// Keeps exits of pids nobody knows yet from now until the guard is dropped, so that `adopt` of a pid that
    /// died between its fork (by an OCI runtime) and now still learns its exit.
    pub fn hold_unknown(&self) -> HoldUnknown {
        todo!()
    }
    /// Takes over a descendant that is, or will be, our child through the subreaper (a container's init, an exec).
    pub fn adopt(&self, pid: i32) -> Result<Child> {
        todo!()
    }
}

/// See [`Reaper::hold_unknown`].
#[derive(Debug)]
pub struct HoldUnknown {}

/// One child. Cloning shares the exit.
#[derive(Clone, Debug)]
pub struct Child {
    pub identity: Identity,
    pub exit: watch::Receiver<Option<Exit>>,
}

impl Child {
    pub fn pid(&self) -> i32 {
        self.identity.pid
    }
    /// How it ended, if it has.
    pub fn exited(&self) -> Option<Exit> {
        *self.exit.borrow()
    }
    /// Waits for the end.
    pub async fn wait(&self) -> Exit {
        todo!()
    }
    /// kill(2), never after it has been reaped. Ok(false): it has ended.
    pub fn signal(&self, signal: i32) -> Result<bool> {
        todo!()
    }
}

/// A short-lived helper program (an OCI runtime's verb, a CNI plugin): bounded, its output drained while it runs and capped.
#[derive(Debug)]
pub struct Helper {
    pub program: PathBuf,
    pub args: Vec<std::ffi::OsString>,
    /// Exactly this environment, nothing inherited.
    pub env: Vec<(std::ffi::OsString, std::ffi::OsString)>,
    pub cwd: Option<PathBuf>,
    pub stdin: Vec<u8>,
    /// Given to the helper as its own stdin/stdout/stderr instead of the capture pipes (container stdio).
    pub stdio: Option<[std::process::Stdio; 3]>,
    /// At the bound its whole process group is killed with SIGKILL, and so is what it left behind in the group.
    pub limit: Duration,
    /// Cap for each of stdout and stderr, bytes; what is over is read and dropped.
    pub output_cap: usize,
    /// Ask the kernel to SIGKILL it when the supervisor dies (pdeathsig; spawn happens on the main thread).
    pub die_with_parent: bool,
}

#[derive(Debug)]
pub struct Output {
    pub exit: Exit,
    pub stdout: Vec<u8>,
    pub stderr: Vec<u8>,
    /// stdout or stderr was longer than the cap.
    pub truncated: bool,
    /// It was killed at the bound.
    pub timed_out: bool,
    pub took: Duration,
}

impl Helper {
    /// Defaults: empty env, no stdin, cap 1 MiB, limit as given, die_with_parent true.
    pub fn new(program: impl Into<PathBuf>, limit: Duration) -> Self {
        todo!()
    }
    /// Runs it in its own process group, rlimits as given to us at start (see `sys`), no descriptor but 0 to 2.
    /// `started` is called with the identity right after the spawn (for the journal).
    pub async fn run(self, reaper: &Reaper) -> Result<Output> {
        todo!()
    }
}
