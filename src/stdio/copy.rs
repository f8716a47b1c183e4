//! The tasks that carry bytes between a process' pipes and the far ends.
//!
//! Promises that nothing is held back (what was read is passed on before more is read, so a slow reader slows the
//! workload and not our memory) and that a far end that fails never makes the workload fail: its bytes are dropped.

use std::fs::File;
use std::io::{self, Read, Write};
use std::path::PathBuf;
use std::sync::Arc;

use tokio::net::unix::pipe::{OpenOptions, Receiver, Sender};
use tokio::sync::watch;

use super::log;
use super::relay;
use super::terminal::Terminal;

/// Bytes read at a time.
const CHUNK: usize = 8 << 10;

/// Where a stream comes from.
#[derive(Debug)]
pub(super) enum Source {
    Pipe(Receiver),
    Terminal(Terminal),
    /// A regular file, or a device that cannot be waited for (`/dev/null`): read at once.
    File(File),
    /// What a client sends to our socket.
    Stream(relay::End),
}

/// What a process reads.
#[derive(Debug)]
pub(super) enum Into {
    Pipe(Sender),
    Terminal(Terminal),
}

/// Where a stream goes.
#[derive(Debug)]
pub(super) enum Sink {
    /// The write end of a pipe whose read end we hold too, so that it never is without reader.
    Pipe(Sender),
    /// A regular file or a device.
    File(File),
    /// Read and dropped.
    Nothing,
    /// What a client comes for to our socket.
    Stream(relay::End),
    /// A log, and the FIFO of whoever wants to see the bytes at once.
    Log(log::Stream, Option<Attach>),
}

/// A FIFO that is written to while somebody reads it; without a reader, bytes for it are dropped.
#[derive(Debug)]
pub(super) struct Attach {
    path: PathBuf,
    open: Option<Sender>,
}

impl Attach {
    pub(super) fn new(path: PathBuf) -> Self {
        let mut attach = Self { path, open: None };
        // Now already, so that a reader that is there gets its end of file even when nothing is ever written.
        attach.connect();
        attach
    }

    /// ENXIO, ENOENT: nobody is there. Whatever else it is, the log has the bytes.
    fn connect(&mut self) {
        if self.open.is_none() {
            self.open = OpenOptions::new().open_sender(&self.path).ok();
        }
    }

    async fn send(&mut self, bytes: &[u8]) {
        self.connect();
        if let Some(sender) = &self.open
            && write_all(sender, bytes).await.is_err()
        {
            self.open = None; // EPIPE: the reader has gone; the next one is looked for with the next bytes
        }
    }
}

/// Counts the copies of outputs that are not at their end.
#[derive(Debug)]
pub(super) struct Running(Arc<watch::Sender<usize>>);

impl Running {
    pub(super) fn new(count: &Arc<watch::Sender<usize>>) -> Self {
        count.send_modify(|n| *n += 1);
        Self(count.clone())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.0.send_modify(|n| *n = n.saturating_sub(1));
    }
}

/// Copies an output until the last writer of the pipe is gone. The reader's end of file comes with the return.
pub(super) async fn output(from: Source, sink: Sink, running: Running) {
    // Dropped in reverse order of declaration: first the sink (which closes its last line), then the count.
    let _running = running;
    let (mut from, mut sink) = (from, sink);
    let mut buffer = vec![0; CHUNK];
    while let Some(n) = from.read(&mut buffer).await {
        match &mut sink {
            Sink::Pipe(to) => {
                if let Err(e) = write_all(to, &buffer[..n]).await {
                    tracing::warn!(error = %e, "write to a client's pipe");
                }
            }
            Sink::Nothing => {}
            Sink::Stream(to) => to.write(&buffer[..n]).await,
            Sink::File(file) => {
                if let Err(e) = file.write_all(&buffer[..n]) {
                    tracing::warn!(error = %e, "write to a client's file");
                }
            }
            Sink::Log(stream, attach) => {
                stream.write(&buffer[..n]);
                if let Some(attach) = attach {
                    attach.send(&buffer[..n]).await;
                }
            }
        }
    }
    match &mut sink {
        // A reader that waits in open(2) is let in, to see the end of file.
        Sink::Log(_, Some(attach)) => attach.connect(),
        // Not passed on before a client has it.
        Sink::Stream(to) => to.finish().await,
        _ => {}
    }
}

/// Copies an input until its last writer is gone (then the process sees the end, unless it reads a terminal, which has
/// none) or the process reads no more.
pub(super) async fn input(from: Source, to: Into) {
    let mut from = from;
    let mut buffer = vec![0; CHUNK];
    while let Some(n) = from.read(&mut buffer).await {
        let written = match &to {
            Into::Pipe(pipe) => write_all(pipe, &buffer[..n]).await,
            Into::Terminal(terminal) => terminal.write_all(&buffer[..n]).await,
        };
        if written.is_err() {
            break;
        }
    }
}

impl Source {
    /// None at the end, and on an error.
    async fn read(&mut self, buffer: &mut [u8]) -> Option<usize> {
        let read = match self {
            Self::Pipe(pipe) => return read(pipe, buffer).await,
            Self::Terminal(terminal) => terminal.read(buffer).await,
            Self::File(file) => file.read(buffer),
            Self::Stream(from) => Ok(from.read(buffer).await),
        };
        match read {
            Ok(0) => None,
            Ok(n) => Some(n),
            Err(e) => {
                tracing::warn!(error = %e, "read a terminal or a file");
                None
            }
        }
    }
}

/// None at the end, and on an error, which a pipe does not have.
async fn read(from: &Receiver, buffer: &mut [u8]) -> Option<usize> {
    loop {
        from.readable().await.ok()?;
        match from.try_read(buffer) {
            Ok(0) => return None,
            Ok(n) => return Some(n),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
            Err(e) => {
                tracing::warn!(error = %e, "read a pipe");
                return None;
            }
        }
    }
}

async fn write_all(to: &Sender, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        to.writable().await?;
        match to.try_write(bytes) {
            Ok(n) => bytes = &bytes[n..],
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}
