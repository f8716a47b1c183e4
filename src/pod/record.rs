//! The journal of a pod as others may read it: `<runtime_root>/<namespace>/<sandbox id>/journal.json`.
//!
//! One document, replaced whole (temp file and rename; the directory is a tmpfs). It is what undo works from, what the
//! command lists, and what a supervisor that was killed leaves behind.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::history::Moment;
use super::resources::Resources;
use crate::clock;
use crate::config::Config;
use crate::container::ContainerRecord;
use crate::error::{Context, Error, Kind, Result};
use crate::infra::{InfraSpec, Labels, Namespace, PodFilePaths};
use crate::network::{Facts, NetworkRecord, PodKey, PortMapping, Timing};
use crate::process::Identity;
use crate::sys::dir::check_private;

/// File name of the journal.
pub const FILE: &str = "journal.json";

/// Layout version of the document.
pub const VERSION: u32 = 1;

/// Where the pod is in its life.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// CreateSandbox was accepted; nothing runs yet.
    #[default]
    Created,
    /// A creation job is under way.
    Starting,
    /// Ready.
    Ready,
    /// Finished, but nobody has claimed it: not ready for anyone but a fresh StartSandbox.
    Parked,
    /// Was ready, or failed, and is not any more; see `reason`.
    NotReady,
    /// Stopped on request.
    Stopped,
    /// A supervisor without a sandbox (containers only).
    TaskOnly,
}

/// One stage of the creation (or of the removal) with its time.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Stage {
    /// `create`, `netns`, `cni-add`, `infra`, `ready`, ...: the names used in logs and errors.
    pub name: String,
    /// Microseconds from the first stage of this run to the beginning of this one.
    pub at_us: u64,
    /// How long it took; absent while it is under way.
    pub took_us: Option<u64>,
    /// What went wrong.
    pub error: Option<String>,
}

/// A side effect, its intent written before it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Effect {
    /// Not begun, or undone.
    #[default]
    None,
    /// May have happened.
    Intent,
    /// Happened.
    Done,
}

/// The pod's network as readers see it.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Network {
    /// Name of the CNI network; empty for host network or a netns of the caller's.
    pub name: String,
    /// Where the netns is.
    pub netns: Option<PathBuf>,
    /// The netns and the network are ours to undo.
    pub ours: bool,
    /// Host network.
    pub host: bool,
    /// Addresses with prefix length, order of the plugin's result: those of the first attachment that has any.
    pub ips: Vec<String>,
    /// Every attachment that was added, in order.
    #[serde(default)]
    pub attachments: Vec<Attached>,
    /// Published ports.
    pub ports: Vec<PortMapping>,
    /// Why a DEL is still owed.
    pub pending: Option<String>,
    /// Name of the directory in which the network's own record is; empty: not begun.
    #[serde(default)]
    pub place: String,
    /// An earlier supervisor of the pod had it made.
    #[serde(default)]
    pub taken: Option<TakenOver>,
}

/// Where a network that was not made for this sandbox comes from.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct TakenOver {
    /// Sandbox id of the supervisor that had it before.
    pub from: String,
    /// Unix nanoseconds: when its ADD began.
    pub added_at: u64,
}

/// One attachment to a network.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Attached {
    /// Name of the network.
    pub name: String,
    /// Interface in the pod.
    pub ifname: String,
    /// Addresses with prefix length, order of the plugin's result.
    pub ips: Vec<String>,
    /// Interfaces, addresses with their gateways, routes, DNS.
    #[serde(flatten)]
    pub facts: Facts,
    /// How long each plugin took at ADD.
    pub timings: Vec<Timing>,
}

/// The whole document.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Record {
    /// [`VERSION`].
    pub version: u32,
    /// containerd namespace.
    pub namespace: String,
    /// Sandbox id (task-only: the group id).
    pub id: String,
    /// Pod metadata, empty when none was given.
    pub name: String,
    /// Pod metadata.
    pub uid: String,
    /// Pod's own (Kubernetes) namespace.
    pub pod_namespace: String,
    /// Pod metadata.
    pub attempt: u32,
    /// Digest of the request that made it.
    pub digest: String,
    /// Boot it was made in.
    pub boot_id: String,
    /// Our process.
    pub supervisor: Option<Identity>,
    /// Our socket, `unix:///…`.
    pub address: String,
    /// The bundle `start` ran in.
    pub bundle: PathBuf,
    /// Where it is in its life.
    pub state: State,
    /// Why it is not ready.
    pub reason: Option<String>,
    /// Unix nanoseconds.
    pub created_at: u64,
    /// Unix nanoseconds.
    pub ready_at: Option<u64>,
    /// Unix nanoseconds.
    pub exited_at: Option<u64>,
    /// Exit status of the infra process.
    pub exit_status: Option<u32>,
    /// Stages, in order.
    pub stages: Vec<Stage>,
    /// What happened beside them, in order.
    #[serde(default)]
    pub history: Vec<Moment>,
    /// When what goes on now ([`Record::activity`]) began: microseconds since the boot.
    #[serde(default)]
    pub activity_since_us: u64,
    /// Hostname of the pod.
    pub hostname: String,
    /// Labels of the pod's metadata.
    pub labels: BTreeMap<String, String>,
    /// Annotations of the pod's metadata, the latest.
    pub annotations: BTreeMap<String, String>,
    /// Sum of the containers' limits, the latest that we were told.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resources: Option<Box<Resources>>,
    /// What the pod itself is counted as, beside its containers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub overhead: Option<Box<Resources>>,
    /// The network.
    pub network: Network,
    /// Effects, for undo.
    pub effects: Effects,
    /// The infra process.
    pub infra: Option<Identity>,
    /// What it was made from.
    pub infra_spec: Option<InfraSpec>,
    /// Directory with the pins of the namespaces that were made with it, while they are there.
    #[serde(default)]
    pub pins: Option<PathBuf>,
    /// cgroup of the pod (below the mount points).
    pub cgroup: Option<String>,
    /// The pod's cgroup directory is ours to remove.
    pub cgroup_ours: bool,
    /// cgroup of the infra process.
    pub infra_cgroup: Option<String>,
    /// Pod files.
    pub files: Option<PodFilePaths>,
    /// SELinux labels of the files, the shm and the infra process, on a node that has any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub selinux: Option<Labels>,
    /// Containers by id.
    pub containers: BTreeMap<String, ContainerRecord>,
}

/// Side effects of the creation, in order.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct Effects {
    /// Pod files and shm.
    pub files: Effect,
    /// cgroups.
    pub cgroup: Effect,
    /// netns of ours.
    pub netns: Effect,
    /// CNI ADD; the record on disk decides about DEL, this is for readers.
    pub cni: Effect,
    /// Infra process.
    pub infra: Effect,
    /// Pins of the namespaces that were made with it.
    #[serde(default)]
    pub pins: Effect,
}

impl Effects {
    /// Something that StartSandbox makes is there, or may be.
    pub fn owe_creation(&self) -> bool {
        [self.cgroup, self.netns, self.cni, self.infra, self.pins]
            .iter()
            .any(|effect| *effect != Effect::None)
    }
}

impl Record {
    /// The record of its network, as this sandbox sees it.
    pub fn network_record(&self, config: &Config) -> NetworkRecord {
        let place = self.network.place.as_str();
        let record = if !place.is_empty() && place.bytes().all(|b| b.is_ascii_hexdigit()) {
            NetworkRecord::in_place(config, place, &self.namespace, &self.id)
        } else {
            NetworkRecord::at(config, &self.namespace, &self.id)
        };
        record.as_of(&self.id, self.supervisor)
    }

    /// What its network is found by under another sandbox id; None without metadata or without a network of ours.
    pub fn pod_key(&self) -> Option<PodKey> {
        PodKey::new(
            &self.namespace,
            &self.pod_namespace,
            &self.name,
            &self.uid,
            self.attempt,
        )
        .filter(|_| self.network.ours)
    }

    /// "network taken over from p1, ADD ran 12 s ago", where it was.
    pub fn taken_over(&self) -> Option<String> {
        let taken = self.network.taken.as_ref()?;
        let at = clock::from_unix_nanos(taken.added_at);
        let age = at.elapsed().unwrap_or_default().as_secs();
        Some(format!(
            "network taken over from {}, ADD ran {age} s ago",
            taken.from
        ))
    }

    /// Its containers see the host's IPC objects.
    pub fn has_host_ipc(&self) -> bool {
        let infra = self.infra_spec.as_ref();
        infra.is_some_and(|infra| infra.ipc == Namespace::Host)
    }

    /// Its containers see the host's processes.
    pub fn has_host_pids(&self) -> bool {
        let infra = self.infra_spec.as_ref();
        infra.is_some_and(|infra| infra.pid == Namespace::Host)
    }

    /// True while the supervisor that wrote it lives.
    pub fn is_supervised(&self) -> bool {
        // After a reboot the pid, and even its start time, may be another's.
        self.supervisor.is_some_and(|s| s.is_alive()) && self.boot_id == clock::boot_id()
    }
}

/// What reading one state directory gave.
#[derive(Debug)]
pub enum Found {
    /// A good record.
    Record(Box<Record>),
    /// The directory is there, its journal is missing, empty or cut in half: shown as "unrecovered", can be removed.
    Broken {
        /// Namespace.
        namespace: String,
        /// Id, from the directory's name.
        id: String,
        /// Why.
        reason: String,
    },
}

/// Reads the journal of one sandbox.
///
/// # Errors
/// Denied when the directory is not ours alone: what the journal says will be signalled, unmounted and removed.
pub fn read(dir: &Path) -> Result<Record> {
    check_private(dir)?;
    let path = dir.join(FILE);
    let text = fs::read(&path).context(|| format!("read {}", path.display()))?;
    let id = dir.file_name().unwrap_or_default().display();
    if text.is_empty() {
        return Err(Error::new(
            Kind::Invalid,
            format!(
                "read {}: the file is empty; remove the pod with `podvisor rm -f {id}`",
                path.display()
            ),
        ));
    }
    serde_json::from_slice(&text).map_err(|e| {
        Error::caused(
            Kind::Invalid,
            format!(
                "read {}: cut off or damaged; remove the pod with `podvisor rm -f {id}`",
                path.display()
            ),
            e,
        )
    })
}

/// The sandbox of `namespace` that has this directory; None when it has gone, if only while one looked.
pub fn look(dir: &Path, namespace: &str) -> Option<Found> {
    match read(dir) {
        Ok(record) => Some(Found::Record(Box::new(record))),
        Err(_) if !dir.exists() => None,
        Err(e) => Some(Found::Broken {
            namespace: namespace.to_owned(),
            id: dir.file_name()?.to_str()?.to_owned(),
            reason: e.to_string(),
        }),
    }
}

/// Every sandbox of `namespace` (or of all), sorted by creation, broken ones last.
pub fn list(config: &Config, namespace: Option<&str>) -> Vec<Found> {
    let mut found: Vec<Found> = Vec::new();
    for space in directories(&config.runtime_root) {
        // `s` and `netns` are ours beside the namespaces; see decisions on paths in docs/journal.md.
        if crate::id::RESERVED.contains(&space.as_str()) || namespace.is_some_and(|n| n != space) {
            continue;
        }
        let root = config.runtime_root.join(&space);
        for id in directories(&root) {
            found.extend(look(&root.join(&id), &space));
        }
    }
    found.sort_by_key(|f| match f {
        Found::Record(r) => (0, r.created_at, r.id.clone()),
        Found::Broken { id, .. } => (1, 0, id.clone()),
    });
    found
}

/// Ids of the sandboxes of `namespace`, in no order; nothing is read.
pub fn ids(config: &Config, namespace: &str) -> Vec<String> {
    directories(&config.runtime_root.join(namespace))
}

fn directories(root: &Path) -> Vec<String> {
    let Ok(entries) = fs::read_dir(root) else {
        return Vec::new();
    };
    entries
        .flatten()
        .filter(|e| e.file_type().is_ok_and(|t| t.is_dir()))
        .filter_map(|e| e.file_name().into_string().ok())
        .filter(|name| crate::id::check("directory", name).is_ok())
        .collect()
}
