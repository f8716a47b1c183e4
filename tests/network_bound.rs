//! The network under a bound, with the real executables: plugins that hang, fork and flee, many pods at once, netns that
//! are busy or not what they were, user namespaces, and two generations of the reference plugins.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::print_stdout,
    reason = "tests panic where they cannot go on"
)]

#[path = "launch/daemon.rs"]
mod daemon;
#[path = "creation/rig.rs"]
#[allow(dead_code, reason = "shared with the tests of creation")]
mod rig;
mod support;

#[path = "network_bound/hang.rs"]
mod hang;
#[path = "network_bound/kit.rs"]
mod kit;
#[path = "network_bound/lines.rs"]
mod lines;
#[path = "network_bound/many.rs"]
mod many;
#[path = "network_bound/netns.rs"]
mod netns;
#[path = "network_bound/real.rs"]
mod real;
#[path = "network_bound/users.rs"]
mod users;
