//! The CNI plugin `podvisor-cni`, called as libcni calls it, in front of the reference plugins: attempts that give up,
//! join, claim and are deleted; every process killed at every step; what it passes through.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "tests panic where they cannot go on"
)]
#![allow(
    clippy::print_stdout,
    reason = "captured by the test runner and shown with a failure"
)]

#[path = "cni_plugin/attempts.rs"]
mod attempts;
#[path = "cni_plugin/cost.rs"]
mod cost;
#[path = "cni_plugin/ends.rs"]
mod ends;
#[cfg(feature = "failpoint")]
#[path = "cni_plugin/faults.rs"]
mod faults;
#[path = "cni_plugin/kit.rs"]
mod kit;
#[path = "owed/kit.rs"]
mod owed_kit;
#[cfg(feature = "failpoint")]
#[path = "cni_plugin/points.rs"]
mod points;
#[path = "cni_plugin/real.rs"]
mod real;
mod support;
#[path = "cni_plugin/verbs.rs"]
mod verbs;
#[path = "cni_plugin/wrapped.rs"]
mod wrapped;
