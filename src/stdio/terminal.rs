//! The master end of a terminal, read and written by the runtime's tasks.
//!
//! Promises that everything the program wrote is read before the end is told: the kernel keeps what is in the terminal
//! until its last slave is closed and hands it out before EIO.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use nix::unistd;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use crate::error::{Context, Result};
use crate::sys;

/// A master. Cheap to clone; the descriptor is closed with the last one.
#[derive(Clone, Debug)]
pub(super) struct Terminal(Arc<AsyncFd<OwnedFd>>);

impl Terminal {
    /// `master` must be non-blocking; registered with the runtime it is called in.
    pub(super) fn new(master: OwnedFd) -> Result<Self> {
        let both = Interest::READABLE | Interest::WRITABLE;
        let fd = sys::fd::watch(master, both).context(|| "watch a terminal")?;
        Ok(Self(Arc::new(fd)))
    }

    /// Bytes read; 0 when nobody has the terminal open any more.
    pub(super) async fn read(&self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = |fd: &OwnedFd| Ok(unistd::read(fd, buffer)?);
        match self.0.async_io(Interest::READABLE, read).await {
            Err(e) if e.raw_os_error() == Some(libc::EIO) => Ok(0),
            done => done,
        }
    }

    /// Writes all of it, as fast as the program reads.
    pub(super) async fn write_all(&self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let write = |fd: &OwnedFd| Ok(unistd::write(fd, bytes)?);
            let written = self.0.async_io(Interest::WRITABLE, write).await?;
            bytes = bytes.get(written..).unwrap_or_default();
        }
        Ok(())
    }

    /// Sets the window's size, characters.
    pub(super) fn resize(&self, width: u16, height: u16) -> io::Result<()> {
        sys::pty::set_window(self.0.get_ref(), width, height)
    }
}
