//! CHECK, and what the networks' states are, asked by the command of plugins and of pods that are up.

use std::path::Path;

use serde_json::json;

use crate::place::{bridge, each_set, network, portmap, tool};
use crate::support::rootfs::{self, Rootfs};
use crate::support::{cni, podvisor};

const V4: &str = "10.87.1.0/24";
const V6: &str = "fd87::/64";

/// The chain with what a CHECK can be asked of.
fn chain(subnets: &[&str]) {
    let firewall = json!({"type": "firewall", "backend": "iptables"});
    let tuning = json!({"type": "tuning", "sysctl": {"net.core.somaxconn": "500"}});
    network("pods", vec![bridge(subnets), portmap(), firewall, tuning]);
}

/// A pod that runs; `ports` as flags.
fn up(rootfs: &Rootfs, ports: &[&str]) {
    let run = ["run", "-d", "--name", "web", "--rootfs", rootfs.str()];
    let script = "trap exit TERM; sleep 600 & wait";
    let end = ["--", "/bin/sh", "-c", script];
    podvisor(&[&run[..], ports, &end[..]].concat()).ok();
}

/// The older portmap's CHECK of a published port looks for rules of the wrong family and always fails: there without one.
#[test]
fn a_live_pod_passes_check_until_its_network_is_changed_by_somebody_else() {
    each_set(
        "check::a_live_pod_passes_check_until_its_network_is_changed_by_somebody_else",
        || {},
        |set| {
            chain(&[V4, V6]);
            let rootfs = rootfs::make();
            let ports: &[&str] = if set.is_old() {
                &[]
            } else {
                &["-p", "8080:80"]
            };
            up(&rootfs, ports);
            let checked = podvisor(&["network", "check", "web"]).ok();
            assert_eq!(checked.stdout, "pods eth0: ok\n");
            // The way out, taken away behind the plugin's back, and put back.
            let netns = tool("sh", &["-c", "ls -d /run/netns/podvisor-*"]);
            let netns = netns.trim().rsplit('/').next().unwrap();
            let route = ["default", "via", "10.87.1.1", "dev", "eth0"];
            let change = |what: &str| {
                tool("ip", &[&["-n", netns, "route", what], &route[..]].concat());
            };
            change("del");
            podvisor(&["network", "check", "web"]).fails_with("\"bridge\" (CHECK)");
            change("add");
            podvisor(&["network", "check", "web"]).ok();
            change("del");
            // It goes all the same.
            podvisor(&["rm", "-f", "web"]).ok();
        },
    );
}

#[test]
fn a_published_port_passes_check_where_the_plugin_can_tell() {
    each_set(
        "check::a_published_port_passes_check_where_the_plugin_can_tell",
        || {},
        |set| {
            chain(&[V4]);
            let rootfs = rootfs::make();
            up(&rootfs, &["-p", "8080:80"]);
            let checked = podvisor(&["network", "check", "web"]);
            if set.is_old() {
                checked.fails_with("\"portmap\" (CHECK)");
            } else {
                checked.ok();
                // Somebody has flushed the rules.
                tool("iptables", &["-t", "nat", "-F"]);
                podvisor(&["network", "check", "web"]).fails_with("\"portmap\" (CHECK)");
            }
            podvisor(&["rm", "-f", "web"]).ok();
        },
    );
}

#[test]
fn networks_of_the_reference_plugins_have_a_status_and_versions() {
    each_set(
        "check::networks_of_the_reference_plugins_have_a_status_and_versions",
        || {},
        |set| {
            let version = if set.is_old() { "1.0.0" } else { "1.1.0" };
            let plugins = vec![bridge(&[V4]), portmap()];
            cni::network("pods", plugins)
                .version(version)
                .write_in(Path::new(cni::CONFIGS));
            let status = podvisor(&["network", "status", "pods"]).ok().stdout;
            assert!(status.starts_with("pods: "), "{status}");
            assert_eq!(status.contains("not asked"), set.is_old(), "{status}");
            let listed = podvisor(&["network", "ls"]).ok().stdout;
            assert!(
                listed.contains(version) && listed.contains("portmap"),
                "{listed}"
            );
            podvisor(&["network", "gc"]).ok();
        },
    );
}
