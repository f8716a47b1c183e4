//! What a job's state is shared by, in one place, so that a model checker can put its own under it.

pub(super) use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Only ever says "look again"; what there is to see is behind the mutex.
pub(super) use tokio::sync::watch;
