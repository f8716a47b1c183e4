//! Streams of real shells over real FIFOs.

use super::*;
use crate::process::Child;
use std::fs::{self, File, OpenOptions};
use std::io::{Read, Write};
use std::path::PathBuf;
use std::process::Command;
use std::thread;

use nix::sys::stat::Mode;

const LIMIT: Duration = Duration::from_secs(20);

/// 2 MB of text that tells where a piece is missing, without a newline at the end.
const TWO_MB: &str =
    "i=0; while [ $i -lt 2000 ]; do printf '%06d%994s' $i x; i=$((i+1)); done; printf END";

struct Dir(tempfile::TempDir);

impl Dir {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn fifo(&self, name: &str) -> String {
        nix::unistd::mkfifo(&self.path(name), Mode::S_IRWXU).unwrap();
        self.text(name)
    }

    fn text(&self, name: &str) -> String {
        self.path(name).to_str().unwrap().to_owned()
    }
}

fn request(stdin: &str, stdout: &str, stderr: &str, direct: bool) -> Request {
    Request {
        stdin: stdin.into(),
        stdout: stdout.into(),
        stderr: stderr.into(),
        direct,
        ..Request::default()
    }
}

async fn open_io(request: &Request) -> Result<Io> {
    Io::open(request, &Reaper::start().unwrap()).await
}

fn spawn(io: &mut Io, script: &str) -> Child {
    let [stdin, stdout, stderr] = io.take_child_stdio().unwrap();
    let mut command = Command::new("sh");
    command
        .args(["-c", script])
        .env("PATH", "/usr/bin:/bin")
        .stdin(stdin)
        .stdout(stdout)
        .stderr(stderr);
    // There is one caller of wait in a process.
    let child = Reaper::start().unwrap().spawn(command).unwrap();
    io.start();
    child
}

/// Reads a FIFO to its end, on a thread as a client would.
fn reader(path: &str) -> thread::JoinHandle<Vec<u8>> {
    let path = path.to_owned();
    thread::spawn(move || {
        let mut all = Vec::new();
        File::open(path).unwrap().read_to_end(&mut all).unwrap();
        all
    })
}

/// The same, once that thread sleeps in open(2): the FIFO has a reader and no writer.
async fn waiting_reader(path: &str) -> thread::JoinHandle<Vec<u8>> {
    let path = path.to_owned();
    let (tell, told) = std::sync::mpsc::sync_channel(1);
    let reader = thread::spawn(move || {
        tell.send(nix::unistd::gettid()).unwrap();
        drop(tell);
        let mut all = Vec::new();
        File::open(path).unwrap().read_to_end(&mut all).unwrap();
        all
    });
    let stat = format!("/proc/self/task/{}/stat", told.recv().unwrap());
    until(|| fs::read_to_string(&stat).is_ok_and(|s| s.contains(") S "))).await;
    reader
}

/// Waits for `thread` while the copies run.
async fn joined<T>(thread: thread::JoinHandle<T>) -> T {
    until(|| thread.is_finished()).await;
    thread.join().unwrap()
}

async fn ended(child: &Child) -> u32 {
    let exit = tokio::time::timeout(LIMIT, child.wait()).await;
    exit.expect("an end").code
}

async fn until(mut done: impl FnMut() -> bool) {
    let start = tokio::time::Instant::now();
    while !done() {
        assert!(start.elapsed() < LIMIT, "nothing happened within {LIMIT:?}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

fn expected() -> Vec<u8> {
    let mut all = String::new();
    for i in 0..2000 {
        all.push_str(&format!("{i:06}{:>994}", "x"));
    }
    all.push_str("END");
    all.into_bytes()
}

#[tokio::test]
async fn two_megabytes_without_newline_arrive_whole() {
    for direct in [false, true] {
        let dir = Dir::new();
        let out = dir.fifo("out");
        let mut io = open_io(&request("", &out, "", direct)).await.unwrap();
        let reader = reader(&out);
        let child = spawn(&mut io, TWO_MB);
        assert_eq!(ended(&child).await, 0);
        assert!(io.drain(LIMIT).await);
        assert!(joined(reader).await == expected(), "direct {direct}");
    }
}

#[tokio::test]
async fn a_slow_reader_slows_the_writer_and_loses_nothing() {
    for direct in [false, true] {
        let dir = Dir::new();
        let err = dir.fifo("err");
        let mut io = open_io(&request("", "", &err, direct)).await.unwrap();
        let child = spawn(&mut io, &format!("{{ {TWO_MB}; }} >&2"));
        let path = err.clone();
        let reader = thread::spawn(move || {
            let mut file = File::open(path).unwrap();
            let (mut all, mut buffer) = (Vec::new(), vec![0; 64 << 10]);
            loop {
                thread::sleep(Duration::from_millis(2));
                match file.read(&mut buffer).unwrap() {
                    0 => break all,
                    n => all.extend_from_slice(&buffer[..n]),
                }
            }
        });
        assert_eq!(ended(&child).await, 0);
        assert!(io.drain(LIMIT).await);
        assert!(joined(reader).await == expected(), "direct {direct}");
    }
}

#[tokio::test]
async fn a_reader_that_leaves_and_comes_back_is_no_error_for_the_writer() {
    for direct in [false, true] {
        let dir = Dir::new();
        let out = dir.fifo("out");
        let mut io = open_io(&request("", &out, "", direct)).await.unwrap();
        let script =
            "i=0; while [ $i -lt 400 ]; do printf '%01000d' $i || exit 9; i=$((i+1)); done; exit 3";
        let path = out.clone();
        let first = thread::spawn(move || {
            let mut piece = vec![0; 5000];
            File::open(path).unwrap().read_exact(&mut piece).unwrap();
            piece
        });
        let child = spawn(&mut io, script);
        let mut all = joined(first).await;
        // Nobody reads now. 400 kB do not fit: the writer waits.
        tokio::time::sleep(Duration::from_millis(100)).await;
        assert!(child.identity.is_alive());
        all.extend(joined(reader(&out)).await);
        assert_eq!(ended(&child).await, 3);
        let expected: String = (0..400).map(|i| format!("{i:01000}")).collect();
        assert!(
            all == expected.as_bytes(),
            "direct {direct}: {} bytes",
            all.len()
        );
    }
}

#[tokio::test]
async fn a_background_child_holds_the_drain_and_not_the_end_of_file() {
    let dir = Dir::new();
    let out = dir.fifo("out");
    let mut io = open_io(&request("", &out, &out, false)).await.unwrap();
    let reader = reader(&out);
    let child = spawn(&mut io, "sleep 300 & echo $!");
    assert_eq!(ended(&child).await, 0);
    assert!(!io.drain(Duration::from_millis(200)).await);
    assert!(!reader.is_finished());
    io.close();
    let text = String::from_utf8(joined(reader).await).unwrap();
    let sleeper = text.trim().parse().unwrap();
    nix::sys::signal::kill(
        nix::unistd::Pid::from_raw(sleeper),
        nix::sys::signal::SIGKILL,
    )
    .unwrap();
    assert!(io.drain(LIMIT).await);
    io.close();
}

#[tokio::test]
async fn stdin_ends_when_both_the_client_and_we_have_closed_it() {
    for direct in [false, true] {
        let dir = Dir::new();
        let (input, out) = (dir.fifo("in"), dir.fifo("out"));
        let mut io = open_io(&request(&input, &out, "", direct)).await.unwrap();
        let reader = reader(&out);
        let child = spawn(&mut io, "cat; echo end");
        for part in ["one\n", "two\n"] {
            // A client that comes, writes and goes is not the end.
            OpenOptions::new()
                .write(true)
                .open(&input)
                .unwrap()
                .write_all(part.as_bytes())
                .unwrap();
            tokio::time::sleep(Duration::from_millis(50)).await;
            assert!(child.identity.is_alive(), "direct {direct}");
        }
        let client = OpenOptions::new().write(true).open(&input).unwrap();
        io.close_stdin();
        io.close_stdin();
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert!(
            child.identity.is_alive(),
            "the client has it still, direct {direct}"
        );
        drop(client);
        assert_eq!(ended(&child).await, 0);
        assert!(io.drain(LIMIT).await);
        assert_eq!(joined(reader).await, b"one\ntwo\nend\n");
    }
}

#[tokio::test]
async fn nothing_and_devices_and_files_need_no_copy() {
    let dir = Dir::new();
    fs::write(dir.path("file"), "old ").unwrap();
    fs::write(dir.path("given"), "given").unwrap();
    let mut io = open_io(&request(
        &dir.text("given"),
        &dir.text("file"),
        "/dev/null",
        false,
    ))
    .await
    .unwrap();
    let child = spawn(&mut io, "cat; echo lost >&2");
    assert_eq!(ended(&child).await, 0);
    assert!(io.drain(Duration::ZERO).await);
    assert_eq!(fs::read(dir.path("file")).unwrap(), b"old given");

    let mut io = open_io(&Request::default()).await.unwrap();
    assert_eq!(
        ended(&spawn(&mut io, "cat && echo x && echo y >&2")).await,
        0
    );
    assert_eq!(io.take_child_stdio().unwrap_err().kind(), Kind::State);

    let uri = format!("file://{}/made/both", dir.0.path().display());
    let mut io = open_io(&request("", &uri, "/no/such/fifo", true))
        .await
        .unwrap();
    assert_eq!(ended(&spawn(&mut io, "echo out; echo err >&2")).await, 0);
    assert_eq!(fs::read(dir.path("made/both")).unwrap(), b"out\nerr\n");
}

#[tokio::test]
async fn what_cannot_be_opened_is_said_and_leaves_nothing_open() {
    let dir = Dir::new();
    let out = dir.fifo("out");
    let missing = open_io(&request("", &out, &dir.text("no"), false))
        .await
        .unwrap_err();
    assert_eq!(missing.kind(), Kind::NotFound);
    assert!(missing.to_string().starts_with("open stderr "), "{missing}");
    assert_eq!(open_count(&out), 0);
    for (stdin, stdout, kind) in [
        ("", "nosuch:///x", Kind::Invalid),
        ("podvisor-log:///x", "", Kind::Invalid),
        ("", "binary:///no/such/logger", Kind::NotFound),
        ("binary:///bin/true", "", Kind::Invalid),
        ("", "file:///proc/self/no/such", Kind::NotFound),
    ] {
        assert_eq!(
            open_io(&request(stdin, stdout, "", false))
                .await
                .unwrap_err()
                .kind(),
            kind,
            "{stdin}{stdout}"
        );
    }
}

#[tokio::test]
async fn closing_or_dropping_leaves_no_descriptor() {
    let dir = Dir::new();
    let (input, out) = (dir.fifo("in"), dir.fifo("out"));
    for direct in [false, true] {
        for close in [false, true] {
            let mut io = open_io(&request(&input, &out, "", direct)).await.unwrap();
            assert!(open_count(&input) == 2 && open_count(&out) == 2);
            let child = spawn(&mut io, "true");
            ended(&child).await;
            if close {
                io.close();
            } else {
                drop(io);
            }
            until(|| open_count(&input) + open_count(&out) == 0).await;
        }
    }
}

#[tokio::test]
async fn a_log_gets_lines_and_whoever_is_attached_gets_bytes() {
    let dir = Dir::new();
    let (out, err) = (dir.fifo("out"), dir.fifo("err"));
    let log = dir.path("log");
    let uri = format!(
        "podvisor-log://{}?attach-stdout={out}&attach-stderr={err}",
        log.display()
    );
    // Readers that come when everything is written: they see the end of file, also from within open(2).
    let mut io = open_io(&request("", &uri, "", true)).await.unwrap();
    let child = spawn(&mut io, "echo early; exec sleep 300");
    until(|| fs::read(&log).is_ok_and(|l| l.ends_with(b" F early\n"))).await;
    let readers = [waiting_reader(&out).await, waiting_reader(&err).await];
    child.signal(nix::libc::SIGKILL).unwrap();
    ended(&child).await;
    assert!(io.drain(LIMIT).await);
    for reader in readers {
        assert_eq!(joined(reader).await, b"");
    }

    let mut io = open_io(&request("", &uri, "", false)).await.unwrap();
    let readers = [waiting_reader(&out).await, waiting_reader(&err).await];
    let child = spawn(&mut io, "printf late; echo bad >&2");
    assert_eq!(ended(&child).await, 0);
    assert!(io.drain(LIMIT).await);
    let [seen_out, seen_err] = readers;
    assert_eq!(joined(seen_out).await, b"late");
    assert_eq!(joined(seen_err).await, b"bad\n");
    let text = fs::read_to_string(&log).unwrap();
    let mut tails: Vec<&str> = text.lines().map(|l| &l[31..]).collect();
    tails.sort_unstable();
    assert_eq!(tails, ["stderr F bad", "stdout F early", "stdout F late"]);
}

#[tokio::test]
async fn an_attached_reader_that_leaves_does_not_stop_the_log() {
    let dir = Dir::new();
    let out = dir.fifo("out");
    let uri = format!("podvisor-log://{}?attach-stdout={out}", dir.text("log"));
    let mut io = open_io(&request("", &uri, "", true)).await.unwrap();
    let path = out.clone();
    let leaver =
        thread::spawn(move || File::open(path).unwrap().read_exact(&mut [0; 100]).unwrap());
    tokio::time::sleep(Duration::from_millis(50)).await;
    let child = spawn(&mut io, TWO_MB);
    joined(leaver).await;
    assert_eq!(ended(&child).await, 0);
    assert!(io.drain(LIMIT).await);
    let bytes = fs::read(dir.path("log")).unwrap();
    let lines: Vec<log::Line> = bytes
        .strip_suffix(b"\n")
        .unwrap()
        .split(|b| *b == b'\n')
        .map(|l| log::parse(l).unwrap())
        .collect();
    let text: Vec<u8> = lines.iter().flat_map(|l| l.text.clone()).collect();
    assert!(text == expected());
    let fulls: Vec<usize> = lines
        .iter()
        .enumerate()
        .filter(|(_, l)| l.full)
        .map(|(i, _)| i)
        .collect();
    assert_eq!(fulls, [lines.len() - 1]);
}

#[tokio::test]
async fn closing_ends_a_logs_last_line() {
    let dir = Dir::new();
    let log = dir.path("log");
    let uri = format!("podvisor-log://{}", log.display());
    let mut io = open_io(&request("", &uri, "", false)).await.unwrap();
    let child = spawn(&mut io, "printf 'line\nprompt'; exec sleep 300");
    until(|| fs::read(&log).is_ok_and(|l| l.ends_with(b" F line\n"))).await;
    io.close();
    until(|| fs::read(&log).is_ok_and(|l| l.ends_with(b" F prompt\n"))).await;
    child.signal(nix::libc::SIGKILL).unwrap();
    ended(&child).await;
}

#[tokio::test]
async fn pipes_and_fifos_belong_to_the_workloads_user() {
    use std::os::unix::fs::MetadataExt;
    if !nix::unistd::geteuid().is_root() {
        eprintln!("skipped: chown needs root");
        return;
    }
    let dir = Dir::new();
    let out = dir.fifo("out");
    for direct in [false, true] {
        let request = Request {
            uid: 12345,
            gid: 54321,
            ..request("", &out, &out, direct)
        };
        let io = open_io(&request).await.unwrap();
        let state = io.lock();
        let end: File = state.child.as_ref().unwrap()[1].try_clone().unwrap().into();
        let meta = end.metadata().unwrap();
        assert_eq!((meta.uid(), meta.gid()), (12345, 54321), "direct {direct}");
    }
}

/// How many of our descriptors are this file.
fn open_count(path: &str) -> usize {
    let links = fs::read_dir("/proc/self/fd")
        .unwrap()
        .flatten()
        .filter_map(|e| fs::read_link(e.path()).ok());
    links.filter(|l| l.to_str() == Some(path)).count()
}
