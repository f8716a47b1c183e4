//! Requests that wait for one creation: docs/retry.md over the real socket.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use podvisor::error::Kind;

use crate::rig::{self, BOUND, Pod, called, config, container};
use crate::support::fake::{Act, Fake};
use crate::support::{Snapshot, eventually, podvisor, rootfs, sandboxed};

/// Makes ADD wait until [`open`].
pub fn closed(plugin: &Fake) -> PathBuf {
    let gate = PathBuf::from("/run/gate");
    plugin.on("ADD", &[Act::WaitFor(gate.clone())]);
    gate
}

pub fn open(gate: &Path) {
    std::fs::write(gate, "").unwrap();
}

/// Until the journal says so.
pub fn until_state(pod: &Pod, state: &str) {
    eventually(
        Duration::from_secs(30),
        &format!("the pod is {state}"),
        || {
            let record = pod.record()?;
            (format!("{:?}", record.state) == state).then_some(())
        },
    );
}

/// FL-002: the work of a creation whose caller gave up goes to the retry, whichever way the caller left.
fn the_work_goes_on(hang_up: bool) {
    let (plugin, rootfs) = (rig::fake_network(), rootfs::make());
    let before = Snapshot::take();
    let gate = closed(&plugin);
    let pod = Pod::create("p1");
    let first = pod.probe();
    if hang_up {
        first.start_and_hang_up("p1", Duration::from_secs(1));
    } else {
        let error = first.start("p1", Duration::from_secs(1)).unwrap_err();
        let text = error.to_string();
        assert_eq!(error.kind(), Kind::Deadline, "{text}");
        let named = format!("in supervisor {}", pod.supervisor());
        for part in [
            "still at stage cni-add after ",
            " s ",
            named.as_str(),
            "the work goes on",
        ] {
            assert!(text.contains(part), "{text}");
        }
    }
    assert_eq!(pod.probe().status("p1").unwrap().0, "SANDBOX_NOTREADY");

    // A daemon's retry is both requests, and neither waits for the work.
    let second = pod.aside(|probe| {
        probe.create("p1", &config("p1"))?;
        probe.start("p1", Duration::from_secs(4))
    });
    std::thread::sleep(Duration::from_millis(300));
    open(&gate);
    until_state(&pod, "Parked");
    assert_eq!(pod.probe().status("p1").unwrap().0, "SANDBOX_NOTREADY");
    let listed = podvisor(&["--namespace", rig::NAMESPACE, "ps", "-a"])
        .ok()
        .stdout;
    assert!(listed.contains("parked"), "{listed}");
    let c1 = container("c1", "sleep 100");
    let refused = pod.probe().create_task(&c1, &rootfs).unwrap_err();
    assert_eq!(refused.kind(), Kind::State);
    assert!(refused.to_string().contains("parked"), "{refused}");
    let told = second.join().unwrap().unwrap_err();
    assert_eq!(told.kind(), Kind::Busy);
    assert!(
        told.to_string().contains("it is ready, retry to take it"),
        "{told}"
    );

    let probe = pod.probe();
    probe.create("p1", &config("p1")).unwrap();
    let pid = probe.start("p1", BOUND).unwrap();
    assert_eq!(probe.status("p1").unwrap(), ("SANDBOX_READY".into(), pid));
    assert_eq!(probe.start("p1", BOUND).unwrap(), pid);
    probe.run_task(&c1, &rootfs);
    assert_eq!((plugin.count("ADD"), plugin.count("DEL")), (1, 0));
    pod.end();
    before.assert_unchanged();
    assert_eq!((plugin.count("ADD"), plugin.count("DEL")), (1, 1));
}

#[test]
fn a_creation_outlives_its_callers_deadline_and_is_taken_by_a_retry() {
    sandboxed(
        "joining::a_creation_outlives_its_callers_deadline_and_is_taken_by_a_retry",
        || the_work_goes_on(false),
    );
}

#[test]
fn a_creation_outlives_its_callers_connection_and_is_taken_by_a_retry() {
    sandboxed(
        "joining::a_creation_outlives_its_callers_connection_and_is_taken_by_a_retry",
        || the_work_goes_on(true),
    );
}

#[test]
fn duplicates_get_the_live_pod_when_the_first_caller_waits_to_the_end() {
    sandboxed(
        "joining::duplicates_get_the_live_pod_when_the_first_caller_waits_to_the_end",
        || {
            let plugin = rig::fake_network();
            let before = Snapshot::take();
            let gate = closed(&plugin);
            let pod = Pod::create("p1");
            let first = pod.start_aside(BOUND);
            called(&plugin, "ADD", 1);
            let others: Vec<_> = (0..3).map(|_| pod.start_aside(BOUND)).collect();
            std::thread::sleep(Duration::from_millis(300));
            open(&gate);
            let pid = first.join().unwrap().unwrap();
            for other in others {
                assert_eq!(other.join().unwrap().unwrap(), pid);
            }
            assert_eq!(plugin.count("ADD"), 1);
            pod.end();
            before.assert_unchanged();
            assert_eq!(plugin.count("DEL"), 1);
        },
    );
}

#[test]
fn who_watches_a_creation_fail_is_told_the_cause_at_once() {
    sandboxed(
        "joining::who_watches_a_creation_fail_is_told_the_cause_at_once",
        || {
            let plugin = rig::fake_network();
            let before = Snapshot::take();
            let gate = closed(&plugin);
            plugin.on(
                "ADD",
                &[
                    Act::WaitFor(gate.clone()),
                    Act::Stderr("no address is free".into()),
                    Act::Exit(3),
                    Act::OnlyFirst(1),
                ],
            );
            let pod = Pod::create("p1");
            let gave_up = pod.probe().start("p1", Duration::from_millis(500));
            assert_eq!(gave_up.unwrap_err().kind(), Kind::Deadline);
            let watchers: Vec<_> = (0..2).map(|_| pod.start_aside(BOUND)).collect();
            std::thread::sleep(Duration::from_millis(300));
            let opened = Instant::now();
            open(&gate);
            for watcher in watchers {
                let error = watcher.join().unwrap().unwrap_err().to_string();
                for part in ["\"fake\"", "no address is free", "3"] {
                    assert!(error.contains(part), "{error}");
                }
            }
            assert!(opened.elapsed() < BOUND / 2, "held until the deadline");
            called(&plugin, "DEL", 1);
            // The request is still on record, and the next try is a creation of its own.
            eventually(BOUND, "the roll-back ends", || {
                match pod.probe().start("p1", BOUND) {
                    Ok(_) => Some(()),
                    Err(e) => {
                        assert_eq!(e.kind(), Kind::Busy, "{e}");
                        assert!(e.to_string().contains("rolled back"), "{e}");
                        None
                    }
                }
            });
            assert_eq!((plugin.count("ADD"), plugin.count("DEL")), (2, 1));
            pod.end();
            before.assert_unchanged();
            assert_eq!(plugin.count("DEL"), 2);
        },
    );
}

#[test]
fn another_request_for_the_same_id_is_refused_with_both_digests() {
    sandboxed(
        "joining::another_request_for_the_same_id_is_refused_with_both_digests",
        || {
            let plugin = rig::fake_network();
            let before = Snapshot::take();
            let gate = closed(&plugin);
            let pod = Pod::create("p1");
            let first = pod.start_aside(BOUND);
            called(&plugin, "ADD", 1);
            // Answered while the creation is under way, as the same request is.
            for _ in 0..2 {
                let error = pod.probe().create("p1", &config("other"));
                open(&gate);
                let error = error.unwrap_err();
                assert_eq!(error.kind(), Kind::Exists, "{error}");
                let text = error.to_string();
                let digest = pod.record().unwrap().digest;
                assert!(
                    text.contains(&format!("request {}", &digest[..12])),
                    "{text}"
                );
                let named = text.matches("request ").count();
                assert_eq!(named, 2, "{text}");
            }
            pod.probe().create("p1", &config("p1")).unwrap();
            first.join().unwrap().unwrap();
            assert_eq!(plugin.count("ADD"), 1);
            pod.end();
            before.assert_unchanged();
        },
    );
}
