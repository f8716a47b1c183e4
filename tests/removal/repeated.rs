//! Stop and removal said more than once, many times, and with somebody holding on to the netns.

use std::fs;
use std::path::Path;
use std::process::{Child, Command};

use podvisor::error::Kind;

use crate::rig::{self, Pod};
use crate::support::{Snapshot, podvisor, rootfs, sandboxed};

/// FL-010: by the command.
#[test]
fn stop_and_removal_can_be_said_three_times() {
    sandboxed("repeated::stop_and_removal_can_be_said_three_times", || {
        let plugin = rig::fake_network();
        let rootfs = rootfs::make();
        let before = Snapshot::take();
        let asked = ["run", "-d", "--name", "web", "--rootfs", rootfs.str()];
        podvisor(&[&asked[..], &["--", "/bin/sleep", "100"]].concat()).ok();
        for _ in 0..3 {
            podvisor(&["stop", "-t", "1", "web"]).ok();
            assert_eq!(plugin.count("DEL"), 1);
        }
        podvisor(&["rm", "web"]).ok();
        for verb in [&["rm", "web"][..], &["rm", "web"], &["stop", "web"]] {
            // Nobody is called so any more, which a person wants to know.
            podvisor(verb).code_is(1).fails_with("web");
        }
        before.assert_unchanged();
        assert_eq!((plugin.count("ADD"), plugin.count("DEL")), (1, 1));
    });
}

/// FL-010: by the calls a daemon makes.
#[test]
fn a_daemon_may_stop_and_shut_down_and_delete_three_times() {
    sandboxed(
        "repeated::a_daemon_may_stop_and_shut_down_and_delete_three_times",
        || {
            let plugin = rig::fake_network();
            let before = Snapshot::take();
            let pod = Pod::up("p1");
            let probe = pod.probe();
            for _ in 0..3 {
                probe.stop("p1").unwrap();
                assert_eq!(plugin.count("DEL"), 1);
            }
            let unknown = probe.stop("nobody").unwrap_err();
            assert_eq!(unknown.kind(), Kind::NotFound, "{unknown}");
            // All on connections that are open already: the supervisor leaves after the first.
            let probes = [pod.probe(), pod.probe(), pod.probe()];
            probes[0].shutdown("p1").unwrap();
            for late in &probes[1..] {
                if let Err(e) = late.shutdown("p1") {
                    assert_eq!(e.kind(), Kind::Gone, "{e}");
                }
            }
            for _ in 0..3 {
                pod.bundle.delete();
            }
            before.assert_unchanged();
            assert_eq!((plugin.count("ADD"), plugin.count("DEL")), (1, 1));
        },
    );
}

/// FL-043: network namespaces pile up.
#[test]
fn a_hundred_pods_leave_no_netns() {
    sandboxed("repeated::a_hundred_pods_leave_no_netns", || {
        let plugin = rig::fake_network();
        let rootfs = rootfs::make();
        let before = Snapshot::take();
        let pins = || fs::read_dir("/run/netns").unwrap().count();
        let (mounts, files) = (rig::netns_mounts(), pins());
        for n in 0..100 {
            // A container adds nothing here but time.
            if n % 5 == 0 {
                let asked = ["run", "--rm", "--rootfs", rootfs.str()];
                podvisor(&[&asked[..], &["--", "/bin/true"]].concat()).ok();
            } else {
                podvisor(&["create", "--name", "web"]).ok();
                podvisor(&["rm", "-f", "web"]).ok();
            }
            assert_eq!((rig::netns_mounts(), pins()), (mounts, files));
        }
        before.assert_unchanged();
        assert_eq!((plugin.count("ADD"), plugin.count("DEL")), (100, 100));
    });
}

/// A process with a private copy of all mounts, those of pinned namespaces among them.
struct Holder(Child);

impl Holder {
    fn start() -> Self {
        let mut unshare = Command::new("unshare");
        unshare.args(["-m", "--propagation", "private", "sleep", "600"]);
        let child = unshare.spawn().unwrap();
        let table = format!("/proc/{}/mountinfo", child.id());
        let line = format!("/proc/{}/cmdline", child.id());
        crate::support::eventually(rig::BOUND, "it holds the mounts", || {
            let sleeps = fs::read_to_string(&line).ok()?.starts_with("sleep");
            let holds = fs::read_to_string(&table).ok()?.contains(" - nsfs ");
            (sleeps && holds).then_some(())
        });
        Self(child)
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// FL-044: the pin of the netns leaked into another mount namespace.
#[test]
fn a_netns_that_another_mount_namespace_holds_stops_nobody() {
    sandboxed(
        "repeated::a_netns_that_another_mount_namespace_holds_stops_nobody",
        || {
            let plugin = rig::fake_network();
            let rootfs = rootfs::make();
            let before = Snapshot::take();
            let run = ["run", "-d", "--name", "web", "--rootfs", rootfs.str()];
            for _ in 0..2 {
                podvisor(&[&run[..], &["--", "/bin/sleep", "100"]].concat()).ok();
                let _holder = Holder::start();
                let add = plugin.calls_of("ADD").pop().unwrap();
                podvisor(&["inspect", "web"]).ok();
                podvisor(&["stop", "-t", "1", "web"]).ok();
                podvisor(&["inspect", "web"]).ok();
                assert!(!Path::new(add.var("CNI_NETNS")).exists());
                podvisor(&["rm", "web"]).ok();
                assert_eq!(rig::netns_mounts(), 0);
            }
            before.assert_unchanged();
            assert_eq!((plugin.count("ADD"), plugin.count("DEL")), (2, 2));
        },
    );
}
