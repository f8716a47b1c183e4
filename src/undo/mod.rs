//! The stack of undos: newest first, dependents wait, independents go on, each try under its own clock.
//!
//! Promises: every step that may run is tried at least once, whatever else fails or hangs; what is not done in the end
//! is reported by name with its error. Must never run under a request's deadline: a step's bound is its own.

use std::collections::HashSet;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::time::Duration;

use tokio::time::{Instant, sleep_until, timeout};

use crate::error::{Error, Kind, Result};

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
    /// may run is made in any case, so that one step that hangs does not keep the others from theirs.
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

/// Runs the steps in the order given (newest first): dependents wait, independents go on, each try has its own bound,
/// tries of a failing step are spaced by a capped back-off, within the budget. A round tries every step that may run and
/// whose pause is over; retries begin only after every such step had its first try.
pub async fn unwind(steps: Vec<Step<'_>>, patience: Patience) -> Report {
    let end = Instant::now() + patience.budget;
    let mut open: Vec<Open<'_>> = steps
        .into_iter()
        .map(|step| Open::new(step, patience))
        .collect();
    let mut done = Vec::new();
    loop {
        round(&mut open, &mut done, end, patience).await;
        match next_turn(&open) {
            Turn::Now => {}
            Turn::At(at) if at < end => sleep_until(at).await,
            Turn::At(_) | Turn::Never => break,
        }
    }
    let owed = open
        .into_iter()
        .map(|o| {
            let waits = || {
                Error::new(
                    Kind::State,
                    format!(
                        "undo {}: it waits for {}",
                        o.step.name,
                        o.step.after.join(", ")
                    ),
                )
            };
            (o.step.name, o.failure.unwrap_or_else(waits))
        })
        .collect();
    Report { done, owed }
}

/// When another round makes sense.
enum Turn {
    /// A step was freed by one that stands behind it in the list.
    Now,
    At(Instant),
    Never,
}

fn next_turn(open: &[Open<'_>]) -> Turn {
    let blocked = blocked(open);
    let free = || open.iter().filter(|o| !blocked.contains(o.step.name));
    if free().any(|o| o.next.is_none()) {
        return Turn::Now;
    }
    free()
        .filter_map(|o| o.next)
        .min()
        .map_or(Turn::Never, Turn::At)
}

/// A step that is not done.
struct Open<'a> {
    step: Step<'a>,
    tries: u32,
    delay: Duration,
    /// When to try again; None before the first try.
    next: Option<Instant>,
    failure: Option<Error>,
}

impl<'a> Open<'a> {
    fn new(step: Step<'a>, patience: Patience) -> Self {
        Self {
            step,
            tries: 0,
            delay: patience.first_delay,
            next: None,
            failure: None,
        }
    }

    async fn attempt(&mut self, patience: Patience) -> bool {
        let (name, limit) = (self.step.name, self.step.limit);
        self.tries += 1;
        let error = match timeout(limit, (self.step.run)()).await {
            Ok(Ok(())) => return true,
            Ok(Err(e)) if e.is_gone() => return true,
            Ok(Err(e)) => e,
            Err(_) => Error::new(
                Kind::Deadline,
                format!("undo {name}: not done within {:.1} s", limit.as_secs_f64()),
            ),
        };
        tracing::warn!(step = name, tries = self.tries, %error, "undo failed");
        self.failure = Some(error);
        self.next = Some(Instant::now() + self.delay);
        self.delay = (self.delay * 2).min(patience.max_delay);
        false
    }
}

/// Tries, in order, what may run now. A step that becomes free in this round has its turn in it.
async fn round(
    open: &mut Vec<Open<'_>>,
    done: &mut Vec<&'static str>,
    end: Instant,
    patience: Patience,
) {
    let mut at = 0;
    while at < open.len() {
        let waits = blocked(open).contains(open[at].step.name);
        let now = Instant::now();
        let due = open[at].next.is_none_or(|next| next <= now && now < end);
        if !waits && due && open[at].attempt(patience).await {
            done.push(open.remove(at).step.name);
        } else {
            at += 1;
        }
    }
}

/// Names of the steps that wait for one that is not done.
fn blocked(open: &[Open<'_>]) -> HashSet<&'static str> {
    let waits = |o: &&Open<'_>| {
        o.step
            .after
            .iter()
            .any(|name| open.iter().any(|other| other.step.name == *name))
    };
    open.iter().filter(waits).map(|o| o.step.name).collect()
}

#[cfg(test)]
mod tests;
