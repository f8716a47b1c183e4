//! A container's bundle, and what it tells of the command that wrote it.
//!
//! Owns `<pod>/bundles/<id>`: `config.json`, which the supervisor changes, and `asked.json`, by which the same command is
//! known again. Promises that of several commands one writes a bundle, whole or not at all. Must never remove a bundle
//! whose writer is still at it.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use nix::fcntl::{Flock, FlockArg};
use serde_json::Value;

use crate::container::Status;
use crate::error::{Context, Error, Kind, Result};

use super::host::private_dir;
use super::names;

/// In the bundle: what was asked for.
const ASKED: &str = "asked.json";

/// What is there of the container that is asked for.
#[derive(Debug, PartialEq, Eq)]
pub enum Found {
    Nothing,
    /// On its way, or made and waiting; by the same command.
    Ours,
    Other,
}

/// Held by the command that has written a bundle until the supervisor knows of the container: nobody takes it for one
/// that was left behind.
#[derive(Debug)]
pub struct Writing {
    _dir: Flock<File>,
}

/// What there is of a container, by its `status` on the pod's record and by its bundle. One that was left behind by another
/// command, and that the supervisor does not know, is removed.
pub fn find(status: Option<Status>, bundle: &Path, config: &Value) -> Found {
    match (status, bundle.exists()) {
        (None, false) => Found::Nothing,
        // Begun a moment ago, or undone since: nobody came for it.
        (None, true) if is_same(bundle, config) => Found::Ours,
        (None, true) if remove_left(bundle) => Found::Nothing,
        (Some(status), true) if !has_begun(status) && is_same(bundle, config) => Found::Ours,
        _ => Found::Other,
    }
}

/// Its program runs, or has run: it is nobody's to be made any more.
pub fn has_begun(status: Status) -> bool {
    match status {
        Status::Creating | Status::Parked | Status::Created => false,
        Status::Running | Status::Paused | Status::Stopped => true,
    }
}

/// Writes it. None: another command was quicker.
pub fn write(bundle: &Path, config: &Value) -> Result<Option<Writing>> {
    let Some(all) = bundle.parent() else {
        return Ok(None);
    };
    private_dir(all)?;
    // '.' may not begin an id.
    let new = all.join(format!(".{}", names::random_hex(8)?));
    let written = fill(&new, config).and_then(|()| lock(&new));
    let moved = written.and_then(|dir| match fs::rename(&new, bundle) {
        Ok(()) => Ok(Some(Writing { _dir: dir })),
        Err(e) if is_taken(&e) => Ok(None),
        Err(e) => Err(Error::io(format!("make {}", bundle.display()), e)),
    });
    if !matches!(moved, Ok(Some(_))) {
        let _ = fs::remove_dir_all(&new);
    }
    moved
}

fn fill(dir: &Path, config: &Value) -> Result<()> {
    private_dir(dir)?;
    let text = serde_json::to_vec_pretty(config)
        .map_err(|e| Error::caused(Kind::Other, "write config.json", e))?;
    for name in [ASKED, "config.json"] {
        let path: PathBuf = dir.join(name);
        let mut file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&path)
            .context(|| format!("make {}", path.display()))?;
        file.write_all(&text)
            .context(|| format!("write {}", path.display()))?;
    }
    Ok(())
}

fn is_same(bundle: &Path, config: &Value) -> bool {
    let asked = fs::read(bundle.join(ASKED)).ok();
    asked.is_some_and(|text| serde_json::from_slice::<Value>(&text).ok().as_ref() == Some(config))
}

fn remove_left(bundle: &Path) -> bool {
    lock(bundle).is_ok_and(|_dir| fs::remove_dir_all(bundle).is_ok())
}

fn lock(dir: &Path) -> Result<Flock<File>> {
    let file = File::open(dir).context(|| format!("open {}", dir.display()))?;
    Flock::lock(file, FlockArg::LockExclusiveNonblock)
        .map_err(|(_, e)| Error::sys(format!("lock {}", dir.display()), e))
}

/// A directory with something in it is there.
fn is_taken(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::DirectoryNotEmpty | io::ErrorKind::AlreadyExists
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn of_two_commands_one_writes_and_the_other_knows_whose_it_is() {
        let top = tempfile::tempdir().unwrap();
        let bundle = top.path().join("bundles").join("c");
        let (one, two) = (json!({"a": 1}), json!({"a": 2}));
        assert_eq!(find(None, &bundle, &one), Found::Nothing);
        let writing = write(&bundle, &one).unwrap();
        assert!(writing.is_some());
        assert!(write(&bundle, &two).unwrap().is_none());
        assert_eq!(fs::read_dir(top.path().join("bundles")).unwrap().count(), 1);
        assert_eq!(find(None, &bundle, &one), Found::Ours);
        assert_eq!(find(Some(Status::Parked), &bundle, &one), Found::Ours);
        assert_eq!(find(Some(Status::Running), &bundle, &one), Found::Other);
        // Its writer is at it.
        assert_eq!(find(None, &bundle, &two), Found::Other);
        drop(writing);
        // Left behind.
        assert_eq!(find(None, &bundle, &two), Found::Nothing);
        assert!(!bundle.exists());
    }

    #[test]
    fn half_a_bundle_is_another_commands() {
        let top = tempfile::tempdir().unwrap();
        let bundle = top.path().join("c");
        fs::create_dir(&bundle).unwrap();
        fs::write(bundle.join(ASKED), "{\"a\":").unwrap();
        let found = find(None, &bundle, &json!({"a": 1}));
        assert_eq!((found, bundle.exists()), (Found::Nothing, false));
    }
}
