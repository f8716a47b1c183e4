//! What a container may use, and what is told of its use.

use std::fs;
use std::time::Duration;

use protobuf::MessageField;

use crate::kubelet::{container, sleeper};
use crate::node::Side;
use crate::support::{cgroup_mounts, eventually};
use crate::wire::api::*;
use crate::wire::sandbox_config::*;

/// Of the container's own cgroup, wherever the controller's files are.
const SHOWN: [(&str, &[&str]); 5] = [
    ("memory", &["memory.limit_in_bytes", "memory.max"]),
    ("shares", &["cpu.shares", "cpu.weight"]),
    ("quota", &["cpu.cfs_quota_us", "cpu.max"]),
    ("period", &["cpu.cfs_period_us", "cpu.max"]),
    ("cpus", &["cpuset.cpus"]),
];

/// A file of a cgroup, in whichever hierarchy has it.
fn of_group(path: &str, names: &[&str]) -> String {
    let files = cgroup_mounts().into_iter().flat_map(|mount| {
        let dir = mount.join(path.trim_start_matches('/'));
        names.iter().map(move |name| dir.join(name))
    });
    let found = files
        .filter_map(|file| fs::read_to_string(file).ok())
        .next();
    found.map_or_else(|| "nothing".into(), |text| text.trim().to_owned())
}

pub fn limits(side: &mut Side<'_>) {
    let parent = format!("/kubepods-{}", side.kubelet.handler);
    let config = side.config("limits", |_, linux| {
        linux.cgroup_parent = parent.clone();
        let resources = linux.resources.mut_or_insert_default();
        resources.cpu_shares = 512;
        resources.memory_limit_in_bytes = 128 << 20;
        linux.overhead.mut_or_insert_default().memory_limit_in_bytes = 8 << 20;
    });
    let pod = side.kubelet.run(&config, 1).unwrap();
    let infra = format!("{parent}/{}", pod.id);
    side.say(
        "the pod's own cgroup",
        of_group(&infra, &["cgroup.procs"]).lines().count(),
    );
    side.say("the pod's own shares", of_group(&infra, SHOWN[1].1));
    let mut config = sleeper("a");
    let resources = config
        .linux
        .mut_or_insert_default()
        .resources
        .mut_or_insert_default();
    resources.memory_limit_in_bytes = 64 << 20;
    resources.memory_swap_limit_in_bytes = 64 << 20;
    resources.cpu_shares = 256;
    resources.cpu_period = 100_000;
    resources.cpu_quota = 50_000;
    resources.cpuset_cpus = "0".into();
    resources.oom_score_adj = 300;
    let id = side.kubelet.launch(&pod, &config).unwrap();
    let group = format!("{parent}/{id}");
    for (key, names) in SHOWN {
        side.say(key, of_group(&group, names));
    }
    side.sees("OOM score", &id, "cat /proc/1/oom_score_adj");
    let info = side.kubelet.pod_status(&pod.id).unwrap().info;
    let info: serde_json::Value = serde_json::from_str(&info["info"]).unwrap();
    let first = fs::read_to_string(format!("/proc/{}/oom_score_adj", info["pid"])).unwrap();
    side.say("OOM score of the pod's own process", first.trim());
    for key in ["resources", "overhead"] {
        side.say(&format!("info {key}"), &info[key]);
    }
    let update = UpdateContainerResourcesRequest {
        container_id: id.clone(),
        linux: MessageField::some(LinuxContainerResources {
            memory_limit_in_bytes: 96 << 20,
            memory_swap_limit_in_bytes: 96 << 20,
            cpu_shares: 128,
            cpu_quota: 30_000,
            ..Default::default()
        }),
        ..Default::default()
    };
    let updated = side
        .kubelet
        .ask::<_, Nothing>("UpdateContainerResources", &update);
    side.say(
        "update",
        format!("{:?}", updated.map(drop).map_err(|s| s.code)),
    );
    for (key, names) in SHOWN {
        side.say(&format!("{key} when updated"), of_group(&group, names));
    }
    let told = side
        .kubelet
        .status(&id)
        .unwrap()
        .resources
        .unwrap_or_default()
        .linux
        .unwrap_or_default();
    side.say(
        "status tells",
        format!(
            "{} {} {}",
            told.memory_limit_in_bytes, told.cpu_shares, told.cpu_quota
        ),
    );
    let update = UpdatePodSandboxResourcesRequest {
        pod_sandbox_id: pod.id.clone(),
        resources: MessageField::some(LinuxContainerResources {
            cpu_shares: 1024,
            ..Default::default()
        }),
        ..Default::default()
    };
    let updated = side
        .kubelet
        .ask::<_, Nothing>("UpdatePodSandboxResources", &update);
    side.say(
        "update of the pod",
        format!("{:?}", updated.map(drop).map_err(|s| s.code)),
    );
    side.kubelet.end(&pod.id);
    let left = cgroup_mounts()
        .into_iter()
        .map(|mount| mount.join(parent.trim_start_matches('/')));
    let inside = |dir: &std::path::PathBuf| {
        let entries = fs::read_dir(dir).into_iter().flatten().flatten();
        entries.filter(|e| e.path().is_dir()).count()
    };
    side.say(
        "cgroups left below the parent",
        left.clone().map(|dir| inside(&dir)).sum::<usize>(),
    );
    // The parent is the kubelet's, which removes it.
    left.for_each(|dir| drop(fs::remove_dir(dir)));
}

/// FL-062, FL-063: the limit is the pod's, which a kubelet writes into the parent cgroup.
pub fn of_the_pod(side: &mut Side<'_>) {
    let parent = format!("/kubepods-o-{}", side.kubelet.handler);
    for mount in cgroup_mounts() {
        let dir = mount.join(parent.trim_start_matches('/'));
        if fs::create_dir(&dir).is_ok() {
            for file in [
                "memory.use_hierarchy",
                "memory.limit_in_bytes",
                "memory.max",
            ] {
                let value = if file == "memory.use_hierarchy" {
                    "1"
                } else {
                    "50331648"
                };
                let _ = fs::write(dir.join(file), value);
            }
        }
    }
    let config = side.config("of-the-pod", |_, linux| {
        linux.cgroup_parent = parent.clone()
    });
    let pod = side.kubelet.run(&config, 1).unwrap();
    let hungry = "x=$(tr '\\0' x < /dev/zero | head -c 200000000); echo ${#x}";
    let id = side
        .kubelet
        .launch(&pod, &container("hungry", hungry))
        .unwrap();
    let status = side.kubelet.ended(&id);
    side.say(
        "who uses up the pod's memory",
        format!("{} {}", status.exit_code, status.reason),
    );
    let state = side
        .kubelet
        .pod_status(&pod.id)
        .unwrap()
        .status
        .unwrap_or_default()
        .state;
    side.say("its pod", format!("{:?}", state.enum_value_or_default()));
    side.kubelet.end(&pod.id);
    for mount in cgroup_mounts() {
        drop(fs::remove_dir(mount.join(parent.trim_start_matches('/'))));
    }
}

pub fn stats(side: &mut Side<'_>) {
    let parent = format!("/kubepods-s-{}", side.kubelet.handler);
    let config = side.config("stats", |_, linux| linux.cgroup_parent = parent.clone());
    let pod = side.kubelet.run(&config, 1).unwrap();
    let id = side
        .kubelet
        .launch(&pod, &container("a", "while :; do :; done"))
        .unwrap();
    let request = ContainerRequest {
        container_id: id.clone(),
        ..Default::default()
    };
    let used = |side: &mut Side<'_>| {
        let answer: ContainerStatsResponse = side.kubelet.ask("ContainerStats", &request).unwrap();
        let stats = answer.stats.unwrap_or_default();
        (
            stats.cpu.usage_core_nano_seconds.value,
            stats.memory.working_set_bytes.value,
            stats.cpu.timestamp,
        )
    };
    let first = used(side);
    let grown = eventually(Duration::from_secs(20), "processor time is counted", || {
        let now = used(side);
        (now.0 > first.0 && now.2 > first.2).then_some(now)
    });
    side.say("container uses memory", (1..64 << 20).contains(&grown.1));
    let request = PodSandboxRequest {
        pod_sandbox_id: pod.id.clone(),
        ..Default::default()
    };
    let stats = side
        .kubelet
        .ask::<_, PodSandboxStatsResponse>("PodSandboxStats", &request);
    let shown = match stats {
        Err(status) => format!("error {} {}", status.code, status.message),
        Ok(answer) => {
            let stats = answer.stats.unwrap_or_default().linux.unwrap_or_default();
            format!(
                "cpu {} memory {} network {:?} {} processes {} containers {}",
                stats.cpu.usage_core_nano_seconds.value > 0,
                stats.memory.working_set_bytes.value > 0,
                stats.network.default_interface.name,
                stats.network.default_interface.rx_bytes.is_some(),
                stats.process.process_count.value > 0,
                stats.containers.len()
            )
        }
    };
    side.say("pod", shown);
    side.kubelet.end(&pod.id);
    for mount in cgroup_mounts() {
        drop(fs::remove_dir(mount.join(parent.trim_start_matches('/'))));
    }
}
