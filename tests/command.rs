//! The command `podvisor` as its users see it: every verb and flag against the real executables.
#![allow(clippy::unwrap_used, clippy::expect_used)]

#[path = "command/again.rs"]
mod again;
#[path = "command/exec.rs"]
mod exec;
#[path = "command/flags.rs"]
mod flags;
#[path = "command/help.rs"]
mod help;
#[path = "command/kit.rs"]
mod kit;
#[path = "command/listing.rs"]
mod listing;
#[path = "command/logs.rs"]
mod logs;
#[path = "command/many.rs"]
mod many;
#[path = "command/network.rs"]
mod network;
#[path = "command/run.rs"]
mod run;
#[path = "command/schema.rs"]
mod schema;
#[path = "command/sharing.rs"]
mod sharing;
#[path = "command/signals.rs"]
mod signals;
#[path = "command/stop.rs"]
mod stop;
mod support;
#[path = "command/terminals.rs"]
mod terminals;
#[path = "command/timeout.rs"]
mod timeout;
#[path = "command/tty.rs"]
mod tty;
#[path = "command/verbs.rs"]
mod verbs;
