//! Results that nobody takes.

use std::time::{Duration, Instant};

use podvisor::error::Kind;

use crate::joining::{closed, open, until_state};
use crate::rig::{self, BOUND, Pod, alive, gone};
use crate::support::{Snapshot, podvisor, sandboxed};

const INTERVAL: Duration = Duration::from_millis(1500);

fn parked() -> (crate::support::fake::Fake, Snapshot, Pod) {
    rig::settings(&format!(
        "[parking]\ninterval = {}\n",
        INTERVAL.as_secs_f64()
    ));
    let plugin = rig::fake_network();
    let before = Snapshot::take();
    let gate = closed(&plugin);
    let pod = Pod::create("p1");
    let error = pod
        .probe()
        .start("p1", Duration::from_millis(500))
        .unwrap_err();
    assert_eq!(error.kind(), Kind::Deadline);
    open(&gate);
    until_state(&pod, "Parked");
    (plugin, before, pod)
}

#[test]
fn a_parked_pod_nobody_claims_is_undone_and_its_supervisor_leaves() {
    sandboxed(
        "parked::a_parked_pod_nobody_claims_is_undone_and_its_supervisor_leaves",
        || {
            let (plugin, before, pod) = parked();
            let (supervisor, since) = (pod.supervisor(), Instant::now());
            // Not before one interval, measured from a moment after it was parked.
            while since.elapsed() < INTERVAL - Duration::from_millis(300) {
                assert!(alive(supervisor) && pod.record().is_some());
                std::thread::sleep(Duration::from_millis(20));
            }
            gone(supervisor);
            before.assert_unchanged();
            assert_eq!((plugin.count("ADD"), plugin.count("DEL")), (1, 1));
        },
    );
}

#[test]
fn somebody_who_watches_keeps_a_parked_pod_and_a_claim_keeps_it_for_good() {
    sandboxed(
        "parked::somebody_who_watches_keeps_a_parked_pod_and_a_claim_keeps_it_for_good",
        || {
            rig::settings(&format!(
                "[parking]\ninterval = {}\n",
                INTERVAL.as_secs_f64()
            ));
            let plugin = rig::fake_network();
            let before = Snapshot::take();
            let gate = closed(&plugin);
            let pod = Pod::create("p1");
            pod.probe()
                .start_and_hang_up("p1", Duration::from_millis(500));
            // It watches for longer than two intervals.
            let watcher = pod.start_aside(INTERVAL * 4);
            std::thread::sleep(Duration::from_millis(300));
            open(&gate);
            let error = watcher.join().unwrap().unwrap_err();
            assert_eq!(error.kind(), Kind::Busy, "{error}");
            let pid = pod.probe().start("p1", BOUND).unwrap();
            std::thread::sleep(INTERVAL * 3);
            assert_eq!(
                pod.probe().status("p1").unwrap(),
                ("SANDBOX_READY".into(), pid)
            );
            pod.end();
            before.assert_unchanged();
            assert_eq!((plugin.count("ADD"), plugin.count("DEL")), (1, 1));
        },
    );
}

#[test]
fn a_parked_pod_can_be_removed_by_the_command() {
    sandboxed("parked::a_parked_pod_can_be_removed_by_the_command", || {
        rig::settings("");
        let plugin = rig::fake_network();
        let before = Snapshot::take();
        let gate = closed(&plugin);
        let asked = ["create", "--name", "web", "--timeout", "1s"];
        podvisor(&asked).fails_with("still at stage cni-add");
        open(&gate);
        crate::support::eventually(BOUND, "it is parked", || {
            podvisor(&["ps", "-a"])
                .ok()
                .stdout
                .contains("parked")
                .then_some(())
        });
        podvisor(&["rm", "web"]).fails_with("podvisor rm -f web");
        podvisor(&["rm", "-f", "web"]).ok();
        before.assert_unchanged();
        assert_eq!((plugin.count("ADD"), plugin.count("DEL")), (1, 1));
    });
}

#[test]
fn the_same_command_takes_the_pod_that_it_began() {
    sandboxed(
        "parked::the_same_command_takes_the_pod_that_it_began",
        || {
            let plugin = rig::fake_network();
            let before = Snapshot::take();
            let gate = closed(&plugin);
            let asked = ["create", "--name", "web", "--timeout", "1s"];
            podvisor(&asked).fails_with("--name web");
            // Still under way: the second joins, and is told the same.
            podvisor(&asked).fails_with("still at stage cni-add");
            open(&gate);
            podvisor(&["create", "--name", "web", "--timeout", "5m"]).ok();
            assert!(podvisor(&["ps"]).ok().stdout.contains("ready"));
            podvisor(&["rm", "-f", "web"]).ok();
            before.assert_unchanged();
            assert_eq!((plugin.count("ADD"), plugin.count("DEL")), (1, 1));
        },
    );
}
