//! `delete`: the daemon's clean-up after a supervisor that is gone, is going, or should go.
//!
//! Promises an answer within [`ANSWER_LIMIT`], a `DeleteResponse` on standard output, success when nothing is left,
//! and that a container's id touches that container only. The work is done by a child that holds no pipe of the
//! daemon's, so what takes longer goes on after the answer. Works from the flags and the state directory alone: the
//! working directory and the bundle may be gone.

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant, SystemTime};

use nix::fcntl::OFlag;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::unistd::{dup2_stderr, dup2_stdin, dup2_stdout, pipe2};
use protobuf::Message;
use tokio::runtime::Builder;
use tokio::time::timeout;

use crate::client::{self, Client};
use crate::clock;
use crate::config::Config;
use crate::error::{Context, Error, Kind, Result};
use crate::launch::flags::Flags;
use crate::launch::{answer, socket};
use crate::pod::record::{self, Found, Record};
use crate::pod::{self, Deleted};
use crate::process::Reaper;
use crate::proto::sandbox::sandbox::{PingRequest, ShutdownSandboxRequest};
use crate::proto::task_v3::shim::{
    DeleteRequest, DeleteResponse, KillRequest, ShutdownRequest, WaitRequest,
};
use crate::proto::time::{system_time, timestamp};
use crate::sys;
use crate::sys::fork::{Fork, fork};

/// The daemon kills us after 5 s; it has its answer before.
const ANSWER_LIMIT: Duration = Duration::from_secs(4);

/// What one step before the answer may take.
const STEP_LIMIT: Duration = Duration::from_millis(3500);

/// How long a supervisor that was asked to leave may take before its life is doubted.
const LEAVE_LIMIT: Duration = Duration::from_secs(10);

/// Undo after the answer: so many further tries, each this long. What is owed after that is on record.
const LATE_TRIES: u32 = 3;
const LATE_LIMIT: Duration = Duration::from_secs(60);

/// 128 + SIGKILL: how a process ends that nobody saw ending but we.
const KILLED: u32 = 137;

/// First byte of the child's word: an answer, or an error's text.
const ANSWER: u8 = b'\x06';

/// Cleans up and answers.
pub fn run(flags: &Flags) -> Result<ExitCode> {
    let config = Config::load()?;
    let (read, write) = pipe2(OFlag::O_CLOEXEC).context(|| "make a pipe")?;
    match fork().context(|| "fork the one who cleans up")? {
        Fork::Child => {
            drop(read);
            work(&config, flags, write);
            Ok(ExitCode::SUCCESS)
        }
        Fork::Parent(_) => {
            drop(write);
            let response = hear(read)?;
            answer(&response)?;
            Ok(ExitCode::SUCCESS)
        }
    }
}

/// Waits for the child's word; when it takes too long the work is handed over and the answer is what can be said.
fn hear(pipe: OwnedFd) -> Result<Vec<u8>> {
    let end = Instant::now() + ANSWER_LIMIT;
    let mut pipe = File::from(pipe);
    let mut word = Vec::new();
    loop {
        let left = PollTimeout::try_from(end.saturating_duration_since(Instant::now()))
            .unwrap_or(PollTimeout::MAX);
        match poll(&mut [PollFd::new(pipe.as_fd(), PollFlags::POLLIN)], left) {
            Err(nix::errno::Errno::EINTR) => continue,
            Err(e) => return Err(Error::sys("wait for the one who cleans up", e)),
            Ok(0) => {
                return encode(Deleted {
                    exit_status: KILLED,
                    ..Deleted::default()
                });
            }
            Ok(_) => {}
        }
        let mut chunk = [0; 4096];
        match pipe
            .read(&mut chunk)
            .context(|| "read the result of cleaning up")?
        {
            0 => break,
            n => word.extend_from_slice(&chunk[..n]),
        }
    }
    match word.split_first() {
        Some((&ANSWER, response)) => Ok(response.to_vec()),
        Some((_, text)) => Err(Error::new(Kind::Other, String::from_utf8_lossy(text))),
        None => Err(Error::new(
            Kind::Other,
            "clean up: the one who did it was killed; run delete again",
        )),
    }
}

/// The child: detached from everything of the daemon's, it answers through the pipe and then finishes.
fn work(config: &Config, flags: &Flags, pipe: OwnedFd) {
    if detach(&pipe).is_err() {
        // The pipe closes without a word, which the parent tells.
        return;
    }
    let Ok(runtime) = Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(2)
        .build()
    else {
        return;
    };
    let mut pipe = Some(pipe);
    let mut tell = |result: Result<Deleted>| {
        let word = match result.and_then(encode) {
            Ok(bytes) => [&[ANSWER], bytes.as_slice()].concat(),
            Err(e) => format!("!{e}").into_bytes(),
        };
        if let Some(pipe) = pipe.take() {
            // The parent may have answered in our stead.
            let _ = File::from(pipe).write_all(&word);
        }
    };
    runtime.block_on(async {
        let cleaner = match Reaper::start() {
            Ok(reaper) => Cleaner {
                config,
                namespace: &flags.namespace,
                id: &flags.id,
                reaper,
            },
            Err(e) => return tell(Err(e)),
        };
        let owner = cleaner.owner();
        let sockets = sockets(config, flags, &owner);
        if matches!(owner, Owner::Unknown) {
            cleaner.dismiss(&sockets).await;
        }
        match cleaner.ask(&owner).await {
            Asked::Done(deleted) => return tell(Ok(deleted)),
            Asked::Leaving(deleted) => {
                tell(Ok(deleted));
                if !cleaner.see_off(&owner).await {
                    return;
                }
                // What it left undone is undone below; usually nothing.
                let _ = cleaner.rescue(STEP_LIMIT).await;
            }
            Asked::Nobody => tell(cleaner.rescue(STEP_LIMIT).await),
        }
        cleaner.finish().await;
        for path in &sockets {
            let _ = socket::remove_dead(path);
        }
    });
    runtime.shutdown_background();
}

fn detach(pipe: &OwnedFd) -> Result<()> {
    sys::fork::new_session().context(|| "start a session")?;
    sys::fd::close_from(&[pipe.as_raw_fd()]);
    let null = OpenOptions::new()
        .read(true)
        .write(true)
        .open("/dev/null")
        .context(|| "open /dev/null")?;
    dup2_stdin(&null).context(|| "put /dev/null on standard input")?;
    dup2_stdout(&null).context(|| "put /dev/null on standard output")?;
    dup2_stderr(&null).context(|| "put /dev/null on standard error")
}

/// Whose the id is.
enum Owner {
    /// A pod of this id.
    Pod(Box<Record>),
    /// A container of this pod.
    Container(Box<Record>),
    /// No usable record says so; there may still be a supervisor that was never given anything.
    Unknown,
}

/// What came of asking a live supervisor.
enum Asked {
    /// It has done all there is to do.
    Done(Deleted),
    /// It said yes, or said nothing, and should go.
    Leaving(Deleted),
    /// There is none.
    Nobody,
}

struct Cleaner<'a> {
    config: &'a Config,
    namespace: &'a str,
    id: &'a str,
    reaper: Reaper,
}

impl Cleaner<'_> {
    fn owner(&self) -> Owner {
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
    async fn ask(&self, owner: &Owner) -> Asked {
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
            // A supervisor that does not answer: for a pod the rest is up to `see_off`; a container alone is no reason
            // to doubt the life of its pod.
            Err(_) if whole => Asked::Leaving(killed(record.infra.map_or(0, |infra| infra.pid))),
            Err(_) => Asked::Done(killed(0)),
        }
    }

    /// Tells a supervisor without a record that it may go: it does when it was never given anything.
    async fn dismiss(&self, sockets: &[PathBuf]) {
        let request = ShutdownRequest {
            id: self.id.to_owned(),
            ..ShutdownRequest::default()
        };
        for path in sockets.iter().filter(|path| client::is_live(path)) {
            if let Ok(client) = Client::connect(&path.to_string_lossy()).await {
                // It may be at work on its first request just now; then it stays and answers for itself.
                let _ = client
                    .task()
                    .shutdown(client::context(Some(STEP_LIMIT / 3)), &request)
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
                .shutdown(client::context(Some(STEP_LIMIT)), &request)
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
            .shutdown_sandbox(client::context(Some(STEP_LIMIT)), &request)
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
        let limit = || client::context(Some(STEP_LIMIT / 3));
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
    async fn see_off(&self, owner: &Owner) -> bool {
        let (Owner::Pod(record) | Owner::Container(record)) = owner else {
            return true;
        };
        let Some(supervisor) = record.supervisor else {
            return true;
        };
        if supervisor.wait_gone(LEAVE_LIMIT).await {
            return true;
        }
        if record.state == record::State::TaskOnly || self.answers(&record.address).await {
            return false;
        }
        let _ = supervisor.signal(libc::SIGKILL);
        supervisor.wait_gone(LEAVE_LIMIT).await
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
                .ping_sandbox(client::context(Some(STEP_LIMIT)), &request)
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

    async fn rescue(&self, budget: Duration) -> Result<Deleted> {
        match pod::rescue(self.config, &self.reaper, self.namespace, self.id, budget).await {
            // What is owed is on record and is tried again below, and by `podvisor gc`; the daemon must not keep the
            // bundle for it.
            Err(e) if e.kind() == Kind::Busy => Ok(killed(0)),
            other => other,
        }
    }

    /// Tries again while something is left of the pod.
    async fn finish(&self) {
        for _ in 0..LATE_TRIES {
            if !self.config.sandbox_dir(self.namespace, self.id).exists() {
                return;
            }
            let _ = self.rescue(LATE_LIMIT).await;
        }
    }
}

/// Where a socket of this id may lie: on record, at the daemon's hash, behind the bundle's link, at our own hash.
fn sockets(config: &Config, flags: &Flags, owner: &Owner) -> Vec<PathBuf> {
    let at = |dir: Option<&Path>, address: &str| {
        socket::path(config, dir, address, &flags.namespace, &flags.id)
    };
    let mut paths = vec![at(None, &flags.address), at(None, "")];
    if let Owner::Pod(record) = owner {
        paths.push(PathBuf::from(client::path_of(&record.address)));
    }
    if Path::new(&flags.bundle).is_absolute()
        && let Ok(dir) = fs::read_link(Path::new(&flags.bundle).join("s"))
    {
        paths.push(at(Some(&dir), &flags.address));
    }
    paths.retain(|path| path.is_absolute());
    paths
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

fn encode(deleted: Deleted) -> Result<Vec<u8>> {
    // 0 is "unknown": the daemon shows this time to people, and 1970 tells them nothing.
    let at = if deleted.exited_at == 0 {
        now()
    } else {
        deleted.exited_at
    };
    let response = DeleteResponse {
        pid: deleted.pid,
        exit_status: deleted.exit_status,
        exited_at: Some(timestamp(clock::from_unix_nanos(at))).into(),
        ..DeleteResponse::default()
    };
    response
        .write_to_bytes()
        .map_err(|e| Error::caused(Kind::Other, "encode the answer of delete", e))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_always_has_a_time() {
        let response =
            DeleteResponse::parse_from_bytes(&encode(Deleted::default()).unwrap()).unwrap();
        assert!(response.exited_at.seconds > 1_600_000_000);
        let known = Deleted {
            pid: 7,
            exit_status: 3,
            exited_at: 5_000_000_001,
        };
        let response = DeleteResponse::parse_from_bytes(&encode(known).unwrap()).unwrap();
        assert_eq!(
            (
                response.pid,
                response.exit_status,
                response.exited_at.seconds
            ),
            (7, 3, 5)
        );
    }

    #[test]
    fn every_place_of_a_socket_is_known_once_the_bundle_tells() {
        let dir = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink("/run/elsewhere", dir.path().join("s")).unwrap();
        let flags = Flags {
            namespace: "n".into(),
            id: "x".into(),
            address: "/run/c.sock".into(),
            bundle: dir.path().display().to_string(),
            ..Flags::default()
        };
        let config = Config::default();
        let paths = sockets(&config, &flags, &Owner::Unknown);
        let dirs: Vec<_> = paths.iter().filter_map(|p| p.parent()).collect();
        for wanted in ["/run/containerd/s", "/run/podvisor/s", "/run/elsewhere"] {
            assert!(dirs.contains(&Path::new(wanted)), "{wanted}");
        }
    }
}
