//! A daemon that is no containerd and launches shims as CRI-O does for a runtime of type `vm`: no `-address`, one bare
//! address in answer, Task v2 alone, FIFOs that it makes itself, and after its own restart a new connection to the address
//! it has kept.

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use podvisor::client;
use podvisor::proto::any;
use podvisor::proto::task_v2::shim as task;
use podvisor::proto::task_v2::shim_ttrpc::TaskClient;
use podvisor::proto::types::task::Status;
use tokio::net::UnixStream;
use ttrpc::Code;
use ttrpc::asynchronous::transport::Socket;

use crate::daemon::{all_gone, shims};
use crate::kit::{self, BOUND, block_on, limit};
use crate::support::bin::SHIM;
use crate::support::rootfs::{self, Rootfs};
use crate::support::{Snapshot, eventually, require, run, sandboxed};

/// One container as that daemon keeps it: its bundle, the address of its shim, and the FIFOs.
struct Container {
    id: String,
    bundle: PathBuf,
    address: String,
    fifos: [String; 3],
}

impl Container {
    /// Bundle, FIFOs, `start`.
    fn launch(id: &str, rootfs: &Rootfs, terminal: bool, script: &str) -> Self {
        let bundle = Path::new("/run/crio").join(id);
        fs::create_dir_all(&bundle).unwrap();
        let mut spec = kit::spec(id, script);
        // It mounts the root itself and names it by its path.
        spec["root"]["path"] = rootfs.str().into();
        spec["process"]["terminal"] = terminal.into();
        fs::write(bundle.join("config.json"), spec.to_string()).unwrap();
        let fifos = ["stdin", "stdout", "stderr"].map(|name| {
            let path = bundle.join(name);
            nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
            path.display().to_string()
        });
        // Both outputs of the helper are one pipe, read to its end.
        let (mut read, write) = std::io::pipe().unwrap();
        let mut command = Command::new(SHIM);
        command
            .args(["-namespace", "default", "-id", id, "start"])
            .current_dir(&bundle)
            .env("MAX_SHIM_VERSION", "2")
            .stdin(Stdio::null())
            .stdout(write.try_clone().unwrap())
            .stderr(write);
        let mut helper = command.spawn().unwrap();
        drop(command);
        let mut answer = String::new();
        read.read_to_string(&mut answer).unwrap();
        assert!(helper.wait().unwrap().success(), "{answer}");
        let address = answer.trim().to_owned();
        assert!(address.starts_with("unix:///"), "bare: {answer:?}");
        Self {
            id: id.into(),
            bundle,
            address,
            fifos,
        }
    }

    async fn connect(&self) -> TaskClient {
        let path = client::path_of(&self.address);
        let stream = UnixStream::connect(path).await.unwrap();
        TaskClient::new(ttrpc::asynchronous::Client::new(Socket::from(stream)))
    }

    async fn create(&self, task: &TaskClient, terminal: bool) -> u32 {
        let request = task::CreateTaskRequest {
            id: self.id.clone(),
            bundle: self.bundle.display().to_string(),
            terminal,
            stdin: self.fifos[0].clone(),
            stdout: self.fifos[1].clone(),
            stderr: if terminal {
                String::new()
            } else {
                self.fifos[2].clone()
            },
            ..Default::default()
        };
        task.create(limit(), &request).await.unwrap().pid
    }

    async fn start(&self, task: &TaskClient, exec: &str) -> ttrpc::Result<u32> {
        let request = task::StartRequest {
            id: self.id.clone(),
            exec_id: exec.into(),
            ..Default::default()
        };
        task.start(limit(), &request).await.map(|r| r.pid)
    }

    async fn state(&self, task: &TaskClient) -> ttrpc::Result<task::StateResponse> {
        let request = task::StateRequest {
            id: self.id.clone(),
            ..Default::default()
        };
        task.state(limit(), &request).await
    }

    async fn status(&self, task: &TaskClient) -> Status {
        self.state(task).await.unwrap().status.enum_value().unwrap()
    }

    async fn wait(&self, task: &TaskClient, exec: &str) -> u32 {
        let request = task::WaitRequest {
            id: self.id.clone(),
            exec_id: exec.into(),
            ..Default::default()
        };
        task.wait(limit(), &request).await.unwrap().exit_status
    }

    async fn kill(&self, task: &TaskClient, signal: u32, all: bool) -> ttrpc::Result<()> {
        let request = task::KillRequest {
            id: self.id.clone(),
            signal,
            all,
            ..Default::default()
        };
        task.kill(limit(), &request).await.map(drop)
    }

    async fn delete(&self, task: &TaskClient, exec: &str) -> ttrpc::Result<task::DeleteResponse> {
        let request = task::DeleteRequest {
            id: self.id.clone(),
            exec_id: exec.into(),
            ..Default::default()
        };
        task.delete(limit(), &request).await
    }

    async fn exec(&self, task: &TaskClient, exec: &str, fifos: &[String; 3], script: &str) {
        let process = kit::process(script).to_string();
        let request = task::ExecProcessRequest {
            id: self.id.clone(),
            exec_id: exec.into(),
            stdin: fifos[0].clone(),
            stdout: fifos[1].clone(),
            stderr: fifos[2].clone(),
            spec: Some(any::raw(any::OCI_PROCESS, process.into_bytes())).into(),
            ..Default::default()
        };
        task.exec(limit(), &request).await.unwrap();
    }

    async fn shutdown(&self, task: &TaskClient) {
        let request = task::ShutdownRequest {
            id: self.id.clone(),
            now: true,
            ..Default::default()
        };
        task.shutdown(limit(), &request).await.unwrap();
    }

    /// Opens the reading end of an output as the daemon does, without waiting for a writer.
    fn output(&self, n: usize) -> File {
        let mut options = OpenOptions::new();
        std::os::unix::fs::OpenOptionsExt::custom_flags(&mut options, libc::O_NONBLOCK);
        options.read(true).open(&self.fifos[n]).unwrap()
    }
}

/// Reads until `text` was seen, or the end when it is empty.
fn read_until(file: &mut File, text: &str) -> String {
    let mut all = Vec::new();
    eventually(BOUND, &format!("{text:?} in an output"), || {
        let mut buffer = [0; 4096];
        let ended = match file.read(&mut buffer) {
            Ok(n) => {
                all.extend(&buffer[..n]);
                n == 0
            }
            Err(e) => {
                assert_eq!(e.kind(), std::io::ErrorKind::WouldBlock);
                false
            }
        };
        let shown = String::from_utf8_lossy(&all);
        let found = if text.is_empty() {
            ended
        } else {
            shown.contains(text)
        };
        found.then(|| shown.into_owned())
    })
}

fn code(error: &ttrpc::Error) -> Code {
    match error {
        ttrpc::Error::RpcStatus(status) => status.code(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_container_lives_under_a_daemon_that_is_no_containerd() {
    const NAME: &str = "crio::a_container_lives_under_a_daemon_that_is_no_containerd";
    sandboxed(NAME, || {
        if !require::tool("runc") {
            return;
        }
        let rootfs = rootfs::make();
        let before = Snapshot::take();
        let script = "while read line; do echo \"out $line\"; echo \"err $line\" >&2; done; exit 8";
        let c = Container::launch("c", &rootfs, false, script);
        let (mut out, mut err) = (c.output(1), c.output(2));
        let writer = || OpenOptions::new().write(true).open(&c.fifos[0]).unwrap();
        block_on(async {
            let task = c.connect().await;
            let pid = c.create(&task, false).await;
            assert_eq!(c.status(&task).await, Status::CREATED);
            assert_eq!(c.start(&task, "").await.unwrap(), pid);
            assert_eq!(c.status(&task).await, Status::RUNNING);
            // Attach: a client writes and leaves, and the program goes on.
            writer().write_all(b"one\n").unwrap();
            read_until(&mut out, "out one\n");
            read_until(&mut err, "err one\n");

            // An exec with FIFOs of its own.
            let fifos = ["x-in", "x-out", "x-err"].map(|name| {
                let path = c.bundle.join(name);
                nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
                path.display().to_string()
            });
            let fifos = [String::new(), fifos[1].clone(), fifos[2].clone()];
            c.exec(&task, "x", &fifos, "echo from the exec; exit 4")
                .await;
            let shown = fifos[1].clone();
            let reading = tokio::task::spawn_blocking(move || fs::read_to_string(shown).unwrap());
            c.start(&task, "x").await.unwrap();
            assert_eq!(c.wait(&task, "x").await, 4);
            assert_eq!(reading.await.unwrap(), "from the exec\n");
            assert_eq!(c.delete(&task, "x").await.unwrap().exit_status, 4);

            // Pids, stats, pause and resume are what it asks for besides.
            let request = task::PidsRequest {
                id: "c".into(),
                ..Default::default()
            };
            let pids = task.pids(limit(), &request).await.unwrap();
            assert!(pids.processes.iter().any(|p| p.pid == pid));
            let request = task::StatsRequest {
                id: "c".into(),
                ..Default::default()
            };
            assert!(task.stats(limit(), &request).await.unwrap().stats.is_some());
            let request = task::PauseRequest {
                id: "c".into(),
                ..Default::default()
            };
            task.pause(limit(), &request).await.unwrap();
            assert_eq!(c.status(&task).await, Status::PAUSED);
            let request = task::ResumeRequest {
                id: "c".into(),
                ..Default::default()
            };
            task.resume(limit(), &request).await.unwrap();
            drop(task);

            // The daemon is started again: it has the address, and reads what was written meanwhile.
            drop((out, err));
            writer().write_all(b"two\n").unwrap();
            tokio::time::sleep(Duration::from_millis(200)).await;
            let (mut out, _err) = (c.output(1), c.output(2));
            let address = fs::read_to_string(c.bundle.join("address")).unwrap();
            assert_eq!(address, c.address);
            let task = c.connect().await;
            let state = c.state(&task).await.unwrap();
            assert_eq!((state.pid, &state.stdout), (pid, &c.fifos[1]));
            read_until(&mut out, "out two\n");

            // CloseIO, exit, delete, the shim's end.
            let request = task::CloseIORequest {
                id: "c".into(),
                stdin: true,
                ..Default::default()
            };
            task.close_io(limit(), &request).await.unwrap();
            assert_eq!(c.wait(&task, "").await, 8);
            read_until(&mut out, "");
            assert_eq!(
                code(&c.kill(&task, 9, false).await.unwrap_err()),
                Code::NOT_FOUND
            );
            assert_eq!(c.delete(&task, "").await.unwrap().exit_status, 8);
            assert_eq!(
                code(&c.delete(&task, "").await.unwrap_err()),
                Code::NOT_FOUND
            );
            c.shutdown(&task).await;
        });
        all_gone();
        let _ = fs::remove_dir_all("/run/crio");
        before.assert_unchanged();
    });
}

#[test]
fn a_terminal_is_resized_and_a_stop_is_a_kill_of_all() {
    const NAME: &str = "crio::a_terminal_is_resized_and_a_stop_is_a_kill_of_all";
    sandboxed(NAME, || {
        if !require::tool("runc") {
            return;
        }
        let rootfs = rootfs::make();
        let before = Snapshot::take();
        let script = "trap 'stty size' WINCH; echo ready; while :; do sleep 0.1; done";
        let c = Container::launch("t", &rootfs, true, script);
        let mut out = c.output(1);
        block_on(async {
            let task = c.connect().await;
            c.create(&task, true).await;
            c.start(&task, "").await.unwrap();
            read_until(&mut out, "ready\r\n");
            let request = task::ResizePtyRequest {
                id: "t".into(),
                width: 90,
                height: 21,
                ..Default::default()
            };
            task.resize_pty(limit(), &request).await.unwrap();
            read_until(&mut out, "21 90\r\n");
            c.kill(&task, 15, false).await.unwrap();
            c.kill(&task, 9, true).await.unwrap();
            assert_eq!(c.wait(&task, "").await, 137);
            c.delete(&task, "").await.unwrap();
            c.shutdown(&task).await;
        });
        all_gone();

        // What it knows nothing of any more is cleaned up by `delete`, also of a shim that was killed.
        let c = Container::launch("k", &rootfs, false, "sleep 1000");
        block_on(async {
            let task = c.connect().await;
            c.create(&task, false).await;
            c.start(&task, "").await.unwrap();
        });
        for pid in shims() {
            crate::daemon::signal(pid, nix::sys::signal::Signal::SIGKILL);
        }
        let mut delete = Command::new(SHIM);
        delete
            .args(["-namespace", "default", "-id", "k", "-bundle"])
            .arg(&c.bundle)
            .arg("delete")
            .current_dir(&c.bundle);
        run(&mut delete, BOUND).ok();
        all_gone();
        let _ = fs::remove_dir_all("/run/crio");
        before.assert_unchanged();
    });
}
