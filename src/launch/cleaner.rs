//! Who cleans up for `delete`: asks a living supervisor, works from the record without one.
//!
//! Promises that a container's id touches that container only, and that a supervisor is killed only when it neither
//! leaves nor answers. Must never be used in the helper's own process before its fork.

use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use tokio::time::{Instant, timeout};

use crate::client::{self, Client};
use crate::clock;
use crate::config::Config;
use crate::error::{Error, Kind, Result};
use crate::failpoint;
use crate::network::NetworkRecord;
use crate::pod::record::{self, Found, Record};
use crate::pod::{self, Deleted, Parked};
use crate::process::Reaper;
use crate::proto::sandbox::sandbox::{PingRequest, ShutdownSandboxRequest};
use crate::proto::task_v3::shim::{DeleteRequest, KillRequest, ShutdownRequest, WaitRequest};
use crate::proto::time::system_time;

/// What one step before the answer may take.
pub const STEP_LIMIT: Duration = Duration::from_millis(3500);

/// How long a supervisor that was asked to leave may take before its life is doubted.
const LEAVE_LIMIT: Duration = Duration::from_secs(10);

/// How often it is looked whether it has become a keeper.
const LEAVE_POLL: Duration = Duration::from_millis(100);

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
        let done = if whole {
            self.ask_pod(record).await
        } else {
            self.ask_container(&record.address).await
        };
        match done {
            Ok(deleted) if whole => Asked::Leaving(deleted),
            Ok(deleted) => Asked::Done(deleted),
            // Whether one that does not answer still lives is up to `see_off`.
            Err(_) if whole => Asked::Leaving(killed(record.infra.map_or(0, |infra| infra.pid))),
            Err(e) if e.kind() == Kind::Gone => {
                // It is ending, with its container; what is left of that is on record.
                if let Some(supervisor) = record.supervisor {
                    supervisor.wait_gone(STEP_LIMIT / 3).await;
                }
                Asked::Nobody
            }
            // A container is no reason to doubt the life of its pod.
            Err(e) => Asked::Failed(e),
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

    async fn ask_pod(&self, record: &Record) -> Result<Deleted> {
        if record.state == record::State::TaskOnly {
            // The pod is a group of containers; the one called like the group goes, and the supervisor with the last.
            let deleted = self.ask_container(&record.address).await?;
            let request = ShutdownRequest {
                id: self.id.to_owned(),
                ..ShutdownRequest::default()
            };
            let client = Client::connect(&record.address).await?;
            let shut = client
                .task()
                .shutdown(client::context_within(STEP_LIMIT), &request)
                .await;
            return shut
                .map(|_| deleted)
                .map_err(|e| client::from_ttrpc("shut down the task service", e));
        }
        let request = ShutdownSandboxRequest {
            sandbox_id: self.id.to_owned(),
            ..ShutdownSandboxRequest::default()
        };
        let client = Client::connect(&record.address).await?;
        let shut = client
            .sandbox()
            .shutdown_sandbox(client::context_within(STEP_LIMIT), &request)
            .await;
        shut.map_err(|e| client::from_ttrpc("shut down the sandbox", e))?;
        Ok(Deleted {
            pid: record
                .infra
                .and_then(|infra| u32::try_from(infra.pid).ok())
                .unwrap_or(0),
            exit_status: record.exit_status.unwrap_or(KILLED),
            exited_at: record.exited_at.unwrap_or_else(now),
        })
    }

    /// Kill, wait, delete: of this container alone.
    async fn ask_container(&self, address: &str) -> Result<Deleted> {
        let client = Client::connect(address).await?;
        let task = client.task();
        let limit = || client::context_within(STEP_LIMIT / 3);
        let id = || self.id.to_owned();
        let kill = KillRequest {
            id: id(),
            signal: libc::SIGKILL as u32,
            all: true,
            ..KillRequest::default()
        };
        // Gone, ended or never started: the deletion tells.
        let _ = task.kill(limit(), &kill).await;
        let _ = task
            .wait(
                limit(),
                &WaitRequest {
                    id: id(),
                    ..WaitRequest::default()
                },
            )
            .await;
        match task
            .delete(
                limit(),
                &DeleteRequest {
                    id: id(),
                    ..DeleteRequest::default()
                },
            )
            .await
        {
            Ok(response) => Ok(Deleted {
                pid: response.pid,
                exit_status: response.exit_status,
                exited_at: response
                    .exited_at
                    .as_ref()
                    .and_then(system_time)
                    .map_or_else(now, clock::unix_nanos),
            }),
            Err(e) => match client::from_ttrpc("delete the container", e) {
                gone if gone.is_gone() => Ok(killed(0)),
                other => Err(other),
            },
        }
    }

    /// Waits until the supervisor has left; one that neither leaves nor answers is killed. False: it lives and answers,
    /// so it is at work and the pod is its business.
    pub async fn see_off(&self, owner: &Owner) -> bool {
        let (Owner::Pod(record) | Owner::Container(record)) = owner else {
            return true;
        };
        let Some(supervisor) = record.supervisor else {
            return true;
        };
        let end = Instant::now() + LEAVE_LIMIT;
        while !supervisor.wait_gone(LEAVE_POLL).await {
            if self.is_keeper(record) {
                return true;
            }
            if Instant::now() >= end {
                break;
            }
        }
        if !supervisor.is_alive() {
            return true;
        }
        if record.state == record::State::TaskOnly || self.answers(&record.address).await {
            return false;
        }
        let _ = supervisor.signal(libc::SIGKILL);
        supervisor.wait_gone(LEAVE_LIMIT).await
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

    async fn answers(&self, address: &str) -> bool {
        let request = PingRequest {
            sandbox_id: self.id.to_owned(),
            ..PingRequest::default()
        };
        let ping = async {
            let client = Client::connect(address).await?;
            let pong = client
                .sandbox()
                .ping_sandbox(client::context_within(STEP_LIMIT), &request)
                .await;
            pong.map(drop)
                .map_err(|e| client::from_ttrpc("ping the supervisor", e))
        };
        match timeout(STEP_LIMIT, ping).await {
            Ok(Ok(())) => true,
            // An answer is an answer, whatever it says.
            Ok(Err(e)) => !matches!(e.kind(), Kind::Gone | Kind::Deadline),
            Err(_) => false,
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

fn now() -> u64 {
    clock::unix_nanos(SystemTime::now())
}
