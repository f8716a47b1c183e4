//! The socket over which an OCI runtime hands us the master of a terminal it has made.
//!
//! Promises that the socket's file is gone when the master is here, or when the wait is given up.

use std::fs;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::io::Interest;
use tokio::net::UnixListener;
use tokio::time::timeout;

use super::fifo;
use crate::error::{Context, Error, Kind, Result};
use crate::sys;

/// How long the master may take after the runtime has ended: it was sent before.
const LIMIT: Duration = Duration::from_secs(30);

/// Names of console sockets: this, the pid of who listens, a number.
const PREFIX: &str = "tty-";

/// A socket somebody is to connect to once.
#[derive(Debug)]
pub(super) struct Console {
    listener: UnixListener,
    path: PathBuf,
}

impl Console {
    /// Listens in `dir`, which is made (0700) when it is missing.
    pub(super) fn listen(dir: &Path) -> Result<Self> {
        let what = || format!("make a console socket in {}", dir.display());
        sys::dir::make_private(dir).context(what)?;
        // One thread makes them, but tests of this file do not keep to that.
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let (own, count) = (std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let path = dir.join(format!("{PREFIX}{own}-{count}"));
        // Of somebody who had our pid before.
        let _ = fs::remove_file(&path);
        let listener = UnixListener::bind(&path).context(what)?;
        Ok(Self { listener, path })
    }

    /// What the runtime is told.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// The master, non-blocking.
    ///
    /// # Errors
    /// Deadline when none comes; Other when something else does.
    pub(super) async fn receive(self) -> Result<OwnedFd> {
        let what = || "take a terminal from the OCI runtime";
        let received = timeout(LIMIT, async {
            let (stream, _) = self.listener.accept().await?;
            stream
                .async_io(Interest::READABLE, || sys::pty::receive_descriptor(&stream))
                .await
        });
        let master = match received.await {
            Ok(master) => master.context(what)?,
            Err(_) => {
                let why = format!("{}: none came within {} s", what(), LIMIT.as_secs());
                return Err(Error::new(Kind::Deadline, why));
            }
        };
        fifo::set_non_blocking(&master).context(what)?;
        Ok(master)
    }
}

/// Removes sockets of processes that are gone.
pub fn sweep(dir: &Path) {
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let pid = name
            .to_str()
            .and_then(|n| n.strip_prefix(PREFIX)?.split_once('-'))
            .and_then(|(pid, _)| pid.parse::<u32>().ok());
        if pid.is_some_and(|pid| !Path::new(&format!("/proc/{pid}")).exists()) {
            let _ = fs::remove_file(entry.path());
        }
    }
}

impl Drop for Console {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_socket_is_gone_with_its_owner_and_a_dead_ones_is_swept() {
        let top = tempfile::tempdir().unwrap();
        let dir = top.path().join("s");
        let console = Console::listen(&dir).unwrap();
        let dead = dir.join("tty-4194399-0");
        for name in [&dead, &dir.join("tty-x"), &dir.join("other")] {
            fs::write(name, "").unwrap();
        }
        sweep(&dir);
        assert!(console.path().exists() && !dead.exists());
        assert!(dir.join("tty-x").exists() && dir.join("other").exists());
        let path = console.path().to_owned();
        drop(console);
        assert!(!path.exists());
    }

    #[tokio::test]
    async fn what_sends_no_terminal_is_refused() {
        let top = tempfile::tempdir().unwrap();
        let console = Console::listen(top.path()).unwrap();
        let _stranger = std::os::unix::net::UnixStream::connect(console.path()).unwrap();
        drop(_stranger);
        let error = console.receive().await.unwrap_err();
        assert!(error.to_string().contains("no descriptor"), "{error}");
    }
}
