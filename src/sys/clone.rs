//! A process cloned into namespaces that runs a prepared list of system calls and then a program.
//!
//! Promise: between clone and exec the child allocates nothing, takes no lock and calls no function of libc that could:
//! it is a copy of one thread of a process that may have several, whose locks nobody in the child would release. All
//! data is made by the parent; every failure is reported by the number of the step and its errno.

use std::ffi::CStr;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::ptr;

use nix::sched::CloneFlags;

use super::fd::close_gaps;

/// One thing the child does. The list is run in order; the first failure ends the child.
#[derive(Clone, Copy, Debug)]
pub enum Step<'a> {
    /// Closes everything from 3 up except these, which must be sorted.
    CloseExcept(&'a [RawFd]),
    /// Waits for one byte. End of file: nobody wants this process any more, it leaves without a word.
    Await(BorrowedFd<'a>),
    /// Tells the parent that it has come here.
    Report,
    /// Joins a namespace (the one thing that needs a process of a single thread: a user namespace).
    Join(BorrowedFd<'a>, CloneFlags),
    /// Goes on in a second clone, in these new namespaces, that is a child of *our* parent; its pid is reported.
    CloneAgain(CloneFlags),
    /// Writes `0`, itself, to each of these open files: v1's `tasks`.
    JoinCgroups(&'a [RawFd]),
    /// User and group 0 of its user namespace, no further groups.
    BecomeRoot,
    /// Sets the host name of its uts namespace.
    Hostname(&'a [u8]),
    /// Asks the kernel for this security label at its next exec. Where /proc is still the machine's.
    ExecLabel(&'a [u8]),
    /// Cuts its mounts off from those they were copied from.
    PrivateMounts,
    /// Makes an empty read-only tmpfs its root and lets go of the old one. Working directory inside.
    EmptyRoot,
    /// A session and process group of its own.
    NewSession,
    /// Makes this its descriptors 0, 1 and 2.
    Stdio(BorrowedFd<'a>),
    /// Executes a file by descriptor, with this one argument and an empty environment. The report pipe stays open in
    /// the program, which closes it when it has come as far as it should.
    Exec(BorrowedFd<'a>, &'a CStr),
}

impl Step<'_> {
    /// What it does, for an error.
    pub fn name(&self) -> &'static str {
        match self {
            Self::CloseExcept(_) => "close descriptors",
            Self::Await(_) => "wait for its parent",
            Self::Report => "report",
            Self::Join(..) => "join a namespace",
            Self::CloneAgain(_) => "clone again",
            Self::JoinCgroups(_) => "join its cgroups",
            Self::BecomeRoot => "become root of its user namespace",
            Self::Hostname(_) => "set the host name",
            Self::ExecLabel(_) => "ask for its label",
            Self::PrivateMounts => "make its mounts private",
            Self::EmptyRoot => "change to an empty root",
            Self::NewSession => "start a session",
            Self::Stdio(_) => "set its standard streams",
            Self::Exec(..) => "execute its program",
        }
    }

    /// A label that was asked for has a say in it.
    pub fn takes_label(&self) -> bool {
        matches!(self, Self::ExecLabel(_) | Self::Exec(..))
    }
}

/// What the child writes to the report pipe, as it is in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Report {
    /// Index into the list of steps.
    pub step: u32,
    /// 0: no failure.
    pub errno: i32,
    /// Of the second clone, in the first one's pid namespace.
    pub pid: i32,
}

impl Report {
    /// Bytes of a report on the pipe. Small enough that the kernel never splits it.
    pub const SIZE: usize = size_of::<Self>();

    /// From the bytes on the pipe.
    pub fn parse(bytes: &[u8; Self::SIZE]) -> Self {
        let [a, b, c, d, e, f, g, h, i, j, k, l] = *bytes;
        Self {
            step: u32::from_ne_bytes([a, b, c, d]),
            errno: i32::from_ne_bytes([e, f, g, h]),
            pid: i32::from_ne_bytes([i, j, k, l]),
        }
    }
}

/// Clones a child into the new namespaces `flags`, which runs `steps` and reports to `report`. Returns its pid.
///
/// The child starts the program with all signals at their defaults and TERM, INT and CHLD blocked, so that one sent
/// before the program waits for them is not lost. Its exit is told by SIGCHLD as any child's.
pub fn spawn(flags: CloneFlags, steps: &[Step<'_>], report: BorrowedFd<'_>) -> io::Result<i32> {
    spawn_in(None, flags, steps, report)
}

/// The same, in a cgroup of v2, which is an open directory. Unsupported where there is no clone3, or none that can this.
pub fn spawn_in(
    group: Option<BorrowedFd<'_>>,
    flags: CloneFlags,
    steps: &[Step<'_>],
    report: BorrowedFd<'_>,
) -> io::Result<i32> {
    let report = report.as_raw_fd();
    let mut old = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: both sets are initialised by the calls before they are read. All signals are blocked over the clone: the
    // child has copies of our handlers, which must not run in it.
    unsafe {
        let mut all = MaybeUninit::<libc::sigset_t>::uninit();
        libc::sigfillset(all.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), old.as_mut_ptr());
    }
    // SAFETY: memory is not shared (no CLONE_VM), so the child may go on on its copy of this stack; it runs `child`,
    // which keeps to the promise of this module and does not return.
    let pid = unsafe {
        let pid = match group {
            None => raw_clone(flags),
            Some(group) => raw_clone_in(group, flags),
        };
        if pid == 0 {
            child(steps, report);
        }
        pid
    };
    let error = io::Error::last_os_error();
    // SAFETY: `old` was written above.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, old.as_ptr(), ptr::null_mut()) };
    if pid < 0 { Err(error) } else { Ok(pid) }
}

/// Like fork with namespaces. Raw, because libc's runs handlers and takes locks.
///
/// # Safety
/// The child must keep to the promise of this module.
unsafe fn raw_clone(flags: CloneFlags) -> i32 {
    let flags = flags.bits() as libc::c_ulong | libc::SIGCHLD as libc::c_ulong;
    // SAFETY: a null stack without CLONE_VM means the copy of ours; the other arguments are unused with these flags,
    // so their order, which differs between machines, does not matter.
    unsafe { libc::syscall(libc::SYS_clone, flags, 0_usize, 0_usize, 0_usize, 0_usize) as i32 }
}

/// The same in a cgroup of v2.
///
/// # Safety
/// As of `raw_clone`.
unsafe fn raw_clone_in(group: BorrowedFd<'_>, flags: CloneFlags) -> i32 {
    // CLONE_INTO_CGROUP, linux/sched.h: not in 32 bits, where nix and older headers have their flags.
    const INTO_CGROUP: u64 = 0x2_0000_0000;
    // SAFETY: all zero is a valid value, and means "not asked for" for each field.
    let mut args: libc::clone_args = unsafe { std::mem::zeroed() };
    args.flags = u64::from(flags.bits().cast_unsigned()) | INTO_CGROUP;
    args.exit_signal = libc::SIGCHLD as u64;
    args.cgroup = group.as_raw_fd() as u64;
    // SAFETY: the kernel reads as many bytes as it is told; a null stack as in `raw_clone`.
    unsafe { libc::syscall(libc::SYS_clone3, &raw const args, size_of_val(&args)) as i32 }
}

/// The child's life until exec.
///
/// # Safety
/// Only in a child made by `raw_clone`.
unsafe fn child(steps: &[Step<'_>], report: RawFd) -> ! {
    // SAFETY: system calls on data that the parent prepared and this process has its own copy of.
    unsafe {
        default_signals();
        let mut number = 0_u32;
        for step in steps {
            let errno = run(step, number, report);
            if errno != 0 {
                tell(
                    report,
                    Report {
                        step: number,
                        errno,
                        pid: 0,
                    },
                );
                leave(1);
            }
            number = number.wrapping_add(1);
        }
        leave(0)
    }
}

/// Runs one step; 0 or an errno.
unsafe fn run(step: &Step<'_>, number: u32, report: RawFd) -> i32 {
    // SAFETY: system calls with valid, NUL-terminated or length-bounded data.
    unsafe {
        match *step {
            Step::CloseExcept(keep) => {
                close_gaps(keep);
                0
            }
            Step::Await(fd) => wait_for_byte(fd.as_raw_fd()),
            Step::Report => {
                tell(
                    report,
                    Report {
                        step: number,
                        errno: 0,
                        pid: 0,
                    },
                );
                0
            }
            Step::Join(fd, kind) => {
                errno_of(libc::syscall(libc::SYS_setns, fd.as_raw_fd(), kind.bits()))
            }
            Step::CloneAgain(flags) => match raw_clone(flags | CloneFlags::CLONE_PARENT) {
                0 => 0,
                pid if pid > 0 => {
                    tell(
                        report,
                        Report {
                            step: number,
                            errno: 0,
                            pid,
                        },
                    );
                    leave(0)
                }
                _ => errno(),
            },
            Step::JoinCgroups(files) => {
                for fd in files {
                    if libc::syscall(libc::SYS_write, *fd, c"0".as_ptr(), 1_usize) < 0 {
                        return errno();
                    }
                }
                0
            }
            Step::BecomeRoot => {
                // Refused where setgroups is denied; then there is nothing to drop that would matter.
                libc::syscall(libc::SYS_setgroups, 0, ptr::null::<libc::gid_t>());
                first(&[&|| libc::syscall(libc::SYS_setresgid, 0, 0, 0), &|| {
                    libc::syscall(libc::SYS_setresuid, 0, 0, 0)
                }])
            }
            Step::Hostname(name) => errno_of(libc::syscall(
                libc::SYS_sethostname,
                name.as_ptr(),
                name.len(),
            )),
            Step::ExecLabel(label) => exec_label(label),
            Step::PrivateMounts => errno_of(mount(
                c"none",
                c"/",
                ptr::null(),
                libc::MS_REC | libc::MS_PRIVATE,
                ptr::null(),
            )),
            Step::EmptyRoot => empty_root(),
            Step::NewSession => {
                libc::syscall(libc::SYS_umask, 0);
                errno_of(libc::syscall(libc::SYS_setsid))
            }
            Step::Stdio(fd) => {
                for to in 0..3 {
                    if libc::syscall(libc::SYS_dup3, fd.as_raw_fd(), to, 0) < 0 {
                        return errno();
                    }
                }
                0
            }
            Step::Exec(program, name) => {
                libc::syscall(libc::SYS_fcntl, report, libc::F_SETFD, 0);
                let argv = [name.as_ptr(), ptr::null()];
                let envp = [ptr::null::<libc::c_char>()];
                libc::syscall(
                    libc::SYS_execveat,
                    program.as_raw_fd(),
                    c"".as_ptr(),
                    argv.as_ptr(),
                    envp.as_ptr(),
                    libc::AT_EMPTY_PATH,
                );
                errno()
            }
        }
    }
}

/// The file takes a label from nobody but the thread it is about, with the credentials that opened it.
unsafe fn exec_label(label: &[u8]) -> i32 {
    const FILE: &CStr = c"/proc/thread-self/attr/exec";
    // SAFETY: system calls with a NUL-terminated and a length-bounded string. The descriptor is of this call alone.
    unsafe {
        let flags = libc::O_WRONLY | libc::O_CLOEXEC;
        let fd = libc::syscall(libc::SYS_openat, libc::AT_FDCWD, FILE.as_ptr(), flags);
        if fd < 0 {
            return errno();
        }
        let done = libc::syscall(libc::SYS_write, fd, label.as_ptr(), label.len());
        let errno = errno_of(done);
        libc::syscall(libc::SYS_close, fd);
        errno
    }
}

/// The new root is mounted over a directory that surely exists, and the old one is left by stacking: no directory for
/// it is needed in a root that is read-only.
unsafe fn empty_root() -> i32 {
    const PLACE: &CStr = c"/proc";
    const FLAGS: libc::c_ulong =
        libc::MS_RDONLY | libc::MS_NOSUID | libc::MS_NODEV | libc::MS_NOEXEC;
    // SAFETY: system calls with constant, NUL-terminated strings.
    unsafe {
        let data = c"mode=555,size=4k,nr_inodes=2".as_ptr();
        first(&[
            &|| mount(c"podvisor", PLACE, c"tmpfs".as_ptr(), FLAGS, data),
            &|| libc::syscall(libc::SYS_chdir, PLACE.as_ptr()),
            &|| libc::syscall(libc::SYS_pivot_root, c".".as_ptr(), c".".as_ptr()),
            &|| libc::syscall(libc::SYS_umount2, c".".as_ptr(), libc::MNT_DETACH),
            &|| libc::syscall(libc::SYS_chdir, c"/".as_ptr()),
        ])
    }
}

unsafe fn mount(
    source: &CStr,
    target: &CStr,
    kind: *const libc::c_char,
    flags: libc::c_ulong,
    data: *const libc::c_char,
) -> libc::c_long {
    // SAFETY: the strings are NUL-terminated or, where the kernel allows it, null.
    unsafe {
        libc::syscall(
            libc::SYS_mount,
            source.as_ptr(),
            target.as_ptr(),
            kind,
            flags,
            data,
        )
    }
}

/// Calls in order until one fails; its errno, or 0.
fn first(calls: &[&dyn Fn() -> libc::c_long]) -> i32 {
    for call in calls {
        if call() < 0 {
            return errno();
        }
    }
    0
}

unsafe fn wait_for_byte(fd: RawFd) -> i32 {
    loop {
        let mut byte = 0_u8;
        // SAFETY: one byte is written to a local.
        match unsafe { libc::syscall(libc::SYS_read, fd, &raw mut byte, 1) } {
            1 => return 0,
            0 => leave(0),
            _ if errno() == libc::EINTR => {}
            _ => return errno(),
        }
    }
}

unsafe fn tell(pipe: RawFd, report: Report) {
    // SAFETY: a plain struct of three integers without padding, read for its size.
    unsafe { libc::syscall(libc::SYS_write, pipe, &raw const report, Report::SIZE) };
}

unsafe fn default_signals() {
    /// The kernel's struct sigaction; all zeroes is SIG_DFL without flags. SIGKILL and SIGSTOP refuse: harmless.
    static DEFAULT: [u64; 4] = [0; 4];
    let waited_for: u64 =
        1 << (libc::SIGTERM - 1) | 1 << (libc::SIGINT - 1) | 1 << (libc::SIGCHLD - 1);
    // SAFETY: the kernel reads a struct of this size and a mask of 8 bytes, and writes nothing.
    unsafe {
        for signal in 1..=64 {
            libc::syscall(
                libc::SYS_rt_sigaction,
                signal,
                DEFAULT.as_ptr(),
                0_usize,
                8_usize,
            );
        }
        libc::syscall(
            libc::SYS_rt_sigprocmask,
            libc::SIG_SETMASK,
            &raw const waited_for,
            0_usize,
            8_usize,
        );
    }
}

pub(super) fn leave(code: i32) -> ! {
    loop {
        // SAFETY: ends the process; libc's exit handlers belong to the parent and must not run.
        unsafe { libc::syscall(libc::SYS_exit_group, code) };
    }
}

pub(super) fn errno() -> i32 {
    // SAFETY: the address of this thread's errno is always valid.
    unsafe { *libc::__errno_location() }
}

fn errno_of(done: libc::c_long) -> i32 {
    if done < 0 { errno() } else { 0 }
}
