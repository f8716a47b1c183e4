//! The named points of the plugin's own process and of its jobs, and what happens at them.

use std::fs;
use std::path::Path;

use nix::fcntl::{Flock, FlockArg};

/// Of the plugin's own process and of its jobs, in the order in which a pod's life meets them; "one after another" is met
/// by a pod with which somebody has died at the other.
pub const POINTS: &[&str] = &[
    "cni-plugin.add.before",
    "cni-job.fork.before",
    "cni-job.fork.after",
    "cni-job.begin",
    "cni-job.own.before",
    "cni-job.own.after",
    "netns.pin.before",
    "netns.pin.after",
    "record.write.half",
    "cni-add.record.before",
    "cni-add.record.after",
    "cni-add.plugin.before",
    "cni-add.plugin.after",
    "cni-add.result.before",
    "cni-add.result.after",
    "cni-job.failed",
    "cni-claim.before",
    "cni-claim.bind.before",
    "cni-claim.after",
    "cni-plugin.answer.before",
    "cni-plugin.answer.after",
    "cni-plugin.release.after after cni-plugin.answer.before",
    // A job gives the network to the plugin that started it; without that it keeps it, and another plugin takes it.
    "cni-job.park.before after cni-job.fork.after",
    "cni-job.park.after after cni-job.fork.after",
    "cni-claim.before after cni-job.fork.after",
    "cni-claim.bind.before after cni-job.fork.after",
    "cni-claim.after after cni-job.fork.after",
    "cni-plugin.del.before",
    "cni-job.end.after",
    "gc.settle.before",
    "cni-del.plugin.before",
    "cni-del.plugin.after",
    "cni-del.stopped.before",
    "cni-del.stopped.after",
    "gc.record.before",
    "netns.link.after",
    "record.remove.before",
    "record.remove.half",
    "cni-job.done.before",
];

/// From now on the processes that are told of `dir` do `act` at `point`, once among all of them.
pub fn arm(dir: &Path, point: &str, act: &str) {
    fs::create_dir_all(dir).unwrap();
    fs::write(dir.join("hits"), "").unwrap();
    let (point, earlier) = parts(point);
    let mut rules = earlier.map_or(String::new(), |earlier| format!("{earlier}=1*die\n"));
    if point == "cni-job.failed" {
        rules += "cni-add.plugin.before=1*fail(no)\n";
    }
    fs::write(dir.join("rules"), format!("{rules}{point}=1*{act}\n")).unwrap();
}

fn parts(point: &str) -> (&str, Option<&str>) {
    match point.split_once(" after ") {
        Some((point, earlier)) => (point, Some(earlier)),
        None => (point, None),
    }
}

/// What hangs goes on. Under the lock of the rules: who is just taking one writes the others back.
pub fn release(dir: &Path) {
    let rules = fs::OpenOptions::new()
        .write(true)
        .open(dir.join("rules"))
        .unwrap();
    let rules = Flock::lock(rules, FlockArg::LockExclusive).unwrap();
    rules.set_len(0).unwrap();
}

/// The process that came to the point first.
pub fn reached(dir: &Path, point: &str) -> Option<i32> {
    let (point, _) = parts(point);
    let hits = fs::read_to_string(dir.join("hits")).unwrap_or_default();
    let mut hits = hits.lines().filter_map(|line| line.split_once(' '));
    let pid = hits.find(|(_, at)| *at == point)?.0;
    pid.parse().ok()
}

/// Every point of ours is among them.
pub fn assert_complete() {
    let own = ["cni-plugin.", "cni-job.", "cni-claim."];
    for point in podvisor::failpoint::POINTS {
        let ours = own.iter().any(|prefix| point.starts_with(prefix));
        assert!(
            !ours || POINTS.iter().any(|all| parts(all).0 == *point),
            "{point} is not gone through"
        );
    }
}
