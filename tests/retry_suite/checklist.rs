//! The checklist of CRI-O's behaviours, store and protocol, items 1 to 11; the rest is in `checklist_ends`. docs/retry.md
//! has the table.

use std::time::{Duration, Instant};

use podvisor::error::Kind;
use podvisor::pod::record::State;

use crate::kit::{
    self, Delay, INTERVAL, SHORT, create_aside, document, info, listed, on_a_machine, says, until,
    until_listed, until_waiters,
};
use crate::rig::{self, BOUND, Pod, called, config, container};
use crate::support::fake::Act;
use crate::support::{Sandbox, eventually, podvisor, rootfs};

/// The client is killed; its work is not.
#[test]
fn crio_01_first_request_outlives_its_client() {
    on_a_machine(
        "checklist::crio_01_first_request_outlives_its_client",
        "",
        |machine| {
            machine.hold(Delay::Plugin);
            let mut client = create_aside("5m");
            called(&machine.plugin, "ADD", 1);
            client.kill().unwrap();
            client.wait().unwrap();
            machine.let_go(Delay::Plugin);
            until_listed("parked");
            let id = listed()[0]["id"].as_str().unwrap().to_owned();
            let taken = podvisor(&kit::create("1m")).ok();
            assert_eq!(taken.stdout.trim(), id);
            machine.chains(1, 0);
            podvisor(&["rm", "-f", "web"]).ok();
        },
    );
}

/// Ours is listed, as parked; nothing can be done with it but to claim, stop or remove it.
#[test]
fn crio_02_a_parked_pod_is_not_ready_and_takes_no_work() {
    on_a_machine(
        "checklist::crio_02_a_parked_pod_is_not_ready_and_takes_no_work",
        "",
        |machine| {
            let rootfs = rootfs::make();
            let pod = machine.parked("p1", Delay::Plugin);
            assert_eq!(pod.probe().status("p1").unwrap().0, "SANDBOX_NOTREADY");
            for _ in 0..2 {
                let made = pod
                    .probe()
                    .create_task(&container_once("c1"), &rootfs)
                    .unwrap_err();
                assert_eq!(made.kind(), Kind::State, "{made}");
            }
            for id in ["c1", "p1"] {
                let started = pod.probe().start_task(id).unwrap_err();
                assert_eq!(started.kind(), Kind::NotFound, "{started}");
            }
            assert!(pod.record().unwrap().containers.is_empty());
            pod.end();
        },
    );
}

fn container_once(id: &str) -> crate::daemon::Bundle {
    let _ = std::fs::remove_dir_all(format!("/run/bundles/{id}"));
    container(id, "sleep 100")
}

#[test]
fn crio_03_a_fresh_request_gets_the_parked_pod_and_there_is_one() {
    on_a_machine(
        "checklist::crio_03_a_fresh_request_gets_the_parked_pod_and_there_is_one",
        "",
        |machine| {
            let pod = machine.parked("p1", Delay::Plugin);
            let pid = kit::retry(&pod.probe(), "p1", &config("p1"), BOUND).unwrap();
            let record = pod.record().unwrap();
            assert_eq!(i64::from(pid), i64::from(record.infra.unwrap().pid));
            assert_eq!((record.id.as_str(), record.state), ("p1", State::Ready));
            assert_eq!((kit::leases(), rig::netns_mounts()), (1, 1));
            machine.chains(1, 0);
            pod.end();
        },
    );
}

#[test]
fn crio_04_a_duplicate_of_a_taken_pod_is_answered_at_once() {
    on_a_machine(
        "checklist::crio_04_a_duplicate_of_a_taken_pod_is_answered_at_once",
        "",
        |machine| {
            let pod = machine.parked("p1", Delay::Plugin);
            let pid = pod.probe().start("p1", BOUND).unwrap();
            let asked = Instant::now();
            for _ in 0..10 {
                assert_eq!(pod.probe().start("p1", BOUND).unwrap(), pid);
            }
            // A stall lasts for as long as the deadline.
            assert!(asked.elapsed() < BOUND / 2);
            pod.end();
        },
    );
}

#[test]
fn crio_05_a_request_that_waited_when_it_became_ready_fails_and_takes_nothing() {
    on_a_machine(
        "checklist::crio_05_a_request_that_waited_when_it_became_ready_fails_and_takes_nothing",
        "",
        |machine| {
            let pod = machine.timed_out("p1", Delay::Infra);
            let waiter = pod.start_aside(Duration::from_secs(3));
            until_waiters(&pod, 1);
            machine.let_go(Delay::Infra);
            until(&pod, State::Parked);
            let told = waiter.join().unwrap().unwrap_err();
            assert_eq!(told.kind(), Kind::Busy);
            assert_eq!(document(&pod)["state"], "parked");
            pod.probe().start("p1", BOUND).unwrap();
            pod.end();
        },
    );
}

/// The failure of item 5 is held until the margin before the deadline begins: 5 %, at most 250 ms.
fn held_until_its_deadline(name: &str, limit: Duration) {
    on_a_machine(name, "", |machine| {
        let pod = machine.timed_out("p1", Delay::Plugin);
        let asked = Instant::now();
        let waiter = pod.start_aside(limit);
        until_waiters(&pod, 1);
        machine.let_go(Delay::Plugin);
        until(&pod, State::Parked);
        let told = waiter.join().unwrap().unwrap_err();
        let margin = Duration::from_millis(250).min(limit / 20);
        // The client counts from before the supervisor does: never early by more than the margin.
        assert!(asked.elapsed() >= limit - margin, "{:?}", asked.elapsed());
        assert_eq!(told.kind(), Kind::Busy, "{told}");
        pod.probe().start("p1", BOUND).unwrap();
        pod.end();
    });
}

#[test]
fn crio_06_that_failure_is_not_sent_before_the_deadline_3_s() {
    held_until_its_deadline(
        "checklist::crio_06_that_failure_is_not_sent_before_the_deadline_3_s",
        Duration::from_secs(3),
    );
}

#[test]
#[ignore = "half a minute; scripts/test --slow"]
fn crio_06_that_failure_is_not_sent_before_the_deadline_30_s_slow() {
    held_until_its_deadline(
        "checklist::crio_06_that_failure_is_not_sent_before_the_deadline_30_s_slow",
        Duration::from_secs(30),
    );
}

/// Four minutes, the bound of a watcher that names none.
#[test]
#[ignore = "four minutes; scripts/test --slow"]
fn crio_07_a_waiter_without_a_deadline_ends_by_itself_slow() {
    let name = "checklist::crio_07_a_waiter_without_a_deadline_ends_by_itself_slow";
    Sandbox::new(name).bound(Duration::from_secs(900)).run(|| {
        let plugin = rig::fake_network();
        let gate = std::path::PathBuf::from("/run/gate");
        plugin.on("ADD", &[Act::WaitFor(gate.clone())]);
        let pod = Pod::create("p1");
        let first = pod.probe().start("p1", SHORT).unwrap_err();
        assert_eq!(first.kind(), Kind::Deadline);
        let asked = Instant::now();
        let waiter = pod.aside(|probe| start_without_deadline(probe, "p1"));
        until_waiters(&pod, 1);
        let told = waiter.join().unwrap().unwrap_err();
        assert_eq!(told.kind(), Kind::Deadline, "{told}");
        says(&told, &["still at stage cni-add"]);
        let took = asked.elapsed();
        assert!(took >= Duration::from_secs(239), "{took:?}");
        std::fs::write(gate, "").unwrap();
        until(&pod, State::Parked);
        pod.end();
    });
}

fn start_without_deadline(probe: &rig::Probe, id: &str) -> podvisor::error::Result<u32> {
    let request = podvisor::proto::sandbox::sandbox::StartSandboxRequest {
        sandbox_id: id.into(),
        ..Default::default()
    };
    let service = probe.client.sandbox();
    let call = service.start_sandbox(podvisor::client::context(None), &request);
    probe
        .block(call)
        .map(|answer| answer.pid)
        .map_err(|e| podvisor::client::from_ttrpc("start", e))
}

#[test]
fn crio_08_a_result_lives_while_watched_and_for_a_grace_afterwards() {
    on_a_machine(
        "checklist::crio_08_a_result_lives_while_watched_and_for_a_grace_afterwards",
        "",
        |machine| {
            let pod = machine.timed_out("p1", Delay::Plugin);
            let long = pod.start_aside(INTERVAL * 2 + INTERVAL / 2);
            until_waiters(&pod, 1);
            machine.let_go(Delay::Plugin);
            until(&pod, State::Parked);
            let infra = pod.record().unwrap().infra.unwrap();
            long.join().unwrap().unwrap_err();
            // At once after the last one left, and the result is there.
            let pid = pod.probe().start("p1", BOUND).unwrap();
            assert_eq!(i64::from(pid), i64::from(infra.pid));
            machine.chains(1, 0);
            pod.end();
        },
    );
}

/// Many in the model of the job; here with the real thing, requests all around the moment of parking.
#[test]
fn crio_09_parking_between_look_up_and_subscription_wakes_the_waiter() {
    on_a_machine(
        "checklist::crio_09_parking_between_look_up_and_subscription_wakes_the_waiter",
        "",
        |machine| {
            let pod = machine.timed_out("p1", Delay::Plugin);
            let crossing: Vec<_> = (0..12)
                .map(|n| {
                    pod.aside(move |probe| {
                        std::thread::sleep(Duration::from_millis(20 * n));
                        probe.start("p1", Duration::from_secs(4))
                    })
                })
                .collect();
            machine.let_go(Delay::Plugin);
            let mut pids = Vec::new();
            for one in crossing {
                match one.join().unwrap() {
                    Ok(pid) => pids.push(pid),
                    Err(told) => assert_eq!(told.kind(), Kind::Busy, "{told}"),
                }
            }
            pids.push(pod.probe().start("p1", BOUND).unwrap());
            pids.dedup();
            assert_eq!(pids.len(), 1, "{pids:?}");
            assert_eq!(info(&pod)["waiters"], 0);
            machine.chains(1, 0);
            pod.end();
        },
    );
}

#[test]
fn crio_10_a_failure_wakes_all_waiters_with_its_cause() {
    on_a_machine(
        "checklist::crio_10_a_failure_wakes_all_waiters_with_its_cause",
        "",
        |machine| {
            machine.hold_and_fail();
            let pod = Pod::create("p1");
            let first = pod.start_aside(BOUND);
            called(&machine.plugin, "ADD", 1);
            let others: Vec<_> = (0..4).map(|_| pod.start_aside(BOUND)).collect();
            until_waiters(&pod, 5);
            let opened = Instant::now();
            machine.let_go(Delay::Plugin);
            for waiter in others.into_iter().chain([first]) {
                let told = waiter.join().unwrap().unwrap_err();
                says(&told, &["slow-bridge", "no address is free"]);
            }
            assert!(opened.elapsed() < BOUND / 2, "held until the deadline");
            // And afterwards one of them starts anew.
            eventually(BOUND, "the next try", || {
                pod.probe().start("p1", BOUND).ok()
            });
            pod.end();
            machine.chains(2, 2);
        },
    );
}

#[test]
fn crio_11_a_success_in_time_wakes_duplicates_who_get_the_pod() {
    on_a_machine(
        "checklist::crio_11_a_success_in_time_wakes_duplicates_who_get_the_pod",
        "",
        |machine| {
            machine.hold(Delay::Infra);
            let pod = Pod::create("p1");
            let first = pod.start_aside(BOUND);
            kit::stands_at(&pod, Delay::Infra);
            let others: Vec<_> = (0..4).map(|_| pod.start_aside(BOUND)).collect();
            until_waiters(&pod, 5);
            machine.let_go(Delay::Infra);
            let pid = first.join().unwrap().unwrap();
            for other in others {
                assert_eq!(other.join().unwrap().unwrap(), pid);
            }
            assert_eq!(pod.record().unwrap().state, State::Ready);
            machine.chains(1, 0);
            pod.end();
        },
    );
}
