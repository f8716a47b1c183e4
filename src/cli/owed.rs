//! Pods that are known by their networks alone: how they are found, shown, and hurried. Most are gone; one whose runtime
//! directory somebody has removed lives.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::clock;
use crate::error::{Error, Result};
use crate::network::DAEMONS;
use crate::pod::gc::{self, OwedNetwork};

use super::failure::Failure;
use super::host::Host;
use super::supervisor::short;
use super::{output, select};

/// Between looks at a network that another process is at.
const LOOK_AGAIN: Duration = Duration::from_millis(50);

/// Those of this namespace, of daemons' pods, and those of which nobody knows it any more.
pub fn list(host: &Host) -> Vec<OwedNetwork> {
    let owed = gc::owed(&host.config).into_iter();
    let all = owed.chain(gc::astray(&host.config));
    all.filter(|o| ["", DAEMONS, &host.namespace].contains(&o.namespace.as_str()))
        .collect()
}

/// The one that `target` stands for: a name or id, or the beginning of just one id.
pub fn find(host: &Host, target: &str) -> Result<Option<OwedNetwork>, Failure> {
    let mut all = list(host);
    let exact = all
        .iter()
        .position(|o| o.id == target || o.holder.name == target);
    if let Some(i) = exact {
        return Ok(Some(all.swap_remove(i)));
    }
    all.retain(|o| !target.is_empty() && o.id.starts_with(target));
    if all.len() > 1 {
        let names: Vec<&str> = all.iter().map(|o| o.id.as_str()).collect();
        return Err(select::ambiguous(target, &names));
    }
    Ok(all.pop())
}

/// One try of its DEL, now; Busy when somebody else is at it.
pub async fn try_once(host: &Host, owed: &OwedNetwork) -> Result<()> {
    gc::settle(&host.config, host.reaper().await?, &owed.record).await
}

/// One try of its DEL, as soon as nobody else is at it.
pub async fn hurry(host: &Host, owed: &OwedNetwork) -> Result<()> {
    let end = Instant::now() + host.config.del_timeout();
    loop {
        // A try of its keeper's, which may have begun before what was in its way went.
        while owed.record.is_busy() && Instant::now() < end {
            tokio::time::sleep(LOOK_AGAIN).await;
        }
        let tried = try_once(host, owed).await;
        // Its keeper, or somebody else, was quicker.
        if !owed.record.owes_del() {
            return Ok(());
        }
        if !owed.record.is_busy() || Instant::now() >= end {
            return tried.map_err(|e| e.within(format!("remove pod {}", label(owed))));
        }
    }
}

/// Its name, else the short id.
pub fn label(owed: &OwedNetwork) -> &str {
    match owed.holder.name.as_str() {
        "" => short(&owed.id),
        name => name,
    }
}

/// A row of `ps`.
pub fn row(owed: &OwedNetwork) -> Vec<String> {
    let mut row = vec![
        short(&owed.id).to_owned(),
        owed.holder.name.clone(),
        owed.state().to_owned(),
        since(owed).map_or_else(String::new, output::age),
    ];
    row.resize(7, String::new());
    row
}

/// An entry of `ps --json`.
pub fn entry(owed: &OwedNetwork) -> Value {
    json!({
        "id": owed.id,
        "name": owed.holder.name,
        "namespace": owed.namespace,
        "state": owed.state(),
        "reason": reason(owed),
    })
}

/// What `inspect` and `network ls --json` show.
pub fn document(owed: &OwedNetwork) -> Value {
    let time = |nanos: u64| (nanos != 0).then(|| clock::rfc3339(clock::from_unix_nanos(nanos)));
    json!({
        "id": owed.id,
        "name": owed.holder.name,
        "namespace": owed.namespace,
        "uid": owed.holder.uid,
        "pod_namespace": owed.holder.pod_namespace,
        "attempt": owed.holder.attempt,
        "status": { "state": owed.state(), "reason": reason(owed), "supervised": owed.supervisor.is_some() },
        "network": {
            "netns": owed.holder.netns,
            "record": owed.record.dir(),
            "pending": {
                "since": time(owed.debt.first_failure),
                "tries": owed.debt.tries,
                "last_error": owed.debt.last_error,
                "next_try": time(owed.debt.next_try),
            },
        },
    })
}

fn since(owed: &OwedNetwork) -> Option<std::time::SystemTime> {
    (owed.debt.first_failure != 0).then(|| clock::from_unix_nanos(owed.debt.first_failure))
}

/// Why it is not an ordinary pod.
pub fn reason(owed: &OwedNetwork) -> String {
    if let Some(supervisor) = owed.supervisor {
        return format!(
            "its runtime directory is gone, its supervisor (pid {}) lives: remove it with `podvisor rm -f {}`",
            supervisor.pid,
            label(owed)
        );
    }
    match owed.debt.tries {
        0 => "its network has not been cleaned up yet".to_owned(),
        tries => format!("{tries} tries failed, the last: {}", owed.debt.last_error),
    }
}

/// A network that is still owed after a try by force: said, not failed.
pub fn complain(error: &Error) {
    output::complain(format!("{error}; it stays on record and is retried"));
}
