//! `podvisor network`: the networks that are configured, what is wrong with them, who is on them, and what is owed.
//!
//! Promises that looking changes nothing: plugins are only asked VERSION, CHECK and STATUS; `gc` alone removes.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::error::{Kind, Result};
use crate::network::{self, Asked, Histogram, NetworkConf, NetworkRecord, OnRecord, Valid};
use crate::pod::gc;

use super::failure::{Failure, NO_SUCH};
use super::host::Host;
use super::output::Format;
use super::{output, owed, parked, select, wrap};

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
    #[command(after_help = "Example:\n  podvisor network ls --format json")]
    Ls {
        #[command(flatten)]
        format: Format,
    },
    /// Ask the plugins whether a pod's network still is as they have made it (CHECK).
    #[command(after_help = "Example:\n  podvisor network check web")]
    Check {
        /// Name, id, or the beginning of one.
        #[arg(value_name = "POD")]
        pod: String,
    },
    /// Send the DELs that are owed, and let the plugins collect what belongs to no pod (GC).
    #[command(after_help = "Example:\n  podvisor network gc --dry-run")]
    Gc {
        /// Print what would be done.
        #[arg(long)]
        dry_run: bool,
    },
    /// Put podvisor's CNI plugin in front of a network, for pods that daemons make: what it has made for an attempt that
    /// gave up is the next attempt's.
    #[command(after_help = "Example:\n  podvisor network wrap pods")]
    Wrap {
        /// Its name.
        #[arg(value_name = "NETWORK")]
        network: String,
    },
    /// Take the plugin away from a network again; pods that are there are not touched.
    #[command(after_help = "Example:\n  podvisor network unwrap pods")]
    Unwrap {
        /// Its name.
        #[arg(value_name = "NETWORK")]
        network: String,
    },
    /// Ask whether networks can take pods (STATUS).
    #[command(after_help = "Example:\n  podvisor network status")]
    Status {
        /// Only this one.
        #[arg(value_name = "NETWORK")]
        network: Option<String>,
    },
}

/// Runs the verb.
pub async fn run(host: &Host, args: &Args) -> Result<u8, Failure> {
    match &args.verb {
        Verb::Ls { format } => ls(host, format.is_json()).await,
        Verb::Check { pod } => check(host, pod).await,
        Verb::Gc { dry_run } => collect(host, *dry_run).await,
        Verb::Status { network } => status(host, network.as_deref()).await,
        Verb::Wrap { network } => wrap::wrap(host, network).await,
        Verb::Unwrap { network } => wrap::unwrap(host, network),
    }
}

/// A network as it is shown; or a file that is none.
#[derive(Default)]
struct Shown {
    name: Option<String>,
    path: Option<PathBuf>,
    cni_version: String,
    /// Versions of each plugin by type, where they could be asked.
    plugins: Vec<(String, Option<Vec<String>>)>,
    problems: Vec<String>,
    /// Pods on it.
    pods: usize,
    /// Pods that are gone and whose DEL is owed.
    owed: Vec<Value>,
    /// Pods that are gone and whose network waits for their next supervisor.
    parked: Vec<Value>,
    /// Durations of its chains since the boot, by command.
    latency: BTreeMap<String, Histogram>,
}

async fn ls(host: &Host, json: bool) -> Result<u8, Failure> {
    let shown = look(host).await?;
    if json {
        output::json(&shown.iter().map(document).collect::<Vec<_>>())?;
        return Ok(0);
    }
    let networks = shown
        .iter()
        .filter(|s| s.path.is_some() && s.name.is_some());
    let rows: Vec<Vec<String>> = networks.map(row).collect();
    output::table(
        &["NAME", "PODS", "OWED", "VERSION", "PLUGINS", "FILE"],
        &rows,
    );
    for network in &shown {
        let path = network.path.as_ref().map(|p| p.display().to_string());
        let name = network.name.as_ref().map(|n| format!("network {n}"));
        let what = name.or(path).unwrap_or_default();
        for problem in &network.problems {
            output::complain(format!("{what}: {problem}"));
        }
    }
    for parked in gc::parked(&host.config) {
        output::complain(format!(
            "pod {} is gone: {}, {}",
            parked::label(&parked),
            parked.state(),
            parked::reason(&parked)
        ));
    }
    for owed in gc::owed(&host.config) {
        output::complain(format!(
            "pod {} is gone: {}, tries so far: {}",
            owed::label(&owed),
            owed.state(),
            owed.debt.tries
        ));
    }
    Ok(0)
}

/// Configured networks, then files that are bad, then networks that are only owed something.
async fn look(host: &Host) -> Result<Vec<Shown>> {
    let (here, _) = attachments(host);
    let mut owed = owed_by_network(host);
    let mut latencies = network::latencies(&host.config);
    let mut shown = Vec::new();
    for (name, _) in network::list_confs(&host.config) {
        // Taken away since it was listed.
        let Ok(conf) = network::load_conf(&host.config, Some(&name)) else {
            continue;
        };
        let pods: BTreeSet<&str> = here
            .iter()
            .filter(|a| a.network == name)
            .map(|a| a.container_id.as_str())
            .collect();
        let mut network = Shown {
            pods: pods.len(),
            owed: owed.remove(&name).unwrap_or_default(),
            parked: parked_on(host, &name),
            path: Some(conf.path.clone()),
            latency: latencies.remove(&name).unwrap_or_default(),
            cni_version: conf.cni_version.clone(),
            name: Some(name),
            ..Shown::default()
        };
        ask_plugins(host, &conf, &mut network).await?;
        shown.push(network);
    }
    let bad = network::bad_confs(&host.config).into_iter();
    shown.extend(bad.map(|(path, why)| Shown {
        path: Some(path),
        problems: vec![format!("not used: {why}")],
        ..Shown::default()
    }));
    shown.extend(owed.into_iter().map(|(name, owed)| Shown {
        name: Some(name),
        problems: vec!["it is owed a DEL and is not configured any more".to_owned()],
        owed,
        ..Shown::default()
    }));
    Ok(shown)
}

async fn ask_plugins(host: &Host, conf: &NetworkConf, shown: &mut Shown) -> Result<()> {
    for plugin in &conf.plugins {
        let kind = plugin["type"].as_str().unwrap_or_default();
        let asked = network::versions(&host.config, host.reaper().await?, kind).await;
        match &asked {
            Err(e) => shown.problems.push(e.to_string()),
            Ok(spoken) if !spoken.contains(&conf.cni_version) => shown.problems.push(format!(
                "plugin {kind:?} does not speak version {}",
                conf.cni_version
            )),
            Ok(_) => {}
        }
        shown.plugins.push((kind.to_owned(), asked.ok()));
    }
    Ok(())
}

/// Parked networks with an attachment to this one.
fn parked_on(host: &Host, name: &str) -> Vec<Value> {
    let all = gc::parked(&host.config).into_iter();
    all.filter(|p| p.record.attachments().iter().any(|a| a.network == name))
        .map(|p| parked::document(&p))
        .collect()
}

fn owed_by_network(host: &Host) -> BTreeMap<String, Vec<Value>> {
    let mut all: BTreeMap<String, Vec<Value>> = BTreeMap::new();
    for owed in gc::owed(&host.config) {
        let on = owed.record.attachments().into_iter();
        let networks: BTreeSet<String> = on.filter(|a| a.owes_del).map(|a| a.network).collect();
        for network in networks {
            all.entry(network).or_default().push(owed::document(&owed));
        }
    }
    all
}

/// Attachments of pods that are there, and those of pods that are gone, whose DEL is owed.
fn attachments(host: &Host) -> (Vec<OnRecord>, Vec<OnRecord>) {
    let owed = gc::owed(&host.config);
    let gone: Vec<&Path> = owed.iter().map(|o| o.record.dir()).collect();
    let (mut here, mut owed) = (Vec::new(), Vec::new());
    for (_, _, record) in NetworkRecord::list(&host.config) {
        let open = record.attachments().into_iter().filter(|a| a.owes_del);
        if gone.contains(&record.dir()) {
            owed.extend(open);
        } else {
            here.extend(open);
        }
    }
    (here, owed)
}

fn row(shown: &Shown) -> Vec<String> {
    let plugins: Vec<&str> = shown
        .plugins
        .iter()
        .map(|(name, _)| name.as_str())
        .collect();
    let path = shown.path.as_ref().map(|p| p.display().to_string());
    vec![
        shown.name.clone().unwrap_or_default(),
        shown.pods.to_string(),
        shown.owed.len().to_string(),
        shown.cni_version.clone(),
        plugins.join(","),
        path.unwrap_or_default(),
    ]
}

fn document(shown: &Shown) -> Value {
    let plugins: Vec<Value> = shown
        .plugins
        .iter()
        .map(|(name, versions)| json!({"type": name, "versions": versions}))
        .collect();
    json!({
        "name": shown.name,
        "path": shown.path,
        "cni_version": shown.cni_version,
        "plugins": plugins,
        "problems": shown.problems,
        "pods": shown.pods,
        "owed": shown.owed,
        "parked": shown.parked,
        "latency": latency(&shown.latency),
    })
}

/// `{"ADD": {"count", "failed", "sum_us", "buckets": [{"le_ms", "count"}]}}`; buckets are cumulative, as in Prometheus, and
/// the last has no bound.
fn latency(of: &BTreeMap<String, Histogram>) -> Value {
    let commands = of.iter().map(|(command, histogram)| {
        let mut sum = 0;
        let bounds = network::BOUNDS_MS.iter().map(|b| json!(b));
        let buckets: Vec<Value> = bounds
            .chain([Value::Null])
            .zip(histogram.buckets)
            .map(|(le, count)| {
                sum += count;
                json!({"le_ms": le, "count": sum})
            })
            .collect();
        let document = json!({
            "count": histogram.count,
            "failed": histogram.failed,
            "sum_us": histogram.sum_us,
            "buckets": buckets,
        });
        (command.clone(), document)
    });
    Value::Object(commands.collect())
}

async fn check(host: &Host, target: &str) -> Result<u8, Failure> {
    let pod = select::readable(host, target)?;
    let record = pod.network_record(&host.config);
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
        let conf =
            network::load_conf(&host.config, Some(&name)).map_err(|e| Failure::new(NO_SUCH, e))?;
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
        } else if let Err(e) = owed::try_once(host, &owed).await {
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
