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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn liveness_is_about_the_listener_and_not_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        assert!(!is_live(&path));
        let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        assert!(is_live(&path));
        drop(listener);
        assert!(path.exists() && !is_live(&path));
    }
}
