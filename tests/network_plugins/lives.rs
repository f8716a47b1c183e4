//! Pods on every version of CNI, and what becomes of the whole chain's work when a pod loses its supervisor or its infra
//! process.

use std::path::Path;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::json;

use crate::daemon::shims;
use crate::place::{Up, bridge, each_set, network, portmap, tool};
use crate::support::{Snapshot, cni, podvisor, rootfs};
use crate::wire::{HOST, Server, Via, answered};

const SUBNETS: [&str; 2] = ["10.87.1.0/24", "fd87::/64"];

#[test]
fn a_pod_has_its_addresses_in_every_version_of_cni() {
    each_set(
        "lives::a_pod_has_its_addresses_in_every_version_of_cni",
        || {},
        |set| {
            let newest = if set.is_old() { "1.0.0" } else { "1.1.0" };
            for version in ["0.2.0", "0.3.0", "0.3.1", "0.4.0", newest] {
                cni::network("pods", vec![bridge(&SUBNETS)])
                    .version(version)
                    .write_in(Path::new(cni::CONFIGS));
                let before = Snapshot::take();
                let id = format!("p{}-{}", version.replace('.', ""), set.name);
                let pod = Up::on("pods", &id, &[]);
                let ips = pod.ips();
                assert!(
                    ips[0].starts_with("10.87.1.") && ips[1].starts_with("fd87::"),
                    "{version}: {ips:?}"
                );
                let server = Server::start(&pod.netns(), "pod", 80);
                for ip in &ips {
                    let said = answered(Path::new(HOST), Via::Tcp, ip, 80);
                    assert!(said.starts_with("pod to "), "{version}: {said}");
                }
                drop(server);
                pod.shut();
                before.assert_unchanged();
            }
        },
    );
}

/// Everything that the plugins make for one pod.
fn whole_chain() {
    let firewall = json!({"type": "firewall", "backend": "iptables"});
    let tuning = json!({"type": "tuning", "sysctl": {"net.core.somaxconn": "500"}});
    let rates = json!({
        "type": "bandwidth", "ingressRate": 3_000_000, "ingressBurst": 3_000_000,
        "egressRate": 7_000_000, "egressBurst": 7_000_000
    });
    let plugins = vec![bridge(&SUBNETS), portmap(), firewall, tuning, rates];
    network("pods", plugins);
}

#[test]
fn a_pod_whose_processes_were_killed_takes_the_whole_chains_work_along() {
    each_set(
        "lives::a_pod_whose_processes_were_killed_takes_the_whole_chains_work_along",
        || {},
        |_| {
            whole_chain();
            let rootfs = rootfs::make();
            let before = Snapshot::take();
            for victims in [&["supervisor"][..], &["infra"], &["infra", "supervisor"]] {
                let run = ["run", "-d", "--name", "web", "-p", "8080:80", "--rootfs"];
                let end = [rootfs.str(), "--", "/bin/sleep", "600"];
                podvisor(&[&run[..], &end[..]].concat()).ok();
                assert!(tool("iptables-save", &[]).contains("8080"));
                assert!(tool("tc", &["qdisc", "show"]).contains("Mbit") || !classes().is_empty());
                for victim in victims {
                    let pids = if *victim == "infra" { infra() } else { shims() };
                    assert!(!pids.is_empty(), "no {victim} runs");
                    for pid in pids {
                        kill(Pid::from_raw(pid), Signal::SIGKILL).unwrap();
                    }
                }
                podvisor(&["rm", "-f", "web"]).ok();
                before.assert_unchanged();
            }
        },
    );
}

fn classes() -> String {
    let links = tool("ip", &["-o", "link"]);
    let names = links.lines().filter_map(|l| l.split(": ").nth(1));
    names
        .map(|name| name.split('@').next().unwrap())
        .map(|name| tool("tc", &["class", "show", "dev", name]))
        .collect()
}

fn infra() -> Vec<i32> {
    let pids = tool("sh", &["-c", "grep -l podvisor-infra /proc/[0-9]*/comm"]);
    pids.lines()
        .filter_map(|l| l.split('/').nth(2)?.parse().ok())
        .collect()
}
