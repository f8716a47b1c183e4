//! Signals to the supervisor: TERM and INT end the pod in its own time, USR1 dumps its state to the log.
//!
//! Promises that the loop never ends before the process does: a signal whose reader has gone kills nobody and helps
//! nobody. SIGCHLD belongs to `process`, SIGPIPE is ignored by the language's start-up.

use tokio::signal::unix::{SignalKind, signal};
use tracing::{info, warn};

use crate::error::{Context, Result};
use crate::pod::Pod;

/// Installs the handlers and starts the loop.
pub fn spawn(pod: Pod) -> Result<()> {
    let mut terminate = signal(SignalKind::terminate()).context(|| "listen to SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context(|| "listen to SIGINT")?;
    let mut dump = signal(SignalKind::user_defined1()).context(|| "listen to SIGUSR1")?;
    // Hanging up is no reason to end a pod: the daemon's terminal is not ours.
    let mut hang_up = signal(SignalKind::hangup()).context(|| "listen to SIGHUP")?;
    tokio::spawn(async move {
        loop {
            tokio::select! {
                _ = terminate.recv() => end(&pod, "SIGTERM"),
                _ = interrupt.recv() => end(&pod, "SIGINT"),
                _ = dump.recv() => write_dump(&pod),
                _ = hang_up.recv() => {}
            }
        }
    });
    Ok(())
}

/// Detached, because stopping takes time and the loop has other signals to hear. Twice is as good as once.
fn end(pod: &Pod, signal: &str) {
    warn!(step = "signal", "{signal}: end the pod");
    let pod = pod.clone();
    tokio::spawn(async move { pod.terminate().await });
}

fn write_dump(pod: &Pod) {
    // Line by line: a log line has a limit, a dump has none.
    for line in pod.dump().lines() {
        info!(step = "dump", "{line}");
    }
}
