//! Many pods at once on one machine: random histories, and more requests than the network can serve.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::print_stdout,
    reason = "tests panic where they cannot go on"
)]

#[path = "histories/chaos.rs"]
mod chaos;
#[path = "launch/daemon.rs"]
mod daemon;
#[path = "histories/history.rs"]
mod history;
#[path = "histories/overload.rs"]
mod overload;
#[path = "creation/rig.rs"]
#[allow(dead_code, reason = "shared with the tests of creation")]
mod rig;
mod support;
