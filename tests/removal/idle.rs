//! FL-051: supervisors that were started and never used.

use std::os::unix::net::UnixStream;
use std::time::Duration;

use crate::daemon::{Bundle, all_gone, shims};
use crate::rig::{self, Pod, Probe};
use crate::support::{Snapshot, rootfs, sandboxed};

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
