//! A daemon with the plugin in front of its network, and a client that does as kubelets do.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::cri::Cri;
use crate::image::{self, PAUSE};
use crate::support::cni::Network;
use crate::support::fake::{self, Act, Fake};
use crate::support::grpc::Message;
use crate::support::{self, Containerd, Scope, cni, eventually, podvisor, require};

/// For what takes as long as a loaded machine needs.
pub const BOUND: Duration = Duration::from_secs(90);

/// What the client waits at least for one RunPodSandbox; longer where the machine needs that without any network.
const DEADLINE: Duration = Duration::from_secs(4);

/// How many of these the network takes.
const SLOWER: f64 = 2.5;

/// Where the network's pods have their addresses.
pub const SUBNET: &str = "10.97.3.";

pub fn config(name: &str) -> Message {
    Cri::config(name, &[])
}

/// Of one client.
#[derive(Clone, Copy)]
pub struct Times {
    /// Of one RunPodSandbox.
    pub deadline: Duration,
    /// Of all of them.
    pub limit: Duration,
}

impl Times {
    /// Of a client with this deadline, for as long as it takes.
    pub fn of(deadline: f64) -> Self {
        Self {
            deadline: Duration::from_secs_f64(deadline),
            limit: BOUND,
        }
    }
}

/// What a node is like.
#[derive(Clone)]
pub struct Setup {
    peer: String,
    wrapped: bool,
    network: Network,
    config: String,
    env: Vec<(String, String)>,
    interval: f64,
}

impl Setup {
    /// A bridge behind a fake that can be told to be slow, host-local and portmap, with the plugin in front.
    pub fn of(peer: &str) -> Self {
        Self {
            peer: peer.to_owned(),
            wrapped: true,
            network: cni::network("pods", vec![bridge("slow", &[&format!("{SUBNET}0/24")])])
                .portmap(),
            config: String::new(),
            env: Vec::new(),
            interval: 20.0,
        }
    }

    /// Without the plugin.
    pub fn alone(mut self) -> Self {
        self.wrapped = false;
        self
    }

    /// Another network.
    pub fn network(mut self, network: Network) -> Self {
        self.network = network;
        self
    }

    /// More of the daemon's configuration.
    pub fn config(mut self, text: &str) -> Self {
        self.config = text.to_owned();
        self
    }

    /// A variable of the daemon's environment, which its plugins inherit.
    pub fn env(mut self, name: &str, value: &str) -> Self {
        self.env.push((name.to_owned(), value.to_owned()));
        self
    }

    /// An unclaimed network lives one and a half of these, seconds.
    pub fn interval(mut self, seconds: f64) -> Self {
        self.interval = seconds;
        self
    }

    /// Starts it; None where the peer is not there.
    pub fn start(self) -> Option<Node> {
        Node::start(self)
    }
}

/// A bridge's object with these ranges.
pub fn bridge(kind: &str, subnets: &[&str]) -> Value {
    let ranges: Vec<Value> = subnets.iter().map(|s| json!([{"subnet": s}])).collect();
    json!({"type": kind, "bridge": "pvc2", "isGateway": true, "ipMasq": false,
        "ipam": {"type": "host-local", "ranges": ranges}})
}

/// A daemon on a bridge that can be told to be slow.
pub struct Node {
    pub daemon: Containerd,
    pub bridge: Fake,
}

impl Node {
    fn start(setup: Setup) -> Option<Self> {
        let peer = require::peer(&setup.peer)?;
        let real = cni::use_real_plugins()?;
        let plugin = env!("CARGO_BIN_EXE_podvisor-cni");
        symlink(plugin, Path::new(cni::PLUGINS).join("podvisor-cni")).unwrap();
        let bridge = fake::plugin_before(Path::new(cni::PLUGINS), "slow", &real.join("bridge"));
        support::sh("ip link add pvc2 type bridge");
        setup.network.write();
        fs::write(
            "/etc/podvisor/config.toml",
            format!(
                "[parking]\ninterval = {:?}\n[cni]\nparallel = 32\n",
                setup.interval
            ),
        )
        .unwrap();
        if setup.wrapped {
            podvisor(&["network", "wrap", "pods"]).ok();
        }
        let mut config = if peer.name.starts_with("containerd-1.") {
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
        config.push_str(&setup.config);
        let mut builder = Containerd::builder(&peer).config(&config);
        for (name, value) in &setup.env {
            builder = builder.env(name, value);
        }
        let daemon = builder.start();
        image::import(&daemon);
        Some(Self { daemon, bridge })
    }

    pub fn cri(&self) -> Cri {
        Cri::of(&self.daemon)
    }

    /// One pod as a kubelet makes it: what is left of the last attempt goes, then RunPodSandbox; until it is up, or the
    /// time is over.
    pub fn come_up(
        &self,
        name: &str,
        handler: &str,
        pod: &Message,
        times: Times,
    ) -> Option<String> {
        let mut cri = self.cri();
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
    pub fn all(&self, prefix: &str, handler: &str, count: usize, times: Times) -> Vec<String> {
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
    pub fn measured(&self, handler: &str, count: usize) -> Times {
        let mut times = Times {
            deadline: BOUND,
            limit: BOUND * 2,
        };
        let begun = Instant::now();
        let ids = self.all("quick", handler, count, times);
        times.deadline = (begun.elapsed() * 2).max(DEADLINE);
        assert_eq!(ids.len(), count);
        let mut cri = self.cri();
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
    pub fn calls(&self) -> (usize, usize) {
        (self.bridge.count("ADD"), self.bridge.count("DEL"))
    }

    /// Until the real bridge has seen so many ADDs and DELs, and never more.
    #[track_caller]
    pub fn until(&self, adds: usize, dels: usize) {
        eventually(BOUND, &format!("{adds} ADD and {dels} DEL"), || {
            let now = self.calls();
            assert!(now.0 <= adds && now.1 <= dels, "{now:?}");
            (now == (adds, dels)).then_some(())
        });
    }
}

/// Stop and remove, the latter again until it succeeds, as kubelets do: a daemon may find the shim's connection closed
/// before it has read the answer to its shutdown.
pub fn end(cri: &mut Cri, id: &str) {
    cri.stop(id).unwrap();
    eventually(BOUND, "the removal", || match cri.remove(id) {
        Ok(()) => Some(()),
        Err(status) => {
            println!("remove {id}: {status:?}");
            None
        }
    });
}

/// The pod is up, and has an address of the network's.
#[track_caller]
pub fn address(cri: &mut Cri, id: &str) -> String {
    let (pod, address) = cri.status(id).unwrap();
    assert!(
        pod.ready && address.starts_with(SUBNET),
        "{pod:?} {address}"
    );
    address
}

pub fn scope() -> Scope {
    Scope::default().within(Duration::from_secs(30))
}

/// The same without what a daemon has made of a sandbox that it was killed over, which is the daemon's.
pub fn without_the_daemons() -> Scope {
    let of_daemon = [
        "netns /run/netns/cni-",
        "mount /run/netns/cni-",
        "process",
        "socket /run/containerd",
    ];
    let scope = of_daemon
        .iter()
        .fold(scope(), |scope, text| scope.allow(text));
    let groups = support::cgroup_mounts().into_iter();
    groups.fold(scope, |scope, root| {
        scope.allow(&format!("cgroup {}/k8s.io", root.display()))
    })
}
