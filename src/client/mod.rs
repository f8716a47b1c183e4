//! Our outgoing ttrpc: connecting, telling a closed peer from a failed call, and the schedule of retries.
//!
//! Promises that the spellings of "closed" are compared in one place, [`is_closed`]; a test pins them to the version of
//! ttrpc in use. Must never decide what is safe to repeat: that is the caller's knowledge.

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

pub use crate::sys::socket::is_live;

/// Tries of [`retry_closed`], the first included: containerd's own number.
const TRIES: u32 = 3;

/// Unit of the pause before try i+1: 100 ms x i^2, containerd's own schedule.
const PAUSE: Duration = Duration::from_millis(100);

/// True when the error means that the peer has closed, in any of the spellings of ttrpc 0.10.
///
/// In flight it is `Socket("early eof")`, the next call on the same client is `Others("reserve channel …")`. The words
/// `ttrpc: closed` are Go's and never come from this library.
pub fn is_closed(error: &Ttrpc) -> bool {
    match error {
        Ttrpc::Socket(_) | Ttrpc::LocalClosed | Ttrpc::RemoteClosed | Ttrpc::Eof => true,
        Ttrpc::Others(text) => text.starts_with("reserve channel capacity failed"),
        _ => false,
    }
}

/// The crate's error of a ttrpc error: kind by status code, closed becomes [`Kind::Gone`].
pub fn from_ttrpc(what: &str, error: Ttrpc) -> Error {
    if is_closed(&error) {
        return Error::caused(Kind::Gone, what, error);
    }
    match error {
        Ttrpc::RpcStatus(status) => {
            let kind = kind_of(status.code());
            Error::new(kind, format!("{what}: {}", status.message))
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
                    io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => Kind::Gone,
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

/// The same for a caller who has `whole` and no more: the grace is part of it, half of it at most.
pub fn context_within(whole: Duration) -> ttrpc::context::Context {
    context(Some(whole - deadline::GRACE.min(whole / 2)))
}

/// Runs `call` on a fresh connection, again after "closed": at most 3 tries, 100 ms x i^2 apart.
///
/// # Errors
/// The last error when every try met a closed peer, the first one otherwise.
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
        match result {
            Err(e) if e.kind() == Kind::Gone && done < TRIES => {
                tokio::time::sleep(PAUSE * done * done).await
            }
            other => return other,
        }
    }
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

    #[test]
    fn who_has_no_more_than_a_time_has_the_grace_in_it() {
        for whole in [700, 1_000, 3_500] {
            let whole = Duration::from_millis(whole);
            let sent = context_within(whole);
            let waits = Duration::from_nanos(sent.timeout_nano.unsigned_abs());
            let deadline = deadline::of(sent.timeout_nano, &sent.metadata).unwrap();
            assert!(deadline >= whole / 2 && deadline < waits, "{deadline:?}");
            assert!(waits <= whole.max(deadline::GRACE * 2), "{waits:?}");
        }
    }
}
