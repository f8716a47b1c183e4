//! When nothing can be kept, and the call goes straight through to the real plugins.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use nix::sys::statfs::{Statfs, fstatfs};
use serde_json::Value;

use super::note;
use super::request::Request;
use crate::config::Config;
use crate::error::Result;
use crate::network::userns::{self, Wanted};
use crate::network::{self, Through, netns};
use crate::process::Reaper;
use crate::sys;

/// Why the ADD of this attempt is passed through; None: its network can be kept.
pub(super) fn why(config: &Config, request: &Request) -> Option<&'static str> {
    let netns = request.netns.as_path();
    if !config.parking.enabled {
        return Some("parking is off");
    }
    if request.key().is_none() {
        return Some("the daemon tells no name and uid of the pod");
    }
    if request.previous.is_some() {
        return Some("plugins before this one have been at the daemon's netns");
    }
    if netns.starts_with(config.runtime_root.join("netns")) {
        return Some("it is a pod of podvisor's, which keeps its network itself");
    }
    let Some(mount) = bind_mount(netns) else {
        return Some("the netns that was given is no bind mount");
    };
    if sys::netns::is_copy_of_pin(&mount) && is_ours(config, netns) {
        return Some("another network of this pod is kept, and its netns is there already");
    }
    if !same(Path::new("/proc/self/ns/mnt"), Path::new("/proc/1/ns/mnt")) {
        return Some("the daemon has a mount namespace of its own");
    }
    if !userns::fits(netns, Wanted::Hosts) {
        return Some("the netns that was given belongs to a user namespace of the pod's");
    }
    None
}

/// Asks the real plugins for what we were asked for, on what we were given.
pub(super) fn through(config: &Config, request: &Request, verb: Through) -> Result<Value> {
    super::block_on(async {
        let reaper = Reaper::start()?;
        let attachment = request.attachment(&request.id, &request.netns);
        let previous = request.previous.as_ref();
        network::pass(config, &reaper, &request.conf, &attachment, verb, previous).await
    })
}

/// The netns at this path is one of those that are pinned here.
fn is_ours(config: &Config, path: &Path) -> bool {
    let Some(given) = identity(path) else {
        return false;
    };
    let pins = fs::read_dir(config.runtime_root.join("netns"));
    let pins = pins.into_iter().flatten().flatten();
    pins.filter_map(|pin| identity(&pin.path()))
        .any(|pin| pin == given)
}

/// Device and inode of what is at a path; None: nothing is.
pub(super) fn identity(path: &Path) -> Option<(u64, u64)> {
    fs::metadata(path).map(|m| (m.dev(), m.ino())).ok()
}

/// Puts an empty netns where an attempt that has lost its network has that bound: the DEL of this attempt is for the
/// daemon's other plugins, too, and the one for `lo` takes it down in whatever it finds there.
fn hide(path: &Path, pin: &Path) -> Result<()> {
    match identity(path) {
        Some(shown) if Some(shown) == identity(pin) => sys::netns::replace_with_new(path),
        _ => Ok(()),
    }
}

/// Before the netns at `pin` is anybody's again who had it at `path`: the daemon's plugin for `lo` may have taken that down
/// already, and may come once more.
pub(super) fn take_back(path: &Path, pin: &Path) -> Result<()> {
    hide(path, pin)?;
    netns::raise_loopback(pin).unwrap_or_else(|error| note(&error.to_string()));
    Ok(())
}

/// Of a namespace that is mounted at this path, and not a link into /proc.
fn bind_mount(path: &Path) -> Option<Statfs> {
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_PATH | libc::O_NOFOLLOW | libc::O_CLOEXEC)
        .open(path);
    let mount = fstatfs(&file.ok()?).ok()?;
    (mount.filesystem_type().0 == libc::NSFS_MAGIC).then_some(mount)
}

/// In doubt they are the same.
fn same(one: &Path, other: &Path) -> bool {
    match (identity(one), identity(other)) {
        (Some(one), Some(other)) => one == other,
        _ => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_into_proc_and_a_plain_file_are_no_bind_mounts() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        fs::write(&file, "").unwrap();
        for path in [Path::new("/proc/self/ns/net"), &file, Path::new("")] {
            assert!(bind_mount(path).is_none(), "{}", path.display());
        }
        assert!(userns::fits(Path::new("/proc/self/ns/net"), Wanted::Hosts));
    }
}
