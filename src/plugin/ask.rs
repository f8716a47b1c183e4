//! CHECK, STATUS and GC: the real plugins' answers, with the names that those know.

use std::time::Duration;

use super::request::Request;
use super::seen::{self, Seen};
use super::{block_on, del, note, passing};
use crate::clock;
use crate::config::Config;
use crate::error::{Error, Kind, Result};
use crate::network::{self, Asked, Through, Valid, stage_at};
use crate::process::Reaper;

/// A job older than this is worth a word when somebody asks for the network's state.
const STUCK: Duration = Duration::from_secs(30);

/// Runs CHECK.
pub(super) fn check(config: &Config, request: &Request) -> Result<()> {
    let seen = seen::read(config, request);
    let attached = request.attached();
    match network::held(config, &request.id, &attached, seen.place()) {
        Some((record, _)) => block_on(async {
            let reaper = Reaper::start()?;
            for checked in network::check(config, &reaper, &record).await? {
                checked.verdict?;
            }
            Ok(())
        }),
        None if seen == Seen::Never => passing::through(config, request, Through::Check).map(drop),
        None => Err(Error::new(
            Kind::State,
            format!(
                "check network {attached} of {}: attempt {} does not have it",
                request.pod_name(),
                request.id
            ),
        )),
    }
}

/// Runs STATUS.
pub(super) fn status(config: &Config, request: &Request) -> Result<()> {
    let stuck = stuck(config, &request.network);
    let asked = block_on(async {
        let reaper = Reaper::start()?;
        network::status(config, &reaper, &request.conf).await
    });
    match asked {
        Ok(Asked::Good | Asked::NotAsked(_)) => {
            stuck.iter().for_each(|line| note(line));
            Ok(())
        }
        Err(error) if stuck.is_empty() => Err(error),
        Err(error) => {
            let kind = error.kind();
            Err(Error::new(kind, format!("{error}; {}", stuck.join("; "))))
        }
    }
}

/// Runs GC: what the caller's pods do not have gets its DEL, then the real plugins are told what is valid, by their names.
pub(super) fn collect(config: &Config, request: &Request) -> Result<()> {
    let told: Vec<Valid> = serde_json::from_value(request.valid.clone()).map_err(|e| {
        Error::caused(
            Kind::Invalid,
            "read cni.dev/valid-attachments, which GC has to have",
            e,
        )
    })?;
    let mut valid = told.clone();
    let mut failed = None;
    for (record, holder) in network::of_daemons(config) {
        let Some((name, ifname)) = holder.network.rsplit_once('/') else {
            continue;
        };
        if name != request.network {
            continue;
        }
        let has = |id: &str| {
            told.iter()
                .any(|v| v.container_id == id && v.ifname == ifname)
        };
        // What nobody was given yet is nobody's garbage, and ends by itself.
        if holder.is_used() && !has(&holder.sandbox_id) && !has(&holder.made_for) {
            let record = record.as_of(&holder.sandbox_id, None);
            if let Err(error) = del::end(config, record, holder) {
                failed.get_or_insert(error);
            }
            continue;
        }
        valid.push(Valid {
            container_id: holder.made_for,
            ifname: ifname.to_owned(),
        });
    }
    let collected = block_on(async {
        let reaper = Reaper::start()?;
        network::gc(config, &reaper, &request.conf, &valid).await
    });
    match failed {
        Some(error) => Err(error),
        None => collected.map(drop),
    }
}

/// A line for each job on this network that is at work for long.
fn stuck(config: &Config, network: &str) -> Vec<String> {
    let jobs = network::of_daemons(config)
        .into_iter()
        .filter(|(_, holder)| {
            let name = holder.network.rsplit_once('/').map(|(name, _)| name);
            name == Some(network) && holder.is_alive() && holder.parked.is_none()
        });
    let told = jobs.filter_map(|(record, holder)| {
        let stage = stage_at(config, record.place())?;
        let age = clock::from_unix_nanos(stage.since).elapsed().ok()?;
        (age > STUCK).then(|| {
            format!(
                "pod {}/{} (uid {}) is at stage {} for {:.1} s in job {}",
                holder.pod_namespace,
                holder.name,
                holder.uid,
                stage.name,
                age.as_secs_f64(),
                stage.pid
            )
        })
    });
    told.collect()
}
