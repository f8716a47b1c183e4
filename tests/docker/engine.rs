//! A Docker engine of a test's own: dockerd, its containerd with this build's shim, and an image made of busybox.

use std::fs;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::support::bin::{self, run, run_with};
use crate::support::rootfs;
use crate::support::{Containerd, Output, require};

/// What takes longer hangs.
pub const BOUND: Duration = Duration::from_secs(60);
/// The image that every container is made from.
pub const IMAGE: &str = "busybox:test";
const SOCKET: &str = "/run/docker-test/docker.sock";

/// A running engine.
pub struct Engine {
    pub containerd: Containerd,
    bin: PathBuf,
    options: Vec<String>,
    dockerd: Option<Child>,
}

impl Engine {
    /// An engine with these options of dockerd's; none where the machine has no Docker 28.
    pub fn start(options: &[&str]) -> Option<Self> {
        let bin = require::docker()?;
        let containerd = require::peer("containerd-2.1")?;
        let containerd = Containerd::builder(&containerd).start();
        fs::create_dir_all("/run/docker-test").unwrap();
        let mut engine = Self {
            containerd,
            bin,
            options: options.iter().map(|o| (*o).to_owned()).collect(),
            dockerd: None,
        };
        engine.start_again();
        engine.import();
        // The first container makes what all share: the engine's parent of their cgroups.
        engine.docker(&["run", "--rm", IMAGE, "true"]).ok();
        Some(engine)
    }

    /// Runs `docker` with these arguments.
    pub fn docker(&self, args: &[&str]) -> Output {
        run(self.command().args(args), BOUND)
    }

    /// The same with bytes on stdin.
    pub fn docker_with(&self, args: &[&str], input: &[u8]) -> Output {
        run_with(self.command().args(args), Some(input), BOUND)
    }

    /// `docker`, for other ways of running it.
    pub fn command(&self) -> Command {
        let mut command = Command::new(self.bin.join("docker"));
        command
            .env("DOCKER_HOST", format!("unix://{SOCKET}"))
            .env("HOME", "/run/docker-test");
        command
    }

    /// One field of a container, by a Go template.
    pub fn inspect(&self, id: &str, template: &str) -> String {
        let output = self.docker(&["inspect", "--format", template, id]);
        output.ok().stdout.trim().to_owned()
    }

    /// Until that field has this value.
    pub fn until(&self, id: &str, template: &str, value: &str) {
        let end = Instant::now() + BOUND;
        loop {
            let found = self.inspect(id, template);
            if found == value {
                return;
            }
            assert!(
                Instant::now() < end,
                "{id}: {template} is {found}, not {value}"
            );
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    /// SIGKILL to dockerd.
    pub fn kill(&mut self) {
        let mut dockerd = self.dockerd.take().unwrap();
        dockerd.kill().unwrap();
        dockerd.wait().unwrap();
        let _ = fs::remove_file("/run/docker-test/docker.pid");
    }

    /// SIGTERM to dockerd, which ends its containers (without live restore) and then itself.
    pub fn stop(&mut self) {
        let mut dockerd = self.dockerd.take().unwrap();
        let pid = nix::unistd::Pid::from_raw(i32::try_from(dockerd.id()).unwrap());
        nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM).unwrap();
        crate::support::eventually(BOUND, "dockerd ends", || dockerd.try_wait().unwrap());
    }

    /// dockerd on the same directories.
    pub fn start_again(&mut self) {
        let log = fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open("/run/docker-test/log")
            .unwrap();
        let mut command = Command::new(self.bin.join("dockerd"));
        command
            .args([
                "--data-root",
                "/run/docker-test/data",
                "--exec-root",
                "/run/docker-test/exec",
            ])
            .args([
                "--pidfile",
                "/run/docker-test/docker.pid",
                "--host",
                &format!("unix://{SOCKET}"),
            ])
            .arg("--containerd")
            .arg(&self.containerd.address)
            .args(["--bip", "10.77.3.1/24"])
            .args(&self.options)
            .env("PATH", bin::path_with(&[&self.bin]))
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log);
        let mut child = command.spawn().unwrap();
        let end = Instant::now() + BOUND;
        while self.docker(&["version"]).code != Some(0) {
            let ended = child.try_wait().unwrap();
            assert!(
                ended.is_none() && Instant::now() < end,
                "dockerd: {ended:?}\n{}",
                log_tail()
            );
            std::thread::sleep(Duration::from_millis(200));
        }
        self.dockerd = Some(child);
    }

    /// `docker import` of a tar archive of busybox.
    fn import(&self) {
        let rootfs = rootfs::make();
        // Of the test's temporary directory only what is below it.
        let tar = "/run/docker-test/busybox.tar";
        run(
            Command::new("tar").args(["-C", rootfs.str(), "-cf", tar, "."]),
            BOUND,
        )
        .ok();
        self.docker(&["import", tar, IMAGE]).ok();
        fs::remove_file(tar).unwrap();
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        if std::thread::panicking() {
            println!("--- end of dockerd's log ---\n{}", log_tail());
        }
        if let Some(mut dockerd) = self.dockerd.take() {
            let _ = dockerd.kill();
            let _ = dockerd.wait();
        }
    }
}

fn log_tail() -> String {
    let log = fs::read_to_string("/run/docker-test/log").unwrap_or_default();
    let from = log.lines().count().saturating_sub(40);
    log.lines().skip(from).collect::<Vec<_>>().join("\n")
}
