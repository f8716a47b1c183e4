//! Networks that go from one supervisor of a pod to the next: taking one over, and waiting for one that another
//! supervisor is still making under another sandbox id.
//!
//! A request that waits is told what a watcher is told (docs/retry.md) and never gets the result; the next one does.
//! Promises that the journal knows the network's place before the network is this pod's.

use std::time::Duration;

use serde_json::json;
use tokio::time::{Instant, sleep_until};

use super::plan::Plan;
use super::record::{self, Attached, Effect, TakenOver};
use super::{Phase, Pod};
use crate::clock;
use crate::error::{Error, Kind, Result};
use crate::infra::Namespace;
use crate::network::{
    self, Attachment, Holder, NetworkConf, NetworkRecord, Owned, PodKey, netns, userns,
};

/// Between looks at what another supervisor is doing.
const LOOK: Duration = Duration::from_millis(50);

/// How long what is left of a dead supervisor's plugins may take to end after SIGKILL.
const ORPHAN_LIMIT: Duration = Duration::from_secs(5);

/// A place for the pod's network.
pub(super) struct Place {
    pub(super) record: NetworkRecord,
    /// All of the network is there already.
    pub(super) whole: bool,
}

impl Pod {
    /// Makes this pod the owner of its network's place: that of the network which an earlier supervisor of the same pod
    /// has parked or died with, else a new one. What was taken over and is not what is asked for, or not whole, has had
    /// its DEL, and its netns is gone.
    ///
    /// Errors: Busy, and the job knows that it came second, when another supervisor is at it.
    pub(super) async fn own_network(
        &self,
        plan: &Plan,
        confs: &[NetworkConf],
        asked: &[Attachment],
    ) -> Result<Option<Place>> {
        let config = self.config();
        let fresh = self.fresh_place();
        let holder = Holder {
            digest: network::asked(confs, asked, &of_the_netns(plan)),
            ifnames: asked.iter().map(|a| a.ifname.clone()).collect(),
            made_for: self.container_id(&fresh),
            ..self.holder(netns::of_record(config, &fresh))
        };
        let journal = &self.shared.journal;
        let intent = |record: &NetworkRecord| {
            journal.update(|r| {
                r.network.place = record.place().to_owned();
                r.network.netns = Some(netns::of_record(config, record));
                r.network.taken = None;
                r.effects.netns = Effect::Intent;
            })
        };
        let owned = match journal.with(record::Record::pod_key) {
            Some(key) => network::own(config, &key, &fresh, &holder, intent).await?,
            None => {
                intent(&fresh)?;
                fresh.hold(&holder)?;
                Owned::Fresh(fresh)
            }
        };
        match owned {
            Owned::Fresh(record) => {
                self.settle_before_add(&record).await?;
                Ok(Some(Place {
                    record,
                    whole: false,
                }))
            }
            Owned::Taken(record, before) => {
                let user = match &plan.infra.user {
                    Namespace::Host => userns::Wanted::Hosts,
                    Namespace::New => userns::Wanted::Own,
                    Namespace::Path(given) => userns::Wanted::Given(given),
                };
                let whole = record.is_whole(&before, &holder, user);
                tracing::info!(from = before.sandbox_id, whole, "network taken over");
                if whole {
                    self.adopt(&record, &before)?;
                } else {
                    let dead = before.supervisor.filter(|_| !before.is_alive());
                    let dead = dead.map(|s| s.pid);
                    network::kill_orphans_of(config, &record, dead, ORPHAN_LIMIT).await?;
                    self.settle_before_add(&record).await?;
                    record.hold(&Holder {
                        netns: netns::of_record(config, &record),
                        made_for: self.container_id(&record),
                        ..holder
                    })?;
                }
                Ok(Some(Place { record, whole }))
            }
            Owned::Elsewhere(_) => {
                journal.note(|r| {
                    r.network.place.clear();
                    r.network.netns = None;
                    r.effects.netns = Effect::None;
                });
                Ok(None)
            }
        }
    }

    /// What the plugins gave another supervisor is this pod's network now.
    fn adopt(&self, record: &NetworkRecord, before: &Holder) -> Result<()> {
        self.shared.journal.begin_stage("take-over", false)?;
        let on_record = record.attachments();
        let begun = on_record.iter().filter_map(|a| a.begun_at).min();
        self.shared.journal.update(|r| {
            r.network.taken = Some(TakenOver {
                from: before.sandbox_id.clone(),
                added_at: begun.map(clock::unix_nanos).unwrap_or_default(),
            });
            r.network.attachments.clear();
            for on in on_record {
                let Some(result) = on.result else { continue };
                if r.network.attachments.iter().all(|a| a.ips.is_empty()) {
                    r.network.ips = result.ips.clone();
                }
                r.network.attachments.push(Attached {
                    name: on.network,
                    ifname: on.ifname,
                    ips: result.ips,
                    facts: result.facts,
                    timings: result.timings,
                });
            }
            let first = r.network.attachments.first();
            r.network.name = first.map(|a| a.name.clone()).unwrap_or_default();
            r.effects.netns = Effect::Done;
            r.effects.cni = Effect::Done;
        })?;
        self.shared.journal.end_stage(None);
        Ok(())
    }

    /// Where a new network of this pod may be: nobody else has what is there.
    pub(super) fn fresh_place(&self) -> NetworkRecord {
        let o = &self.shared.options;
        let own = self.shared.journal.with(|r| r.supervisor);
        NetworkRecord::free(&o.config, &o.namespace, &o.group).as_of(&o.group, own)
    }

    /// The error of a request that has to wait for another supervisor of the same pod, shortly before its deadline or as
    /// soon as it is known. None: there is no such supervisor (any more), and the request may begin or take over.
    pub(super) async fn wait_for_other(&self, reply_at: Instant) -> Option<Error> {
        let key = self.shared.journal.with(record::Record::pod_key)?;
        let (mut record, mut holder) = self.other(&key)?;
        let mut lease = record.watch();
        loop {
            sleep_until(reply_at.min(Instant::now() + LOOK)).await;
            if !matches!(self.lock().phase, Phase::Created) {
                return Some(self.stopped());
            }
            let now = match key.look(self.config()) {
                None => return Some(self.other_ended(&record, &holder)),
                Some((_, now)) if !now.failed.is_empty() => return Some(failed(&now)),
                Some((_, now)) if now.is_parked() => {
                    return Some(self.other_is_ready(reply_at, lease).await);
                }
                // It died: this request takes what it has left.
                Some((_, now)) if now.is_takable() => return None,
                Some(now) => now,
            };
            if now.1.sandbox_id != holder.sandbox_id {
                lease = now.0.watch();
            }
            (record, holder) = now;
            if Instant::now() >= reply_at {
                return Some(self.other_is_at_it(&holder));
            }
        }
    }

    /// The living supervisor that makes the network of this pod under another sandbox id.
    fn other(&self, key: &PodKey) -> Option<(NetworkRecord, Holder)> {
        let (record, holder) = key.look(self.config())?;
        let own = holder.sandbox_id == self.shared.options.group;
        (!own && !holder.is_takable() && holder.failed.is_empty()).then_some((record, holder))
    }

    /// Ready while one watched: the result is for who asks next, and until then the lease keeps it.
    async fn other_is_ready(&self, reply_at: Instant, lease: Result<network::Watching>) -> Error {
        while self.config().parking.hold_waiters && Instant::now() < reply_at {
            if !matches!(self.lock().phase, Phase::Created) {
                return self.stopped();
            }
            sleep_until(reply_at.min(Instant::now() + LOOK)).await;
        }
        drop(lease);
        self.ready_for_the_next()
    }

    fn other_is_at_it(&self, holder: &Holder) -> Error {
        let dir = self
            .config()
            .sandbox_dir(&holder.namespace, &holder.sandbox_id);
        let stages = record::read(&dir).map(|r| r.stages).unwrap_or_default();
        // A keeper has no journal any more; what it still does is this.
        let stage = stages.last().map_or("cni-add", |s| s.name.as_str());
        let age = clock::from_unix_nanos(holder.begun).elapsed();
        Error::new(
            Kind::Deadline,
            format!(
                "start sandbox {}: {} is being made as sandbox {}: still at stage {stage} after {:.1} s in supervisor {}; the work goes on, ask again to take it over",
                self.shared.options.group,
                pod_name(holder),
                holder.sandbox_id,
                age.unwrap_or_default().as_secs_f64(),
                holder.supervisor.map_or(0, |s| s.pid),
            ),
        )
    }

    /// It is not offered any more: somebody has the pod, or there is none.
    fn other_ended(&self, record: &NetworkRecord, last: &Holder) -> Error {
        match record.holder() {
            Some(now) if !now.failed.is_empty() => failed(&now),
            Some(now) if now.is_alive() && now.key() == last.key() => Error::new(
                Kind::Exists,
                format!(
                    "start sandbox {}: {} is up as sandbox {}; remove one of them",
                    self.shared.options.group,
                    pod_name(&now),
                    now.sandbox_id
                ),
            ),
            _ => Error::new(
                Kind::Busy,
                format!(
                    "start sandbox {}: {} was being made as sandbox {} and has been undone; try again",
                    self.shared.options.group,
                    pod_name(last),
                    last.sandbox_id
                ),
            ),
        }
    }
}

fn failed(holder: &Holder) -> Error {
    Error::new(
        holder.failed_as,
        format!(
            "{} was being made as sandbox {}: {}",
            pod_name(holder),
            holder.sandbox_id,
            holder.failed
        ),
    )
}

fn pod_name(holder: &Holder) -> String {
    format!(
        "pod {}/{} (attempt {})",
        holder.pod_namespace, holder.name, holder.attempt
    )
}

/// What of the netns itself was asked for: its owner, and settings that live in it.
fn of_the_netns(plan: &Plan) -> serde_json::Value {
    let sysctls = plan.infra.sysctls.iter();
    let net: Vec<_> = sysctls.filter(|(k, _)| k.starts_with("net.")).collect();
    let maps = |of: &[crate::infra::IdMapping]| -> Vec<_> {
        let of = of.iter();
        of.map(|m| (m.container_id, m.host_id, m.size)).collect()
    };
    json!([
        net,
        plan.infra.user == Namespace::New,
        maps(&plan.infra.uid_mappings),
        maps(&plan.infra.gid_mappings)
    ])
}
