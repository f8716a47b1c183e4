//! A Delete that takes longer than a daemon waits.

use std::fs;
use std::time::{Duration, Instant};

use podvisor::client;
use podvisor::error::Kind;
use podvisor::proto::task_v3::shim as task;

use crate::kit::{Shim, block_on, run, wait};
use crate::support::{Snapshot, require, sandboxed};

/// What containerd's CRI plugin gives a Delete.
const PATIENCE: Duration = Duration::from_secs(10);

/// The daemon asks again, is told that the task is not there, and sends Shutdown.
#[test]
fn an_unmount_of_twelve_seconds_ends_clean_and_the_supervisor_leaves() {
    const NAME: &str =
        "deleting::an_unmount_of_twelve_seconds_ends_clean_and_the_supervisor_leaves";
    sandboxed(NAME, || {
        if !require::tool("runc") {
            return;
        }
        let before = Snapshot::take();
        let fault = "rootfs.unmount.before=1*delay(12000)";
        let shim = Shim::launch("exit 3", |b| b.env("PODVISOR_FAULT", fault));
        block_on(async {
            let client = shim.client().await;
            run(&client, &shim.request()).await;
            assert_eq!(wait(&client, "").await, 3);
            let begun = Instant::now();
            let request = task::DeleteRequest {
                id: "c".into(),
                ..Default::default()
            };
            let refused = async || {
                let context = client::context(Some(PATIENCE));
                let error = client.task().delete(context, &request).await.unwrap_err();
                client::from_ttrpc("delete", error).kind()
            };
            assert_eq!(refused().await, Kind::Deadline);
            // Queries are not held up meanwhile.
            let state = task::StateRequest {
                id: "c".into(),
                ..Default::default()
            };
            let context = client::context(Some(Duration::from_secs(1)));
            client.task().state(context, &state).await.unwrap();
            assert_eq!(refused().await, Kind::NotFound);
            assert!(begun.elapsed() >= Duration::from_secs(12), "the delay");
            drop(client);
            shim.end().await;
            assert!(begun.elapsed() < Duration::from_secs(27), "15 s after it");
        });
        let _ = fs::remove_dir_all("/run/bundles");
        before.assert_unchanged();
    });
}

/// A deadline that has passed is no reason to leave a kill undone: the daemon sends one when its own caller has left.
#[test]
fn a_deadline_that_has_passed_does_not_keep_work_from_being_done() {
    const NAME: &str = "deleting::a_deadline_that_has_passed_does_not_keep_work_from_being_done";
    sandboxed(NAME, || {
        if !require::tool("runc") {
            return;
        }
        let before = Snapshot::take();
        let shim = Shim::launch("sleep 1000", |b| b);
        block_on(async {
            let client = shim.client().await;
            run(&client, &shim.request()).await;
            let request = task::KillRequest {
                id: "c".into(),
                signal: 9,
                ..Default::default()
            };
            let passed = ttrpc::context::Context {
                timeout_nano: -1_000_000,
                ..Default::default()
            };
            let _ = client.task().kill(passed.clone(), &request).await;
            assert_eq!(wait(&client, "").await, 137);
            let request = task::DeleteRequest {
                id: "c".into(),
                ..Default::default()
            };
            let _ = client.task().delete(passed, &request).await;
            drop(client);
            shim.end().await;
        });
        assert!(fs::read_dir("/run/containerd/runc/test").is_ok_and(|mut d| d.next().is_none()));
        let _ = fs::remove_dir_all("/run/bundles");
        before.assert_unchanged();
    });
}
