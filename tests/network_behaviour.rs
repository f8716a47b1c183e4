//! What podvisor does with each way a plugin can behave, with the real executables: the rows of the table in
//! docs/network.md that no other test file shows.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::print_stdout,
    reason = "tests panic where they cannot go on"
)]

mod support;

#[path = "network_behaviour/at_add.rs"]
mod at_add;
#[path = "network_behaviour/at_del.rs"]
mod at_del;
#[path = "network_behaviour/five_minutes.rs"]
mod five_minutes;
#[path = "network_bound/kit.rs"]
#[allow(dead_code, reason = "shared with the tests of the bound")]
mod kit;
#[path = "network_behaviour/place.rs"]
mod place;
#[path = "network_behaviour/several.rs"]
mod several;
