//! Signals, and stopping everything.

use std::collections::BTreeMap;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use nix::sys::signal::Signal;
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};

use super::state::{Inner, Phase};
use super::table::{Container, Shared};
use super::{delete, parking, start};
use crate::cgroup::Group;
use crate::error::{Error, Kind, Result};
use crate::failpoint;
use crate::process::{Child, Identity};
use crate::sys::process::told;

/// What an image says about how its program wants to be asked to end.
const STOP_SIGNAL: &str = "org.opencontainers.image.stopSignal";
/// How long a cancelled create may take to undo itself.
const CANCEL_LIMIT: Duration = Duration::from_secs(20);
/// How long a killed container may take to be gone, and a sweep of its cgroup to empty it.
const KILL_LIMIT: Duration = Duration::from_secs(10);
/// Between the signal to init and the sweep of its cgroup: enough for the kernel to end a pid namespace.
const SWEEP_AFTER: Duration = Duration::from_secs(1);
/// How many processes an error names.
const SHOWN: usize = 8;

/// See [`super::Containers::kill`]. Waits in no queue: a hanging verb must not protect a container.
pub(super) async fn kill(
    shared: &Shared,
    container: &Arc<Container>,
    exec_id: &str,
    signal: u32,
    all: bool,
) -> Result<()> {
    if !exec_id.is_empty() {
        return kill_exec(container, exec_id, number(signal)?);
    }
    let fixed = &container.fixed;
    failpoint::reach("container.kill.before").await?;
    let init = living_init(container)?;
    let result = match (fixed.runtime.flavour().kills_by_pid(), all) {
        (true, false) => sent(init.signal(number(signal)?)?, &fixed.id),
        (true, true) => kill_all(container, &init, signal).await,
        (false, _) => {
            let killed = fixed
                .runtime
                .kill(&shared.reaper, &fixed.bundle, &fixed.id, signal, all)
                .await;
            match killed {
                // A runtime that hangs or is gone does not keep a container alive.
                Err(_) if signal == 9 => sent(init.signal(libc::SIGKILL)?, &fixed.id),
                other => other,
            }
        }
    };
    // However the runtime words it: what has ended meanwhile is not there to be signalled.
    result.map_err(|e| living_init(container).err().unwrap_or(e))
}

/// Every process of the container, by its cgroup.
async fn kill_all(container: &Container, init: &Child, signal: u32) -> Result<()> {
    let group = container.inner().group.clone();
    match group {
        Some(group) if signal == 9 => group.kill_all(KILL_LIMIT).await,
        Some(group) => {
            let number = number(signal)?;
            for pid in group.pids() {
                if let Ok(identity) = Identity::of(pid) {
                    identity.signal(number)?;
                }
            }
            Ok(())
        }
        None => sent(init.signal(number(signal)?)?, &container.fixed.id),
    }
}

fn kill_exec(container: &Container, exec_id: &str, signal: i32) -> Result<()> {
    let child = {
        let mut inner = container.inner();
        let id = container.fixed.id.clone();
        let process = inner.process(exec_id)?;
        match process.phase {
            Phase::Created | Phase::Starting => {
                let why = format!("kill exec {exec_id} of container {id}: it has not been started");
                return Err(Error::new(Kind::State, why));
            }
            Phase::Exited(_) => return Err(finished(exec_id)),
            Phase::Running => process.child.clone().ok_or_else(|| finished(exec_id))?,
        }
    };
    sent(child.signal(signal)?, exec_id)
}

/// Init, if it has not ended, announced or not.
pub(super) fn living_init(container: &Container) -> Result<Child> {
    let inner = container.inner();
    if inner.removed {
        return Err(Inner::absent(&container.fixed.id));
    }
    let alive = inner
        .init
        .child
        .clone()
        .filter(|c| c.exited().is_none() && !inner.ending);
    alive.ok_or_else(|| finished(&container.fixed.id))
}

/// See [`super::Containers::stop_all`].
pub(super) async fn stop_all(shared: &Arc<Shared>, grace: Duration, delete: bool) -> Result<()> {
    let mut stops = JoinSet::new();
    for container in shared.all() {
        let shared = Arc::clone(shared);
        stops.spawn(async move { stop(&shared, &container, grace, delete).await });
    }
    let mut worst = Ok(());
    while let Some(done) = stops.join_next().await {
        let done = done.unwrap_or_else(|e| Err(Error::caused(Kind::Other, "stop a container", e)));
        if let Err(error) = done {
            tracing::warn!(%error, "a container is not stopped");
            worst = worst.and(Err(error));
        }
    }
    worst
}

async fn stop(
    shared: &Arc<Shared>,
    container: &Arc<Container>,
    grace: Duration,
    delete: bool,
) -> Result<()> {
    if parking::discard(shared, container).await {
        return Ok(());
    }
    if container.inner().creating {
        container.job.cancel();
        container.cancel();
        if !container
            .until(CANCEL_LIMIT, |inner| inner.removed || !inner.creating)
            .await
        {
            let id = &container.fixed.id;
            return Err(Error::new(
                Kind::Deadline,
                format!("stop container {id}: its create was cancelled and hangs"),
            ));
        }
    }
    if container.inner().removed {
        return Ok(());
    }
    end(shared, container, grace).await?;
    if !delete {
        return Ok(());
    }
    match delete::container(shared, container).await {
        Err(e) if !e.is_gone() => Err(e),
        _ => Ok(()),
    }
}

/// Asks, then kills init, then everything in the cgroup.
async fn end(shared: &Shared, container: &Arc<Container>, grace: Duration) -> Result<()> {
    let gone = |inner: &Inner| inner.removed || inner.init.has_exited();
    let (running, paused) = {
        let inner = container.inner();
        (inner.init.phase == Phase::Running, inner.paused)
    };
    if running && !grace.is_zero() {
        if paused {
            let _ = timeout(grace, start::resume(shared, container)).await;
        }
        let asked = async {
            // It may have ended; a runtime that hangs is given the same time as the program.
            let _ = kill(shared, container, "", container.fixed.stop_signal, false).await;
            std::future::pending::<()>().await;
        };
        tokio::select! {
            () = asked => {}
            () = shared.grace_over(Instant::now() + grace) => {}
            _ = container.until(Duration::MAX, gone) => {}
        }
    }
    let Some(init) = container.init() else {
        // From a checkpoint, and not restored yet; a restore under way is given up.
        container.cancel();
        return Ok(());
    };
    if container.inner().init.has_exited() {
        return sweep(container).await;
    }
    container.cancel();
    init.signal(libc::SIGKILL)?;
    if container.until(SWEEP_AFTER, gone).await {
        return sweep(container).await;
    }
    let end = Instant::now() + KILL_LIMIT;
    let group = container.inner().group.clone();
    if let Some(group) = &group {
        // Frozen or stuck: the sweep thaws.
        let _ = group.kill_all(KILL_LIMIT).await;
    }
    let left = end.saturating_duration_since(Instant::now());
    if container.until(left.max(SWEEP_AFTER), gone).await {
        return sweep(container).await;
    }
    Err(still_there(container, init.pid()))
}

/// Kills what init has left, where its pid namespace was not its own: a process that was stuck then is tried again.
async fn sweep(container: &Container) -> Result<()> {
    let group = container.inner().group.clone();
    let Some(group) = group.filter(|_| !container.fixed.own_pid_namespace) else {
        return Ok(());
    };
    match group.kill_all(KILL_LIMIT).await {
        // The root's, or ours: what is in it is not the container's.
        Err(e) if e.kind() == Kind::Invalid => Ok(()),
        Err(e) if !e.is_gone() => Err(e.within(format!("stop container {}", container.fixed.id))),
        _ => Ok(()),
    }
}

/// Who hangs, and where: it was told to end, the rest is the kernel's.
fn still_there(container: &Container, init: i32) -> Error {
    let group = container.inner().group.clone();
    let mut pids = group.map(|g| g.pids()).unwrap_or_default();
    if pids.is_empty() {
        pids.push(init);
    }
    let shown: Vec<String> = pids.iter().take(SHOWN).map(|pid| told(*pid)).collect();
    let (id, count) = (&container.fixed.id, pids.len());
    Error::new(
        Kind::Deadline,
        format!(
            "stop container {id}: {count} killed and still there after {KILL_LIMIT:?}: {}; it ends as soon as the kernel lets it",
            shown.join(", ")
        ),
    )
}

/// See [`super::Containers::kill_what_is_left`].
pub(super) async fn kill_what_is_left(shared: &Shared) {
    for container in shared.all() {
        let (group, ended) = {
            let inner = container.inner();
            let ended = inner.removed || inner.init.has_exited();
            (inner.group.clone(), ended)
        };
        // Only what was killed before: a stop that has failed earlier has given nobody his grace.
        if !container.is_cancelled() || (ended && container.fixed.own_pid_namespace) {
            continue;
        }
        if let Some(init) = container.init().filter(|_| !ended) {
            let _ = init.signal(libc::SIGKILL);
        }
        if let Some(group) = group {
            let _ = group.kill_all(SWEEP_AFTER).await;
        }
    }
}

/// See [`super::Containers::is_any_alive`].
pub(super) fn is_any_alive(shared: &Shared, killed: bool) -> bool {
    shared.all().iter().any(|container| {
        let inner = container.inner();
        if inner.removed || (killed && !container.is_cancelled()) {
            return false;
        }
        if inner.init.child.is_some() && !inner.init.has_exited() {
            return true;
        }
        let ours = |g: &Group| !g.is_root() && !g.pids().contains(&own_pid());
        let left = |g: &Group| ours(g) && !g.pids().is_empty();
        !container.fixed.own_pid_namespace && inner.group.as_ref().is_some_and(left)
    })
}

fn own_pid() -> i32 {
    i32::try_from(std::process::id()).unwrap_or(0)
}

/// Whether what is killed by this signal may be taken for ended.
pub(super) fn ends(signal: u32) -> bool {
    [libc::SIGKILL, libc::SIGTERM].contains(&signal.cast_signed())
}

/// The signal named by the image, else SIGTERM.
pub(super) fn stop_signal(annotations: &BTreeMap<String, String>) -> u32 {
    annotations
        .get(STOP_SIGNAL)
        .and_then(|text| parse_signal(text))
        .unwrap_or(libc::SIGTERM.unsigned_abs())
}

/// `SIGQUIT`, `QUIT`, `quit`, `3`, `SIGRTMIN+3`.
fn parse_signal(text: &str) -> Option<u32> {
    let name = text.trim().to_ascii_uppercase();
    if let Ok(number) = name.parse::<u32>() {
        return (1..=64).contains(&number).then_some(number);
    }
    let name = name.strip_prefix("SIG").unwrap_or(&name);
    if let Some(offset) = name
        .strip_prefix("RTMIN+")
        .and_then(|n| n.parse::<u32>().ok())
    {
        // The C library keeps 32 and 33 for itself; images count from there.
        return (offset <= 30).then_some(34 + offset);
    }
    Signal::from_str(&format!("SIG{name}"))
        .ok()
        .map(|s| (s as i32).unsigned_abs())
}

fn number(signal: u32) -> Result<i32> {
    i32::try_from(signal)
        .map_err(|e| Error::caused(Kind::Invalid, format!("send signal {signal}"), e))
}

fn sent(alive: bool, id: &str) -> Result<()> {
    if alive { Ok(()) } else { Err(finished(id)) }
}

fn finished(id: &str) -> Error {
    Error::new(
        Kind::NotFound,
        format!("signal {id}: process already finished"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signals_have_many_spellings() {
        for (text, want) in [
            ("SIGQUIT", Some(3)),
            ("quit", Some(3)),
            (" 15 ", Some(15)),
            ("SIGRTMIN+3", Some(37)),
            ("RTMIN+31", None),
            ("0", None),
            ("65", None),
            ("SIGNOPE", None),
            ("", None),
        ] {
            assert_eq!(parse_signal(text), want, "{text:?}");
        }
    }

    #[test]
    fn an_image_without_a_word_gets_term() {
        assert_eq!(stop_signal(&BTreeMap::new()), 15);
        assert_eq!(
            stop_signal(&BTreeMap::from([(
                STOP_SIGNAL.to_owned(),
                "SIGINT".to_owned()
            )])),
            2
        );
        assert_eq!(
            stop_signal(&BTreeMap::from([(STOP_SIGNAL.to_owned(), "?".to_owned())])),
            15
        );
    }
}
