//! What CRI-O's suite leaves out: watchers when the result is parked, failures while watched, restarts, the order and the
//! failure of clean-up, the bound of CNI, how a caller leaves, a name that is wanted while its pod is being undone.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use podvisor::error::Kind;
use podvisor::pod::record::State;

use crate::daemon::signal;
use crate::kit::{
    self, Delay, INTERVAL, SHORT, create, document, info, listed, on_a_machine, says, until,
    until_listed, until_waiters,
};
use crate::rig::{self, BOUND, Pod, called, config, gone};
use crate::support::fake::Act;
use crate::support::{eventually, podvisor};

/// Makes DEL wait until [`go`].
fn hold_del(machine: &kit::Machine) -> PathBuf {
    let gate = PathBuf::from("/run/del-gate");
    let _ = std::fs::remove_file(&gate);
    machine.plugin.on("DEL", &[Act::WaitFor(gate.clone())]);
    gate
}

fn go(gate: &PathBuf) {
    std::fs::write(gate, "").unwrap();
}

/// R4: all who watch are told, each shortly before its own deadline, and none takes the result.
#[test]
fn watchers_of_a_result_that_is_parked_are_held_to_their_own_deadlines() {
    on_a_machine(
        "uncovered::watchers_of_a_result_that_is_parked_are_held_to_their_own_deadlines",
        "",
        |machine| {
            let pod = machine.timed_out("p1", Delay::Plugin);
            let limits = [2000, 3000, 4000].map(Duration::from_millis);
            let asked = Instant::now();
            let watchers = limits.map(|limit| pod.start_aside(limit));
            until_waiters(&pod, 3);
            machine.let_go(Delay::Plugin);
            until(&pod, State::Parked);
            for (watcher, limit) in watchers.into_iter().zip(limits) {
                let told = watcher.join().unwrap().unwrap_err();
                assert_eq!(told.kind(), Kind::Busy, "{told}");
                says(
                    &told,
                    &["it is ready, retry to take it", "apps/p1/uid-p1/0"],
                );
                assert!(asked.elapsed() >= limit - limit / 20, "told early");
                assert_eq!(document(&pod)["state"], "parked");
            }
            pod.probe().start("p1", BOUND).unwrap();
            machine.chains(1, 0);
            pod.end();
        },
    );
}

/// R3: a retry that crosses the moment of parking is told something at once or in time, and nothing is lost.
#[test]
fn a_retry_that_crosses_the_parking_is_never_forgotten() {
    on_a_machine(
        "uncovered::a_retry_that_crosses_the_parking_is_never_forgotten",
        "",
        |machine| {
            for round in 0..8 {
                let id = format!("p{round}");
                let pod = machine.timed_out(&id, Delay::Plugin);
                machine.let_go(Delay::Plugin);
                // Each a little later: before, at and after the moment.
                std::thread::sleep(Duration::from_millis(25 * round));
                match pod.probe().start(&id, Duration::from_secs(3)) {
                    Ok(_) => {}
                    Err(error) => {
                        assert_eq!(error.kind(), Kind::Busy, "{error}");
                        pod.probe().start(&id, BOUND).unwrap();
                    }
                }
                assert_eq!(pod.probe().status(&id).unwrap().0, "SANDBOX_READY");
                pod.end();
            }
            machine.chains(8, 8);
        },
    );
}

/// R5: somebody who watches is a lease; the clock of expiry begins when the last one leaves.
#[test]
fn a_watcher_keeps_the_result_and_its_grace_begins_when_it_leaves() {
    on_a_machine(
        "uncovered::a_watcher_keeps_the_result_and_its_grace_begins_when_it_leaves",
        "",
        |machine| {
            let pod = machine.timed_out("p1", Delay::Plugin);
            let limit = INTERVAL * 3;
            let watcher = pod.start_aside(limit);
            until_waiters(&pod, 1);
            machine.let_go(Delay::Plugin);
            until(&pod, State::Parked);
            let told = watcher.join().unwrap().unwrap_err();
            assert_eq!(told.kind(), Kind::Busy);
            // A whole interval is left for the next one from here; it comes after half.
            std::thread::sleep(INTERVAL / 2);
            pod.probe().start("p1", BOUND).unwrap();
            machine.chains(1, 0);
            pod.end();
        },
    );
}

/// R6: a creation that fails after the plugin's real work.
#[test]
fn who_watches_a_failure_is_told_the_cause_and_nothing_is_left() {
    on_a_machine(
        "uncovered::who_watches_a_failure_is_told_the_cause_and_nothing_is_left",
        "",
        |machine| {
            machine.hold_and_fail();
            let pod = Pod::create("p1");
            assert_eq!(
                pod.probe().start("p1", SHORT).unwrap_err().kind(),
                Kind::Deadline
            );
            let watchers: Vec<_> = (0..3).map(|_| pod.start_aside(BOUND)).collect();
            until_waiters(&pod, 3);
            let opened = Instant::now();
            machine.let_go(Delay::Plugin);
            for watcher in watchers {
                let told = watcher.join().unwrap().unwrap_err();
                assert_eq!(told.kind(), Kind::Other, "{told}");
                says(&told, &["slow-bridge", "no address is free"]);
            }
            assert!(opened.elapsed() < BOUND / 2, "held until the deadline");
            eventually(BOUND, "the lease is given back", || {
                (kit::leases() == 0).then_some(())
            });
            // The next request is a try of its own.
            eventually(BOUND, "the next try", || {
                pod.probe().start("p1", BOUND).ok()
            });
            machine.chains(2, 1);
            pod.end();
            machine.chains(2, 2);
        },
    );
}

#[test]
fn a_supervisor_killed_with_a_parked_pod_leaves_its_network_to_the_next_and_nothing_ready() {
    on_a_machine(
        "uncovered::a_supervisor_killed_with_a_parked_pod_leaves_its_network_to_the_next_and_nothing_ready",
        "",
        |machine| {
            // Its time must not be over before a slow machine comes to asking for it.
            rig::settings("[parking]\ninterval = 60.0\n");
            let pod = machine.parked("p1", Delay::Plugin);
            pod.kill_supervisor();
            let shown = podvisor(&["--namespace", rig::NAMESPACE, "ps", "-a"]).ok();
            assert!(shown.stdout.contains("dead"), "{shown:#?}");
            assert_eq!(
                document(&pod)["state"],
                "parked",
                "nobody has made it ready"
            );
            // A new supervisor of the same pod does not take it for its own before it is asked to.
            let anew = Pod::in_bundle(pod.bundle);
            anew.probe().create("p1", &config("p1")).unwrap();
            assert_eq!(anew.probe().status("p1").unwrap().0, "SANDBOX_NOTREADY");
            anew.probe().start("p1", BOUND).unwrap();
            machine.chains(1, 0);
            anew.end();
            machine.chains(1, 1);
        },
    );
}

#[test]
fn delete_undoes_a_parked_pod_whose_supervisor_was_killed() {
    on_a_machine(
        "uncovered::delete_undoes_a_parked_pod_whose_supervisor_was_killed",
        "",
        |machine| {
            let pod = machine.parked("p1", Delay::Infra);
            pod.kill_supervisor();
            pod.bundle.delete();
            machine.is_clean();
            machine.chains(1, 1);
        },
    );
}

#[test]
fn a_supervisor_that_is_terminated_undoes_its_parked_pod() {
    on_a_machine(
        "uncovered::a_supervisor_that_is_terminated_undoes_its_parked_pod",
        "",
        |machine| {
            let pod = machine.parked("p1", Delay::Plugin);
            let supervisor = pod.supervisor();
            signal(supervisor, Signal::SIGTERM);
            gone(supervisor);
            machine.is_clean();
            machine.chains(1, 1);
        },
    );
}

/// Clean-up runs newest first: infra process, cgroup, DEL, netns; each once.
#[test]
fn a_roll_back_goes_backwards_and_tells_each_step() {
    on_a_machine(
        "uncovered::a_roll_back_goes_backwards_and_tells_each_step",
        "",
        |machine| {
            let pod = Pod::launch("p1");
            let mut broken = config("p1");
            let linux = broken.linux.mut_or_insert_default();
            // Allowed by its name, and there is no such: the infra process fails after ADD.
            linux.sysctls.insert("net.ipv4.no_such".into(), "1".into());
            pod.probe().create("p1", &broken).unwrap();
            let told = pod.probe().start("p1", BOUND).unwrap_err();
            says(&told, &["no_such"]);
            eventually(BOUND, "the roll-back ends", || {
                (info(&pod)["activity"] == "not_ready").then_some(())
            });
            let events = kit::history(&document(&pod));
            let undone: Vec<&str> = events
                .iter()
                .filter(|(event, _)| event == "undo")
                .map(|(_, step)| step.as_str())
                .collect();
            assert_eq!(undone, ["infra", "cgroup", "cni-del", "netns"]);
            assert_eq!((kit::leases(), rig::netns_mounts()), (0, 0));
            machine.chains(1, 1);
            pod.end();
        },
    );
}

/// A clean-up that fails is retried, visible, and what others meet says so.
#[test]
fn a_clean_up_that_fails_is_retried_and_told_to_who_asks() {
    on_a_machine(
        "uncovered::a_clean_up_that_fails_is_retried_and_told_to_who_asks",
        "",
        |machine| {
            machine
                .plugin
                .on("ADD", &[Act::AfterReal, Act::Exit(3), Act::OnlyFirst(1)]);
            machine.plugin.on(
                "DEL",
                &[
                    Act::Stderr("not now".into()),
                    Act::Exit(5),
                    Act::OnlyFirst(2),
                ],
            );
            let pod = Pod::create("p1");
            pod.probe().start("p1", BOUND).unwrap_err();
            called(&machine.plugin, "DEL", 1);
            let told = pod.probe().start("p1", BOUND).unwrap_err();
            assert_eq!(told.kind(), Kind::Busy);
            says(&told, &["rolled back"]);
            eventually(BOUND, "the next try", || {
                pod.probe().start("p1", BOUND).ok()
            });
            machine.chains(2, 3);
            pod.end();
        },
    );
}

#[test]
fn a_parked_pod_whose_del_fails_at_expiry_is_undone_in_the_end() {
    on_a_machine(
        "uncovered::a_parked_pod_whose_del_fails_at_expiry_is_undone_in_the_end",
        "",
        |machine| {
            machine.plugin.on(
                "DEL",
                &[
                    Act::Stderr("not now".into()),
                    Act::Exit(5),
                    Act::OnlyFirst(2),
                ],
            );
            let pod = machine.parked("p1", Delay::Plugin);
            let supervisor = pod.supervisor();
            called(&machine.plugin, "DEL", 1);
            // Nobody serves any more, and the process stays for what is owed.
            gone(supervisor);
            machine.chains(1, 3);
            machine.is_clean();
        },
    );
}

/// The chain's bound is ours: who waits is told a failure and no deadline, however long its own.
#[test]
fn a_plugin_killed_at_its_bound_fails_the_creation_for_all_who_wait() {
    on_a_machine(
        "uncovered::a_plugin_killed_at_its_bound_fails_the_creation_for_all_who_wait",
        "[cni]\nadd_timeout = 2.0\n",
        |machine| {
            machine.hold(Delay::Plugin);
            let pod = Pod::create("p1");
            let first = pod.start_aside(BOUND);
            called(&machine.plugin, "ADD", 1);
            let second = pod.start_aside(BOUND);
            for waiter in [first, second] {
                let told = waiter.join().unwrap().unwrap_err();
                assert_eq!(told.kind(), Kind::Other, "{told}");
                says(&told, &["slow-bridge", "2.0 s"]);
                assert!(!told.to_string().contains("goes on"), "{told}");
            }
            pod.end();
            machine.chains(1, 1);
        },
    );
}

/// However a caller leaves, the work goes on and is parked.
#[test]
fn deadline_disconnect_and_a_deadline_that_has_passed_are_one() {
    on_a_machine(
        "uncovered::deadline_disconnect_and_a_deadline_that_has_passed_are_one",
        "",
        |machine| {
            for (n, leave) in ["deadline", "hang-up", "killed", "passed", "negative"]
                .into_iter()
                .enumerate()
            {
                let id = format!("p{n}");
                machine.hold(Delay::Plugin);
                let pod = Pod::create(&id);
                match leave {
                    "deadline" => drop(pod.probe().start(&id, SHORT).unwrap_err()),
                    "hang-up" => pod.probe().start_and_hang_up(&id, SHORT),
                    // A process that dies takes its connection along without a word.
                    "killed" => drop_raw(&pod, &id, 60_000_000_000),
                    "passed" => drop_raw(&pod, &id, 1),
                    _ => drop_raw(&pod, &id, -5_000_000_000),
                }
                kit::stands_at(&pod, Delay::Plugin);
                machine.let_go(Delay::Plugin);
                until(&pod, State::Parked);
                let pid = pod.probe().start(&id, BOUND).unwrap();
                assert_eq!(
                    pod.probe().status(&id).unwrap(),
                    ("SANDBOX_READY".into(), pid)
                );
                pod.end();
                machine.chains(n + 1, n + 1);
            }
        },
    );
}

/// A deadline that has passed takes no parked pod: its caller has left.
#[test]
fn a_deadline_that_has_passed_claims_nothing() {
    on_a_machine(
        "uncovered::a_deadline_that_has_passed_claims_nothing",
        "",
        |machine| {
            let pod = machine.parked("p1", Delay::Plugin);
            drop_raw(&pod, "p1", -1);
            assert_eq!(info(&pod)["activity"], "parked");
            pod.probe().start("p1", BOUND).unwrap();
            pod.end();
        },
    );
}

/// StartSandbox as raw bytes with this timeout; the connection is dropped when the supervisor has taken the request.
fn drop_raw(pod: &Pod, id: &str, timeout_nano: i64) {
    use std::io::{Read, Write};
    let mut stream = std::os::unix::net::UnixStream::connect(&pod.socket).unwrap();
    let start = frame("StartSandbox", id, timeout_nano, 1);
    let ping = frame("PingSandbox", id, 60_000_000_000, 3);
    stream.write_all(&[start, ping].concat()).unwrap();
    // Something comes back: both were read.
    let mut byte = [0; 1];
    stream.read_exact(&mut byte).unwrap();
    std::thread::sleep(Duration::from_millis(100));
}

/// A call of the sandbox service: length, stream, request, no flags. Every request begins with the id.
fn frame(method: &str, id: &str, timeout_nano: i64, stream: u32) -> Vec<u8> {
    use podvisor::proto::sandbox::sandbox::PingRequest;
    use protobuf::Message;
    let payload = PingRequest {
        sandbox_id: id.into(),
        ..Default::default()
    };
    let request = ttrpc::Request {
        service: "containerd.runtime.sandbox.v1.Sandbox".into(),
        method: method.into(),
        payload: payload.write_to_bytes().unwrap(),
        timeout_nano,
        ..Default::default()
    };
    let body = request.write_to_bytes().unwrap();
    let mut frame = u32::try_from(body.len()).unwrap().to_be_bytes().to_vec();
    frame.extend(stream.to_be_bytes());
    frame.extend([1, 0]);
    frame.extend(body);
    frame
}

/// R8, over ttrpc: who asks for a pod that is being undone is told so, and what it waits for.
#[test]
fn a_pod_wanted_while_it_is_reaped_is_told_so_and_made_anew_afterwards() {
    on_a_machine(
        "uncovered::a_pod_wanted_while_it_is_reaped_is_told_so_and_made_anew_afterwards",
        "",
        |machine| {
            let pod = machine.parked("p1", Delay::Plugin);
            let supervisor = pod.supervisor();
            let probe = pod.probe();
            let gate = hold_del(machine);
            called(&machine.plugin, "DEL", 1);
            for told in [
                probe.create("p1", &config("p1")).unwrap_err(),
                probe.start("p1", BOUND).unwrap_err(),
            ] {
                assert_eq!(told.kind(), Kind::Busy, "{told}");
                says(
                    &told,
                    &["being removed", "step cni-del", "apps/p1/uid-p1/0"],
                );
            }
            go(&gate);
            gone(supervisor);
            let anew = Pod::in_bundle(pod.bundle);
            kit::retry(&anew.probe(), "p1", &config("p1"), BOUND).unwrap();
            anew.end();
            machine.chains(2, 2);
        },
    );
}

/// R8, by the command: it waits for the name and makes a new pod.
#[test]
fn a_name_wanted_while_its_pod_is_reaped_is_waited_for() {
    on_a_machine(
        "uncovered::a_name_wanted_while_its_pod_is_reaped_is_waited_for",
        "",
        |machine| {
            machine.hold(Delay::Plugin);
            podvisor(&create("1s")).code_is(125);
            let gate = hold_del(machine);
            machine.let_go(Delay::Plugin);
            until_listed("parked");
            let id = listed()[0]["id"].as_str().unwrap().to_owned();
            called(&machine.plugin, "DEL", 1);
            let mut waiting = kit::create_aside("2m");
            std::thread::sleep(Duration::from_millis(700));
            assert!(waiting.try_wait().unwrap().is_none(), "it did not wait");
            go(&gate);
            let made = waiting.wait_with_output().unwrap();
            let (out, err) = (
                String::from_utf8_lossy(&made.stdout).into_owned(),
                String::from_utf8_lossy(&made.stderr).into_owned(),
            );
            assert!(made.status.success(), "{err}");
            assert!(err.contains("being removed"), "{err}");
            assert_ne!(out.trim(), id);
            podvisor(&["rm", "-f", "web"]).ok();
            machine.chains(2, 2);
        },
    );
}
