//! StartSandbox as its callers see it: one creation job, and requests that wait for it.
//!
//! The first request starts the job and holds a lease; when the job is done and the lease is still held, the result is
//! that caller's (commit), otherwise it is parked. A request that joins is told the stage and the age shortly before
//! its own deadline; a result that becomes ready while it watches goes to the *next* request, because nobody knows
//! whether a reply sent so late still arrives (docs/retry.md).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, timeout_at};

use super::record::State;
use super::{Phase, Pod, Started, gone, now_nanos};
use crate::clock;
use crate::error::{Error, Kind, Result};

/// How long a request without a deadline watches.
const WATCH_BOUND: Duration = Duration::from_secs(240);

/// The answer goes out this long before the caller's deadline, or 5 % of it where that is less.
const REPLY_MARGIN: Duration = Duration::from_millis(250);

/// One creation under way, or finished and parked.
#[derive(Clone, Debug)]
pub(super) struct Job {
    outcome: watch::Receiver<Option<Outcome>>,
    /// The request that started it still waits.
    claimant: Arc<AtomicBool>,
    waiters: Arc<AtomicUsize>,
    begun: Instant,
    cancel: Arc<watch::Sender<bool>>,
    /// Its pod is being shut down; only the network is still wanted.
    leaving: Arc<AtomicBool>,
    /// Another supervisor of the same pod was quicker.
    second: Arc<AtomicBool>,
}

/// How a creation ended.
#[derive(Clone, Debug)]
pub(super) enum Outcome {
    /// The request that started it got it; others get the live pod.
    Committed,
    /// Nobody was there to take it.
    Parked,
    Failed(Kind, String),
    /// Another supervisor of the same pod is making it.
    Elsewhere,
}

impl Job {
    /// A job and the sender of its outcome; counted as claimed by the caller.
    pub(super) fn new() -> (Self, watch::Sender<Option<Outcome>>) {
        let (sender, outcome) = watch::channel(None);
        let job = Self {
            outcome,
            claimant: Arc::new(AtomicBool::new(true)),
            waiters: Arc::new(AtomicUsize::new(0)),
            begun: Instant::now(),
            cancel: Arc::new(watch::channel(false).0),
            leaving: Arc::new(AtomicBool::new(false)),
            second: Arc::new(AtomicBool::new(false)),
        };
        (job, sender)
    }

    /// The request that started the job still waits for it.
    pub(super) fn is_claimed(&self) -> bool {
        self.claimant.load(Ordering::Relaxed)
    }

    /// Requests that watch.
    pub(super) fn waiters(&self) -> usize {
        self.waiters.load(Ordering::Relaxed)
    }

    /// Asks the job to stop.
    pub(super) fn cancel(&self) {
        self.cancel.send_replace(true);
    }

    /// Somebody asked the job to stop, and undoes what it has done.
    pub(super) fn is_cancelled(&self) -> bool {
        *self.cancel.borrow()
    }

    /// Asks the job to stop before its next step, and to leave the network as it is.
    pub(super) fn leave(&self) {
        self.leaving.store(true, Ordering::Relaxed);
    }

    /// Somebody asked it to.
    pub(super) fn is_leaving(&self) -> bool {
        self.leaving.load(Ordering::Relaxed)
    }

    /// The job ends because another supervisor makes the pod.
    pub(super) fn come_second(&self) {
        self.second.store(true, Ordering::Relaxed);
    }

    /// It ended so.
    pub(super) fn is_second(&self) -> bool {
        self.second.load(Ordering::Relaxed)
    }

    /// Its outcome is known.
    pub(super) fn is_over(&self) -> bool {
        self.outcome.borrow().is_some()
    }

    /// True for this very job.
    pub(super) fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.claimant, &other.claimant)
    }

    /// Resolves when somebody asked the job to stop.
    pub(super) async fn cancelled(&self) {
        let mut cancel = self.cancel.subscribe();
        if cancel.wait_for(|c| *c).await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}

/// The claimant's hold on its job; given back when its request ends, however it ends.
struct Claim(Arc<AtomicBool>);

impl Drop for Claim {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Relaxed);
    }
}

/// A watcher's lease: while it is held, a parked result is not thrown away.
struct Lease(Arc<AtomicUsize>);

impl Lease {
    fn new(job: &Job) -> Self {
        job.waiters.fetch_add(1, Ordering::Relaxed);
        Self(job.waiters.clone())
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

enum Role {
    Claimant(Job, Claim),
    Watcher(Job, Lease),
    /// Fresh, and there is a parked pod for it.
    Claim,
    Live,
}

impl Pod {
    /// StartSandbox. `limit`: what is left of the caller's deadline; `None`: it gave none.
    ///
    /// Errors: `Deadline` with stage and age (the work goes on), `Busy` when the result is ready for the next request
    /// or when an earlier try is being rolled back, the cause's own kind when the creation fails.
    pub async fn start(&self, id: &str, limit: Option<Duration>) -> Result<Started> {
        self.check_sandbox(id)?;
        let limit = limit.unwrap_or(WATCH_BOUND);
        let margin = REPLY_MARGIN.min(limit / 20);
        let reply_at = Instant::now() + limit.saturating_sub(margin);
        let created = matches!(self.lock().phase, Phase::Created);
        if let Some(error) = match created {
            true => self.wait_for_other(reply_at).await,
            false => None,
        } {
            return Err(error);
        }
        match self.join_or_begin(limit)? {
            Role::Live => Ok(self.started()),
            Role::Claim => self.claim().await,
            Role::Claimant(job, _claim) => match self.outcome(&job, reply_at).await? {
                Outcome::Committed => Ok(self.started()),
                Outcome::Parked => Err(ready_for_the_next()),
                Outcome::Failed(kind, text) => Err(Error::new(kind, text)),
                Outcome::Elsewhere => Err(self.came_second(reply_at).await),
            },
            Role::Watcher(job, _lease) => match self.outcome(&job, reply_at).await? {
                Outcome::Committed => Ok(self.started()),
                Outcome::Parked => {
                    if self.config().parking.hold_waiters {
                        // An early error counts as a failure with the kubelet, which then bumps the attempt and
                        // leaves the parked pod behind.
                        let over = self.wait(id);
                        if timeout_at(reply_at, over).await.is_ok() {
                            // Stopped or undone meanwhile: holding on would lose the reply with the supervisor.
                            return Err(self.stopped());
                        }
                    }
                    Err(ready_for_the_next())
                }
                Outcome::Failed(kind, text) => Err(Error::new(kind, text)),
                Outcome::Elsewhere => Err(self.came_second(reply_at).await),
            },
        }
    }

    /// Another supervisor of the same pod had begun, or taken over, a moment before.
    async fn came_second(&self, reply_at: Instant) -> Error {
        let again = || {
            let id = &self.shared.options.group;
            Error::new(
                Kind::Busy,
                format!(
                    "start sandbox {id}: another sandbox of the same pod came first; try again"
                ),
            )
        };
        // The job gives the pod back when it has put its own things away.
        drop(self.shared.work.lock().await);
        self.wait_for_other(reply_at).await.unwrap_or_else(again)
    }

    /// Takes the parked pod for this request, before another supervisor takes its network.
    async fn claim(&self) -> Result<Started> {
        let shared = self.shared.journal.with(|r| r.pod_key().is_some());
        if shared && !self.network_record().claim(self.config()).await? {
            return Err(self.network_taken());
        }
        let claimed = {
            let mut inner = self.lock();
            match inner.phase {
                // Another request was as fast as this one.
                Phase::Ready => false,
                Phase::Parked => {
                    inner.phase = Phase::Ready;
                    inner.unclaimed = false;
                    true
                }
                _ => return Err(self.stopped()),
            }
        };
        if claimed {
            tracing::info!(pod = %self.shared.options.group, "a parked pod was claimed");
            self.shared.journal.note(|r| {
                r.state = State::Ready;
                r.ready_at = Some(now_nanos());
            });
        }
        Ok(self.started())
    }

    fn network_taken(&self) -> Error {
        let holder = self.network_record().holder();
        Error::new(
            Kind::State,
            format!(
                "start sandbox {}: sandbox {} of the same pod has taken its network over; remove this one",
                self.shared.options.group,
                holder.map(|h| h.sandbox_id).unwrap_or_default()
            ),
        )
    }

    /// What this request is to the creation; claims a parked pod, begins one where none is under way.
    fn join_or_begin(&self, limit: Duration) -> Result<Role> {
        let mut inner = self.lock();
        match inner.phase.clone() {
            Phase::Ready => Ok(Role::Live),
            // Its caller has left: it must not be the one to own the pod.
            Phase::Parked if limit.is_zero() => Err(ready_for_the_next()),
            Phase::Parked => Ok(Role::Claim),
            Phase::Starting(job) => {
                if matches!(
                    *job.outcome.borrow(),
                    Some(Outcome::Failed(..) | Outcome::Elsewhere)
                ) {
                    let (stage, _) = self.shared.journal.stage();
                    return Err(Error::new(
                        Kind::Busy,
                        format!(
                            "start sandbox {}: an earlier try failed and is being rolled back (step {stage}, {} s); try again",
                            self.shared.options.group,
                            job.begun.elapsed().as_secs()
                        ),
                    ));
                }
                let lease = Lease::new(&job);
                Ok(Role::Watcher(job, lease))
            }
            Phase::Created => {
                let plan = inner.plan.clone().ok_or_else(gone)?;
                let (job, sender) = Job::new();
                inner.phase = Phase::Starting(job.clone());
                drop(inner);
                let pod = self.clone();
                let work = job.clone();
                tokio::spawn(async move { pod.run_creation(plan, work, sender).await });
                let claim = Claim(job.claimant.clone());
                Ok(Role::Claimant(job, claim))
            }
            Phase::Down | Phase::Stopping | Phase::Stopped => Err(self.stopped()),
            Phase::Empty | Phase::TaskOnly | Phase::Ending => Err(gone()),
        }
    }

    async fn outcome(&self, job: &Job, reply_at: Instant) -> Result<Outcome> {
        let mut outcome = job.outcome.clone();
        match timeout_at(reply_at, outcome.wait_for(Option::is_some)).await {
            Ok(Ok(seen)) => (*seen).clone().ok_or_else(gone),
            // The sender is only dropped without a value when the job itself panicked.
            Ok(Err(_)) => Err(Error::new(
                Kind::Other,
                "create the pod: the job ended without an outcome; see the supervisor's log",
            )),
            Err(_) => {
                let (stage, _) = self.shared.journal.stage();
                Err(Error::new(
                    Kind::Deadline,
                    format!(
                        "start sandbox {}: still at stage {stage} after {:.1} s in supervisor {}; the work goes on, ask again to join it",
                        self.shared.options.group,
                        job.begun.elapsed().as_secs_f64(),
                        std::process::id()
                    ),
                ))
            }
        }
    }

    pub(super) fn stopped(&self) -> Error {
        Error::new(
            Kind::State,
            format!(
                "start sandbox {}: it was stopped; remove it and create it anew",
                self.shared.options.group
            ),
        )
    }

    fn started(&self) -> Started {
        self.shared.journal.with(|r| Started {
            pid: r.infra.and_then(|i| u32::try_from(i.pid).ok()).unwrap_or(0),
            created_at: clock::from_unix_nanos(r.created_at),
        })
    }
}

pub(super) fn ready_for_the_next() -> Error {
    Error::new(Kind::Busy, "start sandbox: it is ready, retry to take it")
}
