//! Plugins that outlived their supervisor.
//!
//! A plugin dies with its supervisor, what it started does not: it may go on attaching the pod while the DEL runs, or
//! after it. It is told by what it was given: CNI's environment with the pod's id and netns.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::time::Instant;

use super::{NetworkRecord, netns};
use crate::config::Config;
use crate::error::{Error, Kind, Result};
use crate::process::Identity;

/// Name of a guard's process.
const GUARD: &str = "podvisor-guard";

/// The same for every attachment of a record: each by the names that its plugins were given, whichever sandbox has it now.
pub async fn kill_orphans_of(
    config: &Config,
    record: &NetworkRecord,
    supervisor: Option<i32>,
    limit: Duration,
) -> Result<()> {
    let mut told: Vec<(String, PathBuf)> = Vec::new();
    for on in record.attachments().into_iter().filter(|on| on.owes_del) {
        let pinned = on.netns.is_absolute().then_some(on.netns);
        let netns = pinned.unwrap_or_else(|| netns::of_record(config, record));
        if !on.container_id.is_empty() && !told.contains(&(on.container_id.clone(), netns.clone()))
        {
            told.push((on.container_id, netns));
        }
    }
    for (container_id, netns) in &told {
        kill_orphans(container_id, netns, supervisor, limit).await?;
    }
    Ok(())
}

/// SIGKILL to what is left of this attachment's plugins, and waits until it is gone.
///
/// `supervisor`: pid of the dead one, whose session its plugins are in; `None`: not known, any session without a leader.
/// A daemon that a plugin put into a session of its own lives on: its DEL may need it.
async fn kill_orphans(
    container_id: &str,
    netns: &Path,
    supervisor: Option<i32>,
    limit: Duration,
) -> Result<()> {
    let marks = [
        format!("CNI_CONTAINERID={container_id}"),
        format!("CNI_NETNS={}", netns.display()),
    ];
    let end = Instant::now() + limit;
    // Guards of a dead supervisor end what is below them: they know more than an environment tells. Until they are done,
    // and until nobody is left who could fork another.
    loop {
        let orphans = orphans(&marks, supervisor);
        let guards = supervisor.map(guards).unwrap_or_default();
        if orphans.is_empty() && guards.is_empty() {
            return Ok(());
        }
        for orphan in &orphans {
            tracing::warn!(
                pid = orphan.pid,
                id = container_id,
                "a plugin's process outlived its supervisor: killed"
            );
            orphan.signal(libc::SIGKILL)?;
        }
        for process in orphans.iter().chain(&guards) {
            let left = end.saturating_duration_since(Instant::now());
            if !process.wait_gone(left).await {
                return Err(Error::new(
                    Kind::Deadline,
                    format!(
                        "end process {} of a CNI plugin whose supervisor has died: it hangs in the kernel",
                        process.pid
                    ),
                ));
            }
        }
    }
}

/// Guards (see `sys::guard`) of the dead supervisor: processes of its session that bear their name.
fn guards(supervisor: i32) -> Vec<Identity> {
    let is_guard = |pid: i32| {
        let who = Identity::of(pid).ok()?;
        let name = fs::read_to_string(format!("/proc/{pid}/comm")).ok()?;
        (name.trim_end() == GUARD && session(pid)? == supervisor && who.is_alive()).then_some(who)
    };
    processes().filter_map(is_guard).collect()
}

fn processes() -> impl Iterator<Item = i32> {
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    processes.filter_map(|e| e.file_name().to_str()?.parse::<i32>().ok())
}

fn orphans(marks: &[String], supervisor: Option<i32>) -> Vec<Identity> {
    let is_one = |pid: i32| {
        // First who it is: what is read afterwards is this process' own, or the signal reaches nobody.
        let who = Identity::of(pid).ok()?;
        let session = session(pid)?;
        let of_dead = match supervisor {
            Some(dead) => session == dead,
            None => Identity::of(session).map_or(true, |leader| !leader.is_alive()),
        };
        (of_dead && has_marks(pid, marks) && who.is_alive()).then_some(who)
    };
    processes().filter_map(is_one).collect()
}

fn has_marks(pid: i32, marks: &[String]) -> bool {
    let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
    let has = |mark: &String| environment.split(|b| *b == 0).any(|v| v == mark.as_bytes());
    marks.iter().all(has)
}

/// Field 6 of `/proc/<pid>/stat`; the name before it may hold anything.
fn session(pid: i32) -> Option<i32> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (_, rest) = stat.rsplit_once(')')?;
    rest.split_ascii_whitespace().nth(3)?.parse().ok()
}
