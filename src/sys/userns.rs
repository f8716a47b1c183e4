//! A user namespace that nobody lives in: what an id-mapped mount takes its map from.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

use super::clone::{errno, leave};
use super::fd::close_gaps;

/// A user namespace with these maps, in the form of `/proc/<pid>/uid_map`.
///
/// A namespace has to be made by a process, and a process with threads cannot change its own. So a child is cloned that
/// only waits and ends before this returns. It has no exit signal: nobody else's wait finds it.
///
/// # Errors
/// Those of clone(2), and EINVAL or EPERM of a map the kernel does not take.
pub fn with_maps(uids: &str, gids: &str) -> io::Result<OwnedFd> {
    let (wait, go) = io::pipe()?;
    let pid = clone_waiting(wait.as_raw_fd())?;
    drop(wait);
    let made = (|| {
        std::fs::write(format!("/proc/{pid}/uid_map"), uids)?;
        std::fs::write(format!("/proc/{pid}/gid_map"), gids)?;
        File::open(format!("/proc/{pid}/ns/user")).map(OwnedFd::from)
    })();
    // The end of its wait.
    drop(go);
    wait_for(pid);
    made
}

fn clone_waiting(pipe: RawFd) -> io::Result<i32> {
    let mut all = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    let mut old = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: both sets are initialised before they are read. The child has copies of our signal handlers, which must
    // not run in it.
    unsafe {
        libc::sigfillset(all.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), old.as_mut_ptr());
    }
    let flags = libc::CLONE_NEWUSER as libc::c_ulong;
    // SAFETY: memory is not shared, a null stack means the copy of ours; the child makes system calls on its own copy of
    // this stack and does not return.
    let pid = unsafe {
        let pid = libc::syscall(libc::SYS_clone, flags, 0_usize, 0_usize, 0_usize, 0_usize) as i32;
        if pid == 0 {
            // Whoever waits for the end of one of our pipes must not wait for this child.
            close_gaps(&[pipe]);
            let mut byte = 0_u8;
            while libc::syscall(libc::SYS_read, pipe, &raw mut byte, 1) < 0
                && errno() == libc::EINTR
            {}
            leave(0);
        }
        pid
    };
    let error = io::Error::last_os_error();
    // SAFETY: `old` was written above.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, old.as_ptr(), std::ptr::null_mut()) };
    if pid < 0 { Err(error) } else { Ok(pid) }
}

fn wait_for(pid: i32) {
    // SAFETY: a null status is allowed. __WCLONE finds this child, which has no exit signal, and no other.
    while unsafe { libc::waitpid(pid, std::ptr::null_mut(), libc::__WCLONE) } < 0
        && errno() == libc::EINTR
    {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_namespace_outlives_its_maker_and_a_bad_map_is_refused() {
        if !nix::unistd::geteuid().is_root() {
            return;
        }
        let made = with_maps("0 1000 10\n", "0 2000 10\n").unwrap();
        let own = std::fs::read_link("/proc/self/ns/user").unwrap();
        let its = std::fs::read_link(format!("/proc/self/fd/{}", made.as_raw_fd())).unwrap();
        assert!(its != own && its.to_str().unwrap().starts_with("user:["));
        assert!(with_maps("x", "0 0 1").is_err());
    }
}
