//! StartSandbox as its callers see it: one creation job, and requests that wait for it.
//!
//! The first request starts the job and holds a lease; when the job is done and the lease is still held, the result is
//! that caller's (commit), otherwise it is parked. A request that joins is told the stage and the age shortly before
//! its own deadline; a result that becomes ready while it watches goes to the *next* request, because nobody knows
//! whether a reply sent so late still arrives (docs/retry.md).

use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::time::Instant;

use super::history::Event;
use super::record::State;
use super::{Phase, Pod, Started, gone, now_nanos};
use crate::clock;
use crate::error::{Error, Kind, Result};
use crate::job::{self, Ask, Waiter};

/// The creation of a pod: the pod itself is its result.
pub(super) type Work = job::Job<()>;

/// The same, with how it stands to other supervisors of the pod.
#[derive(Clone, Debug)]
pub(super) struct Job {
    work: Work,
    /// Its pod is being shut down; only the network is still wanted.
    leaving: Arc<AtomicBool>,
    /// Another supervisor of the same pod was quicker.
    second: Arc<AtomicBool>,
}

impl Job {
    fn begin() -> (Self, Waiter<()>) {
        let (work, waiter) = Work::begin();
        let job = Self {
            work,
            leaving: Arc::default(),
            second: Arc::default(),
        };
        (job, waiter)
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
        self.work.phase() != job::Phase::Working
    }
}

impl Deref for Job {
    type Target = Work;

    fn deref(&self) -> &Work {
        &self.work
    }
}

enum Role {
    /// Waits for the job, which it began or joined.
    Waiter(Job, Waiter<()>),
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
        let hold = self.config().parking.hold_waiters;
        let ask = Ask::new(format!("start sandbox {id}"), limit, hold);
        let reply_at = ask.reply_at.unwrap_or_else(Instant::now);
        let created = matches!(self.lock().phase, Phase::Created);
        if created && let Some(error) = self.wait_for_other(reply_at).await {
            return Err(error);
        }
        match self.join_or_begin(&ask)? {
            Role::Live => {}
            Role::Claim => self.claim().await?,
            Role::Waiter(job, waiter) => {
                let _waiting = self.wait_here();
                let over = async {
                    // Stopped or undone meanwhile: holding on would lose the reply with the supervisor.
                    let _ = self.wait(id).await;
                    self.stopped()
                };
                let stage = || self.shared.journal.progress().stage;
                match waiter.answer(&ask, stage, over).await {
                    Ok(()) => {}
                    Err(_) if job.is_second() => return Err(self.came_second(reply_at).await),
                    Err(error) => return Err(self.finer(&job, error)),
                }
            }
        }
        Ok(self.started())
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
    async fn claim(&self) -> Result<()> {
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
                    inner.enter(Phase::Ready);
                    true
                }
                _ => return Err(self.stopped()),
            }
        };
        if claimed {
            self.unpark("claimed");
            tracing::info!(key = self.key(), "a parked pod was claimed");
            self.shared
                .journal
                .happened(Event::Claimed, "", None, false);
            self.shared.journal.note(|r| {
                r.state = State::Ready;
                r.ready_at = Some(now_nanos());
            });
        }
        Ok(())
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
    fn join_or_begin(&self, ask: &Ask) -> Result<Role> {
        let mut inner = self.lock();
        match inner.phase.clone() {
            Phase::Ready => Ok(Role::Live),
            // Its caller has left: it must not be the one to own the pod.
            Phase::Parked if ask.is_late => Err(self.ready_for_the_next()),
            Phase::Parked => Ok(Role::Claim),
            Phase::Starting(job) => {
                if job.rolling_back(&ask.what, "").is_some() {
                    return Err(self.rolling_back());
                }
                let waiter = job.watch();
                self.note_join();
                Ok(Role::Waiter(job, waiter))
            }
            Phase::Created => {
                let plan = inner.plan.clone().ok_or_else(gone)?;
                let (job, waiter) = Job::begin();
                inner.enter(Phase::Starting(job.clone()));
                drop(inner);
                let (pod, work) = (self.clone(), job.clone());
                job.run(async move { pod.run_creation(plan, work).await });
                Ok(Role::Waiter(job, waiter))
            }
            Phase::Down | Phase::Stopping | Phase::Stopped => Err(self.stopped()),
            Phase::Ending => Err(self.being_removed("start")),
            Phase::Empty | Phase::TaskOnly => Err(gone()),
        }
    }

    fn started(&self) -> Started {
        self.shared.journal.with(|r| Started {
            pid: r.infra.and_then(|i| u32::try_from(i.pid).ok()).unwrap_or(0),
            created_at: clock::from_unix_nanos(r.created_at),
        })
    }
}
