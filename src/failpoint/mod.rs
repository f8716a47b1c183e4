//! Named points of failure: where a test makes a call fail, or a process stop, hang or die.
//!
//! Two kinds. *Points* stand in the source before and after side effects ([`hit`] and its relatives) and obey the
//! environment. *Methods* are the calls of the Task and Sandbox services; the executable
//! `containerd-shim-podvisor-fp-v1` arms them from the annotations of the pod, in containerd's own grammar ([`call`]).
//!
//! Promise: without the feature `failpoint` all of it is nothing: no code, no text, no table. Must never be in what is
//! shipped; `scripts/build` looks.
//!
//! | variable | says |
//! |---|---|
//! | `PODVISOR_FAULT` | `point=terms;point=terms`: counts are those of each process |
//! | `PODVISOR_FAULT_DIR` | a directory: `rules` has a `point=terms` a line, may change while a process runs, and is counted down by all processes together (what hangs goes on when its line is gone); a file `hits` gets a line `pid point` for each point that was reached |

#[cfg(feature = "failpoint")]
mod method;
#[cfg(feature = "failpoint")]
mod point;
#[cfg(feature = "failpoint")]
mod points;
#[cfg(feature = "failpoint")]
mod term;

#[cfg(feature = "failpoint")]
pub use method::{PREFIX, arm, call, obey_annotations};
#[cfg(feature = "failpoint")]
pub use point::{child, hit, pass, reach};
#[cfg(feature = "failpoint")]
pub use points::POINTS;
#[cfg(feature = "failpoint")]
pub use term::{Act, Terms};

#[cfg(not(feature = "failpoint"))]
mod nothing {
    use crate::error::Result;

    /// A point in plain code: may fail, and blocks the thread while it is delayed.
    #[inline(always)]
    pub fn hit(_: &'static str) -> Result<()> {
        Ok(())
    }

    /// A point where nobody could be told of a failure.
    #[inline(always)]
    pub fn pass(_: &'static str) {}

    /// A point in asynchronous code, which goes on meanwhile.
    #[inline(always)]
    pub fn reach(_: &'static str) -> std::future::Ready<Result<()>> {
        std::future::ready(Ok(()))
    }

    /// A point at which it is a child of ours that dies.
    #[inline(always)]
    pub fn child(_: &'static str, _: i32) {}
}

#[cfg(not(feature = "failpoint"))]
pub use nothing::{child, hit, pass, reach};
