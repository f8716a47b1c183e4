//! Containers and execs of one supervisor. STUB of the public surface; bodies to be written.
#![allow(missing_docs, unused_variables, clippy::todo)]
use std::path::PathBuf;
use std::sync::Arc;
use std::time::SystemTime;

use serde::{Deserialize, Serialize};

use crate::config::Config;
use crate::error::Result;
use crate::mount::Mount;
use crate::process::{Identity, Reaper};
use protobuf::well_known_types::any::Any;

/// What the journal keeps of a container, so that `delete` can undo it without us. Saved (state Creating) before the first side effect.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ContainerRecord {
    pub id: String,
    pub bundle: PathBuf,
    /// OCI runtime binary and its --root.
    pub runtime: PathBuf,
    pub root: PathBuf,
    pub systemd_cgroup: bool,
    /// Init, once it exists.
    pub init: Option<Identity>,
    /// cgroup path below the mount points, once known.
    pub cgroup: Option<String>,
    pub rootfs_mounted: bool,
    /// creating, created, running, stopped
    pub status: Status,
    /// Unix nanoseconds.
    pub created_at: u64,
    pub started_at: Option<u64>,
    pub exit: Option<ExitRecord>,
    pub stdin: String,
    pub stdout: String,
    pub stderr: String,
    pub terminal: bool,
}

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct ExitRecord {
    pub code: u32,
    /** unix nanoseconds */
    pub at: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    Creating,
    Created,
    Running,
    Stopped,
    Paused,
}

/// Where containers keep their records; implemented by the pod's journal.
pub trait Ledger: Send + Sync + 'static {
    fn save(&self, record: &ContainerRecord) -> Result<()>;
    fn forget(&self, id: &str) -> Result<()>;
}

/// Where events go, in order: containerd's topic ("/tasks/start") and the packed event. Must not block.
pub trait Events: Send + Sync + 'static {
    fn publish(&self, topic: &'static str, event: Any);
}

/// What the pod gives its containers: applied to config.json in `create` (unknown fields kept).
#[derive(Clone, Debug, Default)]
pub struct PodContext {
    /// Paths for namespaces the spec lists without a path: (type "network"|"ipc"|"uts", path). Never mount; pid only if the pod shares it.
    pub join: Vec<(String, PathBuf)>,
    /// (destination, source, options) added when the spec has no mount at that destination, replacing a fresh tmpfs at /dev/shm.
    pub files: Vec<(PathBuf, PathBuf, Vec<String>)>,
}

#[derive(Clone, Debug, Default)]
pub struct CreateRequest {
    pub id: String,
    pub bundle: PathBuf,
    pub rootfs: Vec<Mount>,
    pub terminal: bool,
    pub stdin: String,
    pub stdout: String,
    pub stderr: String,
    pub checkpoint: String,
    pub options: RuntimeOptions,
    pub pod: Option<PodContext>,
}

/// Options after decoding (runc options, runtimeoptions TOML, or none).
#[derive(Clone, Debug, Default)]
pub struct RuntimeOptions {
    pub binary: String,
    pub root: String,
    pub systemd_cgroup: bool,
    pub no_pivot_root: bool,
    pub no_new_keyring: bool,
    pub io_uid: u32,
    pub io_gid: u32,
    pub shim_cgroup: String,
}

#[derive(Clone, Debug)]
pub struct TaskState {
    pub id: String,
    pub exec_id: String,
    pub bundle: PathBuf,
    pub pid: u32,
    pub status: Status,
    pub stdin: String,
    pub stdout: String,
    pub stderr: String,
    pub terminal: bool,
    pub exit: Option<(u32, SystemTime)>,
}

/// All containers of this supervisor. Cheap to clone. Queries never wait for anything that works.
/// Every state-changing method must be called from a detached task (the service layer does), it is not cancelled.
#[derive(Clone, Debug)]
pub struct Containers {}

impl Containers {
    pub fn new(
        config: Arc<Config>,
        namespace: String,
        reaper: Reaper,
        ledger: Arc<dyn Ledger>,
        events: Arc<dyn Events>,
    ) -> Self {
        todo!()
    }
    pub async fn create(&self, request: CreateRequest) -> Result<u32> {
        todo!()
    }
    /// exec_id "" means the init.
    pub async fn start(&self, id: &str, exec_id: &str) -> Result<u32> {
        todo!()
    }
    pub async fn exec(
        &self,
        id: &str,
        exec_id: &str,
        terminal: bool,
        stdin: &str,
        stdout: &str,
        stderr: &str,
        process_json: &[u8],
    ) -> Result<()> {
        todo!()
    }
    pub fn state(&self, id: &str, exec_id: &str) -> Result<TaskState> {
        todo!()
    }
    pub async fn wait(&self, id: &str, exec_id: &str) -> Result<(u32, SystemTime)> {
        todo!()
    }
    pub async fn kill(&self, id: &str, exec_id: &str, signal: u32, all: bool) -> Result<()> {
        todo!()
    }
    /// (pid, code, exited at)
    pub async fn delete(&self, id: &str, exec_id: &str) -> Result<(u32, u32, SystemTime)> {
        todo!()
    }
    /// (pid, exec id or "")
    pub async fn pids(&self, id: &str) -> Result<Vec<(u32, String)>> {
        todo!()
    }
    pub fn close_io(&self, id: &str, exec_id: &str) -> Result<()> {
        todo!()
    }
    pub async fn pause(&self, id: &str) -> Result<()> {
        todo!()
    }
    pub async fn resume(&self, id: &str) -> Result<()> {
        todo!()
    }
    pub fn stats(&self, id: &str) -> Result<Any> {
        todo!()
    }
    /// Ids of all containers.
    pub fn list(&self) -> Vec<String> {
        todo!()
    }
    /// Stops all: SIGTERM (or the image's signal), after `grace` SIGKILL; in parallel; then deletes each (events included).
    pub async fn stop_all(&self, grace: std::time::Duration, delete: bool) -> Result<()> {
        todo!()
    }
}

/// Undo of one container from its record alone (no supervisor needed): runtime delete --force, kill by cgroup and identity, unmount rootfs,
/// remove its cgroup. Idempotent; absent = done.
pub async fn undo(config: &Config, reaper: &Reaper, record: &ContainerRecord) -> Result<()> {
    todo!()
}
