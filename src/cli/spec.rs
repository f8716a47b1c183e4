//! `config.json` of a container that the command makes (OCI runtime specification 1.0.2).
//!
//! Pure: a wish in, a document out. Promises the defaults people know from container engines: root with the usual fourteen
//! capabilities, masked /proc and /sys, private mount and pid namespaces, the pod's network, ipc and uts. Namespaces of
//! the pod are listed without a path: the supervisor puts the paths in. Must never read the machine.

use serde_json::{Value, json};

use super::user::User;
use super::workload::{self, Workload};

/// The pod of the container.
pub const SANDBOX_ANNOTATION: &str = "io.podvisor.sandbox-id";

/// PATH of a workload that is given none.
const PATH: &str = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

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
    /// What was asked for.
    pub work: &'a Workload,
    /// The pod's hostname, for `$HOSTNAME`; empty for pods on the host's network.
    pub hostname: &'a str,
    /// Pod id.
    pub sandbox: &'a str,
    /// cgroup below the mount points.
    pub cgroups_path: &'a str,
    /// Namespaces that the pod shares with the host.
    pub host: HostNamespaces,
    /// Most open files the workload may ask for: ours, because a limit cannot be raised without a capability we may lack.
    pub files: u64,
    /// One cgroup tree: then the container gets a cgroup namespace, or it would see the whole tree.
    pub cgroup_v2: bool,
}

/// What a pod shares with the host.
#[derive(Clone, Copy, Debug, Default)]
pub struct HostNamespaces {
    /// The network, and the hostname with it.
    pub network: bool,
    /// IPC.
    pub ipc: bool,
    /// Processes.
    pub pid: bool,
}

/// The document.
pub fn config(wish: &Wish<'_>) -> Value {
    let work = wish.work;
    let mut annotations = json!(work.annotations);
    annotations[SANDBOX_ANNOTATION] = wish.sandbox.into();
    let mut all = mounts();
    if let Value::Array(list) = &mut all {
        // The workload's own take the place of the usual ones.
        list.retain(|m| {
            work.mounts
                .iter()
                .all(|own| own["destination"] != m["destination"])
        });
        list.extend(work.mounts.iter().cloned());
    }
    let mut resources = work.resources.clone();
    resources["devices"] = json!([{ "allow": false, "access": "rwm" }]);
    json!({
        "ociVersion": "1.0.2",
        "process": process(wish),
        "root": { "path": work.rootfs, "readonly": work.read_only },
        "mounts": all,
        "annotations": annotations,
        "linux": {
            "cgroupsPath": wish.cgroups_path,
            "namespaces": namespaces(wish),
            "resources": resources,
            "maskedPaths": work.masked.as_deref().map_or_else(|| json!(MASKED), |list| json!(list)),
            "readonlyPaths": work.write_protected.as_deref().map_or_else(|| json!(READONLY), |list| json!(list)),
        },
    })
}

/// What an exec has of its own.
#[derive(Debug, Default)]
pub struct Exec<'a> {
    /// Command and arguments.
    pub args: &'a [String],
    /// `KEY=VALUE`, over the container's.
    pub env: &'a [String],
    /// Working directory.
    pub cwd: Option<&'a str>,
    /// Another user than the container's.
    pub user: Option<&'a User>,
    /// It gets a terminal.
    pub tty: bool,
}

/// The process object of an exec: the container's own, with another command. `None` when that is no process object.
pub fn exec_process(container: &Value, exec: &Exec<'_>) -> Option<Value> {
    let mut process = container.get("process")?.as_object()?.clone();
    let mut env: Vec<String> = process
        .get("env")
        .and_then(Value::as_array)
        .map(|list| {
            list.iter()
                .filter_map(|v| v.as_str().map(str::to_owned))
                .collect()
        })
        .unwrap_or_default();
    if exec.tty {
        env = merged(&env, &[workload::term()]);
    }
    process.insert("env".into(), json!(merged(&env, exec.env)));
    process.insert("args".into(), json!(exec.args));
    process.insert("terminal".into(), json!(exec.tty));
    if let Some(cwd) = exec.cwd {
        process.insert("cwd".into(), json!(cwd));
    }
    if let Some(user) = exec.user {
        process.insert("user".into(), user.document());
    }
    Some(Value::Object(process))
}

fn process(wish: &Wish<'_>) -> Value {
    let work = wish.work;
    let mut base = vec![PATH.to_owned()];
    if !wish.hostname.is_empty() {
        base.push(format!("HOSTNAME={}", wish.hostname));
    }
    if work.tty {
        base.push(workload::term());
    }
    let mut capabilities = json!({
        "bounding": work.capabilities,
        "effective": work.capabilities,
        "permitted": work.capabilities,
    });
    if !work.ambient.is_empty() {
        capabilities["inheritable"] = json!(work.ambient);
        capabilities["ambient"] = json!(work.ambient);
    }
    json!({
        "terminal": work.tty,
        "user": work.user.document(),
        "args": work.args,
        "env": merged(&base, &work.env),
        "cwd": work.cwd,
        "capabilities": capabilities,
        "rlimits": [{ "type": "RLIMIT_NOFILE", "hard": wish.files, "soft": wish.files.min(1024) }],
        "noNewPrivileges": work.no_new_privileges,
        "oomScoreAdj": work.oom_score_adj,
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
    let host = wish.host;
    let all = [
        ("pid", host.pid),
        ("mount", false),
        ("ipc", host.ipc),
        // A pod on the host's network has the host's name too.
        ("uts", host.network),
        ("network", host.network),
    ];
    let own = all.iter().filter(|(_, shared)| !shared);
    let mut kinds: Vec<&str> = own.map(|(kind, _)| *kind).collect();
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

    fn work(args: &[&str], env: &[&str]) -> Workload {
        Workload {
            rootfs: "/r".into(),
            args: words(args),
            env: words(env),
            cwd: "/".to_owned(),
            capabilities: super::super::capability::usual(),
            ..Workload::default()
        }
    }

    fn wish(work: &Workload, host_network: bool) -> Wish<'_> {
        Wish {
            work,
            hostname: if host_network { "" } else { "web" },
            sandbox: "p1",
            cgroups_path: "/podvisor/p1/c1",
            host: HostNamespaces {
                network: host_network,
                ..HostNamespaces::default()
            },
            files: 1_048_576,
            cgroup_v2: false,
        }
    }

    #[test]
    fn the_document_is_the_one_expected() {
        let made = config(&wish(&work(&["/bin/sh", "-c", "exit 7"], &["A=1"]), false));
        let golden: Value = serde_json::from_str(include_str!("spec-golden.json")).unwrap();
        assert_eq!(
            made,
            golden,
            "{}",
            serde_json::to_string_pretty(&made).unwrap()
        );
    }

    #[test]
    fn a_pod_that_shares_with_the_host_has_no_such_namespaces() {
        let work = work(&["x"], &[]);
        let kinds = |wish: &Wish<'_>| -> Vec<String> {
            let made = config(wish);
            let list = made["linux"]["namespaces"].as_array().unwrap().clone();
            list.iter()
                .map(|n| n["type"].as_str().unwrap().to_owned())
                .collect()
        };
        assert_eq!(kinds(&wish(&work, true)), ["pid", "mount", "ipc"]);
        let two = Wish {
            cgroup_v2: true,
            host: HostNamespaces {
                pid: true,
                ipc: true,
                network: false,
            },
            ..wish(&work, false)
        };
        assert_eq!(kinds(&two), ["mount", "uts", "network", "cgroup"]);
    }

    #[test]
    fn what_was_asked_for_is_in_the_document() {
        let mount = json!({"destination": "/dev/shm", "type": "tmpfs"});
        let asked = Workload {
            tty: true,
            read_only: true,
            user: User {
                uid: 33,
                gid: 34,
                groups: vec![40],
            },
            mounts: vec![mount.clone()],
            resources: json!({"pids": {"limit": 5}}),
            annotations: [("a".to_owned(), "b".to_owned())].into(),
            masked: Some(Vec::new()),
            ambient: words(&["CAP_KILL"]),
            ..work(&["x"], &["TERM=dumb"])
        };
        let made = config(&wish(&asked, false));
        let process = &made["process"];
        assert_eq!(
            process["user"],
            json!({"uid": 33, "gid": 34, "additionalGids": [40]})
        );
        assert_eq!(
            (&process["terminal"], &made["root"]["readonly"]),
            (&json!(true), &json!(true))
        );
        assert!(
            process["env"]
                .as_array()
                .unwrap()
                .contains(&json!("TERM=dumb"))
        );
        assert_eq!(process["capabilities"]["ambient"], json!(["CAP_KILL"]));
        let shm = made["mounts"]
            .as_array()
            .unwrap()
            .iter()
            .filter(|m| m["destination"] == "/dev/shm");
        assert_eq!(shm.collect::<Vec<_>>(), [&mount]);
        assert_eq!(made["linux"]["resources"]["pids"]["limit"], 5);
        assert_eq!(made["linux"]["maskedPaths"], json!([]));
        assert_eq!(
            made["annotations"],
            json!({"a": "b", (SANDBOX_ANNOTATION): "p1"})
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
        let container = config(&wish(&work(&["sleep", "9"], &["A=1"]), false));
        let (args, env) = (words(&["ls"]), words(&["A=2"]));
        let wanted = Exec {
            args: &args,
            env: &env,
            cwd: Some("/tmp"),
            ..Exec::default()
        };
        let exec = exec_process(&container, &wanted).unwrap();
        assert_eq!(
            (&exec["args"], &exec["cwd"]),
            (&json!(["ls"]), &json!("/tmp"))
        );
        assert_eq!(exec["capabilities"], container["process"]["capabilities"]);
        assert_eq!(exec["user"], container["process"]["user"]);
        assert!(exec["env"].as_array().unwrap().contains(&json!("A=2")));
        assert!(exec_process(&json!({}), &Exec::default()).is_none());
    }
}
