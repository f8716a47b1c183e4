//! What others keep for us or hear from us: the journal's record of a container, where it goes, where events go.

use std::path::PathBuf;

use protobuf::well_known_types::any::Any;
use serde::{Deserialize, Serialize};

use crate::error::Result;
use crate::process::Identity;

/// What the journal keeps of a container, so that `delete` can undo it without us. Saved (state Creating) before the
/// first side effect.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ContainerRecord {
    /// The container.
    pub id: String,
    /// Its bundle.
    pub bundle: PathBuf,
    /// OCI runtime binary.
    pub runtime: PathBuf,
    /// The runtime's `--root`.
    pub root: PathBuf,
    /// The runtime's `--systemd-cgroup`.
    pub systemd_cgroup: bool,
    /// Init, once it exists.
    pub init: Option<Identity>,
    /// cgroup path below the mount points: from the spec before create, from /proc after. None: not known, or not ours.
    pub cgroup: Option<String>,
    /// Something may be mounted at `<bundle>/rootfs`.
    pub rootfs_mounted: bool,
    /// Where it is in its life.
    pub status: Status,
    /// Unix nanoseconds.
    pub created_at: u64,
    /// When its creation ended with nobody there to take it, Unix nanoseconds; None once somebody has.
    #[serde(default)]
    pub parked_at: Option<u64>,
    /// Unix nanoseconds.
    pub started_at: Option<u64>,
    /// How init ended.
    pub exit: Option<ExitRecord>,
    /// How many of its processes the kernel killed for want of memory.
    #[serde(default)]
    pub oom_kills: u64,
    /// Whose limit was hit at the last of these.
    #[serde(default)]
    pub oom_limit: Option<OomLimit>,
    /// Verbatim from the request; so the three below.
    pub stdin: String,
    /// See `stdin`.
    pub stdout: String,
    /// See `stdin`.
    pub stderr: String,
    /// See `stdin`.
    pub terminal: bool,
    /// The logging program that reads the outputs.
    #[serde(default)]
    pub logger: Option<Identity>,
}

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExitRecord {
    /// Exit code, or 128 + signal.
    pub code: u32,
    /// Unix nanoseconds.
    pub at: u64,
}

/// Whose memory was used up when the kernel killed a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OomLimit {
    /// The container's, or that of a group that it has made in its own.
    Container,
    /// That of its pod or of a group above, or the machine's.
    Above,
}

/// Where a container or an exec is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    /// Being made: may have left anything behind.
    Creating,
    /// Made, and nobody was there to take it: waits for the next request, or for its end.
    Parked,
    /// Init exists and waits.
    Created,
    /// The program runs.
    Running,
    /// Ended.
    Stopped,
    /// Frozen.
    Paused,
}

/// Where containers keep their records; implemented by the pod's journal.
pub trait Ledger: Send + Sync + 'static {
    /// Stores the newest record of a container.
    ///
    /// # Errors
    /// When it is not safely stored; before a side effect this stops the work.
    fn save(&self, record: &ContainerRecord) -> Result<()>;
    /// Drops it: nothing of the container is left. Unknown ids are done.
    ///
    /// # Errors
    /// When it may still be there.
    fn forget(&self, id: &str) -> Result<()>;
}

/// Where events go, in order: containerd's topic ("/tasks/start") and the packed event. Must not block, and must not
/// call back into the containers: it is called under a container's lock, which is what keeps the order.
pub trait Events: Send + Sync + 'static {
    /// Takes one event.
    fn publish(&self, topic: &'static str, event: Any);
}
