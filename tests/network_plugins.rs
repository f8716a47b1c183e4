//! Pods on networks of the reference plugins, both generations, driven through the real executables: who reaches whom,
//! what the plugins have made while the pod lives, and that nothing of it is left.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::print_stdout,
    reason = "tests panic where they cannot go on"
)]

#[path = "launch/daemon.rs"]
mod daemon;
#[path = "pod/kit.rs"]
#[allow(dead_code, reason = "shared with the tests of pods")]
mod kit;
mod support;

#[path = "network_plugins/chain.rs"]
mod chain;
#[path = "network_plugins/check.rs"]
mod check;
#[path = "network_plugins/cycles.rs"]
mod cycles;
#[path = "network_plugins/links.rs"]
mod links;
#[path = "network_plugins/lives.rs"]
mod lives;
#[path = "network_plugins/place.rs"]
mod place;
#[path = "network_plugins/ports.rs"]
mod ports;
#[path = "network_plugins/reach.rs"]
mod reach;
#[path = "network_plugins/wire.rs"]
mod wire;
