//! The built executables, and running any program with a bound.

use std::io::Read;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc::{Receiver, sync_channel};
use std::time::{Duration, Instant};

/// The command.
pub const PODVISOR: &str = env!("CARGO_BIN_EXE_podvisor");
/// The shim.
pub const SHIM: &str = env!("CARGO_BIN_EXE_containerd-shim-podvisor-v1");

/// The directory a daemon has to have in `PATH` to find the shim.
pub fn dir() -> &'static Path {
    Path::new(SHIM).parent().unwrap()
}

/// Pieces of output that are kept: nobody takes them before the program has ended, and one that is not read does not end.
const CHUNKS: usize = 1 << 16;

/// Runs `podvisor` for at most two minutes.
pub fn podvisor(args: &[&str]) -> Output {
    run(Command::new(PODVISOR).args(args), Duration::from_secs(120))
}

/// Runs the shim's executable with these arguments for at most a minute.
pub fn shim(args: &[&str]) -> Output {
    run(Command::new(SHIM).args(args), Duration::from_secs(60))
}

/// What a program did.
#[derive(Debug)]
pub struct Output {
    /// Program and arguments, for messages.
    pub line: String,
    /// Exit code, `None` when it died by a signal.
    pub code: Option<i32>,
    /// The signal it died by.
    pub signal: Option<i32>,
    pub stdout: String,
    pub stderr: String,
    pub took: Duration,
    /// Something that outlived it still held its stdout or stderr a second after it ended.
    pub held_open: bool,
}

impl Output {
    /// Panics, with everything it printed, unless it exited 0.
    #[track_caller]
    pub fn ok(self) -> Self {
        self.code_is(0)
    }

    /// Panics, with everything it printed, unless it exited with this code.
    #[track_caller]
    pub fn code_is(self, code: i32) -> Self {
        assert_eq!(self.code, Some(code), "{self:#?}");
        self
    }

    /// Panics unless it exited with another code than 0 and its stderr has this text.
    #[track_caller]
    pub fn fails_with(self, text: &str) -> Self {
        assert!(
            self.code.is_some_and(|code| code != 0) && self.stderr.contains(text),
            "wanted `{text}` in {self:#?}"
        );
        self
    }
}

/// Runs a program to its end, stdin empty unless the command says otherwise; kills it and panics after `bound`.
#[track_caller]
pub fn run(command: &mut Command, bound: Duration) -> Output {
    run_with(command, None, bound)
}

/// [`run`] with bytes on stdin.
#[track_caller]
pub fn run_with(command: &mut Command, input: Option<&[u8]>, bound: Duration) -> Output {
    let line = format!("{command:?}");
    command.stdin(if input.is_some() {
        Stdio::piped()
    } else {
        Stdio::null()
    });
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let begin = Instant::now();
    let mut child = command
        .spawn()
        .unwrap_or_else(|error| panic!("cannot run {line}: {error}"));
    if let (Some(input), Some(mut stdin)) = (input, child.stdin.take()) {
        let input = input.to_vec();
        std::thread::spawn(move || std::io::Write::write_all(&mut stdin, &input));
    }
    let stdout = reader(child.stdout.take().unwrap());
    let stderr = reader(child.stderr.take().unwrap());
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        if begin.elapsed() > bound {
            child.kill().unwrap();
            child.wait().unwrap();
            let (out, err) = (collect(&stdout).0, collect(&stderr).0);
            panic!("not ended within {bound:?}, killed: {line}\nstdout: {out}\nstderr: {err}");
        }
        std::thread::sleep(Duration::from_millis(2));
    };
    let took = begin.elapsed();
    let ((stdout, out_open), (stderr, err_open)) = (collect(&stdout), collect(&stderr));
    let held_open = out_open || err_open;
    Output {
        line,
        code: status.code(),
        signal: status.signal(),
        stdout,
        stderr,
        took,
        held_open,
    }
}

/// Reads on a thread of its own: a daemon that keeps the pipe must not keep the test.
fn reader(mut from: impl Read + Send + 'static) -> Receiver<Vec<u8>> {
    let (send, receive) = sync_channel(CHUNKS);
    std::thread::spawn(move || {
        let mut buffer = vec![0; 65536];
        while let Ok(n @ 1..) = from.read(&mut buffer) {
            if send.send(buffer[..n].to_vec()).is_err() {
                return;
            }
        }
    });
    receive
}

/// What came so far or until the end, and whether the other end is still open after a second.
fn collect(from: &Receiver<Vec<u8>>) -> (String, bool) {
    let end = Instant::now() + Duration::from_secs(1);
    let mut all = Vec::new();
    loop {
        match from.recv_timeout(end.saturating_duration_since(Instant::now())) {
            Ok(bytes) => all.extend(bytes),
            Err(reason) => {
                let open = reason == std::sync::mpsc::RecvTimeoutError::Timeout;
                return (String::from_utf8_lossy(&all).into_owned(), open);
            }
        }
    }
}

/// `dir` in front of the usual search path.
pub fn path_with(dirs: &[&Path]) -> String {
    let mut all: Vec<PathBuf> = dirs.iter().map(|dir| dir.to_path_buf()).collect();
    all.extend(std::env::split_paths(
        &std::env::var_os("PATH").unwrap_or_default(),
    ));
    all.extend(["/usr/sbin", "/sbin"].map(PathBuf::from));
    std::env::join_paths(all).unwrap().into_string().unwrap()
}
