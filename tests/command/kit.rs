//! What these tests do again and again.

use std::fs::File;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use serde_json::Value;

use crate::support::bin::{self, Output, PODVISOR};
use crate::support::rootfs::{self, Rootfs};
use crate::support::{Sandbox, Snapshot, cni, eventually, podvisor};

/// For what may take as long as a loaded machine needs; reaching it means a hang.
pub const BOUND: Duration = Duration::from_secs(60);

/// A machine with a root file system and the network `testnet` (10.87.1.0/24, ports can be published).
pub struct Kit {
    pub rootfs: Rootfs,
}

impl Kit {
    /// `podvisor run FLAGS --rootfs … -- /bin/sh -c SCRIPT`.
    #[track_caller]
    pub fn run(&self, flags: &[&str], script: &str) -> Output {
        podvisor(&self.line(flags, script))
    }

    /// The same with bytes on standard input.
    #[track_caller]
    pub fn run_with(&self, flags: &[&str], script: &str, input: &[u8]) -> Output {
        let mut command = Command::new(PODVISOR);
        command.args(self.line(flags, script));
        bin::run_with(&mut command, Some(input), BOUND)
    }

    /// A detached pod; gives its id.
    #[track_caller]
    pub fn detached(&self, flags: &[&str], script: &str) -> String {
        let mut all = vec!["-d"];
        all.extend(flags);
        id_of(&self.run(&all, script).ok())
    }

    /// The same as [`Kit::run`], not waited for.
    pub fn background(&self, flags: &[&str], script: &str) -> Background {
        Background::start(&self.line(flags, script))
    }

    fn line<'a>(&'a self, flags: &[&'a str], script: &'a str) -> Vec<&'a str> {
        let mut line = vec!["run"];
        line.extend(flags);
        line.extend(["--rootfs", self.rootfs.str(), "--", "/bin/sh", "-c", script]);
        line
    }
}

/// Runs `body` on a machine of its own and checks that nothing is left of it.
pub fn on_a_machine(name: &str, body: impl FnOnce(&Kit)) {
    on(Sandbox::new(name), body);
}

/// The same for what takes longer.
pub fn on_a_machine_within(name: &str, bound: Duration, body: impl FnOnce(&Kit)) {
    on(Sandbox::new(name).bound(bound), body);
}

fn on(machine: Sandbox<'_>, body: impl FnOnce(&Kit)) {
    machine.run(|| {
        let kit = Kit {
            rootfs: rootfs::make(),
        };
        cni::bridge("testnet", "pvt0", "10.87.1.0/24")
            .portmap()
            .write();
        let before = Snapshot::take();
        body(&kit);
        before.assert_unchanged();
    });
}

/// The one line of an output that is an id.
#[track_caller]
pub fn id_of(output: &Output) -> String {
    let id = output.stdout.trim_end();
    assert!(
        id.len() == 32 && id.bytes().all(|b| b.is_ascii_hexdigit()),
        "{output:#?}"
    );
    id.to_owned()
}

/// The document that a verb prints.
#[track_caller]
pub fn json(args: &[&str]) -> Value {
    let output = podvisor(args).ok();
    serde_json::from_str(&output.stdout).unwrap_or_else(|e| panic!("{e}: {output:#?}"))
}

/// What `inspect` says of one pod.
#[track_caller]
pub fn inspect(pod: &str) -> Value {
    json(&["inspect", pod])[0].clone()
}

/// First address of a pod, without the length of its prefix.
#[track_caller]
pub fn address(pod: &str) -> String {
    let pod = inspect(pod);
    let ip = pod["network"]["ips"][0].as_str().unwrap();
    ip.split('/').next().unwrap().to_owned()
}

/// The pod's supervisor dies on the spot.
#[track_caller]
pub fn kill_supervisor(pod: &str) {
    let pid = inspect(pod)["supervisor"]["pid"].as_i64().unwrap();
    let pid = nix::unistd::Pid::from_raw(i32::try_from(pid).unwrap());
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL).unwrap();
    eventually(BOUND, "a dead pod in the list", || {
        let list = json(&["ps", "--json"]);
        let pods = list.as_array().unwrap();
        pods.iter()
            .any(|p| p["name"] == pod && p["state"] == "dead")
            .then_some(())
    });
}

/// Waits until the pod's main container has written this line.
pub fn wait_for_log(pod: &str, text: &str) {
    eventually(BOUND, &format!("{text:?} in the log of {pod}"), || {
        let logs = podvisor(&["logs", pod]);
        (logs.stdout + &logs.stderr).contains(text).then_some(())
    });
}

/// A `podvisor` that runs meanwhile, its output in files.
pub struct Background {
    child: Child,
    dir: tempfile::TempDir,
}

impl Background {
    pub fn start(args: &[&str]) -> Self {
        let dir = tempfile::Builder::new()
            .prefix("pvtest-out-")
            .tempdir()
            .unwrap();
        let file = |name: &str| File::create(dir.path().join(name)).unwrap();
        let child = Command::new(PODVISOR)
            .args(args)
            .stdin(Stdio::null())
            .stdout(file("stdout"))
            .stderr(file("stderr"))
            .spawn()
            .unwrap();
        Self { child, dir }
    }

    pub fn signal(&self, signal: nix::sys::signal::Signal) {
        let pid = nix::unistd::Pid::from_raw(i32::try_from(self.child.id()).unwrap());
        nix::sys::signal::kill(pid, signal).unwrap();
    }

    pub fn stdout(&self) -> String {
        read(&self.dir.path().join("stdout"))
    }

    pub fn stderr(&self) -> String {
        read(&self.dir.path().join("stderr"))
    }

    /// Waits until it has printed this.
    pub fn wait_for(&self, text: &str) {
        eventually(BOUND, &format!("{text:?} from the command"), || {
            self.stdout().contains(text).then_some(())
        });
    }

    /// Exit code and signal.
    pub fn end(&mut self) -> (Option<i32>, Option<i32>) {
        let status = eventually(BOUND, "the end of the command", || {
            self.child.try_wait().unwrap()
        });
        (status.code(), status.signal())
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn read(path: &Path) -> String {
    String::from_utf8_lossy(&std::fs::read(path).unwrap()).into_owned()
}
