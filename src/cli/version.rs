//! `podvisor version`: this command, and what it would use.

use serde_json::json;

use super::failure::Failure;
use super::{output, supervisor};

/// Flags of `version`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  podvisor version --json")]
pub struct Args {
    /// Print a JSON object.
    #[arg(long)]
    json: bool,
}

/// Runs the verb; needs neither root nor a configuration.
pub fn run(args: &Args) -> Result<u8, Failure> {
    let version = env!("CARGO_PKG_VERSION");
    let program = supervisor::find().ok();
    if args.json {
        output::json(&json!({ "version": version, "supervisor": program }))?;
        return Ok(0);
    }
    output::line(format_args!("podvisor {version}"));
    match program {
        Some(path) => output::line(format_args!("supervisor {}", path.display())),
        None => output::line("supervisor not found"),
    }
    Ok(0)
}
