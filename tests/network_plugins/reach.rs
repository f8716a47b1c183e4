//! Reachability: pods, the host and other machines, both families, published ports.

use std::path::Path;

use podvisor::proto::cri::sandbox_config::Protocol;
use serde_json::{Value, json};

use crate::kit::BOUND;
use crate::place::{self, Up, bridge, each_set, ips, network, portmap};
use crate::support::{eventually, podvisor, rootfs};
use crate::wire::{HOST, Neighbour, Server, Via, answered, ask};

const V4: &str = "10.87.1.0/24";
const V6: &str = "fd87::/64";

/// FL-030 too: the order of the plugin is the order everywhere.
#[test]
fn pods_with_both_families_reach_each_other_the_host_and_other_machines() {
    each_set(
        "reach::pods_with_both_families_reach_each_other_the_host_and_other_machines",
        || {},
        |set| {
            for (name, subnets, order) in [
                ("four", [V4, V6], ["10.87.1.", "fd87::"]),
                ("six", [V6, V4], ["fd87::", "10.87.1."]),
            ] {
                network(name, vec![bridge(&subnets)]);
                let neighbour = Neighbour::new();
                let one = Up::on(name, &format!("one-{}-{name}", set.name), &[]);
                let two = Up::on(name, &format!("two-{}-{name}", set.name), &[]);
                ordered(&one, order);
                everyone(&neighbour, &one, &two);
                one.shut();
                two.shut();
            }
        },
    );
}

/// The addresses in this order, in every part of the status.
fn ordered(pod: &Up, order: [&str; 2]) {
    let info = pod.info();
    let told = &info["cniResult"]["Interfaces"]["eth0"]["IPConfigs"];
    let told: Vec<&str> = told
        .as_array()
        .unwrap()
        .iter()
        .map(|c| c["IP"].as_str().unwrap())
        .collect();
    let network = &info["podvisor"]["network"];
    assert_eq!(pod.ips(), told);
    assert_eq!(ips(&network["attachments"][0]["ips"]), told);
    for (ip, begin) in told.iter().zip(order) {
        assert!(ip.starts_with(begin), "{told:?}");
    }
}

fn everyone(neighbour: &Neighbour, one: &Up, two: &Up) {
    let host = Path::new(HOST);
    let places = [
        (one.netns(), "one"),
        (two.netns(), "two"),
        (host.into(), "host"),
        (neighbour.netns(), "neighbour"),
    ];
    let _servers: Vec<Server> = places
        .iter()
        .map(|(netns, name)| Server::start(netns, name, 80))
        .collect();
    for via in [Via::Tcp, Via::Udp] {
        for (mine, other) in one.ips().iter().zip(two.ips()) {
            let six = mine.contains(':');
            let (gateway, wire, out) = if six {
                ("fd87::1", "2001:db8::2", "2001:db8::1")
            } else {
                ("10.87.1.1", "192.0.2.2", "192.0.2.1")
            };
            // Between pods without a change of address.
            let said = answered(&one.netns(), via, &other, 80);
            assert_eq!(said, format!("two to {mine}"));
            let said = answered(&two.netns(), via, mine, 80);
            assert_eq!(said, format!("one to {other}"));
            // The host, both ways.
            let said = answered(&one.netns(), via, gateway, 80);
            assert!(said.starts_with("host to "), "{said}");
            let said = answered(host, via, mine, 80);
            assert_eq!(said, format!("one to {gateway}"));
            // Another machine sees the host.
            let said = answered(&one.netns(), via, wire, 80);
            assert_eq!(said, format!("neighbour to {out}"));
        }
    }
}

#[test]
fn published_ports_are_reached_from_another_machine_by_both_protocols_and_families() {
    each_set(
        "reach::published_ports_are_reached_from_another_machine_by_both_protocols_and_families",
        || {},
        |set| {
            network("pods", vec![bridge(&[V4, V6]), portmap()]);
            let neighbour = Neighbour::new();
            let ports = [(Protocol::TCP, 8080, 80), (Protocol::UDP, 5353, 80)];
            let pod = Up::with("pods", &format!("web-{}", set.name), &[], &ports);
            let plain = Up::on("pods", &format!("plain-{}", set.name), &[]);
            let server = Server::start(&pod.netns(), "web", 80);
            for (via, port) in [(Via::Tcp, 8080), (Via::Udp, 5353)] {
                for (host, from) in [("192.0.2.1", "192.0.2.2"), ("2001:db8::1", "2001:db8::2")] {
                    let said = answered(&neighbour.netns(), via, host, port);
                    assert_eq!(said, format!("web to {from}"));
                    // From a pod by the host's address, also from itself.
                    for asks in [&plain, &pod] {
                        let said = answered(&asks.netns(), via, host, port);
                        assert!(said.starts_with("web to "), "{said}");
                    }
                }
                // The other protocol is not published.
                let other = if via == Via::Tcp { Via::Udp } else { Via::Tcp };
                assert_eq!(ask(&neighbour.netns(), other, "192.0.2.1", port), None);
            }
            drop(server);
            pod.stop();
            let _server = Server::start(&plain.netns(), "plain", 80);
            for (via, port) in [(Via::Tcp, 8080), (Via::Udp, 5353)] {
                assert_eq!(ask(&neighbour.netns(), via, "192.0.2.1", port), None);
            }
            drop(_server);
            plain.shut();
            pod.shut();
        },
    );
}

/// The command's own way, with a program in a container as the server.
#[test]
fn a_pod_of_the_command_tells_both_addresses_in_order_and_its_port_is_open() {
    each_set(
        "reach::a_pod_of_the_command_tells_both_addresses_in_order_and_its_port_is_open",
        || {},
        |_| {
            network("pods", vec![bridge(&[V6, V4]), portmap()]);
            let neighbour = Neighbour::new();
            let rootfs = rootfs::make();
            let script =
                "mkdir -p /tmp/w; echo hello >/tmp/w/index.html; exec httpd -f -p 80 -h /tmp/w";
            let begin = ["run", "-d", "--name", "web", "-p", "8080:80"];
            let end = ["--rootfs", rootfs.str(), "--", "/bin/sh", "-c", script];
            podvisor(&[&begin[..], &end[..]].concat()).ok();
            let shown = podvisor(&["inspect", "web"]).ok().stdout;
            let shown: Value = serde_json::from_str(&shown).unwrap();
            let ips = ips(&shown[0]["network"]["ips"]);
            assert!(
                ips.len() == 2 && ips[0].starts_with("fd87::") && ips[1].starts_with("10.87.1."),
                "{ips:?}"
            );
            let urls = [
                "http://192.0.2.1:8080/".to_owned(),
                "http://[2001:db8::1]:8080/".to_owned(),
                format!("http://[{}]/", ips[0]),
                format!("http://{}/", ips[1]),
            ];
            for url in urls {
                eventually(BOUND, &format!("a page from {url}"), || {
                    fetch(&neighbour, &url)
                });
            }
            podvisor(&["rm", "-f", "web"]).ok();
            assert_eq!(fetch(&neighbour, "http://192.0.2.1:8080/"), None);
        },
    );
}

fn fetch(from: &Neighbour, url: &str) -> Option<()> {
    let mut command = std::process::Command::new("nsenter");
    command.arg(format!("--net={}", from.netns().display()));
    command.args(["timeout", "2", "busybox", "wget", "-q", "-O-", url]);
    let got = crate::support::run(&mut command, BOUND);
    (got.code == Some(0)).then(|| assert_eq!(got.stdout, "hello\n"))
}

/// The newer generation only: of bridge and portmap alike.
#[test]
fn ports_published_by_nftables_are_reached_and_leave_no_rule() {
    each_set(
        "reach::ports_published_by_nftables_are_reached_and_leave_no_rule",
        || {},
        |set| {
            if set.is_old() {
                println!("the older portmap knows no nftables");
                return;
            }
            let mut first = bridge(&[V4]);
            first["ipMasqBackend"] = json!("nftables");
            let mut second = portmap();
            second["backend"] = json!("nftables");
            network("pods", vec![first, second]);
            let neighbour = Neighbour::new();
            let elements = || place::tool("nft", &["list", "ruleset"]);
            let ports = [(Protocol::TCP, 8080, 80), (Protocol::UDP, 5353, 80)];
            let pod = Up::with("pods", "web", &[], &ports);
            let server = Server::start(&pod.netns(), "web", 80);
            for (via, port) in [(Via::Tcp, 8080), (Via::Udp, 5353)] {
                let said = answered(&neighbour.netns(), via, "192.0.2.1", port);
                assert_eq!(said, "web to 192.0.2.2");
            }
            assert!(elements().contains("dport 8080"), "{}", elements());
            drop(server);
            pod.shut();
            let left = elements();
            assert!(
                !left.contains("8080") && !left.contains("10.87.1."),
                "{left}"
            );
            // Tables and base chains are the plugins' to keep.
            place::tool("nft", &["flush", "ruleset"]);
        },
    );
}
