//! The table of containers, and one container with its locks.
//!
//! `inner` is held for a few instructions and never across an await; `verbs` is the queue of the verbs that change the
//! container as a whole (create, start, pause, resume, delete). Queries use `inner` only.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use protobuf::well_known_types::any::Any;
use tokio::sync::{Semaphore, watch};
use tokio::time::{Instant, sleep_until, timeout};

use super::TaskState;
use super::event::Announcer;
use super::record::{Events, ExitRecord, Ledger};
use super::state::{Inner, Phase, Streams};
use crate::cgroup::OomCount;
use crate::clock::from_unix_nanos;
use crate::config::Config;
use crate::error::{Error, Kind, Result};
use crate::job::Job;
use crate::mount::Mount;
use crate::oci::Runtime;
use crate::process::{Child, Reaper};
use crate::stdio::{self, Io};

/// Execs being started at a time in one container: each is a run of the OCI runtime with its memory. Not shared between
/// containers, or one whose execs hang would hold up the others.
const EXEC_SLOTS: usize = 16;

/// What all containers of a supervisor share.
pub(super) struct Shared {
    pub config: Arc<Config>,
    pub namespace: String,
    pub reaper: Reaper,
    ledger: Arc<dyn Ledger>,
    events: Arc<dyn Events>,
    /// Streams of bytes that clients come for by name.
    pub streams: stdio::Streams,
    table: Mutex<BTreeMap<String, Arc<Container>>>,
    /// By container: from the request that begins one until nothing of the container is left.
    creations: Mutex<BTreeMap<String, Making>>,
    joined: Mutex<BTreeMap<&'static str, u64>>,
    /// Whatever grace a stop was given, it ends here.
    grace_end: watch::Sender<Option<Instant>>,
    /// How many were thrown away because nobody took them.
    pub unclaimed: watch::Sender<u64>,
    /// Told of every container that has gone.
    pub removals: watch::Sender<()>,
}

/// One creation and whom it is for.
#[derive(Debug)]
pub(super) struct Making {
    pub job: Job<u32>,
    /// Of the request as it came, and as its config.json reads since we have changed it.
    pub digests: Vec<String>,
}

/// What stays the same for a container's life.
#[derive(Debug)]
pub(super) struct Fixed {
    pub id: String,
    pub bundle: PathBuf,
    pub runtime: Runtime,
    /// The kernel ends everything in it with init.
    pub own_pid_namespace: bool,
    /// Owner of the pipes.
    pub io_owner: (u32, u32),
    /// What asks the program to end.
    pub stop_signal: u32,
    /// As the request has it.
    pub rootfs: Vec<Mount>,
    /// For a restore; so the one below.
    pub no_pivot_root: bool,
    /// criu's directory; empty for one in the bundle.
    pub criu_work: String,
}

/// One container.
#[derive(Debug)]
pub(super) struct Container {
    pub fixed: Fixed,
    /// Its creation.
    pub job: Job<u32>,
    pub verbs: tokio::sync::Mutex<()>,
    pub exec_slots: Semaphore,
    /// True: the container is being stopped, nothing waits for a runtime any more.
    cancelled: watch::Sender<bool>,
    /// Sent after every step somebody may wait for.
    changed: watch::Sender<()>,
    inner: Mutex<Inner>,
    /// Keeps saves in order; what is saved is read under it.
    saving: Mutex<()>,
    /// Kills for want of memory that were told.
    oom: Mutex<OomCount>,
}

impl Shared {
    pub fn new(
        config: Arc<Config>,
        namespace: String,
        reaper: Reaper,
        ledger: Arc<dyn Ledger>,
        events: Arc<dyn Events>,
    ) -> Self {
        Self {
            config,
            namespace,
            reaper,
            ledger,
            events,
            streams: stdio::Streams::default(),
            table: Mutex::default(),
            creations: Mutex::default(),
            joined: Mutex::default(),
            grace_end: watch::Sender::new(None),
            unclaimed: watch::Sender::new(0),
            removals: watch::Sender::new(()),
        }
    }

    /// Grace that is running ends at `end` at the latest.
    pub fn shorten_grace(&self, end: Instant) {
        self.grace_end
            .send_modify(|now| *now = Some(now.map_or(end, |n| n.min(end))));
    }

    /// Waits until `end`, or until an earlier one was asked for.
    pub async fn grace_over(&self, mut end: Instant) {
        let mut sooner = self.grace_end.subscribe();
        loop {
            let asked = *sooner.borrow_and_update();
            end = asked.map_or(end, |a| a.min(end));
            tokio::select! {
                () = sleep_until(end) => return,
                // The sender is ours and outlives this wait.
                _ = sooner.changed() => {}
            }
        }
    }

    /// A container that somebody has been given.
    pub fn container(&self, id: &str) -> Result<Arc<Container>> {
        let found = self.any(id).ok_or_else(|| Inner::absent(id))?;
        let hidden = {
            let inner = found.inner();
            match (inner.creating, inner.parked) {
                (true, _) => Some("it is being created"),
                (_, true) => Some("it is parked, nobody has been given it"),
                _ => None,
            }
        };
        match hidden {
            None => Ok(found),
            Some(why) => Err(Error::new(
                Kind::NotFound,
                format!("find container {id}: {why}; create it again to take it, or delete it"),
            )),
        }
    }

    /// A container in whatever state.
    pub fn any(&self, id: &str) -> Option<Arc<Container>> {
        locked(&self.table).get(id).cloned()
    }

    /// Creations, by container. Held for a few instructions; taken before a container's own lock.
    pub fn creations(&self) -> MutexGuard<'_, BTreeMap<String, Making>> {
        locked(&self.creations)
    }

    /// Counts a request that joined a creation in this stage.
    pub fn count_joined(&self, stage: &'static str) {
        *locked(&self.joined).entry(stage).or_default() += 1;
    }

    pub fn joined(&self) -> BTreeMap<&'static str, u64> {
        locked(&self.joined).clone()
    }

    pub fn all(&self) -> Vec<Arc<Container>> {
        locked(&self.table).values().cloned().collect()
    }

    pub fn ids(&self) -> Vec<String> {
        let made = locked(&self.table).keys().cloned().collect::<BTreeSet<_>>();
        let making = self.creations().keys().cloned().collect();
        made.union(&making).cloned().collect()
    }

    /// Takes the id; Exists when it is taken.
    pub fn insert(&self, container: &Arc<Container>) -> Result<()> {
        let id = &container.fixed.id;
        let mut table = locked(&self.table);
        if table.contains_key(id) {
            return Err(taken(id));
        }
        table.insert(id.clone(), Arc::clone(container));
        Ok(())
    }

    /// Gives the id back. From here on the container is not there for anybody.
    pub fn remove(&self, container: &Container) {
        let mut creations = self.creations();
        container.inner().removed = true;
        locked(&self.table).remove(&container.fixed.id);
        creations.remove(&container.fixed.id);
        drop(creations);
        container.notify();
        self.removals.send_replace(());
    }

    /// Stores the container's record as it is now; nothing once it is forgotten.
    pub fn save(&self, container: &Container) -> Result<()> {
        let _order = locked(&container.saving);
        let record = {
            let inner = container.inner();
            if inner.removed {
                return Ok(());
            }
            inner.record.clone()
        };
        self.ledger.save(&record)
    }

    /// The same where nothing depends on it: the kernel or the runtime knows it too.
    pub fn save_or_warn(&self, container: &Container) {
        if let Err(error) = self.save(container) {
            tracing::warn!(id = container.fixed.id, %error, "container's record not saved");
        }
    }

    /// Drops the record.
    pub fn forget(&self, container: &Container) -> Result<()> {
        let _order = locked(&container.saving);
        self.ledger.forget(&container.fixed.id)
    }

    /// The streams of a process of `container`; `direct`: see [`stdio::Request::direct`].
    pub async fn open_streams(
        &self,
        container: &Container,
        streams: Streams,
        direct: bool,
    ) -> Result<Io> {
        let fixed = &container.fixed;
        let request = stdio::Request {
            stdin: streams.stdin,
            stdout: streams.stdout,
            stderr: streams.stderr,
            terminal: streams.terminal,
            uid: fixed.io_owner.0,
            gid: fixed.io_owner.1,
            direct,
            streams: self.streams.clone(),
            console_dir: self.config.runtime_root.join("s"),
            container: fixed.id.clone(),
            namespace: self.namespace.clone(),
        };
        Io::open(&request, &self.reaper).await
    }

    pub fn announcer<'a>(&'a self, container: &'a Container) -> Announcer<'a> {
        Announcer {
            events: &*self.events,
            id: &container.fixed.id,
        }
    }
}

impl Container {
    pub fn new(fixed: Fixed, job: Job<u32>, inner: Inner) -> Self {
        Self {
            fixed,
            job,
            verbs: tokio::sync::Mutex::new(()),
            exec_slots: Semaphore::new(EXEC_SLOTS),
            cancelled: watch::Sender::new(false),
            changed: watch::Sender::new(()),
            inner: Mutex::new(inner),
            saving: Mutex::new(()),
            oom: Mutex::default(),
        }
    }

    pub fn inner(&self) -> MutexGuard<'_, Inner> {
        locked(&self.inner)
    }

    pub fn oom(&self) -> MutexGuard<'_, OomCount> {
        locked(&self.oom)
    }

    /// One step, then everybody who waits looks again.
    pub fn step<T>(&self, step: impl FnOnce(&mut Inner) -> T) -> T {
        let result = step(&mut self.inner());
        self.notify();
        result
    }

    pub fn notify(&self) {
        self.changed.send_replace(());
    }

    /// Waits until `done` holds; false when it does not within `limit`.
    pub async fn until(&self, limit: Duration, done: impl Fn(&Inner) -> bool) -> bool {
        let mut changed = self.changed.subscribe();
        let look = async {
            while !done(&self.inner()) {
                if changed.changed().await.is_err() {
                    return;
                }
            }
        };
        timeout(limit, look).await.is_ok()
    }

    /// Ends every wait for a runtime in this container, now and later.
    pub fn cancel(&self) {
        self.cancelled.send_replace(true);
    }

    pub fn is_cancelled(&self) -> bool {
        *self.cancelled.borrow()
    }

    /// What `work` gives, unless the container is being stopped: then it is dropped, which ends the runtime.
    pub async fn unless_cancelled<T>(&self, work: impl Future<Output = Result<T>>) -> Result<T> {
        let mut cancelled = self.cancelled.subscribe();
        tokio::select! {
            biased;
            _ = cancelled.wait_for(|c| *c) => Err(self.is_being_stopped()),
            done = work => done,
        }
    }

    pub fn is_being_stopped(&self) -> Error {
        Error::new(
            Kind::Cancelled,
            format!("container {} is being stopped", self.fixed.id),
        )
    }

    /// Init, once it exists.
    pub fn init(&self) -> Option<Child> {
        self.inner().init.child.clone()
    }

    pub fn task_state(&self, exec_id: &str) -> Result<TaskState> {
        let mut inner = self.inner();
        inner.process(exec_id)?;
        let process = inner.execs.get(exec_id).map_or(&inner.init, |e| &e.process);
        Ok(TaskState {
            id: self.fixed.id.clone(),
            exec_id: exec_id.to_owned(),
            bundle: self.fixed.bundle.clone(),
            pid: process.pid(),
            status: inner.status(process),
            stdin: process.streams.stdin.clone(),
            stdout: process.streams.stdout.clone(),
            stderr: process.streams.stderr.clone(),
            terminal: process.streams.terminal,
            exit: match process.phase {
                Phase::Exited(exit) => Some((exit.code, from_unix_nanos(exit.at))),
                _ => None,
            },
        })
    }

    pub async fn wait(&self, exec_id: &str) -> Result<(u32, SystemTime)> {
        let mut exit = self.inner().process(exec_id)?.exit.subscribe();
        let found = exit.wait_for(Option::is_some).await.map(|e| *e);
        match found {
            Ok(Some(ExitRecord { code, at })) => Ok((code, from_unix_nanos(at))),
            _ => Err(Error::new(
                Kind::NotFound,
                format!(
                    "wait for {} {exec_id}: deleted without having run",
                    self.fixed.id
                ),
            )),
        }
    }

    pub fn pids(&self) -> Vec<(u32, String)> {
        let (group, mut known) = {
            let inner = self.inner();
            let mut known = vec![(inner.init.pid(), String::new())];
            let running = inner
                .execs
                .iter()
                .filter(|(_, e)| e.process.phase == Phase::Running);
            known.extend(running.map(|(id, e)| (e.process.pid(), id.clone())));
            // A dead init's pid may belong to somebody else by now.
            (inner.group.clone().filter(|_| !inner.ending), known)
        };
        // What the container forked; a process we know stays in the list wherever it has moved itself.
        for pid in group.map(|g| g.pids()).unwrap_or_default() {
            let pid = pid.unsigned_abs();
            if pid != 0 && known.iter().all(|(p, _)| *p != pid) {
                known.push((pid, String::new()));
            }
        }
        known
    }

    pub fn close_stdin(&self, exec_id: &str) -> Result<()> {
        let mut inner = self.inner();
        let process = inner.process(exec_id)?;
        process.stdin_closed = true;
        if let Some(io) = &process.io {
            io.close_stdin();
        }
        Ok(())
    }

    /// Without a terminal there is nothing to resize: containerd's own shim says yes to that.
    pub fn resize(&self, exec_id: &str, width: u16, height: u16) -> Result<()> {
        let mut inner = self.inner();
        let process = inner.process(exec_id)?;
        process.window = Some((width, height));
        match &process.io {
            Some(io) if !process.has_exited() => io.resize(width, height),
            _ => Ok(()),
        }
    }

    pub fn stats(&self) -> Result<Any> {
        let group = self.inner().group.clone();
        let absent = || {
            Error::new(
                Kind::NotFound,
                format!("read metrics of {}: its cgroup is gone", self.fixed.id),
            )
        };
        let group = group.filter(|g| g.exists()).ok_or_else(absent)?;
        group.metrics()
    }
}

/// The data behind the lock is whole after every step, a panicking one too: each step sets plain fields.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn taken(id: &str) -> Error {
    Error::new(
        Kind::Exists,
        format!("create container {id}: there is one of this id"),
    )
}
