//! Docker 28 runs its containers with `--runtime io.containerd.podvisor.v1`: what people do every day, compared line by
//! line with what they see under `io.containerd.runc.v2`, and engines that die and come back.
#![allow(clippy::unwrap_used, clippy::expect_used)]
#![allow(clippy::print_stdout, reason = "captured by the test runner")]

#[path = "docker/engine.rs"]
mod engine;
#[path = "docker/lives.rs"]
mod lives;
#[path = "docker/restarts.rs"]
mod restarts;
mod support;
#[path = "docker/told.rs"]
mod told;

use engine::Engine;
use lives::Seen;
use support::{Snapshot, sandboxed};

const RUNC: &str = "io.containerd.runc.v2";
const PODVISOR: &str = "io.containerd.podvisor.v1";

/// The same steps with both runtimes in one engine; nothing is left, and no line differs.
fn both(name: &str, body: fn(&Engine, &str, &mut Seen)) {
    sandboxed(name, || {
        let Some(engine) = Engine::start(&[]) else {
            return;
        };
        let [theirs, ours] = [RUNC, PODVISOR].map(|runtime| {
            println!("--- {runtime}");
            let before = Snapshot::take();
            let mut seen = Seen::default();
            body(&engine, runtime, &mut seen);
            before.assert_unchanged();
            seen
        });
        let differences = theirs.differences(&ours);
        assert!(differences.is_empty(), "{}", differences.join("\n"));
    });
}

#[test]
fn docker_every_day() {
    both("docker_every_day", lives::every_day);
}

#[test]
fn docker_in_all_ways_to_run() {
    both("docker_in_all_ways_to_run", lives::ways_to_run);
}

#[test]
fn docker_sees_health_limits_and_oom() {
    both("docker_sees_health_limits_and_oom", lives::watched);
}

#[test]
fn docker_renames_follows_and_tells_events() {
    both(
        "docker_renames_follows_and_tells_events",
        told::names_and_events,
    );
}

#[test]
fn docker_terminals_are_left_by_keys() {
    both("docker_terminals_are_left_by_keys", told::keys);
}

/// What the engine that came back sees, with both runtimes.
fn restarted(name: &str, options: &[&str], body: fn(&mut Engine, &str, &mut Seen)) {
    sandboxed(name, || {
        let Some(mut engine) = Engine::start(options) else {
            return;
        };
        let [theirs, ours] = [RUNC, PODVISOR].map(|runtime| {
            println!("--- {runtime}");
            let before = Snapshot::take();
            let mut seen = Seen::default();
            body(&mut engine, runtime, &mut seen);
            nothing_is_left(&before);
            seen
        });
        let differences = theirs.differences(&ours);
        assert!(differences.is_empty(), "{}", differences.join("\n"));
    });
}

/// But for the engine itself, which is other processes with another socket by now.
fn nothing_is_left(before: &Snapshot) {
    let changes = || {
        let mut changes = before.changes();
        let engines = ["(dockerd)", "(containerd)", "/exec/libnetwork/"];
        changes.retain(|line| !engines.iter().any(|own| line.contains(own)));
        changes
    };
    let end = std::time::Instant::now() + std::time::Duration::from_secs(8);
    while !changes().is_empty() && std::time::Instant::now() < end {
        std::thread::sleep(std::time::Duration::from_millis(200));
    }
    assert!(changes().is_empty(), "{}", changes().join("\n"));
}

#[test]
fn docker_killed_with_live_restore() {
    restarted(
        "docker_killed_with_live_restore",
        &["--live-restore"],
        restarts::with_live_restore,
    );
}

#[test]
fn docker_killed_without_live_restore() {
    restarted(
        "docker_killed_without_live_restore",
        &[],
        restarts::without_live_restore,
    );
}

#[test]
fn docker_ended_in_good_order() {
    restarted("docker_ended_in_good_order", &[], restarts::in_good_order);
}

#[test]
fn docker_whose_containerd_is_killed() {
    restarted(
        "docker_whose_containerd_is_killed",
        &["--live-restore"],
        restarts::with_another_containerd,
    );
}
