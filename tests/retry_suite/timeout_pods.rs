//! CRI-O's time-out suite for pods, over ttrpc: each row with a plugin and with an infra process that take their time.

use std::time::Instant;

use podvisor::error::Kind;
use podvisor::pod::record::State;

use crate::kit::{self, Delay, SHORT, info, metric, on_a_machine, says, until};
use crate::rig::{self, BOUND, Pod, alive, config, container, gone};
use crate::support::{podvisor, rootfs};

/// "should not clean up pod after timeout".
fn kept_and_taken(name: &str, at: Delay) {
    on_a_machine(name, "", |machine| {
        let pod = machine.parked("p1", at);
        assert_eq!(pod.probe().status("p1").unwrap().0, "SANDBOX_NOTREADY");
        let infra = pod.record().unwrap().infra.unwrap().pid;
        let pid = kit::retry(&pod.probe(), "p1", &config("p1"), BOUND).unwrap();
        assert_eq!(pid, u32::try_from(infra).unwrap());
        assert_eq!(
            pod.probe().status("p1").unwrap(),
            ("SANDBOX_READY".into(), pid)
        );
        machine.chains(1, 0);
        pod.end();
        machine.chains(1, 1);
    });
}

/// "emit metric when sandbox is re-requested".
fn counted_when_asked_again(name: &str, at: Delay) {
    on_a_machine(name, "", |machine| {
        let pod = machine.timed_out("p1", at);
        let sample = format!(
            "podvisor_stalled_at_stage_total{{kind=\"pod\",stage=\"{}\"}}",
            at.stage()
        );
        assert_eq!(metric(&sample), None, "who began it does not stall");
        for times in 1..=2 {
            let told = kit::retry(&pod.probe(), "p1", &config("p1"), SHORT).unwrap_err();
            assert_eq!(told.kind(), Kind::Deadline);
            assert_eq!(metric(&sample), Some(f64::from(times)));
        }
        machine.let_go(at);
        until(&pod, State::Parked);
        pod.end();
        // It outlives the supervisor that counted.
        gone_with(&pod);
        assert_eq!(metric(&sample), Some(2.0));
    });
}

/// "should clean up pod after timeout if request changes".
fn another_attempt_is_another_pod(name: &str, at: Delay) {
    on_a_machine(name, "", |machine| {
        let pod = machine.parked("p1", at);
        let supervisor = pod.supervisor();
        let other = Pod::launch("p1-again");
        let mut changed = config("p1");
        changed.metadata.mut_or_insert_default().attempt = 2;
        let pid = kit::retry(&other.probe(), "p1-again", &changed, BOUND).unwrap();
        assert!(alive(i32::try_from(pid).unwrap()));
        assert_eq!(kit::leases(), 2, "both are accounted for");
        gone(supervisor);
        assert!(pod.record().is_none());
        assert_eq!(kit::leases(), 1);
        assert_eq!(other.probe().status("p1-again").unwrap().0, "SANDBOX_READY");
        other.end();
        machine.chains(2, 2);
    });
}

/// "should clean up pod after timeout if not re-requested".
fn expires_and_can_be_made_anew(name: &str, at: Delay) {
    on_a_machine(name, "", |machine| {
        let pod = machine.parked("p1", at);
        let (supervisor, infra) = (pod.supervisor(), pod.record().unwrap().infra.unwrap().pid);
        gone(supervisor);
        assert!(!alive(infra));
        machine.is_clean();
        machine.chains(1, 1);
        let anew = Pod::in_bundle(pod.bundle);
        kit::retry(&anew.probe(), "p1", &config("p1"), BOUND).unwrap();
        anew.end();
        machine.chains(2, 2);
    });
}

/// "should not be able to operate on a timed out pod", but that it can be removed.
fn refuses_work(name: &str, at: Delay) {
    on_a_machine(name, "", |machine| {
        let rootfs = rootfs::make();
        let pod = machine.parked("p1", at);
        let refused = pod
            .probe()
            .create_task(&container("c1", "sleep 100"), &rootfs)
            .unwrap_err();
        assert_eq!(refused.kind(), Kind::State);
        says(&refused, &["parked"]);
        let execed = pod.probe().start_task("c1").unwrap_err();
        assert_eq!(execed.kind(), Kind::NotFound);
        assert_eq!(pod.probe().status("p1").unwrap().0, "SANDBOX_NOTREADY");
        assert_eq!(info(&pod)["activity"], "parked");
        let shown = podvisor(&["--namespace", rig::NAMESPACE, "ps", "-a"]);
        assert!(shown.ok().stdout.contains("parked"));
        pod.probe().stop("p1").unwrap();
        assert_eq!(kit::leases(), 0);
        pod.probe().shutdown("p1").unwrap();
        machine.chains(1, 1);
    });
}

fn gone_with(pod: &Pod) {
    crate::support::eventually(BOUND, "the pod is gone", || {
        (!pod.dir().exists()).then_some(())
    });
}

macro_rules! rows {
    ($($body:ident: $plugin:ident, $infra:ident;)*) => {$(
        #[test]
        fn $plugin() {
            $body(concat!("timeout_pods::", stringify!($plugin)), Delay::Plugin);
        }

        #[test]
        fn $infra() {
            $body(concat!("timeout_pods::", stringify!($infra)), Delay::Infra);
        }
    )*};
}

rows! {
    kept_and_taken: a_timed_out_pod_is_kept_and_taken_plugin, a_timed_out_pod_is_kept_and_taken_infra;
    counted_when_asked_again: a_pod_asked_for_again_is_counted_plugin, a_pod_asked_for_again_is_counted_infra;
    another_attempt_is_another_pod: another_attempt_is_another_pod_plugin, another_attempt_is_another_pod_infra;
    expires_and_can_be_made_anew: a_pod_not_asked_for_again_expires_plugin, a_pod_not_asked_for_again_expires_infra;
    refuses_work: a_timed_out_pod_refuses_work_plugin, a_timed_out_pod_refuses_work_infra;
}

/// "should not wait for actual duplicate pod request".
#[test]
fn a_duplicate_of_a_live_pod_does_not_wait() {
    on_a_machine(
        "timeout_pods::a_duplicate_of_a_live_pod_does_not_wait",
        "",
        |machine| {
            let pod = Pod::up("p1");
            let pid = pod.probe().status("p1").unwrap().1;
            let asked = Instant::now();
            let again = kit::retry(&pod.probe(), "p1", &config("p1"), BOUND).unwrap();
            assert_eq!(again, pid);
            // It did not wait for anything that has to do with time.
            assert!(asked.elapsed() < BOUND / 2);
            assert!(
                metric("podvisor_stalled_at_stage_total{kind=\"pod\",stage=\"ready\"}").is_none()
            );
            machine.chains(1, 0);
            pod.end();
        },
    );
}
