//! Attempts whose networks are kept: `<runtime_root>/cni/ids/<hash>` is written before anything is done for one, and holds
//! the place of the network that it was given, when it was.
//!
//! So a DEL tells three things apart: the attempt that has the network, one that never got it or has lost it, and one that
//! never went this way, whose DEL is the real plugins' business. Kept for an hour after the end, because daemons send the
//! same DEL again and again; lost with the boot, and then everything is the real plugins' business.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use sha2::{Digest, Sha256};

use super::request::Request;
use crate::config::Config;
use crate::error::{Context, Error, Kind, Result};
use crate::network::{DAEMONS, NetworkRecord};
use crate::sys::dir::make_private;

/// How long an attempt is remembered whose network is gone.
const KEPT: Duration = Duration::from_secs(3600);

/// Between two looks at all of them.
const SWEEP: Duration = Duration::from_secs(600);

/// In the place of a place: the attempt is over, and its ADD, should one be left of it, gets nothing any more.
const OVER: &str = "-";

/// What is known of an attempt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Seen {
    /// It never went this way.
    Never,
    /// It has no network yet.
    Waiting,
    /// Its DEL has come before it had one.
    Over,
    /// It was given the network at this place.
    Given(String),
}

impl Seen {
    /// The place, for a look there. None: a look at all of them may find it.
    pub(super) fn place(&self) -> Option<&str> {
        match self {
            Self::Never => None,
            Self::Waiting | Self::Over => Some(""),
            Self::Given(place) => Some(place),
        }
    }
}

/// Remembers an attempt. `place`: the network that it has; empty: none yet.
pub(super) fn note(config: &Config, request: &Request, place: &str) -> Result<()> {
    let path = path(config, request);
    let what = || format!("write {}", path.display());
    let temp = path.with_extension("new");
    let written = match fs::write(&temp, place) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            path.parent().map_or(Ok(()), make_private)?;
            fs::write(&temp, place)
        }
        written => written,
    };
    written
        .and_then(|()| fs::rename(&temp, &path))
        .context(what)
}

/// The attempt is given the network at `place`. Gone: its DEL has come already. To be called while nothing else is given.
pub(super) fn give(config: &Config, request: &Request, place: &str) -> Result<()> {
    if read(config, request) == Seen::Over {
        return Err(Error::new(Kind::Gone, "its DEL has come meanwhile"));
    }
    note(config, request, place)
}

/// The DEL of an attempt that has nothing yet: it is to get nothing. What is known of it now. To be called while nothing is
/// given.
pub(super) fn end_waiting(config: &Config, request: &Request) -> Result<Seen> {
    let seen = read(config, request);
    if seen == Seen::Waiting {
        note(config, request, OVER)?;
    }
    Ok(seen)
}

/// What is known of it.
pub(super) fn read(config: &Config, request: &Request) -> Seen {
    match fs::read_to_string(path(config, request)) {
        Err(_) => Seen::Never,
        Ok(text) if text.is_empty() => Seen::Waiting,
        Ok(text) if text == OVER => Seen::Over,
        Ok(place) => Seen::Given(place),
    }
}

/// Forgets those that are over for long. Looks once in ten minutes, however often it is called: whether it did.
pub fn sweep(config: &Config) -> bool {
    let dir = root(config).join("ids");
    let age = |path: &Path| fs::metadata(path).ok()?.modified().ok()?.elapsed().ok();
    // Files that come and go change the directory's own time; a file's stays.
    let mark = root(config).join("swept");
    if age(&mark).is_some_and(|age| age < SWEEP) || !dir.is_dir() {
        return false;
    }
    let _ = fs::write(&mark, "");
    for entry in fs::read_dir(&dir).into_iter().flatten().flatten() {
        let path = entry.path();
        let place = fs::read_to_string(&path).unwrap_or_default();
        let record = NetworkRecord::in_place(config, &place, DAEMONS, "");
        let over = place.is_empty() || place == OVER || !record.dir().exists();
        if over && age(&path).is_some_and(|age| age > KEPT) {
            let _ = fs::remove_file(&path);
        }
    }
    true
}

/// Where jobs and attempts are.
pub(super) fn root(config: &Config) -> PathBuf {
    config.runtime_root.join(DAEMONS)
}

fn path(config: &Config, request: &Request) -> PathBuf {
    let digest = Sha256::digest(format!("{}\0{}", request.id, request.attached()));
    root(config).join("ids").join(crate::id::hex(&digest[..16]))
}
