//! Which requests end a supervisor, which do not, and that the last one is answered.

use std::path::Path;
use std::time::Duration;

use nix::sys::signal::Signal;
use podvisor::client;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use ttrpc::asynchronous::transport::Socket;
use ttrpc::{Code, Error};

use crate::daemon::signal;
use crate::kit::*;
use crate::support::{Snapshot, cni, fake, sandboxed};

/// Checklist 73: containerd sends this after the last container of a pod that lives on.
#[test]
fn a_task_shutdown_does_not_end_a_live_sandbox() {
    sandboxed(
        "ending::a_task_shutdown_does_not_end_a_live_sandbox",
        || {
            let before = Snapshot::take();
            on(async {
                let pod = Pod::launch("p");
                let client = pod.connect().await;
                let infra = pod.up(&client, &config("p")).await;
                let container = Container::new("c", "exec sleep 1000", |_| ());
                container.run(&client).await;
                shutdown_task(&client, "c").await.unwrap();
                assert_eq!(container.state(&client).await.unwrap().id, "c");
                container.remove(&client).await;
                shutdown_task(&client, "c").await.unwrap();
                shutdown_task_v2(&pod, "c").await;
                tokio::time::sleep(Duration::from_millis(500)).await;
                let status = status(&client, "p").await.unwrap();
                assert_eq!(
                    (status.state.as_str(), status.pid),
                    ("SANDBOX_READY", infra.cast_unsigned())
                );
                assert!(Path::new(&format!("/proc/{infra}")).exists());
                pod.shut(&client).await;
            });
            before.assert_unchanged();
        },
    );
}

/// Checklist 31: how containerd gets rid of a sandbox it has no record of.
#[test]
fn a_task_shutdown_of_the_sandbox_itself_tears_it_down() {
    sandboxed(
        "ending::a_task_shutdown_of_the_sandbox_itself_tears_it_down",
        || {
            let before = Snapshot::take();
            on(async {
                let pod = Pod::launch("p");
                let client = pod.connect().await;
                let infra = pod.up(&client, &config("p")).await;
                Container::new("c", "exec sleep 1000", |_| ())
                    .run(&client)
                    .await;
                shutdown_task(&client, "p").await.unwrap();
                pod.left();
                assert!(!Path::new(&format!("/proc/{infra}")).exists());
            });
            before.assert_unchanged();
        },
    );
}

/// Checklist 71: in every state the answer comes, and then the process goes.
#[test]
fn a_shutdown_is_always_answered_before_the_process_ends() {
    sandboxed(
        "ending::a_shutdown_is_always_answered_before_the_process_ends",
        || {
            cni::network("broken", vec![serde_json::json!({"type": "broken"})]).write();
            let broken = fake::plugin(Path::new(cni::PLUGINS), "broken");
            broken.on("ADD", &[fake::Act::Exit(1)]);
            let before = Snapshot::take();
            on(async {
                for round in 0..12 {
                    let pod = Pod::launch(&format!("p{round}"));
                    let client = pod.connect().await;
                    let mut config = config("p");
                    match round % 6 {
                        0 => {}
                        // After a CreateSandbox that fails.
                        1 => {
                            config.linux.mut_or_insert_default().sysctls =
                                [("kernel.panic".into(), "1".into())].into();
                            create(&client, &pod.request(Some(&config)))
                                .await
                                .unwrap_err();
                        }
                        2 => create(&client, &pod.request(Some(&config))).await.unwrap(),
                        // After a StartSandbox that fails.
                        3 => {
                            config.annotations.clear();
                            create(&client, &pod.request(Some(&config))).await.unwrap();
                            start(&client, &pod.id).await.unwrap_err();
                            // FL-068: what failed is told as such, at once.
                            let told = status(&client, &pod.id).await.unwrap();
                            assert_eq!((told.state.as_str(), told.pid), ("SANDBOX_NOTREADY", 0));
                            if round > 6 {
                                stop(&client, &pod.id, 0).await.unwrap();
                            }
                        }
                        4 => drop(pod.up(&client, &config).await),
                        _ => {
                            pod.up(&client, &config).await;
                            stop(&client, &pod.id, 0).await.unwrap();
                        }
                    }
                    if round < 6 {
                        shutdown(&client, &pod.id).await.unwrap();
                    } else {
                        // Twice at the same time: what was not read any more tells that the supervisor is gone.
                        let other = pod.connect().await;
                        let (one, two) =
                            tokio::join!(shutdown(&client, &pod.id), shutdown(&other, &pod.id));
                        assert!(one.is_ok() || two.is_ok(), "{one:?} {two:?}");
                        for error in [one.err(), two.err()].into_iter().flatten() {
                            assert!(client::is_closed(&error), "{error:?}");
                        }
                    }
                    pod.left();
                }
            });
            before.assert_unchanged();
        },
    );
}

/// Law 11: what was sent before the end began is answered, however many there are.
#[test]
fn every_shutdown_that_was_sent_in_time_is_answered() {
    sandboxed(
        "ending::every_shutdown_that_was_sent_in_time_is_answered",
        || {
            let before = Snapshot::take();
            on(async {
                // Without a sandbox there is nothing to undo: the end comes at once.
                for (id, with_sandbox) in [("p", false), ("q", true)] {
                    let pod = Pod::launch(id);
                    let client = pod.connect().await;
                    if with_sandbox {
                        pod.up(&client, &config("p")).await;
                    } else {
                        status(&client, id).await.unwrap_err();
                    }
                    let mut streams = Vec::new();
                    for _ in 0..4 {
                        streams.push(UnixStream::connect(&pod.socket).await.unwrap());
                    }
                    signal(pod.pid, Signal::SIGSTOP);
                    for _ in 0..4 {
                        streams.push(UnixStream::connect(&pod.socket).await.unwrap());
                    }
                    for stream in &mut streams {
                        let frame = frame("ShutdownSandbox", id, 0);
                        stream.write_all(&frame).await.unwrap();
                    }
                    signal(pod.pid, Signal::SIGCONT);
                    for (n, stream) in streams.iter_mut().enumerate() {
                        let mut header = [0; 10];
                        let read = stream.read_exact(&mut header).await;
                        assert!(read.is_ok(), "{id}, connection {n}: {read:?}");
                        // A response on our stream.
                        assert_eq!(header[4..9], [0, 0, 0, 1, 2], "{header:?}");
                    }
                    pod.left();
                }
            });
            before.assert_unchanged();
        },
    );
}

/// Law 1: what arrives too late, or from a caller who has left, is executed all the same.
#[test]
fn a_shutdown_with_a_negative_deadline_from_a_caller_who_has_left_is_executed() {
    sandboxed(
        "ending::a_shutdown_with_a_negative_deadline_from_a_caller_who_has_left_is_executed",
        || {
            let before = Snapshot::take();
            on(async {
                for leaves in [false, true] {
                    let pod = Pod::launch(if leaves { "p" } else { "q" });
                    let client = pod.connect().await;
                    pod.up(&client, &config("p")).await;
                    let mut stream = UnixStream::connect(&pod.socket).await.unwrap();
                    stream
                        .write_all(&frame("ShutdownSandbox", &pod.id, -1_000_000))
                        .await
                        .unwrap();
                    if leaves {
                        drop(stream);
                    }
                    pod.left();
                }
            });
            before.assert_unchanged();
        },
    );
}

/// Checklist 53 (while it is not built) and 59. An unknown service is ttrpc's own business, which says INVALID_ARGUMENT (see
/// `ttrpc_semantics`); an unknown method of a service of ours, too, so every method is there.
#[test]
fn an_unknown_method_is_unimplemented_and_the_pod_goes_on() {
    sandboxed(
        "ending::an_unknown_method_is_unimplemented_and_the_pod_goes_on",
        || {
            let before = Snapshot::take();
            on(async {
                let pod = Pod::launch("p");
                let client = pod.connect().await;
                pod.up(&client, &config("p")).await;
                let container = Container::new("c", "exec sleep 1000", |_| ());
                container.run(&client).await;
                for (service, method, wanted) in [
                    ("containerd.task.v2.Task", "NoSuch", Code::UNIMPLEMENTED),
                    ("containerd.task.v3.Task", "NoSuch", Code::UNIMPLEMENTED),
                    // ttrpc's own answer: none of ours is asked.
                    (
                        "containerd.no.such.Service",
                        "Create",
                        Code::INVALID_ARGUMENT,
                    ),
                ] {
                    let code = unknown(&pod, service, method).await;
                    assert_eq!(code, wanted, "{service}/{method}");
                }
                // And it goes on.
                container.remove(&client).await;
                pod.shut(&client).await;
            });
            before.assert_unchanged();
        },
    );
}

async fn unknown(pod: &Pod, service: &str, method: &str) -> Code {
    let stream = UnixStream::connect(&pod.socket).await.unwrap();
    let client = ttrpc::asynchronous::Client::new(Socket::from(stream));
    let request = ttrpc::Request {
        service: service.into(),
        method: method.into(),
        timeout_nano: client::context(Some(BOUND)).timeout_nano,
        ..Default::default()
    };
    match client.request(request).await {
        Err(Error::RpcStatus(status)) => status.code(),
        other => panic!("{other:?}"),
    }
}

async fn shutdown_task_v2(pod: &Pod, id: &str) {
    use podvisor::proto::task_v2::{shim::ShutdownRequest, shim_ttrpc::TaskClient};
    let stream = UnixStream::connect(&pod.socket).await.unwrap();
    let client = TaskClient::new(ttrpc::asynchronous::Client::new(Socket::from(stream)));
    let request = ShutdownRequest {
        id: id.into(),
        ..Default::default()
    };
    client.shutdown(soon(), &request).await.unwrap();
}
