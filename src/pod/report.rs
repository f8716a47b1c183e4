//! A line in the log from time to time while a stage lasts: what hangs is named before anybody asks.

use std::time::Duration;

use tokio::task::AbortHandle;

use super::Pod;
use super::told::{micros, step};

/// Tells as long as it is held.
pub(super) struct Reporting(AbortHandle);

impl Drop for Reporting {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl Pod {
    /// Begins to tell, every `log.stage_interval`, which stage is at work.
    pub(super) fn report(&self) -> Reporting {
        let pod = self.clone();
        let every = Duration::from_secs_f64(self.config().log.stage_interval);
        let telling = tokio::spawn(async move {
            loop {
                tokio::time::sleep(every).await;
                pod.tell_stage();
            }
        });
        Reporting(telling.abort_handle())
    }

    fn tell_stage(&self) {
        let at = self.shared.journal.progress();
        if !at.under_way {
            return;
        }
        tracing::warn!(
            key = self.key(),
            stage = at.stage,
            step = step(&at),
            stage_age_us = micros(at.stage_age),
            age_us = micros(at.age),
            waiters = self.shared.journal.waiting(),
            "still at stage"
        );
    }
}
