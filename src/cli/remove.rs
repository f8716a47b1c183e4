//! Removing a pod: by its supervisor, and without one.
//!
//! Owns what comes after the supervisor (`client::removal`): rescue from the journal, directory, name. Promises that every
//! step may find its work done already, and that with force every pod can be removed. Must never delete across a mount: what is
//! mounted below a pod's directory is somebody's data.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::client;
use crate::client::removal::{Supervisor, Told};
use crate::error::{Error, Kind, Result};
use crate::failpoint;
use crate::launch;
use crate::network::NetworkRecord;
use crate::pod::gc::OwedNetwork;
use crate::pod::record::{self, Found, Record, State};
use crate::pod::{self, Parked};
use crate::process::Identity;
use crate::proto::sandbox::sandbox::ShutdownSandboxRequest;
use crate::proto::task_v3::shim::ConnectRequest;

use super::host::Host;
use super::supervisor::label;
use super::{names, output};

/// Seconds that containers get between SIGTERM and SIGKILL when a pod is removed by force.
const FORCED_GRACE: u32 = 1;

/// Longer than the 4 s after which a supervisor answers ShutdownSandbox and goes on detached.
const SHUTDOWN_LIMIT: Duration = Duration::from_secs(15);

/// How long a supervisor may take from its last reply to its end.
const LEAVE_LIMIT: Duration = Duration::from_secs(3);

/// How long what fails is retried when there is no supervisor, as long as that would. Each try has its own bound.
const RESCUE_BUDGET: Duration = Duration::from_secs(5);

/// Pause between two looks at whether a supervisor has left.
const LOOK_AGAIN: Duration = Duration::from_millis(20);

/// What StopSandbox may take on top of the grace and of one DEL.
const STOP_MARGIN: Duration = Duration::from_secs(30);

/// How long a supervisor that nobody reaches may take to stop its pod after SIGTERM: the grace that containers have when
/// nobody names one, and one DEL, on top.
const TERMINATE_GRACE: Duration = Duration::from_secs(10);

/// Stops the pod: synchronous, idempotent, bounded. With a supervisor that is dead, or that nobody reaches any more, from
/// its journal.
///
/// # Errors
/// `Busy`, "network clean-up pending", while a DEL fails; NotFound for what is no pod of ours.
pub async fn stop(host: &Host, record: &Record, grace: u32) -> Result<()> {
    let del = host.config.del_timeout();
    let limit = Duration::from_secs(u64::from(grace)) + del + STOP_MARGIN;
    let is_keeper = || is_keeper(host, record);
    let supervisor = supervisor_of(record, &is_keeper);
    match supervisor.stop(grace, limit).await {
        Told::Done(()) => return Ok(()),
        Told::Unknown(e) | Told::Failed(e) => return Err(e),
        Told::Gone => {}
        Told::Deaf(e) => {
            output::complain(format!(
                "{e}; its supervisor lives and nobody reaches it: telling it to stop by a signal"
            ));
            let limit = TERMINATE_GRACE + del + STOP_MARGIN;
            if !supervisor.terminate(limit).await? {
                supervisor.kill().await?;
            }
        }
    }
    stop_without(host, record).await
}

/// Stops a pod whose supervisor has ended, from its journal; its record stays until it is removed.
pub async fn stop_without(host: &Host, record: &Record) -> Result<()> {
    let (config, reaper) = (&host.config, host.reaper().await?);
    let stopped = pod::stop_dead(config, reaper, &host.namespace, &record.id, RESCUE_BUDGET).await;
    match stopped {
        // Somebody has removed it meanwhile.
        Err(e) if e.is_gone() => Ok(()),
        other => other.map_err(|e| e.within(format!("stop pod {}", label(record)))),
    }
}

fn supervisor_of<'a>(
    record: &'a Record,
    is_keeper: &'a (dyn Fn() -> bool + Sync),
) -> Supervisor<'a> {
    Supervisor {
        id: &record.id,
        name: label(record),
        address: &record.address,
        process: record.supervisor,
        is_keeper,
    }
}

/// It has let go of its pod and stays for a DEL that is still owed: it has closed its socket and needs nothing of ours.
fn is_keeper(host: &Host, record: &Record) -> bool {
    let network = record.network_record(&host.config);
    network.owes_del() && !network.is_held()
}

/// Removes a pod that is known to be removable (see [`check`]), or any pod with `force`.
/// `parked`: what becomes of a network that waits for the pod's next supervisor.
pub async fn pod(host: &Host, found: &Found, force: bool, parked: Parked) -> Result<()> {
    let (id, name) = match found {
        Found::Record(record) => {
            if record.is_supervised() {
                by_supervisor(host, record, force).await?;
            }
            (record.id.as_str(), Some(record.name.clone()))
        }
        Found::Broken { id, .. } => {
            dismiss(host, id).await?;
            (id.as_str(), names::of(host, id))
        }
    };
    if host.pod_dir(id).join(record::FILE).exists() || matches!(found, Found::Broken { .. }) {
        let undone = from_journal(host, id, force, parked).await;
        // Nothing but the network's own record is left: it is listed by that, and the rest must not stand in its way.
        if undone.is_err()
            && !host.pod_dir(id).join(record::FILE).exists()
            && owes(&network_of(host, found), parked)
        {
            forget(host, id, name.as_deref()).await?;
        }
        undone?;
    }
    owed(&network_of(host, found), id, force, parked)?;
    forget(host, id, name.as_deref()).await
}

/// The record of its network. Where the journal tells its place no other is looked at: there may be thousands.
fn network_of(host: &Host, found: &Found) -> NetworkRecord {
    match found {
        Found::Record(r) if !r.network.ours || !r.network.place.is_empty() => {
            r.network_record(&host.config)
        }
        Found::Record(r) => NetworkRecord::find(&host.config, &host.namespace, &r.id),
        Found::Broken { id, .. } => NetworkRecord::find(&host.config, &host.namespace, id),
    }
}

/// A pod that lives without its runtime directory; by force.
pub async fn astray(host: &Host, pod: &OwedNetwork) -> Result<()> {
    from_journal(host, &pod.id, true, Parked::Undone).await?;
    owed(&pod.record, &pod.id, true, Parked::Undone)?;
    forget(host, &pod.id, Some(&pod.holder.name)).await
}

/// What a creation that failed has left: the same, by force, whatever state it is in.
pub async fn unfinished(host: &Host, id: &str, name: &str) -> Result<()> {
    let dir = host.pod_dir(id);
    match record::read(&dir) {
        Ok(record) => pod(host, &Found::Record(Box::new(record)), true, Parked::Undone).await,
        // No supervisor got far enough to write a journal.
        Err(e) if e.is_gone() => forget(host, id, Some(name)).await,
        Err(e) => {
            let found = Found::Broken {
                namespace: host.namespace.clone(),
                id: id.to_owned(),
                reason: e.to_string(),
            };
            pod(host, &found, true, Parked::Undone).await
        }
    }
}

/// Without force only what has ended may be removed.
pub fn check(host: &Host, found: &Found) -> Result<()> {
    let refuse = |name: &str, why: &str| {
        Err(Error::new(
            Kind::State,
            format!("remove pod {name}: {why}, or remove it by force with `podvisor rm -f {name}`"),
        ))
    };
    match found {
        Found::Broken { id, .. } => refuse(
            &names::of(host, id).unwrap_or_else(|| id.clone()),
            "its record cannot be read, so that it is not known whether it runs: look at it",
        ),
        Found::Record(r) if !r.is_supervised() => Ok(()),
        Found::Record(r) => match r.state {
            State::Ready | State::TaskOnly => refuse(
                label(r),
                &format!(
                    "it is running: stop it first with `podvisor stop {}`",
                    label(r)
                ),
            ),
            State::Starting | State::Parked => refuse(label(r), "it is being made: wait"),
            State::Created | State::NotReady | State::Stopped => Ok(()),
        },
    }
}

/// By its supervisor; afterwards that is out of the way, and what it has left is in its journal.
async fn by_supervisor(host: &Host, record: &Record, force: bool) -> Result<()> {
    let is_keeper = || is_keeper(host, record);
    let supervisor = supervisor_of(record, &is_keeper);
    // Shutdown never fails for a DEL that is owed; a removal without force has to, so it asks for the DEL first.
    if record.state != State::Stopped || record.network.pending.is_some() {
        let limit = Duration::from_secs(u64::from(FORCED_GRACE));
        let limit = limit + host.config.del_timeout() + STOP_MARGIN;
        match supervisor.stop(FORCED_GRACE, limit).await {
            Told::Failed(e) if !force => return Err(e),
            Told::Gone => return Ok(()),
            Told::Deaf(e) => return end(&supervisor, &e).await,
            // Shutdown is next, and stops for itself.
            Told::Done(()) | Told::Unknown(_) | Told::Failed(_) => {}
        }
    }
    failpoint::hit("cli.shutdown.before")?;
    let told = supervisor.shut_down(SHUTDOWN_LIMIT).await;
    failpoint::hit("cli.shutdown.after")?;
    match told {
        // What stays longer is at work detached, and refuses to have its journal touched.
        Told::Done(()) | Told::Unknown(_) => {
            supervisor.see_off(LEAVE_LIMIT).await;
            Ok(())
        }
        Told::Gone => Ok(()),
        // It is leaving, and takes its time to tell a daemon what has ended.
        Told::Deaf(_) if !host.pod_dir(&record.id).join(record::FILE).exists() => {
            supervisor.see_off(LEAVE_LIMIT).await;
            Ok(())
        }
        Told::Failed(e) if !force => Err(e),
        Told::Failed(e) | Told::Deaf(e) => end(&supervisor, &e).await,
    }
}

async fn end(supervisor: &Supervisor<'_>, why: &Error) -> Result<()> {
    output::complain(format!(
        "{why}; ending its supervisor (pid {}) and working from its journal",
        supervisor.process.map_or(0, |process| process.pid)
    ));
    supervisor.kill().await
}

/// The supervisor of a pod whose record cannot be read may live; nobody else tells it to go.
async fn dismiss(host: &Host, id: &str) -> Result<()> {
    let Some(socket) = own_socket(host, &host.pod_dir(id)).filter(|s| client::is_live(s)) else {
        return Ok(());
    };
    let request = ShutdownSandboxRequest {
        sandbox_id: id.to_owned(),
        ..Default::default()
    };
    let address = socket.to_string_lossy();
    let process = process_of(&address, id).await;
    let answer = client::retry_closed(&address, |client| {
        let request = request.clone();
        async move {
            let answer = client
                .sandbox()
                .shutdown_sandbox(client::context(Some(SHUTDOWN_LIMIT)), &request)
                .await;
            answer
                .map(drop)
                .map_err(|e| client::from_ttrpc("shut down its supervisor", e))
        }
    })
    .await;
    match answer {
        Err(e) if !ended(&e) => return Err(e.within(format!("remove pod {id}"))),
        _ => {}
    }
    let end = Instant::now() + LEAVE_LIMIT;
    while client::is_live(&socket) && Instant::now() < end {
        tokio::time::sleep(LOOK_AGAIN).await;
    }
    // Its socket goes before it does.
    if let Some(process) = process {
        process
            .wait_gone(end.saturating_duration_since(Instant::now()))
            .await;
    }
    Ok(())
}

/// The supervisor that listens there, by its own word.
async fn process_of(address: &str, id: &str) -> Option<Identity> {
    let request = ConnectRequest {
        id: id.to_owned(),
        ..Default::default()
    };
    let client = client::Client::connect(address).await.ok()?;
    let context = client::context(Some(SHUTDOWN_LIMIT));
    let answer = client.task().connect(context, &request).await.ok()?;
    Identity::of(answer.shim_pid.try_into().ok()?).ok()
}

/// The supervisor has died, or left without forgetting everything.
async fn from_journal(host: &Host, id: &str, force: bool, parked: Parked) -> Result<()> {
    match pod::rescue(
        &host.config,
        host.reaper().await?,
        &host.namespace,
        id,
        RESCUE_BUDGET,
        parked,
    )
    .await
    {
        Ok(_) => Ok(()),
        Err(e) if e.is_gone() => Ok(()),
        Err(e) if force => {
            output::complain(format!("clean up pod {id}: {e}"));
            Ok(())
        }
        Err(e) => Err(e.within(format!("clean up pod {id}"))),
    }
}

/// A DEL that is still owed is on record beside the pod and survives it.
fn owed(network: &NetworkRecord, id: &str, force: bool, parked: Parked) -> Result<()> {
    if !owes(network, parked) {
        return Ok(());
    }
    let what = format!(
        "remove pod {id}: network clean-up pending, see {}",
        network.dir().display()
    );
    if !force {
        return Err(Error::new(
            Kind::Busy,
            format!("{what}; try again, or remove the rest now with `podvisor rm -f {id}`"),
        ));
    }
    output::complain(format!(
        "{what}; the pod is gone, its addresses are not free until that has been done: it is retried, `podvisor rm` hurries it"
    ));
    Ok(())
}

fn owes(network: &NetworkRecord, parked: Parked) -> bool {
    let stays = parked == Parked::Stays && network.holder().is_some_and(|h| h.is_kept());
    network.owes_del() && !stays
}

/// Directory last but one, name last.
async fn forget(host: &Host, id: &str, name: Option<&str>) -> Result<()> {
    let dir = host.pod_dir(id);
    if let Some(mount) = mount_below(&dir)? {
        return Err(Error::new(
            Kind::State,
            format!(
                "remove {}: {mount} is still mounted in it; unmount that and try again",
                dir.display()
            ),
        ));
    }
    failpoint::hit("cli.socket.before")?;
    remove_socket(host, id).await;
    failpoint::hit("cli.directory.before")?;
    match fs::remove_dir_all(&dir) {
        Ok(()) => {}
        Err(e) if e.kind() == io::ErrorKind::NotFound => {}
        Err(e) => return Err(Error::io(format!("remove {}", dir.display()), e)),
    }
    failpoint::hit("cli.name-release.before")?;
    match name {
        Some(name) if !name.is_empty() => names::release(host, name, id),
        _ => Ok(()),
    }
}

/// The socket of a supervisor that was killed, whatever of its record there is. One that has just got the signal, or whose
/// helper was killed and which is about to leave, still listens for a moment: it is waited for.
async fn remove_socket(host: &Host, id: &str) {
    let end = Instant::now() + LEAVE_LIMIT;
    loop {
        match launch::remove_own_socket(&host.config, &host.namespace, id) {
            Ok(false) if Instant::now() < end => tokio::time::sleep(LOOK_AGAIN).await,
            _ => return,
        }
    }
}

/// `start` has left the address in the bundle; only one in our own directory of sockets is believed.
fn own_socket(host: &Host, dir: &Path) -> Option<PathBuf> {
    let address = fs::read_to_string(dir.join("bundle").join("address")).ok()?;
    let path = PathBuf::from(client::path_of(address.trim()));
    (path.parent() == Some(&host.config.runtime_root.join("s"))).then_some(path)
}

fn mount_below(dir: &Path) -> Result<Option<String>> {
    let table = fs::read_to_string("/proc/self/mountinfo")
        .map_err(|e| Error::io("read /proc/self/mountinfo", e))?;
    let root = format!("{}/", dir.display());
    // Field 5 is the mount point; ids hold nothing that the kernel would escape.
    let mut points = table.lines().filter_map(|l| l.split(' ').nth(4));
    Ok(points.find(|p| p.starts_with(&root)).map(str::to_owned))
}

/// The other side is not there any more, or knows the pod no more.
fn ended(error: &Error) -> bool {
    matches!(error.kind(), Kind::NotFound | Kind::Gone)
}
