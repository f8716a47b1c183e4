//! The journal: the one owner of a pod's [`Record`], in memory and on disk.
//!
//! Promise: an intent is on disk before its side effect begins (law 2), a reader never sees half a document (temporary
//! file, rename), and a query never waits for anything but a short copy. The runtime directory is a tmpfs: what must
//! survive a reboot is the network's own record, with fsync. Must never be written by two processes at once: whoever
//! writes has seen that the supervisor of the record is gone.

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use crate::clock;
use crate::container::{ContainerRecord, Ledger};
use crate::error::{Context, Error, Kind, Result};
use crate::failpoint;
use crate::pod::history::{Event, Moment};
use crate::pod::record::{FILE, Record, Stage};
use crate::sys::dir::{check_private, make_private};

/// Cheap to clone; all clones are one journal.
#[derive(Clone, Debug)]
pub struct Journal {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    dir: PathBuf,
    state: Mutex<State>,
    /// Requests that wait for the creation.
    waiting: AtomicUsize,
}

#[derive(Debug)]
struct State {
    record: Record,
    /// Beginning of the current run of stages.
    run: Option<Instant>,
    hold: Hold,
}

/// How far a run of stages is.
#[derive(Clone, Debug)]
pub struct Progress {
    /// The stage under way, or the last.
    pub stage: String,
    /// The step of an undo that is at work in it.
    pub step: Option<String>,
    /// False: nothing is at work.
    pub under_way: bool,
    /// Since the beginning of the step or stage.
    pub stage_age: Duration,
    /// Since the beginning of the run.
    pub age: Duration,
}

/// A request that waits.
#[derive(Debug)]
pub struct Waiting(Journal);

impl Drop for Waiting {
    fn drop(&mut self) {
        self.0.shared.waiting.fetch_sub(1, Ordering::Relaxed);
    }
}

/// What the directory is to this journal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Hold {
    /// Not taken yet: what is in it is somebody else's. Nothing is written, nothing removed.
    No,
    Ours,
    /// Given up: nothing is written any more.
    Closed,
}

impl Journal {
    /// A journal for `record` in `dir`, in memory only until [`Journal::take`].
    pub fn new(dir: PathBuf, record: Record) -> Self {
        let state = State {
            record,
            run: None,
            hold: Hold::No,
        };
        Self {
            shared: Arc::new(Shared {
                dir,
                state: Mutex::new(state),
                waiting: AtomicUsize::new(0),
            }),
        }
    }

    /// From here on the directory is this journal's. Whoever calls it has made sure that nobody else has it.
    pub fn take(&self) {
        self.lock().hold = Hold::Ours;
    }

    /// Directory of the pod's runtime state.
    pub fn dir(&self) -> &Path {
        &self.shared.dir
    }

    /// A copy of the record.
    pub fn read(&self) -> Record {
        self.lock().record.clone()
    }

    /// Looks at the record without copying it.
    pub fn with<T>(&self, look: impl FnOnce(&Record) -> T) -> T {
        look(&self.lock().record)
    }

    /// Changes the record and writes it. On a write error the change stays in memory, so that undo still knows of it.
    pub fn update(&self, change: impl FnOnce(&mut Record)) -> Result<()> {
        let mut state = self.lock();
        let before = state.record.activity();
        change(&mut state.record);
        if state.record.activity() != before {
            state.record.activity_since_us = whole_micros(clock::uptime());
        }
        if state.hold != Hold::Ours {
            return Ok(());
        }
        match write(&self.shared.dir, &state.record) {
            // A cleaner of temporary files took the directory away (FL-072): undo after a crash needs a record.
            Err(error) if error.is_gone() => {
                make_private(&self.shared.dir)?;
                write(&self.shared.dir, &state.record)
            }
            written => written,
        }
    }

    /// The same where a full disk must not stop what is under way (undo, exits): the error is logged.
    pub fn note(&self, change: impl FnOnce(&mut Record)) {
        if let Err(error) = self.update(change) {
            tracing::warn!(%error, "write the journal");
        }
    }

    /// Begins a stage; the first of a run (`fresh`) forgets the stages of the run before.
    pub fn begin_stage(&self, name: &str, fresh: bool) -> Result<()> {
        let stage = self.stage_now(name, fresh);
        self.update(|r| push(r, stage, fresh))
    }

    /// The same for an undo, which no full disk may stop.
    pub fn note_stage(&self, name: &str, fresh: bool) {
        let stage = self.stage_now(name, fresh);
        self.note(|r| push(r, stage, fresh));
    }

    /// One line for each change of stage, with the stage that is over.
    fn stage_now(&self, name: &str, fresh: bool) -> Stage {
        let now = Instant::now();
        let mut state = self.lock();
        if fresh {
            state.run = None;
        }
        let run = *state.run.get_or_insert(now);
        let last = state.record.stages.last().filter(|_| !fresh);
        tracing::info!(
            key = state.record.key(),
            stage = name,
            age_us = micros(run, now),
            waiters = self.waiting(),
            last = last.map(|s| s.name.as_str()),
            took_us = last.and_then(|s| s.took_us),
            "stage begins"
        );
        Stage {
            name: name.to_owned(),
            at_us: micros(run, now),
            took_us: None,
            error: None,
        }
    }

    /// Ends the stage under way.
    pub fn end_stage(&self, error: Option<&Error>) {
        let at = self.run_micros();
        self.note(|r| {
            r.give_up_undo(None);
            if let Some(stage) = r.stages.last_mut().filter(|s| s.took_us.is_none()) {
                stage.took_us = Some(at.saturating_sub(stage.at_us));
                stage.error = error.map(ToString::to_string);
                tracing::debug!(stage = %stage.name, took_us = stage.took_us, error = stage.error, "stage ended");
            }
        });
    }

    /// How far the run of stages is: what a retry is told.
    pub fn progress(&self) -> Progress {
        let state = self.lock();
        let age = state.run.map(|r| r.elapsed()).unwrap_or_default();
        let last = state.record.stages.last();
        let step = state.record.undo_step();
        let at_us = step.map(|m| m.at_us).or_else(|| last.map(|s| s.at_us));
        Progress {
            stage: last.map_or("create", |s| s.name.as_str()).to_owned(),
            step: step.map(|m| m.detail.clone()),
            under_way: last.is_some_and(|s| s.took_us.is_none()),
            stage_age: age.saturating_sub(Duration::from_micros(at_us.unwrap_or(0))),
            age,
        }
    }

    /// Adds to the history, on disk with the next change (or, where `told`, now).
    pub fn happened(&self, event: Event, detail: &str, error: Option<&Error>, told: bool) {
        let moment = Moment {
            event,
            detail: detail.to_owned(),
            at_us: self.run_micros(),
            times: 1,
            took_us: None,
            error: error.map(ToString::to_string),
        };
        if told {
            self.note(|r| r.remember(moment));
        } else {
            self.lock().record.remember(moment);
        }
    }

    /// A try of an undo's step has ended; on disk with the next change.
    pub fn undo_step_ended(&self, step: &str, took: Duration, error: Option<&Error>) {
        self.lock()
            .record
            .end_undo_step(step, whole_micros(took), error.map(ToString::to_string));
    }

    /// Counts one more request that waits, until the guard is dropped.
    pub fn wait_here(&self) -> Waiting {
        self.shared.waiting.fetch_add(1, Ordering::Relaxed);
        Waiting(self.clone())
    }

    /// Requests that wait now.
    pub fn waiting(&self) -> usize {
        self.shared.waiting.load(Ordering::Relaxed)
    }

    /// Microseconds since the first stage of this run.
    fn run_micros(&self) -> u64 {
        let now = Instant::now();
        micros(self.lock().run.unwrap_or(now), now)
    }

    /// Gives the directory up: removes the journal (and the directory, where nothing else is in it) and writes no more.
    ///
    /// A directory that was never taken is left as it is.
    pub fn close(&self) -> Result<()> {
        let before = std::mem::replace(&mut self.lock().hold, Hold::Closed);
        match before {
            Hold::No => Ok(()),
            Hold::Ours | Hold::Closed => remove(&self.shared.dir),
        }
    }

    /// Takes back a request that was refused: nothing of it is left, on disk or in memory, and the next one may come.
    pub fn discard(&self, before: Record) -> Result<()> {
        let mut state = self.lock();
        state.record = before;
        if state.hold != Hold::Ours {
            return Ok(());
        }
        state.hold = Hold::No;
        remove(&self.shared.dir)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // A panic between lock and unlock leaves at worst a record that was not written: better than none at all.
        self.shared
            .state
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

impl Ledger for Journal {
    fn save(&self, record: &ContainerRecord) -> Result<()> {
        self.update(|r| {
            r.containers.insert(record.id.clone(), record.clone());
        })
    }

    fn forget(&self, id: &str) -> Result<()> {
        // On a full disk the old text stays: undoing a container that is gone does nothing, and one that cannot be
        // deleted for want of space would be worse.
        self.note(|r| {
            r.containers.remove(id);
        });
        Ok(())
    }
}

/// Makes the runtime directory of one sandbox, 0700, and its parents. Refuses a root that others could write to.
pub fn make_dir(root: &Path, dir: &Path) -> Result<()> {
    make_private(dir)?;
    // The namespace's directory is between them.
    let all = [Some(root), dir.parent(), Some(dir)];
    all.into_iter().flatten().try_for_each(check_private)
}

/// Where the pod's files (hostname, hosts, resolv.conf, shm) are in its runtime directory.
pub fn files_dir(dir: &Path) -> PathBuf {
    dir.join("files")
}

/// Replaces the journal in `dir` whole.
pub fn write(dir: &Path, record: &Record) -> Result<()> {
    let text = serde_json::to_vec(record)
        .map_err(|e| Error::caused(Kind::Other, "encode the journal", e))?;
    let (path, temporary) = (dir.join(FILE), dir.join(".journal.tmp"));
    failpoint::hit("journal.write.before")?;
    // Truncated, not exclusive: one left by a killed writer must not stop the next.
    let mut file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .custom_flags(libc::O_NOFOLLOW | libc::O_CLOEXEC)
        .open(&temporary)
        .context(|| format!("write {}", temporary.display()))?;
    file.write_all(&text)
        .context(|| format!("write {}", temporary.display()))?;
    failpoint::hit("journal.write.half")?;
    fs::rename(&temporary, &path).context(|| format!("replace {}", path.display()))?;
    failpoint::hit("journal.write.after")
}

/// Removes the journal and, where nothing else is left in it, its directory; absent = done.
pub fn remove(dir: &Path) -> Result<()> {
    failpoint::hit("journal.remove.before")?;
    for name in [".journal.tmp", FILE] {
        let path = dir.join(name);
        match fs::remove_file(&path) {
            Err(e)
                if !matches!(
                    e.kind(),
                    io::ErrorKind::NotFound | io::ErrorKind::NotADirectory
                ) =>
            {
                return Err(Error::io(format!("remove {}", path.display()), e));
            }
            _ => {}
        }
    }
    // Not empty: the command keeps its bundle and logs beside the journal and removes them itself.
    let _ = fs::remove_dir(dir);
    failpoint::hit("journal.remove.after")
}

/// A record with everything that is the same for all kinds of pods.
pub fn blank(namespace: &str, id: &str) -> Record {
    Record {
        version: crate::pod::record::VERSION,
        namespace: namespace.to_owned(),
        id: id.to_owned(),
        boot_id: clock::boot_id(),
        created_at: clock::unix_nanos(SystemTime::now()),
        name: String::new(),
        uid: String::new(),
        pod_namespace: String::new(),
        attempt: 0,
        digest: String::new(),
        supervisor: None,
        address: String::new(),
        bundle: PathBuf::new(),
        state: Default::default(),
        reason: None,
        ready_at: None,
        exited_at: None,
        exit_status: None,
        stages: Vec::new(),
        history: Vec::new(),
        activity_since_us: whole_micros(clock::uptime()),
        hostname: String::new(),
        labels: Default::default(),
        annotations: Default::default(),
        resources: None,
        overhead: None,
        network: Default::default(),
        effects: Default::default(),
        infra: None,
        infra_spec: None,
        pins: None,
        cgroup: None,
        cgroup_ours: false,
        infra_cgroup: None,
        files: None,
        selinux: None,
        containers: Default::default(),
    }
}

fn push(record: &mut Record, stage: Stage, fresh: bool) {
    if fresh {
        record.stages.clear();
        record.history.clear();
    }
    record.stages.push(stage);
}

fn micros(from: Instant, to: Instant) -> u64 {
    whole_micros(to.saturating_duration_since(from))
}

fn whole_micros(span: Duration) -> u64 {
    u64::try_from(span.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn journal() -> (tempfile::TempDir, Journal) {
        let dir = tempfile::tempdir().unwrap();
        let journal = Journal::new(dir.path().join("p"), blank("default", "p"));
        make_dir(dir.path(), journal.dir()).unwrap();
        journal.take();
        (dir, journal)
    }

    #[test]
    fn what_is_written_is_read_back() {
        let (_keep, journal) = journal();
        journal.begin_stage("create", true).unwrap();
        journal.update(|r| r.hostname = "web".into()).unwrap();
        journal.end_stage(None);
        let record = crate::pod::record::read(journal.dir()).unwrap();
        assert_eq!((record.hostname.as_str(), record.stages.len()), ("web", 1));
        assert!(record.stages[0].took_us.is_some());
    }

    #[test]
    fn an_empty_or_cut_journal_is_a_clear_error() {
        let (_keep, journal) = journal();
        journal.update(|_| {}).unwrap();
        let path = journal.dir().join(FILE);
        let whole = fs::read(&path).unwrap();
        for length in [0, 1, whole.len() / 2, whole.len() - 1] {
            fs::write(&path, &whole[..length]).unwrap();
            let error = crate::pod::record::read(journal.dir()).unwrap_err();
            assert!(error.to_string().contains("podvisor rm -f"), "{error}");
        }
    }

    #[test]
    fn a_closed_journal_leaves_nothing_and_stays_silent() {
        let (_keep, journal) = journal();
        journal.update(|_| {}).unwrap();
        journal.close().unwrap();
        journal.note(|r| r.hostname = "late".into());
        assert!(!journal.dir().exists());
    }

    #[test]
    fn a_directory_that_was_not_taken_is_left_as_it_is() {
        let (_keep, journal) = journal();
        journal.update(|r| r.hostname = "theirs".into()).unwrap();
        let other = Journal::new(journal.dir().to_owned(), blank("default", "p"));
        other.note(|r| r.hostname = "mine".into());
        other.close().unwrap();
        let record = crate::pod::record::read(journal.dir()).unwrap();
        assert_eq!(record.hostname, "theirs");
    }

    #[test]
    fn a_directory_that_was_wiped_comes_back_with_the_next_word() {
        let (_keep, journal) = journal();
        journal.update(|_| {}).unwrap();
        fs::remove_dir_all(journal.dir()).unwrap();
        journal.update(|r| r.hostname = "web".into()).unwrap();
        let record = crate::pod::record::read(journal.dir()).unwrap();
        assert_eq!(record.hostname, "web");
    }

    #[test]
    fn a_refused_request_leaves_nothing_and_the_next_is_written() {
        let (keep, journal) = journal();
        let before = journal.read();
        journal.update(|r| r.hostname = "bad".into()).unwrap();
        journal.discard(before).unwrap();
        assert!(!journal.dir().exists() && journal.read().hostname.is_empty());
        make_dir(keep.path(), journal.dir()).unwrap();
        journal.take();
        journal.update(|r| r.hostname = "good".into()).unwrap();
        let record = crate::pod::record::read(journal.dir()).unwrap();
        assert_eq!(record.hostname, "good");
    }
}
