//! Starts that outlive their callers, of a container and of an exec.

use std::time::Duration;

use podvisor::error::Kind;

use crate::kit::{Kit, SHORT, each_runtime, exec, open, start, with_runc};
use crate::rig::{BOUND, called, container};
use crate::support::fake::Act;

/// A container that waits to be started, or one that runs with an exec `e` that does: the verb that starts it.
fn waiting(kit: &Kit, exec_id: &str) -> &'static str {
    let c1 = container("c1", "sleep 1000");
    kit.create(&c1, BOUND).unwrap();
    if exec_id.is_empty() {
        return "START";
    }
    let probe = kit.pod.probe();
    start(&probe, "c1", "", BOUND).unwrap();
    exec(&probe, "c1", exec_id, "sleep 1000").unwrap();
    "EXEC"
}

fn goes_on(kit: &Kit, exec_id: &str) {
    let verb = waiting(kit, exec_id);
    let gate = kit.closed(verb);
    let before = kit.runtime.count(verb);
    let probe = kit.pod.probe();
    let error = start(&probe, "c1", exec_id, SHORT).unwrap_err();
    assert_eq!(error.kind(), Kind::Deadline, "{error}");
    let stage = format!("still at stage runtime-{} after ", verb.to_lowercase());
    assert!(error.to_string().contains(&stage), "{error}");
    // Who asks while it works is told the pid; nothing is lost with a reply that does not arrive.
    let watcher = kit.start_aside("c1", exec_id, BOUND);
    std::thread::sleep(Duration::from_millis(300));
    open(&gate);
    let pid = watcher.join().unwrap().unwrap();
    assert!(pid > 0);
    // One that comes later is a second start, and refused.
    let second = start(&probe, "c1", exec_id, BOUND).unwrap_err();
    assert_eq!(second.kind(), Kind::State, "{second}");
    assert!(second.to_string().contains("has been started"), "{second}");
    assert_eq!(kit.runtime.count(verb), before + 1);
    kit.remove("c1");
    kit.with_pod.assert_unchanged();
}

#[test]
fn the_start_of_a_container_outlives_its_caller_and_is_joined_by_a_retry() {
    each_runtime(
        "starting::the_start_of_a_container_outlives_its_caller_and_is_joined_by_a_retry",
        "",
        |kit| goes_on(kit, ""),
    );
}

#[test]
fn the_start_of_an_exec_outlives_its_caller_and_is_joined_by_a_retry() {
    each_runtime(
        "starting::the_start_of_an_exec_outlives_its_caller_and_is_joined_by_a_retry",
        "",
        |kit| goes_on(kit, "e"),
    );
}

#[test]
fn a_retry_after_a_start_that_nobody_waited_for_is_told_its_pid_once() {
    with_runc(
        "starting::a_retry_after_a_start_that_nobody_waited_for_is_told_its_pid_once",
        "",
        |kit| {
            for exec_id in ["", "e"] {
                let verb = waiting(kit, exec_id);
                let gate = kit.closed(verb);
                let probe = kit.pod.probe();
                start(&probe, "c1", exec_id, SHORT).unwrap_err();
                open(&gate);
                crate::support::eventually(BOUND, "it runs", || {
                    (running(kit, exec_id)).then_some(())
                });
                let pid = start(&probe, "c1", exec_id, BOUND).unwrap();
                assert!(pid > 0);
                let second = start(&probe, "c1", exec_id, BOUND).unwrap_err();
                assert_eq!(second.kind(), Kind::State, "{second}");
                kit.remove("c1");
            }
        },
    );
}

fn running(kit: &Kit, exec_id: &str) -> bool {
    let request = podvisor::proto::task_v3::shim::StateRequest {
        id: "c1".into(),
        exec_id: exec_id.into(),
        ..Default::default()
    };
    let probe = kit.pod.probe();
    let tasks = probe.client.task();
    let state = probe
        .block(tasks.state(crate::rig::limit(BOUND), &request))
        .unwrap();
    format!("{:?}", state.status.enum_value_or_default()) == "RUNNING"
}

#[test]
fn starts_that_overlap_are_one_start() {
    with_runc("starting::starts_that_overlap_are_one_start", "", |kit| {
        for exec_id in ["", "e"] {
            let verb = waiting(kit, exec_id);
            let before = kit.runtime.count(verb);
            let gate = kit.closed(verb);
            let starts: Vec<_> = (0..3)
                .map(|_| kit.start_aside("c1", exec_id, BOUND))
                .collect();
            called(&kit.runtime, verb, before + 1);
            std::thread::sleep(Duration::from_millis(300));
            open(&gate);
            let pids: Vec<u32> = starts
                .into_iter()
                .map(|s| s.join().unwrap().unwrap())
                .collect();
            assert!(pids.iter().all(|p| *p == pids[0] && *p > 0), "{pids:?}");
            assert_eq!(kit.runtime.count(verb), before + 1);
            kit.remove("c1");
        }
    });
}

#[test]
fn a_start_that_fails_is_told_to_everybody_and_may_be_tried_again() {
    each_runtime(
        "starting::a_start_that_fails_is_told_to_everybody_and_may_be_tried_again",
        "",
        |kit| {
            for exec_id in ["", "e"] {
                let verb = waiting(kit, exec_id);
                let gate = kit.closed(verb);
                let acts = [
                    Act::WaitFor(gate.clone()),
                    Act::Stderr("no luck today".into()),
                    Act::Exit(3),
                ];
                kit.runtime.on(verb, &acts);
                let probe = kit.pod.probe();
                start(&probe, "c1", exec_id, SHORT).unwrap_err();
                let watchers: Vec<_> = (0..2)
                    .map(|_| kit.start_aside("c1", exec_id, BOUND))
                    .collect();
                std::thread::sleep(Duration::from_millis(300));
                open(&gate);
                for watcher in watchers {
                    let error = watcher.join().unwrap().unwrap_err();
                    assert_eq!(error.kind(), Kind::Other, "{error}");
                    assert!(error.to_string().contains("no luck today"), "{error}");
                }
                kit.runtime.on(verb, &[]);
                start(&probe, "c1", exec_id, BOUND).unwrap();
                kit.remove("c1");
            }
            kit.with_pod.assert_unchanged();
        },
    );
}
