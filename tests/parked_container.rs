//! Creations and starts of containers that outlive whoever asked for them: docs/retry.md over the real socket, with real
//! OCI runtimes behind a wrapper that keeps them waiting.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::print_stdout,
    reason = "tests panic where they cannot go on"
)]

#[path = "launch/daemon.rs"]
mod daemon;
#[path = "creation/rig.rs"]
#[allow(dead_code, reason = "shared with the tests of pods")]
mod rig;
mod support;

#[path = "parked_container/bounds.rs"]
mod bounds;
#[path = "parked_container/command.rs"]
mod command;
#[path = "parked_container/daemons.rs"]
mod daemons;
#[path = "parked_container/ending.rs"]
mod ending;
#[path = "parked_container/joining.rs"]
mod joining;
#[path = "parked_container/kit.rs"]
mod kit;
#[path = "parked_container/starting.rs"]
mod starting;
