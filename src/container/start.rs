//! Start, pause and resume of a container: one verb of the runtime each, then one step of the state. A start is a job,
//! of init as of an exec: who asks while it works waits for it, and is told the pid.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use super::checkpoint;
use super::exec;
use super::exit;
use super::join::millis;
use super::record::Status;
use super::state::{Inner, Phase};
use super::table::{Container, Shared};
use crate::cgroup::{Group, Layout};
use crate::clock::unix_nanos;
use crate::error::{Kind, Result};
use crate::failpoint;
use crate::job::{self, Ask, Job, Waiter};

/// How long a runtime may take to see that what it starts has ended; the exit waits for it, to come after the start.
const HANGS_AFTER: Duration = Duration::from_secs(5);

/// See [`super::Containers::start_within`].
pub(super) async fn join(
    shared: &Arc<Shared>,
    container: &Arc<Container>,
    exec_id: &str,
    limit: Option<Duration>,
) -> Result<u32> {
    let what = match exec_id {
        "" => format!("start container {}", container.fixed.id),
        exec => format!("start exec {exec} of container {}", container.fixed.id),
    };
    // Nothing is lost with a reply that does not arrive: the process is the container's, and its owner can see it.
    let ask = Ask::patient(what, limit, false);
    let waiter = match join_or_begin(shared, container, exec_id, &ask)? {
        Role::Started(pid) => return Ok(pid),
        Role::Waiter(waiter) => waiter,
    };
    let stage = || waiter.job().stage().0.to_owned();
    waiter.answer(&ask, stage, std::future::pending()).await
}

/// What a request is to the start.
enum Role {
    /// It is over, and this is the first request to hear of it.
    Started(u32),
    Waiter(Waiter<u32>),
}

fn join_or_begin(
    shared: &Arc<Shared>,
    container: &Arc<Container>,
    exec_id: &str,
    ask: &Ask,
) -> Result<Role> {
    let (job, waiter) = {
        let mut inner = container.inner();
        if !exec_id.is_empty() && inner.process(exec_id).is_err() {
            inner.may_exec()?;
        }
        let process = inner.process(exec_id)?;
        if let Some(job) = &process.start {
            match job.phase() {
                job::Phase::Working => return Ok(Role::Waiter(job.watch())),
                job::Phase::Parked(_) if !ask.is_late => {
                    if let Some(pid) = job.take() {
                        return Ok(Role::Started(pid));
                    }
                }
                _ => {}
            }
        }
        let (job, waiter) = Job::begin();
        process.start = Some(job.clone());
        (job, waiter)
    };
    let (shared, container, exec_id) = (
        Arc::clone(shared),
        Arc::clone(container),
        exec_id.to_owned(),
    );
    let work = job.clone();
    job.run(async move {
        let stage = if exec_id.is_empty() {
            "runtime-start"
        } else {
            "runtime-exec"
        };
        work.enter(stage);
        let started = match exec_id.as_str() {
            "" => start(&shared, &container).await,
            exec => exec::start(&shared, &container, exec).await,
        };
        let (id, took_ms) = (&container.fixed.id, millis(work.age()));
        match started {
            Ok(pid) => {
                let claimed = work.settle_for_all(pid);
                tracing::info!(id, exec_id, step = stage, took_ms, claimed, "stage ended");
            }
            Err(error) => {
                tracing::info!(id, exec_id, step = stage, took_ms, %error, "stage ended");
                // The runtime's own bound is no impatience of the caller's, to whom the work would seem to go on.
                let kind = match error.kind() {
                    Kind::Deadline => Kind::Other,
                    kind => kind,
                };
                work.fail(kind, error.to_string());
                work.end();
            }
        }
    });
    Ok(Role::Waiter(waiter))
}

async fn start(shared: &Arc<Shared>, container: &Arc<Container>) -> Result<u32> {
    let _turn = container.verbs.lock().await;
    let fixed = &container.fixed;
    let restoring = {
        let mut inner = container.inner();
        if inner.removed {
            return Err(Inner::absent(&fixed.id));
        }
        if inner.restoring.is_none() && inner.init.child.is_none() {
            return Err(inner.refusal("start", "its restoration has failed; delete it"));
        }
        inner.begin_start()?;
        inner.restoring.take()
    };
    // Read before: a program that ends at once must not have ended before it was started.
    let at = unix_nanos(SystemTime::now());
    let starting = async {
        failpoint::reach("runtime-start.before").await?;
        let restored = match restoring {
            Some(restoring) => Some(checkpoint::restore(shared, container, restoring).await?),
            None => {
                let start = fixed
                    .runtime
                    .start(&shared.reaper, &fixed.bundle, &fixed.id);
                start.await?;
                None
            }
        };
        failpoint::reach("runtime-start.after").await?;
        Ok(restored)
    };
    let starting = container.unless_cancelled(starting);
    let started = tokio::select! {
        biased;
        started = starting => started,
        // Dropping the wait ends the runtime.
        () = ended(container) => Err(container.inner().refusal(
            "start",
            "its init process has ended, and the OCI runtime's start hangs",
        )),
    };
    let (started, restored) = match started {
        Ok(restored) => (Ok(()), restored),
        Err(error) => (Err(error), None),
    };
    let child = restored.as_ref().map(|(child, _)| child.clone());
    let group = child.as_ref().and_then(|child| {
        let layout = Layout::detect().ok()?;
        Group::of_process(&layout, child.pid()).ok()
    });
    let pid = container.step(|inner| {
        if let Some((child, io)) = restored {
            inner.record.init = Some(child.identity);
            inner.record.cgroup = group.as_ref().map(|g| g.path().to_owned());
            inner.group = group;
            inner.init.connect(child, io);
        }
        inner.end_start(started.is_ok().then_some(at));
        let pid = inner.init.pid();
        if started.is_ok() {
            shared.announcer(container).started(pid);
        }
        pid
    });
    if let Some(child) = child {
        exit::watch_init(shared, container, child);
    }
    started.map_err(|e| e.within(format!("start container {}", fixed.id)))?;
    shared.save_or_warn(container);
    Ok(pid)
}

/// Resolves when init has been gone for so long that a runtime which still starts it hangs.
async fn ended(container: &Container) {
    container.until(Duration::MAX, |inner| inner.ending).await;
    tokio::time::sleep(HANGS_AFTER).await;
}

/// See [`super::Containers::pause`].
pub(super) async fn pause(shared: &Shared, container: &Arc<Container>) -> Result<()> {
    let _turn = container.verbs.lock().await;
    let fixed = &container.fixed;
    {
        let inner = container.inner();
        if inner.init.phase != Phase::Running || inner.paused || inner.ending {
            return Err(inner.refusal("pause", "it is not running"));
        }
    }
    container
        .unless_cancelled(
            fixed
                .runtime
                .pause(&shared.reaper, &fixed.bundle, &fixed.id),
        )
        .await?;
    freeze(shared, container, true);
    Ok(())
}

/// See [`super::Containers::resume`].
pub(super) async fn resume(shared: &Shared, container: &Arc<Container>) -> Result<()> {
    let _turn = container.verbs.lock().await;
    let fixed = &container.fixed;
    {
        let inner = container.inner();
        if !inner.paused {
            return Err(inner.refusal("resume", "it is not paused"));
        }
    }
    container
        .unless_cancelled(
            fixed
                .runtime
                .resume(&shared.reaper, &fixed.bundle, &fixed.id),
        )
        .await?;
    freeze(shared, container, false);
    Ok(())
}

fn freeze(shared: &Shared, container: &Container, paused: bool) {
    container.step(|inner| {
        inner.paused = paused;
        if inner.ending || inner.init.has_exited() {
            return; // its exit is what is told of it from here on
        }
        inner.record.status = if paused {
            Status::Paused
        } else {
            Status::Running
        };
        let announcer = shared.announcer(container);
        if paused {
            announcer.paused()
        } else {
            announcer.resumed()
        }
    });
    shared.save_or_warn(container);
}
