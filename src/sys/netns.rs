//! Network namespaces: made on a thread of their own and pinned by a bind mount; the loopback interface.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use nix::mount::{MsFlags, mount};
use nix::sched::CloneFlags;
use nix::sys::statfs::Statfs;
use nix::sys::statvfs::FsFlags;

use super::mount::replace_bind;
use super::pin;
use super::thread_ns::{self, Enter, Started};
use crate::error::{Context, Error, Kind, Result};

/// A network namespace in the making. It is nowhere yet: dropped, it is gone.
#[derive(Debug)]
pub struct Fresh(Started<File>);

impl Fresh {
    /// Begins to make one, on a thread of its own, with `lo` up: the kernel takes a millisecond, in which other work can be
    /// done.
    pub fn begin() -> Result<Self> {
        thread_ns::start(CloneFlags::CLONE_NEWNET, || {
            lo_up().context(|| "bring lo up")?;
            // thread-self: the process itself is still in its own netns.
            File::open("/proc/thread-self/ns/net").context(|| "open the new network namespace")
        })
        .map(Self)
    }

    /// Binds it to `path`, a file made here (its directory must exist), with the mark of [`is_copy_of_pin`].
    ///
    /// Exists: there is a file already, which is left alone. On any other error nothing is left.
    pub fn pin(self, path: &Path) -> Result<()> {
        let netns = self.0.done()?;
        let file = format!("/proc/self/fd/{}", netns.as_raw_fd());
        let bound = pin::bind(&file, "network", path).and_then(|()| mark(path));
        bound.inspect_err(|e| {
            if e.kind() != Kind::Exists {
                let _ = pin::clear(path);
            }
        })
    }
}

/// What is bound at `path` may be a copy of a pin made here. False: it is none. Copies of a mount have its flags, and this
/// one says nothing of a namespace: so a look at one mount spares one at every pin.
pub fn is_copy_of_pin(mount: &Statfs) -> bool {
    mount.flags().contains(FsFlags::ST_NODIRATIME)
}

fn mark(path: &Path) -> Result<()> {
    let flags = MsFlags::MS_REMOUNT | MsFlags::MS_BIND | MsFlags::MS_NODIRATIME;
    mount(None::<&str>, path, None::<&str>, flags, None::<&str>)
        .map_err(|e| Error::mount(format!("mark the pin {}", path.display()), e))
}

/// Puts a new network namespace, `lo` up, in the place of the one that is bound at `path`.
pub fn replace_with_new(path: &Path) -> Result<()> {
    thread_ns::run(&[Enter::New(CloneFlags::CLONE_NEWNET)], || {
        lo_up().context(|| "bring lo up")?;
        replace_bind(Path::new("/proc/thread-self/ns/net"), path)
            .context(|| format!("put a new network namespace at {}", path.display()))
    })
}

/// Whether the namespace file at `path` (on nsfs: the caller has looked) is a network namespace's. A kernel that cannot
/// tell (before 4.11) is believed.
pub fn is_netns(path: &Path) -> bool {
    // _IO(0xb7, 0x3), linux/nsfs.h.
    const NS_GET_NSTYPE: libc::c_ulong = 0xb703;
    let Ok(file) = File::open(path) else {
        return false;
    };
    // SAFETY: this request takes no argument and answers a number.
    let kind = unsafe { libc::ioctl(file.as_raw_fd(), NS_GET_NSTYPE as _) };
    kind == libc::CLONE_NEWNET
        || (kind < 0 && io::Error::last_os_error().raw_os_error() == Some(libc::ENOTTY))
}

/// The user namespace that owns the namespace at `path`: device and inode, as of `/proc/<pid>/ns/user`.
pub fn owner(path: &Path) -> io::Result<(u64, u64)> {
    let meta = open_owner(path)?.metadata()?;
    Ok((meta.dev(), meta.ino()))
}

/// The user namespace that owns the namespace at `path`, open.
pub fn open_owner(path: &Path) -> io::Result<File> {
    // _IO(0xb7, 0x1), linux/nsfs.h.
    const NS_GET_USERNS: libc::c_ulong = 0xb701;
    let file = File::open(path)?;
    // SAFETY: this request takes no argument and answers a descriptor.
    let fd = unsafe { libc::ioctl(file.as_raw_fd(), NS_GET_USERNS as _) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel just gave us this descriptor; nobody else knows it.
    Ok(File::from(unsafe { OwnedFd::from_raw_fd(fd) }))
}

/// Brings `lo` up in the network namespace at `netns`.
pub fn lo_up_in(netns: &Path) -> Result<()> {
    let file = File::open(netns).context(|| format!("open {}", netns.display()))?;
    thread_ns::run(
        &[Enter::Join(file.as_fd(), CloneFlags::CLONE_NEWNET)],
        || lo_up().context(|| format!("bring lo up in {}", netns.display())),
    )
}

/// Brings `lo` up in the network namespace of the calling thread.
pub fn lo_up() -> io::Result<()> {
    // SAFETY: socket takes integers.
    let fd = unsafe { libc::socket(libc::AF_INET, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel just gave us this descriptor; nobody else knows it.
    let socket = unsafe { OwnedFd::from_raw_fd(fd) };
    // SAFETY: all zeroes is a valid ifreq: an empty name and an empty union.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(b"lo") {
        *to = *from as libc::c_char;
    }
    // SAFETY: both calls read and write one ifreq, which lives over them; the union holds the flags after the first.
    unsafe {
        if libc::ioctl(socket.as_raw_fd(), libc::SIOCGIFFLAGS as _, &mut request) < 0 {
            return Err(io::Error::last_os_error());
        }
        request.ifr_ifru.ifru_flags |= libc::IFF_UP as libc::c_short;
        if libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFFLAGS as _, &mut request) < 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}
