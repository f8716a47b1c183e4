//! `podvisor-cni` under containerd's CRI: a client that gives up sooner than the network is ready, and comes again, as
//! kubelets do.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "tests panic where they cannot go on"
)]
#![allow(
    clippy::print_stdout,
    reason = "captured by the test runner, and the summary of a slow run"
)]

#[path = "cni_plugin_cri/converge.rs"]
mod converge;
#[path = "failpoints/cri.rs"]
mod cri;
#[path = "cni_plugin_cri/field.rs"]
mod field;
#[path = "cni_plugin_cri/forward.rs"]
mod forward;
#[path = "failpoints/image.rs"]
mod image;
#[cfg(feature = "failpoint")]
#[path = "cni_plugin_cri/kills.rs"]
mod kills;
#[path = "cni_plugin_cri/kit.rs"]
mod kit;
#[path = "owed/kit.rs"]
mod owed_kit;
#[cfg(feature = "failpoint")]
#[path = "cni_plugin/points.rs"]
mod points;
#[path = "cni_plugin_cri/same.rs"]
mod same;
mod support;
