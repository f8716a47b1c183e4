//! CNI from the runtime's side, and the pod's netns. STUB of the public surface; bodies to be written.
#![allow(missing_docs, unused_variables, clippy::todo)]
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::config::Config;
use crate::error::Result;
use crate::process::Reaper;

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PortMapping {
    #[serde(rename = "hostPort")]
    pub host_port: u16,
    #[serde(rename = "containerPort")]
    pub container_port: u16,
    /// tcp, udp or sctp, lower case.
    pub protocol: String,
    #[serde(rename = "hostIP", default, skip_serializing_if = "String::is_empty")]
    pub host_ip: String,
}

/// A loaded configuration list: exact bytes are kept, so that DEL uses the configuration of its ADD.
#[derive(Clone, Debug)]
pub struct NetworkConf {
    pub name: String,
    pub path: PathBuf,
    pub cni_version: String,
    pub bytes: Vec<u8>,
    pub plugins: Vec<Value>,
    pub disable_check: bool,
}

/// Loads by network name, or (None) the first good file by name order; .conflist, .conf, .json. Bad files are warned about and skipped,
/// unless the named network is among the broken ones: then the error names the file. NotFound lists the names there are.
pub fn load_conf(config: &Config, name: Option<&str>) -> Result<NetworkConf> {
    todo!()
}
/// (name, path) of every network configured.
pub fn list_confs(config: &Config) -> Vec<(String, PathBuf)> {
    todo!()
}

/// What ADD and DEL are given beside the configuration. Serialised into the on-disk record: DEL uses exactly this.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Attachment {
    /// CNI_CONTAINERID: the sandbox id.
    pub container_id: String,
    pub netns: PathBuf,
    pub ifname: String,
    /// CNI_ARGS in order.
    pub args: Vec<(String, String)>,
    pub port_mappings: Vec<PortMapping>,
    /// Further capability args (dns, bandwidth ...), by capability name.
    #[serde(default)]
    pub capabilities: serde_json::Map<String, Value>,
}

/// What ADD gave.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct AddResult {
    /// Addresses of interfaces in the sandbox, "10.1.2.3/24", order kept.
    pub ips: Vec<String>,
    /// The whole result of the last plugin.
    pub raw: Value,
}

/// The on-disk record of one pod's network, in `<state_root>/networks/<hash>/` (hash of namespace + sandbox id or pod key).
/// Survives a reboot: temp file, fsync, rename, fsync of the directory. Files: `add-started.json` (conf bytes, attachment, boot id,
/// namespace, sandbox id, time), `result.json`, `network-stopped`. A zero-length or half-written file is a known case:
/// `add-started` present but unreadable still means DEL is owed (libcni's cache and the configuration directory are then used).
#[derive(Debug, Clone)]
pub struct NetworkRecord {}

impl NetworkRecord {
    /// The record's place for this sandbox; touches nothing.
    pub fn at(config: &Config, namespace: &str, sandbox_id: &str) -> Self {
        todo!()
    }
    pub fn dir(&self) -> &Path {
        todo!()
    }
    /// `add-started` exists and `network-stopped` does not.
    pub fn owes_del(&self) -> bool {
        todo!()
    }
    /// Writes `add-started` before the first plugin.
    pub fn begin(&self, conf: &NetworkConf, attachment: &Attachment) -> Result<()> {
        todo!()
    }
    pub fn read_result(&self) -> Option<AddResult> {
        todo!()
    }
    /// Removes the whole record (after DEL succeeded and the sandbox is forgotten); absent = done.
    pub fn remove(&self) -> Result<()> {
        todo!()
    }
    /// Every record below the state root: (namespace, sandbox id, record), also unreadable ones.
    pub fn list(config: &Config) -> Vec<(String, String, NetworkRecord)> {
        todo!()
    }
}

/// ADD of the whole chain, bounded by `config.add_timeout()` (monotonic, whole chain). Order: `record.begin`, plugins with prevResult,
/// result cached in libcni's form (`<cache_dir>/results/<net>-<cid>-<ifname>`) and in the record. `lo` is brought up first.
/// On failure nothing is undone here: the record says DEL is owed; the error names plugin, code or signal, time spent, stderr tail.
pub async fn add(
    config: &Config,
    reaper: &Reaper,
    record: &NetworkRecord,
    conf: &NetworkConf,
    attachment: &Attachment,
) -> Result<AddResult> {
    todo!()
}

/// DEL of the recorded ADD: reverse order, prevResult where known, the configuration and arguments of the ADD, bounded by `limit`.
/// Does nothing when no DEL is owed. A missing netns means an empty CNI_NETNS. Sets `network-stopped` only on success, then removes
/// libcni's cached result.
pub async fn del(
    config: &Config,
    reaper: &Reaper,
    record: &NetworkRecord,
    limit: Duration,
) -> Result<()> {
    todo!()
}

/// Pinned network namespaces: `<runtime_root>/netns/<hash>`, with a symbolic link `/run/netns/podvisor-<hash>`.
pub mod netns {
    use super::*;
    /// Where this sandbox's netns is (to be) pinned; touches nothing.
    pub fn path(config: &Config, namespace: &str, sandbox_id: &str) -> PathBuf {
        todo!()
    }
    /// Makes a netns on a thread of its own and pins it at `path` (idempotent: an existing good pin is an error Exists). Intent must be on record before.
    pub fn make(path: &Path) -> Result<()> {
        todo!()
    }
    /// Unmounts (detach, repeated while mounts are stacked), unlinks pin and link; absent = done.
    pub fn unpin(path: &Path) -> Result<()> {
        todo!()
    }
    /// Brings `lo` up in it.
    pub fn loopback_up(path: &Path) -> Result<()> {
        todo!()
    }
    /// True when `path` is an nsfs mount.
    pub fn is_pinned(path: &Path) -> bool {
        todo!()
    }
}
