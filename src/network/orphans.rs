//! Plugins that outlived their supervisor.
//!
//! A plugin dies with its supervisor, what it started does not: it may go on attaching the pod while the DEL runs, or
//! after it. It is told by what it was given: CNI's environment with the pod's id and netns.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::{NetworkRecord, netns};
use crate::config::Config;
use crate::error::{Error, Kind, Result};
use crate::process::Identity;

/// Name of a guard's process.
const GUARD: &str = "podvisor-guard";

/// Most of an environment that is looked at, bytes: more than a plugin's, which we make, and what it may add.
const ENVIRONMENT: usize = 1 << 17;

/// Between looks at a process of which it cannot be told yet what it is.
const PAUSE: Duration = Duration::from_millis(2);

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

/// [`kill_orphans_of`] for a record that owes a DEL. Busy: somebody who lives is at work on it, the plugins are that one's.
pub async fn kill_orphans_alone(
    config: &Config,
    record: &NetworkRecord,
    limit: Duration,
) -> Result<()> {
    if !record.owes_del() {
        return Ok(());
    }
    let _locked = record.lock()?;
    kill_orphans_of(config, record, record.last_session(), limit).await
}

/// SIGKILL to what is left of this attachment's plugins, and waits until it is gone.
///
/// `supervisor`: pid of the dead one, whose session its plugins are in; `None`: not known, any session without a leader.
/// A daemon that a plugin put into a session of its own lives on: its DEL may need it.
pub async fn kill_orphans(
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
        let left: Vec<Left> = processes()
            .filter_map(|pid| look(pid, &marks, supervisor))
            .collect();
        if left.is_empty() {
            return Ok(());
        }
        for orphan in left.iter().filter(|l| l.how == How::Orphan) {
            tracing::warn!(
                pid = orphan.who.pid,
                id = container_id,
                "a plugin's process outlived its supervisor: killed"
            );
            orphan.who.signal(libc::SIGKILL)?;
        }
        for process in &left {
            if !process.settled(&marks, supervisor, end).await {
                return Err(Error::new(
                    Kind::Deadline,
                    format!(
                        "end process {} of a CNI plugin whose supervisor has died: it hangs in the kernel",
                        process.who.pid
                    ),
                ));
            }
        }
    }
}

/// A process that may still be at work on the attachment.
struct Left {
    who: Identity,
    how: How,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum How {
    /// See `sys::guard`: it ends by itself, and what is below it before.
    Guard,
    /// It bears the attachment's marks.
    Orphan,
    /// It has no environment at this moment: it is between two programs (exec takes the old one away before the new one
    /// has its own), or on its way out with a thread that is still in a system call.
    Unclear,
}

impl Left {
    /// Waits until it is gone, or can be told apart; false at the end of the time.
    async fn settled(&self, marks: &[String], supervisor: Option<i32>, end: Instant) -> bool {
        let left = || end.saturating_duration_since(Instant::now());
        if self.how != How::Unclear {
            return self.who.wait_gone(left()).await;
        }
        let unclear = || {
            look(self.who.pid, marks, supervisor)
                .is_some_and(|now| now.how == How::Unclear && now.who == self.who)
        };
        while unclear() {
            if left().is_zero() {
                return false;
            }
            sleep(PAUSE).await;
        }
        true
    }
}

/// What a process is to the attachment; None: nothing.
fn look(pid: i32, marks: &[String], supervisor: Option<i32>) -> Option<Left> {
    // First who it is: what is read afterwards is this process' own, or the signal reaches nobody.
    let who = Identity::of(pid).ok()?;
    let stat = Stat::of(pid)?;
    let of_dead = match supervisor {
        Some(dead) => stat.session == dead,
        None => Identity::of(stat.session).map_or(true, |leader| !leader.is_alive()),
    };
    if !of_dead || stat.is_over {
        return None;
    }
    if supervisor.is_some() && stat.name == GUARD {
        return Some(Left {
            who,
            how: How::Guard,
        });
    }
    let how = match environment(pid) {
        Ok(text) if has_marks(&text, marks) => How::Orphan,
        // Whose session it is in says enough; in one of which only that its leader is gone does not.
        Ok(text) if text.is_empty() && !stat.is_bare && supervisor.is_some() => How::Unclear,
        _ => return None,
    };
    Some(Left { who, how })
}

fn processes() -> impl Iterator<Item = i32> {
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    processes.filter_map(|e| e.file_name().to_str()?.parse::<i32>().ok())
}

/// In one read: between two of them the process may have another program, and the rest would be missing.
fn environment(pid: i32) -> io::Result<Vec<u8>> {
    let mut text = vec![0; ENVIRONMENT];
    let length = File::open(format!("/proc/{pid}/environ"))?.read(&mut text)?;
    text.truncate(length);
    Ok(text)
}

fn has_marks(environment: &[u8], marks: &[String]) -> bool {
    let has = |mark: &String| environment.split(|b| *b == 0).any(|v| v == mark.as_bytes());
    marks.iter().all(has)
}

/// Of `/proc/<pid>/stat`.
#[derive(Debug, PartialEq, Eq)]
struct Stat {
    name: String,
    session: i32,
    /// Ended, with all its threads. A first thread that has ended looks the same while others are in the kernel.
    is_over: bool,
    /// Its program was given an environment without a variable. Between two programs there is none at all, and before
    /// that was one with some.
    is_bare: bool,
}

impl Stat {
    fn of(pid: i32) -> Option<Self> {
        Self::parse(&fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
    }

    /// The name may hold anything; the fields after it are counted from 3, proc(5).
    fn parse(text: &str) -> Option<Self> {
        let (head, rest) = text.rsplit_once(')')?;
        let fields: Vec<&str> = rest.split_ascii_whitespace().collect();
        let field = |n: usize| fields.get(n - 3).copied();
        let ended = matches!(field(3)?, "Z" | "X" | "x");
        let threads: u32 = field(20)?.parse().ok()?;
        Some(Self {
            name: head.split_once('(')?.1.to_owned(),
            session: field(6)?.parse().ok()?,
            is_over: ended && threads <= 1,
            // 26: where its code is; the last that exec fills in.
            is_bare: field(26) != Some("0") && field(51).is_some_and(|end| field(50) == Some(end)),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stat(state: char, threads: u32, code: u64, environment: [u64; 2]) -> Stat {
        let zeroes = |n: usize| " 0".repeat(n);
        let [start, end] = environment;
        // Fields 7 to 19, 21 to 25, 27 to 49.
        let [to_threads, to_code, to_environment] = [13, 5, 23].map(zeroes);
        let text = format!(
            "7 (a (b) c) {state} 1 7 5{to_threads} {threads}{to_code} {code}{to_environment} {start} {end} 0"
        );
        Stat::parse(&text).unwrap()
    }

    #[test]
    fn a_first_thread_that_has_ended_is_no_end_while_others_run() {
        assert!(stat('Z', 1, 0, [0, 0]).is_over);
        assert!(!stat('Z', 2, 0, [0, 0]).is_over);
        let sleeps = stat('S', 1, 9, [8, 9]);
        assert!(!sleeps.is_over);
        assert_eq!((sleeps.session, sleeps.name.as_str()), (5, "a (b) c"));
    }

    #[test]
    fn an_environment_that_is_not_there_is_no_empty_one() {
        assert!(!stat('R', 1, 0, [0, 0]).is_bare);
        assert!(!stat('R', 1, 0, [140_000, 140_000]).is_bare);
        assert!(!stat('R', 1, 9, [140_000, 140_001]).is_bare);
        assert!(stat('R', 1, 9, [140_000, 140_000]).is_bare);
        let own = Stat::of(i32::try_from(std::process::id()).unwrap()).unwrap();
        assert!(!own.is_bare && !own.is_over);
    }
}
