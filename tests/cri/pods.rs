//! What is the pod's: its life, its files, its namespaces, its events.

use std::os::unix::fs::PermissionsExt;
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use protobuf::MessageField;
use serde_json::Value;

use crate::kubelet::{self, container, mode, sleeper};
use crate::node::{Side, supervisors};
use crate::support::eventually;
use crate::wire::api::*;
use crate::wire::sandbox_config::*;

/// Made, shown, listed, stopped, removed.
pub fn life(side: &mut Side<'_>) {
    let mut config = side.config("life", |_, _| {});
    config.labels = [("app".to_owned(), "life".to_owned())].into();
    config.annotations = [("note".to_owned(), "kept".to_owned())].into();
    let linux = config.linux.as_mut().unwrap();
    let resources = linux.resources.mut_or_insert_default();
    resources.cpu_shares = 512;
    resources.memory_limit_in_bytes = 64 << 20;
    let pod = side.kubelet.run(&config, 3).unwrap();
    shown(side, "ready", &pod.id);
    let filter = PodSandboxFilter {
        label_selector: [("app".to_owned(), "life".to_owned())].into(),
        ..Default::default()
    };
    let request = ListPodSandboxRequest {
        filter: MessageField::some(filter),
        ..Default::default()
    };
    let listed: ListPodSandboxResponse = side.kubelet.ask("ListPodSandbox", &request).unwrap();
    let own = listed.items.iter().filter(|p| p.id == pod.id).count();
    side.say("listed by label", own);
    let info = side.kubelet.pod_status(&pod.id).unwrap().info;
    let info: Value = serde_json::from_str(&info["info"]).unwrap();
    let text = |pointer: &str| info.pointer(pointer).cloned().unwrap_or_default();
    side.say("info has a pid", text("/pid").as_u64() > Some(1));
    side.say("info process status", text("/processStatus"));
    side.say("info netns closed", text("/netNamespaceClosed"));
    side.say("info config name", text("/config/metadata/namespace"));
    let notes = text("/runtimeSpec/annotations");
    let notes = notes.as_object().cloned().unwrap_or_default();
    let notes: Vec<String> = notes
        .iter()
        // The image is one of podsandbox mode alone.
        .filter(|(key, _)| key.starts_with("io.kubernetes.cri.") && !key.contains("image-name"))
        .map(|(key, value)| {
            let value = value.as_str().unwrap_or_default();
            let value = value.replace(&pod.id, "ID");
            format!("{key}={}", value.replace(&side.kubelet.handler, "H"))
        })
        .collect();
    let notes: std::collections::BTreeSet<_> = notes.into_iter().collect();
    side.say("info annotations", format!("{notes:?}"));
    let namespaces = text("/runtimeSpec/linux/namespaces");
    let namespaces = namespaces.as_array().cloned().unwrap_or_default();
    let network = namespaces.iter().find(|n| n["type"] == "network");
    let path = network.and_then(|n| n["path"].as_str()).unwrap_or_default();
    side.say("info netns", path.starts_with("/var/run/netns/cni-"));
    side.kubelet.of_pod("StopPodSandbox", &pod.id).unwrap();
    shown(side, "stopped", &pod.id);
    side.kubelet.of_pod("RemovePodSandbox", &pod.id).unwrap();
    shown(side, "removed", &pod.id);
}

fn shown(side: &mut Side<'_>, when: &str, id: &str) {
    let text = match side.kubelet.pod_status(id) {
        Err(status) => format!("error {}", status.code),
        Ok(answer) => {
            let status = answer.status.unwrap_or_default();
            let address = status.network.ip.starts_with("10.98.7.");
            let options = &status.linux.namespaces.options;
            format!(
                "{:?} attempt {} of {} created {} address {address} {} network {:?} pid {:?} ipc {:?} {:?} {:?} {}",
                status.state.enum_value_or_default(),
                status.metadata.attempt,
                status.metadata.namespace,
                status.created_at > 1_700_000_000_000_000_000,
                status.network.additional_ips.len(),
                options.network.enum_value_or_default(),
                options.pid.enum_value_or_default(),
                options.ipc.enum_value_or_default(),
                status.labels,
                status.annotations,
                status.runtime_handler == side.kubelet.handler,
            )
        }
    };
    side.say(&format!("status when {when}"), text);
}

/// Everything twice, in the wrong order, and too late.
pub fn again(side: &mut Side<'_>) {
    let config = side.config("again", |_, _| {});
    let pod = side.kubelet.run(&config, 1).unwrap();
    let second = side.kubelet.run(&config, 1);
    side.say("the same pod again", second.unwrap_err().code);
    let id = side.kubelet.launch(&pod, &sleeper("a")).unwrap();
    let second = side.kubelet.create(&pod, &sleeper("a"));
    side.say("the same container again", second.unwrap_err().code);
    let started = side.kubelet.of_container("StartContainer", &id);
    side.say("start again", started.unwrap_err().code);
    let removed = side.kubelet.of_container("RemoveContainer", &id);
    side.say(
        "remove while it runs",
        format!("{:?}", removed.map_err(|s| s.code)),
    );
    let id = side.kubelet.launch(&pod, &sleeper("b")).unwrap();
    for time in ["once", "twice"] {
        let stopped = side.kubelet.stop(&id, 5).map_err(|s| s.code);
        side.say(&format!("stop a container {time}"), format!("{stopped:?}"));
    }
    let exec = side.kubelet.exec(&id, "true", 5).map_err(|s| s.code);
    side.say("exec in what has ended", format!("{:?}", exec.map(drop)));
    let running = side.kubelet.launch(&pod, &sleeper("c")).unwrap();
    for time in ["once", "twice"] {
        let stopped = side.kubelet.of_pod("StopPodSandbox", &pod.id);
        side.say(
            &format!("stop a pod {time}"),
            format!("{:?}", stopped.map_err(|s| s.code)),
        );
    }
    let status = side.kubelet.ended(&running);
    side.say(
        "what ran in it",
        format!("{} {}", status.exit_code, status.reason),
    );
    // The daemon makes a container there, but none can be started.
    let late = side.kubelet.launch(&pod, &sleeper("d"));
    side.say("launch in a stopped pod", late.is_ok());
    for time in ["once", "twice"] {
        let removed = side.kubelet.of_pod("RemovePodSandbox", &pod.id);
        side.say(
            &format!("remove a pod {time}"),
            format!("{:?}", removed.map_err(|s| s.code)),
        );
    }
    for (what, answer) in [
        ("container", side.kubelet.status(&running).map(drop)),
        ("stop", side.kubelet.stop(&running, 0)),
        ("pod", side.kubelet.pod_status(&pod.id).map(drop)),
    ] {
        side.say(
            &format!("{what} when removed"),
            format!("{:?}", answer.map_err(|s| s.code)),
        );
    }
    // Its name is free again; with a container that still runs it goes in one step.
    let pod = side.kubelet.run(&config, 1).unwrap();
    side.kubelet.launch(&pod, &sleeper("a")).unwrap();
    side.kubelet.end(&pod.id);
}

/// The pod's files in two containers.
pub fn files(side: &mut Side<'_>) {
    let config = side.config("files", |_, _| {});
    let pod = side.kubelet.run(&config, 1).unwrap();
    let a = side.kubelet.launch(&pod, &sleeper("a")).unwrap();
    let b = side.kubelet.launch(&pod, &sleeper("b")).unwrap();
    side.say("supervisors of the pod", supervisors(&pod.id).len());
    side.sees(
        "hostname",
        &a,
        "hostname; cat /proc/sys/kernel/hostname; echo $HOSTNAME",
    );
    side.sees("/etc/hostname", &a, "cat /etc/hostname");
    side.sees("resolv.conf", &a, "cat /etc/resolv.conf");
    side.sees(
        "localhost",
        &a,
        "grep -q localhost /etc/hosts && echo known",
    );
    let own = std::fs::read_to_string("/etc/hosts").unwrap_or_default();
    let hosts = side.kubelet.sh(&a, "cat /etc/hosts");
    side.say(
        "hosts",
        if hosts == own.trim_end() {
            "the node's"
        } else {
            "the pod's"
        },
    );
    side.sees(
        "the files can be written",
        &a,
        "for f in hosts resolv.conf hostname; do echo >> /etc/$f && echo $f; done",
    );
    let mount = "grep ' /dev/shm ' /proc/mounts | cut -d' ' -f3,4 | tr , '\\n' | grep -vE 'inode|relatime' | sort | xargs";
    side.sees("shm", &a, &format!("{mount}; stat -c %a /dev/shm"));
    side.kubelet.sh(&a, "echo of-a > /dev/shm/note");
    side.sees("shm is shared", &b, "cat /dev/shm/note");
    side.sees("mounts", &a, "cut -d' ' -f2 /proc/mounts | sort | xargs");
    side.kubelet.end(&pod.id);
    for (key, dns) in [
        ("no DNS at all", MessageField::none()),
        ("empty DNS", MessageField::some(DNSConfig::new())),
    ] {
        let mut config = side.config("dns", |_, _| {});
        config.dns_config = dns;
        let pod = side.kubelet.run(&config, 1).unwrap();
        let id = side.kubelet.launch(&pod, &sleeper("a")).unwrap();
        std::fs::read("/etc/resolv.conf").unwrap_or_default();
        side.sees(key, &id, "md5sum < /etc/resolv.conf");
        side.kubelet.end(&pod.id);
    }
    // Longer than a hostname may be is cut by kubelets; one that is not must not stop a pod.
    let mut config = side.config("long", |_, _| {});
    config.hostname = "a".repeat(63);
    let pod = side.kubelet.run(&config, 1).unwrap();
    let id = side.kubelet.launch(&pod, &sleeper("a")).unwrap();
    side.sees("63 bytes of hostname", &id, "hostname | wc -c");
    side.kubelet.end(&pod.id);
    // FL-086a: others than kubelets cut nothing. Here the 63rd byte is a hyphen, with which no name may end.
    let mut config = side.config("longer", |_, _| {});
    config.hostname = format!("{}-{}", "a".repeat(62), "b".repeat(40));
    let seen = match side.kubelet.run(&config, 1) {
        Err(status) => format!("error {}", status.code),
        Ok(pod) => {
            let id = side.kubelet.launch(&pod, &sleeper("a")).unwrap();
            let name = side.kubelet.sh(&id, "hostname; cat /etc/hostname");
            assert_eq!(name, [&config.hostname[..62]; 2].join("\n"));
            format!("{} bytes", config.hostname[..62].len())
        }
    };
    side.say("a hostname that is too long", seen);
    let name = &config.metadata.name;
    side.kubelet.clean(name);
}

/// Those of the pod, and those that daemons add.
pub fn sysctls(side: &mut Side<'_>) {
    const SHOWN: &str = "cd /proc/sys; cat net/ipv4/ip_unprivileged_port_start net/ipv4/ping_group_range net/ipv4/tcp_syncookies kernel/shm_rmid_forced kernel/msgmax | xargs";
    let config = side.config("plain", |_, _| {});
    let pod = side.kubelet.run(&config, 1).unwrap();
    let id = side.kubelet.launch(&pod, &sleeper("a")).unwrap();
    side.sees("as daemons have them", &id, SHOWN);
    side.kubelet.end(&pod.id);
    let config = side.config("own", |_, linux| {
        for (key, value) in [
            ("net.ipv4.ip_unprivileged_port_start", "500"),
            ("net.ipv4.ping_group_range", "0 7"),
            ("net.ipv4.tcp_syncookies", "0"),
            ("kernel.shm_rmid_forced", "1"),
            ("kernel/msgmax", "9999"),
        ] {
            linux.sysctls.insert(key.into(), value.into());
        }
    });
    let pod = side.kubelet.run(&config, 1).unwrap();
    let id = side.kubelet.launch(&pod, &sleeper("a")).unwrap();
    side.sees("as the pod has them", &id, SHOWN);
    side.kubelet.end(&pod.id);
    for (key, name) in [("of the node", "vm.swappiness"), ("unknown", "net.no.such")] {
        let config = side.config("bad", |_, linux| {
            linux.sysctls.insert(name.into(), "1".into());
        });
        let made = side.kubelet.run(&config, 1);
        side.say(key, made.is_ok());
    }
}

/// Process, IPC and network namespaces in each mode.
pub fn namespaces(side: &mut Side<'_>) {
    let own = |kind: &str| {
        let link = std::fs::read_link(format!("/proc/self/ns/{kind}")).unwrap();
        link.to_string_lossy().into_owned()
    };
    const LINKS: &str = "for n in pid ipc uts net; do readlink /proc/self/ns/$n; done";
    for (name, pid, ipc) in [
        ("private", NamespaceMode::CONTAINER, NamespaceMode::POD),
        ("shared", NamespaceMode::POD, NamespaceMode::POD),
        ("node", NamespaceMode::NODE, NamespaceMode::NODE),
    ] {
        let config = side.config(name, |options, _| {
            options.pid = mode(pid);
            options.ipc = mode(ipc);
        });
        let pod = side.kubelet.run(&config, 1).unwrap();
        let a = side.kubelet.launch(&pod, &sleeper("a")).unwrap();
        let b = side.kubelet.launch(&pod, &sleeper("b")).unwrap();
        let links = [&a, &b].map(|id| side.kubelet.sh(id, LINKS));
        let [of_a, of_b] = links
            .each_ref()
            .map(|text| text.lines().collect::<Vec<_>>());
        let compared = ["pid", "ipc", "uts", "net"]
            .iter()
            .zip(of_a.iter().zip(of_b));
        let compared: Vec<String> = compared
            .map(|(kind, (a, b))| format!("{kind}: same {} node {}", *a == b, *a == own(kind)))
            .collect();
        side.say(&format!("{name} namespaces"), compared.join(", "));
        let first = "tr '\\0' ' ' < /proc/1/cmdline | cut -c1-8";
        if pid == NamespaceMode::CONTAINER {
            side.sees("first process when private", &a, first);
            let mut into = sleeper("c");
            let security = into.linux.mut_or_insert_default();
            let security = security.security_context.mut_or_insert_default();
            let mut options = NamespaceOption::new();
            options.pid = mode(NamespaceMode::TARGET);
            options.target_id = a.clone();
            security.namespace_options = MessageField::some(options);
            let c = side.kubelet.launch(&pod, &into).unwrap();
            let link = side.kubelet.sh(&c, "readlink /proc/self/ns/pid");
            side.say("target", Some(link.as_str()) == of_a.first().copied());
        }
        if ipc == NamespaceMode::NODE {
            let note = format!("/dev/shm/{}", side.kubelet.handler);
            std::fs::write(&note, "of the node").unwrap();
            // FL-086j: it is the node's, and stays as it is.
            let mode = std::fs::metadata("/dev/shm").unwrap().permissions().mode();
            side.say("mode of the node's shm", format!("{mode:o}"));
            side.sees("shm of the node", &a, &format!("cat {note}"));
            std::fs::remove_file(&note).unwrap();
        }
        side.kubelet.end(&pod.id);
    }
}

/// A pod on the node's network, where the daemon can have one: containerd 2.1 itself dies of such a pod when a shim is to
/// be its controller (mended in 2.3).
pub fn host_network(side: &mut Side<'_>) {
    let now = side.kubelet.version().starts_with("v2.") || side.kubelet.version().starts_with("2.");
    if now && side.kubelet.handler == "podvisor" {
        return;
    }
    let mut config = side.config("host", |options, _| {
        options.network = mode(NamespaceMode::NODE)
    });
    config.hostname.clear();
    let pod = side.kubelet.run(&config, 1).unwrap();
    let id = side.kubelet.launch(&pod, &sleeper("a")).unwrap();
    let links = side.kubelet.sh(
        &id,
        "readlink /proc/self/ns/net; readlink /proc/self/ns/uts",
    );
    let own = ["net", "uts"].map(|kind| {
        let link = std::fs::read_link(format!("/proc/self/ns/{kind}")).unwrap();
        link.to_string_lossy().into_owned()
    });
    side.say("network and name are the node's", links == own.join("\n"));
    let hosts = side
        .kubelet
        .sh(&id, "md5sum < /etc/hosts; hostname | wc -c");
    side.say("hosts and hostname", hosts);
    let status = side
        .kubelet
        .pod_status(&pod.id)
        .unwrap()
        .status
        .unwrap_or_default();
    side.say("address", &status.network.ip);
    side.kubelet.end(&pod.id);
}

/// FL-055, FL-063: somebody kills the pod's own process.
pub fn killed(side: &mut Side<'_>) {
    let config = side.config("killed", |_, _| {});
    let pod = side.kubelet.run(&config, 1).unwrap();
    let id = side.kubelet.launch(&pod, &sleeper("a")).unwrap();
    let info = side.kubelet.pod_status(&pod.id).unwrap().info;
    let info: Value = serde_json::from_str(&info["info"]).unwrap();
    let pid = i32::try_from(info["pid"].as_i64().unwrap()).unwrap();
    kill(Pid::from_raw(pid), Signal::SIGKILL).unwrap();
    eventually(Duration::from_secs(20), "the pod is not ready", || {
        let status = side
            .kubelet
            .pod_status(&pod.id)
            .unwrap()
            .status
            .unwrap_or_default();
        (status.state.enum_value_or_default() == PodSandboxState::SANDBOX_NOTREADY).then_some(())
    });
    let refused = side.kubelet.launch(&pod, &sleeper("b"));
    side.say("another container", refused.is_ok());
    // As a kubelet does: what is left of the pod goes, and the next attempt comes.
    side.kubelet.of_pod("StopPodSandbox", &pod.id).unwrap();
    let status = side.kubelet.ended(&id);
    side.say(
        "its container",
        format!("{} {}", status.exit_code, status.reason),
    );
    let mut next = config.clone();
    next.metadata.as_mut().unwrap().attempt = 1;
    let next = side.kubelet.run(&next, 2).unwrap();
    let mut again = sleeper("a");
    again.metadata.as_mut().unwrap().attempt = 1;
    let id = side.kubelet.launch(&next, &again).unwrap();
    side.sees("the next attempt", &id, "hostname");
    for pod in [pod, next] {
        side.kubelet.end(&pod.id);
    }
}

/// GetContainerEvents of one pod's life.
pub fn events(side: &mut Side<'_>) {
    let heard = kubelet::events(side.daemon);
    let config = side.config("events", |_, _| {});
    let pod = side.kubelet.run(&config, 1).unwrap();
    let id = side
        .kubelet
        .launch(&pod, &container("a", "exit 3"))
        .unwrap();
    side.kubelet.ended(&id);
    let long = side.kubelet.launch(&pod, &sleeper("b")).unwrap();
    side.kubelet.stop(&long, 5).unwrap();
    side.kubelet.of_container("RemoveContainer", &id).unwrap();
    side.kubelet.end(&pod.id);
    let mut lines = Vec::new();
    eventually(Duration::from_secs(30), "the last event", || {
        while let Ok(event) = heard.try_recv() {
            let status = &event.pod_sandbox_status;
            if status.id != pod.id && event.container_id != pod.id {
                continue;
            }
            let who = match event.container_id.as_str() {
                own if own == pod.id => "pod",
                own if own == id => "a",
                _ => "b",
            };
            let kind = event.container_event_type.enum_value_or_default();
            let containers = event
                .containers_statuses
                .iter()
                .filter(|c| c.id == event.container_id);
            let states: Vec<_> = containers
                .map(|c| {
                    format!(
                        "{:?} {} {}",
                        c.state.enum_value_or_default(),
                        c.exit_code,
                        c.reason
                    )
                })
                .collect();
            lines.push(format!("{who} {kind:?} {states:?}"));
        }
        let gone = "pod CONTAINER_DELETED_EVENT";
        lines
            .iter()
            .any(|line| line.starts_with(gone))
            .then_some(())
    });
    for who in ["pod", "a", "b"] {
        let own = lines
            .iter()
            .filter(|line| line.starts_with(&format!("{who} ")));
        let own: Vec<_> = own.cloned().collect();
        side.say(&format!("events of {who}"), own.join("; "));
    }
}
