//! Who goes on retrying an undo that fails: the supervisor while its pod is there, and as a *keeper* of its DEL after that.
//!
//! A keeper is a supervisor whose pod was shut down with a DEL still owed: its socket is gone, its journal too, it only
//! waits and retries, for `cni.keeper_time`; what is owed then is left to `podvisor gc` and to the next supervisor that
//! starts on the node. Promises one log line per try.

use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::time::{Instant, sleep, timeout};

use super::record::{Effect, Record, State};
use super::teardown::{self, Scope};
use super::{Phase, Pod, gc, now_nanos, patience};
use crate::failpoint;
use crate::network::{FIRST_PAUSE, Holder, LONGEST_PAUSE, NetworkRecord};
use crate::process::Identity;

/// How soon a keeper sees that somebody else has done its work.
const LOOK: Duration = Duration::from_secs(1);

/// How soon it is seen that a process has ended which could not be killed.
const LOOK_AGAIN: Duration = Duration::from_secs(5);

/// How the reason begins of a pod whose stop has failed.
pub(super) const NOT_STOPPED: &str = "not stopped";

impl Pod {
    /// Retries in the background what stop or the death of the infra process could not finish, until it is done or the
    /// pod is made again or shut down.
    pub(super) fn retry_undo(&self) {
        self.note_stopped();
        if !self.owes_undo() || self.shared.retrying.swap(true, Ordering::Relaxed) {
            return;
        }
        let pod = self.clone();
        tokio::spawn(async move {
            let mut pause = FIRST_PAUSE;
            while pod.owes_undo() {
                let hangs = pod.containers().is_any_alive(true);
                sleep(if hangs { pause.min(LOOK_AGAIN) } else { pause }).await;
                let _work = pod.shared.work.lock().await;
                // Stopped, or made again, while we waited for our turn?
                if !pod.owes_undo() {
                    break;
                }
                if matches!(pod.lock().phase, Phase::Stopping) {
                    pod.containers().kill_what_is_left().await;
                }
                let scope = match pod.lock().phase {
                    Phase::Starting(_) => continue,
                    Phase::Stopping | Phase::Stopped => Scope::pod(),
                    _ => Scope::creation(),
                };
                let once = patience(Duration::ZERO);
                let (config, reaper) = (pod.config(), &pod.shared.reaper);
                let (journal, undoing) = (&pod.shared.journal, &pod.shared.undoing);
                teardown::undo(config, reaper, journal, scope, once, undoing).await;
                pod.note_stopped();
                pause = (pause * 2).min(LONGEST_PAUSE);
            }
            let _work = pod.shared.work.lock().await;
            pod.shared.retrying.store(false, Ordering::Relaxed);
            // What was killed may have ended by itself meanwhile; and a stop that came in between has found us at work.
            pod.retry_undo();
        });
    }

    /// A stop that failed has come to its end without being asked again. Under the turn of whoever works.
    fn note_stopped(&self) {
        if self.owes_undo() || self.containers().is_any_alive(false) {
            return;
        }
        {
            let mut inner = self.lock();
            if !matches!(inner.phase, Phase::Stopping) {
                return;
            }
            inner.enter(Phase::Stopped);
        }
        self.shared.journal.note(|r| {
            r.state = State::Stopped;
            // What was the matter before that is still true.
            r.reason = r.reason.take().filter(|why| !why.starts_with(NOT_STOPPED));
        });
        tracing::info!(pod = %self.shared.options.group, "stopped at last");
    }

    /// Stays until the DEL that is owed has succeeded, here or elsewhere, or the keeper's time is over, or SIGTERM. For
    /// a process that serves nobody any more.
    pub async fn keep(&self) {
        // A creation may go on without its pod, for its network's sake.
        let goes_on = self.lock().left.is_some();
        if goes_on {
            drop(self.shared.work.lock().await);
        }
        self.keep_parked().await;
        let record = self.network_record();
        if !record.owes_del() {
            return;
        }
        let (config, id) = (self.config(), &self.shared.options.group);
        let limit = config.keeper_time();
        tracing::warn!(pod = %id, ?limit, "network clean-up pending; staying to retry");
        failpoint::pass("keeper.begin");
        let mut quit = self.shared.quit.subscribe();
        let kept = timeout(limit, async {
            tokio::select! {
                () = keep_trying(self, &record) => {}
                _ = quit.wait_for(|q| *q) => {}
            }
        });
        if kept.await.is_err() {
            tracing::error!(pod = %id, "network clean-up still pending; leaving it to podvisor gc");
        }
    }

    /// Something is left of a pod that nobody wants: a DEL, or, of one that was stopped, anything that is not undone yet.
    fn owes_undo(&self) -> bool {
        let phase = self.lock().phase.clone();
        let left = |r: &Record| {
            let e = &r.effects;
            // Of the DEL the record on disk tells: somebody else may have sent it.
            [e.infra, e.pins, e.cgroup, e.netns, e.files]
                .iter()
                .any(|effect| *effect != Effect::None)
        };
        match phase {
            Phase::Ending | Phase::Ready | Phase::Parked => false,
            Phase::Stopping | Phase::Stopped if self.shared.journal.with(left) => true,
            Phase::Stopping if self.shared.containers.is_any_alive(true) => true,
            _ => self.network_record().owes_del(),
        }
    }

    /// What is written beside the network's markers before anything of it exists.
    pub(super) fn holder(&self, netns: PathBuf) -> Holder {
        let journal = &self.shared.journal;
        journal.with(|r| Holder {
            namespace: r.namespace.clone(),
            sandbox_id: r.id.clone(),
            name: r.name.clone(),
            uid: r.uid.clone(),
            pod_namespace: r.pod_namespace.clone(),
            attempt: r.attempt,
            netns,
            boot_id: r.boot_id.clone(),
            supervisor: r.supervisor,
            begun: now_nanos(),
            ..Holder::default()
        })
    }
}

async fn keep_trying(pod: &Pod, record: &NetworkRecord) {
    let own = Identity::own().ok();
    let mut pause = FIRST_PAUSE;
    loop {
        let next = Instant::now() + pause;
        while Instant::now() < next {
            sleep(LOOK.min(next.saturating_duration_since(Instant::now()))).await;
            // Done by somebody else, or taken over by a new supervisor of the same id.
            if !record.owes_del() || record.held_by().is_some_and(|by| Some(by) != own) {
                return;
            }
        }
        failpoint::pass("keeper.try.before");
        match gc::settle(pod.config(), &pod.shared.reaper, record).await {
            Ok(()) => {
                tracing::info!(step = "cni-del", "network cleaned up at last");
                return;
            }
            Err(error) => {
                let tries = record.debt().map_or(0, |d| d.tries);
                tracing::warn!(step = "cni-del", tries, %error, "network not cleaned up");
            }
        }
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}
