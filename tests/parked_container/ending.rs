//! Containers that nobody takes, and the ends they come to.

use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use podvisor::container::Status;
use podvisor::error::Kind;

use crate::daemon::signal;
use crate::kit::{Kit, SHORT, delete, each_runtime, kill, open, wait, with_runc};
use crate::rig::{self, BOUND, Pod, called, container, gone};
use crate::support::{Snapshot, eventually, require, rootfs, sandboxed};

const INTERVAL: Duration = Duration::from_millis(1500);
const SETTINGS: &str = "[parking]\ninterval = 1.5\n";

/// crio.md 4.1 "should clean up container after timeout if not re-requested".
#[test]
fn a_parked_container_nobody_takes_is_undone() {
    each_runtime(
        "ending::a_parked_container_nobody_takes_is_undone",
        SETTINGS,
        |kit| {
            let c1 = kit.parked("c1");
            let since = Instant::now();
            while since.elapsed() < INTERVAL - Duration::from_millis(400) {
                assert!(kit.pod.record().unwrap().containers.contains_key("c1"));
                std::thread::sleep(Duration::from_millis(20));
            }
            kit.until("c1", None);
            kit.with_pod.assert_unchanged();
            // The same request is a creation of its own.
            kit.create(&c1, BOUND).unwrap();
            assert_eq!(kit.runtime.count("CREATE"), 2);
            delete(&kit.pod.probe(), "c1").unwrap();
            kit.with_pod.assert_unchanged();
        },
    );
}

/// R5: a waiter is a lease.
#[test]
fn somebody_who_watches_keeps_a_parked_container_and_a_claim_keeps_it_for_good() {
    with_runc(
        "ending::somebody_who_watches_keeps_a_parked_container_and_a_claim_keeps_it_for_good",
        SETTINGS,
        |kit| {
            let gate = kit.closed("CREATE");
            let c1 = container("c1", "sleep 1000");
            kit.create(&c1, SHORT).unwrap_err();
            let watcher = kit.create_aside(&c1, INTERVAL * 4);
            std::thread::sleep(Duration::from_millis(300));
            open(&gate);
            assert_eq!(watcher.join().unwrap().unwrap_err().kind(), Kind::Busy);
            let pid = kit.create(&c1, BOUND).unwrap();
            std::thread::sleep(INTERVAL * 3);
            assert_eq!(kit.create(&c1, BOUND).unwrap(), pid);
            assert_eq!(kit.runtime.count("CREATE"), 1);
            delete(&kit.pod.probe(), "c1").unwrap();
        },
    );
}

#[test]
fn a_parked_container_can_be_deleted_and_killed() {
    each_runtime(
        "ending::a_parked_container_can_be_deleted_and_killed",
        "",
        |kit| {
            kit.parked("c1");
            assert_eq!(delete(&kit.pod.probe(), "c1").unwrap(), 137);
            assert_eq!(
                delete(&kit.pod.probe(), "c1").unwrap_err().kind(),
                Kind::NotFound
            );
            kit.with_pod.assert_unchanged();
            kit.parked("c2");
            kill(&kit.pod.probe(), "c2", 9).unwrap();
            kit.until("c2", None);
            kit.with_pod.assert_unchanged();
        },
    );
}

/// A daemon whose Create timed out cleans up with Delete: the runtime at work is killed, whoever watches is told.
#[test]
fn a_container_that_is_being_made_can_be_deleted() {
    each_runtime(
        "ending::a_container_that_is_being_made_can_be_deleted",
        "",
        |kit| {
            kit.closed("CREATE");
            let c1 = container("c1", "sleep 1000");
            kit.create(&c1, SHORT).unwrap_err();
            called(&kit.runtime, "CREATE", 1);
            let pid = kit.runtime.calls_of("CREATE")[0].pid;
            let watcher = kit.create_aside(&c1, BOUND);
            std::thread::sleep(Duration::from_millis(300));
            delete(&kit.pod.probe(), "c1").unwrap();
            gone(pid);
            let told = watcher.join().unwrap().unwrap_err();
            assert_eq!(told.kind(), Kind::Cancelled, "{told}");
            kit.until("c1", None);
            kit.with_pod.assert_unchanged();
            kit.runtime.on("CREATE", &[]);
            kit.create(&c1, BOUND).unwrap();
            delete(&kit.pod.probe(), "c1").unwrap();
        },
    );
}

/// What ends the pod ends what nobody has been given, too; whichever way it is ended.
fn ends_with_its_pod(name: &str, end: impl Fn(&Kit)) {
    with_runc(name, "", |kit| {
        kit.parked("c1");
        end(kit);
        kit.before.assert_unchanged();
    });
}

#[test]
fn stopping_the_pod_undoes_a_parked_container() {
    ends_with_its_pod(
        "ending::stopping_the_pod_undoes_a_parked_container",
        |kit| {
            kit.pod.probe().stop("p1").unwrap();
            kit.until("c1", None);
            kit.pod.probe().shutdown("p1").unwrap();
        },
    );
}

#[test]
fn shutting_the_pod_down_undoes_a_parked_container() {
    ends_with_its_pod(
        "ending::shutting_the_pod_down_undoes_a_parked_container",
        |kit| kit.pod.probe().shutdown("p1").unwrap(),
    );
}

#[test]
fn a_supervisor_that_is_terminated_undoes_its_parked_container() {
    ends_with_its_pod(
        "ending::a_supervisor_that_is_terminated_undoes_its_parked_container",
        |kit| signal(kit.pod.supervisor(), Signal::SIGTERM),
    );
}

#[test]
fn delete_undoes_the_parked_container_of_a_supervisor_that_was_killed() {
    ends_with_its_pod(
        "ending::delete_undoes_the_parked_container_of_a_supervisor_that_was_killed",
        |kit| {
            assert!(matches!(
                kit.pod.record().unwrap().containers["c1"].status,
                Status::Parked
            ));
            kit.pod.kill_supervisor();
            kit.pod.bundle.delete();
        },
    );
}

/// It is given as any other, and its end is told like any other's.
#[test]
fn a_parked_container_whose_init_has_died_is_given_and_has_ended() {
    with_runc(
        "ending::a_parked_container_whose_init_has_died_is_given_and_has_ended",
        "",
        |kit| {
            let c1 = kit.parked("c1");
            let init = kit.pod.record().unwrap().containers["c1"].init.unwrap();
            init.signal(9).unwrap();
            gone(init.pid);
            let pid = kit.create(&c1, BOUND).unwrap();
            assert_eq!(i32::try_from(pid).unwrap(), init.pid);
            let probe = kit.pod.probe();
            assert_eq!(wait(&probe, "c1").unwrap(), 137);
            assert_eq!(probe.task_state("c1").unwrap(), "STOPPED");
            delete(&probe, "c1").unwrap();
            kit.with_pod.assert_unchanged();
        },
    );
}

/// A supervisor that has nothing but a container nobody has been given.
fn without_a_sandbox(name: &str, settings: &str, end: impl FnOnce(&Kit)) {
    sandboxed(name, || {
        rig::settings(settings);
        let runtime = crate::kit::runtime(&require::find("runc").unwrap());
        let (rootfs, before) = (rootfs::make(), Snapshot::take());
        let pod = Pod::launch("p1");
        let with_pod = Snapshot::take();
        let kit = Kit {
            pod,
            runtime,
            rootfs,
            before,
            with_pod,
        };
        kit.parked("c1");
        end(&kit);
        kit.before.assert_unchanged();
    });
}

#[test]
fn a_supervisor_without_a_sandbox_leaves_after_the_container_nobody_took() {
    without_a_sandbox(
        "ending::a_supervisor_without_a_sandbox_leaves_after_the_container_nobody_took",
        "idle_timeout = 1.0\n[parking]\ninterval = 1.0\n",
        |kit| gone(kit.pod.supervisor()),
    );
}

/// What containerd sends after a Create that timed out.
#[test]
fn a_shutdown_of_the_task_service_takes_what_nobody_has_been_given() {
    without_a_sandbox(
        "ending::a_shutdown_of_the_task_service_takes_what_nobody_has_been_given",
        "",
        |kit| {
            let supervisor = kit.pod.supervisor();
            let request = podvisor::proto::task_v3::shim::ShutdownRequest {
                id: "c1".into(),
                ..Default::default()
            };
            let probe = kit.pod.probe();
            let tasks = probe.client.task();
            probe
                .block(tasks.shutdown(rig::limit(BOUND), &request))
                .unwrap();
            gone(supervisor);
        },
    );
}

/// `delete` for a container of a living pod touches it alone.
#[test]
fn delete_of_a_parked_container_leaves_its_pod() {
    with_runc(
        "ending::delete_of_a_parked_container_leaves_its_pod",
        "",
        |kit| {
            let c1 = kit.parked("c1");
            assert_eq!(c1.delete().exit_status, 137);
            eventually(BOUND, "it is undone", || {
                (!kit.pod.record()?.containers.contains_key("c1")).then_some(())
            });
            kit.with_pod.assert_unchanged();
            assert_eq!(kit.pod.probe().status("p1").unwrap().0, "SANDBOX_READY");
        },
    );
}
