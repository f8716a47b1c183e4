//! Events to the daemon: one queue, in order, sent again until they arrive.
//!
//! Promises that publishing never waits, that order is kept, and that a daemon that restarts gets what it missed. The
//! queue is bounded: when it is full the oldest event that is no exit goes, exits last, because a lost exit leaves a
//! container "running" for ever in somebody's books. Without an address events are dropped quietly.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use protobuf::well_known_types::any::Any;
use tokio::sync::{Notify, watch};
use tokio::time::sleep;
use tracing::{debug, warn};

use crate::client::{self, Client};
use crate::container::Events;
use crate::error::{Error, Kind, Result};
use crate::proto::any;
use crate::proto::events_ttrpc::events::ForwardRequest;
use crate::proto::time::timestamp;
use crate::proto::types::event::Envelope;

/// Events kept while the daemon is away: some hundred bytes each.
const QUEUE_MAX: usize = 2048;

/// How long the daemon may take for one event.
const TRY_LIMIT: Duration = Duration::from_secs(5);

/// First pause after a failed try; doubled up to [`PAUSE_MAX`].
const PAUSE_FIRST: Duration = Duration::from_millis(100);
/// Longest pause.
const PAUSE_MAX: Duration = Duration::from_secs(5);

/// The queue and who empties it.
pub struct Publisher {
    namespace: String,
    /// None: nobody to tell.
    queue: Option<Mutex<Queue>>,
    more: Notify,
    length: watch::Sender<usize>,
}

#[derive(Default)]
struct Queue {
    events: VecDeque<Arc<Envelope>>,
    lost: u64,
}

impl Publisher {
    /// Starts sending to `address` on the current runtime.
    pub fn start(address: Option<String>, namespace: String) -> Arc<Self> {
        let publisher = Arc::new(Self {
            namespace,
            queue: address.as_ref().map(|_| Mutex::default()),
            more: Notify::new(),
            length: watch::Sender::new(0),
        });
        if let Some(address) = address {
            let sender = Arc::clone(&publisher);
            tokio::spawn(async move { sender.send_all(&address).await });
        }
        publisher
    }

    /// Resolves when everything published so far, and since, has been delivered.
    pub async fn flush(&self) {
        // An error means that the sender is gone, which is us: there is nobody to wait for.
        let _ = self.length.subscribe().wait_for(|n| *n == 0).await;
    }

    /// Events not delivered yet.
    pub fn len(&self) -> usize {
        *self.length.borrow()
    }

    async fn send_all(&self, address: &str) {
        let mut connection = None;
        let mut pause = PAUSE_FIRST;
        loop {
            let Some(envelope) = self.first() else {
                self.more.notified().await;
                continue;
            };
            match forward(&mut connection, address, &envelope).await {
                Ok(()) => {
                    self.done(&envelope);
                    pause = PAUSE_FIRST;
                }
                Err(e) if is_final(&e) => {
                    warn!(
                        step = "publish",
                        topic = envelope.topic,
                        "the daemon refuses an event: {e}"
                    );
                    self.done(&envelope);
                }
                Err(e) => {
                    debug!(
                        step = "publish",
                        topic = envelope.topic,
                        left = self.len(),
                        "{e}"
                    );
                    if e.kind() == Kind::Gone {
                        connection = None;
                    }
                    sleep(pause).await;
                    pause = (pause * 2).min(PAUSE_MAX);
                }
            }
        }
    }

    fn first(&self) -> Option<Arc<Envelope>> {
        self.queue()?.events.front().cloned()
    }

    /// Takes the event out, unless the bound took it meanwhile.
    fn done(&self, envelope: &Arc<Envelope>) {
        let Some(mut queue) = self.queue() else {
            return;
        };
        if queue
            .events
            .front()
            .is_some_and(|first| Arc::ptr_eq(first, envelope))
        {
            queue.events.pop_front();
        }
        self.length.send_replace(queue.events.len());
    }

    fn queue(&self) -> Option<MutexGuard<'_, Queue>> {
        // A panic elsewhere left the queue as good as it was: each change is one step.
        self.queue
            .as_ref()
            .map(|queue| queue.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Events for Publisher {
    fn publish(&self, topic: &'static str, event: Any) {
        let Some(mut queue) = self.queue() else {
            return;
        };
        let envelope = Envelope {
            timestamp: Some(timestamp(SystemTime::now())).into(),
            namespace: self.namespace.clone(),
            topic: topic.to_owned(),
            event: Some(event).into(),
            ..Envelope::default()
        };
        queue.push(Arc::new(envelope));
        self.length.send_replace(queue.events.len());
        drop(queue);
        self.more.notify_one();
    }
}

impl fmt::Debug for Publisher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Publisher")
            .field("length", &self.len())
            .finish_non_exhaustive()
    }
}

impl Queue {
    fn push(&mut self, envelope: Arc<Envelope>) {
        if self.events.len() >= QUEUE_MAX {
            let oldest = self.events.iter().position(|e| !is_exit(e)).unwrap_or(0);
            self.events.remove(oldest);
            self.lost += 1;
            // Told at 1, 2, 4, 8, …: a daemon that is away for a day must not fill the log.
            if self.lost.is_power_of_two() {
                warn!(
                    step = "publish",
                    lost = self.lost,
                    "the daemon takes no events; the oldest are dropped"
                );
            }
        }
        self.events.push_back(envelope);
    }
}

async fn forward(
    connection: &mut Option<Client>,
    address: &str,
    envelope: &Envelope,
) -> Result<()> {
    let client = match connection {
        Some(client) => client.clone(),
        None => connection.insert(Client::connect(address).await?).clone(),
    };
    let request = ForwardRequest {
        envelope: Some(envelope.clone()).into(),
        ..ForwardRequest::default()
    };
    client
        .events()
        .forward(client::context(Some(TRY_LIMIT)), &request)
        .await
        .map(drop)
        .map_err(|e| client::from_ttrpc("forward an event", e))
}

/// Errors that another try would meet again.
fn is_final(error: &Error) -> bool {
    matches!(
        error.kind(),
        Kind::Invalid | Kind::Unsupported | Kind::NotFound | Kind::Denied
    )
}

fn is_exit(envelope: &Envelope) -> bool {
    let event = envelope.event.as_ref();
    event.is_some_and(|event| any::is(event, any::TASK_EXIT) || any::is(event, any::SANDBOX_EXIT))
}

#[cfg(test)]
mod tests {
    use super::*;
    use async_trait::async_trait;
    use protobuf::well_known_types::empty::Empty;
    use ttrpc::asynchronous::{Server, TtrpcContext};

    use crate::proto::events_ttrpc::events_ttrpc::{Events as EventsService, create_events};

    #[derive(Default)]
    struct Daemon(Mutex<Vec<Envelope>>);

    #[async_trait]
    impl EventsService for Daemon {
        async fn forward(&self, _: &TtrpcContext, request: ForwardRequest) -> ttrpc::Result<Empty> {
            self.0
                .lock()
                .unwrap()
                .push(request.envelope.unwrap_or_default());
            Ok(Empty::default())
        }
    }

    async fn daemon(address: &str) -> (Arc<Daemon>, Server) {
        let daemon = Arc::new(Daemon::default());
        let services = create_events(Arc::clone(&daemon) as Arc<dyn EventsService + Send + Sync>);
        let mut server = Server::new()
            .bind(address)
            .unwrap()
            .register_service(services);
        server.start().await.unwrap();
        (daemon, server)
    }

    #[tokio::test]
    async fn events_wait_for_the_daemon_and_keep_their_order() {
        let dir = tempfile::tempdir().unwrap();
        let address = format!("unix://{}", dir.path().join("s").display());
        let publisher = Publisher::start(Some(address.clone()), "k8s.io".into());
        for n in 0..10_u8 {
            publisher.publish("/tasks/start", any::raw(any::TASK_START, vec![n]));
        }
        tokio::task::yield_now().await;
        assert_eq!(publisher.len(), 10);
        let (daemon, _server) = daemon(&address).await;
        publisher.flush().await;
        let got = daemon.0.lock().unwrap();
        let values: Vec<u8> = got.iter().map(|e| e.event.value[0]).collect();
        assert_eq!(values, (0..10).collect::<Vec<_>>());
        let first = &got[0];
        assert_eq!(
            (first.namespace.as_str(), first.topic.as_str()),
            ("k8s.io", "/tasks/start")
        );
        assert!(first.timestamp.seconds > 0);
    }

    #[tokio::test]
    async fn a_daemon_that_comes_back_is_found() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let address = format!("unix://{}", path.display());
        let (_, mut server) = daemon(&address).await;
        let publisher = Publisher::start(Some(address.clone()), "n".into());
        publisher.publish("/tasks/start", any::raw(any::TASK_START, vec![1]));
        publisher.flush().await;
        server.shutdown().await.unwrap();
        drop(server);
        std::fs::remove_file(&path).unwrap();
        publisher.publish("/tasks/exit", any::raw(any::TASK_EXIT, vec![2]));
        tokio::task::yield_now().await;
        let (daemon, _server) = daemon(&address).await;
        publisher.flush().await;
        assert_eq!(daemon.0.lock().unwrap().len(), 1);
    }

    #[test]
    fn a_full_queue_drops_the_oldest_that_is_no_exit() {
        let mut queue = Queue::default();
        let event = |name: &str, n: usize| {
            let event = any::raw(name, n.to_le_bytes().to_vec());
            Arc::new(Envelope {
                event: Some(event).into(),
                ..Envelope::default()
            })
        };
        queue.push(event(any::TASK_EXIT, 0));
        for n in 1..=QUEUE_MAX {
            queue.push(event(any::TASK_START, n));
        }
        assert_eq!(queue.events.len(), QUEUE_MAX);
        assert!(is_exit(&queue.events[0]));
        assert_eq!(queue.events[1].event.value, 2_usize.to_le_bytes());
        assert_eq!(queue.lost, 1);
    }

    #[tokio::test]
    async fn without_an_address_events_vanish() {
        let publisher = Publisher::start(None, "n".into());
        publisher.publish("/tasks/exit", any::raw(any::TASK_EXIT, Vec::new()));
        assert_eq!(publisher.len(), 0);
        publisher.flush().await;
    }
}
