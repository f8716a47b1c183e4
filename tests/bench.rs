//! Benchmarks: what podvisor costs beside containerd's Go shim, in turn in one run. `scripts/bench` runs them with the
//! released executables; the ordinary test run leaves them out. What they gave stands in docs/performance.md.
#![allow(clippy::unwrap_used, clippy::expect_used)]
#![allow(clippy::print_stdout, reason = "the tables")]
#![allow(dead_code, reason = "parts of other tests' kits are used here")]

#[path = "failpoints/cri.rs"]
mod cri;
#[path = "launch/daemon.rs"]
mod daemon;
#[path = "failpoints/image.rs"]
mod image;
#[path = "bench/latency.rs"]
mod latency;
#[path = "oracle/listener.rs"]
mod listener;
#[path = "bench/node.rs"]
mod node;
#[path = "pod/kit.rs"]
mod pod;
#[path = "bench/pods.rs"]
mod pods;
#[path = "bench/processes.rs"]
mod processes;
#[path = "bench/rig.rs"]
mod rig;
#[path = "bench/shims.rs"]
mod shims;
#[path = "oracle/side.rs"]
mod side;
mod support;
#[path = "bench/table.rs"]
mod table;
#[path = "oracle/transcript.rs"]
mod transcript;
