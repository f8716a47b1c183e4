//! A machine whose pod creations can be held up: in the real bridge plugin's ADD, or in the infra process.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use podvisor::error::{Error, Kind, Result};
use podvisor::pod::record::State;
use podvisor::proto::cri::sandbox_config::PodSandboxConfig;
use podvisor::proto::sandbox::sandbox::SandboxStatusRequest;
use serde_json::{Value, json};

use crate::rig::{self, BOUND, Pod, Probe};
use crate::support::bin::PODVISOR;
use crate::support::fake::{self, Act, Fake};
use crate::support::{Sandbox, Snapshot, cni, eventually, podvisor};

/// `parking.interval` of these machines: long enough for a loaded one to act within it.
pub const INTERVAL: Duration = Duration::from_millis(2500);

/// The deadline of a request that is meant to time out.
pub const SHORT: Duration = Duration::from_millis(700);

/// What holds a creation up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Delay {
    /// The first plugin of the chain.
    Plugin,
    /// The infra process, frozen with its cgroup.
    Infra,
}

impl Delay {
    /// Of a command that is to give up there: enough to come to the stage on a slow machine.
    pub fn patience(self) -> &'static str {
        match self {
            Self::Plugin => "1s",
            Self::Infra => "4s",
        }
    }

    /// The stage at which the creation stands meanwhile.
    pub fn stage(self) -> &'static str {
        match self {
            Self::Plugin => "cni-add",
            Self::Infra => "infra",
        }
    }
}

/// The machine.
pub struct Machine {
    /// In front of the real bridge plugin.
    pub plugin: Fake,
    before: Snapshot,
    gate: PathBuf,
}

/// One of the settings: a shutdown undoes everything, the network too (`tests/handover.rs` is about what it leaves else).
pub const UNDO_ON_SHUTDOWN: &str = "park_network_on_shutdown = false\n";

/// Runs `body` on a machine with these further settings, and looks for what it has left.
pub fn on_a_machine(name: &str, settings: &str, body: impl FnOnce(&Machine)) {
    on_a_machine_for(Duration::from_secs(300), name, settings, body);
}

/// The same for what may take so long.
pub fn on_a_machine_for(bound: Duration, name: &str, settings: &str, body: impl FnOnce(&Machine)) {
    Sandbox::new(name).bound(bound).run(|| {
        rig::settings(&format!(
            "[parking]\ninterval = {}\n{settings}\n",
            INTERVAL.as_secs_f64()
        ));
        let real = cni::real_plugins().unwrap().join("bridge");
        let plugin = fake::plugin_before(Path::new(cni::PLUGINS), "slow-bridge", &real);
        let mut network = cni::bridge("slow", "pvt0", "10.87.9.0/24");
        network.write();
        network = network.typed("slow-bridge");
        network.write_in(Path::new(cni::CONFIGS));
        let before = Snapshot::take();
        let machine = Machine {
            plugin,
            before,
            gate: "/run/gate".into(),
        };
        body(&machine);
        machine.before.assert_unchanged();
    });
}

impl Drop for Machine {
    /// A test that fails must not leave anything frozen: that does not die.
    fn drop(&mut self) {
        if std::thread::panicking() {
            freeze(false);
        }
    }
}

impl Machine {
    /// What comes next stands still there, until [`Machine::let_go`].
    pub fn hold(&self, at: Delay) {
        match at {
            Delay::Plugin => {
                let _ = fs::remove_file(&self.gate);
                self.plugin.on("ADD", &[Act::WaitFor(self.gate.clone())]);
            }
            Delay::Infra => freeze(true),
        }
    }

    /// Ends the delay, for what stands and for what comes.
    pub fn let_go(&self, at: Delay) {
        match at {
            Delay::Plugin => fs::write(&self.gate, "").unwrap(),
            Delay::Infra => freeze(false),
        }
    }

    /// The plugin waits, and then its real work is done and it fails all the same.
    pub fn hold_and_fail(&self) {
        let _ = fs::remove_file(&self.gate);
        let acts = [
            Act::WaitFor(self.gate.clone()),
            Act::Stderr("no address is free".into()),
            Act::AfterReal,
            Act::Exit(3),
            Act::OnlyFirst(1),
        ];
        self.plugin.on("ADD", &acts);
    }

    /// A created pod whose StartSandbox timed out at this delay.
    pub fn timed_out(&self, id: &str, at: Delay) -> Pod {
        self.hold(at);
        let pod = Pod::create(id);
        let error = pod.probe().start(id, SHORT).unwrap_err();
        // On a loaded machine the client may be quicker than the supervisor's word, which comes 35 ms before.
        assert_eq!(error.kind(), Kind::Deadline, "{error}");
        stands_at(&pod, at);
        pod
    }

    /// The same, and by now the creation is done and parked.
    pub fn parked(&self, id: &str, at: Delay) -> Pod {
        let pod = self.timed_out(id, at);
        self.let_go(at);
        until(&pod, State::Parked);
        pod
    }

    /// Nothing is left of what was there.
    pub fn is_clean(&self) {
        self.before.assert_unchanged();
    }

    /// ADD and DEL, so often.
    #[track_caller]
    pub fn chains(&self, add: usize, del: usize) {
        assert_eq!(
            (self.plugin.count("ADD"), self.plugin.count("DEL")),
            (add, del)
        );
    }
}

/// Freezes the parent of all pods' cgroups, or thaws it.
fn freeze(frozen: bool) {
    let table = fs::read_to_string("/proc/self/mountinfo").unwrap();
    let found = table.lines().find_map(|line| {
        let (left, right) = line.split_once(" - ")?;
        let point = left.split(' ').nth(4)?;
        let (kind, options) = (right.split(' ').next()?, right.rsplit(' ').next()?);
        match kind {
            "cgroup" if options.split(',').any(|o| o == "freezer") => Some((
                point,
                "freezer.state",
                if frozen { "FROZEN" } else { "THAWED" },
            )),
            "cgroup2" => Some((point, "cgroup.freeze", if frozen { "1" } else { "0" })),
            _ => None,
        }
    });
    let (root, file, word) = found.expect("a freezer");
    let dir = Path::new(root).join("podvisor");
    fs::create_dir_all(&dir).unwrap();
    fs::write(dir.join(file), word).unwrap();
}

/// Blocks until the creation has come to the delay.
pub fn stands_at(pod: &Pod, at: Delay) {
    eventually(BOUND, &format!("it stands at {at:?}"), || {
        let record = pod.record()?;
        let last = record.stages.last()?;
        (last.name == at.stage() && last.took_us.is_none()).then_some(())
    });
}

/// Blocks until the journal says so.
pub fn until(pod: &Pod, state: State) {
    eventually(BOUND, &format!("the pod is {state:?}"), || {
        (pod.record()?.state == state).then_some(())
    });
}

/// Blocks until so many requests wait in the supervisor.
pub fn until_waiters(pod: &Pod, count: u64) {
    eventually(BOUND, &format!("{count} requests wait"), || {
        (info(pod)["waiters"] == count).then_some(())
    });
}

/// What a live supervisor says of itself: SandboxStatus, verbose, `info`, `podvisor`.
pub fn info(pod: &Pod) -> Value {
    let request = SandboxStatusRequest {
        sandbox_id: pod.id.clone(),
        verbose: true,
        ..Default::default()
    };
    let probe = pod.probe();
    let service = probe.client.sandbox();
    let answer = probe
        .block(service.sandbox_status(rig::limit(BOUND), &request))
        .unwrap();
    let info: Value = serde_json::from_str(&answer.info["info"]).unwrap();
    info["podvisor"].clone()
}

/// CreateSandbox and StartSandbox, as a daemon's retry is both.
pub fn retry(probe: &Probe, id: &str, config: &PodSandboxConfig, limit: Duration) -> Result<u32> {
    probe.create(id, config)?;
    probe.start(id, limit)
}

/// All parts are in the error's text.
#[track_caller]
pub fn says(error: &Error, parts: &[&str]) {
    let text = error.to_string();
    for part in parts {
        assert!(text.contains(part), "{part:?} in {text:?}");
    }
}

/// Value of a sample of `podvisor metrics`, `None` when there is no such.
pub fn metric(sample: &str) -> Option<f64> {
    let text = podvisor(&["metrics"]).ok().stdout;
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix(sample)?.strip_prefix(' '))?;
    Some(line.parse().unwrap())
}

/// The document of one pod of the command's.
pub fn inspect(name: &str) -> Value {
    let text = podvisor(&["inspect", name]).ok().stdout;
    let all: Value = serde_json::from_str(&text).unwrap();
    all[0].clone()
}

/// The pods of the command's, parked ones too.
pub fn listed() -> Value {
    let text = podvisor(&["ps", "-a", "--json"]).ok().stdout;
    serde_json::from_str(&text).unwrap()
}

/// Blocks until the only pod of the command's is in this state, by `ps`.
pub fn until_listed(state: &str) {
    eventually(BOUND, &format!("ps shows {state}"), || {
        (listed()[0]["state"] == state).then_some(())
    });
}

/// The words of a `podvisor create` of the pod `web` with this patience.
pub fn create(timeout: &'static str) -> [&'static str; 5] {
    ["create", "--name", "web", "--timeout", timeout]
}

/// The same, not waited for.
pub fn create_aside(timeout: &'static str) -> Child {
    Command::new(PODVISOR)
        .args(create(timeout))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

/// The log of the supervisor of the command's only pod.
pub fn log_of(id: &str) -> String {
    let log = format!("/run/podvisor/default/{id}/bundle/log");
    fs::read_to_string(log).unwrap_or_default()
}

/// Leases that host-local has given for the network.
pub fn leases() -> usize {
    fs::read_dir("/var/lib/cni/networks/slow").map_or(0, |entries| {
        let names = entries.flatten().map(|e| e.file_name());
        names
            .filter(|name| name.to_string_lossy().starts_with("10."))
            .count()
    })
}

/// Events of the record's history, in order, by name and detail.
pub fn history(record: &Value) -> Vec<(String, String)> {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let events = record["history"].as_array().cloned().unwrap_or_default();
    events
        .iter()
        .map(|m| (text(&m["event"]), text(&m["detail"])))
        .collect()
}

/// The record of a pod as JSON.
pub fn document(pod: &Pod) -> Value {
    pod.record()
        .map_or(json!(null), |r| serde_json::to_value(r).unwrap())
}
