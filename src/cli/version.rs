//! `podvisor version`: this command, and what it would use.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::json;

use crate::config::Config;

use super::failure::Failure;
use super::output::{self, Format};
use super::supervisor;

/// Flags of `version`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  podvisor version --json")]
pub struct Args {
    #[command(flatten)]
    format: Format,
}

/// Runs the verb; needs neither root nor a configuration, and says so when there is one that cannot be read.
pub fn run(args: &Args) -> Result<u8, Failure> {
    let version = env!("CARGO_PKG_VERSION");
    let program = supervisor::find().ok();
    let config = Config::load();
    if let Err(error) = &config {
        output::complain(error);
    }
    let bounds = config.map(|c| bounds(&c)).unwrap_or_default();
    if args.format.is_json() {
        output::json(
            &json!({ "version": version, "supervisor": program, "runtime_create_timeout": bounds }),
        )?;
        return Ok(0);
    }
    output::line(format_args!("podvisor {version}"));
    match program {
        Some(path) => output::line(format_args!("supervisor {}", path.display())),
        None => output::line("supervisor not found"),
    }
    for (runtime, seconds) in bounds {
        output::line(format_args!(
            "runtime create timeout {seconds} s ({runtime})"
        ));
    }
    Ok(0)
}

/// Seconds that hold, after defaults and floor: of any OCI runtime (`default`), and of those with settings of their own.
fn bounds(config: &Config) -> BTreeMap<String, f64> {
    let own = config.runtimes.keys().map(String::as_str);
    own.chain([""])
        .map(|name| {
            let seconds = config.create_timeout(Path::new(name)).as_secs_f64();
            let shown = if name.is_empty() { "default" } else { name };
            (shown.to_owned(), seconds)
        })
        .collect()
}
