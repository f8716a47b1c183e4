//! The network a pod is to have, checked before anything of the pod exists.
//!
//! Promises that a network which is chosen has its plugins, that one of them can publish the ports, and that no other pod has
//! them. Must never ask a plugin.

use crate::config::Config;
use crate::error::{Error, Kind, Result};
use crate::network::{self, NetworkConf, PortMapping};
use crate::pod::record::{self, Found};
use crate::proto::cri::sandbox_config as cri;

use super::host::Host;
use super::{parse, ps, supervisor};

/// Value of `--net` and of the annotation for a netns with only `lo`.
pub const NONE: &str = "none";

/// Value of `--net` for the host's network.
pub const HOST: &str = "host";

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

/// The network that was asked for, or the first configured; its plugins are there and can do what is asked of them.
pub fn choose(config: &Config, wanted: Option<&str>, ports: &[PortMapping]) -> Result<Net> {
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
pub fn free_ports(host: &Host, name: Option<&str>, ports: &[PortMapping]) -> Result<()> {
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

/// A port as the supervisor is told of it.
pub fn port_mapping(port: &PortMapping) -> cri::PortMapping {
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

#[cfg(test)]
mod tests {
    use super::*;
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

    #[test]
    fn ports_need_a_network() {
        let ports = [parse::port("1:2").unwrap()];
        for net in ["none", "host"] {
            assert!(choose(&Config::default(), Some(net), &[]).is_ok());
            assert_eq!(
                choose(&Config::default(), Some(net), &ports).map_err(|e| e.kind()),
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
            let net = choose(&config, Some(good), &ports).unwrap();
            assert_eq!(net, Net::Named(good.into()));
        }
        for bad in [
            "b,a", "a,,b", "a,host", "none,a", "a,c", "a,b@", "a,b@x/y", "", ",",
        ] {
            assert!(choose(&config, Some(bad), &ports).is_err(), "{bad}");
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
