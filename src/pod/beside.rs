//! What the command keeps for its own pods: a bundle, bundles and logs beside the journal, and `.names/<name>`.
//!
//! The command removes them with the pod. A parked pod that expires, and one whose supervisor is told to end, have nobody to
//! do that: the name must not stay taken for ever. Must never touch a directory that a daemon gave.

use std::fs::{self, File};
use std::io;
use std::path::Path;

use nix::fcntl::{Flock, FlockArg};

use crate::error::{Context, Error, Result};

/// Where names are, below a namespace's directory. No pod's: '.' may not begin an id.
pub const NAMES: &str = ".names";

/// Entries of a pod's directory that are the command's.
const ENTRIES: [&str; 3] = ["bundle", "bundles", "logs"];

/// Removes what the command kept for the pod in `dir`, and the directory with it; then frees the pod's name.
pub(super) fn forget(dir: &Path, bundle: &Path, name: &str, id: &str) -> Result<()> {
    if bundle != dir.join("bundle") {
        return Ok(());
    }
    for entry in ENTRIES {
        let path = dir.join(entry);
        match fs::remove_dir_all(&path) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => {
                return Err(Error::io(format!("remove {}", path.display()), e));
            }
            _ => {}
        }
    }
    // Not empty: somebody else's, who will know.
    let _ = fs::remove_dir(dir);
    match dir.parent() {
        Some(root) if !dir.exists() => release_name(&root.join(NAMES), name, id),
        _ => Ok(()),
    }
}

/// Frees `name` in the directory of names if it is (still) this pod's.
pub fn release_name(names: &Path, name: &str, id: &str) -> Result<()> {
    if crate::id::check("name", name).is_err() || !names.is_dir() {
        return Ok(());
    }
    // The directory itself is the lock, so that no file of ours outlives the last name.
    let file = File::open(names).context(|| format!("open {}", names.display()))?;
    let _lock = Flock::lock(file, FlockArg::LockExclusive)
        .map_err(|(_, e)| Error::sys(format!("lock {}", names.display()), e))?;
    let path = names.join(name);
    match fs::read_to_string(&path) {
        Ok(owner) if owner.trim() == id => {
            fs::remove_file(&path).context(|| format!("remove {}", path.display()))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_commands_own_is_removed() {
        let top = tempfile::tempdir().unwrap();
        let (dir, names) = (top.path().join("a1"), top.path().join(NAMES));
        for path in [&dir.join("bundle"), &dir.join("logs"), &names] {
            fs::create_dir_all(path).unwrap();
        }
        fs::write(dir.join("bundle/log"), "x").unwrap();
        fs::write(names.join("web"), "a1").unwrap();
        fs::write(names.join("other"), "b2").unwrap();
        forget(&dir, Path::new("/run/containerd/x"), "web", "a1").unwrap();
        assert!(dir.join("bundle/log").exists() && names.join("web").exists());
        forget(&dir, &dir.join("bundle"), "web", "a1").unwrap();
        assert!(!dir.exists() && !names.join("web").exists());
        forget(&dir, &dir.join("bundle"), "other", "a1").unwrap();
        assert!(names.join("other").exists());
    }
}
