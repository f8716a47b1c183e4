//! ttrpc services: decode, call, encode; nothing is decided here.
//!
//! Promise: every method of every service is overridden (the generated defaults answer NOT_FOUND where containerd
//! expects UNIMPLEMENTED), a panic becomes INTERNAL, and a dropped handler drops a wait, never work (`guard`).

mod guard;
mod sandbox;
mod streaming;
mod task;
mod tidy;

use std::collections::HashMap;
use std::sync::Arc;

use tokio::sync::watch;

use crate::pod::Pod;
use crate::proto::{sandbox::sandbox_ttrpc, streaming::streaming_ttrpc, task_v2, task_v3};

/// Task v2, Task v3, Sandbox and Streaming over one pod, for `ttrpc::asynchronous::Server::register_service`.
/// `connections`: how many there are, now and as it changes.
pub fn all(
    pod: Pod,
    connections: watch::Receiver<usize>,
) -> HashMap<String, ttrpc::asynchronous::Service> {
    let task = Arc::new(task::TaskService::new(pod.clone()));
    let mut services = task_v2::shim_ttrpc::create_task(task.clone());
    services.extend(task_v3::shim_ttrpc::create_task(task));
    services.extend(sandbox_ttrpc::create_sandbox(Arc::new(
        sandbox::SandboxService::new(pod.clone()),
    )));
    services.extend(streaming_ttrpc::create_streaming(Arc::new(
        streaming::StreamingService::new(pod, connections),
    )));
    services
}
