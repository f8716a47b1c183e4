//! Private containerds: own root, state and socket, this build's shim first in `PATH`, killed with the value.
//! Start them in a sandbox only; its `/run` and `/var/lib/containerd` are theirs.

use super::rootfs::Rootfs;
use super::{Output, bin, require, run};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// An unpacked or installed containerd.
#[derive(Debug, Clone)]
pub struct Peer {
    /// `containerd-2.1`.
    pub name: String,
    /// The directory of `containerd` and `ctr`.
    pub bin: PathBuf,
}

impl Peer {
    /// Looks under `target/peers`, then at the system's containerd if its version is the one in the name.
    pub fn find(name: &str) -> Option<Self> {
        let unpacked = peers_dir().join(name).join("bin");
        if unpacked.join("containerd").is_file() {
            return Some(Self {
                name: name.into(),
                bin: unpacked,
            });
        }
        let system = require::find("containerd")?;
        let version = Command::new(&system).arg("--version").output().ok()?;
        let version = String::from_utf8_lossy(&version.stdout).into_owned();
        let wanted = name.strip_prefix("containerd-")?;
        let same = version.split_ascii_whitespace().any(|word| {
            word.trim_start_matches('v')
                .starts_with(&format!("{wanted}."))
        });
        same.then(|| Self {
            name: name.into(),
            bin: system.parent().unwrap().to_path_buf(),
        })
    }
}

/// `peers` in the target directory this test was built in.
pub fn peers_dir() -> PathBuf {
    let own = std::env::current_exe().unwrap_or_default();
    let beside = own
        .ancestors()
        .map(|dir| dir.join("peers"))
        .find(|dir| dir.join("versions").is_file());
    beside.unwrap_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("target/peers"))
}

/// What a containerd is started with.
#[derive(Debug)]
pub struct Builder {
    peer: Peer,
    shims: PathBuf,
    config: String,
    env: Vec<(String, String)>,
}

impl Builder {
    /// More lines at the end of the configuration (tables in the peer's own version of it).
    pub fn config(mut self, toml: &str) -> Self {
        self.config.push_str(toml);
        self.config.push('\n');
        self
    }

    /// Another directory with the shim than this build's.
    pub fn shims(mut self, dir: &Path) -> Self {
        self.shims = dir.into();
        self
    }

    /// A variable of the daemon's environment, which its shims inherit.
    pub fn env(mut self, name: &str, value: &str) -> Self {
        self.env.push((name.into(), value.into()));
        self
    }

    /// Starts it and waits until it answers.
    pub fn start(self) -> Containerd {
        let state = PathBuf::from("/run").join(&self.peer.name);
        let root = PathBuf::from("/var/lib/containerd").join(&self.peer.name);
        fs::create_dir_all(&state).unwrap();
        fs::create_dir_all(&root).unwrap();
        let mut daemon = Containerd {
            address: state.join("c.sock"),
            log: state.join("log"),
            state,
            root,
            builder: self,
            child: None,
        };
        daemon.write_config();
        daemon.start_again();
        daemon
    }
}

/// A running containerd.
#[derive(Debug)]
pub struct Containerd {
    /// Its socket, for `--address` and gRPC clients.
    pub address: PathBuf,
    /// Its log.
    pub log: PathBuf,
    /// Its state directory.
    pub state: PathBuf,
    root: PathBuf,
    builder: Builder,
    child: Option<Child>,
}

impl Containerd {
    /// Starts a containerd with this build's shim and the CRI plugin, which containerd 2.1's sandbox controller needs.
    pub fn start(peer: &Peer) -> Self {
        Self::builder(peer).start()
    }

    /// The same with other settings.
    pub fn builder(peer: &Peer) -> Builder {
        Builder {
            peer: peer.clone(),
            shims: bin::dir().into(),
            config: String::new(),
            env: Vec::new(),
        }
    }

    /// Runs its own `ctr` for at most two minutes.
    pub fn ctr(&self, args: &[&str]) -> Output {
        run(self.ctr_command().args(args), Duration::from_secs(120))
    }

    /// `ctr run --rm` of a command in a root file system.
    pub fn run_once(&self, runtime: &str, rootfs: &Rootfs, id: &str, command: &[&str]) -> Output {
        let run = [
            "run",
            "--rm",
            "--runtime",
            runtime,
            "--rootfs",
            rootfs.str(),
            id,
        ];
        self.ctr(&[&run, command].concat())
    }

    /// Its `ctr`, for other bounds.
    pub fn ctr_command(&self) -> Command {
        let mut command = Command::new(self.builder.peer.bin.join("ctr"));
        command.arg("--address").arg(&self.address);
        command
    }

    /// The daemon's process id.
    pub fn pid(&self) -> i32 {
        i32::try_from(self.child.as_ref().expect("containerd is running").id()).unwrap()
    }

    /// TERM, wait, start on the same directories.
    pub fn restart(&mut self) {
        self.end(Signal::SIGTERM);
        self.start_again();
    }

    /// Ends it in good order; shims live on.
    pub fn stop(&mut self) {
        self.end(Signal::SIGTERM);
    }

    /// Ends it by SIGKILL.
    pub fn kill(&mut self) {
        self.end(Signal::SIGKILL);
    }

    /// Ends it in good order and starts another version on the same directories.
    pub fn become_version(&mut self, peer: &Peer) {
        self.end(Signal::SIGTERM);
        self.builder.peer = peer.clone();
        self.write_config();
        self.start_again();
    }

    /// Starts it again after [`stop`](Self::stop) or [`kill`](Self::kill).
    pub fn start_again(&mut self) {
        let log = fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(&self.log)
            .unwrap();
        let mut command = Command::new(self.builder.peer.bin.join("containerd"));
        command.arg("--config").arg(self.state.join("config.toml"));
        command.env(
            "PATH",
            bin::path_with(&[&self.builder.shims, &self.builder.peer.bin]),
        );
        command.envs(self.builder.env.iter().map(|(name, value)| (name, value)));
        command
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log);
        self.child = Some(command.spawn().unwrap());
        self.wait_until_ready();
    }

    /// What it logged so far.
    pub fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }

    fn wait_until_ready(&mut self) {
        let end = Instant::now() + Duration::from_secs(60);
        loop {
            let ended = self
                .child
                .as_mut()
                .and_then(|child| child.try_wait().unwrap());
            if ended.is_some() || Instant::now() > end {
                let log = self.log();
                let tail: Vec<&str> = log.lines().rev().take(30).collect();
                panic!(
                    "{} is not ready ({ended:?}), newest first:\n{}",
                    self.builder.peer.name,
                    tail.join("\n")
                );
            }
            let ready = self.address.exists()
                && self
                    .ctr_command()
                    .args(["namespaces", "ls"])
                    .output()
                    .is_ok_and(|out| out.status.success());
            if ready {
                return;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    fn end(&mut self, signal: Signal) {
        let Some(mut child) = self.child.take() else {
            return;
        };
        let _ = kill(Pid::from_raw(i32::try_from(child.id()).unwrap()), signal);
        let end = Instant::now() + Duration::from_secs(20);
        while child.try_wait().unwrap().is_none() {
            if Instant::now() > end {
                child.kill().unwrap();
                child.wait().unwrap();
                panic!(
                    "{} did not end within 20 s of {signal}",
                    self.builder.peer.name
                );
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn write_config(&self) {
        let (root, state, address) = (
            self.root.display(),
            self.state.display(),
            self.address.display(),
        );
        // Naming one runtime replaces the built-in table, and without the default one the plugin does not load.
        let (version, plugin, sandboxer) = if self.builder.peer.name.starts_with("containerd-1.") {
            (2, "io.containerd.grpc.v1.cri", "")
        } else {
            (3, "io.containerd.cri.v1.runtime", "sandboxer = \"shim\"")
        };
        let table = |name: &str, version: &str, more: &str| {
            format!(
                "[plugins.\"{plugin}\".containerd.runtimes.{name}]\nruntime_type = \"io.containerd.{name}.{version}\"\n{more}\n"
            )
        };
        let cri = table("runc", "v2", "") + &table("podvisor", "v1", sandboxer);
        let text = format!(
            "version = {version}\nroot = \"{root}\"\nstate = \"{state}\"\n[grpc]\naddress = \"{address}\"\n\
             [debug]\nlevel = \"debug\"\n{cri}\n{}",
            self.builder.config
        );
        fs::write(self.state.join("config.toml"), text).unwrap();
    }
}

impl Drop for Containerd {
    fn drop(&mut self) {
        if let Some(child) = &mut self.child {
            let _ = child.kill();
            let _ = child.wait();
        }
        if std::thread::panicking() {
            let log = self.log();
            let from = log.lines().count().saturating_sub(40);
            println!("--- end of {}'s log ---", self.builder.peer.name);
            log.lines().skip(from).for_each(|line| println!("{line}"));
        }
    }
}
