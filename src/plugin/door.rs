//! Where those who wait for a job are told how it went: `<runtime_root>/cni/<place>/s`, a socket, and beside it `stage`,
//! what the job is doing, for people.
//!
//! A waiter connects and reads a line; the end without a line means that the job died. Promises that the job never waits
//! for a waiter.

use std::fs;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};
use tokio::net::UnixListener;
use tokio::time::{Instant, sleep_until};

use super::seen::root;
use crate::clock;
use crate::config::Config;
use crate::error::{Context, Error, Kind, Result};
use crate::network::{STAGE, Stage};
use crate::sys::dir::make_private;

/// Before a door is looked for again, or a network that is changing hands.
pub(super) const PAUSE: Duration = Duration::from_millis(5);

/// How long a stage lasts that is worth writing.
const WRITE_AFTER: Duration = Duration::from_millis(50);

/// What a job says of itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Word {
    /// Look again: the network is there to be taken, or somebody else is at it.
    Look,
    /// To whoever started it: the network is there, and about to be given to it; so the answer can be made. More follows.
    Made {
        /// Of its record.
        place: String,
    },
    /// To the same: it is this attempt's.
    Given,
    /// It is undone.
    Done,
    /// This is why not.
    Failed(String),
    /// It took longer than it may.
    Late(String),
}

impl Word {
    /// Of a failure.
    pub(super) fn of(error: &Error) -> Self {
        match error.kind() {
            Kind::Deadline => Self::Late(error.to_string()),
            _ => Self::Failed(error.to_string()),
        }
    }
}

/// The job's side.
#[derive(Debug)]
pub(super) struct Door {
    dir: PathBuf,
    listener: Option<UnixListener>,
    /// Who has started the job.
    starter: Option<UnixStream>,
    waiting: Vec<UnixStream>,
    /// What is not written yet of what is being done, and when it is to be.
    pending: Option<(Stage, Instant)>,
}

impl Door {
    /// Not there yet, but known to whoever started the job.
    pub(super) fn known_to(starter: UnixStream) -> Self {
        Self {
            dir: PathBuf::new(),
            listener: None,
            starter: Some(starter),
            waiting: Vec::new(),
            pending: None,
        }
    }

    /// Opens it at the place of a network. What another job has left there is replaced.
    pub(super) fn open(&mut self, config: &Config, place: &str) -> Result<()> {
        let dir = root(config).join(place);
        make_private(&dir)?;
        let path = dir.join("s");
        match fs::remove_file(&path) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => {
                return Err(Error::io(format!("remove {}", path.display()), e));
            }
            _ => {}
        }
        let bound = UnixListener::bind(&path);
        self.listener = Some(bound.context(|| format!("listen at {}", path.display()))?);
        self.dir = dir;
        Ok(())
    }

    /// Says what is done from now on: written, and logged, where it lasts, because that is what people look at.
    pub(super) fn stage(&mut self, name: &str) {
        let stage = Stage {
            name: name.to_owned(),
            since: clock::unix_nanos(SystemTime::now()),
            pid: std::process::id(),
        };
        self.pending = Some((stage, Instant::now() + WRITE_AFTER));
    }

    fn write(&self, stage: &Stage) {
        tracing::info!(step = stage.name, "stage");
        let temp = self.dir.join("stage.new");
        // For people only; a full tmpfs must not stop the work.
        let written = serde_json::to_vec(stage)
            .map_err(io::Error::other)
            .and_then(|text| fs::write(&temp, text))
            .and_then(|()| fs::rename(&temp, self.dir.join(STAGE)));
        written.unwrap_or_else(|error| tracing::debug!(%error, "stage not written"));
    }

    /// Lets waiters in while `work` is done.
    pub(super) async fn during<T>(&mut self, work: impl Future<Output = T>) -> T {
        let mut work = std::pin::pin!(work);
        loop {
            tokio::select! {
                done = &mut work => return done,
                () = self.let_in() => {}
            }
        }
    }

    /// The next waiter. Meanwhile the stage is written when it is time.
    pub(super) async fn let_in(&mut self) {
        let Some(listener) = &self.listener else {
            return std::future::pending().await;
        };
        let mut accept = std::pin::pin!(listener.accept());
        let accepted = loop {
            let Some((stage, due)) = &self.pending else {
                break accept.await;
            };
            tokio::select! {
                accepted = &mut accept => break accepted,
                () = sleep_until(*due) => self.write(stage),
            }
            self.pending = None;
        };
        match accepted {
            Ok((stream, _)) => {
                if let Ok(stream) = stream.into_std() {
                    self.waiting.push(stream);
                }
            }
            Err(error) => {
                tracing::warn!(%error, "let a waiter in");
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
    }

    /// Whoever started the job still waits for it.
    pub(super) fn is_starter_there(&self) -> bool {
        self.starter.as_ref().is_some_and(|mut starter| {
            // Nobody writes there: it is open, or there is an end.
            let _ = starter.set_nonblocking(true);
            let read = starter.read(&mut [0]);
            read.is_err_and(|e| e.kind() == io::ErrorKind::WouldBlock)
        })
    }

    /// Tells whoever started the job, and nobody else; more follows.
    pub(super) fn tell_starter(&self, word: &Word) {
        say(self.starter.as_ref(), word);
    }

    /// Tells all who wait.
    pub(super) fn tell(&mut self, word: &Word) {
        let all = self.starter.take().into_iter();
        let all: Vec<_> = all.chain(self.waiting.drain(..)).collect();
        say(&all, word);
    }

    /// Takes it away.
    pub(super) fn close(&mut self) {
        self.listener = None;
        remove(&self.dir);
    }
}

fn say<'a>(waiting: impl IntoIterator<Item = &'a UnixStream>, word: &Word) {
    let mut line = serde_json::to_vec(word).unwrap_or_default();
    line.push(b'\n');
    for mut stream in waiting {
        // A line fits into any socket's buffer; who has left is told nothing.
        let _ = stream.set_nonblocking(true);
        let _ = stream.write_all(&line);
    }
}

/// The waiter's side.
#[derive(Debug)]
pub(super) struct Wait(BufReader<UnixStream>);

impl Wait {
    /// On a job that was just started.
    pub(super) fn on(stream: UnixStream) -> Self {
        Self(BufReader::new(stream))
    }

    /// On the job at a place; None: it does not listen (yet, or any more).
    pub(super) fn at(config: &Config, place: &str) -> Option<Self> {
        UnixStream::connect(root(config).join(place).join("s"))
            .ok()
            .map(Self::on)
    }

    /// Waits for the job's word. Ok(None): not yet. Gone: the job died.
    pub(super) fn word(&mut self, limit: Duration) -> Result<Option<Word>> {
        let limit = limit.max(Duration::from_millis(1));
        let what = || "wait for the job that makes the network";
        let stream = self.0.get_ref();
        stream.set_read_timeout(Some(limit)).context(what)?;
        let mut line = Vec::new();
        match self.0.read_until(b'\n', &mut line) {
            Ok(0) => Err(Error::new(Kind::Gone, format!("{}: it has died", what()))),
            Ok(_) => serde_json::from_slice(&line)
                .map(Some)
                .map_err(|e| Error::caused(Kind::Gone, what(), e)),
            Err(e)
                if matches!(
                    e.kind(),
                    io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut
                ) =>
            {
                Ok(None)
            }
            Err(e) => Err(Error::io(what(), e).as_kind(Kind::Gone)),
        }
    }
}

/// Removes what stands at a place.
pub(super) fn remove(dir: &Path) {
    if !dir.as_os_str().is_empty() {
        let _ = fs::remove_dir_all(dir);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn who_waits_is_told_once_and_a_death_is_no_word() {
        let dir = tempfile::tempdir().unwrap();
        let config = Config {
            runtime_root: dir.path().join("run"),
            ..Config::default()
        };
        let (ours, theirs) = UnixStream::pair().unwrap();
        let mut door = Door::known_to(theirs);
        door.open(&config, "aa").unwrap();
        door.stage("netns");
        door.stage("cni-add");
        assert!(crate::network::stage_at(&config, "aa").is_none());
        let nobody = tokio::time::timeout(WRITE_AFTER * 4, door.let_in());
        assert!(nobody.await.is_err());
        let written = crate::network::stage_at(&config, "aa").unwrap();
        assert_eq!(written.name, "cni-add");
        let mut starter = Wait::on(ours);
        assert_eq!(starter.word(Duration::ZERO).unwrap(), None);
        let mut other = Wait::at(&config, "aa").unwrap();
        door.let_in().await;
        assert!(door.is_starter_there());
        door.tell(&Word::Look);
        assert!(!door.is_starter_there());
        for waiter in [&mut starter, &mut other] {
            assert_eq!(
                waiter.word(Duration::from_secs(5)).unwrap(),
                Some(Word::Look)
            );
        }
        let (ours, theirs) = UnixStream::pair().unwrap();
        door.starter = Some(theirs);
        assert!(door.is_starter_there());
        drop(ours);
        assert!(!door.is_starter_there());
        let mut late = Wait::at(&config, "aa").unwrap();
        door.close();
        let died = late.word(Duration::from_secs(5)).unwrap_err();
        assert_eq!(died.kind(), Kind::Gone);
        assert!(Wait::at(&config, "aa").is_none());
    }
}
