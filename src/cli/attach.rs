//! Following a workload in the foreground: its output, its input, our signals, its exit code.
//!
//! With a terminal it also hands on keys and the window's size, and can leave the workload running.
//!
//! Owns a directory of fifos below the pod's, removed when it is dropped, and the threads that copy. Promises that output
//! is complete before the exit code is returned, unless something the workload left behind holds its pipe. Copying is
//! done by threads, because our stdout may block for as long as its reader likes, and signals must still be passed on.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::task::Poll;
use std::thread;
use std::time::Duration;

use nix::fcntl::{Flock, FlockArg};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::stat::Mode;
use nix::unistd::mkfifo;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::oneshot;

use crate::client::{self, Client};
use crate::error::{Context, Error, Kind, Result};
use crate::proto::task_v3::shim::{CloseIORequest, KillRequest, ResizePtyRequest, WaitRequest};

use super::host::private_dir;
use super::terminal::{self, Keys, Raw, Window};
use super::{names, output};

/// Output may still be under way when the workload has ended; a process that it left behind may hold the pipe for ever.
const DRAIN_LIMIT: Duration = Duration::from_secs(10);

/// Kill and CloseIO answer at once.
const CALL_LIMIT: Duration = Duration::from_secs(10);

/// A first process of a container ignores signals it has no handler for: this many in a row mean "end it".
const IMPATIENT: u32 = 3;

/// The fifos of one process and our ends of them.
#[derive(Debug)]
pub struct Attach {
    dir: PathBuf,
    streams: Streams,
    stdin: Option<File>,
    stdout: File,
    /// None: the workload has a terminal, which is one stream.
    stderr: Option<File>,
    /// On the directory: there is one command at its other ends.
    _lock: Flock<File>,
}

/// Which streams a process is to have.
#[derive(Clone, Copy, Debug, Default)]
pub struct Streams {
    /// It is passed our standard input.
    pub stdin: bool,
    /// It has a terminal.
    pub tty: bool,
    /// It may be left running: by the keys, and when our terminal hangs up.
    pub leave: bool,
}

/// How following a process came to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Followed {
    /// It has ended, with this exit code.
    Ended(u8),
    /// It runs on, and is nobody's in the foreground: the keys were typed.
    Left,
    /// The same, because our terminal has gone.
    HungUp,
}

/// What has become of our standard input.
#[derive(Debug, PartialEq, Eq)]
enum Input {
    Ended,
    Detached,
}

impl Attach {
    /// Makes the fifos and opens our ends, so that the other side finds a peer at once.
    pub fn make(pod_dir: &Path, streams: Streams) -> Result<Self> {
        Self::locked(
            &pod_dir.join(format!("attach-{}", names::random_hex(4)?)),
            streams,
        )
    }

    /// Those of container `id`. They are called by its id, so that a command which takes up what a killed one has left is
    /// the same request, and has the streams.
    ///
    /// # Errors
    /// Exists when another command is attached to it.
    pub fn of(pod_dir: &Path, id: &str, streams: Streams) -> Result<Self> {
        Self::locked(&pod_dir.join(format!("attach-{id}")), streams)
            .map_err(|e| e.within(format!("attach to container {id}")))
    }

    fn locked(dir: &Path, streams: Streams) -> Result<Self> {
        loop {
            private_dir(dir)?;
            let what = || format!("lock {}", dir.display());
            let file = File::open(dir).context(what)?;
            let lock = match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
                Ok(lock) => lock,
                Err((_, nix::errno::Errno::EWOULDBLOCK)) => {
                    let text = "another command is; `podvisor logs` shows what it writes";
                    return Err(Error::new(Kind::Exists, text));
                }
                Err((_, e)) => return Err(Error::sys(what(), e)),
            };
            let (ours, there) = (lock.metadata().context(what)?, fs::metadata(dir));
            // Removed by whoever had it, a moment before the lock was ours?
            if there.is_ok_and(|there| (there.dev(), there.ino()) == (ours.dev(), ours.ino())) {
                let made = Self::open(dir.to_owned(), streams, lock);
                if made.is_err() {
                    let _ = fs::remove_dir_all(dir);
                }
                return made;
            }
        }
    }

    /// Fifo of the workload's input; empty when it has none.
    pub fn stdin_path(&self) -> String {
        self.stdin
            .as_ref()
            .map(|_| text(&self.dir.join("stdin")))
            .unwrap_or_default()
    }

    /// Fifo of the workload's output.
    pub fn stdout_path(&self) -> String {
        text(&self.dir.join("stdout"))
    }

    /// Fifo of the workload's errors; empty when it has a terminal.
    pub fn stderr_path(&self) -> String {
        self.stderr
            .as_ref()
            .map(|_| text(&self.dir.join("stderr")))
            .unwrap_or_default()
    }

    /// Gives the workload's terminal the size of ours, if both are there. It may have no terminal yet.
    pub async fn resize(&self, client: &Client, id: &str, exec_id: &str) {
        let Some((width, height)) = terminal::size().filter(|_| self.streams.tty) else {
            return;
        };
        let request = ResizePtyRequest {
            id: id.to_owned(),
            exec_id: exec_id.to_owned(),
            width: u32::from(width),
            height: u32::from(height),
            ..Default::default()
        };
        let context = client::context(Some(CALL_LIMIT));
        // A wrong size is no reason to end.
        let _ = client.task().resize_pty(context, &request).await;
    }

    /// Copies until the process has ended, or is left; passes signals on.
    pub async fn follow(
        mut self,
        client: &Client,
        id: &str,
        exec_id: &str,
        signals: &mut Signals,
    ) -> Result<Followed> {
        const SHARE: &str = "share a fifo";
        let takes_keys = self.streams.tty && self.streams.stdin;
        let raw = match takes_keys {
            true => Raw::enter()?,
            false => None,
        };
        let mut window = Window::watch(self.streams.tty)?;
        let out = copy(
            self.stdout.try_clone().context(|| SHARE)?,
            own(io::stdout().as_fd()),
        );
        let err = self.stderr.as_ref().map(File::try_clone).transpose();
        let err = err.context(|| SHARE)?;
        let err = err.map(|from| copy(from, own(io::stderr().as_fd())));
        let keys = (takes_keys && self.streams.leave).then(Keys::default);
        let mut input = self
            .stdin
            .take()
            .map(|fifo| copy_input(own(io::stdin().as_fd()), fifo, keys));
        let request = WaitRequest {
            id: id.to_owned(),
            exec_id: exec_id.to_owned(),
            ..Default::default()
        };
        let task = client.task();
        let wait = task.wait(client::context(None), &request);
        tokio::pin!(wait);
        // It may have changed since the workload was started.
        self.resize(client, id, exec_id).await;
        let mut asked = 0;
        let code = loop {
            tokio::select! {
                answer = &mut wait => {
                    let answer = answer.map_err(|e| client::from_ttrpc(&format!("wait for container {id}"), e))?;
                    break exit_code(answer.exit_status);
                }
                number = signals.next() => {
                    if number == libc::SIGHUP && self.streams.tty && self.streams.leave {
                        return Ok(Followed::HungUp);
                    }
                    asked += u32::from(matches!(number, libc::SIGINT | libc::SIGTERM));
                    let number = if asked >= IMPATIENT { libc::SIGKILL } else { number };
                    if let Err(e) = kill(client, id, exec_id, number).await {
                        output::complain(format!("pass signal {number} on: {e}"));
                    }
                }
                () = window.changed() => self.resize(client, id, exec_id).await,
                end = ended(&mut input) => {
                    input = None;
                    if end == Input::Detached {
                        return Ok(Followed::Left);
                    }
                    let request = CloseIORequest { id: id.to_owned(), exec_id: exec_id.to_owned(), stdin: true, ..Default::default() };
                    // It may have ended meanwhile.
                    let _ = task.close_io(client::context(Some(CALL_LIMIT)), &request).await;
                }
            }
        };
        let drained = async {
            let _ = out.await;
            if let Some(err) = err {
                let _ = err.await;
            }
        };
        // After the limit the rest is in the log.
        let _ = tokio::time::timeout(DRAIN_LIMIT, drained).await;
        drop(raw);
        Ok(Followed::Ended(code))
    }

    fn open(dir: PathBuf, streams: Streams, lock: Flock<File>) -> Result<Self> {
        let fifo = |name: &str, write: bool| {
            let path = dir.join(name);
            match mkfifo(&path, Mode::S_IRUSR | Mode::S_IWUSR) {
                // A killed command has left it, and a supervisor may have its other end.
                Err(nix::errno::Errno::EEXIST) => {}
                made => made.context(|| format!("make fifo {}", path.display()))?,
            }
            // Not blocking: a plain open waits for the other side. A writer alone would be refused (ENXIO), so it reads too.
            OpenOptions::new()
                .read(true)
                .write(write)
                .custom_flags(libc::O_NONBLOCK)
                .open(&path)
                .context(|| format!("open fifo {}", path.display()))
        };
        let wanted = |name, write, wanted: bool| wanted.then(|| fifo(name, write)).transpose();
        Ok(Self {
            stdin: wanted("stdin", true, streams.stdin)?,
            stdout: fifo("stdout", false)?,
            stderr: wanted("stderr", false, !streams.tty)?,
            streams,
            dir,
            _lock: lock,
        })
    }
}

impl Drop for Attach {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.dir);
    }
}

/// The signals that are passed on to a workload. While it exists they do not end us.
#[derive(Debug)]
pub struct Signals(Vec<(i32, Signal)>);

impl Signals {
    /// Catches them from now on.
    pub fn catch() -> Result<Self> {
        let numbers = [
            libc::SIGINT,
            libc::SIGTERM,
            libc::SIGHUP,
            libc::SIGQUIT,
            libc::SIGUSR1,
            libc::SIGUSR2,
        ];
        let caught = numbers.map(|n| signal(SignalKind::from_raw(n)).map(|s| (n, s)));
        caught
            .into_iter()
            .collect::<io::Result<Vec<_>>>()
            .map(Self)
            .context(|| "catch signals")
    }

    /// The next one's number.
    pub async fn next(&mut self) -> i32 {
        std::future::poll_fn(|cx| {
            for (number, signal) in &mut self.0 {
                if signal.poll_recv(cx).is_ready() {
                    return Poll::Ready(*number);
                }
            }
            Poll::Pending
        })
        .await
    }

    /// The next one that means "end": the user signals are for workloads only.
    pub async fn next_ending(&mut self) -> u8 {
        loop {
            let number = self.next().await;
            if !matches!(number, libc::SIGUSR1 | libc::SIGUSR2) {
                return u8::try_from(number).unwrap_or_default();
            }
        }
    }
}

/// An exit status as a process can pass it on.
pub fn exit_code(status: u32) -> u8 {
    u8::try_from(status).unwrap_or(u8::MAX)
}

/// Signals a process of a container; one that has gone meanwhile is no error.
pub async fn kill(client: &Client, id: &str, exec_id: &str, number: i32) -> Result<()> {
    let request = KillRequest {
        id: id.to_owned(),
        exec_id: exec_id.to_owned(),
        signal: u32::try_from(number).unwrap_or_default(),
        ..Default::default()
    };
    let answer = client
        .task()
        .kill(client::context(Some(CALL_LIMIT)), &request)
        .await;
    match answer.map_err(|e| client::from_ttrpc("signal the container", e)) {
        Err(e) if e.is_gone() => Ok(()),
        other => other.map(drop),
    }
}

async fn ended(input: &mut Option<oneshot::Receiver<Input>>) -> Input {
    match input {
        Some(done) => done.await.unwrap_or(Input::Ended),
        None => std::future::pending().await,
    }
}

/// A descriptor of ours for good, `None` when the stream is closed.
fn own(stream: BorrowedFd<'_>) -> Option<File> {
    stream.try_clone_to_owned().ok().map(File::from)
}

/// Copies a fifo until its last writer has gone. Goes on reading when nobody reads us: the workload must not stall.
fn copy(mut from: File, mut to: Option<File>) -> oneshot::Receiver<()> {
    let (done, receiver) = oneshot::channel();
    thread::spawn(move || {
        let mut buffer = vec![0; 64 * 1024];
        while let Ok(n @ 1..) = read(&mut from, &mut buffer) {
            if to
                .as_mut()
                .is_some_and(|to| write(to, &buffer[..n]).is_err())
            {
                to = None;
            }
        }
        let _ = done.send(());
    });
    receiver
}

/// Copies our input until its end, or until the keys that leave the workload; the fifo's writer is closed then.
fn copy_input(
    from: Option<File>,
    mut to: File,
    mut keys: Option<Keys>,
) -> oneshot::Receiver<Input> {
    let (done, receiver) = oneshot::channel();
    thread::spawn(move || {
        let mut how = Input::Ended;
        if let Some(mut from) = from {
            let mut buffer = vec![0; 64 * 1024];
            while let Ok(n @ 1..) = read(&mut from, &mut buffer) {
                let (typed, leave) = match &mut keys {
                    Some(keys) => keys.pass(&buffer[..n]),
                    None => (buffer[..n].to_vec(), false),
                };
                if leave {
                    how = Input::Detached;
                }
                if write(&mut to, &typed).is_err() || leave {
                    break;
                }
            }
        }
        drop(to);
        let _ = done.send(how);
    });
    receiver
}

/// One read that waits, whether or not the descriptor does.
fn read(from: &mut File, buffer: &mut [u8]) -> io::Result<usize> {
    loop {
        ready(from, PollFlags::POLLIN)?;
        match from.read(buffer) {
            Err(e)
                if matches!(
                    e.kind(),
                    io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
                ) => {}
            other => return other,
        }
    }
}

fn write(to: &mut File, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        match to.write(bytes) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(n) => bytes = &bytes[n..],
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => ready(to, PollFlags::POLLOUT)?,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

/// A fifo that nobody has opened for writing yet is not ready, and not at its end either.
fn ready(file: &File, what: PollFlags) -> io::Result<()> {
    loop {
        match poll(&mut [PollFd::new(file.as_fd(), what)], PollTimeout::NONE) {
            Err(nix::errno::Errno::EINTR) => {}
            other => return other.map(drop).map_err(io::Error::from),
        }
    }
}

fn text(path: &Path) -> String {
    path.display().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    const STREAMS: Streams = Streams {
        stdin: true,
        tty: false,
        leave: false,
    };

    #[test]
    fn a_fifo_nobody_has_written_to_is_not_at_its_end() {
        let dir = tempfile::tempdir().unwrap();
        let attach = Attach::make(dir.path(), STREAMS).unwrap();
        let mode = fs::metadata(&attach.dir).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o700);
        let to = dir.path().join("copy");
        let mut done = copy(
            attach.stdout.try_clone().unwrap(),
            Some(File::create(&to).unwrap()),
        );
        assert!(done.try_recv().is_err());
        let mut writer = OpenOptions::new()
            .write(true)
            .open(attach.stdout_path())
            .unwrap();
        writer.write_all(b"late").unwrap();
        drop(writer);
        done.blocking_recv().unwrap();
        assert_eq!(fs::read(&to).unwrap(), b"late");
        let made = attach.dir.clone();
        drop(attach);
        assert!(!made.exists());
    }

    #[test]
    fn one_command_at_a_time_has_a_containers_streams_and_takes_up_what_was_left() {
        let dir = tempfile::tempdir().unwrap();
        let first = Attach::of(dir.path(), "c", STREAMS).unwrap();
        let refused = Attach::of(dir.path(), "c", STREAMS).unwrap_err();
        assert_eq!(refused.kind(), Kind::Exists, "{refused}");
        Attach::of(dir.path(), "d", STREAMS).unwrap();
        let path = first.stdout_path();
        drop(first);
        // What a killed command leaves: no lock, fifos, a supervisor at their other end.
        fs::create_dir(dir.path().join("attach-c")).unwrap();
        mkfifo(Path::new(&path), Mode::S_IRWXU).unwrap();
        let _read = OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_NONBLOCK)
            .open(&path)
            .unwrap();
        let mut writer = OpenOptions::new().write(true).open(&path).unwrap();
        let second = Attach::of(dir.path(), "c", STREAMS).unwrap();
        writer.write_all(b"text").unwrap();
        drop(writer);
        let to = dir.path().join("copy");
        let from = second.stdout.try_clone().unwrap();
        copy(from, Some(File::create(&to).unwrap()))
            .blocking_recv()
            .unwrap();
        assert_eq!(fs::read(&to).unwrap(), b"text");
    }

    #[test]
    fn the_end_of_the_last_writer_ends_the_copy() {
        let dir = tempfile::tempdir().unwrap();
        let attach = Attach::make(dir.path(), Streams::default()).unwrap();
        assert_eq!(attach.stdin_path(), "");
        // Written and closed before anybody reads: a workload may be that quick.
        let mut writer = OpenOptions::new()
            .write(true)
            .open(attach.stderr_path())
            .unwrap();
        writer.write_all(b"text").unwrap();
        drop(writer);
        let to = dir.path().join("copy");
        let done = copy(
            attach.stderr.as_ref().unwrap().try_clone().unwrap(),
            Some(File::create(&to).unwrap()),
        );
        done.blocking_recv().unwrap();
        assert_eq!(fs::read(&to).unwrap(), b"text");
    }

    #[test]
    fn statuses_fit_an_exit_code() {
        assert_eq!(
            (exit_code(0), exit_code(137), exit_code(4_000)),
            (0, 137, 255)
        );
    }
}
