//! What happens when a process ends.
//!
//! One task per process. The exit of an exec is announced when it is seen; the exit of init is stored when it is seen
//! and announced last: after a start under way, after everything else in the container was killed (unless its own pid
//! namespace did that), and after the execs. What the kernel killed for want of memory is told before.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::timeout;

use super::oom;
use super::record::ExitRecord;
use super::state::Phase;
use super::table::{Container, Shared};
use crate::clock::unix_nanos;
use crate::failpoint;
use crate::oci;
use crate::process::{Child, Exit};

/// How long init's exit waits for execs that cannot die (stuck in the kernel) or whose start hangs.
const PATIENCE: Duration = Duration::from_secs(10);
/// How a process ends that the kernel kills for want of memory: 128 + SIGKILL.
const KILLED: u32 = 137;

/// Announces the exit of init; call after its create was announced.
pub(super) fn watch_init(shared: &Arc<Shared>, container: &Arc<Container>, child: Child) {
    let (shared, container) = (Arc::clone(shared), Arc::clone(container));
    oom::begin(&container);
    tokio::spawn(async move {
        let exit = tokio::select! {
            exit = child.wait() => record(exit),
            () = oom::watch(&shared, &container) => return,
        };
        // The kernel counts a kill before it sends the signal.
        oom::tell(&shared, &container);
        failpoint::pass("container.exit.before");
        container.step(|inner| inner.note_exit(exit));
        // At once: who reads the journal after us must find the code.
        shared.save_or_warn(&container);
        container
            .until(oci::START_LIMIT + PATIENCE, |i| {
                i.init.phase != Phase::Starting
            })
            .await;
        if !container.fixed.own_pid_namespace {
            kill_others(&shared, &container).await;
        }
        if !container
            .until(PATIENCE, |inner| inner.active_execs() == 0)
            .await
        {
            tracing::warn!(
                id = container.fixed.id,
                "init ended and an exec is still there"
            );
        }
        failpoint::pass("container.exit.after");
        let pid = child.pid().unsigned_abs();
        container.step(|inner| {
            if inner.init.end(exit) {
                shared.announcer(&container).exited("", pid, exit);
            }
        });
        shared.save_or_warn(&container);
    });
}

/// Announces the exit of an exec; call after its start was announced.
pub(super) fn watch_exec(
    shared: &Arc<Shared>,
    container: &Arc<Container>,
    exec_id: String,
    child: Child,
) {
    let (shared, container) = (Arc::clone(shared), Arc::clone(container));
    tokio::spawn(async move {
        let exit = record(child.wait().await);
        if exit.code == KILLED {
            oom::tell(&shared, &container);
        }
        let pid = child.pid().unsigned_abs();
        container.step(|inner| {
            if inner
                .process(&exec_id)
                .is_ok_and(|process| process.end(exit))
            {
                shared.announcer(&container).exited(&exec_id, pid, exit);
            }
        });
    });
}

/// Without a pid namespace of its own the container's other processes outlive init.
async fn kill_others(shared: &Shared, container: &Container) {
    let (group, execs) = {
        let inner = container.inner();
        let execs: Vec<Child> = inner
            .execs
            .values()
            .filter_map(|e| e.process.child.clone())
            .collect();
        (inner.group.clone(), execs)
    };
    for exec in execs {
        let _ = exec.signal(libc::SIGKILL);
    }
    let killed = match group {
        Some(group) => group.kill_all(PATIENCE).await,
        None => {
            let fixed = &container.fixed;
            let kill = fixed
                .runtime
                .kill(&shared.reaper, &fixed.bundle, &fixed.id, 9, true);
            timeout(PATIENCE, kill).await.unwrap_or(Ok(()))
        }
    };
    if let Err(error) = killed.or_else(|e| if e.is_gone() { Ok(()) } else { Err(e) }) {
        tracing::warn!(id = container.fixed.id, %error, "kill what init left behind");
    }
}

fn record(exit: Exit) -> ExitRecord {
    ExitRecord {
        code: exit.code,
        at: unix_nanos(exit.at),
    }
}
