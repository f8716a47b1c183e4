//! containerd, whose client gives up while the OCI runtime works.

use std::time::Duration;

use crate::kit::{open, runtime};
use crate::rig::called;
use crate::support::fake::Act;
use crate::support::{Containerd, Snapshot, require, rootfs, run, sandboxed};

/// `ctr run` times out in Task.Create or Task.Start; what the daemon sends then, and the removal, leave nothing.
fn gives_up(peer: &str, verb: &str, name: &str) {
    sandboxed(name, || {
        let Some(peer) = require::peer(peer) else {
            return;
        };
        let (daemon, rootfs) = (Containerd::start(&peer), rootfs::make());
        let slow = runtime(&require::find("runc").unwrap());
        let named = format!("BinaryName = \"{}\"\n", slow.path.display());
        std::fs::write("/run/options.toml", named).unwrap();
        let run_as = |id: &str, timeout: &str| {
            let mut command = daemon.ctr_command();
            command.args(["--timeout", timeout, "run", "-d"]);
            command.args(["--runtime", "io.containerd.podvisor.v1"]);
            command.args(["--runtime-config-path", "/run/options.toml"]);
            command.args(["--rootfs", rootfs.str(), id, "/bin/sleep", "1000"]);
            run(&mut command, Duration::from_secs(120))
        };
        let remove = |id: &str| {
            // Whatever was left of it; a task that never came to be is none.
            let _ = daemon.ctr(&["task", "rm", "-f", id]);
            daemon.ctr(&["container", "rm", id]);
        };
        let before = Snapshot::take();
        let gate = std::path::PathBuf::from("/run/gate");
        slow.on(verb, &[Act::WaitFor(gate.clone())]);
        let told = run_as("x", "3s").fails_with("");
        println!("{told:?}");
        called(&slow, verb, 1);
        open(&gate);
        remove("x");
        before.assert_unchanged();
        // The id is free.
        run_as("x", "60s").ok();
        remove("x");
        before.assert_unchanged();
        // And once more with the runtime still at work while it is removed.
        std::fs::remove_file(&gate).unwrap();
        run_as("y", "3s").fails_with("");
        remove("y");
        open(&gate);
        before.assert_unchanged();
    });
}

#[test]
fn ctr_gives_up_a_create_under_containerd_1_6() {
    gives_up(
        "containerd-1.6",
        "CREATE",
        "daemons::ctr_gives_up_a_create_under_containerd_1_6",
    );
}

#[test]
fn ctr_gives_up_a_create_under_containerd_2_1() {
    gives_up(
        "containerd-2.1",
        "CREATE",
        "daemons::ctr_gives_up_a_create_under_containerd_2_1",
    );
}

#[test]
fn ctr_gives_up_a_start_under_containerd_1_6() {
    gives_up(
        "containerd-1.6",
        "START",
        "daemons::ctr_gives_up_a_start_under_containerd_1_6",
    );
}

#[test]
fn ctr_gives_up_a_start_under_containerd_2_1() {
    gives_up(
        "containerd-2.1",
        "START",
        "daemons::ctr_gives_up_a_start_under_containerd_2_1",
    );
}
