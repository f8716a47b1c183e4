//! Standard streams of one process: one owner for all its descriptors.
//!
//! Owns what the strings of a request open, the pipes between the process and us, and the copying. Promises never to
//! wait for a peer while opening, that a client that goes away costs the process nothing (what it writes waits in the
//! FIFO), that every byte written is passed on before a drain says so, and that closing gives the reader its end of
//! file whoever still holds the pipe. Must never lend a descriptor: it is moved, or duplicated.

mod copy;
mod fifo;
pub mod log;
mod target;
#[cfg(test)]
mod tests;

use std::fs::{self, OpenOptions};
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::process::Stdio;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use nix::fcntl::OFlag;
use nix::unistd::{Gid, Uid, fchown, pipe2};
use tokio::net::unix::pipe::{Receiver, Sender};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::error::{Context, Error, Kind, Result};
use copy::{Attach, Running, Sink};
use fifo::Opened;
use log::Log;
use target::Target;

/// What a process' streams are to be connected to.
#[derive(Clone, Debug, Default)]
pub struct Request {
    /// Verbatim from the request; "" is nothing.
    pub stdin: String,
    /// Verbatim from the request; "" is nothing.
    pub stdout: String,
    /// Verbatim from the request; "" is nothing. Where stdout goes to a file or a log, stderr goes there too.
    pub stderr: String,
    /// The process gets a terminal.
    pub terminal: bool,
    /// Owner of pipes, a host id (user namespaces).
    pub uid: u32,
    /// Group of pipes, a host id.
    pub gid: u32,
    /// Give FIFOs to the process itself (a container's init: when it ends, everything that holds them ends) instead of
    /// copying (an exec: a background child may keep its pipe open, so the end of file must be ours to give).
    pub direct: bool,
}

/// Owns every descriptor until dropped.
#[derive(Debug)]
pub struct Io {
    state: Mutex<State>,
    /// Copies of outputs that have not come to their end.
    running: Arc<watch::Sender<usize>>,
}

#[derive(Debug, Default)]
struct State {
    /// The process' ends, until they are taken.
    child: Option<[OwnedFd; 3]>,
    outputs: Vec<(Receiver, Sink)>,
    input: Option<(Receiver, Sender)>,
    /// Our write end of the stdin FIFO.
    stdin_hold: Option<OwnedFd>,
    /// Our read ends of output FIFOs.
    holds: Vec<OwnedFd>,
    tasks: Vec<JoinHandle<()>>,
}

impl Io {
    /// Opens the far ends, never waiting for a peer: "" (null), a FIFO's path or `fifo://`, a regular file or device by
    /// path, `file://` (made, appended to), `podvisor-log:///path?attach-stdout=/fifo&attach-stderr=/fifo&max-bytes=N`
    /// (CRI log lines, capped and rotated, see [`log`]; path values are %-encoded).
    ///
    /// # Errors
    /// Invalid "unknown STDIO scheme" and for what cannot be opened as a stream; Unsupported for what is not built
    /// (terminals, logging programs, streams over a socket); NotFound for a path that is not there.
    #[allow(
        clippy::unused_async,
        reason = "the pipes are registered with the runtime it is called in"
    )]
    pub async fn open(request: &Request) -> Result<Self> {
        if request.terminal {
            return Err(Error::new(
                Kind::Unsupported,
                "open a terminal: not built yet, ask without one",
            ));
        }
        let mut state = State::default();
        let stdin = open_stdin(request, &mut state)?;
        let [stdout, stderr] = open_outputs(request, &mut state)?;
        state.child = Some([stdin, stdout, stderr]);
        Ok(Self {
            state: Mutex::new(state),
            running: Arc::new(watch::Sender::new(0)),
        })
    }

    /// The process' ends, in the order of their numbers; given to the command that makes it. Taken once.
    ///
    /// # Errors
    /// State when they are taken already.
    pub fn take_child_stdio(&mut self) -> Result<[Stdio; 3]> {
        let ends = self.lock().child.take();
        let ends = ends.ok_or_else(|| {
            Error::new(
                Kind::State,
                "take the streams of a process: they are taken already",
            )
        })?;
        Ok(ends.map(Stdio::from))
    }

    /// Starts the copying. Call it when the process was made and the command that held its ends is dropped: as long as
    /// we hold a pipe's write end ourselves, no end of file comes. Must be called inside the runtime.
    pub fn start(&mut self) {
        let mut state = self.lock();
        state.child = None;
        for (from, sink) in std::mem::take(&mut state.outputs) {
            let running = Running::new(&self.running);
            state
                .tasks
                .push(tokio::spawn(copy::output(from, sink, running)));
        }
        if let Some((from, to)) = state.input.take() {
            state.tasks.push(tokio::spawn(copy::input(from, to)));
        }
    }

    /// Drops our own write end of stdin: the process sees the end of file when the client has closed too. Idempotent.
    pub fn close_stdin(&self) {
        self.lock().stdin_hold = None;
    }

    /// Waits until everything the process wrote has been passed on, at most `limit`; false when somebody still holds
    /// the pipe (or nobody reads). Then [`close`](Io::close) gives the reader the end of file.
    pub async fn drain(&self, limit: Duration) -> bool {
        let mut running = self.running.subscribe();
        tokio::time::timeout(limit, running.wait_for(|n| *n == 0))
            .await
            .is_ok_and(|done| done.is_ok())
    }

    /// Ends the copying and closes everything; a log's last line is closed. Idempotent. The descriptors of copies are
    /// closed when the runtime next gets to them.
    pub fn close(&self) {
        let mut state = self.lock();
        for task in state.tasks.drain(..) {
            task.abort();
        }
        *state = State::default();
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Io {
    fn drop(&mut self) {
        self.close();
    }
}

fn open_stdin(request: &Request, state: &mut State) -> Result<OwnedFd> {
    let path = match Target::parse("stdin", &request.stdin)? {
        Target::Null => return null(false),
        Target::Path(path) => path,
        Target::File(_) | Target::Log(_) => {
            let text = format!(
                "connect stdin to {:?}: give the path of a FIFO or a file",
                request.stdin
            );
            return Err(Error::new(Kind::Invalid, text));
        }
    };
    let (end, hold) = match fifo::open_input("stdin", &path)? {
        Opened::Plain(fd) => return Ok(fd),
        Opened::Fifo { end, hold } => (end, hold),
    };
    state.stdin_hold = Some(hold);
    if request.direct {
        return given(end, request);
    }
    let (read, write) = new_pipe()?;
    own(&read, request)?;
    state.input = Some((receiver(end)?, sender(write)?));
    Ok(read)
}

fn open_outputs(request: &Request, state: &mut State) -> Result<[OwnedFd; 2]> {
    match Target::parse("stdout", &request.stdout)? {
        // One file for both streams, whatever stderr says: so do clients that give such a target expect it.
        Target::File(path) => {
            let file = make_file("stdout", &path)?;
            let other = file.try_clone().context(|| "duplicate a descriptor")?;
            Ok([file, other])
        }
        Target::Log(target) => {
            let log = Log::open(&target.path, target.cap)?;
            let stdout = Sink::Log(log.stream(false), target.attach_stdout.map(Attach::new));
            let stderr = Sink::Log(log.stream(true), target.attach_stderr.map(Attach::new));
            Ok([
                piped(stdout, request, state)?,
                piped(stderr, request, state)?,
            ])
        }
        stdout => {
            let stderr = Target::parse("stderr", &request.stderr)?;
            Ok([
                open_output("stdout", stdout, request, state)?,
                open_output("stderr", stderr, request, state)?,
            ])
        }
    }
}

fn open_output(
    stream: &str,
    target: Target,
    request: &Request,
    state: &mut State,
) -> Result<OwnedFd> {
    match target {
        Target::Null => null(true),
        Target::File(path) => make_file(stream, &path),
        Target::Path(path) => match fifo::open_output(stream, &path)? {
            Opened::Plain(fd) => Ok(fd),
            Opened::Fifo { end, hold } => {
                state.holds.push(hold);
                if request.direct {
                    given(end, request)
                } else {
                    piped(Sink::Fifo(sender(end)?), request, state)
                }
            }
        },
        Target::Log(target) => {
            let stderr = stream == "stderr";
            let attach = if stderr {
                target.attach_stderr
            } else {
                target.attach_stdout
            };
            let lines = Log::open(&target.path, target.cap)?.stream(stderr);
            piped(Sink::Log(lines, attach.map(Attach::new)), request, state)
        }
    }
}

/// A pipe whose read end is copied to `sink`; its write end is the process'.
fn piped(sink: Sink, request: &Request, state: &mut State) -> Result<OwnedFd> {
    let (read, write) = new_pipe()?;
    own(&write, request)?;
    state.outputs.push((receiver(read)?, sink));
    Ok(write)
}

/// A FIFO's end, made fit for the process itself.
fn given(end: OwnedFd, request: &Request) -> Result<OwnedFd> {
    fifo::set_blocking(&end).context(|| "make a FIFO blocking")?;
    own(&end, request)?;
    Ok(end)
}

/// Gives it to the workload's user, who could not open `/dev/stdout` again otherwise. 0 leaves the owner alone.
fn own(fd: &OwnedFd, request: &Request) -> Result<()> {
    if request.uid == 0 && request.gid == 0 {
        return Ok(());
    }
    let (uid, gid) = (Uid::from_raw(request.uid), Gid::from_raw(request.gid));
    fchown(fd, Some(uid), Some(gid)).context(|| format!("give a pipe to user {uid}"))
}

fn make_file(stream: &str, path: &Path) -> Result<OwnedFd> {
    let what = || format!("open {stream} file {}", path.display());
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent).context(what)?;
    }
    let mut options = OpenOptions::new();
    options
        .append(true)
        .create(true)
        .mode(0o644)
        .custom_flags(libc::O_NOCTTY | libc::O_NONBLOCK);
    // O_NONBLOCK: a FIFO without reader in its place is an error and no wait.
    let fd: OwnedFd = options.open(path).context(what)?.into();
    fifo::set_blocking(&fd).context(what)?;
    Ok(fd)
}

fn null(write: bool) -> Result<OwnedFd> {
    let file = OpenOptions::new()
        .read(!write)
        .write(write)
        .open("/dev/null");
    file.map(OwnedFd::from).context(|| "open /dev/null")
}

fn new_pipe() -> Result<(OwnedFd, OwnedFd)> {
    pipe2(OFlag::O_CLOEXEC).context(|| "make a pipe")
}

fn receiver(fd: OwnedFd) -> Result<Receiver> {
    Receiver::from_owned_fd(fd).context(|| "watch a pipe for reading")
}

fn sender(fd: OwnedFd) -> Result<Sender> {
    Sender::from_owned_fd(fd).context(|| "watch a pipe for writing")
}
