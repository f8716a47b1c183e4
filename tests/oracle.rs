//! The same body against containerd's own shim and against ours: the Go shim of containerd 1.6 (Task v2) and of 2.1
//! (Task v3), run as these daemons run it, is the oracle. Where we mean to differ is said here and in docs/task.md.
#![allow(clippy::unwrap_used, clippy::expect_used)]
#![allow(clippy::print_stdout, reason = "captured by the test runner")]

#[path = "oracle/field.rs"]
mod field;
#[path = "oracle/listener.rs"]
mod listener;
#[path = "oracle/lives.rs"]
mod lives;
#[path = "oracle/races.rs"]
mod races;
#[path = "oracle/side.rs"]
mod side;
mod support;
#[path = "oracle/transcript.rs"]
mod transcript;
#[path = "oracle/verbs.rs"]
mod verbs;

use side::{Side, Who};
use support::{Snapshot, sandboxed};
use transcript::{OnPurpose, Transcript, compare};

/// Daemons whose shims are asked.
const PEERS: [&str; 2] = ["containerd-1.6", "containerd-2.1"];

fn both(name: &str, on_purpose: &'static [OnPurpose], body: fn(&Side, &mut Transcript)) {
    sandboxed(name, || {
        let (mut wrong, mut used, mut asked) = (Vec::new(), Vec::new(), 0);
        for peer in PEERS {
            let Some(peer) = side::peer(peer) else {
                continue;
            };
            let [go, ours] = [Who::Go, Who::Podvisor].map(|who| seen(who, &peer, body));
            let differences = compare(&go, &ours, on_purpose, &mut used);
            wrong.extend(differences.iter().map(|d| format!("{}: {d}", peer.name)));
            asked += 1;
        }
        assert!(wrong.is_empty(), "differences:\n{}", wrong.join("\n"));
        // The order of events is the Go shims' luck in some of these.
        let by_luck = |meant: &OnPurpose| meant.0 == "event";
        let idle =
            |meant: &&OnPurpose| asked == PEERS.len() && !used.contains(meant) && !by_luck(meant);
        let idle: Vec<_> = on_purpose.iter().filter(idle).collect();
        assert!(idle.is_empty(), "no differences any more: {idle:#?}");
        let unexplained = transcript::explained(on_purpose);
        assert!(
            unexplained.is_empty(),
            "not in docs/task.md: {unexplained:?}"
        );
    });
}

fn seen(who: Who, peer: &support::peers::Peer, body: fn(&Side, &mut Transcript)) -> Transcript {
    println!("--- {} {who:?}", peer.name);
    let before = Snapshot::take();
    let side = Side::launch(who, peer);
    let mut transcript = Transcript::default();
    body(&side, &mut transcript);
    if side.listens() {
        side.end();
    } else {
        drop(side);
    }
    let _ = std::fs::remove_dir_all("/run/oracle");
    before.assert_unchanged();
    transcript
}

#[test]
fn a_whole_life() {
    both(
        "a_whole_life",
        &[
            (
                "bundle when created",
                "address config.json init.pid log log.json options.json out rootfs runtime",
                "address config.json init.pid log log.json out rootfs runtime-tmp",
                "`options.json`",
            ),
            (
                "bundle when created",
                "config.json init.pid log log.json options.json out rootfs runtime",
                "address config.json init.pid log log.json out rootfs runtime-tmp",
                "`address`",
            ),
            (
                "bundle when deleted",
                "address config.json init.pid log log.json options.json out rootfs runtime",
                "address config.json log log.json out rootfs",
                "`options.json`",
            ),
            (
                "bundle when deleted",
                "config.json init.pid log log.json options.json out rootfs runtime",
                "address config.json log log.json out rootfs",
                "`init.pid`",
            ),
        ],
        lives::whole_life,
    );
}

#[test]
fn ids_that_nobody_has() {
    both(
        "ids_that_nobody_has",
        &[
            (
                "close-io of no exec",
                "error 2 []",
                "error 5 []",
                "CloseIO for an exec that is not there",
            ),
            (
                "event",
                "/tasks/exit containerd.events.TaskExit c/c pid true code 137 at false",
                "/tasks/exit containerd.events.TaskExit c/c pid true code 137 at true",
                "never started",
            ),
            (
                "event",
                "/tasks/delete containerd.events.TaskDelete c/ pid true code 0 at false",
                "/tasks/delete containerd.events.TaskDelete c/ pid true code 137 at true",
                "never started",
            ),
        ],
        lives::unknown_ids,
    );
}

#[test]
fn creates_that_fail() {
    both("creates_that_fail", &[], lives::failed_creates);
}

#[test]
fn exits_at_odd_moments() {
    both(
        "exits_at_odd_moments",
        &[
            (
                "event",
                "/tasks/exit containerd.events.TaskExit e/e pid true code 4 at true",
                "/tasks/exit containerd.events.TaskExit e/x pid true code 137 at true",
                "The exit of init is the last",
            ),
            (
                "event",
                "/tasks/exit containerd.events.TaskExit e/x pid true code 137 at true",
                "/tasks/exit containerd.events.TaskExit e/e pid true code 4 at true",
                "The exit of init is the last",
            ),
        ],
        lives::odd_exits,
    );
}

#[test]
fn readers_that_are_missing() {
    both(
        "readers_that_are_missing",
        &[(
            "it is left with the runtime",
            "true",
            "false",
            "leaves nothing with the OCI runtime",
        )],
        lives::missing_readers,
    );
}

#[test]
fn shutdown_with_and_without_tasks() {
    both("shutdown_with_and_without_tasks", &[], lives::shut_down);
}

#[test]
fn execs() {
    both(
        "execs",
        &[
            ("ids of an exec", "early ", "c early", "State of an exec"),
            (
                "resize when it has ended",
                "error 2 []",
                "ok",
                "ResizePty of a process that has ended",
            ),
        ],
        verbs::execs,
    );
}

#[test]
fn signals() {
    both(
        "signals",
        &[(
            "kill of all of a dead one",
            "ok",
            "error 5 [\"already finished\"]",
            "`all`",
        )],
        verbs::signals,
    );
}

#[test]
fn pausing() {
    both("pausing", &[], verbs::pausing);
}

#[test]
fn terminals() {
    both("terminals", &[], verbs::terminals);
}

#[test]
fn streams() {
    both("streams", &[], verbs::streams);
}

#[test]
fn statistics() {
    both("statistics", &[], verbs::statistics);
}

#[test]
fn updates() {
    both("updates", &[], verbs::updates);
}
