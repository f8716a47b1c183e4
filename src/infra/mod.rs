//! The infra process, which holds a pod's namespaces, and the pod's own files.
//!
//! Owns: the clone into the namespaces, the tiny program that stays there, the rules for sysctls, hostname, hosts,
//! resolv.conf, the pod's shm, the pins of its namespaces and the SELinux labels of it all. Promises: the process is known
//! before it may run, holds no mount and no descriptor of the host, and a preparation that is given up leaves nothing. Must
//! never touch the network or a container.

mod files;
mod groups;
mod label;
pub mod pins;
mod spawn;
mod sysctl;

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

pub use files::{Dns, PodFilePaths, PodFiles, hostname};
pub use label::{LabelOptions, Labels};
pub use spawn::{PROGRAM, Prepared, prepare};
pub use sysctl::check_sysctls;

/// How one namespace of the pod is made.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Namespace {
    /// The host's.
    #[default]
    Host,
    /// A new one, made with the infra process.
    New,
    /// An existing one, by path (a bind mount of nsfs, or `/proc/<pid>/ns/net`).
    Path(PathBuf),
}

/// One range of a user namespace's map: `size` ids from `container_id` inside are those from `host_id` outside.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct IdMapping {
    /// First id inside.
    pub container_id: u32,
    /// First id outside.
    pub host_id: u32,
    /// How many.
    pub size: u32,
}

/// What the infra process is made from. Its mount namespace is always new.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct InfraSpec {
    /// Network namespace.
    pub network: Namespace,
    /// IPC namespace.
    pub ipc: Namespace,
    /// UTS namespace: the host name.
    pub uts: Namespace,
    /// PID namespace. In a new one the infra process is pid 1; one by path is joined as an ordinary member.
    pub pid: Namespace,
    /// New user namespace with these mappings, or (Path) join. All other new ones are owned by it. Id 0 must be mapped.
    pub user: Namespace,
    /// Of a new user namespace.
    pub uid_mappings: Vec<IdMapping>,
    /// Of a new user namespace.
    pub gid_mappings: Vec<IdMapping>,
    /// Set in the uts namespace when that is New (at most 63 bytes, see [`hostname`]). Empty: the host's stays.
    pub hostname: String,
    /// Checked by [`check_sysctls`] against the namespaces above; written from inside the namespaces.
    pub sysctls: BTreeMap<String, String>,
    /// Value for oom_score_adj, -998 usually; EACCES/EPERM is a warning.
    pub oom_score_adj: i32,
    /// cgroup directories (absolute, one for v2, one per controller for v1) that the process joins before it runs.
    pub cgroup_dirs: Vec<PathBuf>,
    /// SELinux: the label it runs with, where there is one, and that of the file it is executed from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub labels: Option<Labels>,
}
