//! What a pod is to be, worked out from a CreateSandbox request before anything is done.
//!
//! Three kinds of caller: one that sends a `PodSandboxConfig` (CRI, the command), one that leaves an OCI spec in the
//! bundle (containerd's sandbox API), one that sends neither. All end in the same [`Plan`], whose digest tells a
//! repeated request from a different one. Nothing here touches the system.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde_json::{Map, Value};
use sha2::{Digest, Sha256};

use crate::config::Config;
use crate::error::{Error, Kind, Result};
use crate::id;
use crate::infra::{self, Dns, IdMapping, InfraSpec, Namespace};
use crate::network::{self, PortMapping};
use crate::proto::cri::sandbox_config::{
    NamespaceMode, NamespaceOption, PodSandboxConfig, Protocol, UserNamespace,
};
use crate::spec::Spec;

/// Annotation that chooses the CNI networks: names with `,` between them, each for the next of eth0, eth1, ... or, as
/// `name@interface`, for that one. `none`: a netns with nothing but `lo`.
pub const NETWORK_ANNOTATION: &str = "io.podvisor.network";

/// oom_score_adj of an infra process (what the kubelet gives a pod's first process).
const INFRA_OOM_SCORE: i32 = -998;

/// Most networks of one pod: all of them share the bound of one DEL.
const MAX_NETWORKS: usize = 16;

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
    /// cgroup the caller named as the parent of the pod's.
    pub cgroup_parent: Option<String>,
    /// cgroup the caller named for the infra process itself (OCI spec).
    pub cgroups_path: Option<String>,
    /// Labels.
    pub labels: BTreeMap<String, String>,
    /// Annotations, of the request, the pod's configuration and the spec.
    pub annotations: BTreeMap<String, String>,
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
        }
        plan.annotations.extend(request.annotations);
        plan.spec = request.spec;
        plan.choose_network(&request.netns_path)?;
        plan.finish(config)?;
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
        Ok(hash.finalize().iter().map(|b| format!("{b:02x}")).collect())
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
            cgroup_parent: None,
            cgroups_path: None,
            labels: BTreeMap::new(),
            annotations: BTreeMap::new(),
            log_directory: String::new(),
            spec: None,
        }
    }

    fn take_spec(&mut self, spec: &Spec) -> Result<()> {
        let listed = spec.namespaces();
        if listed.iter().any(|(kind, _)| kind == "user") {
            return Err(Error::new(
                Kind::Unsupported,
                "make the pod's user namespace from an OCI spec: not built yet; send a PodSandboxConfig with userns_options",
            ));
        }
        let of = |kind: &str| match listed.iter().find(|(k, _)| k == kind) {
            None => Namespace::Host,
            Some((_, None)) => Namespace::New,
            Some((_, Some(path))) => Namespace::Path(path.clone()),
        };
        self.infra.network = of("network");
        self.infra.ipc = of("ipc");
        self.infra.uts = of("uts");
        self.infra.pid = of("pid");
        self.infra.sysctls = spec.sysctls();
        if !spec.hostname().is_empty() {
            self.hostname = infra::hostname(spec.hostname());
        }
        self.cgroups_path = spec.cgroups_path().map(str::to_owned);
        self.annotations.extend(spec.annotations());
        Ok(())
    }

    fn take_pod(&mut self, pod: &PodSandboxConfig) -> Result<()> {
        if let Some(meta) = pod.metadata.as_ref() {
            self.name = meta.name.clone();
            self.pod_namespace = meta.namespace.clone();
            self.uid = meta.uid.clone();
            self.attempt = meta.attempt;
        }
        let wanted = if pod.hostname.is_empty() {
            &self.name
        } else {
            &pod.hostname
        };
        if !wanted.is_empty() {
            self.hostname = infra::hostname(wanted);
        }
        self.log_directory = pod.log_directory.clone();
        self.labels.extend(pod.labels.clone());
        self.annotations.extend(pod.annotations.clone());
        self.dns = pod.dns_config.as_ref().map(|dns| Dns {
            servers: dns.servers.clone(),
            searches: dns.searches.clone(),
            options: dns.options.clone(),
        });
        for port in &pod.port_mappings {
            self.ports.extend(port_mapping(
                port.protocol.enum_value_or_default(),
                port.host_port,
                port.container_port,
                &port.host_ip,
            )?);
        }
        let Some(linux) = pod.linux.as_ref() else {
            return Ok(());
        };
        if !linux.cgroup_parent.is_empty() {
            self.cgroup_parent = Some(linux.cgroup_parent.clone());
        }
        self.infra.sysctls.extend(linux.sysctls.clone());
        if let Some(options) = linux.security_context.namespace_options.as_ref() {
            self.take_namespaces(options)?;
        }
        Ok(())
    }

    fn take_namespaces(&mut self, options: &NamespaceOption) -> Result<()> {
        let node = |mode: protobuf::EnumOrUnknown<NamespaceMode>| {
            mode.enum_value_or_default() == NamespaceMode::NODE
        };
        if node(options.network) {
            // The host's network has no uts namespace of its own either: its hostname is the host's.
            self.infra.network = Namespace::Host;
            self.infra.uts = Namespace::Host;
        }
        if node(options.ipc) {
            self.infra.ipc = Namespace::Host;
        }
        if node(options.pid) {
            self.infra.pid = Namespace::Host;
        }
        if let Some(user) = options.userns_options.as_ref() {
            self.take_user(user)?;
        }
        Ok(())
    }

    fn take_user(&mut self, user: &UserNamespace) -> Result<()> {
        let pod = user.mode.enum_value_or_default() == NamespaceMode::POD;
        if !pod {
            if user.uids.is_empty() && user.gids.is_empty() {
                return Ok(());
            }
            return Err(invalid(
                "id mappings need a user namespace of the pod; leave them out or use mode POD",
            ));
        }
        let (uids, gids) = (user.uids.as_slice(), user.gids.as_slice());
        let ([uid], [gid]) = (uids, gids) else {
            return Err(invalid(
                "a pod's user namespace needs exactly one uid range and one gid range",
            ));
        };
        if uid.length == 0 || gid.length == 0 {
            return Err(invalid(
                "a range of a pod's user namespace needs a length of at least 1",
            ));
        }
        self.infra.user = Namespace::New;
        let map = |m: &crate::proto::cri::sandbox_config::IDMapping| IdMapping {
            container_id: m.container_id,
            host_id: m.host_id,
            size: m.length,
        };
        self.infra.uid_mappings = vec![map(uid)];
        self.infra.gid_mappings = vec![map(gid)];
        Ok(())
    }

    fn choose_network(&mut self, netns_path: &str) -> Result<()> {
        if !netns_path.is_empty() {
            if !Path::new(netns_path).is_absolute() {
                return Err(invalid(&format!(
                    "netns_path {netns_path:?} is not absolute"
                )));
            }
            self.infra.network = Namespace::Path(netns_path.into());
        }
        let name = self
            .annotations
            .get(NETWORK_ANNOTATION)
            .cloned()
            .unwrap_or_default();
        self.network = match &self.infra.network {
            Namespace::Host => NetworkPlan::Host,
            Namespace::Path(path) => NetworkPlan::Given(path.clone()),
            Namespace::New if name == "none" => NetworkPlan::Loopback,
            Namespace::New => {
                let mut wanted = networks(&name)?;
                let ifnames: Vec<&str> = wanted.iter().map(|w| w.ifname.as_str()).collect();
                let wishes = network::wishes(&self.annotations, &ifnames)?;
                for (wanted, wishes) in wanted.iter_mut().zip(wishes) {
                    wanted.capabilities = wishes;
                }
                NetworkPlan::Ours(wanted)
            }
        };
        if !self.ports.is_empty() && !matches!(self.network, NetworkPlan::Ours(_)) {
            if matches!(self.network, NetworkPlan::Given(_)) {
                // CRI has published them through its own CNI call already.
                self.ports.clear();
            } else {
                return Err(invalid(
                    "ports can only be published on a pod network of ours; leave them out with host or no network",
                ));
            }
        }
        Ok(())
    }

    fn finish(&mut self, config: &Config) -> Result<()> {
        if self.infra.uts == Namespace::Host {
            self.hostname.clear();
        }
        self.infra.hostname = match self.infra.uts {
            Namespace::New => self.hostname.clone(),
            _ => String::new(),
        };
        self.infra.sysctls = infra::check_sysctls(&self.infra.sysctls, &self.infra)?;
        if config.unprivileged_ports && self.owns_network() {
            self.infra
                .sysctls
                .entry("net.ipv4.ip_unprivileged_port_start".into())
                .or_insert_with(|| "0".into());
        }
        Ok(())
    }
}

/// The networks that the annotation names.
fn networks(text: &str) -> Result<Vec<Wanted>> {
    let mut wanted: Vec<Wanted> = Vec::new();
    for (n, part) in text.split(',').map(str::trim).enumerate() {
        let (network, ifname) = match part.split_once('@') {
            Some((network, ifname)) => (network, ifname.to_owned()),
            None => (part, format!("eth{n}")),
        };
        if !text.is_empty() {
            id::check_network(network)?;
        }
        id::check_interface(&ifname)?;
        if matches!(network, "none" | "host") || ifname == "lo" {
            return Err(invalid(&format!(
                "annotation {NETWORK_ANNOTATION} = {text:?}: \"none\" and \"host\" cannot be among other networks, and lo is the pod's own"
            )));
        }
        if wanted.iter().any(|w| w.ifname == ifname) {
            return Err(invalid(&format!(
                "annotation {NETWORK_ANNOTATION} = {text:?}: interface {ifname} comes twice"
            )));
        }
        wanted.push(Wanted {
            network: network.to_owned(),
            ifname,
            capabilities: Map::new(),
        });
    }
    if wanted.len() > MAX_NETWORKS {
        return Err(invalid(&format!(
            "annotation {NETWORK_ANNOTATION} names {} networks; {MAX_NETWORKS} are the most",
            wanted.len()
        )));
    }
    Ok(wanted)
}

/// One CRI port mapping; host port 0 publishes nothing.
fn port_mapping(
    protocol: Protocol,
    host: i32,
    container: i32,
    ip: &str,
) -> Result<Option<PortMapping>> {
    if host == 0 {
        return Ok(None);
    }
    let port = |n: i32| {
        u16::try_from(n)
            .ok()
            .filter(|n| *n > 0)
            .ok_or_else(|| invalid(&format!("port {n} is not between 1 and 65535")))
    };
    Ok(Some(PortMapping {
        host_port: port(host)?,
        container_port: port(container)?,
        protocol: match protocol {
            Protocol::TCP => "tcp",
            Protocol::UDP => "udp",
            Protocol::SCTP => "sctp",
        }
        .to_owned(),
        host_ip: ip.to_owned(),
    }))
}

fn invalid(why: &str) -> Error {
    Error::new(
        Kind::Invalid,
        format!("check the pod's configuration: {why}"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proto::cri::sandbox_config as cri;

    fn request() -> Request {
        Request {
            id: "p1".into(),
            ..Request::default()
        }
    }

    fn pod(network: NamespaceMode) -> PodSandboxConfig {
        let options = NamespaceOption {
            network: network.into(),
            ..Default::default()
        };
        let context = cri::LinuxSandboxSecurityContext {
            namespace_options: Some(options).into(),
            ..Default::default()
        };
        let linux = cri::LinuxPodSandboxConfig {
            security_context: Some(context).into(),
            ..Default::default()
        };
        PodSandboxConfig {
            linux: Some(linux).into(),
            ..Default::default()
        }
    }

    fn plan(request: Request) -> Result<Plan> {
        Plan::new(&Config::default(), request)
    }

    #[test]
    fn a_request_with_neither_options_nor_spec_gets_a_network_of_ours() {
        let plan = plan(request()).unwrap();
        let wanted = Wanted {
            ifname: "eth0".into(),
            ..Wanted::default()
        };
        assert_eq!(plan.network, NetworkPlan::Ours(vec![wanted]));
        assert_eq!(plan.hostname, "p1");
    }

    #[test]
    fn a_netns_of_the_callers_is_the_callers() {
        let request = Request {
            netns_path: "/run/netns/cni-1".into(),
            config: Some(pod(NamespaceMode::POD)),
            ..request()
        };
        let plan = plan(request).unwrap();
        assert_eq!(plan.network, NetworkPlan::Given("/run/netns/cni-1".into()));
        assert!(!plan.owns_network());
    }

    #[test]
    fn host_network_by_the_pods_options_or_by_a_spec_without_a_network_namespace() {
        let by_options = Request {
            config: Some(pod(NamespaceMode::NODE)),
            ..request()
        };
        let plan_options = plan(by_options).unwrap();
        assert_eq!(plan_options.network, NetworkPlan::Host);
        assert_eq!(
            plan_options.hostname, "",
            "the host's uts namespace keeps the host's name"
        );
        let spec =
            Spec::parse(br#"{"linux":{"namespaces":[{"type":"mount"},{"type":"ipc"}]}}"#).unwrap();
        let by_spec = Request {
            spec: Some(spec),
            ..request()
        };
        assert_eq!(plan(by_spec).unwrap().network, NetworkPlan::Host);
    }

    #[test]
    fn equal_requests_have_equal_digests_whatever_the_order_of_their_maps() {
        let with = |pairs: &[(&str, &str)]| {
            let mut config = pod(NamespaceMode::POD);
            for (k, v) in pairs {
                config.labels.insert((*k).into(), (*v).into());
            }
            let request = Request {
                config: Some(config),
                ..request()
            };
            plan(request).unwrap().digest().unwrap()
        };
        let (a, b) = (("a", "1"), ("b", "2"));
        assert_eq!(with(&[a, b]), with(&[b, a]));
        assert_ne!(with(&[a, b]), with(&[a]));
    }

    #[test]
    fn bad_ports_and_mappings_are_refused() {
        let mut config = pod(NamespaceMode::NODE);
        config.port_mappings.push(cri::PortMapping {
            host_port: 80,
            container_port: 80,
            ..Default::default()
        });
        let on_host = Request {
            config: Some(config.clone()),
            ..request()
        };
        assert_eq!(plan(on_host).unwrap_err().kind(), Kind::Invalid);
        config.linux = Default::default();
        config.port_mappings[0].container_port = 70_000;
        let too_high = Request {
            config: Some(config),
            ..request()
        };
        assert_eq!(plan(too_high).unwrap_err().kind(), Kind::Invalid);
    }

    #[test]
    fn several_networks_have_interfaces_in_their_order_or_by_name() {
        let annotated = |pairs: &[(&str, &str)]| {
            let pairs = pairs.iter().map(|(k, v)| ((*k).into(), (*v).into()));
            plan(Request {
                annotations: pairs.collect(),
                ..request()
            })
        };
        let on = |text: &str| annotated(&[(NETWORK_ANNOTATION, text)]);
        let NetworkPlan::Ours(wanted) = on("a, b@net1,c").unwrap().network else {
            panic!("not ours");
        };
        let pairs: Vec<_> = wanted
            .iter()
            .map(|w| (w.network.as_str(), w.ifname.as_str()))
            .collect();
        assert_eq!(pairs, [("a", "eth0"), ("b", "net1"), ("c", "eth2")]);
        assert_eq!(on("none").unwrap().network, NetworkPlan::Loopback);
        for text in [
            "a,,b", "a@", "a@lo", "a@eth1,b", "a,none", "a@x/y", "../a", "@eth0", ",",
        ] {
            assert_eq!(on(text).unwrap_err().kind(), Kind::Invalid, "{text}");
        }
        let rate = ("kubernetes.io/ingress-bandwidth", "1");
        assert_eq!(annotated(&[rate]).unwrap_err().kind(), Kind::Invalid);
    }
}
