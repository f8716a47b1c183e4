//! A guard between us and a helper program: a process that sees to it that nothing the program started is left.
//!
//! A process group or session is left with one call, and a daemon leaves both. What nobody can leave is the tree below
//! a *child subreaper*: whoever loses its parent becomes the subreaper's child. So the program runs below a guard of
//! its own that is one. The alternatives lose: moving a process into a cgroup of its own waits for every thread of the
//! machine (milliseconds), and a mark in the environment is gone with the first `env -i`.
//!
//! | the program | the guard |
//! |---|---|
//! | exits with 0 | leaves at once; what the program left on purpose lives on and becomes our orphan |
//! | exits with another code, or by a signal | kills everything below it, then ends in the same way |
//! | is still running at SIGTERM, or when our spawning thread ends | kills everything below it, then ends by SIGKILL |
//!
//! (Where our own group is of an outer pid namespace, nobody in this one can join it: then the guard keeps the group, the
//! program has one of its own, and only the guard may be signalled. See [`group_is_shared`].)
//!
//! It is a fork of us, not a program: one page-table copy is cheaper than a second exec. The program's process has no copy
//! of its own before it execs. The guard holds no descriptor and lives in our process group, so that a SIGKILL to the
//! program's group (its number is the guard's pid) spares it.
//! Promise, as for `sys::clone`: between fork and exec nothing is allocated and no lock is taken.

use std::ffi::CStr;
use std::io;
use std::mem::MaybeUninit;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::ptr;
use std::sync::OnceLock;

use super::clone::{errno, leave};
use super::image::{Image, Stack};
use super::process::read_at_once;

/// How long a guard tries to see everything below it end. What hangs in the kernel has its SIGKILL waiting for it.
const PATIENCE_ROUNDS: u32 = 800;
/// Pause between two rounds.
const ROUND_NANOS: libc::c_long = 10_000_000;

const NAME: &CStr = c"podvisor-guard";

/// Puts a guard between us and what `command` runs. Call it last, after [`super::process::set_up_child`], for a command
/// with a process group and an environment of its own. The pid that is spawned is the guard's, its end is the program's.
///
/// # Errors
/// InvalidInput for a NUL in its texts.
pub fn set_up_guard(command: &mut Command) -> io::Result<()> {
    let mut start = Start::of(command)?;
    // SAFETY: `split` keeps the promise of this module, and this is the single thread of a fresh child.
    let hook = move || unsafe { split(&mut start) };
    // SAFETY: see the hook: it may run after fork.
    unsafe { command.pre_exec(hook) };
    Ok(())
}

/// What is needed after the fork, where nothing can be allocated any more.
struct Start {
    parent: i32,
    arguments: (usize, usize),
    stack: Stack,
    program: Program,
}

struct Program {
    image: Image,
    /// Our process group.
    group: i32,
    /// The guard's pid.
    guard: i32,
}

impl Start {
    fn of(command: &Command) -> io::Result<Self> {
        // SAFETY: neither has preconditions.
        let (parent, group) = unsafe { (libc::getpid(), libc::getpgrp()) };
        Ok(Self {
            parent,
            arguments: arguments(),
            stack: Stack::new(),
            program: Program {
                image: Image::of(command)?,
                group,
                guard: 0,
            },
        })
    }
}

/// Whether the program's group may be signalled by the guard's pid: the guard is in ours, not in that one.
pub fn group_is_shared() -> bool {
    // SAFETY: getpgrp has no preconditions.
    unsafe { libc::getpgrp() != 0 }
}

/// Returns only when there is no program.
///
/// # Safety
/// Only between fork and exec.
unsafe fn split(start: &mut Start) -> io::Result<()> {
    // SAFETY: system calls on integers and locals, and a process that uses the stack which is there for it.
    unsafe {
        // Before the clone, all of it: from the program's first moment on there is a guard that can be told by its name
        // and is told of our death. Until it execs the program bears the name, too.
        show_name(start.arguments);
        libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0);
        // A SIGTERM from here on waits until the guard asks for it.
        mask(libc::SIG_BLOCK, all());
        libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGTERM, 0, 0, 0);
        if libc::getppid() != start.parent {
            return Err(io::Error::from_raw_os_error(libc::ESRCH));
        }
        start.program.guard = libc::getpid();
        match start.stack.run(become_program, &start.program) {
            Ok(program) => guard(program, start.program.group),
            Err(errno) => {
                mask(libc::SIG_UNBLOCK, all());
                Err(io::Error::from_raw_os_error(errno))
            }
        }
    }
}

/// The program's process until exec. Returns errno.
unsafe fn become_program(program: &Program) -> i32 {
    // SAFETY: system calls on integers.
    unsafe {
        mask(libc::SIG_UNBLOCK, all());
        if libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL, 0, 0, 0) < 0 {
            return errno();
        }
        if libc::getppid() != program.guard {
            return libc::ESRCH;
        }
        if program.group == 0 {
            libc::setpgid(0, 0);
        }
        program.image.exec()
    }
}

/// The guard's life.
unsafe fn guard(program: i32, group: i32) -> ! {
    // SAFETY: system calls on integers and locals; every descriptor is only this process's own copy.
    unsafe {
        // A kill of the program's group must not hit the guard. Nobody can ask for one before: who has spawned it waits
        // until every descriptor here is closed. Refused when the group is gone: with us, for we were in it.
        let orphaned = group != 0 && libc::setpgid(0, group) < 0;
        if orphaned {
            libc::kill(program, libc::SIGKILL);
        }
        // No second core file beside the program's when it ends as that did.
        libc::prctl(libc::PR_SET_DUMPABLE, 0, 0, 0, 0);
        super::fd::close_everything();
        let mut status = None;
        let mut told = orphaned;
        while status.is_none() && !told {
            told = wait_for_signal(None) == libc::SIGTERM;
            status = reap(program).0;
        }
        // Told while it was ending: then nobody wants what it left either.
        told = told || wait_for_signal(Some(0)) == libc::SIGTERM;
        if status == Some(0) && !told {
            leave(0);
        }
        // Again and again: what forks while it is looked for, and the children of those just killed.
        for _ in 0..PATIENCE_ROUNDS {
            let (ended, alone) = reap(program);
            status = status.or(ended);
            if alone {
                break;
            }
            kill_children(program, status.is_none());
            wait_for_signal(Some(ROUND_NANOS));
        }
        end_like(if told {
            libc::SIGKILL
        } else {
            status.unwrap_or(libc::SIGKILL)
        })
    }
}

/// It must not look like a second supervisor to whoever looks for one by its command line: its copy of ours is
/// overwritten.
unsafe fn show_name((start, end): (usize, usize)) {
    let name = NAME.to_bytes_with_nul();
    // SAFETY: the range is where the kernel put our arguments, on the stack, which this process has its own copy of and
    // which nothing in it reads.
    unsafe {
        libc::prctl(libc::PR_SET_NAME, NAME.as_ptr(), 0, 0, 0);
        if end.saturating_sub(start) >= name.len() {
            ptr::write_bytes(start as *mut u8, 0, end - start);
            ptr::copy_nonoverlapping(name.as_ptr(), start as *mut u8, name.len());
        }
    }
}

/// Where this process' arguments lie; an empty range when /proc does not say.
fn arguments() -> (usize, usize) {
    static FOUND: OnceLock<(usize, usize)> = OnceLock::new();
    *FOUND.get_or_init(|| {
        let stat = read_at_once("/proc/self/stat").unwrap_or_default();
        // Fields 48 and 49, proc(5); the third is the first behind the name.
        let mut fields = stat
            .rsplit(')')
            .next()
            .unwrap_or_default()
            .split_ascii_whitespace();
        let mut field = |n: usize| fields.nth(n).and_then(|f| f.parse().ok());
        match (field(48 - 3), field(0)) {
            (Some(start), Some(end)) if start > 0 && end > start => (start, end),
            _ => (0, 0),
        }
    })
}

/// Reaps all that has ended: the program's status if it is among them, and whether no child is left.
unsafe fn reap(program: i32) -> (Option<i32>, bool) {
    let mut found = None;
    loop {
        let mut status = 0;
        // SAFETY: one integer is written to a local.
        match unsafe { libc::waitpid(-1, &mut status, libc::WNOHANG | libc::__WALL) } {
            0 => return (found, false),
            pid if pid == program => found = Some(status),
            pid if pid > 0 => {}
            _ if errno() == libc::EINTR => {}
            _ => return (found, true),
        }
    }
}

/// Waits for SIGTERM or SIGCHLD, which are blocked; for ever without a time. 0: none came.
unsafe fn wait_for_signal(nanos: Option<libc::c_long>) -> i32 {
    // SAFETY: the set is initialised before it is used; a null pointer means no limit.
    unsafe {
        let mut set = MaybeUninit::<libc::sigset_t>::uninit();
        libc::sigemptyset(set.as_mut_ptr());
        libc::sigaddset(set.as_mut_ptr(), libc::SIGTERM);
        if nanos != Some(0) {
            libc::sigaddset(set.as_mut_ptr(), libc::SIGCHLD);
        }
        let limit = libc::timespec {
            tv_sec: 0,
            tv_nsec: nanos.unwrap_or(0),
        };
        let limit = if nanos.is_some() {
            &raw const limit
        } else {
            ptr::null()
        };
        libc::sigtimedwait(set.as_ptr(), ptr::null_mut(), limit).max(0)
    }
}

/// SIGKILL to every child. None of their pids can be somebody else's: only we could have reaped them.
unsafe fn kill_children(program: i32, runs: bool) {
    // SAFETY: system calls with constant strings and buffers of the stated size.
    unsafe {
        if runs {
            libc::kill(program, libc::SIGKILL);
        }
        let own = libc::getpid();
        let proc = libc::open(
            c"/proc".as_ptr(),
            libc::O_RDONLY | libc::O_DIRECTORY | libc::O_CLOEXEC,
        );
        // A /proc of another pid namespace knows us, and all others, by other numbers.
        if proc < 0 || number_of_link(proc, c"self") != Some(own) {
            if proc >= 0 {
                libc::close(proc);
            }
            return;
        }
        let mut entries = [0_u64; 1024];
        let size = size_of_val(&entries);
        loop {
            let read = libc::syscall(libc::SYS_getdents64, proc, entries.as_mut_ptr(), size);
            let Ok(read @ 1..) = usize::try_from(read) else {
                break;
            };
            let bytes = std::slice::from_raw_parts(entries.as_ptr().cast::<u8>(), read);
            each_pid(bytes, |pid| {
                if pid != own && parent_of(proc, pid) == Some(own) {
                    libc::kill(pid, libc::SIGKILL);
                }
            });
        }
        libc::close(proc);
    }
}

/// The names among directory entries (struct linux_dirent64) that are numbers.
fn each_pid(mut entries: &[u8], mut each: impl FnMut(i32)) {
    const NAME_AT: usize = 19;
    while let (Some(length), Some(name)) = (entries.get(16..18), entries.get(NAME_AT..)) {
        let length = usize::from(u16::from_ne_bytes([length[0], length[1]]));
        if let Some(pid) = digits(name).filter(|(_, next)| *next == Some(0)) {
            each(pid.0);
        }
        match entries.get(length..) {
            Some(rest) if length > 0 => entries = rest,
            _ => return,
        }
    }
}

/// A leading number and the byte behind it.
fn digits(text: &[u8]) -> Option<(i32, Option<u8>)> {
    let mut value = None;
    for byte in text {
        match byte {
            b'0'..=b'9' => {
                let sum = value.unwrap_or(0_i32).checked_mul(10)?;
                value = Some(sum.checked_add(i32::from(byte - b'0'))?);
            }
            other => return value.map(|v| (v, Some(*other))),
        }
    }
    value.map(|v| (v, None))
}

unsafe fn number_of_link(dir: i32, name: &CStr) -> Option<i32> {
    let mut text = [0_u8; 16];
    // SAFETY: the kernel writes at most the stated number of bytes.
    let read =
        unsafe { libc::readlinkat(dir, name.as_ptr(), text.as_mut_ptr().cast(), text.len()) };
    digits(text.get(..usize::try_from(read).ok()?)?).map(|(number, _)| number)
}

/// From `<pid>/stat`: "7 (a name) S 1 ...", where the name may hold anything.
unsafe fn parent_of(proc: i32, pid: i32) -> Option<i32> {
    let mut path = [0_u8; 20];
    let path = stat_path(&mut path, pid)?;
    let mut text = [0_u8; 256];
    // SAFETY: the path is NUL-terminated; the kernel writes at most the stated number of bytes.
    let read = unsafe {
        let file = libc::openat(proc, path.as_ptr().cast(), libc::O_RDONLY | libc::O_CLOEXEC);
        if file < 0 {
            return None;
        }
        let read = libc::read(file, text.as_mut_ptr().cast(), text.len());
        libc::close(file);
        read
    };
    parse_parent(text.get(..usize::try_from(read).ok()?)?)
}

fn parse_parent(stat: &[u8]) -> Option<i32> {
    let name_end = stat.iter().rposition(|b| *b == b')')?;
    // ") S 1 "
    digits(stat.get(name_end + 4..)?).map(|(parent, _)| parent)
}

/// "<pid>/stat\0" without an allocation.
fn stat_path(buffer: &mut [u8; 20], pid: i32) -> Option<&[u8]> {
    const TAIL: &[u8] = b"/stat\0";
    let (head, tail) = buffer.split_at_mut(14);
    tail.copy_from_slice(TAIL);
    let mut at = head.len();
    let mut left = pid;
    loop {
        at = at.checked_sub(1)?;
        *head.get_mut(at)? = b'0' + (left % 10) as u8;
        left /= 10;
        if left == 0 {
            return buffer.get(at..);
        }
    }
}

/// Ends with this wait status.
unsafe fn end_like(status: i32) -> ! {
    if libc::WIFEXITED(status) {
        leave(libc::WEXITSTATUS(status));
    }
    let signal = libc::WTERMSIG(status);
    // SAFETY: system calls on integers; the dispositions were set to their defaults before.
    unsafe {
        libc::kill(libc::getpid(), signal);
        mask(libc::SIG_UNBLOCK, all());
    }
    leave(128 + signal)
}

fn all() -> libc::sigset_t {
    let mut set = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: sigfillset initialises the whole set.
    unsafe {
        libc::sigfillset(set.as_mut_ptr());
        set.assume_init()
    }
}

unsafe fn mask(how: i32, set: libc::sigset_t) {
    // SAFETY: the set lives over the call; the old mask is not asked for.
    unsafe { libc::sigprocmask(how, &raw const set, ptr::null_mut()) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_parent_is_found_behind_any_name() {
        assert_eq!(parse_parent(b"7 (a) S 1 7 7"), Some(1));
        assert_eq!(parse_parent(b"7 (a) R 9) Z) S 4194303 7"), Some(4_194_303));
        assert_eq!(parse_parent(b"7 (a) S"), None);
        assert_eq!(parse_parent(b""), None);
    }

    #[test]
    fn paths_are_made_for_every_pid() {
        for pid in [1, 10, 4_194_304, i32::MAX] {
            let mut buffer = [0; 20];
            let path = stat_path(&mut buffer, pid).expect("a path").to_vec();
            assert_eq!(path, format!("{pid}/stat\0").into_bytes());
        }
    }

    #[test]
    fn only_whole_numbers_among_the_names_are_pids() {
        let mut bytes = Vec::new();
        for name in ["self", "12", "1x", "4194304"] {
            let mut entry = vec![0; 19];
            entry.extend_from_slice(name.as_bytes());
            entry.push(0);
            let length = entry.len().next_multiple_of(8);
            entry.resize(length, 0);
            entry[16..18].copy_from_slice(&(length as u16).to_ne_bytes());
            bytes.extend(entry);
        }
        let mut seen = Vec::new();
        each_pid(&bytes, |pid| seen.push(pid));
        assert_eq!(seen, [12, 4_194_304]);
    }
}
