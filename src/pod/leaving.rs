//! A pod that is shut down after the caller of its creation has left: everything goes but its network, which is parked
//! for the next supervisor of the same pod, and this process stays as its *keeper*.
//!
//! Owns the decision, and the keeper's life: no socket, no journal, until the network is taken over, or nobody has come
//! within one to two parking intervals, or SIGTERM. Must never leave a network behind that is not whole.

use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::build::told_as;
use super::join::Job;
use super::journal::files_dir;
use super::plan::NetworkPlan;
use super::record::{Effect, Record};
use super::{Phase, Pod, gc};
use crate::error::{Error, Kind, Result};
use crate::infra::PodFiles;
use crate::process::Child;

/// What a request hears whose creation is left to its network.
const SHUT_DOWN: &str = "start sandbox: the pod was shut down";

/// How often a keeper looks whether somebody has taken the network over.
const LOOK: Duration = Duration::from_millis(200);

/// A caller that goes away and a shutdown that it sends may come in one moment: how often, and how long apart, it is
/// looked whether it has left.
const CALLER_LOOKS: u32 = 10;
const CALLER_PAUSE: Duration = Duration::from_millis(10);

/// For those who watch under another id to read why there is no network: they look every 50 ms, when the machine lets them.
const HEARING: Duration = Duration::from_secs(2);

impl Pod {
    /// ShutdownSandbox of a creation that nobody waits for: everything is undone but the network. None: that does not
    /// apply, and the pod is to be undone whole.
    pub(super) async fn leave_network(&self) -> Option<Result<()>> {
        for _ in 0..CALLER_LOOKS {
            match self.making() {
                Some(job) if job.is_claimed() => sleep(CALLER_PAUSE).await,
                _ => break,
            }
        }
        let making = self.making().filter(|job| !job.is_claimed());
        let parked = matches!(self.lock().phase, Phase::Parked);
        if making.is_none() && !self.may_leave(parked) {
            return None;
        }
        if let Some(job) = making {
            // Nothing waits between this and the next look: the creation stops before its next step.
            job.leave();
            if self.has_only_network() {
                return Some(self.leave_at_once(job).await);
            }
        }
        let _work = self.shared.work.lock().await;
        if matches!(self.lock().phase, Phase::Ending) {
            return Some(Ok(()));
        }
        let unclaimed = matches!(self.lock().phase, Phase::Parked | Phase::Starting(_));
        let kept = unclaimed && self.park_network(true).await;
        self.lock().enter(Phase::Ending);
        let result = self.shut_down_everything(Duration::ZERO, kept).await;
        self.shared.ended.send_replace(true);
        Some(result)
    }

    /// The creation under way, where its network may stay: an ADD has begun, so that there is something to save.
    fn making(&self) -> Option<Job> {
        let job = match &self.lock().phase {
            Phase::Starting(job) if !job.is_cancelled() && !job.is_over() => job.clone(),
            _ => return None,
        };
        self.may_leave(self.network_record().owes_del())
            .then_some(job)
    }

    fn may_leave(&self, there: bool) -> bool {
        let plan = self.lock().plan.clone();
        there
            && self.config().parking.enabled
            && self.config().parking.park_network_on_shutdown
            && plan.is_some_and(|p| matches!(p.network, NetworkPlan::Ours(_)))
            && self.shared.journal.with(Record::pod_key).is_some()
    }

    fn has_only_network(&self) -> bool {
        let none = |r: &Record| {
            let e = &r.effects;
            [e.infra, e.pins, e.cgroup] == [Effect::None; 3]
        };
        self.shared.journal.with(none)
    }

    /// A plugin is at work: it may finish, within its bound, and the reply does not wait for it.
    async fn leave_at_once(&self, job: Job) -> Result<()> {
        {
            let mut inner = self.lock();
            inner.enter(Phase::Ending);
            inner.left = Some(job.clone());
        }
        // Whoever still waits is told now: the plugin may take minutes, and the socket goes with this request.
        job.fail(Kind::Cancelled, SHUT_DOWN);
        if let Err(error) = self.network_record().set_keeper() {
            tracing::warn!(%error, "not marked as the network's keeper");
        }
        let files = PodFiles::remove(&files_dir(self.shared.journal.dir()));
        let closed = files.and_then(|()| self.shared.journal.close());
        self.end_exit().await;
        self.shared.ended.send_replace(true);
        closed
    }

    /// The end of a creation whose pod is gone already.
    pub(super) async fn finish_left(&self, job: &Job, built: Result<Child>) {
        self.count_created("cancelled");
        job.fail(Kind::Cancelled, SHUT_DOWN);
        if !job.is_cancelled() && self.park_network(true).await {
            return;
        }
        let record = self.network_record();
        let error = match built {
            Err(error) => error,
            Ok(_) => Error::new(Kind::Cancelled, "it was stopped"),
        };
        tracing::warn!(%error, "no network to keep; undoing what there is of it");
        record.note_end(self.config(), told_as(&error), &error);
        let report = self.undo_creation(Duration::ZERO).await;
        for (step, error) in &report.owed {
            tracing::error!(step, %error, "undo is still owed");
        }
        let forgotten = match record.owes_del() {
            true => record.let_go(),
            false => {
                record.told(HEARING).await;
                record.remove()
            }
        };
        forgotten.unwrap_or_else(|error| tracing::warn!(%error, "record of the network left"));
    }

    /// Anybody who comes for the same pod may have the network from now on. False: there is none that is whole, or
    /// another supervisor has it.
    pub(super) async fn park_network(&self, keeper: bool) -> bool {
        let (done, key) = self
            .shared
            .journal
            .with(|r| (r.effects.cni == Effect::Done, r.pod_key()));
        let record = self.network_record();
        if !done || key.is_none() || !record.owes_del() {
            return false;
        }
        let keep = self.config().parking_interval() * 2;
        let parked = record.park(self.config(), keeper, keep).await;
        parked.unwrap_or_else(|error| {
            tracing::warn!(%error, "the network cannot be parked");
            false
        })
    }

    /// The keeper of a parked network: stays until it is taken over, or nobody has come, or SIGTERM; then undoes it.
    pub(super) async fn keep_parked(&self) {
        let record = self.network_record();
        let parked = || record.holder().is_some_and(|h| h.is_parked()) && record.owes_del();
        if !parked() {
            return;
        }
        let pod = &self.shared.options.group;
        tracing::info!(%pod, "the network is parked; staying to keep it");
        let interval = self.config().parking_interval();
        let mut quit = self.shared.quit.subscribe();
        let (mut stale, mut tick) = (false, Instant::now() + interval);
        loop {
            let told = tokio::select! {
                () = sleep(LOOK.min(interval)) => false,
                _ = quit.wait_for(|q| *q) => true,
            };
            if !parked() {
                tracing::info!(%pod, "the network is somebody's; leaving");
                return;
            }
            if told {
                break;
            }
            if Instant::now() < tick {
                continue;
            }
            tick = Instant::now() + interval;
            if record.is_watched() {
                stale = false;
            } else if stale {
                break;
            } else {
                stale = true;
            }
        }
        match record.withdraw(self.config()).await {
            Ok(true) => {}
            Ok(false) => return,
            Err(error) => {
                tracing::error!(%error, "the parked network cannot be undone; leaving it to podvisor gc");
                return;
            }
        }
        tracing::warn!(%pod, "nobody came for the parked network; undoing it");
        let undone = match record.let_go() {
            Ok(()) => gc::settle(self.config(), &self.shared.reaper, &record).await,
            Err(error) => Err(error),
        };
        if let Err(error) = undone {
            tracing::error!(%error, "undo the parked network");
        }
    }
}
