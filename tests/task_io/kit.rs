//! One supervisor as a daemon launches it, its Task service, and a client of its streams.
#![allow(dead_code, reason = "each test file uses its own part of this module")]

use std::fs;
use std::future::Future;
use std::path::Path;
use std::time::Duration;

use podvisor::client::{self, Client};
use podvisor::proto::any;
use podvisor::proto::streaming::streaming::StreamInit;
use podvisor::proto::streaming::streaming_ttrpc::StreamingClient;
use podvisor::proto::task_v3::mount::Mount;
use podvisor::proto::task_v3::shim as task;
use podvisor::proto::types::transfer::{Data, WindowUpdate};
use protobuf::well_known_types::any::Any;
use serde_json::{Value, json};
use tokio::net::UnixStream;
use ttrpc::asynchronous::transport::Socket;
use ttrpc::asynchronous::{CSReceiver, CSSender};

use crate::daemon::{Bundle, all_gone, path_of};
use crate::support;
use crate::support::rootfs::{self, Rootfs};

/// A call that takes longer hangs.
pub const BOUND: Duration = Duration::from_secs(60);

/// A supervisor that has no container yet.
pub struct Shim {
    pub bundle: Bundle,
    /// `unix:///…`.
    pub address: String,
    pub rootfs: Rootfs,
}

impl Shim {
    /// Launched for a container `c` that runs `script`, by a daemon that `edit` describes further.
    pub fn launch(script: &str, edit: impl FnOnce(Bundle) -> Bundle) -> Self {
        let rootfs = rootfs::make();
        let spec = spec("c", script);
        let bundle = edit(Bundle::new("c").config(&spec.to_string()));
        let address = format!("unix://{}", bundle.address().display());
        Self {
            bundle,
            address,
            rootfs,
        }
    }

    /// Changes the container's config.json.
    pub fn edit(&self, edit: impl FnOnce(&mut Value), script: &str) {
        let mut spec = spec("c", script);
        edit(&mut spec);
        fs::write(self.bundle.dir.join("config.json"), spec.to_string()).unwrap();
    }

    /// What creates the container.
    pub fn request(&self) -> task::CreateTaskRequest {
        task::CreateTaskRequest {
            id: "c".into(),
            bundle: self.bundle.dir.display().to_string(),
            rootfs: vec![Mount {
                type_: "bind".into(),
                source: self.rootfs.str().into(),
                options: vec!["rbind".into(), "rw".into()],
                ..Default::default()
            }],
            ..Default::default()
        }
    }

    /// The name of a stream, as a request says it.
    pub fn stream(&self, name: &str) -> String {
        let path = path_of(&self.address);
        format!("ttrpc+unix://{}?streaming_id={name}", path.display())
    }

    pub async fn client(&self) -> Client {
        Client::connect(&self.address).await.unwrap()
    }

    /// Ends it by Shutdown, and waits until nothing is left.
    pub async fn end(&self) {
        let shutdown = task::ShutdownRequest {
            id: "c".into(),
            ..Default::default()
        };
        let client = self.client().await;
        client.task().shutdown(limit(), &shutdown).await.unwrap();
        drop(client);
        tokio::task::spawn_blocking(all_gone).await.unwrap();
    }
}

/// Runs `body` on a runtime of one thread.
pub fn block_on<T>(body: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(body)
}

pub fn limit() -> ttrpc::context::Context {
    client::context(Some(BOUND))
}

/// Creates and starts; the pid.
pub async fn run(client: &Client, request: &task::CreateTaskRequest) -> u32 {
    let created = client.task().create(limit(), request).await.unwrap();
    assert!(created.pid > 0);
    start(client, "").await
}

/// Starts init or an exec.
pub async fn start(client: &Client, exec_id: &str) -> u32 {
    let request = task::StartRequest {
        id: "c".into(),
        exec_id: exec_id.into(),
        ..Default::default()
    };
    client.task().start(limit(), &request).await.unwrap().pid
}

/// The exit status.
pub async fn wait(client: &Client, exec_id: &str) -> u32 {
    let request = task::WaitRequest {
        id: "c".into(),
        exec_id: exec_id.into(),
        ..Default::default()
    };
    let answer = client.task().wait(limit(), &request).await.unwrap();
    answer.exit_status
}

pub async fn delete(client: &Client, exec_id: &str) -> task::DeleteResponse {
    let request = task::DeleteRequest {
        id: "c".into(),
        exec_id: exec_id.into(),
        ..Default::default()
    };
    client.task().delete(limit(), &request).await.unwrap()
}

pub async fn kill(client: &Client) {
    let request = task::KillRequest {
        id: "c".into(),
        signal: 9,
        all: true,
        ..Default::default()
    };
    client.task().kill(limit(), &request).await.unwrap();
}

pub async fn close_stdin(client: &Client, exec_id: &str) {
    let request = task::CloseIORequest {
        id: "c".into(),
        exec_id: exec_id.into(),
        stdin: true,
        ..Default::default()
    };
    client.task().close_io(limit(), &request).await.unwrap();
}

/// `process` of a spec.
pub fn process(script: &str) -> Value {
    json!({"user": {"uid": 0, "gid": 0}, "cwd": "/", "args": ["/bin/sh", "-c", script], "env": ["PATH=/bin"]})
}

pub fn spec(id: &str, script: &str) -> Value {
    let namespaces = ["pid", "mount", "ipc", "uts"].map(|kind| json!({"type": kind}));
    json!({
        "ociVersion": "1.0.2",
        "process": process(script),
        "root": {"path": "rootfs"},
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "mode=755"]},
            {"destination": "/dev/pts", "type": "devpts", "source": "devpts", "options": ["newinstance", "ptmxmode=0666", "mode=0620"]},
        ],
        "linux": {"namespaces": namespaces, "cgroupsPath": format!("/default/{id}")},
    })
}

/// A connection for one stream, as containerd makes it.
pub struct Stream {
    to: CSSender<Any>,
    from: CSReceiver<Any>,
    /// Dropped, the connection is closed.
    _client: ttrpc::asynchronous::Client,
}

impl Stream {
    /// Opens a stream; its name is known when this returns.
    pub async fn open(address: &str, name: &str) -> Self {
        let init = StreamInit {
            id: name.into(),
            ..Default::default()
        };
        let first = any::pack(any::STREAM_INIT, &init).unwrap();
        let (stream, answer) = Self::begin(address, &first).await;
        assert_eq!(answer.unwrap(), Any::default());
        // containerd's reader says at once what it takes; its writer waits for us.
        if !name.ends_with("stdin") {
            stream.allow(64 << 10).await;
        }
        stream
    }

    /// The same with another first message; what is answered.
    pub async fn begin(address: &str, first: &Any) -> (Self, ttrpc::Result<Any>) {
        let stream = UnixStream::connect(client::path_of(address)).await.unwrap();
        let client = ttrpc::asynchronous::Client::new(Socket::from(stream));
        let stream = StreamingClient::new(client.clone());
        let stream = stream.stream(client::context(None)).await.unwrap();
        stream.send(first).await.unwrap();
        let (to, mut from) = stream.split();
        let answer = from.recv().await;
        let opened = Self {
            to,
            from,
            _client: client,
        };
        (opened, answer)
    }

    /// Takes this many bytes more.
    pub async fn allow(&self, size: i32) {
        let window = WindowUpdate {
            update: size,
            ..Default::default()
        };
        let window = any::pack(any::STREAM_WINDOW, &window).unwrap();
        self.to.send(&window).await.unwrap();
    }

    /// The next bytes of an output; None at its end.
    pub async fn next(&mut self) -> Option<Vec<u8>> {
        let got = tokio::time::timeout(BOUND, self.from.recv());
        let any = match got.await.expect("an answer in time") {
            Ok(any) => any,
            Err(ttrpc::Error::Eof) => return None,
            Err(other) => panic!("{other:?}"),
        };
        let data: Data = any::unpack(&any, any::STREAM_DATA).unwrap().unwrap();
        Some(data.data)
    }

    /// Everything up to the end, always ready to take more.
    pub async fn read_all(&mut self) -> Vec<u8> {
        let mut all = Vec::new();
        while let Some(bytes) = self.next().await {
            self.allow(i32::try_from(bytes.len()).unwrap()).await;
            all.extend(bytes);
        }
        all
    }

    /// Waits until more may be sent; how much.
    pub async fn allowed(&mut self) -> usize {
        let got = tokio::time::timeout(BOUND, self.from.recv());
        let any = got.await.expect("an answer in time").unwrap();
        let window: WindowUpdate = any::unpack(&any, any::STREAM_WINDOW).unwrap().unwrap();
        usize::try_from(window.update).unwrap()
    }

    pub async fn receive(&mut self) -> ttrpc::Result<Any> {
        self.from.recv().await
    }

    pub async fn send(&self, bytes: &[u8]) {
        let data = Data {
            data: bytes.to_vec(),
            ..Default::default()
        };
        let data = any::pack(any::STREAM_DATA, &data).unwrap();
        self.to.send(&data).await.unwrap();
    }

    /// No more is sent.
    pub async fn close(&self) {
        self.to.close_send().await.unwrap();
    }
}

/// A log of a runtime in front of the real one; see `fake`.
pub fn recorder(name: &str) -> support::fake::Fake {
    let real = support::require::find("runc").unwrap();
    support::fake::runtime_before(Path::new("/run/fakes"), name, &real)
}
