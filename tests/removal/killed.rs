//! Pods whose supervisor was killed: `delete` as containerd calls it, and the command, leave nothing.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use podvisor::proto::task_v3::shim::DeleteResponse;
use protobuf::Message;

use crate::daemon::{ADDRESS, Bundle, raw};
use crate::rig::{self, NAMESPACE, Pod, container, kill};
use crate::support::bin::SHIM;
use crate::support::fake::Fake;
use crate::support::rootfs::Rootfs;
use crate::support::{Snapshot, podvisor, rootfs, sandboxed};

/// A pod with two running containers.
struct Busy {
    plugin: Fake,
    _rootfs: Rootfs,
    pod: Pod,
    containers: [Bundle; 2],
    /// Of the infra process and of the containers.
    pids: Vec<i32>,
}

fn busy() -> (Busy, Snapshot) {
    let (plugin, rootfs) = (rig::fake_network(), rootfs::make());
    let before = Snapshot::take();
    let pod = Pod::up("p1");
    let containers = ["c1", "c2"].map(|id| container(id, "sleep 100 & sleep 100"));
    let probe = pod.probe();
    let mut pids = vec![probe.status("p1").unwrap().1.cast_signed()];
    let run = |bundle| probe.run_task(bundle, &rootfs).cast_signed();
    pids.extend(containers.iter().map(run));
    let busy = Busy {
        plugin,
        _rootfs: rootfs,
        pod,
        containers,
        pids,
    };
    (busy, before)
}

impl Busy {
    fn assert_dead(&self) {
        self.pids.iter().for_each(|pid| rig::gone(*pid));
        assert_eq!((self.plugin.count("ADD"), self.plugin.count("DEL")), (1, 1));
    }
}

/// With containerd's arguments, in its order; `gone`: in a directory that was unlinked.
fn delete(id: &str, gone: bool) -> DeleteResponse {
    let bundle = PathBuf::from("/run/bundles").join(id);
    let inside = match gone {
        false => format!("cd {}", bundle.display()),
        true => "mkdir /run/unlinked; cd /run/unlinked; rmdir /run/unlinked".to_owned(),
    };
    let mut command = Command::new("bash");
    command.args(["-euc", &format!("{inside}; exec \"$@\""), "delete", SHIM]);
    command.args(["-namespace", NAMESPACE, "-address", ADDRESS]);
    command.args([
        "-publish-binary",
        "/usr/bin/containerd",
        "-id",
        id,
        "-bundle",
    ]);
    command.arg(&bundle).args(["-debug", "delete"]);
    DeleteResponse::parse_from_bytes(&raw(&mut command, b"")).unwrap()
}

fn deleted_after_a_kill(gone: bool) {
    let (busy, before) = busy();
    busy.pod.kill_supervisor();
    let answer = delete("p1", gone);
    assert_eq!(
        (answer.pid.cast_signed(), answer.exit_status),
        (busy.pids[0], 137)
    );
    assert!(answer.exited_at.seconds > 1_600_000_000);
    busy.assert_dead();
    for id in ["p1", "c1", "c2", "p1"] {
        // Nothing is there any more, and that is no failure.
        assert!(delete(id, gone).exited_at.seconds > 1_600_000_000);
    }
    before.assert_unchanged();
    busy.assert_dead();
}

/// FL-061: by the shim's own `delete`.
#[test]
fn delete_leaves_nothing_of_a_pod_whose_supervisor_was_killed() {
    sandboxed(
        "killed::delete_leaves_nothing_of_a_pod_whose_supervisor_was_killed",
        || deleted_after_a_kill(false),
    );
}

#[test]
fn delete_works_in_a_directory_that_was_unlinked() {
    sandboxed(
        "killed::delete_works_in_a_directory_that_was_unlinked",
        || {
            deleted_after_a_kill(true);
        },
    );
}

#[test]
fn the_command_removes_a_daemons_pod_whose_supervisor_was_killed() {
    sandboxed(
        "killed::the_command_removes_a_daemons_pod_whose_supervisor_was_killed",
        || {
            let (busy, before) = busy();
            busy.pod.kill_supervisor();
            let listed = podvisor(&["--namespace", NAMESPACE, "ps"]).ok().stdout;
            assert!(listed.contains("dead"), "{listed}");
            podvisor(&["--namespace", NAMESPACE, "rm", "-f", "p1"]).ok();
            busy.assert_dead();
            before.assert_unchanged();
        },
    );
}

#[test]
fn the_command_removes_its_own_pod_whose_supervisor_was_killed() {
    sandboxed(
        "killed::the_command_removes_its_own_pod_whose_supervisor_was_killed",
        || {
            let (plugin, rootfs) = (rig::fake_network(), rootfs::make());
            let before = Snapshot::take();
            for force in [true, false] {
                let work = ["--rootfs", rootfs.str(), "--", "/bin/sleep", "100"];
                podvisor(&[&["run", "-d", "--name", "web"], &work[..]].concat()).ok();
                let second = ["run", "-d", "--sandbox", "web", "--name", "side"];
                podvisor(&[&second[..], &work[..]].concat()).ok();
                kill(crate::daemon::supervisor());
                assert!(podvisor(&["ps"]).ok().stdout.contains("dead"));
                // It does what is left to be done; the record stays for who removes it.
                for _ in 0..2 {
                    podvisor(&["stop", "web"]).ok();
                    let listed = podvisor(&["ps", "-a"]).ok().stdout;
                    assert!(listed.contains("stopped"), "{listed}");
                }
                assert_eq!(plugin.count("ADD"), plugin.count("DEL"));
                let rm = if force {
                    &["rm", "-f", "web"][..]
                } else {
                    &["rm", "web"]
                };
                podvisor(rm).ok();
                before.assert_unchanged();
            }
            assert_eq!((plugin.count("ADD"), plugin.count("DEL")), (2, 2));
        },
    );
}

#[test]
fn a_lone_container_goes_with_delete_when_its_supervisor_was_killed() {
    sandboxed(
        "killed::a_lone_container_goes_with_delete_when_its_supervisor_was_killed",
        || {
            let rootfs = rootfs::make();
            let before = Snapshot::take();
            for (gone, command) in [(false, false), (true, false), (false, true)] {
                let _ = fs::remove_dir_all("/run/bundles");
                let lone = Pod::in_bundle(container("t1", "sleep 100 & sleep 100"));
                let pid = lone.probe().run_task(&lone.bundle, &rootfs).cast_signed();
                lone.kill_supervisor();
                if command {
                    podvisor(&["--namespace", NAMESPACE, "rm", "-f", "t1"]).ok();
                } else {
                    let answer = delete("t1", gone);
                    assert_eq!((answer.pid.cast_signed(), answer.exit_status), (pid, 137));
                }
                rig::gone(pid);
                delete("t1", gone);
                before.assert_unchanged();
            }
        },
    );
}

#[test]
fn delete_of_one_container_touches_nothing_else_of_its_pod() {
    sandboxed(
        "killed::delete_of_one_container_touches_nothing_else_of_its_pod",
        || {
            let (busy, before) = busy();
            let answer = delete("c1", false);
            assert_eq!(
                (answer.pid.cast_signed(), answer.exit_status),
                (busy.pids[1], 137)
            );
            rig::gone(busy.pids[1]);
            let probe = busy.pod.probe();
            assert_eq!(probe.task_state("c2").unwrap(), "RUNNING");
            assert!(probe.task_state("c1").is_err());
            assert_eq!(probe.status("p1").unwrap().0, "SANDBOX_READY");
            assert!(rig::alive(busy.pids[2]) && rig::alive(busy.pids[0]));
            assert_eq!(busy.plugin.count("DEL"), 0);
            // The same in a pod whose supervisor is dead.
            busy.pod.kill_supervisor();
            assert_eq!(delete(&busy.containers[1].id, false).exit_status, 137);
            rig::gone(busy.pids[2]);
            assert!(rig::alive(busy.pids[0]));
            assert_eq!(busy.plugin.count("DEL"), 0);
            delete("p1", false);
            before.assert_unchanged();
            busy.assert_dead();
        },
    );
}
