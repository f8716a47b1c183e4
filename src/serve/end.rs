//! The end of the process: nobody new, everything answered, events out.
//!
//! The order matters. The socket goes first, so that nothing new connects to a supervisor that is leaving; whoever has had
//! its last reply closes, then we do; events are flushed last. Each step has its bound: nothing may keep the process.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::timeout;
use tracing::{debug, warn};
use ttrpc::asynchronous::Server;

use crate::failpoint;
use crate::serve::publisher::Publisher;

/// How long peers may take to close, which have had their last reply. Go's client that finds a reply and the end of the
/// connection in one look takes either, by chance, and then its daemon says `ttrpc: closed` of a removal that went well.
const PEER_LIMIT: Duration = Duration::from_secs(1);
/// How long requests in flight may take to be answered. Waits are answered by the pod's own end.
const ANSWER_LIMIT: Duration = Duration::from_millis(1500);
/// How long written replies may take to leave and connections to close.
const CLOSE_LIMIT: Duration = Duration::from_secs(1);
/// How long events may take to be delivered.
const EVENT_LIMIT: Duration = Duration::from_secs(2);

/// Ends serving in order.
pub async fn orderly(
    mut server: Server,
    socket: SocketFile,
    mut connections: watch::Receiver<usize>,
    publisher: &Arc<Publisher>,
) {
    failpoint::pass("end.socket.before");
    socket.remove();
    failpoint::pass("end.socket.after");
    let closed = connections.wait_for(|n| *n == 0);
    if timeout(PEER_LIMIT, closed).await.is_err() {
        debug!(step = "end", "peers stay connected; closing");
    }
    if timeout(ANSWER_LIMIT, server.shutdown()).await.is_err() {
        warn!(step = "end", "requests are still unanswered; leaving them");
    }
    // A connection is counted until its last reply is written.
    if timeout(CLOSE_LIMIT, connections.wait_for(|n| *n == 0))
        .await
        .is_err()
    {
        debug!(step = "end", "peers are still connected");
    }
    if timeout(EVENT_LIMIT, publisher.flush()).await.is_err() {
        warn!(
            step = "end",
            left = publisher.len(),
            "events were not delivered"
        );
    }
}

/// The file of our socket, told from a later one at the same path.
#[derive(Debug)]
pub struct SocketFile {
    path: PathBuf,
    identity: Option<(u64, u64)>,
}

impl SocketFile {
    /// The file that is there now.
    pub fn of(path: PathBuf) -> Self {
        let identity = fs::symlink_metadata(&path).ok().map(|m| (m.dev(), m.ino()));
        Self { path, identity }
    }

    /// Removes it, if it is still the same. Absent is done.
    pub fn remove(&self) {
        let now = fs::symlink_metadata(&self.path)
            .ok()
            .map(|m| (m.dev(), m.ino()));
        if now.is_none() || now != self.identity {
            return;
        }
        if let Err(e) = fs::remove_file(&self.path) {
            warn!(step = "end", "remove {}: {e}", self.path.display());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_our_own_file_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        fs::write(&path, "ours").unwrap();
        let file = SocketFile::of(path.clone());
        fs::write(dir.path().join("new"), "theirs").unwrap();
        fs::rename(dir.path().join("new"), &path).unwrap();
        file.remove();
        assert_eq!(fs::read_to_string(&path).unwrap(), "theirs");
        SocketFile::of(path.clone()).remove();
        assert!(!path.exists());
        file.remove();
    }
}
