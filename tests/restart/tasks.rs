//! containerd's own Tasks service over gRPC, for what `ctr` cannot ask (field numbers of
//! `containerd.services.tasks.v1`).

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::time::Duration;

use podvisor::proto::any;
use serde_json::json;

use crate::support::Containerd;
use crate::support::grpc::{Answer, Connection, Message, Status};

const TASKS: &str = "/containerd.services.tasks.v1.Tasks";
/// What takes longer hangs.
pub const BOUND: Duration = Duration::from_secs(60);

pub const CREATED: u64 = 1;
pub const RUNNING: u64 = 2;
pub const STOPPED: u64 = 3;
pub const PAUSED: u64 = 4;
/// gRPC's NOT_FOUND.
pub const NOT_FOUND: u32 = 5;

/// Tasks of the namespace `default`.
pub struct Tasks(Connection);

/// Where the streams of a process are; empty: nowhere.
#[derive(Clone, Default)]
pub struct Streams {
    pub stdin: String,
    pub stdout: String,
    pub stderr: String,
    pub terminal: bool,
}

impl Tasks {
    pub fn of(daemon: &Containerd) -> Self {
        Self(Connection::open(&daemon.address, "default"))
    }

    fn call(&mut self, method: &str, message: Message) -> Result<Answer, Status> {
        let answer = self.0.call(&format!("{TASKS}/{method}"), &message, BOUND);
        if let Err(status) = &answer {
            println!("    {method}: {} {}", status.code, status.message);
        }
        answer
    }

    pub fn create(&mut self, id: &str, streams: &Streams) -> Result<u64, Status> {
        let message = Message::new()
            .text(1, id)
            .text(4, &streams.stdin)
            .text(5, &streams.stdout)
            .text(6, &streams.stderr)
            .varint(7, streams.terminal.into());
        self.call("Create", message).map(|answer| answer.number(2))
    }

    pub fn start(&mut self, id: &str, exec_id: &str) -> Result<u64, Status> {
        let message = Message::new().text(1, id).text(2, exec_id);
        self.call("Start", message).map(|answer| answer.number(1))
    }

    pub fn exec(
        &mut self,
        id: &str,
        exec_id: &str,
        streams: &Streams,
        script: &str,
    ) -> Result<(), Status> {
        let process = json!({
            "user": {"uid": 0, "gid": 0}, "args": ["/bin/sh", "-c", script], "env": ["PATH=/bin"],
            "cwd": "/", "terminal": streams.terminal,
        });
        let spec = Message::new()
            .text(1, any::OCI_PROCESS)
            .bytes(2, process.to_string().as_bytes());
        let message = Message::new()
            .text(1, id)
            .text(2, &streams.stdin)
            .text(3, &streams.stdout)
            .text(4, &streams.stderr)
            .varint(5, streams.terminal.into())
            .message(6, &spec)
            .text(7, exec_id);
        self.call("Exec", message).map(drop)
    }

    /// Status, pid and exit code.
    pub fn state(&mut self, id: &str, exec_id: &str) -> Result<(u64, u64, u64), Status> {
        let answer = self.call("Get", Message::new().text(1, id).text(2, exec_id))?;
        let process = answer.message(1);
        Ok((process.number(4), process.number(3), process.number(9)))
    }

    pub fn kill(&mut self, id: &str, exec_id: &str, signal: u64) -> Result<(), Status> {
        let message = Message::new().text(1, id).text(2, exec_id);
        self.call("Kill", message.varint(3, signal)).map(drop)
    }

    /// The exit code.
    pub fn wait(&mut self, id: &str, exec_id: &str) -> Result<u64, Status> {
        let message = Message::new().text(1, id).text(2, exec_id);
        self.call("Wait", message).map(|answer| answer.number(1))
    }

    /// The exit code.
    pub fn delete(&mut self, id: &str) -> Result<u64, Status> {
        let answer = self.call("Delete", Message::new().text(1, id))?;
        Ok(answer.number(3))
    }

    pub fn pause(&mut self, id: &str) -> Result<(), Status> {
        self.call("Pause", Message::new().text(1, id)).map(drop)
    }

    pub fn resume(&mut self, id: &str) -> Result<(), Status> {
        self.call("Resume", Message::new().text(1, id)).map(drop)
    }

    pub fn resize(&mut self, id: &str, width: u64, height: u64) -> Result<(), Status> {
        let message = Message::new().text(1, id).varint(3, width);
        self.call("ResizePty", message.varint(4, height)).map(drop)
    }

    /// SIGKILL, the exit, Delete.
    pub fn remove(&mut self, id: &str) {
        let _ = self.kill(id, "", 9);
        self.wait(id, "").unwrap();
        self.delete(id).unwrap();
    }
}

/// A container of this runtime, with nothing made of it yet.
pub fn container(
    daemon: &Containerd,
    runtime: &str,
    rootfs: &str,
    id: &str,
    script: &str,
    terminal: bool,
) {
    let mut args = vec!["container", "create", "--runtime", runtime, "--rootfs"];
    if terminal {
        args.push("-t");
    }
    // A file, because the `ctr` of 1.6 takes an option of the command for its own.
    let program = format!("/{id}.sh");
    let path = format!("{rootfs}{program}");
    fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    args.extend([rootfs, id, &program]);
    daemon.ctr(&args).ok();
}

/// For the containers' records.
pub fn forget(daemon: &Containerd, id: &str) {
    daemon.ctr(&["container", "rm", id]).ok();
}
