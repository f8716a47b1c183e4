//! The pod around the job, as `src/pod/join.rs`, `build.rs` and `parking.rs` are around it: one lock over "which job is
//! it", and every decision about a request taken under it. Counts what is made and what becomes of it.

use std::future::pending;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use shuttle::rand::{Rng, thread_rng};
use shuttle::{future, thread};

use crate::error::Kind;
use crate::job::{Ask, Job, Phase};
use crate::primitives::Mutex;

#[derive(Clone)]
enum Slot {
    Created,
    Starting(Job<usize>),
    Ready,
    Parked(Job<usize>),
    Stopped,
}

pub enum Answer {
    Live,
    Retry,
    Failed,
}

pub struct Store {
    slot: Mutex<Slot>,
    workers: Mutex<Vec<thread::JoinHandle<()>>>,
    stale: Mutex<bool>,
    /// Things made, undone, and given to somebody.
    made: AtomicUsize,
    undone: AtomicUsize,
    given: AtomicUsize,
    at_work: AtomicUsize,
}

impl Store {
    pub fn new() -> Self {
        Self {
            slot: Mutex::new(Slot::Created),
            workers: Mutex::new(Vec::new()),
            stale: Mutex::new(false),
            made: AtomicUsize::new(0),
            undone: AtomicUsize::new(0),
            given: AtomicUsize::new(0),
            at_work: AtomicUsize::new(0),
        }
    }

    /// StartSandbox.
    pub async fn get(self: &Arc<Self>, hold: bool) -> Answer {
        let waiter = {
            let mut slot = self.slot.lock().unwrap();
            match slot.clone() {
                Slot::Ready => return Answer::Live,
                Slot::Stopped => return Answer::Failed,
                Slot::Parked(job) => {
                    assert!(job.take().is_some(), "parked, and nothing to take");
                    self.given.fetch_add(1, Ordering::Relaxed);
                    *slot = Slot::Ready;
                    return Answer::Live;
                }
                Slot::Starting(job) if job.rolling_back("x", "undo").is_some() => {
                    return Answer::Retry;
                }
                Slot::Starting(job) => job.watch(),
                Slot::Created => {
                    let (job, waiter) = Job::begin();
                    *slot = Slot::Starting(job.clone());
                    let store = Arc::clone(self);
                    let worker = thread::spawn(move || store.work(&job));
                    self.workers.lock().unwrap().push(worker);
                    waiter
                }
            }
        };
        let ask = Ask::patient("make x", None, hold);
        match waiter.answer(&ask, || "s".into(), pending()).await {
            Ok(_) => Answer::Live,
            Err(e) if e.kind() == Kind::Busy => Answer::Retry,
            Err(_) => Answer::Failed,
        }
    }

    /// The creation job.
    fn work(self: Arc<Self>, job: &Job<usize>) {
        let before = self.at_work.fetch_add(1, Ordering::Relaxed);
        assert_eq!(before, 0, "two creations at a time");
        let fails = thread_rng().gen_bool(0.3);
        let number = self.made.fetch_add(1, Ordering::Relaxed);
        thread::yield_now();
        let settled = {
            let mut slot = self.slot.lock().unwrap();
            let current = matches!(&*slot, Slot::Starting(now) if now.is(job));
            let keep = current && !fails && !job.is_cancelled();
            if keep {
                *slot = match job.settle(number) {
                    true => {
                        self.given.fetch_add(1, Ordering::Relaxed);
                        Slot::Ready
                    }
                    false => Slot::Parked(job.clone()),
                };
            }
            keep
        };
        if !settled {
            job.fail(Kind::Other, "it failed");
            thread::yield_now();
            self.undone.fetch_add(1, Ordering::Relaxed);
            self.at_work.fetch_sub(1, Ordering::Relaxed);
            job.end();
            let mut slot = self.slot.lock().unwrap();
            if matches!(&*slot, Slot::Starting(now) if now.is(job)) {
                *slot = Slot::Created;
            }
        } else {
            self.at_work.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Half of an interval of parking.rs: the second tick in a row without a watcher throws away.
    pub fn tick(&self) {
        let mut slot = self.slot.lock().unwrap();
        let Slot::Parked(job) = slot.clone() else {
            return;
        };
        if job.watchers() > 0 {
            *self.stale.lock().unwrap() = false;
            return;
        }
        if !std::mem::replace(&mut *self.stale.lock().unwrap(), true) {
            return;
        }
        if job.discard(false) {
            self.undone.fetch_add(1, Ordering::Relaxed);
            *slot = Slot::Stopped;
        }
    }

    /// StopSandbox: cancels what is under way, undoes what is there.
    pub fn stop(&self) {
        let mut slot = self.slot.lock().unwrap();
        match std::mem::replace(&mut *slot, Slot::Stopped) {
            Slot::Starting(job) => job.cancel(),
            Slot::Parked(job) => {
                assert!(job.discard(true));
                self.undone.fetch_add(1, Ordering::Relaxed);
            }
            Slot::Ready => {
                self.given.fetch_sub(1, Ordering::Relaxed);
                self.undone.fetch_add(1, Ordering::Relaxed);
            }
            Slot::Created | Slot::Stopped => {}
        }
    }

    pub fn join_workers(&self) {
        let workers = std::mem::take(&mut *self.workers.lock().unwrap());
        workers.into_iter().for_each(|w| w.join().unwrap());
        // Every wait is over by now; one that is not would never end.
        future::block_on(async {});
    }

    /// Each thing that was made is somebody's or undone, once; `told`: somebody was told that he has it.
    pub fn assert_no_orphan(&self, told: bool) {
        let count = |n: &AtomicUsize| n.load(Ordering::Relaxed);
        let slot = self.slot.lock().unwrap().clone();
        let (made, undone, given) = (count(&self.made), count(&self.undone), count(&self.given));
        assert_eq!(made, undone + given, "an orphan, or one undone twice");
        assert!(given <= 1, "given away twice");
        match slot {
            Slot::Ready => assert_eq!(given, 1),
            Slot::Created | Slot::Stopped => assert_eq!(given, 0),
            Slot::Starting(_) => panic!("still at work"),
            Slot::Parked(job) => panic!(
                "parked for ever: {:?}",
                matches!(job.phase(), Phase::Parked(_))
            ),
        }
        assert!(!told || made > 0);
    }
}
