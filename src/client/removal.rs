//! How a supervisor is asked to end its pod: StopSandbox, ShutdownSandbox, its end; one sequence for `podvisor stop` and
//! `rm`, and for `delete` (docs/removal.md).
//!
//! Promises: every step may find its work done, and has a deadline of its own, retries included; a closed connection is
//! no failure but a question, which the identity of the process answers and no text; only ever that very process is
//! signalled. Several removers may be at it at once. Must never undo anything itself: that is done from the journal, by
//! those who can, when this has said that the supervisor is out of the way.

use std::fmt;
use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::{Client, context, context_within, from_ttrpc, pause_before};
use crate::error::{Error, Kind, Result};
use crate::process::Identity;
use crate::proto::sandbox::sandbox::{PingRequest, ShutdownSandboxRequest, StopSandboxRequest};

/// How long a supervisor that has closed its socket may take to end before its life is doubted.
const CLOSED_LIMIT: Duration = Duration::from_secs(3);

/// How often it is looked whether a supervisor has ended, or has become a keeper.
const LOOK: Duration = Duration::from_millis(50);

/// How often one that takes its time is asked whether it stands still, and how long it may take to say no. Questions never
/// wait for work; this is what a machine that is far behind needs for one.
const STILL_LOOK: Duration = Duration::from_secs(5);
const STILL_LIMIT: Duration = Duration::from_secs(20);

/// How long a process may take to go after SIGKILL.
const KILL_LIMIT: Duration = Duration::from_secs(5);

/// A pod's supervisor, as the pod's record names it.
#[derive(Clone, Copy)]
pub struct Supervisor<'a> {
    /// Sandbox id.
    pub id: &'a str,
    /// What the pod is called in messages.
    pub name: &'a str,
    /// Its socket, `unix:///path` or a bare path.
    pub address: &'a str,
    /// Its process; None: nobody knows, and nobody is signalled.
    pub process: Option<Identity>,
    /// True as soon as it has let go of the pod and stays for the network alone, on record: a keeper. Its socket is closed
    /// and its process lives, rightly.
    pub is_keeper: &'a (dyn Fn() -> bool + Sync),
}

/// What came of a step.
#[derive(Debug)]
pub enum Told<T> {
    /// It was done, now or before.
    Done(T),
    /// There is no such thing (any more), it says.
    Unknown(Error),
    /// Nobody can be asked: its process has ended, or it is a keeper. What is left is in the journal.
    Gone,
    /// It has closed, and its process lives all the same: nobody reaches it.
    Deaf(Error),
    /// It could not do it, or not in time.
    Failed(Error),
}

impl<T> Told<T> {
    /// The same with another value.
    pub fn map<U>(self, with: impl FnOnce(T) -> U) -> Told<U> {
        match self {
            Self::Done(value) => Told::Done(with(value)),
            Self::Unknown(error) => Told::Unknown(error),
            Self::Gone => Told::Gone,
            Self::Deaf(error) => Told::Deaf(error),
            Self::Failed(error) => Told::Failed(error),
        }
    }
}

impl fmt::Debug for Supervisor<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Supervisor")
            .field("id", &self.id)
            .field("address", &self.address)
            .field("process", &self.process)
            .finish_non_exhaustive()
    }
}

impl Supervisor<'_> {
    /// StopSandbox: containers get `grace` seconds; `limit` for all of it. What runs already is joined, not repeated.
    pub async fn stop(&self, grace: u32, limit: Duration) -> Told<()> {
        let request = StopSandboxRequest {
            sandbox_id: self.id.to_owned(),
            timeout_secs: grace,
            ..Default::default()
        };
        let what = format!("stop pod {}", self.name);
        let asked = self.ask(limit, async |client, left| {
            let sandbox = client.sandbox();
            let answer = sandbox.stop_sandbox(context_within(left), &request).await;
            answer.map(drop).map_err(|e| from_ttrpc(&what, e))
        });
        self.unless_still(asked).await
    }

    /// ShutdownSandbox, `limit` for all of it. After `Done` it leaves by itself: see [`Self::see_off`].
    pub async fn shut_down(&self, limit: Duration) -> Told<()> {
        let request = ShutdownSandboxRequest {
            sandbox_id: self.id.to_owned(),
            ..Default::default()
        };
        let what = format!("shut down pod {}", self.name);
        let asked = self.ask(limit, async |client, left| {
            let sandbox = client.sandbox();
            let answer = sandbox.shutdown_sandbox(context_within(left), &request);
            answer.await.map(drop).map_err(|e| from_ttrpc(&what, e))
        });
        self.unless_still(asked).await
    }

    /// What was asked for, if it goes on answering meanwhile.
    async fn unless_still<T>(&self, asked: impl Future<Output = Told<T>>) -> Told<T> {
        tokio::select! {
            told = asked => told,
            error = self.stands_still() => Told::Failed(error),
        }
    }

    /// Resolves when it does not answer a plain question any more; never otherwise.
    async fn stands_still(&self) -> Error {
        let request = PingRequest {
            sandbox_id: self.id.to_owned(),
            ..Default::default()
        };
        loop {
            sleep(STILL_LOOK).await;
            let Ok(client) = Client::connect(self.address).await else {
                continue;
            };
            let sandbox = client.sandbox();
            let pong = sandbox.ping_sandbox(context(Some(STILL_LIMIT)), &request);
            match pong.await.map_err(|e| from_ttrpc("ping", e)) {
                Err(e) if e.kind() == Kind::Deadline => break,
                _ => {}
            }
        }
        let pid = self.process.map_or(0, |process| process.pid);
        Error::new(
            Kind::Deadline,
            format!(
                "ask the supervisor of pod {0} (pid {pid}): it has answered nothing for {1} s, so that it stands still or hangs; let it go on, or end it with `podvisor rm -f {0}`",
                self.name,
                STILL_LIMIT.as_secs()
            ),
        )
    }

    /// One request, on a fresh connection each time: after "closed" again, 100 ms x i^2 later, at most three times, within
    /// `limit`. `call` is given what is left of that; it has to be safe to repeat.
    pub async fn ask<T>(
        &self,
        limit: Duration,
        mut call: impl AsyncFnMut(Client, Duration) -> Result<T>,
    ) -> Told<T> {
        let end = Instant::now() + limit;
        let left = || end.saturating_duration_since(Instant::now());
        let mut done = 0;
        loop {
            let answer = match Client::connect(self.address).await {
                Ok(client) => call(client, left()).await,
                Err(error) => Err(error),
            };
            done += 1;
            let error = match answer {
                Ok(value) => return Told::Done(value),
                Err(error) if error.kind() == Kind::NotFound => return Told::Unknown(error),
                Err(error) if error.kind() != Kind::Gone => return Told::Failed(error),
                Err(closed) => closed,
            };
            if self.is_out_of_the_way() {
                return Told::Gone;
            }
            match pause_before(done).filter(|pause| *pause < left()) {
                Some(pause) => sleep(pause).await,
                None => return self.decide(error, left().min(CLOSED_LIMIT)).await,
            }
        }
    }

    /// Waits until it has left, or has become a keeper; false when neither has happened within `limit`.
    pub async fn see_off(&self, limit: Duration) -> bool {
        let end = Instant::now() + limit;
        loop {
            if self.is_out_of_the_way() {
                return true;
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            match self.process {
                Some(process) => drop(process.wait_gone(LOOK.min(left)).await),
                None => return true,
            }
        }
    }

    /// Ends exactly this process, whatever it is at. A keeper is let live.
    ///
    /// # Errors
    /// Denied when it may not be signalled; Deadline when it hangs in the kernel.
    pub async fn kill(&self) -> Result<()> {
        let Some(process) = self.process.filter(|_| !self.is_out_of_the_way()) else {
            return Ok(());
        };
        process.signal(libc::SIGKILL)?;
        if process.wait_gone(KILL_LIMIT).await {
            return Ok(());
        }
        Err(Error::new(
            Kind::Deadline,
            format!(
                "end the supervisor of pod {} (pid {}): it is still there {} s after SIGKILL, so that it hangs in the kernel; look at /proc/{}/stack",
                self.name,
                process.pid,
                KILL_LIMIT.as_secs(),
                process.pid
            ),
        ))
    }

    /// SIGTERM: it stops its pod with the pod's grace, undoes everything and leaves. False: not within `limit`.
    ///
    /// # Errors
    /// Denied when it may not be signalled.
    pub async fn terminate(&self, limit: Duration) -> Result<bool> {
        if let Some(process) = self.process.filter(|_| !self.is_out_of_the_way()) {
            process.signal(libc::SIGTERM)?;
        }
        Ok(self.see_off(limit).await)
    }

    /// It has closed again and again. Leaving supervisors close first and end then.
    async fn decide<T>(&self, closed: Error, limit: Duration) -> Told<T> {
        match self.see_off(limit).await {
            true => Told::Gone,
            false => Told::Deaf(closed),
        }
    }

    fn is_out_of_the_way(&self) -> bool {
        self.process.is_none_or(|process| !process.is_alive()) || (self.is_keeper)()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;

    const LIMIT: Duration = Duration::from_secs(60);

    fn own() -> Identity {
        Identity::own().unwrap()
    }

    /// A process that is not there (any more): its pid is another's.
    fn dead() -> Identity {
        Identity {
            start_time: own().start_time + 1,
            ..own()
        }
    }

    async fn asked(process: Option<Identity>, keeper: bool) -> (Told<()>, Duration) {
        let supervisor = Supervisor {
            id: "p1",
            name: "web",
            address: "/nowhere/at/all",
            process,
            is_keeper: &|| keeper,
        };
        let begun = Instant::now();
        let told = supervisor.shut_down(LIMIT).await;
        (told, begun.elapsed())
    }

    #[tokio::test(start_paused = true)]
    async fn when_nobody_listens_the_process_decides() {
        for (process, keeper) in [(None, false), (Some(dead()), false), (Some(own()), true)] {
            let (told, took) = asked(process, keeper).await;
            assert!(matches!(told, Told::Gone), "{told:?}");
            assert_eq!(took, Duration::ZERO, "asked again for nothing");
        }
        let (told, took) = asked(Some(own()), false).await;
        assert!(matches!(told, Told::Deaf(_)), "{told:?}");
        // Three pauses, and the time that one who leaves is given.
        assert!(took >= PAUSES + CLOSED_LIMIT && took < LIMIT, "{took:?}");
    }

    const PAUSES: Duration = Duration::from_millis(100 + 400 + 900);

    #[tokio::test(start_paused = true)]
    async fn a_connection_that_is_cut_is_made_anew_three_times() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let listener = UnixListener::bind(&path).unwrap();
        listener.set_nonblocking(true).unwrap();
        let listener = tokio::net::UnixListener::from_std(listener).unwrap();
        let serve = tokio::spawn(async move {
            let mut count = 0;
            while count < 4 {
                drop(listener.accept().await);
                count += 1;
            }
            count
        });
        let supervisor = Supervisor {
            id: "p1",
            name: "web",
            address: &path.to_string_lossy(),
            process: Some(own()),
            is_keeper: &|| false,
        };
        let told = supervisor.stop(1, LIMIT).await;
        assert!(matches!(told, Told::Deaf(_)), "{told:?}");
        assert_eq!(serve.await.unwrap(), 4);
        assert!(!supervisor.see_off(Duration::from_secs(1)).await);
    }

    #[tokio::test]
    async fn nobody_else_is_ever_killed() {
        for (process, keeper) in [(None, false), (Some(dead()), false), (Some(own()), true)] {
            let supervisor = Supervisor {
                id: "p1",
                name: "web",
                address: "",
                process,
                is_keeper: &|| keeper,
            };
            supervisor.kill().await.unwrap();
            assert!(supervisor.terminate(LIMIT).await.unwrap());
        }
    }
}
