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

use nix::errno::Errno;
use nix::mount::{MntFlags, umount2};
use nix::sys::statfs::statfs;

use super::{disk, markers};
use crate::config::Config;
use crate::error::{Context, Error, Kind, Result};
use crate::sys;

/// Where iproute2 looks.
const LINKS: &str = "/run/netns";

/// Mounts stacked on one pin beyond this are somebody's loop, not a leak.
const MAX_STACKED: usize = 1024;

/// Where this sandbox's netns is (to be) pinned; touches nothing.
pub fn path(config: &Config, namespace: &str, sandbox_id: &str) -> PathBuf {
    config
        .runtime_root
        .join("netns")
        .join(markers::hash(namespace, sandbox_id))
}

/// Makes a netns on a thread of its own, `lo` up, and pins it at `path`. The intent must be on record before.
///
/// An existing good pin is an error (Exists); a plain file left there by a crash is replaced.
pub fn make(path: &Path) -> Result<()> {
    let what = || format!("make netns {}", path.display());
    if is_pinned(path) {
        return Err(Error::new(
            Kind::Exists,
            format!("{}: one is pinned there already", what()),
        ));
    }
    if let Some(dir) = path.parent() {
        disk::private_dir(dir).context(what)?;
    }
    // What a crash between making the file and mounting on it left.
    disk::remove_file(path).context(what)?;
    sys::netns::new_netns_pinned(path)?;
    if let Err(error) = link(path) {
        // A comfort for people; the pod does not need it.
        tracing::warn!(%error, "netns not shown to ip netns");
    }
    Ok(())
}

/// Unmounts (detach, repeated while mounts are stacked), unlinks pin and link; absent = done.
pub fn unpin(path: &Path) -> Result<()> {
    let what = || format!("unpin netns {}", path.display());
    unlink(path)?;
    for _ in 0..MAX_STACKED {
        match umount2(path, MntFlags::MNT_DETACH | MntFlags::UMOUNT_NOFOLLOW) {
            Ok(()) => {}
            // Not a mount point (any more), or not there.
            Err(Errno::EINVAL | Errno::ENOENT) => return disk::remove_file(path).context(what),
            Err(e) => return Err(Error::sys(what(), e)),
        }
    }
    Err(Error::new(
        Kind::Busy,
        format!(
            "{}: something mounts there faster than it is unmounted; retry",
            what()
        ),
    ))
}

/// True when there is a namespace at `path` (an nsfs mount, or a link into /proc); a plain file is none.
pub fn is_pinned(path: &Path) -> bool {
    statfs(path).is_ok_and(|s| s.filesystem_type().0 == libc::NSFS_MAGIC)
}

/// Brings `lo` up in the netns at `path`; up already = done.
pub(super) fn raise_loopback(path: &Path) -> Result<()> {
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
    fn the_path_is_below_the_runtime_root_and_different_for_each_sandbox() {
        let config = Config::default();
        let a = path(&config, "default", "a");
        assert!(a.starts_with("/run/podvisor/netns"));
        assert_ne!(a, path(&config, "k8s.io", "a"));
        assert_ne!(a, path(&config, "default", "b"));
    }
}
