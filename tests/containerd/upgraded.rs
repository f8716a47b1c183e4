//! The daemon is replaced by a newer one while a container runs: 1.6, then 1.7, then 2.1, on the same directories.

use std::time::Duration;

use crate::RUNTIME;
use crate::daemon::{shims, signal};
use crate::support::rootfs::Rootfs;
use crate::support::{Containerd, Snapshot, eventually, require, rootfs, sandboxed};

const BOUND: Duration = Duration::from_secs(60);

fn begin(daemon: &Containerd, rootfs: &Rootfs, id: &str) {
    let mut run = vec![
        "run",
        "-d",
        "--runtime",
        RUNTIME,
        "--rootfs",
        rootfs.str(),
        id,
    ];
    run.extend([
        "/bin/sh",
        "-c",
        "trap 'exit 7' TERM; while :; do sleep 0.05; done",
    ]);
    daemon.ctr(&run).ok();
}

/// Id, pid and state, a line for each task.
fn tasks(daemon: &Containerd) -> Vec<String> {
    let list = daemon.ctr(&["task", "ls"]).ok().stdout;
    let mut lines: Vec<String> = list.lines().skip(1).map(str::to_owned).collect();
    lines
        .iter_mut()
        .for_each(|line| *line = line.split_ascii_whitespace().collect::<Vec<_>>().join(" "));
    lines.sort();
    lines
}

#[test]
fn a_container_lives_through_upgrades_of_its_daemon() {
    const NAME: &str = "upgraded::a_container_lives_through_upgrades_of_its_daemon";
    sandboxed(NAME, || {
        let names = ["containerd-1.6", "containerd-1.7", "containerd-2.1"];
        let peers: Vec<_> = names
            .iter()
            .filter_map(|name| require::peer(name))
            .collect();
        let [first, newer @ ..] = peers.as_slice() else {
            return;
        };
        let (mut daemon, rootfs) = (Containerd::start(first), rootfs::make());
        daemon
            .run_once(RUNTIME, &rootfs, "warm", &["/bin/true"])
            .ok();
        let before = Snapshot::take();
        begin(&daemon, &rootfs, "c0");
        for (n, peer) in newer.iter().enumerate() {
            let were = tasks(&daemon);
            assert!(
                were.iter().all(|line| line.ends_with(" RUNNING")),
                "{were:?}"
            );
            daemon.become_version(peer);
            assert_eq!(tasks(&daemon), were, "under {}", peer.name);
            // What supervisors say is in the newer daemon's log.
            let dumps = || daemon.log().matches("step=dump").count();
            let (said, supervisors) = (dumps(), shims());
            for pid in &supervisors {
                signal(*pid, nix::sys::signal::Signal::SIGUSR1);
            }
            eventually(BOUND, "each has told its state", || {
                (dumps() == said + supervisors.len()).then_some(())
            });
            assert_eq!(supervisors.len(), n + 1);
            for id in 0..=n {
                let exec = [
                    "task",
                    "exec",
                    "--exec-id",
                    "e",
                    &format!("c{id}"),
                    "/bin/echo",
                    "in",
                ];
                assert_eq!(daemon.ctr(&exec).ok().stdout, "in\n", "under {}", peer.name);
            }
            // One that the newer daemon makes itself.
            begin(&daemon, &rootfs, &format!("c{}", n + 1));
        }
        for id in 0..=newer.len() {
            let id = format!("c{id}");
            daemon.ctr(&["task", "kill", &id]).ok();
            eventually(BOUND, "it ends", || {
                let line = format!("{id} ");
                let stopped = |task: &String| task.starts_with(&line) && task.ends_with(" STOPPED");
                tasks(&daemon).iter().any(stopped).then_some(())
            });
            let told = daemon.ctr(&["task", "rm", &id]).ok().stderr;
            assert!(told.contains("exit code 7"), "{id}: {told}");
            daemon.ctr(&["container", "rm", &id]).ok();
        }
        let left = || {
            let mut changes = before.changes();
            // The daemon is another process now, and a newer one listens at one place more.
            let own = ["(containerd)", "/run/nri/"];
            changes.retain(|line| !own.iter().any(|word| line.contains(word)));
            changes
        };
        eventually(BOUND, "nothing is left", || left().is_empty().then_some(()));
    });
}
