//! What the supervisor asks of allocator and kernel to stay small. All of it is best effort: no error is worth a pod.

use std::sync::atomic::Ordering;

use super::process::THP_IS_OFF;

/// One malloc arena for all threads: a supervisor has one busy thread, and each further arena reserves address space
/// and keeps freed pages. Call it before the first thread.
pub fn one_arena() {
    #[cfg(target_env = "gnu")]
    // SAFETY: mallopt takes integers.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 1);
    }
}

/// Gives freed pages back, after a burst such as a pod's creation.
pub fn trim() {
    #[cfg(target_env = "gnu")]
    // SAFETY: malloc_trim takes an integer and may be called at any time.
    unsafe {
        libc::malloc_trim(0);
    }
}

/// No transparent huge pages for us: one touched byte must not cost 2 MiB. Children get them back (`sys::process`).
pub fn huge_pages_off() {
    // SAFETY: these prctls take integers only.
    unsafe {
        // Off already: then that is what was given to us, and what children get.
        if libc::prctl(libc::PR_GET_THP_DISABLE, 0, 0, 0, 0) == 0
            && libc::prctl(libc::PR_SET_THP_DISABLE, 1, 0, 0, 0) == 0
        {
            THP_IS_OFF.store(true, Ordering::Relaxed);
        }
    }
}
