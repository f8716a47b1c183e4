//! The sandbox as an actor. STUB of the public surface; bodies to be written.
#![allow(missing_docs, unused_variables, clippy::todo)]
use std::sync::Arc;
use std::time::Duration;

use crate::config::Config;
use crate::container::{Containers, Events};
use crate::error::Result;
use crate::process::Reaper;

pub mod record;

/// Handle of the one pod of this supervisor. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Pod {}

/// What `serve` knows when it starts.
#[derive(Debug, Clone)]
pub struct PodOptions { pub config: Arc<Config>, pub namespace: String, pub group: String, pub bundle: std::path::PathBuf, pub address: String }

impl Pod {
    pub fn new(options: PodOptions, reaper: Reaper, events: Arc<dyn Events>) -> Result<Self> { todo!() }
    pub fn containers(&self) -> &Containers { todo!() }
    /// SIGTERM: stop with the pod's grace and undo everything.
    pub async fn terminate(&self) { todo!() }
    /// Resolves when the supervisor should leave (ShutdownSandbox, Task.Shutdown without tasks, terminate).
    pub async fn ended(&self) { todo!() }
    /// True while there is nothing to live for: nothing was ever created and nothing is being created.
    pub fn is_unused(&self) -> bool { todo!() }
    /// State for SIGUSR1's dump.
    pub fn dump(&self) -> String { todo!() }
}

/// What `delete` answers.
#[derive(Debug, Clone, Copy, Default)]
pub struct Deleted { pub pid: u32, pub exit_status: u32, /** unix nanoseconds, 0 unknown */ pub exited_at: u64 }

/// Undo without a supervisor, from the journal alone: `id` a sandbox (everything of the pod) or one of its containers (only that).
/// Idempotent. `budget`: answer within it; what is left is owed and stays on record.
pub async fn rescue(config: &Config, reaper: &Reaper, namespace: &str, id: &str, budget: Duration) -> Result<Deleted> { todo!() }
