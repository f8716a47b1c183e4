//! The creation job: netns, CNI ADD, infra process, each with its intent on record before it begins.
//!
//! Owned by the pod, not by a request (law 1). Ends in commit, park or undo, as a value (law 3). The undo runs before
//! the job lets go of the pod's work, under its own clock (law 4).

mod infra;
mod network;

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;

use super::join::{Job, Outcome};
use super::journal::files_dir;
use super::plan::{NetworkPlan, Plan};
use super::record::{Effect, State};
use super::teardown::{self, Scope};
use super::{Phase, Pod, now_nanos, patience};
use crate::error::{Error, Kind, Result};
use crate::infra::{Namespace, PodFiles};
use crate::network::userns;
use crate::process::Child;
use crate::undo::Report;

/// How long a roll-back holds up the next try of the same pod.
const ROLL_BACK_BUDGET: Duration = Duration::from_secs(90);

/// How long a roll-back may go on when a stop is waiting: long enough for a DEL that works to end, and be the only one.
const OVERTAKEN_GRACE: Duration = Duration::from_secs(5);

impl Pod {
    /// CreateSandbox's own effects: the record, directories, pod files and shm.
    pub(super) fn prepare(&self, plan: &Plan, digest: &str) -> Result<()> {
        let before = self.shared.journal.read();
        let Err(error) = self.make_files(plan, digest) else {
            return Ok(());
        };
        // Nothing but files was begun; what cannot be removed stays on record for `delete`.
        let undone = PodFiles::remove(&files_dir(self.shared.journal.dir()))
            .and_then(|()| self.shared.journal.discard(before));
        if let Err(undo) = undone {
            tracing::warn!(error = %undo, "take a refused sandbox back");
        }
        Err(error)
    }

    fn make_files(&self, plan: &Plan, digest: &str) -> Result<()> {
        let journal = &self.shared.journal;
        journal.begin_stage("create", true)?;
        let paths = self.cgroup_paths(plan);
        journal.update(|r| {
            r.state = State::Created;
            r.name = plan.name.clone();
            r.uid = plan.uid.clone();
            r.pod_namespace = plan.pod_namespace.clone();
            r.attempt = plan.attempt;
            r.digest = digest.to_owned();
            r.hostname = plan.hostname.clone();
            r.labels = plan.labels.clone();
            r.annotations = plan.annotations.clone();
            r.network.ports = plan.ports.clone();
            r.network.ours = plan.owns_network();
            r.network.host = plan.network == NetworkPlan::Host;
            r.cgroup = Some(paths.pod);
            r.cgroup_ours = paths.ours;
            r.infra_cgroup = Some(paths.infra);
            r.effects.files = Effect::Intent;
        })?;
        let files = PodFiles {
            // Empty on the host's network: the host's name then.
            hostname: plan.hostname.clone(),
            dns: plan.dns.clone(),
            host_network: plan.network == NetworkPlan::Host,
            host_ipc: plan.infra.ipc == Namespace::Host,
            shm_size: plan.shm_size(),
        };
        let made = files.make(&files_dir(self.shared.journal.dir()))?;
        journal.update(|r| {
            r.files = Some(made);
            r.effects.files = Effect::Done;
        })?;
        journal.end_stage(None);
        Ok(())
    }

    /// Runs the creation to its end, then commits, parks or undoes it.
    pub(super) async fn run_creation(
        self,
        plan: Arc<Plan>,
        job: Job,
        outcome: watch::Sender<Option<Outcome>>,
    ) {
        let _work = self.shared.work.lock().await;
        let result = match self.is_current(&job) {
            true => self.build_unless_cancelled(plan, &job).await,
            // Stopped, or shut down, while it waited for its turn.
            false => Err(stopping()),
        };
        if job.is_leaving() && matches!(self.lock().phase, Phase::Ending) {
            return self.finish_left(&job, result, &outcome).await;
        }
        match result {
            Ok(child) => self.finish_creation(&job, child, &outcome).await,
            // Whoever cancelled waits for our turn to end, and undoes everything from the record.
            Err(error) if !self.is_current(&job) => {
                self.shared.journal.end_stage(Some(&error));
                outcome.send_replace(Some(Outcome::Failed(
                    Kind::Cancelled,
                    stopping().to_string(),
                )));
            }
            Err(error) if job.is_second() => {
                self.shared.journal.end_stage(Some(&error));
                self.roll_back().await;
                self.shared.journal.note(|r| r.state = State::Created);
                outcome.send_replace(Some(Outcome::Elsewhere));
            }
            Err(error) => {
                self.shared.journal.end_stage(Some(&error));
                self.network_record().note_end(self.config(), &error);
                self.shared.journal.note(|r| {
                    r.state = State::NotReady;
                    r.reason = Some(error.to_string());
                });
                tracing::warn!(pod = %self.shared.options.group, %error, "creation failed; rolling back");
                outcome.send_replace(Some(Outcome::Failed(told_as(&error), error.to_string())));
                tokio::select! {
                    () = self.roll_back() => {}
                    // A stop has limits of its own and begins where this was dropped; a DEL killed half-way is sent again.
                    () = overtaken(&job) => {}
                }
            }
        }
    }

    /// Still the pod's creation, and nobody wants it stopped.
    fn is_current(&self, job: &Job) -> bool {
        let phase = &self.lock().phase;
        matches!(phase, Phase::Starting(current) if current.is(job))
            && !job.is_cancelled()
            && !job.is_leaving()
    }

    async fn build_unless_cancelled(&self, plan: Arc<Plan>, job: &Job) -> Result<Child> {
        let (pod, work) = (self.clone(), job.clone());
        // A task of its own, so that a panic is an error and not the end of the job.
        let mut building = tokio::spawn(async move { pod.build(&plan, &work).await });
        tokio::select! {
            built = &mut building => return built.unwrap_or_else(|e| Err(panicked(&e))),
            () = job.cancelled() => {}
        }
        // Dropping the build kills a plugin at work (its helper's process group); DEL is owed by the record. Waited for:
        // until it is dropped it holds the lock of the network's record.
        building.abort();
        match building.await {
            Ok(built) => built,
            Err(_) => Err(stopping()),
        }
    }

    async fn finish_creation(
        &self,
        job: &Job,
        child: Child,
        outcome: &watch::Sender<Option<Outcome>>,
    ) {
        let claimed = job.is_claimed();
        self.watch_infra(child);
        if !self.is_current(job) {
            // Stop or shutdown has taken over; it waits for our work lock and undoes from the record.
            outcome.send_replace(Some(Outcome::Failed(
                Kind::Cancelled,
                stopping().to_string(),
            )));
            return;
        }
        {
            let mut inner = self.lock();
            inner.unclaimed = !claimed;
            inner.phase = match claimed {
                true => Phase::Ready,
                false => Phase::Parked,
            };
        }
        self.shared.journal.note(|r| {
            r.state = if claimed { State::Ready } else { State::Parked };
            r.reason = None;
            r.ready_at = claimed.then(now_nanos);
        });
        self.shared.journal.end_stage(None);
        tracing::info!(pod = %self.shared.options.group, claimed, "pod is up");
        if claimed {
            outcome.send_replace(Some(Outcome::Committed));
            // Somebody's: not to be found by another supervisor of the pod any more.
            if let Err(error) = self.network_record().withdraw(self.config()).await {
                tracing::warn!(%error, "take the network off the index");
            }
        } else {
            outcome.send_replace(Some(Outcome::Parked));
            self.watch_parked(job.clone());
        }
    }

    async fn roll_back(&self) {
        self.shared.journal.note_stage("roll-back", false);
        let report = self.undo_creation().await;
        self.shared.journal.end_stage(None);
        for (step, error) in &report.owed {
            tracing::error!(step, %error, "undo is still owed");
        }
        let mut inner = self.lock();
        if matches!(inner.phase, Phase::Starting(_)) {
            // The request is still on record: the next StartSandbox may try again.
            inner.phase = Phase::Created;
        }
        drop(inner);
        self.retry_network();
    }

    pub(super) async fn undo_creation(&self) -> Report {
        teardown::undo(
            self.config(),
            &self.shared.reaper,
            &self.shared.journal,
            Scope::creation(),
            patience(ROLL_BACK_BUDGET),
        )
        .await
    }

    async fn build(&self, plan: &Plan, job: &Job) -> Result<Child> {
        let journal = &self.shared.journal;
        journal.update(|r| {
            r.state = State::Starting;
            // Those of an earlier try would pile up.
            r.stages.retain(|s| s.name == "create");
        })?;
        if journal.with(|r| r.effects.owe_creation()) {
            // An earlier try that could not be rolled back whole: a second one on top would lose track of the first.
            journal.begin_stage("roll-back", false)?;
            teardown::verdict(&self.undo_creation().await)?;
            journal.end_stage(None);
        }
        journal.note(|r| r.infra = None);
        let mut spec = plan.infra.clone();
        match &plan.network {
            NetworkPlan::Host => {}
            NetworkPlan::Given(path) => {
                journal.update(|r| r.network.netns = Some(path.clone()))?;
            }
            NetworkPlan::Loopback => {
                let record = self.fresh_place();
                journal.update(|r| r.network.place = record.place().to_owned())?;
                let path = self.make_netns(plan)?;
                journal.end_stage(None);
                spec.network = Namespace::Path(path);
            }
            NetworkPlan::Ours(wanted) => {
                let Some(path) = self.make_network(plan, wanted).await? else {
                    job.come_second();
                    return Err(second());
                };
                spec.network = Namespace::Path(path);
            }
        }
        if job.is_leaving() {
            return Err(stopping());
        }
        if let (true, Namespace::Path(path)) = (owns_user(plan), &spec.network) {
            // Made with the netns, which it owns.
            spec.user = Namespace::Path(userns::user_path(path));
            spec.uid_mappings.clear();
            spec.gid_mappings.clear();
        }
        let child = self.make_infra(spec).await?;
        journal.begin_stage("ready", false)?;
        Ok(child)
    }
}

/// What a caller is told a failed creation's kind is. A bound of ours that passed is no deadline of the caller's: told as
/// one it would mean that the work goes on.
fn told_as(error: &Error) -> Kind {
    match error.kind() {
        Kind::Deadline => Kind::Other,
        kind => kind,
    }
}

/// A new user namespace of the pod's, and a netns of ours that it has to own.
fn owns_user(plan: &Plan) -> bool {
    plan.owns_network() && plan.infra.user == Namespace::New
}

/// Resolves when somebody has been waiting for the job to stop for some time.
async fn overtaken(job: &Job) {
    job.cancelled().await;
    tokio::time::sleep(OVERTAKEN_GRACE).await;
}

fn stopping() -> Error {
    Error::new(Kind::Cancelled, "start sandbox: the pod is being stopped")
}

fn second() -> Error {
    Error::new(
        Kind::Busy,
        "start sandbox: another supervisor makes this pod",
    )
}

fn panicked(error: &tokio::task::JoinError) -> Error {
    Error::new(
        Kind::Other,
        format!("create the pod: its job ended early ({error}); see the supervisor's log"),
    )
}
