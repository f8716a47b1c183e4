//! Streams by name: a client comes for one over our own socket, before the process is made or long after.
//!
//! Owns the meeting of the two and what is between them: at most [`WINDOW`] bytes, whose order and number are kept when
//! the client goes and another comes under the same name (a daemon that was restarted). Promises what a FIFO promises: an
//! output nobody takes waits and stops the program, and an input ends when it was closed *and* its client has left, not
//! before. Must never know how bytes get to the client.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::watch;

use crate::error::{Error, Kind, Result};

/// Most bytes kept between the two, and most that a client may send ahead.
pub(super) const WINDOW: usize = 64 << 10;
/// Most bytes a client is handed at once.
const PIECE: usize = 32 << 10;

/// All streams of a supervisor, by name. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct Streams(Arc<Mutex<Table>>);

type Table = BTreeMap<String, Arc<Relay>>;

/// A client's end. Dropped, the client is away.
#[derive(Debug)]
pub struct Attached {
    streams: Streams,
    name: String,
    relay: Arc<Relay>,
    /// Which client it is: a later one takes the stream over.
    number: u64,
}

/// What a client's end has to do next.
#[derive(Debug, PartialEq, Eq)]
pub enum Next {
    /// Hand these to the client, then say so by [`Attached::sent`].
    Send(Vec<u8>),
    /// The client may send this many bytes more.
    Allow(usize),
    /// No more bytes come, or go: the process' end is closed, or another client has the stream.
    End,
}

/// The process' end of an output or an input. Dropped, nothing more comes or is taken.
#[derive(Debug)]
pub(super) struct End {
    streams: Streams,
    name: String,
    relay: Arc<Relay>,
}

/// Keeps an input from ending while its client is away.
#[derive(Debug)]
pub(super) struct Hold(Arc<Relay>);

#[derive(Debug)]
struct Relay {
    state: Mutex<State>,
    /// Sent after every step.
    changed: watch::Sender<()>,
}

#[derive(Debug, Default)]
struct State {
    /// None until a process is connected: which way the stream goes is the process' to say.
    way: Option<Way>,
    bytes: Vec<u8>,
    /// The process' end is closed; what is in `bytes` is the last of an output.
    ended: bool,
    /// Of an input.
    held: bool,
    /// The client that has it now; 0: none.
    client: u64,
    /// How many have come.
    clients: u64,
    /// Of an input: what the client may still send.
    allowed: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Out,
    In,
}

impl Streams {
    /// A client that has come for the stream `name`; who had it before has it no more. The stream need not be there yet.
    pub fn attach(&self, name: &str) -> Attached {
        let relay = Arc::clone(self.table().entry(name.to_owned()).or_default());
        let number = relay.step(|state| {
            state.clients += 1;
            state.client = state.clients;
            state.allowed = 0;
            state.client
        });
        Attached {
            streams: self.clone(),
            name: name.to_owned(),
            relay,
            number,
        }
    }

    /// The process' end of an output.
    ///
    /// # Errors
    /// Exists when a process has that stream.
    pub(super) fn output(&self, name: &str) -> Result<End> {
        self.connect(name, Way::Out)
    }

    /// The process' end of an input, and what keeps it open.
    ///
    /// # Errors
    /// Exists when a process has that stream.
    pub(super) fn input(&self, name: &str) -> Result<(End, Hold)> {
        let end = self.connect(name, Way::In)?;
        end.relay.step(|state| state.held = true);
        let hold = Hold(Arc::clone(&end.relay));
        Ok((end, hold))
    }

    fn connect(&self, name: &str, way: Way) -> Result<End> {
        let relay = Arc::clone(self.table().entry(name.to_owned()).or_default());
        let free = relay.step(|state| state.way.is_none().then(|| state.way = Some(way)));
        if free.is_none() {
            let why = format!("connect stream {name:?}: another process has it; give each its own");
            return Err(Error::new(Kind::Exists, why));
        }
        Ok(End {
            streams: self.clone(),
            name: name.to_owned(),
            relay,
        })
    }

    /// Forgets `relay` if that is what the name stands for: the next user of the name gets a fresh one.
    fn forget(&self, name: &str, relay: &Arc<Relay>) {
        let mut table = self.table();
        if table.get(name).is_some_and(|now| Arc::ptr_eq(now, relay)) {
            table.remove(name);
        }
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Attached {
    /// Waits for something to do. `room`: how many bytes the client takes now. May be dropped at any time: nothing is
    /// taken away before [`sent`](Self::sent).
    pub async fn next(&self, room: usize) -> Next {
        let look = |state: &mut State| {
            if state.client != self.number {
                return Some(Next::End);
            }
            match state.way {
                None => None,
                Some(Way::Out) if !state.bytes.is_empty() => {
                    let size = state.bytes.len().min(PIECE).min(room);
                    (size > 0).then(|| Next::Send(state.bytes[..size].to_vec()))
                }
                _ if state.ended => Some(Next::End),
                Some(Way::Out) => None,
                Some(Way::In) => {
                    let ahead = state.allowed + state.bytes.len();
                    // In halves: a small permission for every few bytes would double the traffic.
                    let more = (ahead <= WINDOW / 2).then(|| WINDOW - ahead)?;
                    state.allowed += more;
                    Some(Next::Allow(more))
                }
            }
        };
        self.relay.until(look).await
    }

    /// The client has the first `size` bytes of the output.
    pub fn sent(&self, size: usize) {
        self.relay.step(|state| {
            if state.client == self.number {
                state.bytes.drain(..size.min(state.bytes.len()));
            }
        });
    }

    /// Bytes from the client.
    ///
    /// # Errors
    /// Invalid when they are more than it may send, or when the stream is no input.
    pub fn received(&self, bytes: &[u8]) -> Result<()> {
        self.relay.step(|state| {
            if state.client != self.number || state.ended {
                return Ok(()); // nobody reads it any more
            }
            let Some(left) = state.allowed.checked_sub(bytes.len()) else {
                let why = format!(
                    "take {} bytes for stream {:?}: {} were allowed",
                    bytes.len(),
                    self.name,
                    state.allowed
                );
                return Err(Error::new(Kind::Invalid, why));
            };
            state.allowed = left;
            state.bytes.extend_from_slice(bytes);
            Ok(())
        })
    }
}

impl Drop for Attached {
    fn drop(&mut self) {
        let unused = self.relay.step(|state| {
            if state.client == self.number {
                state.client = 0;
            }
            state.client == 0 && state.way.is_none()
        });
        if unused {
            self.streams.forget(&self.name, &self.relay);
        }
    }
}

impl End {
    /// Adds to an output; waits while a window is full.
    pub(super) async fn write(&self, bytes: &[u8]) {
        let add = |state: &mut State| {
            (state.bytes.len() < WINDOW).then(|| state.bytes.extend_from_slice(bytes))
        };
        self.relay.until(add).await;
        self.relay.changed.send_replace(());
    }

    /// No more comes; waits until a client has taken all.
    pub(super) async fn finish(&self) {
        self.relay.step(|state| state.ended = true);
        let empty = |state: &mut State| state.bytes.is_empty().then_some(());
        self.relay.until(empty).await;
    }

    /// Reads from an input; 0 at its end: it was closed, and its client has left.
    pub(super) async fn read(&self, buffer: &mut [u8]) -> usize {
        let take = |state: &mut State| {
            let size = state.bytes.len().min(buffer.len());
            if size == 0 {
                return (!state.held && state.client == 0).then_some(0);
            }
            buffer[..size].copy_from_slice(&state.bytes[..size]);
            state.bytes.drain(..size);
            Some(size)
        };
        let size = self.relay.until(take).await;
        self.relay.changed.send_replace(());
        size
    }
}

impl Drop for End {
    fn drop(&mut self) {
        self.relay.step(|state| state.ended = true);
        self.streams.forget(&self.name, &self.relay);
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        self.0.step(|state| state.held = false);
    }
}

impl Default for Relay {
    fn default() -> Self {
        Self {
            state: Mutex::default(),
            changed: watch::Sender::new(()),
        }
    }
}

impl Relay {
    fn step<T>(&self, step: impl FnOnce(&mut State) -> T) -> T {
        let result = step(&mut self.lock());
        self.changed.send_replace(());
        result
    }

    /// What `look` gives, as soon as it gives something.
    async fn until<T>(&self, mut look: impl FnMut(&mut State) -> Option<T>) -> T {
        let mut changed = self.changed.subscribe();
        loop {
            if let Some(found) = look(&mut self.lock()) {
                return found;
            }
            // The sender is ours and lives as long as this wait.
            let _ = changed.changed().await;
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;
    use tokio::time::timeout;

    const SOON: Duration = Duration::from_millis(50);

    #[tokio::test]
    async fn an_output_waits_for_its_client_and_survives_a_change_of_clients() {
        let streams = Streams::default();
        let end = streams.output("c-stdout").unwrap();
        assert_eq!(streams.output("c-stdout").unwrap_err().kind(), Kind::Exists);
        end.write(b"hello").await;
        end.write(&vec![b'x'; WINDOW]).await;
        assert!(timeout(SOON, end.write(b"!")).await.is_err(), "it is full");

        let first = streams.attach("c-stdout");
        assert_eq!(first.next(5).await, Next::Send(b"hello".to_vec()));
        first.sent(3);
        assert!(timeout(SOON, first.next(0)).await.is_err(), "no room");
        let second = streams.attach("c-stdout");
        assert_eq!(first.next(9).await, Next::End);
        first.sent(2); // of one that has it no more
        drop(first);
        assert_eq!(second.next(2).await, Next::Send(b"lo".to_vec()));
        second.sent(2);

        let finishing = tokio::spawn(async move { end.finish().await });
        let mut all = 0;
        loop {
            match second.next(usize::MAX).await {
                Next::Send(bytes) => {
                    assert!(bytes.len() <= PIECE);
                    all += bytes.len();
                    second.sent(bytes.len());
                }
                Next::End => break,
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(all, WINDOW);
        finishing.await.unwrap();
        drop(second);
        assert!(streams.table().is_empty());
    }

    #[tokio::test]
    async fn an_input_ends_when_it_is_closed_and_its_client_has_left() {
        let streams = Streams::default();
        // The client is there first, as a daemon is.
        let client = streams.attach("c-stdin");
        let (end, hold) = streams.input("c-stdin").unwrap();
        assert_eq!(client.next(0).await, Next::Allow(WINDOW));
        client.received(b"one ").unwrap();
        let mut buffer = [0; 8];
        assert_eq!(end.read(&mut buffer).await, 4);
        drop(client);
        assert!(timeout(SOON, end.read(&mut buffer)).await.is_err(), "held");
        let client = streams.attach("c-stdin");
        drop(hold);
        assert!(
            timeout(SOON, end.read(&mut buffer)).await.is_err(),
            "a client is there"
        );
        assert_eq!(client.next(0).await, Next::Allow(WINDOW));
        client.received(b"two").unwrap();
        drop(client);
        assert_eq!(end.read(&mut buffer).await, 3);
        assert_eq!(end.read(&mut buffer).await, 0);
        drop(end);
        assert!(streams.table().is_empty());
    }

    #[tokio::test]
    async fn a_client_sends_no_more_than_it_may() {
        let streams = Streams::default();
        let client = streams.attach("c-stdin");
        assert_eq!(client.received(b"early").unwrap_err().kind(), Kind::Invalid);
        let (end, _hold) = streams.input("c-stdin").unwrap();
        assert_eq!(client.next(0).await, Next::Allow(WINDOW));
        client.received(&vec![1; WINDOW]).unwrap();
        assert_eq!(client.received(b"x").unwrap_err().kind(), Kind::Invalid);
        assert!(timeout(SOON, client.next(0)).await.is_err());
        let mut buffer = vec![0; WINDOW / 2];
        assert_eq!(end.read(&mut buffer).await, WINDOW / 2);
        assert_eq!(client.next(0).await, Next::Allow(WINDOW / 2));
        drop(end);
        assert_eq!(client.next(0).await, Next::End);
        client.received(b"nobody reads it").unwrap();
    }

    #[tokio::test]
    async fn a_name_is_free_when_its_process_is_gone() {
        let streams = Streams::default();
        let waiting = streams.attach("x");
        drop(streams.output("x").unwrap());
        assert_eq!(waiting.next(1).await, Next::End);
        let end = streams.output("x").unwrap();
        end.write(b"new").await;
        assert_eq!(waiting.next(9).await, Next::End, "of the old one");
        drop(waiting);
        let client = streams.attach("x");
        assert_eq!(client.next(9).await, Next::Send(b"new".to_vec()));
        drop(streams.attach("never used"));
        assert_eq!(streams.table().len(), 1);
    }
}
