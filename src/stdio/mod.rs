//! Standard streams of one process: one owner for all its descriptors. STUB of the public surface; bodies to be written.
#![allow(missing_docs, unused_variables, clippy::todo)]
use std::time::Duration;

use crate::error::Result;

/// What a process' streams are to be connected to (verbatim strings of the request).
#[derive(Clone, Debug, Default)]
pub struct Request {
    pub stdin: String,
    pub stdout: String,
    pub stderr: String,
    pub terminal: bool,
    /// Owner of pipes (user namespaces).
    pub uid: u32,
    pub gid: u32,
    /// Give FIFOs to the process itself (a container's init: when it ends, everything that holds them ends) instead of copying
    /// (an exec: a background child may keep its pipe open, so EOF must be ours to give).
    pub direct: bool,
}

/// Owns every descriptor until dropped.
#[derive(Debug)]
pub struct Io {}

impl Io {
    /// Opens the far ends, never blocking for a peer: "" (null), fifo path or `fifo://`, regular file (append), `file://` (made, append, stdout and stderr share),
    /// `podvisor-log:///path?attach-stdout=/fifo&attach-stderr=/fifo` (CRI log lines, capped and rotated, see `log` submodule). Anything else: Unsupported/Invalid "unknown STDIO scheme".
    /// FIFO outputs: our own read end is held, so that a client that goes away is no EPIPE; FIFO stdin: our own write end is held until `close_stdin`.
    pub async fn open(request: &Request) -> Result<Self> {
        todo!()
    }
    /// The process' ends (taken once; given to the OCI runtime's command).
    pub fn take_child_stdio(&mut self) -> Result<[std::process::Stdio; 3]> {
        todo!()
    }
    /// Starts the copying after the process was made (child's ends are closed in us by then).
    pub fn start(&mut self) {}
    pub fn close_stdin(&self) {
        todo!()
    }
    /// Waits until everything the process wrote has been passed on, at most `limit`; false when somebody still holds the pipe. Then closing gives the reader EOF.
    pub async fn drain(&self, limit: Duration) -> bool {
        todo!()
    }
    /// Ends the copying and closes everything.
    pub fn close(&self) {}
}

/// CRI log lines: `2026-11-30T13:33:12.000000001Z stdout F text`.
pub mod log {
    /// One line of a log file.
    #[derive(Clone, Debug, PartialEq, Eq)]
    pub struct Line {
        pub at: String,
        pub stderr: bool,
        /** false: P, the text goes on in the next line of the stream */
        pub full: bool,
        pub text: Vec<u8>,
    }
    /// Parses one line (without its newline); None when it is none of ours.
    pub fn parse(line: &[u8]) -> Option<Line> {
        None
    }
}
