//! Our outgoing ttrpc. STUB of the public surface; bodies to be written.
#![allow(missing_docs, unused_variables, clippy::todo)]
use std::path::Path;
use std::time::Duration;

use crate::error::Result;

/// True when the error means that the peer has closed, in any of the spellings of ttrpc 0.10 (one place).
pub fn is_closed(error: &ttrpc::Error) -> bool {
    todo!()
}
/// The crate's error of a ttrpc error: kind by status code; closed becomes Kind::Gone.
pub fn from_ttrpc(what: &str, error: ttrpc::Error) -> crate::error::Error {
    todo!()
}

/// One connection to a supervisor (or anything that speaks ttrpc on a unix socket).
#[derive(Clone)]
pub struct Client {}
impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Client")
    }
}

impl Client {
    /// `address` is `unix:///path` or a path. Gone when nothing listens.
    pub async fn connect(address: &str) -> Result<Self> {
        todo!()
    }
    pub fn sandbox(&self) -> crate::proto::sandbox::sandbox_ttrpc::SandboxClient {
        todo!()
    }
    pub fn task(&self) -> crate::proto::task_v3::shim_ttrpc::TaskClient {
        todo!()
    }
}

/// A ttrpc context with a timeout (None: none).
pub fn context(limit: Option<Duration>) -> ttrpc::context::Context {
    todo!()
}

/// Can something be connected to at this socket right now? (blocking, for `start`)
pub fn is_live(socket: &Path) -> bool {
    todo!()
}

/// Runs `call` with reconnects on closed: 100 ms x i^2, at most 3 tries; the last error otherwise.
pub async fn retry_closed<T, F, Fut>(address: &str, call: F) -> Result<T>
where
    F: FnMut(Client) -> Fut,
    Fut: std::future::Future<Output = Result<T>>,
{
    todo!()
}
