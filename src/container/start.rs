//! Start, pause and resume of a container: one verb of the runtime each, then one step of the state.

use std::sync::Arc;
use std::time::SystemTime;

use super::record::Status;
use super::state::{Inner, Phase};
use super::table::{Container, Shared};
use crate::clock::unix_nanos;
use crate::error::Result;
use crate::failpoint;

/// See [`super::Containers::start`].
pub(super) async fn start(shared: &Shared, container: &Arc<Container>) -> Result<u32> {
    let _turn = container.verbs.lock().await;
    let fixed = &container.fixed;
    {
        let mut inner = container.inner();
        if inner.removed {
            return Err(Inner::absent(&fixed.id));
        }
        inner.begin_start()?;
    }
    // Read before: a program that ends at once must not have ended before it was started.
    let at = unix_nanos(SystemTime::now());
    let starting = async {
        failpoint::reach("runtime-start.before").await?;
        let start = fixed
            .runtime
            .start(&shared.reaper, &fixed.bundle, &fixed.id);
        start.await?;
        failpoint::reach("runtime-start.after").await
    };
    let started = container.unless_cancelled(starting).await;
    let pid = container.step(|inner| {
        inner.end_start(started.is_ok().then_some(at));
        let pid = inner.init.pid();
        if started.is_ok() {
            shared.announcer(container).started(pid);
        }
        pid
    });
    started.map_err(|e| e.within(format!("start container {}", fixed.id)))?;
    shared.save_or_warn(container);
    Ok(pid)
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
