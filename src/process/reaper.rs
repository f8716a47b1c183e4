//! The one owner of wait: a table of known children and a loop on SIGCHLD that reaps whatever has ended.
//!
//! There is one table per process, because wait is per process: every [`Reaper`] is a handle on it. The loop never
//! ends before its runtime does (a SIGTERM must not leave children unreaped), and goes on only while the kernel hands
//! out ended children (a stopped child is no event, so it cannot spin).
//! Must never be joined by a second caller of wait: no `tokio::process`, no `std::process::Child::wait`.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::OwnedFd;
use std::process::Command;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::watch;
use tracing::{debug, error};

use super::alone;
use super::child::{Child, Exit};
use super::identity::Identity;
use crate::error::{Context, Error, Result};
use crate::sys;

/// Exits of unknown children kept at most while somebody holds them; the oldest goes first.
const KEPT: usize = 1024;

/// What a child that has ended needs to leave its processor, and far more.
const LAST_STEPS: Duration = Duration::from_millis(1);

/// Children reaped in one go before other tasks get their turn.
const BATCH: usize = 128;

/// The one owner of wait. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Reaper {
    table: Arc<Mutex<Table>>,
}

#[derive(Debug, Default)]
struct Table {
    known: HashMap<i32, Known>,
    kept: VecDeque<(Identity, Exit)>,
    holders: usize,
}

#[derive(Debug)]
struct Known {
    identity: Identity,
    /// Not spawned by us: it may be reaped by somebody else, so its pid alone proves nothing.
    adopted: bool,
    exit: watch::Sender<Option<Exit>>,
}

impl Known {
    /// Once.
    fn tell(&self, exit: Exit) {
        self.exit.send_if_modified(|told| {
            let first = told.is_none();
            told.get_or_insert(exit);
            first
        });
    }
}

impl Reaper {
    /// Becomes child subreaper and starts the SIGCHLD loop on the current tokio runtime.
    ///
    /// Unknown children (orphans handed to the subreaper) are reaped and logged at debug. A second call gives another
    /// handle on the same table.
    pub fn start() -> Result<Self> {
        static TABLE: OnceLock<Arc<Mutex<Table>>> = OnceLock::new();
        sys::process::become_subreaper().context(|| "become child subreaper")?;
        sys::process::unblock_sigchld().context(|| "unblock SIGCHLD")?;
        let news = signal(SignalKind::child()).context(|| "listen for SIGCHLD")?;
        let reaper = Self {
            table: Arc::clone(TABLE.get_or_init(Arc::default)),
        };
        tokio::spawn(reaper.clone().reap_for_ever(news));
        Ok(reaper)
    }

    /// Spawns; registered before anything else can be reaped.
    ///
    /// The child gets default signals, the stated limit of open files and no descriptor but 0 to 2 (see
    /// [`sys::process::set_up_child`]). It does not die with us.
    pub fn spawn(&self, command: Command) -> Result<Child> {
        self.spawn_as(command, false)
    }

    /// The same for a child that is given descriptors of its own: 3, 4 and 5.
    pub fn spawn_giving(&self, mut command: Command, given: [OwnedFd; 3]) -> Result<Child> {
        sys::process::set_up_child(&mut command, false);
        let _taken = sys::process::give_descriptors(&mut command, given)
            .context(|| "give descriptors to a child")?;
        self.spawn_prepared(command)
    }

    /// The same as [`Reaper::spawn`]; `die_with_parent` asks the kernel to SIGKILL it when the calling *thread* ends.
    pub(super) fn spawn_as(&self, mut command: Command, die_with_parent: bool) -> Result<Child> {
        sys::process::set_up_child(&mut command, die_with_parent);
        self.spawn_prepared(command)
    }

    /// The same under a guard, which is the child then; see [`sys::guard`]. It acts when the calling *thread* ends.
    pub(super) fn spawn_guarded(&self, mut command: Command) -> Result<Child> {
        sys::process::set_up_child(&mut command, false);
        sys::guard::set_up_guard(&mut command)
            .context(|| format!("run {}", command.get_program().to_string_lossy()))?;
        self.spawn_prepared(command)
    }

    /// The same for a program whose guard this process is itself; see [`sys::spawn::spawn`].
    pub(super) fn spawn_alone(&self, command: &Command, stdio: [&OwnedFd; 3]) -> Result<Child> {
        self.register_with(|| {
            sys::spawn::spawn(command, stdio)
                .context(|| format!("run {}", command.get_program().to_string_lossy()))
        })
    }

    fn spawn_prepared(&self, mut command: Command) -> Result<Child> {
        // Held over the spawn: when exec fails, std waits for the child itself, and nobody may be faster.
        let mut table = self.lock();
        let spawned = command
            .spawn()
            .context(|| format!("run {}", command.get_program().to_string_lossy()))?;
        // Neither dropping the handle nor leaving it unwaited does anything: the loop reaps.
        let pid = spawned.id() as i32;
        self.register(&mut table, pid, false)
    }

    /// Registers a child that `sys` has just cloned; `make` runs with the table locked, so that its exit cannot be
    /// reaped before it is known.
    pub fn register_with(&self, make: impl FnOnce() -> Result<i32>) -> Result<Child> {
        let mut table = self.lock();
        let pid = make()?;
        self.register(&mut table, pid, false)
    }

    /// Keeps exits of pids nobody knows yet from now until the guard is dropped, so that `adopt` of a pid that
    /// died between its fork (by an OCI runtime) and now still learns its exit.
    pub fn hold_unknown(&self) -> HoldUnknown {
        self.lock().holders += 1;
        HoldUnknown {
            reaper: self.clone(),
        }
    }

    /// Takes over a descendant that is, or will be, our child through the subreaper (a container's init, an exec).
    ///
    /// Works before the kernel has handed it to us. NotFound: it is gone, and nobody held its exit.
    pub fn adopt(&self, pid: i32) -> Result<Child> {
        let mut table = self.lock();
        // The newest first: the pid may have come round.
        if let Some(at) = table
            .kept
            .iter()
            .rposition(|(identity, _)| identity.pid == pid)
        {
            let later = Identity::of(pid)
                .is_ok_and(|now| table.kept.get(at).is_some_and(|(kept, _)| *kept != now));
            if let (false, Some((identity, exit))) = (later, table.kept.remove(at)) {
                return Ok(Child {
                    identity,
                    exit: watch::channel(Some(exit)).1,
                    reaper: self.clone(),
                });
            }
        }
        if let Some(known) = table
            .known
            .get(&pid)
            .filter(|k| !k.adopted || Identity::of(pid).is_ok_and(|i| i == k.identity))
        {
            return Ok(Child {
                identity: known.identity,
                exit: known.exit.subscribe(),
                reaper: self.clone(),
            });
        }
        self.register(&mut table, pid, true)
    }

    /// See [`Child::signal`].
    pub(super) fn signal(&self, identity: &Identity, signal: i32) -> Result<bool> {
        let table = self.lock();
        match table.known.get(&identity.pid) {
            Some(known) if known.identity == *identity && !known.adopted => {
                // Not reaped while the table is locked: the pid is this child's, living or zombie.
                gone_is_false(sys::process::kill(identity.pid, signal), || {
                    format!("send signal {signal} to pid {}", identity.pid)
                })
            }
            Some(known) if known.identity == *identity => identity.signal(signal),
            _ => Ok(false),
        }
    }

    /// See [`Child::signal_group`].
    pub(super) fn signal_group(&self, identity: &Identity, signal: i32) -> Result<bool> {
        let table = self.lock();
        let unreaped = table
            .known
            .get(&identity.pid)
            .is_some_and(|known| known.identity == *identity);
        // The kernel gives out no pid that still names a group. So after the leader was reaped, a process with its pid
        // means that the group had emptied and the number belongs to somebody else now.
        if !unreaped && Identity::of(identity.pid).is_ok() {
            return Ok(false);
        }
        gone_is_false(sys::process::kill(-identity.pid, signal), || {
            format!("send signal {signal} to process group {}", identity.pid)
        })
    }

    fn register(&self, table: &mut Table, pid: i32, adopted: bool) -> Result<Child> {
        // A child of ours cannot be reaped while the table is locked, so /proc has it, if only as a zombie.
        let identity = Identity::of(pid)?;
        let (exit, seen) = watch::channel(None);
        table.known.insert(
            pid,
            Known {
                identity,
                adopted,
                exit,
            },
        );
        Ok(Child {
            identity,
            exit: seen,
            reaper: self.clone(),
        })
    }

    async fn reap_for_ever(self, mut news: Signal) {
        loop {
            while self.reap_batch() {
                tokio::task::yield_now().await;
            }
            if news.recv().await.is_none() {
                // Only when the runtime's signal driver is gone, and this task with it.
                return;
            }
            if alone::is_guard() {
                self.tell_first();
                tokio::time::sleep(LAST_STEPS).await;
            }
        }
    }

    /// Tells how a child has ended that is reaped a little later.
    ///
    /// The signal comes before the last steps of the child (of its last thread, to be exact), and takes the processor from
    /// it where both have the same. Reaped now it would be waited for without being let run, up to the scheduler's next
    /// tick, 4 ms; every fifth was. For a process that has nothing else to wait for.
    fn tell_first(&self) {
        let table = self.lock();
        if let Ok(Some((pid, status))) = sys::process::peek_ended()
            && let Some(known) = table.known.get(&pid).filter(|known| !known.adopted)
        {
            known.tell(Exit::now(status));
        }
    }

    /// Reaps what has ended; true when there may be more.
    fn reap_batch(&self) -> bool {
        for _ in 0..BATCH {
            match self.reap_one() {
                Ok(true) => {}
                Ok(false) => return false,
                Err(e) => {
                    error!(error = %e, "wait for children");
                    return false;
                }
            }
        }
        true
    }

    fn reap_one(&self) -> io::Result<bool> {
        let mut table = self.lock();
        // Looked at first: while it is a zombie its start time can be read.
        let Some((pid, _)) = sys::process::peek_ended()? else {
            return Ok(false);
        };
        let known = table
            .known
            .get(&pid)
            .map(|known| (known.identity, known.adopted));
        let identity = match known {
            Some((identity, false)) => Some(identity),
            _ => Identity::of(pid).ok(),
        };
        let Some((_, status)) = sys::process::reap(pid)? else {
            // Somebody else waits in this process. Nothing to deliver, and not a reason to spin.
            return Ok(false);
        };
        let exit = Exit::now(status);
        match (known, identity) {
            (Some((expected, _)), Some(identity)) if expected == identity => {
                if let Some(known) = table.known.remove(&pid) {
                    known.tell(exit);
                }
            }
            (_, Some(identity)) if table.holders > 0 => {
                if table.kept.len() == KEPT {
                    table.kept.pop_front();
                }
                table.kept.push_back((identity, exit));
            }
            _ => debug!(pid, code = exit.code, "reaped an orphan"),
        }
        Ok(true)
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// See [`Reaper::hold_unknown`].
#[derive(Debug)]
pub struct HoldUnknown {
    reaper: Reaper,
}

impl Drop for HoldUnknown {
    fn drop(&mut self) {
        let mut table = self.reaper.lock();
        table.holders -= 1;
        if table.holders == 0 {
            table.kept.clear();
        }
    }
}

fn gone_is_false(done: io::Result<()>, what: impl FnOnce() -> String) -> Result<bool> {
    match done {
        Ok(()) => Ok(true),
        Err(e) if e.raw_os_error() == Some(libc::ESRCH) => Ok(false),
        Err(e) => Err(Error::io(what(), e)),
    }
}
