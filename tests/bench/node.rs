//! A containerd 2.1 with CRI, on which pods are made by the Go shim and by ours in both modes.

use std::fs;
use std::path::Path;
use std::time::Duration;

use serde_json::json;

use crate::cri::Cri;
use crate::image::{self, PAUSE};
use crate::rig;
use crate::support::grpc::Message;
use crate::support::{Containerd, cni, require};
use crate::table::GO;

const BOUND: Duration = Duration::from_secs(60);

/// One way of making pods.
#[derive(Clone, Copy, Debug)]
pub struct Way {
    pub name: &'static str,
    pub handler: &'static str,
    pub host_network: bool,
}

const GO_HOST: &str = "Go shim, host network";

/// Through a network's plugins.
pub const NETWORKED: [Way; 3] = [
    Way {
        name: GO,
        handler: "runc",
        host_network: false,
    },
    Way {
        name: "podvisor, shim mode",
        handler: "podvisor",
        host_network: false,
    },
    Way {
        name: "podvisor, podsandbox mode",
        handler: "podvisor-pod",
        host_network: false,
    },
];

/// On the host's network; shim mode is left out: containerd crashes on it before 2.3.
pub const HOST: [Way; 2] = [
    Way {
        name: GO_HOST,
        handler: "runc",
        host_network: true,
    },
    Way {
        name: "podvisor, podsandbox mode, host network",
        handler: "podvisor-pod",
        host_network: true,
    },
];

impl Way {
    /// PodSandboxConfig of a pod made so.
    pub fn config(&self, name: &str) -> Message {
        let config = Cri::config(name, &[]);
        if !self.host_network {
            return config;
        }
        // LinuxPodSandboxConfig.security_context.namespace_options.network = NODE.
        let options = Message::new().varint(1, 2);
        let security = Message::new().message(1, &options);
        // The host's own name, too: the last value of a field counts.
        config
            .text(2, "")
            .message(8, &Message::new().message(2, &security))
    }
}

/// What pods' networks are made by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Network {
    /// bridge, host-local and portmap.
    Bridge,
    /// A static plugin that does nothing: what is left is the daemon's and the shim's.
    Nothing,
}

/// Starts it; None where a part is missing.
pub fn start(network: Network) -> Option<Containerd> {
    rig::use_released();
    let peer = require::peer("containerd-2.1")?;
    cni::use_real_plugins()?;
    match network {
        Network::Bridge => drop(
            cni::bridge("bench", "pvbench0", "10.98.0.0/16")
                .portmap()
                .write(),
        ),
        Network::Nothing => {
            fs::copy(rig::floor()?, Path::new(cni::PLUGINS).join("nothing")).unwrap();
            cni::network("bench", vec![json!({"type": "nothing"})]).write();
        }
    }
    let plugin = "plugins.\"io.containerd.cri.v1.runtime\"";
    let config = format!(
        "[{plugin}.containerd.runtimes.podvisor-pod]\n\
         runtime_type = \"io.containerd.podvisor.v1\"\n[{plugin}]\nrestrict_oom_score_adj = true\n\
         [plugins.\"io.containerd.cri.v1.images\".pinned_images]\nsandbox = \"{PAUSE}\"\n"
    );
    let daemon = Containerd::builder(&peer).config(&config).start();
    image::import(&daemon);
    Some(daemon)
}

/// RunPodSandbox.
pub fn run(cri: &mut Cri, way: &Way, name: &str) -> String {
    cri.run_within(&way.config(name), way.handler, BOUND)
        .unwrap()
}

/// A container of the pod image, called `name`, that sleeps.
pub fn container(cri: &mut Cri, pod: &str, name: &str) {
    let config = ["/bin/busybox", "sleep", WORKLOAD].iter().fold(
        Message::new()
            .message(1, &Message::new().text(1, "main"))
            .message(2, &Message::new().text(1, PAUSE)),
        |config, word| config.text(3, word),
    );
    let id = cri.create_container(pod, name, &config).unwrap();
    cri.start_container(&id).unwrap();
}

/// What tells a workload from a pod's first container, which sleeps as well.
pub const WORKLOAD: &str = "99999";
