//! Word of processes that the kernel killed for want of memory: told before the exit they bring about.

use std::future::pending;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::sleep;

use super::record::OomLimit;
use super::table::{Container, Shared};
use crate::cgroup::{OomCount, OomWatch};

/// Where word comes before the deed: first and longest pause between looks for it, and how many of them there are. All
/// together some seconds; a kill that takes longer is told with the exit.
const FIRST_PAUSE: Duration = Duration::from_millis(5);
const LONGEST_PAUSE: Duration = Duration::from_millis(500);
const LOOKS: u32 = 12;

/// What was killed up to now, before the container was anybody's, is no news.
pub(super) fn begin(container: &Container) {
    let group = container.inner().group.clone();
    if let Some(group) = group {
        *container.oom() = OomCount::of(&group);
    }
}

/// Tells of kills as they happen; never ends. May be dropped at any time: what it has not told is told by [`tell`].
pub(super) async fn watch(shared: &Shared, container: &Arc<Container>) {
    let group = container.inner().group.clone();
    let watch = match group.as_ref().map(OomWatch::of) {
        Some(Ok(watch)) => watch,
        Some(Err(error)) => {
            // Its kills are still told, with the exits.
            tracing::debug!(id = container.fixed.id, %error, "no word of kills as they happen");
            return pending().await;
        }
        None => return pending().await,
    };
    loop {
        watch.fired().await;
        let (mut looks, mut pause) = (0, FIRST_PAUSE);
        while !tell_of(shared, container, true) && watch.is_early() && looks < LOOKS {
            sleep(pause).await;
            looks += 1;
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }
}

/// Tells of what has happened since the last look.
pub(super) fn tell(shared: &Shared, container: &Container) {
    tell_of(shared, container, false);
}

/// `stuck`: of processes that wait for memory as well. Says whether there was something to tell.
fn tell_of(shared: &Shared, container: &Container, stuck: bool) -> bool {
    let group = container.inner().group.clone();
    let Some(group) = group else {
        return false;
    };
    let news = container.oom().news(&group);
    if news.kills == 0 && !(stuck && news.stuck) {
        return false;
    }
    let limit = match news.own_limit {
        true => OomLimit::Container,
        false => OomLimit::Above,
    };
    let (id, kills, stuck) = (&container.fixed.id, news.kills, news.stuck);
    tracing::warn!(id, kills, ?limit, stuck, "the container is out of memory");
    container.step(|inner| {
        inner.record.oom_kills += kills;
        inner.record.oom_limit = Some(limit);
        // The exit of init is the last that is told of a container.
        if !inner.init.has_exited() {
            shared.announcer(container).out_of_memory();
        }
    });
    shared.save_or_warn(container);
    true
}
