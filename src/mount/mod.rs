//! Root filesystem mounts as a daemon's snapshotter names them, and their undo.
//!
//! Owns how a list of mounts becomes a tree under a bundle's `rootfs`. Promises that a failed list leaves nothing
//! mounted, that a target never leaves the root it belongs to, and that unmounting goes by what the kernel lists, not
//! by what we remember. Must never follow a symbolic link that the image or the container made.

mod helper;
mod idmap;
mod options;
mod overlay;
#[cfg(test)]
mod tests;

use std::fs::{self, File};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{OFlag, OpenHow, ResolveFlag, openat2};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sys::statvfs::{FsFlags, fstatvfs};
use serde::{Deserialize, Serialize};

use crate::error::{Context, Error, Kind, Result};
use crate::sys::loopdev::LoopDevice;
use crate::sys::mountinfo;
pub use helper::RunHelper;
use options::Options;

/// Rounds of [`unmount_tree`]: each takes away one layer of stacked mounts, so this many may be stacked at one place.
const MAX_ROUNDS: usize = 256;

/// One mount as containerd's snapshotter names it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mount {
    /// Filesystem type, or "bind".
    pub kind: String,
    /// Device, directory or name.
    pub source: String,
    /// Below the root; empty for the root itself.
    #[serde(default)]
    pub target: String,
    /// As mount(8) writes them; what is unknown goes to the filesystem.
    #[serde(default)]
    pub options: Vec<String>,
}

/// Mounts all, in order, below `root`; undoes what it did when one fails. `scratch`: a directory for what is mounted only
/// meanwhile; made when it is needed, and on the way out empty again. `run`: for filesystems that a program mounts
/// (`fuse.*`, `fuse3.*`).
///
/// # Errors
/// What the kernel or the program says, with the number and the type of the mount.
pub fn mount_all(mounts: &[Mount], root: &Path, scratch: &Path, run: &RunHelper<'_>) -> Result<()> {
    let mut done = Vec::new();
    for (index, mount) in mounts.iter().enumerate() {
        if let Err(e) = mount_one(mount, root, scratch, run, &mut done) {
            for point in done.iter().rev() {
                if let Err(e) = unmount(point) {
                    tracing::warn!(point = %point.display(), error = %e, "undo of a mount");
                }
            }
            return Err(e.within(format!(
                "mount {} of {} ({}) on {}",
                index + 1,
                mounts.len(),
                mount.kind,
                root.display()
            )));
        }
    }
    Ok(())
}

/// Unmounts everything mounted at and below `path`, deepest first, from the kernel's table, until nothing is left
/// there; what is busy is detached. Absent is done. Symbolic links at `path` and below are not followed.
///
/// # Errors
/// The last refusal of the kernel, with the place, when something stays mounted.
pub fn unmount_tree(path: &Path) -> Result<()> {
    let Some(path) = real(path)? else {
        return Ok(());
    };
    let mut last = None;
    for _ in 0..MAX_ROUNDS {
        let all = mountinfo::read().context(|| "read the mount table")?;
        let points = below(&all, &path);
        if points.is_empty() {
            return Ok(());
        }
        let mut progress = false;
        for point in points {
            match unmount(&point) {
                Ok(()) => progress = true,
                Err(e) => last = Some(e),
            }
        }
        if !progress {
            break;
        }
    }
    Err(last
        .unwrap_or_else(|| Error::new(Kind::Other, "unmount: new mounts keep coming"))
        .within(format!("unmount all below {}", path.display())))
}

fn mount_one(
    wanted: &Mount,
    root: &Path,
    scratch: &Path,
    run: &RunHelper<'_>,
    done: &mut Vec<PathBuf>,
) -> Result<()> {
    if let Some(program) = helper::of(&wanted.kind) {
        done.push(helper::place(wanted, root, program, run)?);
        return Ok(());
    }
    let mut options = Options::parse(&wanted.kind, &wanted.options)?;
    if !options.flags.contains(MsFlags::MS_REMOUNT) || !options.data.is_empty() {
        let target = at(root, &wanted.target)?;
        place(wanted, &mut options, &proc_path(&target), scratch)?;
        if !options.flags.contains(MsFlags::MS_REMOUNT) {
            // Opened anew: the first descriptor is the directory below the mount.
            let top = at(root, &wanted.target)?;
            done.push(fs::read_link(proc_path(&top)).context(|| "find the new mount")?);
        }
    }
    let top = at(root, &wanted.target)?;
    let point = proc_path(&top);
    let later = options.after_bind() & !MsFlags::MS_REMOUNT;
    if options.is_bind() && !later.is_empty() {
        // The kernel ignores these flags in the first call; those the source's own mount had must be named again.
        let flags = MsFlags::MS_BIND | MsFlags::MS_REMOUNT | later | kept(&top)?;
        mount(None::<&str>, &point, None::<&str>, flags, None::<&str>)
            .context(|| format!("remount with {later:?}"))?;
    }
    if !options.propagation.is_empty() {
        mount(
            None::<&str>,
            &point,
            None::<&str>,
            options.propagation,
            None::<&str>,
        )
        .context(|| "change the propagation")?;
    }
    Ok(())
}

/// The first call: the mount itself, at `point`.
fn place(wanted: &Mount, options: &mut Options, point: &Path, scratch: &Path) -> Result<()> {
    let mut source = wanted.source.clone();
    // Both are let go when the mount is made: it has a hold of its own then.
    let mut _layers = None;
    let mut _device = None;
    if !options.maps.is_empty() {
        if options.is_bind() {
            let recursive = options.flags.contains(MsFlags::MS_REC);
            return idmap::bind(Path::new(&source), point, options, recursive);
        }
        if wanted.kind != "overlay" {
            let why = format!(
                "map the ids of a {} mount: only binds and overlays can be",
                wanted.kind
            );
            return Err(Error::new(Kind::Unsupported, why));
        }
        _layers = Some(idmap::map_layers(options, scratch)?);
    }
    if options.is_loop {
        let read_only = options.flags.contains(MsFlags::MS_RDONLY);
        let device = LoopDevice::attach(Path::new(&source), read_only)
            .context(|| format!("make a loop device of {source}"))?;
        source = device.path.to_string_lossy().into_owned();
        _device = Some(device);
    }
    if overlay::is_long(&wanted.kind, options) {
        return overlay::mount_long(&source, point, options);
    }
    let data = options.joined();
    let data = (!data.is_empty()).then_some(data.as_str());
    let kind = Some(wanted.kind.as_str());
    mount(Some(source.as_str()), point, kind, options.flags, data)
        .map_err(|e| Error::mount(format_args!("mount {:?}", wanted.source), e))
}

/// Opens `target` inside `root`: links and `..` in it cannot lead out (openat2 with RESOLVE_IN_ROOT).
fn at(root: &Path, target: &str) -> Result<OwnedFd> {
    let dir: OwnedFd = File::options()
        .read(true)
        .custom_flags(libc::O_PATH | libc::O_DIRECTORY | libc::O_NOFOLLOW)
        .open(root)
        .context(|| format!("open {} (a directory, no link)", root.display()))?
        .into();
    let target = target.trim_start_matches('/');
    if target.is_empty() {
        return Ok(dir);
    }
    let how = OpenHow::new()
        .flags(OFlag::O_PATH | OFlag::O_CLOEXEC)
        .resolve(ResolveFlag::RESOLVE_IN_ROOT | ResolveFlag::RESOLVE_NO_MAGICLINKS);
    openat2(&dir, target, how).context(|| format!("open {target:?} below {}", root.display()))
}

fn proc_path(fd: &OwnedFd) -> PathBuf {
    format!("/proc/self/fd/{}", fd.as_raw_fd()).into()
}

/// Flags of the mount `fd` is on that a remount would otherwise take away.
fn kept(fd: &OwnedFd) -> Result<MsFlags> {
    let now = fstatvfs(fd).context(|| "read the flags of a bind")?.flags();
    Ok([
        (FsFlags::ST_RDONLY, MsFlags::MS_RDONLY),
        (FsFlags::ST_NOSUID, MsFlags::MS_NOSUID),
        (FsFlags::ST_NODEV, MsFlags::MS_NODEV),
        (FsFlags::ST_NOEXEC, MsFlags::MS_NOEXEC),
        (FsFlags::ST_NOATIME, MsFlags::MS_NOATIME),
        (FsFlags::ST_NODIRATIME, MsFlags::MS_NODIRATIME),
        (FsFlags::ST_RELATIME, MsFlags::MS_RELATIME),
    ]
    .into_iter()
    .filter(|(seen, _)| now.contains(*seen))
    .fold(MsFlags::empty(), |sum, (_, flag)| sum | flag))
}

/// `path` with the links of its parent resolved, its last part as it is; None when it is not there.
fn real(path: &Path) -> Result<Option<PathBuf>> {
    let what = || format!("find {}", path.display());
    let parent = match path.parent() {
        Some(p) if !p.as_os_str().is_empty() => p,
        Some(_) => Path::new("."),
        None => {
            return Err(Error::new(
                Kind::Invalid,
                "unmount all below /: give a directory of a pod",
            ));
        }
    };
    let Some(name) = path.file_name() else {
        return Err(Error::new(
            Kind::Invalid,
            format!("{}: it must not end in '..'", what()),
        ));
    };
    match fs::canonicalize(parent) {
        Ok(parent) => Ok(Some(parent.join(name))),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(Error::io(what(), e)),
    }
}

/// Mount points at and below `path`: deepest first, and of several at one depth the youngest first.
fn below(all: &[mountinfo::Entry], path: &Path) -> Vec<PathBuf> {
    let mut found: Vec<&PathBuf> = all
        .iter()
        .rev()
        .map(|e| &e.point)
        .filter(|p| p.starts_with(path))
        .collect();
    found.sort_by_key(|p| std::cmp::Reverse(p.components().count()));
    found.into_iter().cloned().collect()
}

/// Unmounts the top mount at `point`; gone is done, busy is detached.
fn unmount(point: &Path) -> Result<()> {
    let result = match umount2(point, MntFlags::UMOUNT_NOFOLLOW) {
        Err(Errno::EBUSY) => umount2(point, MntFlags::UMOUNT_NOFOLLOW | MntFlags::MNT_DETACH),
        other => other,
    };
    match result {
        // EINVAL: not a mount point (any more); ENOENT: gone with what it was in. The next look at the table decides.
        Ok(()) | Err(Errno::EINVAL | Errno::ENOENT) => Ok(()),
        Err(e) => Err(Error::sys(format!("unmount {}", point.display()), e)),
    }
}
