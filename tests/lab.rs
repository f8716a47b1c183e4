//! The same executables on a machine with cgroup v2 alone: `scripts/lab` boots one. What is looked at there stands in
//! `scripts/lab.d`.
#![allow(clippy::unwrap_used, clippy::expect_used)]

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
    lab.args([
        "--timeout",
        "540",
        "pod-on-v2",
        "retry-on-v2",
        "rooms-on-v2",
    ]);
    // What it prints is shown when it fails, and names what did.
    let output = run(&mut lab, Duration::from_secs(580)).ok();
    println!("{}", output.stdout);
}
