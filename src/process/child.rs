//! One child: who it is, how it ended, and signals that can only reach it.

use std::time::SystemTime;

use tokio::sync::watch;

use super::identity::Identity;
use super::reaper::Reaper;
use crate::error::Result;
use crate::sys::process::Status;

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

impl Exit {
    /// From the kernel's answer, now.
    pub(super) fn now(status: Status) -> Self {
        let at = SystemTime::now();
        match status {
            Status::Code(code) => Self {
                code: u32::try_from(code).unwrap_or(255),
                signal: None,
                at,
            },
            Status::Signal(signal) => Self {
                code: 128 + u32::try_from(signal).unwrap_or(0),
                signal: Some(signal),
                at,
            },
        }
    }
}

/// One child. Cloning shares the exit.
#[derive(Clone, Debug)]
pub struct Child {
    /// Pid and start time.
    pub identity: Identity,
    /// None until it has ended and was reaped; in a process that is its programs' guard itself, until it has ended.
    pub exit: watch::Receiver<Option<Exit>>,
    pub(super) reaper: Reaper,
}

impl Child {
    /// Its pid.
    pub fn pid(&self) -> i32 {
        self.identity.pid
    }

    /// How it ended, if it has.
    pub fn exited(&self) -> Option<Exit> {
        *self.exit.borrow()
    }

    /// Waits for the end. May be called any number of times, also after the end.
    pub async fn wait(&self) -> Exit {
        let mut exit = self.exit.clone();
        match exit.wait_for(Option::is_some).await.map(|e| *e) {
            Ok(Some(exit)) => exit,
            // The table keeps the sender until it has sent; only its end without a word comes here.
            Ok(None) | Err(_) => Exit::now(Status::Code(255)),
        }
    }

    /// kill(2), never after it has been reaped. Ok(false): it has ended.
    pub fn signal(&self, signal: i32) -> Result<bool> {
        self.reaper.signal(&self.identity, signal)
    }

    /// Signals its process group, which must be its own (its id is the child's pid). Ok(false): nobody is left in it.
    pub fn signal_group(&self, signal: i32) -> Result<bool> {
        self.reaper.signal_group(&self.identity, signal)
    }
}
