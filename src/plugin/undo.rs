//! The end of a network: its DEL, its pin, its record; again and again until it works.

use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::door::Word;
use super::job::Job;
use super::work::{close, settle};
use crate::error::Result;
use crate::failpoint;
use crate::network::{self, Ending, FIRST_PAUSE, Holder, LONGEST_PAUSE, NetworkRecord};

/// Before a try that somebody who waits has asked for.
const HURRIED: Duration = Duration::from_millis(100);

/// The DEL of the attempt that has it.
pub(super) async fn ended(job: &mut Job<'_>, record: &NetworkRecord) -> Result<()> {
    let (ending, id) = network::end_claim(job.config, record)?;
    if ending == Ending::Elsewhere {
        // Another job is at it, or it is done.
        job.door.tell(&Word::Look);
        return Ok(());
    }
    let record = record.as_of(&id, Some(job.own));
    job.door.open(job.config, record.place())?;
    failpoint::reach("cni-job.end.after").await?;
    // Nobody is given a network whose ADD has not ended well, and no DEL was begun.
    let quiet = ending == Ending::First;
    until_done(job, &record, quiet).await
}

/// A network of this job's that nobody is to have.
pub(super) async fn own(job: &mut Job<'_>, record: &NetworkRecord) -> Result<()> {
    if let Some(holder) = record.holder()
        && holder.supervisor == Some(job.own)
        && holder.parked.is_some()
    {
        // Not before it is off the index: who looks must not find what is half undone.
        if !record.claim(job.config).await? {
            close(job, record);
            return Ok(());
        }
        record.hold(&Holder {
            parked: None,
            failed: "nobody came for it".to_owned(),
            ..holder
        })?;
    }
    until_done(job, record, false).await
}

/// `quiet`: none of its plugins can be at work still.
async fn until_done(job: &mut Job<'_>, record: &NetworkRecord, mut quiet: bool) -> Result<()> {
    job.door.stage("cni-del");
    let end = Instant::now() + job.config.keeper_time();
    let mut pause = FIRST_PAUSE;
    loop {
        let Err(error) = settle(job, record, std::mem::take(&mut quiet)).await else {
            failpoint::reach("cni-job.done.before").await?;
            // Before the word: who is told that it is done may look.
            close(job, record);
            job.door.tell(&Word::Done);
            return Ok(());
        };
        let tries = record.debt().map_or(0, |debt| debt.tries);
        tracing::warn!(step = "cni-del", tries, %error, "network not cleaned up");
        job.door.tell(&Word::of(&error));
        tokio::select! {
            () = sleep(pause) => pause = (pause * 2).min(LONGEST_PAUSE),
            // Somebody asks: the sooner the better.
            () = job.door.let_in() => sleep(HURRIED).await,
            _ = job.stop.recv() => break,
        }
        if Instant::now() >= end {
            break;
        }
    }
    tracing::error!("network clean-up still pending; leaving it to podvisor gc");
    record.let_go()?;
    close(job, record);
    Ok(())
}
