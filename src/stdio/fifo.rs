//! Opening what is at a path without ever waiting for a peer.
//!
//! Owns the order of the opens: a FIFO's read end first and non-blocking (it never waits), then the write end (there
//! is a reader now: us). Promises close-on-exec on every descriptor and blocking mode on what a process gets.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;

use nix::fcntl::{FcntlArg, OFlag, fcntl};

use crate::error::{Context, Error, Kind, Result};

/// What was at the path.
#[derive(Debug)]
pub(super) enum Opened {
    /// A FIFO: the end asked for (non-blocking), and the opposite end that keeps it alive while the client is away.
    Fifo { end: OwnedFd, hold: OwnedFd },
    /// A regular file or a device: one descriptor, needs no hold.
    Plain(OwnedFd),
}

/// Opens an output: a FIFO's write end with our own read end, a regular file for appending, a device for writing.
///
/// # Errors
/// NotFound when nothing is there (the client makes its FIFOs first), Invalid for a directory or a socket.
pub(super) fn open_output(stream: &str, path: &Path) -> Result<Opened> {
    let (first, kind) = look(stream, path)?;
    let mut options = OpenOptions::new();
    match kind {
        What::Fifo => {
            let end = reopen(
                stream,
                path,
                &first,
                options.write(true).custom_flags(libc::O_NONBLOCK),
            )?;
            Ok(Opened::Fifo { end, hold: first })
        }
        What::File => reopen(stream, path, &first, options.append(true)).map(Opened::Plain),
        What::Device => reopen(
            stream,
            path,
            &first,
            options.write(true).custom_flags(libc::O_NOCTTY),
        )
        .map(Opened::Plain),
    }
}

/// Opens an input: a FIFO's read end with our own write end, or a file or device for reading.
///
/// # Errors
/// As [`open_output`].
pub(super) fn open_input(stream: &str, path: &Path) -> Result<Opened> {
    let (first, kind) = look(stream, path)?;
    let mut options = OpenOptions::new();
    match kind {
        What::Fifo => {
            let hold = reopen(
                stream,
                path,
                &first,
                options.write(true).custom_flags(libc::O_NONBLOCK),
            )?;
            Ok(Opened::Fifo { end: first, hold })
        }
        What::File | What::Device => {
            set_blocking(&first).context(|| about(stream, path))?;
            Ok(Opened::Plain(first))
        }
    }
}

/// Clears O_NONBLOCK: a workload does not expect EAGAIN on its standard streams.
pub(super) fn set_blocking(fd: impl AsFd) -> nix::Result<()> {
    let flags = OFlag::from_bits_retain(fcntl(&fd, FcntlArg::F_GETFL)?);
    fcntl(&fd, FcntlArg::F_SETFL(flags & !OFlag::O_NONBLOCK)).map(drop)
}

/// Sets O_NONBLOCK.
pub(super) fn set_non_blocking(fd: impl AsFd) -> nix::Result<()> {
    let flags = OFlag::from_bits_retain(fcntl(&fd, FcntlArg::F_GETFL)?);
    fcntl(&fd, FcntlArg::F_SETFL(flags | OFlag::O_NONBLOCK)).map(drop)
}

enum What {
    Fifo,
    File,
    Device,
}

/// Opens for reading, which waits for nobody, and looks what it is.
fn look(stream: &str, path: &Path) -> Result<(OwnedFd, What)> {
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY)
        .open(path)
        .map_err(|e| {
            match e.raw_os_error() {
                Some(libc::ENOENT) => Error::io(
                    format!(
                        "{} (the client makes it before it asks)",
                        about(stream, path)
                    ),
                    e,
                ),
                // What open(2) says to a socket.
                Some(libc::ENXIO) => wrong(stream, path),
                _ => Error::io(about(stream, path), e),
            }
        })?;
    let kind = file.metadata().context(|| about(stream, path))?.file_type();
    let what = if kind.is_fifo() {
        What::Fifo
    } else if kind.is_file() {
        What::File
    } else if kind.is_char_device() {
        What::Device
    } else {
        return Err(wrong(stream, path));
    };
    Ok((file.into(), what))
}

/// Opens the very thing `fd` is, even if the path has changed since.
fn reopen(stream: &str, path: &Path, fd: &OwnedFd, options: &OpenOptions) -> Result<OwnedFd> {
    let file: io::Result<File> = options.open(format!("/proc/self/fd/{}", fd.as_raw_fd()));
    file.map(OwnedFd::from).context(|| about(stream, path))
}

fn about(stream: &str, path: &Path) -> String {
    format!("open {stream} {}", path.display())
}

fn wrong(stream: &str, path: &Path) -> Error {
    let text = format!(
        "{}: it is no FIFO, regular file or character device",
        about(stream, path)
    );
    Error::new(Kind::Invalid, text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::sys::stat::Mode;

    fn flags(fd: &OwnedFd) -> OFlag {
        OFlag::from_bits_retain(fcntl(fd, FcntlArg::F_GETFL).unwrap())
    }

    #[test]
    fn a_fifo_without_peer_opens_at_once_both_ways_and_close_on_exec() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        nix::unistd::mkfifo(&path, Mode::S_IRWXU).unwrap();
        for opened in [
            open_output("stdout", &path).unwrap(),
            open_input("stdin", &path).unwrap(),
        ] {
            let Opened::Fifo { end, hold } = opened else {
                panic!("no fifo")
            };
            for fd in [&end, &hold] {
                assert_eq!(
                    fcntl(fd, FcntlArg::F_GETFD).unwrap() & libc::FD_CLOEXEC,
                    libc::FD_CLOEXEC
                );
            }
            assert!(flags(&end).contains(OFlag::O_NONBLOCK));
            set_blocking(&end).unwrap();
            assert!(!flags(&end).contains(OFlag::O_NONBLOCK));
        }
    }

    #[test]
    fn files_append_devices_pass_and_the_rest_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        std::fs::write(&file, "old").unwrap();
        let Opened::Plain(fd) = open_output("stdout", &file).unwrap() else {
            panic!("no file")
        };
        assert!(flags(&fd).contains(OFlag::O_APPEND) && !flags(&fd).contains(OFlag::O_NONBLOCK));
        let Opened::Plain(fd) = open_input("stdin", &file).unwrap() else {
            panic!("no file")
        };
        assert!(!flags(&fd).contains(OFlag::O_NONBLOCK));
        assert!(matches!(
            open_output("stdout", Path::new("/dev/null")),
            Ok(Opened::Plain(_))
        ));

        let missing = open_output("stdout", &dir.path().join("no")).unwrap_err();
        assert_eq!(missing.kind(), Kind::NotFound);
        assert!(
            missing.to_string().contains("the client makes it"),
            "{missing}"
        );
        let socket = dir.path().join("s");
        let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        for path in [dir.path(), &socket] {
            assert_eq!(
                open_output("stdout", path).unwrap_err().kind(),
                Kind::Invalid,
                "{}",
                path.display()
            );
        }
    }
}
