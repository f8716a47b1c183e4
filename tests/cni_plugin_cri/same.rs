//! What is in the pod, and what the daemon says and does of it, is the network that was taken: as without the plugin.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, Command};
use std::time::Duration;

use serde_json::json;

use crate::cri::Cri;
use crate::forward;
use crate::kit::{BOUND, Node, Setup, address, bridge, config, end, scope};
use crate::support::fake::Act;
use crate::support::grpc::Message;
use crate::support::{cni, eventually, sandboxed, sh};

const IPV6: &str = "fd00:98::";
const HOST_PORT: u16 = 18081;

/// A pod whose first attempt has given up, and whose network waits for the next: its id.
fn second_attempt(node: &Node, name: &str, pod: &Message) -> String {
    let go = Path::new("/run/go");
    node.bridge.on("ADD", &[Act::WaitFor(go.into())]);
    let mut cri = node.cri();
    cri.run_within(pod, "runc", Duration::from_secs(1))
        .unwrap_err();
    fs::write(go, "").unwrap();
    node.bridge.on("ADD", &[]);
    let id = eventually(BOUND, "the pod is up", || {
        for left in cri.list().into_iter().filter(|p| p.name == name) {
            let _ = cri.stop(&left.id);
            let _ = cri.remove(&left.id);
        }
        cri.run_within(pod, "runc", BOUND).ok()
    });
    assert_eq!(node.calls(), (1, 0));
    id
}

/// busybox in the pod.
fn exec(node: &Node, id: &str, exec_id: &str, args: &[&str]) -> Command {
    let mut command = node.daemon.ctr_command();
    command.args(["-n", "k8s.io", "tasks", "exec", "--exec-id", exec_id, id]);
    command.arg("/bin/busybox").args(args);
    command
}

fn shown(node: &Node, id: &str, args: &[&str]) -> String {
    let output = crate::support::run(&mut exec(node, id, "x", args), BOUND);
    output.ok().stdout
}

/// Says hello to all who connect to the pod's port 80.
fn server(node: &Node, id: &str) -> Child {
    let words = [
        "nc",
        "-ll",
        "-p",
        "80",
        "-e",
        "/bin/busybox",
        "echo",
        "hello",
    ];
    exec(node, id, "s", &words).spawn().unwrap()
}

/// What port 80 says through the daemon's streaming server, once somebody listens there.
fn forwarded(cri: &mut Cri, id: &str) -> String {
    eventually(BOUND, "the port is open", || {
        let said = forward::ask(cri, id, 80, 6);
        said.map_err(|error| println!("{error}")).ok()
    })
}

#[test]
fn exec_stats_ports_bandwidth_and_names_see_the_network_that_was_taken() {
    sandboxed(
        "same::exec_stats_ports_bandwidth_and_names_see_the_network_that_was_taken",
        || {
            let mut slow = bridge("slow", &["10.97.3.0/24", &format!("{IPV6}/64")]);
            slow["capabilities"] = json!({"dns": true});
            let network = cni::network("pods", vec![slow])
                .portmap()
                .plugin(json!({"type": "bandwidth", "capabilities": {"bandwidth": true}}));
            let Some(node) = Setup::of("containerd-2.1").network(network).start() else {
                return;
            };
            let before = scope().take();
            let port = Message::new().varint(2, 80).varint(3, HOST_PORT.into());
            let group = Message::new().text(1, "/kubepods-web");
            let names = Message::new().text(1, "10.97.3.1").text(2, "apps.local");
            let limit = [(
                "kubernetes.io/ingress-bandwidth".to_owned(),
                "10M".to_owned(),
            )];
            let pod = Cri::config("web", &limit)
                .message(4, &names)
                .message(5, &port)
                .message(8, &group);
            let id = second_attempt(&node, "web", &pod);
            let mut cri = node.cri();
            let own = address(&mut cri, &id);
            let all = cri.addresses(&id).unwrap();
            assert!(all.len() == 2 && all[1].starts_with(IPV6), "{all:?}");
            let addresses = shown(&node, &id, &["ip", "addr"]);
            assert!(addresses.contains(&format!("inet {own}/24")), "{addresses}");
            assert!(addresses.contains(&all[1]), "{addresses}");
            assert!(addresses.contains("LOOPBACK,UP"), "{addresses}");
            shown(&node, &id, &["ping", "-c", "1", "-W", "5", "10.97.3.1"]);
            shown(&node, &id, &["ping6", "-c", "1", "-W", "5", "fd00:98::1"]);
            let resolver = shown(&node, &id, &["cat", "/etc/resolv.conf"]);
            assert!(
                resolver.contains("nameserver 10.97.3.1") && resolver.contains("apps.local"),
                "{resolver}"
            );
            // containerd writes the keys of this capability with capitals.
            let told = &node.bridge.calls_of("ADD")[0].stdin;
            assert!(told.contains(r#""dns":{"Servers":["10.97.3.1"]"#), "{told}");
            let qdiscs = Command::new("tc").args(["qdisc", "show"]).output().unwrap();
            let qdiscs = String::from_utf8_lossy(&qdiscs.stdout).into_owned();
            assert!(qdiscs.contains("tbf"), "{qdiscs}");
            assert!(cri.has_stats(&id).unwrap());
            let mut server = server(&node, &id);
            let text = eventually(BOUND, "the published port", || {
                let mut nc = Command::new("busybox");
                let to = HOST_PORT.to_string();
                let out = nc
                    .args(["nc", "-w", "2", "10.97.3.1", &to])
                    .output()
                    .unwrap();
                (!out.stdout.is_empty()).then_some(out.stdout)
            });
            assert_eq!(text, b"hello\n");
            assert_eq!(forwarded(&mut cri, &id), "hello\n");
            let _ = server.kill();
            server.wait().unwrap();
            end(&mut cri, &id);
            node.until(1, 1);
            before.assert_unchanged();
        },
    );
}

/// Port-forward by the other daemons, whose code for it differs.
fn forwards(peer: &str) {
    let Some(node) = Setup::of(peer).start() else {
        return;
    };
    let before = scope().take();
    let id = second_attempt(&node, "web", &config("web"));
    let mut cri = node.cri();
    let own = address(&mut cri, &id);
    assert!(shown(&node, &id, &["ip", "addr"]).contains(&own));
    let mut server = server(&node, &id);
    assert_eq!(forwarded(&mut cri, &id), "hello\n");
    let _ = server.kill();
    server.wait().unwrap();
    end(&mut cri, &id);
    node.until(1, 1);
    before.assert_unchanged();
}

#[test]
fn port_forward_reaches_the_pod_under_containerd_17() {
    sandboxed(
        "same::port_forward_reaches_the_pod_under_containerd_17",
        || forwards("containerd-1.7"),
    );
}

#[test]
#[ignore = "slow"]
fn slow_port_forward_reaches_the_pod_under_containerd_16() {
    sandboxed(
        "same::slow_port_forward_reaches_the_pod_under_containerd_16",
        || forwards("containerd-1.6"),
    );
}

/// A plugin that calls others, as Multus does: the first network is kept by ours, the second is put into the same netns
/// beside it.
const META: &str = r#"#!/bin/sh
cat >/dev/null
first() { CNI_IFNAME=eth0 /opt/cni/bin/podvisor-cni </run/meta/first.json; }
second() { CNI_IFNAME=net1 /opt/cni/bin/bridge </run/meta/second.json; }
case $CNI_COMMAND in
ADD)
    result=$(first) || { printf %s "$result"; exit 1; }
    said=$(second) || { printf %s "$said"; exit 1; }
    printf %s "$result" ;;
DEL) second >/dev/null && first ;;
VERSION) echo '{"cniVersion":"1.0.0","supportedVersions":["0.4.0","1.0.0"]}' ;;
esac
"#;

#[test]
fn two_networks_by_a_plugin_that_calls_others_are_both_in_the_pod() {
    sandboxed(
        "same::two_networks_by_a_plugin_that_calls_others_are_both_in_the_pod",
        || {
            let meta = Path::new(cni::PLUGINS).join("meta");
            fs::write(&meta, META).unwrap();
            fs::set_permissions(&meta, fs::Permissions::from_mode(0o755)).unwrap();
            fs::create_dir("/run/meta").unwrap();
            sh("ip link add pvc4 type bridge");
            let first = json!({"cniVersion": "1.0.0", "name": "pods", "type": "podvisor-cni",
                "plugins": [bridge("slow", &["10.97.3.0/24"])]});
            let second = json!({"cniVersion": "1.0.0", "name": "more", "type": "bridge",
                "bridge": "pvc4", "isGateway": true,
                "ipam": {"type": "host-local", "ranges": [[{"subnet": "10.97.5.0/24"}]]}});
            fs::write("/run/meta/first.json", first.to_string()).unwrap();
            fs::write("/run/meta/second.json", second.to_string()).unwrap();
            let network = cni::network("pods", vec![json!({"type": "meta"})]);
            let setup = Setup::of("containerd-2.1").network(network).alone();
            let Some(node) = setup.start() else {
                return;
            };
            let before = scope().take();
            let id = second_attempt(&node, "web", &config("web"));
            let mut cri = node.cri();
            let own = address(&mut cri, &id);
            let addresses = shown(&node, &id, &["ip", "addr"]);
            for part in [own.as_str(), "10.97.5."] {
                assert!(addresses.contains(part), "{addresses}");
            }
            end(&mut cri, &id);
            node.until(1, 1);
            before.assert_unchanged();
        },
    );
}
