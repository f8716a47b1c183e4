//! Opens what the strings of a request say.

use std::fs::{self, File, OpenOptions};
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use nix::fcntl::OFlag;
use nix::unistd::{Gid, Uid, fchown, pipe2};
use tokio::net::unix::pipe::{Receiver, Sender};

use super::console::Console;
use super::copy::{Attach, Into, Sink, Source};
use super::fifo::{self, Opened};
use super::log::Log;
use super::logger::Logger;
use super::relay;
use super::target::{LogTarget, Target};
use super::terminal::Terminal;
use super::{Hold, Request, State, Wanted};
use crate::error::{Context, Error, Kind, Result};
use crate::process::Reaper;

/// See [`super::Io::open`].
pub(super) async fn open(request: &Request, reaper: &Reaper) -> Result<State> {
    let mut state = State::default();
    if request.terminal {
        let input = open_terminal_input(request, &mut state)?;
        let output = open_terminal_output(request, &mut state, reaper).await?;
        state.wanted = Some(Wanted {
            console: Console::listen(&request.console_dir)?,
            input,
            output,
        });
        state.child = Some([null(false)?, null(true)?, null(true)?]);
        return Ok(state);
    }
    let stdin = open_stdin(request, &mut state)?;
    let [stdout, stderr] = open_outputs(request, &mut state, reaper).await?;
    state.child = Some([stdin, stdout, stderr]);
    Ok(state)
}

fn open_stdin(request: &Request, state: &mut State) -> Result<OwnedFd> {
    let (source, hold) = match open_far_stdin(request)? {
        Far::Nothing => return null(false),
        Far::At(Opened::Plain(fd)) => return Ok(fd),
        Far::At(Opened::Fifo { end, hold }) if request.direct => {
            state.stdin_hold = Some(Hold::Fifo(hold));
            return given(end, request);
        }
        Far::At(Opened::Fifo { end, hold }) => (Source::Pipe(receiver(end)?), Hold::Fifo(hold)),
        Far::Stream(end, hold) => (Source::Stream(end), Hold::Stream(hold)),
    };
    state.stdin_hold = Some(hold);
    let (read, write) = new_pipe()?;
    own(&read, request)?;
    state.input = Some((source, Into::Pipe(sender(write)?)));
    Ok(read)
}

/// Where an input comes from.
enum Far {
    /// Nothing is to be read.
    Nothing,
    At(Opened),
    Stream(relay::End, relay::Hold),
}

fn open_far_stdin(request: &Request) -> Result<Far> {
    match Target::parse("stdin", &request.stdin)? {
        Target::Null => Ok(Far::Nothing),
        Target::Path(path) => fifo::open_input("stdin", &path).map(Far::At),
        Target::Stream(name) => {
            let (end, hold) = request.streams.input(&name)?;
            Ok(Far::Stream(end, hold))
        }
        Target::File(_) | Target::Log(_) | Target::Program(_) => {
            let text = format!(
                "connect stdin to {:?}: give the path of a FIFO or a file",
                request.stdin
            );
            Err(Error::new(Kind::Invalid, text))
        }
    }
}

fn open_terminal_input(request: &Request, state: &mut State) -> Result<Option<Source>> {
    Ok(match open_far_stdin(request)? {
        Far::Nothing => None,
        Far::At(Opened::Plain(fd)) => Some(watched(fd)?),
        Far::At(Opened::Fifo { end, hold }) => {
            state.stdin_hold = Some(Hold::Fifo(hold));
            Some(Source::Pipe(receiver(end)?))
        }
        Far::Stream(end, hold) => {
            state.stdin_hold = Some(Hold::Stream(hold));
            Some(Source::Stream(end))
        }
    })
}

/// A device that can keep us waiting (a terminal) is waited for; what cannot be watched gives its bytes at once.
fn watched(fd: OwnedFd) -> Result<Source> {
    let copy = fd.try_clone().context(|| "duplicate a descriptor")?;
    match Terminal::new(copy) {
        Ok(device) => {
            fifo::set_non_blocking(&fd).context(|| "make a device non-blocking")?;
            Ok(Source::Terminal(device))
        }
        Err(_) => Ok(Source::File(File::from(fd))),
    }
}

async fn open_terminal_output(
    request: &Request,
    state: &mut State,
    reaper: &Reaper,
) -> Result<Option<Sink>> {
    Ok(match Target::parse("stdout", &request.stdout)? {
        Target::Null => None,
        Target::File(path) => Some(Sink::File(File::from(make_file("stdout", &path)?))),
        Target::Path(path) => match fifo::open_output("stdout", &path)? {
            Opened::Plain(fd) => Some(Sink::File(File::from(fd))),
            Opened::Fifo { end, hold } => {
                state.holds.push(hold);
                Some(Sink::Pipe(sender(end)?))
            }
        },
        Target::Log(target) => Some(log_sink("stdout", target)?),
        Target::Stream(name) => Some(Sink::Stream(request.streams.output(&name)?)),
        Target::Program(program) => {
            // Its stderr ends at once: the terminal has only one stream.
            let (logger, [stdout, _]) = Logger::start(&program, request, reaper).await?;
            state.logger = Some(logger);
            Some(Sink::Pipe(sender(stdout)?))
        }
    })
}

async fn open_outputs(
    request: &Request,
    state: &mut State,
    reaper: &Reaper,
) -> Result<[OwnedFd; 2]> {
    match Target::parse("stdout", &request.stdout)? {
        // One file for both streams, whatever stderr says: so do clients that give such a target expect it.
        Target::File(path) => {
            let file = make_file("stdout", &path)?;
            let other = file.try_clone().context(|| "duplicate a descriptor")?;
            Ok([file, other])
        }
        Target::Log(target) => {
            let log = Log::open(&target.path, target.cap)?;
            let stdout = Sink::Log(log.stream(false), target.attach_stdout.map(Attach::new));
            let stderr = Sink::Log(log.stream(true), target.attach_stderr.map(Attach::new));
            Ok([
                piped(stdout, request, state)?,
                piped(stderr, request, state)?,
            ])
        }
        // One program for both.
        Target::Program(program) => {
            let (logger, ends) = Logger::start(&program, request, reaper).await?;
            state.logger = Some(logger);
            Ok(ends)
        }
        stdout => {
            let stderr = Target::parse("stderr", &request.stderr)?;
            Ok([
                open_output("stdout", stdout, request, state)?,
                open_output("stderr", stderr, request, state)?,
            ])
        }
    }
}

fn open_output(
    stream: &str,
    target: Target,
    request: &Request,
    state: &mut State,
) -> Result<OwnedFd> {
    match target {
        Target::Null => null(true),
        Target::File(path) => make_file(stream, &path),
        Target::Path(path) => match fifo::open_output(stream, &path)? {
            Opened::Plain(fd) => Ok(fd),
            Opened::Fifo { end, hold } => {
                state.holds.push(hold);
                if request.direct {
                    given(end, request)
                } else {
                    piped(Sink::Pipe(sender(end)?), request, state)
                }
            }
        },
        Target::Log(target) => piped(log_sink(stream, target)?, request, state),
        Target::Stream(name) => piped(Sink::Stream(request.streams.output(&name)?), request, state),
        Target::Program(_) => {
            let text = format!(
                "connect {stream} to a logging program: stdout has to name it, and it reads both"
            );
            Err(Error::new(Kind::Invalid, text))
        }
    }
}

fn log_sink(stream: &str, target: LogTarget) -> Result<Sink> {
    let stderr = stream == "stderr";
    let attach = if stderr {
        target.attach_stderr
    } else {
        target.attach_stdout
    };
    let lines = Log::open(&target.path, target.cap)?.stream(stderr);
    Ok(Sink::Log(lines, attach.map(Attach::new)))
}

/// A pipe whose read end is copied to `sink`; its write end is the process'.
fn piped(sink: Sink, request: &Request, state: &mut State) -> Result<OwnedFd> {
    let (read, write) = new_pipe()?;
    own(&write, request)?;
    state.outputs.push((Source::Pipe(receiver(read)?), sink));
    Ok(write)
}

/// A FIFO's end, made fit for the process itself.
fn given(end: OwnedFd, request: &Request) -> Result<OwnedFd> {
    fifo::set_blocking(&end).context(|| "make a FIFO blocking")?;
    own(&end, request)?;
    Ok(end)
}

/// Gives it to the workload's user, who could not open `/dev/stdout` again otherwise. 0 leaves the owner alone.
pub(super) fn own(fd: &OwnedFd, request: &Request) -> Result<()> {
    if request.uid == 0 && request.gid == 0 {
        return Ok(());
    }
    let (uid, gid) = (Uid::from_raw(request.uid), Gid::from_raw(request.gid));
    fchown(fd, Some(uid), Some(gid)).context(|| format!("give a pipe to user {uid}"))
}

fn make_file(stream: &str, path: &Path) -> Result<OwnedFd> {
    let what = || format!("open {stream} file {}", path.display());
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent).context(what)?;
    }
    let mut options = OpenOptions::new();
    options
        .append(true)
        .create(true)
        .mode(0o644)
        .custom_flags(libc::O_NOCTTY | libc::O_NONBLOCK);
    // O_NONBLOCK: a FIFO without reader in its place is an error and no wait.
    let fd: OwnedFd = options.open(path).context(what)?.into();
    fifo::set_blocking(&fd).context(what)?;
    Ok(fd)
}

fn null(write: bool) -> Result<OwnedFd> {
    let file = OpenOptions::new()
        .read(!write)
        .write(write)
        .open("/dev/null");
    file.map(OwnedFd::from).context(|| "open /dev/null")
}

pub(super) fn new_pipe() -> Result<(OwnedFd, OwnedFd)> {
    pipe2(OFlag::O_CLOEXEC).context(|| "make a pipe")
}

pub(super) fn receiver(fd: OwnedFd) -> Result<Receiver> {
    Receiver::from_owned_fd(fd).context(|| "watch a pipe for reading")
}

pub(super) fn sender(fd: OwnedFd) -> Result<Sender> {
    Sender::from_owned_fd(fd).context(|| "watch a pipe for writing")
}
