//! containerd launches the same executable: 1.6, 1.7 and 2.1, tasks and sandboxes.
#![allow(clippy::unwrap_used, clippy::expect_used)]

#[path = "launch/daemon.rs"]
mod daemon;
#[path = "containerd/restarted.rs"]
mod restarted;
mod support;
#[path = "containerd/upgraded.rs"]
mod upgraded;

use support::{Containerd, Sandboxes, Snapshot, require, rootfs, sandboxed};

const RUNTIME: &str = "io.containerd.podvisor.v1";

fn echo_under(peer: &str, name: &str) {
    let peer = peer.to_owned();
    sandboxed(name, move || {
        let Some(peer) = require::peer(&peer) else {
            return;
        };
        let (daemon, rootfs) = (Containerd::start(&peer), rootfs::make());
        let before = Snapshot::take();
        for id in ["x", "y"] {
            let run = daemon.run_once(RUNTIME, &rootfs, id, &["/bin/echo", "hi"]);
            assert_eq!(
                run.ok().stdout,
                "hi
"
            );
        }
        let run = daemon.run_once(RUNTIME, &rootfs, "z", &["/bin/sh", "-c", "exit 7"]);
        assert_eq!(run.code, Some(7));
        before.assert_unchanged();
    });
}

#[test]
fn ctr_runs_a_container_under_containerd_1_6() {
    echo_under(
        "containerd-1.6",
        "ctr_runs_a_container_under_containerd_1_6",
    );
}

#[test]
fn ctr_runs_a_container_under_containerd_1_7() {
    echo_under(
        "containerd-1.7",
        "ctr_runs_a_container_under_containerd_1_7",
    );
}

#[test]
fn ctr_runs_a_container_under_containerd_2_1() {
    echo_under(
        "containerd-2.1",
        "ctr_runs_a_container_under_containerd_2_1",
    );
}

#[test]
fn a_sandbox_made_through_grpc_takes_a_container() {
    sandboxed("a_sandbox_made_through_grpc_takes_a_container", || {
        let Some(peer) = require::peer("containerd-2.1") else {
            return;
        };
        let (daemon, rootfs) = (Containerd::start(&peer), rootfs::make());
        support::cni::bridge("grpc", "podvgrpc0", "10.98.1.0/24").write();
        let before = Snapshot::take();
        let spec = serde_json::json!({
            "ociVersion": "1.0.2",
            "hostname": "grpc",
            "linux": {"namespaces": [{"type": "network"}, {"type": "ipc"}, {"type": "uts"}, {"type": "mount"}]},
        });
        let mut sandboxes = Sandboxes::of(&daemon, "default", RUNTIME);
        sandboxes.create("p1", &spec).unwrap();
        sandboxes.start("p1").unwrap();
        println!("{:?}", sandboxes.status("p1"));
        let run = [
            "run",
            "--rm",
            "--sandbox",
            "p1",
            "--runtime",
            RUNTIME,
            "--rootfs",
            rootfs.str(),
            "c1",
            "/bin/sh",
            "-c",
            "hostname; ip -o -4 addr show eth0",
        ];
        let out = daemon.ctr(&run).ok().stdout;
        assert!(
            out.starts_with("grpc\n") && out.contains("10.98.1."),
            "{out}"
        );
        sandboxes.stop("p1", 5).unwrap();
        sandboxes.shutdown("p1").unwrap();
        sandboxes.forget("p1").unwrap();
        before.assert_unchanged();
    });
}
