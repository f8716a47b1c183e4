//! The stack of undos. STUB of the public surface; bodies to be written.
#![allow(
    missing_docs,
    unused_variables,
    clippy::todo,
    missing_debug_implementations
)]
use std::future::Future;
use std::pin::Pin;
use std::time::Duration;

use crate::error::{Error, Result};

pub type Work<'a> = Pin<Box<dyn Future<Output = Result<()>> + Send + 'a>>;

/// One undo. `run` may be called again after an error; "gone" (Error::is_gone) counts as done.
pub struct Step<'a> {
    pub name: &'static str,
    /// Names of steps (newer, earlier in the list) that must be done before this one may run: "unpin netns" waits for "cni del".
    pub after: &'static [&'static str],
    /// Own bound of one try.
    pub limit: Duration,
    pub run: Box<dyn FnMut() -> Work<'a> + Send + 'a>,
}

/// How long and how often.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    /// Stop starting tries after this long; what is not done is reported as owed.
    pub budget: Duration,
    pub first_delay: Duration,
    pub max_delay: Duration,
}

#[derive(Debug, Default)]
pub struct Report {
    pub done: Vec<&'static str>,
    /// Tried and failing, or waiting for one that fails (then the error says for which).
    pub owed: Vec<(&'static str, Error)>,
}

/// Runs the steps in the order given (newest first): dependents wait, independents go on, each try has its own bound,
/// tries of a failing step are spaced by a capped back-off, within the budget.
pub async fn unwind(steps: Vec<Step<'_>>, patience: Patience) -> Report {
    todo!()
}
