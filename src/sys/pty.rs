//! Terminals: taking a master over a socket, its window size.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};

/// Room for one control message with one descriptor, aligned as the kernel's header wants it.
#[repr(C, align(8))]
struct Control([u8; 64]);

/// Receives one descriptor (close-on-exec) with the bytes it came with, which are dropped. WouldBlock on a
/// non-blocking socket without news; InvalidData when a message without a descriptor, or the end, comes.
pub fn receive_descriptor(socket: impl AsFd) -> io::Result<OwnedFd> {
    let mut bytes = [0_u8; 4096];
    let mut part = libc::iovec {
        iov_base: bytes.as_mut_ptr().cast(),
        iov_len: bytes.len(),
    };
    let mut control = Control([0; 64]);
    // SAFETY: a zeroed msghdr is a valid one.
    let mut message: libc::msghdr = unsafe { MaybeUninit::zeroed().assume_init() };
    message.msg_iov = &raw mut part;
    message.msg_iovlen = 1;
    message.msg_control = control.0.as_mut_ptr().cast();
    message.msg_controllen = control.0.len() as _;
    let socket = socket.as_fd().as_raw_fd();
    // SAFETY: every pointer in the message is valid, with its length, for the time of the call.
    let read = unsafe { libc::recvmsg(socket, &raw mut message, libc::MSG_CMSG_CLOEXEC) };
    if read < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel filled the control buffer up to msg_controllen; the macros walk within it.
    let found = unsafe {
        let header = libc::CMSG_FIRSTHDR(&raw const message);
        if header.is_null()
            || (*header).cmsg_level != libc::SOL_SOCKET
            || (*header).cmsg_type != libc::SCM_RIGHTS
        {
            None
        } else {
            let length = (*header).cmsg_len as usize - libc::CMSG_LEN(0) as usize;
            let first = libc::CMSG_DATA(header).cast::<RawFd>();
            // More than one: each has been given to us and has to be closed.
            (0..length / size_of::<RawFd>())
                .map(|at| OwnedFd::from_raw_fd(first.add(at).read_unaligned()))
                .reduce(|first, _| first)
        }
    };
    found.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "no descriptor came"))
}

/// Sets the size of a terminal's window, characters; the program in it gets SIGWINCH.
pub fn set_window(terminal: impl AsFd, width: u16, height: u16) -> io::Result<()> {
    let size = libc::winsize {
        ws_row: height,
        ws_col: width,
        ws_xpixel: 0,
        ws_ypixel: 0,
    };
    let fd = terminal.as_fd().as_raw_fd();
    // SAFETY: TIOCSWINSZ reads one winsize.
    if unsafe { libc::ioctl(fd, libc::TIOCSWINSZ, &raw const size) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// The size of a terminal's window, characters: width and height. 0 is "not known".
pub fn window(terminal: impl AsFd) -> io::Result<(u16, u16)> {
    let mut size = libc::winsize {
        ws_row: 0,
        ws_col: 0,
        ws_xpixel: 0,
        ws_ypixel: 0,
    };
    let fd = terminal.as_fd().as_raw_fd();
    // SAFETY: TIOCGWINSZ writes one winsize.
    if unsafe { libc::ioctl(fd, libc::TIOCGWINSZ, &raw mut size) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok((size.ws_col, size.ws_row))
}

#[cfg(test)]
mod tests {
    use std::io::{IoSlice, Write};
    use std::os::unix::net::UnixStream;

    use nix::pty::openpty;
    use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};

    use super::*;

    fn send(to: &UnixStream, fds: &[RawFd]) {
        let rights = [ControlMessage::ScmRights(fds)];
        let text = [IoSlice::new(b"/dev/pts/0")];
        sendmsg::<()>(to.as_raw_fd(), &text, &rights, MsgFlags::empty(), None).unwrap();
    }

    #[test]
    fn a_master_comes_over_a_socket_and_takes_a_window() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let pty = openpty(None, None).unwrap();
        send(&theirs, &[pty.master.as_raw_fd()]);
        let master = receive_descriptor(&ours).unwrap();
        set_window(&master, 132, 43).unwrap();
        assert_eq!(window(&pty.slave).unwrap(), (132, 43));
        assert!(window(&theirs).is_err());
    }

    #[test]
    fn what_is_no_descriptor_is_refused_and_a_second_one_is_closed() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        theirs.write_all(b"x").unwrap();
        let error = receive_descriptor(&ours).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        let (read, write) = nix::unistd::pipe().unwrap();
        let null = std::fs::File::open("/dev/null").unwrap();
        send(&theirs, &[null.as_raw_fd(), write.as_raw_fd()]);
        drop(write);
        let _first = receive_descriptor(&ours).unwrap();
        assert_eq!(nix::unistd::read(&read, &mut [0; 1]), Ok(0), "still open");
        drop(theirs);
        let error = receive_descriptor(&ours).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
    }
}
