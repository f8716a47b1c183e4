//! Failing methods of the shim, as containerd's own rollback tests have them: through CRI, and over the Sandbox service.
//!
//! Each scenario: the caller is told the injected text, the pod stays known until it is removed, its removal succeeds,
//! nothing is left.
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

#[path = "failpoints/cri.rs"]
mod cri;
#[path = "failpoints/image.rs"]
mod image;
#[path = "failpoints/many.rs"]
mod many;
#[path = "failpoints/pods.rs"]
mod pods;
#[path = "failpoints/sandboxes.rs"]
mod sandboxes;
mod support;

/// Of the executable `containerd-shim-podvisor-fp-v1`.
const RUNTIME: &str = "io.containerd.podvisor-fp.v1";

/// `io.containerd.runtime.v2.shim.failpoint.<Method>` for each pair.
fn annotations(failing: &[(&str, &str)]) -> Vec<(String, String)> {
    let key = |method: &str| format!("{}{method}", podvisor::failpoint::PREFIX);
    let pairs = failing.iter();
    pairs
        .map(|(method, terms)| (key(method), (*terms).to_owned()))
        .collect()
}
