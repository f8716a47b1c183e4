//! Checkpoint and restore: what the runtime is told, what becomes of the container, and who says that it cannot be.
//!
//! criu works on few machines: here a dump is a file, and a restore is a new start. The lab has it for real
//! (`tests/lab/criu.rs`).

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use podvisor::proto::any;
use podvisor::proto::runc_options::oci::{CheckpointOptions, Options as RuncOptions};
use podvisor::proto::task_v3::shim as task;
use protobuf::well_known_types::any::Any;
use ttrpc::Code;

use crate::kit::{BOUND, Shim, block_on, delete, kill, limit, run, start, wait};
use crate::support::{Snapshot, eventually, require, sandboxed};

/// The only directory that supervisors of these tests look for programs in.
const PATH: &str = "/run/path";
const IMAGE: &str = "/run/image";

fn script(name: &str, text: &str) {
    fs::create_dir_all(PATH).unwrap();
    let path = Path::new(PATH).join(name);
    fs::write(&path, format!("#!/bin/sh\n{text}\n")).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
}

/// runc under the name of a wrapper, with dumps that are files.
fn emulated() {
    let runc = require::find("runc").unwrap();
    script("runc", &format!("exec {} \"$@\"", runc.display()));
    let text = r#"
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
for id; do :; done
all="$*" image= work= head=
while [ $# -gt 0 ]; do
  case $1 in
    checkpoint|restore) verb=$1; shift; break ;;
    --root|--log|--log-format) [ $1 != --log ] || log=$2; head="$head $1 $2"; shift 2 ;;
    *) exec runc $all ;;
  esac
done
pid= console= bundle= leave=
while [ $# -gt 1 ]; do
  case $1 in
    --image-path) image=$2; shift ;;
    --work-path) work=$2; shift ;;
    --pid-file) pid=$2; shift ;;
    --bundle) bundle=$2; shift ;;
    --console-socket) console=$2; shift ;;
    --leave-running) leave=1 ;;
  esac
  shift
done
if [ $verb = checkpoint ]; then
  echo "$all" >$work/dump.log
  [ ! -e /run/no-dump ] || { echo 'criu failed: no dump today' >&2; exit 1; }
  echo "$all" >$image/dump
  [ -n "$leave" ] || runc $head kill $id KILL
  exit 0
fi
echo "$all" >/run/restored
[ -e $image/dump ] || { echo '{"level":"error","msg":"no dump in the image"}' >>$log; exit 1; }
runc $head create --bundle $bundle --pid-file $pid ${console:+--console-socket $console} $id && exec runc $head start $id
"#;
    script("emulated", text);
}

fn options() -> Option<Any> {
    let options = RuncOptions {
        binary_name: format!("{PATH}/emulated"),
        ..Default::default()
    };
    Some(any::pack(any::RUNC_OPTIONS, &options).unwrap())
}

fn dump(options: CheckpointOptions) -> task::CheckpointTaskRequest {
    task::CheckpointTaskRequest {
        id: "c".into(),
        path: IMAGE.into(),
        options: Some(any::pack(any::CHECKPOINT_OPTIONS, &options).unwrap()).into(),
        ..Default::default()
    }
}

/// Code and text.
fn refusal<T: std::fmt::Debug>(answer: ttrpc::Result<T>) -> (Code, String) {
    match answer {
        Err(ttrpc::Error::RpcStatus(status)) => (status.code(), status.message),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_container_is_dumped_and_another_restored_from_it() {
    const NAME: &str = "checkpoint::a_container_is_dumped_and_another_restored_from_it";
    sandboxed(NAME, || {
        if !require::tool("runc") {
            return;
        }
        emulated();
        script("criu", "exit 0");
        let before = Snapshot::take();
        let shim = Shim::launch("echo begun; exec sleep 1000", |b| b.env("PATH", PATH));
        let out = shim.bundle.dir.join("out");
        let printed = |text: &str| {
            eventually(BOUND, "the program has printed", || {
                (fs::read_to_string(&out).ok()? == text).then_some(())
            })
        };
        block_on(async {
            let client = shim.client().await;
            let request = task::CreateTaskRequest {
                options: options().into(),
                stdout: format!("file://{}", out.display()),
                ..shim.request()
            };
            run(&client, &request).await;
            printed("begun\n");
            let task = client.task();
            // It goes on after a dump, unless it is to end.
            let all = CheckpointOptions {
                open_tcp: true,
                external_unix_sockets: true,
                terminal: true,
                file_locks: true,
                empty_namespaces: vec!["network".into()],
                cgroups_mode: "soft".into(),
                work_path: "/run/criu-work".into(),
                ..Default::default()
            };
            task.checkpoint(limit(), &dump(all)).await.unwrap();
            let told = fs::read_to_string(format!("{IMAGE}/dump")).unwrap();
            let wanted = "checkpoint --image-path /run/image --work-path /run/criu-work --leave-running --tcp-established \
                          --ext-unix-sk --shell-job --file-locks --empty-ns network --manage-cgroups-mode soft c\n";
            assert!(told.ends_with(wanted), "{told}");
            assert!(
                Path::new("/run/criu-work/dump.log").exists(),
                "it was named"
            );
            let end = CheckpointOptions {
                exit: true,
                ..Default::default()
            };
            fs::write("/run/no-dump", "").unwrap();
            let (code, text) = refusal(task.checkpoint(limit(), &dump(end.clone())).await);
            let log = shim.bundle.dir.join("criu-dump.log");
            assert_eq!(code, Code::UNKNOWN);
            assert!(text.contains(log.to_str().unwrap()), "{text}");
            assert!(log.exists() && !shim.bundle.dir.join("criu-work").exists());
            fs::remove_file("/run/no-dump").unwrap();
            task.checkpoint(limit(), &dump(end)).await.unwrap();
            assert_eq!(wait(&client, "").await, 137);
            let (code, _) = refusal(task.checkpoint(limit(), &dump(Default::default())).await);
            assert_eq!(code, Code::FAILED_PRECONDITION);
            delete(&client, "").await;

            // Created from it there is nothing that runs before the start.
            let restore = task::CreateTaskRequest {
                checkpoint: IMAGE.into(),
                ..request.clone()
            };
            assert_eq!(task.create(limit(), &restore).await.unwrap().pid, 0);
            assert!(!Path::new("/run/restored").exists());
            assert!(
                shim.bundle.dir.join("rootfs/bin/busybox").exists(),
                "mounted"
            );
            assert_eq!(delete(&client, "").await.pid, 0);
            assert_eq!(task.create(limit(), &restore).await.unwrap().pid, 0);
            let pid = start(&client, "").await;
            assert!(pid > 0);
            let told = fs::read_to_string("/run/restored").unwrap();
            let (bundle, work) = (shim.bundle.dir.display(), shim.bundle.dir.join("criu-work"));
            let wanted = format!(
                "restore --detach --bundle {bundle} --image-path {IMAGE} --work-path {} --pid-file {bundle}/init.pid c\n",
                work.display()
            );
            assert!(told.ends_with(&wanted), "{told}");
            assert!(!work.exists());
            let state = task::StateRequest {
                id: "c".into(),
                ..Default::default()
            };
            assert_eq!(task.state(limit(), &state).await.unwrap().pid, pid);
            printed("begun\nbegun\n");
            kill(&client).await;
            assert_eq!(wait(&client, "").await, 137);
            assert_eq!(delete(&client, "").await.pid, pid);

            // A restore that fails leaves what can be deleted.
            fs::remove_file(format!("{IMAGE}/dump")).unwrap();
            task.create(limit(), &restore).await.unwrap();
            let again = task::StartRequest {
                id: "c".into(),
                ..Default::default()
            };
            let (_, text) = refusal(task.start(limit(), &again).await);
            assert!(text.contains("no dump in the image"), "{text}");
            let (code, _) = refusal(task.start(limit(), &again).await);
            assert_eq!(code, Code::FAILED_PRECONDITION);
            delete(&client, "").await;
            let missing = task::CreateTaskRequest {
                checkpoint: "/nowhere".into(),
                ..request
            };
            let (code, text) = refusal(task.create(limit(), &missing).await);
            assert_eq!(code, Code::INVALID_ARGUMENT, "{text}");
            drop(client);
            shim.end().await;
        });
        let _ = fs::remove_dir_all("/run/bundles");
        before.assert_unchanged();
    });
}

#[test]
fn where_criu_cannot_work_its_reason_is_told() {
    const NAME: &str = "checkpoint::where_criu_cannot_work_its_reason_is_told";
    sandboxed(NAME, || {
        if !require::tool("runc") {
            return;
        }
        emulated();
        let before = Snapshot::take();
        let shim = Shim::launch("exec sleep 1000", |b| b.env("PATH", PATH));
        block_on(async {
            let client = shim.client().await;
            fs::create_dir(IMAGE).unwrap();
            let restore = task::CreateTaskRequest {
                checkpoint: IMAGE.into(),
                ..shim.request()
            };
            let answer = client.task().create(limit(), &restore).await;
            let (code, text) = refusal(answer);
            assert_eq!(code, Code::UNIMPLEMENTED);
            assert!(
                text.contains("criu cannot work here: it is not installed"),
                "{text}"
            );
            run(&client, &shim.request()).await;
            let answer = client
                .task()
                .checkpoint(limit(), &dump(Default::default()))
                .await;
            let (code, text) = refusal(answer);
            assert_eq!(code, Code::UNIMPLEMENTED);
            assert!(text.contains("it is not installed"), "{text}");
            script(
                "criu",
                "echo 'Warn  (x): no matter' >&2; echo 'Error (criu/cr-check.c:7): no luck here' >&2; exit 1",
            );
            let answer = client
                .task()
                .checkpoint(limit(), &dump(Default::default()))
                .await;
            let (code, text) = refusal(answer);
            assert_eq!(code, Code::UNIMPLEMENTED);
            assert!(
                text.contains("Error (criu/cr-check.c:7): no luck here"),
                "{text}"
            );
            for (request, wanted) in [
                (
                    task::CheckpointTaskRequest {
                        id: "none".into(),
                        path: IMAGE.into(),
                        ..Default::default()
                    },
                    Code::NOT_FOUND,
                ),
                (
                    task::CheckpointTaskRequest {
                        id: "c".into(),
                        path: "image".into(),
                        ..Default::default()
                    },
                    Code::INVALID_ARGUMENT,
                ),
            ] {
                let (code, text) = refusal(client.task().checkpoint(limit(), &request).await);
                assert_eq!(code, wanted, "{text}");
            }
            kill(&client).await;
            wait(&client, "").await;
            delete(&client, "").await;
            drop(client);
            shim.end().await;
        });
        let _ = fs::remove_dir_all("/run/bundles");
        before.assert_unchanged();
    });
}
