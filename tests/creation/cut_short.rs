//! Creations that are ended while a plugin hangs in ADD: on request, by a signal, or with their supervisor.

use std::time::Duration;

use nix::sys::signal::Signal;
use podvisor::error::Kind;

use crate::daemon::signal;
use crate::rig::{self, BOUND, Pod, called, gone, kill};
use crate::support::fake::{Act, Fake};
use crate::support::{Snapshot, podvisor, sandboxed};

/// A pod whose ADD does not end, not even for SIGTERM, and the plugin's pid.
fn hanging(id: &str) -> (Fake, Snapshot, Pod, i32) {
    // A shutdown undoes the network, too; that it stays for the pod's next supervisor is `tests/handover.rs`.
    rig::settings("[parking]\npark_network_on_shutdown = false\n");
    let plugin = rig::fake_network();
    plugin.on("ADD", &[Act::IgnoreTerm, Act::Sleep(300.0)]);
    let before = Snapshot::take();
    let pod = Pod::create(id);
    let error = pod
        .probe()
        .start(id, Duration::from_millis(500))
        .unwrap_err();
    assert_eq!(error.kind(), Kind::Deadline);
    called(&plugin, "ADD", 1);
    let pid = plugin.calls_of("ADD")[0].pid;
    (plugin, before, pod, pid)
}

fn one_add_one_del(plugin: &Fake) {
    let add = plugin.calls_of("ADD");
    let del = plugin.calls_of("DEL");
    assert_eq!((add.len(), del.len()), (1, 1));
    for name in ["CNI_CONTAINERID", "CNI_NETNS", "CNI_IFNAME", "CNI_ARGS"] {
        assert_eq!(add[0].var(name), del[0].var(name), "{name}");
    }
}

#[test]
fn stopping_a_pod_that_is_being_made_kills_the_plugin_and_undoes_it() {
    sandboxed(
        "cut_short::stopping_a_pod_that_is_being_made_kills_the_plugin_and_undoes_it",
        || {
            let (plugin, before, pod, pid) = hanging("p1");
            let watcher = pod.start_aside(BOUND);
            std::thread::sleep(Duration::from_millis(200));
            pod.probe().stop("p1").unwrap();
            gone(pid);
            let told = watcher.join().unwrap().unwrap_err();
            assert_eq!(told.kind(), Kind::Cancelled, "{told}");
            one_add_one_del(&plugin);
            assert_eq!(rig::netns_mounts(), 0);
            assert_eq!(pod.probe().status("p1").unwrap().0, "SANDBOX_NOTREADY");
            let again = pod.probe().start("p1", BOUND).unwrap_err();
            assert_eq!(again.kind(), Kind::State, "{again}");
            pod.probe().stop("p1").unwrap();
            pod.probe().shutdown("p1").unwrap();
            before.assert_unchanged();
            one_add_one_del(&plugin);
        },
    );
}

#[test]
fn shutting_down_a_pod_that_is_being_made_kills_the_plugin_and_undoes_it() {
    sandboxed(
        "cut_short::shutting_down_a_pod_that_is_being_made_kills_the_plugin_and_undoes_it",
        || {
            let (plugin, before, pod, pid) = hanging("p1");
            let watcher = pod.start_aside(BOUND);
            std::thread::sleep(Duration::from_millis(200));
            pod.probe().shutdown("p1").unwrap();
            gone(pid);
            assert!(watcher.join().unwrap().is_err());
            before.assert_unchanged();
            one_add_one_del(&plugin);
        },
    );
}

#[test]
fn a_supervisor_that_is_terminated_undoes_what_it_was_making() {
    sandboxed(
        "cut_short::a_supervisor_that_is_terminated_undoes_what_it_was_making",
        || {
            let (plugin, before, pod, pid) = hanging("p1");
            let supervisor = pod.supervisor();
            signal(supervisor, Signal::SIGTERM);
            gone(pid);
            gone(supervisor);
            before.assert_unchanged();
            one_add_one_del(&plugin);
        },
    );
}

#[test]
fn delete_undoes_what_a_killed_supervisor_was_making() {
    sandboxed(
        "cut_short::delete_undoes_what_a_killed_supervisor_was_making",
        || {
            let (plugin, before, pod, pid) = hanging("p1");
            pod.kill_supervisor();
            gone(pid);
            pod.bundle.delete();
            pod.bundle.delete();
            before.assert_unchanged();
            one_add_one_del(&plugin);
        },
    );
}

#[test]
fn delete_undoes_what_a_live_supervisor_is_making() {
    sandboxed(
        "cut_short::delete_undoes_what_a_live_supervisor_is_making",
        || {
            let (plugin, before, pod, pid) = hanging("p1");
            pod.bundle.delete();
            gone(pid);
            before.assert_unchanged();
            one_add_one_del(&plugin);
        },
    );
}

#[test]
fn a_new_pod_of_the_same_id_undoes_what_a_killed_supervisor_was_making() {
    sandboxed(
        "cut_short::a_new_pod_of_the_same_id_undoes_what_a_killed_supervisor_was_making",
        || {
            let (plugin, before, pod, pid) = hanging("p1");
            let old = pod.supervisor();
            kill(old);
            gone(pid);
            let pod = Pod::in_bundle(pod.bundle);
            pod.probe().create("p1", &rig::config("p1")).unwrap();
            one_add_one_del(&plugin);
            assert_ne!(pod.supervisor(), old);
            plugin.on("ADD", &[]);
            pod.probe().start("p1", BOUND).unwrap();
            assert_eq!((plugin.count("ADD"), plugin.count("DEL")), (2, 1));
            pod.end();
            before.assert_unchanged();
            assert_eq!((plugin.count("ADD"), plugin.count("DEL")), (2, 2));
        },
    );
}

#[test]
fn a_stop_that_meets_a_roll_back_lets_its_del_end() {
    sandboxed(
        "cut_short::a_stop_that_meets_a_roll_back_lets_its_del_end",
        || {
            let plugin = rig::fake_network();
            plugin.on("ADD", &[Act::Exit(1)]);
            plugin.on("DEL", &[Act::Sleep(1.5)]);
            let before = Snapshot::take();
            let pod = Pod::create("p1");
            pod.probe().start("p1", BOUND).unwrap_err();
            called(&plugin, "DEL", 1);
            pod.end();
            before.assert_unchanged();
            one_add_one_del(&plugin);
            assert_eq!(plugin.calls_of("DEL")[0].end.as_deref(), Some("0"));
        },
    );
}

#[test]
fn a_command_that_is_killed_leaves_a_creation_that_can_be_removed() {
    sandboxed(
        "cut_short::a_command_that_is_killed_leaves_a_creation_that_can_be_removed",
        || {
            let plugin = rig::fake_network();
            plugin.on("ADD", &[Act::IgnoreTerm, Act::Sleep(300.0)]);
            let before = Snapshot::take();
            let mut command = std::process::Command::new(crate::support::bin::PODVISOR)
                .args(["create", "--name", "web"])
                .spawn()
                .unwrap();
            called(&plugin, "ADD", 1);
            command.kill().unwrap();
            command.wait().unwrap();
            podvisor(&["rm", "-f", "web"]).ok();
            before.assert_unchanged();
            one_add_one_del(&plugin);
        },
    );
}
