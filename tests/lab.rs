//! The same executables on a machine with cgroup v2 alone: `scripts/lab` boots one. What is looked at there stands in
//! `scripts/lab.d`.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stdout)]

#[path = "lab/criu.rs"]
mod criu;
#[path = "launch/daemon.rs"]
mod daemon;
#[path = "task_io/kit.rs"]
mod kit;
#[path = "pod/kit.rs"]
#[allow(dead_code, reason = "other tests use the rest of it")]
mod pod_kit;
#[path = "lab/selinux.rs"]
mod selinux;
mod support;

use std::process::Command;
use std::time::Duration;

use support::{bin, require, run};

#[test]
fn pods_live_and_die_on_cgroup_v2() {
    if !require::root() || !require::lab() {
        return;
    }
    let mut lab = lab();
    lab.args([
        "--rooms",
        "--timeout",
        "540",
        "pod-on-v2",
        "retry-on-v2",
        "rooms-on-v2",
        "criu-on-v2",
    ]);
    show(&mut lab);
}

#[test]
fn labels_hold_where_selinux_is_enforced() {
    if !require::root() || !require::lab() || !require::checkpolicy() {
        return;
    }
    let mut lab = lab();
    lab.args(["--selinux", "--timeout", "540", "selinux-on-v2"]);
    show(&mut lab);
}

/// With these executables, and this program itself: some of its tests are run there.
fn lab() -> Command {
    let mut lab = Command::new(concat!(env!("CARGO_MANIFEST_DIR"), "/scripts/lab"));
    lab.args(["--bin", bin::dir().to_str().unwrap()]);
    lab.arg("--file").arg(std::env::current_exe().unwrap());
    lab
}

fn show(lab: &mut Command) {
    // What it prints is shown when it fails, and names what did.
    let output = run(lab, Duration::from_secs(580)).ok();
    println!("{}", output.stdout);
}
