//! containerd was killed, and things happened before it came back.

use std::fs;

use super::*;
use crate::support::{Output, eventually, rootfs::Rootfs};
use std::path::Path;
use std::time::Duration;

/// The machine with all that the daemon leaves itself; its process is another one after each death.
fn without_daemon(daemon: &mut Containerd) -> Snapshot {
    daemon.stop();
    let before = Snapshot::take();
    daemon.start_again();
    before
}

/// A container that ends with this code as soon as `/go` is there, under a daemon that is then killed.
fn left_alone(daemon: &mut Containerd, rootfs: &Rootfs, code: u32) {
    let script = format!("while [ ! -e /go ]; do sleep 0.1; done; exit {code}");
    let run = ["run", "-d", "--runtime", RUNTIME, "--rootfs", rootfs.str()];
    let program = ["c", "/bin/sh", "-c", &script];
    daemon.ctr(&[&run[..], &program[..]].concat()).ok();
    let pid = init(daemon);
    daemon.kill();
    fs::write(rootfs.path().join("go"), "").unwrap();
    eventually(Duration::from_secs(60), "it has ended", || {
        (!Path::new(&format!("/proc/{pid}")).exists()).then_some(())
    });
    fs::remove_file(rootfs.path().join("go")).unwrap();
}

/// What `ctr tasks rm` says of a task that failed.
fn assert_code(removed: &Output, code: u32) {
    let told = format!("exit code {code}");
    assert!(removed.stderr.contains(&told), "{removed:?}");
}

fn init(daemon: &Containerd) -> String {
    let listed = daemon.ctr(&["tasks", "ls"]).ok().stdout;
    let line = listed.lines().find(|l| l.starts_with("c ")).unwrap();
    line.split_whitespace().nth(1).unwrap().to_owned()
}

/// FL-050, FL-058, FL-060: the exit that nobody was there for is known, with its code, and removing is as always.
fn an_exit_is_known_after_the_daemons_death(peer: &str, name: &str) {
    let peer = peer.to_owned();
    sandboxed(name, move || {
        let Some(peer) = require::peer(&peer) else {
            return;
        };
        let (mut daemon, rootfs) = (Containerd::start(&peer), rootfs::make());
        let before = without_daemon(&mut daemon);
        left_alone(&mut daemon, &rootfs, 3);
        daemon.start_again();
        let listed = daemon.ctr(&["tasks", "ls"]).ok().stdout;
        assert!(listed.contains("STOPPED"), "{listed}");
        // A signal to what has ended is answered at once.
        daemon.ctr(&["tasks", "kill", "-s", "9", "c"]);
        assert_code(&daemon.ctr(&["tasks", "rm", "c"]).ok(), 3);
        daemon.ctr(&["containers", "rm", "c"]).ok();

        left_alone(&mut daemon, &rootfs, 4);
        daemon.start_again();
        daemon.ctr(&["tasks", "rm", "-f", "c"]);
        daemon.ctr(&["containers", "rm", "c"]).ok();
        daemon.stop();
        before.assert_unchanged();
    });
}

#[test]
fn an_exit_is_known_after_the_death_of_containerd_1_6() {
    an_exit_is_known_after_the_daemons_death(
        "containerd-1.6",
        "restarted::an_exit_is_known_after_the_death_of_containerd_1_6",
    );
}

#[test]
fn an_exit_is_known_after_the_death_of_containerd_2_1() {
    an_exit_is_known_after_the_daemons_death(
        "containerd-2.1",
        "restarted::an_exit_is_known_after_the_death_of_containerd_2_1",
    );
}

/// Events are sent again until they are taken: who listens to the daemon that came back hears of the exit.
#[test]
fn an_exit_is_announced_by_the_daemon_that_comes_back() {
    sandboxed(
        "restarted::an_exit_is_announced_by_the_daemon_that_comes_back",
        || {
            let Some(peer) = require::peer("containerd-1.6") else {
                return;
            };
            let (mut daemon, rootfs) = (Containerd::start(&peer), rootfs::make());
            let before = without_daemon(&mut daemon);
            left_alone(&mut daemon, &rootfs, 3);
            daemon.start_again();
            // Its own log tells of each event that it has passed on.
            eventually(Duration::from_secs(60), "the exit is passed on", || {
                let log = daemon.log();
                let line = |l: &str| l.contains("event forwarded") && l.contains("/tasks/exit");
                log.lines().any(line).then_some(())
            });
            assert_code(&daemon.ctr(&["tasks", "rm", "c"]).ok(), 3);
            daemon.ctr(&["containers", "rm", "c"]).ok();
            daemon.stop();
            before.assert_unchanged();
        },
    );
}
