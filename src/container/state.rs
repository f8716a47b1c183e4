//! The state of one container and of its processes, and every step it can take.
//!
//! No I/O and no waiting here: each method is one step under the container's lock.

use std::collections::BTreeMap;
use std::sync::Arc;

use tokio::sync::watch;

use super::checkpoint::Restoring;
use super::record::{ContainerRecord, ExitRecord, Status};
use crate::cgroup::Group;
use crate::error::{Error, Kind, Result};
use crate::job::Job;
use crate::process::Child;
use crate::stdio::Io;

/// Verbatim strings of a request.
#[derive(Clone, Debug, Default)]
pub(super) struct Streams {
    pub stdin: String,
    pub stdout: String,
    pub stderr: String,
    pub terminal: bool,
}

/// Where a process is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// Not there yet, or (init) waiting to be started.
    Created,
    /// The runtime is starting it.
    Starting,
    Running,
    Exited(ExitRecord),
}

/// Init or an exec.
#[derive(Debug)]
pub(super) struct Process {
    pub phase: Phase,
    /// Kept after the exit.
    pub child: Option<Child>,
    pub io: Option<Arc<Io>>,
    pub streams: Streams,
    /// Its start, or the last try of one.
    pub start: Option<Job<u32>>,
    /// CloseIO came, maybe before there was anything to close.
    pub stdin_closed: bool,
    /// ResizePty came: width and height, maybe before there was a terminal.
    pub window: Option<(u16, u16)>,
    /// Holds the exit once it is announced; waiters of a process that is dropped learn it from the closed channel.
    pub exit: watch::Sender<Option<ExitRecord>>,
}

/// An exec and the `process` object it is started from.
#[derive(Debug)]
pub(super) struct Exec {
    pub process: Process,
    pub json: Arc<Vec<u8>>,
}

/// One container.
#[derive(Debug)]
pub(super) struct Inner {
    pub record: ContainerRecord,
    pub creating: bool,
    /// Created, and nobody has been given it: its exit is not watched, nothing of it was announced.
    pub parked: bool,
    pub paused: bool,
    /// Init has ended; its exit is announced when the execs have ended too. No exec starts from here on.
    pub ending: bool,
    /// Deleted, or its create failed.
    pub removed: bool,
    pub group: Option<Group>,
    /// Created from a checkpoint, and not started.
    pub restoring: Option<Restoring>,
    pub init: Process,
    pub execs: BTreeMap<String, Exec>,
}

impl Process {
    pub fn new(streams: Streams) -> Self {
        Self {
            phase: Phase::Created,
            child: None,
            io: None,
            streams,
            start: None,
            stdin_closed: false,
            window: None,
            exit: watch::Sender::new(None),
        }
    }

    pub fn pid(&self) -> u32 {
        self.child.as_ref().map_or(0, |c| c.pid().unsigned_abs())
    }

    /// Whether the runtime has it, or is about to.
    fn is_active(&self) -> bool {
        matches!(self.phase, Phase::Starting | Phase::Running)
    }

    pub fn has_exited(&self) -> bool {
        matches!(self.phase, Phase::Exited(_))
    }

    /// Takes the streams of a process that was made, and a CloseIO that came before.
    pub fn connect(&mut self, child: Child, mut io: Io) {
        io.start();
        if self.stdin_closed {
            io.close_stdin();
        }
        if let Some((width, height)) = self.window
            && let Err(error) = io.resize(width, height)
        {
            tracing::debug!(%error, "a terminal has not the size that was asked for");
        }
        self.child = Some(child);
        self.io = Some(Arc::new(io));
    }

    /// Stores the exit and wakes its waiters. False when it had ended already.
    pub fn end(&mut self, exit: ExitRecord) -> bool {
        if self.has_exited() {
            return false;
        }
        self.phase = Phase::Exited(exit);
        self.exit.send_replace(Some(exit));
        true
    }
}

impl Inner {
    pub fn new(record: ContainerRecord) -> Self {
        let streams = Streams {
            stdin: record.stdin.clone(),
            stdout: record.stdout.clone(),
            stderr: record.stderr.clone(),
            terminal: record.terminal,
        };
        Self {
            record,
            creating: true,
            parked: false,
            paused: false,
            ending: false,
            removed: false,
            group: None,
            restoring: None,
            init: Process::new(streams),
            execs: BTreeMap::new(),
        }
    }

    /// Of init (`exec_id` empty) or an exec.
    pub fn process(&mut self, exec_id: &str) -> Result<&mut Process> {
        if exec_id.is_empty() {
            return Ok(&mut self.init);
        }
        let id = &self.record.id;
        match self.execs.get_mut(exec_id) {
            Some(exec) => Ok(&mut exec.process),
            None => Err(Error::new(
                Kind::NotFound,
                format!("find exec {exec_id} of container {id}: there is none"),
            )),
        }
    }

    /// What State says of a process.
    pub fn status(&self, process: &Process) -> Status {
        match process.phase {
            Phase::Created | Phase::Starting => Status::Created,
            Phase::Running if self.paused => Status::Paused,
            Phase::Running => Status::Running,
            Phase::Exited(_) => Status::Stopped,
        }
    }

    /// Init leaves Created.
    pub fn begin_start(&mut self) -> Result<()> {
        match self.init.phase {
            Phase::Created if !self.ending => {
                self.init.phase = Phase::Starting;
                Ok(())
            }
            Phase::Created | Phase::Exited(_) => {
                Err(self.refusal("start", "its init process has ended"))
            }
            Phase::Starting | Phase::Running => Err(self.refusal("start", "it has been started")),
        }
    }

    /// The runtime is done with starting init. With an error it may be tried again.
    pub fn end_start(&mut self, started_at: Option<u64>) {
        if self.init.phase != Phase::Starting {
            return;
        }
        self.init.phase = if started_at.is_some() {
            Phase::Running
        } else {
            Phase::Created
        };
        if started_at.is_some() {
            self.record.started_at = started_at;
            self.record.status = if self.ending {
                Status::Stopped
            } else {
                Status::Running
            };
        }
    }

    /// An exec may be registered or started now.
    pub fn may_exec(&self) -> Result<()> {
        if self.ending || self.init.has_exited() {
            Err(self.refusal("exec in", "its init process is not running"))
        } else if self.paused {
            Err(self.refusal("exec in", "it is paused; resume it first"))
        } else {
            Ok(())
        }
    }

    /// An exec leaves Created; answers what to run.
    pub fn begin_exec(&mut self, exec_id: &str) -> Result<(Arc<Vec<u8>>, Streams)> {
        self.may_exec()?;
        let id = self.record.id.clone();
        let process = self.process(exec_id)?;
        if process.phase != Phase::Created {
            return Err(Error::new(
                Kind::State,
                format!("start exec {exec_id} of container {id}: it has been started"),
            ));
        }
        process.phase = Phase::Starting;
        let streams = process.streams.clone();
        let json = self
            .execs
            .get(exec_id)
            .map(|e| Arc::clone(&e.json))
            .unwrap_or_default();
        Ok((json, streams))
    }

    /// How many execs run or are being started.
    pub fn active_execs(&self) -> usize {
        self.execs
            .values()
            .filter(|e| e.process.is_active())
            .count()
    }

    /// A container from a checkpoint that is not started, or whose start failed, never had a process: it has ended. False
    /// for another.
    pub fn give_up_restoring(&mut self, at: u64) -> bool {
        if self.restoring.take().is_none() && self.init.child.is_some() {
            return false;
        }
        let exit = ExitRecord { code: 0, at };
        self.note_exit(exit);
        self.init.end(exit)
    }

    /// Init was seen to have ended: kept at once, announced later.
    pub fn note_exit(&mut self, exit: ExitRecord) {
        self.ending = true;
        self.record.exit = Some(exit);
        self.record.status = Status::Stopped;
    }

    /// Whether the container may be deleted: Ok(true) when init has to be ended first.
    pub fn may_delete(&self) -> Result<bool> {
        match self.init.phase {
            Phase::Exited(_) => Ok(false),
            Phase::Created => Ok(true),
            _ if self.paused => {
                Err(self.refusal("delete", "it is paused; resume and kill it first"))
            }
            _ => Err(self.refusal("delete", "it is running; kill it first")),
        }
    }

    pub fn refusal(&self, verb: &str, why: &str) -> Error {
        Error::new(
            Kind::State,
            format!("{verb} container {}: {why}", self.record.id),
        )
    }

    /// What a caller hears when there is nothing (any more) of that name.
    pub fn absent(id: &str) -> Error {
        Error::new(
            Kind::NotFound,
            format!("find container {id}: there is none"),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EXIT: ExitRecord = ExitRecord { code: 7, at: 1 };

    fn inner() -> Inner {
        Inner::new(ContainerRecord {
            id: "c".into(),
            bundle: "/b".into(),
            runtime: "/r".into(),
            root: "/root".into(),
            systemd_cgroup: false,
            init: None,
            cgroup: None,
            rootfs_mounted: false,
            status: Status::Created,
            created_at: 1,
            parked_at: None,
            started_at: None,
            exit: None,
            oom_kills: 0,
            oom_limit: None,
            stdin: String::new(),
            stdout: String::new(),
            stderr: String::new(),
            terminal: false,
            logger: None,
        })
    }

    fn with_exec() -> Inner {
        let mut inner = inner();
        let exec = Exec {
            process: Process::new(Streams::default()),
            json: Arc::default(),
        };
        inner.execs.insert("e".into(), exec);
        inner
    }

    fn kind<T>(result: Result<T>) -> Option<Kind> {
        result.err().map(|e| e.kind())
    }

    #[test]
    fn a_container_starts_once() {
        let mut inner = inner();
        assert!(inner.begin_start().is_ok());
        assert_eq!(kind(inner.begin_start()), Some(Kind::State));
        inner.end_start(Some(5));
        assert_eq!(
            (inner.status(&inner.init), inner.record.status),
            (Status::Running, Status::Running)
        );
        assert_eq!(kind(inner.begin_start()), Some(Kind::State));
    }

    #[test]
    fn a_failed_start_may_be_tried_again() {
        let mut inner = inner();
        assert!(inner.begin_start().is_ok());
        inner.end_start(None);
        assert!(inner.begin_start().is_ok());
    }

    #[test]
    fn an_init_that_died_before_its_start_does_not_start() {
        let mut inner = inner();
        inner.note_exit(EXIT);
        assert_eq!(kind(inner.begin_start()), Some(Kind::State));
        assert_eq!(inner.record.exit, Some(EXIT));
    }

    #[test]
    fn an_exit_seen_during_the_start_stays_on_record() {
        let mut inner = inner();
        assert!(inner.begin_start().is_ok());
        inner.note_exit(EXIT);
        inner.end_start(Some(5));
        assert_eq!(inner.record.status, Status::Stopped);
        assert_eq!(
            inner.status(&inner.init),
            Status::Running,
            "until it is announced"
        );
        assert!(inner.init.end(EXIT));
        assert!(!inner.init.end(ExitRecord { code: 0, at: 2 }), "one exit");
        assert_eq!(inner.init.phase, Phase::Exited(EXIT));
    }

    #[test]
    fn no_exec_starts_once_init_has_ended_or_is_frozen() {
        let mut inner = with_exec();
        inner.paused = true;
        assert_eq!(kind(inner.begin_exec("e")), Some(Kind::State));
        inner.paused = false;
        inner.note_exit(EXIT);
        assert_eq!(kind(inner.begin_exec("e")), Some(Kind::State));
        assert_eq!(kind(inner.begin_exec("x")), Some(Kind::State));
    }

    #[test]
    fn execs_count_while_they_start_and_run() {
        let mut inner = with_exec();
        assert_eq!(kind(inner.begin_exec("x")), Some(Kind::NotFound));
        assert_eq!(inner.active_execs(), 0);
        assert!(inner.begin_exec("e").is_ok());
        assert_eq!(kind(inner.begin_exec("e")), Some(Kind::State));
        assert_eq!(inner.active_execs(), 1);
        assert!(inner.process("e").is_ok_and(|p| p.end(EXIT)));
        assert_eq!(inner.active_execs(), 0);
    }

    #[test]
    fn only_what_does_not_run_is_deleted() {
        let mut inner = inner();
        assert_eq!(inner.may_delete().ok(), Some(true));
        inner.init.phase = Phase::Running;
        assert_eq!(kind(inner.may_delete()), Some(Kind::State));
        inner.paused = true;
        assert_eq!(kind(inner.may_delete()), Some(Kind::State));
        assert!(inner.init.end(EXIT));
        assert_eq!(inner.may_delete().ok(), Some(false));
    }
}
