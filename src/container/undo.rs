//! Undo of a container from its record alone.
//!
//! Every step is tried whatever became of the others, each within its own limit; absent is done. Nothing is signalled
//! that cannot be told apart: init by pid and start time, the rest by a cgroup that is the container's own.

use std::fs;
use std::io::ErrorKind;
use std::path::Path;
use std::time::Duration;

use tokio::time::timeout;

use super::record::ContainerRecord;
use crate::cgroup::{Group, Layout};
use crate::config::Config;
use crate::error::{Error, Kind, Result};
use crate::failpoint;
use crate::mount::unmount_tree;
use crate::oci::{Flavour, Runtime, SCRATCH};
use crate::process::Reaper;
use crate::stdio;
use crate::sys::process::told;

/// How long killed processes may take to be gone.
const KILL_LIMIT: Duration = Duration::from_secs(5);
/// How long a logging program may take to write what it has read, and once more after SIGTERM.
const LOGGER_GRACE: Duration = Duration::from_secs(1);
/// How long an emptied cgroup may stay busy.
const CGROUP_LIMIT: Duration = Duration::from_secs(5);
/// How long unmounting may take; a dead network file system is left to the kernel.
const UNMOUNT_LIMIT: Duration = Duration::from_secs(20);

/// Undo of one container from its record alone (no supervisor needed): its processes, the runtime's state, the mounts,
/// the cgroup. Idempotent; absent = done; works for a create that was cut short at any point.
///
/// # Errors
/// The first; the later steps were tried all the same.
pub async fn undo(config: &Config, reaper: &Reaper, record: &ContainerRecord) -> Result<()> {
    let killed = kill(record).await;
    let cleaned = clean(reaper, record, true).await;
    stdio::sweep_consoles(&config.runtime_root.join("s"));
    first([killed, cleaned, end_logger(record).await])
}

/// A logging program sees the end of what it reads when the processes and the supervisor are gone, and ends.
async fn end_logger(record: &ContainerRecord) -> Result<()> {
    let Some(logger) = record.logger else {
        return Ok(());
    };
    for (signal, grace) in [(0, LOGGER_GRACE), (libc::SIGTERM, LOGGER_GRACE)] {
        if signal != 0 {
            logger.signal(signal)?;
        }
        if logger.wait_gone(grace).await {
            return Ok(());
        }
    }
    logger.signal(libc::SIGKILL)?;
    if logger.wait_gone(KILL_LIMIT).await {
        return Ok(());
    }
    let why = format!(
        "end the logging program of container {}: pid {} was killed and is still there",
        record.id, logger.pid
    );
    Err(Error::new(Kind::Deadline, why))
}

/// Removes a container whose init has ended.
pub(super) async fn remove(reaper: &Reaper, record: &ContainerRecord) -> Result<()> {
    clean(reaper, record, false).await
}

async fn clean(reaper: &Reaper, record: &ContainerRecord, force: bool) -> Result<()> {
    failpoint::reach("runtime-delete.before").await?;
    let deleted = delete_state(reaper, record, force).await;
    failpoint::reach("rootfs.unmount.before").await?;
    let unmounted = unmount(record).await;
    failpoint::reach("rootfs.unmount.after").await?;
    let cleared = clear_scratch(record).await;
    let removed = match own_group(record) {
        Some(group) => absent_is_done(group.remove(CGROUP_LIMIT).await),
        None => Ok(()),
    };
    first([deleted, unmounted, cleared, removed])
}

/// SIGKILL to init and to what shares its cgroup.
async fn kill(record: &ContainerRecord) -> Result<()> {
    let signalled = record
        .init
        .map_or(Ok(false), |init| init.signal(libc::SIGKILL));
    let swept = match own_group(record) {
        Some(group) => absent_is_done(group.kill_all(KILL_LIMIT).await),
        None => Ok(()),
    };
    let gone = match record.init {
        Some(init) if !init.wait_gone(KILL_LIMIT).await => Err(Error::new(
            Kind::Deadline,
            format!(
                "end container {}: {} was killed and is still there",
                record.id,
                told(init.pid)
            ),
        )),
        _ => Ok(()),
    };
    first([signalled.map(drop), swept, gone])
}

/// The runtime's `delete`; by hand where the runtime is missing, hangs or fails and init is gone.
async fn delete_state(reaper: &Reaper, record: &ContainerRecord, force: bool) -> Result<()> {
    let runtime = Runtime {
        binary: record.runtime.clone(),
        root: record.root.clone(),
        systemd_cgroup: record.systemd_cgroup,
    };
    let state = runtime.state_dir(&record.id);
    // A runtime we know has nothing to delete without its directory.
    if runtime.flavour() != Flavour::Other && !state.exists() {
        return Ok(());
    }
    if force {
        // runc's init mounts its executable there for a moment; `delete` would find the directory busy.
        bounded_unmount(&state).await?;
    }
    let done = if runtime.binary.exists() {
        match runtime
            .delete(reaper, &record.bundle, &record.id, force)
            .await
        {
            // One that hangs is not asked a second time.
            Err(e) if !force && e.kind() != Kind::Deadline => {
                tracing::debug!(id = record.id, error = %e, "runtime delete, now with --force");
                runtime
                    .delete(reaper, &record.bundle, &record.id, true)
                    .await
            }
            done => done,
        }
    } else {
        Err(Error::new(
            Kind::Other,
            format!(
                "delete container {}: {} is missing",
                record.id,
                runtime.binary.display()
            ),
        ))
    };
    let Err(error) = done else {
        return Ok(());
    };
    if record.init.is_some_and(|init| init.is_alive())
        || own_group(record).is_some_and(|g| !g.pids().is_empty())
    {
        return Err(error);
    }
    tracing::warn!(id = record.id, %error, "the runtime did not delete a dead container; its state is removed by hand");
    remove_dir(&state)
}

/// On the blocking pool and bounded.
async fn unmount(record: &ContainerRecord) -> Result<()> {
    if !record.rootfs_mounted {
        return Ok(());
    }
    bounded_unmount(&record.bundle.join("rootfs")).await
}

/// What the runtime's verbs left in their scratch directory: nothing, unless one was killed.
async fn clear_scratch(record: &ContainerRecord) -> Result<()> {
    let scratch = record.bundle.join(SCRATCH);
    match fs::remove_dir(&scratch) {
        Ok(()) => return Ok(()),
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(()),
        Err(_) => {}
    }
    bounded_unmount(&scratch).await?;
    match fs::remove_dir_all(&scratch) {
        Ok(()) => Ok(()),
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(()),
        // The daemon's disk: what is on it goes with the bundle, and nothing of the container's is in use any more.
        Err(error) if error.kind() == ErrorKind::ReadOnlyFilesystem => {
            tracing::warn!(id = record.id, %error, "{} stays: it cannot be written to", scratch.display());
            Ok(())
        }
        Err(e) => Err(Error::io(format!("remove {}", scratch.display()), e)),
    }
}

async fn bounded_unmount(path: &Path) -> Result<()> {
    let point = path.to_owned();
    let work = tokio::task::spawn_blocking(move || unmount_tree(&point));
    match timeout(UNMOUNT_LIMIT, work).await {
        Ok(Ok(done)) => absent_is_done(done),
        Ok(Err(e)) => Err(Error::caused(
            Kind::Other,
            format!("unmount {}", path.display()),
            e,
        )),
        Err(_) => Err(Error::new(
            Kind::Deadline,
            format!("unmount {}: it hangs", path.display()),
        )),
    }
}

/// The container's cgroup, if it is its own: never the root, never one that holds this process.
fn own_group(record: &ContainerRecord) -> Option<Group> {
    let path = record
        .cgroup
        .as_deref()
        .filter(|p| !p.trim_matches('/').is_empty())?;
    let group = Group::new(&Layout::detect().ok()?, path).ok()?;
    let own = i32::try_from(std::process::id()).unwrap_or(0);
    if group.pids().contains(&own) {
        tracing::warn!(
            id = record.id,
            path,
            "the container's cgroup is ours too: left alone"
        );
        return None;
    }
    Some(group)
}

fn remove_dir(path: &Path) -> Result<()> {
    match fs::remove_dir_all(path) {
        Err(e) if e.kind() != ErrorKind::NotFound => {
            Err(Error::io(format!("remove {}", path.display()), e))
        }
        _ => Ok(()),
    }
}

fn absent_is_done(result: Result<()>) -> Result<()> {
    result.or_else(|e| if e.is_gone() { Ok(()) } else { Err(e) })
}

fn first<const N: usize>(results: [Result<()>; N]) -> Result<()> {
    results.into_iter().collect()
}
