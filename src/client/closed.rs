//! Whether an error means that the other side has closed.
//!
//! The one place where this is decided, for every shape it comes in: the spellings of ttrpc, of the socket, and of the
//! socket's file. Must never be guessed from a text anywhere else; tests pin the texts to the version of ttrpc in use.

use std::io;

use ttrpc::Error as Ttrpc;

/// Errors of the kernel which say that nobody is at the other end: the file is gone, nobody listens, the connection is cut.
const OS: [i32; 7] = [
    libc::ENOENT,
    libc::ECONNREFUSED,
    libc::ECONNRESET,
    libc::ECONNABORTED,
    libc::EPIPE,
    libc::ENOTCONN,
    libc::ESHUTDOWN,
];

/// The same where an error comes without a number: the standard library's own words, and those it gives our numbers.
const KINDS: [io::ErrorKind; 7] = [
    io::ErrorKind::NotFound,
    io::ErrorKind::ConnectionRefused,
    io::ErrorKind::ConnectionReset,
    io::ErrorKind::ConnectionAborted,
    io::ErrorKind::BrokenPipe,
    io::ErrorKind::NotConnected,
    io::ErrorKind::UnexpectedEof,
];

/// What `Others` begins with when a connection's own tasks have ended.
const TASKS_ENDED: [&str; 2] = [
    // The next call on a client whose connection has closed.
    "reserve channel capacity failed",
    // In flight, when the one who writes has ended in a panic.
    "Writer task failed",
];

/// True when the error means that the peer has closed, in any of the spellings of ttrpc 0.10.
///
/// In flight it is `Socket("early eof")`, the next call on the same client is `Others("reserve channel …")`. The words
/// `ttrpc: closed` are Go's and never come from this library.
pub fn is_closed(error: &Ttrpc) -> bool {
    match error {
        Ttrpc::Socket(_) | Ttrpc::LocalClosed | Ttrpc::RemoteClosed | Ttrpc::Eof => true,
        Ttrpc::Nix(errno) => OS.contains(&(*errno as i32)),
        Ttrpc::Others(text) => TASKS_ENDED.iter().any(|begin| text.starts_with(begin)),
        Ttrpc::RpcStatus(_) => false,
    }
}

/// The same for what connecting to a unix socket, or using one, gave.
pub fn is_closed_socket(error: &io::Error) -> bool {
    match error.raw_os_error() {
        Some(errno) => OS.contains(&errno),
        None => KINDS.contains(&error.kind()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ttrpc::Code;

    #[test]
    fn closed_is_known_in_every_shape() {
        let others = |text: &str| Ttrpc::Others(text.into());
        let status = |code, text| ttrpc::error::get_rpc_status(code, text);
        for (closed, error) in [
            (true, Ttrpc::Socket("early eof".into())),
            (true, Ttrpc::Socket("Broken pipe (os error 32)".into())),
            (true, Ttrpc::RemoteClosed),
            (true, Ttrpc::LocalClosed),
            (true, Ttrpc::Eof),
            (
                true,
                others("reserve channel capacity failed: channel closed"),
            ),
            (true, others("Writer task failed: task 7 panicked")),
            (false, others("Request deadline elapsed")),
            (false, others("Unpack response error")),
            (
                false,
                others("message length 5242948 exceed maximum message size of 4194304"),
            ),
            // An answer, whatever it says: somebody is there.
            (false, status(Code::UNAVAILABLE, "ttrpc: closed")),
            (false, status(Code::NOT_FOUND, "gone")),
        ] {
            assert_eq!(is_closed(&error), closed, "{error}");
        }
    }

    #[test]
    fn a_socket_is_closed_in_every_shape() {
        for (closed, errno) in [
            (true, libc::ENOENT),
            (true, libc::ECONNREFUSED),
            (true, libc::ECONNRESET),
            (true, libc::ECONNABORTED),
            (true, libc::EPIPE),
            (true, libc::ENOTCONN),
            (true, libc::ESHUTDOWN),
            // Its queue of connections is full: it lives.
            (false, libc::EAGAIN),
            (false, libc::EACCES),
            (false, libc::EMFILE),
            (false, libc::EINTR),
            (false, libc::ETIMEDOUT),
        ] {
            let error = io::Error::from_raw_os_error(errno);
            assert_eq!(is_closed_socket(&error), closed, "{error}");
        }
        for (closed, kind) in [
            (true, io::ErrorKind::UnexpectedEof),
            (true, io::ErrorKind::BrokenPipe),
            (true, io::ErrorKind::NotFound),
            (false, io::ErrorKind::WouldBlock),
            (false, io::ErrorKind::InvalidInput),
        ] {
            assert_eq!(is_closed_socket(&kind.into()), closed, "{kind}");
        }
    }
}
