//! One shim, run the way a daemon runs it: `start` in a bundle, Task calls over its socket, its events into a list.
//! Which program it is, and which daemon it believes to serve, is all that differs between two sides.

use std::fs;
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use podvisor::proto::any;
use podvisor::proto::task_v3::mount::Mount;
use podvisor::proto::task_v3::shim as task;
use protobuf::Message;
use protobuf::well_known_types::empty::Empty;
use serde_json::{Value, json};
use ttrpc::asynchronous::Client;

use super::listener::{Background, Recorder, serve};
use crate::support::bin::{SHIM, run};
use crate::support::peers::Peer;
use crate::support::rootfs::{self, Rootfs};
use crate::support::{eventually, require};

/// What takes longer hangs.
pub const BOUND: Duration = Duration::from_secs(60);
/// Where the daemon would listen.
const DAEMON: &str = "/run/oracle/c.sock";

/// Who is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Who {
    /// containerd's own shim.
    Go,
    Podvisor,
}

/// A running shim.
pub struct Side {
    pub rootfs: Rootfs,
    dir: tempfile::TempDir,
    service: &'static str,
    calls: Calls,
    socket: PathBuf,
    events: Arc<Recorder>,
    _server: Background,
}

/// A failed call: the status code's number and the text behind it.
#[derive(Clone, Debug)]
pub struct Failure {
    pub code: i32,
    pub text: String,
}

pub type Answer<T> = Result<T, Failure>;

/// One connection and a runtime that drives it while somebody waits.
pub struct Calls {
    runtime: tokio::runtime::Runtime,
    client: Client,
    service: &'static str,
}

impl Side {
    /// Starts the shim of `peer` (its Go shim, or ours as `peer` starts it) with one bundle, `c`.
    pub fn launch(who: Who, peer: &Peer) -> Self {
        Self::launch_by(who, peer, |start| run(start, BOUND).ok().stdout)
    }

    /// The same; `started` runs `start` and gives what it printed.
    pub fn launch_by(who: Who, peer: &Peer, started: impl FnOnce(&mut Command) -> String) -> Self {
        let _ = fs::remove_dir_all("/run/oracle");
        fs::create_dir_all("/run/oracle").unwrap();
        let events = Arc::<Recorder>::default();
        let server = serve(Arc::clone(&events), &format!("{DAEMON}.ttrpc"));
        let dir = tempfile::Builder::new()
            .prefix("pvtest-oracle-")
            .tempdir_in("/run")
            .unwrap();
        let old = peer.name.starts_with("containerd-1.");
        let service = if old {
            "containerd.task.v2.Task"
        } else {
            "containerd.task.v3.Task"
        };
        let rootfs = rootfs::make();
        bundle(dir.path(), "c", &spec("c", "true"));
        let socket = start(who, peer, &dir.path().join("c"), started);
        Self {
            rootfs,
            service,
            calls: Calls::connect(&socket, service),
            socket,
            dir,
            events,
            _server: server,
        }
    }

    pub fn bundle(&self, id: &str) -> PathBuf {
        self.dir.path().join(id)
    }

    /// A path of the test's own in this side's directory.
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// A second connection, for a thread of its own.
    pub fn connect(&self) -> Calls {
        Calls::connect(&self.socket, self.service)
    }

    /// Writes the bundle and answers the request that creates it, its output into `<bundle>/out`.
    pub fn request(
        &self,
        id: &str,
        script: &str,
        edit: impl FnOnce(&mut Value),
    ) -> task::CreateTaskRequest {
        let mut spec = spec(id, script);
        edit(&mut spec);
        let bundle = bundle(self.dir.path(), id, &spec);
        task::CreateTaskRequest {
            id: id.into(),
            rootfs: vec![Mount {
                type_: "bind".into(),
                source: self.rootfs.str().into(),
                options: vec!["rbind".into(), "rw".into()],
                ..Default::default()
            }],
            terminal: spec["process"]["terminal"] == true,
            stdout: file(&bundle.join("out")),
            // The Go shim dies where a file takes stdout and nothing takes stderr.
            stderr: file(&bundle.join("out")),
            bundle: bundle.display().to_string(),
            ..Default::default()
        }
    }

    /// Created and started.
    pub fn run(&self, id: &str, script: &str) -> u32 {
        self.run_edited(id, script, |_| ())
    }

    pub fn run_edited(&self, id: &str, script: &str, edit: impl FnOnce(&mut Value)) -> u32 {
        let pid = self.create(&self.request(id, script, edit)).unwrap();
        assert_eq!(self.start(id, "").unwrap(), pid);
        pid
    }

    /// What was printed into `<bundle>/out`.
    pub fn output(&self, id: &str) -> String {
        fs::read_to_string(self.bundle(id).join("out")).unwrap_or_default()
    }

    /// What the events say once there are `count`: topic, container, process, code; without pids and times.
    pub fn events(&self, count: usize) -> Vec<String> {
        let end = Instant::now() + BOUND;
        while self.events.0.lock().unwrap().len() < count && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(20));
        }
        // Whatever is published too much comes soon after.
        std::thread::sleep(Duration::from_millis(200));
        let events = self.events.0.lock().unwrap();
        events.iter().map(crate::transcript::event).collect()
    }

    /// Takes what has come once the last of it begins so.
    pub fn take_events_to(&self, last: &str) -> Vec<String> {
        eventually(BOUND, last, || {
            let mut events = self.events.0.lock().unwrap();
            let told: Vec<String> = events.iter().map(crate::transcript::event).collect();
            let is_there = told.last().is_some_and(|event| event.starts_with(last));
            is_there.then(|| {
                events.clear();
                told
            })
        })
    }

    /// `unix:///…`.
    pub fn address(&self) -> String {
        format!("unix://{}", self.socket.display())
    }

    /// The shim leaves after its last container.
    pub fn end(self) {
        self.shutdown("c").unwrap();
        eventually(BOUND, "the shim leaves", || {
            (!self.socket.exists()).then_some(())
        });
    }

    /// Whether the shim's socket is there.
    pub fn listens(&self) -> bool {
        std::os::unix::net::UnixStream::connect(&self.socket).is_ok()
    }
}

impl std::ops::Deref for Side {
    type Target = Calls;

    fn deref(&self) -> &Calls {
        &self.calls
    }
}

impl Calls {
    fn connect(socket: &Path, service: &'static str) -> Self {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        let client = runtime
            .block_on(Client::connect(&format!("unix://{}", socket.display())))
            .unwrap();
        Self {
            runtime,
            client,
            service,
        }
    }

    /// Any method with any message.
    pub fn call<T: Message>(&self, method: &str, message: &impl Message) -> Answer<T> {
        self.call_within(method, message, BOUND)
    }

    /// The same with a deadline the shim is told.
    pub fn call_within<T: Message>(
        &self,
        method: &str,
        message: &impl Message,
        bound: Duration,
    ) -> Answer<T> {
        let request = ttrpc::Request {
            service: self.service.into(),
            method: method.into(),
            payload: message.write_to_bytes().unwrap(),
            timeout_nano: i64::try_from(bound.as_nanos()).unwrap(),
            ..Default::default()
        };
        let answer = self
            .runtime
            .block_on(async { tokio::time::timeout(bound, self.client.request(request)).await });
        let failure = match answer {
            Ok(Ok(response)) => {
                return Ok(T::parse_from_bytes(&response.payload).unwrap());
            }
            Ok(Err(ttrpc::Error::RpcStatus(status))) => Failure {
                code: status.code.value(),
                text: status.message,
            },
            Ok(Err(other)) => Failure {
                code: if other.to_string().contains("deadline") {
                    4
                } else {
                    -1
                },
                text: other.to_string(),
            },
            Err(_) => Failure {
                code: 4,
                text: "no answer".into(),
            },
        };
        println!("    {method}: {} {}", failure.code, failure.text);
        Err(failure)
    }

    pub fn create(&self, request: &task::CreateTaskRequest) -> Answer<u32> {
        let answer: task::CreateTaskResponse = self.call("Create", request)?;
        Ok(answer.pid)
    }

    pub fn start(&self, id: &str, exec_id: &str) -> Answer<u32> {
        let request = task::StartRequest {
            id: id.into(),
            exec_id: exec_id.into(),
            ..Default::default()
        };
        let answer: task::StartResponse = self.call("Start", &request)?;
        Ok(answer.pid)
    }

    /// An exec that prints into `<dir of the output>`.
    pub fn exec(&self, id: &str, exec_id: &str, stdout: &str, process: &Value) -> Answer<()> {
        let request = task::ExecProcessRequest {
            id: id.into(),
            exec_id: exec_id.into(),
            terminal: process["terminal"] == true,
            stdout: stdout.into(),
            stderr: match process["terminal"] == true {
                true => String::new(),
                false => stdout.into(),
            },
            spec: Some(any::raw(any::OCI_PROCESS, process.to_string().into_bytes())).into(),
            ..Default::default()
        };
        self.call::<Empty>("Exec", &request).map(drop)
    }

    pub fn state(&self, id: &str, exec_id: &str) -> Answer<task::StateResponse> {
        let request = task::StateRequest {
            id: id.into(),
            exec_id: exec_id.into(),
            ..Default::default()
        };
        self.call("State", &request)
    }

    pub fn kill(&self, id: &str, exec_id: &str, signal: u32, all: bool) -> Answer<()> {
        let request = task::KillRequest {
            id: id.into(),
            exec_id: exec_id.into(),
            signal,
            all,
            ..Default::default()
        };
        self.call::<Empty>("Kill", &request).map(drop)
    }

    /// The exit status.
    pub fn wait(&self, id: &str, exec_id: &str) -> Answer<u32> {
        let request = task::WaitRequest {
            id: id.into(),
            exec_id: exec_id.into(),
            ..Default::default()
        };
        let answer: task::WaitResponse = self.call("Wait", &request)?;
        assert!(answer.exited_at.seconds > 0, "{answer:?}");
        Ok(answer.exit_status)
    }

    pub fn delete(&self, id: &str, exec_id: &str) -> Answer<task::DeleteResponse> {
        let request = task::DeleteRequest {
            id: id.into(),
            exec_id: exec_id.into(),
            ..Default::default()
        };
        self.call("Delete", &request)
    }

    pub fn pids(&self, id: &str) -> Answer<task::PidsResponse> {
        let request = task::PidsRequest {
            id: id.into(),
            ..Default::default()
        };
        self.call("Pids", &request)
    }

    pub fn pause(&self, id: &str) -> Answer<()> {
        let request = task::PauseRequest {
            id: id.into(),
            ..Default::default()
        };
        self.call::<Empty>("Pause", &request).map(drop)
    }

    pub fn resume(&self, id: &str) -> Answer<()> {
        let request = task::ResumeRequest {
            id: id.into(),
            ..Default::default()
        };
        self.call::<Empty>("Resume", &request).map(drop)
    }

    pub fn resize(&self, id: &str, exec_id: &str, width: u32, height: u32) -> Answer<()> {
        let request = task::ResizePtyRequest {
            id: id.into(),
            exec_id: exec_id.into(),
            width,
            height,
            ..Default::default()
        };
        self.call::<Empty>("ResizePty", &request).map(drop)
    }

    pub fn close_stdin(&self, id: &str, exec_id: &str) -> Answer<()> {
        let request = task::CloseIORequest {
            id: id.into(),
            exec_id: exec_id.into(),
            stdin: true,
            ..Default::default()
        };
        self.call::<Empty>("CloseIO", &request).map(drop)
    }

    pub fn update(&self, id: &str, resources: &Value) -> Answer<()> {
        let resources = any::raw(any::OCI_RESOURCES, resources.to_string().into_bytes());
        let request = task::UpdateTaskRequest {
            id: id.into(),
            resources: Some(resources).into(),
            ..Default::default()
        };
        self.call::<Empty>("Update", &request).map(drop)
    }

    pub fn stats(&self, id: &str) -> Answer<task::StatsResponse> {
        let request = task::StatsRequest {
            id: id.into(),
            ..Default::default()
        };
        self.call("Stats", &request)
    }

    pub fn task_connect(&self, id: &str) -> Answer<task::ConnectResponse> {
        let request = task::ConnectRequest {
            id: id.into(),
            ..Default::default()
        };
        self.call("Connect", &request)
    }

    pub fn shutdown(&self, id: &str) -> Answer<()> {
        let request = task::ShutdownRequest {
            id: id.into(),
            ..Default::default()
        };
        match self.call::<Empty>("Shutdown", &request) {
            // The Go shim may be gone before its answer is out.
            Err(failure) if failure.code == -1 => Ok(()),
            other => other.map(drop),
        }
    }

    /// SIGKILL, its exit, and Delete.
    pub fn remove(&self, id: &str) {
        let _ = self.kill(id, "", 9, false);
        self.wait(id, "").unwrap();
        self.delete(id, "").unwrap();
    }
}

/// `start`, with what that daemon gives it; answers the socket.
fn start(
    who: Who,
    peer: &Peer,
    bundle: &Path,
    started: impl FnOnce(&mut Command) -> String,
) -> PathBuf {
    let log = bundle.join("log");
    nix::unistd::mkfifo(&log, nix::sys::stat::Mode::S_IRWXU).unwrap();
    // The daemon reads it from before the start; both ways, so that this does not wait for the writer.
    let mut reader = fs::OpenOptions::new()
        .read(true)
        .write(true)
        .open(&log)
        .unwrap();
    std::thread::spawn(move || {
        let mut buffer = [0; 4096];
        while let Ok(n @ 1..) = reader.read(&mut buffer) {
            // A Go program that panics says so here and nowhere else.
            if who == Who::Go {
                print!("{}", String::from_utf8_lossy(&buffer[..n]));
            }
        }
    });
    let old = peer.name.starts_with("containerd-1.");
    let program = match who {
        Who::Podvisor => PathBuf::from(SHIM),
        Who::Go => peer.bin.join("containerd-shim-runc-v2"),
    };
    let mut command = Command::new(program);
    command
        .args(["-namespace", "test", "-address", DAEMON, "-publish-binary"])
        .arg(peer.bin.join("containerd"))
        .args(["-id", "c", "start"])
        .env("TTRPC_ADDRESS", format!("{DAEMON}.ttrpc"))
        .env("GRPC_ADDRESS", DAEMON)
        .env("NAMESPACE", "test")
        .env("GOMAXPROCS", "2")
        .env("MAX_SHIM_VERSION", if old { "2" } else { "3" })
        .current_dir(bundle)
        .stdin(Stdio::null());
    let answer = started(&mut command);
    let address = match serde_json::from_str::<Value>(&answer) {
        Ok(json) => json["address"].as_str().unwrap().to_owned(),
        Err(_) => answer,
    };
    address.trim().strip_prefix("unix://").unwrap().into()
}

/// A directory with config.json.
fn bundle(dir: &Path, id: &str, spec: &Value) -> PathBuf {
    let bundle = dir.join(id);
    fs::create_dir_all(&bundle).unwrap();
    fs::write(bundle.join("config.json"), spec.to_string()).unwrap();
    bundle
}

/// The `process` object of a shell script.
pub fn process(script: &str) -> Value {
    json!({"user": {"uid": 0, "gid": 0}, "args": ["/bin/sh", "-c", script], "env": ["PATH=/bin"], "cwd": "/"})
}

fn spec(id: &str, script: &str) -> Value {
    let namespaces = ["pid", "mount", "ipc", "uts", "network"].map(|kind| json!({"type": kind}));
    json!({
        "ociVersion": "1.0.2",
        "process": process(script),
        "root": {"path": "rootfs"},
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "mode=755"]},
            {"destination": "/dev/pts", "type": "devpts", "source": "devpts", "options": ["newinstance", "ptmxmode=0666", "mode=0620"]},
        ],
        "linux": {"namespaces": namespaces, "cgroupsPath": format!("/default/{id}"), "resources": {"devices": [{"allow": true, "access": "rwm"}]}},
    })
}

/// Output into a file.
pub fn file(path: &Path) -> String {
    format!("file://{}", path.display())
}

/// A FIFO as a daemon makes it.
pub fn fifo(path: &Path) -> String {
    nix::unistd::mkfifo(path, nix::sys::stat::Mode::S_IRWXU).unwrap();
    path.display().to_string()
}

/// Both ends, so that opening waits for nobody; reads and writes do not wait either.
pub fn both_ends(path: &str) -> fs::File {
    fs::OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(nix::libc::O_NONBLOCK)
        .open(path)
        .unwrap()
}

/// Reads a FIFO to its end on a thread of its own.
pub fn reader(path: &str) -> JoinHandle<String> {
    let path = path.to_owned();
    std::thread::spawn(move || {
        let mut text = Vec::new();
        fs::File::open(path)
            .unwrap()
            .read_to_end(&mut text)
            .unwrap();
        String::from_utf8_lossy(&text).into_owned()
    })
}

/// The daemon whose Go shim is the oracle.
pub fn peer(name: &str) -> Option<Peer> {
    require::tool("runc").then(|| require::peer(name)).flatten()
}
