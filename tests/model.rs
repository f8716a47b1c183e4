//! The retry protocol under every order of its steps: the real job type of `src/job`, compiled once more with primitives
//! that shuttle schedules, driven as the pod drives it.
//!
//! Looked for: a wake-up that is lost (shuttle finds nobody who can run), a result that is given away twice, and one that
//! is nobody's in the end. A failure prints the schedule, which `shuttle::replay` takes.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::print_stdout,
    reason = "tests panic where they cannot go on"
)]

/// What the job's sources call `crate::error`.
mod error {
    pub use podvisor::error::{Error, Kind, Result};
}
/// The sources themselves; only `sync.rs` is another.
#[allow(dead_code, reason = "the model drives the part that has races")]
#[path = "model/job/mod.rs"]
mod job;
#[path = "model/primitives.rs"]
mod primitives;
#[path = "model/store.rs"]
mod store;

use std::future::{Future, pending, poll_fn};
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;

use error::{Error, Kind};
use job::{Ask, Job, Phase};
use shuttle::rand::{Rng, thread_rng};
use shuttle::scheduler::{PctScheduler, RandomScheduler};
use shuttle::{Config, Runner, future, thread};
use store::{Answer, Store};

/// `PODVISOR_SLOW` looks ten times as long.
fn rounds(count: usize) -> usize {
    match std::env::var_os("PODVISOR_SLOW") {
        Some(_) => count * 10,
        None => count,
    }
}

/// Explores `body`, half of the rounds at random and half with few, well-placed changes of the running thread.
fn explore(count: usize, body: impl Fn() + Send + Sync + Copy + 'static) {
    let body = move || {
        primitives::inside(true);
        body();
    };
    let mut config = Config::new();
    config.failure_persistence = shuttle::FailurePersistence::Print;
    Runner::new(RandomScheduler::new(count / 2), config.clone()).run(body);
    Runner::new(PctScheduler::new(3, count / 2), config).run(body);
    primitives::inside(false);
    println!("{count} schedules");
}

/// `work` unless its caller's deadline passes, which it may at any moment.
async fn unless_late<R>(steps: u32, work: impl Future<Output = R>) -> Option<R> {
    let mut work = pin!(work);
    let mut left = steps;
    poll_fn(|cx| {
        if let Poll::Ready(answer) = work.as_mut().poll(cx) {
            return Poll::Ready(Some(answer));
        }
        if left == 0 {
            return Poll::Ready(None);
        }
        left -= 1;
        cx.waker().wake_by_ref();
        Poll::Pending
    })
    .await
}

fn ask(hold: bool) -> Ask {
    Ask::patient("make x", None, hold)
}

/// Checklist item 9: a result that comes between a request's look and its wait wakes it, a hundred thousand times.
#[test]
fn crio_09_a_result_that_comes_between_look_and_wait_is_seen() {
    const EACH: usize = 10;
    explore(rounds(100_000) / EACH, || {
        let jobs: Vec<_> = (0..EACH).map(|_| Job::begin()).collect();
        let work: Vec<_> = jobs.iter().map(|(job, _)| job.clone()).collect();
        let worker = thread::spawn(move || work.iter().all(|job| job.settle(7)));
        for (job, first) in &jobs {
            let answer = match thread_rng().gen_bool(0.5) {
                // Its beginner is there: it is his, and who joins is told of it.
                true => future::block_on(first.answer(&ask(false), || "s".into(), pending())),
                false => {
                    let watcher = job.watch();
                    future::block_on(watcher.answer(&ask(false), || "s".into(), pending()))
                }
            };
            assert_eq!(answer.unwrap(), 7);
        }
        assert!(worker.join().unwrap());
    });
}

/// R6: whoever watches a creation fail is woken, whenever he came, and hears the cause.
#[test]
fn a_failure_wakes_everybody_whenever_they_came() {
    explore(rounds(5_000), || {
        let (job, first) = Job::<u32>::begin();
        let work = job.clone();
        let worker = thread::spawn(move || {
            work.fail(Kind::Denied, "no");
            work.end();
        });
        let waiters = [first, job.watch()].map(|waiter| {
            thread::spawn(move || {
                future::block_on(waiter.answer(&ask(true), || "s".into(), pending()))
            })
        });
        for waiter in waiters {
            assert_eq!(waiter.join().unwrap().unwrap_err().kind(), Kind::Denied);
        }
        worker.join().unwrap();
        assert!(job.is_undone());
    });
}

/// R5, R11: a parked result is taken by one of several requests or thrown away, never both and never twice; who is held
/// hears of it.
#[test]
fn a_parked_result_has_one_end() {
    explore(rounds(5_000), || {
        let (job, first) = Job::begin();
        drop(first);
        assert!(!job.settle(7));
        let held = job.watch();
        let held = thread::spawn(move || {
            future::block_on(held.answer(&ask(true), || "s".into(), pending()))
        });
        let claims: Vec<_> = (0..2)
            .map(|_| {
                let job = job.clone();
                thread::spawn(move || job.take().is_some())
            })
            .collect();
        let thrown = thread::spawn({
            let job = job.clone();
            move || job.discard(true)
        });
        let taken = claims
            .into_iter()
            .filter(|_| true)
            .map(|c| c.join().unwrap());
        let taken = taken.filter(|taken| *taken).count();
        let thrown = thrown.join().unwrap();
        assert_eq!(taken + usize::from(thrown), 1);
        match held.join().unwrap() {
            Ok(result) => assert!(result == 7 && taken == 1),
            Err(e) => assert!(e.kind() == Kind::Cancelled && thrown, "{e}"),
        }
    });
}

/// R5: what somebody watches is not thrown away by a tick, and it is once he has left.
#[test]
fn a_watched_result_is_not_thrown_away() {
    explore(rounds(5_000), || {
        let (job, first) = Job::begin();
        drop(first);
        job.settle(7);
        let watcher = job.watch();
        let tick = thread::spawn({
            let job = job.clone();
            move || job.discard(false)
        });
        thread::yield_now();
        let parked = job.phase() == Phase::Parked(7);
        drop(watcher);
        let thrown = tick.join().unwrap();
        assert!(parked, "thrown away under a watcher");
        assert_eq!(thrown, job.phase() == Phase::Gone);
        assert_eq!(!thrown, job.discard(false));
    });
}

/// A request, repeated as a daemon repeats it: until it is told, or it has asked three times.
async fn client(store: Arc<Store>, patience: [u32; 3]) -> u32 {
    let mut taken = 0;
    for steps in patience {
        match unless_late(steps, store.get(thread_rng().gen_bool(0.5))).await {
            Some(Answer::Live) => {
                taken += 1;
                break;
            }
            Some(Answer::Retry | Answer::Failed) | None => {}
        }
    }
    taken
}

/// Everything at once: requests that come, time out, and come again; work that succeeds or fails at any moment and is
/// undone; ticks that throw away; a stop. In the end nothing is nobody's, and nothing was given away twice.
#[test]
fn whatever_happens_to_a_pod_it_is_somebodys_or_gone() {
    explore(rounds(5_000), || {
        let store = Arc::new(Store::new());
        let clients: Vec<_> = (0..3)
            .map(|_| {
                let patience = [0; 3].map(|_| thread_rng().gen_range(0..12));
                let store = Arc::clone(&store);
                thread::spawn(move || future::block_on(client(store, patience)))
            })
            .collect();
        let ticks = thread::spawn({
            let store = Arc::clone(&store);
            move || {
                for _ in 0..thread_rng().gen_range(0..6) {
                    store.tick();
                    thread::yield_now();
                }
            }
        });
        let stops = thread_rng().gen_bool(0.2);
        let stop = thread::spawn({
            let store = Arc::clone(&store);
            move || {
                if stops {
                    store.stop();
                }
            }
        });
        let told: u32 = clients.into_iter().map(|c| c.join().unwrap()).sum();
        ticks.join().unwrap();
        stop.join().unwrap();
        store.join_workers();
        // Nobody asks any more: two ticks later what is parked is gone.
        store.tick();
        store.tick();
        store.assert_no_orphan(told > 0);
    });
}

/// The model has teeth: the same look and wait with the subscription after the look loses a wake-up, and is caught.
#[test]
#[should_panic(expected = "deadlock")]
fn a_wait_that_subscribes_too_late_is_caught() {
    explore(20_000, || {
        let (sent, done) = (
            Arc::new(primitives::watch::Sender::new(())),
            Arc::new(primitives::Mutex::new(false)),
        );
        let worker = thread::spawn({
            let (sent, done) = (Arc::clone(&sent), Arc::clone(&done));
            move || {
                *done.lock().unwrap() = true;
                sent.send_replace(());
            }
        });
        future::block_on(async {
            while !*done.lock().unwrap() {
                // Between the look above and this, the change may come and go.
                let _ = sent.subscribe().changed().await;
            }
        });
        worker.join().unwrap();
    });
}

/// So that the type is used as the sources mean it.
#[allow(dead_code, reason = "names the error type for the sources")]
type Told = Error;
