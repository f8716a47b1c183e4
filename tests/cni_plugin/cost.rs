//! What the plugin costs when nothing is slow: ADD and DEL of the reference bridge alone and behind it, in turn.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::kit::{self, Attempt, BOUND, settings, snapshot};
use crate::support::{Sandbox, bin, cni, sh};

const ROUNDS: usize = 60;

/// The executable to measure: `scripts/cni-cost` names the released one.
fn plugin() -> PathBuf {
    std::env::var_os("PODVISOR_CNI").map_or_else(|| kit::PLUGIN.into(), PathBuf::from)
}

fn timed(pod: &Attempt, plugin: &Path, verb: &str, conf: &Value) -> Duration {
    let mut command = pod.command_of(plugin, verb);
    let text = conf.to_string();
    let begun = Instant::now();
    bin::run_with(&mut command, Some(text.as_bytes()), BOUND).ok();
    begun.elapsed()
}

/// Middle of all, and of the middle half the mean, in milliseconds.
fn middle(mut all: Vec<Duration>) -> (f64, f64) {
    all.sort();
    let half = &all[all.len() / 4..all.len() * 3 / 4];
    let mean = half.iter().sum::<Duration>() / u32::try_from(half.len()).unwrap();
    let ms = |d: Duration| d.as_secs_f64() * 1e3;
    (ms(all[all.len() / 2]), ms(mean))
}

#[test]
#[ignore = "slow"]
fn slow_what_the_plugin_costs() {
    Sandbox::new("cost::slow_what_the_plugin_costs").run(|| {
        settings(30.0);
        sh("ip link add pvc3 type bridge");
        let bridge = cni::real_plugins().unwrap().join("bridge");
        let list = serde_json::json!({"cniVersion": "1.0.0", "name": "pods", "plugins": [{
            "type": "bridge", "bridge": "pvc3", "isGateway": true, "ipMasq": false,
            "ipam": {"type": "host-local", "ranges": [[{"subnet": "10.97.4.0/24"}]]}}]});
        let mut alone = list["plugins"][0].clone();
        alone["name"] = "pods".into();
        alone["cniVersion"] = "1.0.0".into();
        let behind = kit::conf(&list);
        let before = snapshot();
        let mut times: [Vec<Duration>; 4] = Default::default();
        for round in 0..ROUNDS {
            let sides = [(&bridge, &alone), (&plugin(), &behind)];
            for side in [round % 2, 1 - round % 2] {
                let (program, conf) = sides[side];
                let pod = Attempt::of(&format!("w{round}"), &format!("a{round}s{side}"), &list);
                times[side].push(timed(&pod, program, "ADD", conf));
                times[side + 2].push(timed(&pod, program, "DEL", conf));
                pod.forget();
            }
        }
        let [add, with, del, with_del] = times.map(middle);
        for (verb, alone, behind) in [("ADD", add, with), ("DEL", del, with_del)] {
            println!(
                "{verb}: bridge alone {:.2} ms (mean of the middle half {:.2}), behind {:.2} ({:.2}): {:.2} ({:.2}) more",
                alone.0,
                alone.1,
                behind.0,
                behind.1,
                behind.0 - alone.0,
                behind.1 - alone.1
            );
            assert!(behind.0 - alone.0 < 500.0);
        }
        before.assert_unchanged();
    });
}
