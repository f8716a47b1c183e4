//! A real supervisor for a test: launched as a daemon launches it, spoken to over its socket.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use podvisor::client::{self, Client};
use podvisor::proto::any;
use podvisor::proto::cri::sandbox_config::{
    LinuxPodSandboxConfig, LinuxSandboxSecurityContext, NamespaceOption, PodSandboxConfig,
    PodSandboxMetadata,
};
use podvisor::proto::runc_options::oci::Options as RuncOptions;
use podvisor::proto::sandbox::sandbox as wire;
use podvisor::proto::task_v3::shim as task;
use podvisor::proto::types::mount::Mount;
use protobuf::well_known_types::any::Any;
use protobuf::{Message, MessageField};
use serde_json::{Value, json};
use ttrpc::{Code, Error};

use crate::daemon::{Bundle, shims};
use crate::support::eventually;
use crate::support::rootfs::{self, Rootfs};

/// What takes longer hangs.
pub const BOUND: Duration = Duration::from_secs(30);

/// A supervisor and what a test knows of it.
pub struct Pod {
    pub id: String,
    pub bundle: Bundle,
    pub socket: PathBuf,
    /// Of the supervisor.
    pub pid: i32,
}

impl Pod {
    /// Launched with an empty bundle, as CRI's shim sandboxer does it.
    pub fn launch(id: &str) -> Self {
        Self::of(Bundle::new(id))
    }

    /// Launched with this bundle.
    pub fn of(bundle: Bundle) -> Self {
        let before = shims();
        let socket = bundle.address();
        let new: Vec<i32> = shims()
            .into_iter()
            .filter(|p| !before.contains(p))
            .collect();
        assert_eq!(new.len(), 1, "{new:?}");
        Self {
            id: bundle.id.clone(),
            bundle,
            socket,
            pid: new[0],
        }
    }

    pub async fn connect(&self) -> Client {
        Client::connect(self.socket.to_str().unwrap())
            .await
            .unwrap()
    }

    /// CreateSandbox with these options.
    pub fn request(&self, config: Option<&PodSandboxConfig>) -> wire::CreateSandboxRequest {
        wire::CreateSandboxRequest {
            sandbox_id: self.id.clone(),
            bundle_path: self.bundle.dir.display().to_string(),
            options: config
                .map(|c| any::pack(any::POD_SANDBOX_CONFIG, c).unwrap())
                .into(),
            ..Default::default()
        }
    }

    /// Created and started; the pid of the infra process.
    pub async fn up(&self, client: &Client, config: &PodSandboxConfig) -> i32 {
        create(client, &self.request(Some(config))).await.unwrap();
        let pid = start(client, &self.id).await.unwrap().pid;
        i32::try_from(pid).unwrap()
    }

    /// ShutdownSandbox, and the end of the process.
    pub async fn shut(&self, client: &Client) {
        shutdown(client, &self.id).await.unwrap();
        self.left();
    }

    /// Waits for the end of the process, and that it took its socket along.
    pub fn left(&self) {
        eventually(BOUND, "the supervisor leaves", || {
            (!Path::new(&format!("/proc/{}", self.pid)).exists()).then_some(())
        });
        assert!(!self.socket.exists(), "the socket is left");
    }
}

/// A pod without a network but its own `lo`.
pub fn config(name: &str) -> PodSandboxConfig {
    PodSandboxConfig {
        metadata: MessageField::some(PodSandboxMetadata {
            name: name.into(),
            uid: format!("uid-{name}"),
            namespace: "apps".into(),
            attempt: 1,
            ..Default::default()
        }),
        annotations: HashMap::from([("io.podvisor.network".into(), "none".into())]),
        ..Default::default()
    }
}

/// The same with these namespace options and sysctls.
pub fn config_with(
    name: &str,
    options: NamespaceOption,
    sysctls: &[(&str, &str)],
) -> PodSandboxConfig {
    let mut config = config(name);
    config.linux = MessageField::some(LinuxPodSandboxConfig {
        sysctls: sysctls
            .iter()
            .map(|(k, v)| ((*k).to_owned(), (*v).to_owned()))
            .collect(),
        security_context: MessageField::some(LinuxSandboxSecurityContext {
            namespace_options: MessageField::some(options),
            ..Default::default()
        }),
        ..Default::default()
    });
    config
}

/// Runs on a runtime of its own; panics when it takes too long.
pub fn on<T>(body: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(async {
        tokio::time::timeout(BOUND * 4, body)
            .await
            .expect("the test hangs")
    })
}

/// The deadline of a call that should be answered long before.
pub fn soon() -> ttrpc::context::Context {
    client::context(Some(BOUND))
}

pub fn code<T: std::fmt::Debug>(result: ttrpc::Result<T>) -> (Code, String) {
    match result {
        Err(Error::RpcStatus(status)) => (status.code(), status.message),
        other => panic!("no status: {other:?}"),
    }
}

pub async fn create(client: &Client, request: &wire::CreateSandboxRequest) -> ttrpc::Result<()> {
    client.sandbox().create_sandbox(soon(), request).await?;
    Ok(())
}

pub async fn start(client: &Client, id: &str) -> ttrpc::Result<wire::StartSandboxResponse> {
    let request = wire::StartSandboxRequest {
        sandbox_id: id.into(),
        ..Default::default()
    };
    client.sandbox().start_sandbox(soon(), &request).await
}

pub async fn status(client: &Client, id: &str) -> ttrpc::Result<wire::SandboxStatusResponse> {
    let request = wire::SandboxStatusRequest {
        sandbox_id: id.into(),
        verbose: true,
        ..Default::default()
    };
    client.sandbox().sandbox_status(soon(), &request).await
}

pub async fn stop(client: &Client, id: &str, secs: u32) -> ttrpc::Result<()> {
    let request = wire::StopSandboxRequest {
        sandbox_id: id.into(),
        timeout_secs: secs,
        ..Default::default()
    };
    client.sandbox().stop_sandbox(soon(), &request).await?;
    Ok(())
}

pub async fn wait(client: &Client, id: &str) -> ttrpc::Result<wire::WaitSandboxResponse> {
    let request = wire::WaitSandboxRequest {
        sandbox_id: id.into(),
        ..Default::default()
    };
    client.sandbox().wait_sandbox(soon(), &request).await
}

pub async fn shutdown(client: &Client, id: &str) -> ttrpc::Result<()> {
    let request = wire::ShutdownSandboxRequest {
        sandbox_id: id.into(),
        ..Default::default()
    };
    client.sandbox().shutdown_sandbox(soon(), &request).await?;
    Ok(())
}

/// A container's bundle of busybox.
pub struct Container {
    pub id: String,
    pub dir: PathBuf,
    rootfs: Rootfs,
}

impl Container {
    /// Runs `script`, with namespaces of its own but those that `edit` takes away; out goes to the file `out`.
    pub fn new(id: &str, script: &str, edit: impl FnOnce(&mut Value)) -> Self {
        let dir = Path::new("/run/bundles").join(id);
        fs::create_dir_all(dir.join("rootfs")).unwrap();
        let namespaces =
            ["pid", "mount", "ipc", "uts", "network"].map(|kind| json!({"type": kind}));
        let mut spec = json!({
            "ociVersion": "1.0.2",
            "process": process(script),
            "root": {"path": "rootfs"},
            "hostname": id,
            "mounts": [
                {"destination": "/proc", "type": "proc", "source": "proc"},
                {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "mode=755"]},
            ],
            "linux": {
                "namespaces": namespaces,
                "cgroupsPath": format!("/default/{id}"),
            },
        });
        edit(&mut spec);
        fs::write(dir.join("config.json"), spec.to_string()).unwrap();
        Self {
            id: id.into(),
            dir,
            rootfs: rootfs::make(),
        }
    }

    pub fn request(&self) -> task::CreateTaskRequest {
        task::CreateTaskRequest {
            id: self.id.clone(),
            bundle: self.dir.display().to_string(),
            rootfs: vec![Mount {
                type_: "bind".into(),
                source: self.rootfs.str().into(),
                options: vec!["rbind".into(), "rw".into()],
                ..Default::default()
            }],
            stdout: format!("file://{}", self.dir.join("out").display()),
            ..Default::default()
        }
    }

    /// With another OCI runtime.
    pub fn request_of(&self, runtime: &Path) -> task::CreateTaskRequest {
        let options = RuncOptions {
            binary_name: runtime.display().to_string(),
            ..Default::default()
        };
        task::CreateTaskRequest {
            options: Some(any::pack(any::RUNC_OPTIONS, &options).unwrap()).into(),
            ..self.request()
        }
    }

    /// Created and started; its pid.
    pub async fn run(&self, client: &Client) -> i32 {
        client.task().create(soon(), &self.request()).await.unwrap();
        self.start(client, "").await
    }

    pub async fn start(&self, client: &Client, exec: &str) -> i32 {
        let request = task::StartRequest {
            id: self.id.clone(),
            exec_id: exec.into(),
            ..Default::default()
        };
        let started = client.task().start(soon(), &request).await.unwrap();
        i32::try_from(started.pid).unwrap()
    }

    /// Registers `script` as an exec with this standard input.
    pub async fn exec(&self, client: &Client, exec: &str, script: &str, stdin: &str) {
        let request = task::ExecProcessRequest {
            id: self.id.clone(),
            exec_id: exec.into(),
            stdin: stdin.into(),
            stdout: format!("file://{}", self.dir.join(exec).display()),
            spec: MessageField::some(Any {
                type_url: any::OCI_PROCESS.into(),
                value: process(script).to_string().into_bytes(),
                ..Default::default()
            }),
            ..Default::default()
        };
        client.task().exec(soon(), &request).await.unwrap();
    }

    /// Wait for its init.
    pub fn wait_request(&self) -> task::WaitRequest {
        task::WaitRequest {
            id: self.id.clone(),
            ..Default::default()
        }
    }

    pub async fn wait(&self, client: &Client, exec: &str) -> ttrpc::Result<u32> {
        let request = task::WaitRequest {
            id: self.id.clone(),
            exec_id: exec.into(),
            ..Default::default()
        };
        Ok(client.task().wait(soon(), &request).await?.exit_status)
    }

    pub async fn kill(&self, client: &Client, signal: u32) {
        let request = task::KillRequest {
            id: self.id.clone(),
            signal,
            ..Default::default()
        };
        client.task().kill(soon(), &request).await.unwrap();
    }

    pub async fn state(&self, client: &Client) -> ttrpc::Result<task::StateResponse> {
        let request = task::StateRequest {
            id: self.id.clone(),
            ..Default::default()
        };
        client.task().state(soon(), &request).await
    }

    pub async fn delete(&self, client: &Client, exec: &str) -> ttrpc::Result<task::DeleteResponse> {
        let request = task::DeleteRequest {
            id: self.id.clone(),
            exec_id: exec.into(),
            ..Default::default()
        };
        client.task().delete(soon(), &request).await
    }

    /// Killed, seen to end, deleted.
    pub async fn remove(&self, client: &Client) {
        self.kill(client, 9).await;
        self.wait(client, "").await.unwrap();
        self.delete(client, "").await.unwrap();
    }

    /// What its init, or an exec, printed.
    pub fn printed(&self, exec: &str) -> String {
        let name = if exec.is_empty() { "out" } else { exec };
        fs::read_to_string(self.dir.join(name)).unwrap_or_default()
    }

    /// Waits for a line that says so.
    pub fn says(&self, line: &str) {
        eventually(BOUND, line, || {
            self.printed("").lines().any(|l| l == line).then_some(())
        });
    }
}

/// Task.Shutdown.
pub async fn shutdown_task(client: &Client, id: &str) -> ttrpc::Result<()> {
    let request = task::ShutdownRequest {
        id: id.into(),
        ..Default::default()
    };
    client.task().shutdown(soon(), &request).await?;
    Ok(())
}

/// Leaves out these namespaces: they are then those of the caller.
pub fn without(kinds: &[&str]) -> impl FnOnce(&mut Value) {
    let kinds: Vec<String> = kinds.iter().map(|k| (*k).to_owned()).collect();
    move |spec| {
        let all = spec["linux"]["namespaces"].as_array_mut().unwrap();
        all.retain(|n| !kinds.iter().any(|k| n["type"] == k.as_str()));
    }
}

fn process(script: &str) -> Value {
    json!({"user": {"uid": 0, "gid": 0}, "args": ["/bin/sh", "-c", script], "env": ["PATH=/bin"], "cwd": "/"})
}

/// A call of the sandbox service as bytes: length, stream 1, request, no flags. Every request begins with the id.
pub fn frame(method: &str, id: &str, timeout_nano: i64) -> Vec<u8> {
    let payload = wire::ShutdownSandboxRequest {
        sandbox_id: id.into(),
        ..Default::default()
    };
    let request = ttrpc::Request {
        service: "containerd.runtime.sandbox.v1.Sandbox".into(),
        method: method.into(),
        payload: payload.write_to_bytes().unwrap(),
        timeout_nano,
        ..Default::default()
    };
    let body = request.write_to_bytes().unwrap();
    let mut frame = u32::try_from(body.len()).unwrap().to_be_bytes().to_vec();
    frame.extend(1_u32.to_be_bytes());
    frame.extend([1, 0]);
    frame.extend(body);
    frame
}

/// User and system time, ticks of 10 ms.
pub fn cpu_ticks(pid: i32) -> u64 {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let fields: Vec<&str> = stat
        .rsplit(')')
        .next()
        .unwrap()
        .split_whitespace()
        .collect();
    fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
}
