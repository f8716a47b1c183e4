//! A logging program that reads a process' outputs (`binary://`, `binary-v2://`).
//!
//! It gets stdout as descriptor 3, stderr as 4 and a pipe to say that it is ready as 5, and two variables that say whose
//! output it is. Promises that a logger that dies costs the process nothing but its output (we hold the read ends, so
//! there is no SIGPIPE; what is written waits), that a logger is given its end of file and time to write what it has
//! before it is signalled, and that none is left behind.

use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::time::Duration;

use tokio::io::AsyncReadExt;
use tokio::time::timeout;

use super::Request;
use super::open::{new_pipe, own, receiver};
use super::target::ProgramTarget;
use crate::error::{Context, Error, Kind, Result};
use crate::process::{Child, Identity, Reaper};

/// How long a logger may take to be ready.
const READY_LIMIT: Duration = Duration::from_secs(30);
/// How long it may take to end by itself once it has seen the end of both streams.
const EOF_GRACE: Duration = Duration::from_secs(2);
/// How long after SIGTERM: what containerd's own shim gives.
const TERM_GRACE: Duration = Duration::from_secs(12);
/// How long a killed one may take to be gone.
const KILL_GRACE: Duration = Duration::from_secs(2);

/// A logging program that runs.
#[derive(Debug)]
pub(super) struct Logger {
    child: Child,
    /// Read ends of stdout and stderr.
    holds: [OwnedFd; 2],
}

impl Logger {
    /// Starts it and waits until it is ready; answers the write ends of stdout and stderr too.
    ///
    /// # Errors
    /// NotFound or what exec says; Other when a `binary-v2` logger closes its pipe without a byte; Deadline.
    pub(super) async fn start(
        target: &ProgramTarget,
        request: &Request,
        reaper: &Reaper,
    ) -> Result<(Self, [OwnedFd; 2])> {
        let shown = target.path.display();
        let (out, stdout) = new_pipe()?;
        let (err, stderr) = new_pipe()?;
        let (ready, says_ready) = new_pipe()?;
        own(&stdout, request)?;
        own(&stderr, request)?;
        let mut command = Command::new(&target.path);
        // A group of its own: a script's children are ended with it.
        command
            .args(&target.args)
            .process_group(0)
            .env_clear()
            .env("CONTAINER_ID", &request.container)
            .env("CONTAINER_NAMESPACE", &request.namespace)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        let copy = |fd: &OwnedFd| fd.try_clone().context(|| "duplicate a pipe's end");
        let given = [copy(&out)?, copy(&err)?, says_ready];
        let child = reaper
            .spawn_giving(command, given)
            .map_err(|e| e.within("start a logging program"))?;
        let logger = Self {
            child,
            holds: [out, err],
        };
        let said = timeout(READY_LIMIT, async {
            receiver(ready)?
                .read(&mut [0])
                .await
                .context(|| "read a logger's pipe")
        });
        let fault = match said.await {
            Ok(Ok(0)) if target.must_say_ready => Error::new(
                Kind::Other,
                format!(
                    "start logging program {shown}: it closed its pipe without saying that it is ready"
                ),
            ),
            Ok(Ok(_)) => return Ok((logger, [stdout, stderr])),
            Ok(Err(error)) => error,
            Err(_) => Error::new(
                Kind::Deadline,
                format!(
                    "start logging program {shown}: not ready within {} s",
                    READY_LIMIT.as_secs()
                ),
            ),
        };
        let _ = logger.child.signal_group(libc::SIGKILL);
        Err(fault)
    }

    /// Who it is, for the record.
    pub(super) fn identity(&self) -> Identity {
        self.child.identity
    }

    /// Gives it the end of file (the process' ends must be closed) and waits until it is gone: by itself, after SIGTERM,
    /// after SIGKILL.
    pub(super) async fn end(self) {
        let Self { child, holds } = self;
        drop(holds);
        for (signal, grace) in [
            (0, EOF_GRACE),
            (libc::SIGTERM, TERM_GRACE),
            (libc::SIGKILL, KILL_GRACE),
        ] {
            if signal != 0 {
                let _ = child.signal_group(signal);
            }
            if timeout(grace, child.wait()).await.is_ok() {
                return;
            }
        }
        tracing::warn!(
            pid = child.pid(),
            "a logging program was killed and is still there"
        );
    }
}
