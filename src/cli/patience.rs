//! Asking for work that outlives the request: how long in all, how long at a time, and what an answer means for the next.

use std::time::Duration;

use tokio::time::Instant;

use crate::error::{Kind, Result};

/// How long a command that joins asks at a time. Whoever began the work may have left; then the result goes to a request
/// that comes after it is ready, and one that watches is held until its own deadline.
const JOIN_SLICE: Duration = Duration::from_secs(1);

/// The answer that our time is over comes after this part of it, not before (a supervisor keeps 5 %).
const ANSWERED: f64 = 0.9;

/// A result that became ready while we watched is taken by asking again; more often than this something is wrong.
const TRIES: u32 = 3;

/// How long to wait for the work, and for one answer.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    whole: Duration,
    slice: Duration,
    joins: bool,
}

impl Patience {
    /// Of the command that begins the work: in one request, which has the result as soon as it is ready.
    pub fn first(whole: Duration) -> Self {
        Self {
            whole,
            slice: whole,
            joins: false,
        }
    }

    /// Of one that joins.
    pub fn joining(whole: Duration) -> Self {
        Self {
            whole,
            slice: JOIN_SLICE,
            joins: true,
        }
    }

    /// The work is another command's.
    pub fn joins(self) -> bool {
        self.joins
    }

    /// Calls (with what is left of the time), and again when the answer is that the result has become ready for whoever
    /// asks next.
    ///
    /// # Errors
    /// Deadline when our time is over and the work goes on; what the work failed with.
    pub async fn ask<T>(self, mut call: impl AsyncFnMut(Duration) -> Result<T>) -> Result<T> {
        let end = Instant::now() + self.whole;
        let mut refused = 0;
        loop {
            // Zero would mean no limit at all.
            let left = end
                .saturating_duration_since(Instant::now())
                .min(self.slice)
                .max(Duration::from_millis(1));
            let asked = Instant::now();
            let error = match call(left).await {
                Ok(answer) => return Ok(answer),
                Err(error) => error,
            };
            refused += u32::from(error.kind() == Kind::Busy);
            let again = match error.kind() {
                Kind::Busy => refused < TRIES,
                // Not ours: some step of the work had one, and that has failed.
                Kind::Deadline if asked.elapsed() < left.mul_f64(ANSWERED) => {
                    return Err(error.as_kind(Kind::Other));
                }
                // The slice's, not the whole.
                Kind::Deadline => end.saturating_duration_since(asked) > left,
                _ => false,
            };
            if !again || Instant::now() >= end {
                return Err(error);
            }
        }
    }
}
