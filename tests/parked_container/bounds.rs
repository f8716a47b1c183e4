//! The bound of an OCI runtime's `create`: what it is set to, and that it holds (crio.md 4.2).

use std::fs;

use crate::kit;
use crate::rig::{self, BOUND, alive, container};
use crate::support::{podvisor, require, sandboxed};
use podvisor::error::Kind;

fn shown(settings: &str) -> serde_json::Value {
    rig::settings(settings);
    let text = podvisor(&["version", "--json"]).ok().stdout;
    let version: serde_json::Value = serde_json::from_str(&text).unwrap();
    version["runtime_create_timeout"].clone()
}

#[test]
fn the_bound_has_a_default_a_floor_and_a_value_for_each_runtime() {
    sandboxed(
        "bounds::the_bound_has_a_default_a_floor_and_a_value_for_each_runtime",
        || {
            for (asked, holds) in [
                ("", 240.0),
                ("runtime_create_timeout = 0.0", 240.0),
                ("runtime_create_timeout = 300.0", 300.0),
                ("runtime_create_timeout = 15.0", 30.0),
                ("runtime_create_timeout = -1.0", 30.0),
            ] {
                assert_eq!(
                    shown(asked),
                    serde_json::json!({"default": holds}),
                    "{asked}"
                );
            }
            let two = "[runtimes.one]\ncreate_timeout = 300.0\n[runtimes.\"/opt/two\"]\ncreate_timeout = 600.0\n";
            let want = serde_json::json!({"default": 240.0, "one": 300.0, "/opt/two": 600.0});
            assert_eq!(shown(two), want);
            let text = podvisor(&["version"]).ok().stdout;
            assert!(
                text.contains("runtime create timeout 600 s (/opt/two)"),
                "{text}"
            );
            rig::settings("runtime_create_timeout = \"soon\"");
            let told = podvisor(&["version"]).ok();
            assert!(told.stderr.contains("config.toml"), "{told:?}");
        },
    );
}

/// The runtime leaves a child in its group, one in a session of its own, and does not end for SIGTERM. Half a minute:
/// that is the floor.
#[test]
fn a_create_over_its_bound_is_killed_with_all_it_started_and_undone() {
    kit::with_runc(
        "bounds::a_create_over_its_bound_is_killed_with_all_it_started_and_undone",
        "runtime = \"/run/fakes/slow\"\n[runtimes.slow]\ncreate_timeout = 15.0\n",
        |kit| {
            let real = require::find("runc").unwrap();
            let wrapper = "/run/fakes/slow";
            let script = format!(
                "#!/bin/bash\ntrap '' TERM\nfor verb; do\n  if [ \"$verb\" = create ]; then\n    \
                 setsid sleep 1001 & echo $! >>/run/left\n    sleep 1002 & echo $! >>/run/left\n    \
                 echo $$ >>/run/left\n    wait\n  fi\ndone\nexec {} \"$@\"\n",
                real.display()
            );
            fs::write(wrapper, script).unwrap();
            let c1 = container("c1", "sleep 1000");
            let asked = kit.create_aside(&c1, BOUND);
            // The command's own pod at the same time.
            let rootfs = kit.rootfs.str().to_owned();
            let ran = podvisor(&[
                "run",
                "--net",
                "none",
                "--rootfs",
                &rootfs,
                "--",
                "/bin/true",
            ]);
            let ran = ran.code_is(125).fails_with("create container timeout");
            assert!(ran.stderr.contains("30 s"), "{ran:?}");
            let error = asked.join().unwrap().unwrap_err();
            // Not a deadline of the caller's, who would take it that the work goes on.
            assert_eq!(error.kind(), Kind::Other, "{error}");
            for part in ["create container timeout", "no end within 30 s", wrapper] {
                assert!(error.to_string().contains(part), "{error}");
            }
            let left = fs::read_to_string("/run/left").unwrap();
            let pids: Vec<i32> = left.lines().map(|l| l.parse().unwrap()).collect();
            assert_eq!(pids.len(), 6, "{left}");
            assert!(pids.iter().all(|p| !alive(*p)), "{left}");
            kit.with_pod.assert_unchanged();
        },
    );
}
