//! The supervisor's socket: where it is, and who gets it.
//!
//! Promises one supervisor per path: binding, the check whether the holder of a taken path lives, and replacing a dead
//! one happen under a lock of the directory. Must never serve from a directory that somebody else can write to.

use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use nix::sys::stat::{Mode, umask};
use sha2::{Digest, Sha256};

use crate::client;
use crate::config::Config;
use crate::error::{Context, Error, Kind, Result};
use crate::sys::dir::check_private;

/// Longest path of a unix socket: `sun_path` has 108 bytes with the closing NUL.
pub const PATH_MAX: usize = 107;

/// How long the lock of the directory may be held by others; they hold it for microseconds.
const LOCK_PATIENCE: Duration = Duration::from_secs(10);

/// Who serves a path.
#[derive(Debug)]
pub enum Claim {
    /// We do: bound and listening, ours to unlink.
    Ours(OwnedFd),
    /// A living supervisor does.
    Joined,
}

/// Where the socket of `group` is: `<dir>/<sha256 of <daemon address>/<namespace>/<group>>`, the daemon's own scheme.
///
/// `dir` as the daemon wishes, else the configured directory; without a daemon (`address` empty) our own.
pub fn path(
    config: &Config,
    dir: Option<&Path>,
    address: &str,
    namespace: &str,
    group: &str,
) -> PathBuf {
    let own = config.runtime_root.join("s");
    let dir = match dir {
        Some(dir) => dir,
        None if address.is_empty() => &own,
        None => &config.socket_dir,
    };
    dir.join(hash(&format!("{address}/{namespace}/{group}")))
}

/// Binds `path`, or finds out that a living supervisor has it; a dead one's leavings are replaced.
///
/// # Errors
/// Invalid when the path is too long or not absolute, Denied when the directory is not ours alone.
pub fn claim(path: &Path) -> Result<Claim> {
    let length = path.as_os_str().len();
    if length > PATH_MAX {
        return Err(Error::new(
            Kind::Invalid,
            format!(
                "bind {}: the path has {length} bytes and the limit is {PATH_MAX}; use a shorter socket directory",
                path.display()
            ),
        ));
    }
    let Some(dir) = path.parent().filter(|dir| dir.is_absolute()) else {
        return Err(Error::new(
            Kind::Invalid,
            format!("bind {}: give an absolute path", path.display()),
        ));
    };
    prepare_dir(dir)?;
    let _lock = lock(dir)?;
    match bind(path) {
        Ok(listener) => Ok(Claim::Ours(listener)),
        Err(e) if e.kind() == io::ErrorKind::AddrInUse => {
            if client::is_live(path) {
                return Ok(Claim::Joined);
            }
            remove_socket(path)?;
            bind(path)
                .map(Claim::Ours)
                .context(|| format!("bind {}", path.display()))
        }
        Err(e) => Err(Error::io(format!("bind {}", path.display()), e)),
    }
}

/// Removes the socket unless somebody listens on it. Absent is done; anything but a socket is left alone.
pub fn remove_dead(path: &Path) -> Result<()> {
    let Some(dir) = path.parent() else {
        return Ok(());
    };
    if fs::symlink_metadata(path).is_err() {
        return Ok(());
    }
    let _lock = lock(dir)?;
    if client::is_live(path) {
        Ok(())
    } else {
        remove_socket(path)
    }
}

/// Makes a directory that only we can enter, or checks that the one that is there is ours alone to write.
///
/// # Errors
/// Denied when it belongs to another user, others can write to it, or it is a symbolic link or no directory.
pub fn prepare_dir(dir: &Path) -> Result<()> {
    let what = || format!("use directory {}", dir.display());
    if let Some(parent) = dir.parent().filter(|parent| !parent.exists()) {
        // What lies above may be entered by others, as the daemon's own state directory.
        DirBuilder::new()
            .recursive(true)
            .mode(0o711)
            .create(parent)
            .context(what)?;
    }
    match DirBuilder::new().mode(0o700).create(dir) {
        Ok(()) => {}
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
        Err(e) => return Err(Error::io(what(), e)),
    }
    check_private(dir)
}

fn bind(path: &Path) -> io::Result<OwnedFd> {
    // The mode must be right from the first moment; nothing else of this process makes files meanwhile.
    let before = umask(Mode::from_bits_truncate(0o177));
    let bound = UnixListener::bind(path);
    umask(before);
    bound.map(OwnedFd::from)
}

fn remove_socket(path: &Path) -> Result<()> {
    let what = || format!("remove the stale socket {}", path.display());
    match fs::symlink_metadata(path) {
        Ok(found) if found.file_type().is_socket() => fs::remove_file(path).context(what),
        Ok(_) => Err(Error::new(
            Kind::Exists,
            format!("{}: it is no socket; remove it by hand", what()),
        )),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(e) => Err(Error::io(what(), e)),
    }
}

/// The lock is on the directory itself, so that it leaves no file; it goes with the descriptor.
fn lock(dir: &Path) -> Result<Flock<File>> {
    let what = || format!("lock directory {}", dir.display());
    let mut file = File::open(dir).context(what)?;
    let end = Instant::now() + LOCK_PATIENCE;
    loop {
        match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(lock) => return Ok(lock),
            Err((back, Errno::EWOULDBLOCK | Errno::EINTR)) if Instant::now() < end => file = back,
            Err((_, Errno::EWOULDBLOCK)) => {
                return Err(Error::new(
                    Kind::Deadline,
                    format!("{}: another start holds it; end that first", what()),
                ));
            }
            Err((_, e)) => return Err(Error::sys(what(), e)),
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Lower-case hex of the sha256 of the path, cleaned as Go's `filepath.Clean` does.
fn hash(path: &str) -> String {
    let digest = Sha256::digest(clean(path).as_bytes());
    crate::id::hex(&digest)
}

/// Go's lexical clean, for what `Join` is given here: no empty or `.` parts, `..` eats the part before it.
fn clean(path: &str) -> String {
    let rooted = path.starts_with('/');
    let mut parts: Vec<&str> = Vec::new();
    for part in path.split('/') {
        match part {
            "" | "." => {}
            ".." if parts.last().is_some_and(|last| *last != "..") => {
                parts.pop();
            }
            ".." if rooted => {}
            other => parts.push(other),
        }
    }
    let joined = parts.join("/");
    match (rooted, joined.is_empty()) {
        (true, _) => format!("/{joined}"),
        (false, true) => ".".to_owned(),
        (false, false) => joined,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;
    use std::os::unix::fs::PermissionsExt;

    fn directory() -> (tempfile::TempDir, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let inner = dir.path().join("s");
        (dir, inner)
    }

    #[test]
    fn the_name_is_the_daemons() {
        let config = Config::default();
        let path = path(
            &config,
            None,
            "/run/containerd/containerd.sock",
            "k8s.io",
            "0123456789abcdef",
        );
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        assert!(name.starts_with("a1516fb9") && name.len() == 64, "{name}");
        assert_eq!(path.parent(), Some(Path::new("/run/containerd/s")));
    }

    #[test]
    fn the_directory_follows_the_caller() {
        let config = Config::default();
        let own = path(&config, None, "", "default", "x");
        assert_eq!(own.parent(), Some(Path::new("/run/podvisor/s")));
        let wished = path(&config, Some(Path::new("/run/w")), "/a", "default", "x");
        assert_eq!(wished.parent(), Some(Path::new("/run/w")));
        // The longest legal namespace and id fit, because only their hash is in the path.
        assert!(
            path(&config, None, "/a", &"n".repeat(76), &"i".repeat(76))
                .as_os_str()
                .len()
                <= PATH_MAX
        );
    }

    #[test]
    fn paths_are_cleaned_as_the_daemon_does() {
        for (given, wanted) in [
            ("/a//b/./c", "/a/b/c"),
            ("/a/../b", "/b"),
            ("/../a", "/a"),
            ("/", "/"),
            ("", "."),
            ("a/b/", "a/b"),
            ("../a", "../a"),
        ] {
            assert_eq!(clean(given), wanted);
        }
    }

    #[test]
    fn a_live_path_is_joined_and_a_dead_one_replaced() {
        let (_keep, dir) = directory();
        let path = dir.join("x");
        let Claim::Ours(listener) = claim(&path).unwrap() else {
            panic!("bound by nobody")
        };
        assert_eq!(fs::metadata(&dir).unwrap().mode() & 0o777, 0o700);
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        assert!(matches!(claim(&path).unwrap(), Claim::Joined));
        remove_dead(&path).unwrap();
        assert!(path.exists());
        drop(listener);
        assert!(matches!(claim(&path).unwrap(), Claim::Ours(_)));
        remove_dead(&path).unwrap();
        assert!(!path.exists());
        remove_dead(&path).unwrap();
    }

    #[test]
    fn what_is_no_socket_is_not_removed() {
        let (_keep, dir) = directory();
        prepare_dir(&dir).unwrap();
        let path = dir.join("x");
        fs::write(&path, "precious").unwrap();
        assert!(claim(&path).unwrap_err().to_string().contains("no socket"));
        assert!(remove_dead(&path).is_err());
        assert!(path.exists());
    }

    #[test]
    fn a_long_path_is_refused_with_length_and_limit() {
        let (_keep, dir) = directory();
        let path = dir.join("d".repeat(100)).join("x");
        let error = claim(&path).unwrap_err();
        assert_eq!(error.kind(), Kind::Invalid);
        let told = error.to_string();
        let length = format!("{} bytes", path.as_os_str().len());
        assert!(
            told.contains(&length) && told.contains("limit is 107"),
            "{told}"
        );
        assert!(!path.parent().unwrap().exists());
    }

    #[test]
    fn a_directory_others_can_write_to_is_refused() {
        let (_keep, dir) = directory();
        fs::create_dir(&dir).unwrap();
        fs::set_permissions(&dir, fs::Permissions::from_mode(0o1777)).unwrap();
        let error = claim(&dir.join("x")).unwrap_err();
        assert_eq!(error.kind(), Kind::Denied);
        assert!(error.to_string().contains("1777"), "{error}");
        let link = dir.with_file_name("link");
        std::os::unix::fs::symlink(&dir, &link).unwrap();
        assert!(prepare_dir(&link).is_err());
    }
}
