//! Reasons to leave that no request gives: the helper died before anybody knew our address, nobody ever came, or nobody
//! came to start what was created or took what was made.
//!
//! Promises that a supervisor that was never given anything does not stay (a daemon that dies between `start` and its
//! first request leaves one), nor one that a command has left between CreateSandbox and StartSandbox, nor one whose only
//! container was taken by nobody: containerd 1.6, killed in the middle of a Create, connects to it when it is back, and
//! has no other way to learn that there is no task than the end of that connection. Must never end a pod that has
//! something to live for: a daemon may start much later what it has created, and so may a client that stays connected.

use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use tokio::io::AsyncReadExt;
use tokio::net::unix::pipe::Receiver;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};

use crate::pod::Pod;

/// A daemon that is connected and asks for nothing is waited for this many times longer.
const CONNECTED: u32 = 10;

/// How long what was thrown away may take to be forgotten everywhere.
const FORGETTING: Duration = Duration::from_secs(5);

/// Why to leave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// The helper died before anybody knew our address.
    Orphaned,
    /// There is nothing, and nobody asked for anything.
    Unused,
    /// Nobody came to start what was created.
    Unstarted,
    /// Nobody took the last container that was made.
    Unclaimed,
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Orphaned => "the helper died before it told our address",
            Self::Unused => "there is nothing, and nobody asked for anything",
            Self::Unstarted => "nobody came to start what was created",
            Self::Unclaimed => "nobody took the last container that was made",
        })
    }
}

/// Resolves when there is a reason to leave; `idle_timeout` in seconds. `has_daemon`: whoever launched us comes back.
pub async fn watch(
    pod: &Pod,
    connections: watch::Receiver<usize>,
    helper: Option<OwnedFd>,
    has_daemon: bool,
    idle_timeout: f64,
) -> Reason {
    let limit = Duration::from_secs_f64(idle_timeout);
    let idle = idle(
        || pod.is_unused(),
        in_use(pod, limit, Pod::is_unused),
        connections.clone(),
        limit,
        limit * CONNECTED,
    );
    let unstarted = async {
        if has_daemon {
            std::future::pending::<()>().await;
        }
        let count = connections.clone();
        let in_use = in_use(pod, limit, Pod::is_only_created);
        self::idle(
            || pod.is_only_created(),
            in_use,
            count,
            limit,
            Duration::MAX,
        )
        .await;
    };
    let orphaned = async {
        helper_died(helper).await;
        if !pod.is_unused() || *connections.borrow() > 0 {
            // Somebody else has joined us meanwhile; the idle rule covers the rest.
            std::future::pending::<()>().await;
        }
    };
    tokio::select! {
        () = orphaned => Reason::Orphaned,
        () = idle => Reason::Unused,
        () = unstarted => Reason::Unstarted,
        () = unclaimed(pod) => Reason::Unclaimed,
    }
}

/// Resolves, each time it is called, when a pod that is in use may have ceased to be. A supervisor that is in use has no
/// timer for this: a thousand of them would wake a machine that has nothing to do a thousand times in `limit`.
fn in_use(pod: &Pod, limit: Duration, is_idle: fn(&Pod) -> bool) -> impl AsyncFnMut() {
    let mut changes = pod.changes();
    async move || {
        if pod.is_at_work() {
            sleep(limit).await;
        } else if !is_idle(pod) {
            changes.next().await;
        }
    }
}

/// Resolves when nothing is left after a container that nobody took.
async fn unclaimed(pod: &Pod) {
    loop {
        pod.containers().one_was_unclaimed().await;
        let end = Instant::now() + FORGETTING;
        while Instant::now() < end {
            if pod.is_unused() {
                return;
            }
            sleep(Duration::from_millis(50)).await;
        }
    }
}

/// Resolves when the pipe ends without a byte; never otherwise.
async fn helper_died(helper: Option<OwnedFd>) {
    if let Some(pipe) = helper
        && matches!(read_word(pipe).await, Ok(0))
    {
        return;
    }
    std::future::pending().await
}

async fn read_word(pipe: OwnedFd) -> io::Result<usize> {
    // Sets it non-blocking; the other end has its own file description.
    Receiver::from_owned_fd(set_nonblocking(pipe)?)?
        .read(&mut [0])
        .await
}

fn set_nonblocking(pipe: OwnedFd) -> io::Result<OwnedFd> {
    use nix::fcntl::{FcntlArg, OFlag, fcntl};
    fcntl(&pipe, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
    Ok(pipe)
}

/// Resolves when the pod has been unused for the whole of `limit` with nobody connected, or of `connected_limit` with
/// somebody. `in_use` is waited for while it is used.
async fn idle(
    is_unused: impl Fn() -> bool,
    mut in_use: impl AsyncFnMut(),
    mut connections: watch::Receiver<usize>,
    limit: Duration,
    connected_limit: Duration,
) {
    loop {
        if !is_unused() {
            in_use().await;
            continue;
        }
        // A connection is a sign of life that costs no timer to wait for.
        let connected = *connections.borrow_and_update() > 0;
        let patience = if connected { connected_limit } else { limit };
        let changed = connections.wait_for(|n| (*n > 0) != connected);
        match timeout(patience, changed).await {
            Err(_) if is_unused() => return,
            // Nobody counts any more: the process is ending anyway.
            Ok(Err(_)) => std::future::pending::<()>().await,
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::unistd::pipe;

    const LIMIT: Duration = Duration::from_secs(60);

    async fn never() {
        std::future::pending().await
    }

    #[tokio::test(start_paused = true)]
    async fn a_pod_that_ceases_to_be_used_gets_its_time_then() {
        let count = watch::Sender::new(0);
        let used = std::cell::Cell::new(3);
        let start = Instant::now();
        let told = async || {
            sleep(LIMIT * 5).await;
            used.set(used.get() - 1);
        };
        idle(|| used.get() == 0, told, count.subscribe(), LIMIT, LIMIT).await;
        assert_eq!(start.elapsed(), LIMIT * 16);
    }

    #[tokio::test(start_paused = true)]
    async fn an_unused_supervisor_leaves_after_its_time() {
        let count = watch::Sender::new(0);
        let start = Instant::now();
        idle(|| true, never, count.subscribe(), LIMIT, LIMIT * CONNECTED).await;
        assert!(start.elapsed() >= LIMIT && start.elapsed() < LIMIT * 2);
    }

    #[tokio::test(start_paused = true)]
    async fn a_connection_or_a_pod_keeps_it() {
        let count = watch::Sender::new(1);
        assert!(
            timeout(
                LIMIT * 5,
                idle(|| true, never, count.subscribe(), LIMIT, LIMIT * CONNECTED)
            )
            .await
            .is_err()
        );
        count.send_replace(0);
        assert!(
            timeout(
                LIMIT * 50,
                idle(|| false, never, count.subscribe(), LIMIT, LIMIT * CONNECTED)
            )
            .await
            .is_err()
        );
    }

    #[tokio::test(start_paused = true)]
    async fn a_connection_that_asks_for_nothing_does_not_keep_it_for_ever() {
        let count = watch::Sender::new(1);
        let start = Instant::now();
        idle(|| true, never, count.subscribe(), LIMIT, LIMIT * CONNECTED).await;
        assert!(start.elapsed() >= LIMIT * CONNECTED);
    }

    #[tokio::test(start_paused = true)]
    async fn the_time_starts_anew_when_a_connection_ends() {
        let count = watch::Sender::new(0);
        let start = Instant::now();
        let leave = idle(|| true, never, count.subscribe(), LIMIT, LIMIT * CONNECTED);
        let visit = async {
            sleep(LIMIT / 2).await;
            count.send_replace(1);
            sleep(LIMIT / 10).await;
            count.send_replace(0);
            std::future::pending::<()>().await;
        };
        tokio::select! { () = leave => {}, () = visit => {} }
        assert!(
            start.elapsed() >= LIMIT + LIMIT / 2,
            "{:?}",
            start.elapsed()
        );
    }

    #[tokio::test]
    async fn a_helper_that_answers_is_no_reason() {
        let (read, write) = pipe().unwrap();
        nix::unistd::write(&write, b"1").unwrap();
        drop(write);
        assert!(
            timeout(Duration::from_millis(50), helper_died(Some(read)))
                .await
                .is_err()
        );
        let (read, write) = pipe().unwrap();
        drop(write);
        helper_died(Some(read)).await;
    }
}
