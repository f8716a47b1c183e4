//! `podvisor network`: the networks that are configured, what is wrong with them, who is on them, and what is owed.
//!
//! Promises that looking changes nothing: plugins are only asked VERSION, CHECK and STATUS; `gc` alone removes.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde_json::{Value, json};

use crate::error::{Kind, Result};
use crate::network::{self, Asked, NetworkConf, NetworkRecord, OnRecord, Valid};
use crate::pod::gc;

use super::failure::{Failure, NO_SUCH};
use super::host::Host;
use super::{output, owed, select};

/// Flags of `network`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  podvisor network ls")]
pub struct Args {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, clap::Subcommand)]
enum Verb {
    /// List configured networks; the first one is what pods get that ask for none.
    Ls {
        /// Print a JSON object.
        #[arg(long)]
        json: bool,
    },
    /// Ask the plugins whether a pod's network still is as they have made it (CHECK).
    Check {
        /// Name, id, or the beginning of one.
        #[arg(value_name = "POD")]
        pod: String,
    },
    /// Send the DELs that are owed, and let the plugins collect what belongs to no pod (GC).
    Gc {
        /// Print what would be done.
        #[arg(long)]
        dry_run: bool,
    },
    /// Ask whether networks can take pods (STATUS).
    Status {
        /// Only this one.
        #[arg(value_name = "NETWORK")]
        network: Option<String>,
    },
}

/// Runs the verb.
pub async fn run(host: &Host, args: &Args) -> Result<u8, Failure> {
    match &args.verb {
        Verb::Ls { json } => ls(host, *json).await,
        Verb::Check { pod } => check(host, pod).await,
        Verb::Gc { dry_run } => collect(host, *dry_run).await,
        Verb::Status { network } => status(host, network.as_deref()).await,
    }
}

/// A configured network as it is shown.
struct Shown {
    conf: NetworkConf,
    /// Versions of each plugin by type; the problem where it could not be asked.
    plugins: Vec<(String, Result<Vec<String>, String>)>,
    /// Attachments on record that are not owed.
    attached: usize,
    /// Attachments of pods that are gone.
    owed: usize,
}

impl Shown {
    fn problems(&self) -> Vec<String> {
        let of = |(name, versions): &(String, Result<Vec<String>, String>)| match versions {
            Err(e) => Some(e.clone()),
            Ok(v) if !v.contains(&self.conf.cni_version) => Some(format!(
                "plugin {name:?} does not speak version {}",
                self.conf.cni_version
            )),
            Ok(_) => None,
        };
        self.plugins.iter().filter_map(of).collect()
    }
}

async fn ls(host: &Host, json: bool) -> Result<u8, Failure> {
    let shown = look(host).await?;
    let bad = network::bad_confs(&host.config);
    let owed = gc::owed(&host.config);
    if json {
        let networks: Vec<Value> = shown.iter().map(document).collect();
        let bad: Vec<Value> = bad
            .iter()
            .map(|(path, why)| json!({"path": path, "problem": why}))
            .collect();
        let owed: Vec<Value> = owed.iter().map(owed::document).collect();
        output::json(&json!({"networks": networks, "bad_files": bad, "owed": owed}))?;
        return Ok(0);
    }
    let rows: Vec<Vec<String>> = shown.iter().map(row).collect();
    output::table(
        &["NAME", "VERSION", "PLUGINS", "PODS", "OWED", "FILE"],
        &rows,
    );
    for network in &shown {
        for problem in network.problems() {
            output::complain(format!("network {}: {problem}", network.conf.name));
        }
    }
    for (path, why) in bad {
        output::complain(format!("{} is not used: {why}", path.display()));
    }
    for owed in owed {
        output::complain(format!(
            "pod {} is gone: {}, {} tries",
            owed::label(&owed),
            owed.state(),
            owed.debt.tries
        ));
    }
    Ok(0)
}

async fn look(host: &Host) -> Result<Vec<Shown>> {
    let (here, owed) = attachments(host);
    let mut shown = Vec::new();
    for (name, _) in network::list_confs(&host.config) {
        // Taken away since it was listed.
        let Ok(conf) = network::load_conf(&host.config, Some(&name)) else {
            continue;
        };
        let mut plugins = Vec::new();
        for plugin in &conf.plugins {
            let kind = plugin["type"].as_str().unwrap_or_default();
            let asked = network::versions(&host.config, host.reaper().await?, kind).await;
            plugins.push((kind.to_owned(), asked.map_err(|e| e.to_string())));
        }
        let on = |all: &[OnRecord]| all.iter().filter(|a| a.network == name).count();
        shown.push(Shown {
            plugins,
            attached: on(&here),
            owed: on(&owed),
            conf,
        });
    }
    Ok(shown)
}

/// Attachments of pods that are there, and those of pods that are gone, whose DEL is owed.
fn attachments(host: &Host) -> (Vec<OnRecord>, Vec<OnRecord>) {
    let gone: Vec<PathBuf> = gc::owed(&host.config)
        .iter()
        .map(|o| o.record.dir().to_owned())
        .collect();
    let (mut here, mut owed) = (Vec::new(), Vec::new());
    for (_, _, record) in NetworkRecord::list(&host.config) {
        let open = record.attachments().into_iter().filter(|a| a.owes_del);
        if gone.iter().any(|dir| dir == record.dir()) {
            owed.extend(open);
        } else {
            here.extend(open);
        }
    }
    (here, owed)
}

fn row(shown: &Shown) -> Vec<String> {
    let plugins: Vec<&str> = shown.plugins.iter().map(|(name, _)| name.as_str()).collect();
    vec![
        shown.conf.name.clone(),
        shown.conf.cni_version.clone(),
        plugins.join(","),
        shown.attached.to_string(),
        shown.owed.to_string(),
        shown.conf.path.display().to_string(),
    ]
}

fn document(shown: &Shown) -> Value {
    let plugins: Vec<Value> = shown
        .plugins
        .iter()
        .map(|(name, versions)| json!({"type": name, "versions": versions.as_ref().ok()}))
        .collect();
    json!({
        "name": shown.conf.name,
        "path": shown.conf.path,
        "cni_version": shown.conf.cni_version,
        "plugins": plugins,
        "problems": shown.problems(),
        "pods": shown.attached,
        "owed": shown.owed,
    })
}

async fn check(host: &Host, target: &str) -> Result<u8, Failure> {
    let pod = select::readable(host, target)?;
    let record = NetworkRecord::at(&host.config, &host.namespace, &pod.id);
    let checked = network::check(&host.config, host.reaper().await?, &record).await?;
    if checked.is_empty() {
        return Err(Failure::no_such(
            Kind::State,
            format!("check the network of pod {target}: it has none of podvisor's"),
        ));
    }
    let mut failed = false;
    for attachment in checked {
        let what = format!("{} {}", attachment.network, attachment.ifname);
        match attachment.verdict {
            Ok(asked) => output::line(format!("{what}: {}", word(&asked))),
            Err(e) => {
                failed = true;
                output::complain(format!("{what}: {e}"));
            }
        }
    }
    ended(failed)
}

async fn status(host: &Host, only: Option<&str>) -> Result<u8, Failure> {
    let names = match only {
        Some(name) => vec![name.to_owned()],
        None => network::list_confs(&host.config)
            .into_iter()
            .map(|(name, _)| name)
            .collect(),
    };
    let mut failed = false;
    for name in names {
        let conf = network::load_conf(&host.config, Some(&name))
            .map_err(|e| Failure::new(NO_SUCH, e))?;
        match network::status(&host.config, host.reaper().await?, &conf).await {
            Ok(asked) => output::line(format!("{name}: {}", word(&asked))),
            Err(e) => {
                failed = true;
                output::complain(format!("{name}: {e}"));
            }
        }
    }
    ended(failed)
}

async fn collect(host: &Host, dry_run: bool) -> Result<u8, Failure> {
    let mut failed = false;
    for owed in gc::owed(&host.config) {
        let what = format!("network of pod {}, which is gone", owed::label(&owed));
        if dry_run {
            output::line(format!("would undo: {what}"));
        } else if let Err(e) = owed::hurry(host, &owed).await {
            failed = true;
            output::complain(format!("not undone: {what}: {e}"));
        } else {
            output::line(format!("undone: {what}"));
        }
    }
    for (name, valid) in valid(host) {
        // Without its configuration nobody can be asked; its attachments have theirs on record.
        let Ok(conf) = network::load_conf(&host.config, Some(&name)) else {
            continue;
        };
        if dry_run {
            for gone in network::stale(&host.config, &conf, &valid) {
                output::line(format!(
                    "would undo: attachment {} of {} to network {name}",
                    gone.ifname, gone.container_id
                ));
            }
            continue;
        }
        match network::gc(&host.config, host.reaper().await?, &conf, &valid).await {
            Ok(done) => {
                for gone in done.deleted {
                    output::line(format!(
                        "undone: attachment {} of {} to network {name}",
                        gone.ifname, gone.container_id
                    ));
                }
                output::line(format!("{name}: {}", word(&done.asked)));
            }
            Err(e) => {
                failed = true;
                output::complain(format!("{name}: {e}"));
            }
        }
    }
    ended(failed)
}

/// For each configured network what is attached to it, owed or not: none of that is garbage.
fn valid(host: &Host) -> BTreeMap<String, Vec<Valid>> {
    let (here, owed) = attachments(host);
    let mut networks: BTreeMap<String, Vec<Valid>> = network::list_confs(&host.config)
        .into_iter()
        .map(|(name, _)| (name, Vec::new()))
        .collect();
    for on in here.into_iter().chain(owed) {
        let valid = Valid {
            container_id: on.container_id,
            ifname: on.ifname,
        };
        networks.entry(on.network).or_default().push(valid);
    }
    networks
}

fn word(asked: &Asked) -> String {
    match asked {
        Asked::Good => "ok".to_owned(),
        Asked::NotAsked(why) => format!("not asked: {why}"),
    }
}

fn ended(failed: bool) -> Result<u8, Failure> {
    if failed {
        Err(Failure::silent(NO_SUCH))
    } else {
        Ok(0)
    }
}
