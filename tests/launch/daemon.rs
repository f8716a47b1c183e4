//! What a daemon does with the shim's executable: bundles, `start` and `delete` with its arguments and input.
#![allow(dead_code, reason = "each test file uses its own part of this module")]

use std::fs;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use podvisor::proto::task_v3::shim::DeleteResponse;
use protobuf::Message;

use crate::support::bin::{SHIM, run_with};
use crate::support::{Output, eventually};

/// The daemon's socket, by which the shim's socket is named; nothing listens there.
pub const ADDRESS: &str = "/run/containerd/containerd.sock";

/// A bundle in which `start` runs, and how to call it.
pub struct Bundle {
    pub dir: PathBuf,
    pub id: String,
    pub address: bool,
    pub env: Vec<(String, String)>,
    pub publisher: PathBuf,
}

impl Bundle {
    /// An empty bundle `id` of a daemon that sets no environment, as containerd 1.6.
    pub fn new(id: &str) -> Self {
        let dir = Path::new("/run/bundles").join(id);
        fs::create_dir_all(&dir).unwrap();
        nix::unistd::mkfifo(&dir.join("log"), nix::sys::stat::Mode::S_IRWXU).unwrap();
        Self {
            dir,
            id: id.to_owned(),
            address: true,
            env: Vec::new(),
            publisher: "/usr/bin/containerd".into(),
        }
    }

    pub fn env(mut self, name: &str, value: &str) -> Self {
        self.env.push((name.into(), value.into()));
        self
    }

    /// A daemon that says of itself that it has this version.
    pub fn daemon(mut self, version: &str) -> Self {
        self.publisher = Path::new("/run").join(format!("containerd-{version}"));
        let script =
            format!("#!/bin/sh\necho containerd github.com/containerd/containerd {version} rev\n");
        fs::write(&self.publisher, script).unwrap();
        fs::set_permissions(&self.publisher, fs::Permissions::from_mode(0o755)).unwrap();
        self.env("MAX_SHIM_VERSION", "2")
    }

    pub fn without_address(mut self) -> Self {
        self.address = false;
        self
    }

    pub fn config(self, text: &str) -> Self {
        fs::write(self.dir.join("config.json"), text).unwrap();
        self
    }

    /// Settings of podvisor for this call.
    pub fn settings(self, toml: &str) -> Self {
        let path = self.dir.with_extension("toml");
        fs::write(&path, toml).unwrap();
        let path = path.display().to_string();
        self.env("PODVISOR_CONFIG", &path)
    }

    pub fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command
            .args(["-namespace", "test", "-id", &self.id])
            .current_dir(&self.dir);
        if self.address {
            command
                .args(["-address", ADDRESS])
                .arg("-publish-binary")
                .arg(&self.publisher);
        }
        command
            .env_remove("MAX_SHIM_VERSION")
            .envs(self.env.iter().map(|(k, v)| (k, v)));
        command
    }

    pub fn start(&self) -> Output {
        self.start_with(&[])
    }

    /// `start` with this standard input; fails when something was printed on standard error or a pipe was kept.
    pub fn start_with(&self, input: &[u8]) -> Output {
        run_with(
            self.command(SHIM).arg("start"),
            Some(input),
            Duration::from_secs(60),
        )
    }

    /// A plain address, from a `start` that must work.
    pub fn address(&self) -> PathBuf {
        let output = self.start().ok();
        assert_eq!((output.stderr.as_str(), output.held_open), ("", false));
        path_of(&output.stdout)
    }

    /// `start` left to itself.
    pub fn spawn(&self, stdout: Stdio) -> Child {
        self.command(SHIM)
            .arg("start")
            .stdin(Stdio::null())
            .stdout(stdout)
            .stderr(Stdio::null())
            .spawn()
            .unwrap()
    }

    /// `delete`, with its decoded answer.
    pub fn delete(&self) -> DeleteResponse {
        let answer = raw(
            self.command(SHIM)
                .arg("-bundle")
                .arg(&self.dir)
                .arg("delete"),
            b"",
        );
        DeleteResponse::parse_from_bytes(&answer).unwrap()
    }
}

/// Standard output as bytes: a message is no text.
pub fn raw(command: &mut Command, input: &[u8]) -> Vec<u8> {
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(input).unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(
        output.status.success() && output.stderr.is_empty(),
        "{output:?}"
    );
    output.stdout
}

pub fn path_of(address: &str) -> PathBuf {
    address
        .strip_prefix("unix://")
        .unwrap_or_else(|| panic!("no address: {address:?}"))
        .into()
}

/// Pids of living supervisors and helpers.
pub fn shims() -> Vec<i32> {
    let pids = fs::read_dir("/proc")
        .unwrap()
        .flatten()
        .filter_map(|e| e.file_name().to_str()?.parse().ok());
    let mut found: Vec<i32> = pids
        .filter(|pid| {
            let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            line.starts_with(SHIM.as_bytes())
        })
        .collect();
    found.sort_unstable();
    found
}

/// The one supervisor there is.
pub fn supervisor() -> i32 {
    let found = shims();
    assert_eq!(found.len(), 1, "{found:?}");
    found[0]
}

pub fn signal(pid: i32, signal: nix::sys::signal::Signal) {
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), signal).unwrap();
}

/// Waits until no supervisor and no socket is left.
pub fn all_gone() {
    eventually(
        Duration::from_secs(20),
        "the last supervisor leaves",
        || shims().is_empty().then_some(()),
    );
    for dir in ["/run/containerd/s", "/run/podvisor/s"] {
        let left: Vec<_> = fs::read_dir(dir)
            .into_iter()
            .flatten()
            .flatten()
            .map(|e| e.path())
            .collect();
        assert!(left.is_empty(), "{left:?}");
    }
}

/// Ends every supervisor by SIGTERM and waits until nothing is left.
pub fn end_all() {
    for pid in shims() {
        signal(pid, nix::sys::signal::Signal::SIGTERM);
    }
    all_gone();
}

/// A pipe whose write end takes nothing any more.
pub fn full_pipe() -> (std::fs::File, std::fs::File) {
    let (read, write) = nix::unistd::pipe2(nix::fcntl::OFlag::O_CLOEXEC).unwrap();
    let (read, mut write) = (fs::File::from(read), fs::File::from(write));
    use nix::fcntl::{FcntlArg, OFlag, fcntl};
    fcntl(&write, FcntlArg::F_SETFL(OFlag::O_NONBLOCK)).unwrap();
    while write.write(&[0; 4096]).is_ok() {}
    while write.write(&[0; 1]).is_ok() {}
    fcntl(&write, FcntlArg::F_SETFL(OFlag::empty())).unwrap();
    (read, write)
}
