//! Networks that the CNI plugin has made for the pods of daemons: how an attempt of the pod comes to have one.
//!
//! A daemon makes a netns of its own for each attempt and knows nothing of ours, so the network is found by the pod's key,
//! and given away by a *claim* in `pod.json`. The key's link stays while the network is claimed: so the next attempt sees
//! a claim that nobody answers for any more. Everything here is for a process without an event loop.
//!
//! Promises: to find, to judge and to claim is one step under the lock of the index; a claim that its caller never heard
//! of can be taken back. Must never give away what another attempt was told that it has.

use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};

use super::handover::{lock, lock_blocking};
use super::{Holder, NetworkRecord, Parking, PodKey, disk, netns, userns};
use crate::clock;
use crate::config::Config;
use crate::error::{Error, Kind, Result};
use crate::failpoint;
use crate::process::Identity;

/// Where the networks of daemons' pods are kept, in the place of a containerd namespace; none can be called so.
pub const NAMESPACE: &str = "cni";

/// In the directory of a job, `<runtime_root>/cni/<place>`.
pub const STAGE: &str = "stage";

/// That an attempt of a daemon's pod has the network; its id is the holder's sandbox id.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Claim {
    /// The path that the daemon gave, over which the netns was bound.
    pub netns: PathBuf,
    /// The process of the plugin that has it, or is told next.
    pub plugin: Option<Identity>,
    /// Who had started that: the daemon, or a plugin in front of us.
    pub caller: Option<Identity>,
    /// Unix nanoseconds, for people.
    pub at: u64,
    /// The result was written to the caller.
    pub delivered: bool,
    /// Its DEL has come: nobody can have it any more.
    pub ending: bool,
}

/// What became of a try to take the network of a pod.
#[derive(Debug)]
pub enum Taking {
    /// There is none, or one that has to be undone or taken over first: somebody has to work.
    Nothing,
    /// It is being given to another attempt at this moment, or comes back from that: look again.
    Changing,
    /// Somebody works on it.
    Working(NetworkRecord),
    /// It is this attempt's now.
    Taken(Box<Taken>),
}

/// Who ends a network that an attempt had.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// This process, and nobody has begun before it.
    First,
    /// This process, after another that has died or given up.
    Again,
    /// Another one that lives; or it is not there any more.
    Elsewhere,
}

/// What the job that makes or keeps a network is doing.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Stage {
    /// Its name.
    pub name: String,
    /// Unix nanoseconds.
    pub since: u64,
    /// Of the job.
    pub pid: u32,
}

/// What the job at a place is doing; None where none has said so.
pub fn stage_at(config: &Config, place: &str) -> Option<Stage> {
    let path = config.runtime_root.join(NAMESPACE).join(place).join(STAGE);
    serde_json::from_slice(&disk::read(&path).ok()?).ok()
}

/// A network that was taken.
#[derive(Debug)]
pub struct Taken {
    /// Its record, as the attempt sees it.
    pub record: NetworkRecord,
    /// Where its netns is pinned.
    pub netns: PathBuf,
    /// Who has kept it.
    pub keeper: Option<Identity>,
}

impl Holder {
    /// An attempt of a daemon's pod has it, in this boot.
    pub fn is_used(&self) -> bool {
        let claimed = self.claim.as_ref().is_some_and(|c| !c.ending);
        claimed && self.boot_id == clock::boot_id()
    }

    /// Claimed, and nobody has heard of it: the plugin died before it could say so.
    fn is_unheard(&self) -> bool {
        self.is_untold() && !self.plugin_lives()
    }

    /// Claimed, and not yet said.
    pub fn is_untold(&self) -> bool {
        self.claim
            .as_ref()
            .is_some_and(|c| !c.ending && !c.delivered)
    }

    fn plugin_lives(&self) -> bool {
        let plugin = self.claim.as_ref().and_then(|claim| claim.plugin);
        plugin.is_some_and(|who| who.is_alive())
    }
}

impl NetworkRecord {
    /// Made by the CNI plugin for a daemon.
    pub fn is_daemons(&self) -> bool {
        self.namespace() == NAMESPACE
    }
}

/// Takes the network that is ready for the pod of `key`, if it is what `wanted` asks for. `wanted` has the attempt's id,
/// what it asks for, and the claim to write; `note` is told of the place before anything is changed, `bind` puts the netns
/// where the daemon looks, and sees to it that another attempt, which had it, does not look at it any more: what was
/// written of it until now is given.
///
/// `abandoned`: whether a network that another attempt was given is in use by nobody any more, its daemon having died.
///
/// Errors: State when this very attempt has one already; what `note` and `bind` say, and then nothing was taken.
pub fn take<'a>(
    config: &Config,
    key: &PodKey,
    wanted: impl FnOnce() -> &'a Holder,
    abandoned: impl Fn(&Holder) -> bool,
    note: impl FnOnce(&NetworkRecord) -> Result<()>,
    bind: impl FnOnce(&Holder) -> Result<()>,
) -> Result<Taking> {
    // As a rule there is none, and then no lock is needed.
    if key.look(config).is_none() {
        return Ok(Taking::Nothing);
    }
    let _locked = lock_blocking(config)?;
    let Some((record, before)) = key.look(config) else {
        return Ok(Taking::Nothing);
    };
    let wanted = wanted();
    if let Some(claim) = before.claim.as_ref() {
        if claim.ending {
            return Ok(Taking::Nothing);
        }
        // Given by a job that died before it could say so.
        let ours = before.is_untold() && is_for(claim, wanted);
        // It may come back: its caller may be gone.
        if before.is_untold() && !ours && before.plugin_lives() {
            return Ok(Taking::Changing);
        }
        let free = ours || before.is_unheard() || abandoned(&before);
        if !free && before.sandbox_id == wanted.sandbox_id {
            return Err(Error::new(
                Kind::State,
                format!(
                    "add network {} to {}: it has been added already; delete it first",
                    before.network, before.sandbox_id
                ),
            ));
        }
        if !free {
            return Ok(Taking::Nothing);
        }
    } else if before.is_alive() && !before.is_parked() {
        return Ok(Taking::Working(record));
    } else if !before.is_parked() {
        return Ok(Taking::Nothing);
    }
    if !record.is_whole(&before, wanted, userns::Wanted::Hosts) {
        if before.claim.is_some() {
            // Whoever makes the new one has to be able to undo it.
            record.hold_for_the_boot(&unclaimed(before, Duration::ZERO))?;
        }
        return Ok(Taking::Nothing);
    }
    // Somebody may be at it just now, with a DEL or a CHECK.
    let Ok(_alone) = record.lock() else {
        return Ok(Taking::Working(record));
    };
    hand_over(&record, before, wanted, note, bind).map(|taken| Taking::Taken(Box::new(taken)))
}

/// Gives the network that this process makes to the attempt which `wanted` tells of, before anybody else can have it. False:
/// it is not this process's any more. `note` and `bind` as for [`take`].
pub async fn give(
    config: &Config,
    record: &NetworkRecord,
    wanted: &Holder,
    note: impl FnOnce(&NetworkRecord) -> Result<()>,
    bind: impl FnOnce(&Holder) -> Result<()>,
) -> Result<bool> {
    let _locked = lock(config).await?;
    let Some(before) = record.holder().filter(|by| record.is_mine_by(by)) else {
        return Ok(false);
    };
    hand_over(record, before, wanted, note, bind).map(|_| true)
}

/// With the index locked.
fn hand_over(
    record: &NetworkRecord,
    before: Holder,
    wanted: &Holder,
    note: impl FnOnce(&NetworkRecord) -> Result<()>,
    bind: impl FnOnce(&Holder) -> Result<()>,
) -> Result<Taken> {
    let taken = record.as_of(&wanted.sandbox_id, None);
    note(&taken)?;
    failpoint::hit("cni-claim.before")?;
    taken.hold_for_the_boot(&Holder {
        netns: before.netns.clone(),
        made_for: before.made_for.clone(),
        begun: before.begun,
        supervisor: None,
        keeper: false,
        parked: None,
        ..wanted.clone()
    })?;
    let bound = failpoint::hit("cni-claim.bind.before").and_then(|()| bind(&before));
    if let Err(error) = bound {
        record.hold_for_the_boot(&before)?;
        return Err(error);
    }
    if before.sandbox_id != wanted.sandbox_id {
        for slot in taken.slots() {
            slot.set_sandbox(&wanted.sandbox_id)?;
        }
    }
    failpoint::hit("cni-claim.after")?;
    Ok(Taken {
        record: taken,
        netns: before.netns,
        keeper: before.supervisor,
    })
}

/// The claim is the one that this very process wants.
fn is_for(claim: &Claim, wanted: &Holder) -> bool {
    let plugin = wanted.claim.as_ref().and_then(|claim| claim.plugin);
    plugin.is_some() && claim.plugin == plugin
}

/// Does `work` while no network is given to anybody.
pub fn undisturbed<T>(config: &Config, work: impl FnOnce() -> Result<T>) -> Result<T> {
    let _locked = lock_blocking(config)?;
    work()
}

/// The caller of the attempt has its result.
pub fn deliver(config: &Config, record: &NetworkRecord) -> Result<()> {
    change(config, record, |holder| {
        if let Some(claim) = &mut holder.claim {
            claim.delivered = true;
        }
        true
    })
    .map(drop)
}

/// Takes back a claim that its caller never heard of: the network is parked for `keep`, and somebody has to keep it. False:
/// it is claimed no more, or its caller has heard of it. `any`: whatever its caller has heard.
pub fn release(config: &Config, record: &NetworkRecord, keep: Duration, any: bool) -> Result<bool> {
    change(config, record, |holder| {
        let may = holder.is_used() && (any || holder.is_unheard());
        if may {
            *holder = unclaimed(std::mem::take(holder), keep);
        }
        may
    })
}

/// The DEL of the attempt that has it: from now on this process undoes it. With the attempt's id.
pub fn end_claim(config: &Config, record: &NetworkRecord) -> Result<(Ending, String)> {
    let own = Identity::own()?;
    let mut ending = (Ending::Elsewhere, String::new());
    change(config, record, |holder| {
        let by_other = holder.is_alive() && holder.supervisor != Some(own);
        match &mut holder.claim {
            Some(claim) if !by_other => {
                let before = match claim.ending {
                    true => Ending::Again,
                    false => Ending::First,
                };
                ending = (before, holder.sandbox_id.clone());
                claim.ending = true;
            }
            _ => return false,
        }
        holder.supervisor = Some(own);
        holder.boot_id = clock::boot_id();
        holder.keeper = true;
        true
    })?;
    Ok(ending)
}

/// The network that this attempt has; `place` is where it was told to be.
pub fn held(
    config: &Config,
    id: &str,
    network: &str,
    place: Option<&str>,
) -> Option<(NetworkRecord, Holder)> {
    let is = |record: NetworkRecord, holder: Holder| {
        let claimed = holder.claim.is_some() && holder.network == network;
        (claimed && holder.sandbox_id == id).then_some((record, holder))
    };
    match place.filter(|place| !place.is_empty()) {
        Some(place) => {
            let record = NetworkRecord::in_place(config, place, NAMESPACE, id);
            let mut holder = record.holder();
            if holder.is_none() && record.owes_del() {
                restore(config, &record, id, network);
                holder = record.holder();
            }
            is(record, holder?)
        }
        // A reboot takes away what leads to it.
        None => of_daemons(config)
            .into_iter()
            .find_map(|(record, holder)| is(record.as_of(id, None), holder)),
    }
}

/// `pod.json` is damaged; whose the network is has been written beside the attempt, too.
fn restore(config: &Config, record: &NetworkRecord, id: &str, network: &str) {
    let on_record = record.attachments();
    let made_for = on_record.first().map(|on| on.container_id.clone());
    let holder = Holder {
        namespace: NAMESPACE.to_owned(),
        sandbox_id: id.to_owned(),
        netns: netns::of_record(config, record),
        boot_id: clock::boot_id(),
        made_for: made_for.unwrap_or_default(),
        ifnames: on_record.into_iter().map(|on| on.ifname).collect(),
        network: network.to_owned(),
        claim: Some(Claim {
            delivered: true,
            ..Claim::default()
        }),
        ..Holder::default()
    };
    let written = record.hold_for_the_boot(&holder);
    written.unwrap_or_else(|error| tracing::warn!(%error, "damaged record not restored"));
}

/// Every network that was made for a daemon's pod.
pub fn of_daemons(config: &Config) -> Vec<(NetworkRecord, Holder)> {
    let all = NetworkRecord::list(config).into_iter();
    all.filter(|(namespace, ..)| namespace == NAMESPACE)
        .filter_map(|(_, _, record)| record.holder().map(|holder| (record, holder)))
        .collect()
}

fn change(
    config: &Config,
    record: &NetworkRecord,
    change: impl FnOnce(&mut Holder) -> bool,
) -> Result<bool> {
    let _locked = lock_blocking(config)?;
    let Some(mut holder) = record.holder() else {
        return Ok(false);
    };
    let changed = change(&mut holder);
    if changed {
        record.hold_for_the_boot(&holder)?;
    }
    Ok(changed)
}

fn unclaimed(holder: Holder, keep: Duration) -> Holder {
    let until = clock::uptime().saturating_add(keep).as_secs_f64();
    Holder {
        claim: None,
        supervisor: None,
        parked: Some(Parking {
            at: clock::unix_nanos(SystemTime::now()),
            until,
        }),
        ..holder
    }
}
