//! Stop, shutdown and termination: idempotent, joinable, under their own clocks.

use std::time::{Duration, SystemTime};

use tokio::time::{Instant, sleep_until, timeout};

use super::keeper::NOT_STOPPED;
use super::record::{Effect, State};
use super::teardown::{self, Scope, is_network};
use super::{Phase, Pod, patience};
use crate::container::Status;
use crate::error::{Error, Kind, Result};
use crate::failpoint;
use crate::network::{FIRST_PAUSE, LONGEST_PAUSE};
use crate::undo::Report;

/// Grace of containers when the caller names none: what container tools give.
pub const DEFAULT_GRACE: Duration = Duration::from_secs(10);

/// How long StopSandbox goes on retrying a step that fails before it says "pending".
const STOP_BUDGET: Duration = Duration::from_secs(5);

/// How long Task.Shutdown waits for containers that nobody has been given: containerd gives it 3 s.
const SHUTDOWN_PATIENCE: Duration = Duration::from_secs(2);

/// How long the exit of a process that is gone may take to come from the reaper.
const EXIT_LIMIT: Duration = Duration::from_secs(1);

impl Pod {
    /// StopSandbox: containers with `grace`, then infra, network and files. On return no process of the pod is left.
    ///
    /// Idempotent; a shorter grace than that of a stop under way shortens it. `Busy` with "network clean-up pending" when
    /// everything is down but DEL keeps failing; ask again.
    pub async fn stop(&self, id: &str, grace: Option<Duration>) -> Result<()> {
        self.check_sandbox(id)?;
        self.cancel_creation();
        self.shared.undoing.hurry();
        let grace = grace.unwrap_or(DEFAULT_GRACE);
        self.shared.containers.shorten_grace(grace);
        let turn = self.shared.work.lock();
        let is_ending = matches!(self.lock().phase, Phase::Ending);
        let _work = match is_ending {
            // A removal that is stuck may be at it for long.
            true => timeout(STOP_BUDGET, turn)
                .await
                .map_err(|_| self.still_being_removed())?,
            false => turn.await,
        };
        let phase = self.lock().phase.clone();
        match phase {
            Phase::Ending | Phase::Stopped => return Ok(()),
            _ => self.lock().enter(Phase::Stopping),
        }
        self.unpark("removed");
        let _reporting = self.report();
        self.shared.journal.note_stage("stop", true);
        let result = self.stop_everything(grace).await;
        self.shared.journal.end_stage(result.as_ref().err());
        self.end_exit().await;
        if result.is_ok() {
            // After an error the phase stays: the next stop has to try again.
            self.lock().enter(Phase::Stopped);
        }
        failpoint::pass("stop.record.before");
        let hangs = self.shared.containers.is_any_alive(false);
        self.shared.journal.note(|r| match &result {
            Err(error) if hangs => {
                r.state = State::NotReady;
                r.reason = Some(format!("{NOT_STOPPED}: {error}"));
            }
            _ => r.state = State::Stopped,
        });
        failpoint::pass("stop.record.after");
        self.retry_undo();
        result
    }

    /// ShutdownSandbox: undoes everything, and then the supervisor leaves. Also for a pod that was never created.
    ///
    /// Succeeds with a DEL still owed: that is on the network's record then, and the process stays as its keeper. So it does
    /// for the network of a creation whose caller has left (`leaving`).
    pub async fn shutdown(&self, id: &str) -> Result<()> {
        self.check_id(id)?;
        if let Some(left) = self.leave_network().await {
            return left;
        }
        self.cancel_creation();
        self.shared.undoing.hurry();
        self.shared.containers.shorten_grace(Duration::ZERO);
        self.end(Duration::ZERO, || true).await
    }

    /// Task.Shutdown: leaves when there is nothing left; for the sandbox' own id it tears the pod down (containerd sends
    /// that only for a sandbox it has no record of).
    pub async fn shutdown_task(&self, id: &str) -> Result<()> {
        if self.is_sandbox(id) {
            return self.shutdown(id).await;
        }
        if !self.retire() && self.has_only_unclaimed_containers() {
            // Who says this does not come back for them: containerd, after a Create that timed out.
            let pod = self.clone();
            let leaving = tokio::spawn(async move {
                let stopped = pod.shared.containers.stop_all(Duration::ZERO, true).await;
                if let Err(error) = stopped {
                    tracing::error!(%error, "undo containers that nobody has been given");
                }
                pod.retire();
            });
            let _ = timeout(SHUTDOWN_PATIENCE, leaving).await;
        }
        Ok(())
    }

    fn has_only_unclaimed_containers(&self) -> bool {
        matches!(self.lock().phase, Phase::TaskOnly) && self.shared.containers.are_all_unclaimed()
    }

    /// Leaves if there is nothing to live for; says whether it does. What comes after is refused.
    pub fn retire(&self) -> bool {
        if !self.is_unused() {
            return false;
        }
        self.lock().enter(Phase::Ending);
        if let Err(error) = self.shared.journal.close() {
            tracing::error!(%error, "remove the journal of a supervisor that leaves");
        }
        self.shared.ended.send_replace(true);
        true
    }

    /// Undoes a sandbox that was created and is not being started, if it still is that, with what its command had made for
    /// it; says whether the supervisor leaves.
    pub async fn abandon(&self) -> bool {
        let undone = self.end(Duration::ZERO, || self.is_only_created()).await;
        if let Err(error) = undone {
            tracing::error!(%error, "undo a pod that was created and that nobody has started");
        }
        self.forget_what_is_beside();
        matches!(self.lock().phase, Phase::Ending)
    }

    /// SIGTERM: stops with grace, undoes everything, parked things too, and the supervisor leaves.
    pub async fn terminate(&self) {
        // Whoever ends the process ends the keeper, too; the record stays.
        self.shared.quit.send_replace(true);
        self.cancel_creation();
        // Also what was left to finish its network.
        if let Some(job) = &self.lock().left {
            job.cancel();
        }
        self.shared.containers.shorten_grace(DEFAULT_GRACE);
        match self.end(DEFAULT_GRACE, || true).await {
            Err(error) => tracing::error!(%error, "undo the pod on termination"),
            // Nobody has asked for a removal, and so nobody does the command's part of it.
            Ok(()) => self.forget_what_is_beside(),
        }
    }

    /// Undoes everything, if it is (still) wanted when it is our turn, and lets the supervisor leave, whatever became
    /// of it: what is left is on record.
    pub(super) async fn end(&self, grace: Duration, wanted: impl Fn() -> bool) -> Result<()> {
        let _work = self.shared.work.lock().await;
        if matches!(self.lock().phase, Phase::Ending) || !wanted() {
            return Ok(());
        }
        self.lock().enter(Phase::Ending);
        self.unpark("removed");
        let _reporting = self.report();
        self.shared.journal.note_stage("shutdown", true);
        let result = self.shut_down_everything(grace, false).await;
        self.shared.journal.end_stage(result.as_ref().err());
        failpoint::pass("shutdown.after");
        self.shared.ended.send_replace(true);
        result
    }

    /// After the infra process ended by itself: a pod whose network is ours is taken down at once (its ports must not
    /// point at nothing); one with a caller's netns only turns not ready, its containers live on until they are stopped.
    pub(super) async fn clean_up_after_infra(&self) {
        let _work = self.shared.work.lock().await;
        if !matches!(self.lock().phase, Phase::Down) {
            return;
        }
        if !self.shared.journal.with(|r| r.network.ours) {
            return;
        }
        if let Err(error) = self.stop_everything(Duration::from_secs(2)).await {
            tracing::error!(%error, "clean up after the infra process");
        }
        self.retry_undo();
    }

    async fn stop_everything(&self, grace: Duration) -> Result<()> {
        failpoint::reach("stop.containers.before").await?;
        let stopped = self.shared.containers.stop_all(grace, false).await;
        failpoint::pass("stop.containers.after");
        if let Err(error) = &stopped {
            tracing::error!(%error, "stop containers");
        }
        let report = teardown::undo(
            self.config(),
            &self.shared.reaper,
            &self.shared.journal,
            Scope::pod(),
            patience(STOP_BUDGET),
            &self.shared.undoing,
        )
        .await;
        stopped.and_then(|()| teardown::verdict(&report))
    }

    /// `network_stays`: it is parked, and not to be undone.
    pub(super) async fn shut_down_everything(
        &self,
        grace: Duration,
        network_stays: bool,
    ) -> Result<()> {
        failpoint::pass("shutdown.containers.before");
        if let Err(error) = self.shared.containers.stop_all(grace, true).await {
            tracing::error!(%error, "stop and delete containers");
        }
        let journal = &self.shared.journal;
        // The supervisor's own view of what is left: a container that could not be deleted is undone from its record.
        let left = journal.with(|r| r.containers.values().any(|c| c.status != Status::Stopped));
        let mut scope = Scope::everything();
        scope.network = !network_stays;
        scope.containers = left || !journal.with(|r| r.containers.is_empty());
        let report = self.undo_to_the_end(scope).await;
        self.end_exit().await;
        for (step, error) in &report.owed {
            tracing::error!(step, %error, "undo is still owed");
        }
        failpoint::pass("shutdown.network.before");
        let record = self.network_record();
        if network_stays {
            tracing::info!("the network stays parked");
        } else if record.owes_del() {
            // From now on anybody on the node may send it.
            record.let_go().unwrap_or_else(
                |error| tracing::warn!(%error, "network still marked as this supervisor's"),
            );
        } else if journal.with(|r| r.network.ours && r.effects.netns == Effect::None) {
            record.remove()?;
        }
        failpoint::pass("shutdown.close.before");
        if journal.with(|r| teardown::is_over(r, &report)) {
            return journal.close();
        }
        journal.note(|r| {
            r.state = State::NotReady;
            r.reason = Some(format!(
                "the pod could not be undone whole; `podvisor rm -f {}` tries again",
                r.id
            ));
        });
        teardown::verdict(&report)
    }

    /// A DEL that fails holds nobody up: it stays on the network's record, and with the keeper. What only the journal knows
    /// of is tried for as long as a keeper stays; after that it is on record for `podvisor gc`, `rm` and `delete`.
    async fn undo_to_the_end(&self, scope: Scope) -> Report {
        let (journal, undoing) = (&self.shared.journal, &self.shared.undoing);
        let begun = Instant::now();
        let end = begun + self.config().keeper_time();
        let mut quit = self.shared.quit.subscribe();
        let mut pause = FIRST_PAUSE;
        loop {
            let once = patience(Duration::ZERO);
            let (config, reaper) = (self.config(), &self.shared.reaper);
            let report = teardown::undo(config, reaper, journal, scope, once, undoing).await;
            let failing = report.owed.iter().find(|(step, _)| !is_network(step));
            let Some((step, error)) = failing.filter(|_| Instant::now() + pause < end) else {
                return report;
            };
            journal.note(|r| {
                r.state = State::NotReady;
                r.reason = Some(format!("being removed, {step} fails: {error}"));
            });
            let told_to_go = async {
                let _ = quit.wait_for(|q| *q).await;
                sleep_until(begun + STOP_BUDGET).await;
            };
            let hurried = tokio::select! {
                hurried = undoing.pause(pause) => hurried,
                () = told_to_go => return report,
            };
            pause = if hurried {
                FIRST_PAUSE
            } else {
                (pause * 2).min(LONGEST_PAUSE)
            };
        }
    }

    fn still_being_removed(&self) -> Error {
        let at = self.shared.undoing.now();
        let at = at.map_or_else(String::new, |now| format!(" ({now})"));
        Error::new(
            Kind::Busy,
            format!(
                "stop sandbox {}: it is being removed, which is not done yet{at}; ask again",
                self.shared.options.group
            ),
        )
    }

    fn cancel_creation(&self) {
        if let Phase::Starting(job) = &self.lock().phase {
            job.cancel();
        }
    }

    /// Waiters of a pod that has no infra process to wait for (any more) are answered: 255, an explicit "unknown".
    pub(super) async fn end_exit(&self) {
        if self.lock().infra_watched {
            // It was killed a moment ago; its true exit is on its way from the reaper.
            let mut exit = self.shared.exit.subscribe();
            let _ = timeout(EXIT_LIMIT, exit.wait_for(Option::is_some)).await;
        }
        self.shared.exit.send_if_modified(|exit| {
            let unknown = exit.is_none();
            if unknown {
                *exit = Some((255, SystemTime::now()));
            }
            unknown
        });
    }
}
