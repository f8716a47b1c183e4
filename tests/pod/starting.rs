//! `start` where another supervisor is, or was.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use nix::sys::signal::Signal;
use podvisor::client::Client;
use podvisor::proto::bootstrap::bootstrap::{BootstrapParams, BootstrapResult};
use podvisor::proto::task_v2;
use podvisor::proto::task_v3::shim::ConnectRequest;
use protobuf::Message;
use serde_json::Value;
use ttrpc::asynchronous::Server;

use crate::daemon::{Bundle, path_of, raw, shims, signal};
use crate::kit::*;
use crate::support::bin::{SHIM, run_with};
use crate::support::{Snapshot, cni, eventually, fake, rootfs, sandboxed};

/// FL-084: the socket of a killed supervisor is replaced, and its pod undone before the id is used again.
#[test]
fn an_id_is_used_again_after_its_supervisor_was_killed() {
    sandboxed(
        "starting::an_id_is_used_again_after_its_supervisor_was_killed",
        || {
            cni::network("net", vec![serde_json::json!({"type": "fake"})]).write();
            let net = fake::plugin(Path::new(cni::PLUGINS), "fake");
            let before = Snapshot::take();
            on(async {
                let first = Pod::launch("p");
                let client = first.connect().await;
                create(&client, &first.request(None)).await.unwrap();
                let infra = start(&client, "p").await.unwrap().pid;
                let container = Container::new("c", "exec sleep 1000", |_| ());
                let child = container.run(&client).await;
                signal(first.pid, Signal::SIGKILL);
                eventually(BOUND, "it dies", || shims().is_empty().then_some(()));
                assert!(first.socket.exists());

                let second = Pod::of(again("p"));
                assert_eq!(second.socket, first.socket);
                let client = second.connect().await;
                create(&client, &second.request(None)).await.unwrap();
                let started = start(&client, "p").await.unwrap();
                assert_ne!(started.pid, infra);
                for pid in [infra, child.cast_unsigned()] {
                    assert!(!Path::new(&format!("/proc/{pid}")).exists(), "{pid} lives");
                }
                assert_eq!((net.count("ADD"), net.count("DEL")), (2, 1));
                let container = Container::new("c", "exec sleep 1000", |_| ());
                container.run(&client).await;
                second.shut(&client).await;
                assert_eq!(net.count("DEL"), 2);
            });
            before.assert_unchanged();
        },
    );
}

/// FL-084: only a hash of names is in a path that has a limit.
#[test]
fn the_longest_names_below_a_deep_directory_work() {
    sandboxed(
        "starting::the_longest_names_below_a_deep_directory_work",
        || {
            let (deep, settings) = deep();
            cni::network("net", vec![serde_json::json!({"type": "fake"})]).write();
            let _net = fake::plugin(Path::new(cni::PLUGINS), "fake");
            let id = "0123456789abcdef".repeat(4);
            let namespace = "n".repeat(76);
            let before = Snapshot::take();
            on(async {
                let bundle = Bundle::new(&id);
                let mut command = Command::new(SHIM);
                command
                    .args(["-namespace", &namespace, "-id", &id])
                    .args(["-address", crate::daemon::ADDRESS])
                    .args(["-publish-binary", "/bin/true", "start"])
                    .env("PODVISOR_CONFIG", &settings)
                    .current_dir(&bundle.dir);
                let answer = run_with(&mut command, Some(b""), BOUND).ok();
                let pod = Pod {
                    id: id.clone(),
                    socket: path_of(&answer.stdout),
                    pid: crate::daemon::supervisor(),
                    bundle,
                };
                let client = pod.connect().await;
                create(&client, &pod.request(None)).await.unwrap();
                start(&client, &id).await.unwrap();
                assert!(deep.join(&namespace).join(&id).is_dir());
                let container = Container::new(&"f".repeat(64), "echo hi", |_| ());
                container.run(&client).await;
                assert_eq!(container.wait(&client, "").await.unwrap(), 0);
                assert_eq!(container.printed(""), "hi\n");
                container.delete(&client, "").await.unwrap();
                pod.shut(&client).await;
                assert!(!deep.join(&namespace).join(&id).exists());
            });
            before.assert_unchanged();
        },
    );
}

/// FL-084: where a path is too long all the same, that is the error, and not a time-out.
#[test]
fn a_socket_path_that_is_too_long_is_told_at_once() {
    sandboxed(
        "starting::a_socket_path_that_is_too_long_is_told_at_once",
        || {
            let (deep, settings) = deep();
            let rootfs = rootfs::make();
            let length = deep.as_os_str().len() + "/s/".len() + 64;
            let before = Snapshot::take();
            let bundle = Bundle::new("p").without_address();
            let mut command = bundle.command(SHIM);
            command.arg("start").env("PODVISOR_CONFIG", &settings);
            let told = run_with(&mut command, Some(b""), BOUND)
                .fails_with(&format!("has {length} bytes and the limit is 107"));
            assert_eq!(told.stderr.lines().count(), 1, "{told:?}");
            let mut command = Command::new(crate::support::bin::PODVISOR);
            command
                .args([
                    "run",
                    "--net",
                    "none",
                    "--rootfs",
                    rootfs.str(),
                    "--",
                    "/bin/true",
                ])
                .env("PODVISOR_CONFIG", &settings);
            run_with(&mut command, None, BOUND)
                .fails_with(&format!("has {length} bytes and the limit is 107"));
            assert_eq!(shims(), [0_i32; 0]);
            before.assert_unchanged();
        },
    );
}

/// FL-085: every caller is answered in its own dialect, also one who joins what another has started.
#[test]
fn each_caller_is_answered_in_its_dialect_when_it_joins() {
    sandboxed(
        "starting::each_caller_is_answered_in_its_dialect_when_it_joins",
        || {
            let before = Snapshot::take();
            on(async {
                let pod = Pod::launch("p");
                let member = r#"{"annotations":{"io.kubernetes.cri.sandbox-id":"p"}}"#;
                assert_eq!(Bundle::new("c16").config(member).address(), pod.socket);
                for (version, number) in [("1.7.24~ds1", 2), ("v2.0.5", 3), ("v2.2.7", 3)] {
                    let id = format!("c{}", version.len());
                    let _ = fs::remove_dir_all(Path::new("/run/bundles").join(&id));
                    let bundle = Bundle::new(&id).config(member).daemon(version);
                    check_json(&bundle.start().ok().stdout, number, &pod.socket);
                }
                let params = BootstrapParams {
                    instance_id: "c23".into(),
                    namespace: "test".into(),
                    containerd_version: "2.3.4".into(),
                    ..Default::default()
                };
                let bundle = Bundle::new("c23").config(member);
                let answer = raw(
                    bundle.command(SHIM).arg("start"),
                    &params.write_to_bytes().unwrap(),
                );
                let result = BootstrapResult::parse_from_bytes(&answer).unwrap();
                assert_eq!((result.version, result.protocol.as_str()), (3, "ttrpc"));
                assert_eq!(path_of(&result.address), pod.socket);
                let client = pod.connect().await;
                pod.shut(&client).await;
            });
            before.assert_unchanged();
        },
    );
}

/// FL-085: the executable was replaced while a supervisor of the old one runs.
#[test]
fn a_new_executable_joins_the_supervisor_of_an_old_one() {
    sandboxed(
        "starting::a_new_executable_joins_the_supervisor_of_an_old_one",
        || {
            let before = Snapshot::take();
            let installed = Path::new("/run/installed");
            on(async {
                fs::copy(SHIM, installed).unwrap();
                let bundle = Bundle::new("p");
                let answer = run_with(
                    bundle.command("/run/installed").arg("start"),
                    Some(b""),
                    BOUND,
                );
                let socket = path_of(&answer.ok().stdout);
                // As a package manager does it: beside, then renamed over.
                fs::copy(SHIM, "/run/new").unwrap();
                fs::rename("/run/new", installed).unwrap();
                let member = r#"{"annotations":{"io.containerd.runc.v2.group":"p"}}"#;
                let joins = Bundle::new("c").config(member).daemon("v2.1.9");
                let answer = run_with(
                    joins.command("/run/installed").arg("start"),
                    Some(b""),
                    BOUND,
                );
                check_json(&answer.ok().stdout, 3, &socket);
                let client = Client::connect(socket.to_str().unwrap()).await.unwrap();
                let told = client
                    .task()
                    .connect(soon(), &ConnectRequest::default())
                    .await
                    .unwrap();
                let pid = told.shim_pid;
                assert!(
                    fs::read_link(format!("/proc/{pid}/exe"))
                        .unwrap()
                        .to_string_lossy()
                        .ends_with("(deleted)")
                );
                shutdown(&client, "p").await.unwrap();
                eventually(BOUND, "it leaves", || {
                    (!Path::new(&format!("/proc/{pid}")).exists()).then_some(())
                });
            });
            fs::remove_file(installed).unwrap();
            before.assert_unchanged();
        },
    );
}

/// FL-085: an old supervisor that serves Task v2 alone must not be called one of version 3.
#[test]
fn the_version_told_is_that_of_the_supervisor_that_runs() {
    struct Old;
    impl task_v2::shim_ttrpc::Task for Old {}

    sandboxed(
        "starting::the_version_told_is_that_of_the_supervisor_that_runs",
        || {
            let before = Snapshot::take();
            let pod = Pod::launch("p");
            signal(pod.pid, Signal::SIGKILL);
            eventually(BOUND, "it dies", || shims().is_empty().then_some(()));
            fs::remove_file(&pod.socket).unwrap();
            let socket = pod.socket.clone();
            let (stop, stopped) = std::sync::mpsc::sync_channel::<()>(1);
            // On a thread of its own: `start` is waited for here.
            let (ready, served) = std::sync::mpsc::sync_channel(1);
            let server = std::thread::spawn(move || {
                on(async move {
                    let services = task_v2::shim_ttrpc::create_task(Arc::new(Old));
                    let mut server = Server::new()
                        .bind(&format!("unix://{}", socket.display()))
                        .unwrap()
                        .register_service(services);
                    server.start().await.unwrap();
                    ready.send(()).unwrap();
                    while stopped.try_recv().is_err() {
                        tokio::time::sleep(Duration::from_millis(5)).await;
                    }
                    server.shutdown().await.unwrap();
                });
            });
            served.recv().unwrap();
            let member = r#"{"annotations":{"io.containerd.runc.v2.group":"p"}}"#;
            let joins = Bundle::new("c").config(member).daemon("v2.1.9");
            check_json(&joins.start().ok().stdout, 2, &pod.socket);
            let params = BootstrapParams {
                instance_id: "d".into(),
                namespace: "test".into(),
                containerd_version: "2.3.4".into(),
                ..Default::default()
            };
            let joins = Bundle::new("d").config(member);
            let answer = raw(
                joins.command(SHIM).arg("start"),
                &params.write_to_bytes().unwrap(),
            );
            let result = BootstrapResult::parse_from_bytes(&answer).unwrap();
            assert_eq!(
                (result.version, path_of(&result.address)),
                (2, pod.socket.clone())
            );
            stop.send(()).unwrap();
            server.join().unwrap();
            let _ = fs::remove_file(&pod.socket);
            before.assert_unchanged();
        },
    );
}

fn check_json(text: &str, version: u32, socket: &Path) {
    let answer: Value = serde_json::from_str(text).unwrap();
    assert_eq!(
        (&answer["version"], &answer["protocol"]),
        (&version.into(), &"ttrpc".into()),
        "{text}"
    );
    assert_eq!(path_of(answer["address"].as_str().unwrap()), socket);
}

/// A bundle whose directory is made anew.
fn again(id: &str) -> Bundle {
    fs::remove_dir_all(Path::new("/run/bundles").join(id)).unwrap();
    Bundle::new(id)
}

/// A state directory of 90 characters, and settings that name it.
fn deep() -> (PathBuf, PathBuf) {
    let mut deep = PathBuf::from("/run/deep");
    while deep.as_os_str().len() < 79 {
        deep.push("d".repeat(9));
    }
    deep.push("e".repeat(89 - deep.as_os_str().len()));
    assert_eq!(deep.as_os_str().len(), 90);
    fs::create_dir_all(&deep).unwrap();
    fs::set_permissions(&deep, fs::Permissions::from_mode(0o700)).unwrap();
    let settings = PathBuf::from("/run/deep.toml");
    fs::write(
        &settings,
        format!("runtime_root = \"{}\"\n", deep.display()),
    )
    .unwrap();
    (deep, settings)
}
