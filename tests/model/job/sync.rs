//! What stands in the place of `src/job/sync.rs` under the model: the same types, by primitives that shuttle schedules.
//!
//! Outside of a model (the job's own unit tests are compiled into this binary, too) they work as usual ones.

pub(super) use std::sync::{Arc, PoisonError};

pub(super) use super::super::primitives::{Mutex, MutexGuard, watch};
