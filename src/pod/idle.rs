//! Whether a supervisor has something to live for, and when that may have changed: no timer is spent on asking.

use tokio::sync::watch;

use super::{Phase, Pod};

/// What tells that the pod may have become idle.
#[derive(Debug)]
pub struct Changes {
    phases: watch::Receiver<()>,
    removals: watch::Receiver<()>,
}

impl Changes {
    /// Resolves when the pod's phase has changed, or a container has gone, since this was last called.
    pub async fn next(&mut self) {
        // The senders live as long as the pod, whose handle the caller has.
        tokio::select! {
            _ = self.phases.changed() => {}
            _ = self.removals.changed() => {}
        }
    }
}

impl Pod {
    /// True while there is nothing to live for: no sandbox, no container, and none of them being made.
    pub fn is_unused(&self) -> bool {
        matches!(self.lock().phase, Phase::Empty | Phase::TaskOnly)
            && self.shared.work.try_lock().is_ok()
            && self.shared.containers.list().is_empty()
    }

    /// CreateSandbox was the last that anybody wanted: nothing runs, nothing is being made.
    pub fn is_only_created(&self) -> bool {
        matches!(self.lock().phase, Phase::Created)
    }

    /// Something is being made, undone or waits to be taken: what ends by itself, and of whose end [`Pod::changes`] need
    /// not tell.
    pub fn is_at_work(&self) -> bool {
        self.shared.work.try_lock().is_err() || !self.shared.containers.creations().is_empty()
    }

    /// From here on.
    pub fn changes(&self) -> Changes {
        Changes {
            phases: self.lock().entered.subscribe(),
            removals: self.shared.containers.removals(),
        }
    }
}
