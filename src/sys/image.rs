//! What exec needs, made before the process that execs: there nothing can be allocated any more.

use std::ffi::{CString, OsStr, c_char};
use std::io;
use std::mem::MaybeUninit;
use std::os::unix::ffi::OsStrExt;
use std::process::Command;
use std::ptr;

/// Of a process that shares our memory until exec: a search of PATH needs a few kilobytes.
const STACK: usize = 32 << 10;

/// A program with its arguments and environment, and a stack to exec it from.
#[derive(Debug)]
pub(super) struct Image {
    /// What the pointers below point at.
    _texts: [Vec<CString>; 2],
    /// The program first. Both end with a null pointer.
    argv: Vec<*const c_char>,
    envp: Vec<*const c_char>,
    stack: Vec<MaybeUninit<u128>>,
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
            stack: Vec::with_capacity(STACK / size_of::<u128>()),
        })
    }

    /// The end of its stack, where it begins.
    pub(super) fn top(&mut self) -> *mut u128 {
        let end = self.stack.capacity();
        // SAFETY: one past the end of what was allocated.
        unsafe { self.stack.as_mut_ptr().add(end).cast() }
    }

    /// Becomes the program, which is searched in our PATH when its name has no slash. Returns errno.
    ///
    /// # Safety
    /// Only in a process that has nothing else to do.
    pub(super) unsafe fn exec(&self) -> i32 {
        let argv = self.argv.as_ptr();
        // SAFETY: both lists end with a null pointer, and the texts live as long as this.
        unsafe { libc::execvpe(*argv, argv, self.envp.as_ptr()) };
        super::clone::errno()
    }
}
