//! What happened to a pod beside its stages: requests that joined, parking and claims, failures, each step of an undo.
//!
//! Kept in the record for whoever asks later. Promises that it stays short whatever callers do: the same again is
//! counted and not listed twice, and of too many the oldest goes.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::record::{Record, State};
use crate::clock;

/// Most entries of one run; a creation with everything in it has some twenty.
const MOST: usize = 64;

/// Name of the stage in which a failed creation is undone.
pub const ROLL_BACK: &str = "roll-back";

/// What happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Event {
    /// A request began to wait for the creation under way; `detail`: the stage it was at.
    Joined,
    /// A request was told, at its deadline, that the work goes on; `detail`: the stage then.
    TimedOut,
    /// The creation was done and nobody was there to take it.
    Parked,
    /// A parked pod was taken.
    Claimed,
    /// The creation failed; `detail`: the stage; `error`: why.
    Failed,
    /// A step of an undo; `detail`: which.
    Undo,
}

/// One thing that happened, or the same one several times.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Moment {
    /// What.
    pub event: Event,
    /// The stage or step it has to do with; may be empty.
    pub detail: String,
    /// Microseconds from the first stage of this run to the (first) time.
    pub at_us: u64,
    /// How often.
    pub times: u32,
    /// How long it took; absent while it is under way and for what takes no time.
    pub took_us: Option<u64>,
    /// What went wrong.
    pub error: Option<String>,
}

/// Work that people wait for, as `ps` and the metrics tell it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activity {
    /// A creation is under way.
    Creating,
    /// A creation that failed is being undone.
    RollingBack,
    /// Done, and waiting to be taken.
    Parked,
    /// None of these.
    Other(State),
}

impl Activity {
    /// As in JSON and as a label of the metrics: `creating`, `rolling_back`, `parked`, else the state's own name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Creating => "creating",
            Self::RollingBack => "rolling_back",
            Self::Parked => "parked",
            Self::Other(State::Created) => "created",
            Self::Other(State::Starting) => "starting",
            Self::Other(State::Ready) => "ready",
            Self::Other(State::Parked) => "parked",
            Self::Other(State::NotReady) => "not_ready",
            Self::Other(State::Stopped) => "stopped",
            Self::Other(State::TaskOnly) => "task_only",
        }
    }
}

impl Event {
    /// As it is written in tables.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Joined => "joined",
            Self::TimedOut => "timed out",
            Self::Parked => "parked",
            Self::Claimed => "claimed",
            Self::Failed => "failed",
            Self::Undo => "undo",
        }
    }
}

impl Record {
    /// The pod key as it is written in errors and logs: `namespace/name/uid/attempt` of the pod's metadata where a name
    /// was given, else the sandbox id.
    pub fn key(&self) -> String {
        if self.name.is_empty() {
            return self.id.clone();
        }
        format!(
            "{}/{}/{}/{}",
            self.pod_namespace, self.name, self.uid, self.attempt
        )
    }

    /// What is going on with the pod.
    pub fn activity(&self) -> Activity {
        let last = self.stages.last().filter(|s| s.took_us.is_none());
        match self.state {
            State::Starting | State::NotReady if last.is_some_and(|s| s.name == ROLL_BACK) => {
                Activity::RollingBack
            }
            State::Starting => Activity::Creating,
            State::Parked => Activity::Parked,
            other => Activity::Other(other),
        }
    }

    /// How long that has been going on; zero for a record of another boot.
    pub fn activity_age(&self) -> Duration {
        if self.boot_id != clock::boot_id() {
            return Duration::ZERO;
        }
        let since = Duration::from_micros(self.activity_since_us);
        clock::uptime().saturating_sub(since)
    }

    /// The step of an undo that is at work now.
    pub fn undo_step(&self) -> Option<&Moment> {
        let open = |m: &&Moment| m.event == Event::Undo && m.took_us.is_none();
        self.history.iter().rev().find(open)
    }

    /// Adds what happened; the same as the last time it happened is counted there.
    pub(super) fn remember(&mut self, moment: Moment) {
        let same = |m: &&mut Moment| {
            m.event == moment.event
                && m.detail == moment.detail
                && matches!(m.event, Event::Joined | Event::TimedOut)
        };
        if let Some(known) = self.history.iter_mut().find(same) {
            known.times = known.times.saturating_add(1);
            return;
        }
        if moment.event == Event::Undo {
            // Steps may work side by side, but one is not tried twice at a time.
            self.give_up_undo(Some(&moment.detail));
        }
        if self.history.len() >= MOST {
            self.history.remove(0);
        }
        self.history.push(moment);
    }

    /// A try that did not come back was dropped at its limit, or with its stage. `step`: only of this one.
    pub(super) fn give_up_undo(&mut self, step: Option<&str>) {
        for moment in &mut self.history {
            let open = moment.event == Event::Undo && moment.took_us.is_none();
            if open && step.is_none_or(|step| step == moment.detail) {
                moment.took_us = Some(0);
                moment.error = Some("given up".to_owned());
            }
        }
    }

    /// Ends the try of an undo's step that is under way.
    pub(super) fn end_undo_step(&mut self, step: &str, took_us: u64, error: Option<String>) {
        let open =
            |m: &&mut Moment| m.event == Event::Undo && m.took_us.is_none() && m.detail == step;
        if let Some(moment) = self.history.iter_mut().rev().find(open) {
            moment.took_us = Some(took_us);
            moment.error = error;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::journal::blank;
    use super::super::record::Stage;
    use super::*;

    fn moment(event: Event, detail: &str) -> Moment {
        Moment {
            event,
            detail: detail.into(),
            at_us: 1,
            times: 1,
            took_us: None,
            error: None,
        }
    }

    #[test]
    fn joins_are_counted_and_the_list_stays_short() {
        let mut record = blank("default", "p");
        for _ in 0..1000 {
            record.remember(moment(Event::Joined, "cni-add"));
        }
        record.remember(moment(Event::Joined, "infra"));
        assert_eq!((record.history.len(), record.history[0].times), (2, 1000));
        for _ in 0..1000 {
            record.remember(moment(Event::Undo, "cni-del"));
            record.end_undo_step("cni-del", 3, Some("no".into()));
        }
        assert_eq!(record.history.len(), MOST);
        assert_eq!(record.undo_step(), None);
        // Two side by side: each ends for itself, and one that is tried again has given the try before up.
        record.remember(moment(Event::Undo, "cni-del"));
        record.remember(moment(Event::Undo, "infra"));
        record.end_undo_step("cni-del", 5, None);
        assert_eq!(record.undo_step().map(|m| m.detail.as_str()), Some("infra"));
        record.remember(moment(Event::Undo, "infra"));
        let open = |m: &&Moment| m.took_us.is_none() && m.event == Event::Undo;
        assert_eq!(record.history.iter().filter(open).count(), 1);
        record.give_up_undo(None);
        assert_eq!(record.undo_step(), None);
    }

    #[test]
    fn what_goes_on_is_read_from_state_and_stage() {
        let mut record = blank("default", "p");
        record.state = State::Starting;
        assert_eq!(record.activity(), Activity::Creating);
        record.state = State::NotReady;
        record.stages.push(Stage {
            name: ROLL_BACK.into(),
            at_us: 0,
            took_us: None,
            error: None,
        });
        assert_eq!(record.activity(), Activity::RollingBack);
        record.stages[0].took_us = Some(1);
        assert_eq!(record.activity(), Activity::Other(State::NotReady));
    }

    #[test]
    fn the_key_is_the_metadata_where_there_is_any() {
        let mut record = blank("default", "p");
        assert_eq!(record.key(), "p");
        record.name = "web".into();
        record.pod_namespace = "apps".into();
        record.uid = "u-1".into();
        record.attempt = 2;
        assert_eq!(record.key(), "apps/web/u-1/2");
    }
}
