//! Unix sockets: whether somebody listens.

use std::os::fd::AsRawFd;
use std::path::Path;

use nix::errno::Errno;
use nix::sys::socket::{AddressFamily, SockFlag, SockType, UnixAddr, connect, socket};

/// Whether something listens on this socket right now. Never blocks: a full queue is a listener too.
pub fn is_live(path: &Path) -> bool {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let Ok(address) = UnixAddr::new(path) else {
        return false;
    };
    let Ok(socket) = socket(AddressFamily::Unix, SockType::Stream, flags, None) else {
        return false;
    };
    matches!(
        connect(socket.as_raw_fd(), &address),
        Ok(()) | Err(Errno::EAGAIN | Errno::EINPROGRESS)
    )
}
