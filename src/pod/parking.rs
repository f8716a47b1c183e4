//! Results that nobody was there to take: how long they live.
//!
//! A parked pod lives between one and two intervals after its last waiter left: a tick that sees no waiter marks it
//! stale, the next one that still sees none undoes it, and the supervisor leaves.

use std::fs;
use std::time::Duration;

use super::join::Job;
use super::{Phase, Pod, record};

impl Pod {
    /// Watches the result of `job` until it is claimed, stopped, or thrown away.
    pub(super) fn watch_parked(&self, job: Job) {
        let pod = self.clone();
        let interval = Duration::from_secs_f64(self.config().parking.interval);
        tokio::spawn(async move {
            if !job.expired(interval, || pod.is_unclaimed()).await {
                return;
            }
            tracing::warn!(pod = %pod.shared.options.group, "nobody claimed the parked pod; undoing it");
            // Asked again under the lock: a claim may have come while we waited for it.
            let still = || pod.is_unclaimed() && job.watchers() == 0;
            if let Err(error) = pod.end(Duration::ZERO, still).await {
                tracing::error!(%error, "undo the parked pod");
            }
            pod.forget_command_files();
        });
    }

    /// The command that made the pod keeps its bundle beside our journal, and removes it with the pod. Nobody will come
    /// back for one that was never taken.
    fn forget_command_files(&self) {
        let (dir, bundle) = (self.shared.journal.dir(), &self.shared.options.bundle);
        if bundle.parent() != Some(dir) || dir.join(record::FILE).exists() {
            return;
        }
        // What else is in the directory is somebody's, and keeps it.
        let removed = fs::remove_dir_all(bundle).and_then(|()| fs::remove_dir(dir));
        if let Err(error) = removed {
            tracing::warn!(%error, dir = %dir.display(), "directory of a pod that nobody took left behind");
        }
    }

    /// Parked; or it was, and its infra process has ended since.
    fn is_unclaimed(&self) -> bool {
        let inner = self.lock();
        inner.unclaimed && matches!(inner.phase, Phase::Parked | Phase::Down)
    }
}
