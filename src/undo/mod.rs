//! The stack of undos: newest first, dependents wait, independents go on, each try under its own clock.
//!
//! Promises: every step that may run is tried at least once, whatever else fails, hangs or panics; what is not done in
//! the end is reported by name with its error. Must never run under a request's deadline: a step's bound is its own.

mod progress;
mod together;

use std::fmt;
use std::future::{Future, poll_fn};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::{Pin, pin};
use std::task::Poll;
use std::time::Duration;

use tokio::time::{Instant, sleep, timeout};

use crate::error::{Error, Kind, Result};

pub use self::progress::{Progress, Undoing};
pub use self::together::together;

/// A try that takes longer than this holds up only those that depend on it.
const TURN: Duration = Duration::from_secs(1);

/// One try under way.
pub type Work<'a> = Pin<Box<dyn Future<Output = Result<()>> + Send + 'a>>;

/// One undo. `run` may be called again after an error, or after its try was dropped at the limit; "gone"
/// (`Error::is_gone`) counts as done.
pub struct Step<'a> {
    /// As in logs and stages: "cni-del".
    pub name: &'static str,
    /// Names of steps (newer, earlier in the list) that must be done before this one may run: "unpin netns" waits for
    /// "cni del". A name that is not in the list counts as done.
    pub after: &'static [&'static str],
    /// Own bound of one try.
    pub limit: Duration,
    /// Begins a try.
    pub run: Box<dyn FnMut() -> Work<'a> + Send + 'a>,
}

impl fmt::Debug for Step<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Step")
            .field("name", &self.name)
            .field("after", &self.after)
            .field("limit", &self.limit)
            .finish_non_exhaustive()
    }
}

/// How long and how often.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    /// Stop starting further tries after this long; what is not done is reported as owed. The first try of a step that
    /// may run is made in any case, so that one step that hangs does not keep the others from theirs. `Duration::MAX`:
    /// for as long as it takes.
    pub budget: Duration,
    /// Between the first and the second try; doubled from try to try.
    pub first_delay: Duration,
    /// Cap of the doubling.
    pub max_delay: Duration,
}

/// What came of it.
#[derive(Debug, Default)]
pub struct Report {
    /// In the order in which they were done.
    pub done: Vec<&'static str>,
    /// Tried and failing, or waiting for one that fails (then the error says for which); order of the list.
    pub owed: Vec<(&'static str, Error)>,
}

/// Runs the steps in the order given (newest first), one after the other as long as each ends soon. Dependents wait,
/// independents go on beside one that fails or takes longer than a second; each try has its own bound, and tries of a
/// failing step are spaced by a capped back-off, within the budget. `progress` tells of it, and hurries it.
///
/// Dropping it drops the tries under way; a later call with what is left goes on from there.
pub async fn unwind(steps: Vec<Step<'_>>, patience: Patience, progress: &Progress) -> Report {
    let end = Instant::now().checked_add(patience.budget);
    progress.begin(steps.iter().map(|s| (s.name, s.after)));
    let over = Over(progress);
    let names: Vec<&'static str> = steps.iter().map(|s| s.name).collect();
    let count = steps.len();
    let runs = steps.into_iter().enumerate();
    let runs = runs.map(|(at, step)| Box::pin(run(step, at, patience, end, progress)));
    let ended = together(runs.collect(), count).await;
    let owed = names.into_iter().zip(ended);
    let owed = owed.filter_map(|(name, ended)| Some((name, ended.err()?)));
    Report {
        owed: owed.collect(),
        done: over.done(),
    }
}

/// One step to its end: done, or the error with which it was given up.
async fn run(
    mut step: Step<'_>,
    at: usize,
    patience: Patience,
    end: Option<Instant>,
    progress: &Progress,
) -> Result<()> {
    if !progress.turn(at).await {
        progress.give_up(at);
        return Err(Error::new(
            Kind::State,
            format!("undo {}: it waits for {}", step.name, step.after.join(", ")),
        ));
    }
    let mut delay = patience.first_delay;
    loop {
        let hurries = progress.hurries();
        let tries = progress.try_begins(at);
        let error = match attempt(&mut step, at, progress).await {
            Ok(()) => {
                tracing::info!(step = step.name, tries, "undone");
                progress.done(at);
                return Ok(());
            }
            Err(error) => error,
        };
        tracing::warn!(step = step.name, tries, %error, "undo failed");
        let next = Instant::now() + delay;
        if end.is_some_and(|end| next >= end) {
            progress.failed(at, &error, None);
            return Err(error);
        }
        progress.failed(at, &error, Some(next));
        delay = match progress.pause_until(next, hurries).await {
            true => patience.first_delay,
            false => (delay * 2).min(patience.max_delay),
        };
    }
}

async fn attempt(step: &mut Step<'_>, at: usize, progress: &Progress) -> Result<()> {
    let (name, limit) = (step.name, step.limit);
    let mut work = pin!(timeout(limit, contained(name, (step.run)())));
    let ended = tokio::select! {
        biased;
        ended = &mut work => ended,
        () = sleep(TURN) => {
            progress.is_slow(at);
            work.await
        }
    };
    match ended {
        Ok(Err(error)) if !error.is_gone() => Err(error),
        Ok(_) => Ok(()),
        Err(_) => Err(Error::new(
            Kind::Deadline,
            format!("undo {name}: not done within {:.1} s", limit.as_secs_f64()),
        )),
    }
}

/// A panic is a failed try of this step, and no end of the others.
async fn contained(name: &'static str, mut work: Work<'_>) -> Result<()> {
    poll_fn(|cx| {
        catch_unwind(AssertUnwindSafe(|| work.as_mut().poll(cx))).unwrap_or_else(|_| {
            let text = format!("undo {name}: the try panicked; see the log");
            Poll::Ready(Err(Error::new(Kind::Other, text)))
        })
    })
    .await
}

/// Whoever drops an undo half-way leaves nothing that looks as if it were at work.
struct Over<'a>(&'a Progress);

impl Over<'_> {
    fn done(self) -> Vec<&'static str> {
        self.0.end()
    }
}

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.end();
    }
}

#[cfg(test)]
mod tests;
