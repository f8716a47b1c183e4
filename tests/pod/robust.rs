//! FL-083: ttrpc between our client and a real supervisor, when one side stops, dies or is late.

use std::collections::HashMap;
use std::time::Duration;

use nix::sys::signal::Signal;
use podvisor::client::{self, Client};
use podvisor::error::Kind;
use podvisor::proto::sandbox::sandbox::{PingRequest, SandboxStatusRequest, WaitSandboxRequest};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::time::{sleep, timeout};
use ttrpc::Error;

use crate::daemon::signal;
use crate::kit::*;
use crate::support::{Scope, Snapshot, sandboxed};

fn in_two_seconds() -> ttrpc::context::Context {
    client::context(Some(Duration::from_secs(2)))
}

fn kind_of(error: Error) -> Kind {
    client::from_ttrpc("call", error).kind()
}

/// FL-083 a and e: deadlines hold against a server that does not read, and its late replies harm nobody.
#[test]
fn calls_to_a_stopped_supervisor_end_at_their_deadline_and_later_ones_work() {
    sandboxed(
        "robust::calls_to_a_stopped_supervisor_end_at_their_deadline_and_later_ones_work",
        || {
            let before = Snapshot::take();
            on(async {
                let pod = Pod::launch("p");
                let client = pod.connect().await;
                pod.up(&client, &config("p")).await;
                signal(pod.pid, Signal::SIGSTOP);
                let call = |client: Client| async move {
                    let request = SandboxStatusRequest {
                        sandbox_id: "p".into(),
                        ..Default::default()
                    };
                    client
                        .sandbox()
                        .sandbox_status(in_two_seconds(), &request)
                        .await
                };
                let fresh = pod.connect().await;
                let both = async {
                    tokio::join!(
                        call(client.clone()),
                        call(client.clone()),
                        call(fresh.clone())
                    )
                };
                let (one, two, three) = timeout(BOUND, both).await.expect("they return");
                for result in [one, two, three] {
                    assert_eq!(kind_of(result.unwrap_err()), Kind::Deadline);
                }
                signal(pod.pid, Signal::SIGCONT);
                // The supervisor finds three requests, whose answers nobody waits for.
                for client in [&client, &fresh] {
                    for _ in 0..3 {
                        assert_eq!(status(client, "p").await.unwrap().sandbox_id, "p");
                        sleep(Duration::from_millis(50)).await;
                    }
                }
                pod.shut(&client).await;
            });
            before.assert_unchanged();
        },
    );
}

/// FL-083 b.
#[test]
fn many_large_replies_on_one_connection_all_arrive() {
    sandboxed(
        "robust::many_large_replies_on_one_connection_all_arrive",
        || {
            let before = Snapshot::take();
            on(async {
                let pod = Pod::launch("p");
                let client = pod.connect().await;
                let mut config = config("p");
                // The verbose status tells them twice.
                config.labels = HashMap::from([("l".into(), "l".repeat(512 << 10))]);
                config.annotations.insert("a".into(), "a".repeat(384 << 10));
                pod.up(&client, &config).await;
                let calls: Vec<_> = (0..64)
                    .map(|_| {
                        let client = client.clone();
                        tokio::spawn(async move { status(&client, "p").await })
                    })
                    .collect();
                for call in calls {
                    let answer = timeout(BOUND * 2, call)
                        .await
                        .expect("an answer")
                        .unwrap()
                        .unwrap();
                    assert!(answer.info["info"].len() > 1 << 20);
                }
                pod.shut(&client).await;
            });
            before.assert_unchanged();
        },
    );
}

/// FL-083 c.
#[test]
fn idle_connections_and_a_wait_do_not_hold_up_a_shutdown() {
    sandboxed(
        "robust::idle_connections_and_a_wait_do_not_hold_up_a_shutdown",
        || {
            let before = Snapshot::take();
            on(async {
                let pod = Pod::launch("p");
                let client = pod.connect().await;
                pod.up(&client, &config("p")).await;
                let mut idle = Vec::new();
                for _ in 0..3 {
                    idle.push(UnixStream::connect(&pod.socket).await.unwrap());
                }
                let waiting = {
                    let client = pod.connect().await;
                    tokio::spawn(async move { wait(&client, "p").await })
                };
                // A container that is waited for is gone with its pod, too.
                let container = Container::new("c", "exec sleep 1000", |_| ());
                container.run(&client).await;
                let task = {
                    let client = pod.connect().await;
                    let id = container.id.clone();
                    tokio::spawn(async move {
                        let request = podvisor::proto::task_v3::shim::WaitRequest {
                            id,
                            ..Default::default()
                        };
                        client.task().wait(soon(), &request).await
                    })
                };
                sleep(Duration::from_millis(200)).await;
                pod.shut(&client).await;
                assert_eq!(waiting.await.unwrap().unwrap().exit_status, 137);
                assert_eq!(task.await.unwrap().unwrap().exit_status, 137);
                drop(idle);
            });
            before.assert_unchanged();
        },
    );
}

/// FL-083 d.
#[test]
fn a_call_to_a_supervisor_that_is_killed_fails_as_closed() {
    sandboxed(
        "robust::a_call_to_a_supervisor_that_is_killed_fails_as_closed",
        || {
            let before = Snapshot::take();
            on(async {
                let pod = Pod::launch("p");
                let client = pod.connect().await;
                pod.up(&client, &config("p")).await;
                let waiting = {
                    let client = client.clone();
                    tokio::spawn(async move {
                        let request = WaitSandboxRequest {
                            sandbox_id: "p".into(),
                            ..Default::default()
                        };
                        // Without a deadline: only the closed connection can end it.
                        client
                            .sandbox()
                            .wait_sandbox(client::context(None), &request)
                            .await
                    })
                };
                sleep(Duration::from_millis(100)).await;
                signal(pod.pid, Signal::SIGKILL);
                let error = timeout(BOUND, waiting)
                    .await
                    .expect("an error")
                    .unwrap()
                    .unwrap_err();
                assert_eq!(kind_of(error), Kind::Gone);
                let again = client
                    .sandbox()
                    .ping_sandbox(in_two_seconds(), &PingRequest::new())
                    .await;
                assert_eq!(kind_of(again.unwrap_err()), Kind::Gone);
                let fresh = Client::connect(pod.socket.to_str().unwrap()).await;
                assert_eq!(fresh.unwrap_err().kind(), Kind::Gone);
                pod.bundle.delete();
            });
            before.assert_unchanged();
        },
    );
}

/// Who waits and hangs up costs nothing afterwards.
#[test]
fn waiters_that_hang_up_leave_no_descriptor() {
    sandboxed("robust::waiters_that_hang_up_leave_no_descriptor", || {
        let before = Snapshot::take();
        on(async {
            let pod = Pod::launch("p");
            let client = pod.connect().await;
            pod.up(&client, &config("p")).await;
            status(&client, "p").await.unwrap();
            let held = Scope::default().fds_of(pod.pid).take();
            for _ in 0..200 {
                let mut stream = UnixStream::connect(&pod.socket).await.unwrap();
                stream
                    .write_all(&frame("WaitSandbox", "p", 0))
                    .await
                    .unwrap();
            }
            held.assert_unchanged();
            pod.shut(&client).await;
        });
        before.assert_unchanged();
    });
}

/// Bytes that are no request end their connection and nothing else.
#[test]
fn garbage_on_the_socket_harms_nobody() {
    sandboxed("robust::garbage_on_the_socket_harms_nobody", || {
        let before = Snapshot::take();
        on(async {
            let pod = Pod::launch("p");
            let client = pod.connect().await;
            pod.up(&client, &config("p")).await;
            let good = frame("SandboxStatus", "p", 0);
            let mut bad_body = good.clone();
            bad_body[10..].fill(0xff);
            let mut of_a_response = good.clone();
            of_a_response[8] = 2;
            for bytes in [
                b"GET / HTTP/1.1\r\n\r\n".to_vec(),
                vec![0xff; 4096],
                vec![0; 4096],
                good[..good.len() - 1].to_vec(),
                good[..5].to_vec(),
                bad_body,
                of_a_response,
                [&good[..], &[0xff; 64][..]].concat(),
            ] {
                for hang_up in [true, false] {
                    let mut stream = UnixStream::connect(&pod.socket).await.unwrap();
                    // It may have been refused by now.
                    let _ = stream.write_all(&bytes).await;
                    if !hang_up {
                        let _ =
                            timeout(Duration::from_millis(200), stream.read(&mut [0; 64])).await;
                    }
                }
                assert_eq!(status(&client, "p").await.unwrap().state, "SANDBOX_READY");
                let fresh = pod.connect().await;
                assert_eq!(status(&fresh, "p").await.unwrap().state, "SANDBOX_READY");
            }
            let ticks = cpu_ticks(pod.pid);
            sleep(Duration::from_secs(1)).await;
            assert!(cpu_ticks(pod.pid) - ticks <= 5, "it spins");
            pod.shut(&client).await;
        });
        before.assert_unchanged();
    });
}

/// Too many connections: the listener pauses, and goes on when there is room.
#[test]
fn a_supervisor_without_a_free_descriptor_waits_for_one() {
    sandboxed(
        "robust::a_supervisor_without_a_free_descriptor_waits_for_one",
        || {
            let before = Snapshot::take();
            on(async {
                let pod = Pod::launch("p");
                let client = pod.connect().await;
                pod.up(&client, &config("p")).await;
                let limit = format!("--nofile={}", 40);
                let pid = pod.pid.to_string();
                let mut prlimit = std::process::Command::new("prlimit");
                prlimit.args(["--pid", &pid, &limit]);
                crate::support::run(&mut prlimit, BOUND).ok();
                let mut many = Vec::new();
                for _ in 0..100 {
                    many.push(UnixStream::connect(&pod.socket).await.unwrap());
                }
                sleep(Duration::from_millis(500)).await;
                let ticks = cpu_ticks(pod.pid);
                sleep(Duration::from_secs(2)).await;
                assert!(cpu_ticks(pod.pid) - ticks <= 20, "it spins");
                // Who is in is served.
                assert_eq!(status(&client, "p").await.unwrap().state, "SANDBOX_READY");
                drop(many);
                let fresh = pod.connect().await;
                assert_eq!(status(&fresh, "p").await.unwrap().state, "SANDBOX_READY");
                pod.shut(&fresh).await;
            });
            before.assert_unchanged();
        },
    );
}
