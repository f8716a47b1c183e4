//! Events, when the daemon that takes them is away, hangs, or comes back.

use std::os::unix::net::UnixListener;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use podvisor::proto::any;
use podvisor::proto::events::task_events::{TaskExit, TaskStart};
use podvisor::proto::events_ttrpc::events::ForwardRequest;
use podvisor::proto::events_ttrpc::events_ttrpc::{Events, create_events};
use podvisor::proto::time::system_time;
use podvisor::proto::types::event::Envelope;
use protobuf::well_known_types::empty::Empty;
use ttrpc::asynchronous::{Server, TtrpcContext};

use crate::daemon::Bundle;
use crate::kit::*;
use crate::support::{Snapshot, sandboxed};

const SOCKET: &str = "/run/events.sock";

/// What the daemon was told.
#[derive(Default)]
struct Told(Mutex<Vec<Envelope>>);

#[async_trait]
impl Events for Told {
    async fn forward(&self, _: &TtrpcContext, request: ForwardRequest) -> ttrpc::Result<Empty> {
        self.0
            .lock()
            .unwrap()
            .push(request.envelope.unwrap_or_default());
        Ok(Empty::default())
    }
}

impl Told {
    /// Topics, with whose they are and how it ended.
    fn take(&self) -> Vec<String> {
        self.0.lock().unwrap().drain(..).map(|e| told(&e)).collect()
    }

    /// Waits for this many.
    async fn wait_for(&self, count: usize) -> Vec<String> {
        let all = async {
            while self.0.lock().unwrap().len() < count {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        let in_time = tokio::time::timeout(BOUND, all).await;
        let told = self.take();
        assert!(in_time.is_ok(), "{count} events: {told:?}");
        told
    }
}

/// Checklist 60: what a daemon looks at before it passes an event on.
fn told(envelope: &Envelope) -> String {
    assert_eq!(envelope.namespace, "test");
    let at = system_time(&envelope.timestamp).unwrap();
    let age = at.elapsed().unwrap_or_default();
    assert!(age < BOUND * 4, "{envelope:?}");
    let event = envelope.event.as_ref().unwrap();
    let verb = envelope.topic.strip_prefix("/tasks/").unwrap();
    match verb {
        "start" => {
            let start: TaskStart = any::unpack(event, any::TASK_START).unwrap().unwrap();
            format!("start {}", start.container_id)
        }
        "exit" => {
            let exit: TaskExit = any::unpack(event, any::TASK_EXIT).unwrap().unwrap();
            format!("exit {} {}", exit.id, exit.exit_status)
        }
        other => other.into(),
    }
}

async fn serve(told: &Arc<Told>) -> Server {
    let _ = std::fs::remove_file(SOCKET);
    let services = create_events(Arc::clone(told) as Arc<dyn Events + Send + Sync>);
    let mut server = Server::new()
        .bind(&format!("unix://{SOCKET}"))
        .unwrap()
        .register_service(services);
    server.start().await.unwrap();
    server
}

async fn leave(mut server: Server) {
    server.shutdown().await.unwrap();
    drop(server);
    std::fs::remove_file(SOCKET).unwrap();
}

/// FL-057: away, then there without a word, then back: each event once, in order, and the exits among them.
#[test]
fn a_daemon_that_was_away_and_hung_is_told_all_in_order() {
    sandboxed(
        "events::a_daemon_that_was_away_and_hung_is_told_all_in_order",
        || {
            let before = Snapshot::take();
            on(async {
                let daemon = Arc::<Told>::default();
                let server = serve(&daemon).await;
                let address = format!("unix://{SOCKET}");
                let pod = Pod::of(Bundle::new("p").env("TTRPC_ADDRESS", &address));
                let client = pod.connect().await;
                pod.up(&client, &config("p")).await;
                let first = Container::new("first", "exec sleep 1000", |_| ());
                first.run(&client).await;
                assert_eq!(daemon.wait_for(2).await, ["create", "start first"]);

                leave(server).await;
                first.kill(&client, 9).await;
                assert_eq!(
                    first.wait(&client, "").await.unwrap(),
                    137,
                    "State tells it now"
                );
                let second = Container::new("second", "exit 5", |_| ());
                second.run(&client).await;
                assert_eq!(second.wait(&client, "").await.unwrap(), 5);

                // It accepts and says nothing, for longer than one event is waited for.
                let hanging = UnixListener::bind(SOCKET).unwrap();
                hanging.set_nonblocking(true).unwrap();
                let mut held = Vec::new();
                let end = tokio::time::Instant::now() + Duration::from_secs(8);
                while tokio::time::Instant::now() < end {
                    held.extend(hanging.accept().ok());
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
                assert!(!held.is_empty(), "it was tried");
                second.delete(&client, "").await.unwrap();
                drop((held, hanging));

                let server = serve(&daemon).await;
                assert_eq!(
                    daemon.wait_for(5).await,
                    [
                        "exit first 137",
                        "create",
                        "start second",
                        "exit second 5",
                        "delete"
                    ]
                );
                // Checklist 58: what is published last is told before the supervisor leaves.
                shutdown(&client, "p").await.unwrap();
                pod.left();
                assert_eq!(daemon.wait_for(1).await, ["delete"]);
                leave(server).await;
            });
            before.assert_unchanged();
        },
    );
}

/// A daemon that is gone for good does not keep the supervisor.
#[test]
fn a_daemon_that_is_gone_does_not_keep_a_supervisor_from_leaving() {
    sandboxed(
        "events::a_daemon_that_is_gone_does_not_keep_a_supervisor_from_leaving",
        || {
            let before = Snapshot::take();
            on(async {
                let address = format!("unix://{SOCKET}");
                let pod = Pod::of(Bundle::new("p").env("TTRPC_ADDRESS", &address));
                let client = pod.connect().await;
                pod.up(&client, &config("p")).await;
                let one = Container::new("one", "exit 5", |_| ());
                one.run(&client).await;
                assert_eq!(one.wait(&client, "").await.unwrap(), 5);
                pod.shut(&client).await;
            });
            before.assert_unchanged();
        },
    );
}
