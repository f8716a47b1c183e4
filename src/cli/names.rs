//! Names and ids of pods.
//!
//! Owns `<runtime root>/<namespace>/.names/<name>`, a file per name that holds the pod's id. Promises that two commands at
//! the same time never give one name to two pods, and that a name whose pod has gone is free again. Must never keep
//! anything that a pod's removal would need: a pod is removed by its id.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use nix::fcntl::{Flock, FlockArg};

use crate::error::{Context, Error, Kind, Result};
use crate::pod::beside;

use super::host::{Host, private_dir};

/// Where a namespace's names are, in its directory.
pub const DIRECTORY: &str = beside::NAMES;

/// Characters of a pod's id, all of them lower case hexadecimal.
const ID_LENGTH: usize = 32;

/// What became of a wish for a name.
#[derive(Debug, PartialEq, Eq)]
pub enum Reserved {
    /// It is this pod's now.
    New,
    /// The pod with this id has it.
    Taken(String),
}

/// `bytes` random bytes in hexadecimal.
pub fn random_hex(bytes: usize) -> Result<String> {
    let mut buffer = vec![0; bytes];
    File::open("/dev/urandom")
        .and_then(|mut f| f.read_exact(&mut buffer))
        .context(|| "read /dev/urandom")?;
    Ok(crate::id::hex(&buffer))
}

/// A new pod's id.
pub fn new_id() -> Result<String> {
    random_hex(ID_LENGTH / 2)
}

/// True for a text of the shape [`new_id`] makes.
pub fn is_id(text: &str) -> bool {
    text.len() == ID_LENGTH && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
}

/// The name of a pod nobody named.
pub fn invented(id: &str) -> String {
    format!("pod-{}", id.get(..8).unwrap_or(id))
}

/// Gives `name` to the pod `id`, whose directory must exist already: that is how a name in use is told from a stale one.
pub fn reserve(host: &Host, name: &str, id: &str) -> Result<Reserved> {
    let dir = directory(host);
    private_dir(&dir)?;
    let _lock = lock(&dir)?;
    let path = dir.join(name);
    match read(&path)? {
        Some(owner) if owner == id => return Ok(Reserved::New),
        Some(owner)
            if crate::id::check("pod id", &owner).is_ok() && host.pod_dir(&owner).is_dir() =>
        {
            return Ok(Reserved::Taken(owner));
        }
        _ => {}
    }
    // Whole or not at all: a command killed here must not leave an empty name. '.' may not begin a name.
    let fresh = dir.join(format!(".{id}"));
    fs::write(&fresh, id)
        .and_then(|()| fs::rename(&fresh, &path))
        .context(|| format!("write {}", path.display()))?;
    Ok(Reserved::New)
}

/// Frees the name if it is (still) this pod's.
pub fn release(host: &Host, name: &str, id: &str) -> Result<()> {
    beside::release_name(&directory(host), name, id)
}

/// Id of the pod that has `name`, if any; the pod itself may be gone.
pub fn lookup(host: &Host, name: &str) -> Option<String> {
    crate::id::check("name", name).ok()?;
    read(&directory(host).join(name)).ok()?
}

/// Name given to the pod `id`, found by reading all of them: for pods whose own record cannot be read.
pub fn of(host: &Host, id: &str) -> Option<String> {
    let entries = fs::read_dir(directory(host)).ok()?;
    entries
        .flatten()
        .filter(|e| read(&e.path()).ok().flatten().as_deref() == Some(id))
        .filter_map(|e| e.file_name().into_string().ok())
        .find(|name| !name.starts_with('.'))
}

/// Names in this namespace whose pods are gone, and what is left of a write that was cut short: (file's name, id). A
/// command that was killed leaves them, and a pod that went by itself.
pub fn stale(host: &Host) -> Vec<(String, String)> {
    let dir = directory(host);
    // With the lock nobody is between a name and its file.
    let Ok(_lock) = lock(&dir) else {
        return Vec::new();
    };
    let entries = fs::read_dir(&dir).into_iter().flatten().flatten();
    entries
        .filter_map(|e| Some((e.file_name().into_string().ok()?, read(&e.path()).ok()?)))
        .map(|(name, id)| (name, id.unwrap_or_default()))
        .filter(|(name, id)| name.starts_with('.') || id.is_empty() || !host.pod_dir(id).is_dir())
        .collect()
}

/// Removes what [`stale`] has found, unless it is somebody's by now.
pub fn forget_stale(host: &Host, name: &str, id: &str) -> Result<()> {
    let dir = directory(host);
    let _lock = lock(&dir)?;
    let path = dir.join(name);
    if read(&path)?.unwrap_or_default() != id {
        return Ok(());
    }
    fs::remove_file(&path).context(|| format!("remove {}", path.display()))
}

/// No pod's directory: '.' may not begin an id, so that listing pods passes it by.
fn directory(host: &Host) -> PathBuf {
    host.root().join(DIRECTORY)
}

/// The directory itself is the lock, so that no file of ours outlives the last name.
fn lock(dir: &Path) -> Result<Flock<File>> {
    let file = File::open(dir).context(|| format!("open {}", dir.display()))?;
    Flock::lock(file, FlockArg::LockExclusive)
        .map_err(|(_, e)| Error::sys(format!("lock {}", dir.display()), e))
}

fn read(path: &Path) -> Result<Option<String>> {
    match fs::read_to_string(path) {
        Ok(text) => Ok(Some(text.trim().to_owned())),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) if e.kind() == io::ErrorKind::InvalidData => Ok(None),
        Err(e) => Err(Error::io(format!("read {}", path.display()), e)),
    }
}

/// The error for a name that is taken by a pod which cannot be joined.
pub fn taken(name: &str, owner: &str) -> Error {
    let short = owner.get(..12).unwrap_or(owner);
    Error::new(
        Kind::Exists,
        format!(
            "name the pod {name:?}: pod {short} has this name; choose another, or `podvisor rm -f {name}` first"
        ),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_random_and_known_by_their_shape() {
        let (a, b) = (new_id().unwrap(), new_id().unwrap());
        assert!(is_id(&a) && is_id(&b) && a != b);
        assert!(crate::id::check("pod id", &a).is_ok());
        assert!(!is_id("web") && !is_id(&"G".repeat(32)));
        assert!(crate::id::check("name", &invented(&a)).is_ok());
    }

    #[test]
    fn a_name_belongs_to_one_pod_until_that_is_gone() {
        let dir = tempfile::tempdir().unwrap();
        let host = Host::at(dir.path());
        private_dir(&host.pod_dir("a1")).unwrap();
        private_dir(&host.pod_dir("b2")).unwrap();
        assert_eq!(reserve(&host, "web", "a1").unwrap(), Reserved::New);
        assert_eq!(
            reserve(&host, "web", "b2").unwrap(),
            Reserved::Taken("a1".into())
        );
        assert_eq!(
            (lookup(&host, "web"), of(&host, "a1")),
            (Some("a1".into()), Some("web".into()))
        );
        // Released by another: still taken. Pod gone without a release: free.
        release(&host, "web", "b2").unwrap();
        assert_eq!(
            reserve(&host, "web", "b2").unwrap(),
            Reserved::Taken("a1".into())
        );
        fs::remove_dir(host.pod_dir("a1")).unwrap();
        assert_eq!(reserve(&host, "web", "b2").unwrap(), Reserved::New);
        release(&host, "web", "b2").unwrap();
        assert_eq!(fs::read_dir(directory(&host)).unwrap().count(), 0);
        assert_eq!(lookup(&host, "../web"), None);
    }

    #[test]
    fn names_of_pods_that_are_gone_are_stale_and_the_others_are_not() {
        let dir = tempfile::tempdir().unwrap();
        let host = Host::at(dir.path());
        for (name, id) in [("web", "a"), ("db", "b")] {
            fs::create_dir_all(host.pod_dir(id)).unwrap();
            reserve(&host, name, id).unwrap();
        }
        assert!(stale(&host).is_empty());
        fs::remove_dir(host.pod_dir("a")).unwrap();
        fs::write(directory(&host).join(".c"), "c").unwrap();
        let mut found = stale(&host);
        found.sort();
        let owned = |name: &str, id: &str| (name.to_owned(), id.to_owned());
        assert_eq!(found, [owned(".c", "c"), owned("web", "a")]);
        // Somebody has taken the name meanwhile.
        fs::create_dir_all(host.pod_dir("d")).unwrap();
        reserve(&host, "web", "d").unwrap();
        for (name, id) in &found {
            forget_stale(&host, name, id).unwrap();
        }
        assert_eq!(lookup(&host, "web").as_deref(), Some("d"));
        assert!(stale(&host).is_empty());
    }

    #[test]
    fn half_written_names_are_free() {
        let dir = tempfile::tempdir().unwrap();
        let host = Host::at(dir.path());
        private_dir(&host.pod_dir("a1")).unwrap();
        private_dir(&directory(&host)).unwrap();
        for junk in [&b""[..], b"..", b"\xff", b"/etc"] {
            fs::write(directory(&host).join("web"), junk).unwrap();
            assert_eq!(
                reserve(&host, "web", "a1").unwrap(),
                Reserved::New,
                "{junk:?}"
            );
        }
    }
}
