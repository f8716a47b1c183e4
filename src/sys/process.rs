//! Processes: pidfds, wait, subreaper, and what every child of ours is set up with between fork and exec.
//!
//! Must never be used to wait outside `process::reaper`: a second caller steals exit codes.

use std::fs;
use std::io::{self, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};

/// Soft limit of open files that our children start with. The hard one is [`NOFILE_HARD`].
///
/// An OCI runtime hands its own limits to a container whose spec names none, so a supervisor started with
/// `ulimit -n 1000000000` would give workloads that close or scan "all" descriptors minutes of work. The default is
/// therefore stated, not inherited; nothing is raised above what was given to us.
pub const NOFILE_SOFT: u64 = 1024;
/// Upper bound of the hard limit of open files of our children; see [`NOFILE_SOFT`].
pub const NOFILE_HARD: u64 = 1_048_576;

/// True once we switched transparent huge pages off for ourselves, so that children get them back.
pub(super) static THP_IS_OFF: AtomicBool = AtomicBool::new(false);

/// How a child ended, as the kernel tells it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// It called exit with this code.
    Code(i32),
    /// This signal ended it.
    Signal(i32),
}

/// Opens a pidfd (close-on-exec). ESRCH: no such process.
pub fn pidfd_open(pid: i32) -> io::Result<OwnedFd> {
    // SAFETY: pidfd_open takes two integers and touches no memory of ours.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel just gave us this descriptor; nobody else knows it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as RawFd) })
}

/// Signals the process behind a pidfd. ESRCH: it has been reaped.
pub fn pidfd_send_signal(pidfd: BorrowedFd<'_>, signal: i32) -> io::Result<()> {
    // SAFETY: a null siginfo is allowed and means "as kill(2) would"; the other arguments are integers.
    let done = unsafe {
        libc::syscall(
            libc::SYS_pidfd_send_signal,
            pidfd.as_raw_fd(),
            signal,
            std::ptr::null::<libc::siginfo_t>(),
            0,
        )
    };
    if done < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(())
    }
}

/// kill(2): a negative pid means a process group. The caller answers for the pid being the one it means.
pub fn kill(pid: i32, signal: i32) -> io::Result<()> {
    // SAFETY: kill takes two integers.
    if unsafe { libc::kill(pid, signal) } < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(())
    }
}

/// A file of /proc that the kernel gives whole at the first read, up to 4 KiB: a line of numbers such as `<pid>/stat`.
/// What reads to the end asks three times as often.
pub fn read_at_once(path: &str) -> io::Result<String> {
    let mut text = [0; 4096];
    let length = fs::File::open(path)?.read(&mut text)?;
    let text = text.get(..length).unwrap_or_default();
    Ok(String::from_utf8_lossy(text).into_owned())
}

/// A process as a person is told of it: `4711 (sleep, state D in do_freezer_trap)`; of one that is gone the pid.
pub fn told(pid: i32) -> String {
    let read = |file: &str| fs::read_to_string(format!("/proc/{pid}/{file}")).unwrap_or_default();
    let stat = read("stat");
    // The name may hold brackets itself: it ends at the last one.
    let named = stat
        .split_once('(')
        .and_then(|(_, rest)| rest.rsplit_once(") "));
    let Some((name, rest)) = named else {
        return pid.to_string();
    };
    let state = rest.chars().next().unwrap_or('?');
    let place = read("wchan");
    match place.trim_matches(['0', '\n']) {
        "" => format!("{pid} ({name}, state {state})"),
        place => format!("{pid} ({name}, state {state} in {place})"),
    }
}

/// Orphans below us become our children.
pub fn become_subreaper() -> io::Result<()> {
    // SAFETY: this prctl takes integers only.
    if unsafe { libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Looks at one ended child without reaping it. None: no child has ended (or there is none).
///
/// Not nix's waitid: it answers EINVAL for a child ended by a real-time signal, after having reaped it.
pub fn peek_ended() -> io::Result<Option<(i32, Status)>> {
    waitid(libc::P_ALL, 0, libc::WNOWAIT)
}

/// Reaps this ended child. None: it has not ended, or is no child of ours.
pub fn reap(pid: i32) -> io::Result<Option<(i32, Status)>> {
    waitid(libc::P_PID, pid as libc::id_t, 0)
}

fn waitid(which: libc::idtype_t, id: libc::id_t, more: i32) -> io::Result<Option<(i32, Status)>> {
    loop {
        let mut info = MaybeUninit::<libc::siginfo_t>::zeroed();
        // Only ended children: stopped and continued ones are no event, or the caller's loop would spin on them.
        let flags = libc::WEXITED | libc::WNOHANG | libc::__WALL | more;
        // SAFETY: `info` is a valid place for a siginfo_t for the time of the call.
        let done = unsafe { libc::waitid(which, id, info.as_mut_ptr(), flags) };
        if done < 0 {
            let error = io::Error::last_os_error();
            match error.raw_os_error() {
                Some(libc::EINTR) => continue,
                Some(libc::ECHILD) => return Ok(None),
                _ => return Err(error),
            }
        }
        // SAFETY: zeroed is a valid siginfo_t, and the kernel wrote the child's one or left the zeroes.
        let info = unsafe { info.assume_init() };
        // SAFETY: waitid fills the SIGCHLD form of the union; with no child ended it is the zeroes from above.
        let (pid, status) = unsafe { (info.si_pid(), info.si_status()) };
        if pid == 0 {
            return Ok(None);
        }
        let status = match info.si_code {
            libc::CLD_EXITED => Status::Code(status),
            _ => Status::Signal(status),
        };
        return Ok(Some((pid, status)));
    }
}

/// Lets SIGCHLD in: a caller that blocked it before exec would otherwise leave us deaf.
pub fn unblock_sigchld() -> io::Result<()> {
    let mut set = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: sigemptyset initialises the set before it is used; the old mask is not asked for.
    let failed = unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        libc::sigaddset(set.as_mut_ptr(), libc::SIGCHLD);
        libc::pthread_sigmask(libc::SIG_UNBLOCK, set.as_ptr(), std::ptr::null_mut())
    };
    if failed != 0 {
        Err(io::Error::from_raw_os_error(failed))
    } else {
        Ok(())
    }
}

/// The limit of open files to give to children: (soft, hard), from the hard limit given to us.
pub fn child_nofile(own_hard: u64) -> (u64, u64) {
    let hard = own_hard.min(NOFILE_HARD);
    (NOFILE_SOFT.min(hard), hard)
}

/// The limit of open files that our children get: (soft, hard).
pub fn nofile_of_children() -> (u64, u64) {
    let mut own = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: getrlimit writes into the struct it is given.
    let known = unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &mut own) == 0 };
    child_nofile(if known { own.rlim_max } else { NOFILE_HARD })
}

/// What each child of ours gets between fork and exec: default signal dispositions, empty mask, the stated limit of open
/// files, huge pages as they were given to us, no descriptor but 0 to 2, and with `die_with_parent` SIGKILL when the
/// *thread* that spawns it ends.
#[derive(Clone, Copy, Debug)]
pub(super) struct SetUp {
    parent: i32,
    nofile: libc::rlimit,
    restore_thp: bool,
    die_with_parent: bool,
}

impl SetUp {
    /// Of a child of this process.
    pub(super) fn of_child(die_with_parent: bool) -> Self {
        let (soft, hard) = nofile_of_children();
        Self {
            // SAFETY: getpid has no preconditions.
            parent: unsafe { libc::getpid() },
            nofile: libc::rlimit {
                rlim_cur: soft,
                rlim_max: hard,
            },
            restore_thp: THP_IS_OFF.load(Ordering::Relaxed),
            die_with_parent,
        }
    }

    /// Does it, in the child.
    ///
    /// # Safety
    /// Only between fork, or a clone that shares memory, and exec: the calling thread is not as it was.
    pub(super) unsafe fn apply(&self) -> io::Result<()> {
        // SAFETY: only async-signal-safe system calls on integers and on values captured before the fork: no allocation,
        // no lock, so this is sound in the forked child of a process with several threads.
        unsafe {
            for signal in 1..=31 {
                // A workload must not inherit that somebody ignored SIGHUP or SIGPIPE. KILL and STOP refuse: harmless.
                libc::signal(signal, libc::SIG_DFL);
            }
            let mut none = MaybeUninit::<libc::sigset_t>::uninit();
            libc::sigemptyset(none.as_mut_ptr());
            libc::sigprocmask(libc::SIG_SETMASK, none.as_ptr(), std::ptr::null_mut());
            libc::setrlimit(libc::RLIMIT_NOFILE, &self.nofile);
            if self.restore_thp {
                libc::prctl(libc::PR_SET_THP_DISABLE, 0, 0, 0, 0);
            }
            if self.die_with_parent {
                if libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL, 0, 0, 0) < 0 {
                    return Err(io::Error::last_os_error());
                }
                // The parent may have died before the request was known to the kernel.
                if libc::getppid() != self.parent {
                    return Err(io::Error::from_raw_os_error(libc::ESRCH));
                }
            }
            // Close-on-exec and not close: the descriptor on which exec's errno is reported must live until exec.
            // A kernel before 5.11 refuses; there everything of ours is close-on-exec by itself.
            libc::syscall(
                libc::SYS_close_range,
                3,
                u32::MAX,
                libc::CLOSE_RANGE_CLOEXEC,
            );
        }
        Ok(())
    }
}

/// Adds a [`SetUp`] to `command`.
pub fn set_up_child(command: &mut Command, die_with_parent: bool) {
    let set_up = SetUp::of_child(die_with_parent);
    // SAFETY: the hook runs in the child.
    let hook = move || unsafe { set_up.apply() };
    // SAFETY: see `SetUp::apply`: it may run after fork.
    unsafe { command.pre_exec(hook) };
}

/// Makes `given` the child's descriptors 3, 4 and 5. Call it after [`set_up_child`], which closes all of them at exec,
/// and keep what it answers until the spawn: it takes these numbers here, so that the descriptor on which exec's errno
/// is reported is none of them.
pub fn give_descriptors(command: &mut Command, given: [OwnedFd; 3]) -> io::Result<Vec<OwnedFd>> {
    let mut taken = Vec::new();
    loop {
        // SAFETY: F_DUPFD_CLOEXEC takes an integer.
        let fd = unsafe { libc::fcntl(given[0].as_raw_fd(), libc::F_DUPFD_CLOEXEC, 3) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the kernel just gave us this descriptor; nobody else knows it.
        taken.push(unsafe { OwnedFd::from_raw_fd(fd) });
        if fd > 5 {
            break;
        }
    }
    let hook = move || {
        let mut moved = [0; 3];
        // SAFETY: fcntl and dup2 take integers and are async-signal-safe; nothing is allocated.
        unsafe {
            // Out of the way first: one may have the number that is another's place.
            for (copy, fd) in moved.iter_mut().zip(&given) {
                *copy = libc::fcntl(fd.as_raw_fd(), libc::F_DUPFD_CLOEXEC, 6);
                if *copy < 0 {
                    return Err(io::Error::last_os_error());
                }
            }
            for (place, copy) in (3..).zip(moved) {
                if libc::dup2(copy, place) < 0 {
                    return Err(io::Error::last_os_error());
                }
            }
        }
        Ok(())
    };
    // SAFETY: see the hook: it may run after fork.
    unsafe { command.pre_exec(hook) };
    Ok(taken)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_huge_limit_is_not_handed_on_and_a_small_one_is_not_raised() {
        assert_eq!(child_nofile(1_000_000_000), (1024, 1_048_576));
        assert_eq!(child_nofile(libc::RLIM_INFINITY), (1024, 1_048_576));
        assert_eq!(child_nofile(524_288), (1024, 524_288));
        assert_eq!(child_nofile(256), (256, 256));
    }
}
