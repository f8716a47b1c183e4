//! Processes: the only room that waits.
//!
//! Owns: spawning, the one wait loop of this process, identities (pid and start time), short-lived helper programs.
//! Promises: an exit is never lost once a child is known, a reaped pid is never signalled, a helper never outlives its
//! bound. Must never know what a process is for.

mod alone;
mod child;
mod detach;
mod helper;
mod identity;
mod reaper;

pub use alone::guard_by_itself;
pub use child::{Child, Exit};
pub use detach::detach;
pub use helper::{Helper, Output};
pub use identity::{Identity, tree_of};
pub use reaper::{HoldUnknown, Reaper};
