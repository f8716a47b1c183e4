//! A ready pod, an OCI runtime that waits where it is told to, and Task calls with deadlines.

use std::path::{Path, PathBuf};
use std::thread::JoinHandle;
use std::time::Duration;

use podvisor::client;
use podvisor::container::Status;
use podvisor::error::Result;
use podvisor::proto::any;
use podvisor::proto::runtimeoptions::runtimeoptions::Options;
use podvisor::proto::task_v3::mount::Mount;
use podvisor::proto::task_v3::shim as task;
use protobuf::well_known_types::any::Any;

use crate::daemon::Bundle;
use crate::rig::{self, BOUND, Pod, Probe, limit};
use crate::support::fake::{self, Act, Fake};
use crate::support::rootfs::{self, Rootfs};
use crate::support::{Snapshot, eventually, require, sandboxed};

/// How long whoever gives up waits.
pub const SHORT: Duration = Duration::from_millis(1000);

/// The pod and its runtime.
pub struct Kit {
    pub pod: Pod,
    pub runtime: Fake,
    pub rootfs: Rootfs,
    pub before: Snapshot,
    /// Of the sandbox alone, for what is made again and again.
    pub with_pod: Snapshot,
}

/// Runs `body` on machines with a ready pod on the host's network, for every OCI runtime that is there.
pub fn each_runtime(name: &str, settings: &str, body: impl Fn(&Kit)) {
    sandboxed(name, || {
        for real in ["runc", "crun"] {
            if let Some(real) = require::tool(real).then(|| require::find(real)).flatten() {
                println!("--- {}", real.display());
                rig::settings(settings);
                let kit = Kit::new(&real);
                body(&kit);
                kit.end();
            }
        }
    });
}

/// The same with runc alone.
pub fn with_runc(name: &str, settings: &str, body: impl FnOnce(&Kit)) {
    sandboxed(name, || {
        rig::settings(settings);
        let kit = Kit::new(&require::find("runc").unwrap());
        body(&kit);
        kit.end();
    });
}

/// A runtime in front of `real`, kept where both a daemon and the command find it.
pub fn runtime(real: &Path) -> Fake {
    fake::runtime_before(Path::new("/run/fakes"), "slow", real)
}

impl Kit {
    fn new(real: &Path) -> Self {
        let _ = std::fs::remove_file("/run/gate");
        let (runtime, rootfs) = (runtime(real), rootfs::make());
        let before = Snapshot::take();
        let pod = Pod::launch("p1");
        pod.probe().create("p1", &rig::host_config("p1")).unwrap();
        pod.probe().start("p1", BOUND).unwrap();
        Self {
            pod,
            runtime,
            rootfs,
            before,
            with_pod: Snapshot::take(),
        }
    }

    fn end(&self) {
        if !self.pod.dir().exists() {
            return self.before.assert_unchanged();
        }
        self.pod.end();
        self.before.assert_unchanged();
        let _ = std::fs::remove_dir_all(&self.pod.bundle.dir);
        let _ = std::fs::remove_dir_all("/run/bundles");
    }

    /// The verb waits from now on until [`open`].
    pub fn closed(&self, verb: &str) -> PathBuf {
        let gate = PathBuf::from("/run/gate");
        let _ = std::fs::remove_file(&gate);
        self.runtime.on(verb, &[Act::WaitFor(gate.clone())]);
        gate
    }

    /// What creates `bundle`.
    pub fn request(&self, bundle: &Bundle) -> task::CreateTaskRequest {
        task::CreateTaskRequest {
            id: bundle.id.clone(),
            bundle: bundle.dir.display().to_string(),
            rootfs: vec![Mount {
                type_: "bind".into(),
                source: self.rootfs.str().into(),
                options: vec!["rbind".into(), "rw".into()],
                ..Default::default()
            }],
            options: Some(options(&self.runtime)).into(),
            ..Default::default()
        }
    }

    pub fn create(&self, bundle: &Bundle, deadline: Duration) -> Result<u32> {
        create(&self.pod.probe(), &self.request(bundle), deadline)
    }

    pub fn create_aside(&self, bundle: &Bundle, deadline: Duration) -> JoinHandle<Result<u32>> {
        let request = self.request(bundle);
        self.pod
            .aside(move |probe| create(probe, &request, deadline))
    }

    pub fn start_aside(&self, id: &str, exec: &str, deadline: Duration) -> JoinHandle<Result<u32>> {
        let (id, exec) = (id.to_owned(), exec.to_owned());
        self.pod
            .aside(move |probe| start(probe, &id, &exec, deadline))
    }

    /// A container whose creation its caller left, and which is parked.
    pub fn parked(&self, id: &str) -> Bundle {
        let gate = self.closed("CREATE");
        let bundle = rig::container(id, "sleep 1000");
        self.create(&bundle, SHORT).unwrap_err();
        std::fs::write(&gate, "").unwrap();
        self.until(id, Some(Status::Parked));
        self.runtime.on("CREATE", &[]);
        bundle
    }

    /// Until the journal has the container in this state, or not at all.
    pub fn until(&self, id: &str, status: Option<Status>) {
        eventually(BOUND, &format!("{id} is {status:?}"), || {
            let record = self.pod.record()?;
            (record.containers.get(id).map(|c| c.status) == status).then_some(())
        });
    }

    /// Kill, wait, delete.
    pub fn remove(&self, id: &str) {
        let probe = self.pod.probe();
        kill(&probe, id, 9).unwrap();
        wait(&probe, id).unwrap();
        delete(&probe, id).unwrap();
    }
}

/// Names the runtime as a daemon does.
pub fn options(runtime: &Fake) -> Any {
    let body = format!("BinaryName = \"{}\"\n", runtime.path.display());
    let options = Options {
        config_body: body.into_bytes(),
        ..Default::default()
    };
    any::pack(any::RUNTIME_OPTIONS, &options).unwrap()
}

pub fn open(gate: &Path) {
    std::fs::write(gate, "").unwrap();
}

fn call<T>(probe: &Probe, what: &str, work: impl Future<Output = ttrpc::Result<T>>) -> Result<T> {
    let answer = probe.block(work).map_err(|e| client::from_ttrpc(what, e));
    let told = answer
        .as_ref()
        .map_or_else(ToString::to_string, |_| "ok".into());
    println!("{what}: {told}");
    answer
}

pub fn create(probe: &Probe, request: &task::CreateTaskRequest, deadline: Duration) -> Result<u32> {
    let tasks = probe.client.task();
    call(probe, "create", tasks.create(limit(deadline), request)).map(|a| a.pid)
}

/// Task.Create, and the connection is closed with the request unanswered.
pub fn create_and_hang_up(probe: Probe, request: &task::CreateTaskRequest, after: Duration) {
    let tasks = probe.client.task();
    let answer = probe
        .block(async { tokio::time::timeout(after, tasks.create(limit(BOUND), request)).await });
    assert!(answer.is_err(), "answered: {answer:?}");
}

pub fn start(probe: &Probe, id: &str, exec_id: &str, deadline: Duration) -> Result<u32> {
    let request = task::StartRequest {
        id: id.into(),
        exec_id: exec_id.into(),
        ..Default::default()
    };
    let tasks = probe.client.task();
    call(probe, "start", tasks.start(limit(deadline), &request)).map(|a| a.pid)
}

pub fn exec(probe: &Probe, id: &str, exec_id: &str, script: &str) -> Result<()> {
    let process = serde_json::json!({
        "user": {"uid": 0, "gid": 0}, "args": ["/bin/sh", "-c", script], "env": ["PATH=/bin"], "cwd": "/",
    });
    let spec = Any {
        type_url: "types.containerd.io/opencontainers/runtime-spec/1/Process".into(),
        value: process.to_string().into_bytes(),
        ..Default::default()
    };
    let request = task::ExecProcessRequest {
        id: id.into(),
        exec_id: exec_id.into(),
        spec: Some(spec).into(),
        ..Default::default()
    };
    let tasks = probe.client.task();
    call(probe, "exec", tasks.exec(limit(BOUND), &request)).map(drop)
}

pub fn kill(probe: &Probe, id: &str, signal: u32) -> Result<()> {
    let request = task::KillRequest {
        id: id.into(),
        signal,
        ..Default::default()
    };
    let tasks = probe.client.task();
    call(probe, "kill", tasks.kill(limit(BOUND), &request)).map(drop)
}

/// The exit status.
pub fn wait(probe: &Probe, id: &str) -> Result<u32> {
    let request = task::WaitRequest {
        id: id.into(),
        ..Default::default()
    };
    let tasks = probe.client.task();
    call(probe, "wait", tasks.wait(limit(BOUND), &request)).map(|a| a.exit_status)
}

/// The exit status.
pub fn delete(probe: &Probe, id: &str) -> Result<u32> {
    let request = task::DeleteRequest {
        id: id.into(),
        ..Default::default()
    };
    let tasks = probe.client.task();
    call(probe, "delete", tasks.delete(limit(BOUND), &request)).map(|a| a.exit_status)
}

pub fn pids(probe: &Probe, id: &str) -> Result<usize> {
    let request = task::PidsRequest {
        id: id.into(),
        ..Default::default()
    };
    let tasks = probe.client.task();
    call(probe, "pids", tasks.pids(limit(BOUND), &request)).map(|a| a.processes.len())
}
