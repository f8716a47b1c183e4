//! The creation job: netns, CNI ADD, infra process, each with its intent on record before it begins.
//!
//! Owned by the pod, not by a request (law 1). Ends in commit, park or undo, as a value (law 3). The undo runs before
//! the job lets go of the pod's work, under its own clock (law 4).

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use serde_json::json;
use tokio::sync::watch;
use tokio::time::{Instant, sleep};

use super::history::{Event, ROLL_BACK};
use super::join::{Job, Outcome};
use super::journal::files_dir;
use super::plan::{NetworkPlan, Plan, Wanted};
use super::record::{Attached, Effect, State};
use super::teardown::{self, Scope};
use super::{Phase, Pod, now_nanos, patience};
use crate::cgroup::{Group, Layout};
use crate::error::{Error, Kind, Result};
use crate::infra::{self, IdMapping, InfraSpec, Namespace, PodFiles};
use crate::network::userns::{self, IdRange};
use crate::network::{self, Attachment, NetworkConf, NetworkRecord, netns};
use crate::process::Child;
use crate::undo::Report;

/// How long a roll-back holds up the next try of the same pod.
const ROLL_BACK_BUDGET: Duration = Duration::from_secs(90);

/// Between looks at a network that another process is at.
const BUSY_PAUSE: Duration = Duration::from_millis(100);

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
        let _reporting = self.report();
        let _work = self.shared.work.lock().await;
        let result = match self.is_current(&job) {
            true => self.build_unless_cancelled(plan, &job).await,
            // Stopped, or shut down, while it waited for its turn.
            false => Err(stopping()),
        };
        match result {
            Ok(child) => self.finish_creation(&job, child, &outcome),
            // Whoever cancelled waits for our turn to end, and undoes everything from the record.
            Err(error) if !self.is_current(&job) => {
                self.shared.journal.end_stage(Some(&error));
                self.count_created("cancelled");
                outcome.send_replace(Some(Outcome::Failed(
                    Kind::Cancelled,
                    stopping().to_string(),
                )));
            }
            Err(error) => {
                let stage = self.shared.journal.progress().stage;
                self.shared
                    .journal
                    .happened(Event::Failed, &stage, Some(&error), false);
                self.shared.journal.end_stage(Some(&error));
                self.count_created("failed");
                self.shared.journal.note(|r| {
                    r.state = State::NotReady;
                    r.reason = Some(error.to_string());
                });
                tracing::warn!(key = self.key(), stage, %error, "creation failed; rolling back");
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
        matches!(phase, Phase::Starting(current) if current.is(job)) && !job.is_cancelled()
    }

    async fn build_unless_cancelled(&self, plan: Arc<Plan>, job: &Job) -> Result<Child> {
        let pod = self.clone();
        // A task of its own, so that a panic is an error and not the end of the job.
        let mut building = tokio::spawn(async move { pod.build(&plan).await });
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

    fn finish_creation(&self, job: &Job, child: Child, outcome: &watch::Sender<Option<Outcome>>) {
        let claimed = job.is_claimed();
        self.watch_infra(child);
        if !self.is_current(job) {
            // Stop or shutdown has taken over; it waits for our work lock and undoes from the record.
            self.count_created("cancelled");
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
        if !claimed {
            self.shared
                .journal
                .happened(Event::Parked, "", None, false);
        }
        self.count_created(if claimed { "committed" } else { "parked" });
        self.shared.journal.note(|r| {
            r.state = if claimed { State::Ready } else { State::Parked };
            r.reason = None;
            r.ready_at = claimed.then(now_nanos);
        });
        self.shared.journal.end_stage(None);
        tracing::info!(key = self.key(), claimed, "pod is up");
        if claimed {
            outcome.send_replace(Some(Outcome::Committed));
        } else {
            outcome.send_replace(Some(Outcome::Parked));
            self.watch_parked(job.clone());
        }
    }

    async fn roll_back(&self) {
        self.shared.journal.note_stage(ROLL_BACK, false);
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

    async fn undo_creation(&self) -> Report {
        teardown::undo(
            self.config(),
            &self.shared.reaper,
            &self.shared.journal,
            Scope::creation(),
            patience(ROLL_BACK_BUDGET),
        )
        .await
    }

    async fn build(&self, plan: &Plan) -> Result<Child> {
        let journal = &self.shared.journal;
        journal.update(|r| {
            r.state = State::Starting;
            // Those of an earlier try would pile up.
            r.stages.retain(|s| s.name == "create");
        })?;
        if journal.with(|r| r.effects.owe_creation()) {
            // An earlier try that could not be rolled back whole: a second one on top would lose track of the first.
            journal.begin_stage(ROLL_BACK, false)?;
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
                let path = self.make_netns(plan)?;
                journal.end_stage(None);
                spec.network = Namespace::Path(path);
            }
            NetworkPlan::Ours(wanted) => {
                spec.network = Namespace::Path(self.make_network(plan, wanted).await?)
            }
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

    async fn make_network(&self, plan: &Plan, wanted: &[Wanted]) -> Result<PathBuf> {
        let (config, reaper, journal) = (self.config(), &self.shared.reaper, &self.shared.journal);
        // Read first: an unknown network must not cost a netns.
        let load = |w: &Wanted| {
            let name = Some(w.network.as_str()).filter(|n| !n.is_empty());
            network::load_conf(config, name)
        };
        let confs: Vec<NetworkConf> = wanted.iter().map(load).collect::<Result<_>>()?;
        let record = self.network_record();
        if record.owes_del() {
            journal.begin_stage("cni-del", false)?;
            self.del_before_add(&record).await?;
            journal.end_stage(None);
        }
        // On disk, so that the netns and the network have an owner whatever becomes of the runtime directory.
        record.hold(&self.holder(self.netns_path()))?;
        let path = self.make_netns(plan)?;
        journal.end_stage(None);
        journal.begin_stage("cni-add", false)?;
        journal.update(|r| {
            r.network.name = confs.first().map(|c| c.name.clone()).unwrap_or_default();
            r.network.attachments.clear();
            r.effects.cni = Effect::Intent;
        })?;
        for (n, (wanted, conf)) in wanted.iter().zip(&confs).enumerate() {
            let attachment = self.attachment(plan, wanted, n == 0, path.clone());
            let result = network::add(config, reaper, &record, conf, &attachment).await?;
            journal.update(|r| {
                if r.network.attachments.iter().all(|a| a.ips.is_empty()) {
                    r.network.ips = result.ips.clone();
                }
                r.network.attachments.push(Attached {
                    name: conf.name.clone(),
                    ifname: wanted.ifname.clone(),
                    ips: result.ips,
                    facts: result.facts,
                    timings: result.timings,
                });
            })?;
        }
        journal.update(|r| r.effects.cni = Effect::Done)?;
        self.write_hosts(&journal.with(|r| r.network.ips.clone()));
        journal.end_stage(None);
        Ok(path)
    }

    /// The DEL that an earlier life of the pod owes. A keeper or `podvisor gc` may be at it just now.
    async fn del_before_add(&self, record: &NetworkRecord) -> Result<()> {
        let limit = self.config().del_timeout();
        let end = Instant::now() + limit;
        loop {
            let sent = network::del(self.config(), &self.shared.reaper, record, limit).await;
            match sent {
                Err(e) if e.kind() == Kind::Busy && Instant::now() < end => sleep(BUSY_PAUSE).await,
                Err(e) => return Err(e),
                Ok(()) => return netns::unpin(&self.netns_path()),
            }
        }
    }

    fn netns_path(&self) -> PathBuf {
        let o = &self.shared.options;
        netns::path(&o.config, &o.namespace, &o.group)
    }

    fn make_netns(&self, plan: &Plan) -> Result<PathBuf> {
        let path = self.netns_path();
        let journal = &self.shared.journal;
        journal.begin_stage("netns", false)?;
        journal.update(|r| {
            r.network.netns = Some(path.clone());
            r.effects.netns = Effect::Intent;
        })?;
        if owns_user(plan) {
            let ranges = |maps: &[IdMapping]| -> Vec<IdRange> {
                let range = |m: &IdMapping| IdRange {
                    inside: m.container_id,
                    outside: m.host_id,
                    size: m.size,
                };
                maps.iter().map(range).collect()
            };
            let (uids, gids) = (&plan.infra.uid_mappings, &plan.infra.gid_mappings);
            userns::make(&self.shared.reaper, &path, &ranges(uids), &ranges(gids))?;
        } else {
            netns::make(&path)?;
        }
        journal.update(|r| r.effects.netns = Effect::Done)?;
        Ok(path)
    }

    async fn make_infra(&self, mut spec: InfraSpec) -> Result<Child> {
        let journal = &self.shared.journal;
        journal.begin_stage("infra", false)?;
        let layout = Layout::detect()?;
        let (pod, infra_path) = journal.with(|r| (r.cgroup.clone(), r.infra_cgroup.clone()));
        if let Some(path) = infra_path
            .as_ref()
            .filter(|_| !journal.with(|r| r.cgroup_ours))
        {
            refuse_foreign(&Group::from_spec(&layout, path)?)?;
        }
        journal.update(|r| r.effects.cgroup = Effect::Intent)?;
        if let Some(path) = pod.filter(|_| journal.with(|r| r.cgroup_ours)) {
            Group::new(&layout, &path)?.create()?;
        }
        if let Some(path) = infra_path {
            let group = Group::from_spec(&layout, &path)?;
            group.create()?;
            spec.cgroup_dirs = group.dirs();
        }
        journal.update(|r| {
            r.effects.cgroup = Effect::Done;
            r.effects.infra = Effect::Intent;
            r.infra_spec = Some(spec.clone());
        })?;
        let prepared = infra::prepare(&self.shared.reaper, &spec).await?;
        // On record before it may run.
        journal.update(|r| r.infra = Some(prepared.identity()))?;
        let child = prepared.run().await?;
        journal.update(|r| r.effects.infra = Effect::Done)?;
        journal.end_stage(None);
        Ok(child)
    }

    /// Ports are published on the pod's first network: on two, each would take the other's.
    fn attachment(&self, plan: &Plan, wanted: &Wanted, first: bool, netns: PathBuf) -> Attachment {
        let id = &self.shared.options.group;
        let or = |text: &str, other: &str| {
            if text.is_empty() {
                other.to_owned()
            } else {
                text.to_owned()
            }
        };
        let mut capabilities = wanted.capabilities.clone();
        if let Some(dns) = &plan.dns {
            capabilities.insert(
                "dns".into(),
                json!({"servers": dns.servers, "searches": dns.searches, "options": dns.options}),
            );
        }
        if let Some(cgroup) = self.shared.journal.with(|r| r.cgroup.clone()) {
            capabilities.insert("cgroupPath".into(), cgroup.into());
        }
        capabilities.insert(
            "io.kubernetes.cri.pod-annotations".into(),
            json!(plan.annotations),
        );
        Attachment {
            container_id: id.clone(),
            netns,
            ifname: wanted.ifname.clone(),
            args: vec![
                ("IgnoreUnknown".into(), "1".into()),
                (
                    "K8S_POD_NAMESPACE".into(),
                    or(&plan.pod_namespace, &self.shared.options.namespace),
                ),
                ("K8S_POD_NAME".into(), or(&plan.name, id)),
                ("K8S_POD_INFRA_CONTAINER_ID".into(), id.clone()),
                ("K8S_POD_UID".into(), plan.uid.clone()),
            ],
            port_mappings: if first {
                plan.ports.clone()
            } else {
                Vec::new()
            },
            capabilities,
        }
    }

    /// The pod's own hosts file; containers bind it, so it is told of addresses in place. Not worth failing a pod for.
    fn write_hosts(&self, ips: &[String]) {
        let hostname = self.shared.journal.with(|r| r.hostname.clone());
        let files = PodFiles {
            hostname,
            dns: None,
            host_network: false,
            host_ipc: false,
            shm_size: 0,
        };
        let bare: Vec<String> = ips
            .iter()
            .map(|ip| ip.split('/').next().unwrap_or(ip).to_owned())
            .collect();
        if let Err(error) = files.set_addresses(&files_dir(self.shared.journal.dir()), &bare) {
            tracing::warn!(%error, "write the pod's addresses to its hosts file");
        }
    }

    fn cgroup_paths(&self, plan: &Plan) -> CgroupPaths {
        let id = &self.shared.options.group;
        if let Some(path) = &plan.cgroups_path {
            // From an OCI spec: the path is the sandbox's own.
            return CgroupPaths {
                pod: path.clone(),
                infra: path.clone(),
                ours: false,
            };
        }
        match &plan.cgroup_parent {
            Some(parent) if parent.ends_with(".slice") => CgroupPaths {
                pod: parent.clone(),
                infra: format!(
                    "{}:cri-containerd:{id}",
                    parent.rsplit('/').next().unwrap_or(parent)
                ),
                ours: false,
            },
            Some(parent) => CgroupPaths {
                pod: parent.clone(),
                infra: format!("{}/{id}", parent.trim_end_matches('/')),
                ours: false,
            },
            None => {
                let pod = teardown::cgroup_of(self.config(), &self.shared.options.namespace, id);
                CgroupPaths {
                    // cgroup v2 allows no processes beside child groups: the infra process gets a leaf of its own.
                    infra: format!("{pod}/infra"),
                    pod,
                    ours: true,
                }
            }
        }
    }

    /// Sees the infra process end by itself.
    fn watch_infra(&self, child: Child) {
        let pod = self.clone();
        self.lock().infra_watched = true;
        tokio::spawn(async move {
            let exit = child.wait().await;
            pod.infra_ended(exit.code, exit.signal, exit.at).await;
        });
    }

    async fn infra_ended(&self, code: u32, signal: Option<i32>, at: SystemTime) {
        self.shared.exit.send_replace(Some((code, at)));
        let unexpected = {
            let mut inner = self.lock();
            let up = matches!(inner.phase, Phase::Ready | Phase::Parked);
            if up {
                inner.phase = Phase::Down;
            }
            up
        };
        let how = signal.map_or_else(|| format!("exit code {code}"), |s| format!("signal {s}"));
        self.shared.journal.note(|r| {
            r.exited_at = Some(crate::clock::unix_nanos(at));
            r.exit_status = Some(code);
            if unexpected {
                r.state = State::NotReady;
                r.reason = Some(format!("the infra process ended by itself ({how})"));
            }
        });
        if unexpected {
            tracing::error!(pod = %self.shared.options.group, how, "the infra process ended by itself");
            self.clean_up_after_infra().await;
        }
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

struct CgroupPaths {
    pod: String,
    infra: String,
    ours: bool,
}

/// A cgroup that the caller named is emptied and removed with the pod: it must not hold anybody now.
fn refuse_foreign(group: &Group) -> Result<()> {
    if group.is_root() || !group.pids().is_empty() {
        return Err(Error::new(
            Kind::Invalid,
            format!(
                "use cgroup {} for the sandbox: it holds other processes; name one of its own",
                group.path()
            ),
        ));
    }
    Ok(())
}

/// Resolves when somebody has been waiting for the job to stop for some time.
async fn overtaken(job: &Job) {
    job.cancelled().await;
    tokio::time::sleep(OVERTAKEN_GRACE).await;
}

fn stopping() -> Error {
    Error::new(Kind::Cancelled, "start sandbox: the pod is being stopped")
}

fn panicked(error: &tokio::task::JoinError) -> Error {
    Error::new(
        Kind::Other,
        format!("create the pod: its job ended early ({error}); see the supervisor's log"),
    )
}
