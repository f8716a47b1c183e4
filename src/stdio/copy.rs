//! The tasks that carry bytes between a process' pipes and the far ends.
//!
//! Promises that nothing is held back (what was read is passed on before more is read, so a slow reader slows the
//! workload and not our memory) and that a far end that fails never makes the workload fail: its bytes are dropped.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use tokio::net::unix::pipe::{OpenOptions, Receiver, Sender};
use tokio::sync::watch;

use super::log;

/// Bytes read at a time.
const CHUNK: usize = 8 << 10;

/// Where a stream goes.
#[derive(Debug)]
pub(super) enum Sink {
    /// The write end of a FIFO whose read end we hold too, so that it never is without reader.
    Fifo(Sender),
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
pub(super) async fn output(from: Receiver, sink: Sink, running: Running) {
    // Dropped in reverse order of declaration: first the sink (which closes its last line), then the count.
    let _running = running;
    let mut sink = sink;
    let mut buffer = vec![0; CHUNK];
    while let Some(n) = read(&from, &mut buffer).await {
        match &mut sink {
            Sink::Fifo(to) => {
                if let Err(e) = write_all(to, &buffer[..n]).await {
                    tracing::warn!(error = %e, "write to a client's FIFO");
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
    if let Sink::Log(_, Some(attach)) = &mut sink {
        // A reader that waits in open(2) is let in, to see the end of file.
        attach.connect();
    }
}

/// Copies an input until its last writer is gone (then the process sees the end) or the process reads no more.
pub(super) async fn input(from: Receiver, to: Sender) {
    let mut buffer = vec![0; CHUNK];
    while let Some(n) = read(&from, &mut buffer).await {
        if write_all(&to, &buffer[..n]).await.is_err() {
            break;
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
