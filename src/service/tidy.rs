//! Memory after work: what parsing a container's configuration took (ten times its text) is given back to the machine
//! once, shortly after a burst of requests. A supervisor lives for months after its last one.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::sys::memory;

/// From the first request of a burst. Once for all that come meanwhile: the pages would be taken again at once.
const PAUSE: Duration = Duration::from_secs(2);

static COMING: AtomicBool = AtomicBool::new(false);

/// Called at the end of each request; only those of these methods leave much behind.
pub fn after(method: &str) {
    let is_large = matches!(
        method,
        "CreateSandbox" | "StartSandbox" | "Create" | "Start" | "Exec" | "Update" | "Delete"
    );
    if !is_large || COMING.swap(true, Ordering::Relaxed) {
        return;
    }
    tokio::spawn(async {
        tokio::time::sleep(PAUSE).await;
        COMING.store(false, Ordering::Relaxed);
        memory::trim();
    });
}
