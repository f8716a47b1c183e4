//! FL-059: programs that end before anybody waits for them.

use std::time::Duration;

use podvisor::proto::task_v3::shim as task;
use podvisor::proto::task_v3::shim_ttrpc::TaskClient;

use crate::rig::{self, BOUND, Pod, Probe, container, limit};
use crate::support::rootfs::Rootfs;
use crate::support::{Sandbox, Snapshot, rootfs, sandboxed};

async fn wait(task: TaskClient, id: String) -> u32 {
    let request = task::WaitRequest {
        id,
        ..Default::default()
    };
    task.wait(limit(BOUND), &request).await.unwrap().exit_status
}

async fn start(task: TaskClient, id: String) {
    let request = task::StartRequest {
        id,
        ..Default::default()
    };
    task.start(limit(BOUND), &request).await.unwrap();
}

/// Runs `exit 7` and waits before, during and after.
fn seven(probe: &Probe, id: &str, rootfs: &Rootfs) {
    let bundle = container(id, "exit 7");
    probe.create_task(&bundle, rootfs).unwrap();
    probe.block(async {
        let task = probe.client.task();
        let waiting = || tokio::spawn(wait(task.clone(), id.to_owned()));
        // Tasks begin in order, and one connection keeps the order of its requests.
        let before = waiting();
        let started = tokio::spawn(start(task.clone(), id.to_owned()));
        let during = waiting();
        started.await.unwrap();
        for wait in [before, during, waiting(), waiting()] {
            assert_eq!(wait.await.unwrap(), 7, "{id}");
        }
        // The exit is known by now.
        assert_eq!(waiting().await.unwrap(), 7, "{id}");
        let request = task::DeleteRequest {
            id: id.into(),
            ..Default::default()
        };
        let deleted = task.delete(limit(BOUND), &request).await.unwrap();
        assert_eq!(deleted.exit_status, 7, "{id}");
    });
    std::fs::remove_dir_all(&bundle.dir).unwrap();
}

fn sevens(times: u32) {
    let rootfs = rootfs::make();
    let plugin = rig::fake_network();
    let before = Snapshot::take();
    let pod = Pod::up("p1");
    let probe = pod.probe();
    for n in 0..times {
        seven(&probe, &format!("c{n}"), &rootfs);
    }
    pod.end();
    before.assert_unchanged();
    assert_eq!((plugin.count("ADD"), plugin.count("DEL")), (1, 1));
}

#[test]
fn a_hundred_programs_that_end_at_once_are_waited_for_at_any_time() {
    sandboxed(
        "exits::a_hundred_programs_that_end_at_once_are_waited_for_at_any_time",
        || sevens(100),
    );
}

#[test]
#[ignore = "slow: a thousand containers"]
fn slow_a_thousand_programs_that_end_at_once_are_waited_for_at_any_time() {
    let name = "exits::slow_a_thousand_programs_that_end_at_once_are_waited_for_at_any_time";
    Sandbox::new(name)
        .bound(Duration::from_secs(1800))
        .run(|| sevens(1000));
}
