//! Many pods, one after another and at once.
#![allow(
    clippy::print_stdout,
    reason = "figures, shown by the test runner on demand"
)]

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use crate::support::{Sandbox, Snapshot, cni, podvisor, rootfs};

use crate::kit::{Kit, on_a_machine_within};

#[test]
fn two_hundred_pods_run_and_removed_leave_nothing() {
    let name = "many::two_hundred_pods_run_and_removed_leave_nothing";
    on_a_machine_within(name, Duration::from_secs(500), |kit| {
        let next = AtomicU32::new(0);
        std::thread::scope(|scope| {
            for worker in 0..4 {
                let (kit, next) = (kit, &next);
                scope.spawn(move || {
                    while next.fetch_add(1, Ordering::Relaxed) < 200 {
                        let name = format!("worker-{worker}");
                        let ended = kit
                            .run(&["--rm", "--name", &name], "hostname; exit 7")
                            .code_is(7);
                        assert_eq!(ended.stdout, format!("{name}\n"), "{ended:#?}");
                        assert_eq!(ended.stderr, "");
                    }
                });
            }
        });
    });
}

/// The first pods of a network make its bridge, all at the same time.
#[test]
fn twenty_pods_at_once_on_a_new_bridge_have_twenty_addresses() {
    let name = "many::twenty_pods_at_once_on_a_new_bridge_have_twenty_addresses";
    Sandbox::new(name).run(|| {
        let kit = Kit {
            rootfs: rootfs::make(),
        };
        cni::bridge("fresh", "pvfresh0", "10.87.2.0/24")
            .write_in(std::path::Path::new(cni::CONFIGS));
        let before = crate::support::Scope::default()
            .allow("link pvfresh0")
            .take();
        std::thread::scope(|scope| {
            for n in 0..20 {
                let kit = &kit;
                scope.spawn(move || kit.detached(&["--name", &format!("pod-n{n}")], "sleep 1000"));
            }
        });
        let pods = crate::kit::json(&["ps", "--json"]);
        let addresses: BTreeSet<&str> = pods
            .as_array()
            .unwrap()
            .iter()
            .map(|pod| pod["ips"][0].as_str().unwrap())
            .collect();
        assert_eq!(addresses.len(), 20, "{pods:#}");
        // The last can talk to the first.
        let first = crate::kit::address("pod-n0");
        podvisor(&["exec", "pod-n19", "ping", "-c", "1", "-W", "5", &first]).ok();
        let names: Vec<String> = (0..20).map(|n| format!("pod-n{n}")).collect();
        let mut line = vec!["rm", "-f"];
        line.extend(names.iter().map(String::as_str));
        let removed = podvisor(&line).ok();
        assert_eq!(removed.stdout.lines().count(), 20);
        before.assert_unchanged();
    });
}

/// Nobody waits who lists, inspects or removes many: how long each takes is told.
#[test]
fn thirty_pods_are_listed_inspected_and_removed_at_once() {
    listed_inspected_removed(
        "many::thirty_pods_are_listed_inspected_and_removed_at_once",
        30,
    );
}

#[test]
#[ignore = "two hundred pods; scripts/test --slow"]
fn slow_two_hundred_pods_are_listed_inspected_and_removed_at_once() {
    let name = "many::slow_two_hundred_pods_are_listed_inspected_and_removed_at_once";
    listed_inspected_removed(name, 200);
}

fn listed_inspected_removed(name: &str, count: usize) {
    Sandbox::new(name).bound(Duration::from_secs(500)).run(|| {
        let kit = Kit {
            rootfs: rootfs::make(),
        };
        let before = Snapshot::take();
        let next = AtomicU32::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                let (kit, next) = (&kit, &next);
                scope.spawn(move || {
                    loop {
                        let n = next.fetch_add(1, Ordering::Relaxed) as usize;
                        if n >= count {
                            return;
                        }
                        let name = format!("pod-n{n}");
                        kit.detached(&["--name", &name, "--net", "none"], "sleep 1000");
                    }
                });
            }
        });
        let names: Vec<String> = (0..count).map(|n| format!("pod-n{n}")).collect();
        let all: Vec<&str> = names.iter().map(String::as_str).collect();
        // The best of three: others use this machine too.
        let timed = |line: &[&str]| {
            let runs = (0..3).map(|_| podvisor(line).ok());
            runs.min_by_key(|run| run.took).unwrap()
        };
        let ps = timed(&["ps"]);
        assert_eq!(ps.stdout.lines().count(), count + 1);
        let json = timed(&["ps", "--json"]);
        let one = timed(&["inspect", "pod-n7"]);
        let inspect = timed(&[&["inspect"][..], &all].concat());
        let pods: serde_json::Value = serde_json::from_str(&inspect.stdout).unwrap();
        for (pod, name) in pods.as_array().unwrap().iter().zip(&names) {
            assert_eq!((&pod["name"], &pod["status"]["live"]["state"]), (&name.as_str().into(), &"SANDBOX_READY".into()));
        }
        let stats = podvisor(&["stats", "--no-stream"]).ok();
        assert_eq!(stats.stdout.lines().count(), count + 1);
        let memory = memory_of(&pods);
        let stop = podvisor(&[&["stop", "-t", "1"][..], &all[..count / 2]].concat()).ok();
        let rm = podvisor(&[&["rm", "-f"][..], &all].concat()).ok();
        assert_eq!(rm.stdout.lines().count(), count);
        println!(
            "{count} pods: ps {:?}, ps --json {:?}, inspect of one {:?}, of all {:?}, stats {:?}, stop of half {:?}, rm -f {:?}; {memory} kB anonymous memory each",
            ps.took, json.took, one.took, inspect.took, stats.took, stop.took, rm.took
        );
        // FL-086v: of a build that is not optimized.
        assert!(memory < 3000, "{memory} kB");
        before.assert_unchanged();
    });
}

/// Anonymous memory of a pod's supervisor and infra process, kB, the mean.
fn memory_of(pods: &serde_json::Value) -> u64 {
    let pods = pods.as_array().unwrap();
    let of = |pid: &serde_json::Value| {
        let text = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap();
        let line = text.lines().find(|l| l.starts_with("Anonymous:")).unwrap();
        line.split_whitespace()
            .nth(1)
            .unwrap()
            .parse::<u64>()
            .unwrap()
    };
    let sum: u64 = pods
        .iter()
        .map(|p| of(&p["supervisor"]["pid"]) + of(&p["infra"]["pid"]))
        .sum();
    sum / pods.len() as u64
}

/// FL-086w: with a plugin that takes no time, alone and many at once; what is the plugin's and what is ours is told apart.
#[test]
fn starts_at_the_same_time_do_not_wait_for_each_other() {
    starts(
        "many::starts_at_the_same_time_do_not_wait_for_each_other",
        5,
        20,
    );
}

#[test]
#[ignore = "a thousand starts; scripts/test --slow"]
fn slow_a_thousand_starts_take_the_same_time() {
    starts("many::slow_a_thousand_starts_take_the_same_time", 1000, 50);
}

fn starts(name: &str, alone: usize, at_once: usize) {
    Sandbox::new(name).bound(Duration::from_secs(900)).run(|| {
        let plugin = crate::support::fake::plugin(std::path::Path::new(cni::PLUGINS), "quick");
        plugin.on("ADD", &[]);
        cni::network("quick", vec![serde_json::json!({ "type": "quick" })]).write();
        let before = Snapshot::take();
        // Milliseconds from the first stage to the last, and of these those of ADD.
        let start = |name: &str| {
            podvisor(&["create", "--name", name]).ok();
            let pod = crate::kit::inspect(name);
            let stages = pod["stages"].as_array().unwrap();
            let end = |s: &serde_json::Value| {
                s["at_us"].as_u64().unwrap() + s["took_us"].as_u64().unwrap()
            };
            let add = stages.iter().find(|s| s["name"] == "cni-add").unwrap();
            let whole = stages.iter().map(end).max().unwrap();
            (whole as f64 / 1e3, add["took_us"].as_f64().unwrap() / 1e3)
        };
        let quantiles = |what: &str, mut all: Vec<(f64, f64)>| {
            let of = |list: &mut Vec<f64>, part: f64| {
                list.sort_by(f64::total_cmp);
                list[((list.len() - 1) as f64 * part) as usize]
            };
            let mut whole: Vec<f64> = all.iter().map(|(whole, _)| *whole).collect();
            let mut ours: Vec<f64> = all.drain(..).map(|(whole, add)| whole - add).collect();
            let (p50, p99) = (of(&mut whole, 0.5), of(&mut whole, 0.99));
            let (own50, own99) = (of(&mut ours, 0.5), of(&mut ours, 0.99));
            println!(
                "{what}: p50 {p50:.1} ms, p99 {p99:.1} ms; without ADD {own50:.1} and {own99:.1} ms"
            );
            own99
        };
        let mut one_by_one = Vec::new();
        for _ in 0..alone {
            one_by_one.push(start("one"));
            podvisor(&["rm", "-f", "one"]).ok();
        }
        let single = quantiles("alone", one_by_one);
        let names: Vec<String> = (0..at_once).map(|n| format!("pod-n{n}")).collect();
        let together = std::thread::scope(|scope| {
            let all: Vec<_> = names
                .iter()
                .map(|name| scope.spawn(move || start(name)))
                .collect();
            all.into_iter().map(|one| one.join().unwrap()).collect()
        });
        let many = quantiles("at once", together);
        assert!(
            single < 5_000.0 && many < 30_000.0,
            "{single} ms, {many} ms"
        );
        let line: Vec<&str> = ["rm", "-f"]
            .into_iter()
            .chain(names.iter().map(String::as_str))
            .collect();
        podvisor(&line).ok();
        before.assert_unchanged();
    });
}

/// FL-052: pods of a second, 200 in a minute; each is stopped about when it ends by itself.
#[test]
fn fl_052_short_lives_that_are_stopped_as_they_end_leave_no_supervisor() {
    let name = "many::fl_052_short_lives_that_are_stopped_as_they_end_leave_no_supervisor";
    let pods: u32 = if crate::support::slow() { 1000 } else { 40 };
    on_a_machine_within(name, Duration::from_secs(900), |kit| {
        let begun = Instant::now();
        std::thread::scope(|scope| {
            for n in 0..pods {
                std::thread::sleep((begun + EVERY * n).saturating_duration_since(Instant::now()));
                scope.spawn(move || short_life(kit, n));
            }
        });
        println!("{pods} short lives in {:?}", begun.elapsed());
    });
}

/// Of 200 in a minute.
const EVERY: Duration = Duration::from_millis(300);

/// A pod that removes itself when its second is over, or one that is kept until it is removed; stopped at that moment.
fn short_life(kit: &Kit, n: u32) {
    let name = format!("cron-{n}");
    // From a tenth of a second before the end to a tenth after it.
    let until_stop = Duration::from_millis(900 + u64::from(n * 7 % 200));
    let script = "echo up; sleep 1";
    if n.is_multiple_of(2) {
        kit.detached(&["--name", &name], script);
        std::thread::sleep(until_stop);
        podvisor(&["stop", &name]).ok();
        podvisor(&["rm", &name]).ok();
    } else {
        let mut running = kit.background(&["--rm", "--name", &name], script);
        running.wait_for("up");
        std::thread::sleep(until_stop);
        let stopped = podvisor(&["stop", &name]);
        assert!(
            stopped.code == Some(0) || stopped.stderr.contains("no pod"),
            "{stopped:#?}"
        );
        let (code, signal) = running.end();
        // 143: the stop came first. 0: the second was over.
        assert!(
            matches!(code, Some(0 | 137 | 143)) && signal.is_none(),
            "{code:?} {signal:?} {}",
            running.stderr()
        );
    }
}
