//! A daemon's part: a netns for each attempt, and the calls that libcni makes.

use std::fs;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use nix::mount::{MntFlags, umount2};
use podvisor::sys::netns::Fresh;
use serde_json::{Value, json};

use crate::owed_kit::processes;
use crate::support::fake::{self, Fake};
use crate::support::{Scope, Snapshot, bin, cni, eventually, podvisor, run};

/// The plugin.
pub const PLUGIN: &str = env!("CARGO_BIN_EXE_podvisor-cni");

/// For what takes as long as a loaded machine needs.
pub const BOUND: Duration = Duration::from_secs(60);

/// What is there; jobs take a moment to leave.
pub fn snapshot() -> Snapshot {
    Scope::default().within(Duration::from_secs(20)).take()
}

/// Settings; an unclaimed network lives one and a half of `interval`, seconds.
pub fn settings(interval: f64) {
    fs::write(
        "/etc/podvisor/config.toml",
        format!("[parking]\ninterval = {interval:?}\n[cni]\nkeeper_time = 60.0\n"),
    )
    .unwrap();
}

/// The reference bridge behind a fake that logs and can be told to be slow, and its network's list.
pub fn bridge() -> (Fake, Value) {
    let real = cni::real_plugins().unwrap().join("bridge");
    let plugin = fake::plugin_before(Path::new(cni::PLUGINS), "bridge", &real);
    let made = Command::new("ip")
        .args(["link", "add", "pvc0", "type", "bridge"])
        .output()
        .unwrap();
    assert!(made.status.success(), "{made:?}");
    let list = json!({"cniVersion": "1.0.0", "name": "pods", "plugins": [{
        "type": "bridge", "bridge": "pvc0", "isGateway": true, "ipMasq": false,
        "ipam": {"type": "host-local", "ranges": [[{"subnet": "10.97.1.0/24"}]]}
    }]});
    (plugin, list)
}

/// The configuration that the plugin gets for a list of real plugins.
pub fn conf(list: &Value) -> Value {
    let mut conf = list.clone();
    conf["type"] = "podvisor-cni".into();
    conf
}

/// A sandbox of a daemon.
#[derive(Debug)]
pub struct Attempt {
    pub id: String,
    pub netns: PathBuf,
    pub ifname: String,
    pub args: String,
    pub conf: Value,
    pub env: Vec<(String, String)>,
}

/// What the plugin said.
#[derive(Debug)]
pub struct Said {
    pub code: Option<i32>,
    pub answer: Value,
    pub stderr: String,
    pub took: Duration,
}

impl Said {
    #[track_caller]
    pub fn ok(self) -> Self {
        assert_eq!(self.code, Some(0), "{self:?}");
        self
    }

    /// The error object's text.
    #[track_caller]
    pub fn failed(self) -> String {
        assert_eq!(self.code, Some(1), "{self:?}");
        self.answer["msg"].as_str().unwrap().to_owned()
    }

    /// The first address.
    pub fn ip(&self) -> String {
        self.answer["ips"][0]["address"]
            .as_str()
            .unwrap()
            .to_owned()
    }
}

impl Attempt {
    /// An attempt of the pod `name`, with a netns as containerd makes it.
    pub fn of(name: &str, id: &str, list: &Value) -> Self {
        let netns = Path::new("/run/netns").join(format!("cni-{id}"));
        Fresh::begin().unwrap().pin(&netns).unwrap();
        Self {
            id: id.into(),
            netns,
            ifname: "eth0".into(),
            args: format!(
                "IgnoreUnknown=1;K8S_POD_NAMESPACE=apps;K8S_POD_NAME={name};K8S_POD_INFRA_CONTAINER_ID={id};K8S_POD_UID=uid-{name}"
            ),
            conf: conf(list),
            env: Vec::new(),
        }
    }

    pub fn command(&self, verb: &str) -> Command {
        self.command_of(Path::new(PLUGIN), verb)
    }

    /// The call of any plugin.
    pub fn command_of(&self, plugin: &Path, verb: &str) -> Command {
        let mut command = Command::new(plugin);
        command
            .env_clear()
            .env("CNI_COMMAND", verb)
            .env("CNI_CONTAINERID", &self.id)
            .env("CNI_NETNS", &self.netns)
            .env("CNI_IFNAME", &self.ifname)
            .env("CNI_ARGS", &self.args)
            .env("CNI_PATH", search())
            .env("PATH", std::env::var("PATH").unwrap())
            .envs(self.env.iter().map(|(k, v)| (k, v)));
        command
    }

    pub fn call(&self, verb: &str) -> Said {
        self.call_with(verb, &self.conf)
    }

    pub fn call_with(&self, verb: &str, conf: &Value) -> Said {
        let text = conf.to_string();
        let output = bin::run_with(&mut self.command(verb), Some(text.as_bytes()), BOUND);
        assert!(
            !output.held_open,
            "a job holds the caller's pipe: {output:?}"
        );
        Said {
            code: output.code,
            answer: serde_json::from_str(&output.stdout).unwrap_or_default(),
            stderr: output.stderr,
            took: output.took,
        }
    }

    pub fn add(&self) -> Said {
        self.call("ADD")
    }

    /// As containerd sends it: behind that of its own network for `lo`, at the same path.
    pub fn del(&self) -> Said {
        if self.netns.starts_with("/run/netns") {
            let loopback = cni::real_plugins().unwrap().join("loopback");
            let mut command = self.command_of(&loopback, "DEL");
            command.env("CNI_IFNAME", "lo");
            let conf = json!({"cniVersion": "1.0.0", "name": "cni-loopback", "type": "loopback"});
            let text = conf.to_string();
            bin::run_with(&mut command, Some(text.as_bytes()), BOUND).ok();
        }
        self.call("DEL")
    }

    /// ADD by a caller that kills the plugin after this time, as libcni does.
    pub fn give_up(&self, after: Duration) -> String {
        self.give_up_at("ADD", after)
    }

    /// The same at any verb.
    pub fn give_up_at(&self, verb: &str, after: Duration) -> String {
        use std::io::{Read, Write};
        let mut child = self
            .command(verb)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0)
            .spawn()
            .unwrap();
        let mut stdin = child.stdin.take().unwrap();
        stdin.write_all(self.conf.to_string().as_bytes()).unwrap();
        drop(stdin);
        let end = Instant::now() + after;
        while Instant::now() < end {
            assert!(child.try_wait().unwrap().is_none(), "it ended before");
            std::thread::sleep(Duration::from_millis(5));
        }
        child.kill().unwrap();
        child.wait().unwrap();
        let mut text = String::new();
        child.stderr.unwrap().read_to_string(&mut text).unwrap();
        text
    }

    /// What the daemon does with the netns at the end: one unmount, one unlink, and no second try.
    pub fn forget(self) {
        match umount2(&self.netns, MntFlags::MNT_DETACH) {
            Ok(()) | Err(nix::errno::Errno::EINVAL) => {}
            Err(e) => panic!("unmount {}: {e}", self.netns.display()),
        }
        fs::remove_file(&self.netns).unwrap();
    }

    /// DEL, and the netns goes.
    pub fn end(self) {
        self.del().ok();
        self.forget();
    }

    /// What `ip` prints in the netns at the daemon's path.
    pub fn ip(&self, args: &[&str]) -> String {
        let mut command = Command::new("nsenter");
        command.arg(format!("--net={}", self.netns.display()));
        let output = run(command.arg("ip").args(args), BOUND).ok();
        output.stdout
    }

    /// It has this address on eth0, and `lo` is up.
    #[track_caller]
    pub fn has(&self, address: &str) {
        let shown = self.ip(&["-o", "addr"]);
        assert!(shown.contains(address), "{address} in {shown}");
        let lo = self.ip(&["-o", "link", "show", "lo"]);
        assert!(lo.contains("UP"), "{lo}");
    }
}

fn search() -> String {
    format!(
        "{}:{}",
        cni::PLUGINS,
        cni::real_plugins().unwrap().display()
    )
}

/// ADDs and DELs that the real plugin has seen, once there are so many.
#[track_caller]
pub fn calls(plugin: &Fake, adds: usize, dels: usize) {
    eventually(BOUND, &format!("{adds} ADD and {dels} DEL"), || {
        let ended = |verb| plugin.calls_of(verb).iter().all(|c| c.end.is_some());
        let now = (plugin.count("ADD"), plugin.count("DEL"));
        assert!(now.0 <= adds && now.1 <= dels, "{now:?}");
        (now == (adds, dels) && ended("DEL")).then_some(())
    });
}

/// Networks of daemons' pods as `podvisor ps -a` shows them: (pod, state).
pub fn shown() -> Vec<(String, String)> {
    let listed = podvisor(&["ps", "-a", "--json"]).ok().stdout;
    let listed: Vec<Value> = serde_json::from_str(&listed).unwrap();
    let text = |v: &Value| v.as_str().unwrap_or_default().to_owned();
    listed
        .iter()
        .map(|p| (text(&p["name"]), text(&p["state"])))
        .collect()
}

/// Until the pod's network is in this state ("": not shown).
pub fn until(name: &str, state: &str) {
    eventually(BOUND, &format!("{name} is {state:?}"), || {
        let all = shown();
        let now = all.iter().find(|(n, _)| n == name);
        (now.map_or("", |(_, s)| s.as_str()) == state).then_some(())
    });
}

/// Pids of jobs.
pub fn jobs() -> Vec<i32> {
    processes(|line| line.starts_with(PLUGIN))
}
