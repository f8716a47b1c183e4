//! What the integration tests stand on: a machine of their own for each test, a check that nothing was left behind,
//! real peers (containerd, CNI plugins, OCI runtimes), and fakes that fail on demand.
//!
//! Use it as `mod support;` from a file in `tests/`. A typical test:
//!
//! ```ignore
//! #[test]
//! fn a_pod_leaves_nothing() {
//!     sandboxed("a_pod_leaves_nothing", || {
//!         let rootfs = rootfs::make();
//!         cni::bridge("testnet", "pvt0", "10.87.1.0/24").write();
//!         let before = Snapshot::take();
//!         podvisor(&["run", "--rootfs", rootfs.str(), "--", "/bin/true"]).ok();
//!         before.assert_unchanged();
//!     });
//! }
//! ```
#![allow(dead_code, reason = "each test file uses its own part of this module")]
#![allow(
    unused_imports,
    reason = "each test file uses its own part of this module"
)]
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a harness that cannot go on panics"
)]
#![allow(
    clippy::print_stdout,
    reason = "captured by the test runner and shown with a failure"
)]

pub mod bin;
pub mod cni;
pub mod fake;
pub mod grpc;
pub mod peers;
pub mod require;
pub mod residue;
pub mod rootfs;
pub mod sandbox;

pub use bin::{Output, podvisor, run, shim};
pub use grpc::Sandboxes;
pub use peers::Containerd;
pub use residue::{Scope, Snapshot};
pub use sandbox::{Sandbox, sandboxed};

use std::time::{Duration, Instant};

/// Calls `check` every 20 ms until it gives something, for at most `bound`.
pub fn eventually<T>(bound: Duration, what: &str, mut check: impl FnMut() -> Option<T>) -> T {
    let end = Instant::now() + bound;
    loop {
        if let Some(found) = check() {
            return found;
        }
        assert!(Instant::now() < end, "not within {bound:?}: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Runs a script that must work.
pub fn sh(script: &str) {
    let done = run(
        std::process::Command::new("bash").args(["-euc", script]),
        Duration::from_secs(30),
    );
    assert_eq!(done.code, Some(0), "{script}: {done:?}");
}

/// Where cgroup hierarchies are mounted in the sandbox.
pub fn cgroup_mounts() -> Vec<std::path::PathBuf> {
    sandbox::cgroup_roots()
}

/// Of a process: resident memory in kB, threads, descriptors.
pub fn cost_of(pid: u32) -> (u64, u64, usize) {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let number = |name: &str| {
        let line = status.lines().find(|line| line.starts_with(name)).unwrap();
        let word = line.split_ascii_whitespace().nth(1);
        word.unwrap().parse().unwrap()
    };
    let descriptors = std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap();
    (number("VmRSS:"), number("Threads:"), descriptors.count())
}

/// Whether this run may take its time (`scripts/test --slow`).
pub fn slow() -> bool {
    std::env::var_os("PODVISOR_SLOW").is_some()
}
