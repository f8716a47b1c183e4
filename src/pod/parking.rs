//! Results that nobody was there to take: how long they live.
//!
//! A parked pod lives between one and two intervals after its last waiter left: a tick that sees no waiter marks it
//! stale, the next one that still sees none undoes it, and the supervisor leaves. As soon as no request waits for it any
//! more, its network is on offer to other supervisors of the same pod; when one takes it, the rest is undone at once.

use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::join::Job;
use super::record::Record;
use super::{Phase, Pod, beside};

/// How often it is looked whether the last waiter has left, and whether somebody has taken the network.
const LOOK: Duration = Duration::from_millis(100);

impl Pod {
    /// Watches the result of `job` until it is claimed, stopped, taken over, or thrown away.
    pub(super) fn watch_parked(&self, job: Job) {
        let pod = self.clone();
        tokio::spawn(async move {
            let why = pod.until_unwanted(&job).await;
            let Some(why) = why else { return };
            tracing::warn!(key = pod.key(), "{why}; undoing the parked pod");
            // Asked again under the lock: a claim may have come while we waited for it.
            let still = || {
                let unwanted = pod.is_taken() || !pod.is_waited_for(&job);
                pod.is_unclaimed() && unwanted && pod.unpark("expired")
            };
            match pod.end(Duration::ZERO, still).await {
                Err(error) => tracing::error!(%error, "undo the parked pod"),
                Ok(()) => pod.forget_what_is_beside(),
            }
        });
    }

    /// The last of a pod that has ended and that nobody will come for: what its command had made for it.
    pub(super) fn forget_what_is_beside(&self) {
        if !matches!(self.lock().phase, Phase::Ending) {
            return;
        }
        let (journal, bundle) = (&self.shared.journal, &self.shared.options.bundle);
        let name = journal.with(|r| r.name.clone());
        let id = &self.shared.options.group;
        if let Err(error) = beside::forget(journal.dir(), bundle, &name, id) {
            tracing::warn!(%error, "remove what the command kept for the pod");
        }
    }

    /// Why the parked pod is to be undone; None when it is not parked any more.
    async fn until_unwanted(&self, job: &Job) -> Option<&'static str> {
        let interval = self.config().parking_interval();
        let shared = self.shared.journal.with(Record::pod_key).is_some();
        let (mut stale, mut offered) = (false, false);
        let mut tick = Instant::now() + interval;
        loop {
            if !self.is_unclaimed() {
                return None;
            }
            if shared && !offered && job.watchers() == 0 {
                offered = self.park_network(false).await;
            }
            sleep(LOOK.min(tick.saturating_duration_since(Instant::now()))).await;
            if offered && self.is_unclaimed() && self.is_taken() {
                return Some("another supervisor of the pod has taken its network");
            }
            if Instant::now() < tick {
                continue;
            }
            tick = Instant::now() + interval;
            if self.is_waited_for(job) {
                stale = false;
            } else if stale {
                return Some("nobody claimed it");
            } else {
                stale = true;
            }
        }
    }

    /// A request of this sandbox, or one of the same pod under another id, waits for it.
    fn is_waited_for(&self, job: &Job) -> bool {
        job.watchers() > 0 || self.network_record().is_watched()
    }

    fn is_taken(&self) -> bool {
        !self.network_record().is_mine()
    }

    /// Parked; or it was, and its infra process has ended since.
    fn is_unclaimed(&self) -> bool {
        let inner = self.lock();
        inner.unclaimed && matches!(inner.phase, Phase::Parked | Phase::Down)
    }
}
