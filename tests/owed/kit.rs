//! Pods of the real executables on networks that fail on demand, and the ways in which a node loses them.
#![allow(dead_code, reason = "each test file uses its own part of this module")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use serde_json::{Value, json};

use crate::support::fake::{self, Fake};
use crate::support::{Output, bin, cni, eventually, podvisor};

/// Far longer than anything here takes.
pub const BOUND: Duration = Duration::from_secs(30);

/// Settings for this test's podvisor.
pub fn configure(text: &str) {
    fs::write("/etc/podvisor/config.toml", text).unwrap();
}

/// A network of one fake.
pub fn fake_network(network: &str, plugin: &str) -> Fake {
    let made = fake::plugin(Path::new(cni::PLUGINS), plugin);
    cni::network(network, vec![json!({ "type": plugin })]).write();
    made
}

/// A bridge with five addresses for pods. Without masquerading: the bridge plugin forgets its rules when it gets no
/// netns, or when its DEL was killed half way.
pub fn small_subnet(network: &str) {
    let made = Command::new("ip")
        .args(["link", "add", "pvt0", "type", "bridge"])
        .output()
        .unwrap();
    assert!(made.status.success(), "{made:?}");
    let ipam = json!({"type": "host-local", "ranges": [[{"subnet": "10.87.1.0/29"}]]});
    cni::network(
        network,
        vec![json!({"type": "bridge", "bridge": "pvt0", "isGateway": true, "ipam": ipam})],
    )
    .write();
}

/// A fake in front of the reference plugin of the same name.
pub fn before_real(name: &str) -> Fake {
    let real = cni::real_plugins().unwrap().join(name);
    fake::plugin_before(Path::new(cni::PLUGINS), name, &real)
}

/// Lets a fake do its next DEL whole, and then kills the process (its supervisor) before that can hear of its end.
pub fn kill_after_del(plugin: &str, pid: i32) {
    let path = Path::new(cni::PLUGINS).join(plugin);
    let aside = Path::new(cni::PLUGINS).join(format!(".{plugin}-aside"));
    fs::rename(&path, &aside).unwrap();
    let (path, aside) = (path.display(), aside.display());
    let script = format!(
        "#!/bin/bash\n{aside} </dev/stdin; code=$?\n\
         if [ $CNI_COMMAND = DEL ]; then mv {aside} {path}; kill -KILL {pid}; fi\nexit $code\n"
    );
    fs::write(path.to_string(), script).unwrap();
    fs::set_permissions(
        path.to_string(),
        std::os::unix::fs::PermissionsExt::from_mode(0o755),
    )
    .unwrap();
}

/// Makes a pod; its id.
pub fn create(name: &str, network: &str) -> String {
    let made = podvisor(&["create", "--name", name, "--net", network]).ok();
    made.stdout.trim().to_owned()
}

/// The journal of a pod.
pub fn journal(id: &str) -> Value {
    let path = dir(id).join("journal.json");
    serde_json::from_slice(&fs::read(&path).unwrap()).unwrap()
}

pub fn dir(id: &str) -> PathBuf {
    Path::new("/run/podvisor/default").join(id)
}

/// Where the network's record of the only pod is.
pub fn record() -> PathBuf {
    let dirs: Vec<PathBuf> = records();
    assert_eq!(dirs.len(), 1, "{dirs:?}");
    dirs[0].clone()
}

pub fn records() -> Vec<PathBuf> {
    let entries = fs::read_dir("/var/lib/podvisor/networks");
    let entries = entries.into_iter().flatten().flatten();
    entries.map(|e| e.path()).collect()
}

/// pid of the pod's supervisor.
pub fn supervisor(id: &str) -> i32 {
    number(&journal(id)["supervisor"]["pid"])
}

/// pid of the pod's infra process.
pub fn infra(id: &str) -> i32 {
    number(&journal(id)["infra"]["pid"])
}

fn number(value: &Value) -> i32 {
    i32::try_from(value.as_i64().unwrap()).unwrap()
}

pub fn kill(pid: i32) {
    let _ = nix::sys::signal::kill(
        nix::unistd::Pid::from_raw(pid),
        nix::sys::signal::Signal::SIGKILL,
    );
    eventually(BOUND, "the end of a process", || {
        (!alive(pid)).then_some(())
    });
}

/// Whether the process runs; a zombie does not.
pub fn alive(pid: i32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let state = stat.rsplit(')').next().unwrap_or_default();
    state
        .split_whitespace()
        .next()
        .is_some_and(|s| s != "Z" && s != "X")
}

/// Supervisors that run now.
pub fn supervisors() -> Vec<i32> {
    processes(|line| line.contains("containerd-shim-podvisor"))
}

/// Those that run and whose command line is `wanted`.
pub fn processes(wanted: impl Fn(&str) -> bool) -> Vec<i32> {
    let entries = fs::read_dir("/proc").unwrap().flatten();
    let pids = entries.filter_map(|e| e.file_name().to_str()?.parse::<i32>().ok());
    pids.filter(|pid| {
        let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        alive(*pid) && wanted(&String::from_utf8_lossy(&line))
    })
    .collect()
}

/// `ps -a --json`.
pub fn listed() -> Vec<Value> {
    let out = podvisor(&["ps", "-a", "--json"]).ok();
    serde_json::from_str(&out.stdout).unwrap()
}

/// The state in which `ps -a` shows a pod; empty when it does not.
pub fn state(name: &str) -> String {
    let pods = listed();
    let found = pods.iter().find(|p| p["name"] == name);
    found
        .and_then(|p| p["state"].as_str())
        .unwrap_or_default()
        .to_owned()
}

/// Power off and on: everything is killed, `/run` and the mounts in it are empty, the boot id is another one. Returns
/// what a command has to be called with from now on.
pub fn reboot(count: u32) -> Boot {
    let own = i32::try_from(std::process::id()).unwrap();
    for _ in 0..3 {
        for pid in processes(|_| true) {
            // pid 1 is the sandbox's.
            if pid != 1 && pid != own {
                kill(pid);
            }
        }
    }
    let table = fs::read_to_string("/proc/self/mountinfo").unwrap();
    let points: Vec<&str> = table.lines().filter_map(|l| l.split(' ').nth(4)).collect();
    for point in points
        .iter()
        .rev()
        .filter(|p| p.starts_with("/run/podvisor"))
    {
        let flags = nix::mount::MntFlags::MNT_DETACH;
        let _ = nix::mount::umount2(*point, flags);
    }
    for dir in ["/run/podvisor", "/run/netns"] {
        let _ = fs::remove_dir_all(dir);
    }
    remove_cgroups();
    Boot(format!("00000000-0000-4000-8000-{count:012}"))
}

fn remove_cgroups() {
    for root in crate::support::sandbox::cgroup_roots() {
        remove_tree(&root.join("podvisor"));
    }
}

fn remove_tree(dir: &Path) {
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        if entry.path().is_dir() {
            remove_tree(&entry.path());
        }
    }
    let _ = fs::remove_dir(dir);
}

/// A boot after the first.
pub struct Boot(String);

impl Boot {
    /// What makes a program of ours take it for this boot.
    pub fn variable(&self) -> (String, String) {
        ("PODVISOR_BOOT_ID".into(), self.0.clone())
    }

    /// podvisor, and what it launches, in this boot.
    pub fn podvisor(&self, args: &[&str]) -> Output {
        let mut command = Command::new(bin::PODVISOR);
        command.args(args).env("PODVISOR_BOOT_ID", &self.0);
        bin::run(&mut command, Duration::from_secs(60))
    }
}

/// Addresses that host-local has given away on a network.
pub fn leases(network: &str) -> Vec<String> {
    let entries = fs::read_dir(Path::new("/var/lib/cni/networks").join(network));
    let names = entries.into_iter().flatten().flatten();
    let mut leases: Vec<String> = names
        .filter_map(|e| e.file_name().into_string().ok())
        .filter(|n| n.contains('.') && !n.starts_with("last_reserved") && n != "lock")
        .collect();
    leases.sort();
    leases
}
