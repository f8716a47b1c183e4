//! Networks that wait for the next supervisor of their pod: how they are found, shown, and undone at once.

use std::time::Duration;

use serde_json::{Value, json};

use crate::clock;
use crate::error::{Error, Kind, Result};
use crate::network::DAEMONS;
use crate::pod::gc::{self, ParkedNetwork};

use super::failure::Failure;
use super::host::Host;
use super::supervisor::short;
use super::{output, select};

/// What a keeper may take on top of one DEL.
const KEEPER_MARGIN: Duration = Duration::from_secs(10);

/// Those of this namespace, and those that the CNI plugin makes for daemons.
pub fn list(host: &Host) -> Vec<ParkedNetwork> {
    let all = gc::parked(&host.config).into_iter();
    // Those of daemons' pods belong to no namespace.
    let here = |space: &str| space == host.namespace || space == DAEMONS;
    all.filter(|p| here(&p.holder.namespace)).collect()
}

/// The one that `target` stands for: a name or id, or the beginning of just one id.
pub fn find(host: &Host, target: &str) -> Result<Option<ParkedNetwork>, Failure> {
    let mut all = list(host);
    let exact = |p: &ParkedNetwork| p.holder.sandbox_id == target || p.holder.name == target;
    let named = all.iter().any(exact);
    all.retain(|p| match named {
        true => exact(p),
        false => !target.is_empty() && p.holder.sandbox_id.starts_with(target),
    });
    if all.len() > 1 {
        let ids: Vec<&str> = all.iter().map(|p| p.holder.sandbox_id.as_str()).collect();
        return Err(select::ambiguous(target, &ids));
    }
    Ok(all.pop())
}

/// Ends its keeper, who undoes it, or undoes it here where there is none.
pub async fn undo(host: &Host, parked: &ParkedNetwork) -> Result<()> {
    let record = &parked.record;
    if let Some(keeper) = record.held_by() {
        keeper.signal(libc::SIGTERM)?;
        let limit = host.config.del_timeout() + KEEPER_MARGIN;
        if !keeper.wait_gone(limit).await {
            return Err(Error::new(
                Kind::Busy,
                format!(
                    "remove pod {}: its keeper (pid {}) is still at its network; try again",
                    label(parked),
                    keeper.pid
                ),
            ));
        }
    }
    if !record.owes_del() {
        return Ok(());
    }
    let tried = gc::settle(&host.config, host.reaper().await?, record).await;
    tried.map_err(|e| e.within(format!("remove pod {}", label(parked))))
}

/// Its name, else the short id.
pub fn label(parked: &ParkedNetwork) -> &str {
    match parked.holder.name.as_str() {
        "" => short(&parked.holder.sandbox_id),
        name => name,
    }
}

/// A row of `ps`.
pub fn row(parked: &ParkedNetwork) -> Vec<String> {
    let bare = |ip: &String| ip.split('/').next().unwrap_or_default().to_owned();
    let ips: Vec<String> = parked.ips.iter().map(bare).collect();
    let mut row = vec![
        short(&parked.holder.sandbox_id).to_owned(),
        parked.holder.name.clone(),
        parked.state().to_owned(),
        output::age(clock::from_unix_nanos(since(parked))),
        ips.join(","),
    ];
    row.resize(7, String::new());
    row
}

/// An entry of `ps --json`.
pub fn entry(parked: &ParkedNetwork) -> Value {
    json!({
        "id": parked.holder.sandbox_id,
        "name": parked.holder.name,
        "namespace": parked.holder.namespace,
        "state": parked.state(),
        "reason": reason(parked),
        "created_at": time(since(parked)),
        "ips": parked.ips,
    })
}

/// What `inspect` and `network ls --json` show.
pub fn document(parked: &ParkedNetwork) -> Value {
    let holder = &parked.holder;
    json!({
        "id": holder.sandbox_id,
        "name": holder.name,
        "namespace": holder.namespace,
        "uid": holder.uid,
        "pod_namespace": holder.pod_namespace,
        "attempt": holder.attempt,
        "status": { "state": parked.state(), "reason": reason(parked), "supervised": parked.kept },
        "network": {
            "netns": holder.netns,
            "record": parked.record.dir(),
            "ips": parked.ips,
            "made_for": holder.made_for,
            "parked": {
                "since": time(since(parked)),
                "keeper": holder.supervisor.filter(|_| parked.kept).map(|s| s.pid),
                "left_seconds": left(parked),
            },
        },
    })
}

/// Why it is there, for people.
pub fn reason(parked: &ParkedNetwork) -> String {
    if let Some(stage) = parked.stage.as_ref().filter(|_| parked.kept) {
        let age = clock::from_unix_nanos(stage.since).elapsed();
        let seconds = age.unwrap_or_default().as_secs_f64();
        return match stage.name.as_str() {
            "parked" => "it waits for the next attempt of its pod".to_owned(),
            name => format!(
                "job {} of the CNI plugin is at stage {name} for {seconds:.1} s",
                stage.pid
            ),
        };
    }
    if !parked.holder.is_parked() {
        return "its pod was shut down while a plugin was at work, which may finish".to_owned();
    }
    match parked.kept {
        true => "it waits for the next supervisor of its pod".to_owned(),
        false => format!(
            "its keeper has died; it waits {} s more for the next supervisor of its pod",
            left(parked)
        ),
    }
}

/// Seconds until nobody needs to keep it any more.
fn left(parked: &ParkedNetwork) -> u64 {
    let until = parked.holder.parked.as_ref().map_or(0.0, |p| p.until);
    let left = (until - clock::uptime().as_secs_f64()).max(0.0);
    Duration::try_from_secs_f64(left)
        .unwrap_or_default()
        .as_secs()
}

fn since(parked: &ParkedNetwork) -> u64 {
    let holder = &parked.holder;
    holder.parked.as_ref().map_or(holder.begun, |p| p.at)
}

fn time(nanos: u64) -> Option<String> {
    (nanos != 0).then(|| clock::rfc3339(clock::from_unix_nanos(nanos)))
}
