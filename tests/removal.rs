//! Removing pods with the real executables: again and again, after their supervisor was killed, with a damaged journal,
//! and supervisors that nobody uses.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::print_stdout,
    reason = "tests panic where they cannot go on"
)]

#[path = "launch/daemon.rs"]
mod daemon;
#[path = "creation/rig.rs"]
#[allow(dead_code, reason = "shared with the tests of creation")]
mod rig;
mod support;

#[path = "removal/at_once.rs"]
mod at_once;
#[path = "removal/cut.rs"]
mod cut;
#[path = "removal/damaged.rs"]
mod damaged;
#[path = "removal/exits.rs"]
mod exits;
#[path = "removal/idle.rs"]
mod idle;
#[path = "removal/killed.rs"]
mod killed;
#[path = "removal/outside.rs"]
mod outside;
#[path = "removal/proxy.rs"]
mod proxy;
#[path = "removal/repeated.rs"]
mod repeated;
#[path = "removal/restart.rs"]
mod restart;
#[path = "removal/stale.rs"]
mod stale;
