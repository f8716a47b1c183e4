//! CRI-O's time-out suite for pods, by the command.

use crate::kit::{self, Delay, create, inspect, listed, metric, on_a_machine, until_listed};
use crate::rig::BOUND;
use crate::support::{eventually, podvisor, rootfs};

/// A `podvisor create` that ran out of patience at this delay; the pod's id.
fn timed_out(machine: &kit::Machine, at: Delay) -> String {
    machine.hold(at);
    let told = podvisor(&create(at.patience())).code_is(125);
    for part in [
        &format!("still at stage {}", at.stage())[..],
        "in supervisor ",
        "the work goes on",
        "--name web",
        "podvisor rm -f web",
    ] {
        assert!(told.stderr.contains(part), "{part} in {told:#?}");
    }
    listed()[0]["id"].as_str().unwrap().to_owned()
}

fn parked(machine: &kit::Machine, at: Delay) -> String {
    let id = timed_out(machine, at);
    machine.let_go(at);
    until_listed("parked");
    id
}

fn kept_and_taken(name: &str, at: Delay) {
    on_a_machine(name, "", |machine| {
        let id = parked(machine, at);
        let taken = podvisor(&create("1m")).ok();
        assert_eq!(taken.stdout.trim(), id);
        assert_eq!(listed()[0]["state"], "ready");
        machine.chains(1, 0);
        podvisor(&["rm", "-f", "web"]).ok();
        machine.chains(1, 1);
    });
}

#[test]
fn a_timed_out_pod_is_kept_and_taken_plugin() {
    let name = "timeout_command::a_timed_out_pod_is_kept_and_taken_plugin";
    kept_and_taken(name, Delay::Plugin);
}

#[test]
fn a_timed_out_pod_is_kept_and_taken_infra() {
    let name = "timeout_command::a_timed_out_pod_is_kept_and_taken_infra";
    kept_and_taken(name, Delay::Infra);
}

#[test]
fn a_pod_asked_for_again_is_counted() {
    on_a_machine(
        "timeout_command::a_pod_asked_for_again_is_counted",
        "",
        |machine| {
            timed_out(machine, Delay::Plugin);
            podvisor(&create("1s")).code_is(125);
            let sample = "podvisor_stalled_at_stage_total{kind=\"pod\",stage=\"cni-add\"}";
            assert!(metric(sample).is_some_and(|count| count >= 1.0));
            machine.let_go(Delay::Plugin);
            podvisor(&["rm", "-f", "web"]).ok();
            assert!(metric(sample).is_some());
        },
    );
}

/// Another name is another pod, as another attempt is for a daemon.
#[test]
fn another_request_is_another_pod_and_the_first_expires() {
    on_a_machine(
        "timeout_command::another_request_is_another_pod_and_the_first_expires",
        "",
        |machine| {
            let id = parked(machine, Delay::Plugin);
            // The same name with other wishes is refused, by both digests.
            let other = [&create("1m")[..], &["--net", "none"]].concat();
            let refused = podvisor(&other).code_is(125);
            assert_eq!(
                refused.stderr.matches("request ").count(),
                2,
                "{refused:#?}"
            );
            let made = podvisor(&["create", "--name", "web2"]).ok();
            assert_ne!(made.stdout.trim(), id);
            eventually(BOUND, "the first expires", || {
                (listed().as_array().unwrap().len() == 1).then_some(())
            });
            assert_eq!(listed()[0]["name"], "web2");
            podvisor(&["rm", "-f", "web2"]).ok();
            machine.chains(2, 2);
        },
    );
}

#[test]
fn a_pod_not_asked_for_again_expires_and_its_name_is_free() {
    on_a_machine(
        "timeout_command::a_pod_not_asked_for_again_expires_and_its_name_is_free",
        "",
        |machine| {
            let id = parked(machine, Delay::Plugin);
            eventually(BOUND, "it expires", || {
                listed().as_array().unwrap().is_empty().then_some(())
            });
            machine.is_clean();
            machine.chains(1, 1);
            assert_eq!(
                metric("podvisor_unparked_total{kind=\"pod\",reason=\"expired\"}"),
                Some(1.0)
            );
            let anew = podvisor(&create("1m")).ok();
            assert_ne!(anew.stdout.trim(), id);
            podvisor(&["rm", "-f", "web"]).ok();
            machine.chains(2, 2);
        },
    );
}

#[test]
fn a_live_pods_name_is_taken_at_once() {
    on_a_machine(
        "timeout_command::a_live_pods_name_is_taken_at_once",
        "",
        |machine| {
            podvisor(&create("1m")).ok();
            podvisor(&create("5m"))
                .code_is(125)
                .fails_with("podvisor rm -f web");
            machine.chains(1, 0);
            podvisor(&["rm", "-f", "web"]).ok();
        },
    );
}

#[test]
fn a_timed_out_pod_refuses_work_and_can_be_removed() {
    on_a_machine(
        "timeout_command::a_timed_out_pod_refuses_work_and_can_be_removed",
        "",
        |machine| {
            let rootfs = rootfs::make();
            parked(machine, Delay::Plugin);
            let pod = inspect("web");
            assert_eq!(pod["status"]["state"], "parked");
            assert!(pod["status"]["activity_seconds"].as_f64().unwrap() > 0.0);
            let add = [
                "run",
                "--sandbox",
                "web",
                "--rootfs",
                rootfs.str(),
                "--",
                "true",
            ];
            podvisor(&add).code_is(1).fails_with("not ready");
            podvisor(&["exec", "web", "--", "true"]).code_is(1);
            podvisor(&["rm", "web"]).code_is(1);
            podvisor(&["stop", "-t", "1", "web"]).ok();
            assert_eq!(kit::leases(), 0);
            podvisor(&["rm", "web"]).ok();
            machine.chains(1, 1);
        },
    );
}
