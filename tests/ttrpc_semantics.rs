//! Behaviour of ttrpc 0.10 that the supervisor is built around. A failure here after an upgrade means that the code
//! which works around it, or relies on it, has to be read again: `client::is_closed`, `service::guard`, `serve::end`.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "tests panic where they cannot go on"
)]

use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use podvisor::client::{self, Client};
use podvisor::error::Kind;
use podvisor::proto::deadline;
use podvisor::proto::sandbox::sandbox::{
    PingRequest, PingResponse, PlatformRequest, SandboxStatusRequest, SandboxStatusResponse,
    StopSandboxRequest, StopSandboxResponse, WaitSandboxRequest, WaitSandboxResponse,
};
use podvisor::proto::sandbox::sandbox_ttrpc::{Sandbox, create_sandbox};
use podvisor::proto::task_v3::shim::ConnectRequest;
use tokio::time::sleep;
use ttrpc::asynchronous::{Server, TtrpcContext};
use ttrpc::{Code, Error};

/// A service of which some methods are built.
#[derive(Default)]
struct Some_ {
    dropped: Arc<AtomicUsize>,
    finished: Arc<AtomicUsize>,
    deadlines: Deadlines,
}

/// Of each request, in milliseconds.
type Deadlines = Arc<Mutex<Vec<Option<u128>>>>;

/// Counts when it is dropped.
struct Guard(Arc<AtomicUsize>);

impl Drop for Guard {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

#[async_trait]
impl Sandbox for Some_ {
    async fn ping_sandbox(&self, _: &TtrpcContext, _: PingRequest) -> ttrpc::Result<PingResponse> {
        Ok(PingResponse::default())
    }

    /// Takes long.
    async fn wait_sandbox(
        &self,
        ctx: &TtrpcContext,
        _: WaitSandboxRequest,
    ) -> ttrpc::Result<WaitSandboxResponse> {
        let limit = deadline::of(ctx.timeout_nano, &ctx.metadata);
        self.deadlines
            .lock()
            .unwrap()
            .push(limit.map(|l| l.as_millis()));
        let _guard = Guard(Arc::clone(&self.dropped));
        sleep(Duration::from_millis(700)).await;
        self.finished.fetch_add(1, Ordering::SeqCst);
        Ok(WaitSandboxResponse::default())
    }

    /// Panics.
    async fn stop_sandbox(
        &self,
        _: &TtrpcContext,
        _: StopSandboxRequest,
    ) -> ttrpc::Result<StopSandboxResponse> {
        panic!("on purpose")
    }

    /// Answers 1 MiB.
    async fn sandbox_status(
        &self,
        _: &TtrpcContext,
        _: SandboxStatusRequest,
    ) -> ttrpc::Result<SandboxStatusResponse> {
        Ok(SandboxStatusResponse {
            state: "x".repeat(1 << 20),
            ..Default::default()
        })
    }
}

struct Fixture {
    address: String,
    server: Server,
    dropped: Arc<AtomicUsize>,
    finished: Arc<AtomicUsize>,
    deadlines: Deadlines,
    _dir: tempfile::TempDir,
}

impl Fixture {
    async fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let address = format!("unix://{}", dir.path().join("s").display());
        let service = Some_::default();
        let (dropped, finished) = (Arc::clone(&service.dropped), Arc::clone(&service.finished));
        let deadlines = Arc::clone(&service.deadlines);
        let services = create_sandbox(Arc::new(service) as Arc<dyn Sandbox + Send + Sync>);
        let mut server = Server::new()
            .bind(&address)
            .unwrap()
            .register_service(services);
        server.start().await.unwrap();
        Self {
            address,
            server,
            dropped,
            finished,
            deadlines,
            _dir: dir,
        }
    }

    async fn client(&self) -> Client {
        Client::connect(&self.address).await.unwrap()
    }
}

fn status(error: Error) -> (Code, String) {
    match error {
        Error::RpcStatus(status) => (status.code(), status.message),
        other => panic!("no status: {other:?}"),
    }
}

#[tokio::test]
async fn what_is_not_built_has_three_codes() {
    let fixture = Fixture::new().await;
    let client = fixture.client().await;
    // A trait's default method: not the UNIMPLEMENTED a daemon looks for, so every method is overridden.
    let default = client
        .sandbox()
        .platform(client::context(None), &PlatformRequest::default())
        .await
        .unwrap_err();
    let (code, text) = status(default);
    assert_eq!(code, Code::NOT_FOUND);
    assert!(text.ends_with("is not supported"), "{text}");
    // An unknown service: not UNIMPLEMENTED either, so both task services are registered.
    let unknown = client
        .task()
        .connect(client::context(None), &ConnectRequest::default())
        .await
        .unwrap_err();
    assert_eq!(status(unknown).0, Code::INVALID_ARGUMENT);
}

#[tokio::test]
async fn a_deadline_drops_the_handler() {
    let fixture = Fixture::new().await;
    let client = fixture.client().await;
    let limit = ttrpc::context::with_timeout(150_000_000);
    let error = client
        .sandbox()
        .wait_sandbox(limit, &WaitSandboxRequest::default())
        .await
        .unwrap_err();
    assert_eq!(client::from_ttrpc("wait", error).kind(), Kind::Deadline);
    sleep(Duration::from_millis(800)).await;
    assert_eq!(
        (
            fixture.dropped.load(Ordering::SeqCst),
            fixture.finished.load(Ordering::SeqCst)
        ),
        (1, 0)
    );
    // The late end of that call does not hurt the next one.
    client
        .sandbox()
        .ping_sandbox(client::context(None), &PingRequest::default())
        .await
        .unwrap();
}

/// ttrpc's own clock is not the deadline: who waits hears what is said a moment too late.
#[tokio::test]
async fn an_answer_a_little_after_the_deadline_is_heard() {
    let fixture = Fixture::new().await;
    let client = fixture.client().await;
    let limit = client::context(Some(Duration::from_millis(600)));
    client
        .sandbox()
        .wait_sandbox(limit, &WaitSandboxRequest::default())
        .await
        .unwrap();
    assert_eq!(fixture.deadlines.lock().unwrap()[..], [Some(600)]);
    // Not for ever.
    let limit = client::context(Some(Duration::from_millis(50)));
    let error = client
        .sandbox()
        .wait_sandbox(limit, &WaitSandboxRequest::default())
        .await
        .unwrap_err();
    assert_eq!(client::from_ttrpc("wait", error).kind(), Kind::Deadline);
}

#[tokio::test]
async fn a_client_that_leaves_drops_the_handler() {
    let fixture = Fixture::new().await;
    let client = fixture.client().await;
    let call = tokio::spawn(async move {
        client
            .sandbox()
            .wait_sandbox(client::context(None), &WaitSandboxRequest::default())
            .await
    });
    sleep(Duration::from_millis(100)).await;
    call.abort();
    sleep(Duration::from_millis(900)).await;
    assert_eq!(
        (
            fixture.dropped.load(Ordering::SeqCst),
            fixture.finished.load(Ordering::SeqCst)
        ),
        (1, 0)
    );
}

#[tokio::test]
async fn a_panic_is_never_answered() {
    let fixture = Fixture::new().await;
    let client = fixture.client().await;
    let limit = client::context(Some(Duration::from_millis(300)));
    let error = client
        .sandbox()
        .stop_sandbox(limit, &StopSandboxRequest::default())
        .await
        .unwrap_err();
    assert_eq!(client::from_ttrpc("stop", error).kind(), Kind::Deadline);
    client
        .sandbox()
        .ping_sandbox(client::context(None), &PingRequest::default())
        .await
        .unwrap();
}

#[tokio::test]
async fn closed_has_these_spellings() {
    let fixture = Fixture::new().await;
    let path = PathBuf::from(client::path_of(&fixture.address));
    // A peer that accepts, reads a little and goes away.
    let rude = path.with_file_name("rude");
    let listener = tokio::net::UnixListener::bind(&rude).unwrap();
    tokio::spawn(async move {
        let (stream, _) = listener.accept().await.unwrap();
        stream.readable().await.unwrap();
        drop(stream);
    });
    let client = Client::connect(rude.to_str().unwrap()).await.unwrap();
    let ping = || async {
        client
            .sandbox()
            .ping_sandbox(client::context(None), &PingRequest::default())
            .await
    };
    let in_flight = ping().await.unwrap_err();
    assert!(matches!(&in_flight, Error::Socket(_)), "{in_flight:?}");
    assert!(client::is_closed(&in_flight));
    sleep(Duration::from_millis(50)).await;
    let next = ping().await.unwrap_err();
    assert!(
        matches!(&next, Error::Others(text) if text.starts_with("reserve channel capacity failed")),
        "{next:?}"
    );
    assert!(client::is_closed(&next));
    for gone in ["/nonexistent/socket", rude.to_str().unwrap()] {
        assert_eq!(
            Client::connect(gone).await.unwrap_err().kind(),
            Kind::Gone,
            "{gone}"
        );
    }
}

#[tokio::test]
async fn shutdown_answers_what_is_in_flight_and_idle_connections_do_not_hold_it() {
    let mut fixture = Fixture::new().await;
    let idle = [
        fixture.client().await,
        fixture.client().await,
        fixture.client().await,
    ];
    let client = fixture.client().await;
    let call = tokio::spawn(async move {
        client
            .sandbox()
            .wait_sandbox(client::context(None), &WaitSandboxRequest::default())
            .await
    });
    sleep(Duration::from_millis(100)).await;
    let begun = Instant::now();
    fixture.server.shutdown().await.unwrap();
    assert!(
        begun.elapsed() < Duration::from_secs(4),
        "{:?}",
        begun.elapsed()
    );
    assert!(call.await.unwrap().is_ok());
    drop(idle);
}

#[tokio::test]
async fn many_large_replies_on_one_connection_all_arrive() {
    let fixture = Fixture::new().await;
    let client = fixture.client().await;
    let calls: Vec<_> = (0..64)
        .map(|_| {
            let sandbox = client.sandbox();
            tokio::spawn(async move {
                sandbox
                    .sandbox_status(
                        client::context(Some(Duration::from_secs(60))),
                        &SandboxStatusRequest::default(),
                    )
                    .await
            })
        })
        .collect();
    for call in calls {
        assert_eq!(call.await.unwrap().unwrap().state.len(), 1 << 20);
    }
}

#[tokio::test]
async fn a_peer_that_does_not_read_costs_no_more_than_the_deadline() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("deaf");
    // Connections are queued and never accepted: nobody reads.
    let _listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
    let client = Client::connect(path.to_str().unwrap()).await.unwrap();
    let big = StopSandboxRequest {
        sandbox_id: "x".repeat(3 << 20),
        ..Default::default()
    };
    let begun = Instant::now();
    let stop = || {
        let sandbox = client.sandbox();
        let big = big.clone();
        async move {
            sandbox
                .stop_sandbox(client::context(Some(Duration::from_millis(500))), &big)
                .await
        }
    };
    let (first, second) = tokio::join!(stop(), stop());
    assert!(first.is_err() && second.is_err());
    assert!(
        begun.elapsed() < Duration::from_secs(5),
        "{:?}",
        begun.elapsed()
    );
}
