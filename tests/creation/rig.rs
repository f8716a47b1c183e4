//! One pod of the real shim, driven as a daemon drives it: `start` in a bundle, then ttrpc over the real socket.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a harness that cannot go on panics"
)]

use std::fs;
use std::future::Future;
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use podvisor::client::{self, Client};
use podvisor::error::{Error, Result};
use podvisor::pod::record::{self, Record};
use podvisor::proto::any;
use podvisor::proto::cri::sandbox_config::{
    LinuxPodSandboxConfig, LinuxSandboxSecurityContext, NamespaceMode, NamespaceOption,
    PodSandboxConfig, PodSandboxMetadata,
};
use podvisor::proto::sandbox::sandbox as wire;
use podvisor::proto::task_v3::mount::Mount;
use podvisor::proto::task_v3::shim as task;
use protobuf::MessageField;
use serde_json::json;

use crate::daemon::{Bundle, signal};
use crate::support::fake::{self, Fake};
use crate::support::rootfs::Rootfs;
use crate::support::{cni, eventually};

/// The namespace that `Bundle` names.
pub const NAMESPACE: &str = "test";

/// A call that takes longer than this hangs.
pub const BOUND: Duration = Duration::from_secs(60);

/// Podvisor's settings for everything that runs in the sandbox.
pub fn settings(toml: &str) {
    fs::write("/etc/podvisor/config.toml", toml).unwrap();
}

/// A network `slow` of one fake plugin.
pub fn fake_network() -> Fake {
    let plugin = fake::plugin(Path::new(cni::PLUGINS), "fake");
    cni::network("slow", vec![json!({"type": "fake"})]).write();
    plugin
}

/// What CRI would send for a pod called `name`.
pub fn config(name: &str) -> PodSandboxConfig {
    let metadata = PodSandboxMetadata {
        name: name.into(),
        uid: format!("uid-{name}"),
        namespace: "apps".into(),
        ..Default::default()
    };
    PodSandboxConfig {
        metadata: MessageField::some(metadata),
        hostname: name.into(),
        ..Default::default()
    }
}

/// The same on the host's network.
pub fn host_config(name: &str) -> PodSandboxConfig {
    let options = NamespaceOption {
        network: NamespaceMode::NODE.into(),
        ..Default::default()
    };
    let security = LinuxSandboxSecurityContext {
        namespace_options: MessageField::some(options),
        ..Default::default()
    };
    let linux = LinuxPodSandboxConfig {
        security_context: MessageField::some(security),
        ..Default::default()
    };
    let mut config = config(name);
    config.hostname.clear();
    config.linux = MessageField::some(linux);
    config
}

/// A supervisor that `start` made.
pub struct Pod {
    pub id: String,
    pub bundle: Bundle,
    pub socket: PathBuf,
}

impl Pod {
    /// Its supervisor, given nothing yet.
    pub fn launch(id: &str) -> Self {
        Self::in_bundle(Bundle::new(id))
    }

    pub fn in_bundle(bundle: Bundle) -> Self {
        Self {
            id: bundle.id.clone(),
            socket: bundle.address(),
            bundle,
        }
    }

    /// Created.
    pub fn create(id: &str) -> Self {
        let pod = Self::launch(id);
        pod.probe().create(id, &config(id)).unwrap();
        pod
    }

    /// Ready.
    pub fn up(id: &str) -> Self {
        let pod = Self::create(id);
        pod.probe().start(id, BOUND).unwrap();
        pod
    }

    /// A new connection.
    pub fn probe(&self) -> Probe {
        Probe::connect(&self.socket)
    }

    /// `call` with a connection and a thread of its own.
    pub fn aside<T: Send + 'static>(
        &self,
        call: impl FnOnce(&Probe) -> T + Send + 'static,
    ) -> JoinHandle<T> {
        let socket = self.socket.clone();
        std::thread::spawn(move || call(&Probe::connect(&socket)))
    }

    /// StartSandbox with a deadline, aside.
    pub fn start_aside(&self, limit: Duration) -> JoinHandle<Result<u32>> {
        let id = self.id.clone();
        self.aside(move |probe| probe.start(&id, limit))
    }

    pub fn dir(&self) -> PathBuf {
        Path::new("/run/podvisor").join(NAMESPACE).join(&self.id)
    }

    /// Its journal, `None` when there is none.
    pub fn record(&self) -> Option<Record> {
        record::read(&self.dir()).ok()
    }

    /// Pid of the supervisor, by its journal.
    pub fn supervisor(&self) -> i32 {
        self.record().unwrap().supervisor.unwrap().pid
    }

    /// SIGKILL to the supervisor, and its end.
    pub fn kill_supervisor(&self) {
        kill(self.supervisor());
    }

    /// Ends in good order.
    pub fn end(&self) {
        let probe = self.probe();
        probe.stop(&self.id).unwrap();
        probe.shutdown(&self.id).unwrap();
    }
}

/// SIGKILL, until the process has ended.
pub fn kill(pid: i32) {
    signal(pid, Signal::SIGKILL);
    gone(pid);
}

/// Waits until a process has ended (a zombie has).
pub fn gone(pid: i32) {
    eventually(Duration::from_secs(20), &format!("{pid} ends"), || {
        (!alive(pid)).then_some(())
    });
}

pub fn alive(pid: i32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ")
        .is_some_and(|(_, rest)| !rest.starts_with(['Z', 'X']))
}

/// Blocks until the fake was called so often.
pub fn called(plugin: &Fake, verb: &str, times: usize) {
    eventually(
        Duration::from_secs(30),
        &format!("{verb} is called"),
        || (plugin.count(verb) >= times).then_some(()),
    );
}

/// How many mounts of network namespaces there are.
pub fn netns_mounts() -> usize {
    let table = fs::read_to_string("/proc/self/mountinfo").unwrap();
    let at = |l: &str| l.split(' ').nth(4).is_some_and(|p| p.contains("/netns/"));
    table
        .lines()
        .filter(|l| l.contains(" - nsfs ") && at(l))
        .count()
}

/// One connection and its calls, blocking.
pub struct Probe {
    runtime: tokio::runtime::Runtime,
    pub client: Client,
}

impl Probe {
    pub fn connect(socket: &Path) -> Self {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        let client = runtime
            .block_on(Client::connect(socket.to_str().unwrap()))
            .unwrap();
        Self { runtime, client }
    }

    /// `None`: nobody listens there any more.
    pub fn try_connect(socket: &Path) -> Option<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        let client = runtime.block_on(Client::connect(socket.to_str()?)).ok()?;
        Some(Self { runtime, client })
    }

    pub fn block<T>(&self, work: impl Future<Output = T>) -> T {
        self.runtime.block_on(work)
    }

    fn call<T>(&self, what: &str, work: impl Future<Output = ttrpc::Result<T>>) -> Result<T> {
        let begin = Instant::now();
        let answer = self.block(work).map_err(|e| client::from_ttrpc(what, e));
        println!(
            "{what}: {} after {:?}",
            answer
                .as_ref()
                .map_or_else(Error::to_string, |_| "ok".into()),
            begin.elapsed()
        );
        answer
    }

    pub fn create(&self, id: &str, config: &PodSandboxConfig) -> Result<()> {
        let request = wire::CreateSandboxRequest {
            sandbox_id: id.into(),
            bundle_path: format!("/run/bundles/{id}"),
            options: Some(any::pack(any::POD_SANDBOX_CONFIG, config).unwrap()).into(),
            ..Default::default()
        };
        let call = self.client.sandbox();
        self.call("create", call.create_sandbox(limit(BOUND), &request))
            .map(drop)
    }

    /// With nothing but the bundle, as a daemon that wrote a spec there.
    pub fn create_bare(&self, id: &str) -> Result<()> {
        let request = wire::CreateSandboxRequest {
            sandbox_id: id.into(),
            bundle_path: format!("/run/bundles/{id}"),
            ..Default::default()
        };
        let call = self.client.sandbox();
        self.call("create", call.create_sandbox(limit(BOUND), &request))
            .map(drop)
    }

    pub fn start(&self, id: &str, deadline: Duration) -> Result<u32> {
        let request = wire::StartSandboxRequest {
            sandbox_id: id.into(),
            ..Default::default()
        };
        let call = self.client.sandbox();
        self.call("start", call.start_sandbox(limit(deadline), &request))
            .map(|answer| answer.pid)
    }

    /// StartSandbox, and the connection is closed after `after`, answered or not.
    pub fn start_or_hang_up(self, id: &str, after: Duration) {
        let request = wire::StartSandboxRequest {
            sandbox_id: id.into(),
            ..Default::default()
        };
        let call = self.client.sandbox();
        let _ = self.block(async {
            tokio::time::timeout(after, call.start_sandbox(limit(BOUND), &request)).await
        });
    }

    /// StartSandbox, and the connection is closed after `after` with the request unanswered.
    pub fn start_and_hang_up(self, id: &str, after: Duration) {
        let request = wire::StartSandboxRequest {
            sandbox_id: id.into(),
            ..Default::default()
        };
        let call = self.client.sandbox();
        let answer = self.block(async {
            tokio::time::timeout(after, call.start_sandbox(limit(BOUND), &request)).await
        });
        assert!(answer.is_err(), "answered: {answer:?}");
    }

    /// `SANDBOX_READY` or `SANDBOX_NOTREADY`, and the pid.
    pub fn status(&self, id: &str) -> Result<(String, u32)> {
        let request = wire::SandboxStatusRequest {
            sandbox_id: id.into(),
            verbose: true,
            ..Default::default()
        };
        let call = self.client.sandbox();
        self.call("status", call.sandbox_status(limit(BOUND), &request))
            .map(|answer| (answer.state, answer.pid))
    }

    pub fn stop(&self, id: &str) -> Result<()> {
        let request = wire::StopSandboxRequest {
            sandbox_id: id.into(),
            timeout_secs: 1,
            ..Default::default()
        };
        let call = self.client.sandbox();
        self.call("stop", call.stop_sandbox(limit(BOUND), &request))
            .map(drop)
    }

    pub fn shutdown(&self, id: &str) -> Result<()> {
        let request = wire::ShutdownSandboxRequest {
            sandbox_id: id.into(),
            ..Default::default()
        };
        let call = self.client.sandbox();
        self.call("shutdown", call.shutdown_sandbox(limit(BOUND), &request))
            .map(drop)
    }

    /// WaitSandbox: the exit status.
    pub fn wait(&self, id: &str) -> Result<u32> {
        let request = wire::WaitSandboxRequest {
            sandbox_id: id.into(),
            ..Default::default()
        };
        let call = self.client.sandbox();
        self.call("wait", call.wait_sandbox(limit(BOUND), &request))
            .map(|answer| answer.exit_status)
    }

    /// Task.Create of a bundle that [`container`] wrote.
    pub fn create_task(&self, bundle: &Bundle, rootfs: &Rootfs) -> Result<u32> {
        let request = task::CreateTaskRequest {
            id: bundle.id.clone(),
            bundle: bundle.dir.display().to_string(),
            rootfs: vec![Mount {
                type_: "bind".into(),
                source: rootfs.str().into(),
                options: vec!["rbind".into(), "rw".into()],
                ..Default::default()
            }],
            ..Default::default()
        };
        let call = self.client.task();
        self.call("task create", call.create(limit(BOUND), &request))
            .map(|answer| answer.pid)
    }

    pub fn start_task(&self, id: &str) -> Result<u32> {
        let request = task::StartRequest {
            id: id.into(),
            ..Default::default()
        };
        let call = self.client.task();
        self.call("task start", call.start(limit(BOUND), &request))
            .map(|answer| answer.pid)
    }

    /// Status by its name (`RUNNING`).
    pub fn task_state(&self, id: &str) -> Result<String> {
        let request = task::StateRequest {
            id: id.into(),
            ..Default::default()
        };
        let call = self.client.task();
        self.call("task state", call.state(limit(BOUND), &request))
            .map(|answer| format!("{:?}", answer.status.enum_value_or_default()))
    }

    /// Creates and starts.
    pub fn run_task(&self, bundle: &Bundle, rootfs: &Rootfs) -> u32 {
        let pid = self.create_task(bundle, rootfs).unwrap();
        self.start_task(&bundle.id).unwrap();
        pid
    }
}

/// A ttrpc context with this deadline.
pub fn limit(deadline: Duration) -> ttrpc::context::Context {
    client::context(Some(deadline))
}

/// A container's bundle, as containerd writes it.
pub fn container(id: &str, script: &str) -> Bundle {
    let namespaces = ["pid", "mount", "ipc", "uts", "network"].map(|kind| json!({"type": kind}));
    let spec = json!({
        "ociVersion": "1.0.2",
        "process": {
            "user": {"uid": 0, "gid": 0}, "args": ["/bin/sh", "-c", script], "env": ["PATH=/bin"], "cwd": "/",
        },
        "root": {"path": "rootfs"},
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "mode=755"]},
        ],
        "linux": {"namespaces": namespaces, "cgroupsPath": format!("/default/{id}")},
    });
    let bundle = Bundle::new(id).config(&spec.to_string());
    fs::create_dir_all(bundle.dir.join("rootfs")).unwrap();
    bundle
}
