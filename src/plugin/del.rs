//! DEL: the end of the network for the attempt that has it, and nothing at all for one that never got it.

use std::time::Duration;

use super::door::{PAUSE, Wait, Word};
use super::job::{self, MAX_DEATHS, Task};
use super::request::Request;
use super::seen::{self, Seen};
use super::{note, passing};
use crate::config::Config;
use crate::error::{Error, Kind, Result};
use crate::failpoint;
use crate::network::{self, Holder, NetworkRecord, Through};

/// Longer than a try of the DEL may take: its own bound ends that.
const WORD_MARGIN: Duration = Duration::from_secs(30);

/// Runs the verb.
pub(super) fn run(config: &Config, request: &Request) -> Result<()> {
    let mut seen = seen::read(config, request);
    failpoint::hit("cni-plugin.del.before")?;
    if seen == Seen::Waiting {
        // An ADD of its may be left, though whoever asked for that is gone: a plugin that calls others was killed. That it
        // cannot be written down, on a full /run, must not keep the attempt.
        seen = network::undisturbed(config, || seen::end_waiting(config, request)).unwrap_or_else(
            |error| {
                note(&error.to_string());
                Seen::Over
            },
        );
    }
    let attached = request.attached();
    let held = match &seen {
        // Never got one, so that a look at all of them can be spared.
        Seen::Waiting | Seen::Over => return Ok(()),
        seen => network::held(config, &request.id, &attached, seen.place()),
    };
    match held {
        Some((record, holder)) => {
            if holder.is_untold() {
                let path = holder.claim.as_ref().map_or(&request.netns, |c| &c.netns);
                passing::take_back(path, &holder.netns)?;
                if network::release(config, &record, config.parking_interval(), false)? {
                    // Its caller died before it could read the result: this attempt never had it.
                    failpoint::hit("cni-plugin.release.after")?;
                    job::start(config, &request.pod_name(), &Task::Keep(record))?;
                    return Ok(());
                }
            }
            end(config, record, holder).map_err(|e| {
                e.within(format!(
                    "delete network {attached} of {}",
                    request.pod_name()
                ))
            })
        }
        None if seen == Seen::Never => passing::through(config, request, Through::Del).map(drop),
        None => Ok(()),
    }
}

/// The real DEL of what `holder` has, by a job: killing us does not stop it, and the next DEL joins it. Returns when it is
/// done, or with the failure of a try; it is tried again then by itself.
pub(super) fn end(config: &Config, record: NetworkRecord, holder: Holder) -> Result<()> {
    let (place, id) = (record.place().to_owned(), holder.sandbox_id.clone());
    let attached = holder.network.clone();
    let mut held = Some((record, holder));
    let mut deaths = 0;
    // Each look finds it done, or somebody who works, or nobody; the last one is one of us then.
    while let Some((record, holder)) = held {
        let at_work = holder.claim.is_some_and(|c| c.ending)
            && holder.supervisor.is_some_and(|by| by.is_alive());
        let wait = if at_work {
            Wait::at(config, &place)
        } else {
            let label = format!("pod {}/{}", holder.pod_namespace, holder.name);
            Some(job::start(config, &label, &Task::Undo(record))?)
        };
        let word = match wait.map(|mut wait| wait.word(config.del_timeout() + WORD_MARGIN)) {
            // It has not opened its door yet, or has closed it.
            None => Word::Look,
            Some(Ok(Some(word))) => word,
            Some(Ok(None)) => {
                return Err(Error::new(
                    Kind::Deadline,
                    "network clean-up pending: the job that does it gives no answer; try again",
                ));
            }
            Some(Err(_)) if deaths < MAX_DEATHS => {
                deaths += 1;
                Word::Look
            }
            Some(Err(error)) => return Err(error),
        };
        match word {
            Word::Done => return Ok(()),
            Word::Look | Word::Made { .. } | Word::Given => std::thread::sleep(PAUSE),
            Word::Failed(text) => return Err(Error::new(Kind::Other, text)),
            Word::Late(text) => return Err(Error::new(Kind::Deadline, text)),
        }
        held = network::held(config, &id, &attached, Some(&place));
    }
    Ok(())
}
