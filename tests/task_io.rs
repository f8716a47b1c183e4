//! Tasks as their callers make them, over the supervisor's own socket: streams of bytes, runtime options, and a daemon that
//! is no containerd.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::print_stdout,
    reason = "tests panic where they cannot go on"
)]

#[path = "task_io/checkpoint.rs"]
mod checkpoint;
#[path = "failpoints/cri.rs"]
mod cri;
#[path = "task_io/crio.rs"]
mod crio;
#[path = "launch/daemon.rs"]
mod daemon;
#[path = "task_io/deleting.rs"]
mod deleting;
#[path = "failpoints/image.rs"]
mod image;
#[path = "task_io/kit.rs"]
mod kit;
#[path = "task_io/launching.rs"]
mod launching;
#[path = "task_io/loops.rs"]
mod loops;
#[path = "task_io/options.rs"]
mod options;
#[path = "task_io/pods.rs"]
mod pods;
#[path = "task_io/streaming.rs"]
mod streaming;
mod support;
#[path = "task_io/versions.rs"]
mod versions;
