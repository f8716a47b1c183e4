//! Kills at random: any process of a pod, at any time, again and again under load.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::kit::{Cell, Machine, die};
use crate::lives::Life;

/// Kills are at most this far apart: about what a whole life takes.
const LONGEST_PAUSE_MS: u64 = 700;

/// A small generator of numbers (xorshift): the same seed gives the same numbers.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % bound
    }
}

/// Everything of this cell's pod: what serves its namespace, and all below.
fn processes(cell: &Cell<'_>) -> Vec<i32> {
    let mut parents: BTreeMap<i32, i32> = BTreeMap::new();
    for entry in fs::read_dir("/proc").unwrap().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|n| n.parse().ok()) else {
            continue;
        };
        let stat = fs::read_to_string(entry.path().join("stat")).unwrap_or_default();
        let fields = stat.rsplit(')').next().unwrap_or_default();
        if let Some(parent) = fields.split_ascii_whitespace().nth(1) {
            parents.insert(pid, parent.parse().unwrap());
        }
    }
    let mut ours: BTreeSet<i32> = cell.own_processes().into_iter().collect();
    loop {
        let below = parents.iter().filter(|(_, parent)| ours.contains(parent));
        let more: Vec<i32> = below.map(|(pid, _)| *pid).collect();
        let before = ours.len();
        ours.extend(more);
        if ours.len() == before {
            return ours.into_iter().collect();
        }
    }
}

/// One pod's life with kills from `seed`; the names of what was killed.
fn troubled(cell: &Cell<'_>, seed: u64, kills: &AtomicUsize) -> Vec<String> {
    let mut numbers = Numbers(seed);
    let life = [Life::Whole, Life::Whole, Life::Killed, Life::Deleted][numbers.below(4) as usize];
    let over = AtomicBool::new(false);
    let mut killed = Vec::new();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // What a kill makes of a life is no failure here, only what it leaves.
            let lived = std::panic::AssertUnwindSafe(|| life.live(cell, ""));
            let _ = std::panic::catch_unwind(lived);
            over.store(true, Ordering::Relaxed);
        });
        while !over.load(Ordering::Relaxed) {
            let pause = numbers.below(LONGEST_PAUSE_MS);
            std::thread::sleep(Duration::from_millis(pause));
            // A kind first: there are more commands than anything else.
            let mut kinds: BTreeMap<String, Vec<i32>> = BTreeMap::new();
            for pid in processes(cell) {
                let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
                kinds.entry(name.trim().to_owned()).or_default().push(pid);
            }
            if kinds.len() > 1 && !numbers.below(4).is_multiple_of(4) {
                kinds.remove("podvisor");
            }
            let kind = numbers.below(kinds.len().max(1) as u64) as usize;
            let Some((name, pids)) = kinds.into_iter().nth(kind) else {
                continue;
            };
            die(pids[numbers.below(pids.len() as u64) as usize]);
            kills.fetch_add(1, Ordering::Relaxed);
            killed.push(name);
        }
    });
    cell.remove();
    killed
}

fn kills_at_random(name: &str, wanted: usize) {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    let seed = std::env::var("PODVISOR_SEED")
        .ok()
        .and_then(|text| text.parse().ok())
        .unwrap_or(now.as_nanos() as u64 | 1);
    Machine::run(name, |machine| {
        println!("seed: PODVISOR_SEED={seed}");
        let kills = AtomicUsize::new(0);
        let mut round = 0_u64;
        let mut victims: BTreeMap<String, usize> = BTreeMap::new();
        while kills.load(Ordering::Relaxed) < wanted {
            let jobs = (0..20).map(|n| {
                let mixed = seed ^ (round * 20 + n + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
                (format!("round {round} pod {n}"), mixed | 1)
            });
            let done = machine.all(jobs.collect(), |cell, seed| troubled(cell, seed, &kills));
            for name in done.into_values().flatten() {
                *victims.entry(name).or_default() += 1;
            }
            round += 1;
        }
        println!(
            "{} kills at random in {} pods, seed {seed}: no leak; killed: {victims:?}",
            kills.load(Ordering::Relaxed),
            round * 20
        );
    });
}

#[test]
fn a_hundred_kills_at_random_leak_nothing() {
    kills_at_random("random::a_hundred_kills_at_random_leak_nothing", 100);
}

#[test]
#[ignore = "slow: about ten minutes"]
fn slow_a_thousand_kills_at_random_leak_nothing() {
    kills_at_random("random::slow_a_thousand_kills_at_random_leak_nothing", 1000);
}
