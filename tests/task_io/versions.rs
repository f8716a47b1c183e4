//! Both versions of the Task service: the same calls, answered alike.

use podvisor::client;
use podvisor::proto::any;
use protobuf::Message;
use tokio::net::UnixStream;
use ttrpc::asynchronous::transport::Socket;

use crate::kit::{Shim, block_on, limit, process};
use crate::support::{Snapshot, require, sandboxed};

/// What an answer is, without what differs between two runs of the same: an error's code, or the fields that stay.
fn told<T>(name: &str, answer: ttrpc::Result<T>, show: impl FnOnce(T) -> String) -> String {
    match answer {
        Ok(answer) => format!("{name}: {}", show(answer)),
        Err(ttrpc::Error::RpcStatus(status)) => format!("{name}: {:?}", status.code()),
        Err(other) => panic!("{name}: {other:?}"),
    }
}

async fn connect(address: &str) -> ttrpc::asynchronous::Client {
    let stream = UnixStream::connect(client::path_of(address)).await.unwrap();
    ttrpc::asynchronous::Client::new(Socket::from(stream))
}

macro_rules! life {
    ($name:ident, $wire:ident) => {
        async fn $name(shim: &Shim) -> Vec<String> {
            use podvisor::proto::$wire::shim as wire;
            use podvisor::proto::$wire::shim_ttrpc::TaskClient;
            let task = TaskClient::new(connect(&shim.address).await);
            let mut all = Vec::new();
            let create = shim.request().write_to_bytes().unwrap();
            let create = wire::CreateTaskRequest::parse_from_bytes(&create).unwrap();
            let state = wire::StateRequest {
                id: "c".into(),
                ..Default::default()
            };
            let shown =
                |s: wire::StateResponse| format!("{:?} {} {}", s.status, s.exit_status, s.pid > 0);
            let answer = task.state(limit(), &state).await;
            all.push(told("state", answer, shown));
            let answer = task.create(limit(), &create).await;
            all.push(told("create", answer, |a| (a.pid > 0).to_string()));
            let answer = task.state(limit(), &state).await;
            all.push(told("state", answer, shown));
            let other = wire::CreateTaskRequest {
                id: "c".into(),
                bundle: "/nowhere".into(),
                ..Default::default()
            };
            let answer = task.create(limit(), &other).await;
            all.push(told("create", answer, |a| a.pid.to_string()));
            let answer = task
                .start(
                    limit(),
                    &wire::StartRequest {
                        id: "c".into(),
                        ..Default::default()
                    },
                )
                .await;
            all.push(told("start", answer, |a| (a.pid > 0).to_string()));
            let answer = task
                .start(
                    limit(),
                    &wire::StartRequest {
                        id: "none".into(),
                        ..Default::default()
                    },
                )
                .await;
            all.push(told("start", answer, |a| a.pid.to_string()));
            let answer = task.state(limit(), &state).await;
            all.push(told("state", answer, shown));
            let answer = task
                .connect(
                    limit(),
                    &wire::ConnectRequest {
                        id: "c".into(),
                        ..Default::default()
                    },
                )
                .await;
            all.push(told("connect", answer, |a| {
                format!("{} {}", a.shim_pid > 0, a.task_pid > 0)
            }));
            let answer = task
                .connect(
                    limit(),
                    &wire::ConnectRequest {
                        id: "none".into(),
                        ..Default::default()
                    },
                )
                .await;
            all.push(told("connect", answer, |a| {
                format!("{} {}", a.shim_pid > 0, a.task_pid)
            }));
            let spec = any::raw(any::OCI_PROCESS, process("exit 4").to_string().into_bytes());
            let exec = wire::ExecProcessRequest {
                id: "c".into(),
                exec_id: "e".into(),
                spec: Some(spec).into(),
                ..Default::default()
            };
            let answer = task.exec(limit(), &exec).await;
            all.push(told("exec", answer, |_| String::new()));
            let answer = task.exec(limit(), &exec).await;
            all.push(told("exec", answer, |_| String::new()));
            let answer = task
                .kill(
                    limit(),
                    &wire::KillRequest {
                        id: "c".into(),
                        exec_id: "e".into(),
                        signal: 9,
                        ..Default::default()
                    },
                )
                .await;
            all.push(told("kill", answer, |_| String::new()));
            let answer = task
                .start(
                    limit(),
                    &wire::StartRequest {
                        id: "c".into(),
                        exec_id: "e".into(),
                        ..Default::default()
                    },
                )
                .await;
            all.push(told("start", answer, |a| (a.pid > 0).to_string()));
            let answer = task
                .wait(
                    limit(),
                    &wire::WaitRequest {
                        id: "c".into(),
                        exec_id: "e".into(),
                        ..Default::default()
                    },
                )
                .await;
            all.push(told("wait", answer, |a| a.exit_status.to_string()));
            let answer = task
                .delete(
                    limit(),
                    &wire::DeleteRequest {
                        id: "c".into(),
                        exec_id: "e".into(),
                        ..Default::default()
                    },
                )
                .await;
            all.push(told("delete", answer, |a| a.exit_status.to_string()));
            let answer = task
                .pids(
                    limit(),
                    &wire::PidsRequest {
                        id: "c".into(),
                        ..Default::default()
                    },
                )
                .await;
            all.push(told("pids", answer, |a| {
                (!a.processes.is_empty()).to_string()
            }));
            let answer = task
                .stats(
                    limit(),
                    &wire::StatsRequest {
                        id: "c".into(),
                        ..Default::default()
                    },
                )
                .await;
            all.push(told("stats", answer, |a| a.stats.type_url.clone()));
            let answer = task
                .resize_pty(
                    limit(),
                    &wire::ResizePtyRequest {
                        id: "c".into(),
                        width: 80,
                        height: 24,
                        ..Default::default()
                    },
                )
                .await;
            all.push(told("resize_pty", answer, |_| String::new()));
            let answer = task
                .close_io(
                    limit(),
                    &wire::CloseIORequest {
                        id: "c".into(),
                        stdin: true,
                        ..Default::default()
                    },
                )
                .await;
            all.push(told("close_io", answer, |_| String::new()));
            let answer = task
                .resume(
                    limit(),
                    &wire::ResumeRequest {
                        id: "c".into(),
                        ..Default::default()
                    },
                )
                .await;
            all.push(told("resume", answer, |_| String::new()));
            let answer = task
                .pause(
                    limit(),
                    &wire::PauseRequest {
                        id: "c".into(),
                        ..Default::default()
                    },
                )
                .await;
            all.push(told("pause", answer, |_| String::new()));
            let answer = task.state(limit(), &state).await;
            all.push(told("state", answer, shown));
            let answer = task
                .pause(
                    limit(),
                    &wire::PauseRequest {
                        id: "c".into(),
                        ..Default::default()
                    },
                )
                .await;
            all.push(told("pause", answer, |_| String::new()));
            let answer = task
                .delete(
                    limit(),
                    &wire::DeleteRequest {
                        id: "c".into(),
                        ..Default::default()
                    },
                )
                .await;
            all.push(told("delete", answer, |a| a.exit_status.to_string()));
            let answer = task
                .resume(
                    limit(),
                    &wire::ResumeRequest {
                        id: "c".into(),
                        ..Default::default()
                    },
                )
                .await;
            all.push(told("resume", answer, |_| String::new()));
            let answer = task
                .checkpoint(
                    limit(),
                    &wire::CheckpointTaskRequest {
                        id: "none".into(),
                        path: "/nowhere".into(),
                        ..Default::default()
                    },
                )
                .await;
            all.push(told("checkpoint", answer, |_| String::new()));
            let answer = task
                .update(
                    limit(),
                    &wire::UpdateTaskRequest {
                        id: "none".into(),
                        ..Default::default()
                    },
                )
                .await;
            all.push(told("update", answer, |_| String::new()));
            let answer = task
                .shutdown(
                    limit(),
                    &wire::ShutdownRequest {
                        id: "c".into(),
                        ..Default::default()
                    },
                )
                .await;
            all.push(told("shutdown", answer, |_| String::new()));
            let answer = task
                .kill(
                    limit(),
                    &wire::KillRequest {
                        id: "c".into(),
                        signal: 9,
                        all: true,
                        ..Default::default()
                    },
                )
                .await;
            all.push(told("kill", answer, |_| String::new()));
            let answer = task
                .wait(
                    limit(),
                    &wire::WaitRequest {
                        id: "c".into(),
                        ..Default::default()
                    },
                )
                .await;
            all.push(told("wait", answer, |a| a.exit_status.to_string()));
            let answer = task.state(limit(), &state).await;
            all.push(told("state", answer, shown));
            let answer = task
                .kill(
                    limit(),
                    &wire::KillRequest {
                        id: "c".into(),
                        signal: 9,
                        all: true,
                        ..Default::default()
                    },
                )
                .await;
            all.push(told("kill", answer, |_| String::new()));
            let answer = task
                .delete(
                    limit(),
                    &wire::DeleteRequest {
                        id: "c".into(),
                        ..Default::default()
                    },
                )
                .await;
            all.push(told("delete", answer, |a| a.exit_status.to_string()));
            let answer = task
                .delete(
                    limit(),
                    &wire::DeleteRequest {
                        id: "c".into(),
                        ..Default::default()
                    },
                )
                .await;
            all.push(told("delete", answer, |a| a.exit_status.to_string()));
            let answer = task
                .wait(
                    limit(),
                    &wire::WaitRequest {
                        id: "c".into(),
                        ..Default::default()
                    },
                )
                .await;
            all.push(told("wait", answer, |a| a.exit_status.to_string()));
            all
        }
    };
}

life!(second, task_v2);
life!(third, task_v3);

#[test]
fn both_versions_answer_alike() {
    const NAME: &str = "versions::both_versions_answer_alike";
    sandboxed(NAME, || {
        if !require::tool("runc") {
            return;
        }
        let before = Snapshot::take();
        let shim = Shim::launch("exec sleep 1000", |b| b);
        block_on(async {
            let two = second(&shim).await;
            let three = third(&shim).await;
            println!("{two:#?}");
            assert_eq!(two, three);
            let exits = ["wait: 4", "delete: 4", "wait: 137", "delete: 137"];
            assert!(
                exits.iter().all(|e| two.iter().any(|line| line == e)),
                "{two:#?}"
            );
            shim.end().await;
        });
        let _ = std::fs::remove_dir_all("/run/bundles");
        before.assert_unchanged();
    });
}
