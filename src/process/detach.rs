//! Leaving whoever has started us.

use std::fs::{File, OpenOptions};
use std::os::fd::RawFd;

use nix::unistd::{dup2_stderr, dup2_stdin, dup2_stdout};

use crate::error::{Context, Result};
use crate::sys;

/// A session of our own, no descriptor of the caller's but those in `keep`, and nothing on the standard streams. `log` is
/// opened then, and is standard error where it gives something.
///
/// Call it before anything of this process owns a descriptor that is not in `keep`: see [`sys::fd::close_from`].
///
/// # Errors
/// What the kernel says of the session (EPERM: we lead one already) or of `/dev/null`.
pub fn detach(keep: &[RawFd], log: impl FnOnce() -> Option<File>) -> Result<()> {
    // The terminal of a person's shell takes nobody down when it closes.
    sys::fork::new_session().context(|| "start a session")?;
    sys::fd::close_from(keep);
    let null = OpenOptions::new()
        .read(true)
        .write(true)
        .open("/dev/null")
        .context(|| "open /dev/null")?;
    dup2_stdin(&null).context(|| "put /dev/null on standard input")?;
    dup2_stdout(&null).context(|| "put /dev/null on standard output")?;
    dup2_stderr(log().as_ref().unwrap_or(&null)).context(|| "give standard error its file")
}
