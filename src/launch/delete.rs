//! `delete`: the daemon's clean-up after a supervisor that is gone, is going, or should go.
//!
//! Promises an answer within [`ANSWER_LIMIT`], a `DeleteResponse` on standard output, success when nothing is left,
//! and that a container's id touches that container only. The work is done by a child that holds no pipe of the
//! daemon's, so what takes longer goes on after the answer. Works from the flags and the state directory alone: the
//! working directory and the bundle may be gone.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant, SystemTime};

use nix::fcntl::OFlag;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::unistd::pipe2;
use protobuf::Message;
use tokio::runtime::Builder;
use tokio::time::sleep;

use crate::client;
use crate::clock;
use crate::config::Config;
use crate::error::{Context, Error, Kind, Result};
use crate::failpoint;
use crate::launch::cleaner::{Asked, Cleaner, KILLED, Owner, STEP_LIMIT};
use crate::launch::flags::Flags;
use crate::launch::{answer, socket};
use crate::pod::Deleted;
use crate::process::{Reaper, detach};
use crate::proto::task_v3::shim::DeleteResponse;
use crate::proto::time::timestamp;
use crate::sys::fork::{Fork, fork};

/// The daemon kills us after 5 s; it has its answer before.
const ANSWER_LIMIT: Duration = Duration::from_secs(4);

/// How long a fork may take to close what it has inherited, on a machine that gives it no processor time.
const INHERITED_LIMIT: Duration = Duration::from_secs(2);
const INHERITED_LOOK: Duration = Duration::from_millis(50);

/// First byte of the child's word: an answer, or an error's text.
const ANSWER: u8 = b'\x06';

/// Cleans up and answers.
pub fn run(flags: &Flags) -> Result<ExitCode> {
    let config = Config::load()?;
    let (read, write) = pipe2(OFlag::O_CLOEXEC).context(|| "make a pipe")?;
    failpoint::hit("delete.fork.before")?;
    match fork().context(|| "fork the one who cleans up")? {
        Fork::Child => {
            drop(read);
            work(&config, flags, write);
            Ok(ExitCode::SUCCESS)
        }
        Fork::Parent(_) => {
            drop(write);
            failpoint::hit("delete.fork.after")?;
            let response = hear(read)?;
            failpoint::hit("delete.answer.before")?;
            answer(&response)?;
            failpoint::hit("delete.answer.after")?;
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
    if detach(&[pipe.as_raw_fd()], || None).is_err() {
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
        failpoint::pass("delete.ask.before");
        let owner = cleaner.owner();
        let sockets = sockets(config, flags, &owner);
        if matches!(owner, Owner::Unknown) {
            cleaner.dismiss(&sockets).await;
        }
        match cleaner.ask(&owner).await {
            Asked::Done(deleted) => return tell(Ok(deleted)),
            Asked::Failed(e) => return tell(Err(e)),
            Asked::Leaving(deleted) => {
                tell(Ok(deleted));
                failpoint::pass("delete.leaving");
                if !cleaner.see_off(&owner).await {
                    return;
                }
                // What it left undone is undone below; usually nothing.
                let _ = cleaner.rescue(STEP_LIMIT).await;
            }
            Asked::Nobody => tell(cleaner.rescue(STEP_LIMIT).await),
        }
        failpoint::pass("delete.finish.before");
        cleaner.finish().await;
        failpoint::pass("delete.sockets.before");
        remove_sockets(&cleaner, &sockets).await;
        cleaner.keep_network().await;
    });
    runtime.shutdown_background();
}

/// Removes the sockets that nobody serves. One that is answered for may be so only by a fork of a supervisor that was
/// killed, which has not come to closing what it has inherited; a pod on record says that a later supervisor serves there.
async fn remove_sockets(cleaner: &Cleaner<'_>, sockets: &[PathBuf]) {
    let end = Instant::now() + INHERITED_LIMIT;
    for path in sockets {
        while client::is_live(path) && !cleaner.has_journal() && Instant::now() < end {
            sleep(INHERITED_LOOK).await;
        }
        let _ = socket::remove_dead(path);
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

fn encode(deleted: Deleted) -> Result<Vec<u8>> {
    // 0 is "unknown": the daemon shows this time to people, and 1970 tells them nothing.
    let at = if deleted.exited_at == 0 {
        clock::unix_nanos(SystemTime::now())
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
