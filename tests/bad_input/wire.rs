//! Ids and bundles over the wire.

use std::fs;
use std::time::Duration;

use podvisor::client::{self, Client};
use podvisor::proto::any;
use podvisor::proto::sandbox::sandbox::{
    CreateSandboxRequest, ShutdownSandboxRequest, StartSandboxRequest, StopSandboxRequest,
};
use podvisor::proto::task_v3::shim::{
    CreateTaskRequest, DeleteRequest, ExecProcessRequest, KillRequest, ShutdownRequest,
    StartRequest,
};
use serde_json::json;

use crate::support::rootfs::Rootfs;
use crate::{hostile, launch, nothing_left};

/// Runs `body` with a connection to a fresh supervisor.
fn connected<F: AsyncFnOnce(Client)>(body: F) {
    let dir = launch::bundle("p1");
    let address = launch::start(&dir, "p1", b"").ok().stdout;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(async { body(Client::connect(&address).await.unwrap()).await });
    fs::remove_dir_all("/run/bundles").unwrap();
}

fn limit() -> ttrpc::context::Context {
    client::context(Some(Duration::from_secs(60)))
}

/// INVALID_ARGUMENT, or NOT_FOUND where only the id of a thing that is there can be right.
#[track_caller]
fn refused<T: std::fmt::Debug>(answer: ttrpc::Result<T>, codes: &[ttrpc::Code], what: &str) {
    match answer {
        Err(ttrpc::Error::RpcStatus(status)) => {
            assert!(codes.contains(&status.code()), "{what}: {status:?}");
            assert!(!status.message.is_empty(), "{what}");
        }
        other => panic!("{what}: {other:?}"),
    }
}

fn task(id: &str, bundle: &str) -> CreateTaskRequest {
    CreateTaskRequest {
        id: id.into(),
        bundle: bundle.into(),
        ..Default::default()
    }
}

#[test]
fn sandbox_requests_with_hostile_ids_are_refused() {
    nothing_left(
        "wire::sandbox_requests_with_hostile_ids_are_refused",
        |_| {
            use ttrpc::Code::{INVALID_ARGUMENT, NOT_FOUND};
            connected(async |client: Client| {
                let sandbox = client.sandbox();
                for id in hostile() {
                    let create = CreateSandboxRequest {
                        sandbox_id: id.clone(),
                        bundle_path: "/run/bundles/p1".into(),
                        ..Default::default()
                    };
                    refused(
                        sandbox.create_sandbox(limit(), &create).await,
                        &[INVALID_ARGUMENT],
                        &id,
                    );
                    let start = StartSandboxRequest {
                        sandbox_id: id.clone(),
                        ..Default::default()
                    };
                    refused(
                        sandbox.start_sandbox(limit(), &start).await,
                        &[INVALID_ARGUMENT, NOT_FOUND],
                        &id,
                    );
                    let stop = StopSandboxRequest {
                        sandbox_id: id.clone(),
                        ..Default::default()
                    };
                    refused(
                        sandbox.stop_sandbox(limit(), &stop).await,
                        &[INVALID_ARGUMENT, NOT_FOUND],
                        &id,
                    );
                    let shutdown = ShutdownSandboxRequest {
                        sandbox_id: id.clone(),
                        ..Default::default()
                    };
                    refused(
                        sandbox.shutdown_sandbox(limit(), &shutdown).await,
                        &[INVALID_ARGUMENT, NOT_FOUND],
                        &id,
                    );
                }
                let own = ShutdownSandboxRequest {
                    sandbox_id: "p1".into(),
                    ..Default::default()
                };
                sandbox.shutdown_sandbox(limit(), &own).await.unwrap();
            });
        },
    );
}

#[test]
fn tasks_with_hostile_ids_or_damaged_bundles_are_refused() {
    nothing_left(
        "wire::tasks_with_hostile_ids_or_damaged_bundles_are_refused",
        |rootfs: &Rootfs| {
            use ttrpc::Code::{INVALID_ARGUMENT, NOT_FOUND};
            connected(async |client: Client| {
                let tasks = client.task();
                let dir = launch::bundle("c1");
                let config = json!({
                    "ociVersion": "1.0.2",
                    "root": { "path": rootfs.str() },
                    "process": { "args": ["sleep", "1000"], "cwd": "/", "user": { "uid": 0, "gid": 0 }, "env": ["PATH=/bin"] },
                    "mounts": [{ "destination": "/proc", "type": "proc", "source": "proc" }],
                    "linux": { "namespaces": [{ "type": "pid" }, { "type": "mount" }] }
                });
                let file = dir.join("config.json");
                let both = [INVALID_ARGUMENT, NOT_FOUND];
                refused(
                    tasks.create(limit(), &task("c1", "/run/bundles/c1")).await,
                    &both,
                    "no config.json",
                );
                let text = config.to_string();
                for cut in [0, 1, text.len() / 2, text.len() - 1] {
                    fs::write(&file, &text[..cut]).unwrap();
                    refused(
                        tasks.create(limit(), &task("c1", "/run/bundles/c1")).await,
                        &[INVALID_ARGUMENT],
                        "cut config.json",
                    );
                }
                fs::write(&file, &text).unwrap();
                for bundle in [
                    "",
                    "relative",
                    "/nowhere",
                    "/run/bundles/c1/config.json",
                    "/run/bundles/c1\0",
                ] {
                    let answer = tasks.create(limit(), &task("c1", bundle)).await;
                    refused(answer, &both, bundle);
                }
                for id in hostile() {
                    refused(
                        tasks.create(limit(), &task(&id, "/run/bundles/c1")).await,
                        &[INVALID_ARGUMENT],
                        &id,
                    );
                    let start = StartRequest {
                        id: id.clone(),
                        ..Default::default()
                    };
                    refused(tasks.start(limit(), &start).await, &both, &id);
                }
                tasks
                    .create(limit(), &task("c1", "/run/bundles/c1"))
                    .await
                    .unwrap();
                let start = StartRequest {
                    id: "c1".into(),
                    ..Default::default()
                };
                tasks.start(limit(), &start).await.unwrap();
                let process =
                    json!({ "args": ["true"], "cwd": "/", "user": { "uid": 0, "gid": 0 } })
                        .to_string()
                        .into_bytes();
                for id in hostile() {
                    let exec = ExecProcessRequest {
                        id: "c1".into(),
                        exec_id: id.clone(),
                        spec: Some(any::raw(any::OCI_PROCESS, process.clone())).into(),
                        ..Default::default()
                    };
                    refused(tasks.exec(limit(), &exec).await, &[INVALID_ARGUMENT], &id);
                }
                for spec in [&b"{"[..], b"", b"[]", b"{\"args\":[]}"] {
                    let exec = ExecProcessRequest {
                        id: "c1".into(),
                        exec_id: "e1".into(),
                        spec: Some(any::raw(any::OCI_PROCESS, spec.to_vec())).into(),
                        ..Default::default()
                    };
                    refused(
                        tasks.exec(limit(), &exec).await,
                        &[INVALID_ARGUMENT],
                        &String::from_utf8_lossy(spec),
                    );
                }
                let kill = KillRequest {
                    id: "c1".into(),
                    signal: 9,
                    ..Default::default()
                };
                tasks.kill(limit(), &kill).await.unwrap();
                let wait = podvisor::proto::task_v3::shim::WaitRequest {
                    id: "c1".into(),
                    ..Default::default()
                };
                assert_eq!(tasks.wait(limit(), &wait).await.unwrap().exit_status, 137);
                let delete = DeleteRequest {
                    id: "c1".into(),
                    ..Default::default()
                };
                tasks.delete(limit(), &delete).await.unwrap();
                let leave = ShutdownRequest {
                    id: "p1".into(),
                    ..Default::default()
                };
                tasks.shutdown(limit(), &leave).await.unwrap();
            });
        },
    );
}
