//! Starts that outlive their callers, of a container and of an exec.

use std::time::Duration;

use podvisor::error::Kind;

use crate::kit::{Kit, SHORT, each_runtime, exec, open, start, with_runc};
use crate::rig::{BOUND, called, container};
use crate::support::fake::Act;

/// A container that waits to be started, or one that runs with an exec `e` that does: the verb that starts it.
fn waiting(kit: &Kit, id: &str, exec_id: &str) -> &'static str {
    kit.create(&container(id, "sleep 1000"), BOUND).unwrap();
    if exec_id.is_empty() {
        return "START";
    }
    let probe = kit.pod.probe();
    start(&probe, id, "", BOUND).unwrap();
    exec(&probe, id, exec_id, "sleep 1000").unwrap();
    "EXEC"
}

fn goes_on(kit: &Kit, exec_id: &str) {
    let verb = waiting(kit, "c1", exec_id);
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
            for (id, exec_id) in [("c1", ""), ("c2", "e")] {
                let verb = waiting(kit, id, exec_id);
                let gate = kit.closed(verb);
                let probe = kit.pod.probe();
                start(&probe, id, exec_id, SHORT).unwrap_err();
                open(&gate);
                crate::support::eventually(BOUND, "it runs", || {
                    (running(kit, id, exec_id)).then_some(())
                });
                let pid = start(&probe, id, exec_id, BOUND).unwrap();
                assert!(pid > 0);
                let second = start(&probe, id, exec_id, BOUND).unwrap_err();
                assert_eq!(second.kind(), Kind::State, "{second}");
                kit.remove(id);
            }
        },
    );
}

fn running(kit: &Kit, id: &str, exec_id: &str) -> bool {
    let request = podvisor::proto::task_v3::shim::StateRequest {
        id: id.into(),
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
        for (id, exec_id) in [("c1", ""), ("c2", "e")] {
            let verb = waiting(kit, id, exec_id);
            let before = kit.runtime.count(verb);
            let gate = kit.closed(verb);
            let starts: Vec<_> = (0..3)
                .map(|_| kit.start_aside(id, exec_id, BOUND))
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
            kit.remove(id);
        }
    });
}

#[test]
fn a_start_that_fails_is_told_to_everybody_and_may_be_tried_again() {
    each_runtime(
        "starting::a_start_that_fails_is_told_to_everybody_and_may_be_tried_again",
        "",
        |kit| {
            for (id, exec_id) in [("c1", ""), ("c2", "e")] {
                let verb = waiting(kit, id, exec_id);
                let gate = kit.closed(verb);
                let acts = [
                    Act::WaitFor(gate.clone()),
                    Act::Stderr("no luck today".into()),
                    Act::Exit(3),
                ];
                kit.runtime.on(verb, &acts);
                let probe = kit.pod.probe();
                start(&probe, id, exec_id, SHORT).unwrap_err();
                let watchers: Vec<_> = (0..2)
                    .map(|_| kit.start_aside(id, exec_id, BOUND))
                    .collect();
                std::thread::sleep(Duration::from_millis(300));
                open(&gate);
                for watcher in watchers {
                    let error = watcher.join().unwrap().unwrap_err();
                    assert_eq!(error.kind(), Kind::Other, "{error}");
                    let text = error.to_string();
                    // What the runtime of an exec prints goes where the exec's own output goes.
                    assert!(text.contains("/run/fakes/slow"), "{text}");
                    assert!(
                        text.contains("no luck today") || text.contains("exit status 3"),
                        "{text}"
                    );
                }
                kit.runtime.on(verb, &[]);
                start(&probe, id, exec_id, BOUND).unwrap();
                kit.remove(id);
            }
            kit.with_pod.assert_unchanged();
        },
    );
}

/// A container whose init was killed while the runtime hangs in `start` has ended, and soon.
#[test]
fn a_runtime_that_hangs_in_start_does_not_hide_the_end_of_its_container() {
    each_runtime(
        "starting::a_runtime_that_hangs_in_start_does_not_hide_the_end_of_its_container",
        "",
        |kit| {
            let verb = waiting(kit, "c1", "");
            kit.closed(verb);
            let starting = kit.start_aside("c1", "", BOUND);
            called(&kit.runtime, verb, 1);
            let pid = kit.runtime.calls_of(verb)[0].pid;
            kit.remove("c1");
            let error = starting.join().unwrap().unwrap_err();
            assert_eq!(error.kind(), Kind::State, "{error}");
            crate::rig::gone(pid);
            kit.with_pod.assert_unchanged();
        },
    );
}
