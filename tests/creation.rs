//! Creating pods with the real executables: requests that time out and are repeated, creations that fail or are cut
//! short, and what is left of them (nothing).
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::print_stdout,
    reason = "tests panic where they cannot go on"
)]

#[path = "launch/daemon.rs"]
mod daemon;
#[path = "creation/rig.rs"]
#[allow(dead_code, reason = "shared with the tests of removal")]
mod rig;
mod support;

#[path = "creation/cut_short.rs"]
mod cut_short;
#[path = "creation/failing.rs"]
mod failing;
#[path = "creation/joining.rs"]
mod joining;
#[path = "creation/parked.rs"]
mod parked;
