//! What a pod is to be, checked before anything of it exists.
//!
//! Owns the flags that `run` and `create` share, and turns them and a file into a [`Plan`]. Promises that everything that can be
//! known beforehand is known: network, its plugins, ports, OCI runtime, executable of the supervisor. Must never make anything.

use std::fs;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::config::Config;
use crate::error::{Error, Kind, Result};
use crate::network::PortMapping;
use crate::proto::cri::sandbox_config as cri;

use super::host::Host;
use super::pod_network::{self, HOST, NONE, Net};
use super::spec::SANDBOX_ANNOTATION;
use super::{given_pod, parse, supervisor};

/// The annotation by which the supervisor learns which network the pod gets.
pub const NETWORK_ANNOTATION: &str = "io.podvisor.network";

/// The annotation of a pod that `run` has made: a digest of what for, so that the same command is known again.
pub const RUN_ANNOTATION: &str = "io.podvisor.run";

/// How long to wait for a pod when nothing else is said.
const PATIENCE: Duration = Duration::from_secs(240);

/// Most characters of a hostname.
const MAX_HOSTNAME: usize = 63;

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
    /// Hostname of the pod [default: its name].
    #[arg(long, value_name = "NAME", value_parser = hostname)]
    pub hostname: Option<String>,
    /// Name server of the pod [default: the host's]. May be repeated.
    #[arg(long, value_name = "IP")]
    pub dns: Vec<IpAddr>,
    /// Domain that names are looked for in. May be repeated.
    #[arg(long, value_name = "DOMAIN", value_parser = word)]
    pub dns_search: Vec<String>,
    /// Option of the resolver, as in ndots:2. May be repeated.
    #[arg(long, value_name = "OPTION", value_parser = word)]
    pub dns_option: Vec<String>,
    /// Label of the pod, for `ps --filter`. May be repeated.
    #[arg(short, long, value_name = "KEY=VALUE", value_parser = parse::pair)]
    pub label: Vec<(String, String)>,
    /// Annotation of the pod and of its container, with --sandbox of the container alone. May be repeated.
    #[arg(long, value_name = "KEY=VALUE", value_parser = parse::pair)]
    pub annotation: Vec<(String, String)>,
    /// Kernel setting of the pod's namespaces, as in net.core.somaxconn=512. May be repeated.
    #[arg(long, value_name = "NAME=VALUE", value_parser = parse::pair)]
    pub sysctl: Vec<(String, String)>,
    /// The pod as JSON, in the form of `crictl runp`; flags win over it.
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// How long to wait for the pod [default: 4m], or with --sandbox for the container [default: as long as the OCI
    /// runtime may take]; the creation goes on when that has passed, and the same command takes its result.
    #[arg(long, value_name = "TIME", value_parser = parse::span)]
    pub timeout: Option<Duration>,
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
    /// Everything else that is asked of the pod, in the form in which the supervisor is told.
    pub pod: cri::PodSandboxConfig,
    /// How long the caller waits.
    pub timeout: Duration,
    /// The supervisor's executable.
    pub program: PathBuf,
    /// Digest of the workload that the pod is made for; `None`: it is made for itself.
    pub purpose: Option<String>,
}

/// Checks the flags against this machine.
pub fn check(host: &Host, name: Option<String>, args: Args) -> Result<Plan> {
    let mut given = match &args.config {
        Some(path) => given_pod::read(path)?,
        None => given_pod::GivenPod::default(),
    };
    let pod = &mut given.pod;
    let mut ports = given.ports;
    ports.extend(args.publish);
    if let Some(port) = parse::clash(&ports) {
        return Err(Error::new(
            Kind::Invalid,
            format!("publish {port}: the port is given twice"),
        ));
    }
    for (key, value) in args.annotation {
        check_annotation(&key)?;
        pod.annotations.insert(key, value);
    }
    pod.labels.extend(args.label);
    if !args.sysctl.is_empty() {
        let linux = pod.linux.mut_or_insert_default();
        linux.sysctls.extend(args.sysctl);
    }
    name_servers(pod, &args.dns, args.dns_search, args.dns_option)?;
    let net = match (args.net, given.host_network) {
        (None, true) => Some(HOST.to_owned()),
        (net, _) => net.or_else(|| pod.annotations.remove(NETWORK_ANNOTATION)),
    };
    let net = pod_network::choose(&host.config, net.as_deref(), &ports)?;
    if let Some(wanted) = args.hostname {
        pod.hostname = wanted;
    }
    if net == Net::Host && !pod.hostname.is_empty() {
        let what = format!(
            "call the pod {:?}: on the host's network it has the host's name; leave --hostname out",
            pod.hostname
        );
        return Err(Error::new(Kind::Invalid, what));
    }
    let name = name.or(given.name);
    pod_network::free_ports(host, name.as_deref(), &ports)?;
    let program = supervisor::find()?;
    Ok(Plan {
        name,
        net,
        ports,
        pod: given.pod,
        timeout: args.timeout.unwrap_or(PATIENCE),
        program,
        purpose: None,
    })
}

/// Ours are not for people: they would say something else than the flags do.
pub fn check_annotation(key: &str) -> Result<()> {
    if ![NETWORK_ANNOTATION, RUN_ANNOTATION, SANDBOX_ANNOTATION].contains(&key) {
        return Ok(());
    }
    let what = format!("annotate with {key:?}: podvisor sets that itself; use --net for a network");
    Err(Error::new(Kind::Invalid, what))
}

/// Where only domains or options are given, the servers are the host's.
fn name_servers(
    pod: &mut cri::PodSandboxConfig,
    servers: &[IpAddr],
    searches: Vec<String>,
    options: Vec<String>,
) -> Result<()> {
    const HOSTS: &str = "/etc/resolv.conf";
    if servers.is_empty() && searches.is_empty() && options.is_empty() {
        return Ok(());
    }
    let dns = pod.dns_config.mut_or_insert_default();
    if !servers.is_empty() {
        dns.servers = servers.iter().map(ToString::to_string).collect();
    }
    if !searches.is_empty() {
        dns.searches = searches;
    }
    if !options.is_empty() {
        dns.options = options;
    }
    if dns.servers.is_empty() {
        let text = fs::read_to_string(HOSTS).map_err(|e| {
            Error::io(
                format!("take name servers from {HOSTS} (name one with --dns)"),
                e,
            )
        })?;
        let of_host = text.lines().filter_map(|l| l.strip_prefix("nameserver"));
        dns.servers = of_host.map(|l| l.trim().to_owned()).collect();
    }
    Ok(())
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
        let mut config = self.pod.clone();
        let meta = config.metadata.mut_or_insert_default();
        name.clone_into(&mut meta.name);
        if meta.uid.is_empty() {
            id.clone_into(&mut meta.uid);
        }
        if meta.namespace.is_empty() {
            namespace.clone_into(&mut meta.namespace);
        }
        let linux = config.linux.mut_or_insert_default();
        let security = linux.security_context.mut_or_insert_default();
        let options = security.namespace_options.mut_or_insert_default();
        if options.pid.enum_value_or_default() == cri::NamespaceMode::POD {
            // Containers have pid namespaces of their own.
            options.pid = cri::NamespaceMode::CONTAINER.into();
        }
        let network = match &self.net {
            Net::Host => {
                options.network = cri::NamespaceMode::NODE.into();
                None
            }
            Net::Nothing => Some(NONE.to_owned()),
            Net::Named(net) => Some(net.clone()),
        };
        let ours = [
            (NETWORK_ANNOTATION, network),
            (RUN_ANNOTATION, self.purpose.clone()),
        ];
        for (key, value) in ours {
            if let Some(value) = value {
                config.annotations.insert(key.into(), value);
            }
        }
        if self.net != Net::Host && config.hostname.is_empty() {
            config.hostname = name.to_ascii_lowercase().replace('_', "-");
        }
        config.port_mappings = self.ports.iter().map(pod_network::port_mapping).collect();
        config
    }
}

/// A hostname as the supervisor takes it without a change.
pub fn hostname(text: &str) -> std::result::Result<String, String> {
    let plain = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b"-.".contains(&b);
    let edge = ['-', '.'];
    let good = (1..=MAX_HOSTNAME).contains(&text.len())
        && text.bytes().all(plain)
        && text.trim_matches(edge) == text;
    match good {
        true => Ok(text.to_owned()),
        false => Err(format!(
            "{text:?} is no hostname: write at most {MAX_HOSTNAME} of a-z, 0-9, '-' and '.', the last two not at an end"
        )),
    }
}

fn word(text: &str) -> std::result::Result<String, String> {
    match text.is_empty() || text.chars().any(|c| c.is_whitespace() || c.is_control()) {
        false => Ok(text.to_owned()),
        true => Err(format!("{text:?}: give one word")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use protobuf::Message;

    fn plan(net: Net) -> Plan {
        let ports = vec![parse::port("127.0.0.1:53:5353/udp").unwrap()];
        Plan {
            name: None,
            net,
            ports,
            pod: cri::PodSandboxConfig::new(),
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
    fn what_a_file_says_of_the_pod_is_kept() {
        let mut wanted = plan(Net::Nothing);
        wanted.pod.hostname = "h".to_owned();
        wanted.pod.metadata.mut_or_insert_default().uid = "u1".to_owned();
        let config = wanted.sandbox_config("default", "a1", "p");
        assert_eq!(
            (config.hostname.as_str(), config.metadata.uid.as_str()),
            ("h", "u1")
        );
        assert_eq!(
            (
                config.metadata.name.as_str(),
                config.metadata.namespace.as_str()
            ),
            ("p", "default")
        );
    }

    #[test]
    fn hostnames_are_taken_as_they_are_or_not_at_all() {
        let long = "a".repeat(64);
        for bad in ["", "-a", "a-", "a.", "A", "a_b", "a b", &long] {
            assert!(hostname(bad).is_err(), "{bad}");
        }
        for good in ["a", "web-1.example", &long[..63]] {
            assert_eq!(hostname(good).as_deref(), Ok(good));
        }
    }

    #[test]
    fn domains_alone_keep_the_hosts_servers() {
        let mut pod = cri::PodSandboxConfig::new();
        name_servers(&mut pod, &[], Vec::new(), Vec::new()).unwrap();
        assert!(pod.dns_config.is_none());
        let server: IpAddr = "192.0.2.1".parse().unwrap();
        name_servers(&mut pod, &[server], vec!["x".into()], Vec::new()).unwrap();
        assert_eq!(
            (&pod.dns_config.servers[..], &pod.dns_config.searches[..]),
            (&["192.0.2.1".to_owned()][..], &["x".to_owned()][..])
        );
    }
}
