//! The supervisor's process: runtime, listener, signals, events, and an orderly end.
//!
//! Promises: one thread serves; the signal loop lives as long as the process; the reply to the last request is written
//! before the process ends. Must never know what a request means, that is the services' business.

use std::fmt;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener as StdListener;
use std::path::PathBuf;
use std::sync::Arc;

use tokio::net::UnixListener;
use tokio::runtime::Builder;
use tracing::{info, warn};
use ttrpc::asynchronous::{Server, transport::Listener};

use crate::config::Config;
use crate::container::Events;
use crate::error::{Context, Error, Kind, Result};
use crate::pod::{Pod, PodOptions};
use crate::process::Reaper;
use crate::service;

mod end;
mod listener;
mod publisher;
mod signals;
mod watchdog;

use end::SocketFile;
use listener::Accept;
use publisher::Publisher;
use watchdog::Reason;

/// Threads for blocking calls (mounts, namespaces): few, because they are rare.
const BLOCKING_THREADS: usize = 4;

/// Their stacks: nothing recursive runs there, and a pod pays for what is touched.
const BLOCKING_STACK: usize = 512 * 1024;

/// What `launch` hands to the supervisor after the fork.
pub struct Options {
    /// Settings.
    pub config: Config,
    /// containerd namespace.
    pub namespace: String,
    /// -id of the `start` that made us (the group's first id).
    pub id: String,
    /// Group id (socket and state directory are named by it).
    pub group: String,
    /// Directory `start` ran in.
    pub bundle: PathBuf,
    /// Log more.
    pub debug: bool,
    /// Bound and listening.
    pub listener: OwnedFd,
    /// Path of the socket, removed at the beginning of the end.
    pub socket: PathBuf,
    /// containerd's ttrpc address for events; None: events are dropped quietly.
    pub ttrpc_address: Option<String>,
    /// Read end of the pipe from `start`: EOF without a byte means that the helper died before its answer: leave.
    pub watchdog: Option<OwnedFd>,
    /// Called once, when requests are served.
    pub ready: Option<Box<dyn FnOnce() + Send>>,
}

impl fmt::Debug for Options {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Options")
            .field("group", &self.group)
            .field("socket", &self.socket)
            .finish_non_exhaustive()
    }
}

/// Runs until the pod is over. Builds the current_thread runtime.
///
/// # Errors
/// When it cannot begin to serve; once it serves, failures are the requests' own.
pub fn run(options: Options) -> Result<()> {
    let runtime = Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(BLOCKING_THREADS)
        .thread_stack_size(BLOCKING_STACK)
        .build()
        .context(|| "build the runtime")?;
    let result = runtime.block_on(serve(options));
    // A blocking call that hangs must not keep the process.
    runtime.shutdown_background();
    result
}

async fn serve(options: Options) -> Result<()> {
    let socket = SocketFile::of(options.socket.clone());
    let has_daemon = options.ttrpc_address.is_some();
    let reaper = Reaper::start()?;
    let publisher = Publisher::start(options.ttrpc_address, options.namespace.clone());
    let pod = Pod::new(
        PodOptions {
            config: Arc::new(options.config.clone()),
            namespace: options.namespace,
            group: options.group,
            bundle: options.bundle,
            address: format!("unix://{}", options.socket.display()),
        },
        reaper,
        Arc::clone(&publisher) as Arc<dyn Events>,
    )?;
    let accept = accept(options.listener)?;
    let connections = accept.connections();
    let for_streams = accept.connections();
    let mut server = Server::new()
        .register_service(service::all(pod.clone(), for_streams))
        .add_listener(Listener::new(accept));
    server
        .start()
        .await
        .map_err(|e| Error::caused(Kind::Other, "start the server", e))?;
    signals::spawn(pod.clone())?;
    pod.look_after_the_node();
    if let Some(ready) = options.ready {
        ready();
    }
    let mut helper = options.watchdog;
    loop {
        let leave = watchdog::watch(
            &pod,
            connections.clone(),
            helper.take(),
            has_daemon,
            options.config.idle_timeout,
        );
        tokio::select! {
            () = pod.ended() => info!(step = "end", "the pod is over"),
            why = leave => {
                // A request that came in this very moment wins; afterwards nothing is accepted any more.
                let leaves = match why {
                    Reason::Unstarted => pod.abandon().await,
                    Reason::Orphaned | Reason::Unused | Reason::Unclaimed => pod.retire(),
                };
                if !leaves {
                    continue;
                }
                warn!(step = "end", "leave: {why}");
            }
        }
        break;
    }
    end::orderly(server, socket, connections, &publisher).await;
    // Everybody has their answers; only a DEL that is still owed keeps the process.
    pod.keep().await;
    Ok(())
}

fn accept(listener: OwnedFd) -> Result<Accept> {
    let listener = StdListener::from(listener);
    listener
        .set_nonblocking(true)
        .context(|| "make the listener non-blocking")?;
    UnixListener::from_std(listener)
        .map(Accept::new)
        .context(|| "watch the listener")
}
