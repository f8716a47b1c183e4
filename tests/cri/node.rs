//! A node of one: a containerd with a bridge, a local image and three runtime handlers, and the comparison of what the same
//! body sees through each of them.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::time::Duration;

use nix::unistd::Pid;

use crate::image::{self, PAUSE};
use crate::kubelet::{Kubelet, pod_with};
use crate::support::{Containerd, Scope, Snapshot, cni, require};
use crate::users;
use crate::wire::sandbox_config::*;

/// containerd's own shim, ours as sandbox controller, ours for a pause container.
pub const HANDLERS: [&str; 3] = ["runc", "podvisor", "podvisor-pod"];

/// The file of podvisor's settings where there is one.
const SETTINGS: &str = "/run/podvisor.toml";

/// One handler's view: the kubelet, and what it has seen.
#[derive(Debug)]
pub struct Side<'a> {
    pub kubelet: Kubelet,
    pub daemon: &'a Containerd,
    pub seen: Seen,
}

/// Lines by what they are about.
pub type Seen = BTreeMap<String, String>;

impl<'a> Side<'a> {
    pub fn of(daemon: &'a Containerd, handler: &str) -> Self {
        Self {
            kubelet: Kubelet::of(daemon, handler),
            daemon,
            seen: Seen::new(),
        }
    }

    /// One thing that was seen; a key has one value.
    pub fn say(&mut self, key: &str, seen: impl std::fmt::Display) {
        let seen = seen.to_string();
        println!("{:>12} {key}: {seen}", self.kubelet.handler);
        assert!(self.seen.insert(key.into(), seen).is_none(), "{key} twice");
    }

    /// What a script in a container prints.
    pub fn sees(&mut self, key: &str, id: &str, script: &str) {
        let seen = self.kubelet.sh(id, script);
        self.say(key, seen);
    }

    /// A pod's configuration: its name is this handler's alone, its hostname is not.
    pub fn config(
        &self,
        name: &str,
        edit: impl FnOnce(&mut NamespaceOption, &mut LinuxPodSandboxConfig),
    ) -> PodSandboxConfig {
        let mut config = pod_with(&format!("{name}-{}", self.kubelet.handler), edit);
        config.hostname = name.into();
        config
    }
}

/// The daemon with everything a pod needs; None where it is not installed.
pub fn start(peer: &str, more: &str) -> Option<Containerd> {
    start_over(peer, "", more)
}

/// The same with this OCI runtime for all handlers of a daemon of 2.x; the empty name is runc.
pub fn start_over(peer: &str, runtime: &str, more: &str) -> Option<Containerd> {
    let peer = require::peer(peer)?;
    cni::use_real_plugins()?;
    if !require::tool("runc") || (runtime == users::MAPS && !users::install_maps()) {
        return None;
    }
    network().write();
    let old = peer.name.starts_with("containerd-1.");
    let config = if old {
        format!(
            "[plugins.\"io.containerd.grpc.v1.cri\"]\nsandbox_image = \"{PAUSE}\"\nrestrict_oom_score_adj = true\n\
             enable_unprivileged_ports = true\nenable_unprivileged_icmp = true\n\
             [plugins.\"io.containerd.grpc.v1.cri\".cni]\nbin_dir = \"/opt/cni/bin\"\n"
        )
    } else {
        let plugin = "plugins.\"io.containerd.cri.v1.runtime\"";
        format!(
            "[{plugin}]\nrestrict_oom_score_adj = true\ndrain_exec_sync_io_timeout = \"2s\"\n\
             [{plugin}.containerd.runtimes.podvisor-pod]\nruntime_type = \"io.containerd.podvisor.v1\"\n\
             sandboxer = \"podsandbox\"\n\
             [plugins.\"io.containerd.cri.v1.images\".pinned_images]\nsandbox = \"{PAUSE}\"\n"
        )
    };
    let mut daemon = Containerd::builder(&peer);
    let mut named = String::new();
    if !runtime.is_empty() {
        // For ours it is in the configuration: docs/kubernetes.md says why.
        fs::write(
            SETTINGS,
            format!("[options]\nbinary_name = \"{runtime}\"\n"),
        )
        .unwrap();
        daemon = daemon.env("PODVISOR_CONFIG", SETTINGS);
        named = format!(
            "[plugins.\"io.containerd.cri.v1.runtime\".containerd.runtimes.runc.options]\n\
             BinaryName = \"{runtime}\"\n"
        );
    }
    let daemon = daemon.config(&(config + &named + more)).start();
    image::import(&daemon);
    Some(daemon)
}

/// The pods' network.
pub fn network() -> cni::Network {
    cni::bridge("pods", "pvcri0", "10.98.7.0/24")
}

/// Everything a pod can leave behind.
pub fn snapshot() -> Snapshot {
    Scope::default().within(Duration::from_secs(30)).take()
}

/// The processes that serve a pod, by their command lines.
pub fn supervisors(pod: &str) -> Vec<Pid> {
    let processes = fs::read_dir("/proc").unwrap().flatten();
    let found = processes.filter_map(|entry| {
        let pid: i32 = entry.file_name().to_str()?.parse().ok()?;
        let line = fs::read(entry.path().join("cmdline")).ok()?;
        let line = String::from_utf8_lossy(&line).into_owned();
        (line.contains("containerd-shim") && line.contains(pod)).then(|| Pid::from_raw(pid))
    });
    found.collect()
}

/// Where a handler of ours is meant to differ from containerd's own shim.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OnPurpose {
    /// `podvisor`, `podvisor-pod`, or `*` for both.
    pub handler: &'static str,
    pub key: &'static str,
    pub theirs: &'static str,
    pub ours: &'static str,
    /// `better` or `different`.
    pub verdict: &'static str,
    /// Words of docs/kubernetes.md that tell why.
    pub why: &'static str,
}

/// Compares the handlers, each with containerd's own, and the verdicts with the table in docs/kubernetes.md. Says which
/// difference is in no list, which line of the list is no difference any more, and what the document lacks.
pub fn compare(area: &str, seen: &[(&str, Seen)], on_purpose: &[OnPurpose]) -> Vec<String> {
    let document = include_str!("../../docs/kubernetes.md");
    let (go, ours) = seen.split_first().unwrap();
    let (mut wrong, mut used, mut row) = (Vec::new(), Vec::new(), format!("| {area} |"));
    for (handler, seen) in ours {
        let mut verdict = "same";
        let keys: BTreeSet<_> = match seen.is_empty() {
            true => BTreeSet::new(),
            false => go.1.keys().chain(seen.keys()).collect(),
        };
        for key in keys {
            let of = |seen: &Seen| seen.get(key).cloned().unwrap_or_else(|| "nothing".into());
            let (theirs, ours) = (of(&go.1), of(seen));
            if theirs == ours {
                continue;
            }
            let meant = on_purpose.iter().find(|meant| {
                [handler, "*"].contains(&meant.handler)
                    && (meant.key, meant.theirs, meant.ours) == (key, &theirs, &ours)
            });
            match meant {
                Some(meant) => {
                    used.push(*meant);
                    // The worse of the two is told.
                    if verdict != "different" {
                        verdict = meant.verdict;
                    }
                }
                None => wrong.push(format!(
                    "{area}, {handler}: {key}\n    Go: {theirs}\n    we: {ours}"
                )),
            }
        }
        row += &match seen.is_empty() {
            true => " – |".to_owned(),
            false => format!(" {verdict} |"),
        };
    }
    for meant in on_purpose {
        if !used.contains(meant) {
            wrong.push(format!("{area}: no difference any more: {meant:?}"));
        }
        if !document.contains(meant.why) {
            wrong.push(format!("{area}: not in docs/kubernetes.md: {}", meant.why));
        }
    }
    if !document.contains(&row) {
        wrong.push(format!("docs/kubernetes.md has no row: {row}"));
    }
    wrong
}

/// Nothing is wrong.
pub fn assert_alike(wrong: &[String]) {
    assert!(wrong.is_empty(), "differences:\n{}", wrong.join("\n"));
}
