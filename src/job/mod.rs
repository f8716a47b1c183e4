//! Work that outlives the requests which wait for it: who began it, who watches, and whose its result is.
//!
//! Owns the state of one piece of work ([`Job`]) and the hold that a request has on it ([`Waiter`]): dropping the hold,
//! for whatever reason, ends a wait and nothing else. Promises that a result goes to the one who began the work if he is
//! still there and is parked otherwise, that a parked result is either taken or thrown away, once, and that it is not
//! thrown away while somebody watches. Does no work of its own and must never know what kind of work it is
//! (docs/retry.md says what the callers are told).

mod sync;
mod wait;

use std::fmt;
use std::time::Duration;

use tokio::time::Instant;

use crate::error::{Error, Kind};
use sync::{Arc, Mutex, MutexGuard, PoisonError, watch};

pub use wait::Ask;

/// One piece of work under way, or its result. Cheap to clone; all clones are the same job.
pub struct Job<T> {
    shared: Arc<Shared<T>>,
}

struct Shared<T> {
    begun: Instant,
    state: Mutex<State<T>>,
    /// Sent after every change of the state.
    changed: watch::Sender<()>,
}

struct State<T> {
    phase: Phase<T>,
    /// Whoever began it still waits.
    claimed: bool,
    /// Others that wait.
    watchers: usize,
    cancelled: bool,
    /// What a failed or thrown away job did is undone.
    undone: bool,
    stage: &'static str,
    stage_since: Instant,
}

/// How far a job is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Phase<T> {
    /// Under way.
    Working,
    /// Somebody has the result; others may be told it.
    Committed(T),
    /// Finished, and nobody was there to take it.
    Parked(T),
    /// Failed, of this kind and with this text; see [`Job::is_undone`].
    Failed(Kind, String),
    /// A parked result that was thrown away.
    Gone,
}

/// A request's hold on a job: a watched result is not thrown away, and one whose beginner holds on is his.
pub struct Waiter<T> {
    job: Job<T>,
    began: bool,
}

impl<T> State<T> {
    fn settle(&mut self, result: T, taken: bool) -> bool {
        self.phase = match taken {
            true => Phase::Committed(result),
            false => Phase::Parked(result),
        };
        taken
    }
}

impl<T> Clone for Job<T> {
    fn clone(&self) -> Self {
        Self {
            shared: Arc::clone(&self.shared),
        }
    }
}

impl<T> fmt::Debug for Job<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.state();
        f.debug_struct("Job")
            .field("age", &self.age())
            .field("stage", &state.stage)
            .field("watchers", &state.watchers)
            .finish_non_exhaustive()
    }
}

impl<T> fmt::Debug for Waiter<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Waiter")
            .field("job", &self.job)
            .field("began", &self.began)
            .finish()
    }
}

impl<T> Job<T> {
    /// A job, and the hold of the request that begins it.
    pub fn begin() -> (Self, Waiter<T>) {
        let now = Instant::now();
        let state = State {
            phase: Phase::Working,
            claimed: true,
            watchers: 0,
            cancelled: false,
            undone: false,
            stage: "begin",
            stage_since: now,
        };
        let job = Self {
            shared: Arc::new(Shared {
                begun: now,
                state: Mutex::new(state),
                changed: watch::Sender::new(()),
            }),
        };
        let waiter = Waiter {
            job: job.clone(),
            began: true,
        };
        (job, waiter)
    }

    /// The hold of a request that joins.
    pub fn watch(&self) -> Waiter<T> {
        self.state().watchers += 1;
        Waiter {
            job: self.clone(),
            began: false,
        }
    }

    /// Requests that joined and still wait.
    pub fn watchers(&self) -> usize {
        self.state().watchers
    }

    /// Whoever began it still waits.
    pub fn is_claimed(&self) -> bool {
        self.state().claimed
    }

    /// True for this very job.
    pub fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.shared, &other.shared)
    }

    /// Time since it began.
    pub fn age(&self) -> Duration {
        self.shared.begun.elapsed()
    }

    /// The work has come to `stage`; answers the stage that ended and how long it took.
    pub fn enter(&self, stage: &'static str) -> (&'static str, Duration) {
        let mut state = self.state();
        let took = state.stage_since.elapsed();
        state.stage_since = Instant::now();
        (std::mem::replace(&mut state.stage, stage), took)
    }

    /// Where the work is, and for how long.
    pub fn stage(&self) -> (&'static str, Duration) {
        let state = self.state();
        (state.stage, state.stage_since.elapsed())
    }

    /// The work has failed and is going to be undone: everybody who waits is told.
    pub fn fail(&self, kind: Kind, text: impl Into<String>) {
        let phase = Phase::Failed(kind, text.into());
        self.change(|state| state.phase = phase);
    }

    /// What a failed or thrown away job did is undone: the next request may begin anew.
    pub fn end(&self) {
        self.change(|state| state.undone = true);
    }

    /// A failed or thrown away job with nothing left to undo.
    pub fn is_undone(&self) -> bool {
        self.state().undone
    }

    /// Asks the work to stop.
    pub fn cancel(&self) {
        self.change(|state| state.cancelled = true);
    }

    /// Somebody asked the work to stop; it undoes what it has done.
    pub fn is_cancelled(&self) -> bool {
        self.state().cancelled
    }

    /// Resolves when somebody asked the work to stop.
    pub async fn cancelled(&self) {
        self.until(|state| state.cancelled.then_some(())).await;
    }

    /// Resolves when whoever began it has left.
    pub async fn unclaimed(&self) {
        self.until(|state| (!state.claimed).then_some(())).await;
    }

    /// Throws a parked result away, if nobody waits (or `even_if_watched`). True: it is the caller's to undo.
    pub fn discard(&self, even_if_watched: bool) -> bool {
        self.change(|state| {
            let parked = matches!(state.phase, Phase::Parked(_));
            let watched = state.claimed || state.watchers > 0;
            let gone = parked && (even_if_watched || !watched);
            if gone {
                state.phase = Phase::Gone;
            }
            gone
        })
    }

    /// Resolves when `look` finds something in the state.
    async fn until<R>(&self, look: impl Fn(&State<T>) -> Option<R>) -> R {
        let mut changed = self.shared.changed.subscribe();
        loop {
            if let Some(found) = look(&self.state()) {
                return found;
            }
            // The sender is ours and outlives this wait.
            let _ = changed.changed().await;
        }
    }

    fn change<R>(&self, step: impl FnOnce(&mut State<T>) -> R) -> R {
        let result = step(&mut self.state());
        self.shared.changed.send_replace(());
        result
    }

    /// Whole after every step, a panicking one too: each step sets plain fields.
    fn state(&self) -> MutexGuard<'_, State<T>> {
        self.shared
            .state
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T: Clone> Job<T> {
    /// How far it is.
    pub fn phase(&self) -> Phase<T> {
        self.state().phase.clone()
    }

    /// The work is done: true when whoever began it is there to take the result, else it is parked.
    pub fn settle(&self, result: T) -> bool {
        self.change(|state| state.settle(result, state.claimed))
    }

    /// The same for a result that is nothing to lose: whoever waits is given it, who only watches too.
    pub fn settle_for_all(&self, result: T) -> bool {
        self.change(|state| state.settle(result, state.claimed || state.watchers > 0))
    }

    /// Takes a parked result; from here on it is somebody's. `None`: there is none.
    pub fn take(&self) -> Option<T> {
        self.change(|state| {
            let Phase::Parked(result) = &state.phase else {
                return None;
            };
            let result = result.clone();
            state.phase = Phase::Committed(result.clone());
            Some(result)
        })
    }

    /// What a request hears that comes while the job undoes itself; `None` when it does not.
    pub fn rolling_back(&self, what: &str, step: &str) -> Option<Error> {
        let state = self.state();
        let why = match state.phase {
            _ if state.undone => return None,
            Phase::Failed(..) => "an earlier try failed and is being rolled back",
            Phase::Gone => "an earlier result that nobody took is being undone",
            _ => return None,
        };
        Some(Error::new(
            Kind::Busy,
            format!(
                "{what}: {why} (step {step}, {} s); try again",
                self.age().as_secs()
            ),
        ))
    }
}

impl<T> Waiter<T> {
    /// The job it holds on to.
    pub fn job(&self) -> &Job<T> {
        &self.job
    }
}

impl<T> Drop for Waiter<T> {
    fn drop(&mut self) {
        let began = self.began;
        self.job.change(|state| match began {
            true => state.claimed = false,
            false => state.watchers = state.watchers.saturating_sub(1),
        });
    }
}

/// What a request hears whose result became ready while it watched, or that has no time left to take one.
pub fn ready_for_the_next(what: &str) -> Error {
    Error::new(Kind::Busy, format!("{what}: it is ready, retry to take it"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_result_is_his_who_began_it_and_parked_when_he_has_left() {
        let (job, waiter) = Job::begin();
        assert!(job.settle(7));
        assert_eq!(job.phase(), Phase::Committed(7));
        assert_eq!(job.take(), None, "it is somebody's");
        drop(waiter);
        assert!(!job.discard(true), "and stays so");

        let (job, waiter) = Job::begin();
        drop(waiter);
        let watcher = job.watch();
        assert!(!job.settle(7), "who only watches does not get it");
        assert!(!job.discard(false), "but keeps it from being thrown away");
        assert_eq!(job.watchers(), 1);
        drop(watcher);
        assert_eq!(job.take(), Some(7));
        assert!(job.take().is_none() && !job.discard(true));
    }

    #[test]
    fn a_parked_result_is_taken_or_thrown_away_but_not_both() {
        let (job, waiter) = Job::begin();
        drop(waiter);
        job.settle(7);
        assert!(job.discard(false));
        assert!(!job.discard(false), "once");
        assert_eq!((job.take(), job.phase()), (None, Phase::Gone));
    }

    #[test]
    fn a_failed_job_says_so_until_it_is_undone() {
        let (job, _waiter) = Job::<u32>::begin();
        assert!(job.rolling_back("x", "y").is_none());
        job.fail(Kind::Other, "out of luck");
        let told = job
            .rolling_back("create c", "undo")
            .map(|e| (e.kind(), e.to_string()));
        assert!(told.is_some_and(|(kind, text)| kind == Kind::Busy && text.contains("step undo")));
        job.end();
        assert!(job.rolling_back("x", "y").is_none() && job.is_undone());
    }

    #[test]
    fn stages_follow_each_other() {
        let (job, _waiter) = Job::<()>::begin();
        assert_eq!(job.enter("mount").0, "begin");
        assert_eq!(job.stage().0, "mount");
    }
}
