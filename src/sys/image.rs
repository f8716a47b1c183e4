//! What exec needs, made before the process that execs: there nothing can be allocated any more. And a stack for such a
//! process that has no copy of us.

use std::ffi::{CString, OsStr, c_char, c_void};
use std::io;
use std::mem::MaybeUninit;
use std::os::unix::ffi::OsStrExt;
use std::process::Command;
use std::ptr;

use super::clone::{errno, leave};

/// Of a process that shares our memory until exec: a search of PATH needs a few kilobytes.
const STACK: usize = 32 << 10;

/// A program with its arguments and environment.
#[derive(Debug)]
pub(super) struct Image {
    /// What the pointers below point at.
    _texts: [Vec<CString>; 2],
    /// The program first. Both end with a null pointer.
    argv: Vec<*const c_char>,
    envp: Vec<*const c_char>,
}

// SAFETY: the pointers are to memory that it owns and that nobody changes.
unsafe impl Send for Image {}
// SAFETY: as above.
unsafe impl Sync for Image {}

impl Image {
    /// Of a command with an environment of its own, nothing inherited.
    ///
    /// # Errors
    /// InvalidInput for a NUL; most of them a command has replaced by other text before.
    pub(super) fn of(command: &Command) -> io::Result<Self> {
        let text = |text: &OsStr| CString::new(text.as_bytes()).map_err(io::Error::from);
        let args = [command.get_program()]
            .into_iter()
            .chain(command.get_args());
        let args: Vec<CString> = args.map(text).collect::<Result<_, _>>()?;
        let pair = |(key, value): (&OsStr, Option<&OsStr>)| {
            let pair = [key.as_bytes(), b"=", value?.as_bytes()].concat();
            Some(text(OsStr::from_bytes(&pair)))
        };
        let envs = command.get_envs().filter_map(pair);
        let envs: Vec<CString> = envs.collect::<Result<_, _>>()?;
        let ended = |texts: &[CString]| {
            let pointers = texts.iter().map(|text| text.as_ptr());
            pointers.chain([ptr::null()]).collect()
        };
        Ok(Self {
            argv: ended(&args),
            envp: ended(&envs),
            _texts: [args, envs],
        })
    }

    /// Becomes the program, which is searched in our PATH when its name has no slash. Returns errno.
    ///
    /// # Safety
    /// Only in a process that has nothing else to do.
    pub(super) unsafe fn exec(&self) -> i32 {
        let argv = self.argv.as_ptr();
        // SAFETY: both lists end with a null pointer, and the texts live as long as this.
        unsafe { libc::execvpe(*argv, argv, self.envp.as_ptr()) };
        errno()
    }
}

/// What a process runs on that borrows our memory until it execs.
pub(super) struct Stack(Vec<MaybeUninit<u128>>);

/// What the two processes have between them.
struct Borrowed<T> {
    child: unsafe fn(&T) -> i32,
    start: *const T,
    /// Why there is no program.
    errno: i32,
}

impl Stack {
    pub(super) fn new() -> Self {
        Self(Vec::with_capacity(STACK / size_of::<u128>()))
    }

    /// Starts a process in our memory, and stands still until it has a program: a copy of us for a few calls costs a
    /// quarter of a millisecond. `child` gets `start`, and returns errno when it cannot exec. The pid, or an errno.
    ///
    /// # Safety
    /// `child` must allocate nothing and take no lock.
    pub(super) unsafe fn run<T>(
        &mut self,
        child: unsafe fn(&T) -> i32,
        start: &T,
    ) -> Result<i32, i32> {
        let mut borrowed = Borrowed {
            child,
            start,
            errno: 0,
        };
        let borrowed = &raw mut borrowed;
        let flags = libc::CLONE_VM | libc::CLONE_VFORK | libc::SIGCHLD;
        // SAFETY: the stack begins one past the end of what was allocated, and is nobody else's; `borrowed` is read when
        // the child has execed or ended.
        unsafe {
            let top = self.0.as_mut_ptr().add(self.0.capacity());
            let pid = libc::clone(enter::<T>, top.cast(), flags, borrowed.cast());
            if pid < 0 {
                return Err(errno());
            }
            match ptr::read_volatile(&raw const (*borrowed).errno) {
                0 => Ok(pid),
                errno => {
                    libc::waitpid(pid, ptr::null_mut(), libc::__WALL);
                    Err(errno)
                }
            }
        }
    }
}

extern "C" fn enter<T>(borrowed: *mut c_void) -> i32 {
    // SAFETY: `Stack::run` gives its own, and stands still.
    unsafe {
        let borrowed = &mut *borrowed.cast::<Borrowed<T>>();
        borrowed.errno = (borrowed.child)(&*borrowed.start);
    }
    leave(127)
}
