//! `config.json` of a container that the command makes (OCI runtime specification 1.0.2).
//!
//! Pure: a wish in, a document out. Promises the defaults people know from container engines: root with the usual fourteen
//! capabilities, masked /proc and /sys, private mount and pid namespaces, the pod's network, ipc and uts. Namespaces of
//! the pod are listed without a path: the supervisor puts the paths in. Must never read the machine.

use serde_json::{Value, json};

/// The pod of the container.
pub const SANDBOX_ANNOTATION: &str = "io.podvisor.sandbox-id";

/// PATH of a workload that is given none.
const PATH: &str = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// What container engines leave to root in a container.
const CAPABILITIES: [&str; 14] = [
    "CAP_AUDIT_WRITE",
    "CAP_CHOWN",
    "CAP_DAC_OVERRIDE",
    "CAP_FOWNER",
    "CAP_FSETID",
    "CAP_KILL",
    "CAP_MKNOD",
    "CAP_NET_BIND_SERVICE",
    "CAP_NET_RAW",
    "CAP_SETFCAP",
    "CAP_SETGID",
    "CAP_SETPCAP",
    "CAP_SETUID",
    "CAP_SYS_CHROOT",
];

const MASKED: [&str; 10] = [
    "/proc/acpi",
    "/proc/asound",
    "/proc/kcore",
    "/proc/keys",
    "/proc/latency_stats",
    "/proc/sched_debug",
    "/proc/scsi",
    "/proc/timer_list",
    "/sys/devices/virtual/powercap",
    "/sys/firmware",
];

const READONLY: [&str; 5] = [
    "/proc/bus",
    "/proc/fs",
    "/proc/irq",
    "/proc/sys",
    "/proc/sysrq-trigger",
];

/// What differs from container to container.
#[derive(Debug)]
pub struct Wish<'a> {
    /// Absolute path of the root file system.
    pub rootfs: &'a str,
    /// Command and arguments.
    pub args: &'a [String],
    /// `KEY=VALUE`; a PATH in it replaces the default.
    pub env: &'a [String],
    /// Working directory.
    pub cwd: &'a str,
    /// The pod's hostname, for `$HOSTNAME`; empty for pods on the host's network.
    pub hostname: &'a str,
    /// Pod id.
    pub sandbox: &'a str,
    /// cgroup below the mount points.
    pub cgroups_path: &'a str,
    /// The pod has the host's network.
    pub host_network: bool,
    /// Most open files the workload may ask for: ours, because a limit cannot be raised without a capability we may lack.
    pub files: u64,
    /// One cgroup tree: then the container gets a cgroup namespace, or it would see the whole tree.
    pub cgroup_v2: bool,
}

/// The document.
pub fn config(wish: &Wish<'_>) -> Value {
    json!({
        "ociVersion": "1.0.2",
        "process": process(wish),
        "root": { "path": wish.rootfs, "readonly": false },
        "mounts": mounts(),
        "annotations": { (SANDBOX_ANNOTATION): wish.sandbox },
        "linux": {
            "cgroupsPath": wish.cgroups_path,
            "namespaces": namespaces(wish),
            "resources": { "devices": [{ "allow": false, "access": "rwm" }] },
            "maskedPaths": MASKED,
            "readonlyPaths": READONLY,
        },
    })
}

/// The process object of an exec: the container's own, with another command. `None` when that is no process object.
pub fn exec_process(
    container: &Value,
    args: &[String],
    env: &[String],
    cwd: Option<&str>,
) -> Option<Value> {
    let mut process = container.get("process")?.as_object()?.clone();
    let old: Vec<String> = process
        .get("env")
        .and_then(Value::as_array)
        .map(|list| {
            list.iter()
                .filter_map(|v| v.as_str().map(str::to_owned))
                .collect()
        })
        .unwrap_or_default();
    process.insert("env".into(), json!(merged(&old, env)));
    process.insert("args".into(), json!(args));
    process.insert("terminal".into(), json!(false));
    if let Some(cwd) = cwd {
        process.insert("cwd".into(), json!(cwd));
    }
    Some(Value::Object(process))
}

fn process(wish: &Wish<'_>) -> Value {
    let mut base = vec![PATH.to_owned()];
    if !wish.hostname.is_empty() {
        base.push(format!("HOSTNAME={}", wish.hostname));
    }
    json!({
        "terminal": false,
        "user": { "uid": 0, "gid": 0 },
        "args": wish.args,
        "env": merged(&base, wish.env),
        "cwd": wish.cwd,
        "capabilities": { "bounding": CAPABILITIES, "effective": CAPABILITIES, "permitted": CAPABILITIES },
        "rlimits": [{ "type": "RLIMIT_NOFILE", "hard": wish.files, "soft": wish.files.min(1024) }],
        "noNewPrivileges": false,
        "oomScoreAdj": 0,
    })
}

/// `more` after `base`; a variable named twice has its last value, in the place of the first.
fn merged(base: &[String], more: &[String]) -> Vec<String> {
    let key = |v: &str| v.split('=').next().unwrap_or_default().to_owned();
    let mut all: Vec<String> = Vec::new();
    for variable in base.iter().chain(more) {
        match all.iter_mut().find(|v| key(v) == key(variable)) {
            Some(old) => variable.clone_into(old),
            None => all.push(variable.clone()),
        }
    }
    all
}

fn mounts() -> Value {
    json!([
        { "destination": "/proc", "type": "proc", "source": "proc", "options": ["nosuid", "noexec", "nodev"] },
        { "destination": "/dev", "type": "tmpfs", "source": "tmpfs",
          "options": ["nosuid", "strictatime", "mode=755", "size=65536k"] },
        { "destination": "/dev/pts", "type": "devpts", "source": "devpts",
          "options": ["nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", "gid=5"] },
        { "destination": "/dev/shm", "type": "tmpfs", "source": "shm",
          "options": ["nosuid", "noexec", "nodev", "mode=1777", "size=65536k"] },
        { "destination": "/dev/mqueue", "type": "mqueue", "source": "mqueue", "options": ["nosuid", "noexec", "nodev"] },
        { "destination": "/sys", "type": "sysfs", "source": "sysfs", "options": ["nosuid", "noexec", "nodev", "ro"] },
        { "destination": "/sys/fs/cgroup", "type": "cgroup", "source": "cgroup",
          "options": ["nosuid", "noexec", "nodev", "relatime", "ro"] },
    ])
}

fn namespaces(wish: &Wish<'_>) -> Value {
    let mut kinds = vec!["pid", "mount", "ipc"];
    if !wish.host_network {
        // A pod on the host's network has the host's name too.
        kinds.extend(["uts", "network"]);
    }
    if wish.cgroup_v2 {
        kinds.push("cgroup");
    }
    kinds
        .into_iter()
        .map(|kind| json!({ "type": kind }))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(list: &[&str]) -> Vec<String> {
        list.iter().map(|w| (*w).to_owned()).collect()
    }

    fn wish<'a>(args: &'a [String], env: &'a [String], host_network: bool) -> Wish<'a> {
        Wish {
            rootfs: "/r",
            args,
            env,
            cwd: "/",
            hostname: if host_network { "" } else { "web" },
            sandbox: "p1",
            cgroups_path: "/podvisor/p1/c1",
            host_network,
            files: 1_048_576,
            cgroup_v2: false,
        }
    }

    #[test]
    fn the_document_is_the_one_expected() {
        let (args, env) = (words(&["/bin/sh", "-c", "exit 7"]), words(&["A=1"]));
        let made = config(&wish(&args, &env, false));
        let golden: Value = serde_json::from_str(include_str!("spec-golden.json")).unwrap();
        assert_eq!(
            made,
            golden,
            "{}",
            serde_json::to_string_pretty(&made).unwrap()
        );
    }

    #[test]
    fn a_host_pod_has_no_network_and_no_uts_namespace() {
        let args = words(&["x"]);
        let made = config(&wish(&args, &[], true));
        let kinds: Vec<&str> = made["linux"]["namespaces"]
            .as_array()
            .unwrap()
            .iter()
            .map(|n| n["type"].as_str().unwrap())
            .collect();
        assert_eq!(kinds, ["pid", "mount", "ipc"]);
        let two = Wish {
            cgroup_v2: true,
            ..wish(&args, &[], false)
        };
        assert!(
            config(&two)["linux"]["namespaces"]
                .to_string()
                .contains("cgroup")
        );
    }

    #[test]
    fn the_last_value_of_a_variable_wins() {
        let all = merged(
            &words(&["PATH=/bin", "B=1"]),
            &words(&["PATH=/opt", "C=2", "C=3"]),
        );
        assert_eq!(all, ["PATH=/opt", "B=1", "C=3"]);
    }

    #[test]
    fn an_exec_is_the_containers_process_with_another_command() {
        let (args, env) = (words(&["sleep", "9"]), words(&["A=1"]));
        let container = config(&wish(&args, &env, false));
        let exec =
            exec_process(&container, &words(&["ls"]), &words(&["A=2"]), Some("/tmp")).unwrap();
        assert_eq!(
            (&exec["args"], &exec["cwd"]),
            (&json!(["ls"]), &json!("/tmp"))
        );
        assert_eq!(exec["capabilities"], container["process"]["capabilities"]);
        assert!(exec["env"].as_array().unwrap().contains(&json!("A=2")));
        assert!(exec_process(&json!({}), &[], &[], None).is_none());
    }
}
