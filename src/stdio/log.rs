//! CRI log lines: `2026-11-30T13:33:12.000000001Z stdout F text`.
//!
//! Owns their format, and the file they are written to: capped, with one older file beside it. Promises that a line
//! longer than [`MAX_TEXT`] becomes `P` lines and a closing `F`, that output without a last newline is closed by an `F`
//! too, and that the file is never one that a symbolic link points to.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::SystemTime;

use crate::clock;
use crate::error::{Error, Kind, Result};

/// Most bytes of text in one line; what is longer goes on in the next line of the stream.
pub const MAX_TEXT: usize = 16 << 10;

/// Size at which a file is rotated unless the request says otherwise, bytes. With the older file a log takes twice this.
pub const DEFAULT_CAP: u64 = 16 << 20;

/// One line of a log file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Line {
    /// RFC 3339 with nanoseconds, as written.
    pub at: String,
    /// Of stderr; else of stdout.
    pub stderr: bool,
    /// false: `P`, the text goes on in the next line of the stream.
    pub full: bool,
    /// The text without its newline; any bytes.
    pub text: Vec<u8>,
}

/// Parses one line (without its newline); None when it is none of ours.
pub fn parse(line: &[u8]) -> Option<Line> {
    let mut parts = line.splitn(4, |b| *b == b' ');
    let at = std::str::from_utf8(parts.next()?).ok()?;
    if !at.contains('T') || at.len() < 20 {
        return None;
    }
    let stderr = match parts.next()? {
        b"stdout" => false,
        b"stderr" => true,
        _ => return None,
    };
    // CRI allows more tags after the first, joined by colons.
    let full = match parts.next()?.split(|b| *b == b':').next()? {
        b"F" => true,
        b"P" => false,
        _ => return None,
    };
    Some(Line {
        at: at.to_owned(),
        stderr,
        full,
        text: parts.next().unwrap_or_default().to_vec(),
    })
}

/// Where the older half of the log at `path` is: `<path>.1`. Read it first.
pub fn rotated(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".1");
    name.into()
}

/// The file, shared by both streams of a process.
#[derive(Clone, Debug)]
pub(super) struct Log(Arc<Mutex<LogFile>>);

impl Log {
    /// Opens or makes the file (0640; its directory 0700 when missing).
    ///
    /// # Errors
    /// Invalid when the path is a symbolic link or no regular file.
    pub(super) fn open(path: &Path, cap: u64) -> Result<Self> {
        if let Some(parent) = path.parent() {
            fs::DirBuilder::new()
                .recursive(true)
                .mode(0o700)
                .create(parent)
                .map_err(|e| {
                    Error::io(format!("make the directory of log {}", path.display()), e)
                })?;
        }
        let (file, size) = open(path)?;
        Ok(Self(Arc::new(Mutex::new(LogFile {
            path: path.to_owned(),
            file,
            size,
            cap,
            lost: 0,
        }))))
    }

    /// A writer for one of the streams.
    pub(super) fn stream(&self, stderr: bool) -> Stream {
        Stream {
            log: self.clone(),
            stderr,
            pending: Vec::new(),
            open: false,
        }
    }
}

/// Cuts one stream into lines. Dropping it closes the last line.
#[derive(Debug)]
pub(super) struct Stream {
    log: Log,
    stderr: bool,
    pending: Vec<u8>,
    /// A `P` was written and its `F` is owed.
    open: bool,
}

impl Stream {
    /// Takes what the process wrote; whole lines are in the file when it returns.
    pub(super) fn write(&mut self, bytes: &[u8]) {
        let mut out = Vec::with_capacity(bytes.len() + 128);
        let now = clock::rfc3339(SystemTime::now());
        let mut rest = bytes;
        loop {
            let newline = rest.iter().position(|b| *b == b'\n');
            self.pending
                .extend_from_slice(&rest[..newline.unwrap_or(rest.len())]);
            while self.pending.len() > MAX_TEXT {
                record(
                    &mut out,
                    &now,
                    self.stderr,
                    false,
                    &self.pending[..MAX_TEXT],
                );
                self.pending.drain(..MAX_TEXT);
                self.open = true;
            }
            let Some(end) = newline else { break };
            self.close_line(&mut out, &now);
            rest = &rest[end + 1..];
        }
        self.append(&out);
    }

    fn close_line(&mut self, out: &mut Vec<u8>, now: &str) {
        record(out, now, self.stderr, true, &self.pending);
        self.pending.clear();
        self.open = false;
    }

    fn append(&self, out: &[u8]) {
        if !out.is_empty() {
            self.log
                .0
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .append(out);
        }
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.open || !self.pending.is_empty() {
            let mut out = Vec::new();
            self.close_line(&mut out, &clock::rfc3339(SystemTime::now()));
            self.append(&out);
        }
    }
}

#[derive(Debug)]
struct LogFile {
    path: PathBuf,
    file: File,
    size: u64,
    cap: u64,
    /// Bytes that did not get into the file since the last that did.
    lost: u64,
}

impl LogFile {
    /// Appends whole lines; what the disk does not take is dropped and counted, because a full disk must not stop the
    /// workload.
    fn append(&mut self, lines: &[u8]) {
        let length = lines.len() as u64;
        if self.size > 0 && self.size + length > self.cap {
            self.rotate();
        }
        match self.file.write_all(lines) {
            Ok(()) => {
                self.size += length;
                if self.lost > 0 {
                    tracing::warn!(log = %self.path.display(), bytes = self.lost, "log lines were lost");
                    self.lost = 0;
                }
            }
            Err(e) => {
                if self.lost == 0 {
                    tracing::warn!(log = %self.path.display(), error = %e, "write a log");
                }
                self.lost += length;
                // Take a half-written line away, so that the next one starts a line.
                let _ = self.file.set_len(self.size);
            }
        }
    }

    fn rotate(&mut self) {
        // rename(2) replaces a link at the new place and does not follow it.
        let renewed = fs::rename(&self.path, rotated(&self.path))
            .map_err(|e| Error::io(format!("rotate log {}", self.path.display()), e))
            .and_then(|()| open(&self.path));
        match renewed {
            Ok((file, size)) => {
                self.file = file;
                self.size = size;
            }
            // Tried again with the next lines; until then the old file grows.
            Err(e) => tracing::warn!(error = %e, "rotate a log"),
        }
    }
}

/// Opens for appending, never through a link and never waiting (a FIFO in its place).
fn open(path: &Path) -> Result<(File, u64)> {
    let what = || format!("open log {}", path.display());
    let refuse = || {
        Error::new(
            Kind::Invalid,
            format!(
                "{}: it must be a regular file, not a link or a device",
                what()
            ),
        )
    };
    let file = OpenOptions::new()
        .append(true)
        .create(true)
        .mode(0o640)
        .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_NOCTTY)
        .open(path)
        .map_err(|e| match e.raw_os_error() {
            Some(libc::ELOOP | libc::ENXIO) => refuse(),
            _ => Error::io(what(), e),
        })?;
    let meta = file
        .metadata()
        .map_err(|e: io::Error| Error::io(what(), e))?;
    if !meta.is_file() {
        return Err(refuse());
    }
    Ok((file, meta.len()))
}

fn record(out: &mut Vec<u8>, at: &str, stderr: bool, full: bool, text: &[u8]) {
    out.extend_from_slice(at.as_bytes());
    out.extend_from_slice(if stderr { b" stderr " } else { b" stdout " });
    out.extend_from_slice(if full { b"F " } else { b"P " });
    out.extend_from_slice(text);
    out.push(b'\n');
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(path: &Path) -> Vec<Line> {
        let bytes = fs::read(path).unwrap();
        let text = bytes.strip_suffix(b"\n").unwrap_or(&bytes);
        text.split(|b| *b == b'\n')
            .map(|l| parse(l).unwrap())
            .collect()
    }

    fn shape(path: &Path) -> Vec<(bool, bool, usize)> {
        lines(path)
            .iter()
            .map(|l| (l.stderr, l.full, l.text.len()))
            .collect()
    }

    #[test]
    fn lines_are_cut_and_the_last_one_is_closed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("made/log");
        let log = Log::open(&path, DEFAULT_CAP).unwrap();
        let (mut out, mut err) = (log.stream(false), log.stream(true));
        out.write(b"one\n\ntw");
        err.write(b"bad \xff\n");
        out.write(b"o\nno newline");
        drop((out, err));
        let texts: Vec<Vec<u8>> = lines(&path).into_iter().map(|l| l.text).collect();
        assert_eq!(
            texts,
            [
                b"one".to_vec(),
                vec![],
                b"bad \xff".to_vec(),
                b"two".to_vec(),
                b"no newline".to_vec()
            ]
        );
        assert!(lines(&path).iter().all(|l| l.full));
    }

    #[test]
    fn long_lines_become_partial_ones_with_a_closing_full_one() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        let log = Log::open(&path, DEFAULT_CAP).unwrap();
        let mut out = log.stream(false);
        let long = vec![b'x'; 20_000];
        for part in long.chunks(777) {
            out.write(part);
        }
        drop(out);
        assert_eq!(
            shape(&path),
            [(false, false, MAX_TEXT), (false, true, 20_000 - MAX_TEXT)]
        );

        let mut out = log.stream(false);
        out.write(&vec![b'y'; MAX_TEXT]);
        out.write(b"\n");
        out.write(&vec![b'z'; 2 * MAX_TEXT + 1]);
        out.write(b"\n");
        drop(out);
        let all = shape(&path);
        assert_eq!(
            all[2..],
            [
                (false, true, MAX_TEXT),
                (false, false, MAX_TEXT),
                (false, false, MAX_TEXT),
                (false, true, 1)
            ]
        );
    }

    #[test]
    fn the_file_is_capped_and_one_older_file_is_kept() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        let log = Log::open(&path, 4096).unwrap();
        let mut out = log.stream(false);
        for i in 0..500 {
            out.write(format!("line {i}\n").as_bytes());
        }
        drop(out);
        let (older, newer) = (lines(&rotated(&path)), lines(&path));
        assert!(
            fs::metadata(&path).unwrap().len() <= 4096
                && fs::metadata(rotated(&path)).unwrap().len() <= 4096
        );
        assert_eq!(newer.last().unwrap().text, b"line 499");
        let numbers = |l: &Line| {
            String::from_utf8(l.text.clone()).unwrap()[5..]
                .parse::<i32>()
                .unwrap()
        };
        assert_eq!(numbers(older.last().unwrap()) + 1, numbers(&newer[0]));
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2);
    }

    #[test]
    fn a_link_or_a_fifo_in_the_files_place_is_refused_and_untouched() {
        let dir = tempfile::tempdir().unwrap();
        let (path, victim) = (dir.path().join("log"), dir.path().join("victim"));
        fs::write(&victim, "precious").unwrap();
        std::os::unix::fs::symlink(&victim, &path).unwrap();
        assert_eq!(
            Log::open(&path, DEFAULT_CAP).unwrap_err().kind(),
            Kind::Invalid
        );
        assert_eq!(fs::read(&victim).unwrap(), b"precious");
        fs::remove_file(&path).unwrap();
        nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
        assert_eq!(
            Log::open(&path, DEFAULT_CAP).unwrap_err().kind(),
            Kind::Invalid
        );
    }

    #[test]
    fn a_full_disk_loses_lines_and_nothing_else() {
        // A file opened for reading takes no byte, as a full disk.
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        let log = Log::open(&path, DEFAULT_CAP).unwrap();
        let good = std::mem::replace(&mut log.0.lock().unwrap().file, File::open(&path).unwrap());
        let mut out = log.stream(false);
        out.write(b"lost\n");
        assert_eq!(log.0.lock().unwrap().lost, 45);
        log.0.lock().unwrap().file = good;
        out.write(b"kept\n");
        drop(out);
        assert_eq!(lines(&path).len(), 1);
        assert_eq!(log.0.lock().unwrap().lost, 0);
    }

    #[test]
    fn only_lines_of_this_form_are_parsed() {
        let line = parse(b"2026-11-30T13:33:12.000000001Z stderr P:x a  b").unwrap();
        assert_eq!(
            (line.stderr, line.full, line.text.as_slice()),
            (true, false, b"a  b".as_slice())
        );
        assert_eq!(
            parse(b"2026-11-30T13:33:12.000000001Z stdout F")
                .unwrap()
                .text,
            b""
        );
        for bad in [
            "",
            "x",
            "2026-11-30T13:33:12.0Z stdin F x",
            "2026-11-30T13:33:12.0Z stdout Q x",
            "now stdout F x",
        ] {
            assert_eq!(parse(bad.as_bytes()), None, "{bad}");
        }
    }
}
