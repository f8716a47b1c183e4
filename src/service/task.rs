//! `containerd.task.v2.Task` and `containerd.task.v3.Task`: the same messages under two names, one implementation.

use std::path::PathBuf;
use std::time::SystemTime;

use async_trait::async_trait;
use protobuf::well_known_types::any::Any;
use protobuf::well_known_types::empty::Empty;
use protobuf::{EnumOrUnknown, MessageField};
use ttrpc::asynchronous::TtrpcContext;

use super::guard;
use crate::container::{CheckpointRequest, CreateRequest, Dump, RuntimeOptions, Status, TaskState};
use crate::error::{Error, Kind, Result};
use crate::mount::Mount;
use crate::pod::Pod;
use crate::proto::any;
use crate::proto::runc_options::oci::{CheckpointOptions, ProcessDetails};
use crate::proto::time::timestamp;
use crate::proto::types::mount::Mount as WireMount;
use crate::proto::types::task::{ProcessInfo, Status as WireStatus};

/// The service over one pod.
pub struct TaskService {
    pod: Pod,
}

impl TaskService {
    /// A service over `pod`.
    pub fn new(pod: Pod) -> Self {
        Self { pod }
    }

    fn options(&self, wire: Option<&Any>) -> Result<RuntimeOptions> {
        RuntimeOptions::of_daemon(wire, &self.pod.config().options)
    }
}

/// Implements the trait of one version; `$wire` is its message module.
macro_rules! serve_task {
    ($wire:ident, $service:path) => {
        #[async_trait]
        impl $service for TaskService {
            async fn create(
                &self,
                ctx: &TtrpcContext,
                req: $wire::CreateTaskRequest,
            ) -> ttrpc::Result<$wire::CreateTaskResponse> {
                let limit = guard::limit(ctx);
                // The containers do the work; this only waits for it, and so does Start.
                guard::waiting("Create", async move {
                    crate::id::check("container id", &req.id)?;
                    let request = CreateRequest {
                        id: req.id,
                        bundle: PathBuf::from(req.bundle),
                        rootfs: req.rootfs.into_iter().map(mount).collect(),
                        terminal: req.terminal,
                        stdin: req.stdin,
                        stdout: req.stdout,
                        stderr: req.stderr,
                        checkpoint: req.checkpoint,
                        options: self.options(req.options.as_ref())?,
                        pod: None,
                    };
                    let pid = self.pod.create_container(request, limit).await?;
                    Ok($wire::CreateTaskResponse {
                        pid,
                        ..Default::default()
                    })
                })
                .await
            }

            async fn start(
                &self,
                ctx: &TtrpcContext,
                req: $wire::StartRequest,
            ) -> ttrpc::Result<$wire::StartResponse> {
                let limit = guard::limit(ctx);
                guard::waiting("Start", async move {
                    let containers = self.pod.containers();
                    let pid = containers
                        .start_within(&req.id, &req.exec_id, limit)
                        .await?;
                    Ok($wire::StartResponse {
                        pid,
                        ..Default::default()
                    })
                })
                .await
            }

            async fn state(
                &self,
                _: &TtrpcContext,
                req: $wire::StateRequest,
            ) -> ttrpc::Result<$wire::StateResponse> {
                guard::waiting("State", async move {
                    let state = self.pod.containers().state(&req.id, &req.exec_id)?;
                    let (exit_status, exited_at) = exit(&state);
                    Ok($wire::StateResponse {
                        status: EnumOrUnknown::new(status(state.status)),
                        id: state.id,
                        exec_id: state.exec_id,
                        bundle: state.bundle.to_string_lossy().into_owned(),
                        pid: state.pid,
                        stdin: state.stdin,
                        stdout: state.stdout,
                        stderr: state.stderr,
                        terminal: state.terminal,
                        exit_status,
                        exited_at: exited_at.map(timestamp).into(),
                        ..Default::default()
                    })
                })
                .await
            }

            async fn exec(
                &self,
                _: &TtrpcContext,
                req: $wire::ExecProcessRequest,
            ) -> ttrpc::Result<Empty> {
                let pod = self.pod.clone();
                guard::detached("Exec", async move {
                    crate::id::check("exec id", &req.exec_id)?;
                    let process = req.spec.into_option().unwrap_or_default().value;
                    pod.containers()
                        .exec(
                            &req.id,
                            &req.exec_id,
                            req.terminal,
                            &req.stdin,
                            &req.stdout,
                            &req.stderr,
                            &process,
                        )
                        .await?;
                    Ok(Empty::new())
                })
                .await
            }

            async fn delete(
                &self,
                _: &TtrpcContext,
                req: $wire::DeleteRequest,
            ) -> ttrpc::Result<$wire::DeleteResponse> {
                let pod = self.pod.clone();
                guard::detached("Delete", async move {
                    let (pid, exit_status, at) =
                        pod.containers().delete(&req.id, &req.exec_id).await?;
                    Ok($wire::DeleteResponse {
                        pid,
                        exit_status,
                        exited_at: MessageField::some(timestamp(at)),
                        ..Default::default()
                    })
                })
                .await
            }

            async fn kill(
                &self,
                _: &TtrpcContext,
                req: $wire::KillRequest,
            ) -> ttrpc::Result<Empty> {
                let pod = self.pod.clone();
                guard::detached("Kill", async move {
                    pod.containers()
                        .kill(&req.id, &req.exec_id, req.signal, req.all)
                        .await?;
                    Ok(Empty::new())
                })
                .await
            }

            async fn wait(
                &self,
                _: &TtrpcContext,
                req: $wire::WaitRequest,
            ) -> ttrpc::Result<$wire::WaitResponse> {
                guard::waiting("Wait", async move {
                    let (exit_status, at) =
                        self.pod.containers().wait(&req.id, &req.exec_id).await?;
                    Ok($wire::WaitResponse {
                        exit_status,
                        exited_at: MessageField::some(timestamp(at)),
                        ..Default::default()
                    })
                })
                .await
            }

            async fn pids(
                &self,
                _: &TtrpcContext,
                req: $wire::PidsRequest,
            ) -> ttrpc::Result<$wire::PidsResponse> {
                guard::waiting("Pids", async move {
                    let processes = self
                        .pod
                        .containers()
                        .pids(&req.id)
                        .await?
                        .into_iter()
                        .map(process_info)
                        .collect();
                    Ok($wire::PidsResponse {
                        processes,
                        ..Default::default()
                    })
                })
                .await
            }

            async fn pause(
                &self,
                _: &TtrpcContext,
                req: $wire::PauseRequest,
            ) -> ttrpc::Result<Empty> {
                let pod = self.pod.clone();
                guard::detached("Pause", async move {
                    pod.containers().pause(&req.id).await?;
                    Ok(Empty::new())
                })
                .await
            }

            async fn resume(
                &self,
                _: &TtrpcContext,
                req: $wire::ResumeRequest,
            ) -> ttrpc::Result<Empty> {
                let pod = self.pod.clone();
                guard::detached("Resume", async move {
                    pod.containers().resume(&req.id).await?;
                    Ok(Empty::new())
                })
                .await
            }

            async fn resize_pty(
                &self,
                _: &TtrpcContext,
                req: $wire::ResizePtyRequest,
            ) -> ttrpc::Result<Empty> {
                guard::waiting("ResizePty", async move {
                    self.pod
                        .containers()
                        .resize(&req.id, &req.exec_id, req.width, req.height)?;
                    Ok(Empty::new())
                })
                .await
            }

            async fn close_io(
                &self,
                _: &TtrpcContext,
                req: $wire::CloseIORequest,
            ) -> ttrpc::Result<Empty> {
                guard::waiting("CloseIO", async move {
                    self.pod.containers().close_io(&req.id, &req.exec_id)?;
                    Ok(Empty::new())
                })
                .await
            }

            async fn checkpoint(
                &self,
                _: &TtrpcContext,
                req: $wire::CheckpointTaskRequest,
            ) -> ttrpc::Result<Empty> {
                let pod = self.pod.clone();
                guard::detached("Checkpoint", async move {
                    let request = checkpoint(req.path, req.options.as_ref())?;
                    pod.containers().checkpoint(&req.id, &request).await?;
                    Ok(Empty::new())
                })
                .await
            }

            async fn update(
                &self,
                _: &TtrpcContext,
                req: $wire::UpdateTaskRequest,
            ) -> ttrpc::Result<Empty> {
                let pod = self.pod.clone();
                guard::detached("Update", async move {
                    let resources = req.resources.unwrap_or_default();
                    pod.containers().update(&req.id, &resources).await?;
                    Ok(Empty::new())
                })
                .await
            }

            async fn stats(
                &self,
                _: &TtrpcContext,
                req: $wire::StatsRequest,
            ) -> ttrpc::Result<$wire::StatsResponse> {
                guard::waiting("Stats", async move {
                    Ok($wire::StatsResponse {
                        stats: MessageField::some(self.pod.containers().stats(&req.id)?),
                        ..Default::default()
                    })
                })
                .await
            }

            async fn connect(
                &self,
                _: &TtrpcContext,
                req: $wire::ConnectRequest,
            ) -> ttrpc::Result<$wire::ConnectResponse> {
                // Never fails, for any id: containerd gives a pod up whose supervisor does not answer this.
                guard::waiting("Connect", async move {
                    Ok($wire::ConnectResponse {
                        shim_pid: std::process::id(),
                        task_pid: self
                            .pod
                            .containers()
                            .state(&req.id, "")
                            .map_or(0, |s| s.pid),
                        version: env!("CARGO_PKG_VERSION").to_owned(),
                        ..Default::default()
                    })
                })
                .await
            }

            async fn shutdown(
                &self,
                _: &TtrpcContext,
                req: $wire::ShutdownRequest,
            ) -> ttrpc::Result<Empty> {
                let pod = self.pod.clone();
                guard::detached("Shutdown", async move {
                    pod.shutdown_task(&req.id).await?;
                    Ok(Empty::new())
                })
                .await
            }
        }
    };
}

mod v2 {
    use super::*;
    use crate::proto::task_v2::{shim, shim_ttrpc::Task};
    serve_task!(shim, Task);
}

mod v3 {
    use super::*;
    use crate::proto::task_v3::{shim, shim_ttrpc::Task};
    serve_task!(shim, Task);
}

fn mount(wire: WireMount) -> Mount {
    Mount {
        kind: wire.type_,
        source: wire.source,
        target: wire.target,
        options: wire.options,
    }
}

fn checkpoint(path: String, options: Option<&Any>) -> Result<CheckpointRequest> {
    let name = any::CHECKPOINT_OPTIONS;
    let bad = |e| Error::caused(Kind::Invalid, format!("decode {name}"), e);
    let options = match options.filter(|any| !any::is_nothing(any)) {
        None => CheckpointOptions::default(),
        Some(given) => any::unpack(given, name).map_err(bad)?.ok_or_else(|| {
            let text = format!("decode options of type {:?}: send {name}", given.type_url);
            Error::new(Kind::Invalid, text)
        })?,
    };
    Ok(CheckpointRequest {
        image: path.into(),
        work: options.work_path.into(),
        dump: Dump {
            exit: options.exit,
            open_tcp: options.open_tcp,
            external_unix_sockets: options.external_unix_sockets,
            terminal: options.terminal,
            file_locks: options.file_locks,
            empty_namespaces: options.empty_namespaces,
            cgroups_mode: options.cgroups_mode,
        },
    })
}

fn status(status: Status) -> WireStatus {
    match status {
        // Neither is shown to anybody.
        Status::Creating | Status::Parked => WireStatus::UNKNOWN,
        Status::Created => WireStatus::CREATED,
        Status::Running => WireStatus::RUNNING,
        Status::Stopped => WireStatus::STOPPED,
        Status::Paused => WireStatus::PAUSED,
    }
}

fn exit(state: &TaskState) -> (u32, Option<SystemTime>) {
    state.exit.map_or((0, None), |(code, at)| (code, Some(at)))
}

fn process_info((pid, exec_id): (u32, String)) -> ProcessInfo {
    let details = ProcessDetails {
        exec_id: exec_id.clone(),
        ..Default::default()
    };
    ProcessInfo {
        pid,
        info: match exec_id.is_empty() {
            true => MessageField::none(),
            false => any::pack(any::PROCESS_DETAILS, &details).ok().into(),
        },
        ..Default::default()
    }
}
