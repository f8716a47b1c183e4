//! How many chains of one network run at a time, counted across every process of the machine.
//!
//! Each pod has a supervisor of its own, so the count cannot live in one. It is made of byte-range locks on a single
//! file, `<runtime_root>/.turns`: a network has a range of bytes, a turn is a lock on one of them. The lock belongs to
//! the open file, so the kernel takes it back when a supervisor is killed; nothing is ever written, and no file per
//! turn is left behind. A turn that is free costs two system calls and no thread.
//!
//! ADD and DEL have turns of their own: a network whose ADDs hang must not keep its pods from being removed. The host's
//! network has no chain and never comes here. Where the file cannot be had (a full or read-only disk) chains run
//! without a limit: it is a kindness to plugins, not a promise that anything else rests on.

use std::fs::{File, OpenOptions};
use std::hash::{BuildHasher, RandomState};
use std::os::unix::fs::OpenOptionsExt;
use std::time::Duration;

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, fcntl};
use sha2::{Digest, Sha256};
use tokio::time::{Instant, sleep};

use super::disk;
use super::plugin::Command;
use crate::config::Config;
use crate::error::{Context, Error, Kind, Result};

const FILE: &str = ".turns";

/// Bytes of a network for one kind of chain; the last one tells whether somebody is waiting.
const RANGE: u64 = 256;
const QUEUE: u64 = RANGE - 1;

/// Shortest and longest pause between two looks of one who waits.
const PAUSE_MS: (u64, u64) = (20, 60);

/// The right to run one chain; given back when dropped, and by the kernel when the process ends.
#[derive(Debug)]
pub(super) struct Turn {
    _file: Option<File>,
}

/// Waits, at most for `patience`, until fewer than `cni.parallel` chains of this kind run on `network`.
///
/// Who comes while others wait, waits with them, or a busy network would never get to the first. Dropping the future
/// gives the place up. Deadline when no turn came.
pub(super) async fn turn(
    config: &Config,
    network: &str,
    command: Command,
    patience: Duration,
) -> Result<Turn> {
    let file = match open(config) {
        Ok(file) => file,
        Err(error) => {
            tracing::warn!(%error, network, "plugins run without a limit");
            return Ok(Turn { _file: None });
        }
    };
    let seats = Seats {
        file,
        base: base(network, command),
        count: u64::from(config.cni.parallel),
    };
    let begun = Instant::now();
    let mut waiting = false;
    loop {
        if (waiting || seats.nobody_waits()?) && seats.take()? {
            if waiting {
                seats.leave_queue();
                tracing::info!(network, command = command.as_str(), waited = ?begun.elapsed(), "turn on the network");
            }
            return Ok(Turn {
                _file: Some(seats.file),
            });
        }
        if !waiting {
            seats.join_queue();
            waiting = true;
        }
        let left = patience.saturating_sub(begun.elapsed());
        if left.is_zero() {
            return Err(Error::new(
                Kind::Deadline,
                format!(
                    "wait for a turn on network {network:?}: {} chains ({}) were at work on it for all of {:.1} s; see what its plugins wait for, or raise cni.parallel",
                    config.cni.parallel,
                    command.as_str(),
                    patience.as_secs_f64()
                ),
            ));
        }
        sleep(Duration::from_millis(between(PAUSE_MS.0, PAUSE_MS.1)).min(left)).await;
    }
}

/// A number of `low..=high` that differs from process to process: who began together must not come back together.
pub(super) fn between(low: u64, high: u64) -> u64 {
    let random = RandomState::new().hash_one(0_u8);
    low + random % (high.saturating_sub(low) + 1)
}

fn open(config: &Config) -> Result<File> {
    disk::private_dir(&config.runtime_root)?;
    let path = config.runtime_root.join(FILE);
    OpenOptions::new()
        .write(true)
        .read(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_CLOEXEC)
        .open(&path)
        .context(|| format!("open {}", path.display()))
}

/// First byte of a network: 40 bits of its name's hash, so that two networks meet only in theory (and then share).
fn base(network: &str, command: Command) -> u64 {
    let hash = Sha256::digest(network.as_bytes());
    let number = hash
        .iter()
        .take(5)
        .fold(0, |sum, byte| sum << 8 | u64::from(*byte));
    let kind = u64::from(command == Command::Del);
    (number * 2 + kind) * RANGE
}

#[derive(Debug)]
struct Seats {
    file: File,
    base: u64,
    count: u64,
}

impl Seats {
    /// Takes a free one, looked for from a place that differs each time.
    fn take(&self) -> Result<bool> {
        let first = between(0, self.count - 1);
        for n in 0..self.count {
            if self.lock(libc::F_WRLCK, (first + n) % self.count)? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn nobody_waits(&self) -> Result<bool> {
        let free = self.lock(libc::F_WRLCK, QUEUE)?;
        if free {
            self.leave_queue();
        }
        Ok(free)
    }

    /// All who wait share it. One who looks at this very moment makes it fail: then the next who comes is let past.
    fn join_queue(&self) {
        let _ = self.lock(libc::F_RDLCK, QUEUE);
    }

    fn leave_queue(&self) {
        let _ = self.lock(libc::F_UNLCK, QUEUE);
    }

    fn lock(&self, kind: libc::c_int, byte: u64) -> Result<bool> {
        let range = libc::flock {
            l_type: kind as libc::c_short,
            l_whence: libc::SEEK_SET as libc::c_short,
            l_start: (self.base + byte) as libc::off_t,
            l_len: 1,
            l_pid: 0,
        };
        match fcntl(&self.file, FcntlArg::F_OFD_SETLK(&range)) {
            Ok(_) => Ok(true),
            Err(Errno::EAGAIN | Errno::EACCES) => Ok(false),
            Err(e) => Err(Error::sys("lock a turn on the network", e)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(parallel: u8) -> (tempfile::TempDir, Config) {
        let dir = tempfile::tempdir().unwrap();
        let mut config = Config {
            runtime_root: dir.path().join("run"),
            ..Config::default()
        };
        config.cni.parallel = parallel;
        (dir, config)
    }

    fn run<F: Future>(work: F) -> F::Output {
        tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap()
            .block_on(work)
    }

    const NONE: Duration = Duration::ZERO;
    const LONG: Duration = Duration::from_secs(20);

    #[test]
    fn there_are_as_many_turns_as_configured_for_each_network_and_kind() {
        let (_dir, config) = config(2);
        run(async {
            let held = [
                turn(&config, "a", Command::Add, NONE).await.unwrap(),
                turn(&config, "a", Command::Add, NONE).await.unwrap(),
            ];
            let refused = turn(&config, "a", Command::Add, NONE).await.unwrap_err();
            assert_eq!(refused.kind(), Kind::Deadline);
            assert!(refused.to_string().contains("cni.parallel"), "{refused}");
            turn(&config, "b", Command::Add, NONE).await.unwrap();
            turn(&config, "a", Command::Del, NONE).await.unwrap();
            drop(held);
            turn(&config, "a", Command::Add, NONE).await.unwrap();
        });
    }

    #[test]
    fn who_comes_later_does_not_overtake_and_a_place_given_up_is_free() {
        let (_dir, config) = config(1);
        run(async {
            let held = turn(&config, "a", Command::Add, NONE).await.unwrap();
            let mut first = Box::pin(turn(&config, "a", Command::Add, LONG));
            tokio::select! {
                _ = &mut first => panic!("two at once"),
                () = sleep(Duration::from_millis(5)) => {}
            }
            drop(held);
            // Free, but somebody waits for it.
            let late = turn(&config, "a", Command::Add, NONE).await;
            assert_eq!(late.unwrap_err().kind(), Kind::Deadline);
            let turn_of_first = first.await.unwrap();
            drop(turn_of_first);
            turn(&config, "a", Command::Add, NONE).await.unwrap();
        });
    }

    #[test]
    fn without_a_place_for_the_file_there_is_no_limit() {
        let (dir, mut config) = config(1);
        std::fs::write(dir.path().join("file"), "").unwrap();
        config.runtime_root = dir.path().join("file");
        run(async {
            let _held = turn(&config, "a", Command::Add, NONE).await.unwrap();
            turn(&config, "a", Command::Add, NONE).await.unwrap();
        });
    }
}
