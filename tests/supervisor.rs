//! The supervisor as a process: what it costs idle, what ends it, and that it still hears its children meanwhile.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "tests panic where they cannot go on"
)]

#[path = "launch/daemon.rs"]
mod daemon;
#[path = "launch/group.rs"]
mod group;
mod support;

use std::fs;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use podvisor::client::{self, Client};
use podvisor::proto::any;
use podvisor::proto::task_v3::shim::{ExecProcessRequest, StartRequest, WaitRequest};
use serde_json::json;
use support::{eventually, sandboxed};

use daemon::{all_gone, shims, signal, supervisor};
use group::{Group, sleeps};

fn limit() -> ttrpc::context::Context {
    client::context(Some(Duration::from_secs(60)))
}

/// CPU time used so far, clock ticks of 10 ms.
fn ticks(pid: i32) -> u64 {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let fields: Vec<_> = stat
        .rsplit(')')
        .next()
        .unwrap()
        .split_whitespace()
        .collect();
    fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
}

/// Runs a shell script in container `id`, standard input from `stdin`; its pid.
async fn exec(client: &Client, id: &str, exec_id: &str, stdin: &str, script: &str) -> u32 {
    let process = json!({"user": {"uid": 0, "gid": 0}, "cwd": "/", "args": ["/bin/sh", "-c", script], "env": ["PATH=/bin"]});
    let request = ExecProcessRequest {
        id: id.into(),
        exec_id: exec_id.into(),
        stdin: stdin.into(),
        spec: Some(any::raw(any::OCI_PROCESS, process.to_string().into_bytes())).into(),
        ..Default::default()
    };
    client.task().exec(limit(), &request).await.unwrap();
    let request = StartRequest {
        id: id.into(),
        exec_id: exec_id.into(),
        ..Default::default()
    };
    client.task().start(limit(), &request).await.unwrap().pid
}

#[test]
fn a_stopped_child_is_no_work() {
    const NAME: &str = "a_stopped_child_is_no_work";
    sandboxed(NAME, || {
        let group = Group::new(NAME);
        let (_, pid) = group.state("c1").unwrap();
        signal(i32::try_from(pid).unwrap(), Signal::SIGSTOP);
        let before = ticks(supervisor());
        std::thread::sleep(Duration::from_secs(10));
        let used = ticks(supervisor()) - before;
        assert!(used < 5, "{used} ticks in 10 s");
        signal(supervisor(), Signal::SIGTERM);
        all_gone();
    });
}

#[test]
fn sigterm_ends_the_group_and_the_process_whoever_holds_a_fifo_or_waits() {
    const NAME: &str = "sigterm_ends_the_group_and_the_process_whoever_holds_a_fifo_or_waits";
    sandboxed(NAME, || {
        let group = Group::new(NAME);
        let fifo = "/run/stdin";
        nix::unistd::mkfifo(fifo, nix::sys::stat::Mode::S_IRWXU).unwrap();
        // The writer stays for the whole test.
        let _writer = fs::File::options()
            .read(true)
            .write(true)
            .open(fifo)
            .unwrap();
        group.runtime.block_on(async {
            let client = Client::connect(&group.address).await.unwrap();
            let idle = [
                Client::connect(&group.address).await.unwrap(),
                Client::connect(&group.address).await.unwrap(),
            ];
            exec(&client, "c1", "reader", fifo, "cat").await;
            let waiting = {
                let client = client.clone();
                tokio::spawn(async move {
                    let request = WaitRequest {
                        id: "c2".into(),
                        ..Default::default()
                    };
                    client.task().wait(limit(), &request).await
                })
            };
            tokio::time::sleep(Duration::from_millis(200)).await;
            signal(supervisor(), Signal::SIGTERM);
            let answer = waiting.await.unwrap().unwrap();
            assert!(matches!(answer.exit_status, 137 | 143), "{answer:?}");
            drop(idle);
        });
        let begun = Instant::now();
        all_gone();
        // Init processes ignore TERM as pid 1 does, so the grace passes; what counts is the time after the last exit.
        assert!(
            begun.elapsed() < Duration::from_secs(5),
            "{:?}",
            begun.elapsed()
        );
        assert_eq!(sleeps(), 0);
    });
}

#[test]
fn children_are_reaped_while_the_group_is_ending() {
    const NAME: &str = "children_are_reaped_while_the_group_is_ending";
    sandboxed(NAME, || {
        let group = Group::new(NAME);
        group.runtime.block_on(async {
            let client = Client::connect(&group.address).await.unwrap();
            exec(&client, "c1", "short", "", "sleep 1; exit 9").await;
            signal(supervisor(), Signal::SIGTERM);
            let request = WaitRequest {
                id: "c1".into(),
                exec_id: "short".into(),
                ..Default::default()
            };
            let answer = client.task().wait(limit(), &request).await.unwrap();
            // Ended by itself within the grace, or with its container.
            assert!(matches!(answer.exit_status, 9 | 137 | 143), "{answer:?}");
        });
        all_gone();
    });
}

#[test]
fn sigusr1_tells_the_state_and_changes_nothing() {
    const NAME: &str = "sigusr1_tells_the_state_and_changes_nothing";
    sandboxed(NAME, || {
        let group = Group::new(NAME);
        let pid = supervisor();
        let log = fs::File::options()
            .read(true)
            .write(true)
            .open(group.bundles[0].dir.join("log"))
            .unwrap();
        signal(pid, Signal::SIGUSR1);
        let text = eventually(Duration::from_secs(10), "a dump in the log", || {
            use std::io::Read;
            let mut bytes = vec![0; 65_536];
            let n = (&log).read(&mut bytes).unwrap();
            let text = String::from_utf8_lossy(&bytes[..n]).into_owned();
            text.contains("step=dump").then_some(text)
        });
        assert!(text.contains("c1") && text.contains("c2"), "{text}");
        assert_eq!((shims(), sleeps()), (vec![pid], 3));
        signal(pid, Signal::SIGTERM);
        all_gone();
    });
}
