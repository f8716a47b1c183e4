//! fork(2) without exec, while this process has one thread.

use std::fs;
use std::io;

/// Which side of a fork this is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fork {
    /// The parent, with the child's pid.
    Parent(i32),
    /// The child.
    Child,
}

/// Forks. Refused (EBUSY) when the process has more than one thread: the child would own locks that nobody in it will
/// ever release. So call it before a runtime is built.
pub fn fork() -> io::Result<Fork> {
    if fs::read_dir("/proc/self/task")?.count() != 1 {
        return Err(io::Error::from_raw_os_error(libc::EBUSY));
    }
    // SAFETY: with a single thread the child is a whole copy of this process, in which everything may be called.
    match unsafe { libc::fork() } {
        0 => Ok(Fork::Child),
        pid if pid > 0 => Ok(Fork::Parent(pid)),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Leaves at once, without exit handlers and without flushing: for the parent's side of a fork.
pub fn exit_now(code: i32) -> ! {
    // SAFETY: _exit has no preconditions and does not return.
    unsafe { libc::_exit(code) }
}

/// A new session, of which we are the leader: no terminal, own process group.
pub fn new_session() -> io::Result<()> {
    // SAFETY: setsid has no preconditions.
    if unsafe { libc::setsid() } < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(())
    }
}
