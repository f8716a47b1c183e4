//! Core scheduling: only processes with the same cookie share a core's hyperthreads (`SCHED_CORE` in the environment of
//! a shim asks for it).

use std::io;

/// Makes a cookie for our process group, which everything started later inherits. ENODEV/EINVAL: the kernel has it not.
pub fn create() -> io::Result<()> {
    // Names and values of linux/prctl.h.
    const PR_SCHED_CORE_CREATE: libc::c_ulong = 1;
    const PIDTYPE_PGID: libc::c_ulong = 2;
    // SAFETY: this prctl takes integers only.
    if unsafe {
        libc::prctl(
            libc::PR_SCHED_CORE,
            PR_SCHED_CORE_CREATE,
            0_u64,
            PIDTYPE_PGID,
            0_u64,
        )
    } < 0
    {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}
