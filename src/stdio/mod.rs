//! Standard streams of one process: one owner for all its descriptors.
//!
//! Owns what the strings of a request open, the pipes or the terminal between the process and us, logging programs, and
//! the copying. Promises never to wait for a peer while opening (a logging program may say when it is ready), that a client that goes away costs the process nothing (what it writes waits in the
//! FIFO), that every byte written is passed on before a drain says so, and that closing gives the reader its end of
//! file whoever still holds the pipe. Must never lend a descriptor: it is moved, or duplicated.

mod console;
mod copy;
mod fifo;
pub mod log;
mod logger;
mod open;
mod relay;
mod target;
mod terminal;
#[cfg(test)]
mod tests;

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::error::{Context, Error, Kind, Result};
use crate::process::{Identity, Reaper};
use console::Console;
use copy::{Into, Running, Sink, Source};
use logger::Logger;
use terminal::Terminal;

pub use console::sweep as sweep_consoles;
pub use relay::{Attached, Next, Streams};

/// What a process' streams are to be connected to.
#[derive(Clone, Debug, Default)]
pub struct Request {
    /// Verbatim from the request; "" is nothing.
    pub stdin: String,
    /// Verbatim from the request; "" is nothing.
    pub stdout: String,
    /// Verbatim from the request; "" is nothing. Where stdout goes to a file or a log, stderr goes there too.
    pub stderr: String,
    /// The process gets a terminal: stdout is what comes out of it, stderr is not used.
    pub terminal: bool,
    /// Where the socket is made over which the OCI runtime hands us the terminal; short, for it is a socket's path.
    pub console_dir: PathBuf,
    /// Whose streams they are: what a logging program is told. The container.
    pub container: String,
    /// See `container`. containerd's namespace.
    pub namespace: String,
    /// Owner of pipes, a host id (user namespaces).
    pub uid: u32,
    /// Group of pipes, a host id.
    pub gid: u32,
    /// Where clients come for streams by name (`ttrpc+unix://…?streaming_id=NAME`).
    pub streams: Streams,
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
    outputs: Vec<(Source, Sink)>,
    input: Option<(Source, Into)>,
    /// What keeps stdin from ending while its client is away.
    stdin_hold: Option<Hold>,
    /// Our read ends of output FIFOs.
    holds: Vec<OwnedFd>,
    tasks: Vec<JoinHandle<()>>,
    /// What a terminal that has not come yet is to be connected to.
    wanted: Option<Wanted>,
    terminal: Option<Terminal>,
    logger: Option<Logger>,
}

/// Held for what its drop does.
#[derive(Debug)]
#[allow(dead_code, reason = "nothing is read from it")]
enum Hold {
    /// Our write end of a FIFO.
    Fifo(OwnedFd),
    Stream(relay::Hold),
}

/// A terminal that the OCI runtime is going to make.
#[derive(Debug)]
struct Wanted {
    console: Console,
    input: Option<Source>,
    output: Option<Sink>,
}

impl Io {
    /// Opens the far ends, never waiting for a peer: "" (null), a FIFO's path or `fifo://`, a regular file or device by
    /// path, `file://` (made, appended to), `binary://` and `binary-v2://` (a logging program; waits until it is ready),
    /// `podvisor-log:///path?attach-stdout=/fifo&attach-stderr=/fifo&max-bytes=N` (CRI log lines, capped and rotated, see
    /// [`log`]; path values are %-encoded), `ttrpc+unix://socket?streaming_id=NAME` (one of [`Streams`], for which a client
    /// comes to our own socket). Must be called inside the runtime.
    ///
    /// # Errors
    /// Invalid "unknown STDIO scheme" and for what cannot be opened as a stream; Unsupported for streams over another
    /// kind of socket; Exists for a stream that another process has; NotFound for a path that is not there.
    pub async fn open(request: &Request, reaper: &Reaper) -> Result<Self> {
        Ok(Self {
            state: Mutex::new(open::open(request, reaper).await?),
            running: Arc::new(watch::Sender::new(0)),
        })
    }

    /// The process' ends, in the order of their numbers; given to the command that makes it. Taken once. With a terminal
    /// they are the OCI runtime's own, and nothing.
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

    /// Where the OCI runtime is to send the terminal it makes; None: the process wants none.
    pub fn console_socket(&self) -> Option<PathBuf> {
        self.lock()
            .wanted
            .as_ref()
            .map(|w| w.console.path().to_owned())
    }

    /// Takes the terminal that the OCI runtime has sent; nothing to do where none is wanted.
    ///
    /// # Errors
    /// Deadline, Other: the runtime did not send one.
    pub async fn take_terminal(&mut self) -> Result<()> {
        let Some(wanted) = self.lock().wanted.take() else {
            return Ok(());
        };
        let terminal = Terminal::new(wanted.console.receive().await?)?;
        let mut state = self.lock();
        state.input = wanted
            .input
            .map(|from| (from, Into::Terminal(terminal.clone())));
        // Read in any case: a terminal nobody empties stops the program.
        let sink = wanted.output.unwrap_or(Sink::Nothing);
        let from = Source::Terminal(terminal.clone());
        state.outputs.push((from, sink));
        state.terminal = Some(terminal);
        Ok(())
    }

    /// Sets the size of the terminal's window, characters; nothing to do without a terminal.
    ///
    /// # Errors
    /// The kernel's.
    pub fn resize(&self, width: u16, height: u16) -> Result<()> {
        match &self.lock().terminal {
            Some(terminal) => terminal
                .resize(width, height)
                .context(|| "resize a terminal"),
            None => Ok(()),
        }
    }

    /// The logging program, for the record.
    pub fn logger(&self) -> Option<Identity> {
        self.lock().logger.as_ref().map(Logger::identity)
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
    /// closed when the runtime next gets to them. A logging program is ended in the background.
    pub fn close(&self) {
        if let Some(logger) = self.stop()
            && let Ok(runtime) = Handle::try_current()
        {
            runtime.spawn(logger.end());
        }
    }

    /// The same, and waits until a logging program has ended, which is killed after 14 s.
    pub async fn finish(&self) {
        let logger = self.stop();
        if let Some(logger) = logger {
            logger.end().await;
        }
    }

    fn stop(&self) -> Option<Logger> {
        let mut state = self.lock();
        for task in state.tasks.drain(..) {
            task.abort();
        }
        std::mem::take(&mut *state).logger
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
