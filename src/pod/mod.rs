//! The sandbox of this supervisor: its life from CreateSandbox to ShutdownSandbox.
//!
//! Owns the one [`Journal`], the containers, and the order of work: creation, stop and shutdown each run as a job of
//! the pod's own (law 1), one at a time. Requests only wait for a job; dropping a request drops the wait and nothing
//! else. Queries read the journal's memory and never wait (law 7).

pub mod beside;
mod build;
pub mod gc;
mod handover;
pub mod history;
mod idle;
mod info;
pub mod join;
pub mod journal;
mod keeper;
mod leaving;
mod parking;
pub mod plan;
pub mod record;
mod removal;
mod report;
mod rescue;
pub mod resources;
mod teardown;
mod told;
mod update;

use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use tokio::sync::watch;

use crate::cgroup::{Group, Layout};
use crate::clock;
use crate::config::Config;
use crate::container::{Containers, CreateRequest, Events, PodContext};
use crate::error::{Error, Kind, Result};
use crate::failpoint;
use crate::network::NetworkRecord;
use crate::process::{Identity, Reaper};
use crate::undo::{Patience, Progress};
use protobuf::well_known_types::any::Any;

pub use self::info::Status;
pub use self::rescue::{Deleted, Parked, keep_abandoned, rescue, stop_dead};

use self::join::Job;
use self::journal::Journal;
use self::plan::Plan;
use self::record::{Record, State};

/// What `serve` knows when it starts.
#[derive(Debug, Clone)]
pub struct PodOptions {
    /// The configuration file.
    pub config: Arc<Config>,
    /// containerd namespace.
    pub namespace: String,
    /// Group id: names the runtime directory and is the sandbox id where there is a sandbox.
    pub group: String,
    /// Bundle that `start` ran in.
    pub bundle: PathBuf,
    /// Our socket, `unix:///…`.
    pub address: String,
}

/// What StartSandbox answers.
#[derive(Debug, Clone)]
pub struct Started {
    /// Host pid of the infra process.
    pub pid: u32,
    /// When CreateSandbox was accepted.
    pub created_at: SystemTime,
}

/// Handle of the one pod of this supervisor. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Pod {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    options: PodOptions,
    reaper: Reaper,
    containers: Containers,
    journal: Journal,
    inner: Mutex<Inner>,
    /// Held by the one job that changes the pod: creation with its roll-back, stop, shutdown.
    work: tokio::sync::Mutex<()>,
    /// Exit of the infra process (or the end of a pod that never had one).
    exit: watch::Sender<Option<(u32, SystemTime)>>,
    ended: watch::Sender<bool>,
    /// The process itself has to go: SIGTERM.
    quit: watch::Sender<bool>,
    /// What the undo under way is at.
    undoing: Progress,
    /// A task that retries what a stop or the infra process' end has left is at work.
    retrying: AtomicBool,
}

#[derive(Debug)]
struct Inner {
    /// Changed by [`Inner::enter`] only.
    phase: Phase,
    /// Told of every phase.
    entered: watch::Sender<()>,
    plan: Option<Arc<Plan>>,
    digest: String,
    /// Nobody has been given the pod yet: it was parked, and if its infra process ends meanwhile it still expires.
    unclaimed: bool,
    /// Somebody will tell of the infra process' exit.
    infra_watched: bool,
    /// The creation that goes on for its network's sake alone, after the pod was shut down.
    left: Option<Job>,
}

impl Inner {
    fn enter(&mut self, phase: Phase) {
        self.phase = phase;
        self.entered.send_replace(());
    }
}

/// Where the pod is in its life; finer than the record's state, for deciding what a request may do.
#[derive(Debug, Clone)]
enum Phase {
    /// Nothing was ever asked of us.
    Empty,
    /// Containers without a sandbox.
    TaskOnly,
    /// CreateSandbox done.
    Created,
    /// A creation job is at work, or rolling back.
    Starting(Job),
    Ready,
    /// Finished, unclaimed.
    Parked,
    /// The infra process ended by itself.
    Down,
    Stopping,
    Stopped,
    Ending,
}

impl Pod {
    /// A pod that nothing was asked of yet; touches no file.
    pub fn new(options: PodOptions, reaper: Reaper, events: Arc<dyn Events>) -> Result<Self> {
        let mut record = journal::blank(&options.namespace, &options.group);
        record.supervisor = Some(Identity::own()?);
        record.address = options.address.clone();
        record.bundle = options.bundle.clone();
        let dir = options
            .config
            .sandbox_dir(&options.namespace, &options.group);
        let journal = Journal::new(dir, record);
        let containers = Containers::new(
            options.config.clone(),
            options.namespace.clone(),
            reaper.clone(),
            Arc::new(journal.clone()),
            events,
        );
        let shared = Shared {
            options,
            reaper,
            containers,
            journal,
            inner: Mutex::new(Inner {
                phase: Phase::Empty,
                entered: watch::Sender::new(()),
                plan: None,
                digest: String::new(),
                unclaimed: false,
                infra_watched: false,
                left: None,
            }),
            work: tokio::sync::Mutex::new(()),
            exit: watch::channel(None).0,
            ended: watch::channel(false).0,
            quit: watch::channel(false).0,
            undoing: Progress::default(),
            retrying: AtomicBool::new(false),
        };
        Ok(Self {
            shared: Arc::new(shared),
        })
    }

    /// The containers.
    pub fn containers(&self) -> &Containers {
        &self.shared.containers
    }

    /// CreateSandbox: checks the request, records it, makes directories and pod files. The same request again is fine;
    /// another one for the same id is `Exists`.
    pub async fn create(&self, request: plan::Request) -> Result<()> {
        self.check_id(&request.id)?;
        let plan = Plan::new(self.config(), request)?;
        let digest = plan.digest()?;
        // Before the queue: a retry must not wait behind the very creation that it comes to join.
        if self.is_created(&digest)? {
            return Ok(());
        }
        let _work = self.shared.work.lock().await;
        if self.is_created(&digest)? {
            return Ok(());
        }
        self.take_directory().await?;
        self.prepare(&plan, &digest)?;
        let mut inner = self.lock();
        inner.enter(Phase::Created);
        inner.plan = Some(Arc::new(plan));
        inner.digest = digest;
        Ok(())
    }

    /// Task.Create: in a ready pod, or in a supervisor that has no sandbox. `limit`: what is left of the caller's
    /// deadline.
    pub async fn create_container(
        &self,
        request: CreateRequest,
        limit: Option<Duration>,
    ) -> Result<u32> {
        let (pod, id) = (self.clone(), request.id.clone());
        let admit = async move { pod.admit(&id).await };
        self.shared
            .containers
            .create_within(request, limit, admit)
            .await
    }

    /// What the pod gives the container `id`, if it takes containers.
    async fn admit(&self, id: &str) -> Result<Option<PodContext>> {
        self.become_task_only().await?;
        // Nothing waits between this look and the container's place in the table: a stop either refuses it here or
        // finds it there.
        let phase = self.lock().phase.clone();
        let why = match phase {
            Phase::Ready => return Ok(Some(self.pod_context())),
            Phase::TaskOnly => return Ok(None),
            Phase::Ending => return Err(gone()),
            Phase::Parked => {
                "the pod is parked, nobody has claimed it; start the sandbox again first"
            }
            _ => "the pod is not ready",
        };
        Err(Error::new(
            Kind::State,
            format!("create container {id}: {why}"),
        ))
    }

    /// True when this request made the sandbox, or another one did the same; an error when another one did otherwise.
    fn is_created(&self, digest: &str) -> Result<bool> {
        let inner = self.lock();
        match inner.phase {
            Phase::Empty => Ok(false),
            Phase::TaskOnly => Err(self.busy_with("containers without a sandbox")),
            Phase::Ending => Err(self.being_removed("create")),
            _ if inner.digest == digest => Ok(true),
            _ => Err(self.other_request(&inner.digest, digest)),
        }
    }

    /// A supervisor whose first request is a container has no sandbox, then or later.
    async fn become_task_only(&self) -> Result<()> {
        if !self.is_empty() {
            return Ok(());
        }
        // Boxed: it is large, and not for the containers that come later.
        Box::pin(async {
            let _work = self.shared.work.lock().await;
            if !self.is_empty() {
                return Ok(());
            }
            self.take_directory().await?;
            self.shared.journal.update(|r| r.state = State::TaskOnly)?;
            self.lock().enter(Phase::TaskOnly);
            Ok(())
        })
        .await
    }

    fn is_empty(&self) -> bool {
        matches!(self.lock().phase, Phase::Empty)
    }

    /// WaitSandbox: exit status and time of the infra process.
    pub async fn wait(&self, id: &str) -> Result<(u32, SystemTime)> {
        self.check_sandbox(id)?;
        let mut exit = self.shared.exit.subscribe();
        let seen = exit.wait_for(Option::is_some).await.map_err(|_| gone())?;
        (*seen).ok_or_else(gone)
    }

    /// The pod's cgroup in containerd's metrics message.
    pub fn metrics(&self, id: &str) -> Result<Any> {
        self.check_sandbox(id)?;
        let path = self
            .shared
            .journal
            .with(|r| r.cgroup.clone().or_else(|| r.infra_cgroup.clone()));
        let path = path.ok_or_else(|| {
            Error::new(
                Kind::NotFound,
                format!("read the cgroup of sandbox {id}: it has none yet"),
            )
        })?;
        Group::from_spec(&Layout::detect()?, &path)?.metrics()
    }

    /// A copy of the record.
    pub fn record(&self) -> Record {
        self.shared.journal.read()
    }

    /// True when `id` names the sandbox of this supervisor (and there is one).
    pub fn is_sandbox(&self, id: &str) -> bool {
        self.check_sandbox(id).is_ok()
    }

    /// Resolves when the supervisor should leave.
    pub async fn ended(&self) {
        let mut ended = self.shared.ended.subscribe();
        // An error means that the pod itself is gone: that is an end, too.
        let _ = ended.wait_for(|e| *e).await;
    }

    /// State for SIGUSR1's dump: phase, stage, containers. Takes no lock for longer than a copy.
    pub fn dump(&self) -> String {
        let at = self.shared.journal.progress();
        let phase = format!("{:?}", self.lock().phase);
        let phase = phase
            .split(['(', ' '])
            .next()
            .unwrap_or_default()
            .to_lowercase();
        let undoing = self.shared.undoing.now();
        let undoing = undoing.map_or_else(String::new, |now| format!(" undoing=\"{now}\""));
        format!(
            "key={} phase={phase} stage={} stage_age={:.1}s age={:.1}s waiters={} working={} containers={} creations={} joined={:?}{undoing}",
            self.key(),
            told::step(&at),
            at.stage_age.as_secs_f64(),
            at.age.as_secs_f64(),
            self.shared.journal.waiting(),
            self.shared.work.try_lock().is_err(),
            self.shared.containers.list().join(","),
            creations(&self.shared.containers),
            self.shared.containers.joined(),
        )
    }

    /// Sends, in the background, what pods that are gone still owe on this node.
    pub fn look_after_the_node(&self) {
        let pod = self.clone();
        tokio::spawn(async move { gc::retry_due(pod.config(), &pod.shared.reaper).await });
    }

    /// The settings it was started with.
    pub fn config(&self) -> &Config {
        &self.shared.options.config
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.shared
            .inner
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn network_record(&self) -> NetworkRecord {
        let config = self.config();
        self.shared.journal.with(|r| r.network_record(config))
    }

    /// `NotFound` unless `id` is the one this supervisor serves, whether its sandbox was created or not.
    pub fn check_id(&self, id: &str) -> Result<()> {
        crate::id::check("sandbox id", id)?;
        if id == self.shared.options.group {
            return Ok(());
        }
        Err(Error::new(
            Kind::NotFound,
            format!(
                "find sandbox {id}: this supervisor is that of {}",
                self.shared.options.group
            ),
        ))
    }

    fn check_sandbox(&self, id: &str) -> Result<()> {
        self.check_id(id)?;
        match self.lock().phase {
            Phase::Empty | Phase::TaskOnly => Err(Error::new(
                Kind::NotFound,
                format!("find sandbox {id}: it was not created"),
            )),
            _ => Ok(()),
        }
    }

    /// Our runtime directory; what a supervisor that was killed left in it is undone first.
    async fn take_directory(&self) -> Result<()> {
        let o = &self.shared.options;
        let dir = self.shared.journal.dir();
        failpoint::hit("pod.take.before")?;
        journal::make_dir(&o.config.runtime_root, dir)?;
        failpoint::hit("pod.take.after")?;
        match record::read(dir) {
            Err(error) if error.is_gone() => {
                self.shared.journal.take();
                return Ok(());
            }
            // Damaged: what it belonged to may still be there, and is found by name.
            Err(error) => tracing::warn!(%error, "the journal of an earlier pod cannot be read"),
            Ok(old) if old.is_supervised() && !self.is_own(&old) => {
                let pid = old.supervisor.map_or(0, |s| s.pid);
                return Err(Error::new(
                    Kind::Exists,
                    format!(
                        "take {}: supervisor {pid} has it; remove that pod first",
                        dir.display()
                    ),
                ));
            }
            Ok(_) => {}
        }
        tracing::warn!(pod = %o.group, "a supervisor that is gone left a pod behind; undoing it first");
        rescue(
            &o.config,
            &self.shared.reaper,
            &o.namespace,
            &o.group,
            RESCUE_BUDGET,
            Parked::Stays,
        )
        .await?;
        journal::make_dir(&o.config.runtime_root, dir)?;
        self.shared.journal.take();
        Ok(())
    }

    fn is_own(&self, record: &Record) -> bool {
        record.supervisor == self.shared.journal.with(|r| r.supervisor)
    }

    fn pod_context(&self) -> PodContext {
        self.shared.journal.with(info::pod_context)
    }

    fn other_request(&self, old: &str, new: &str) -> Error {
        let short = |d: &str| d.chars().take(12).collect::<String>();
        Error::new(
            Kind::Exists,
            format!(
                "create sandbox {}: it exists, made by request {}; this is request {}: remove it first or use another id",
                self.shared.options.group,
                short(old),
                short(new)
            ),
        )
    }

    fn busy_with(&self, what: &str) -> Error {
        Error::new(
            Kind::Exists,
            format!(
                "create sandbox {}: this supervisor has {what}",
                self.shared.options.group
            ),
        )
    }
}

/// How long undoing what a killed supervisor left may hold up the request that found it.
const RESCUE_BUDGET: Duration = Duration::from_secs(60);

/// Tries of an undo: first again after half a second, at most a minute apart.
fn patience(budget: Duration) -> Patience {
    Patience {
        budget,
        first_delay: Duration::from_millis(500),
        max_delay: Duration::from_secs(60),
    }
}

fn gone() -> Error {
    Error::new(Kind::Gone, "use the sandbox: it is being removed")
}

fn now_nanos() -> u64 {
    clock::unix_nanos(SystemTime::now())
}

/// For the dump: `c1:runtime-create:3.2s` each.
fn creations(containers: &Containers) -> String {
    let creations = containers.creations();
    let told = creations
        .iter()
        .map(|c| format!("{}:{}:{:.1}s", c.id, c.stage, c.age.as_secs_f64()));
    told.collect::<Vec<_>>().join(",")
}
