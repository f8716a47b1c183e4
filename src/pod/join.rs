//! StartSandbox as its callers see it: one creation job, and requests that wait for it.
//!
//! The first request starts the job and holds a lease; when the job is done and the lease is still held, the result is
//! that caller's (commit), otherwise it is parked. A request that joins is told the stage and the age shortly before
//! its own deadline; a result that becomes ready while it watches goes to the *next* request, because nobody knows
//! whether a reply sent so late still arrives (docs/retry.md).

use std::time::Duration;

use super::history::Event;
use super::record::State;
use super::{Phase, Pod, Started, gone, now_nanos};
use crate::clock;
use crate::error::Result;
use crate::job::{self, Ask, Waiter};

/// The creation of a pod: the pod itself is its result.
pub(super) type Job = job::Job<()>;

enum Role {
    Waiter(Waiter<()>),
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
        if let Role::Waiter(waiter) = self.join_or_begin(&ask)? {
            let _waiting = self.wait_here();
            let over = async {
                // Stopped or undone meanwhile: holding on would lose the reply with the supervisor.
                let _ = self.wait(id).await;
                self.stopped()
            };
            let stage = || self.shared.journal.progress().stage;
            let answer = waiter.answer(&ask, stage, over).await;
            answer.map_err(|error| self.finer(waiter.job(), error))?;
        }
        Ok(self.started())
    }

    /// What this request is to the creation; claims a parked pod, begins one where none is under way.
    fn join_or_begin(&self, ask: &Ask) -> Result<Role> {
        let mut inner = self.lock();
        match inner.phase.clone() {
            Phase::Ready => Ok(Role::Live),
            // Its caller has left: it must not be the one to own the pod.
            Phase::Parked if ask.is_late => Err(self.ready_for_the_next()),
            Phase::Parked => {
                inner.phase = Phase::Ready;
                drop(inner);
                self.unpark("claimed");
                tracing::info!(key = self.key(), "a parked pod was claimed");
                self.shared
                    .journal
                    .happened(Event::Claimed, "", None, false);
                self.shared.journal.note(|r| {
                    r.state = State::Ready;
                    r.ready_at = Some(now_nanos());
                });
                Ok(Role::Live)
            }
            Phase::Starting(job) => {
                if job.rolling_back(&ask.what, "").is_some() {
                    return Err(self.rolling_back());
                }
                let waiter = job.watch();
                self.note_join();
                Ok(Role::Waiter(waiter))
            }
            Phase::Created => {
                let plan = inner.plan.clone().ok_or_else(gone)?;
                let (job, waiter) = Job::begin();
                inner.phase = Phase::Starting(job.clone());
                drop(inner);
                let (pod, work) = (self.clone(), job.clone());
                job.run(async move { pod.run_creation(plan, work).await });
                Ok(Role::Waiter(waiter))
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
