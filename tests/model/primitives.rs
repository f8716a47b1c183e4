//! A mutex and a watch channel whose every use is a point at which the model may run another thread or task.

use std::cell::Cell;
use std::sync::{LockResult, TryLockError};

use shuttle::sync::atomic::{AtomicBool, Ordering};

pub use std::sync::MutexGuard;

thread_local! {
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// Marks the current OS thread as one of a model, on which shuttle runs all of its threads.
pub fn inside(yes: bool) {
    INSIDE.set(yes);
}

/// An atomic's use is one. `yield_now` is none for a task that waits: it wakes it, and nothing would ever block.
fn point() {
    if INSIDE.get() {
        AtomicBool::new(false).load(Ordering::Relaxed);
    }
}

/// A mutex: whoever locks it may be overtaken just before, and just after he lets go of it.
#[derive(Debug)]
pub struct Mutex<T>(std::sync::Mutex<T>);

impl<T> Mutex<T> {
    pub fn new(value: T) -> Self {
        Self(std::sync::Mutex::new(value))
    }

    pub fn lock(&self) -> LockResult<MutexGuard<'_, T>> {
        loop {
            point();
            match self.0.try_lock() {
                Ok(guard) => return Ok(guard),
                Err(TryLockError::Poisoned(e)) => return Err(e),
                // Another thread of the model has it: it runs when this one gives way.
                Err(TryLockError::WouldBlock) if INSIDE.get() => shuttle::thread::yield_now(),
                Err(TryLockError::WouldBlock) => return self.0.lock(),
            }
        }
    }
}

/// The part of `tokio::sync::watch` that a job uses, with tokio's meaning: a receiver has seen what was sent before it
/// subscribed.
pub mod watch {
    use std::future::poll_fn;
    use std::sync::{Arc, Mutex};
    use std::task::{Poll, Waker};

    #[derive(Debug, Default)]
    struct Channel {
        version: u64,
        wakers: Vec<Waker>,
    }

    #[derive(Debug)]
    pub struct Sender<T> {
        channel: Arc<Mutex<Channel>>,
        _value: std::marker::PhantomData<T>,
    }

    #[derive(Debug)]
    pub struct Receiver {
        channel: Arc<Mutex<Channel>>,
        seen: u64,
    }

    impl Sender<()> {
        pub fn new((): ()) -> Self {
            Self {
                channel: Arc::default(),
                _value: std::marker::PhantomData,
            }
        }

        pub fn send_replace(&self, (): ()) {
            super::point();
            let wakers = {
                let mut channel = self.channel.lock().unwrap();
                channel.version += 1;
                std::mem::take(&mut channel.wakers)
            };
            wakers.into_iter().for_each(Waker::wake);
        }

        pub fn subscribe(&self) -> Receiver {
            super::point();
            let seen = self.channel.lock().unwrap().version;
            Receiver {
                channel: Arc::clone(&self.channel),
                seen,
            }
        }
    }

    impl Receiver {
        pub async fn changed(&mut self) -> Result<(), ()> {
            poll_fn(|cx| {
                super::point();
                let mut channel = self.channel.lock().unwrap();
                if channel.version != self.seen {
                    self.seen = channel.version;
                    return Poll::Ready(Ok(()));
                }
                channel.wakers.push(cx.waker().clone());
                Poll::Pending
            })
            .await
        }
    }
}
