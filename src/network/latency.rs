//! How long ADD and DEL chains take: a histogram for each network, kept for the boot in `<runtime_root>/.cni-latency` and
//! fed by all supervisors.
//!
//! Must never hold a pod up or fail it: a sample that cannot be added at once is lost, and a damaged file begins anew.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::plugin::Command;
use crate::config::Config;
use crate::tally;

const FILE: &str = ".cni-latency";

/// Upper bounds of the buckets, milliseconds; a last one takes the rest. From a fast chain to the default bound of ADD.
pub const BOUNDS_MS: [u64; 13] = [
    10, 25, 50, 100, 250, 500, 1_000, 2_500, 5_000, 10_000, 30_000, 60_000, 300_000,
];

/// Chains of one network and one command.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Histogram {
    /// Chains that came to an end, however.
    pub count: u64,
    /// Those among them that failed.
    pub failed: u64,
    /// Their durations together, microseconds.
    pub sum_us: u64,
    /// Chains in each bucket of [`BOUNDS_MS`], not cumulative; the last is for longer ones.
    pub buckets: [u64; BOUNDS_MS.len() + 1],
}

impl Histogram {
    fn add(&mut self, took: Duration, failed: bool) {
        let ms = u64::try_from(took.as_millis()).unwrap_or(u64::MAX);
        let bucket = BOUNDS_MS.partition_point(|bound| *bound < ms);
        self.count += 1;
        self.failed += u64::from(failed);
        let us = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        self.sum_us = self.sum_us.saturating_add(us);
        self.buckets[bucket] += 1;
    }

    fn add_all(&mut self, other: &Self) {
        self.count += other.count;
        self.failed += other.failed;
        self.sum_us = self.sum_us.saturating_add(other.sum_us);
        for (bucket, more) in self.buckets.iter_mut().zip(other.buckets) {
            *bucket += more;
        }
    }
}

/// By network, then by command ("ADD", "DEL").
pub type Latencies = BTreeMap<String, BTreeMap<String, Histogram>>;

/// What there is since the boot; nothing where there is no file, or none that can be believed.
pub fn latencies(config: &Config) -> Latencies {
    tally::read(config, FILE)
}

/// What this process has collected; None: it does not.
static COLLECTED: Mutex<Option<Latencies>> = Mutex::new(None);

/// From now on this process adds its chains when [`add_collected`] is called, and not while somebody waits for one.
pub fn collect() {
    collected().get_or_insert_default();
}

/// Adds what was collected since the last time.
pub fn add_collected(config: &Config) {
    let Some(mut new) = collected().replace(Latencies::new()) else {
        return;
    };
    if new.is_empty() {
        return;
    }
    let added = tally::update(config, FILE, |all: &mut Latencies| {
        for (network, commands) in std::mem::take(&mut new) {
            let there = all.entry(network).or_default();
            for (command, histogram) in commands {
                there.entry(command).or_default().add_all(&histogram);
            }
        }
    });
    if let Err(error) = added {
        tracing::debug!(%error, "durations are left out of the histogram");
    }
}

fn collected() -> MutexGuard<'static, Option<Latencies>> {
    COLLECTED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Adds one chain.
pub(super) fn note(config: &Config, network: &str, command: Command, took: Duration, failed: bool) {
    let add = |all: &mut Latencies| {
        all.entry(network.to_owned())
            .or_default()
            .entry(command.as_str().to_owned())
            .or_default()
            .add(took, failed);
    };
    if let Some(collected) = collected().as_mut() {
        return add(collected);
    }
    if let Err(error) = tally::update(config, FILE, add) {
        tracing::debug!(%error, network, "a duration is left out of the histogram");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(dir: &std::path::Path) -> Config {
        Config {
            runtime_root: dir.to_owned(),
            ..Config::default()
        }
    }

    #[test]
    fn samples_land_in_their_buckets_and_failures_count() {
        let dir = tempfile::tempdir().unwrap();
        let config = config(dir.path());
        for (ms, failed) in [(10, false), (11, false), (400_000, true)] {
            note(
                &config,
                "net",
                Command::Add,
                Duration::from_millis(ms),
                failed,
            );
        }
        note(
            &config,
            "net",
            Command::Del,
            Duration::from_millis(1),
            false,
        );
        let all = latencies(&config);
        let add = &all["net"]["ADD"];
        assert_eq!((add.count, add.failed, add.sum_us), (3, 1, 400_021_000));
        assert_eq!((add.buckets[0], add.buckets[1], add.buckets[13]), (1, 1, 1));
        assert_eq!(all["net"]["DEL"].count, 1);
    }

    #[test]
    fn a_damaged_file_begins_anew() {
        let dir = tempfile::tempdir().unwrap();
        let config = config(dir.path());
        std::fs::write(dir.path().join(FILE), "{\"net\": {\"ADD\"").unwrap();
        assert!(latencies(&config).is_empty());
        note(&config, "net", Command::Add, Duration::ZERO, false);
        assert_eq!(latencies(&config)["net"]["ADD"].count, 1);
    }
}
