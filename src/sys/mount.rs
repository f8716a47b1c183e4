//! Mount calls that no crate of ours wraps: the file descriptor based mount API (Linux 5.2), and mount(2) with a
//! working directory of its own.
//!
//! Promises that the process' working directory is never touched, and that every descriptor is owned and close-on-exec.

use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::raw::c_char;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::ptr;

use nix::errno::Errno;
use nix::mount::{MntFlags, MsFlags, umount2};

use crate::error::{Error, Kind, Result};

// From <linux/mount.h>; libc does not have all of them.
const FSOPEN_CLOEXEC: u32 = 1;
const FSCONFIG_SET_FLAG: u32 = 0;
const FSCONFIG_SET_STRING: u32 = 1;
const FSCONFIG_CMD_CREATE: u32 = 6;
const FSMOUNT_CLOEXEC: u32 = 1;
const MOVE_MOUNT_F_EMPTY_PATH: u32 = 4;
const AT_RECURSIVE: u32 = 0x8000;

/// A filesystem being configured: options one at a time, so that no page limits their sum.
#[derive(Debug)]
pub struct FsContext(OwnedFd);

impl FsContext {
    /// fsopen(2) of the filesystem type `kind`.
    ///
    /// # Errors
    /// ENOSYS before Linux 5.2, ENODEV for an unknown type.
    pub fn open(kind: &str) -> io::Result<Self> {
        let kind = CString::new(kind)?;
        // SAFETY: `kind` is a NUL-terminated string that lives through the call; the kernel only reads it.
        let fd = unsafe { libc::syscall(libc::SYS_fsopen, kind.as_ptr(), FSOPEN_CLOEXEC) };
        owned(fd).map(Self)
    }

    /// Sets `key` to `value`. The kernel takes at most 255 bytes of value.
    ///
    /// # Errors
    /// EINVAL for a key or value the filesystem does not take; [`messages`](Self::messages) has its words.
    pub fn set(&self, key: &str, value: &CStr) -> io::Result<()> {
        let key = CString::new(key)?;
        self.config(FSCONFIG_SET_STRING, key.as_ptr(), value.as_ptr())
    }

    /// Sets the flag `key`.
    ///
    /// # Errors
    /// EINVAL for a key the filesystem does not know.
    pub fn flag(&self, key: &str) -> io::Result<()> {
        let key = CString::new(key)?;
        self.config(FSCONFIG_SET_FLAG, key.as_ptr(), ptr::null())
    }

    /// Makes the filesystem and a mount of it that is nowhere yet, with the `MOUNT_ATTR_*` bits `attributes`.
    ///
    /// # Errors
    /// Whatever the filesystem says to its options.
    pub fn mount(&self, attributes: u64) -> io::Result<Detached> {
        self.config(FSCONFIG_CMD_CREATE, ptr::null(), ptr::null())?;
        // SAFETY: takes a descriptor we own and two integers, no memory.
        let fd = unsafe {
            libc::syscall(
                libc::SYS_fsmount,
                self.0.as_raw_fd(),
                FSMOUNT_CLOEXEC,
                attributes,
            )
        };
        owned(fd).map(Detached)
    }

    /// What the filesystem had to say ("e overlay: ..."), in one line; empty when nothing.
    #[must_use]
    pub fn messages(&self) -> String {
        let mut lines = Vec::new();
        let mut buffer = [0; 1024];
        while let Ok(n) = nix::unistd::read(&self.0, &mut buffer) {
            lines.push(String::from_utf8_lossy(&buffer[..n]).trim().to_owned());
            if n == 0 || lines.len() == 16 {
                break;
            }
        }
        lines.join("; ")
    }

    fn config(&self, command: u32, key: *const c_char, value: *const c_char) -> io::Result<()> {
        // SAFETY: `key` and `value` are null or NUL-terminated strings borrowed from our callers for the whole call;
        // the kernel copies them before it returns.
        let done = unsafe {
            libc::syscall(
                libc::SYS_fsconfig,
                self.0.as_raw_fd(),
                command,
                key,
                value,
                0,
            )
        };
        if done < 0 {
            Err(io::Error::last_os_error())
        } else {
            Ok(())
        }
    }
}

/// A mount that is nowhere yet; dropping it unmounts it.
#[derive(Debug)]
pub struct Detached(OwnedFd);

impl Detached {
    /// Puts it at `target`, following a symbolic link there as mount(2) does.
    ///
    /// # Errors
    /// Those of move_mount(2).
    pub fn attach(self, target: &Path) -> io::Result<()> {
        // Callers give /proc/self/fd/N, a link.
        const MOVE_MOUNT_T_SYMLINKS: u32 = 0x10;
        self.move_to(target, MOVE_MOUNT_T_SYMLINKS)
    }

    /// Puts it beneath the mount at `target`, which hides it.
    ///
    /// # Errors
    /// Those of move_mount(2); EINVAL before Linux 6.5.
    pub fn attach_beneath(self, target: &Path) -> io::Result<()> {
        const MOVE_MOUNT_BENEATH: u32 = 0x200;
        self.move_to(target, MOVE_MOUNT_BENEATH)
    }

    fn move_to(self, target: &Path, flags: u32) -> io::Result<()> {
        let target = CString::new(target.as_os_str().as_bytes())?;
        // SAFETY: both strings are NUL-terminated and live through the call; the descriptor is ours.
        let done = unsafe {
            libc::syscall(
                libc::SYS_move_mount,
                self.0.as_raw_fd(),
                c"".as_ptr(),
                libc::AT_FDCWD,
                target.as_ptr(),
                MOVE_MOUNT_F_EMPTY_PATH | flags,
            )
        };
        if done < 0 {
            Err(io::Error::last_os_error())
        } else {
            Ok(())
        }
    }
}

/// Puts a copy of the mount at `source` in the place of the mount at `target`.
///
/// Since Linux 6.5 at one stroke: beneath the old one, which then goes. Before that `target` has no mount for an instant,
/// and stays without one when the second half fails.
///
/// # Errors
/// Those of umount(2) and mount(2).
pub fn replace_bind(source: &Path, target: &Path) -> io::Result<()> {
    let beneath = Detached::copy_of(source, false).and_then(|copy| copy.attach_beneath(target));
    if beneath.is_ok() {
        return Ok(umount2(target, OFF)?);
    }
    umount2(target, OFF)?;
    nix::mount::mount(
        Some(source),
        target,
        None::<&str>,
        MsFlags::MS_BIND,
        None::<&str>,
    )?;
    Ok(())
}

const OFF: MntFlags = MntFlags::MNT_DETACH.union(MntFlags::UMOUNT_NOFOLLOW);

/// Mounts stacked at one place beyond this are somebody's loop, not a leak.
const MAX_STACKED: usize = 1024;

/// Detaches what is mounted at `path`, all that is stacked there, each with everything below it; no mount there, or
/// nothing at all = done. A symbolic link at `path` is not followed.
///
/// # Errors
/// Those of umount(2); Busy when new mounts keep coming.
pub fn detach_all(path: &Path) -> Result<()> {
    for _ in 0..MAX_STACKED {
        match umount2(path, OFF) {
            Ok(()) => {}
            // Not a mount point (any more), or not there.
            Err(Errno::EINVAL | Errno::ENOENT | Errno::ENOTDIR) => return Ok(()),
            Err(e) => return Err(Error::sys(format!("unmount {}", path.display()), e)),
        }
    }
    Err(Error::new(
        Kind::Busy,
        format!(
            "unmount {}: something mounts there faster than it is unmounted; retry",
            path.display()
        ),
    ))
}

/// Makes `dir` a mount of its own, of itself: what is mounted below it from now on goes with it by one unmount. Private,
/// or what is mounted in it would show a second time in the mount it was made of.
///
/// # Errors
/// Those of mount(2).
pub fn bind_to_itself(dir: &Path) -> io::Result<()> {
    let call = |source, flags| nix::mount::mount(source, dir, None::<&str>, flags, None::<&str>);
    call(Some(dir), MsFlags::MS_BIND)?;
    Ok(call(None, MsFlags::MS_PRIVATE)?)
}

impl Detached {
    /// A copy of the mount at `path` (of everything below it too, `recursive`), nowhere yet.
    ///
    /// # Errors
    /// Those of open_tree(2); ENOSYS before Linux 5.2.
    pub fn copy_of(path: &Path, recursive: bool) -> io::Result<Self> {
        const OPEN_TREE_CLONE: u32 = 1;
        let path = CString::new(path.as_os_str().as_bytes())?;
        let mut flags = OPEN_TREE_CLONE | libc::O_CLOEXEC as u32;
        if recursive {
            flags |= AT_RECURSIVE;
        }
        // SAFETY: the string is NUL-terminated and lives through the call.
        let fd =
            unsafe { libc::syscall(libc::SYS_open_tree, libc::AT_FDCWD, path.as_ptr(), flags) };
        owned(fd).map(Self)
    }

    /// Shows the files of the mount with the ids that the user namespace maps them to. Only before it is attached.
    ///
    /// # Errors
    /// EINVAL for a filesystem that cannot be mapped, or one that is mapped already; ENOSYS before Linux 5.12.
    pub fn map_ids(&self, user_namespace: BorrowedFd<'_>, recursive: bool) -> io::Result<()> {
        /// struct mount_attr.
        #[repr(C)]
        struct Attributes {
            set: u64,
            clear: u64,
            propagation: u64,
            user_namespace: u64,
        }
        const MOUNT_ATTR_IDMAP: u64 = 0x0010_0000;
        let attributes = Attributes {
            set: MOUNT_ATTR_IDMAP,
            clear: 0,
            propagation: 0,
            user_namespace: user_namespace.as_raw_fd() as u64, // never negative: it is open
        };
        let mut flags = libc::AT_EMPTY_PATH as u32;
        if recursive {
            flags |= AT_RECURSIVE;
        }
        // SAFETY: the kernel reads a NUL-terminated string and a struct of the size it is told; both live through the call.
        let done = unsafe {
            libc::syscall(
                libc::SYS_mount_setattr,
                self.0.as_raw_fd(),
                c"".as_ptr(),
                flags,
                &raw const attributes,
                size_of::<Attributes>(),
            )
        };
        if done < 0 {
            Err(io::Error::last_os_error())
        } else {
            Ok(())
        }
    }
}

/// mount(2) with `cwd` as the working directory, so that `data` may hold relative paths.
///
/// Runs on a thread of its own that has left the working directory it shared with the rest of the process.
///
/// # Errors
/// Those of unshare(2), chdir(2) and mount(2).
pub fn mount_in(
    cwd: &Path,
    source: &str,
    target: &Path,
    kind: &str,
    flags: MsFlags,
    data: &CStr,
) -> io::Result<()> {
    let work = || -> io::Result<()> {
        // SAFETY: takes no memory. CLONE_FS only separates this thread's cwd, root and umask; the thread ends below.
        if unsafe { libc::unshare(libc::CLONE_FS) } < 0 {
            return Err(io::Error::last_os_error());
        }
        #[allow(
            clippy::disallowed_methods,
            reason = "this thread has a working directory of its own"
        )]
        nix::unistd::chdir(cwd)?;
        nix::mount::mount(Some(source), target, Some(kind), flags, Some(data))?;
        Ok(())
    };
    std::thread::scope(|scope| {
        let builder = std::thread::Builder::new()
            .name("mount".into())
            .stack_size(64 << 10);
        let thread = builder.spawn_scoped(scope, work)?;
        thread
            .join()
            .unwrap_or_else(|_| Err(io::Error::other("the mount thread panicked")))
    })
}

fn owned(fd: libc::c_long) -> io::Result<OwnedFd> {
    let fd = i32::try_from(fd).map_err(|_| io::Error::other("descriptor out of range"))?;
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a descriptor the kernel has just made for this call, held by nobody else.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}
