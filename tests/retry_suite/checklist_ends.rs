//! The checklist of CRI-O's behaviours, items 12 to 21 and 42 to 44: how results end, and what is left of anything.

use std::path::Path;
use std::time::{Duration, Instant};

use podvisor::error::Kind;
use podvisor::pod::plan::NETWORK_ANNOTATION;
use podvisor::pod::record::State;
use serde_json::json;

use crate::daemon::Bundle;
use crate::kit::{
    self, Delay, INTERVAL, SHORT, create, document, info, listed, metric, on_a_machine, says,
    until, until_listed, until_waiters,
};
use crate::rig::{self, BOUND, Pod, alive, called, config, container, gone};
use crate::support::fake::{self, Act};
use crate::support::{cni, eventually, podvisor, rootfs};

#[test]
fn crio_12_a_result_nobody_asks_for_is_gone_after_one_to_two_intervals() {
    on_a_machine(
        "checklist_ends::crio_12_a_result_nobody_asks_for_is_gone_after_one_to_two_intervals",
        "",
        |machine| {
            let pod = machine.parked("p1", Delay::Plugin);
            let (seen, supervisor) = (Instant::now(), pod.supervisor());
            // It was parked a moment before it was seen to be.
            let moment = Duration::from_millis(500);
            while seen.elapsed() < INTERVAL - moment {
                assert!(alive(supervisor) && pod.record().is_some(), "gone early");
                std::thread::sleep(Duration::from_millis(20));
            }
            gone(supervisor);
            machine.is_clean();
            machine.chains(1, 1);
            let anew = Pod::in_bundle(pod.bundle);
            kit::retry(&anew.probe(), "p1", &config("p1"), BOUND).unwrap();
            anew.end();
        },
    );
}

#[test]
fn crio_13_another_attempt_is_a_new_pod_at_once_and_the_old_one_is_reaped() {
    on_a_machine(
        "checklist_ends::crio_13_another_attempt_is_a_new_pod_at_once_and_the_old_one_is_reaped",
        "",
        |machine| {
            // The old one is still being made.
            let pod = machine.timed_out("p1", Delay::Plugin);
            let second = Pod::launch("p1-b");
            let mut changed = config("p1");
            changed.metadata.mut_or_insert_default().attempt = 1;
            second.probe().create("p1-b", &changed).unwrap();
            assert_ne!(info(&second)["key"], info(&pod)["key"]);
            machine.let_go(Delay::Plugin);
            second.probe().start("p1-b", BOUND).unwrap();
            until_any(&pod);
            let supervisor = pod.record().map(|r| r.supervisor.unwrap().pid);
            assert!(rig::netns_mounts() >= 1);
            supervisor.into_iter().for_each(gone);
            assert_eq!((kit::leases(), rig::netns_mounts()), (1, 1));
            second.end();
            machine.chains(2, 2);
        },
    );
}

/// Parked, or gone already.
fn until_any(pod: &Pod) {
    eventually(BOUND, "it is parked", || match pod.record() {
        None => Some(()),
        Some(record) => (record.state == State::Parked).then_some(()),
    });
}

#[test]
fn crio_14_another_spec_for_the_same_name_is_refused_naming_both_digests() {
    on_a_machine(
        "checklist_ends::crio_14_another_spec_for_the_same_name_is_refused_naming_both_digests",
        "",
        |machine| {
            let pod = machine.timed_out("p1", Delay::Plugin);
            let mut other = config("p1");
            other.hostname = "elsewhere".into();
            // While it is made, when it is parked, and when it is live.
            for moment in ["creating", "parked", "ready"] {
                match moment {
                    "parked" => {
                        machine.let_go(Delay::Plugin);
                        until(&pod, State::Parked);
                    }
                    "ready" => drop(pod.probe().start("p1", BOUND).unwrap()),
                    _ => {}
                }
                assert_eq!(info(&pod)["activity"], moment);
                let told = pod.probe().create("p1", &other).unwrap_err();
                assert_eq!(told.kind(), Kind::Exists, "{told}");
                let first = pod.record().unwrap().digest;
                says(
                    &told,
                    &[
                        &format!("made by request {}", &first[..12]),
                        "this is request ",
                    ],
                );
                assert!(
                    !told
                        .to_string()
                        .contains(&format!("this is request {}", &first[..12]))
                );
                // The same request is not refused.
                pod.probe().create("p1", &config("p1")).unwrap();
            }
            pod.end();
            machine.chains(1, 1);
        },
    );
}

#[test]
fn crio_15_a_pod_and_a_container_of_one_name_do_not_meet() {
    on_a_machine(
        "checklist_ends::crio_15_a_pod_and_a_container_of_one_name_do_not_meet",
        "",
        |machine| {
            let rootfs = rootfs::make();
            let pod = Pod::up("p1");
            // The name of the pod; a container's bundle is another directory than a sandbox'.
            let bundle = same_name("p1");
            let made = pod.probe().create_task(&bundle, &rootfs);
            match made {
                Ok(_) => {
                    pod.probe().start_task("p1").unwrap();
                    assert_eq!(pod.probe().task_state("p1").unwrap(), "RUNNING");
                }
                Err(told) => panic!("{told}"),
            }
            assert_eq!(pod.probe().status("p1").unwrap().0, "SANDBOX_READY");
            pod.end();

            // Fields are never joined: these two would be one with any single separator.
            let (mut a, mut b) = (config("a_b"), config("b"));
            let meta = a.metadata.mut_or_insert_default();
            (meta.name, meta.namespace) = ("a_b".into(), "c".into());
            let meta = b.metadata.mut_or_insert_default();
            (meta.name, meta.namespace) = ("b".into(), "c_a".into());
            let first = Pod::launch("x1");
            let second = Pod::launch("x2");
            kit::retry(&first.probe(), "x1", &a, BOUND).unwrap();
            kit::retry(&second.probe(), "x2", &b, BOUND).unwrap();
            assert_ne!(info(&first)["key"], info(&second)["key"]);
            first.end();
            second.end();
            machine.chains(3, 3);
        },
    );
}

/// A container's bundle beside the sandbox' of the same name.
fn same_name(id: &str) -> Bundle {
    let aside = container("aside", "sleep 100");
    Bundle {
        dir: aside.dir,
        id: id.into(),
        ..Bundle::new("unused")
    }
}

/// There is one owner of a pod's key: requests at the same moment are one creation, a second supervisor is refused.
#[test]
fn crio_16_of_many_requests_at_once_one_makes_the_pod() {
    on_a_machine(
        "checklist_ends::crio_16_of_many_requests_at_once_one_makes_the_pod",
        "",
        |machine| {
            let pod = Pod::launch("p1");
            let all: Vec<_> = (0..16)
                .map(|_| pod.aside(|probe| kit::retry(probe, "p1", &config("p1"), BOUND)))
                .collect();
            let mut pids: Vec<u32> = all
                .into_iter()
                .map(|one| one.join().unwrap().unwrap())
                .collect();
            pids.dedup();
            assert_eq!(pids.len(), 1, "{pids:?}");
            machine.chains(1, 0);
            assert_eq!((kit::leases(), rig::netns_mounts()), (1, 1));
            pod.end();
        },
    );
}

/// The model runs ten thousand; here each end with the real thing, one after the other, and then all is as it was.
#[test]
fn crio_17_nothing_remains_after_success_failure_expiry_duplicate_or_cancel() {
    on_a_machine(
        "checklist_ends::crio_17_nothing_remains_after_success_failure_expiry_duplicate_or_cancel",
        "",
        |machine| {
            for end in ["success", "duplicate", "failure", "cancel", "expiry"] {
                let id = format!("p-{end}");
                machine.plugin.on("ADD", &[]);
                match end {
                    "success" => Pod::up(&id).end(),
                    "duplicate" => {
                        let pod = Pod::up(&id);
                        pod.probe().start(&id, BOUND).unwrap();
                        pod.end();
                    }
                    "failure" => {
                        machine.plugin.on("ADD", &[Act::AfterReal, Act::Exit(1)]);
                        let pod = Pod::create(&id);
                        pod.probe().start(&id, BOUND).unwrap_err();
                        pod.end();
                    }
                    "cancel" => {
                        let pod = machine.timed_out(&id, Delay::Plugin);
                        pod.end();
                    }
                    _ => {
                        let pod = machine.parked(&id, Delay::Plugin);
                        gone(pod.supervisor());
                    }
                }
                machine.is_clean();
                assert_eq!(
                    machine.plugin.count("ADD"),
                    machine.plugin.count("DEL"),
                    "{end}"
                );
            }
            for state in ["creating", "parked", "rolling_back"] {
                assert_eq!(
                    metric(&format!("podvisor_pods{{state=\"{state}\"}}")),
                    Some(0.0)
                );
            }
        },
    );
}

/// See `uncovered` for a deadline that has passed and a negative one.
#[test]
fn crio_18_deadline_and_disconnect_behave_alike() {
    on_a_machine(
        "checklist_ends::crio_18_deadline_and_disconnect_behave_alike",
        "",
        |machine| {
            let mut found = Vec::new();
            for hang_up in [false, true] {
                let id = format!("p{}", u8::from(hang_up));
                machine.hold(Delay::Plugin);
                let pod = Pod::create(&id);
                if hang_up {
                    pod.probe().start_and_hang_up(&id, SHORT);
                } else {
                    pod.probe().start(&id, SHORT).unwrap_err();
                }
                kit::stands_at(&pod, Delay::Plugin);
                eventually(BOUND, "nobody waits", || {
                    (info(&pod)["waiters"] == 0).then_some(())
                });
                // A watcher that leaves in either way is no lease any more.
                if hang_up {
                    pod.probe().start_and_hang_up(&id, SHORT);
                } else {
                    pod.probe().start(&id, SHORT).unwrap_err();
                }
                eventually(BOUND, "nobody waits", || {
                    (info(&pod)["waiters"] == 0).then_some(())
                });
                machine.let_go(Delay::Plugin);
                until(&pod, State::Parked);
                let record = pod.record().unwrap();
                found.push((
                    record.state,
                    record.ready_at,
                    pod.probe().start(&id, BOUND).is_ok(),
                ));
                pod.end();
            }
            assert_eq!(found[0], found[1]);
            machine.chains(2, 2);
        },
    );
}

#[test]
fn crio_19_the_error_holds_cause_stage_age_name_and_holder() {
    on_a_machine(
        "checklist_ends::crio_19_the_error_holds_cause_stage_age_name_and_holder",
        "",
        |machine| {
            machine.hold(Delay::Infra);
            let pod = Pod::create("p1");
            let told = pod.probe().start("p1", Duration::from_secs(5)).unwrap_err();
            let holder = format!("supervisor {}", pod.supervisor());
            for part in [
                "p1",
                "apps/p1/uid-p1/0",
                "stage infra",
                "after ",
                "at this stage",
                &holder,
            ] {
                says(&told, &[part]);
            }
            // How long it says is what has passed until now.
            let text = told.to_string();
            let age = text
                .split("after ")
                .nth(1)
                .and_then(|t| t.split(' ').next())
                .unwrap();
            assert!(age.parse::<f64>().unwrap() >= 4.0, "{text}");
            machine.let_go(Delay::Infra);
            until(&pod, State::Parked);
            pod.end();
        },
    );
}

#[test]
fn crio_20_waits_are_counted_by_stage_and_creations_are_gauged_with_ages() {
    on_a_machine(
        "checklist_ends::crio_20_waits_are_counted_by_stage_and_creations_are_gauged_with_ages",
        "",
        |machine| {
            for (at, times) in [(Delay::Plugin, 2), (Delay::Infra, 1)] {
                let pod = machine.timed_out(&format!("p-{}", at.stage()), at);
                machine.plugin.on("ADD", &[]);
                for _ in 0..times {
                    pod.probe().start(&pod.id, SHORT).unwrap_err();
                }
                assert_eq!(metric("podvisor_pods{state=\"creating\"}"), Some(1.0));
                assert!(metric("podvisor_pods_oldest_age_seconds{state=\"creating\"}") > Some(0.5));
                let sample = format!(
                    "podvisor_stalled_at_stage_total{{kind=\"pod\",stage=\"{}\"}}",
                    at.stage()
                );
                assert_eq!(metric(&sample), Some(f64::from(times)));
                machine.let_go(at);
                until(&pod, State::Parked);
                pod.end();
            }
        },
    );
}

#[test]
fn crio_21_one_pod_whose_reaping_is_stuck_delays_no_other() {
    on_a_machine(
        "checklist_ends::crio_21_one_pod_whose_reaping_is_stuck_delays_no_other",
        "",
        |machine| {
            let free = fake::plugin(Path::new(cni::PLUGINS), "free");
            cni::network("zz-free", vec![json!({"type": "free"})]).write();
            free.on("ADD", &[Act::Sleep(1.5)]);
            let gate = Path::new("/run/stuck").to_owned();
            machine.plugin.on("DEL", &[Act::WaitFor(gate.clone())]);
            let stuck = machine.parked("p1", Delay::Plugin);
            let (holder, watched) = (
                stuck.supervisor(),
                stuck.record().unwrap().infra.unwrap().pid,
            );
            called(&machine.plugin, "DEL", 1);
            assert!(!alive(watched), "what can be undone is");
            let other = Pod::launch("p2");
            let mut on_free = config("p2");
            on_free
                .annotations
                .insert(NETWORK_ANNOTATION.into(), "zz-free".into());
            other.probe().create("p2", &on_free).unwrap();
            other.probe().start("p2", SHORT).unwrap_err();
            until(&other, State::Parked);
            gone(other.supervisor());
            assert_eq!((free.count("ADD"), free.count("DEL")), (1, 1));
            assert!(alive(holder), "the first is still at it");
            std::fs::write(&gate, "").unwrap();
            gone(holder);
            std::fs::remove_file(Path::new(cni::CONFIGS).join("10-zz-free.conflist")).unwrap();
        },
    );
}

#[test]
fn crio_42_a_parked_pod_whose_record_cannot_be_read_is_shown_and_removed() {
    on_a_machine(
        "checklist_ends::crio_42_a_parked_pod_whose_record_cannot_be_read_is_shown_and_removed",
        "",
        |machine| {
            machine.hold(Delay::Plugin);
            podvisor(&create("1s")).code_is(125);
            machine.let_go(Delay::Plugin);
            until_listed("parked");
            let id = listed()[0]["id"].as_str().unwrap().to_owned();
            rig::kill(crate::daemon::supervisor());
            let journal = format!("/run/podvisor/default/{id}/journal.json");
            std::fs::write(&journal, "{\"version\": 1, ").unwrap();
            let shown = podvisor(&["ps", "-a"]).ok().stdout;
            assert!(
                shown.contains("unrecovered") && shown.contains("web"),
                "{shown}"
            );
            podvisor(&["rm", "web"])
                .code_is(1)
                .fails_with("podvisor rm -f web");
            podvisor(&["rm", "-f", "web"]).ok();
            machine.is_clean();
            machine.chains(1, 1);
            podvisor(&create("1m")).ok();
            podvisor(&["rm", "-f", "web"]).ok();
        },
    );
}

#[test]
fn crio_43_stop_and_remove_can_be_repeated_and_know_no_unknown_pod() {
    on_a_machine(
        "checklist_ends::crio_43_stop_and_remove_can_be_repeated_and_know_no_unknown_pod",
        "",
        |machine| {
            // A daemon's remove of something that never was.
            Bundle::new("nobody").delete();
            let pod = machine.parked("p1", Delay::Plugin);
            for _ in 0..3 {
                pod.probe().stop("p1").unwrap();
            }
            for (id, kind) in [("", Kind::Invalid), ("other", Kind::NotFound)] {
                assert_eq!(pod.probe().stop(id).unwrap_err().kind(), kind, "{id:?}");
                assert_eq!(pod.probe().shutdown(id).unwrap_err().kind(), kind, "{id:?}");
            }
            pod.probe().shutdown("p1").unwrap();
            pod.bundle.delete();
            pod.bundle.delete();
            machine.is_clean();
            machine.chains(1, 1);
        },
    );
}

#[test]
fn crio_44_a_pod_that_is_parked_rolling_back_or_failed_can_be_stopped_and_removed() {
    on_a_machine(
        "checklist_ends::crio_44_a_pod_that_is_parked_rolling_back_or_failed_can_be_stopped_and_removed",
        kit::UNDO_ON_SHUTDOWN,
        |machine| {
            for (n, state) in ["parked", "rolling_back", "not_ready", "creating"]
                .iter()
                .enumerate()
            {
                for by_stop in [true, false] {
                    let id = format!("p{n}{}", u8::from(by_stop));
                    let pod = in_state(machine, &id, state);
                    assert_eq!(info(&pod)["activity"], *state);
                    if by_stop {
                        pod.probe().stop(&id).unwrap();
                        assert_eq!(document(&pod)["state"], "stopped");
                    }
                    pod.probe().shutdown(&id).unwrap();
                    machine.is_clean();
                    assert_eq!(kit::leases(), 0);
                }
            }
            assert_eq!(machine.plugin.count("ADD"), 8);
        },
    );
}

fn in_state(machine: &kit::Machine, id: &str, state: &str) -> Pod {
    machine.plugin.on("DEL", &[]);
    match state {
        "parked" => return machine.parked(id, Delay::Plugin),
        "creating" => return machine.timed_out(id, Delay::Plugin),
        // Long enough to be met, and over while a stop waits for it.
        "rolling_back" => drop(machine.plugin.on("DEL", &[Act::Sleep(1.5)])),
        _ => {}
    }
    machine.plugin.on("ADD", &[Act::AfterReal, Act::Exit(1)]);
    let pod = Pod::create(id);
    pod.probe().start(id, BOUND).unwrap_err();
    eventually(BOUND, state, || {
        (info(&pod)["activity"] == state).then_some(())
    });
    pod
}

/// Requests that wait are answered when their pod is removed, each of them.
#[test]
fn crio_44_who_waits_for_a_pod_that_is_removed_is_told() {
    on_a_machine(
        "checklist_ends::crio_44_who_waits_for_a_pod_that_is_removed_is_told",
        "",
        |machine| {
            // The network stays with a keeper, whose plugin is still at work.
            let pod = machine.timed_out("p1", Delay::Plugin);
            let waiters: Vec<_> = (0..3).map(|_| pod.start_aside(BOUND)).collect();
            until_waiters(&pod, 3);
            pod.probe().shutdown("p1").unwrap();
            for waiter in waiters {
                let told = waiter.join().unwrap().unwrap_err();
                assert_eq!(told.kind(), Kind::Cancelled, "{told}");
            }
            machine.chains(1, 0);
            machine.let_go(Delay::Plugin);
            machine.is_clean();
            machine.chains(1, 1);
        },
    );
}
