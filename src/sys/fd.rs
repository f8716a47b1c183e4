//! Descriptors: closing what was inherited, sealed memory files, readiness.

use std::ffi::CStr;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Closes every descriptor from 3 up except those in `keep`: the first thing in a supervisor's `main`, so that nothing
/// inherited survives by accident.
///
/// Call it before anything of this process owns a descriptor above 2 that is not in `keep`: an owner that finds its
/// number closed, or reused, would close somebody else's. On a kernel without close_range (before 5.9) each number up
/// to the soft limit, at most 65536, is closed.
pub fn close_from(keep: &[RawFd]) {
    let mut keep = keep.to_vec();
    keep.sort_unstable();
    close_gaps(&keep);
}

/// The same for a sorted list; allocates nothing (it runs between clone and exec).
pub(super) fn close_gaps(sorted: &[RawFd]) {
    let mut next = 3_u32;
    for fd in sorted {
        let fd = *fd as u32; // never negative: they are open descriptors
        if fd < next {
            continue;
        }
        if fd > next {
            close_range(next, fd.wrapping_sub(1));
        }
        next = fd.saturating_add(1);
    }
    close_range(next, u32::MAX);
}

/// Marks every descriptor from 3 up close-on-exec. Harmless to owners.
pub fn cloexec_from_3() {
    // SAFETY: only flags of descriptors change; no memory is touched.
    unsafe {
        libc::syscall(
            libc::SYS_close_range,
            3,
            u32::MAX,
            libc::CLOSE_RANGE_CLOEXEC,
        )
    };
}

/// Closes every descriptor, 0 to 2 among them; allocates nothing. Only in a process that owns none.
pub(super) fn close_everything() {
    close_range(0, u32::MAX);
}

fn close_range(first: u32, last: u32) {
    // SAFETY: the caller of close_from answers for nobody owning these descriptors; no memory is touched.
    if unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) } == 0 {
        return;
    }
    let mut fd = first;
    while fd <= last && fd < 65_536 {
        // SAFETY: as above. EBADF is the usual answer.
        unsafe { libc::syscall(libc::SYS_close, fd) };
        fd = fd.wrapping_add(1);
    }
}

/// A memory file with these bytes, sealed against any change, close-on-exec: what a program is executed from.
pub fn sealed_memory_file(name: &CStr, bytes: &[u8]) -> io::Result<OwnedFd> {
    let base = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
    // MFD_EXEC says that the file is meant to be executed (6.3; with vm.memfd_noexec = 1 the default is not). Older
    // kernels refuse the flag and need none.
    let fd = match memfd_create(name, base | libc::MFD_EXEC) {
        Err(e) if e.raw_os_error() == Some(libc::EINVAL) => memfd_create(name, base)?,
        other => other?,
    };
    let mut file = File::from(fd);
    file.write_all(bytes)?;
    let seals = libc::F_SEAL_WRITE | libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
    // SAFETY: F_ADD_SEALS takes an integer.
    if unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, seals) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(OwnedFd::from(file))
}

fn memfd_create(name: &CStr, flags: libc::c_uint) -> io::Result<OwnedFd> {
    // SAFETY: the name is NUL-terminated and only read.
    let fd = unsafe { libc::memfd_create(name.as_ptr(), flags) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel just gave us this descriptor; nobody else knows it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Registers a descriptor with the runtime; it must be one that can be polled and should be non-blocking.
pub fn watch(fd: OwnedFd, interest: Interest) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an OwnedFd answers the same, open descriptor for as long as the AsyncFd owns it.
    let watched = unsafe { AsyncFd::register_with_interest(fd, interest) };
    watched.map_err(|error| error.into_parts().1)
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    #[test]
    fn a_sealed_file_reads_back_and_takes_no_write() {
        let fd = sealed_memory_file(c"test", b"abc").expect("make");
        let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
        let mut text = String::new();
        File::open(&path)
            .expect("open")
            .read_to_string(&mut text)
            .expect("read");
        assert_eq!(text, "abc");
        assert!(File::from(fd).write_all(b"d").is_err());
    }
}
