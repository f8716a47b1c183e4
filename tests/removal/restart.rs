//! What happens to containers while the daemon is away: it dies, they end or live on, it comes back.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::sys::signal::Signal;

use crate::daemon::signal;
use crate::rig;
use crate::support::rootfs::Rootfs;
use crate::support::{Containerd, Snapshot, eventually, require, rootfs, sandboxed};

const RUNTIME: &str = "io.containerd.podvisor.v1";
const BOUND: Duration = Duration::from_secs(60);

/// A detached container; its pid.
fn run(daemon: &Containerd, rootfs: &Rootfs, id: &str, script: &str) -> i32 {
    let run = [
        "run",
        "-d",
        "--runtime",
        RUNTIME,
        "--rootfs",
        rootfs.str(),
        id,
    ];
    daemon
        .ctr(&[&run[..], &["/bin/sh", "-c", script]].concat())
        .ok();
    let (pid, status) = task(daemon, id).unwrap();
    assert_eq!(status, "RUNNING");
    pid
}

/// Pid and status as the daemon lists them.
fn task(daemon: &Containerd, id: &str) -> Option<(i32, String)> {
    let listed = daemon.ctr(&["task", "ls"]).ok().stdout;
    listed.lines().find_map(|line| {
        let words: Vec<&str> = line.split_whitespace().collect();
        (words.first() == Some(&id)).then(|| (words[1].parse().unwrap(), words[2].to_owned()))
    })
}

/// Removes task and container; the code that the task ended with.
fn removed(daemon: &Containerd, id: &str) -> Option<i32> {
    let deleted = daemon.ctr(&["task", "delete", id]);
    daemon.ctr(&["container", "delete", id]).ok();
    // Up to 1.7 the client ends with it, later ones write it down.
    let told = deleted.stderr.split("non-zero exit code ").nth(1);
    let digits = |t: &str| {
        t.chars()
            .take_while(char::is_ascii_digit)
            .collect::<String>()
    };
    match told {
        Some(text) => digits(text).parse().ok(),
        None => deleted.code,
    }
}

/// FL-050, FL-060: an exit that nobody was there to hear is told later, with its code.
#[test]
fn an_exit_while_the_daemon_is_away_is_told_with_its_code_when_it_is_back() {
    sandboxed(
        "restart::an_exit_while_the_daemon_is_away_is_told_with_its_code_when_it_is_back",
        || {
            for name in ["containerd-2.1", "containerd-1.7"] {
                let Some(peer) = require::peer(name) else {
                    return;
                };
                let (mut daemon, rootfs) = (Containerd::start(&peer), rootfs::make());
                let before = Snapshot::take();
                let script = "trap 'exit 3' TERM; while :; do sleep 1000 & wait $!; done";
                let pid = run(&daemon, &rootfs, "c1", script);
                daemon.kill();
                signal(pid, Signal::SIGTERM);
                rig::gone(pid);
                daemon.start_again();
                eventually(BOUND, "the exit is known", || {
                    (task(&daemon, "c1")?.1 == "STOPPED").then_some(())
                });
                assert_eq!(removed(&daemon, "c1"), Some(3), "{name}");
                daemon.stop();
                nothing_more(&before);
            }
        },
    );
}

/// FL-058: stopped as soon as the daemon is back, when it may not know yet that there is nothing to stop.
#[test]
fn a_kill_of_what_ended_while_the_daemon_was_away_waits_for_nothing() {
    sandboxed(
        "restart::a_kill_of_what_ended_while_the_daemon_was_away_waits_for_nothing",
        || {
            let Some(peer) = require::peer("containerd-2.1") else {
                return;
            };
            let (mut daemon, rootfs) = (Containerd::start(&peer), rootfs::make());
            let before = Snapshot::take();
            let pid = run(&daemon, &rootfs, "c1", "sleep 1000");
            daemon.kill();
            rig::kill(pid);
            daemon.start_again();
            let killed = daemon.ctr(&["task", "kill", "-s", "SIGKILL", "c1"]);
            assert!(
                killed.code == Some(0)
                    || killed.stderr.contains("not found")
                    || killed.stderr.contains("finished"),
                "{killed:#?}"
            );
            eventually(BOUND, "the exit is known", || {
                (task(&daemon, "c1")?.1 == "STOPPED").then_some(())
            });
            assert_eq!(removed(&daemon, "c1"), Some(137));
            daemon.stop();
            nothing_more(&before);
        },
    );
}

/// FL-054: it moved itself to a cgroup below its own; the daemon that comes back knows it all the same.
#[test]
fn a_workload_that_moved_to_a_cgroup_of_its_own_is_still_owned_and_goes_with_its_task() {
    sandboxed(
        "restart::a_workload_that_moved_to_a_cgroup_of_its_own_is_still_owned_and_goes_with_its_task",
        || {
            let Some(peer) = require::peer("containerd-2.1") else {
                return;
            };
            let (mut daemon, rootfs) = (Containerd::start(&peer), rootfs::make());
            let before = Snapshot::take();
            let pid = run(&daemon, &rootfs, "c1", "sleep 1000");
            let moved = cgroups_of(pid);
            for dir in &moved {
                let below = dir.join("below");
                fs::create_dir(&below).unwrap();
                // A cpuset is empty until somebody fills it.
                for file in ["cpuset.cpus", "cpuset.mems"] {
                    if let Ok(value) = fs::read_to_string(dir.join(file)) {
                        let _ = fs::write(below.join(file), value);
                    }
                }
                fs::write(below.join("cgroup.procs"), pid.to_string()).unwrap();
            }
            assert!(!moved.is_empty());
            daemon.kill();
            daemon.start_again();
            eventually(BOUND, "it is listed", || {
                (task(&daemon, "c1")? == (pid, "RUNNING".into())).then_some(())
            });
            daemon.ctr(&["task", "kill", "-s", "SIGKILL", "c1"]).ok();
            rig::gone(pid);
            eventually(BOUND, "the exit is known", || {
                (task(&daemon, "c1")?.1 == "STOPPED").then_some(())
            });
            assert_eq!(removed(&daemon, "c1"), Some(137));
            assert!(moved.iter().all(|dir| !dir.exists()), "{moved:?}");
            daemon.stop();
            nothing_more(&before);
        },
    );
}

/// The directories of the cgroups of this process which are its container's own.
fn cgroups_of(pid: i32) -> Vec<PathBuf> {
    let table = fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap();
    let mut found = Vec::new();
    for root in crate::support::cgroup_mounts() {
        for line in table.lines() {
            let path = line.splitn(3, ':').nth(2).unwrap().trim_start_matches('/');
            let dir = root.join(path);
            let holds = fs::read_to_string(dir.join("cgroup.procs"))
                .is_ok_and(|procs| procs.lines().any(|p| p == pid.to_string()));
            if path.contains("c1") && holds && !found.contains(&dir) {
                found.push(dir);
            }
        }
    }
    found
}

/// The daemon itself is gone by now.
fn nothing_more(before: &Snapshot) {
    eventually(BOUND, "nothing is left", || {
        let more = before.changes().into_iter().filter(|c| c.starts_with('+'));
        let more: Vec<String> = more.collect();
        if !more.is_empty() {
            println!("still there: {more:?}");
        }
        more.is_empty().then_some(())
    });
    assert!(!Path::new("/run/podvisor/default/c1").exists());
}
