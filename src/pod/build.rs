//! The creation job: netns, CNI ADD, infra process, each with its intent on record before it begins.
//!
//! Owned by the pod, not by a request (law 1). Ends in commit, park or undo, as a value (law 3). The undo runs before
//! the job lets go of the pod's work, under its own clock (law 4).

mod infra;
mod network;

use std::sync::Arc;
use std::time::Duration;

use tokio::time::timeout;

use super::history::{Event, ROLL_BACK};
use super::join::Job;
use super::journal::files_dir;
use super::plan::{NetworkPlan, Plan};
use super::record::{Effect, State};
use super::teardown::{self, Scope};
use super::{Phase, Pod, now_nanos, patience};
use crate::error::{Error, Kind, Result};
use crate::failpoint;
use crate::infra::{Namespace, PodFiles};
use crate::network::userns;
use crate::process::Child;
use crate::undo::Report;

/// How long what an earlier try may have left holds up the next one.
const LEFT_OVER_BUDGET: Duration = Duration::from_secs(90);

/// How long a try of a roll-back may go on when a stop is waiting: long enough for a DEL that works to end, and be the only
/// one.
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
        let labels = plan.selinux.labels()?;
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
            r.resources = plan.resources.clone();
            r.overhead = plan.overhead.clone();
            r.network.ports = plan.ports.clone();
            r.network.ours = plan.owns_network();
            r.network.host = plan.network == NetworkPlan::Host;
            r.cgroup = Some(paths.pod);
            r.cgroup_ours = paths.ours;
            r.infra_cgroup = Some(paths.infra);
            r.selinux = labels.clone();
            r.effects.files = Effect::Intent;
        })?;
        let files = PodFiles {
            // Empty on the host's network: the host's name then.
            hostname: plan.hostname.clone(),
            dns: plan.dns.clone(),
            host_network: plan.network == NetworkPlan::Host,
            host_ipc: plan.infra.ipc == Namespace::Host,
            shm_size: plan.shm_size(),
            label: labels.map(|l| l.files),
        };
        failpoint::hit("files.make.before")?;
        let made = files.make(&files_dir(self.shared.journal.dir()))?;
        failpoint::hit("files.make.after")?;
        journal.update(|r| {
            r.files = Some(made);
            r.effects.files = Effect::Done;
        })?;
        journal.end_stage(None);
        Ok(())
    }

    /// Runs the creation to its end, then commits, parks or undoes it.
    pub(super) async fn run_creation(self, plan: Arc<Plan>, job: Job) {
        let _reporting = self.report();
        let _work = self.shared.work.lock().await;
        let result = match self.is_current(&job) {
            true => self.build_unless_stopped(plan, &job).await,
            // Stopped, or shut down, while it waited for its turn.
            false => Err(stopping()),
        };
        if job.is_leaving() && matches!(self.lock().phase, Phase::Ending) {
            return self.finish_left(&job, result).await;
        }
        match result {
            Ok(child) => self.finish_creation(&job, child).await,
            // Whoever cancelled waits for our turn to end, and undoes everything from the record.
            Err(error) if !self.is_current(&job) => {
                self.shared.journal.end_stage(Some(&error));
                self.count_created("cancelled");
                job.fail(Kind::Cancelled, stopping().to_string());
            }
            Err(error) if job.is_second() => {
                self.shared.journal.end_stage(Some(&error));
                self.roll_back().await;
                self.shared.journal.note(|r| r.state = State::Created);
                job.fail(Kind::Busy, "another sandbox of the same pod came first");
            }
            Err(error) => {
                let stage = self.shared.journal.progress().stage;
                self.shared
                    .journal
                    .happened(Event::Failed, &stage, Some(&error), false);
                self.shared.journal.end_stage(Some(&error));
                self.count_created("failed");
                let told = told_as(&error);
                self.network_record().note_end(self.config(), told, &error);
                self.shared.journal.note(|r| {
                    r.state = State::NotReady;
                    r.reason = Some(error.to_string());
                });
                tracing::warn!(key = self.key(), stage, %error, "creation failed; rolling back");
                job.fail(told, error.to_string());
                tokio::select! {
                    () = self.roll_back() => {}
                    // A stop has limits of its own and begins where this was dropped; a DEL killed half-way is sent again.
                    () = self.overtaken(&job) => {}
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

    async fn build_unless_stopped(&self, plan: Arc<Plan>, job: &Job) -> Result<Child> {
        let (pod, work) = (self.clone(), job.clone());
        // A task of its own, so that a panic is an error and not the end of the job.
        let mut building = tokio::spawn(async move { pod.build(&plan, &work).await });
        tokio::select! {
            built = &mut building => return built.unwrap_or_else(|e| Err(panicked(&e))),
            () = job.cancelled() => {}
            () = job.unclaimed(), if !self.config().parking.enabled => {}
        }
        // Dropping the build kills a plugin at work (its helper's process group); DEL is owed by the record. Waited for:
        // until it is dropped it holds the lock of the network's record.
        building.abort();
        match building.await {
            Ok(built) => built,
            Err(_) => Err(stopping()),
        }
    }

    async fn finish_creation(&self, job: &Job, child: Child) {
        failpoint::pass("commit.before");
        self.watch_infra(child);
        if !self.is_current(job) {
            // Stop or shutdown has taken over; it waits for our work lock and undoes from the record.
            self.count_created("cancelled");
            job.fail(Kind::Cancelled, stopping().to_string());
            return;
        }
        // Told only once the pod is in the state that they ask for: nothing waits until then.
        let claimed = {
            let mut inner = self.lock();
            let claimed = job.settle(());
            inner.unclaimed = !claimed;
            inner.enter(match claimed {
                true => Phase::Ready,
                false => Phase::Parked,
            });
            claimed
        };
        if !claimed {
            self.shared.journal.happened(Event::Parked, "", None, false);
        }
        self.count_created(if claimed { "committed" } else { "parked" });
        self.shared.journal.note(|r| {
            r.state = if claimed { State::Ready } else { State::Parked };
            r.reason = None;
            r.ready_at = claimed.then(now_nanos);
        });
        self.shared.journal.end_stage(None);
        tracing::info!(key = self.key(), claimed, "pod is up");
        failpoint::pass("commit.after");
        if claimed {
            // Somebody's: not to be found by another supervisor of the pod any more.
            if let Err(error) = self.network_record().withdraw(self.config()).await {
                tracing::warn!(%error, "take the network off the index");
            }
        } else {
            failpoint::pass("park.after");
            self.watch_parked(job.clone());
        }
    }

    /// For as long as it takes: the pod's key is held meanwhile, and who asks for it is told what is in the way. What
    /// keeps failing is tried again after at most a minute, at once when the pod is stopped or removed.
    async fn roll_back(&self) {
        failpoint::pass("roll-back.before");
        self.shared.journal.note_stage(ROLL_BACK, false);
        self.undo_creation(Duration::MAX).await;
        self.shared.journal.end_stage(None);
        let mut inner = self.lock();
        if matches!(inner.phase, Phase::Starting(_)) {
            // The request is still on record: the next StartSandbox may try again.
            inner.enter(Phase::Created);
        }
    }

    pub(super) async fn undo_creation(&self, budget: Duration) -> Report {
        teardown::undo(
            self.config(),
            &self.shared.reaper,
            &self.shared.journal,
            Scope::creation(),
            patience(budget),
            &self.shared.undoing,
        )
        .await
    }

    /// Resolves when somebody else wants to undo the pod, and no try that may still work is cut short by it.
    async fn overtaken(&self, job: &Job) {
        job.cancelled().await;
        let _ = timeout(OVERTAKEN_GRACE, self.shared.undoing.idle()).await;
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
            journal.begin_stage(ROLL_BACK, false)?;
            teardown::verdict(&self.undo_creation(LEFT_OVER_BUDGET).await)?;
            journal.end_stage(None);
        }
        journal.note(|r| r.infra = None);
        let mut spec = plan.infra.clone();
        let mut owner = None;
        match &plan.network {
            NetworkPlan::Host => {}
            NetworkPlan::Given(path) => {
                journal.update(|r| r.network.netns = Some(path.clone()))?;
                if spec.user == Namespace::New {
                    owner = userns::of_given(path)?;
                }
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
            // Pinned with the netns, which it owns.
            spec.user = Namespace::Path(userns::user_path(path));
            spec.uid_mappings.clear();
            spec.gid_mappings.clear();
        }
        let child = self.make_infra(spec, owner).await?;
        journal.begin_stage("ready", false)?;
        Ok(child)
    }
}

/// What a caller is told a failed creation's kind is. A bound of ours that passed is no deadline of the caller's: told as
/// one it would mean that the work goes on.
pub(super) fn told_as(error: &Error) -> Kind {
    match error.kind() {
        Kind::Deadline => Kind::Other,
        kind => kind,
    }
}

/// A user namespace of the pod's, and a netns of ours that it has to own.
fn owns_user(plan: &Plan) -> bool {
    plan.owns_network() && plan.infra.user != Namespace::Host
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
