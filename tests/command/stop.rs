//! `stop` and `rm`.

use std::time::{Duration, Instant};

use crate::kit::{json, on_a_machine, wait_for_log};
use crate::support::podvisor;

#[test]
fn a_workload_gets_its_grace_to_end_by_itself() {
    on_a_machine("stop::a_workload_gets_its_grace_to_end_by_itself", |kit| {
        let script =
            "trap 'sleep 1.5; echo bye; exit 5' TERM; echo up; while :; do sleep 0.1; done";
        kit.detached(&["--name", "polite"], script);
        wait_for_log("polite", "up");
        assert_eq!(
            podvisor(&["stop", "-t", "30", "polite"]).ok().stdout,
            "polite\n"
        );
        assert_eq!(podvisor(&["wait", "polite"]).ok().stdout, "5\n");
        assert_eq!(podvisor(&["logs", "polite"]).ok().stdout, "up\nbye\n");
        let pods = json(&["ps", "-a", "--json"]);
        assert_eq!(
            (&pods[0]["state"], &pods[0]["running"]),
            (&"stopped".into(), &0.into())
        );
        // Again is done already.
        podvisor(&["stop", "polite"]).ok();
        podvisor(&["rm", "polite"]).ok();
    });
}

#[test]
fn a_workload_that_ignores_sigterm_is_killed_when_the_grace_is_over() {
    on_a_machine(
        "stop::a_workload_that_ignores_sigterm_is_killed_when_the_grace_is_over",
        |kit| {
            let script = "trap 'echo heard' TERM; echo up; while :; do sleep 0.1; done";
            kit.detached(&["--name", "deaf", "--net", "none"], script);
            wait_for_log("deaf", "up");
            let begin = Instant::now();
            podvisor(&["stop", "-t", "2", "deaf"]).ok();
            // Not before the grace has passed, and long before the usual ten seconds and more of a shorter one forgotten.
            assert!(
                begin.elapsed() >= Duration::from_secs(2),
                "{:?}",
                begin.elapsed()
            );
            assert_eq!(podvisor(&["wait", "deaf"]).ok().stdout, "137\n");
            assert_eq!(podvisor(&["logs", "deaf"]).ok().stdout, "up\nheard\n");
            podvisor(&["rm", "deaf"]).ok();
        },
    );
}

#[test]
fn a_second_stop_with_a_shorter_grace_shortens_the_first() {
    on_a_machine(
        "stop::a_second_stop_with_a_shorter_grace_shortens_the_first",
        |kit| {
            let script = "trap '' TERM; echo up; while :; do sleep 0.1; done";
            kit.detached(&["--name", "deaf", "--net", "none"], script);
            wait_for_log("deaf", "up");
            let mut first = crate::kit::Background::start(&["stop", "-t", "600", "deaf"]);
            std::thread::sleep(Duration::from_millis(300));
            podvisor(&["stop", "-t", "1", "deaf"]).ok();
            assert_eq!(first.end(), (Some(0), None), "{}", first.stderr());
            assert_eq!(podvisor(&["wait", "deaf"]).ok().stdout, "137\n");
            podvisor(&["rm", "deaf"]).ok();
        },
    );
}

#[test]
fn what_runs_is_removed_only_by_force() {
    on_a_machine("stop::what_runs_is_removed_only_by_force", |kit| {
        for name in ["one", "two"] {
            kit.detached(&["--name", name], "sleep 1000");
        }
        let refused = podvisor(&["rm", "one"]).code_is(1);
        for part in ["running", "podvisor stop", "podvisor rm -f one"] {
            assert!(refused.stderr.contains(part), "{part} in {refused:#?}");
        }
        // One that is not there does not keep the others.
        let some = podvisor(&["rm", "-f", "one", "nobody", "two"]).code_is(1);
        let mut done: Vec<&str> = some.stdout.lines().collect();
        done.sort_unstable();
        assert_eq!(done, ["one", "two"]);
        assert!(some.stderr.contains("nobody"), "{some:#?}");
        podvisor(&["rm", "one"]).code_is(1);
        podvisor(&["rm"]).code_is(125);
    });
}
