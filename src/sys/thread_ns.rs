//! Other namespaces, entered only on an OS thread of its own that ends afterwards.
//!
//! Promise: no thread of the runtime ever leaves the namespaces of the process. (A guard that goes back is not enough:
//! held over an await, or failing to go back, it leaves a worker in a pod's netns, and the next pod is built there.)

use std::any::Any;
use std::os::fd::BorrowedFd;
use std::thread;

use nix::sched::{CloneFlags, setns, unshare};

use crate::error::{Context, Error, Kind, Result};

/// One change of namespace, made in order before the closure runs.
#[derive(Clone, Copy, Debug)]
pub enum Enter<'fd> {
    /// setns(2) to this namespace file. The kind is checked by the kernel. A user namespace cannot be joined: the
    /// process has several threads.
    Join(BorrowedFd<'fd>, CloneFlags),
    /// unshare(2) these.
    New(CloneFlags),
}

/// Runs `work` on a new thread that has entered `ways`; blocks until it is done. A panic in it becomes an error.
pub fn run<T: Send>(ways: &[Enter<'_>], work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    thread::scope(|scope| {
        let started = thread()
            .spawn_scoped(scope, || {
                ways.iter().try_for_each(enter)?;
                work()
            })
            .context(|| THREAD)?;
        started
            .join()
            .unwrap_or_else(|panic| Err(panicked(panic.as_ref())))
    })
}

/// Work that [`start`] has begun.
#[derive(Debug)]
pub struct Started<T>(thread::JoinHandle<Result<T>>);

impl<T> Started<T> {
    /// Blocks until it is done.
    pub fn done(self) -> Result<T> {
        let joined = self.0.join();
        joined.unwrap_or_else(|panic| Err(panicked(panic.as_ref())))
    }
}

/// The same as [`run`] in new namespaces, while the caller does something else.
pub fn start<T: Send + 'static>(
    new: CloneFlags,
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<Started<T>> {
    thread()
        .spawn(move || {
            enter(&Enter::New(new))?;
            work()
        })
        .context(|| THREAD)
        .map(Started)
}

const THREAD: &str = "start a thread for other namespaces";

fn thread() -> thread::Builder {
    let named = thread::Builder::new().name("namespaces".to_owned());
    named.stack_size(256 * 1024)
}

#[allow(
    clippy::disallowed_methods,
    reason = "this is the one place: the thread ends afterwards"
)]
fn enter(way: &Enter<'_>) -> Result<()> {
    match way {
        Enter::Join(fd, kind) => {
            if kind.contains(CloneFlags::CLONE_NEWNS) {
                // Refused while root and working directory are shared with other threads.
                unshare(CloneFlags::CLONE_FS)
                    .context(|| "unshare the thread's working directory")?;
            }
            setns(fd, *kind).context(|| format!("join a namespace of kind {kind:?}"))
        }
        Enter::New(kinds) => unshare(*kinds).context(|| format!("make namespaces {kinds:?}")),
    }
}

fn panicked(panic: &(dyn Any + Send)) -> Error {
    let text = panic
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("no text");
    Error::new(
        Kind::Other,
        format!("work in other namespaces: it panicked: {text}"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_is_an_error() {
        let done: Result<()> = run(&[], || panic!("gone wrong"));
        let text = done.map_err(|e| e.to_string());
        assert_eq!(
            text,
            Err("work in other namespaces: it panicked: gone wrong".to_owned())
        );
    }

    #[test]
    fn what_the_work_returns_comes_back() {
        let base = 40;
        assert_eq!(run(&[], || Ok(base + 2)).ok(), Some(42));
    }
}
