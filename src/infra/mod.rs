//! The infra process and the pod's own files. STUB of the public surface; bodies to be written.
#![allow(missing_docs, unused_variables, clippy::todo)]
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::error::Result;
use crate::process::{Child, Identity, Reaper};

/// How one namespace of the pod is made.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Namespace {
    /// The host's.
    #[default]
    Host,
    /// A new one, made with the infra process.
    New,
    /// An existing one, by path (bind mount of nsfs, or /proc/<pid>/ns/x).
    Path(PathBuf),
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct IdMapping {
    pub container_id: u32,
    pub host_id: u32,
    pub size: u32,
}

/// What the infra process is made from.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct InfraSpec {
    pub network: Namespace,
    pub ipc: Namespace,
    pub uts: Namespace,
    pub pid: Namespace,
    /// New user namespace with these mappings, or (Path) join.
    pub user: Namespace,
    pub uid_mappings: Vec<IdMapping>,
    pub gid_mappings: Vec<IdMapping>,
    /// Set in the uts namespace when that is New (validated, at most 63 bytes, see `files::hostname`).
    pub hostname: String,
    /// Already checked by `sysctl::check` against the namespaces above; written from inside the namespaces.
    pub sysctls: BTreeMap<String, String>,
    /// Value for oom_score_adj, -998 usually; EACCES/EPERM is a warning.
    pub oom_score_adj: i32,
    /// cgroup directories (absolute, one for v2, one per controller for v1) that the process joins before it runs.
    pub cgroup_dirs: Vec<PathBuf>,
}

/// A pod's infra process: cloned, known by identity, not running yet (blocked before exec).
#[derive(Debug)]
pub struct Prepared {}

impl Prepared {
    pub fn identity(&self) -> Identity {
        todo!()
    }
    /// Lets it run its program; returns when it is seen to run (exec happened) or the error it met (step + errno).
    /// Dropping without `run` makes the child end by itself (its pipe closes).
    pub async fn run(self) -> Result<Child> {
        todo!()
    }
}

/// Clones the infra process into its namespaces: joined cgroup, hostname and sysctls set, root pivoted to an empty
/// read-only tmpfs of its own (holds no host mount, cwd inside), no descriptor but 0 to 2 (all /dev/null),
/// then blocked until `Prepared::run`. Must be called on the runtime's main thread (no allocation after clone in the child).
pub async fn prepare(reaper: &Reaper, spec: &InfraSpec) -> Result<Prepared> {
    todo!()
}

/// Which sysctls a pod may set: allow-list of namespaced keys (net.*, kernel.shm*, kernel.msg*, kernel.sem, fs.mqueue.*,
/// kernel.shm_rmid_forced, kernel.hostname/domainname excluded), with the namespace they need to be New/Path; keys with `..`, `/`-`.` forms
/// normalised; values: no newline, NUL; never re-parsed. Error Invalid names the key and the reason (host network + net.* is refused).
pub fn check_sysctls(
    sysctls: &BTreeMap<String, String>,
    spec: &InfraSpec,
) -> Result<BTreeMap<String, String>> {
    todo!()
}

/// DNS of a pod; `None` in `PodFiles` copies the host's resolv.conf.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Dns {
    pub servers: Vec<String>,
    pub searches: Vec<String>,
    pub options: Vec<String>,
}

/// The pod's files under `<dir>`: hostname, hosts, resolv.conf, and the tmpfs `shm`.
#[derive(Clone, Debug)]
pub struct PodFiles {
    pub hostname: String,
    pub dns: Option<Dns>,
    pub host_network: bool,
    pub host_ipc: bool,
    pub shm_size: u64,
}

/// Paths to bind into containers.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct PodFilePaths {
    pub hostname: PathBuf,
    pub hosts: PathBuf,
    pub resolv_conf: PathBuf,
    pub shm: PathBuf,
}

impl PodFiles {
    /// Writes the files (0644; dir 0700) and mounts shm (tmpfs 1777, nosuid,nodev,noexec, size) unless host ipc (then /dev/shm).
    pub fn make(&self, dir: &Path) -> Result<PodFilePaths> {
        todo!()
    }
    /// Adds `ip hostname` lines to hosts once the pod's addresses are known (rewritten in place, same inode: it may be bind-mounted).
    pub fn set_addresses(&self, dir: &Path, addresses: &[String]) -> Result<()> {
        todo!()
    }
    /// Undo: unmounts shm (detach, repeated until none is left) and removes the files; absent = done.
    pub fn remove(dir: &Path) -> Result<()> {
        todo!()
    }
}

/// A pod name made into a hostname: at most 63 bytes, cut cleanly (never ends in '-' or '.'), lower case letters, digits, '-', '.'.
pub fn hostname(name: &str) -> String {
    todo!()
}
