//! Pinned network namespaces: `<runtime_root>/netns/<hash>`, with a symbolic link `/run/netns/podvisor-<hash>`.
//!
//! The pin is a bind mount of the namespace, so that it outlives every process in it and plugins have a path that stays
//! valid. Facts this rests on:
//!
//! - Nothing is ever mounted in `/run/netns`: `ip netns add` binds that directory onto itself, and a mount made there
//!   before becomes unreachable and its removal "busy". A symbolic link survives it.
//! - A mount namespace made while a pod lives holds a copy of the pin. Where the copy is a peer, our unmount reaches it;
//!   where it is private, the unlink does: since Linux 3.18 unlinking a mount point detaches what other mount namespaces
//!   have on it. So the directory needs no mount of its own, and inherits the propagation of `/run`.

use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};

use nix::sys::statfs::statfs;

use super::{NetworkRecord, disk, markers, userns};
use crate::config::Config;
use crate::error::{Context, Error, Kind, Result};
use crate::failpoint;
use crate::sys;
use crate::sys::pin::clear;

pub use crate::sys::netns::Fresh;

/// Where iproute2 looks.
const LINKS: &str = "/run/netns";

/// Where this sandbox's netns is (to be) pinned; touches nothing.
pub fn path(config: &Config, namespace: &str, sandbox_id: &str) -> PathBuf {
    config
        .runtime_root
        .join("netns")
        .join(markers::hash(namespace, sandbox_id))
}

/// Where the netns of this network is (to be) pinned: whichever sandbox has it, its place stays.
pub fn of_record(config: &Config, record: &NetworkRecord) -> PathBuf {
    in_place(config, record.dir())
}

/// The same by the record's directory.
pub(super) fn in_place(config: &Config, record: &Path) -> PathBuf {
    let place = record.file_name().unwrap_or_default();
    config.runtime_root.join("netns").join(place)
}

/// Makes a netns on a thread of its own, `lo` up, and pins it at `path`. The intent must be on record before.
///
/// An existing good pin is an error (Exists); anything else that was left there is replaced. In a user namespace of the
/// pod's own: [`super::userns::make`].
pub fn make(path: &Path) -> Result<()> {
    made(path, Fresh::begin)
}

/// The same of one that was begun before.
pub fn make_of(fresh: Fresh, path: &Path) -> Result<()> {
    made(path, || Ok(fresh))
}

fn made(path: &Path, fresh: impl FnOnce() -> Result<Fresh>) -> Result<()> {
    let what = || format!("make netns {}", path.display());
    prepare(path).map_err(|e| e.within(what()))?;
    failpoint::hit("netns.pin.before")?;
    fresh()?.pin(path)?;
    failpoint::hit("netns.pin.after")?;
    show(path);
    Ok(())
}

/// Makes room for a pin at `path` and its user namespace's beside it.
pub(super) fn prepare(path: &Path) -> Result<()> {
    if is_pinned(path) {
        return Err(Error::new(Kind::Exists, "one is pinned there already"));
    }
    if let Some(dir) = path.parent() {
        disk::private_dir(dir)?;
    }
    // What a crash between making the file and mounting on it left, or somebody else put there.
    for path in [path, &userns::user_path(path)] {
        if path.symlink_metadata().is_ok() {
            clear(path)?;
        }
    }
    Ok(())
}

/// Shows a pin to `ip netns`: a comfort for people, which the pod does not need.
pub(super) fn show(path: &Path) {
    if let Err(error) = link(path) {
        tracing::warn!(%error, "netns not shown to ip netns");
    }
}

/// Unmounts (detach, repeated while mounts are stacked), unlinks pin and link, and the pin of the user namespace where
/// there is one; absent = done. So is a path that is something else by now: what is not a netns is gone.
pub fn unpin(path: &Path) -> Result<()> {
    let what = || format!("unpin netns {}", path.display());
    if let Err(error) = unlink(path) {
        // On a read-only /run/netns it was never made, or cannot go; it points at nothing then.
        tracing::warn!(%error, "link to the netns left behind");
    }
    failpoint::hit("netns.link.after")?;
    clear(path).map_err(|e| e.within(what()))?;
    clear(&userns::user_path(path)).map_err(|e| e.within(what()))
}

/// True when there is a network namespace at `path` (an nsfs mount, or a link into /proc). A plain file, a directory, or
/// a namespace of another kind is none.
pub fn is_pinned(path: &Path) -> bool {
    // Looked at before it is opened: opening what else may be there (a fifo, a device) can block or do something.
    statfs(path).is_ok_and(|s| s.filesystem_type().0 == libc::NSFS_MAGIC)
        && sys::netns::is_netns(path)
}

/// Brings `lo` up in the netns at `path`; up already = done.
pub fn raise_loopback(path: &Path) -> Result<()> {
    sys::netns::lo_up_in(path)
}

fn link_of(path: &Path) -> Option<PathBuf> {
    let name = path.file_name()?.to_str()?;
    Some(Path::new(LINKS).join(format!("podvisor-{name}")))
}

fn link(path: &Path) -> Result<()> {
    let Some(link) = link_of(path) else {
        return Ok(());
    };
    let made = DirBuilder::new().mode(0o755).create(LINKS);
    match made {
        // The umask must not hide it from iproute2 of other users.
        Ok(()) => fs::set_permissions(LINKS, fs::Permissions::from_mode(0o755))
            .context(|| format!("make directory {LINKS}"))?,
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
        Err(e) => return Err(Error::io(format!("make directory {LINKS}"), e)),
    }
    let what = || format!("link {}", link.display());
    if fs::symlink_metadata(&link).is_ok_and(|m| m.is_symlink()) {
        disk::remove_file(&link)?;
    }
    std::os::unix::fs::symlink(path, &link).context(what)
}

/// Removes the link, but only one that points at this pin.
fn unlink(path: &Path) -> Result<()> {
    match link_of(path) {
        Some(link) if fs::read_link(&link).is_ok_and(|target| target == path) => {
            disk::remove_file(&link)
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plain_file_is_no_netns_and_unpin_takes_it_away() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("0123");
        assert!(!is_pinned(&path));
        fs::write(&path, "").unwrap();
        assert!(!is_pinned(&path));
        unpin(&path).unwrap();
        unpin(&path).unwrap();
        assert!(!path.exists());
        assert!(is_pinned(Path::new("/proc/self/ns/net")));
    }

    #[test]
    fn what_is_no_netns_is_gone_whatever_it_is() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("0123");
        fs::create_dir(&path).unwrap();
        assert!(!is_pinned(&path) && !is_pinned(Path::new("/proc/self/ns/mnt")));
        unpin(&path).unwrap();
        assert!(!path.exists());
        fs::create_dir(&path).unwrap();
        fs::write(path.join("theirs"), "").unwrap();
        unpin(&path).unwrap();
        assert!(path.join("theirs").exists());
        let fifo = dir.path().join("fifo");
        nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRUSR).unwrap();
        assert!(!is_pinned(&fifo));
    }

    #[test]
    fn the_path_is_below_the_runtime_root_and_different_for_each_sandbox() {
        let config = Config::default();
        let a = path(&config, "default", "a");
        assert!(a.starts_with("/run/podvisor/netns"));
        assert_ne!(a, path(&config, "k8s.io", "a"));
        assert_ne!(a, path(&config, "default", "b"));
    }
}
