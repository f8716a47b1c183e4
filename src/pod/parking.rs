//! Results that nobody was there to take: how long they live.
//!
//! A parked pod lives between one and two intervals after its last waiter left: a tick that sees no waiter marks it
//! stale, the next one that still sees none undoes it, and the supervisor leaves.

use std::time::Duration;

use super::join::Job;
use super::{Phase, Pod, beside};

impl Pod {
    /// Watches the result of `job` until it is claimed, stopped, or thrown away.
    pub(super) fn watch_parked(&self, job: Job) {
        let pod = self.clone();
        let interval = Duration::from_secs_f64(self.config().parking.interval);
        tokio::spawn(async move {
            if !job.expired(interval, || pod.is_unclaimed()).await {
                return;
            }
            tracing::warn!(key = pod.key(), "nobody claimed the parked pod; undoing it");
            // Asked again under the lock: a claim may have come while we waited for it.
            let still = || pod.is_unclaimed() && job.watchers() == 0 && pod.unpark("expired");
            match pod.end(Duration::ZERO, still).await {
                Err(error) => tracing::error!(%error, "undo the parked pod"),
                Ok(()) => pod.forget_what_is_beside(),
            }
        });
    }

    /// The last of a pod that nobody will come for: what its command had made for it.
    fn forget_what_is_beside(&self) {
        if !matches!(self.lock().phase, Phase::Ending) {
            return;
        }
        let (journal, bundle) = (&self.shared.journal, &self.shared.options.bundle);
        let name = journal.with(|r| r.name.clone());
        let id = &self.shared.options.group;
        if let Err(error) = beside::forget(journal.dir(), bundle, &name, id) {
            tracing::warn!(%error, "remove what the command kept for the parked pod");
        }
    }

    /// Parked; or it was, and its infra process has ended since.
    fn is_unclaimed(&self) -> bool {
        let inner = self.lock();
        inner.unclaimed && matches!(inner.phase, Phase::Parked | Phase::Down)
    }
}
