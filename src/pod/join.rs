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

use super::history::Event;
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
}

/// How a creation ended.
#[derive(Clone, Debug)]
pub(super) enum Outcome {
    /// The request that started it got it; others get the live pod.
    Committed,
    /// Nobody was there to take it.
    Parked,
    Failed(Kind, String),
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
        let role = self.join_or_begin(limit)?;
        let _waiting = self.wait_here();
        match role {
            Role::Live => Ok(self.started()),
            Role::Claimant(job, _claim) => match self.outcome(&job, reply_at).await? {
                Outcome::Committed => Ok(self.started()),
                Outcome::Parked => Err(self.ready_for_the_next()),
                Outcome::Failed(kind, text) => Err(Error::new(kind, text)),
            },
            Role::Watcher(job, _lease) => {
                self.note_join();
                match self.outcome(&job, reply_at).await? {
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
                    Err(self.ready_for_the_next())
                }
                Outcome::Failed(kind, text) => Err(Error::new(kind, text)),
            }},
        }
    }

    /// What this request is to the creation; claims a parked pod, begins one where none is under way.
    fn join_or_begin(&self, limit: Duration) -> Result<Role> {
        let mut inner = self.lock();
        match inner.phase.clone() {
            Phase::Ready => Ok(Role::Live),
            // Its caller has left: it must not be the one to own the pod.
            Phase::Parked if limit.is_zero() => {
                drop(inner);
                Err(self.ready_for_the_next())
            }
            Phase::Parked => {
                inner.phase = Phase::Ready;
                drop(inner);
                self.unpark("claimed");
                tracing::info!(key = self.key(), "a parked pod was claimed");
                self.shared.journal.happened(Event::Claimed, "", None, false);
                self.shared.journal.note(|r| {
                    r.state = State::Ready;
                    r.ready_at = Some(now_nanos());
                });
                Ok(Role::Live)
            }
            Phase::Starting(job) => {
                if matches!(*job.outcome.borrow(), Some(Outcome::Failed(..))) {
                    return Err(self.rolling_back());
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
            Phase::Ending => Err(self.being_removed("start")),
            Phase::Empty | Phase::TaskOnly => Err(gone()),
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
            Err(_) => Err(self.still_at(job.begun.elapsed())),
        }
    }

    fn started(&self) -> Started {
        self.shared.journal.with(|r| Started {
            pid: r.infra.and_then(|i| u32::try_from(i.pid).ok()).unwrap_or(0),
            created_at: clock::from_unix_nanos(r.created_at),
        })
    }
}
