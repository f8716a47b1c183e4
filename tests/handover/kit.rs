//! Sandboxes of one pod, on a real bridge whose plugin can be held up.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use podvisor::error::Kind;
use podvisor::proto::cri::sandbox_config::PodSandboxConfig;
use serde_json::{Value, json};

use crate::rig::{self, BOUND, Pod, called};
use crate::support::fake::{self, Act, Fake};
use crate::support::{cni, eventually, podvisor};

/// Long enough for every step of a test, short enough to wait for.
pub const INTERVAL: f64 = 30.0;

/// Settings with this parking interval and more lines of `[parking]`.
pub fn parking(interval: f64, more: &str) {
    rig::settings(&format!("[parking]\ninterval = {interval:?}\n{more}\n"));
}

/// The reference bridge behind a fake that logs, on a network without masquerading.
pub fn bridge() -> Fake {
    let real = cni::real_plugins().unwrap().join("bridge");
    let plugin = fake::plugin_before(Path::new(cni::PLUGINS), "bridge", &real);
    let made = Command::new("ip")
        .args(["link", "add", "pvt0", "type", "bridge"])
        .output()
        .unwrap();
    assert!(made.status.success(), "{made:?}");
    let ipam = json!({"type": "host-local", "ranges": [[{"subnet": "10.87.1.0/24"}]]});
    cni::network(
        "pods",
        vec![json!({"type": "bridge", "bridge": "pvt0", "isGateway": true, "ipam": ipam})],
    )
    .write();
    plugin
}

/// Makes ADD wait until [`open`].
pub fn closed(plugin: &Fake) -> PathBuf {
    let gate = PathBuf::from("/run/gate");
    let _ = fs::remove_file(&gate);
    plugin.on("ADD", &[Act::WaitFor(gate.clone())]);
    gate
}

pub fn open(gate: &Path) {
    fs::write(gate, "").unwrap();
}

/// Sandbox `id` of the pod `web`, created.
pub fn create(id: &str) -> Pod {
    create_as(id, &rig::config("web"))
}

pub fn create_as(id: &str, config: &PodSandboxConfig) -> Pod {
    let pod = Pod::launch(id);
    pod.probe().create(id, config).unwrap();
    pod
}

/// Its StartSandbox has timed out, while the plugin is at work.
pub fn timed_out(id: &str, plugin: &Fake) -> Pod {
    timed_out_as(id, plugin, &rig::config("web"))
}

pub fn timed_out_as(id: &str, plugin: &Fake, config: &PodSandboxConfig) -> Pod {
    let adds = plugin.count("ADD");
    let pod = create_as(id, config);
    let error = pod
        .probe()
        .start(id, Duration::from_millis(500))
        .unwrap_err();
    assert_eq!(error.kind(), Kind::Deadline, "{error}");
    called(plugin, "ADD", adds + 1);
    pod
}

/// Shut down after its caller timed out, its network made and parked; and the keeper's pid.
pub fn parked(id: &str, plugin: &Fake) -> (Pod, i32) {
    parked_as(id, plugin, &rig::config("web"))
}

pub fn parked_as(id: &str, plugin: &Fake, config: &PodSandboxConfig) -> (Pod, i32) {
    let gate = closed(plugin);
    let pod = timed_out_as(id, plugin, config);
    let keeper = pod.supervisor();
    pod.probe().shutdown(id).unwrap();
    open(&gate);
    until(id, "network parked");
    plugin.on("ADD", &[]);
    (pod, keeper)
}

/// Until `ps -a` shows sandbox `id` in this state ("": not at all).
pub fn until(id: &str, state: &str) {
    eventually(BOUND, &format!("{id} is {state:?}"), || {
        (shown(id) == state).then_some(())
    });
}

/// The state in which `ps -a` shows it.
pub fn shown(id: &str) -> String {
    let all = ["--namespace", rig::NAMESPACE, "ps", "-a", "--json"];
    let listed: Vec<Value> = serde_json::from_str(&podvisor(&all).ok().stdout).unwrap();
    let found = listed.iter().find(|p| p["id"] == id);
    let state = found.and_then(|p| p["state"].as_str());
    state.unwrap_or_default().to_owned()
}

/// podvisor in the tests' namespace.
pub fn ask(args: &[&str]) -> crate::support::Output {
    podvisor(&[&["--namespace", rig::NAMESPACE], args].concat())
}

/// Addresses with their prefix, by the journal.
pub fn ips(pod: &Pod) -> Vec<String> {
    pod.record().unwrap().network.ips
}

/// The addresses that really are in the pod.
pub fn real_ips(pod: &Pod) -> String {
    let netns = pod.record().unwrap().network.netns.unwrap();
    let out = Command::new("nsenter")
        .arg(format!("--net={}", netns.display()))
        .args(["ip", "-o", "-4", "addr", "show", "eth0"])
        .output()
        .unwrap();
    String::from_utf8_lossy(&out.stdout).into_owned()
}

/// Each ADD and DEL had the same names; so many of each.
pub fn adds_and_dels(plugin: &Fake, count: usize) {
    let names = ["CNI_CONTAINERID", "CNI_NETNS", "CNI_IFNAME", "CNI_ARGS"];
    let of = |verb| -> Vec<Vec<String>> {
        let calls = plugin.calls_of(verb);
        let mut all: Vec<Vec<String>> = calls
            .iter()
            .map(|c| names.map(|n| c.var(n).to_owned()).to_vec())
            .collect();
        all.sort();
        all
    };
    let (adds, dels) = (of("ADD"), of("DEL"));
    assert_eq!(adds, dels);
    assert_eq!(adds.len(), count);
}

/// Records of networks.
pub fn records() -> usize {
    fs::read_dir("/var/lib/podvisor/networks")
        .into_iter()
        .flatten()
        .count()
}

/// Networks that can be found by pod key.
pub fn offered() -> usize {
    fs::read_dir("/run/podvisor/.keys")
        .into_iter()
        .flatten()
        .count()
}
