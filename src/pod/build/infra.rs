//! The infra process of a creation: its cgroup, its start, and the watch for its end.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::time::SystemTime;

use crate::cgroup::{Group, Layout};
use crate::error::{Error, Kind, Result};
use crate::failpoint;
use crate::infra::{self, InfraSpec, Namespace, pins};
use crate::pod::journal::files_dir;
use crate::pod::plan::Plan;
use crate::pod::record::{Effect, State};
use crate::pod::{Phase, Pod, teardown};
use crate::process::Child;

impl Pod {
    /// `owner`: the user namespace of a netns that the caller gave. A pod with users of its own joins it, for there can be no
    /// other in which the netns is its own.
    pub(super) async fn make_infra(
        &self,
        mut spec: InfraSpec,
        owner: Option<File>,
    ) -> Result<Child> {
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
        failpoint::hit("cgroup.make.before")?;
        if let Some(path) = pod.as_ref().filter(|_| journal.with(|r| r.cgroup_ours)) {
            Group::new(&layout, path)?.create()?;
        }
        if let Some(path) = infra_path.as_ref() {
            let group = Group::from_spec(&layout, path)?;
            group.create()?;
            // One that is the pod's whole cgroup has the containers' below it, and its share is theirs.
            if infra_path != pod {
                group.take_least_shares();
            }
            spec.cgroup_dirs = group.dirs();
        }
        failpoint::hit("cgroup.make.after")?;
        spec.labels = journal.with(|r| r.selinux.clone());
        journal.update(|r| {
            r.effects.cgroup = Effect::Done;
            r.effects.infra = Effect::Intent;
            r.infra_spec = Some(spec.clone());
        })?;
        let kinds = pins::to_pin(&spec);
        if let Some(owner) = &owner {
            // Not on record: it is this process's descriptor. The infra process holds the namespace from now on.
            spec.user = Namespace::Path(format!("/proc/self/fd/{}", owner.as_raw_fd()).into());
        }
        failpoint::reach("infra.clone.before").await?;
        let prepared = infra::prepare(&self.shared.reaper, &spec).await?;
        failpoint::child("infra.process", prepared.identity().pid);
        failpoint::reach("infra.clone.after").await?;
        // On record before it may run.
        journal.update(|r| {
            r.infra = Some(prepared.identity());
            if !kinds.is_empty() {
                r.effects.pins = Effect::Intent;
            }
        })?;
        let files = files_dir(journal.dir());
        if !kinds.is_empty() {
            failpoint::reach("pins.make.before").await?;
            pins::make(&files, &kinds, prepared.identity().pid)?;
            failpoint::reach("pins.make.after").await?;
        }
        failpoint::reach("infra.run.before").await?;
        let child = prepared.run().await?;
        failpoint::reach("infra.run.after").await?;
        journal.update(|r| {
            r.effects.infra = Effect::Done;
            if !kinds.is_empty() {
                r.effects.pins = Effect::Done;
                r.pins = Some(pins::dir(&files));
            }
        })?;
        journal.end_stage(None);
        Ok(child)
    }

    pub(super) fn cgroup_paths(&self, plan: &Plan) -> CgroupPaths {
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
    pub(super) fn watch_infra(&self, child: Child) {
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

/// Where the pod and its infra process are in the cgroup tree.
pub(super) struct CgroupPaths {
    pub(super) pod: String,
    pub(super) infra: String,
    pub(super) ours: bool,
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
