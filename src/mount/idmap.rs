//! Mounts whose files are seen with other ids: what a snapshotter asks for (`uidmap=`, `gidmap=`) when a container has
//! a user namespace and its image does not belong to it.
//!
//! A bind is a mapped copy of its source. Of an overlay every lower layer is mapped, and the upper one, made for the
//! container, is not. overlayfs takes layers by path only, so the mapped copies are mounted in a scratch directory until
//! it has its own hold of them.

use std::fs;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use super::options::Options;
use super::overlay;
use crate::error::{Context, Error, Kind, Result};
use crate::sys::mount::Detached;
use crate::sys::userns;

/// Most ranges of one map: the kernel's own bound.
const RANGES_MAX: usize = 340;

/// The maps of one mount.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Maps {
    /// In the form of `/proc/<pid>/uid_map`; empty: not mapped.
    pub uids: String,
    /// See `uids`.
    pub gids: String,
}

impl Maps {
    /// Takes `uidmap=0:1000:65536`; more ranges are parted by commas, or given by the option again.
    pub(super) fn add(&mut self, key: &str, value: &str) -> Result<()> {
        let map = if key == "uidmap" {
            &mut self.uids
        } else {
            &mut self.gids
        };
        for range in value.split(',') {
            let mut parts = range.split(':').map(str::parse::<u32>);
            let (Some(Ok(inside)), Some(Ok(outside)), Some(Ok(size)), None) =
                (parts.next(), parts.next(), parts.next(), parts.next())
            else {
                return Err(Error::new(
                    Kind::Invalid,
                    format!(
                        "read mount option {key}={value:?}: give inside:outside:size, three numbers"
                    ),
                ));
            };
            map.push_str(&format!("{inside} {outside} {size}\n"));
        }
        if map.lines().count() > RANGES_MAX {
            let why = format!("read mount option {key}: more than {RANGES_MAX} ranges");
            return Err(Error::new(Kind::Invalid, why));
        }
        Ok(())
    }

    pub(super) fn is_empty(&self) -> bool {
        self.uids.is_empty() && self.gids.is_empty()
    }

    /// A user namespace with them.
    fn namespace(&self) -> Result<OwnedFd> {
        if self.uids.is_empty() || self.gids.is_empty() {
            return Err(Error::new(
                Kind::Invalid,
                "map the ids of a mount: give both uidmap and gidmap",
            ));
        }
        userns::with_maps(&self.uids, &self.gids)
            .context(|| "make a user namespace for an id-mapped mount")
    }
}

/// A mapped copy of `source` at `target`.
pub(super) fn bind(source: &Path, target: &Path, options: &Options, recursive: bool) -> Result<()> {
    let namespace = options.maps.namespace()?;
    copy(source, target, &namespace, recursive)
}

/// Mapped lower layers, mounted until this is dropped.
#[derive(Debug)]
pub(super) struct Layers {
    dir: PathBuf,
}

impl Drop for Layers {
    fn drop(&mut self) {
        if let Err(error) = super::unmount_tree(&self.dir).and_then(|()| {
            fs::remove_dir_all(&self.dir).context(|| format!("remove {}", self.dir.display()))
        }) {
            tracing::warn!(%error, "mapped layers left behind");
        }
    }
}

/// Maps the lower layers of an overlay below `scratch`; `options` name the mapped ones afterwards.
pub(super) fn map_layers(options: &mut Options, scratch: &Path) -> Result<Layers> {
    let namespace = options.maps.namespace()?;
    let layers = Layers {
        dir: scratch.join("layers"),
    };
    // 0700: nobody looks at the layers on their way.
    let mut make = fs::DirBuilder::new();
    make.recursive(true)
        .mode(0o700)
        .create(&layers.dir)
        .context(|| format!("make {}", layers.dir.display()))?;
    let mut number = 0_u32;
    for option in &mut options.data {
        let Some(list) = option.strip_prefix("lowerdir=") else {
            continue;
        };
        let mut mapped = Vec::new();
        for layer in overlay::split(list) {
            if layer.is_empty() {
                mapped.push(String::new()); // half of "::", which starts data-only layers
                continue;
            }
            let place = layers.dir.join(number.to_string());
            number += 1;
            fs::create_dir(&place).context(|| format!("make {}", place.display()))?;
            copy(
                Path::new(&overlay::unescape(layer)),
                &place,
                &namespace,
                false,
            )?;
            mapped.push(overlay::escape(&place.to_string_lossy()));
        }
        *option = format!("lowerdir={}", mapped.join(":"));
    }
    Ok(layers)
}

fn copy(source: &Path, target: &Path, namespace: &OwnedFd, recursive: bool) -> Result<()> {
    let what = || format!("make an id-mapped copy of {}", source.display());
    let tree = Detached::copy_of(source, recursive).context(what)?;
    tree.map_ids(namespace.as_fd(), recursive).map_err(|e| {
        let hint = match e.raw_os_error() {
            Some(libc::EINVAL | libc::ENOSYS) => {
                " (this kernel cannot map the ids of that filesystem; use a snapshotter that changes owners instead)"
            }
            _ => "",
        };
        Error::io(format!("{}{hint}", what()), e)
    })?;
    tree.attach(target).map_err(|e| Error::mount(what(), e))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn maps_are_three_numbers_and_may_come_in_pieces() {
        let mut maps = Maps::default();
        assert!(maps.is_empty());
        maps.add("uidmap", "0:1000:10,10:5000:5").unwrap();
        maps.add("uidmap", "20:1:1").unwrap();
        maps.add("gidmap", "0:2000:10").unwrap();
        assert_eq!(maps.uids, "0 1000 10\n10 5000 5\n20 1 1\n");
        assert_eq!(maps.gids, "0 2000 10\n");
        for bad in [
            "",
            "0:1",
            "0:1:2:3",
            "a:b:c",
            "-1:0:1",
            "0:1:4294967296",
            "0:0:1,",
        ] {
            let error = Maps::default().add("gidmap", bad).unwrap_err();
            assert!(error.to_string().contains("gidmap"), "{bad}: {error}");
        }
        let one = Maps {
            uids: "0 0 1\n".into(),
            ..Maps::default()
        };
        assert_eq!(one.namespace().unwrap_err().kind(), Kind::Invalid);
    }
}
