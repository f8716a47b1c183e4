//! `delete` where something is left: containers of a living supervisor, and of one that was killed.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "tests panic where they cannot go on"
)]

#[path = "launch/daemon.rs"]
mod daemon;
#[path = "launch/group.rs"]
mod group;
mod support;

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use podvisor::cgroup::{self, Layout};
use podvisor::client::{self, Client};
use podvisor::proto::sandbox::sandbox::{CreateSandboxRequest, StartSandboxRequest};
use podvisor::proto::task_v3::shim::ConnectRequest;
use podvisor::proto::types::task::Status;
use serde_json::json;
use support::fake::{self, Act};
use support::{Snapshot, cni, eventually, sandboxed};

use daemon::{Bundle, all_gone, shims, signal, supervisor};
use group::{Group, sleeps};

#[test]
fn a_containers_id_touches_that_container_only() {
    const NAME: &str = "a_containers_id_touches_that_container_only";
    sandboxed(NAME, || {
        let group = Group::new(NAME);
        let pid = supervisor();
        let (_, c1) = group.state("c1").unwrap();
        let answer = group.bundle("c1").delete();
        assert_eq!((answer.pid, answer.exit_status), (c1, 137));
        assert_eq!(group.state("c1"), None);
        for id in ["pod", "c2"] {
            assert_eq!(group.state(id).unwrap().0, Status::RUNNING, "{id}");
        }
        assert_eq!((supervisor(), sleeps()), (pid, 2));
        // Again: there is nothing left to do.
        group.bundle("c1").delete();
        group.bundle("c2").delete();
        // With the last container, which bears the group's name, the supervisor goes too.
        group.bundle("pod").delete();
        all_gone();
        assert_eq!(sleeps(), 0);
    });
}

#[test]
fn a_killed_supervisors_group_is_undone_from_its_record() {
    const NAME: &str = "a_killed_supervisors_group_is_undone_from_its_record";
    sandboxed(NAME, || {
        // The containers' parent is the test's; the OCI runtime would make it, and nobody's undo may take it.
        let layout = Layout::detect().unwrap();
        let parent = cgroup::Group::new(
            &layout,
            &format!("/{}", support::sandbox::cgroup_name(NAME)),
        )
        .unwrap();
        parent.create().unwrap();
        let before = Snapshot::take();
        let group = Group::new(NAME);
        signal(supervisor(), Signal::SIGKILL);
        eventually(Duration::from_secs(10), "it dies", || {
            shims().is_empty().then_some(())
        });
        assert_eq!(sleeps(), 3);
        // A container first: only that one.
        group.bundle("c1").delete();
        assert_eq!(sleeps(), 2);
        assert_eq!(group.bundle("pod").delete().exit_status, 137);
        eventually(Duration::from_secs(10), "everything ends", || {
            (sleeps() == 0).then_some(())
        });
        all_gone();
        group.bundle("pod").delete();
        drop(group);
        fs::remove_dir_all("/run/bundles").unwrap();
        before.assert_unchanged();
    });
}

#[test]
fn a_supervisor_that_hangs_does_not_hold_delete_up() {
    const NAME: &str = "a_supervisor_that_hangs_does_not_hold_delete_up";
    sandboxed(NAME, || {
        let group = Group::new(NAME);
        let pid = supervisor();
        signal(pid, Signal::SIGSTOP);
        let begun = Instant::now();
        group.bundle("pod").delete();
        assert!(
            begun.elapsed() < Duration::from_secs(5),
            "{:?}",
            begun.elapsed()
        );
        // It may be at work: a group of containers is not killed for being slow.
        signal(pid, Signal::SIGCONT);
        let connect = group.runtime.block_on(async {
            let client = Client::connect(&group.address).await.unwrap();
            let request = ConnectRequest {
                id: "c2".into(),
                ..Default::default()
            };
            client
                .task()
                .connect(client::context(Some(Duration::from_secs(10))), &request)
                .await
        });
        assert!(connect.is_ok());
        for id in ["c1", "c2", "pod"] {
            group.bundle(id).delete();
        }
        all_gone();
    });
}

/// A sandbox with a network of ours, from a plugin that behaves as told.
async fn start_sandbox(address: &str) {
    let client = Client::connect(address).await.unwrap();
    let limit = || client::context(Some(Duration::from_secs(60)));
    let create = CreateSandboxRequest {
        sandbox_id: "web".into(),
        ..Default::default()
    };
    client
        .sandbox()
        .create_sandbox(limit(), &create)
        .await
        .unwrap();
    let start = StartSandboxRequest {
        sandbox_id: "web".into(),
        ..Default::default()
    };
    client
        .sandbox()
        .start_sandbox(limit(), &start)
        .await
        .unwrap();
}

fn block_on<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap()
        .block_on(future)
}

#[test]
fn delete_of_a_live_sandbox_shuts_it_down() {
    const NAME: &str = "delete_of_a_live_sandbox_shuts_it_down";
    sandboxed(NAME, || {
        let plugin = fake::plugin(Path::new(cni::PLUGINS), "ours");
        cni::network("pods", vec![json!({"type": "ours"})]).write();
        let bundle = Bundle::new("web").without_address();
        block_on(start_sandbox(&bundle.start().ok().stdout));
        let answer = bundle.delete();
        assert!(answer.pid > 0);
        all_gone();
        assert_eq!((plugin.count("ADD"), plugin.count("DEL")), (1, 1));
        assert!(!Path::new("/run/podvisor/test/web").exists());
    });
}

#[test]
fn delete_answers_while_a_plugin_hangs_and_the_del_is_finished_later() {
    const NAME: &str = "delete_answers_while_a_plugin_hangs_and_the_del_is_finished_later";
    sandboxed(NAME, || {
        let plugin = fake::plugin(Path::new(cni::PLUGINS), "ours");
        cni::network("pods", vec![json!({"type": "ours"})]).write();
        let bundle = Bundle::new("web").without_address();
        block_on(start_sandbox(&bundle.start().ok().stdout));
        signal(supervisor(), Signal::SIGKILL);
        eventually(Duration::from_secs(10), "it dies", || {
            shims().is_empty().then_some(())
        });
        plugin.on("DEL", &[Act::Sleep(8.0)]);
        let begun = Instant::now();
        bundle.delete();
        assert!(
            begun.elapsed() < Duration::from_secs(5),
            "{:?}",
            begun.elapsed()
        );
        // One who holds no pipe of ours goes on with it.
        eventually(Duration::from_secs(60), "the pod is gone", || {
            (!Path::new("/run/podvisor/test/web").exists()).then_some(())
        });
        all_gone();
        assert!(
            plugin
                .calls_of("DEL")
                .iter()
                .any(|call| call.end.as_deref() == Some("0")),
            "{:?}",
            plugin.calls()
        );
        let record = fs::read_dir("/var/lib/podvisor/networks")
            .into_iter()
            .flatten()
            .count();
        assert_eq!(record, 0);
    });
}
