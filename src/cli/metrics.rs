//! `podvisor metrics`: the figures of this node as Prometheus text, of all namespaces.
//!
//! Counters and histograms are those kept for the boot, gauges come from the records; only how many requests wait is
//! asked of the supervisors that have a creation. Promises an answer while any of them hangs.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::time::Duration;

use crate::error::Result;
use crate::network::{self, BOUNDS_MS, Histogram};
use crate::pod::gc;
use crate::pod::history::Activity;
use crate::pod::record::{self, Found, Record};
use crate::tally::{self, Counters};

use super::failure::Failure;
use super::host::Host;
use super::{output, ps, supervisor};

/// A supervisor that takes longer is left out of the count of waiting requests.
const LIMIT: Duration = Duration::from_secs(1);

/// What is told even when there is none: a series that comes and goes cannot be alerted on.
const ALWAYS: [&str; 3] = ["creating", "parked", "rolling_back"];

/// Flags of `metrics`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  podvisor metrics | grep stalled")]
pub struct Args {}

/// Runs the verb.
pub async fn run(host: &Host, _: &Args) -> std::result::Result<u8, Failure> {
    let found = record::list(&host.config, None);
    let waiting = waiting(&found).await;
    let mut text = Text::default();
    text.pods(&Pods::of(&found), waiting);
    text.counters(&tally::counters(&host.config));
    text.chains(&network::latencies(&host.config));
    text.family(
        "podvisor_owed_networks",
        "gauge",
        "Networks of pods that are gone whose DEL has not succeeded yet.",
    );
    text.sample("podvisor_owed_networks", &[], gc::owed(&host.config).len());
    output::text(&text.0);
    Ok(0)
}

/// The pods by what goes on with them: how many, and the age of the oldest, seconds.
#[derive(Debug, Default)]
struct Pods(BTreeMap<&'static str, (usize, f64)>);

impl Pods {
    fn of(found: &[Found]) -> Self {
        let mut pods = Self::default();
        for name in ALWAYS {
            pods.0.insert(name, (0, 0.0));
        }
        for one in found {
            match one {
                Found::Record(r) if r.is_supervised() => {
                    pods.add(r.activity().name(), r.activity_age().as_secs_f64());
                }
                Found::Record(_) => pods.add(ps::DEAD, 0.0),
                Found::Broken { .. } => pods.add(ps::UNRECOVERED, 0.0),
            }
        }
        pods
    }

    fn add(&mut self, name: &'static str, age: f64) {
        let (count, oldest) = self.0.entry(name).or_default();
        *count += 1;
        *oldest = oldest.max(age);
    }
}

/// Requests that wait for creations, of all supervisors that answer in time.
async fn waiting(found: &[Found]) -> u64 {
    let mut asked = tokio::task::JoinSet::new();
    for one in found {
        match one {
            Found::Record(r) if r.is_supervised() && is_awaited(r) => {
                let record = r.clone();
                asked.spawn(async move { waiters(&record).await });
            }
            _ => {}
        }
    }
    let mut sum = 0;
    let all = async {
        while let Some(answer) = asked.join_next().await {
            sum += answer.ok().and_then(Result::ok).unwrap_or(0);
        }
    };
    // Late: those that have answered count.
    let _ = tokio::time::timeout(LIMIT, all).await;
    sum
}

fn is_awaited(record: &Record) -> bool {
    !matches!(record.activity(), Activity::Other(_))
}

async fn waiters(record: &Record) -> Result<u64> {
    let answer = supervisor::status(record, LIMIT).await?;
    let info = answer.info.get("info").map_or("", String::as_str);
    let info: serde_json::Value = serde_json::from_str(info).unwrap_or_default();
    Ok(info["podvisor"]["waiters"].as_u64().unwrap_or(0))
}

/// Prometheus' text format, 0.0.4.
#[derive(Debug, Default)]
struct Text(String);

impl Text {
    fn pods(&mut self, pods: &Pods, waiting: u64) {
        self.family(
            "podvisor_pods",
            "gauge",
            "Pods by what goes on with them; creating, parked and rolling_back are what retries meet.",
        );
        for (state, (count, _)) in &pods.0 {
            self.sample("podvisor_pods", &[("state", state)], count);
        }
        self.family(
            "podvisor_pods_oldest_age_seconds",
            "gauge",
            "How long the oldest pod of this state has been in it; 0 where there is none.",
        );
        for state in ALWAYS {
            let oldest = pods.0.get(state).map_or(0.0, |(_, age)| *age);
            let labels = [("state", state)];
            self.sample("podvisor_pods_oldest_age_seconds", &labels, oldest);
        }
        self.family(
            "podvisor_waiting_requests",
            "gauge",
            "Requests that wait for a creation right now.",
        );
        self.sample("podvisor_waiting_requests", &[], waiting);
    }

    fn counters(&mut self, counters: &Counters) {
        for (name, help, label, values) in [
            (
                "podvisor_stalled_at_stage_total",
                "Requests that had to wait for a creation under way, by the stage it was at.",
                "stage",
                &counters.stalled,
            ),
            (
                "podvisor_creations_total",
                "Creations that have ended, by how.",
                "result",
                &counters.created,
            ),
            (
                "podvisor_unparked_total",
                "Parked results that are parked no more, by why.",
                "reason",
                &counters.unparked,
            ),
        ] {
            self.family(name, "counter", help);
            for (kind, labels) in values {
                for (value, count) in labels {
                    self.sample(name, &[("kind", kind), (label, value)], count);
                }
            }
        }
    }

    fn chains(&mut self, all: &network::Latencies) {
        const NAME: &str = "podvisor_cni_chain_seconds";
        self.family(
            NAME,
            "histogram",
            "How long whole CNI chains took, by network and command.",
        );
        for (network, commands) in all {
            for (command, histogram) in commands {
                self.histogram(
                    NAME,
                    &[("network", network), ("command", command)],
                    histogram,
                );
            }
        }
        const FAILED: &str = "podvisor_cni_chains_failed_total";
        self.family(FAILED, "counter", "CNI chains that failed.");
        for (network, commands) in all {
            for (command, histogram) in commands {
                let labels = [("network", network.as_str()), ("command", command)];
                self.sample(FAILED, &labels, histogram.failed);
            }
        }
    }

    fn histogram(&mut self, name: &str, labels: &[(&str, &str)], histogram: &Histogram) {
        let bounds = BOUNDS_MS.iter().map(|ms| seconds(*ms));
        let mut sum = 0;
        for (le, count) in bounds.chain(["+Inf".to_owned()]).zip(histogram.buckets) {
            sum += count;
            let labels = [labels, &[("le", le.as_str())]].concat();
            self.sample(&format!("{name}_bucket"), &labels, sum);
        }
        let total = std::time::Duration::from_micros(histogram.sum_us).as_secs_f64();
        self.sample(&format!("{name}_sum"), labels, total);
        self.sample(&format!("{name}_count"), labels, histogram.count);
    }

    fn family(&mut self, name: &str, kind: &str, help: &str) {
        // Writing to a String does not fail, here and below.
        let _ = write!(self.0, "# HELP {name} {help}\n# TYPE {name} {kind}\n");
    }

    fn sample(&mut self, name: &str, labels: &[(&str, &str)], value: impl std::fmt::Display) {
        self.0.push_str(name);
        for (n, (label, text)) in labels.iter().enumerate() {
            let open = if n == 0 { '{' } else { ',' };
            let _ = write!(self.0, "{open}{label}=\"{}\"", escaped(text));
        }
        let close = if labels.is_empty() { "" } else { "}" };
        let _ = writeln!(self.0, "{close} {value}");
    }
}

fn seconds(ms: u64) -> String {
    let seconds = Duration::from_millis(ms).as_secs_f64();
    format!("{seconds}")
}

fn escaped(text: &str) -> String {
    text.replace('\\', "\\\\")
        .replace('"', "\\\"")
        .replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_printed_is_the_text_format() {
        let mut text = Text::default();
        text.pods(&Pods::of(&[]), 2);
        let mut counters = Counters::default();
        let stages = counters.stalled.entry("pod".into()).or_default();
        stages.insert("cni\"add".into(), 3);
        text.counters(&counters);
        for line in [
            "# TYPE podvisor_pods gauge",
            "podvisor_pods{state=\"creating\"} 0",
            "podvisor_pods_oldest_age_seconds{state=\"parked\"} 0",
            "podvisor_waiting_requests 2",
            "podvisor_stalled_at_stage_total{kind=\"pod\",stage=\"cni\\\"add\"} 3",
        ] {
            assert!(text.0.lines().any(|l| l == line), "{line} in {}", text.0);
        }
    }

    #[test]
    fn buckets_are_cumulative_and_in_seconds() {
        let mut histogram = Histogram {
            count: 3,
            sum_us: 1_500_000,
            ..Histogram::default()
        };
        histogram.buckets[0] = 1;
        histogram.buckets[13] = 2;
        let mut text = Text::default();
        text.histogram("x", &[("network", "n")], &histogram);
        for line in [
            "x_bucket{network=\"n\",le=\"0.01\"} 1",
            "x_bucket{network=\"n\",le=\"300\"} 1",
            "x_bucket{network=\"n\",le=\"+Inf\"} 3",
            "x_sum{network=\"n\"} 1.5",
            "x_count{network=\"n\"} 3",
        ] {
            assert!(text.0.lines().any(|l| l == line), "{line} in {}", text.0);
        }
    }
}
