//! What `start` makes of the process: its core scheduling cookie, its signals, its log.

use std::fs::{self, File};
use std::io::{ErrorKind, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::Duration;

use nix::sys::signal::Signal;

use crate::daemon::{Bundle, all_gone, end_all, shims, signal, supervisor};
use crate::support::{eventually, sandboxed};

#[test]
fn core_scheduling_is_given_or_refused_with_its_name() {
    sandboxed(
        "launching::core_scheduling_is_given_or_refused_with_its_name",
        || {
            let bundle = Bundle::new("web").env("SCHED_CORE", "1");
            let output = bundle.start();
            if output.code == Some(0) {
                assert!(cookie(supervisor()) != 0);
                assert_ne!(cookie(supervisor()), cookie(own()));
                end_all();
            } else {
                // A kernel without it.
                output.fails_with("SCHED_CORE");
                assert!(shims().is_empty());
            }
            let plain = Bundle::new("other");
            plain.address();
            assert_eq!(cookie(supervisor()), cookie(own()));
            end_all();
        },
    );
}

fn own() -> i32 {
    i32::try_from(std::process::id()).unwrap()
}

/// The cookie as the kernel shows it; 0 where it shows none.
fn cookie(pid: i32) -> u64 {
    const PR_SCHED_CORE: libc::c_int = 62;
    let mut cookie = 0_u64;
    // SAFETY: PR_SCHED_CORE_GET (0) of one process (0) writes one u64 to the place it is given.
    #[allow(unsafe_code, reason = "nothing wraps this call")]
    let done = unsafe { libc::prctl(PR_SCHED_CORE, 0, pid, 0, &raw mut cookie) };
    if done == 0 { cookie } else { 0 }
}

#[test]
fn a_broken_pipe_is_no_signal_to_the_supervisor() {
    sandboxed(
        "launching::a_broken_pipe_is_no_signal_to_the_supervisor",
        || {
            Bundle::new("web").address();
            let pid = supervisor();
            let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
            let ignored = status.lines().find_map(|l| l.strip_prefix("SigIgn:"));
            let ignored = u64::from_str_radix(ignored.unwrap().trim(), 16).unwrap();
            assert!(ignored & (1 << (libc::SIGPIPE - 1)) != 0, "{status}");
            end_all();
        },
    );
}

/// The log as a daemon opens it: it never waits, and is its own writer.
fn open(path: &Path) -> File {
    let mut options = File::options();
    options
        .read(true)
        .write(true)
        .custom_flags(libc::O_NONBLOCK);
    options.open(path).unwrap()
}

fn until_dumped(log: &mut File, pid: i32) {
    signal(pid, Signal::SIGUSR1);
    let mut all = Vec::new();
    eventually(Duration::from_secs(20), "a dump in the log", || {
        let mut buffer = [0; 4096];
        match log.read(&mut buffer) {
            Ok(n) => all.extend(&buffer[..n]),
            Err(e) => assert_eq!(e.kind(), ErrorKind::WouldBlock),
        }
        String::from_utf8_lossy(&all)
            .contains("step=dump")
            .then_some(())
    });
}

#[test]
fn lines_come_again_to_a_reader_who_comes_back() {
    sandboxed(
        "launching::lines_come_again_to_a_reader_who_comes_back",
        || {
            let bundle = Bundle::new("web");
            let path = bundle.dir.join("log");
            let mut log = open(&path);
            bundle.address();
            let pid = supervisor();
            until_dumped(&mut log, pid);
            drop(log);
            for _ in 0..20 {
                signal(pid, Signal::SIGUSR1);
                std::thread::sleep(Duration::from_millis(10));
            }
            let mut log = open(&path);
            until_dumped(&mut log, pid);
            end_all();
            all_gone();
        },
    );
}
