//! Our outgoing ttrpc: connecting, telling a closed peer from a failed call, the schedule of retries, and the sequence by
//! which a supervisor is asked to end its pod ([`removal`]).
//!
//! Promises that the shapes of "closed" are compared in one place, [`closed`]. Must never decide what is safe to repeat:
//! that is the caller's knowledge.

pub mod closed;
pub mod removal;

use std::fmt;
use std::future::Future;
use std::io;
use std::time::Duration;

use tokio::net::UnixStream;
use ttrpc::asynchronous::transport::Socket;
use ttrpc::{Code, Error as Ttrpc};

use crate::error::{Error, Kind, Result};
use crate::proto::deadline;
use crate::proto::events_ttrpc::events_ttrpc::EventsClient;
use crate::proto::sandbox::sandbox_ttrpc::SandboxClient;
use crate::proto::task_v3::shim_ttrpc::TaskClient;

pub use self::closed::is_closed;
pub use crate::sys::socket::is_live;

/// Tries of [`retry_closed`] after the first.
const RETRIES: u32 = 3;

/// Unit of the pause before retry i: 100 ms x i^2, containerd's own schedule.
const PAUSE: Duration = Duration::from_millis(100);

/// The crate's error of a ttrpc error: kind by status code, closed becomes [`Kind::Gone`].
pub fn from_ttrpc(what: &str, error: Ttrpc) -> Error {
    if is_closed(&error) {
        return Error::caused(Kind::Gone, what, error);
    }
    match error {
        Ttrpc::RpcStatus(status) => {
            let kind = kind_of(status.code());
            // The words are for daemons; here the kind says it.
            let words = kind.daemons_words().unwrap_or_default();
            let text = &status.message;
            let text = text.strip_suffix(words).unwrap_or(text);
            Error::new(kind, format!("{what}: {text}"))
        }
        Ttrpc::Others(text) if text.starts_with("Request deadline elapsed") => Error::new(
            Kind::Deadline,
            format!("{what}: no answer within the time given"),
        ),
        other => Error::caused(Kind::Other, what, other),
    }
}

/// One connection to a supervisor, or to anything that speaks ttrpc on a unix socket. Cheap to clone.
#[derive(Clone)]
pub struct Client {
    inner: ttrpc::asynchronous::Client,
}

impl Client {
    /// Connects to `unix:///path` or a bare path.
    ///
    /// # Errors
    /// Gone when nothing listens there, Busy when its queue of connections is full.
    pub async fn connect(address: &str) -> Result<Self> {
        let path = path_of(address);
        match UnixStream::connect(path).await {
            Ok(stream) => Ok(Self {
                inner: ttrpc::asynchronous::Client::new(Socket::from(stream)),
            }),
            Err(e) => {
                let kind = match e.kind() {
                    _ if closed::is_closed_socket(&e) => Kind::Gone,
                    io::ErrorKind::WouldBlock => Kind::Busy,
                    _ => Kind::Other,
                };
                Err(Error::io(format!("connect to {path}"), e).as_kind(kind))
            }
        }
    }

    /// The sandbox service.
    pub fn sandbox(&self) -> SandboxClient {
        SandboxClient::new(self.inner.clone())
    }

    /// The task service.
    pub fn task(&self) -> TaskClient {
        TaskClient::new(self.inner.clone())
    }

    /// The daemon's service that takes events.
    pub fn events(&self) -> EventsClient {
        EventsClient::new(self.inner.clone())
    }
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Client")
    }
}

/// The path in `unix:///path`, or the bare path itself.
pub fn path_of(address: &str) -> &str {
    address.strip_prefix("unix://").unwrap_or(address)
}

/// The context of a call that is to be answered within `limit`; it waits [`deadline::GRACE`] longer, so that an answer
/// which is sent at the last moment still arrives. `None`: however long it takes.
pub fn context(limit: Option<Duration>) -> ttrpc::context::Context {
    deadline::context(limit)
}

/// The same for a caller who has `whole` and no more, in which the grace is.
pub fn context_within(whole: Duration) -> ttrpc::context::Context {
    deadline::context_within(whole)
}

/// Runs `call` on a fresh connection, and after "closed" again, at most three times, 100 ms x i^2 later.
///
/// # Errors
/// The last error when every try met a closed peer, the first other one otherwise.
pub async fn retry_closed<T, F, Fut>(address: &str, mut call: F) -> Result<T>
where
    F: FnMut(Client) -> Fut,
    Fut: Future<Output = Result<T>>,
{
    let mut done = 0;
    loop {
        let result = match Client::connect(address).await {
            Ok(client) => call(client).await,
            Err(e) => Err(e),
        };
        done += 1;
        match (result, pause_before(done)) {
            (Err(e), Some(pause)) if e.kind() == Kind::Gone => tokio::time::sleep(pause).await,
            (other, _) => return other,
        }
    }
}

/// The pause before retry `i` (from 1); None when that would be one too many.
fn pause_before(i: u32) -> Option<Duration> {
    (i <= RETRIES).then(|| PAUSE * i * i)
}

fn kind_of(code: Code) -> Kind {
    match code {
        Code::NOT_FOUND => Kind::NotFound,
        Code::ALREADY_EXISTS => Kind::Exists,
        Code::FAILED_PRECONDITION => Kind::State,
        Code::INVALID_ARGUMENT => Kind::Invalid,
        Code::DEADLINE_EXCEEDED => Kind::Deadline,
        Code::UNAVAILABLE => Kind::Busy,
        Code::UNIMPLEMENTED => Kind::Unsupported,
        Code::CANCELLED => Kind::Cancelled,
        Code::PERMISSION_DENIED => Kind::Denied,
        _ => Kind::Other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kind_follows_the_status_code() {
        for (code, kind) in [
            (Code::NOT_FOUND, Kind::NotFound),
            (Code::UNAVAILABLE, Kind::Busy),
            (Code::UNIMPLEMENTED, Kind::Unsupported),
            (Code::UNKNOWN, Kind::Other),
        ] {
            let error = from_ttrpc("stop", ttrpc::error::get_rpc_status(code, "why"));
            assert_eq!(
                (error.kind(), error.to_string().as_str()),
                (kind, "stop: why")
            );
        }
    }

    #[test]
    fn closed_is_gone_in_every_spelling() {
        for error in [
            Ttrpc::Socket("early eof".into()),
            Ttrpc::RemoteClosed,
            Ttrpc::LocalClosed,
            Ttrpc::Others("reserve channel capacity failed: channel closed".into()),
        ] {
            assert_eq!(from_ttrpc("stop", error).kind(), Kind::Gone);
        }
        assert_eq!(
            from_ttrpc("stop", Ttrpc::Others("Request deadline elapsed".into())).kind(),
            Kind::Deadline
        );
        assert!(!is_closed(&Ttrpc::Others("Unpack response error".into())));
    }
}
