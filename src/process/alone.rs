//! A process that runs one guarded program at a time and nothing else needs no guard beside itself: what the program
//! started ends below this process, which is a child subreaper, or goes with it.
//!
//! What it cannot do is to outlive itself: after a SIGKILL of such a process the program is killed by the kernel, and what
//! the program has started is found by whoever takes the work over. It saves a copy of the process for each program.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::identity::{Identity, children, descendants};

static ALONE: AtomicBool = AtomicBool::new(false);

/// A program has been begun.
static BEGUN: AtomicBool = AtomicBool::new(false);

/// Looks for what is left, after a SIGKILL to all of it. What hangs in the kernel has that waiting for it.
const ROUNDS: u32 = 400;
const PAUSE: Duration = Duration::from_millis(5);

/// From now on this process, which has no children, is its programs' guard.
pub fn guard_by_itself() {
    ALONE.store(true, Ordering::Relaxed);
}

/// It is.
pub(super) fn is_guard() -> bool {
    ALONE.load(Ordering::Relaxed)
}

/// What was below this process before a program began: earlier ones have left it on purpose.
#[derive(Debug)]
pub(super) struct Before(Vec<Identity>);

impl Before {
    pub(super) fn now() -> Self {
        if !BEGUN.swap(true, Ordering::Relaxed) {
            return Self(Vec::new());
        }
        let own = children(own());
        Self(own.into_iter().flat_map(Identity::of).collect())
    }

    /// SIGKILL to all that has come below this process since, until nothing of it lives; what it forks meanwhile, too.
    pub(super) fn kill_others(&self) {
        for _ in 0..ROUNDS {
            let others = self.others();
            if others.is_empty() {
                return;
            }
            for process in others {
                if let Err(error) = process.signal(libc::SIGKILL) {
                    tracing::warn!(%error, "kill what a program started");
                }
            }
            std::thread::sleep(PAUSE);
        }
    }

    fn others(&self) -> Vec<Identity> {
        let roots = children(own()).into_iter().flat_map(Identity::of);
        let roots = roots.filter(|root| !self.0.contains(root));
        let all = roots.flat_map(|root| [vec![root], descendants(root.pid)].concat());
        all.filter(Identity::is_alive).collect()
    }
}

fn own() -> i32 {
    std::process::id().cast_signed()
}
