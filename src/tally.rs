//! Figures of the whole node, kept for the boot in small files of the runtime root and fed by all supervisors.
//!
//! Promises that a counter never goes down while the machine is up: it survives the supervisor that has counted, and of
//! two that count at a time both are heard. Must never hold a pod up or fail it: who cannot write at once tries again in
//! the background, and what cannot be written at all is lost.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::time::Duration;

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::config::Config;
use crate::sys::dir::{check_private, private};

/// The counters' file in the runtime root.
const FILE: &str = ".counters";

/// Largest file that is believed, bytes.
const SIZE_MAX: u64 = 1 << 20;

/// Tries to get a file for oneself; whoever has it writes a kilobyte and lets go.
const TRIES: u32 = 5;

/// A count that met others is added later, this often and this far apart.
const LATER: (u32, Duration) = (100, Duration::from_millis(50));

/// Counters since the boot.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Counters {
    /// Requests that had to wait for a creation under way: by kind (`pod`, `container`), then by the stage it was at.
    pub stalled: BTreeMap<String, BTreeMap<String, u64>>,
    /// Creations that ended: by kind, then how (`committed`, `parked`, `failed`, `cancelled`).
    pub created: BTreeMap<String, BTreeMap<String, u64>>,
    /// Parked results that are parked no more: by kind, then why (`claimed`, `expired`, `removed`, `died`).
    pub unparked: BTreeMap<String, BTreeMap<String, u64>>,
}

/// One thing to count.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Count {
    /// A request begins to wait for a creation at this stage.
    Stalled(String),
    /// A creation ended like this.
    Created(&'static str),
    /// A parked result left that state for this reason.
    Unparked(&'static str),
}

impl Counters {
    fn add(&mut self, kind: &str, count: &Count) {
        let (family, label) = match count {
            Count::Stalled(stage) => (&mut self.stalled, stage.as_str()),
            Count::Created(how) => (&mut self.created, *how),
            Count::Unparked(why) => (&mut self.unparked, *why),
        };
        let labels = family.entry(kind.to_owned()).or_default();
        *labels.entry(label.to_owned()).or_default() += 1;
    }
}

/// Counts one; `kind` is `pod` or `container`. Never waits. Called on a runtime, because the file may be another's for
/// a moment: then the count is added in the background.
pub fn count(config: &Config, kind: &'static str, count: Count) {
    if is_settled(config, kind, &count) {
        return;
    }
    let config = config.clone();
    tokio::spawn(async move {
        for _ in 0..LATER.0 {
            tokio::time::sleep(LATER.1).await;
            if is_settled(&config, kind, &count) {
                return;
            }
        }
        tracing::debug!(?count, "a count is lost: its file stays locked");
    });
}

/// Added, or lost for good.
fn is_settled(config: &Config, kind: &str, count: &Count) -> bool {
    match update(config, FILE, |all: &mut Counters| all.add(kind, count)) {
        Ok(()) => true,
        Err(error) if is_busy(&error) => false,
        Err(error) => {
            tracing::debug!(%error, ?count, "a count is lost");
            true
        }
    }
}

/// The counters; zero where nothing was counted yet, or the file cannot be believed.
pub fn counters(config: &Config) -> Counters {
    read(config, FILE)
}

/// What a file holds; nothing when there is none, or it is damaged. Never made by looking.
pub fn read<T: DeserializeOwned + Default>(config: &Config, name: &str) -> T {
    let text = || -> io::Result<Vec<u8>> {
        check_private(&config.runtime_root).map_err(io::Error::other)?;
        let mut file = open(config, name, false)?;
        // A reader between a writer's bytes would take the file for damaged; one that cannot have it looks anyway.
        for _ in 0..LATER.0 {
            match Flock::lock(file, FlockArg::LockSharedNonblock) {
                Ok(mut locked) => return slurp(&mut locked),
                Err((back, _)) => file = back,
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        slurp(&mut file)
    };
    text()
        .ok()
        .and_then(|text| serde_json::from_slice(&text).ok())
        .unwrap_or_default()
}

/// Changes what a file holds, alone; a damaged one begins anew.
///
/// # Errors
/// `EWOULDBLOCK` when others have it; then nothing has changed.
pub fn update<T: DeserializeOwned + Default + Serialize>(
    config: &Config,
    name: &str,
    change: impl FnOnce(&mut T),
) -> io::Result<()> {
    private(&config.runtime_root).map_err(io::Error::other)?;
    let mut file = lock(open(config, name, true)?)?;
    let text = slurp(&mut file)?;
    let mut all: T = serde_json::from_slice(&text).unwrap_or_default();
    change(&mut all);
    let text = serde_json::to_vec(&all).map_err(io::Error::other)?;
    // In place: a lock is on the file and not on its name.
    file.seek(SeekFrom::Start(0))?;
    file.write_all(&text)?;
    file.set_len(text.len() as u64)
}

/// True when an error of [`update`] means that others have the file.
pub fn is_busy(error: &io::Error) -> bool {
    error.raw_os_error() == Some(Errno::EWOULDBLOCK as i32)
}

fn open(config: &Config, name: &str, write: bool) -> io::Result<File> {
    OpenOptions::new()
        .read(true)
        .write(write)
        .create(write)
        .truncate(false)
        .mode(0o600)
        .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_CLOEXEC)
        .open(config.runtime_root.join(name))
}

fn slurp(file: &mut File) -> io::Result<Vec<u8>> {
    let mut text = Vec::new();
    file.take(SIZE_MAX).read_to_end(&mut text)?;
    Ok(text)
}

fn lock(mut file: File) -> io::Result<Flock<File>> {
    let mut tries = 1;
    loop {
        match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(locked) => return Ok(locked),
            Err((back, Errno::EWOULDBLOCK)) if tries < TRIES => {
                file = back;
                tries += 1;
                std::thread::yield_now();
            }
            Err((_, errno)) => return Err(errno.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(dir: &std::path::Path) -> Config {
        Config {
            runtime_root: dir.to_owned(),
            ..Config::default()
        }
    }

    #[test]
    fn counts_of_several_kinds_add_up() {
        let dir = tempfile::tempdir().unwrap();
        let config = config(dir.path());
        assert_eq!(counters(&config), Counters::default());
        count(&config, "pod", Count::Stalled("cni-add".into()));
        count(&config, "pod", Count::Stalled("cni-add".into()));
        count(&config, "container", Count::Stalled("create".into()));
        count(&config, "pod", Count::Created("parked"));
        count(&config, "pod", Count::Unparked("claimed"));
        let all = counters(&config);
        assert_eq!(all.stalled["pod"]["cni-add"], 2);
        assert_eq!(all.stalled["container"]["create"], 1);
        assert_eq!(all.created["pod"]["parked"], 1);
        assert_eq!(all.unparked["pod"]["claimed"], 1);
    }

    #[tokio::test]
    async fn a_count_that_meets_another_writer_is_added_later() {
        let dir = tempfile::tempdir().unwrap();
        let config = config(dir.path());
        count(&config, "pod", Count::Created("parked"));
        let held = lock(open(&config, FILE, true).unwrap()).unwrap();
        count(&config, "pod", Count::Stalled("infra".into()));
        drop(held);
        while counters(&config).stalled.is_empty() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        assert_eq!(counters(&config).stalled["pod"]["infra"], 1);
    }

    #[test]
    fn threads_that_count_at_a_time_lose_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let config = config(dir.path());
        let threads: Vec<_> = (0..4)
            .map(|_| {
                let config = config.clone();
                std::thread::spawn(move || {
                    for _ in 0..200 {
                        while update(&config, FILE, |all: &mut Counters| {
                            all.add("pod", &Count::Stalled("netns".into()));
                        })
                        .is_err()
                        {
                            std::thread::yield_now();
                        }
                        assert!(!counters(&config).stalled.is_empty(), "it went down");
                    }
                })
            })
            .collect();
        for thread in threads {
            thread.join().unwrap();
        }
        assert_eq!(counters(&config).stalled["pod"]["netns"], 800);
    }

    #[test]
    fn a_link_is_not_followed_and_a_damaged_file_begins_anew() {
        let dir = tempfile::tempdir().unwrap();
        let config = config(dir.path());
        std::fs::write(dir.path().join(FILE), "{\"stalled\": {").unwrap();
        assert_eq!(counters(&config), Counters::default());
        count(&config, "pod", Count::Created("failed"));
        assert_eq!(counters(&config).created["pod"]["failed"], 1);
        let target = dir.path().join("target");
        std::fs::write(&target, "precious").unwrap();
        std::fs::remove_file(dir.path().join(FILE)).unwrap();
        std::os::unix::fs::symlink(&target, dir.path().join(FILE)).unwrap();
        count(&config, "pod", Count::Created("failed"));
        assert_eq!(std::fs::read(&target).unwrap(), b"precious");
    }
}
