//! The same executables on a machine with cgroup v2 alone: `scripts/lab` boots one. What is looked at there stands in
//! `scripts/lab.d`.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stdout)]

#[path = "lab/criu.rs"]
mod criu;
#[path = "launch/daemon.rs"]
mod daemon;
#[path = "task_io/kit.rs"]
mod kit;
mod support;

use std::process::Command;
use std::time::Duration;

use support::{bin, require, run};

#[test]
fn pods_live_and_die_on_cgroup_v2() {
    if !require::root() || !require::lab() {
        return;
    }
    let mut lab = Command::new(concat!(env!("CARGO_MANIFEST_DIR"), "/scripts/lab"));
    lab.args(["--rooms", "--bin", bin::dir().to_str().unwrap()]);
    // This program itself: one of its tests is run there.
    lab.arg("--file").arg(std::env::current_exe().unwrap());
    lab.args([
        "--timeout",
        "540",
        "pod-on-v2",
        "retry-on-v2",
        "rooms-on-v2",
        "criu-on-v2",
    ]);
    // What it prints is shown when it fails, and names what did.
    let output = run(&mut lab, Duration::from_secs(580)).ok();
    println!("{}", output.stdout);
}
