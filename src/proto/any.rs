//! `google.protobuf.Any` as containerd writes it.
//!
//! Owns the names of the types that travel inside an `Any`. Promises to write bare names (`containerd.events.TaskExit`)
//! and to read any spelling of the same name. Must never decode by guess: a message is opened only under its own name,
//! because different types share field numbers (field 3 is TOML in one kind of options and a cgroup path in another).

use protobuf::Message;
use protobuf::well_known_types::any::Any;

/// Options of the runc family: [`crate::proto::runc_options::oci::Options`].
pub const RUNC_OPTIONS: &str = "containerd.runc.v1.Options";
/// Options of one checkpoint: [`crate::proto::runc_options::oci::CheckpointOptions`].
pub const CHECKPOINT_OPTIONS: &str = "containerd.runc.v1.CheckpointOptions";
/// What is known of a pid: [`crate::proto::runc_options::oci::ProcessDetails`].
pub const PROCESS_DETAILS: &str = "containerd.runc.v1.ProcessDetails";
/// Options with a TOML body: [`crate::proto::runtimeoptions::runtimeoptions::Options`].
pub const RUNTIME_OPTIONS: &str = "runtimeoptions.v1.Options";
/// The pod's configuration: [`crate::proto::cri::sandbox_config::PodSandboxConfig`].
pub const POD_SANDBOX_CONFIG: &str = "runtime.v1.PodSandboxConfig";
/// Limits as CRI counts them: [`crate::proto::cri::sandbox_config::LinuxContainerResources`].
pub const CRI_RESOURCES: &str = "runtime.v1.LinuxContainerResources";
/// No options at all, as `ctr sandboxes run` says it.
pub const EMPTY: &str = "google.protobuf.Empty";
/// Statistics on cgroup v1: [`crate::proto::cgroup1::metrics::Metrics`].
pub const CGROUP1_METRICS: &str = "io.containerd.cgroups.v1.Metrics";
/// Statistics on cgroup v2: [`crate::proto::cgroup2::metrics::Metrics`].
pub const CGROUP2_METRICS: &str = "io.containerd.cgroups.v2.Metrics";
/// An OCI runtime spec as JSON.
pub const OCI_SPEC: &str = "types.containerd.io/opencontainers/runtime-spec/1/Spec";
/// The `process` object of an OCI runtime spec as JSON.
pub const OCI_PROCESS: &str = "types.containerd.io/opencontainers/runtime-spec/1/Process";
/// The `linux.resources` object of an OCI runtime spec as JSON.
pub const OCI_RESOURCES: &str = "types.containerd.io/opencontainers/runtime-spec/1/LinuxResources";
/// The features document of an OCI runtime as JSON.
pub const OCI_FEATURES: &str =
    "types.containerd.io/opencontainers/runtime-spec/1/features/Features";

/// Opens a stream: [`crate::proto::streaming::streaming::StreamInit`].
pub const STREAM_INIT: &str = "containerd.services.streaming.v1.StreamInit";
/// Bytes of a stream: [`crate::proto::types::transfer::Data`].
pub const STREAM_DATA: &str = "containerd.types.transfer.Data";
/// Permission to send more: [`crate::proto::types::transfer::WindowUpdate`].
pub const STREAM_WINDOW: &str = "containerd.types.transfer.WindowUpdate";

/// [`crate::proto::events::task_events::TaskCreate`], topic `/tasks/create`.
pub const TASK_CREATE: &str = "containerd.events.TaskCreate";
/// [`crate::proto::events::task_events::TaskStart`], topic `/tasks/start`.
pub const TASK_START: &str = "containerd.events.TaskStart";
/// [`crate::proto::events::task_events::TaskDelete`], topic `/tasks/delete`.
pub const TASK_DELETE: &str = "containerd.events.TaskDelete";
/// [`crate::proto::events::task_events::TaskExit`], topic `/tasks/exit`.
pub const TASK_EXIT: &str = "containerd.events.TaskExit";
/// [`crate::proto::events::task_events::TaskOOM`], topic `/tasks/oom`.
pub const TASK_OOM: &str = "containerd.events.TaskOOM";
/// [`crate::proto::events::task_events::TaskExecAdded`], topic `/tasks/exec-added`.
pub const TASK_EXEC_ADDED: &str = "containerd.events.TaskExecAdded";
/// [`crate::proto::events::task_events::TaskExecStarted`], topic `/tasks/exec-started`.
pub const TASK_EXEC_STARTED: &str = "containerd.events.TaskExecStarted";
/// [`crate::proto::events::task_events::TaskPaused`], topic `/tasks/paused`.
pub const TASK_PAUSED: &str = "containerd.events.TaskPaused";
/// [`crate::proto::events::task_events::TaskResumed`], topic `/tasks/resumed`.
pub const TASK_RESUMED: &str = "containerd.events.TaskResumed";
/// [`crate::proto::events::task_events::TaskCheckpointed`], topic `/tasks/checkpointed`.
pub const TASK_CHECKPOINTED: &str = "containerd.events.TaskCheckpointed";
/// [`crate::proto::events::sandbox_events::SandboxCreate`], topic `/sandboxes/create`.
pub const SANDBOX_CREATE: &str = "containerd.events.SandboxCreate";
/// [`crate::proto::events::sandbox_events::SandboxStart`], topic `/sandboxes/start`.
pub const SANDBOX_START: &str = "containerd.events.SandboxStart";
/// [`crate::proto::events::sandbox_events::SandboxExit`], topic `/sandboxes/exit`.
pub const SANDBOX_EXIT: &str = "containerd.events.SandboxExit";

/// Puts `message` into an `Any` called `name`, written as it is: containerd knows no `type.googleapis.com/` prefix.
///
/// # Errors
/// When the message cannot be encoded, which is the case only above 2 GiB.
pub fn pack<M: Message>(name: &str, message: &M) -> protobuf::Result<Any> {
    Ok(raw(name, message.write_to_bytes()?))
}

/// Puts bytes that are no protobuf message (JSON documents) into an `Any` called `name`.
#[must_use]
pub fn raw(name: &str, value: Vec<u8>) -> Any {
    Any {
        type_url: name.to_owned(),
        value,
        ..Any::default()
    }
}

/// Whether `any` holds the type `name`, whatever prefix either spelling has: the part after the last `/` counts.
#[must_use]
pub fn is(any: &Any, name: &str) -> bool {
    let wanted = last(name);
    !wanted.is_empty() && last(&any.type_url) == wanted
}

/// Opens `any` when it holds `name`; `Ok(None)` when it holds something else.
///
/// # Errors
/// When the name fits and the bytes do not.
pub fn unpack<M: Message>(any: &Any, name: &str) -> protobuf::Result<Option<M>> {
    if is(any, name) {
        M::parse_from_bytes(&any.value).map(Some)
    } else {
        Ok(None)
    }
}

/// Whether `any` says nothing: no type, or `google.protobuf.Empty`.
#[must_use]
pub fn is_nothing(any: &Any) -> bool {
    any.type_url.is_empty() || is(any, EMPTY)
}

fn last(name: &str) -> &str {
    name.rsplit('/').next().unwrap_or(name)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::proto::events::task_events::TaskExit;
    use crate::proto::runc_options::oci::Options;

    #[test]
    fn names_are_written_bare_and_read_with_any_prefix() {
        let exit = TaskExit {
            container_id: "c1".into(),
            pid: 7,
            exit_status: 137,
            ..TaskExit::default()
        };
        let mut any = pack(TASK_EXIT, &exit).unwrap();
        assert_eq!(any.type_url, "containerd.events.TaskExit");
        assert_eq!(
            unpack::<TaskExit>(&any, TASK_EXIT).unwrap(),
            Some(exit.clone())
        );
        any.type_url = "type.googleapis.com/containerd.events.TaskExit".into();
        assert_eq!(unpack::<TaskExit>(&any, TASK_EXIT).unwrap(), Some(exit));
    }

    #[test]
    fn another_name_is_not_opened() {
        // Field 3 of runtimeoptions.v1.Options is TOML; as runc options it would become a cgroup path.
        let any = raw(RUNTIME_OPTIONS, b"\x1a\x15SystemdCgroup = true\n".to_vec());
        assert_eq!(unpack::<Options>(&any, RUNC_OPTIONS).unwrap(), None);
        assert!(!is(&raw("", Vec::new()), ""));
        assert!(!is(
            &raw("xcontainerd.runc.v1.Options", Vec::new()),
            RUNC_OPTIONS
        ));
    }

    #[test]
    fn nothing_has_two_spellings() {
        assert!(is_nothing(&Any::default()));
        assert!(is_nothing(&raw(
            "type.googleapis.com/google.protobuf.Empty",
            Vec::new()
        )));
        assert!(!is_nothing(&raw(RUNC_OPTIONS, Vec::new())));
    }
}
