//! `podvisor stats`: what containers use now, asked of their supervisors; a table that goes on, or documents.
//!
//! Promises that a supervisor which does not answer costs only its own rows, and that processor time is that of the time
//! between two looks, in percent of one processor.

use std::collections::BTreeMap;
use std::io::IsTerminal;
use std::time::{Duration, SystemTime};

use serde_json::{Value, json};
use tokio::time::Instant;

use crate::client;
use crate::clock;
use crate::error::{Error, Kind, Result};
use crate::pod::record::{self, Found, Record, State};
use crate::proto::any;
use crate::proto::cgroup1::metrics as v1;
use crate::proto::cgroup2::metrics as v2;
use crate::proto::task_v3::shim::StatsRequest;
use crate::undo::together;

use super::failure::Failure;
use super::host::Host;
use super::output::{self, Format};
use super::supervisor::{self, label, short};
use super::{each, kill, parse, select};

/// Statistics are read from files.
const LIMIT: Duration = Duration::from_secs(5);

/// Between the two looks of `--no-stream`.
const MOMENT: Duration = Duration::from_millis(250);

/// From here on a limit is none: v1 has no word for that.
const NO_LIMIT: u64 = 1 << 62;

/// Takes the cursor home and clears what is below.
const REDRAW: &str = "\x1b[H\x1b[2J";

/// Flags of `stats`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  podvisor stats --no-stream web")]
pub struct Args {
    /// Print once and leave.
    #[arg(long)]
    no_stream: bool,
    /// Time between two looks.
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = parse::span, conflicts_with = "no_stream")]
    interval: Duration,
    #[command(flatten)]
    format: Format,
    /// Names, ids, or beginnings of ids; all pods that run when none is given.
    #[arg(value_name = "POD")]
    pods: Vec<String>,
}

/// What a container has used.
#[derive(Clone, Debug, Default, PartialEq)]
struct Usage {
    cpu_ns: u64,
    memory: u64,
    /// Without what the kernel would give back first.
    working_set: u64,
    memory_limit: Option<u64>,
    pids: u64,
    pids_limit: Option<u64>,
    read: u64,
    written: u64,
}

/// One container at one moment.
#[derive(Debug)]
struct Sample {
    pod: String,
    name: String,
    container: String,
    at: SystemTime,
    taken: Instant,
    usage: Usage,
}

/// Runs the verb.
pub async fn run(host: &Host, args: &Args) -> Result<u8, Failure> {
    let mut before = look(host, &args.pods).await?;
    let pause = if args.no_stream {
        MOMENT
    } else {
        args.interval
    };
    let redraw = !args.no_stream && !args.format.is_json() && std::io::stdout().is_terminal();
    loop {
        // Nothing is measured where nothing runs.
        if !(args.no_stream && before.is_empty()) {
            tokio::time::sleep(pause).await;
        }
        let now = match look(host, &args.pods).await {
            // All that was asked for has gone.
            Err(_) if !args.no_stream => return Ok(0),
            now => now?,
        };
        show(&before, &now, args, redraw)?;
        if args.no_stream {
            return Ok(0);
        }
        before = now;
    }
}

type Samples = BTreeMap<(String, String), Sample>;

async fn look(host: &Host, targets: &[String]) -> Result<Samples, Failure> {
    let pods: Vec<Box<Record>> = match targets {
        [] => {
            let all = record::list(&host.config, Some(&host.namespace)).into_iter();
            let ready = all.filter_map(|found| match found {
                Found::Record(r) if r.state == State::Ready => Some(r),
                _ => None,
            });
            ready.collect()
        }
        some => {
            let found = some.iter().map(|target| select::readable(host, target));
            found.collect::<Result<_, _>>()?
        }
    };
    let asked = pods.iter().map(|pod| Box::pin(of_pod(pod)));
    let asked = together(asked.collect(), each::AT_ONCE).await;
    let mut all = Samples::new();
    for (pod, answer) in pods.iter().zip(asked) {
        match answer {
            Ok(samples) => {
                let keyed = samples.into_iter();
                all.extend(keyed.map(|s| ((s.pod.clone(), s.container.clone()), s)));
            }
            // It has ended while we looked, or was dead before.
            Err(e) if e.is_gone() => {}
            Err(e) => output::complain(format!("measure pod {}: {e}", label(pod))),
        }
    }
    Ok(all)
}

async fn of_pod(pod: &Record) -> Result<Vec<Sample>> {
    let running = kill::running(pod);
    if running.is_empty() {
        return Ok(Vec::new());
    }
    let client = supervisor::connect(pod).await?;
    let mut samples = Vec::new();
    for id in running {
        let request = StatsRequest {
            id: id.clone(),
            ..Default::default()
        };
        let context = client::context(Some(LIMIT));
        let answer = match client.task().stats(context, &request).await {
            Ok(answer) => answer,
            Err(e) => match client::from_ttrpc(&format!("container {id}"), e) {
                e if matches!(e.kind(), Kind::NotFound | Kind::State) => continue,
                e => return Err(e),
            },
        };
        let stats = answer.stats.unwrap_or_default();
        let usage = usage(&stats).ok_or_else(|| {
            let what = format!(
                "container {id}: its statistics are of no known kind ({})",
                stats.type_url
            );
            Error::new(Kind::Unsupported, what)
        })?;
        samples.push(Sample {
            pod: pod.id.clone(),
            name: label(pod).to_owned(),
            container: select::container_name(&pod.id, &id).to_owned(),
            at: SystemTime::now(),
            taken: Instant::now(),
            usage,
        });
    }
    Ok(samples)
}

fn usage(stats: &protobuf::well_known_types::any::Any) -> Option<Usage> {
    let bound = |limit: u64| (limit != 0 && limit < NO_LIMIT).then_some(limit);
    if let Ok(Some(m)) = any::unpack::<v2::Metrics>(stats, any::CGROUP2_METRICS) {
        let sum = |of: fn(&v2::IOEntry) -> u64| m.io.usage.iter().map(of).sum();
        return Some(Usage {
            cpu_ns: m.cpu.usage_usec.saturating_mul(1000),
            memory: m.memory.usage,
            working_set: m.memory.usage.saturating_sub(m.memory.inactive_file),
            memory_limit: bound(m.memory.usage_limit),
            pids: m.pids.current,
            pids_limit: bound(m.pids.limit),
            read: sum(|e| e.rbytes),
            written: sum(|e| e.wbytes),
        });
    }
    let m = any::unpack::<v1::Metrics>(stats, any::CGROUP1_METRICS).ok()??;
    let moved = |op: &str| {
        let all = m.blkio.io_service_bytes_recursive.iter();
        let of_op = all.filter(|e| e.op.eq_ignore_ascii_case(op));
        of_op.map(|e| e.value).sum()
    };
    let memory = m.memory.usage.usage;
    Some(Usage {
        cpu_ns: m.cpu.usage.total,
        memory,
        working_set: memory.saturating_sub(m.memory.total_inactive_file),
        memory_limit: bound(m.memory.usage.limit),
        pids: m.pids.current,
        pids_limit: bound(m.pids.limit),
        read: moved("read"),
        written: moved("write"),
    })
}

fn show(before: &Samples, now: &Samples, args: &Args, redraw: bool) -> Result<()> {
    let percent = |key, sample: &Sample| cpu_percent(before.get(key), sample);
    if args.format.is_json() {
        let list: Vec<Value> = now
            .iter()
            .map(|(k, s)| document(s, percent(k, s)))
            .collect();
        return match args.no_stream {
            true => output::json(&list),
            // One document a line, for who reads on and on.
            false => output::json_line(&list),
        };
    }
    if redraw {
        output::text(REDRAW);
    }
    let rows: Vec<Vec<String>> = now.iter().map(|(k, s)| row(s, percent(k, s))).collect();
    output::table(
        &[
            "POD ID",
            "POD",
            "CONTAINER",
            "CPU %",
            "MEMORY",
            "LIMIT",
            "PIDS",
            "READ",
            "WRITTEN",
        ],
        &rows,
    );
    Ok(())
}

/// Of one processor; 0 where there is nothing to compare with.
fn cpu_percent(before: Option<&Sample>, now: &Sample) -> f64 {
    let Some(before) = before else { return 0.0 };
    let between = now.taken.duration_since(before.taken).as_nanos() as f64;
    // A container of the same name may be another one.
    let used = now.usage.cpu_ns.saturating_sub(before.usage.cpu_ns) as f64;
    if between > 0.0 {
        (used / between * 1e4).round() / 100.0
    } else {
        0.0
    }
}

fn row(sample: &Sample, percent: f64) -> Vec<String> {
    let u = &sample.usage;
    vec![
        short(&sample.pod).to_owned(),
        sample.name.clone(),
        sample.container.clone(),
        format!("{percent:.2}"),
        output::bytes(u.working_set),
        u.memory_limit.map_or_else(|| "-".to_owned(), output::bytes),
        u.pids.to_string(),
        output::bytes(u.read),
        output::bytes(u.written),
    ]
}

fn document(sample: &Sample, percent: f64) -> Value {
    let u = &sample.usage;
    json!({
        "pod_id": sample.pod,
        "pod": sample.name,
        "container": sample.container,
        "at": clock::rfc3339(sample.at),
        "cpu_percent": percent,
        "cpu_ns": u.cpu_ns,
        "memory_bytes": u.memory,
        "memory_working_set_bytes": u.working_set,
        "memory_limit_bytes": u.memory_limit,
        "pids": u.pids,
        "pids_limit": u.pids_limit,
        "read_bytes": u.read,
        "written_bytes": u.written,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(taken: Instant, cpu_ns: u64) -> Sample {
        Sample {
            pod: "p".into(),
            name: "n".into(),
            container: "c".into(),
            at: SystemTime::UNIX_EPOCH,
            taken,
            usage: Usage {
                cpu_ns,
                ..Usage::default()
            },
        }
    }

    #[test]
    fn both_layouts_give_the_same_figures() {
        let mut two = v2::Metrics::new();
        two.cpu.mut_or_insert_default().usage_usec = 5;
        let memory = two.memory.mut_or_insert_default();
        (memory.usage, memory.inactive_file, memory.usage_limit) = (100, 30, u64::MAX);
        two.pids.mut_or_insert_default().limit = 7;
        let mut one = v1::Metrics::new();
        one.cpu
            .mut_or_insert_default()
            .usage
            .mut_or_insert_default()
            .total = 5000;
        let memory = one.memory.mut_or_insert_default();
        memory.total_inactive_file = 30;
        let entry = memory.usage.mut_or_insert_default();
        (entry.usage, entry.limit) = (100, 9_223_372_036_854_771_712);
        one.pids.mut_or_insert_default().limit = 7;
        let wanted = Usage {
            cpu_ns: 5000,
            memory: 100,
            working_set: 70,
            pids_limit: Some(7),
            ..Usage::default()
        };
        let two = any::pack(any::CGROUP2_METRICS, &two).unwrap();
        let one = any::pack(any::CGROUP1_METRICS, &one).unwrap();
        assert_eq!(
            (usage(&two), usage(&one)),
            (Some(wanted.clone()), Some(wanted))
        );
        assert_eq!(usage(&any::raw("x", Vec::new())), None);
    }

    #[test]
    fn processor_time_is_that_between_two_looks() {
        let begin = Instant::now();
        let before = sample(begin, 1_000_000_000);
        let now = sample(begin + Duration::from_secs(2), 1_500_000_000);
        assert_eq!(cpu_percent(Some(&before), &now), 25.0);
        assert_eq!(cpu_percent(None, &now), 0.0);
        // Another container of the same name has used less.
        assert_eq!(cpu_percent(Some(&now), &before), 0.0);
    }
}
