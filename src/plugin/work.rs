//! Making a pod's network, and keeping it until an attempt of the pod takes it.

use std::cell::LazyCell;
use std::time::Duration;

use tokio::signal::unix::Signal;
use tokio::time::{Instant, sleep_until};

use super::add::Attempt;
use super::door::Word;
use super::job::Job;
use super::request::Request;
use super::{seen, undo};
use crate::config::Config;
use crate::error::{Error, Kind, Result};
use crate::failpoint;
use crate::network::{self, Attachment, DAEMONS, Holder, NetworkRecord, Owned, netns, userns};
use crate::pod::gc;

/// How long what is left of a dead job's plugins may take to end after SIGKILL.
const ORPHAN_LIMIT: Duration = Duration::from_secs(5);

/// How soon a job sees that its network was taken, when nobody tells it.
const LOOK: Duration = Duration::from_secs(1);

/// How a network that was offered ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kept {
    /// Somebody has it.
    Taken,
    /// Nobody came.
    Unclaimed,
}

/// As a rule the pod has no network yet, and the kernel can begin with its netns while all the rest is made ready.
pub(super) fn ahead(config: &Config, request: &Request) -> Option<netns::Fresh> {
    let none_yet = request.key()?.look(config).is_none();
    none_yet.then(netns::Fresh::begin)?.ok()
}

/// Makes the network of the pod, or takes over what another job has left of it; then keeps it.
pub(super) async fn make(job: &mut Job<'_>, attempt: &Attempt<'_>) -> Result<()> {
    let (config, request) = (job.config, attempt.request);
    let wanted = LazyCell::new(|| attempt.wanted());
    let key = request.key().ok_or_else(|| {
        Error::new(
            Kind::Invalid,
            "find the pod's key: the daemon tells no name and uid",
        )
    })?;
    let attached = request.attached();
    let (fresh, others) = NetworkRecord::free_for(config, DAEMONS, &request.id, &attached);
    let fresh = fresh.as_of(&request.id, Some(job.own));
    let made_for = match others {
        false => request.id.as_str(),
        true => fresh.place(),
    };
    let holder = Holder {
        supervisor: Some(job.own),
        keeper: true,
        netns: netns::of_record(config, &fresh),
        made_for: made_for.to_owned(),
        ..request.holder()
    };
    failpoint::reach("cni-job.own.before").await?;
    let owned = network::own(config, &key, &fresh, &holder, |_| Ok(())).await?;
    let (record, before) = match owned {
        Owned::Fresh(record) => (record, None),
        Owned::Taken(record, before) => (record, Some(before)),
        Owned::Elsewhere(_) => {
            job.door.tell(&Word::Look);
            return Ok(());
        }
    };
    job.door.open(config, record.place())?;
    failpoint::reach("cni-job.own.after").await?;
    let whole = before
        .as_ref()
        .is_some_and(|before| record.is_whole(before, &holder, userns::Wanted::Hosts));
    if !whole {
        if let Some(before) = before {
            job.door.stage("take-over");
            let dead = before.supervisor.filter(|_| !before.is_alive());
            if let Err(error) = clear(job, &record, dead.map(|s| s.pid)).await {
                return failed(job, &record, &error).await;
            }
            // What it was made for stays the place's: so no two places have the same.
            let known = crate::id::check("container id", &before.made_for).is_ok();
            record.hold(&Holder {
                netns: netns::of_record(config, &record),
                made_for: match known {
                    true => before.made_for,
                    false => record.place().to_owned(),
                },
                ..holder
            })?;
        }
        if let Err(error) = add(job, request, &record, &wanted).await {
            return failed(job, &record, &error).await;
        }
    }
    // One that was not needed.
    job.ahead = None;
    if give(job, attempt, &record, &wanted).await? {
        close(job, &record);
        return Ok(());
    }
    failpoint::reach("cni-job.park.before").await?;
    if !record.park(config, true, keep_time(job)).await? {
        job.door.tell(&Word::Look);
        return Ok(());
    }
    keep(job, &record).await
}

/// Gives the network to the attempt that has asked for it, if that still waits: nobody has to look for it then. False: it is
/// to be kept.
async fn give(
    job: &mut Job<'_>,
    attempt: &Attempt<'_>,
    record: &NetworkRecord,
    wanted: &Holder,
) -> Result<bool> {
    // Both: a plugin whose caller has died could tell nobody.
    let asked = wanted.claim.as_ref();
    let asked = asked.and_then(|claim| claim.plugin.and(claim.caller));
    if !asked.is_some_and(|caller| caller.is_alive()) || !job.door.is_starter_there() {
        return Ok(false);
    }
    job.door.tell_starter(&Word::Made {
        place: record.place().to_owned(),
    });
    let (config, request) = (job.config, attempt.request);
    let given = network::give(
        config,
        record,
        wanted,
        |record| seen::give(config, request, record.place()),
        |before| attempt.bind(before),
    );
    match given.await {
        Ok(true) => {
            job.door.tell_starter(&Word::Given);
            job.door.tell(&Word::Look);
            Ok(true)
        }
        Ok(false) => Ok(false),
        Err(error) => {
            tracing::warn!(%error, "network not given to who asked for it");
            job.door.tell_starter(&Word::of(&error));
            Ok(false)
        }
    }
}

/// Keeps a network that is parked, and that nobody keeps.
pub(super) async fn keep_again(job: &mut Job<'_>, record: &NetworkRecord) -> Result<()> {
    if !record.adopt(job.config, job.own).await? {
        return Ok(());
    }
    let id = record.holder().unwrap_or_default().sandbox_id;
    let record = record.as_of(&id, Some(job.own));
    job.door.open(job.config, record.place())?;
    keep(job, &record).await
}

/// How long a network waits for its pod: as any parked thing, one to two intervals.
pub(super) fn keep_time(job: &Job<'_>) -> Duration {
    job.config.parking_interval().mul_f64(1.5)
}

/// What a dead job left, or one that was asked for something else.
async fn clear(job: &mut Job<'_>, record: &NetworkRecord, dead: Option<i32>) -> Result<()> {
    let (config, limit) = (job.config, job.config.del_timeout());
    let pin = netns::of_record(config, record);
    let reaper = job.reaper.clone();
    job.door
        .during(async {
            network::kill_orphans_of(config, record, dead, ORPHAN_LIMIT).await?;
            network::del(config, &reaper, record, limit).await?;
            netns::unpin(&pin)
        })
        .await
}

async fn add(
    job: &mut Job<'_>,
    request: &Request,
    record: &NetworkRecord,
    wanted: &LazyCell<Holder, impl FnOnce() -> Holder>,
) -> Result<()> {
    let config = job.config;
    let holder = record.holder().unwrap_or_default();
    let attachment: Attachment = request.attachment(&holder.made_for, &holder.netns);
    let (reaper, conf, netns) = (job.reaper.clone(), &request.conf, &attachment.netns);
    let fresh = job.ahead.take().map_or_else(netns::Fresh::begin, Ok)?;
    job.door.stage("cni-add");
    let beginning = Box::pin(network::begin(config, &reaper, record, conf, &attachment));
    let adding = job.door.during(stoppable(&mut job.stop, beginning)).await?;
    // The kernel has had until now for it.
    job.door.stage("netns");
    netns::make_of(fresh, netns)?;
    job.door.stage("cni-add");
    // While the plugins are at it.
    let looking = async {
        LazyCell::force(wanted);
    };
    let adding = Box::pin(async { tokio::join!(adding.run(), looking).0 });
    let added = job.door.during(stoppable(&mut job.stop, adding)).await;
    added.map(drop)
}

/// The work, unless the job is told to stop.
async fn stoppable<T>(stop: &mut Signal, work: impl Future<Output = Result<T>>) -> Result<T> {
    tokio::select! {
        done = work => done,
        _ = stop.recv() => Err(Error::new(
            Kind::Cancelled,
            "the job was told to stop (SIGTERM); ask again to begin anew",
        )),
    }
}

/// Tells why there is no network, and undoes what there is of it.
async fn failed(job: &mut Job<'_>, record: &NetworkRecord, error: &Error) -> Result<()> {
    tracing::warn!(%error, "network not made");
    job.door.tell(&Word::of(error));
    failpoint::reach("cni-job.failed").await?;
    undo::own(job, record).await
}

/// Offers it until somebody takes it or its time is over.
async fn keep(job: &mut Job<'_>, record: &NetworkRecord) -> Result<()> {
    job.door.stage("parked");
    failpoint::reach("cni-job.park.after").await?;
    job.door.tell(&Word::Look);
    network::add_collected(job.config);
    match wait(job, record).await {
        Kept::Taken => {
            close(job, record);
            Ok(())
        }
        Kept::Unclaimed => {
            tracing::warn!("nobody came for the network: undone");
            undo::own(job, record).await
        }
    }
}

async fn wait(job: &mut Job<'_>, record: &NetworkRecord) -> Kept {
    let time = keep_time(job);
    let mut until = Instant::now() + time;
    loop {
        let holder = record.holder().unwrap_or_default();
        if holder.supervisor != Some(job.own) || holder.parked.is_none() {
            return Kept::Taken;
        }
        let now = Instant::now();
        if now >= until {
            return Kept::Unclaimed;
        }
        tokio::select! {
            () = sleep_until(until.min(now + LOOK)) => {}
            _ = job.look.recv() => {}
            _ = job.stop.recv() => until = Instant::now(),
            () = job.door.let_in() => {
                job.door.tell(&Word::Look);
                until = Instant::now() + time;
            }
        }
    }
}

/// The door of a network that is somebody's, or gone; another job may have its own there already.
pub(super) fn close(job: &mut Job<'_>, record: &NetworkRecord) {
    let holder = record.holder();
    let taken_over = holder
        .and_then(|h| h.supervisor.filter(|by| by.is_alive()))
        .is_some_and(|by| by != job.own);
    if !taken_over {
        job.door.close();
    }
}

/// A try of the DEL, by the one who has the network. `quiet`: see [`gc::settle_quiet`].
pub(super) async fn settle(job: &mut Job<'_>, record: &NetworkRecord, quiet: bool) -> Result<()> {
    let (config, reaper) = (job.config, job.reaper.clone());
    let settled = async {
        match quiet {
            true => gc::settle_quiet(config, &reaper, record).await,
            false => gc::settle_own(config, &reaper, record).await,
        }
    };
    job.door.during(Box::pin(settled)).await
}
