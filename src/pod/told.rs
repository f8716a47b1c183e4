//! What requests for the pod are told, and what is noted of them: joins, time-outs, claims.
//!
//! Promises that every refusal names the pod key, the stage, its age and this supervisor, as they are when it is sent.

use std::time::Duration;

use super::Pod;
use super::history::Event;
use super::join::Job;
use super::journal::{Progress, Waiting};
use crate::error::{Error, Kind};
use crate::job;
use crate::tally::{self, Count};

/// Kind of our counts.
const POD: &str = "pod";

impl Pod {
    /// A request begins to wait for the creation that it did not begin.
    pub(super) fn note_join(&self) {
        let at = self.shared.journal.progress();
        tally::count(self.config(), POD, Count::Stalled(at.stage.clone()));
        self.shared
            .journal
            .happened(Event::Joined, &at.stage, None, true);
        tracing::info!(
            key = self.key(),
            stage = at.stage,
            age_us = micros(at.age),
            waiters = self.shared.journal.waiting(),
            "a request joins the creation under way"
        );
    }

    /// Counts the request as one that waits.
    pub(super) fn wait_here(&self) -> Waiting {
        self.shared.journal.wait_here()
    }

    /// How the creation has ended, for the counters.
    pub(super) fn count_created(&self, how: &'static str) {
        tally::count(self.config(), POD, Count::Created(how));
    }

    /// Nobody has been given the pod, and now it is parked no more; says whether it was. Counted once.
    pub(super) fn unpark(&self, why: &'static str) -> bool {
        let was = std::mem::replace(&mut self.lock().unclaimed, false);
        if was {
            tally::count(self.config(), POD, Count::Unparked(why));
        }
        was
    }

    /// What the job has said to a request, with what only the pod knows: its key, and the age of its stage.
    pub(super) fn finer(&self, job: &Job, error: Error) -> Error {
        match (error.kind(), job.phase()) {
            (Kind::Deadline, job::Phase::Working) => self.still_at(job.age()),
            (Kind::Busy, job::Phase::Parked(())) => self.ready_for_the_next(),
            _ => error,
        }
    }

    /// At the deadline of a request: the work goes on. `age`: of the creation.
    fn still_at(&self, age: Duration) -> Error {
        let at = self.shared.journal.progress();
        self.shared
            .journal
            .happened(Event::TimedOut, &at.stage, None, true);
        self.told(
            Kind::Deadline,
            &format!(
                "still at stage {} after {:.1} s in supervisor {} ({:.1} s at this stage); the work goes on, ask again to join it",
                at.stage,
                age.as_secs_f64(),
                std::process::id(),
                at.stage_age.as_secs_f64(),
            ),
        )
    }

    /// To a request that came too early for the result, or may be too near its end to take it.
    pub(super) fn ready_for_the_next(&self) -> Error {
        let age = self.shared.journal.with(|r| r.activity_age());
        self.told(
            Kind::Busy,
            &format!(
                "it is ready, retry to take it (parked for {:.1} s in supervisor {})",
                age.as_secs_f64(),
                std::process::id()
            ),
        )
    }

    /// To a request that finds an earlier try being undone.
    pub(super) fn rolling_back(&self) -> Error {
        let at = self.shared.journal.progress();
        let (now, step) = (self.shared.undoing.now(), step(&at));
        let doing = now.map_or_else(
            || format!("step {step}, since {:.1} s", at.stage_age.as_secs_f64()),
            |now| now.to_string(),
        );
        self.told(
            Kind::Busy,
            &format!(
                "an earlier try failed and is being rolled back ({doing}) in supervisor {}; ask again, or remove the pod",
                std::process::id(),
            ),
        )
    }

    /// To a request for a pod that had its life.
    pub(super) fn stopped(&self) -> Error {
        self.told(Kind::State, "it was stopped; remove it and create it anew")
    }

    /// To a request that finds the pod being removed; `verb`: what it wanted.
    pub(super) fn being_removed(&self, verb: &str) -> Error {
        let at = self.shared.journal.progress();
        self.refusal(
            verb,
            Kind::Gone,
            &format!(
                "it is being removed by supervisor {} (step {}, {:.1} s); ask again when that has left",
                std::process::id(),
                step(&at),
                at.stage_age.as_secs_f64()
            ),
        )
    }

    fn told(&self, kind: Kind, what: &str) -> Error {
        self.refusal("start", kind, what)
    }

    fn refusal(&self, verb: &str, kind: Kind, what: &str) -> Error {
        let id = &self.shared.options.group;
        let key = self.key();
        let named = match key == *id {
            true => String::new(),
            false => format!(" (pod {key})"),
        };
        Error::new(kind, format!("{verb} sandbox {id}{named}: {what}"))
    }

    /// The pod key, as in errors and logs.
    pub(super) fn key(&self) -> String {
        self.shared.journal.with(|r| r.key())
    }
}

/// The finest name for what is at work.
pub(super) fn step(at: &Progress) -> &str {
    at.step.as_deref().unwrap_or(&at.stage)
}

pub(super) fn micros(span: Duration) -> u64 {
    u64::try_from(span.as_micros()).unwrap_or(u64::MAX)
}
