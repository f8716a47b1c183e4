//! Waiting for a job within a caller's deadline, and what is said at its end.

use std::time::Duration;

use tokio::time::{Instant, sleep, timeout, timeout_at};

use super::{Job, Phase, State, Waiter, ready_for_the_next};
use crate::error::{Error, Kind, Result};

/// How long a request without a deadline watches.
const WATCH_BOUND: Duration = Duration::from_secs(240);

/// The answer goes out this long before the caller's deadline, or 5 % of it where that is less.
const REPLY_MARGIN: Duration = Duration::from_millis(250);

/// What a request that waits wants, and until when.
#[derive(Clone, Debug)]
pub struct Ask {
    /// What its errors begin with: "start sandbox p1".
    pub what: String,
    /// When it is answered at the latest; `None`: it has the time that the work has.
    pub reply_at: Option<Instant>,
    /// Nothing is left of its caller's deadline: he will not see the answer.
    pub is_late: bool,
    /// A result that is not its own holds it until `reply_at`: an early error counts as a failure with some callers,
    /// who then ask for something else and leave the result behind.
    pub hold: bool,
}

impl Ask {
    /// Of a request with `limit` left; without one it watches for four minutes.
    pub fn new(what: impl Into<String>, limit: Option<Duration>, hold: bool) -> Self {
        let limit = limit.unwrap_or(WATCH_BOUND);
        let margin = REPLY_MARGIN.min(limit / 20);
        Self {
            what: what.into(),
            reply_at: Instant::now().checked_add(limit.saturating_sub(margin)),
            is_late: limit.is_zero(),
            hold,
        }
    }

    /// The same for a request that has the time that the work has, when its caller named none.
    pub fn patient(what: impl Into<String>, limit: Option<Duration>, hold: bool) -> Self {
        let ask = Self::new(what, limit, hold);
        Self {
            reply_at: limit.and(ask.reply_at),
            ..ask
        }
    }

    /// What `work` gives before it is time to answer.
    async fn within<R>(&self, work: impl Future<Output = R>) -> Option<R> {
        match self.reply_at {
            Some(at) => timeout_at(at, work).await.ok(),
            None => Some(work.await),
        }
    }
}

impl<T: Clone> Waiter<T> {
    /// Waits for the result. `stage` is asked at the end of a wait in vain; `over` ends the hold on a parked result.
    ///
    /// # Errors
    /// Deadline with stage, age and holder while the work goes on; Busy when the result is ready for the next request;
    /// the cause, with its own kind and at once, when the work fails; what `over` says.
    pub async fn answer(
        &self,
        ask: &Ask,
        stage: impl Fn() -> String,
        over: impl Future<Output = Error>,
    ) -> Result<T> {
        let settled = |state: &State<T>| match &state.phase {
            Phase::Working => None,
            other => Some(other.clone()),
        };
        match ask.within(self.job.until(settled)).await {
            None => Err(self.still_working(&ask.what, &stage())),
            Some(Phase::Parked(_)) if ask.hold => self.hold(ask, over).await,
            Some(phase) => verdict(&ask.what, phase),
        }
    }

    /// Until shortly before the deadline, or until the result is somebody's or nobody's for good.
    async fn hold(&self, ask: &Ask, over: impl Future<Output = Error>) -> Result<T> {
        let moved = |state: &State<T>| match &state.phase {
            Phase::Parked(_) => None,
            other => Some(other.clone()),
        };
        tokio::select! {
            phase = ask.within(self.job.until(moved)) => match phase {
                Some(phase) => verdict(&ask.what, phase),
                None => Err(ready_for_the_next(&ask.what)),
            },
            error = over => Err(error),
        }
    }

    /// Gives a failed job's undo until `ask` or `limit` is over.
    pub async fn undone(&self, ask: &Ask, limit: Duration) {
        let _ = ask.within(timeout(limit, self.job.undone())).await;
    }

    fn still_working(&self, what: &str, stage: &str) -> Error {
        Error::new(
            Kind::Deadline,
            format!(
                "{what}: still at stage {stage} after {:.1} s in supervisor {}; the work goes on, ask again to join it",
                self.job.age().as_secs_f64(),
                std::process::id()
            ),
        )
    }
}

fn verdict<T>(what: &str, phase: Phase<T>) -> Result<T> {
    match phase {
        Phase::Committed(result) => Ok(result),
        Phase::Working | Phase::Parked(_) => Err(ready_for_the_next(what)),
        Phase::Failed(kind, text) => Err(Error::new(kind, text)),
        Phase::Gone => Err(Error::new(
            Kind::Cancelled,
            format!("{what}: it was removed meanwhile; ask again to make it anew"),
        )),
    }
}

impl<T: Send + 'static> Job<T> {
    /// Does the work in a task of its own. Work that panics is a job that failed with nothing left to undo.
    pub fn run(&self, work: impl Future<Output = ()> + Send + 'static) {
        let (job, task) = (self.clone(), tokio::spawn(work));
        tokio::spawn(async move {
            if let Err(error) = task.await {
                tracing::error!(%error, "a job panicked");
                job.fail(Kind::Other, "the work panicked; see the supervisor's log");
                job.end();
            }
        });
    }
}

impl<T> Job<T> {
    /// Resolves when nothing is left of a job that failed or was thrown away.
    pub async fn undone(&self) {
        self.until(|state| state.undone.then_some(())).await;
    }

    /// Resolves with true once nobody has watched for between one and two intervals, with false as soon as a tick finds
    /// that `still` does not hold any more.
    pub async fn expired(&self, interval: Duration, still: impl Fn() -> bool) -> bool {
        let mut stale = false;
        loop {
            sleep(interval).await;
            if !still() {
                return false;
            }
            if self.watchers() > 0 {
                stale = false;
            } else if stale {
                return true;
            } else {
                stale = true;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::pending;

    use super::*;

    fn ask(limit: Duration, hold: bool) -> Ask {
        Ask::new("make x", Some(limit), hold)
    }

    async fn asked(waiter: &Waiter<u32>, ask: Ask) -> Result<u32> {
        waiter.answer(&ask, || "s".into(), pending()).await
    }

    fn told(result: Result<u32>) -> (Kind, String) {
        result.map_or_else(|e| (e.kind(), e.to_string()), |v| panic!("{v}"))
    }

    #[tokio::test(start_paused = true)]
    async fn who_has_no_time_left_hears_the_stage_just_before() {
        let (_job, waiter) = Job::begin();
        for (limit, margin) in [(3.0, 0.15), (100.0, 0.25)] {
            let begun = Instant::now();
            let limit = Duration::from_secs_f64(limit);
            let (kind, text) = told(asked(&waiter, ask(limit, true)).await);
            assert_eq!(kind, Kind::Deadline);
            assert!(text.contains("make x: still at stage s after "), "{text}");
            let early = limit.saturating_sub(begun.elapsed()).as_secs_f64();
            assert!((early - margin).abs() < 0.01, "{early}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_result_that_becomes_ready_while_watched_is_held_back() {
        for (hold, least) in [(true, 9.0), (false, 0.0)] {
            let (job, first) = Job::begin();
            drop(first);
            let watcher = job.watch();
            let begun = Instant::now();
            let (answer, ()) =
                tokio::join!(asked(&watcher, ask(Duration::from_secs(10), hold)), async {
                    sleep(Duration::from_secs(1)).await;
                    assert!(!job.settle(7));
                });
            assert_eq!(told(answer).0, Kind::Busy);
            let took = begun.elapsed().as_secs_f64();
            assert!(took >= least && took < 10.0, "{took}");
            assert_eq!(job.take(), Some(7));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn whoever_is_held_hears_at_once_that_it_is_taken_or_gone() {
        for taken in [true, false] {
            let (job, first) = Job::begin();
            drop(first);
            let watcher = job.watch();
            job.settle(7);
            let (answer, ()) =
                tokio::join!(asked(&watcher, ask(Duration::from_secs(10), true)), async {
                    sleep(Duration::from_secs(1)).await;
                    let _ = if taken {
                        job.take().is_some()
                    } else {
                        job.discard(true)
                    };
                });
            match taken {
                true => assert_eq!(answer.ok(), Some(7)),
                false => assert_eq!(told(answer).0, Kind::Cancelled),
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_failure_is_told_at_once_also_when_it_is_undone_already() {
        let (job, first) = Job::begin();
        let watcher = job.watch();
        job.fail(Kind::Denied, "no");
        job.end();
        for waiter in [first, watcher] {
            let answer = asked(&waiter, ask(Duration::from_secs(10), true)).await;
            assert_eq!(told(answer), (Kind::Denied, "no".to_owned()));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_parked_result_expires_between_one_and_two_intervals_after_the_last_waiter() {
        let (job, first) = Job::begin();
        drop(first);
        let watcher = job.watch();
        job.settle(7);
        let interval = Duration::from_secs(60);
        let still = || matches!(job.phase(), Phase::Parked(_));
        let begun = Instant::now();
        let (expired, ()) = tokio::join!(job.expired(interval, still), async {
            sleep(Duration::from_secs(150)).await;
            drop(watcher);
        });
        let life = begun.elapsed() - Duration::from_secs(150);
        assert!(
            expired && life > interval && life <= 2 * interval,
            "{life:?}"
        );
        assert_eq!(job.take(), Some(7), "the caller decides what that means");
        assert!(!job.expired(interval, still).await);
    }
}
