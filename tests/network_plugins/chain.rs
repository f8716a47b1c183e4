//! What the plugins behind the first one make: limits, sysctls, firewall rules.

use std::fs;

use serde_json::{Value, json};

use crate::place::{Up, bridge, each_set, network, portmap, tool};

const V4: &str = "10.87.1.0/24";

/// A rate that `tc` prints as it was given.
const LIMITS: [(&str, &str); 2] = [
    ("kubernetes.io/ingress-bandwidth", "3M"),
    ("kubernetes.io/egress-bandwidth", "7M"),
];

fn bandwidth() -> Value {
    json!({"type": "bandwidth", "capabilities": {"bandwidth": true}})
}

#[test]
fn bandwidth_is_limited_in_both_directions_while_the_pod_lives() {
    each_set(
        "chain::bandwidth_is_limited_in_both_directions_while_the_pod_lives",
        || {},
        |set| {
            network("pods", vec![bridge(&[V4]), bandwidth()]);
            let free = Up::on("pods", &format!("free-{}", set.name), &[]);
            assert!(!queues().contains("bit"), "{}", queues());
            let pod = Up::on("pods", &format!("slow-{}", set.name), &LIMITS);
            let told = queues();
            for rate in ["3Mbit", "7Mbit"] {
                assert!(told.contains(rate), "{rate} in {told}");
            }
            // The link that packets from the pod are led through.
            assert!(links().contains("ifb"), "{}", links());
            pod.stop();
            assert!(!queues().contains("bit"), "{}", queues());
            assert!(!links().contains("ifb"), "{}", links());
            pod.shut();
            free.shut();
        },
    );
}

/// Queueing disciplines and classes of the host's links.
fn queues() -> String {
    let mut all = tool("tc", &["qdisc", "show"]);
    for line in tool("ip", &["-o", "link"]).lines() {
        let name = line.split(": ").nth(1).unwrap().split('@').next().unwrap();
        all += &tool("tc", &["class", "show", "dev", name]);
    }
    all
}

fn links() -> String {
    tool("ip", &["-d", "link"])
}

#[test]
fn a_tuned_sysctl_is_the_pods_alone() {
    each_set(
        "chain::a_tuned_sysctl_is_the_pods_alone",
        || {},
        |set| {
            let sysctl =
                json!({"net.core.somaxconn": "1234", "net.ipv4.conf.eth0.arp_filter": "1"});
            let tuning = json!({"type": "tuning", "sysctl": sysctl, "mtu": 1400, "promisc": true});
            network("tuned", vec![bridge(&[V4]), tuning]);
            network("plain", vec![bridge(&[V4])]);
            let path = "/proc/sys/net/core/somaxconn";
            let host = fs::read_to_string(path).unwrap();
            let tuned = Up::on("tuned", &format!("tuned-{}", set.name), &[]);
            let plain = Up::on("plain", &format!("plain-{}", set.name), &[]);
            assert_eq!(tuned.tool("cat", &[path]), "1234\n");
            let filter = "/proc/sys/net/ipv4/conf/eth0/arp_filter";
            assert_eq!(tuned.tool("cat", &[filter]), "1\n");
            let link = tuned.tool("ip", &["link", "show", "eth0"]);
            assert!(
                link.contains("mtu 1400") && link.contains("PROMISC"),
                "{link}"
            );
            assert_eq!(plain.tool("cat", &[filter]), "0\n");
            assert_ne!(plain.tool("cat", &[path]), "1234\n");
            assert_eq!(fs::read_to_string(path).unwrap(), host);
            tuned.shut();
            plain.shut();
        },
    );
}

#[test]
fn rules_of_the_whole_chain_name_the_pod_while_it_lives_and_not_after() {
    each_set(
        "chain::rules_of_the_whole_chain_name_the_pod_while_it_lives_and_not_after",
        || {},
        |set| {
            let firewall = json!({"type": "firewall", "backend": "iptables"});
            let subnets = [V4, "fd87::/64"];
            network("pods", vec![bridge(&subnets), portmap(), firewall]);
            // The host lets nothing through that no rule allows.
            for tables in ["iptables", "ip6tables"] {
                tool(tables, &["-P", "FORWARD", "DROP"]);
            }
            let one = Up::on("pods", &format!("one-{}", set.name), &[]);
            let two = Up::on("pods", &format!("two-{}", set.name), &[]);
            for ip in one.ips() {
                let rules = rules_of(&ip);
                let accepted = rules.iter().filter(|r| r.ends_with("-j ACCEPT"));
                assert!(accepted.count() >= 2, "{ip}: {rules:#?}");
                assert!(
                    rules.iter().any(|r| r.contains("CNI-FORWARD")),
                    "{rules:#?}"
                );
            }
            let (ips, others) = (one.ips(), two.ips());
            one.stop();
            for ip in ips {
                assert_eq!(rules_of(&ip), [""; 0]);
            }
            // Those of the other pod are not touched.
            for ip in others {
                assert!(!rules_of(&ip).is_empty());
            }
            one.shut();
            two.shut();
            for tables in ["iptables", "ip6tables"] {
                tool(tables, &["-P", "FORWARD", "ACCEPT"]);
            }
        },
    );
}

/// Rules that name this address.
fn rules_of(ip: &str) -> Vec<String> {
    let save = if ip.contains(':') {
        "ip6tables-save"
    } else {
        "iptables-save"
    };
    let wanted = format!(" {ip}/");
    tool(save, &[])
        .lines()
        .filter(|l| l.starts_with("-A") && l.contains(&wanted))
        .map(str::to_owned)
        .collect()
}
