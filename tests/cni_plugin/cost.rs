//! What the plugin costs when nothing is slow: ADD and DEL of the reference bridge alone and behind it, in turn.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::kit::{self, Attempt, settings, snapshot};
use crate::support::{Sandbox, cni, sh};

const ROUNDS: usize = 60;

/// Starts that are timed.
const STARTS: usize = 200;

/// Pods of others, whose number must not matter.
const OTHERS: usize = 100;

/// The executables to measure, separated by colons: `scripts/cni-cost` names the released one. What is to be compared has to
/// be measured in turn: the same machine takes twice as long from one hour to the next.
fn plugins() -> Vec<PathBuf> {
    match std::env::var_os("PODVISOR_CNI") {
        Some(named) => std::env::split_paths(&named).collect(),
        None => vec![kit::PLUGIN.into()],
    }
}

/// From before the start of the program to its end, without a look in between that would have to be waited for.
fn timed(pod: &Attempt, plugin: &Path, verb: &str, conf: &Value) -> Duration {
    let mut command = pod.command_of(plugin, verb);
    command.stdin(Stdio::piped());
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let text = conf.to_string();
    let begun = Instant::now();
    let mut child = command.spawn().unwrap();
    // What answers VERSION need not read it.
    let _ = child.stdin.take().unwrap().write_all(text.as_bytes());
    let output = child.wait_with_output().unwrap();
    let took = begun.elapsed();
    assert!(output.status.success(), "{verb}: {output:?}");
    took
}

/// Middle of all, and the tenth from below, in milliseconds: what else the machine does shows less in that.
fn quantiles(mut all: Vec<Duration>) -> (f64, f64) {
    all.sort();
    let ms = |n: usize| all[n].as_secs_f64() * 1e3;
    (ms(all.len() / 2), ms(all.len() / 10))
}

/// The bridge, whose own time is that of most networks; of its DEL it changes by tens of milliseconds from one to the next.
fn bridge() -> Value {
    serde_json::json!({"type": "bridge", "bridge": "pvc3", "isGateway": true, "ipMasq": false,
        "ipam": {"type": "host-local", "ranges": [[{"subnet": "10.97.4.0/22"}]]}})
}

/// A plugin that does nothing that could take longer at one time than at another.
fn loopback() -> Value {
    serde_json::json!({"type": "loopback"})
}

/// The plugin, its network, and what it is called with alone.
fn network(plugin: &Value) -> (PathBuf, Value, Value) {
    sh("ip link add pvc3 type bridge");
    let name = plugin["type"].as_str().unwrap();
    let program = cni::real_plugins().unwrap().join(name);
    let list = serde_json::json!({"cniVersion": "1.0.0", "name": "pods", "plugins": [plugin]});
    let mut alone = plugin.clone();
    alone["name"] = "pods".into();
    alone["cniVersion"] = "1.0.0".into();
    (program, list, alone)
}

/// The plugin alone, and each of ours with it behind: executable and configuration.
fn sides<'a>(program: PathBuf, alone: &'a Value, behind: &'a Value) -> Vec<(PathBuf, &'a Value)> {
    let ours = plugins().into_iter().map(|plugin| (plugin, behind));
    [(program, alone)].into_iter().chain(ours).collect()
}

/// ADD and DEL of a plugin alone and behind each of ours, in turn, beside so many pods behind the first of them.
fn compare(plugin: &Value, count: usize) {
    let (program, list, alone) = network(plugin);
    let name = plugin["type"].as_str().unwrap();
    let behind = kit::conf(&list);
    let sides = sides(program, &alone, &behind);
    let mut times = vec![[Vec::new(), Vec::new()]; sides.len()];
    let mut others = Vec::new();
    for n in 0..count {
        let pod = Attempt::of(&format!("o{n}"), &format!("o{n}"), &list);
        timed(&pod, &sides[1].0, "ADD", &behind);
        others.push(pod);
    }
    for round in 0..ROUNDS {
        for turn in 0..sides.len() {
            let side = (round + turn) % sides.len();
            let (program, conf) = &sides[side];
            let pod = Attempt::of(&format!("w{round}"), &format!("a{round}s{side}"), &list);
            times[side][0].push(timed(&pod, program, "ADD", conf));
            times[side][1].push(timed(&pod, program, "DEL", conf));
            pod.forget();
        }
    }
    for pod in others {
        timed(&pod, &sides[1].0, "DEL", &behind);
        pod.forget();
    }
    let times: Vec<_> = times
        .into_iter()
        .map(|verbs| verbs.map(quantiles))
        .collect();
    for (at, verb) in ["ADD", "DEL"].into_iter().enumerate() {
        let alone = times[0][at];
        for ((program, _), behind) in sides.iter().zip(&times).skip(1) {
            let behind = behind[at];
            println!(
                "{verb} beside {count} pods: {name} alone {:.2} ms (a tenth below {:.2}), behind {} {:.2} ({:.2}): {:.2} ({:.2}) more",
                alone.0,
                alone.1,
                program.file_name().unwrap().display(),
                behind.0,
                behind.1,
                behind.0 - alone.0,
                behind.1 - alone.1
            );
            assert!(behind.0 - alone.0 < 500.0);
        }
    }
    sh("ip link del pvc3");
}

fn costs(test: &str, plugin: fn() -> Value, count: usize) {
    Sandbox::new(test).run(|| {
        settings(30.0);
        let before = snapshot();
        compare(&plugin(), count);
        before.assert_unchanged();
    });
}

#[test]
#[ignore = "slow"]
fn slow_what_the_plugin_costs() {
    costs("cost::slow_what_the_plugin_costs", bridge, 0);
}

#[test]
#[ignore = "slow"]
fn slow_what_the_plugin_costs_in_front_of_one_that_does_little() {
    costs(
        "cost::slow_what_the_plugin_costs_in_front_of_one_that_does_little",
        loopback,
        0,
    );
}

#[test]
#[ignore = "slow"]
fn slow_what_the_plugin_costs_beside_a_hundred_pods() {
    costs(
        "cost::slow_what_the_plugin_costs_beside_a_hundred_pods",
        bridge,
        OTHERS,
    );
}

/// VERSION does nothing but start and answer.
#[test]
#[ignore = "slow"]
fn slow_how_long_the_plugin_takes_to_start() {
    Sandbox::new("cost::slow_how_long_the_plugin_takes_to_start").run(|| {
        settings(30.0);
        let (program, list, alone) = network(&bridge());
        let pod = Attempt::of("web", "a1", &list);
        let behind = kit::conf(&list);
        let sides = sides(program, &alone, &behind);
        let mut times = vec![Vec::new(); sides.len()];
        for _ in 0..STARTS {
            for ((program, conf), times) in sides.iter().zip(&mut times) {
                times.push(timed(&pod, program, "VERSION", conf));
            }
        }
        for ((program, _), times) in sides.iter().zip(times) {
            let (middle, tenth) = quantiles(times);
            let name = program.file_name().unwrap().display();
            println!("START: {name} {middle:.2} ms (a tenth below {tenth:.2})");
            assert!(middle < 100.0);
        }
        pod.forget();
        sh("ip link del pvc3");
    });
}
