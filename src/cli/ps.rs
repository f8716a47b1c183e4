//! `podvisor ps`: the pods of a namespace, read from their journals; no supervisor is asked.

use std::time::SystemTime;

use serde_json::{Value, json};

use crate::clock;
use crate::container::{ContainerRecord, Status};
use crate::network::PortMapping;
use crate::pod::history::Activity;
use crate::pod::record::{self, Effect, Found, Record, State};

use super::failure::Failure;
use super::filter::{self, Filter, Listed};
use super::host::Host;
use super::output::Format;
use super::supervisor::short;
use super::{names, output, owed, parked};

/// Flags of `ps`.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Examples:\n  podvisor ps -a\n  podvisor ps --filter state=ready --filter label=app=web --format json"
)]
pub struct Args {
    /// Show pods that have stopped, too, and those that are gone but for their network.
    #[arg(short, long)]
    all: bool,
    /// Show only these: state=, name= (with *), id=, network=, label=KEY[=VALUE]. May be repeated: values of one key are
    /// alternatives. A filter by state needs no -a.
    #[arg(short, long, value_name = "KEY=VALUE", value_parser = filter::parse)]
    filter: Vec<Filter>,
    #[command(flatten)]
    format: Format,
    /// Print ids only.
    #[arg(short, long, conflicts_with_all = ["json", "format"])]
    quiet: bool,
}

/// Runs the verb.
pub fn run(host: &Host, args: &Args) -> Result<u8, Failure> {
    let by_state = args.filter.iter().any(|f| matches!(f, Filter::State(_)));
    let all = args.all || by_state;
    let found = record::list(&host.config, Some(&host.namespace));
    // Once for each pod: it asks the kernel whether the supervisor lives.
    let pods = found.iter().map(|pod| Shown {
        state: match pod {
            Found::Record(r) => state(r),
            Found::Broken { .. } => UNRECOVERED,
        },
        pod,
    });
    let shown: Vec<Shown<'_>> = pods
        .filter(|p| all || !p.is_over())
        .filter(|p| filter::passes(&args.filter, &p.listed()))
        .collect();
    let gone = |state: &str, name: &str, id: &str| {
        let listed = Listed {
            state,
            name,
            id,
            networks: Vec::new(),
            labels: None,
        };
        filter::passes(&args.filter, &listed)
    };
    let (mut owed, mut parked) = (Vec::new(), Vec::new());
    if all {
        owed = owed::list(host);
        owed.retain(|o| gone(o.state(), &o.holder.name, &o.id));
        parked = parked::list(host);
        parked.retain(|p| gone(p.state(), &p.holder.name, &p.holder.sandbox_id));
    }
    if args.format.is_json() {
        let pods = shown.iter().map(|p| document(host, p));
        let pods = pods.chain(parked.iter().map(parked::entry));
        let list: Vec<Value> = pods.chain(owed.iter().map(owed::entry)).collect();
        output::json(&list)?;
    } else if args.quiet {
        for shown in shown {
            output::line(shown.id());
        }
        for pod in &parked {
            output::line(&pod.holder.sandbox_id);
        }
        for pod in &owed {
            output::line(&pod.id);
        }
    } else {
        let pods = shown.iter().map(|p| row(host, p));
        let pods = pods.chain(parked.iter().map(parked::row));
        let rows: Vec<Vec<String>> = pods.chain(owed.iter().map(owed::row)).collect();
        output::table(
            &[
                "POD ID",
                "NAME",
                "STATE",
                "AGE",
                "IP",
                "PORTS",
                "CONTAINERS",
            ],
            &rows,
        );
    }
    Ok(0)
}

/// A pod that may be in the list.
struct Shown<'a> {
    pod: &'a Found,
    state: &'static str,
}

impl Shown<'_> {
    fn id(&self) -> &str {
        match self.pod {
            Found::Record(r) => &r.id,
            Found::Broken { id, .. } => id,
        }
    }

    /// Stopped and not ready pods; what is dead or unrecovered is shown always, because it needs somebody.
    fn is_over(&self) -> bool {
        matches!(self.state, STOPPED | "not ready")
    }

    fn listed(&self) -> Listed<'_> {
        match self.pod {
            Found::Record(r) => {
                let attached = r.network.attachments.iter().map(|a| a.name.as_str());
                Listed {
                    state: self.state,
                    name: &r.name,
                    id: &r.id,
                    networks: attached.chain([r.network.name.as_str()]).collect(),
                    labels: Some(&r.labels),
                }
            }
            Found::Broken { id, .. } => Listed {
                state: self.state,
                name: "",
                id,
                networks: Vec::new(),
                labels: None,
            },
        }
    }
}

/// The state people are shown: the record's, unless the supervisor that wrote it has died.
pub fn state(record: &Record) -> &'static str {
    match record.state {
        // Undone without a supervisor: there is none that could have died.
        State::Stopped if record.supervisor.is_none() => return STOPPED,
        _ if !record.is_supervised() => return DEAD,
        _ => {}
    }
    match record.state {
        State::Created => "created",
        State::Starting => "starting",
        State::Ready => "ready",
        State::Parked => "parked",
        State::NotReady => "not ready",
        State::Stopped => STOPPED,
        State::TaskOnly => "task only",
    }
}

/// The same, and how long what somebody waits for has been going on: "parked 12s".
fn told_state(record: &Record, state: &'static str) -> String {
    let going_on = match record.activity() {
        Activity::Creating | Activity::Parked => state,
        Activity::RollingBack => "rolling back",
        Activity::Other(_) => return state.to_owned(),
    };
    if state == DEAD {
        return state.to_owned();
    }
    format!("{going_on} {}", output::span(record.activity_age()))
}

/// The state of a pod whose supervisor has died.
pub const DEAD: &str = "dead";

/// The state of a pod that was stopped.
pub const STOPPED: &str = "stopped";

/// The state of a pod whose record cannot be read.
pub const UNRECOVERED: &str = "unrecovered";

/// A published port as it is written on the command line: `8080->80/tcp`.
pub fn port(port: &PortMapping) -> String {
    let at = match port.host_ip.as_str() {
        "" => String::new(),
        v6 if v6.contains(':') => format!("[{v6}]:"),
        v4 => format!("{v4}:"),
    };
    format!(
        "{at}{}->{}/{}",
        port.host_port, port.container_port, port.protocol
    )
}

fn running(record: &Record) -> usize {
    record
        .containers
        .values()
        .filter(|c| matches!(c.status, Status::Running | Status::Paused))
        .count()
}

fn paused(record: &Record) -> usize {
    let all = record.containers.values();
    all.filter(|c| c.status == Status::Paused).count()
}

/// Made, and nobody has come for them yet: since when.
pub fn parked(record: &Record) -> impl Iterator<Item = (&str, SystemTime)> {
    let since = |c: &ContainerRecord| Some(clock::from_unix_nanos(c.parked_at?));
    let containers = record.containers.iter();
    containers.filter_map(move |(id, c)| Some((id.as_str(), since(c)?)))
}

/// How many run, of how many; those that are parked with the age of the oldest.
fn containers(record: &Record) -> String {
    let counted = format!("{}/{}", running(record), record.containers.len());
    let frozen = paused(record);
    match parked(record).map(|(_, since)| since).min() {
        None if frozen > 0 => format!("{counted} ({frozen} paused)"),
        None => counted,
        Some(since) => {
            let count = parked(record).count();
            format!("{counted} ({count} parked, {})", output::age(since))
        }
    }
}

fn row(host: &Host, shown: &Shown<'_>) -> Vec<String> {
    match shown.pod {
        Found::Record(r) => vec![
            short(&r.id).to_owned(),
            r.name.clone(),
            told_state(r, shown.state),
            output::age(clock::from_unix_nanos(r.created_at)),
            address(r),
            ports(r),
            containers(r),
        ],
        Found::Broken { id, .. } => {
            let name = names::of(host, id).unwrap_or_default();
            let mut row = vec![short(id).to_owned(), name, UNRECOVERED.to_owned()];
            row.resize(7, String::new());
            row
        }
    }
}

fn ports(record: &Record) -> String {
    if is_released(record) {
        String::new()
    } else {
        record
            .network
            .ports
            .iter()
            .map(port)
            .collect::<Vec<_>>()
            .join(",")
    }
}

/// The record keeps the addresses and ports a pod has had; when it has stopped, or its infra process has died, they may
/// be another's.
pub fn is_released(record: &Record) -> bool {
    let down = match record.state {
        State::Stopped => true,
        State::NotReady => record.effects.cni == Effect::None,
        _ => false,
    };
    down && record.network.pending.is_none()
}

fn address(record: &Record) -> String {
    if is_released(record) {
        return String::new();
    }
    if record.network.host {
        return "host".to_owned();
    }
    let bare = |ip: &String| ip.split('/').next().unwrap_or_default().to_owned();
    record
        .network
        .ips
        .iter()
        .map(bare)
        .collect::<Vec<_>>()
        .join(",")
}

fn document(host: &Host, shown: &Shown<'_>) -> Value {
    match shown.pod {
        Found::Record(r) => json!({
            "id": r.id,
            "name": r.name,
            "namespace": r.namespace,
            "state": shown.state,
            "reason": r.reason,
            "activity": r.activity().name(),
            "activity_seconds": r.activity_age().as_secs_f64(),
            "created_at": clock::rfc3339(clock::from_unix_nanos(r.created_at)),
            "network": r.network.name,
            "ips": r.network.ips,
            "ports": r.network.ports,
            "containers": r.containers.len(),
            "running": running(r),
            "paused": paused(r),
            "parked": parked(r).count(),
            "labels": r.labels,
        }),
        Found::Broken {
            namespace,
            id,
            reason,
        } => json!({
            "id": id,
            "name": names::of(host, id),
            "namespace": namespace,
            "state": UNRECOVERED,
            "reason": reason,
            "activity": null,
            "activity_seconds": null,
            "created_at": null,
            "network": null,
            "ips": [],
            "ports": [],
            "containers": null,
            "running": null,
            "paused": null,
            "parked": null,
            "labels": {},
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_read_from_the_host_to_the_pod() {
        let mapping = |ip: &str| PortMapping {
            host_port: 80,
            container_port: 8080,
            protocol: "tcp".into(),
            host_ip: ip.into(),
        };
        assert_eq!(port(&mapping("")), "80->8080/tcp");
        assert_eq!(port(&mapping("10.0.0.1")), "10.0.0.1:80->8080/tcp");
        assert_eq!(port(&mapping("::1")), "[::1]:80->8080/tcp");
    }
}
