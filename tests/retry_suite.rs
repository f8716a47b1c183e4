//! The retry protocol of pod creation (docs/retry.md), with real supervisors, the real bridge plugin and infra processes
//! that are held up on the way: the pods' half of CRI-O's time-out suite, what that leaves out, its checklist, and
//! faults from the field.
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

#[path = "retry_suite/checklist.rs"]
mod checklist;
#[path = "retry_suite/checklist_ends.rs"]
mod checklist_ends;
#[path = "retry_suite/documented.rs"]
mod documented;
#[path = "retry_suite/field.rs"]
mod field;
#[path = "retry_suite/kit.rs"]
mod kit;
#[path = "retry_suite/seen.rs"]
mod seen;
#[path = "retry_suite/timeout_command.rs"]
mod timeout_command;
#[path = "retry_suite/timeout_pods.rs"]
mod timeout_pods;
#[path = "retry_suite/uncovered.rs"]
mod uncovered;
