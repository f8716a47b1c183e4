//! What is left after a death or a failure anywhere, and that all of it can be removed: every named point of failure, the
//! table of docs/recovery.md, and kills at random.
//!
//! Many cells in one machine side by side: each has a namespace of its own, the machine is looked over at the end.
#![cfg(feature = "failpoint")]
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "tests panic where they cannot go on"
)]
#![allow(
    clippy::print_stdout,
    reason = "captured by the test runner, and the summary of a slow run"
)]

#[path = "recovery/daemon.rs"]
mod daemon;
#[path = "recovery/kit.rs"]
mod kit;
#[path = "recovery/lives.rs"]
mod lives;
#[path = "recovery/points.rs"]
mod points;
#[path = "recovery/random.rs"]
mod random;
mod support;
#[path = "recovery/table.rs"]
mod table;
