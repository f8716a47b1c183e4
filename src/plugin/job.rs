//! The process that does the work: forked from the plugin's, and nobody's from then on.
//!
//! Own session, no descriptor of the daemon's, its log in `<runtime_root>/.cni-log`; out of the daemon's cgroup as soon as
//! the work takes longer than a fast network does, because moving a process costs milliseconds.

use std::collections::{BTreeSet, HashSet};
use std::fs::{self, File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixStream;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::signal::unix::{Signal, SignalKind, signal};
use tracing::level_filters::LevelFilter;

use super::add::Attempt;
use super::door::{Door, Wait};
use super::{block_on, seen, undo, work};
use crate::cgroup::{Group, Layout};
use crate::config::Config;
use crate::error::{Context, Result};
use crate::failpoint;
use crate::network::netns::Fresh;
use crate::network::{self, DAEMONS, NetworkRecord};
use crate::process::{Identity, Reaper, detach, guard_by_itself};
use crate::sys;

/// Jobs that may die under one ADD or DEL.
pub(super) const MAX_DEATHS: u32 = 3;

/// When a job leaves the daemon's cgroup.
const MOVE_AFTER: Duration = Duration::from_millis(500);

/// Before a job's pid in the name of its cgroup.
const GROUP: &str = "cni-";

/// When the log of all jobs begins anew, bytes.
const LOG_MAX: u64 = 4 << 20;

/// What a job is for.
#[derive(Debug)]
pub(super) enum Task<'a> {
    /// The network of an attempt's pod, kept until somebody takes it.
    Make(&'a Attempt<'a>),
    /// The same for one that is there and kept by nobody.
    Keep(NetworkRecord),
    /// The end of a network that an attempt had.
    Undo(NetworkRecord),
}

/// What every job has.
#[derive(Debug)]
pub(super) struct Job<'a> {
    pub(super) config: &'a Config,
    pub(super) reaper: Reaper,
    pub(super) own: Identity,
    pub(super) door: Door,
    /// SIGTERM: undo what is there, and leave.
    pub(super) stop: Signal,
    /// SIGUSR1: look whether the network is somebody's.
    pub(super) look: Signal,
    /// The netns of a network that is to be made.
    pub(super) ahead: Option<Fresh>,
}

/// Starts a job and gives the line on which it says how it went.
///
/// Must be called while this process has one thread.
pub(super) fn start(config: &Config, label: &str, task: &Task<'_>) -> Result<Wait> {
    let (ours, theirs) = UnixStream::pair().context(|| "make a pair of sockets")?;
    failpoint::hit("cni-job.fork.before")?;
    match sys::fork::fork().context(|| "fork the job that makes the network")? {
        sys::fork::Fork::Parent(_) => {
            drop(theirs);
            failpoint::hit("cni-job.fork.after")?;
            Ok(Wait::on(ours))
        }
        sys::fork::Fork::Child => {
            drop(ours);
            // Nothing of the plugin's own code may run here a second time.
            let ran = catch_unwind(AssertUnwindSafe(|| run(config, label, task, theirs)));
            sys::fork::exit_now(i32::from(!matches!(ran, Ok(Ok(())))))
        }
    }
}

/// What jobs that have died left at places where no network is any more.
pub fn dead_doors(config: &Config) -> Vec<PathBuf> {
    let places: HashSet<_> = NetworkRecord::list(config)
        .into_iter()
        .map(|(_, _, record)| record.place().to_owned())
        .collect();
    let mut dead = Vec::new();
    let root = config.runtime_root.join(DAEMONS);
    for entry in fs::read_dir(root).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let is_place = name.len() == 32 && !places.contains(&name);
        if is_place && Wait::at(config, &name).is_none() {
            dead.push(entry.path());
        }
    }
    dead
}

/// cgroups of jobs that were killed; by their names, as "/podvisor/cni-123".
pub fn dead_groups(config: &Config) -> Vec<PathBuf> {
    let Ok(layout) = Layout::detect() else {
        return Vec::new();
    };
    let Ok(parent) = Group::new(&layout, &config.cgroup_parent) else {
        return Vec::new();
    };
    let mut dead = BTreeSet::new();
    for entry in parent
        .dirs()
        .iter()
        .flat_map(fs::read_dir)
        .flatten()
        .flatten()
    {
        let name = entry.file_name();
        let name = name.to_string_lossy();
        let pid = name.strip_prefix(GROUP).and_then(|pid| pid.parse().ok());
        if pid.is_some_and(|pid| Identity::of(pid).is_err()) {
            dead.insert(format!("{}/{name}", parent.path()));
        }
    }
    // One whose process has just made it has nobody in it yet.
    let is_empty = |name: &String| Group::new(&layout, name).is_ok_and(|g| g.pids().is_empty());
    dead.into_iter()
        .filter(is_empty)
        .map(PathBuf::from)
        .collect()
}

/// Removes one of them; what has somebody in it stays.
pub fn remove_dead_group(name: &Path) -> Result<()> {
    let group = Group::new(&Layout::detect()?, &name.to_string_lossy())?;
    group.remove_if_empty();
    Ok(())
}

fn run(config: &Config, label: &str, task: &Task<'_>, starter: UnixStream) -> Result<()> {
    detach(&[starter.as_raw_fd()], || open_log(config))?;
    // One for the thread that makes a netns would be 64 MiB of addresses for a few bytes.
    sys::memory::one_arena();
    let ahead = match task {
        Task::Make(attempt) => work::ahead(config, attempt.request),
        Task::Keep(_) | Task::Undo(_) => None,
    };
    crate::log::init(LevelFilter::INFO, label);
    guard_by_itself();
    network::collect();
    failpoint::hit("cni-job.begin")?;
    let ran = block_on(work(config, task, starter, ahead));
    network::add_collected(config);
    if let Err(error) = &ran {
        tracing::error!(%error, "job ended");
    }
    if seen::sweep(config) {
        for group in dead_groups(config) {
            remove_dead_group(&group).unwrap_or_else(
                |error| tracing::debug!(%error, "cgroup of a dead job left behind"),
            );
        }
    }
    ran
}

async fn work(
    config: &Config,
    task: &Task<'_>,
    starter: UnixStream,
    ahead: Option<Fresh>,
) -> Result<()> {
    let mut job = Job {
        config,
        reaper: Reaper::start()?,
        own: Identity::own()?,
        door: Door::known_to(starter),
        stop: signal(SignalKind::terminate()).context(|| "listen for SIGTERM")?,
        look: signal(SignalKind::user_defined1()).context(|| "listen for SIGUSR1")?,
        ahead,
    };
    let mut place = Place::default();
    let moved = async {
        tokio::time::sleep(MOVE_AFTER).await;
        place.leave_daemon(config);
        std::future::pending::<()>().await;
    };
    let ran = tokio::select! {
        ran = Box::pin(do_task(&mut job, task)) => ran,
        () = moved => Ok(()),
    };
    place.come_back();
    ran
}

async fn do_task(job: &mut Job<'_>, task: &Task<'_>) -> Result<()> {
    match task {
        Task::Make(attempt) => work::make(job, attempt).await,
        Task::Keep(record) => work::keep_again(job, record).await,
        Task::Undo(record) => undo::ended(job, record).await,
    }
}

/// All jobs write into one file; each line is one write.
fn open_log(config: &Config) -> Option<File> {
    let path = config.runtime_root.join(".cni-log");
    let full = fs::metadata(&path).is_ok_and(|m| m.len() > LOG_MAX);
    OpenOptions::new()
        .create(true)
        .append(true)
        .mode(0o600)
        .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_CLOEXEC)
        .open(&path)
        .and_then(|file| {
            if full {
                file.set_len(0)?;
            }
            Ok(file)
        })
        .ok()
}

/// The cgroup that a job has gone to.
#[derive(Debug, Default)]
struct Place(Option<(Group, Group)>);

impl Place {
    /// With all that it has started. Without cgroups to write to it stays: the daemon's restart may end it then.
    fn leave_daemon(&mut self, config: &Config) {
        let own = std::process::id();
        let go = || -> Result<(Group, Group)> {
            let layout = Layout::detect()?;
            let group = Group::new(&layout, &format!("{}/{GROUP}{own}", config.cgroup_parent))?;
            group.create()?;
            for pid in crate::process::tree_of(own.cast_signed()) {
                group.add_process(pid).or_else(gone_is_done)?;
            }
            Ok((group, Group::new(&layout, "/")?))
        };
        match go() {
            Ok(groups) => self.0 = Some(groups),
            Err(error) => tracing::warn!(%error, "job stays in its daemon's cgroup"),
        }
    }

    /// A group cannot be removed with a process in it, and this one is about to end.
    fn come_back(&self) {
        let Some((group, root)) = &self.0 else { return };
        for pid in group.pids() {
            let moved = root.add_process(pid).or_else(gone_is_done);
            moved.unwrap_or_else(|error| tracing::warn!(%error, "cgroup of a job left behind"));
        }
        group.remove_if_empty();
    }
}

fn gone_is_done(error: crate::error::Error) -> Result<()> {
    if error.is_gone() { Ok(()) } else { Err(error) }
}
