//! Faults that others reported of pods under a daemon, as a kubelet meets them.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::json;

use crate::kubelet::{BOUND, Kubelet, mode, pod, pod_with, sleeper};
use crate::node::{self, HANDLERS, snapshot, supervisors};
use crate::support::fake::{self, Fake};
use crate::support::{Sandbox, cgroup_mounts, cni, eventually};
use crate::wire::api::PodSandboxState;
use crate::wire::sandbox_config::NamespaceMode;

/// FL-086y: the netns and the network are the daemon's, whoever dies.
#[test]
fn a_pods_network_is_asked_for_by_the_daemon_alone() {
    Sandbox::new("field::a_pods_network_is_asked_for_by_the_daemon_alone").run(|| {
        let Some(mut daemon) = node::start("containerd-2.1", "") else {
            return;
        };
        let bridge = cni::real_plugins().unwrap().join("bridge");
        let fake = fake::plugin_before(Path::new(cni::PLUGINS), "watched", &bridge);
        node::network()
            .typed("watched")
            .write_in(Path::new(cni::CONFIGS));
        daemon.restart();
        let before = snapshot();
        let mut seen = Vec::new();
        for handler in HANDLERS {
            fake.forget();
            let mut kubelet = Kubelet::of(&daemon, handler);
            let pod = kubelet.pod(&format!("once-{handler}"));
            kubelet.launch(&pod, &sleeper("a")).unwrap();
            kubelet.end(&pod.id);
            seen.push(calls(&fake, &pod.id));
            if handler == "runc" {
                continue;
            }
            fake.forget();
            let pod = kubelet.pod(&format!("killed-{handler}"));
            kubelet.launch(&pod, &sleeper("a")).unwrap();
            kill(supervisors(&pod.id)[0], Signal::SIGKILL).unwrap();
            kubelet.end(&pod.id);
            // A removal that meets the dead supervisor is said again, and each time the daemon sends one without a netns.
            let mut calls = calls(&fake, &pod.id);
            calls.dedup();
            assert_eq!(calls, ["ADD true", "DEL true", "DEL false"], "{handler}");
        }
        for calls in seen {
            assert_eq!(calls, ["ADD true", "DEL true", "DEL false"]);
        }
        before.assert_unchanged();
    });
}

/// All for this pod: verbs, and whether they had the netns.
fn calls(fake: &Fake, pod: &str) -> Vec<String> {
    let line = |call: fake::Call| {
        assert_eq!(call.var("CNI_CONTAINERID"), pod);
        format!("{} {}", call.verb, !call.var("CNI_NETNS").is_empty())
    };
    fake.calls().into_iter().map(line).collect()
}

/// FL-023.
#[test]
fn a_pod_on_the_nodes_network_needs_no_network_configuration() {
    Sandbox::new("field::a_pod_on_the_nodes_network_needs_no_network_configuration").run(|| {
        let Some(mut daemon) = node::start("containerd-2.1", "") else {
            return;
        };
        daemon.stop();
        for file in fs::read_dir(cni::CONFIGS).unwrap().flatten() {
            fs::remove_file(file.path()).unwrap();
        }
        daemon.start_again();
        let before = snapshot();
        // The third is the one that containerd 2.1 cannot take to the node's network.
        for handler in ["runc", "podvisor-pod"] {
            let mut kubelet = Kubelet::of(&daemon, handler);
            let refused = kubelet.run(&pod(&format!("own-{handler}")), 1);
            assert!(refused.is_err(), "there is no network for it");
            kubelet.clean(&format!("own-{handler}"));
            let mut config = pod_with(&format!("nodes-{handler}"), |options, _| {
                options.network = mode(NamespaceMode::NODE);
            });
            config.hostname.clear();
            let pod = kubelet.run(&config, 1).unwrap();
            let id = kubelet.launch(&pod, &sleeper("a")).unwrap();
            let own = fs::read_link("/proc/self/ns/net").unwrap();
            let link = kubelet.sh(&id, "readlink /proc/self/ns/net");
            assert_eq!(link, own.to_string_lossy());
            kubelet.end(&pod.id);
        }
        before.assert_unchanged();
    });
}

/// FL-030: before and after the daemon comes back, and the same inside. Which comes first is the daemon's choice (`ip_pref`).
#[test]
fn a_pods_addresses_of_both_families_are_told() {
    Sandbox::new("field::a_pods_addresses_of_both_families_are_told").run(|| {
        let Some(mut daemon) = node::start("containerd-2.1", "") else {
            return;
        };
        let ranges = json!([[{"subnet": "fd98::/64"}], [{"subnet": "10.98.7.0/24"}]]);
        let plugin = json!({
            "type": "bridge", "bridge": "pvcri0", "ipam": {"type": "host-local", "ranges": ranges},
        });
        cni::network("pods", vec![plugin]).write_in(Path::new(cni::CONFIGS));
        daemon.stop();
        let before = snapshot();
        daemon.start_again();
        let mut pods = Vec::new();
        for handler in HANDLERS {
            let mut kubelet = Kubelet::of(&daemon, handler);
            let pod = kubelet.pod(&format!("both-{handler}"));
            let id = kubelet.launch(&pod, &sleeper("a")).unwrap();
            let ips = addresses(&mut kubelet, &pod.id);
            assert!(
                ips[0].starts_with("10.98.7.") && ips[1].starts_with("fd98::"),
                "{ips:?}"
            );
            pods.push((handler, pod, id, ips));
        }
        daemon.kill();
        daemon.start_again();
        for (handler, pod, id, ips) in pods {
            let mut kubelet = Kubelet::of(&daemon, handler);
            assert_eq!(addresses(&mut kubelet, &pod.id), ips);
            let inside = kubelet.sh(&id, "ip addr show eth0");
            for ip in &ips {
                assert!(inside.contains(&format!(" {ip}/")), "{ip}: {inside}");
            }
            kubelet.end(&pod.id);
        }
        daemon.stop();
        before.assert_unchanged();
    });
}

fn addresses(kubelet: &mut Kubelet, pod: &str) -> [String; 2] {
    let status = kubelet.pod_status(pod).unwrap().status.unwrap_or_default();
    let [more] = status.network.additional_ips.as_slice() else {
        panic!("{:?}", status.network);
    };
    [status.network.ip.clone(), more.ip.clone()]
}

/// FL-055: the whole pod is killed by somebody who knows its cgroup, again and again.
#[test]
fn pods_whose_cgroups_are_killed_leave_no_supervisor() {
    Sandbox::new("field::pods_whose_cgroups_are_killed_leave_no_supervisor").run(|| {
        // A daemon that stays connected gets ten times this.
        fs::write("/etc/podvisor/config.toml", "idle_timeout = 0.5\n").unwrap();
        let Some(daemon) = node::start("containerd-2.1", "") else {
            return;
        };
        let before = snapshot();
        for handler in ["podvisor", "podvisor-pod"] {
            let mut kubelet = Kubelet::of(&daemon, handler);
            for attempt in 0..3 {
                let parent = format!("/kubepods-{handler}-{attempt}");
                let mut config = pod_with("swept", |_, linux| {
                    linux.cgroup_parent = parent.clone();
                });
                config.metadata.as_mut().unwrap().attempt = attempt;
                let pod = kubelet.run(&config, attempt + 1).unwrap();
                let ids = ["a", "b"].map(|name| kubelet.launch(&pod, &sleeper(name)).unwrap());
                sweep(&parent);
                for id in ids {
                    assert_eq!(kubelet.ended(&id).exit_code, 137);
                }
                eventually(BOUND, "the pod is not ready", || {
                    let status = kubelet.pod_status(&pod.id).unwrap().status;
                    let state = status.unwrap_or_default().state.enum_value_or_default();
                    (state == PodSandboxState::SANDBOX_NOTREADY).then_some(())
                });
                kubelet.end(&pod.id);
                eventually(BOUND, "its supervisor leaves", || {
                    supervisors(&pod.id).is_empty().then_some(())
                });
                // The parent is the kubelet's, which removes it.
                for dir in groups(&parent) {
                    fs::remove_dir(&dir).unwrap();
                }
            }
        }
        before.assert_unchanged();
    });
}

/// Kills everything in the group and below until nothing is left.
fn sweep(group: &str) {
    let own = Pid::this();
    eventually(Duration::from_secs(20), "the group is empty", || {
        let mut dirs = groups(group);
        let mut pids = Vec::new();
        while let Some(dir) = dirs.pop() {
            let procs = fs::read_to_string(dir.join("cgroup.procs")).unwrap_or_default();
            pids.extend(procs.lines().filter_map(|l| l.parse::<i32>().ok()));
            let inside = fs::read_dir(dir).into_iter().flatten().flatten();
            dirs.extend(inside.map(|e| e.path()).filter(|p| p.is_dir()));
        }
        for pid in &pids {
            assert!(*pid > 1 && *pid != own.as_raw());
            // It may have ended meanwhile.
            let _ = kill(Pid::from_raw(*pid), Signal::SIGKILL);
        }
        pids.is_empty().then_some(())
    });
}

/// Its directories, in whichever hierarchies it is.
fn groups(path: &str) -> Vec<PathBuf> {
    let dirs = cgroup_mounts().into_iter();
    dirs.map(|mount| mount.join(path.trim_start_matches('/')))
        .filter(|dir| dir.is_dir())
        .collect()
}
