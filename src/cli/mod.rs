//! The command people type: `podvisor`.
//!
//! Owns the words of the command line, its tables and its exit codes; one file per verb. Promises: everything that can
//! be checked is checked before anything is made; what fails half-way is undone; data goes to stdout, everything else
//! to stderr. Must never do a supervisor's work: pods are made, kept and ended by their supervisors, this room only
//! launches them, asks them, and reads what they have written down.
//!
//! Exit codes: the workload's own where there is one (128 + n when signal n ended it), 127 command not found, 126
//! command cannot be run, 125 podvisor itself failed, 1 the pod or container named is not there or not in a state
//! that allows it.

mod attach;
mod bundle;
mod capability;
mod completion;
mod container;
mod create;
mod each;
mod events;
mod exec;
mod failure;
mod filter;
mod gc;
mod given;
mod given_container;
mod given_pod;
mod host;
mod inspect;
mod kill;
mod logs;
mod make;
mod metrics;
mod mounts;
mod names;
mod network;
mod output;
mod owed;
mod parked;
mod parse;
mod patience;
mod pause;
mod plan;
mod pod_network;
mod progress;
mod ps;
mod remove;
mod rm;
mod run;
mod select;
mod since;
mod spec;
mod stats;
mod stop;
mod supervisor;
mod terminal;
mod user;
mod version;
mod wait;
mod workload;
mod wrap;

use std::process::ExitCode;
use std::rc::Rc;

use clap::{CommandFactory, Parser, Subcommand};

use crate::cli::failure::{Failure, PODVISOR_FAILED};
use crate::cli::host::Host;
use crate::error::Error;

/// Run pods without a daemon: each pod has one small supervisor of its own.
#[derive(Debug, Parser)]
#[command(
    name = "podvisor",
    version,
    arg_required_else_help = true,
    propagate_version = false
)]
struct Command {
    /// Namespace that pods are kept in, as containerd's namespaces.
    #[arg(
        long,
        global = true,
        default_value = "default",
        value_name = "NAMESPACE"
    )]
    namespace: String,
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Make a pod and run a command in it (or, with --sandbox, in a pod that is there).
    Run(Box<run::Args>),
    /// Make a pod without a container.
    Create(create::Args),
    /// List pods.
    Ps(ps::Args),
    /// Show everything that is known of pods, as JSON, or the stages of their creation.
    Inspect(inspect::Args),
    /// Run one more command in a container.
    Exec(exec::Args),
    /// Print what a container has written.
    Logs(logs::Args),
    /// Show what containers use.
    Stats(stats::Args),
    /// Tell what happens to pods and containers.
    Events(events::Args),
    /// Send a signal to containers.
    Kill(kill::Args),
    /// Stop all containers of pods where they are.
    Pause(pause::PauseArgs),
    /// Let containers that were paused go on.
    Unpause(pause::UnpauseArgs),
    /// Stop pods: containers get SIGTERM, then SIGKILL; the network is released; the record stays until `rm`.
    Stop(stop::Args),
    /// Remove pods that are stopped.
    Rm(rm::Args),
    /// Wait until a container has ended and print its exit code.
    Wait(wait::Args),
    /// Networks that pods can be given: list them, check pods on them, collect what was left.
    Network(network::Args),
    /// Print the figures of this node as Prometheus text, for a collector of text files.
    Metrics(metrics::Args),
    /// Undo what supervisors that have died, and reboots, have left.
    Gc(gc::Args),
    /// Print what a shell needs to complete command lines: bash, zsh, fish.
    Completion(completion::Args),
    /// Show the version.
    Version(version::Args),
}

/// `main` of podvisor.
pub fn main() -> ExitCode {
    let command = match Command::try_parse() {
        Ok(command) => command,
        Err(e) => {
            if e.use_stderr() {
                // It quotes what was typed.
                output::refuse(e.render());
                return ExitCode::from(PODVISOR_FAILED);
            }
            // Printing help can only fail when nobody reads it.
            let _ = e.print();
            return ExitCode::SUCCESS;
        }
    };
    match act(command) {
        Ok(code) => ExitCode::from(code),
        Err(failure) => {
            if let Some(text) = failure.text() {
                output::complain(text);
            }
            ExitCode::from(failure.code())
        }
    }
}

fn act(command: Command) -> Result<u8, Failure> {
    match &command.verb {
        Verb::Version(args) => return version::run(args),
        Verb::Completion(args) => return completion::run(args, Command::command()),
        _ => {}
    }
    let host = Rc::new(Host::open(&command.namespace)?);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|e| Error::io("start the command's own event loop", e))?;
    let verb = async {
        match command.verb {
            // Boxed: its state is larger than a future's should be.
            Verb::Run(args) => Box::pin(run::run(&host, *args)).await,
            Verb::Create(args) => create::run(&host, args).await,
            Verb::Ps(args) => ps::run(&host, &args),
            Verb::Inspect(args) => inspect::run(&host, args).await,
            Verb::Exec(args) => exec::run(&host, args).await,
            Verb::Logs(args) => logs::run(&host, &args).await,
            Verb::Stats(args) => stats::run(&host, &args).await,
            Verb::Events(args) => events::run(&host, &args).await,
            Verb::Kill(args) => kill::run(&host, args).await,
            Verb::Pause(args) => pause::pause(&host, args).await,
            Verb::Unpause(args) => pause::unpause(&host, args).await,
            Verb::Stop(args) => stop::run(&host, args).await,
            Verb::Rm(args) => rm::run(&host, args).await,
            Verb::Wait(args) => wait::run(&host, args).await,
            Verb::Network(args) => network::run(&host, &args).await,
            Verb::Metrics(args) => metrics::run(&host, &args).await,
            Verb::Gc(args) => gc::run(&host, &args).await,
            Verb::Completion(args) => completion::run(&args, Command::command()),
            Verb::Version(args) => version::run(&args),
        }
    };
    // Boxed: the verbs' states together are larger than a stack frame should be.
    let code = runtime.block_on(Box::pin(verb));
    // A thread that copies a stream may hang in a read; it must not hold the command back.
    runtime.shutdown_background();
    code
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Command::command().debug_assert();
    }

    #[test]
    fn what_follows_the_command_is_the_commands() {
        let parsed =
            Command::try_parse_from(["podvisor", "exec", "-e", "A=1", "web", "ls", "-e", "--json"]);
        assert!(matches!(parsed.map(|c| c.verb), Ok(Verb::Exec(_))));
        assert!(
            Command::try_parse_from(["podvisor", "run", "--rootfs", "/r", "--bogus", "x"]).is_err()
        );
    }

    #[test]
    fn a_command_that_looks_like_a_flag_needs_the_double_dash() {
        let run = Command::try_parse_from([
            "podvisor", "run", "--rootfs", "/r", "--", "/bin/sh", "-c", "exit 7",
        ]);
        assert!(run.is_ok());
        let add = [
            "podvisor",
            "run",
            "--sandbox",
            "a",
            "--net",
            "none",
            "--rootfs",
            "/r",
            "--",
            "x",
        ];
        assert!(Command::try_parse_from(add).is_err());
        let both = ["podvisor", "run", "-d", "--rm", "--rootfs", "/r", "--", "x"];
        assert!(Command::try_parse_from(both).is_err());
    }
}
