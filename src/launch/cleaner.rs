//! Who cleans up for `delete`: asks a living supervisor, works from the record without one.
//!
//! Promises that a container's id touches that container only, and that a supervisor is killed only when it neither
//! leaves nor answers. Must never be used in the helper's own process before its fork.

use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use protobuf::MessageField;
use protobuf::well_known_types::timestamp::Timestamp;
use tokio::time::timeout;

use crate::client::removal::{Supervisor, Told};
use crate::client::{self, Client};
use crate::clock;
use crate::config::Config;
use crate::error::{Error, Kind, Result};
use crate::failpoint;
use crate::network::NetworkRecord;
use crate::pod::record::{self, Found, Record};
use crate::pod::{self, Deleted, Parked};
use crate::process::Reaper;
use crate::proto::sandbox::sandbox::PingRequest;
use crate::proto::task_v3::shim::{DeleteRequest, KillRequest, ShutdownRequest, WaitRequest};
use crate::proto::time::system_time;

/// What one step before the answer may take.
pub const STEP_LIMIT: Duration = Duration::from_millis(3500);

/// How long a supervisor that was asked to leave may take before its life is doubted.
const LEAVE_LIMIT: Duration = Duration::from_secs(10);

/// Undo after the answer: so many further tries, each this long. What is owed after that is on record.
const LATE_TRIES: u32 = 3;

const LATE_LIMIT: Duration = Duration::from_secs(60);

/// 128 + SIGKILL: how a process ends that nobody saw ending but we.
pub const KILLED: u32 = 137;

/// Whose the id is.
pub enum Owner {
    /// A pod of this id.
    Pod(Box<Record>),
    /// A container of this pod.
    Container(Box<Record>),
    /// No usable record says so; there may still be a supervisor that was never given anything.
    Unknown,
}

/// What came of asking a live supervisor.
pub enum Asked {
    /// It has done all there is to do.
    Done(Deleted),
    /// It said yes, or said nothing, and should go.
    Leaving(Deleted),
    /// It lives and did not do it.
    Failed(Error),
    /// There is none.
    Nobody,
}

/// One `delete`'s business with one id.
pub struct Cleaner<'a> {
    /// Settings.
    pub config: &'a Config,
    /// containerd namespace.
    pub namespace: &'a str,
    /// Sandbox or container id.
    pub id: &'a str,
    /// For the programs an undo runs.
    pub reaper: Reaper,
}

impl Cleaner<'_> {
    /// Looks the id up in the records.
    pub fn owner(&self) -> Owner {
        if let Ok(record) = record::read(&self.config.sandbox_dir(self.namespace, self.id)) {
            return Owner::Pod(Box::new(record));
        }
        let pods = record::list(self.config, Some(self.namespace));
        pods.into_iter()
            .find_map(|found| match found {
                Found::Record(record) if record.containers.contains_key(self.id) => {
                    Some(Owner::Container(record))
                }
                _ => None,
            })
            .unwrap_or(Owner::Unknown)
    }

    /// Asks the supervisor, if one lives, to do what `delete` is for.
    pub async fn ask(&self, owner: &Owner) -> Asked {
        let (record, whole) = match owner {
            Owner::Pod(record) => (record, true),
            Owner::Container(record) => (record, false),
            Owner::Unknown => return Asked::Nobody,
        };
        if !record.is_supervised() {
            return Asked::Nobody;
        }
        let is_keeper = || self.is_keeper(record);
        let supervisor = supervisor_of(record, &is_keeper);
        let told = match (whole, record.state) {
            (true, record::State::TaskOnly) => self.ask_group(&supervisor, record).await,
            (true, _) => self.ask_pod(&supervisor, record).await,
            (false, _) => self.ask_container(&supervisor, record).await,
        };
        match told {
            Told::Done(deleted) if whole => Asked::Leaving(deleted),
            Told::Done(deleted) => Asked::Done(deleted),
            // It knows nothing of the id: that is gone. Or it has gone itself, or is about to, having done what it was asked
            // for, with the journal; where that is still there, it tells.
            Told::Unknown(_) if whole => Asked::Leaving(self.last_known(record)),
            Told::Unknown(_) => Asked::Done(killed(0)),
            Told::Gone | Told::Deaf(_) if whole && !self.has_journal() => {
                Asked::Leaving(self.last_known(record))
            }
            Told::Gone => Asked::Nobody,
            Told::Deaf(_) if whole => match supervisor.kill().await {
                Ok(()) => Asked::Nobody,
                Err(e) => Asked::Failed(e),
            },
            // Whether one that does not answer still lives is up to `see_off`.
            Told::Failed(_) if whole => Asked::Leaving(self.last_known(record)),
            // A container is no reason to doubt the life of its pod.
            Told::Deaf(e) | Told::Failed(e) => Asked::Failed(e),
        }
    }

    /// Tells a supervisor without a record that it may go: it does when it was never given anything.
    pub async fn dismiss(&self, sockets: &[PathBuf]) {
        let request = ShutdownRequest {
            id: self.id.to_owned(),
            ..ShutdownRequest::default()
        };
        for path in sockets.iter().filter(|path| client::is_live(path)) {
            if let Ok(client) = Client::connect(&path.to_string_lossy()).await {
                // It may be at work on its first request just now; then it stays and answers for itself.
                let _ = client
                    .task()
                    .shutdown(client::context_within(STEP_LIMIT / 3), &request)
                    .await;
            }
        }
    }

    async fn ask_pod(&self, supervisor: &Supervisor<'_>, record: &Record) -> Told<Deleted> {
        let told = supervisor.shut_down(STEP_LIMIT).await;
        told.map(|()| self.last_known(record))
    }

    /// What the id's process ended with by its record; killed by what we have asked for, where that did not know.
    fn last_known(&self, record: &Record) -> Deleted {
        match record.containers.get(self.id) {
            Some(container) => Deleted {
                pid: self.init_of(record),
                exit_status: container.exit.map_or(KILLED, |exit| exit.code),
                exited_at: container.exit.map_or_else(now, |exit| exit.at),
            },
            None => Deleted {
                pid: u32::try_from(pid_of(record)).unwrap_or(0),
                exit_status: record.exit_status.unwrap_or(KILLED),
                exited_at: record.exited_at.unwrap_or_else(now),
            },
        }
    }

    /// Whether the pod is on record.
    pub fn has_journal(&self) -> bool {
        let dir = self.config.sandbox_dir(self.namespace, self.id);
        dir.join(record::FILE).exists()
    }

    /// The pod is a group of containers; the one called like the group goes, and the supervisor with the last.
    async fn ask_group(&self, supervisor: &Supervisor<'_>, record: &Record) -> Told<Deleted> {
        let deleted = match self.ask_container(supervisor, record).await {
            Told::Done(deleted) => deleted,
            Told::Unknown(_) => killed(0),
            other => return other,
        };
        let request = ShutdownRequest {
            id: self.id.to_owned(),
            ..ShutdownRequest::default()
        };
        let shut = supervisor.ask(STEP_LIMIT, async |client, left| {
            let task = client.task();
            let answer = task.shutdown(client::context_within(left), &request);
            answer
                .await
                .map_err(|e| client::from_ttrpc("shut down the task service", e))
        });
        match shut.await {
            // With its last container it had nothing to stay for.
            Told::Gone => Told::Done(deleted),
            told => told.map(|_| deleted),
        }
    }

    /// Kill, wait, delete: of this container alone.
    async fn ask_container(&self, supervisor: &Supervisor<'_>, record: &Record) -> Told<Deleted> {
        let id = || self.id.to_owned();
        let kill = KillRequest {
            id: id(),
            signal: libc::SIGKILL as u32,
            all: true,
            ..KillRequest::default()
        };
        let wait = WaitRequest {
            id: id(),
            ..WaitRequest::default()
        };
        let delete = DeleteRequest {
            id: id(),
            ..DeleteRequest::default()
        };
        let limit = STEP_LIMIT / 3;
        // Gone, ended or never started: the deletion tells.
        let _ = supervisor
            .ask(limit, async |client, left| {
                let task = client.task();
                let answer = task.kill(client::context_within(left), &kill);
                answer
                    .await
                    .map_err(|e| client::from_ttrpc("kill the container", e))
            })
            .await;
        let waited = supervisor
            .ask(limit, async |client, left| {
                let task = client.task();
                let answer = task.wait(client::context_within(left), &wait);
                let answer = answer
                    .await
                    .map_err(|e| client::from_ttrpc("wait for the container", e))?;
                Ok((answer.exit_status, nanos(&answer.exited_at)))
            })
            .await;
        let deleted = supervisor
            .ask(limit, async |client, left| {
                let task = client.task();
                let answer = task.delete(client::context_within(left), &delete);
                let answer = answer
                    .await
                    .map_err(|e| client::from_ttrpc("delete the container", e))?;
                Ok(Deleted {
                    pid: answer.pid,
                    exit_status: answer.exit_status,
                    exited_at: nanos(&answer.exited_at),
                })
            })
            .await;
        match (deleted, waited) {
            // Deleted by an earlier try whose answer was lost, or by somebody else: what it ended with is known.
            (Told::Unknown(_), Told::Done((exit_status, exited_at))) => Told::Done(Deleted {
                pid: self.init_of(record),
                exit_status,
                exited_at,
            }),
            (told, _) => told,
        }
    }

    fn init_of(&self, record: &Record) -> u32 {
        let init = record.containers.get(self.id).and_then(|c| c.init);
        init.map_or(0, |init| u32::try_from(init.pid).unwrap_or(0))
    }

    /// Waits until the supervisor has left; one that neither leaves nor answers is killed. False: it lives and answers,
    /// so it is at work and the pod is its business.
    pub async fn see_off(&self, owner: &Owner) -> bool {
        let (Owner::Pod(record) | Owner::Container(record)) = owner else {
            return true;
        };
        let is_keeper = || self.is_keeper(record);
        let supervisor = supervisor_of(record, &is_keeper);
        if supervisor.see_off(LEAVE_LIMIT).await {
            return true;
        }
        if record.state == record::State::TaskOnly || self.answers(&supervisor).await {
            return false;
        }
        supervisor.kill().await.is_ok()
    }

    /// It has let go of its pod and stays for a DEL that is still owed, or for a network that is parked.
    fn is_keeper(&self, record: &Record) -> bool {
        let network = self.network_of(record);
        let dir = self.config.sandbox_dir(&record.namespace, &record.id);
        let keeps = network.holder().is_some_and(|h| h.keeper) || !network.is_held();
        network.owes_del() && keeps && !dir.join(record::FILE).exists()
    }

    /// It may have begun, or been taken over, after the record was read.
    fn network_of(&self, record: &Record) -> NetworkRecord {
        let network = record.network_record(self.config);
        if network.dir().exists() {
            return network;
        }
        NetworkRecord::find(self.config, &record.namespace, &record.id)
    }

    async fn answers(&self, supervisor: &Supervisor<'_>) -> bool {
        let request = PingRequest {
            sandbox_id: self.id.to_owned(),
            ..PingRequest::default()
        };
        let ping = supervisor.ask(STEP_LIMIT, async |client, left| {
            let sandbox = client.sandbox();
            let answer = sandbox.ping_sandbox(client::context_within(left), &request);
            answer
                .await
                .map_err(|e| client::from_ttrpc("ping the supervisor", e))
        });
        match timeout(STEP_LIMIT * 2, ping).await {
            Ok(Told::Done(_) | Told::Unknown(_)) => true,
            // An answer is an answer, whatever it says.
            Ok(Told::Failed(e)) => e.kind() != Kind::Deadline,
            Ok(Told::Gone | Told::Deaf(_)) | Err(_) => false,
        }
    }

    /// Undoes from the record alone.
    pub async fn rescue(&self, budget: Duration) -> Result<Deleted> {
        failpoint::hit("delete.rescue.before")?;
        let (config, reaper, parked) = (self.config, &self.reaper, Parked::Stays);
        match pod::rescue(config, reaper, self.namespace, self.id, budget, parked).await {
            // What is owed is on record and is tried again below, and by `podvisor gc`; the daemon must not keep the
            // bundle for it.
            Err(e) if e.kind() == Kind::Busy => Ok(killed(0)),
            other => other,
        }
    }

    /// Tries again while something is left of the pod.
    pub async fn finish(&self) {
        for _ in 0..LATE_TRIES {
            if !self.config.sandbox_dir(self.namespace, self.id).exists() {
                break;
            }
            let _ = self.rescue(LATE_LIMIT).await;
        }
    }

    /// A parked network whose supervisor was killed has nobody else to keep it for its time. What cannot be undone then
    /// is on record, for `podvisor gc` and the next supervisor on the node.
    pub async fn keep_network(&self) {
        let (config, reaper) = (self.config, &self.reaper);
        let _ = pod::keep_abandoned(config, reaper, self.namespace, self.id).await;
    }
}

fn killed(pid: i32) -> Deleted {
    Deleted {
        pid: u32::try_from(pid).unwrap_or(0),
        exit_status: KILLED,
        exited_at: now(),
    }
}

fn supervisor_of<'a>(
    record: &'a Record,
    is_keeper: &'a (dyn Fn() -> bool + Sync),
) -> Supervisor<'a> {
    Supervisor {
        id: &record.id,
        name: &record.id,
        address: &record.address,
        process: record.supervisor,
        is_keeper,
    }
}

fn pid_of(record: &Record) -> i32 {
    record.infra.map_or(0, |infra| infra.pid)
}

/// Unix nanoseconds of a time on the wire; now, where there is none.
fn nanos(at: &MessageField<Timestamp>) -> u64 {
    at.as_ref()
        .and_then(system_time)
        .map_or_else(now, clock::unix_nanos)
}

fn now() -> u64 {
    clock::unix_nanos(SystemTime::now())
}
