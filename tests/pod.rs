//! One real supervisor from end to end: the sandbox service, its end, and what it does when others misbehave.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::print_stdout,
    reason = "tests panic where they cannot go on"
)]

#[path = "launch/daemon.rs"]
mod daemon;
mod support;

#[path = "pod/children.rs"]
mod children;
#[path = "pod/ending.rs"]
mod ending;
#[path = "pod/events.rs"]
mod events;
#[path = "pod/kit.rs"]
#[allow(dead_code, reason = "other tests use the rest of it")]
mod kit;
#[path = "pod/labels.rs"]
mod labels;
#[path = "pod/networks.rs"]
mod networks;
#[path = "pod/paths.rs"]
mod paths;
#[path = "pod/robust.rs"]
mod robust;
#[path = "pod/sandbox.rs"]
mod sandbox;
#[path = "pod/starting.rs"]
mod starting;
#[path = "pod/stopping.rs"]
mod stopping;
#[path = "pod/updating.rs"]
mod updating;
