//! Mounts that another program makes: FUSE filesystems, by libfuse's `mount.fuse` and `mount.fuse3`.
//!
//! Promises that the program is given what containerd gives it, that only a mount which the kernel lists counts as made,
//! and that one which a failing program has made all the same is taken away. The filesystem's own process is the
//! program's child that stays: it ends with the mount.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use super::{Mount, at, options, proc_path, unmount};
use crate::error::{Context, Error, Kind, Result};
use crate::sys::mountinfo;

/// Runs a program to its end: its name, which is looked for in `PATH`, and its arguments. Fails when it cannot be run or
/// does not say 0; the error has what it printed.
pub type RunHelper<'a> = dyn Fn(&str, Vec<OsString>) -> Result<()> + 'a;

/// The program for mounts of type `kind`, and the type it is told; None where the kernel mounts them.
pub(super) fn of(kind: &str) -> Option<(&'static str, &str)> {
    [("mount.fuse3", "fuse3."), ("mount.fuse", "fuse.")]
        .into_iter()
        .find_map(|(program, prefix)| Some((program, kind.strip_prefix(prefix)?)))
}

/// Lets `program` make the mount; answers where it is.
pub(super) fn place(
    wanted: &Mount,
    root: &Path,
    (program, kind): (&str, &str),
    run: &RunHelper<'_>,
) -> Result<PathBuf> {
    // Another process cannot go by our descriptor. What the link says lies in the root: links are resolved by then, and
    // nobody but us works in a root that is being made.
    let target = at(root, &wanted.target)?;
    let point = fs::read_link(proc_path(&target)).context(|| "find the place of the mount")?;
    drop(target);
    let mut args: Vec<OsString> = vec![wanted.source.clone().into(), point.clone().into()];
    for option in wanted.options.iter().filter(|o| !options::is_hint(o)) {
        args.extend(["-o".into(), option.into()]);
    }
    args.extend(["-t".into(), kind.into()]);
    let before = mounts_at(&point)?;
    let ended = run(program, args);
    let is_there = mounts_at(&point)? > before;
    match ended {
        Ok(()) if is_there => Ok(point),
        Ok(()) => {
            let what = format!("{program} -t {kind}: it says that it has mounted and has not");
            Err(Error::new(Kind::Other, what))
        }
        Err(error) => {
            if is_there && let Err(e) = unmount(&point) {
                tracing::warn!(point = %point.display(), error = %e, "undo of a mount");
            }
            Err(error)
        }
    }
}

/// How many mounts are stacked at `point`.
fn mounts_at(point: &Path) -> Result<usize> {
    let all = mountinfo::read().context(|| "read the mount table")?;
    Ok(all.iter().filter(|entry| entry.point == point).count())
}
