//! ADD and DEL of a pod's attachments, each chain within one bound, with everything on record before and after.

use std::path::Path;
use std::time::Duration;

use tokio::time::Instant;

use super::chain::{Chain, Failed};
use super::limit::Turn;
use super::markers::Locked;
use super::plugin::Command;
use super::retry::Tries;
use super::slot::{Owed, Slot};
use super::{
    AddResult, Attachment, NetworkConf, NetworkRecord, cache, latency, limit, markers, netns,
    versions,
};
use crate::config::Config;
use crate::error::{Error, Kind, Result};
use crate::failpoint;
use crate::process::Reaper;

/// Capabilities whose arguments only come from somebody who asked for them.
const ASKED_FOR: [&str; 6] = [
    "mac",
    "ips",
    "ipRanges",
    "aliases",
    "infinibandGUID",
    "deviceID",
];

/// ADD of the whole chain, bounded by `config.add_timeout()` (monotonic, whole chain).
///
/// Order: everything that can be refused is refused; the record; `lo` up; the plugins; the result into the record and
/// into libcni's cache. On failure after the record nothing is undone here: the record says that a DEL is owed. A pod
/// may have several attachments, one for each interface, added in turn. Errors: Deadline at the bound, State when the
/// record owes a DEL of this interface already, a plugin is not installed or does not speak the configuration's version
/// (then nothing is on record), Invalid for arguments; they name the plugin, how it ended, the time it took and the end
/// of its stderr.
pub async fn add(
    config: &Config,
    reaper: &Reaper,
    record: &NetworkRecord,
    conf: &NetworkConf,
    attachment: &Attachment,
) -> Result<AddResult> {
    check_netns(&attachment.netns).map_err(|e| e.within(of(conf, attachment)))?;
    let adding = begin(config, reaper, record, conf, attachment).await?;
    adding.run().await
}

/// The first part of [`add`]: all that comes before the plugins, so that the netns need not be there yet. From then on a
/// DEL is owed.
pub async fn begin<'a>(
    config: &'a Config,
    reaper: &'a Reaper,
    record: &'a NetworkRecord,
    conf: &'a NetworkConf,
    attachment: &'a Attachment,
) -> Result<Adding<'a>> {
    let within = |error: Error| error.within(of(conf, attachment));
    check(conf, attachment).map_err(within)?;
    let chain = Chain::new(config, reaper, conf, attachment).map_err(within)?;
    versions::require(config, reaper, conf, chain.programs())
        .await
        .map_err(within)?;
    // Before the record: while it waits nothing is owed. The bound runs from the first plugin.
    let waited = limit::turn(config, &conf.name, Command::Add, config.add_timeout()).await;
    let turn = waited.map_err(within)?;
    let locks = [
        record.reserve()?,
        markers::lock_all(config, false, config.add_timeout()).await?,
    ];
    let adding = Adding {
        config,
        record,
        slot: record.slot(&attachment.ifname),
        chain,
        begun: Instant::now(),
        _turn: turn,
        _locks: locks,
    };
    adding.put_on_record().await.map(|()| adding)
}

/// An ADD that is on record, and none of whose plugins has run.
#[derive(Debug)]
pub struct Adding<'a> {
    config: &'a Config,
    record: &'a NetworkRecord,
    chain: Chain<'a>,
    slot: Slot,
    begun: Instant,
    _turn: Turn,
    /// Of the record, and of the collection.
    _locks: [Locked; 2],
}

impl Adding<'_> {
    /// The second part of [`add`].
    pub async fn run(self) -> Result<AddResult> {
        let (config, conf, attachment) = (self.config, self.chain.conf, self.chain.attachment);
        let tried = self.try_plugins().await;
        let took = self.begun.elapsed();
        latency::note(config, &conf.name, Command::Add, took, tried.is_err());
        let result = tried.map_err(|e| e.within(of(conf, attachment)))?;
        failpoint::reach("cni-add.result.before").await?;
        self.slot.finish(&result)?;
        failpoint::reach("cni-add.result.after").await?;
        if !self.record.is_daemons() {
            cache::write(&config.cni.cache_dir, conf, attachment, &result.raw)?;
        }
        failpoint::reach("cni-add.cache.after").await?;
        tracing::info!(step = "cni-add", network = conf.name, ifname = attachment.ifname, ?took, ips = ?result.ips, "network added");
        Ok(result)
    }

    async fn put_on_record(&self) -> Result<()> {
        let (conf, attachment) = (self.chain.conf, self.chain.attachment);
        failpoint::reach("cni-add.record.before").await?;
        let dirs = self.config.cni.told_dirs();
        self.record.begin_with(conf, attachment, dirs)?;
        failpoint::reach("cni-add.record.after").await
    }

    /// The whole chain, again after a failure that will pass: see [`super::retry`]. DEL comes before each further ADD, and
    /// the record is told of all of them.
    async fn try_plugins(&self) -> Result<AddResult> {
        let (config, chain) = (self.config, &self.chain);
        let end = self.begun + config.add_timeout();
        let mut tries = Tries::new();
        loop {
            // The netns of a daemon's pod was made just now, with `lo` up.
            if !self.record.is_daemons() {
                netns::raise_loopback(&chain.attachment.netns)?;
            }
            let Failed { error, previous } = match chain.add(end, config.add_timeout()).await {
                Ok(result) => return Ok(result),
                Err(failed) => failed,
            };
            if let Some(previous) = &previous {
                // Best effort: DEL works without it, only less well.
                let kept = self.slot.keep_partial(previous);
                kept.unwrap_or_else(
                    |e| tracing::warn!(error = %e, "result of an unfinished chain not kept"),
                );
            }
            let left = end.saturating_duration_since(Instant::now());
            let (pause, error) = tries.after(error, left)?;
            tracing::warn!(network = chain.conf.name, %error, ?pause, "this may pass: DEL, and ADD again");
            let bound = left.min(config.del_timeout());
            if let Err(undo) = chain.del(previous.as_ref(), Instant::now(), bound).await {
                tracing::warn!(error = %undo, "no further ADD: its DEL failed and is owed");
                return Err(error);
            }
            self.slot.set_stopped()?;
            tokio::time::sleep(pause).await;
            self.put_on_record().await?;
        }
    }
}

fn of(conf: &NetworkConf, attachment: &Attachment) -> String {
    let (network, id) = (&conf.name, &attachment.container_id);
    format!("add network {network:?} to sandbox {id:?}")
}

/// DEL of every attachment on record, the last one first: reverse order, prevResult where known, the configuration and
/// arguments of the ADD, all within `limit`.
///
/// Does nothing when no DEL is owed. A missing netns means an empty CNI_NETNS. Only when its DEL succeeded an attachment's
/// cached result of libcni is removed, and then its `network-stopped` set. One that fails keeps none of the others up: each
/// has its share of what is left of the limit. An error leaves the DEL owed and is never NotFound: an undo would take
/// that for done.
pub async fn del(
    config: &Config,
    reaper: &Reaper,
    record: &NetworkRecord,
    limit: Duration,
) -> Result<()> {
    if !record.owes_del() {
        return Ok(());
    }
    let done = del_owed(config, reaper, record, limit).await;
    done.map_err(|e| {
        if e.is_gone() {
            e.as_kind(Kind::State)
        } else {
            e
        }
    })
}

async fn del_owed(
    config: &Config,
    reaper: &Reaper,
    record: &NetworkRecord,
    limit: Duration,
) -> Result<()> {
    let _locked = record.lock()?;
    if !record.is_mine() {
        return Ok(());
    }
    let end = Instant::now() + limit;
    // Whoever held it before may have done the work.
    let mut owing: Vec<Slot> = record.slots();
    owing.retain(Slot::owes_del);
    let mut failed: Option<Error> = None;
    while let Some(slot) = owing.pop() {
        let left = end.saturating_duration_since(Instant::now());
        let waiting = u32::try_from(owing.len()).unwrap_or(u32::MAX);
        let share = left / waiting.saturating_add(1);
        if let Err(error) = del_slot(config, reaper, &slot, share).await {
            failed = Some(match failed {
                None => error,
                Some(first) => Error::new(first.kind(), format!("{first}; {error}")),
            });
        }
    }
    let Some(error) = failed else {
        return Ok(());
    };
    record.note_failure(&error);
    Err(error)
}

async fn del_slot(config: &Config, reaper: &Reaper, slot: &Slot, limit: Duration) -> Result<()> {
    let begun = Instant::now();
    let owed = slot.owed(config)?;
    for Owed {
        conf,
        attachment,
        previous,
        plugin_dirs,
    } in &owed
    {
        let config = &config.searching(plugin_dirs);
        let what = || {
            format!(
                "delete network {:?} of sandbox {:?}",
                conf.name, attachment.container_id
            )
        };
        let chain = Chain::new(config, reaper, conf, attachment).map_err(|e| e.within(what()))?;
        let left = limit.saturating_sub(begun.elapsed());
        let waited = limit::turn(config, &conf.name, Command::Del, left).await;
        let _turn = waited.map_err(|e| e.within(what()))?;
        let started = Instant::now();
        let deleted = chain.del(previous.as_ref(), begun, limit).await;
        let took = started.elapsed();
        latency::note(config, &conf.name, Command::Del, took, deleted.is_err());
        deleted.map_err(|e| e.within(what()))?;
    }
    for Owed {
        conf, attachment, ..
    } in owed.iter().filter(|_| !slot.is_daemons())
    {
        // Before the marker: once that is there, nobody comes back for the entry.
        if let Err(error) = cache::remove(&config.cni.cache_dir, &conf.name, attachment) {
            tracing::warn!(%error, "cached result left behind");
        }
    }
    failpoint::reach("cni-del.stopped.before").await?;
    if let Err(error) = slot.set_stopped() {
        // A full disk has no room for the marker, but what says that a DEL is owed can be taken away.
        tracing::warn!(%error, "mark the network as stopped");
        slot.forget_started()?;
    }
    failpoint::reach("cni-del.stopped.after").await?;
    for Owed {
        conf, attachment, ..
    } in &owed
    {
        tracing::info!(step = "cni-del", network = conf.name, ifname = attachment.ifname, took = ?begun.elapsed(), "network deleted");
    }
    Ok(())
}

fn check_netns(path: &Path) -> Result<()> {
    match netns::is_pinned(path) {
        true => Ok(()),
        false => Err(Error::new(
            Kind::State,
            format!(
                "check netns {}: there is no network namespace at this path",
                path.display()
            ),
        )),
    }
}

fn check(conf: &NetworkConf, attachment: &Attachment) -> Result<()> {
    attachment.check()?;
    let args = attachment.capability_args();
    // What was asked for by name and no plugin looks at would be silently dead.
    for capability in ASKED_FOR {
        if args.contains_key(capability) && !conf.supports(capability) {
            return Err(Error::new(
                Kind::Invalid,
                format!(
                    "give the pod {capability}: no plugin of the network has this capability; add {{\"capabilities\":{{\"{capability}\":true}}}} to the plugin that knows it in {}",
                    conf.path.display()
                ),
            ));
        }
    }
    if args.contains_key("portMappings") && !conf.supports("portMappings") {
        return Err(Error::new(
            Kind::Invalid,
            format!(
                "publish ports: no plugin of the network has the capability portMappings; add {{\"type\":\"portmap\",\"capabilities\":{{\"portMappings\":true}}}} to {}",
                conf.path.display()
            ),
        ));
    }
    Ok(())
}
