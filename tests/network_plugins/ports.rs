//! Published ports in more than the plain way: on one address of the host, and for a client that never pauses.

use std::net::UdpSocket;
use std::path::Path;
use std::time::Duration;

use podvisor::proto::cri::sandbox_config::Protocol;
use serde_json::Value;

use crate::kit::BOUND;
use crate::place::{Up, bridge, each_set, ips, network, portmap};
use crate::support::{eventually, podvisor, rootfs};
use crate::wire::{HOST, Neighbour, Server, Via, answered, ask};

const V4: &str = "10.87.1.0/24";

#[test]
fn a_port_published_on_one_address_is_open_there_only() {
    each_set(
        "ports::a_port_published_on_one_address_is_open_there_only",
        || {},
        |_| {
            network("pods", vec![bridge(&[V4]), portmap()]);
            let neighbour = Neighbour::new();
            let (wire, host) = (neighbour.netns(), Path::new(HOST));
            let rootfs = rootfs::make();
            let run = ["run", "-d", "--name", "web", "--rootfs", rootfs.str()];
            let ports = ["-p", "127.0.0.1:8081:80", "-p", "192.0.2.1:8082:80/udp"];
            let end = ["--", "/bin/sh", "-c", "trap exit TERM; sleep 600 & wait"];
            podvisor(&[&run[..], &ports, &end[..]].concat()).ok();
            let shown = podvisor(&["inspect", "web"]).ok().stdout;
            let shown: Value = serde_json::from_str(&shown).unwrap();
            let ip = ips(&shown[0]["network"]["ips"]).remove(0);
            let netns = std::fs::read_dir("/run/netns").unwrap().flatten();
            let netns: Vec<_> = netns.map(|e| e.path()).collect();
            let server = Server::start(&netns[0], "web", 80);
            let said = answered(host, Via::Tcp, "127.0.0.1", 8081);
            assert!(said.starts_with("web to "), "{said}");
            let said = answered(&wire, Via::Udp, "192.0.2.1", 8082);
            assert_eq!(said, "web to 192.0.2.2");
            assert_eq!(ask(&wire, Via::Tcp, "192.0.2.1", 8081), None);
            assert_eq!(ask(host, Via::Tcp, "192.0.2.1", 8081), None);
            assert_eq!(ask(&wire, Via::Udp, &ip, 8082), None);
            drop(server);
            podvisor(&["rm", "-f", "web"]).ok();
            assert_eq!(ask(host, Via::Tcp, "127.0.0.1", 8081), None);
        },
    );
}

/// What the kernel remembers of the client's flow must not lead to the pod that is gone, nor to the host itself.
#[test]
fn a_udp_client_that_never_pauses_reaches_the_pod_that_came_last() {
    each_set(
        "ports::a_udp_client_that_never_pauses_reaches_the_pod_that_came_last",
        || {},
        |set| {
            network("pods", vec![bridge(&[V4]), portmap()]);
            let neighbour = Neighbour::new();
            let client = crate::wire::within(&neighbour.netns(), || {
                let socket = UdpSocket::bind("192.0.2.2:4444").unwrap();
                let soon = Some(Duration::from_millis(100));
                socket.set_read_timeout(soon).unwrap();
                socket
            });
            let said = || {
                client.send_to(b"?", "192.0.2.1:5353").unwrap();
                let mut buffer = [0; 64];
                let (length, _) = client.recv_from(&mut buffer).ok()?;
                Some(String::from_utf8_lossy(&buffer[..length]).into_owned())
            };
            assert_eq!(said(), None);
            for name in ["one", "two"] {
                let id = format!("{name}-{}", set.name);
                let pod = Up::with("pods", &id, &[], &[(Protocol::UDP, 5353, 53)]);
                let server = Server::start(&pod.netns(), name, 53);
                let answer = eventually(BOUND, &format!("an answer of {name}"), said);
                assert_eq!(answer, format!("{name} to 192.0.2.2"));
                drop(server);
                pod.shut();
                assert_eq!(said(), None);
            }
        },
    );
}
