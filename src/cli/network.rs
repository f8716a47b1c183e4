//! `podvisor network ls`: the networks that are configured, the pods on them, and what is owed.

use serde_json::{Value, json};

use crate::network::{self, NetworkRecord};
use crate::pod::record::{self, Found};

use super::failure::Failure;
use super::host::Host;
use super::output;

/// Flags of `network`.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, clap::Subcommand)]
enum Verb {
    /// List configured networks; the first one is what pods get that ask for none.
    Ls {
        /// Print a JSON array.
        #[arg(long)]
        json: bool,
    },
}

/// Runs the verb.
pub fn run(host: &Host, args: &Args) -> Result<u8, Failure> {
    let Verb::Ls { json } = args.verb;
    let pods = record::list(&host.config, None);
    let on = |name: &str| {
        let uses =
            |f: &&Found| matches!(f, Found::Record(r) if r.network.ours && r.network.name == name);
        pods.iter().filter(uses).count()
    };
    let networks = network::list_confs(&host.config);
    if json {
        let list: Vec<Value> = networks
            .iter()
            .map(|(name, path)| json!({ "name": name, "path": path, "pods": on(name) }))
            .collect();
        output::json(&list)?;
        return Ok(0);
    }
    let rows: Vec<Vec<String>> = networks
        .iter()
        .map(|(name, path)| {
            vec![
                name.clone(),
                on(name).to_string(),
                path.display().to_string(),
            ]
        })
        .collect();
    output::table(&["NAME", "PODS", "FILE"], &rows);
    let owing = NetworkRecord::list(&host.config)
        .into_iter()
        .filter(|(space, id, network)| {
            network.owes_del() && !host.config.sandbox_dir(space, id).exists()
        })
        .count();
    if owing > 0 {
        output::complain(format!(
            "{owing} pods are gone whose networks have not been cleaned up yet"
        ));
    }
    Ok(0)
}
