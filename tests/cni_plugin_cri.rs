//! `podvisor-cni` under containerd's CRI: a client that gives up sooner than the network is ready, and comes again, as
//! kubelets do.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "tests panic where they cannot go on"
)]
#![allow(
    clippy::print_stdout,
    reason = "captured by the test runner, and the summary of a slow run"
)]

#[path = "failpoints/cri.rs"]
mod cri;
#[path = "failpoints/image.rs"]
mod image;
mod support;

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use cri::Cri;
use image::PAUSE;
use serde_json::json;
use support::fake::{self, Act, Fake};
use support::grpc::Message;
use support::{Containerd, Sandbox, Scope, cni, eventually, podvisor, require, sandboxed};

const BOUND: Duration = Duration::from_secs(90);

/// What the client waits at least for one RunPodSandbox; longer where the machine needs that without any network.
const DEADLINE: Duration = Duration::from_secs(4);

/// How many of these the network takes.
const SLOWER: f64 = 2.5;

fn config(name: &str) -> Message {
    Cri::config(name, &[])
}

/// Of one client.
#[derive(Clone, Copy)]
struct Times {
    /// Of one RunPodSandbox.
    deadline: Duration,
    /// Of all of them.
    limit: Duration,
}

/// A daemon on a bridge that can be told to be slow.
struct Node {
    daemon: Containerd,
    bridge: Fake,
}

impl Node {
    fn start(peer: &str, wrapped: bool) -> Option<Self> {
        let peer = require::peer(peer)?;
        let real = cni::real_plugins()?;
        for entry in fs::read_dir(&real).unwrap().flatten() {
            let to = Path::new(cni::PLUGINS).join(entry.file_name());
            if entry.path().is_file() && !to.exists() {
                symlink(entry.path(), to).unwrap();
            }
        }
        let plugin = env!("CARGO_BIN_EXE_podvisor-cni");
        symlink(plugin, Path::new(cni::PLUGINS).join("podvisor-cni")).unwrap();
        let bridge = fake::plugin_before(Path::new(cni::PLUGINS), "slow", &real.join("bridge"));
        support::sh("ip link add pvc2 type bridge");
        let plugins = json!({
            "type": "slow", "bridge": "pvc2", "isGateway": true, "ipMasq": false,
            "ipam": {"type": "host-local", "ranges": [[{"subnet": "10.97.3.0/24"}]]}});
        cni::network("pods", vec![plugins]).portmap().write();
        fs::write(
            "/etc/podvisor/config.toml",
            "[parking]\ninterval = 20.0\n[cni]\nparallel = 32\n",
        )
        .unwrap();
        if wrapped {
            podvisor(&["network", "wrap", "pods"]).ok();
        }
        let config = if peer.name.starts_with("containerd-1.") {
            format!(
                "[plugins.\"io.containerd.grpc.v1.cri\"]\nsandbox_image = \"{PAUSE}\"\nrestrict_oom_score_adj = true\n\
                 [plugins.\"io.containerd.grpc.v1.cri\".cni]\nbin_dir = \"/opt/cni/bin\"\n"
            )
        } else {
            format!(
                "[plugins.\"io.containerd.cri.v1.runtime\"]\nrestrict_oom_score_adj = true\n\
                 [plugins.\"io.containerd.cri.v1.images\".pinned_images]\nsandbox = \"{PAUSE}\"\n"
            )
        };
        let daemon = Containerd::builder(&peer).config(&config).start();
        let dir = tempfile::tempdir().unwrap();
        let tar = image::pause(dir.path());
        let import = ["-n", "k8s.io", "images", "import", tar.to_str().unwrap()];
        daemon.ctr(&import).ok();
        let mut cri = Cri::of(&daemon);
        eventually(BOUND, "CRI knows the image", || {
            cri.has_image(PAUSE).then_some(())
        });
        Some(Self { daemon, bridge })
    }

    /// One pod as a kubelet makes it: what is left of the last attempt goes, then RunPodSandbox; until it is up, or the
    /// time is over.
    fn come_up(&self, name: &str, handler: &str, pod: &Message, times: Times) -> Option<String> {
        let mut cri = Cri::of(&self.daemon);
        let end = Instant::now() + times.limit;
        while Instant::now() < end {
            match cri.run_within(pod, handler, times.deadline) {
                Ok(id) => return Some(id),
                Err(status) => println!("{name}: {} {}", status.code, status.message),
            }
            std::thread::sleep(Duration::from_millis(700));
            for left in cri.list().into_iter().filter(|p| p.name == name) {
                let _ = cri.stop(&left.id);
                let _ = cri.remove(&left.id);
            }
        }
        None
    }

    /// All pods at once; the ids of those that came up.
    fn all(&self, prefix: &str, handler: &str, count: usize, times: Times) -> Vec<String> {
        std::thread::scope(|scope| {
            let names = (0..count).map(|n| format!("{prefix}{n}"));
            let threads: Vec<_> = names
                .map(|name| {
                    scope.spawn(move || self.come_up(&name, handler, &config(&name), times))
                })
                .collect();
            threads
                .into_iter()
                .filter_map(|t| t.join().unwrap())
                .collect()
        })
    }

    /// A deadline that pods can meet when their network is quick, from trying that.
    fn measured(&self, handler: &str, count: usize) -> Times {
        let mut times = Times {
            deadline: BOUND,
            limit: BOUND * 2,
        };
        let begun = Instant::now();
        let ids = self.all("quick", handler, count, times);
        times.deadline = (begun.elapsed() * 2).max(DEADLINE);
        assert_eq!(ids.len(), count);
        let mut cri = Cri::of(&self.daemon);
        ids.iter().for_each(|id| end(&mut cri, id));
        // A daemon alone sends some of them twice.
        let calls = || (self.calls().0 == count && self.calls().1 >= count).then_some(());
        eventually(BOUND, "every DEL", calls);
        self.bridge.forget();
        let slow = times.deadline.mul_f64(SLOWER);
        self.bridge.on("ADD", &[Act::Sleep(slow.as_secs_f64())]);
        times.limit = times.deadline * 20;
        times
    }

    /// Calls of the real bridge.
    fn calls(&self) -> (usize, usize) {
        (self.bridge.count("ADD"), self.bridge.count("DEL"))
    }
}

/// Stop and remove, again until both succeed, as kubelets do: a daemon may find the shim's connection closed before it has
/// read the answer to its shutdown.
fn end(cri: &mut Cri, id: &str) {
    cri.stop(id).unwrap();
    eventually(BOUND, "the removal", || match cri.remove(id) {
        Ok(()) => Some(()),
        Err(status) => {
            println!("remove {id}: {status:?}");
            None
        }
    });
}

fn snapshot() -> support::Snapshot {
    Scope::default().within(Duration::from_secs(30)).take()
}

/// All pods at once; every one comes up with one ADD of its own, and goes with one DEL.
fn all_come_up(peer: &str, handler: &str, count: usize) {
    let Some(node) = Node::start(peer, true) else {
        return;
    };
    let before = snapshot();
    let times = node.measured(handler, count);
    let begun = Instant::now();
    let ids = node.all("web", handler, count, times);
    assert_eq!(ids.len(), count);
    println!(
        "{peer} {handler}: deadline {:.1} s: {count} pods up after {:.1} s with {} ADD and {} DEL",
        times.deadline.as_secs_f64(),
        begun.elapsed().as_secs_f64(),
        node.calls().0,
        node.calls().1
    );
    assert_eq!(node.calls(), (count, 0));
    let mut cri = Cri::of(&node.daemon);
    let mut addresses = BTreeSet::new();
    for id in &ids {
        let (pod, address) = cri.status(id).unwrap();
        assert!(
            pod.ready && address.starts_with("10.97.3."),
            "{pod:?} {address}"
        );
        addresses.insert(address);
    }
    assert_eq!(addresses.len(), count);
    for id in &ids {
        end(&mut cri, id);
    }
    let ended = |dels| dels == node.calls().1;
    eventually(BOUND, "every DEL", || ended(count).then_some(()));
    assert_eq!(node.calls(), (count, count));
    before.assert_unchanged();
}

macro_rules! cells {
    ($($(#[$slow:meta])? $name:ident: $peer:literal, $handler:literal, $count:literal;)*) => {$(
        #[test]
        $(#[$slow])?
        fn $name() {
            Sandbox::new(stringify!($name))
                .bound(Duration::from_secs(600))
                .run(|| all_come_up($peer, $handler, $count));
        }
    )*};
}

cells! {
    twenty_pods_of_runc_come_up_under_containerd_21: "containerd-2.1", "runc", 20;
    pods_of_podvisor_come_up_under_containerd_21: "containerd-2.1", "podvisor", 5;
    pods_of_podvisor_come_up_under_containerd_17: "containerd-1.7", "podvisor", 5;
    pods_of_runc_come_up_under_containerd_16: "containerd-1.6", "runc", 5;
    #[ignore = "slow"]
    slow_twenty_pods_of_podvisor_under_containerd_21: "containerd-2.1", "podvisor", 20;
    #[ignore = "slow"]
    slow_twenty_pods_of_runc_under_containerd_17: "containerd-1.7", "runc", 20;
    #[ignore = "slow"]
    slow_twenty_pods_of_podvisor_under_containerd_17: "containerd-1.7", "podvisor", 20;
    #[ignore = "slow"]
    slow_twenty_pods_of_runc_under_containerd_16: "containerd-1.6", "runc", 20;
    #[ignore = "slow"]
    slow_twenty_pods_of_podvisor_under_containerd_16: "containerd-1.6", "podvisor", 20;
}

/// The same load without the plugin, for the table in docs/cni-plugin.md.
#[test]
#[ignore = "slow"]
fn slow_the_daemon_alone_does_not_converge() {
    Sandbox::new("slow_the_daemon_alone_does_not_converge")
        .bound(Duration::from_secs(600))
        .run(|| {
            let Some(node) = Node::start("containerd-2.1", false) else {
                return;
            };
            let mut times = node.measured("runc", 20);
            // Far more than the work of all takes.
            times.limit = times.deadline * 6;
            let begun = Instant::now();
            let up = node.all("web", "runc", 20, times).len();
            let (adds, dels) = node.calls();
            println!(
                "alone: deadline {:.1} s: {up} of 20 pods up after {:.1} s with {adds} ADD and {dels} DEL",
                times.deadline.as_secs_f64(),
                begun.elapsed().as_secs_f64()
            );
            assert_eq!(up, 0);
        });
}

/// What is in the pod, and what the daemon says of it, is the network that was taken; also published ports.
#[test]
fn exec_stats_and_ports_see_the_network_that_was_taken() {
    sandboxed(
        "exec_stats_and_ports_see_the_network_that_was_taken",
        || {
            let Some(node) = Node::start("containerd-2.1", true) else {
                return;
            };
            let before = snapshot();
            let times = node.measured("runc", 1);
            let port = Message::new().varint(2, 80).varint(3, 18081);
            let group = Message::new().text(1, "/kubepods-web");
            let pod = config("web").message(5, &port).message(8, &group);
            let id = node.come_up("web", "runc", &pod, times).unwrap();
            assert_eq!(node.calls(), (1, 0));
            let mut cri = Cri::of(&node.daemon);
            let (_, address) = cri.status(&id).unwrap();
            let exec = |args: &[&str]| {
                let exec = [
                    "-n",
                    "k8s.io",
                    "tasks",
                    "exec",
                    "--exec-id",
                    "x",
                    &id,
                    "/bin/busybox",
                ];
                node.daemon.ctr(&[&exec, args].concat()).ok().stdout
            };
            let shown = exec(&["ip", "addr"]);
            assert!(shown.contains(&format!("inet {address}/24")), "{shown}");
            assert!(shown.contains("LOOPBACK,UP"), "{shown}");
            assert!(cri.has_stats(&id).unwrap());
            let mut server = node
                .daemon
                .ctr_command()
                .args(["-n", "k8s.io", "tasks", "exec", "--exec-id", "s", &id])
                .args([
                    "/bin/busybox",
                    "nc",
                    "-l",
                    "-p",
                    "80",
                    "-e",
                    "/bin/busybox",
                    "echo",
                    "hello",
                ])
                .spawn()
                .unwrap();
            let text = eventually(BOUND, "the published port", || {
                let mut nc = Command::new("busybox");
                let out = nc
                    .args(["nc", "-w", "2", "10.97.3.1", "18081"])
                    .output()
                    .unwrap();
                (!out.stdout.is_empty()).then_some(out.stdout)
            });
            assert_eq!(text, b"hello\n");
            let _ = server.kill();
            server.wait().unwrap();
            cri.stop(&id).unwrap();
            cri.remove(&id).unwrap();
            eventually(BOUND, "the DEL", || (node.calls() == (1, 1)).then_some(()));
            before.assert_unchanged();
        },
    );
}

/// The daemon is killed while the network is made, and once more when it is there: its next life takes it all the same.
#[test]
fn a_daemon_that_is_killed_loses_no_work() {
    sandboxed("a_daemon_that_is_killed_loses_no_work", || {
        let Some(mut node) = Node::start("containerd-2.1", true) else {
            return;
        };
        // What the daemon had made of a sandbox that it was killed over is the daemon's.
        let before = Scope::default()
            .within(Duration::from_secs(30))
            .allow("netns /run/netns/cni-")
            .allow("mount /run/netns/cni-")
            .allow("process")
            .allow("socket /run/containerd")
            .take();
        let times = node.measured("runc", 1);
        let mut cri = Cri::of(&node.daemon);
        cri.run_within(&config("web"), "runc", Duration::from_secs(2))
            .unwrap_err();
        node.daemon.kill();
        node.daemon.start_again();
        let id = node.come_up("web", "runc", &config("web"), times).unwrap();
        assert_eq!(node.calls(), (1, 0));
        node.daemon.restart();
        let mut cri = Cri::of(&node.daemon);
        let (pod, address) = cri.status(&id).unwrap();
        assert!(
            pod.ready && address.starts_with("10.97.3."),
            "{pod:?} {address}"
        );
        // A pod deleted while its network is parked.
        cri.run_within(&config("other"), "runc", Duration::from_secs(2))
            .unwrap_err();
        node.daemon.kill();
        node.daemon.start_again();
        let mut cri = Cri::of(&node.daemon);
        for left in cri.list() {
            end(&mut cri, &left.id);
        }
        eventually(BOUND, "both DELs", || {
            (node.calls() == (2, 2)).then_some(())
        });
        before.assert_unchanged();
    });
}
