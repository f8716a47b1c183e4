//! The supervisor's runtime. STUB of the public surface; bodies to be written.
#![allow(missing_docs, unused_variables, clippy::todo)]
use std::os::fd::OwnedFd;
use std::path::PathBuf;

use crate::config::Config;
use crate::error::Result;

/// What `launch` hands to the supervisor after the fork.
#[derive(Debug)]
pub struct Options {
    pub config: Config,
    pub namespace: String,
    /// -id of the `start` that made us (the group's first id).
    pub id: String,
    /// Group id (socket and state directory are named by it).
    pub group: String,
    pub bundle: PathBuf,
    pub debug: bool,
    /// Bound and listening.
    pub listener: OwnedFd,
    /// Path of the socket, removed at the beginning of the end.
    pub socket: PathBuf,
    /// containerd's ttrpc address for events; None: events are dropped quietly.
    pub ttrpc_address: Option<String>,
    /// Read end of the pipe from `start`: EOF without a byte means that the helper died before its answer: leave.
    pub watchdog: Option<OwnedFd>,
}

/// Runs until the pod is over. Builds the current_thread runtime.
pub fn run(options: Options) -> Result<()> {
    todo!()
}
