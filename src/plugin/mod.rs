//! The CNI plugin `podvisor-cni`: the real network's chain on a netns of its own, kept for the pod when its daemon gives up.
//!
//! A daemon that runs CNI itself kills the plugin at its deadline and begins anew with another id and another netns.
//! Here the chain is run by a *job*, a process that belongs to nobody, on a netns that the daemon does not know; each
//! attempt of the pod waits for it, and the one that is there when it is ready has that netns bound over the path that
//! its daemon gave. The contract is in `docs/cni-plugin.md`, everything about records and DELs in the room `network`.
//!
//! Promises: killing the plugin at any instant changes nothing for the job; a network is given to one attempt; whatever
//! cannot be kept is passed through as if we were not there. The plugin's own process has one thread and no event loop
//! where it only waits. Must never hold a pipe of its caller in a job: the caller waits for the end of it.

mod add;
mod ask;
mod del;
mod door;
mod job;
mod passing;
mod request;
mod seen;
mod undo;
mod work;

use std::io::{self, Read, Write};
use std::process::ExitCode;

use serde_json::{Value, json};

use crate::config::Config;
use crate::error::{Context, Error, Kind, Result};

use request::{Request, Verb};

pub use job::{dead_doors, dead_groups, remove_dead_group};

/// Versions of the CNI specification that are spoken, oldest first.
pub const VERSIONS: [&str; 5] = ["0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"];

/// "Try again later", CNI specification, "Error".
const TRY_AGAIN: u32 = 11;
/// "Invalid network config".
const BAD_CONFIG: u32 = 7;
/// "The plugin is not available", of STATUS.
const NOT_AVAILABLE: u32 = 50;
/// Ours; the specification leaves 100 and up to plugins.
const FAILED: u32 = 100;

/// `main` of podvisor-cni.
pub fn main() -> ExitCode {
    // A configuration is smaller than that, and read at once.
    let mut stdin = Vec::with_capacity(16 << 10);
    let read = io::stdin().read_to_end(&mut stdin);
    let asked = request::verb().and_then(|verb| {
        read.context(|| "read the network configuration on standard input")?;
        Ok(verb)
    });
    let failed = match asked {
        Err(error) => (FAILED, error),
        Ok(verb) => match answer(verb, &stdin) {
            Ok(()) => return ExitCode::SUCCESS,
            Err(error) => (code_of(verb, error.kind()), error),
        },
    };
    tell(&request::version_of(&stdin), failed.0, &failed.1)
}

/// The specification's number for a failure of this kind.
fn code_of(verb: Verb, kind: Kind) -> u32 {
    match (verb, kind) {
        (Verb::Status, _) => NOT_AVAILABLE,
        (_, Kind::Busy | Kind::Deadline) => TRY_AGAIN,
        (_, Kind::Invalid) => BAD_CONFIG,
        _ => FAILED,
    }
}

fn answer(verb: Verb, stdin: &[u8]) -> Result<()> {
    if verb == Verb::Version {
        let newest = VERSIONS.last().copied().unwrap_or_default();
        return print(&json!({"cniVersion": newest, "supportedVersions": VERSIONS}));
    }
    if !nix::unistd::geteuid().is_root() {
        return Err(Error::new(
            Kind::Denied,
            "set up a pod's network: this needs root; run it as the daemon does",
        ));
    }
    let mut config = Config::load()?;
    let request = Request::read(&mut config, verb, stdin)?;
    match verb {
        Verb::Add => add::run(&config, &request),
        Verb::Del => del::run(&config, &request),
        Verb::Check => ask::check(&config, &request),
        Verb::Status => ask::status(&config, &request),
        Verb::Gc => ask::collect(&config, &request),
        Verb::Version => Ok(()),
    }
}

/// An error object, as libcni reads it.
fn tell(version: &str, code: u32, error: &Error) -> ExitCode {
    let msg = error.to_string();
    // Nobody is left to tell when this fails.
    let _ = print(&json!({"cniVersion": version, "code": code, "msg": msg, "details": ""}));
    ExitCode::FAILURE
}

/// Writes an answer whole.
fn print(value: &Value) -> Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(value.to_string().as_bytes())
        .and_then(|()| out.flush())
        .context(|| "write the answer to standard output")
}

/// A line for the daemon's log, or for its error when it kills us.
fn note(text: &str) {
    let _ = writeln!(io::stderr(), "podvisor-cni: {text}");
}

/// An event loop for what is not the hot path.
fn block_on<T>(work: impl Future<Output = Result<T>>) -> Result<T> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context(|| "start an event loop")?;
    runtime.block_on(Box::pin(work))
}
