//! One real supervisor from end to end: the sandbox service, its end, and what it does when others misbehave.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::print_stdout,
    reason = "tests panic where they cannot go on"
)]

#[path = "launch/daemon.rs"]
#[allow(dead_code, reason = "other tests use the rest of it")]
mod daemon;
mod support;

#[path = "supervisor/children.rs"]
mod children;
#[path = "supervisor/kit.rs"]
#[allow(dead_code, reason = "other tests use the rest of it")]
mod kit;
#[path = "supervisor/ending.rs"]
mod ending;
#[path = "supervisor/robust.rs"]
mod robust;
#[path = "supervisor/sandbox.rs"]
mod sandbox;
#[path = "supervisor/starting.rs"]
mod starting;
