//! What the strings of a request mean. Pure.
//!
//! Promises that every string is either understood or refused with the part that was not.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;

use super::log::DEFAULT_CAP;
use crate::error::{Error, Kind, Result};

/// Longest name of a stream, bytes.
const NAME_MAX: usize = 1024;

/// Where one stream goes to, or comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Target {
    /// Nothing: `/dev/null`.
    Null,
    /// What is at this path decides: a FIFO, a regular file, a device. It must exist.
    Path(PathBuf),
    /// A regular file, made when missing; stdout and stderr share it.
    File(PathBuf),
    /// Log lines; stdout and stderr share it.
    Log(LogTarget),
    /// A logging program; it reads stdout and stderr.
    Program(ProgramTarget),
    /// A stream of this name, for which a client comes to our socket.
    Stream(String),
}

/// `binary:///path?key=value`, `binary-v2:///path?key=value`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ProgramTarget {
    pub path: PathBuf,
    /// Each key and its value, in the order of the query.
    pub args: Vec<OsString>,
    /// It has to say that it is ready (`binary-v2`): closing its pipe is not enough.
    pub must_say_ready: bool,
}

/// `podvisor-log:///path?attach-stdout=/fifo&attach-stderr=/fifo&max-bytes=N`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct LogTarget {
    pub path: PathBuf,
    /// FIFOs that get the bytes as they are while somebody reads there.
    pub attach_stdout: Option<PathBuf>,
    pub attach_stderr: Option<PathBuf>,
    /// Size at which the file is rotated, bytes.
    pub cap: u64,
}

impl Target {
    /// Reads one string of a request. `stream` is its name, for the error.
    pub(super) fn parse(stream: &str, text: &str) -> Result<Self> {
        if text.is_empty() {
            return Ok(Self::Null);
        }
        if text.contains(['\0', '\n']) {
            return Err(bad(stream, text, "it holds a control character"));
        }
        let Some((scheme, rest)) = text.split_once("://") else {
            if !text.starts_with('/') {
                return Err(bad(stream, text, "give an absolute path"));
            }
            return Ok(Self::Path(text.into()));
        };
        match scheme {
            "fifo" => Ok(Self::Path(path(stream, text, rest)?)),
            "file" => Ok(Self::File(path(
                stream,
                text,
                rest.split('?').next().unwrap_or_default(),
            )?)),
            "podvisor-log" => log(stream, text, rest).map(Self::Log),
            "binary" | "binary-v2" => program(stream, text, rest, scheme).map(Self::Program),
            "ttrpc+unix" => streaming(stream, text, rest).map(Self::Stream),
            _ if is_socket(scheme) => Err(unsupported(
                stream,
                scheme,
                "the streams of this supervisor are had from its own socket, use ttrpc+unix",
            )),
            _ => Err(bad(
                stream,
                text,
                "unknown STDIO scheme, use fifo, file, binary, binary-v2, ttrpc+unix or podvisor-log",
            )),
        }
    }
}

fn log(stream: &str, text: &str, rest: &str) -> Result<LogTarget> {
    let (place, query) = rest.split_once('?').unwrap_or((rest, ""));
    let mut target = LogTarget {
        path: path(stream, text, place)?,
        attach_stdout: None,
        attach_stderr: None,
        cap: DEFAULT_CAP,
    };
    for pair in query.split('&').filter(|p| !p.is_empty()) {
        let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
        match key {
            "attach-stdout" => target.attach_stdout = Some(path(stream, text, value)?),
            "attach-stderr" => target.attach_stderr = Some(path(stream, text, value)?),
            "max-bytes" => {
                let cap = value.parse().ok().filter(|n| (4096..=1 << 40).contains(n));
                target.cap =
                    cap.ok_or_else(|| bad(stream, text, "give max-bytes as a number from 4096"))?;
            }
            _ => {
                return Err(bad(
                    stream,
                    text,
                    &format!("{key:?} is no key of podvisor-log"),
                ));
            }
        }
    }
    Ok(target)
}

/// `PROTOCOL+SOCKET`, as daemons write the address of a sandbox.
fn is_socket(scheme: &str) -> bool {
    let known = |(protocol, socket): (&str, &str)| {
        ["ttrpc", "grpc"].contains(&protocol)
            && ["unix", "vsock", "hvsock", "tcp"].contains(&socket)
    };
    scheme.split_once('+').is_some_and(known)
}

/// The name in `/path/of/our/socket?streaming_id=NAME`. The path is not compared with ours: the daemon wrote down what we
/// have told it, and the socket may have been reached by another way.
fn streaming(stream: &str, text: &str, rest: &str) -> Result<String> {
    let (place, query) = rest.split_once('?').unwrap_or((rest, ""));
    path(stream, text, place)?;
    let name = query
        .split('&')
        .find_map(|pair| pair.strip_prefix("streaming_id="));
    let name = decode(stream, text, &name.unwrap_or_default().replace('+', " "))?;
    match String::from_utf8(name) {
        Ok(name) if !name.is_empty() && name.len() <= NAME_MAX => Ok(name),
        _ => Err(bad(
            stream,
            text,
            "give streaming_id as a name of 1 to 1024 bytes",
        )),
    }
}

/// The first value of a key counts, as containerd reads it; a key without value gets an empty one.
fn program(stream: &str, text: &str, rest: &str, scheme: &str) -> Result<ProgramTarget> {
    let (place, query) = rest.split_once('?').unwrap_or((rest, ""));
    let mut seen: Vec<OsString> = Vec::new();
    let mut args = Vec::new();
    for pair in query.split('&').filter(|p| !p.is_empty()) {
        let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
        let word = |encoded: &str| decode(stream, text, &encoded.replace('+', " "));
        let key = OsString::from_vec(word(key)?);
        if seen.contains(&key) {
            continue;
        }
        seen.push(key.clone());
        args.extend([key, OsString::from_vec(word(value)?)]);
    }
    Ok(ProgramTarget {
        path: path(stream, text, place)?,
        args,
        must_say_ready: scheme == "binary-v2",
    })
}

/// An absolute path, %XX decoded as in any URL.
fn path(stream: &str, text: &str, encoded: &str) -> Result<PathBuf> {
    let out = decode(stream, text, encoded)?;
    if out.first() != Some(&b'/') {
        return Err(bad(stream, text, "give an absolute path after the scheme"));
    }
    Ok(OsString::from_vec(out).into())
}

fn decode(stream: &str, text: &str, encoded: &str) -> Result<Vec<u8>> {
    let mut out = Vec::with_capacity(encoded.len());
    let mut rest = encoded.as_bytes();
    while let Some((&first, tail)) = rest.split_first() {
        rest = tail;
        if first != b'%' {
            out.push(first);
            continue;
        }
        let byte = tail
            .get(..2)
            .and_then(|hex| std::str::from_utf8(hex).ok())
            .and_then(|hex| u8::from_str_radix(hex, 16).ok());
        let byte = byte
            .filter(|b| *b != 0)
            .ok_or_else(|| bad(stream, text, "'%' must be followed by two hex digits"))?;
        out.push(byte);
        rest = &tail[2..];
    }
    Ok(out)
}

fn bad(stream: &str, text: &str, why: &str) -> Error {
    let shown: String = text.chars().take(200).collect();
    Error::new(
        Kind::Invalid,
        format!("connect {stream} to {shown:?}: {why}"),
    )
}

fn unsupported(stream: &str, scheme: &str, why: &str) -> Error {
    Error::new(
        Kind::Unsupported,
        format!("connect {stream} to {scheme}://: {why}"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Target {
        Target::parse("stdout", text).unwrap()
    }

    #[test]
    fn every_form_is_understood() {
        assert_eq!(parse(""), Target::Null);
        assert_eq!(parse("/run/f:1"), Target::Path("/run/f:1".into()));
        assert_eq!(parse("fifo:///run/a%20b"), Target::Path("/run/a b".into()));
        assert_eq!(
            parse("file:///var/log/x?ignored=1"),
            Target::File("/var/log/x".into())
        );
        assert_eq!(
            parse("ttrpc+unix:///run/s/0a?streaming_id=c%201-stdout"),
            Target::Stream("c 1-stdout".into())
        );
        let log = LogTarget {
            path: "/l".into(),
            attach_stdout: None,
            attach_stderr: None,
            cap: DEFAULT_CAP,
        };
        assert_eq!(parse("podvisor-log:///l"), Target::Log(log.clone()));
        let attached = LogTarget {
            attach_stdout: Some("/o&1".into()),
            attach_stderr: Some("/e".into()),
            cap: 4096,
            ..log
        };
        let text = "podvisor-log:///l?attach-stdout=/o%261&attach-stderr=/e&max-bytes=4096";
        assert_eq!(parse(text), Target::Log(attached));
    }

    #[test]
    fn a_logging_program_gets_each_key_and_value_once() {
        let program = |text: &str| match parse(text) {
            Target::Program(program) => program,
            other => panic!("{other:?}"),
        };
        let first = program("binary:///bin/log%20it?a=b+c&d&a=x&e=%2Ff");
        assert_eq!(first.path, PathBuf::from("/bin/log it"));
        assert_eq!(first.args, ["a", "b c", "d", "", "e", "/f"]);
        assert!(!first.must_say_ready);
        let second = program("binary-v2:///l");
        assert!(second.must_say_ready && second.args.is_empty());
    }

    #[test]
    fn everything_else_is_refused_with_the_reason() {
        for (text, kind, part) in [
            ("relative", Kind::Invalid, "absolute path"),
            ("http://x/", Kind::Invalid, "unknown STDIO scheme"),
            ("://", Kind::Invalid, "unknown STDIO scheme"),
            ("fifo://relative", Kind::Invalid, "absolute path"),
            ("file://", Kind::Invalid, "absolute path"),
            ("file:///a%", Kind::Invalid, "hex digits"),
            ("file:///a%zz", Kind::Invalid, "hex digits"),
            ("file:///a%00", Kind::Invalid, "hex digits"),
            ("file:///a%é", Kind::Invalid, "hex digits"),
            ("/a\nb", Kind::Invalid, "control character"),
            (
                "podvisor-log:///l?rotate=1",
                Kind::Invalid,
                "\"rotate\" is no key",
            ),
            ("podvisor-log:///l?max-bytes=1", Kind::Invalid, "max-bytes"),
            (
                "podvisor-log:///l?attach-stdout=x",
                Kind::Invalid,
                "absolute path",
            ),
            ("binary://logger?a=b", Kind::Invalid, "absolute path"),
            ("binary:///bin/x?a=%0", Kind::Invalid, "hex digits"),
            ("ttrpc+unix:///s", Kind::Invalid, "streaming_id"),
            ("ttrpc+unix:///s?stream_id=x", Kind::Invalid, "streaming_id"),
            (
                "ttrpc+unix://s?streaming_id=x",
                Kind::Invalid,
                "absolute path",
            ),
            (
                "grpc+unix:///s?streaming_id=x",
                Kind::Unsupported,
                "ttrpc+unix",
            ),
            (
                "ttrpc+vsock://3:4?streaming_id=x",
                Kind::Unsupported,
                "ttrpc+unix",
            ),
        ] {
            let error = Target::parse("stderr", text).unwrap_err();
            assert_eq!(error.kind(), kind, "{text:?}");
            assert!(error.to_string().contains(part), "{text:?}: {error}");
        }
    }
}
