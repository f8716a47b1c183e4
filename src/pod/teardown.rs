//! The undos of a pod, made from its record alone: what the supervisor, `delete` and a later supervisor have in common.
//!
//! Newest first; DEL before the netns goes; the record is told of every step that is done, so that whoever comes next
//! begins where we ended. Nothing the caller gave is touched (law 6).

use std::time::{Duration, Instant};

use super::history::Event;
use super::journal::{Journal, files_dir};
use super::record::{Effect, Record};
use crate::cgroup::{Group, Layout};
use crate::config::Config;
use crate::container;
use crate::error::{Error, Kind, Result};
use crate::failpoint;
use crate::infra::{PodFiles, pins};
use crate::network::{self, NetworkRecord, netns};
use crate::process::Reaper;
use crate::sys::process::told;
use crate::undo::{Patience, Progress, Report, Step, Work, unwind};

/// A process that was sent SIGKILL is given this long; more means that it hangs in the kernel.
const KILL_LIMIT: Duration = Duration::from_secs(10);

/// Removal of empty cgroups; the kernel may need a moment after the last process.
const CGROUP_LIMIT: Duration = Duration::from_secs(10);

/// One container's undo: an OCI runtime's `delete --force` and unmounts.
const CONTAINER_LIMIT: Duration = Duration::from_secs(60);

/// The cgroup of a pod whose caller names none: ids are free in each namespace, so both are in it.
pub(super) fn cgroup_of(config: &Config, namespace: &str, id: &str) -> String {
    // Neither may hold a '+', so no two pods share a path; and no directory is left behind by the last pod of a namespace.
    format!(
        "{}/{namespace}+{id}",
        config.cgroup_parent.trim_end_matches('/')
    )
}

/// Which parts to undo.
#[derive(Clone, Copy, Debug)]
pub(super) struct Scope {
    /// Containers from their records (nobody supervises them any more).
    pub containers: bool,
    /// Pod files and shm, and with them the pins of namespaces, which are undone by themselves without.
    pub files: bool,
    /// Processes of the pod's own cgroup that belong to nothing we know.
    pub strays: bool,
    /// DEL, and then the netns.
    pub network: bool,
}

impl Scope {
    /// A creation that failed: the request, and with it the pod's files, stays for another try.
    pub(super) fn creation() -> Self {
        Self {
            containers: false,
            files: false,
            strays: false,
            network: true,
        }
    }

    /// A pod whose containers the caller has dealt with.
    pub(super) fn pod() -> Self {
        Self {
            containers: false,
            files: true,
            strays: true,
            network: true,
        }
    }

    /// Everything, from the record alone.
    pub(super) fn everything() -> Self {
        Self {
            containers: true,
            files: true,
            strays: true,
            network: true,
        }
    }
}

/// Undoes what the journal's record says was begun.
pub(super) async fn undo(
    config: &Config,
    reaper: &Reaper,
    journal: &Journal,
    scope: Scope,
    patience: Patience,
    progress: &Progress,
) -> Report {
    let record = journal.read();
    let disk = record.network_record(config);
    let (network, locked_out) = match scope.network && record.network.ours {
        true => ours_alone(config, journal, &disk).await,
        false => (false, None),
    };
    let mut steps: Vec<Step<'_>> = Vec::new();
    if scope.containers && !record.containers.is_empty() {
        let run = move || -> Work<'_> { Box::pin(undo_containers(config, reaper, journal)) };
        steps.push(step("containers", &[], CONTAINER_LIMIT, run));
    }
    if record.effects.infra != Effect::None {
        steps.push(step("infra", &[], KILL_LIMIT, move || {
            Box::pin(kill_infra(journal))
        }));
    }
    if !scope.files && record.effects.pins != Effect::None {
        let run = move || -> Work<'_> { Box::pin(remove_pins(journal)) };
        steps.push(step("pins", &[], KILL_LIMIT, run));
    }
    if record.effects.cgroup != Effect::None {
        if scope.strays {
            steps.push(step("strays", &[], KILL_LIMIT, move || {
                Box::pin(kill_strays(journal))
            }));
        }
        let run = move || -> Work<'_> { Box::pin(remove_cgroups(config, journal)) };
        steps.push(step(
            "cgroup",
            &["containers", "infra", "strays"],
            CGROUP_LIMIT * 2,
            run,
        ));
    }
    if network {
        if disk.owes_del() {
            let disk = disk.clone();
            let limit = config.del_timeout();
            let run = move || -> Work<'_> {
                Box::pin(delete_network(config, reaper, journal, disk.clone(), limit))
            };
            // The bound of one DEL is inside; this one only guards against ourselves.
            steps.push(step("cni-del", &[], limit + KILL_LIMIT, run));
        }
        if record.effects.netns != Effect::None {
            steps.push(step("netns", &["cni-del"], KILL_LIMIT, move || {
                Box::pin(unpin(journal))
            }));
        }
    }
    let of_files = [record.effects.files, record.effects.pins];
    if scope.files && of_files != [Effect::None; 2] {
        let run = move || -> Work<'_> { Box::pin(remove_files(journal)) };
        steps.push(step("files", &["containers"], KILL_LIMIT, run));
    }
    let steps = steps.into_iter().map(|s| on_record(journal, s)).collect();
    let mut report = unwind(steps, patience, progress).await;
    report
        .owed
        .extend(locked_out.map(|error| ("cni-del", error)));
    report
}

/// Each try of the step is in the pod's history, with its time and its error.
fn on_record<'a>(journal: &'a Journal, step: Step<'a>) -> Step<'a> {
    let (name, mut run) = (step.name, step.run);
    let run = move || -> Work<'a> {
        let work = run();
        Box::pin(async move {
            journal.happened(Event::Undo, name, None, true);
            let began = Instant::now();
            let result = work.await;
            let error = result.as_ref().err().filter(|e| !e.is_gone());
            journal.undo_step_ended(name, began.elapsed(), error);
            result
        })
    };
    Step {
        run: Box::new(run),
        ..step
    }
}

/// Takes the network off the index, so that from now on nobody else can have it. False when another sandbox has it
/// already: then nothing of it is ours to undo. An error: nobody knows, and it stays owed.
async fn ours_alone(
    config: &Config,
    journal: &Journal,
    disk: &NetworkRecord,
) -> (bool, Option<Error>) {
    match disk.withdraw(config).await {
        Ok(true) => (true, None),
        Ok(false) => {
            tracing::info!(record = %disk.dir().display(), "another sandbox has the network; it is left alone");
            journal.note(|r| {
                r.effects.netns = Effect::None;
                r.effects.cni = Effect::None;
                r.network.pending = None;
                r.network.place.clear();
            });
            (false, None)
        }
        Err(error) => (false, Some(error)),
    }
}

/// The owed steps as one error: `Busy` with "network clean-up pending" when only the network is left.
pub(super) fn verdict(report: &Report) -> Result<()> {
    if report.owed.is_empty() {
        return Ok(());
    }
    let text: Vec<String> = report
        .owed
        .iter()
        .map(|(n, e)| format!("{n}: {e}"))
        .collect();
    let network_only = report.owed.iter().all(|(n, _)| is_network(n));
    Err(if network_only {
        Error::new(
            Kind::Busy,
            format!(
                "network clean-up pending ({}); processes are gone, ask again to retry",
                text.join("; ")
            ),
        )
    } else {
        Error::new(Kind::Other, format!("undo the pod: {}", text.join("; ")))
    })
}

fn step<'a>(
    name: &'static str,
    after: &'static [&'static str],
    limit: Duration,
    run: impl FnMut() -> Work<'a> + Send + 'a,
) -> Step<'a> {
    Step {
        name,
        after,
        limit,
        run: Box::new(run),
    }
}

async fn undo_containers(config: &Config, reaper: &Reaper, journal: &Journal) -> Result<()> {
    let records: Vec<_> = journal.with(|r| r.containers.values().cloned().collect());
    let mut failed = None;
    for record in &records {
        match container::undo(config, reaper, record).await {
            Ok(()) => journal.note(|r| {
                r.containers.remove(&record.id);
            }),
            Err(error) => failed = Some(error.within(format!("container {}", record.id))),
        }
    }
    failed.map_or(Ok(()), Err)
}

async fn kill_infra(journal: &Journal) -> Result<()> {
    if let Some(infra) = journal.with(|r| r.infra) {
        // Only ever this very process: the pid may be somebody else's by now (law 8).
        failpoint::reach("infra.kill.before").await?;
        infra.signal(libc::SIGKILL)?;
        if !infra.wait_gone(KILL_LIMIT / 2).await {
            return Err(Error::new(
                Kind::Deadline,
                format!(
                    "wait for infra process {} to end after SIGKILL: the kernel does not let it",
                    told(infra.pid)
                ),
            ));
        }
    }
    failpoint::reach("infra.kill.after").await?;
    journal.note(|r| r.effects.infra = Effect::None);
    Ok(())
}

async fn kill_strays(journal: &Journal) -> Result<()> {
    failpoint::reach("strays.kill.before").await?;
    for group in groups(journal)? {
        group.kill_all(KILL_LIMIT / 2).await?;
    }
    Ok(())
}

async fn remove_cgroups(config: &Config, journal: &Journal) -> Result<()> {
    failpoint::reach("cgroup.remove.before").await?;
    for group in groups(journal)? {
        group.remove(CGROUP_LIMIT).await?;
    }
    if journal.with(|r| r.cgroup_ours) {
        Group::new(&Layout::detect()?, &config.cgroup_parent)?.remove_if_empty();
    }
    failpoint::reach("cgroup.remove.after").await?;
    journal.note(|r| r.effects.cgroup = Effect::None);
    Ok(())
}

/// The cgroups that are ours: the infra process' own, then the pod's where no caller named it.
fn groups(journal: &Journal) -> Result<Vec<Group>> {
    let layout = Layout::detect()?;
    let (infra, pod) = journal.with(|r| {
        (
            r.infra_cgroup.clone(),
            r.cgroup.clone().filter(|_| r.cgroup_ours),
        )
    });
    infra
        .iter()
        .chain(pod.iter())
        .map(|path| Group::from_spec(&layout, path))
        .collect()
}

async fn delete_network(
    config: &Config,
    reaper: &Reaper,
    journal: &Journal,
    disk: NetworkRecord,
    limit: Duration,
) -> Result<()> {
    let result = network::del(config, reaper, &disk, limit).await;
    journal.note(|r| match &result {
        Ok(()) => {
            r.effects.cni = Effect::None;
            r.network.pending = None;
        }
        Err(error) => r.network.pending = Some(error.to_string()),
    });
    result
}

async fn unpin(journal: &Journal) -> Result<()> {
    if let Some(path) = journal.with(|r| r.network.netns.clone()) {
        failpoint::reach("netns.unpin.before").await?;
        netns::unpin(&path)?;
        failpoint::reach("netns.unpin.after").await?;
    }
    journal.note(|r| r.effects.netns = Effect::None);
    Ok(())
}

async fn remove_pins(journal: &Journal) -> Result<()> {
    failpoint::reach("pins.remove.before").await?;
    pins::remove(&files_dir(journal.dir()))?;
    failpoint::reach("pins.remove.after").await?;
    journal.note(|r| {
        r.effects.pins = Effect::None;
        r.pins = None;
    });
    Ok(())
}

async fn remove_files(journal: &Journal) -> Result<()> {
    failpoint::reach("files.remove.before").await?;
    PodFiles::remove(&files_dir(journal.dir()))?;
    failpoint::reach("files.remove.after").await?;
    journal.note(|r| {
        r.effects.files = Effect::None;
        r.files = None;
        r.effects.pins = Effect::None;
        r.pins = None;
    });
    Ok(())
}

/// True when nothing of the pod is left that only its journal knows of; the network has a record of its own on disk.
pub(super) fn is_over(record: &Record, report: &Report) -> bool {
    record.containers.is_empty() && report.owed.iter().all(|(n, _)| is_network(n))
}

/// Steps that the network's own record on disk remembers.
pub(super) fn is_network(step: &str) -> bool {
    matches!(step, "cni-del" | "netns")
}
