//! Undo without a supervisor: `delete` after a crash, `podvisor rm` of a pod whose supervisor is gone, a new supervisor
//! that finds an old one's state. Works from the journal alone; when the journal itself is broken, from what can be
//! proved by name: the pod's cgroup, its pinned netns, its network's record, its mounts.

use std::fs::{self, File};
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Duration;

use nix::fcntl::{Flock, FlockArg};
use tokio::time::{Instant, sleep};

use super::journal::{self, Journal};
use super::record::{self, Effect, Found, Record, State};
use super::teardown::{self, Scope};
use super::{gc, now_nanos, patience};
use crate::cgroup::{Group, Layout};
use crate::clock;
use crate::config::Config;
use crate::container::{self, ContainerRecord};
use crate::error::{Context, Error, Kind, Result};
use crate::failpoint;
use crate::infra::PodFiles;
use crate::mount;
use crate::network::{self, NetworkRecord, netns};
use crate::process::{Identity, Reaper};
use crate::sys::socket::is_live;
use crate::undo::Progress;

/// An exit status that nobody recorded: explicit, never an invented 0.
const UNKNOWN: u32 = 255;

/// How long a process that was sent SIGKILL may take to go.
const KILL_LIMIT: Duration = Duration::from_secs(5);

/// How long a plugin's process may take to end after SIGKILL.
const PLUGIN_LIMIT: Duration = Duration::from_secs(5);

/// How often it is looked whether an abandoned network is somebody's.
const LOOK: Duration = Duration::from_millis(200);

/// What becomes of a network that is parked by its pod's key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Parked {
    /// It is left to the next supervisor of the pod, or to its end.
    Stays,
    /// It is undone like everything else.
    Undone,
}

/// What `delete` answers.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Deleted {
    /// Host pid of the process, 0 when there was none.
    pub pid: u32,
    /// Its exit status; 137 when this undo killed it, 255 when nobody knows.
    pub exit_status: u32,
    /// Unix nanoseconds.
    pub exited_at: u64,
}

/// Undoes `id` of `namespace` without its supervisor: a sandbox (everything of the pod) or one of a pod's containers
/// (only that). Idempotent; nothing there is success. `budget`: how long steps that fail are retried. `parked`: what
/// becomes of a network that is parked for the next supervisor of the pod.
///
/// Errors: `Busy` when a live supervisor owns it (ask that one) or another undo is at work; `Busy` with "network
/// clean-up pending" when only a DEL is still owed (it stays on the network's record).
pub async fn rescue(
    config: &Config,
    reaper: &Reaper,
    namespace: &str,
    id: &str,
    budget: Duration,
    parked: Parked,
) -> Result<Deleted> {
    crate::id::check_namespace(namespace)?;
    crate::id::check("id", id)?;
    let dir = config.sandbox_dir(namespace, id);
    if !dir.exists() {
        let network = NetworkRecord::find(config, namespace, id);
        if parked == Parked::Stays && is_kept(&network) {
            return Ok(unknown(0));
        }
        if network.is_held() {
            tracing::warn!(pod = %id, "its runtime directory is gone and its supervisor is not; undoing it by name");
            return salvage(config, reaper, namespace, id).await;
        }
        if let Some(owner) = owner_of(config, namespace, id) {
            return rescue_container(config, reaper, &owner, id, budget).await;
        }
        let network = undo_network(config, reaper, namespace, id).await;
        return network.map(|()| unknown(0));
    }
    let _lock = match lock(&dir, budget).await {
        Err(error) if error.is_gone() => return Ok(unknown(0)),
        locked => locked?,
    };
    failpoint::hit("rescue.lock.after")?;
    match record::read(&dir) {
        Ok(record) => {
            let scope = Whole::Removed { parked };
            rescue_pod(config, reaper, &dir, record, budget, scope).await
        }
        Err(error) if error.kind() == Kind::NotFound || error.kind() == Kind::Invalid => {
            let network = NetworkRecord::find(config, namespace, id);
            if parked == Parked::Stays && is_kept(&network) {
                return Ok(unknown(0));
            }
            tracing::warn!(%error, "no usable journal; undoing what can be proved by name");
            salvage(config, reaper, namespace, id).await
        }
        Err(error) => Err(error),
    }
}

/// Stops the pod `id` of `namespace` without its supervisor, which has ended: everything of it is undone as in [`rescue`],
/// its parked network, too, and its record stays, stopped, for who removes it.
///
/// Errors: those of [`rescue`]; NotFound and Invalid when there is no journal, or none that can be read.
pub async fn stop_dead(
    config: &Config,
    reaper: &Reaper,
    namespace: &str,
    id: &str,
    budget: Duration,
) -> Result<()> {
    crate::id::check_namespace(namespace)?;
    crate::id::check("id", id)?;
    let dir = config.sandbox_dir(namespace, id);
    let _lock = lock(&dir, budget).await?;
    let record = record::read(&dir)?;
    rescue_pod(config, reaper, &dir, record, budget, Whole::Stopped)
        .await
        .map(drop)
}

/// What is to become of a pod.
#[derive(Clone, Copy)]
enum Whole {
    Removed {
        parked: Parked,
    },
    /// Nothing of it is left but its record.
    Stopped,
}

async fn rescue_pod(
    config: &Config,
    reaper: &Reaper,
    dir: &Path,
    mut record: Record,
    budget: Duration,
    whole: Whole,
) -> Result<Deleted> {
    refuse_supervised(&record)?;
    let deleted = outcome(&record);
    if record.boot_id != clock::boot_id() {
        // Nothing of the kernel's survives a reboot; a pid on record is somebody else's now.
        record.infra = None;
        for container in record.containers.values_mut() {
            container.init = None;
        }
    }
    let disk = record.network_record(config);
    let stays = matches!(
        whole,
        Whole::Removed {
            parked: Parked::Stays
        }
    ) && is_kept(&disk);
    if record.network.ours && !stays {
        let this_boot = record.boot_id == clock::boot_id();
        let supervisor = record.supervisor.filter(|_| this_boot).map(|s| s.pid);
        network::kill_orphans_of(config, &disk, supervisor, PLUGIN_LIMIT).await?;
    }
    let journal = Journal::new(dir.to_owned(), record);
    journal.take();
    let report = teardown::undo(
        config,
        reaper,
        &journal,
        Scope {
            network: !stays,
            ..Scope::everything()
        },
        patience(budget),
        &Progress::default(),
    )
    .await;
    failpoint::hit("rescue.network.before")?;
    if !stays && !disk.owes_del() && journal.with(|r| r.effects.netns == Effect::None) {
        disk.remove()?;
    }
    if journal.with(|r| teardown::is_over(r, &report)) {
        failpoint::hit("rescue.socket.before")?;
        remove_socket(&journal.read());
        failpoint::hit("rescue.close.before")?;
        match whole {
            Whole::Removed { .. } => journal.close()?,
            Whole::Stopped => journal.update(|r| {
                r.state = State::Stopped;
                r.supervisor = None;
                r.reason = Some("its supervisor had ended; what it left has been undone".into());
            })?,
        }
    } else {
        journal.note(|r| {
            r.state = State::NotReady;
            r.reason = Some("its supervisor is gone and the pod could not be undone whole".into());
        });
    }
    teardown::verdict(&report).map(|()| deleted)
}

/// One container of a pod whose supervisor is gone.
async fn rescue_container(
    config: &Config,
    reaper: &Reaper,
    owner: &Record,
    id: &str,
    budget: Duration,
) -> Result<Deleted> {
    refuse_supervised(owner)?;
    let dir = config.sandbox_dir(&owner.namespace, &owner.id);
    let _lock = match lock(&dir, budget).await {
        Err(error) if error.is_gone() => return Ok(unknown(0)),
        locked => locked?,
    };
    // Read again under the lock: somebody may have undone it meanwhile.
    let Ok(record) = record::read(&dir) else {
        return Ok(unknown(0));
    };
    let Some(container) = record.containers.get(id).cloned() else {
        return Ok(unknown(0));
    };
    let deleted = outcome_of(&container);
    container::undo(config, reaper, &container).await?;
    let journal = Journal::new(dir, record);
    journal.take();
    journal.update(|r| {
        r.containers.remove(id);
    })?;
    if journal.with(|r| r.state == State::TaskOnly && r.containers.is_empty()) {
        remove_socket(&journal.read());
        journal.close()?;
    }
    Ok(deleted)
}

/// The journal is missing, empty or cut in half. A supervisor that the network's record knows is ended first.
async fn salvage(config: &Config, reaper: &Reaper, namespace: &str, id: &str) -> Result<Deleted> {
    let dir = config.sandbox_dir(namespace, id);
    let held = NetworkRecord::find(config, namespace, id).held_by();
    if let Some(supervisor) = held.filter(|s| Identity::own().ok() != Some(*s)) {
        supervisor.signal(libc::SIGKILL)?;
        supervisor.wait_gone(KILL_LIMIT).await;
    }
    failpoint::hit("salvage.before")?;
    let layout = Layout::detect()?;
    let group = Group::new(&layout, &teardown::cgroup_of(config, namespace, id))?;
    group.kill_all(Duration::from_secs(5)).await?;
    for bundle in directories(&dir.join("bundles")) {
        mount::unmount_tree(&bundle)?;
        remove_runtime_state(config, namespace, &bundle)?;
    }
    group.remove(Duration::from_secs(5)).await?;
    Group::new(&layout, &config.cgroup_parent)?.remove_if_empty();
    PodFiles::remove(&journal::files_dir(&dir))?;
    failpoint::hit("salvage.network.before")?;
    undo_network(config, reaper, namespace, id).await?;
    failpoint::hit("salvage.close.before")?;
    journal::remove(&dir)?;
    Ok(unknown(0))
}

/// What the OCI runtime knows of a container the command made. Which runtime is not known, but nothing of the container
/// lives any more, and its directory is called as its bundle is.
fn remove_runtime_state(config: &Config, namespace: &str, bundle: &Path) -> Result<()> {
    let Some(id) = bundle.file_name() else {
        return Ok(());
    };
    let state = config.oci_root().join(namespace).join(id);
    mount::unmount_tree(&state)?;
    match fs::remove_dir_all(&state) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
            Err(Error::io(format!("remove {}", state.display()), e))
        }
        _ => Ok(()),
    }
}

/// DEL where the record on disk owes one, then the netns by its name.
async fn undo_network(config: &Config, reaper: &Reaper, namespace: &str, id: &str) -> Result<()> {
    let record = NetworkRecord::find(config, namespace, id);
    // Where the record says whose it is, settling it does this, and knows whether somebody is at work on it.
    if record.holder().is_none() {
        let netns = netns::of_record(config, &record);
        network::kill_orphans(id, &netns, None, PLUGIN_LIMIT).await?;
    }
    gc::settle(config, reaper, &record).await
}

/// Parked for the next supervisor of the pod, and its time is not over; or its keeper is still making it.
fn is_kept(network: &NetworkRecord) -> bool {
    network.is_mine()
        && network
            .holder()
            .is_some_and(|h| h.is_kept() || (h.keeper && h.is_alive()))
}

/// Stays for a parked network that nobody keeps any more, until it is taken over or its time is over; then undoes it.
///
/// # Errors
/// Those of [`gc::settle`]: the DEL stays owed.
pub async fn keep_abandoned(
    config: &Config,
    reaper: &Reaper,
    namespace: &str,
    id: &str,
) -> Result<()> {
    let record = NetworkRecord::find(config, namespace, id);
    let abandoned = || {
        let holder = record.holder().filter(|_| record.is_mine());
        holder.is_some_and(|h| h.is_parked() && !h.is_alive())
    };
    if !abandoned() {
        return Ok(());
    }
    while abandoned() && is_kept(&record) {
        tokio::time::sleep(LOOK).await;
    }
    match abandoned() && record.owes_del() {
        true => gc::settle(config, reaper, &record).await,
        // Another sandbox of the pod has it, or somebody has undone it.
        false => Ok(()),
    }
}

fn refuse_supervised(record: &Record) -> Result<()> {
    if !record.is_supervised() || record.supervisor == Identity::own().ok() {
        return Ok(());
    }
    let pid = record.supervisor.map_or(0, |s| s.pid);
    Err(Error::new(
        Kind::Busy,
        format!(
            "undo pod {} without its supervisor: process {pid} is alive; ask it to shut down",
            record.id
        ),
    ))
}

/// The pod whose record lists container `id`.
fn owner_of(config: &Config, namespace: &str, id: &str) -> Option<Record> {
    record::list(config, Some(namespace))
        .into_iter()
        .find_map(|found| match found {
            Found::Record(record) if record.containers.contains_key(id) => Some(*record),
            _ => None,
        })
}

fn outcome(record: &Record) -> Deleted {
    if let Some(container) = record.containers.get(&record.id) {
        return outcome_of(container);
    }
    let pid = record
        .infra
        .map_or(0, |i| u32::try_from(i.pid).unwrap_or(0));
    match (record.exit_status, record.exited_at) {
        (Some(exit_status), at) => Deleted {
            pid,
            exit_status,
            exited_at: at.unwrap_or_else(now_nanos),
        },
        _ if record.infra.is_some_and(|i| i.is_alive()) => killed(pid),
        _ => unknown(pid),
    }
}

fn outcome_of(container: &ContainerRecord) -> Deleted {
    let pid = container
        .init
        .map_or(0, |i| u32::try_from(i.pid).unwrap_or(0));
    match container.exit {
        Some(exit) => Deleted {
            pid,
            exit_status: exit.code,
            exited_at: exit.at,
        },
        None if container.init.is_some_and(|i| i.is_alive()) => killed(pid),
        None => unknown(pid),
    }
}

fn killed(pid: u32) -> Deleted {
    Deleted {
        pid,
        exit_status: 137,
        exited_at: now_nanos(),
    }
}

fn unknown(pid: u32) -> Deleted {
    Deleted {
        pid,
        exit_status: UNKNOWN,
        exited_at: now_nanos(),
    }
}

/// Whoever held the lock before may have removed the directory, and a new pod of the same id may have made its own.
fn is_same(locked: &OwnedFd, dir: &Path) -> Result<()> {
    let at = |meta: &fs::Metadata| (meta.dev(), meta.ino());
    let ours = locked
        .try_clone()
        .map(File::from)
        .and_then(|f| f.metadata());
    match (ours, fs::symlink_metadata(dir)) {
        (Ok(ours), Ok(now)) if at(&ours) == at(&now) => Ok(()),
        _ => Err(Error::new(
            Kind::NotFound,
            format!("lock {}: its pod has been removed", dir.display()),
        )),
    }
}

/// One undo at a time per pod, also between processes.
///
/// NotFound: the directory that was waited for is gone, and with it the pod.
async fn lock(dir: &Path, budget: Duration) -> Result<Flock<OwnedFd>> {
    let until = Instant::now() + budget;
    let mut file: OwnedFd = File::open(dir)
        .context(|| format!("open {}", dir.display()))?
        .into();
    loop {
        match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(locked) => return is_same(&locked, dir).map(|()| locked),
            Err((back, errno)) => {
                if errno != nix::errno::Errno::EWOULDBLOCK {
                    return Err(Error::sys(format!("lock {}", dir.display()), errno));
                }
                if Instant::now() >= until {
                    return Err(Error::new(
                        Kind::Busy,
                        format!(
                            "lock {}: another process is undoing this pod; try again",
                            dir.display()
                        ),
                    ));
                }
                file = back;
            }
        }
        sleep(Duration::from_millis(50)).await;
    }
}

/// The socket file of a supervisor that was killed. The next one of the same id serves at the same path, and is often
/// the one that does this.
fn remove_socket(record: &Record) {
    let path = record.address.strip_prefix("unix://").map(Path::new);
    if let Some(path) = path.filter(|p| p.is_absolute() && !is_live(p)) {
        let _ = fs::remove_file(path);
    }
}

fn directories(root: &Path) -> Vec<std::path::PathBuf> {
    fs::read_dir(root)
        .map(|entries| {
            entries
                .flatten()
                .map(|e| e.path())
                .filter(|p| p.is_dir())
                .collect()
        })
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::container::{ExitRecord, Status};

    fn container(init: Option<Identity>, exit: Option<ExitRecord>) -> ContainerRecord {
        ContainerRecord {
            id: "c".into(),
            bundle: "/b".into(),
            runtime: "runc".into(),
            root: "/r".into(),
            systemd_cgroup: false,
            init,
            cgroup: None,
            rootfs_mounted: false,
            status: Status::Running,
            created_at: 0,
            parked_at: None,
            started_at: None,
            exit,
            oom_kills: 0,
            oom_limit: None,
            stdin: String::new(),
            stdout: String::new(),
            stderr: String::new(),
            terminal: false,
            logger: None,
        }
    }

    #[test]
    fn exit_on_record_is_told_as_it_is() {
        let told = outcome_of(&container(None, Some(ExitRecord { code: 5, at: 9 })));
        assert_eq!((told.exit_status, told.exited_at), (5, 9));
    }

    #[test]
    fn a_socket_somebody_listens_on_is_left() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let mut record = journal::blank("default", "p");
        record.address = format!("unix://{}", path.display());
        let next = std::os::unix::net::UnixListener::bind(&path).unwrap();
        remove_socket(&record);
        assert!(path.exists());
        drop(next);
        remove_socket(&record);
        assert!(!path.exists());
    }

    #[tokio::test]
    async fn the_lock_of_a_directory_that_was_removed_meanwhile_is_none() {
        let top = tempfile::tempdir().unwrap();
        let dir = top.path().join("p");
        fs::create_dir(&dir).unwrap();
        let held = lock(&dir, Duration::ZERO).await.unwrap();
        let waits = tokio::spawn({
            let dir = dir.clone();
            async move { lock(&dir, Duration::from_secs(5)).await }
        });
        sleep(Duration::from_millis(100)).await;
        // Its pod is gone, and a new one of the same id begins.
        fs::remove_dir(&dir).unwrap();
        fs::create_dir(&dir).unwrap();
        drop(held);
        assert_eq!(waits.await.unwrap().unwrap_err().kind(), Kind::NotFound);
    }

    #[test]
    fn exit_nobody_saw_is_an_explicit_unknown_never_zero() {
        let gone = Identity {
            pid: i32::MAX - 1,
            start_time: 1,
        };
        assert_eq!(
            outcome_of(&container(Some(gone), None)).exit_status,
            UNKNOWN
        );
    }
}
