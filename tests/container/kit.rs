//! One supervisor's containers for a test: bundles of busybox, a journal and an event log in memory.

use std::collections::BTreeMap;
use std::fs;
use std::future::Future;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use podvisor::config::Config;
use podvisor::container::{
    ContainerRecord, Containers, CreateRequest, Events, Ledger, RuntimeOptions, undo,
};
use podvisor::error::Result;
use podvisor::mount::Mount;
use podvisor::process::Reaper;
use podvisor::proto::any::unpack;
use podvisor::proto::events::task_events::{TaskCreate, TaskDelete, TaskExit, TaskOOM};
use protobuf::well_known_types::any::Any;
use serde_json::{Value, json};

use crate::support::rootfs::{self, Rootfs};

/// A verb that takes longer than this hangs.
pub const BOUND: Duration = Duration::from_secs(30);

/// Everything a test needs of a supervisor.
pub struct Kit {
    pub containers: Containers,
    pub book: Arc<Book>,
    pub log: Arc<Log>,
    pub reaper: Reaper,
    pub dir: tempfile::TempDir,
    pub rootfs: Rootfs,
    runtime: String,
}

/// A journal in memory.
#[derive(Debug, Default)]
pub struct Book(Mutex<BTreeMap<String, ContainerRecord>>);

/// Events, in order.
#[derive(Debug, Default)]
pub struct Log(Mutex<Vec<(&'static str, Any)>>);

/// Runs `body` as a supervisor would: on a current-thread runtime.
pub fn supervise<F: Future<Output = ()>>(body: impl FnOnce() -> F) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(body());
}

impl Kit {
    /// `runtime`: a name or a path. Inside a runtime only.
    pub fn new(runtime: &str) -> Self {
        let (book, log, reaper) = (
            Arc::<Book>::default(),
            Arc::<Log>::default(),
            Reaper::start().unwrap(),
        );
        let containers = Containers::new(
            Arc::new(Config::default()),
            "test".into(),
            reaper.clone(),
            book.clone(),
            log.clone(),
        );
        let dir = tempfile::Builder::new()
            .prefix("pvtest-bundles-")
            .tempdir_in("/run")
            .unwrap();
        Self {
            containers,
            book,
            log,
            reaper,
            dir,
            rootfs: rootfs::make(),
            runtime: runtime.into(),
        }
    }

    /// Whether this is the runtime, by name or path.
    pub fn runs_with(&self, runtime: &str) -> bool {
        self.runtime.rsplit('/').next() == Some(runtime)
    }

    /// A bundle that runs `script`; `edit` changes its config.json.
    pub fn request(&self, id: &str, script: &str, edit: impl FnOnce(&mut Value)) -> CreateRequest {
        let bundle = self.bundle(id);
        fs::create_dir_all(&bundle).unwrap();
        let mut spec = spec(id, script);
        edit(&mut spec);
        fs::write(bundle.join("config.json"), spec.to_string()).unwrap();
        CreateRequest {
            id: id.into(),
            rootfs: vec![Mount {
                kind: "bind".into(),
                source: self.rootfs.str().into(),
                target: String::new(),
                options: vec!["rbind".into(), "rw".into()],
            }],
            stdout: format!("file://{}", bundle.join("out").display()),
            options: RuntimeOptions {
                binary: self.runtime.clone(),
                root: self.root(),
                ..Default::default()
            },
            bundle,
            ..Default::default()
        }
    }

    /// Creates and starts.
    pub async fn run(&self, id: &str, script: &str) -> u32 {
        let pid = self
            .containers
            .create(self.request(id, script, |_| ()))
            .await
            .unwrap();
        assert_eq!(self.containers.start(id, "").await.unwrap(), pid);
        settled(pid).await;
        pid
    }

    /// Registers `script` as an exec.
    pub async fn exec(&self, id: &str, exec_id: &str, script: &str) -> Result<()> {
        let out = format!(
            "file://{}",
            self.dir
                .path()
                .join(format!("{id}-{exec_id}.out"))
                .display()
        );
        let process = process(script).to_string();
        self.containers
            .exec(id, exec_id, false, "", &out, "", process.as_bytes())
            .await
    }

    /// What an exec printed.
    pub fn exec_output(&self, id: &str, exec_id: &str) -> String {
        fs::read_to_string(self.dir.path().join(format!("{id}-{exec_id}.out"))).unwrap()
    }

    /// Waits for the exit and answers the code.
    pub async fn code(&self, id: &str, exec_id: &str) -> u32 {
        tokio::time::timeout(BOUND, self.containers.wait(id, exec_id))
            .await
            .expect("an exit")
            .unwrap()
            .0
    }

    pub async fn undo(&self, record: &ContainerRecord) {
        undo(&Config::default(), &self.reaper, record)
            .await
            .unwrap();
    }

    pub fn bundle(&self, id: &str) -> PathBuf {
        self.dir.path().join(id)
    }

    /// Option `root`: parent of the runtime's state.
    pub fn root(&self) -> String {
        self.dir.path().join("state").display().to_string()
    }

    /// Nothing of `id` is left with the runtime, mounted, in a cgroup, or on record.
    pub fn assert_gone(&self, id: &str) {
        assert!(self.book.get(id).is_none(), "record");
        self.assert_undone(id);
    }

    /// The same but for the record.
    pub fn assert_undone(&self, id: &str) {
        assert!(
            !Path::new(&self.root()).join("test").join(id).exists(),
            "the runtime's state"
        );
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
        assert!(
            !mounts.contains(&format!("{}/", self.bundle(id).display())),
            "{mounts}"
        );
        for root in crate::support::sandbox::cgroup_roots() {
            assert!(
                !root.join("pv").join(id).exists(),
                "cgroup below {}",
                root.display()
            );
        }
    }
}

impl Book {
    pub fn get(&self, id: &str) -> Option<ContainerRecord> {
        self.0.lock().unwrap().get(id).cloned()
    }
}

impl Ledger for Book {
    fn save(&self, record: &ContainerRecord) -> Result<()> {
        self.0
            .lock()
            .unwrap()
            .insert(record.id.clone(), record.clone());
        Ok(())
    }

    fn forget(&self, id: &str) -> Result<()> {
        self.0.lock().unwrap().remove(id);
        Ok(())
    }
}

impl Events for Log {
    fn publish(&self, topic: &'static str, event: Any) {
        self.0.lock().unwrap().push((topic, event));
    }
}

impl Log {
    /// Everything so far, and forgets it: topics with what tells them apart (`exit c/e 7`).
    pub fn take(&self) -> Vec<String> {
        self.0
            .lock()
            .unwrap()
            .drain(..)
            .map(|(topic, any)| told(topic, &any))
            .collect()
    }
}

/// Until the program has taken the runtime's place and runs what it was told (or is gone): `start` may answer before,
/// and a listing of processes would differ.
async fn settled(pid: u32) {
    let read = |file: &str| fs::read_to_string(format!("/proc/{pid}/{file}"));
    // A zombie has an empty line as well, and so has a process in the middle of an exec: only its state tells them apart.
    let ended = || {
        let stat = read("stat").unwrap_or_default();
        let state = stat.rsplit_once(") ").map_or("", |(_, rest)| rest);
        state.is_empty() || state.starts_with(['Z', 'X'])
    };
    let runs = || {
        let (line, name) = (read("cmdline"), read("comm"));
        let (line, name) = (line.unwrap_or_default(), name.unwrap_or_default());
        let program = line.split('\0').next().unwrap_or_default();
        // The kernel changes the line first and the name a moment later.
        !line.is_empty()
            && program.ends_with(name.trim_end())
            && !line.contains("init")
            && !line.contains("--root")
            && !line.starts_with("/bin/sh\0-c\0sleep")
    };
    while !ended() && !runs() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

fn told(topic: &str, any: &Any) -> String {
    let name = any.type_url.clone();
    let verb = topic.strip_prefix("/tasks/").unwrap();
    match verb {
        "create" => {
            let create: TaskCreate = unpack(any, &name).unwrap().unwrap();
            assert!(create.pid > 0 && create.rootfs.len() == 1, "{create:?}");
            assert!(create.bundle.ends_with(&create.container_id), "{create:?}");
            assert!(create.io.stdout.ends_with("/out"), "{create:?}");
            "create".into()
        }
        "exit" => {
            let exit: TaskExit = unpack(any, &name).unwrap().unwrap();
            assert!(exit.pid > 0 && exit.exited_at.is_some(), "{exit:?}");
            format!(
                "exit {}/{} {}",
                exit.container_id, exit.id, exit.exit_status
            )
        }
        "delete" => {
            let delete: TaskDelete = unpack(any, &name).unwrap().unwrap();
            assert!(
                delete.pid > 0 && delete.id.is_empty() && delete.exited_at.is_some(),
                "{delete:?}"
            );
            format!("delete {} {}", delete.container_id, delete.exit_status)
        }
        "oom" => {
            let oom: TaskOOM = unpack(any, &name).unwrap().unwrap();
            format!("oom {}", oom.container_id)
        }
        other => other.into(),
    }
}

fn process(script: &str) -> Value {
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
        "linux": {"namespaces": namespaces, "cgroupsPath": format!("/pv/{id}")},
    })
}
