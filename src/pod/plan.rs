//! What a pod is to be, worked out from a CreateSandbox request before anything is done.
//!
//! Three kinds of caller: one that sends a `PodSandboxConfig` (CRI, the command), one that leaves an OCI spec in the
//! bundle (containerd's sandbox API), one that sends neither. All end in the same [`Plan`], whose digest tells a
//! repeated request from a different one. Nothing here touches the system.

mod cri;
mod networks;
mod spec;

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::Serialize;
use serde_json::{Map, Value};
use sha2::{Digest, Sha256};

use crate::config::Config;
use crate::error::{Error, Kind, Result};
use crate::infra::{self, Dns, InfraSpec, LabelOptions, Namespace};
use crate::network::PortMapping;
use crate::pod::resources::Resources;
use crate::proto::cri::sandbox_config::PodSandboxConfig;
use crate::spec::Spec;

/// Annotation that chooses the CNI networks: names with `,` between them, each for the next of eth0, eth1, ... or, as
/// `name@interface`, for that one. `none`: a netns with nothing but `lo`.
pub const NETWORK_ANNOTATION: &str = "io.podvisor.network";

/// oom_score_adj of an infra process (what the kubelet gives a pod's first process).
const INFRA_OOM_SCORE: i32 = -998;

/// Size of the pod's /dev/shm (what container engines give).
const SHM_SIZE: u64 = 64 << 20;

/// Who makes the pod's network.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum NetworkPlan {
    /// The host's: no netns, no CNI.
    Host,
    /// A netns of the caller's: no CNI, no unlink, no DEL (law 6).
    Given(PathBuf),
    /// Ours, with these networks, added in this order; at least one.
    Ours(Vec<Wanted>),
    /// Ours, with `lo` only.
    Loopback,
}

/// One attachment of the pod.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Wanted {
    /// Name of the network; empty: the first configured.
    pub network: String,
    /// Interface in the pod.
    pub ifname: String,
    /// Capability args that were asked for by annotations.
    pub capabilities: Map<String, Value>,
}

/// What the pod is to be. Maps are sorted, so that equal requests have equal digests.
#[derive(Clone, Debug, Serialize)]
pub struct Plan {
    /// Pod metadata: name, namespace, uid, attempt; empty when none was given.
    pub name: String,
    /// See `name`.
    pub pod_namespace: String,
    /// See `name`.
    pub uid: String,
    /// See `name`.
    pub attempt: u32,
    /// Who makes the network.
    pub network: NetworkPlan,
    /// Ports for the `portMappings` capability.
    pub ports: Vec<PortMapping>,
    /// `None` copies the host's resolv.conf.
    pub dns: Option<Dns>,
    /// Hostname of the pod; empty on the host's network.
    pub hostname: String,
    /// The infra process; its network namespace is filled in when it is known.
    pub infra: InfraSpec,
    /// SELinux labels that the pod asks for.
    #[serde(skip_serializing_if = "LabelOptions::is_empty")]
    pub selinux: LabelOptions,
    /// cgroup the caller named as the parent of the pod's.
    pub cgroup_parent: Option<String>,
    /// cgroup the caller named for the infra process itself (OCI spec).
    pub cgroups_path: Option<String>,
    /// Labels.
    pub labels: BTreeMap<String, String>,
    /// Annotations, of the request, the pod's configuration and the spec.
    pub annotations: BTreeMap<String, String>,
    /// What CRI's own controller notes on the spec of a pod's first process, where NRI and others read it.
    #[serde(skip)]
    pub cri_annotations: BTreeMap<String, String>,
    /// Sum of the containers' limits; told, not set.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resources: Option<Box<Resources>>,
    /// What the pod itself is counted as; told, not set.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub overhead: Option<Box<Resources>>,
    /// Where the kubelet keeps the pod's logs.
    pub log_directory: String,
    /// config.json byte for byte, where there was one.
    #[serde(skip)]
    pub spec: Option<Spec>,
}

/// A CreateSandbox request, decoded.
#[derive(Debug, Default)]
pub struct Request {
    /// Sandbox id, checked.
    pub id: String,
    /// Bundle directory.
    pub bundle: PathBuf,
    /// Path of the caller's netns, or empty.
    pub netns_path: String,
    /// Annotations of the request itself (containerd 2.3 and later).
    pub annotations: BTreeMap<String, String>,
    /// `runtime.v1.PodSandboxConfig`, where the caller sent one.
    pub config: Option<PodSandboxConfig>,
    /// config.json of the bundle, where there is one.
    pub spec: Option<Spec>,
}

impl Plan {
    /// Works it out, or says which part of the request is wrong.
    pub fn new(config: &Config, request: Request) -> Result<Self> {
        let mut plan = Self::blank(&request);
        if let Some(spec) = &request.spec {
            plan.take_spec(spec)?;
        }
        if let Some(pod) = &request.config {
            plan.take_pod(pod)?;
            plan.note_for_cri(&request.id);
        }
        plan.annotations.extend(request.annotations);
        plan.spec = request.spec;
        plan.choose_network(&request.netns_path)?;
        // CRI's own controller sets them, too; whoever gives a netns without a pod's configuration has settled them.
        if plan.owns_network()
            || (plan.infra.network != Namespace::Host && request.config.is_some())
        {
            plan.add_default_sysctls(config);
        }
        plan.finish()?;
        Ok(plan)
    }

    /// SHA-256 of everything that was asked for except where the bundle is (it differs from try to try).
    pub fn digest(&self) -> Result<String> {
        let mut hash = Sha256::new();
        let text = serde_json::to_vec(self)
            .map_err(|e| Error::caused(Kind::Other, "encode the request for its digest", e))?;
        hash.update(&text);
        if let Some(spec) = &self.spec {
            hash.update(spec.json.to_string().as_bytes());
        }
        Ok(crate::id::hex(&hash.finalize()))
    }

    /// Size of the pod's /dev/shm in bytes.
    pub fn shm_size(&self) -> u64 {
        SHM_SIZE
    }

    /// True when the network (and the netns) are ours to undo.
    pub fn owns_network(&self) -> bool {
        matches!(self.network, NetworkPlan::Ours(_) | NetworkPlan::Loopback)
    }

    fn blank(request: &Request) -> Self {
        let infra = InfraSpec {
            network: Namespace::New,
            ipc: Namespace::New,
            uts: Namespace::New,
            pid: Namespace::New,
            oom_score_adj: INFRA_OOM_SCORE,
            ..InfraSpec::default()
        };
        Self {
            name: String::new(),
            pod_namespace: String::new(),
            uid: String::new(),
            attempt: 0,
            network: NetworkPlan::Ours(Vec::new()),
            ports: Vec::new(),
            dns: None,
            // Replaced by what the pod or the spec says.
            hostname: request.id.chars().take(12).collect(),
            infra,
            selinux: LabelOptions::default(),
            cgroup_parent: None,
            cgroups_path: None,
            labels: BTreeMap::new(),
            annotations: BTreeMap::new(),
            cri_annotations: BTreeMap::new(),
            resources: None,
            overhead: None,
            log_directory: String::new(),
            spec: None,
        }
    }

    fn finish(&mut self) -> Result<()> {
        if self.infra.uts == Namespace::Host {
            self.hostname.clear();
        }
        self.infra.hostname = match self.infra.uts {
            Namespace::New => self.hostname.clone(),
            _ => String::new(),
        };
        self.infra.sysctls = infra::check_sysctls(&self.infra.sysctls, &self.infra)?;
        Ok(())
    }

    fn add_default_sysctls(&mut self, config: &Config) {
        // The kernel takes a range of groups only where all of them exist.
        let icmp = config.unprivileged_icmp && self.infra.user == Namespace::Host;
        for (wanted, key, value) in [
            (
                config.unprivileged_ports,
                "net.ipv4.ip_unprivileged_port_start",
                "0",
            ),
            (icmp, "net.ipv4.ping_group_range", "0 2147483647"),
        ] {
            let given = self
                .infra
                .sysctls
                .keys()
                .any(|k| k.replace('/', ".") == key);
            if wanted && !given {
                self.infra.sysctls.insert(key.into(), value.into());
            }
        }
    }
}

fn invalid(why: &str) -> Error {
    Error::new(
        Kind::Invalid,
        format!("check the pod's configuration: {why}"),
    )
}

#[cfg(test)]
mod tests;
