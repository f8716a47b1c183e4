//! Delete of a container or an exec that does not run.
//!
//! A step that fails leaves the container where it was, to be deleted again; a second delete that waited meanwhile finds
//! nothing. The limits of the steps add up to less than a daemon's patience (10 s) unless something hangs.

use std::fs;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::time::Instant;

use super::record::ExitRecord;
use super::state::{Inner, Phase};
use super::table::{Container, Shared};
use super::undo;
use crate::clock::{from_unix_nanos, unix_nanos};
use crate::error::{Error, Kind, Result};
use crate::failpoint;
use crate::stdio::Io;

/// How long what the processes wrote may take to reach a slow reader, all together.
const DRAIN_LIMIT: Duration = Duration::from_secs(5);
/// How long init of a container that was never started may take to die.
const KILL_LIMIT: Duration = Duration::from_secs(10);

/// (pid, exit code, exited at).
pub(super) type Deleted = (u32, u32, SystemTime);

/// See [`super::Containers::delete`].
pub(super) async fn container(shared: &Arc<Shared>, container: &Arc<Container>) -> Result<Deleted> {
    let _turn = container.verbs.lock().await;
    let fixed = &container.fixed;
    let unstarted = {
        let inner = container.inner();
        if inner.removed {
            return Err(Inner::absent(&fixed.id));
        }
        inner.may_delete()?
    };
    let now = unix_nanos(SystemTime::now());
    if unstarted && !container.step(|inner| inner.give_up_restoring(now)) {
        end_init(container).await?;
    }
    let (record, exit, pid) = {
        let inner = container.inner();
        (inner.record.clone(), inner.init.phase, inner.init.pid())
    };
    let Phase::Exited(exit) = exit else {
        return Err(container
            .inner()
            .refusal("delete", "its init has not ended"));
    };
    let end = Instant::now() + DRAIN_LIMIT;
    for io in streams(container) {
        drain(&fixed.id, &io, end).await;
    }
    undo::remove(&shared.reaper, &record)
        .await
        .map_err(|e| e.within(format!("delete container {}", fixed.id)))?;
    failpoint::reach("container.forget.before").await?;
    shared.forget(container)?;
    failpoint::pass("container.forget.after");
    let _ = fs::remove_file(fixed.bundle.join("init.pid"));
    shared.announcer(container).deleted(pid, exit);
    shared.remove(container);
    Ok(deleted(pid, exit))
}

/// An exec that has ended or was never started: forgotten in silence.
pub(super) async fn exec(container: &Arc<Container>, exec_id: &str) -> Result<Deleted> {
    let io = {
        let mut inner = container.inner();
        let id = container.fixed.id.clone();
        let process = inner.process(exec_id)?;
        if matches!(process.phase, Phase::Starting | Phase::Running) {
            return Err(Error::new(
                Kind::State,
                format!("delete exec {exec_id} of {id}: it is running; kill it first"),
            ));
        }
        process.io.clone()
    };
    if let Some(io) = &io {
        drain(exec_id, io, Instant::now() + DRAIN_LIMIT).await;
    }
    let mut inner = container.inner();
    let (pid, phase) = {
        let process = inner.process(exec_id)?;
        (process.pid(), process.phase)
    };
    if matches!(phase, Phase::Starting | Phase::Running) {
        // Started while we looked at its streams (it had none then).
        return Err(inner.refusal("delete an exec of", "it has been started meanwhile"));
    }
    inner.execs.remove(exec_id);
    match phase {
        Phase::Exited(exit) => Ok(deleted(pid, exit)),
        _ => Ok((0, 0, SystemTime::now())),
    }
}

/// Ends an init that waits to be started, and waits until its exit is out.
async fn end_init(container: &Container) -> Result<()> {
    let Some(init) = container.init() else {
        return Err(Inner::absent(&container.fixed.id));
    };
    init.signal(libc::SIGKILL)?;
    if container
        .until(KILL_LIMIT, |inner| inner.init.has_exited())
        .await
    {
        return Ok(());
    }
    let why = format!(
        "delete container {}: pid {} was killed and is still there",
        container.fixed.id,
        init.pid()
    );
    Err(Error::new(Kind::Deadline, why))
}

/// Everything the container's processes were connected to.
fn streams(container: &Container) -> Vec<Arc<Io>> {
    let inner = container.inner();
    let execs = inner.execs.values().filter_map(|e| e.process.io.clone());
    inner.init.io.clone().into_iter().chain(execs).collect()
}

/// Passes on what is left, then closes: the reader sees the end.
async fn drain(id: &str, io: &Io, end: Instant) {
    if !io
        .drain(end.saturating_duration_since(Instant::now()))
        .await
    {
        tracing::debug!(id, "somebody still holds the output; closed");
    }
    io.finish().await;
}

fn deleted(pid: u32, exit: ExitRecord) -> Deleted {
    (pid, exit.code, from_unix_nanos(exit.at))
}
