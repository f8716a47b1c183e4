//! Being started by a daemon: `start`, `delete`, `-info`, `-v`, as containerd and others call a shim.
//!
//! Promises: on success of `start` nothing but the answer is written to standard output and nothing to standard error
//! (a daemon reads both as one); a failure is one line on standard error and an exit code other than 0, and leaves
//! neither process nor socket. `start` forks while the process has one thread.

use std::env;
use std::io::{self, Write};
use std::process::ExitCode;

use crate::config::Config;
use crate::error::{Context, Error, Kind, Result};

mod bootstrap;
mod cleaner;
mod daemon;
mod delete;
mod dialect;
mod flags;
#[cfg(test)]
mod fuzz;
mod info;
mod joined;
mod probe;
mod socket;
mod start;

use flags::{Action, Flags};

pub use socket::remove_dead as remove_dead_socket;

/// Runtime type name of this shim.
pub const NAME: &str = "io.containerd.podvisor.v1";

/// Removes the socket of a supervisor of our own (one without a daemon) that never came up or has died: a `start` that was
/// killed could not. One that somebody listens on is left alone; false then.
pub fn remove_own_socket(config: &Config, namespace: &str, id: &str) -> Result<bool> {
    let path = socket::path(config, None, "", namespace, id);
    socket::remove_dead(&path)?;
    Ok(!path.exists())
}

/// `main` of containerd-shim-podvisor-v1.
pub fn main() -> ExitCode {
    let args = env::args_os()
        .skip(1)
        .map(|arg| arg.to_string_lossy().into_owned());
    match flags::parse(args).and_then(|flags| run(&flags)) {
        Ok(code) => code,
        Err(e) => {
            complain(&e);
            ExitCode::FAILURE
        }
    }
}

fn run(flags: &Flags) -> Result<ExitCode> {
    match flags.action {
        Action::Version => info::version(),
        Action::Info => info::info(),
        Action::Start => {
            check(flags)?;
            start::run(flags)
        }
        Action::Delete => {
            check(flags)?;
            delete::run(flags)
        }
        Action::None => Err(Error::new(
            Kind::Invalid,
            format!(
                "read the command line: no action was given; {}",
                flags::USAGE
            ),
        )),
    }
}

/// What `start` and `delete` cannot do without.
fn check(flags: &Flags) -> Result<()> {
    if flags.namespace.is_empty() || flags.id.is_empty() {
        return Err(Error::new(
            Kind::Invalid,
            format!(
                "read the command line: -namespace and -id are needed; {}",
                flags::USAGE
            ),
        ));
    }
    crate::id::check_namespace(&flags.namespace)?;
    crate::id::check("id", &flags.id)?;
    if !nix::unistd::geteuid().is_root() {
        return Err(Error::new(
            Kind::Denied,
            "start a pod: this needs root; run it as root or through the daemon",
        ));
    }
    Ok(())
}

/// Writes all of an answer to standard output.
fn answer(bytes: &[u8]) -> Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(bytes)
        .and_then(|()| out.flush())
        .context(|| "write the answer to standard output")
}

/// One line on standard error; the daemon makes it the text of its own error.
fn complain(error: &Error) {
    let line = error.to_string().replace('\n', " ");
    // Nobody is left to tell when this fails.
    let _ = writeln!(io::stderr(), "podvisor: {line}");
}
