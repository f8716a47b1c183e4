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
            let keep = config.parking_interval();
            if holder.is_untold() {
                let path = holder.claim.as_ref().map_or(&request.netns, |c| &c.netns);
                passing::take_back(path, &holder.netns)?;
            }
            if network::release(config, &record, keep, false)? {
                // Its caller died before it could read the result: this attempt never had it.
                failpoint::hit("cni-plugin.release.after")?;
                job::start(config, &request.pod_name(), &Task::Keep(record))?;
                return Ok(());
            }
            end(config, &record, &request.id, &attached).map_err(|e| {
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

/// The real DEL, by a job: killing us does not stop it, and the next DEL joins it. Returns when it is done, or with the
/// failure of a try; it is tried again then by itself.
pub(super) fn end(config: &Config, record: &NetworkRecord, id: &str, attached: &str) -> Result<()> {
    let mut deaths = 0;
    // Each look finds it done, or somebody who works, or nobody; the last one is one of us then.
    while let Some((record, holder)) = still_held(config, record, id, attached) {
        let at_work = holder.claim.is_some_and(|c| c.ending)
            && holder.supervisor.is_some_and(|by| by.is_alive());
        let mut wait = if at_work {
            let Some(wait) = Wait::at(config, record.place()) else {
                std::thread::sleep(PAUSE);
                continue;
            };
            wait
        } else {
            let label = format!("pod {}/{}", holder.pod_namespace, holder.name);
            job::start(config, &label, &Task::Undo(record))?
        };
        match wait.word(config.del_timeout() + WORD_MARGIN) {
            Ok(Some(Word::Done)) => return Ok(()),
            Ok(Some(Word::Look | Word::Given { .. })) => std::thread::sleep(PAUSE),
            Ok(Some(Word::Failed(text))) => return Err(Error::new(Kind::Other, text)),
            Ok(Some(Word::Late(text))) => return Err(Error::new(Kind::Deadline, text)),
            Ok(None) => {
                return Err(Error::new(
                    Kind::Deadline,
                    "network clean-up pending: the job that does it gives no answer; try again",
                ));
            }
            Err(_) if deaths < MAX_DEATHS => deaths += 1,
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn still_held(
    config: &Config,
    record: &NetworkRecord,
    id: &str,
    attached: &str,
) -> Option<(NetworkRecord, Holder)> {
    network::held(config, id, attached, Some(record.place()))
}
