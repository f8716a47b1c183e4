//! Bytes recorded from a containerd daemon decode to what the commands that caused them say (see
//! `tests/data/wire/README.md`), and encode to the same bytes again.
#![allow(clippy::unwrap_used)]

use podvisor::proto::{any, runc_options, runtimeoptions, task_v2, task_v3};
use protobuf::Message;
use protobuf::well_known_types::any::Any;
use task_v2::shim;

const HEADER: usize = 10;

fn file(name: &str) -> Vec<u8> {
    let path = format!("{}/tests/data/wire/{name}.bin", env!("CARGO_MANIFEST_DIR"));
    std::fs::read(&path).unwrap_or_else(|e| panic!("read {path}: {e}"))
}

/// The message in a recorded request, after a look at the frame around it.
fn request<M: Message>(name: &str, method: &str) -> M {
    let frame = file(name);
    let (header, body) = frame.split_at(HEADER);
    assert_eq!(
        u32::from_be_bytes(header[..4].try_into().unwrap()) as usize,
        body.len()
    );
    assert_eq!(header[7] % 2, 1, "streams opened by a client are odd");
    assert_eq!(header[8..], [1, 0], "a request without flags");
    let request = ttrpc::Request::parse_from_bytes(body).unwrap();
    assert_eq!(
        (request.service.as_str(), request.method.as_str()),
        ("containerd.task.v2.Task", method)
    );
    let message = M::parse_from_bytes(&request.payload).unwrap();
    assert!(
        message.unknown_fields().iter().next().is_none(),
        "{name} has fields we do not know"
    );
    assert_eq!(
        message.write_to_bytes().unwrap(),
        request.payload,
        "{name} encodes differently"
    );
    message
}

#[test]
fn options_on_standard_input_keep_their_type() {
    let runc = Any::parse_from_bytes(&file("stdin-start-runc")).unwrap();
    assert_eq!(
        runc.type_url,
        any::RUNC_OPTIONS,
        "the daemon writes bare names"
    );
    let options: runc_options::oci::Options =
        any::unpack(&runc, any::RUNC_OPTIONS).unwrap().unwrap();
    assert_eq!(
        (options.binary_name.as_str(), options.root.as_str()),
        ("/usr/sbin/runc", "/run/demo-root")
    );

    let other = Any::parse_from_bytes(&file("stdin-start-other")).unwrap();
    assert!(!any::is(&other, any::RUNC_OPTIONS));
    let options: runtimeoptions::runtimeoptions::Options =
        any::unpack(&other, any::RUNTIME_OPTIONS).unwrap().unwrap();
    assert_eq!(options.config_path, "/run/rec.toml");
}

#[test]
fn a_bare_any_looks_like_bootstrap_parameters() {
    use podvisor::proto::bootstrap::bootstrap::BootstrapParams;
    // The reason why the two must be told apart by comparing the id and the namespace with the flags.
    let params = BootstrapParams::parse_from_bytes(&file("stdin-start-runc")).unwrap();
    assert_eq!(params.instance_id, any::RUNC_OPTIONS);
}

#[test]
fn create_carries_bundle_mounts_and_options() {
    let create: shim::CreateTaskRequest = request("task-create-runc", "Create");
    assert_eq!(create.id, "demo-runc");
    assert_eq!(
        create.bundle,
        "/run/cd-state/io.containerd.runtime.v2.task/default/demo-runc"
    );
    assert!(!create.terminal);
    assert_eq!(
        (
            create.stdin.as_str(),
            create.stdout.as_str(),
            create.stderr.as_str()
        ),
        ("", "", "")
    );
    assert_eq!(create.rootfs.len(), 1);
    let mount = &create.rootfs[0];
    assert_eq!(
        (
            mount.type_.as_str(),
            mount.source.as_str(),
            mount.target.as_str()
        ),
        ("overlay", "overlay", "")
    );
    assert_eq!(mount.options[0], "index=off");
    assert!(
        mount
            .options
            .iter()
            .any(|o| o.starts_with("lowerdir=/run/cd-root/"))
    );
    assert!(any::is(&create.options, any::RUNC_OPTIONS));

    let create: shim::CreateTaskRequest = request("task-create-other", "Create");
    assert_eq!(create.id, "demo-rec");
    assert!(any::is(&create.options, any::RUNTIME_OPTIONS));
}

#[test]
fn version_three_reads_the_same_bytes() {
    let two: shim::CreateTaskRequest = request("task-create-runc", "Create");
    let three =
        task_v3::shim::CreateTaskRequest::parse_from_bytes(&two.write_to_bytes().unwrap()).unwrap();
    assert_eq!(
        three.write_to_bytes().unwrap(),
        two.write_to_bytes().unwrap()
    );
    assert_eq!(
        (three.id, three.rootfs, three.options),
        (two.id, two.rootfs, two.options)
    );
}

#[test]
fn exec_carries_a_process_as_json() {
    let exec: shim::ExecProcessRequest = request("task-exec-other", "Exec");
    assert_eq!(
        (exec.id.as_str(), exec.exec_id.as_str()),
        ("demo-rec", "e1")
    );
    assert!(
        exec.stdout.starts_with("/run/containerd/fifo/") && exec.stdout.ends_with("/e1-stdout")
    );
    assert!(
        any::is(&exec.spec, any::OCI_PROCESS),
        "{}",
        exec.spec.type_url
    );
    let process: serde_json::Value = serde_json::from_slice(&exec.spec.value).unwrap();
    assert_eq!(process["args"], serde_json::json!(["/bin/true"]));
}

#[test]
fn the_short_requests_name_their_process() {
    let start: shim::StartRequest = request("task-start-runc", "Start");
    assert_eq!(
        (start.id.as_str(), start.exec_id.as_str()),
        ("demo-runc", "")
    );
    let kill: shim::KillRequest = request("task-kill-runc", "Kill");
    assert_eq!(
        (
            kill.id.as_str(),
            kill.exec_id.as_str(),
            kill.signal,
            kill.all
        ),
        ("demo-runc", "", 9, false)
    );
    let state: shim::StateRequest = request("task-state-runc", "State");
    assert_eq!(state.id, "demo-runc");
    let wait: shim::WaitRequest = request("task-wait-runc", "Wait");
    assert_eq!(
        (wait.id.as_str(), wait.exec_id.as_str()),
        ("demo-runc", "e1")
    );
    let connect: shim::ConnectRequest = request("task-connect-runc", "Connect");
    assert_eq!(connect.id, "demo-runc");
    let close: shim::CloseIORequest = request("task-closeio-other", "CloseIO");
    assert_eq!(
        (close.id.as_str(), close.exec_id.as_str(), close.stdin),
        ("demo-rec", "e1", true)
    );
    let delete: shim::DeleteRequest = request("task-delete-runc", "Delete");
    assert_eq!(
        (delete.id.as_str(), delete.exec_id.as_str()),
        ("demo-runc", "")
    );
    let shutdown: shim::ShutdownRequest = request("task-shutdown-runc", "Shutdown");
    assert_eq!((shutdown.id.as_str(), shutdown.now), ("demo-runc", false));
}
