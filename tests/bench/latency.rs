//! How long a pod takes whose network costs nothing: what is left is the daemon's, the shim's and the kernel's.

use std::time::Duration;

use crate::cri::Cri;
use crate::node::{self, NETWORKED, Network, Way};
use crate::pods::{benched, made, removed, settle};
use crate::rig::{clocked, load, rounds};
use crate::support::Containerd;
use crate::table::Table;

/// Pods in the same moment.
const AT_ONCE: usize = 50;

#[test]
#[ignore = "a benchmark: scripts/bench latency"]
fn bench_latency() {
    benched("latency::bench_latency", || {
        let Some(daemon) = node::start(Network::Nothing) else {
            return;
        };
        let mut table = Table::new("latency, through CRI");
        one_by_one(&mut table, &daemon, rounds(100));
        // Three times, unless fewer rounds are wanted.
        at_once(&mut table, &daemon, rounds(3).min(3));
        table.print(&load());
    });
}

fn one_by_one(table: &mut Table, daemon: &Containerd, count: usize) {
    let mut cri = Cri::of(daemon);
    let mut all = NETWORKED.map(|way| (way, Vec::new()));
    for round in 0..=count {
        all.rotate_left(1);
        for (way, times) in &mut all {
            let (id, took) = clocked(|| node::run(&mut cri, way, &format!("l{round}")));
            cri.stop(&id).unwrap();
            cri.remove(&id).unwrap();
            settle();
            // The first of each finds nothing warm.
            if round > 0 {
                times.push(took);
            }
        }
    }
    for way in NETWORKED {
        let times = all.iter().find(|(of, _)| of.name == way.name);
        times
            .iter()
            .for_each(|(way, times)| tell(table, "one by one", way, times));
    }
}

fn at_once(table: &mut Table, daemon: &Containerd, count: usize) {
    let mut all = NETWORKED.map(|way| (way, Vec::new()));
    for round in 0..=count {
        for (way, times) in &mut all {
            let prefix = format!("o{round}-");
            // The first round is for what is made once.
            let pods = if round > 0 { AT_ONCE } else { 2 };
            let (pods, took) = clocked(|| made(daemon, way, &prefix, pods, pods));
            let ids: Vec<String> = pods.iter().map(|(id, _)| id.clone()).collect();
            removed(daemon, &ids, 4);
            settle();
            if round > 0 {
                table.time(&format!("{AT_ONCE} at once, all up"), way.name, took);
                times.extend(pods.into_iter().map(|(_, took)| took));
            }
        }
    }
    for (way, times) in &all {
        tell(table, &format!("{AT_ONCE} at once"), way, times);
    }
}

fn tell(table: &mut Table, how: &str, way: &Way, times: &[Duration]) {
    let what = format!("RunPodSandbox, {how}");
    for took in times {
        table.time(&what, way.name, *took);
    }
    let mut sorted = times.to_vec();
    sorted.sort();
    let place = (sorted.len() * 99).div_ceil(100).saturating_sub(1);
    table.time(&format!("{what}, 99 of 100 in"), way.name, sorted[place]);
}
