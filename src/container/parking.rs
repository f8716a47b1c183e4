//! Containers that were made and that nobody was there to take: who gets them, how long they live, how they end.
//!
//! A parked container is in the table and hidden: no verb finds it but Create, which takes it, and Delete and a deadly
//! signal, which undo it. Its exit is watched, and its creation announced, only once somebody has it.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use super::create::abandon;
use super::join::millis;
use super::record::Status;
use super::table::{Container, Shared};
use super::{Creation, exit};
use crate::clock::unix_nanos;
use crate::job::{Job, Phase};

/// What is told of the end of a container that nobody was given: 128 + SIGKILL.
pub(super) const KILLED: u32 = 137;

/// The container is made: it is given to whoever began it, or parked.
pub(super) fn settle(shared: &Arc<Shared>, container: &Arc<Container>, pid: u32) {
    // Who joins looks under this lock: nobody is told of a container that is not there yet for the other verbs.
    let creations = shared.creations();
    let claimed = container.job.settle(pid);
    match claimed {
        true => publish(shared, container),
        false => park(shared, container),
    }
    drop(creations);
    if !claimed {
        // As created it is on record already.
        shared.save_or_warn(container);
    }
    let (id, age_ms) = (&container.fixed.id, millis(container.job.age()));
    tracing::info!(id, pid, claimed, age_ms, "container is created");
}

/// A request has taken the parked container `id`.
pub(super) fn claimed(shared: &Arc<Shared>, id: &str) {
    let Some(container) = shared.any(id) else {
        return;
    };
    publish(shared, &container);
    shared.save_or_warn(&container);
    let age_ms = millis(container.job.age());
    tracing::info!(id, age_ms, "a parked container was claimed");
}

/// From here on it is there for everybody.
fn publish(shared: &Arc<Shared>, container: &Arc<Container>) {
    let child = container.step(|inner| {
        inner.creating = false;
        inner.parked = false;
        inner.record.parked_at = None;
        inner.record.status = Status::Created;
        let fixed = &container.fixed;
        let bundle = fixed.bundle.to_string_lossy();
        let (streams, pid) = (&inner.init.streams, inner.init.pid());
        shared
            .announcer(container)
            .created(&bundle, &fixed.rootfs, streams, pid);
        inner.init.child.clone()
    });
    if let Some(child) = child {
        exit::watch_init(shared, container, child);
    }
}

/// Hides it, and throws it away unless somebody comes.
fn park(shared: &Arc<Shared>, container: &Arc<Container>) {
    container.step(|inner| {
        inner.creating = false;
        inner.parked = true;
        inner.record.parked_at = Some(unix_nanos(SystemTime::now()));
        inner.record.status = Status::Parked;
    });
    container.job.enter("parked");
    let interval = Duration::from_secs_f64(shared.config.parking.interval);
    let (shared, container) = (Arc::clone(shared), Arc::clone(container));
    tokio::spawn(async move {
        let job = &container.job;
        let is_parked = || matches!(job.phase(), Phase::Parked(_));
        if job.expired(interval, is_parked).await && job.discard(false) {
            tracing::warn!(id = %container.fixed.id, "nobody took the parked container; undoing it");
            undo(&shared, &container).await;
            shared.unclaimed.send_modify(|n| *n += 1);
        }
    });
}

/// Undoes a parked container, watched or not; false when it is not parked (any more).
pub(super) async fn discard(shared: &Arc<Shared>, container: &Arc<Container>) -> bool {
    let was_parked = container.job.discard(true);
    if was_parked {
        undo(shared, container).await;
    }
    was_parked
}

async fn undo(shared: &Shared, container: &Container) {
    container.job.enter("roll-back");
    let io = container.inner().init.io.clone();
    abandon(shared, container).await;
    if let Some(io) = io {
        io.close();
    }
    container.job.end();
}

/// Begins to undo a container that nobody has been given, made or in the making; false when there is none of that kind.
pub(super) fn give_up(shared: &Arc<Shared>, id: &str) -> bool {
    let Some(job) = unfinished(shared, id) else {
        return false;
    };
    // First: who finds it in the table a moment later looks at this.
    job.cancel();
    if let Some(container) = shared.any(id).filter(|c| c.job.is(&job)) {
        container.cancel();
        let shared = Arc::clone(shared);
        tokio::spawn(async move { discard(&shared, &container).await });
    }
    true
}

/// The same, and waits for it; the pid it had, if it came that far. `None`: somebody has the container, or there is none.
pub(super) async fn delete(shared: &Arc<Shared>, id: &str) -> Option<u32> {
    let job = unfinished(shared, id)?;
    let pid = match job.phase() {
        Phase::Parked(pid) => pid,
        _ => 0,
    };
    if !give_up(shared, id) {
        return None;
    }
    job.undone().await;
    Some(pid)
}

/// The job of a container that nobody has been given.
fn unfinished(shared: &Shared, id: &str) -> Option<Job<u32>> {
    let job = shared.creations().get(id)?.job.clone();
    let committed = matches!(job.phase(), Phase::Committed(_));
    (!committed && !job.is_undone()).then_some(job)
}

/// See [`super::Containers::creations`].
pub(super) fn creations(shared: &Shared) -> Vec<Creation> {
    let creations = shared.creations();
    let open = creations.iter().filter_map(|(id, making)| {
        let phase = making.job.phase();
        let creation = Creation {
            id: id.clone(),
            stage: making.job.stage().0,
            age: making.job.age(),
            parked: matches!(phase, Phase::Parked(_)),
            watchers: making.job.watchers(),
        };
        (!matches!(phase, Phase::Committed(_))).then_some(creation)
    });
    open.collect()
}

/// See [`super::Containers::are_all_unclaimed`].
pub(super) fn are_all_unclaimed(shared: &Shared) -> bool {
    let creations = shared.creations();
    let unclaimed = |job: &Job<u32>| {
        !matches!(job.phase(), Phase::Committed(_)) && !job.is_claimed() && job.watchers() == 0
    };
    !creations.is_empty() && creations.values().all(|making| unclaimed(&making.job))
}
