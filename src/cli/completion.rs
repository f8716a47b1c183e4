//! `podvisor completion`: words for shells that complete command lines.

use std::io::{self, Write};

use crate::error::Error;

use super::failure::Failure;

/// Flags of `completion`.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Example:\n  podvisor completion bash > podvisor.bash",
    long_about = "Print what a shell needs to complete podvisor's command lines."
)]
pub struct Args {
    /// For which shell.
    shell: Shell,
}

#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum Shell {
    Bash,
    Zsh,
    Fish,
}

/// Runs the verb; needs neither root nor a configuration.
pub fn run(args: &Args, mut command: clap::Command) -> Result<u8, Failure> {
    let shell = match args.shell {
        Shell::Bash => clap_complete::Shell::Bash,
        Shell::Zsh => clap_complete::Shell::Zsh,
        Shell::Fish => clap_complete::Shell::Fish,
    };
    let mut text = Vec::new();
    clap_complete::generate(shell, &mut command, "podvisor", &mut text);
    match io::stdout().write_all(&text) {
        // Whoever read us has seen enough.
        Err(e) if e.kind() == io::ErrorKind::BrokenPipe => Ok(0),
        written => {
            written.map_err(|e| Error::io("write the words for the shell", e))?;
            Ok(0)
        }
    }
}
