//! Namespaces pinned by path: a bind mount of the namespace's file, which holds it when no process is in it any more.

use std::fs::{self, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use nix::mount::{MsFlags, mount};

use super::mount::detach_all;
use crate::error::{Context, Error, Result};

/// Pins the namespace `kind`, as it is called in `/proc/<pid>/ns`, of process `pid` at `path`, a file made here. `pid`
/// must be a child of ours that nobody has reaped: then the number is nobody else's.
///
/// # Errors
/// Exists: there is a file already, which is left alone. Those of mount(2): then the file stays for [`clear`].
pub fn pin(pid: i32, kind: &str, path: &Path) -> Result<()> {
    bind(&format!("/proc/{pid}/ns/{kind}"), kind, path)
}

/// The same of a namespace by its file.
pub(super) fn bind(namespace: &str, kind: &str, path: &Path) -> Result<()> {
    let what = || format!("pin a {kind} namespace at {}", path.display());
    OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o444)
        .open(path)
        .context(what)?;
    mount(
        Some(namespace),
        path,
        None::<&str>,
        MsFlags::MS_BIND,
        None::<&str>,
    )
    .map_err(|e| Error::mount(what(), e))
}

/// Takes everything at `path` away: mounts, then the file; absent = done. A directory goes if it is empty, else it is left
/// to whoever filled it.
pub fn clear(path: &Path) -> Result<()> {
    detach_all(path)?;
    let removed = match fs::symlink_metadata(path).is_ok_and(|m| m.is_dir()) {
        true => fs::remove_dir(path),
        false => fs::remove_file(path),
    };
    match removed {
        Err(e) if e.kind() == io::ErrorKind::DirectoryNotEmpty => {
            tracing::warn!(path = %path.display(), "a directory with files in the place of a namespace: left there");
            Ok(())
        }
        Err(e) if e.kind() != io::ErrorKind::NotFound => {
            Err(Error::io(format!("remove {}", path.display()), e))
        }
        _ => Ok(()),
    }
}
