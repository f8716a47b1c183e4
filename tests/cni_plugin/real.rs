//! The reference plugins behind ours: ports, bandwidth, IPv6, and a plugin of the daemon's after ours, as without it.

use std::fs::File;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::process::Command;
use std::time::Duration;

use nix::sched::CloneFlags;
use podvisor::error::Context;
use podvisor::sys::thread_ns::{Enter, run};
use serde_json::{Value, json};

use crate::kit::{Attempt, BOUND, settings, snapshot};
use crate::support::{eventually, sandboxed, sh};

const PORT: u16 = 18080;

fn list() -> Value {
    json!({"cniVersion": "1.0.0", "name": "full", "plugins": [
        {"type": "bridge", "bridge": "pvc1", "isGateway": true, "ipMasq": false, "hairpinMode": true,
         "ipam": {"type": "host-local",
                  "ranges": [[{"subnet": "10.97.2.0/24"}], [{"subnet": "fd00:97::/64"}]],
                  "routes": [{"dst": "0.0.0.0/0"}, {"dst": "::/0"}]},
         "dns": {"nameservers": ["10.97.2.1"], "search": ["apps.local"]}},
        {"type": "portmap", "capabilities": {"portMappings": true}},
        {"type": "bandwidth", "capabilities": {"bandwidth": true}}]})
}

/// What `tc` and `ip` show of a pod on the host's side.
fn qdiscs() -> String {
    let shown = Command::new("tc").args(["qdisc", "show"]).output().unwrap();
    String::from_utf8_lossy(&shown.stdout).into_owned()
}

#[test]
fn ports_bandwidth_ipv6_and_dns_are_as_without_the_plugin() {
    sandboxed(
        "real::ports_bandwidth_ipv6_and_dns_are_as_without_the_plugin",
        || {
            settings(30.0);
            sh("ip link add pvc1 type bridge; sysctl -qw net.ipv6.conf.all.forwarding=1 || true");
            let before = snapshot();
            let mut pod = Attempt::of("web", "a1", &list());
            pod.conf["capabilities"] = json!({"portMappings": true, "bandwidth": true});
            pod.conf["runtimeConfig"] = json!({
            "portMappings": [{"hostPort": PORT, "containerPort": 80, "protocol": "tcp"}],
            "bandwidth": {"ingressRate": 8_000_000, "ingressBurst": 8_000_000}});
            let said = pod.add().ok();
            assert_eq!(said.answer["dns"]["search"], json!(["apps.local"]));
            pod.has(&said.ip());
            pod.has("fd00:97::");
            assert!(qdiscs().contains("tbf"), "{}", qdiscs());
            let netns = File::open(&pod.netns).unwrap();
            let inside = [Enter::Join(netns.as_fd(), CloneFlags::CLONE_NEWNET)];
            let server = run(&inside, || {
                TcpListener::bind("0.0.0.0:80").context(|| "listen")
            })
            .unwrap();
            let answers = std::thread::spawn(move || {
                server.accept().unwrap().0.write_all(b"hello").unwrap();
            });
            let mut stream = eventually(BOUND, "the published port", || {
                let to = format!("10.97.2.1:{PORT}").parse().unwrap();
                TcpStream::connect_timeout(&to, Duration::from_secs(2)).ok()
            });
            let mut text = String::new();
            stream.read_to_string(&mut text).unwrap();
            assert_eq!(text, "hello");
            answers.join().unwrap();
            drop(netns);
            pod.end();
            before.assert_unchanged();
        },
    );
}

/// The daemon's list goes on behind us: what comes next works on the netns at the path that it gave.
#[test]
fn a_plugin_behind_ours_finds_the_pods_netns_at_the_daemons_path() {
    sandboxed(
        "real::a_plugin_behind_ours_finds_the_pods_netns_at_the_daemons_path",
        || {
            settings(30.0);
            sh("ip link add pvc1 type bridge");
            let before = snapshot();
            let pod = Attempt::of("web", "a1", &list());
            let said = pod.add().ok();
            let tuning = json!({"cniVersion": "1.0.0", "name": "full", "type": "tuning",
                "mtu": 1300, "prevResult": said.answer});
            let dir = crate::support::cni::real_plugins().unwrap();
            let command = pod.command("ADD");
            let mut tune = Command::new(dir.join("tuning"));
            for (name, value) in command.get_envs() {
                tune.env(name, value.unwrap_or_default());
            }
            let text = tuning.to_string();
            crate::support::bin::run_with(&mut tune, Some(text.as_bytes()), BOUND).ok();
            let shown = pod.ip(&["link", "show", "eth0"]);
            assert!(shown.contains("mtu 1300"), "{shown}");
            pod.end();
            std::fs::remove_dir_all("/run/cni").ok();
            before.assert_unchanged();
        },
    );
}
