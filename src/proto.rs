//! Messages and services on the wire, generated from `protos/`, and the few helpers every user of them needs.
//!
//! Owns nothing but shapes: what containerd, the CRI and cgroup statistics look like in bytes. Promises that names,
//! numbers and types are containerd's. Must never hold a rule about what a message means; that is for the rooms.

pub mod any;
pub mod deadline;
pub mod time;

/// Declares one set of generated files; `$shared` are the modules its files look for beside them.
macro_rules! set {
    ($(#[$doc:meta])* $name:ident, use [$($shared:path),*]) => {
        $(#[$doc])*
        // Generated code: its style is the generator's, and it is not documented item by item.
        #[allow(warnings, clippy::all, clippy::pedantic, clippy::restriction)]
        #[allow(missing_docs, missing_debug_implementations)]
        pub mod $name {
            $(pub use $shared;)*
            include!(concat!(env!("OUT_DIR"), "/", stringify!($name), "/mod.rs"));
        }
    };
}

set!(
    /// `containerd.types` and `containerd.v1.types`: mounts, metrics, platforms, envelopes, process states.
    types, use []
);
set!(
    /// `containerd.runtime.sandbox.v1`: the sandbox service.
    sandbox, use [super::types::metrics, super::types::mount, super::types::platform]
);
set!(
    /// `containerd.task.v2`: the task service as daemons up to 1.7 call it.
    task_v2, use [super::types::mount, super::types::task, protobuf::well_known_types::empty]
);
set!(
    /// `containerd.task.v3`: the task service as daemons since 2.0 call it.
    task_v3, use [super::types::mount, super::types::task, protobuf::well_known_types::empty]
);
set!(
    /// `containerd.runtime.bootstrap.v1`: parameters and result of `start` since 2.3.
    bootstrap, use []
);
set!(
    /// `containerd.events`: what is published about tasks and sandboxes.
    events, use [super::types::mount, super::types::task]
);
set!(
    /// `containerd.services.events.ttrpc.v1`: the daemon's service that takes events.
    events_ttrpc, use [super::types::event, protobuf::well_known_types::empty]
);
set!(
    /// `containerd.services.streaming.v1`: streams of bytes, which we serve.
    streaming, use [protobuf::well_known_types::any]
);
set!(
    /// `containerd.runc.v1`: runtime options, checkpoint options, details of a pid.
    runc_options, use []
);
set!(
    /// `runtimeoptions.v1`: options for runtime types the CRI plugin does not know.
    runtimeoptions, use []
);
set!(
    /// `io.containerd.cgroups.v1`: statistics on cgroup v1.
    cgroup1, use []
);
set!(
    /// `io.containerd.cgroups.v2`: statistics on cgroup v2.
    cgroup2, use []
);
set!(
    /// `runtime.v1`: the pod configuration a sandbox is created with.
    cri, use []
);
