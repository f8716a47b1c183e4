//! Accepting connections: back-off when descriptors run out, a check of the peer, a count of who is there.
//!
//! Promises never to hand an error to the server, which would try again at once and spin. Must never hold back a
//! connection for longer than the longest pause.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use futures_core::Stream;
use nix::unistd::geteuid;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::watch;
use tokio::time::{Sleep, sleep};
use tracing::warn;

/// First pause after a failed accept; doubled up to [`PAUSE_MAX`].
const PAUSE_FIRST: Duration = Duration::from_millis(10);
/// Longest pause.
const PAUSE_MAX: Duration = Duration::from_secs(1);

/// The stream of accepted connections for the server.
pub struct Accept {
    listener: UnixListener,
    pause: Option<Pin<Box<Sleep>>>,
    next_pause: Duration,
    count: Arc<watch::Sender<usize>>,
}

impl Accept {
    /// Accepts from `listener`.
    pub fn new(listener: UnixListener) -> Self {
        Self {
            listener,
            pause: None,
            next_pause: PAUSE_FIRST,
            count: Arc::new(watch::Sender::new(0)),
        }
    }

    /// How many connections live, now and as it changes.
    pub fn connections(&self) -> watch::Receiver<usize> {
        self.count.subscribe()
    }

    fn back_off(&mut self, error: &io::Error) {
        // One line per burst: the first pause is short, and the next lines would say the same.
        if self.next_pause == PAUSE_FIRST {
            warn!(
                step = "accept",
                "accept a connection: {error}; trying again"
            );
        }
        self.pause = Some(Box::pin(sleep(self.next_pause)));
        self.next_pause = (self.next_pause * 2).min(PAUSE_MAX);
    }
}

impl Stream for Accept {
    type Item = io::Result<Counted>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        loop {
            if let Some(pause) = self.pause.as_mut() {
                ready!(pause.as_mut().poll(context));
                self.pause = None;
            }
            match ready!(self.listener.poll_accept(context)) {
                Ok((stream, _)) => {
                    self.next_pause = PAUSE_FIRST;
                    if is_ours(&stream) {
                        return Poll::Ready(Some(Ok(Counted::new(
                            stream,
                            Arc::clone(&self.count),
                        ))));
                    }
                }
                // The peer gave up before we came to it; there is nothing to wait for.
                Err(e) if e.kind() == io::ErrorKind::ConnectionAborted => {}
                // EMFILE, ENFILE, ENOMEM, ENOBUFS pass, and for anything else a pause is right too.
                Err(e) => self.back_off(&e),
            }
        }
    }
}

/// The directory keeps others out already; this holds when somebody loosens its mode.
fn is_ours(stream: &UnixStream) -> bool {
    match stream.peer_cred() {
        Ok(peer) if peer.uid() == geteuid().as_raw() => true,
        Ok(peer) => {
            warn!(
                step = "accept",
                uid = peer.uid(),
                "refuse a connection of another user"
            );
            false
        }
        Err(e) => {
            warn!(
                step = "accept",
                "refuse a connection whose peer is unknown: {e}"
            );
            false
        }
    }
}

/// A connection that is counted while it lives.
pub struct Counted {
    stream: UnixStream,
    count: Arc<watch::Sender<usize>>,
}

impl Counted {
    fn new(stream: UnixStream, count: Arc<watch::Sender<usize>>) -> Self {
        count.send_modify(|n| *n += 1);
        Self { stream, count }
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.count.send_modify(|n| *n -= 1);
    }
}

impl AsyncRead for Counted {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for Counted {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::future::poll_fn;
    use tokio::io::AsyncReadExt;

    #[tokio::test]
    async fn connections_are_counted_while_they_live() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let mut accept = Accept::new(UnixListener::bind(&path).unwrap());
        let mut connections = accept.connections();
        let peer = UnixStream::connect(&path).await.unwrap();
        let mut counted = poll_fn(|c| Pin::new(&mut accept).poll_next(c))
            .await
            .unwrap()
            .unwrap();
        assert_eq!(*connections.borrow(), 1);
        drop(peer);
        assert_eq!(counted.read(&mut [0; 8]).await.unwrap(), 0);
        drop(counted);
        connections.wait_for(|n| *n == 0).await.unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn pauses_grow_to_their_bound() {
        let dir = tempfile::tempdir().unwrap();
        let mut accept = Accept::new(UnixListener::bind(dir.path().join("s")).unwrap());
        let full = io::Error::from_raw_os_error(libc::EMFILE);
        for _ in 0..20 {
            accept.back_off(&full);
        }
        assert_eq!(accept.next_pause, PAUSE_MAX);
    }
}
