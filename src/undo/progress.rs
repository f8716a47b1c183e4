//! What an undo is at, for those who ask while it runs, and the way to hurry it.
//!
//! It is also the board by which the steps of one [`unwind`](super::unwind) find their turns. Promises that asking
//! never waits for a step.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};

use crate::error::Error;

/// One undo after the other of one pod. Cheap to clone; all clones are one.
#[derive(Clone, Debug)]
pub struct Progress {
    state: Arc<watch::Sender<State>>,
}

#[derive(Debug, Default)]
struct State {
    begun: Option<Instant>,
    items: Vec<Item>,
    done: Vec<&'static str>,
    /// Goes up with each call of `hurry`.
    hurried: u64,
}

#[derive(Debug)]
struct Item {
    name: &'static str,
    after: &'static [&'static str],
    tries: u32,
    error: Option<String>,
    stands: Stands,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stands {
    /// Not begun: its turn has not come, or it waits for another step.
    Waits,
    /// A try is under way; `slow`: for so long that the others do not wait any more.
    Works {
        slow: bool,
    },
    /// Between two tries.
    Pauses {
        until: Instant,
    },
    Done,
    GivenUp,
}

/// The step that is at work, or the first one that fails.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Undoing {
    /// Its name.
    pub step: &'static str,
    /// Age of the whole undo.
    pub since: Duration,
    /// Tries of this step that were begun.
    pub tries: u32,
    /// How the last one that ended failed.
    pub error: Option<String>,
    /// Until the next one; none while one is under way.
    pub next: Option<Duration>,
}

impl fmt::Display for Undoing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "step {}, since {:.1} s",
            self.step,
            self.since.as_secs_f64()
        )?;
        if let Some(error) = &self.error {
            write!(f, ", {} tries, the last: {error}", self.tries)?;
        }
        if let Some(next) = self.next {
            write!(f, "; the next in {:.1} s", next.as_secs_f64())?;
        }
        Ok(())
    }
}

impl Default for Progress {
    fn default() -> Self {
        Self {
            state: Arc::new(watch::channel(State::default()).0),
        }
    }
}

impl Progress {
    /// Ends every pause between two tries; the pauses begin with the shortest again.
    pub fn hurry(&self) {
        self.state.send_modify(|s| s.hurried += 1);
    }

    /// What is being undone; `None` when nothing is.
    pub fn now(&self) -> Option<Undoing> {
        let state = self.state.borrow();
        let begun = state.begun?;
        let open = || state.items.iter().filter(|i| i.stands != Stands::Done);
        let item = open()
            .find(|i| matches!(i.stands, Stands::Works { .. } | Stands::Pauses { .. }))
            .or_else(|| open().next())?;
        let next = match item.stands {
            Stands::Pauses { until } => Some(until.saturating_duration_since(Instant::now())),
            _ => None,
        };
        Some(Undoing {
            step: item.name,
            since: begun.elapsed(),
            tries: item.tries,
            error: item.error.clone(),
            next,
        })
    }

    /// Resolves as soon as no try is under way: it only pauses, or it is over.
    pub async fn idle(&self) {
        let idle = |s: &State| !s.items.iter().any(Item::works);
        let mut state = self.state.subscribe();
        // The sender is our own.
        let _ = state.wait_for(idle).await;
    }

    /// Waits so long, or until somebody hurries; says whether somebody did.
    pub async fn pause(&self, pause: Duration) -> bool {
        let seen = self.hurries();
        self.pause_until(Instant::now() + pause, seen).await
    }

    pub(super) fn hurries(&self) -> u64 {
        self.state.borrow().hurried
    }

    /// `seen`: hurries that were heeded before.
    pub(super) async fn pause_until(&self, at: Instant, seen: u64) -> bool {
        let mut state = self.state.subscribe();
        tokio::select! {
            _ = state.wait_for(|s| s.hurried != seen) => true,
            () = sleep_until(at) => false,
        }
    }

    pub(super) fn begin(
        &self,
        steps: impl Iterator<Item = (&'static str, &'static [&'static str])>,
    ) {
        let items = steps.map(|(name, after)| Item {
            name,
            after,
            tries: 0,
            error: None,
            stands: Stands::Waits,
        });
        self.state.send_modify(|s| {
            s.begun = Some(Instant::now());
            s.items = items.collect();
            s.done.clear();
        });
    }

    /// Its turn has come; false: what it waits for was given up.
    pub(super) async fn turn(&self, at: usize) -> bool {
        let mut state = self.state.subscribe();
        let settled = |s: &State| s.may_begin(at) || s.is_hopeless(at);
        match state.wait_for(settled).await {
            Ok(state) => state.may_begin(at),
            Err(_) => false,
        }
    }

    pub(super) fn try_begins(&self, at: usize) -> u32 {
        self.change(at, |item| {
            item.tries += 1;
            item.stands = Stands::Works { slow: false };
        });
        self.state.borrow().items.get(at).map_or(0, |i| i.tries)
    }

    pub(super) fn is_slow(&self, at: usize) {
        self.change(at, |item| item.stands = Stands::Works { slow: true });
    }

    pub(super) fn failed(&self, at: usize, error: &Error, until: Option<Instant>) {
        self.change(at, |item| {
            item.error = Some(error.to_string());
            item.stands = until.map_or(Stands::GivenUp, |until| Stands::Pauses { until });
        });
    }

    pub(super) fn give_up(&self, at: usize) {
        self.change(at, |item| item.stands = Stands::GivenUp);
    }

    pub(super) fn done(&self, at: usize) {
        self.state.send_modify(|s| {
            if let Some(item) = s.items.get_mut(at) {
                item.stands = Stands::Done;
                s.done.push(item.name);
            }
        });
    }

    /// The undo has ended, or was dropped. What was done, in that order.
    pub(super) fn end(&self) -> Vec<&'static str> {
        let mut done = Vec::new();
        self.state.send_modify(|s| {
            s.begun = None;
            for item in s.items.iter_mut().filter(|i| i.stands != Stands::Done) {
                item.stands = Stands::GivenUp;
            }
            done = std::mem::take(&mut s.done);
        });
        done
    }

    fn change(&self, at: usize, change: impl FnOnce(&mut Item)) {
        self.state.send_modify(|s| {
            if let Some(item) = s.items.get_mut(at) {
                change(item);
            }
        });
    }
}

impl State {
    /// What it waits for is done, and those before it have had their turns, cannot have them yet, or take long.
    fn may_begin(&self, at: usize) -> bool {
        let before = &self.items[..at.min(self.items.len())];
        self.is_free(at)
            && before
                .iter()
                .enumerate()
                .all(|(n, item)| !(self.is_free(n) && item.has_the_turn()))
    }

    fn is_free(&self, at: usize) -> bool {
        self.dependencies(at).all(|i| i.stands == Stands::Done)
    }

    fn is_hopeless(&self, at: usize) -> bool {
        self.dependencies(at).any(|i| i.stands == Stands::GivenUp)
    }

    fn dependencies(&self, at: usize) -> impl Iterator<Item = &Item> {
        let after = self.items.get(at).map_or(&[][..], |i| i.after);
        self.items.iter().filter(|i| after.contains(&i.name))
    }
}

impl Item {
    fn works(&self) -> bool {
        matches!(self.stands, Stands::Works { .. })
    }

    /// Its first try is to come, or under way.
    fn has_the_turn(&self) -> bool {
        match self.stands {
            Stands::Waits => true,
            Stands::Works { slow } => self.tries == 1 && !slow,
            _ => false,
        }
    }
}
