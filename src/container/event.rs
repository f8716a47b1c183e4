//! The task events, as containerd names and fills them.

use protobuf::Message;
use protobuf::well_known_types::any::Any;

use super::record::{Events, ExitRecord};
use super::state::Streams;
use crate::clock::from_unix_nanos;
use crate::mount::Mount;
use crate::proto::any;
use crate::proto::events::mount::Mount as WireMount;
use crate::proto::events::task_events as wire;
use crate::proto::time::timestamp;

/// Speaks for one container.
pub(super) struct Announcer<'a> {
    pub events: &'a dyn Events,
    pub id: &'a str,
}

impl Announcer<'_> {
    pub fn created(&self, bundle: &str, rootfs: &[Mount], streams: &Streams, pid: u32) {
        let io = wire::TaskIO {
            stdin: streams.stdin.clone(),
            stdout: streams.stdout.clone(),
            stderr: streams.stderr.clone(),
            terminal: streams.terminal,
            ..Default::default()
        };
        let event = wire::TaskCreate {
            container_id: self.id.into(),
            bundle: bundle.into(),
            rootfs: rootfs.iter().map(mount).collect(),
            io: Some(io).into(),
            pid,
            ..Default::default()
        };
        self.publish("/tasks/create", any::TASK_CREATE, &event);
    }

    pub fn started(&self, pid: u32) {
        let event = wire::TaskStart {
            container_id: self.id.into(),
            pid,
            ..Default::default()
        };
        self.publish("/tasks/start", any::TASK_START, &event);
    }

    pub fn exec_added(&self, exec_id: &str) {
        let event = wire::TaskExecAdded {
            container_id: self.id.into(),
            exec_id: exec_id.into(),
            ..Default::default()
        };
        self.publish("/tasks/exec-added", any::TASK_EXEC_ADDED, &event);
    }

    pub fn exec_started(&self, exec_id: &str, pid: u32) {
        let event = wire::TaskExecStarted {
            container_id: self.id.into(),
            exec_id: exec_id.into(),
            pid,
            ..Default::default()
        };
        self.publish("/tasks/exec-started", any::TASK_EXEC_STARTED, &event);
    }

    /// `exec_id` empty: of the container, whose exit carries its own id there.
    pub fn exited(&self, exec_id: &str, pid: u32, exit: ExitRecord) {
        let event = wire::TaskExit {
            container_id: self.id.into(),
            id: if exec_id.is_empty() { self.id } else { exec_id }.into(),
            pid,
            exit_status: exit.code,
            exited_at: Some(timestamp(from_unix_nanos(exit.at))).into(),
            ..Default::default()
        };
        self.publish("/tasks/exit", any::TASK_EXIT, &event);
    }

    /// The kernel has killed processes of the container, or they are stuck, for want of memory.
    pub fn out_of_memory(&self) {
        let event = wire::TaskOOM {
            container_id: self.id.into(),
            ..Default::default()
        };
        self.publish("/tasks/oom", any::TASK_OOM, &event);
    }

    /// Of the container; execs are deleted in silence.
    pub fn deleted(&self, pid: u32, exit: ExitRecord) {
        let event = wire::TaskDelete {
            container_id: self.id.into(),
            pid,
            exit_status: exit.code,
            exited_at: Some(timestamp(from_unix_nanos(exit.at))).into(),
            ..Default::default()
        };
        self.publish("/tasks/delete", any::TASK_DELETE, &event);
    }

    pub fn paused(&self) {
        let event = wire::TaskPaused {
            container_id: self.id.into(),
            ..Default::default()
        };
        self.publish("/tasks/paused", any::TASK_PAUSED, &event);
    }

    pub fn resumed(&self) {
        let event = wire::TaskResumed {
            container_id: self.id.into(),
            ..Default::default()
        };
        self.publish("/tasks/resumed", any::TASK_RESUMED, &event);
    }

    fn publish<M: Message>(&self, topic: &'static str, name: &str, event: &M) {
        let packed: Any = match any::pack(name, event) {
            Ok(packed) => packed,
            // Above 2 GiB only; strings of requests are below 4 MiB.
            Err(error) => return tracing::error!(%error, topic, "event not encoded"),
        };
        self.events.publish(topic, packed);
    }
}

fn mount(mount: &Mount) -> WireMount {
    WireMount {
        type_: mount.kind.clone(),
        source: mount.source.clone(),
        target: mount.target.clone(),
        options: mount.options.clone(),
        ..Default::default()
    }
}
