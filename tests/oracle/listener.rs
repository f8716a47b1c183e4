//! The daemon's end of the events of one side.

use std::fs;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use async_trait::async_trait;
use podvisor::proto::events_ttrpc::events::ForwardRequest;
use podvisor::proto::events_ttrpc::events_ttrpc::{Events, create_events};
use podvisor::proto::types::event::Envelope;
use protobuf::well_known_types::empty::Empty;
use ttrpc::asynchronous::{Server, TtrpcContext};

/// The events that came, in order.
#[derive(Debug, Default)]
pub struct Recorder(pub Mutex<Vec<Envelope>>);

#[async_trait]
impl Events for Recorder {
    async fn forward(&self, _: &TtrpcContext, request: ForwardRequest) -> ttrpc::Result<Empty> {
        self.0
            .lock()
            .unwrap()
            .push(request.envelope.unwrap_or_default());
        Ok(Empty::new())
    }
}

/// The thread that takes events. Dropped, it is waited for: it removes its socket in the end, and a late one would take away
/// that of the next side, which has the same name.
pub struct Background(Option<(tokio::sync::oneshot::Sender<()>, JoinHandle<()>)>);

impl Drop for Background {
    fn drop(&mut self) {
        let (stop, thread) = self.0.take().unwrap();
        let _ = stop.send(());
        // A panic of its own is told by it; here it may be in the middle of another.
        let _ = thread.join();
    }
}

/// Takes events on a thread of its own.
pub fn serve(recorder: Arc<Recorder>, socket: &str) -> Background {
    let socket = socket.to_owned();
    let (stop, stopped) = tokio::sync::oneshot::channel();
    let (ready, is_ready) = std::sync::mpsc::sync_channel(1);
    let thread = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        runtime.block_on(async {
            let services = create_events(recorder as Arc<dyn Events + Send + Sync>);
            let mut server = Server::new()
                .bind(&format!("unix://{socket}"))
                .unwrap()
                .register_service(services);
            server.start().await.unwrap();
            ready.send(()).unwrap();
            let _ = stopped.await;
            server.shutdown().await.ok();
            let _ = fs::remove_file(&socket);
        });
    });
    is_ready.recv().unwrap();
    Background(Some((stop, thread)))
}
