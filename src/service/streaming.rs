//! `containerd.services.streaming.v1.Streaming`: bytes of standard streams, to and from clients that come for them by name.
//!
//! The messages of both directions and the permission to send; what is kept between two clients is the container's.
//! ttrpc does not tell a stream's handler when its connection has closed, and a client that is gone must not count as
//! there (an input would never end). So whenever a connection of the supervisor closes, each stream says something that
//! changes nothing, and learns from the failure.

use std::time::Duration;

use async_trait::async_trait;
use protobuf::Message;
use protobuf::well_known_types::any::Any;
use tokio::sync::watch;
use ttrpc::asynchronous::{SSReceiver, SSSender, ServerStream, TtrpcContext};

use super::guard;
use crate::container::{Attached, Next};
use crate::error::{Error, Kind, Result};
use crate::pod::Pod;
use crate::proto::any;
use crate::proto::streaming::streaming::StreamInit;
use crate::proto::streaming::streaming_ttrpc::Streaming;
use crate::proto::types::transfer::{Data, WindowUpdate};

/// Most that a client can have allowed us: no sane one comes near, and the sum must not overflow.
const ROOM_MAX: usize = 1 << 30;

/// How long a client may take to say which stream it came for.
const FIRST: Duration = Duration::from_secs(60);
/// How long a client may take to see that its stream has ended.
const LINGER: Duration = Duration::from_secs(5);

/// The service over one pod.
pub struct StreamingService {
    pod: Pod,
    connections: watch::Receiver<usize>,
}

impl StreamingService {
    /// A service over `pod`; `connections`: how many there are.
    pub fn new(pod: Pod, connections: watch::Receiver<usize>) -> Self {
        Self { pod, connections }
    }
}

#[async_trait]
impl Streaming for StreamingService {
    async fn stream(&self, _: &TtrpcContext, stream: ServerStream<Any, Any>) -> ttrpc::Result<()> {
        guard::waiting("Stream", async move {
            let (to, mut from) = stream.split();
            let Some(first) = first_of(&mut from).await? else {
                return Ok(());
            };
            let name = name_in(&first)?;
            let attached = self.pod.containers().attach(&name);
            tracing::debug!(name, "a client came for a stream");
            // Nobody may begin to send before it has been told that its stream is known.
            to.send(&Any::default()).await.map_err(broken)?;
            let done = carry(&attached, &to, &mut from, self.connections.clone()).await;
            linger(from);
            done
        })
        .await
    }
}

/// Until the stream ends or its client has left. The answer to both is the end of the stream.
async fn carry(
    attached: &Attached,
    to: &SSSender<Any>,
    from: &mut SSReceiver<Any>,
    mut connections: watch::Receiver<usize>,
) -> Result<()> {
    let mut room = 0_usize;
    let mut before = *connections.borrow_and_update();
    // What says nothing depends on the way, which is known by what has gone over the stream: who reads takes no window. Of
    // a client that has left before, an input is told by the first message to it.
    let mut silence = None;
    loop {
        tokio::select! {
            got = from.recv() => {
                // An error is a connection that broke, which is a client that left.
                let Ok(Some(any)) = got else { return Ok(()) };
                if let Some(data) = unpack::<Data>(&any, any::STREAM_DATA)? {
                    attached.received(&data.data)?;
                } else if let Some(window) = unpack::<WindowUpdate>(&any, any::STREAM_WINDOW)? {
                    let more = usize::try_from(window.update).map_err(|_| negative(window.update))?;
                    room = room.saturating_add(more).min(ROOM_MAX);
                    silence = Some(message(any::STREAM_DATA, &Data::default())?);
                }
                // Anything else is of a newer client, for which an older server is silent.
            }
            next = attached.next(room) => match next {
                Next::Send(bytes) => {
                    let size = bytes.len();
                    let data = Data { data: bytes, ..Default::default() };
                    if to.send(&message(any::STREAM_DATA, &data)?).await.is_err() {
                        return Ok(()); // the next client gets them
                    }
                    attached.sent(size);
                    room -= size;
                }
                Next::Allow(size) => {
                    let update = i32::try_from(size).unwrap_or(i32::MAX);
                    let window = WindowUpdate { update, ..Default::default() };
                    if to.send(&message(any::STREAM_WINDOW, &window)?).await.is_err() {
                        return Ok(());
                    }
                    silence = Some(message(any::STREAM_WINDOW, &WindowUpdate::default())?);
                }
                Next::End => return Ok(()),
            },
            changed = connections.changed() => {
                if changed.is_err() {
                    return Ok(()); // the supervisor ends
                }
                let now = *connections.borrow_and_update();
                if let Some(silence) = silence.as_ref().filter(|_| now <= before)
                    && to.send(silence).await.is_err()
                {
                    return Ok(());
                }
                before = now;
            }
        }
    }
}

/// The first message. A request to open a stream may bring one itself, and an empty one is what ttrpc makes of a request
/// that did not (Go's client does not say that it brings none).
async fn first_of(from: &mut SSReceiver<Any>) -> Result<Option<Any>> {
    let first = async {
        loop {
            match from.recv().await.map_err(broken)? {
                Some(any) if any == Any::default() => {}
                first => return Ok(first),
            }
        }
    };
    // One that has hung up is not told to us.
    tokio::time::timeout(FIRST, first)
        .await
        .unwrap_or_else(|_| {
            let why = format!(
                "open a stream: no first message within {} s",
                FIRST.as_secs()
            );
            Err(Error::new(Kind::Deadline, why))
        })
}

/// Takes what the client sends before it sees the end of the stream. ttrpc answers a message for a stream that is not
/// there any more with an error, which would overtake the end.
fn linger(mut from: SSReceiver<Any>) {
    tokio::spawn(async move {
        let rest = async { while let Ok(Some(_)) = from.recv().await {} };
        let _ = tokio::time::timeout(LINGER, rest).await;
    });
}

fn name_in(first: &Any) -> Result<String> {
    match unpack::<StreamInit>(first, any::STREAM_INIT)? {
        Some(init) if !init.id.is_empty() => Ok(init.id),
        _ => Err(Error::new(
            Kind::Invalid,
            format!(
                "open a stream: the first message has to be {} with an id, not {:?}",
                any::STREAM_INIT,
                first.type_url
            ),
        )),
    }
}

fn message<M: Message>(name: &str, message: &M) -> Result<Any> {
    any::pack(name, message).map_err(|e| Error::caused(Kind::Other, format!("encode {name}"), e))
}

fn unpack<M: Message>(any: &Any, name: &str) -> Result<Option<M>> {
    any::unpack(any, name).map_err(|e| Error::caused(Kind::Invalid, format!("decode {name}"), e))
}

fn broken(error: ttrpc::Error) -> Error {
    Error::caused(Kind::Gone, "read the first message of a stream", error)
}

fn negative(update: i32) -> Error {
    Error::new(
        Kind::Invalid,
        format!("take a window of {update} bytes: give a number that is not negative"),
    )
}
