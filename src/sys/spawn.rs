//! A program started without a copy of us: its process borrows our memory until it execs, and we stand still as long.
//!
//! fork(2) copies our page tables, and afterwards each page that we write to once more: half a millisecond, where this
//! takes a tenth. Promise, as for `sys::clone`: between clone and exec nothing is allocated and no lock is taken.

use std::ffi::CString;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::process::Command;
use std::ptr;

use super::clone::errno;
use super::image::{Image, Stack};
use super::process::SetUp;

struct Start {
    image: Image,
    set_up: SetUp,
    cwd: Option<CString>,
    stdio: [RawFd; 3],
}

/// Starts `command`, of which only program, arguments, environment (nothing is inherited) and working directory count, in
/// a process group of its own, with [`super::process::set_up_child`]'s set-up; it dies with the calling thread. Its pid.
///
/// # Errors
/// What exec says (NotFound: there is no such program); InvalidInput for a descriptor below 3. A command that was given a
/// NUL holds other text in its place: whoever fills it has to look.
pub fn spawn(command: &Command, stdio: [&OwnedFd; 3]) -> io::Result<i32> {
    let stdio = stdio.map(AsRawFd::as_raw_fd);
    if stdio.iter().any(|fd| *fd < 3) {
        return Err(io::Error::from_raw_os_error(libc::EINVAL));
    }
    let cwd = command.get_current_dir();
    let cwd = cwd.map(|dir| CString::new(dir.as_os_str().as_bytes()));
    let start = Start {
        image: Image::of(command)?,
        set_up: SetUp::of_child(true),
        cwd: cwd.transpose()?,
        stdio,
    };
    // SAFETY: `become_program` keeps to that. Every signal is blocked until it has the default handlers: none of ours may
    // run there.
    let spawned = unsafe {
        let mut all = MaybeUninit::<libc::sigset_t>::uninit();
        let mut before = MaybeUninit::<libc::sigset_t>::uninit();
        libc::sigfillset(all.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr());
        let spawned = Stack::new().run(become_program, &start);
        libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), ptr::null_mut());
        spawned
    };
    spawned.map_err(io::Error::from_raw_os_error)
}

/// Returns errno.
unsafe fn become_program(start: &Start) -> i32 {
    // SAFETY: system calls on integers and NUL-terminated texts.
    unsafe {
        for (place, fd) in (0..).zip(start.stdio) {
            if libc::dup2(fd, place) < 0 {
                return errno();
            }
        }
        if let Some(cwd) = &start.cwd
            && libc::chdir(cwd.as_ptr()) < 0
        {
            return errno();
        }
        libc::setpgid(0, 0);
        match start.set_up.apply() {
            Ok(()) => start.image.exec(),
            Err(error) => error.raw_os_error().unwrap_or(libc::EINVAL),
        }
    }
}
