//! Containers and execs of one supervisor: their states, their exits, what is undone when one ends.
//!
//! Owns the table of containers and, per container, one short lock around its state (never held across an await) and
//! one queue for the verbs that change it. Promises: queries answer from the table while any verb hangs; per process
//! create, start, exit and delete are announced in this order, exactly one exit each, init's last; a create that failed
//! leaves nothing; a create or a start outlives the request that asked for it (docs/retry.md). Must never hold up one container for another.

mod checkpoint;
mod create;
mod delete;
mod event;
mod exec;
mod exit;
mod join;
mod kill;
mod oom;
mod parking;
mod pod_context;
mod record;
mod start;
mod state;
mod table;
mod undo;
mod update;

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use protobuf::well_known_types::any::Any;
use tokio::time::Instant;

use crate::config::Config;
use crate::error::Result;
use crate::mount::Mount;
use crate::process::Reaper;

pub use crate::spec::options::Options as RuntimeOptions;
pub use checkpoint::CheckpointRequest;
pub use record::{ContainerRecord, Events, ExitRecord, Ledger, OomLimit, Status};
pub use undo::undo;

pub use crate::oci::Dump;
pub use crate::stdio::{Attached, Next};

/// What the pod gives its containers: applied to config.json in `create` (unknown fields kept).
#[derive(Clone, Debug, Default)]
pub struct PodContext {
    /// Paths for namespaces the spec lists without a path: (type "network"|"ipc"|"uts", path). Never mount, user or
    /// cgroup; pid only if the pod shares it.
    pub join: Vec<(String, PathBuf)>,
    /// (destination, source, options) added when the spec has no mount at that destination, replacing a fresh tmpfs at
    /// /dev/shm.
    pub files: Vec<(PathBuf, PathBuf, Vec<String>)>,
}

/// What a container is created from.
#[derive(Clone, Debug, Default)]
pub struct CreateRequest {
    /// The container.
    pub id: String,
    /// Directory with its config.json.
    pub bundle: PathBuf,
    /// Mounted at `<bundle>/rootfs`, in order; empty: the spec's root is used as it is.
    pub rootfs: Vec<Mount>,
    /// Wants a terminal.
    pub terminal: bool,
    /// Verbatim string of the caller; so the two below.
    pub stdin: String,
    /// See `stdin`.
    pub stdout: String,
    /// See `stdin`.
    pub stderr: String,
    /// Directory to restore from, at the start; the answer is pid 0 then. Empty: a new container.
    pub checkpoint: String,
    /// How the OCI runtime is run.
    pub options: RuntimeOptions,
    /// What the pod adds; none for a container outside a sandbox of ours.
    pub pod: Option<PodContext>,
}

/// Answer of [`Containers::state`]: of a container's init, or of one exec.
#[derive(Clone, Debug)]
pub struct TaskState {
    /// The container.
    pub id: String,
    /// The exec, or empty.
    pub exec_id: String,
    /// The container's bundle.
    pub bundle: PathBuf,
    /// Kept after the exit; 0 before an exec was started.
    pub pid: u32,
    /// Never [`Status::Creating`].
    pub status: Status,
    /// Verbatim, as the request had it; so the three below.
    pub stdin: String,
    /// See `stdin`.
    pub stdout: String,
    /// See `stdin`.
    pub stderr: String,
    /// See `stdin`.
    pub terminal: bool,
    /// Code and time.
    pub exit: Option<(u32, SystemTime)>,
}

/// A creation that nobody has been given yet, or that is under way.
#[derive(Clone, Debug)]
pub struct Creation {
    /// The container.
    pub id: String,
    /// Where it is.
    pub stage: &'static str,
    /// Since it began.
    pub age: Duration,
    /// Finished, unclaimed.
    pub parked: bool,
    /// Requests that joined and wait.
    pub watchers: usize,
}

/// All containers of this supervisor. Cheap to clone. Queries never wait for anything that works.
///
/// `create` and `start` may be dropped: that ends a wait and nothing else. Every other state-changing method must be
/// called from a detached task (the service layer does): it is not made to be dropped half way.
#[derive(Clone)]
pub struct Containers {
    shared: Arc<table::Shared>,
}

impl fmt::Debug for Containers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Containers")
            .field("ids", &self.list())
            .finish_non_exhaustive()
    }
}

impl Containers {
    /// An empty table. `namespace` is containerd's.
    pub fn new(
        config: Arc<Config>,
        namespace: String,
        reaper: Reaper,
        ledger: Arc<dyn Ledger>,
        events: Arc<dyn Events>,
    ) -> Self {
        Self {
            shared: Arc::new(table::Shared::new(
                config, namespace, reaper, ledger, events,
            )),
        }
    }

    /// Makes a container and answers the pid of its init; the same as [`Containers::create_within`] without a deadline
    /// and without a pod.
    ///
    /// # Errors
    /// Those of [`Containers::create_within`].
    pub async fn create(&self, mut request: CreateRequest) -> Result<u32> {
        let pod = request.pod.take();
        self.create_within(request, None, async { Ok(pod) }).await
    }

    /// Makes a container, joins the making of one by the same request, takes a parked one, or answers for a live one:
    /// the pid of init. `limit`: what is left of the caller's deadline. `admit` is the first thing a new creation does:
    /// it says what the pod gives; nothing waits between its end and the container's place in the table.
    ///
    /// # Errors
    /// Exists for an id in use by another request, naming both digests, or by a container that has ended; Deadline with
    /// the stage, Busy while an earlier one is being undone or when the result waits for the next request; Unsupported
    /// for a checkpoint where criu cannot work; Cancelled when the pod or the container was stopped meanwhile. Unless the work
    /// goes on, nothing of the container is left (what takes longer than a moment to undo goes on), and nothing was
    /// announced.
    pub async fn create_within(
        &self,
        request: CreateRequest,
        limit: Option<Duration>,
        admit: impl Future<Output = Result<Option<PodContext>>> + Send + 'static,
    ) -> Result<u32> {
        join::create(&self.shared, request, limit, admit).await
    }

    /// Starts a container (`exec_id` empty) or an exec; answers its pid.
    ///
    /// # Errors
    /// Those of [`Containers::start_within`].
    pub async fn start(&self, id: &str, exec_id: &str) -> Result<u32> {
        self.start_within(id, exec_id, None).await
    }

    /// Starts a container or an exec, or joins its start; who asks again after a start that nobody waited for to the end
    /// is told its pid.
    ///
    /// # Errors
    /// NotFound; State when it is not waiting to be started, or when init has ended; Deadline with the stage while the
    /// start goes on. A failed exec stays created.
    pub async fn start_within(
        &self,
        id: &str,
        exec_id: &str,
        limit: Option<Duration>,
    ) -> Result<u32> {
        let container = self.shared.container(id)?;
        start::join(&self.shared, &container, exec_id, limit).await
    }

    /// Registers another process of a container; `process_json` is the `process` object of an OCI spec.
    ///
    /// # Errors
    /// NotFound, Exists, Invalid (the JSON), State (paused or stopped).
    #[allow(clippy::too_many_arguments, reason = "the fields of one request")]
    pub async fn exec(
        &self,
        id: &str,
        exec_id: &str,
        terminal: bool,
        stdin: &str,
        stdout: &str,
        stderr: &str,
        process_json: &[u8],
    ) -> Result<()> {
        let container = self.shared.container(id)?;
        let streams = state::Streams {
            stdin: stdin.to_owned(),
            stdout: stdout.to_owned(),
            stderr: stderr.to_owned(),
            terminal,
        };
        exec::add(&self.shared, &container, exec_id, streams, process_json)
    }

    /// Snapshot of a container or an exec.
    ///
    /// # Errors
    /// NotFound, also while a create is under way.
    pub fn state(&self, id: &str, exec_id: &str) -> Result<TaskState> {
        self.shared.container(id)?.task_state(exec_id)
    }

    /// Waits for the exit; answers at once when it has happened.
    ///
    /// # Errors
    /// NotFound, also when it is deleted without ever having run.
    pub async fn wait(&self, id: &str, exec_id: &str) -> Result<(u32, SystemTime)> {
        self.shared.container(id)?.wait(exec_id).await
    }

    /// Signals init (or everything in the container, `all`) or an exec.
    ///
    /// # Errors
    /// NotFound when it has ended; State for an exec that was never started.
    pub async fn kill(&self, id: &str, exec_id: &str, signal: u32, all: bool) -> Result<()> {
        if exec_id.is_empty() && kill::ends(signal) && parking::give_up(&self.shared, id) {
            return Ok(());
        }
        let container = self.shared.container(id)?;
        kill::kill(&self.shared, &container, exec_id, signal, all).await
    }

    /// Removes a container or an exec that does not run; answers (pid, code, exited at).
    ///
    /// # Errors
    /// NotFound; State while it runs or is paused. After any other error it is still there and can be deleted again.
    /// A container that is being made, or was made and taken by nobody, is undone.
    pub async fn delete(&self, id: &str, exec_id: &str) -> Result<(u32, u32, SystemTime)> {
        if exec_id.is_empty()
            && let Some(pid) = parking::delete(&self.shared, id).await
        {
            return Ok((pid, parking::KILLED, SystemTime::now()));
        }
        let container = self.shared.container(id)?;
        if exec_id.is_empty() {
            delete::container(&self.shared, &container).await
        } else {
            delete::exec(&container, exec_id).await
        }
    }

    /// All processes: (pid, exec id or ""). After the exit, and until the delete, the pid of init: daemons take a task
    /// without pids for a leaked one when they come back, and would lose its exit status.
    ///
    /// # Errors
    /// NotFound.
    pub async fn pids(&self, id: &str) -> Result<Vec<(u32, String)>> {
        Ok(self.shared.container(id)?.pids())
    }

    /// Gives the process end of file on its stdin, now or as soon as it is started.
    ///
    /// # Errors
    /// NotFound.
    pub fn close_io(&self, id: &str, exec_id: &str) -> Result<()> {
        self.shared.container(id)?.close_stdin(exec_id)
    }

    /// A client that has come for the stream `name`, which a process has or will have.
    pub fn attach(&self, name: &str) -> Attached {
        self.shared.streams.attach(name)
    }

    /// Sets the size of a terminal's window, characters, now or as soon as there is one.
    ///
    /// # Errors
    /// NotFound.
    pub fn resize(&self, id: &str, exec_id: &str, width: u32, height: u32) -> Result<()> {
        let side = |n: u32| u16::try_from(n).unwrap_or(u16::MAX);
        self.shared
            .container(id)?
            .resize(exec_id, side(width), side(height))
    }

    /// Dumps a running or paused container to a directory, from which another can be created.
    ///
    /// # Errors
    /// NotFound, State, Unsupported with criu's reason, or the runtime's.
    pub async fn checkpoint(&self, id: &str, request: &CheckpointRequest) -> Result<()> {
        checkpoint::checkpoint(&self.shared, &*self.shared.container(id)?, request).await
    }

    /// Freezes a running container.
    ///
    /// # Errors
    /// NotFound, State, or the runtime's.
    pub async fn pause(&self, id: &str) -> Result<()> {
        start::pause(&self.shared, &self.shared.container(id)?).await
    }

    /// Thaws a paused container, also when its init has ended meanwhile.
    ///
    /// # Errors
    /// NotFound, State, or the runtime's.
    pub async fn resume(&self, id: &str) -> Result<()> {
        start::resume(&self.shared, &self.shared.container(id)?).await
    }

    /// Changes the limits of a container that is created, running or paused; `resources`: `linux.resources` of an OCI spec
    /// as JSON, of which only what is named changes.
    ///
    /// # Errors
    /// NotFound; Invalid for what is no such document; State once its init has ended; else the runtime's, which names
    /// the limit it cannot set.
    pub async fn update(&self, id: &str, resources: &Any) -> Result<()> {
        update::update(&self.shared, &self.shared.container(id)?, resources).await
    }

    /// containerd's metrics message of the container's cgroup; also between exit and delete while the cgroup exists.
    ///
    /// # Errors
    /// NotFound when there is no such container or no cgroup.
    pub fn stats(&self, id: &str) -> Result<Any> {
        self.shared.container(id)?.stats()
    }

    /// Ids of all containers, those being created and parked too, sorted.
    pub fn list(&self) -> Vec<String> {
        self.shared.ids()
    }

    /// What is being created, and what is parked.
    pub fn creations(&self) -> Vec<Creation> {
        parking::creations(&self.shared)
    }

    /// How often a request joined a creation under way, by the stage it found it in.
    pub fn joined(&self) -> BTreeMap<&'static str, u64> {
        self.shared.joined()
    }

    /// True when there are containers, and none that anybody has been given or waits for.
    pub fn are_all_unclaimed(&self) -> bool {
        parking::are_all_unclaimed(&self.shared)
    }

    /// Resolves when the next container has been thrown away because nobody took it in its time.
    pub async fn one_was_unclaimed(&self) {
        // The sender lives as long as this does.
        let _ = self.shared.unclaimed.subscribe().changed().await;
    }

    /// Changes with every container that has gone.
    pub fn removals(&self) -> tokio::sync::watch::Receiver<()> {
        self.shared.removals.subscribe()
    }

    /// A [`Containers::stop_all`] that is under way gives no grace beyond `grace` from now: whoever asks last does not wait
    /// for the patience of whoever asked first.
    pub fn shorten_grace(&self, grace: Duration) {
        self.shared.shorten_grace(Instant::now() + grace);
    }

    /// Stops all, in parallel: creates under way are cancelled, SIGTERM (or the image's signal), after `grace` SIGKILL,
    /// then, with `delete`, each is deleted (events included). Bounded even when a runtime hangs or a process cannot die.
    ///
    /// # Errors
    /// The first; the others are still stopped.
    pub async fn stop_all(&self, grace: Duration, delete: bool) -> Result<()> {
        kill::stop_all(&self.shared, grace, delete).await
    }

    /// Whether a process of a container lives; `killed`: of one that was stopped, and hangs in the kernel.
    pub fn is_any_alive(&self, killed: bool) -> bool {
        kill::is_any_alive(&self.shared, killed)
    }

    /// SIGKILL once more to what is left of all of them, thawed where it is frozen. Waits a second for each at most.
    pub async fn kill_what_is_left(&self) {
        kill::kill_what_is_left(&self.shared).await;
    }
}
