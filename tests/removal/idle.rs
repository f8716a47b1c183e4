//! FL-051: supervisors that were started and never used.

use std::os::unix::net::UnixStream;
use std::time::Duration;

use crate::daemon::{Bundle, all_gone, shims};
use crate::rig::{self, Pod, Probe};
use crate::support::bin::PODVISOR;
use crate::support::{Snapshot, eventually, podvisor, rootfs, sandboxed};

#[test]
fn a_supervisor_that_is_never_used_leaves_by_itself() {
    sandboxed(
        "idle::a_supervisor_that_is_never_used_leaves_by_itself",
        || {
            rig::settings("idle_timeout = 1.5\n");
            let before = Snapshot::take();
            let bundles = [Bundle::new("a"), Bundle::new("b").daemon("2.1.1")];
            for bundle in &bundles {
                bundle.start().ok();
            }
            assert_eq!(shims().len(), 2);
            all_gone();
            before.assert_unchanged();
            for bundle in &bundles {
                bundle.delete();
            }
            before.assert_unchanged();
        },
    );
}

#[test]
fn a_supervisor_whose_daemon_hung_up_leaves_by_itself() {
    sandboxed(
        "idle::a_supervisor_whose_daemon_hung_up_leaves_by_itself",
        || {
            rig::settings("idle_timeout = 1.0\n");
            let before = Snapshot::take();
            let pod = Pod::launch("p1");
            let connected = UnixStream::connect(&pod.socket).unwrap();
            // Somebody who is connected may still come with something.
            std::thread::sleep(Duration::from_millis(2500));
            assert_eq!(shims().len(), 1);
            drop(connected);
            all_gone();
            before.assert_unchanged();
        },
    );
}

#[test]
fn a_supervisor_that_has_something_stays_without_a_connection() {
    sandboxed(
        "idle::a_supervisor_that_has_something_stays_without_a_connection",
        || {
            rig::settings("idle_timeout = 0.5\n");
            let (plugin, rootfs) = (rig::fake_network(), rootfs::make());
            let before = Snapshot::take();
            let pod = Pod::create("p1");
            let lone = Pod::in_bundle(rig::container("t1", "sleep 100"));
            lone.probe().run_task(&lone.bundle, &rootfs);
            std::thread::sleep(Duration::from_secs(3));
            assert_eq!(shims().len(), 2);
            assert_eq!(pod.probe().status("p1").unwrap().0, "SANDBOX_NOTREADY");
            let state = Probe::connect(&lone.socket).task_state("t1").unwrap();
            assert_eq!(state, "RUNNING");
            pod.end();
            lone.bundle.delete();
            before.assert_unchanged();
            assert_eq!(plugin.calls().len(), 0);
        },
    );
}

/// A pod without a daemon, as the command makes it.
fn daemonless(id: &str) -> Pod {
    let mut bundle = Bundle::new(id);
    bundle.address = false;
    Pod::in_bundle(bundle)
}

#[test]
fn a_pod_that_was_created_without_a_daemon_and_never_started_is_undone() {
    sandboxed(
        "idle::a_pod_that_was_created_without_a_daemon_and_never_started_is_undone",
        || {
            rig::settings("idle_timeout = 1.0\n");
            let plugin = rig::fake_network();
            let before = Snapshot::take();
            let pod = daemonless("p1");
            let probe = pod.probe();
            probe.create("p1", &rig::config("p1")).unwrap();
            // Somebody who is connected may still start it.
            std::thread::sleep(Duration::from_millis(2500));
            assert_eq!(probe.status("p1").unwrap().0, "SANDBOX_NOTREADY");
            drop(probe);
            all_gone();
            before.assert_unchanged();
            // One that is started is a pod like any other.
            let pod = daemonless("p2");
            pod.probe().create("p2", &rig::config("p2")).unwrap();
            pod.probe().start("p2", rig::BOUND).unwrap();
            std::thread::sleep(Duration::from_millis(2500));
            assert_eq!(pod.probe().status("p2").unwrap().0, "SANDBOX_READY");
            pod.end();
            before.assert_unchanged();
            assert_eq!((plugin.count("ADD"), plugin.count("DEL")), (1, 1));
        },
    );
}

/// The command is killed between CreateSandbox and StartSandbox: nothing of the pod stays, its name neither.
#[cfg(feature = "failpoint")]
#[test]
fn a_pod_whose_command_was_killed_before_its_start_goes_with_its_name() {
    sandboxed(
        "idle::a_pod_whose_command_was_killed_before_its_start_goes_with_its_name",
        || {
            rig::settings("idle_timeout = 1.0\n");
            let plugin = rig::fake_network();
            let before = Snapshot::take();
            let mut create = std::process::Command::new(PODVISOR);
            create.args(["create", "--name", "web"]);
            create.env("PODVISOR_FAULT", "cli.create.after=1*die");
            let killed = crate::support::run(&mut create, rig::BOUND);
            assert_eq!(killed.signal, Some(9), "{killed:#?}");
            let listed = podvisor(&["ps", "-a"]).ok().stdout;
            assert!(listed.contains("created"), "{listed}");
            eventually(rig::BOUND, "it goes by itself", || {
                let listed = podvisor(&["ps", "-aq"]).ok().stdout;
                listed.is_empty().then_some(())
            });
            all_gone();
            before.assert_unchanged();
            assert_eq!(plugin.calls().len(), 0);
        },
    );
}
