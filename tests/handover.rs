//! One network, several supervisors of the same pod: parked by pod key, taken over, or undone, whoever dies meanwhile.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::print_stdout,
    reason = "tests panic where they cannot go on"
)]

#[path = "launch/daemon.rs"]
mod daemon;
#[path = "creation/rig.rs"]
#[allow(dead_code, reason = "shared with the tests of creation and removal")]
mod rig;
mod support;

#[path = "handover/containerd.rs"]
mod containerd;
#[path = "handover/killed.rs"]
mod killed;
#[path = "handover/kit.rs"]
mod kit;
#[path = "handover/left_alone.rs"]
mod left_alone;
#[path = "handover/shown.rs"]
mod shown;
#[path = "handover/taken.rs"]
mod taken;
#[path = "handover/told.rs"]
mod told;
#[path = "handover/twice.rs"]
mod twice;
#[path = "handover/users.rs"]
mod users;
