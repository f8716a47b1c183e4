//! Other kinds of links, and several networks for one pod.

use std::path::Path;

use serde_json::{Value, json};

use crate::place::{Up, bridge, each_set, host_local, ips, network, tool};
use crate::wire::{HOST, Neighbour, Server, Via, answered, ask};

const BOTH: [&str; 2] = ["10.87.2.0/24", "fd87:2::/64"];

fn ptp() -> Value {
    json!({"type": "ptp", "ipMasq": true, "ipam": host_local(&BOTH)})
}

#[test]
fn pods_on_point_to_point_links_reach_each_other_and_the_host() {
    each_set(
        "links::pods_on_point_to_point_links_reach_each_other_and_the_host",
        || {},
        |set| {
            network("pods", vec![ptp()]);
            let neighbour = Neighbour::new();
            let one = Up::on("pods", &format!("one-{}", set.name), &[]);
            let two = Up::on("pods", &format!("two-{}", set.name), &[]);
            let servers = [
                Server::start(&one.netns(), "one", 80),
                Server::start(&neighbour.netns(), "neighbour", 80),
            ];
            for ((ip, from), wire) in one
                .ips()
                .iter()
                .zip(two.ips())
                .zip(["192.0.2.2", "2001:db8::2"])
            {
                let said = answered(&two.netns(), Via::Tcp, ip, 80);
                assert_eq!(said, format!("one to {from}"));
                let said = answered(Path::new(HOST), Via::Udp, ip, 80);
                assert!(said.starts_with("one to "), "{said}");
                let said = answered(&one.netns(), Via::Tcp, wire, 80);
                assert!(said.starts_with("neighbour to "), "{said}");
            }
            drop(servers);
            one.shut();
            two.shut();
        },
    );
}

/// A wire that macvlan links are on, and its other end as a machine.
fn macvlan(mode: &str) -> Value {
    let ipam = json!({
        "type": "host-local",
        "ranges": [
            [{"subnet": "192.0.2.0/24", "rangeStart": "192.0.2.100", "rangeEnd": "192.0.2.110"}],
            [{"subnet": "2001:db8::/64", "rangeStart": "2001:db8::100", "rangeEnd": "2001:db8::110"}],
        ],
    });
    json!({"type": "macvlan", "master": "ext0", "mode": mode, "ipam": ipam})
}

#[test]
fn pods_on_a_macvlan_are_machines_on_the_wire_of_their_parent() {
    each_set(
        "links::pods_on_a_macvlan_are_machines_on_the_wire_of_their_parent",
        || {},
        |set| {
            network("pods", vec![macvlan("bridge")]);
            let neighbour = Neighbour::new();
            let one = Up::on("pods", &format!("one-{}", set.name), &[]);
            let two = Up::on("pods", &format!("two-{}", set.name), &[]);
            assert_eq!(one.ips(), ["192.0.2.100", "2001:db8::100"]);
            let servers = [
                Server::start(&one.netns(), "one", 80),
                Server::start(&neighbour.netns(), "neighbour", 80),
            ];
            let wire = ["192.0.2.2", "2001:db8::2"];
            for ((mine, other), wire) in one.ips().iter().zip(two.ips()).zip(wire) {
                // Nobody changes an address on the way.
                let said = answered(&neighbour.netns(), Via::Tcp, mine, 80);
                assert_eq!(said, format!("one to {wire}"));
                let said = answered(&one.netns(), Via::Udp, wire, 80);
                assert_eq!(said, format!("neighbour to {mine}"));
                let said = answered(&two.netns(), Via::Tcp, mine, 80);
                assert_eq!(said, format!("one to {other}"));
            }
            drop(servers);
            one.shut();
            // The parent serves the other pod still.
            let server = Server::start(&two.netns(), "two", 80);
            let said = answered(&neighbour.netns(), Via::Tcp, &two.ips()[0], 80);
            assert_eq!(said, "two to 192.0.2.2");
            drop(server);
            two.shut();
            let links = tool("ip", &["-o", "link"]);
            assert!(
                links.contains("ext0") && !links.contains("macvlan"),
                "{links}"
            );
        },
    );
}

#[test]
fn a_macvlan_on_a_bridge_is_made_and_gone() {
    each_set(
        "links::a_macvlan_on_a_bridge_is_made_and_gone",
        || {
            tool("ip", &["link", "set", "pvt0", "up"]);
        },
        |set| {
            let mut plugin = macvlan("private");
            plugin["master"] = json!("pvt0");
            network("pods", vec![plugin]);
            let pod = Up::on("pods", &format!("one-{}", set.name), &[]);
            let link = pod.tool("ip", &["-d", "link", "show", "eth0"]);
            assert!(link.contains("macvlan mode private"), "{link}");
            assert_eq!(pod.ips(), ["192.0.2.100", "2001:db8::100"]);
            pod.shut();
        },
    );
}

/// The loopback plugin takes `lo` down in its DEL; the pod's `lo` is up from the start all the same.
#[test]
fn a_pod_with_the_loopback_plugin_on_one_of_its_networks_has_its_lo_up() {
    each_set(
        "links::a_pod_with_the_loopback_plugin_on_one_of_its_networks_has_its_lo_up",
        || {},
        |set| {
            network("pods", vec![bridge(&["10.87.1.0/24"])]);
            network("lo", vec![json!({"type": "loopback"})]);
            let pod = Up::on("pods,lo@net1", &format!("one-{}", set.name), &[]);
            assert_eq!(pod.ips(), ["10.87.1.2"]);
            let lo = pod.tool("ip", &["addr", "show", "lo"]);
            assert!(lo.contains("UP") && lo.contains("127.0.0.1/8"), "{lo}");
            let server = Server::start(&pod.netns(), "one", 80);
            let said = answered(&pod.netns(), Via::Tcp, "127.0.0.1", 80);
            assert_eq!(said, "one to 127.0.0.1");
            drop(server);
            pod.shut();
        },
    );
}

#[test]
fn a_pod_on_a_bridge_and_a_point_to_point_link_is_reached_on_both() {
    each_set(
        "links::a_pod_on_a_bridge_and_a_point_to_point_link_is_reached_on_both",
        || {},
        |set| {
            network("pods", vec![bridge(&["10.87.1.0/24", "fd87::/64"])]);
            // No default route of its own: that is the first network's.
            let mut second = ptp();
            second["ipMasq"] = json!(false);
            second["ipam"]["routes"] = json!([]);
            network("more", vec![second]);
            let pod = Up::on("pods,more@net1", &format!("two-{}", set.name), &[]);
            let one = Up::on("pods", &format!("one-{}", set.name), &[]);
            let other = Up::on("more", &format!("other-{}", set.name), &[]);
            let server = Server::start(&pod.netns(), "pod", 80);
            let info = pod.info();
            let attachments = &info["podvisor"]["network"]["attachments"];
            let (first, second) = (ips(&attachments[0]["ips"]), ips(&attachments[1]["ips"]));
            assert_eq!(pod.ips(), first);
            assert!(first[0].starts_with("10.87.1.") && second[0].starts_with("10.87.2."));
            assert!(first[1].starts_with("fd87::") && second[1].starts_with("fd87:2::"));
            for (ip, from) in first.iter().zip(one.ips()) {
                let said = answered(&one.netns(), Via::Tcp, ip, 80);
                assert_eq!(said, format!("pod to {from}"));
            }
            for ip in first.iter().chain(&second) {
                // By TCP: a server of UDP may answer from another of its addresses than it was asked at.
                let said = answered(Path::new(HOST), Via::Tcp, ip, 80);
                assert!(said.starts_with("pod to "), "{said}");
            }
            let addresses = pod.tool("ip", &["-o", "addr"]);
            for interface in ["eth0", "net1"] {
                assert!(addresses.contains(interface), "{addresses}");
            }
            drop(server);
            pod.stop();
            assert_eq!(ask(Path::new(HOST), Via::Tcp, &second[0], 80), None);
            let leases = tool("find", &["/var/lib/cni/networks", "-type", "f"]);
            for ip in [&first[0], &second[0]] {
                assert!(!leases.contains(&format!("/{ip}\n")), "{leases}");
            }
            pod.shut();
            one.shut();
            other.shut();
        },
    );
}

/// Wishes of annotations, those of the second interface by its name.
#[test]
fn addresses_and_macs_that_were_asked_for_are_given() {
    each_set(
        "links::addresses_and_macs_that_were_asked_for_are_given",
        || {},
        |set| {
            let mut first = bridge(&["10.87.1.0/24"]);
            first["capabilities"] = json!({"mac": true, "ips": true});
            // On the same bridge, without a gateway: the bridge has its address.
            let mut second = bridge(&[]);
            second["isGateway"] = json!(false);
            second["ipMasq"] = json!(false);
            second["ipam"] = json!({"type": "host-local", "routes": []});
            second["capabilities"] = json!({"mac": true, "ipRanges": true});
            network("pods", vec![first]);
            network("more", vec![second]);
            let wishes = [
                ("io.podvisor.mac", "0a:00:00:00:00:11"),
                ("io.podvisor.ips", "10.87.1.77"),
                ("io.podvisor.mac.net1", "0a:00:00:00:00:22"),
                ("io.podvisor.ip-ranges.net1", "10.87.9.0/28"),
            ];
            let pod = Up::on("pods,more@net1", &format!("one-{}", set.name), &wishes);
            assert_eq!(pod.ips(), ["10.87.1.77"]);
            for (interface, mac, ip) in [
                ("eth0", "0a:00:00:00:00:11", "10.87.1.77/24"),
                ("net1", "0a:00:00:00:00:22", "10.87.9.2/28"),
            ] {
                let shown = pod.tool("ip", &["addr", "show", interface]);
                assert!(shown.contains(mac) && shown.contains(ip), "{shown}");
            }
            let info = pod.info();
            let attachments = &info["podvisor"]["network"]["attachments"];
            assert_eq!(ips(&attachments[1]["ips"]), ["10.87.9.2"]);
            pod.shut();
        },
    );
}
