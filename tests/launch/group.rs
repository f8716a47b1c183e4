//! A group of real containers under one supervisor, made over its socket.
#![allow(dead_code, reason = "each test file uses its own part of this module")]

use std::fs;
use std::path::Path;
use std::time::Duration;

use podvisor::client::{self, Client};
use podvisor::proto::task_v3::shim::{CreateTaskRequest, StartRequest, StateRequest};
use podvisor::proto::types::task::Status;
use serde_json::json;

use crate::daemon::Bundle;
use crate::support;
use crate::support::rootfs::{self, Rootfs};

/// A group `pod` with the running containers `pod`, `c1` and `c2`, as the daemon of 1.6 makes it.
pub struct Group {
    pub bundles: Vec<Bundle>,
    pub address: String,
    pub runtime: tokio::runtime::Runtime,
    _rootfs: Rootfs,
}

impl Group {
    pub fn new(test: &str) -> Self {
        let rootfs = rootfs::make();
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        let bundles: Vec<Bundle> = ["pod", "c1", "c2"]
            .iter()
            .map(|id| Bundle::new(id).config(&config(test, id, &rootfs)))
            .collect();
        let mut address = String::new();
        for bundle in &bundles {
            address = bundle.start().ok().stdout;
            let pid = runtime.block_on(run(&address, bundle));
            assert!(Path::new(&format!("/proc/{pid}")).exists());
        }
        Self {
            bundles,
            address,
            runtime,
            _rootfs: rootfs,
        }
    }

    pub fn bundle(&self, id: &str) -> &Bundle {
        self.bundles.iter().find(|b| b.id == id).unwrap()
    }

    /// Its state and pid, None when the supervisor does not know it.
    pub fn state(&self, id: &str) -> Option<(Status, u32)> {
        self.runtime.block_on(async {
            let client = Client::connect(&self.address).await.unwrap();
            let request = StateRequest {
                id: id.into(),
                ..Default::default()
            };
            let state = client
                .task()
                .state(client::context(Some(Duration::from_secs(10))), &request)
                .await
                .ok()?;
            Some((state.status.enum_value().unwrap(), state.pid))
        })
    }
}

async fn run(address: &str, bundle: &Bundle) -> u32 {
    let client = Client::connect(address).await.unwrap();
    let limit = || client::context(Some(Duration::from_secs(60)));
    let request = CreateTaskRequest {
        id: bundle.id.clone(),
        bundle: bundle.dir.display().to_string(),
        ..Default::default()
    };
    client.task().create(limit(), &request).await.unwrap();
    let request = StartRequest {
        id: bundle.id.clone(),
        ..Default::default()
    };
    client.task().start(limit(), &request).await.unwrap().pid
}

fn config(test: &str, id: &str, rootfs: &Rootfs) -> String {
    let group = support::sandbox::cgroup_name(test);
    json!({
        "ociVersion": "1.0.2",
        "process": {
            "user": {"uid": 0, "gid": 0}, "cwd": "/", "args": ["/bin/sleep", "1000"], "env": ["PATH=/bin"],
        },
        "root": {"path": rootfs.str()},
        "mounts": [{"destination": "/proc", "type": "proc", "source": "proc"}],
        "annotations": {"io.containerd.runc.v2.group": "pod"},
        "linux": {
            "cgroupsPath": format!("/{group}/{id}"),
            "namespaces": [{"type": "pid"}, {"type": "mount"}, {"type": "ipc"}],
        },
    })
    .to_string()
}

/// How many of the containers' processes live.
pub fn sleeps() -> usize {
    let pids = fs::read_dir("/proc")
        .unwrap()
        .flatten()
        .filter_map(|e| e.file_name().to_str()?.parse::<i32>().ok());
    pids.filter(|pid| {
        fs::read(format!("/proc/{pid}/cmdline"))
            .unwrap_or_default()
            .starts_with(b"/bin/sleep\x001000")
    })
    .count()
}
