//! The command in the foreground: signals go to the workload, and its own end ends nothing it was not told to end.

use nix::sys::signal::Signal;
use serde_json::json;

use crate::kit::{BOUND, json, on_a_machine};
use crate::support::fake::{self, Act};
use crate::support::{cni, eventually, podvisor};

#[test]
fn signals_to_the_command_reach_the_workload() {
    on_a_machine(
        "signals::signals_to_the_command_reach_the_workload",
        |kit| {
            let cases = [
                (Signal::SIGINT, "INT"),
                (Signal::SIGTERM, "TERM"),
                (Signal::SIGHUP, "HUP"),
                (Signal::SIGUSR1, "USR1"),
            ];
            for (signal, name) in cases {
                let script = format!(
                    "trap 'echo got {name}; exit 42' {name}; echo up; while :; do sleep 0.1; done"
                );
                let mut run = kit.background(&["--rm", "--net", "none"], &script);
                run.wait_for("up");
                run.signal(signal);
                assert_eq!(run.end(), (Some(42), None), "{}", run.stderr());
                assert_eq!(run.stdout(), format!("up\ngot {name}\n"));
            }
            kit.detached(&["--name", "web", "--net", "none"], "sleep 1000");
            let script = "trap 'echo got; exit 43' TERM; echo up; while :; do sleep 0.1; done";
            let mut exec = crate::kit::Background::start(&["exec", "web", "sh", "-c", script]);
            exec.wait_for("up");
            exec.signal(Signal::SIGTERM);
            assert_eq!(exec.end(), (Some(43), None), "{}", exec.stderr());
            podvisor(&["rm", "-f", "web"]).ok();
        },
    );
}

#[test]
fn a_workload_that_ignores_three_interrupts_is_killed() {
    on_a_machine(
        "signals::a_workload_that_ignores_three_interrupts_is_killed",
        |kit| {
            let script = "trap 'echo no' INT; echo up; while :; do sleep 0.1; done";
            let mut run = kit.background(&["--rm", "--net", "none"], script);
            run.wait_for("up");
            for n in 1..=3 {
                run.signal(Signal::SIGINT);
                if n < 3 {
                    eventually(BOUND, "the interrupt's arrival", || {
                        (run.stdout().matches("no").count() == n).then_some(())
                    });
                }
            }
            assert_eq!(run.end(), (Some(137), None), "{}", run.stderr());
        },
    );
}

#[test]
fn an_interrupt_while_the_pod_comes_up_undoes_it() {
    on_a_machine(
        "signals::an_interrupt_while_the_pod_comes_up_undoes_it",
        |kit| {
            let plugin = fake::plugin(std::path::Path::new(cni::PLUGINS), "waiting");
            let go = kit.rootfs.path().join("go");
            plugin.on("ADD", &[Act::WaitFor(go.clone())]);
            cni::network("waiting", vec![json!({ "type": "waiting" })]).write();
            let mut run = kit.background(&["--name", "half", "--net", "waiting"], "true");
            eventually(BOUND, "an ADD under way", || {
                (plugin.count("ADD") == 1).then_some(())
            });
            run.signal(Signal::SIGINT);
            std::fs::write(&go, "").unwrap();
            assert_eq!(run.end(), (Some(130), None), "{}", run.stderr());
            assert!(run.stderr().contains("interrupted"), "{}", run.stderr());
            assert_eq!(json(&["ps", "-a", "--json"]), json!([]));
            eventually(BOUND, "the DEL", || {
                (plugin.count("DEL") == 1).then_some(())
            });
        },
    );
}

/// FL-064: what is lost with the terminal is only the terminal.
#[test]
fn a_pod_outlives_the_killed_command_and_keeps_its_output() {
    on_a_machine(
        "signals::a_pod_outlives_the_killed_command_and_keeps_its_output",
        |kit| {
            let script = "echo before; until [ -e /tmp/go ]; do sleep 0.05; done; rm /tmp/go; seq 1 20000; echo after; exit 9";
            let mut run = kit.background(&["--name", "left", "--rm"], script);
            run.wait_for("before");
            run.signal(Signal::SIGKILL);
            assert_eq!(run.end().1, Some(9));
            let pods = json(&["ps", "--json"]);
            assert_eq!(
                (&pods[0]["name"], &pods[0]["state"]),
                (&"left".into(), &"ready".into())
            );
            // Far more than a pipe holds, with nobody at its other end.
            podvisor(&["exec", "left", "touch", "/tmp/go"]).ok();
            assert_eq!(podvisor(&["wait", "left"]).ok().stdout, "9\n");
            let logs = podvisor(&["logs", "left"]).ok().stdout;
            assert!(
                logs.starts_with("before\n1\n") && logs.ends_with("20000\nafter\n"),
                "{} bytes",
                logs.len()
            );
            podvisor(&["stop", "left"]).ok();
            podvisor(&["rm", "left"]).ok();
        },
    );
}
