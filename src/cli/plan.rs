//! What a pod is to be, checked before anything of it exists.
//!
//! Owns the flags that `run` and `create` share, and turns them into a [`Plan`]. Promises that everything that can be known
//! beforehand is known: network, its plugins, ports, OCI runtime, executable of the supervisor. Must never make anything.

use std::path::{Path, PathBuf};
use std::time::Duration;

use protobuf::MessageField;

use crate::config::Config;
use crate::error::{Error, Kind, Result};
use crate::network::{self, NetworkConf, PortMapping};
use crate::pod::record::{self, Found};
use crate::proto::cri::sandbox_config as cri;

use super::host::Host;
use super::{parse, ps, supervisor};

/// The annotation by which the supervisor learns which network the pod gets.
pub const NETWORK_ANNOTATION: &str = "io.podvisor.network";

/// The annotation of a pod that `run` has made: a digest of what for, so that the same command is known again.
pub const RUN_ANNOTATION: &str = "io.podvisor.run";

/// Value of `--net` and of [`NETWORK_ANNOTATION`] for a netns with only `lo`.
const NONE: &str = "none";

/// Value of `--net` for the host's network.
const HOST: &str = "host";

/// How long to wait for a pod when nothing else is said.
const PATIENCE: Duration = Duration::from_secs(240);

/// Flags of a pod.
// No group of its own: it is flattened into arguments of the same name.
#[derive(Clone, Debug, clap::Args)]
#[group(skip)]
pub struct Args {
    /// Network of the pod: a configured network's name, or several with `,` between them (NAME or NAME@INTERFACE; ports
    /// are published on the first), `none` (only lo) or `host`; the first configured one when not given.
    #[arg(long, value_name = "NETWORK")]
    pub net: Option<String>,
    /// Publish a port of the pod on the host, as in 8080:80 or 127.0.0.1:5353:53/udp. May be repeated.
    #[arg(short, long, value_name = "[IP:]HOST:CTR[/PROTO]", value_parser = parse::port)]
    pub publish: Vec<PortMapping>,
    /// How long to wait for the pod [default: 4m], or with --sandbox for the container [default: as long as the OCI
    /// runtime may take]; the creation goes on when that has passed, and the same command takes its result.
    #[arg(long, value_name = "TIME", value_parser = parse::span)]
    pub timeout: Option<Duration>,
}

/// Which network.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Net {
    /// The CNI network with this name, or several, as in [`NETWORK_ANNOTATION`].
    Named(String),
    /// A netns with only `lo`.
    Nothing,
    /// The host's.
    Host,
}

/// A request that has been checked.
#[derive(Debug)]
pub struct Plan {
    /// Name wished for.
    pub name: Option<String>,
    /// Network.
    pub net: Net,
    /// Published ports.
    pub ports: Vec<PortMapping>,
    /// How long the caller waits.
    pub timeout: Duration,
    /// The supervisor's executable.
    pub program: PathBuf,
    /// Digest of the workload that the pod is made for; `None`: it is made for itself.
    pub purpose: Option<String>,
}

/// Checks the flags against this machine.
pub fn check(host: &Host, name: Option<String>, args: Args) -> Result<Plan> {
    if let Some(port) = parse::clash(&args.publish) {
        return Err(Error::new(
            Kind::Invalid,
            format!("publish {port}: the port is given twice"),
        ));
    }
    let net = network(&host.config, args.net.as_deref(), &args.publish)?;
    free_ports(host, name.as_deref(), &args.publish)?;
    let program = supervisor::find()?;
    Ok(Plan {
        name,
        net,
        ports: args.publish,
        timeout: args.timeout.unwrap_or(PATIENCE),
        program,
        purpose: None,
    })
}

/// That an OCI runtime is there; which one is the supervisor's choice.
pub fn check_runtime(config: &Config) -> Result<()> {
    let wanted = config.runtime.as_str();
    let there = match wanted {
        "" => supervisor::in_path("crun")
            .or_else(|| supervisor::in_path("runc"))
            .is_some(),
        path if path.contains('/') => supervisor::is_executable(Path::new(path)),
        name => supervisor::in_path(name).is_some(),
    };
    if there {
        return Ok(());
    }
    let message = match wanted {
        "" => {
            "find an OCI runtime: neither crun nor runc is in PATH; install one of them".to_owned()
        }
        other => format!(
            "find OCI runtime {other:?}: it is not there; correct `runtime` in the configuration or install it"
        ),
    };
    Err(Error::new(Kind::NotFound, message))
}

impl Plan {
    /// The pod's configuration as the supervisor is given it. The same plan gives the same bytes: a retry is known by them.
    pub fn sandbox_config(&self, namespace: &str, id: &str, name: &str) -> cri::PodSandboxConfig {
        let mut config = cri::PodSandboxConfig::new();
        config.metadata = MessageField::some(cri::PodSandboxMetadata {
            name: name.to_owned(),
            uid: id.to_owned(),
            namespace: namespace.to_owned(),
            ..Default::default()
        });
        let mut security = cri::LinuxSandboxSecurityContext::new();
        let mut options = cri::NamespaceOption::new();
        // Containers have pid namespaces of their own.
        options.pid = cri::NamespaceMode::CONTAINER.into();
        match &self.net {
            Net::Host => options.network = cri::NamespaceMode::NODE.into(),
            Net::Nothing => drop(
                config
                    .annotations
                    .insert(NETWORK_ANNOTATION.into(), NONE.into()),
            ),
            Net::Named(net) => drop(
                config
                    .annotations
                    .insert(NETWORK_ANNOTATION.into(), net.clone()),
            ),
        }
        if let Some(purpose) = &self.purpose {
            config
                .annotations
                .insert(RUN_ANNOTATION.into(), purpose.clone());
        }
        if self.net != Net::Host {
            config.hostname = hostname(name);
        }
        security.namespace_options = MessageField::some(options);
        let mut linux = cri::LinuxPodSandboxConfig::new();
        linux.security_context = MessageField::some(security);
        config.linux = MessageField::some(linux);
        config.port_mappings = self.ports.iter().map(port_mapping).collect();
        config
    }
}

fn network(config: &Config, wanted: Option<&str>, ports: &[PortMapping]) -> Result<Net> {
    let net = match wanted {
        Some(NONE) => Net::Nothing,
        Some(HOST) => Net::Host,
        Some(names) => return named(config, names, ports),
        None => {
            let conf = network::load_conf(config, None).map_err(|e| {
                let next = "configure one, or run the pod with `--net none` or `--net host`";
                e.within(format!("choose a network ({next})"))
            })?;
            check_plugins(config, &conf, ports)?;
            return Ok(Net::Named(conf.name));
        }
    };
    match (ports.first(), &net) {
        (None, _) => Ok(net),
        (Some(p), Net::Host) => Err(Error::new(
            Kind::Invalid,
            format!(
                "publish port {}: a pod on the host's network has the host's ports; leave --publish out",
                p.host_port
            ),
        )),
        (Some(p), _) => Err(Error::new(
            Kind::Invalid,
            format!(
                "publish port {}: a pod without a network cannot be reached; give it one with --net",
                p.host_port
            ),
        )),
    }
}

/// One network or several, each `NAME` or `NAME@INTERFACE`; ports are published on the first.
fn named(config: &Config, names: &str, ports: &[PortMapping]) -> Result<Net> {
    for (place, one) in names.split(',').enumerate() {
        let (name, ifname) = one.split_once('@').unzip();
        let name = name.unwrap_or(one);
        if place > 0 && name.is_empty() || [NONE, HOST].contains(&name) {
            return Err(Error::new(
                Kind::Invalid,
                format!(
                    "choose networks {names:?}: give names of networks with ',' between them; {NONE:?} and {HOST:?} stand alone"
                ),
            ));
        }
        crate::id::check_network(name)?;
        ifname.map(crate::id::check_interface).transpose()?;
        let conf = network::load_conf(config, Some(name))?;
        check_plugins(config, &conf, if place == 0 { ports } else { &[] })?;
    }
    Ok(Net::Named(names.to_owned()))
}

/// Every plugin is there, and one of them can publish ports if that is asked for.
fn check_plugins(config: &Config, conf: &NetworkConf, ports: &[PortMapping]) -> Result<()> {
    for plugin in &conf.plugins {
        let ipam = plugin.get("ipam").and_then(|i| i.get("type"));
        for kind in [plugin.get("type"), ipam]
            .into_iter()
            .flatten()
            .filter_map(|t| t.as_str())
        {
            let named_well = !kind.is_empty() && !kind.contains('/');
            if named_well
                && config
                    .cni
                    .plugin_dirs
                    .iter()
                    .any(|d| supervisor::is_executable(&d.join(kind)))
            {
                continue;
            }
            let dirs: Vec<String> = config
                .cni
                .plugin_dirs
                .iter()
                .map(|d| d.display().to_string())
                .collect();
            return Err(Error::new(
                Kind::NotFound,
                format!(
                    "find plugin {kind:?} of network {:?} ({}): it is in none of {}; install it",
                    conf.name,
                    conf.path.display(),
                    dirs.join(", ")
                ),
            ));
        }
    }
    let publishes = |p: &serde_json::Value| {
        p.pointer("/capabilities/portMappings")
            .and_then(serde_json::Value::as_bool)
    };
    if !ports.is_empty() && !conf.plugins.iter().any(|p| publishes(p) == Some(true)) {
        return Err(Error::new(
            Kind::Invalid,
            format!(
                "publish a port on network {:?} ({}): none of its plugins has the portMappings capability; add the portmap plugin",
                conf.name,
                conf.path.display()
            ),
        ));
    }
    Ok(())
}

/// No other pod of this machine has published one of the ports: its connections would go to whoever came first. A pod that
/// has the name already is the one we are about to join.
fn free_ports(host: &Host, name: Option<&str>, ports: &[PortMapping]) -> Result<()> {
    if ports.is_empty() {
        return Ok(());
    }
    for found in record::list(&host.config, None) {
        let Found::Record(pod) = found else { continue };
        if ps::is_released(&pod) || (name == Some(&pod.name) && host.namespace == pod.namespace) {
            continue;
        }
        let all: Vec<PortMapping> = pod.network.ports.iter().chain(ports).cloned().collect();
        if let Some(port) = parse::clash(&all) {
            let owner = supervisor::label(&pod);
            return Err(Error::new(
                Kind::Exists,
                format!(
                    "publish {port}: pod {owner} has this port of the host already; choose another port, or stop that pod"
                ),
            ));
        }
    }
    Ok(())
}

fn port_mapping(port: &PortMapping) -> cri::PortMapping {
    let protocol = match port.protocol.as_str() {
        "udp" => cri::Protocol::UDP,
        "sctp" => cri::Protocol::SCTP,
        _ => cri::Protocol::TCP,
    };
    cri::PortMapping {
        protocol: protocol.into(),
        container_port: i32::from(port.container_port),
        host_port: i32::from(port.host_port),
        host_ip: port.host_ip.clone(),
        ..Default::default()
    }
}

/// Names may hold what host names may not.
fn hostname(name: &str) -> String {
    name.to_ascii_lowercase().replace('_', "-")
}

#[cfg(test)]
mod tests {
    use super::*;
    use protobuf::Message;
    use serde_json::json;
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    fn conf(plugins: serde_json::Value) -> NetworkConf {
        NetworkConf {
            name: "web".into(),
            path: "/etc/cni/net.d/web.conflist".into(),
            cni_version: "1.0.0".into(),
            bytes: Vec::new(),
            plugins: plugins.as_array().cloned().unwrap(),
            disable_check: false,
            disable_gc: false,
        }
    }

    fn plan(net: Net) -> Plan {
        let ports = vec![parse::port("127.0.0.1:53:5353/udp").unwrap()];
        Plan {
            name: None,
            net,
            ports,
            timeout: Duration::from_secs(1),
            program: "/shim".into(),
            purpose: None,
        }
    }

    #[test]
    fn the_same_plan_gives_the_same_bytes_and_the_network_is_named() {
        let one = plan(Net::Named("web".into())).sandbox_config("default", "a1", "My_Pod");
        let two = plan(Net::Named("web".into())).sandbox_config("default", "a1", "My_Pod");
        assert_eq!(one.write_to_bytes().unwrap(), two.write_to_bytes().unwrap());
        assert_eq!(one.hostname, "my-pod");
        assert_eq!(
            one.annotations.get(NETWORK_ANNOTATION).map(String::as_str),
            Some("web")
        );
        assert_eq!(
            (
                one.port_mappings[0].host_port,
                one.port_mappings[0].protocol.value()
            ),
            (53, 1)
        );
    }

    #[test]
    fn a_host_pod_says_so_by_its_namespace_option() {
        let config = plan(Net::Host).sandbox_config("default", "a1", "p");
        let options = &config.linux.security_context.namespace_options;
        assert_eq!(options.network, cri::NamespaceMode::NODE.into());
        assert!(config.hostname.is_empty() && config.annotations.is_empty());
        let none = plan(Net::Nothing).sandbox_config("default", "a1", "p");
        assert_eq!(
            none.annotations.get(NETWORK_ANNOTATION).map(String::as_str),
            Some("none")
        );
    }

    #[test]
    fn ports_need_a_network() {
        let ports = [parse::port("1:2").unwrap()];
        for net in ["none", "host"] {
            assert!(network(&Config::default(), Some(net), &[]).is_ok());
            assert_eq!(
                network(&Config::default(), Some(net), &ports).map_err(|e| e.kind()),
                Err(Kind::Invalid)
            );
        }
    }

    #[test]
    fn each_of_several_networks_is_checked_and_ports_are_the_firsts() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("p"), "").unwrap();
        fs::set_permissions(dir.path().join("p"), fs::Permissions::from_mode(0o755)).unwrap();
        let mut config = Config {
            runtime_root: dir.path().join("run"),
            ..Config::default()
        };
        config.cni.plugin_dirs = vec![dir.path().into()];
        config.cni.conf_dir = dir.path().into();
        for name in ["a", "b"] {
            let capable = json!({"portMappings": name == "a"});
            let text = json!({"cniVersion": "1.0.0", "name": name, "plugins": [{"type": "p", "capabilities": capable}]});
            fs::write(
                dir.path().join(format!("{name}.conflist")),
                text.to_string(),
            )
            .unwrap();
        }
        let ports = [parse::port("1:2").unwrap()];
        for good in ["a", "a,b", "a,b@net1"] {
            let net = network(&config, Some(good), &ports).unwrap();
            assert_eq!(net, Net::Named(good.into()));
        }
        for bad in [
            "b,a", "a,,b", "a,host", "none,a", "a,c", "a,b@", "a,b@x/y", "", ",",
        ] {
            assert!(network(&config, Some(bad), &ports).is_err(), "{bad}");
        }
    }

    #[test]
    fn missing_plugins_and_capabilities_are_found_beforehand() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["bridge", "host-local"] {
            fs::write(dir.path().join(name), "").unwrap();
            fs::set_permissions(dir.path().join(name), fs::Permissions::from_mode(0o755)).unwrap();
        }
        let mut config = Config::default();
        config.cni.plugin_dirs = vec![dir.path().into()];
        let bridge = json!({"type": "bridge", "ipam": {"type": "host-local"}});
        assert!(check_plugins(&config, &conf(json!([bridge])), &[]).is_ok());
        let ports = [parse::port("1:2").unwrap()];
        assert!(check_plugins(&config, &conf(json!([bridge])), &ports).is_err());
        for bad in [
            json!([{"type": "portmap"}]),
            json!([{"type": "../bridge"}]),
            json!([{"type": "bridge", "ipam": {"type": "dhcp"}}]),
        ] {
            let error = check_plugins(&config, &conf(bad), &[]).map_err(|e| e.kind());
            assert_eq!(error, Err(Kind::NotFound));
        }
    }
}
