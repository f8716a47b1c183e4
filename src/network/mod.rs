//! CNI from the runtime's side, and the pod's netns.
//!
//! Owns the running of plugins, the record on disk that says whether a DEL is owed, libcni's cache entry of our
//! attachments, and the pins of network namespaces. Promises: a plugin never starts before its record is on disk; a DEL
//! uses the configuration and arguments of its ADD; nothing of a chain outlives its bound. Must never decide on DEL by
//! anything but the record, and never touch a netns that the caller gave. The contract is in `docs/network.md`.

mod asked;
mod base64;
mod cache;
mod chain;
mod claim;
mod cni;
mod conf;
mod convert;
mod disk;
mod facts;
mod find;
#[cfg(test)]
pub(crate) mod fuzz;
mod gc;
mod handover;
mod kept;
mod latency;
mod limit;
mod markers;
pub mod netns;
mod orphans;
mod owed;
mod plugin;
mod remembered;
mod result;
mod retry;
mod slot;
mod through;
pub mod userns;
mod verbs;
mod version;
mod versions;
mod wishes;
mod wrap;

use std::net::IpAddr;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

pub use asked::asked;
pub use claim::{
    Claim, Ending, NAMESPACE as DAEMONS, STAGE, Stage, Taken, Taking, deliver, end_claim, give,
    held, of_daemons, release, stage_at, take, undisturbed,
};
pub use cni::{Adding, add, begin, del};
pub use conf::{NetworkConf, inlined};
pub use facts::{AddResult, Address, Dns, Facts, Interface, Route, Timing};
pub use find::{bad_confs, list_confs, load_conf};
pub use gc::{Collected, Valid, gc, stale};
pub use handover::{Owned, Parking, PodKey, Watching, own};
pub use latency::{BOUNDS_MS, Histogram, Latencies, add_collected, collect, latencies};
pub use markers::{NetworkRecord, OnRecord};
pub use orphans::{kill_orphans, kill_orphans_alone, kill_orphans_of};
pub use owed::{Debt, FIRST_PAUSE, Holder, LONGEST_PAUSE};
pub use result::converted;
pub use through::{Through, pass};
pub use verbs::{Asked, Checked, check, status};
pub use versions::versions;
pub use wishes::wishes;
pub use wrap::{PLUGIN, agent_note, unwrap, wrap};

use crate::error::{Error, Kind, Result};

/// One published port, in the words of the CNI capability `portMappings`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PortMapping {
    /// Port on the host.
    #[serde(rename = "hostPort")]
    pub host_port: u16,
    /// Port in the pod.
    #[serde(rename = "containerPort")]
    pub container_port: u16,
    /// tcp, udp or sctp, lower case.
    pub protocol: String,
    /// Address of the host to listen on; empty: all.
    #[serde(rename = "hostIP", default, skip_serializing_if = "String::is_empty")]
    pub host_ip: String,
}

/// What ADD and DEL are given beside the configuration. Serialised into the on-disk record: DEL uses exactly this.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Attachment {
    /// CNI_CONTAINERID: the id of the sandbox that the network was made for; it stays when another takes the network over.
    pub container_id: String,
    /// CNI_NETNS: where the netns is pinned.
    pub netns: PathBuf,
    /// CNI_IFNAME.
    pub ifname: String,
    /// CNI_ARGS in order. `IgnoreUnknown=1` is put in front where it is missing: these arguments are for whichever
    /// plugin knows them.
    pub args: Vec<(String, String)>,
    /// Published ports; the plugins that declare the capability get them. A host port of 0 publishes nothing.
    pub port_mappings: Vec<PortMapping>,
    /// Further capability args (dns, bandwidth, ips, mac ...), by capability name.
    #[serde(default)]
    pub capabilities: Map<String, Value>,
}

impl Attachment {
    /// Everything that may become part of a path or of CNI_ARGS, checked before any file call.
    fn check(&self) -> Result<()> {
        crate::id::check("container id", &self.container_id)?;
        crate::id::check_interface(&self.ifname)?;
        if !self.netns.is_absolute() {
            return Err(Error::new(
                Kind::Invalid,
                format!("check netns path {:?}: give an absolute path", self.netns),
            ));
        }
        for port in &self.port_mappings {
            let known = matches!(port.protocol.as_str(), "tcp" | "udp" | "sctp");
            let listens = port.host_ip.is_empty() || port.host_ip.parse::<IpAddr>().is_ok();
            if !known || !listens {
                return Err(Error::new(
                    Kind::Invalid,
                    format!(
                        "check published port {}/{:?} at {:?}: the protocol is tcp, udp or sctp, the address an IP address or empty",
                        port.host_port, port.protocol, port.host_ip
                    ),
                ));
            }
        }
        for (key, value) in &self.args {
            // CNI_ARGS has no quoting: a separator in a value would become another argument.
            let bad = |s: &str| s.contains([';', '=']) || s.chars().any(char::is_control);
            if key.is_empty() || bad(key) || bad(value) {
                return Err(Error::new(
                    Kind::Invalid,
                    format!(
                        "check CNI argument {key:?}={value:?}: neither part may hold ';', '=' or control characters"
                    ),
                ));
            }
        }
        Ok(())
    }

    /// CNI_ARGS as the plugins get them.
    fn cni_args(&self) -> Vec<(String, String)> {
        let mut args = self.args.clone();
        if !args.is_empty() && !args.iter().any(|(k, _)| k == "IgnoreUnknown") {
            args.insert(0, ("IgnoreUnknown".into(), "1".into()));
        }
        args
    }

    /// All capability args, by capability.
    fn capability_args(&self) -> Map<String, Value> {
        let mut all = self.capabilities.clone();
        let published: Vec<&PortMapping> = self
            .port_mappings
            .iter()
            .filter(|p| p.host_port != 0)
            .collect();
        if let (false, Ok(ports)) = (published.is_empty(), serde_json::to_value(&published)) {
            all.insert("portMappings".into(), ports);
        }
        all
    }
}
