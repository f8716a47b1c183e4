//! The infra program: the process that holds a pod's namespaces open, and reaps as their pid 1.
//!
//! Not a module of the crate: `build.rs` compiles it by itself, without standard library or libc, to a static program of
//! a few kilobytes. It gives up every privilege, waits for signals, reaps, and ends on TERM or INT.
//!
//! Contract with `sys::clone`: it is started with TERM, INT and CHLD blocked, 0 to 2 on /dev/null, and one further
//! descriptor, the report pipe. Closing that tells the supervisor that the program is up and hardened; ending before
//! that, with one of the codes below, tells that it is not.
#![no_std]
#![no_main]

use core::arch::{asm, global_asm};

/// Exit codes of a start that did not work. 0 is the orderly end.
const BAD_HARDENING: usize = 111;
const BAD_FILTER: usize = 112;
const PANIC: usize = 113;

const NAME: &[u8; 15] = b"podvisor-infra\0";

#[cfg(target_arch = "x86_64")]
mod arch {
    pub const WAIT4: u32 = 61;
    pub const RT_SIGPROCMASK: u32 = 14;
    pub const RT_SIGTIMEDWAIT: u32 = 128;
    pub const CAPSET: u32 = 126;
    pub const PRCTL: u32 = 157;
    pub const EXIT_GROUP: u32 = 231;
    pub const CLOSE: u32 = 3;
    pub const CLOSE_RANGE: u32 = 436;
    /// AUDIT_ARCH_X86_64.
    pub const AUDIT: u32 = 0xc000_003e;
}

#[cfg(target_arch = "aarch64")]
mod arch {
    pub const WAIT4: u32 = 260;
    pub const RT_SIGPROCMASK: u32 = 135;
    pub const RT_SIGTIMEDWAIT: u32 = 137;
    pub const CAPSET: u32 = 91;
    pub const PRCTL: u32 = 167;
    pub const EXIT_GROUP: u32 = 94;
    pub const CLOSE: u32 = 57;
    pub const CLOSE_RANGE: u32 = 436;
    /// AUDIT_ARCH_AARCH64.
    pub const AUDIT: u32 = 0xc000_00b7;
}

// The kernel enters with the stack pointer at argc and nothing else set up. No argument is read.
#[cfg(target_arch = "x86_64")]
global_asm!(".globl _start", "_start:", "xor %ebp, %ebp", "and $-16, %rsp", "call {main}", "ud2", main = sym main, options(att_syntax));
#[cfg(target_arch = "aarch64")]
global_asm!(".globl _start", "_start:", "mov x29, xzr", "mov x30, xzr", "bl {main}", "brk #0", main = sym main);

const SIGINT: usize = 2;
const SIGTERM: usize = 15;
const SIGCHLD: usize = 17;

extern "C" fn main() -> ! {
    let signals: u64 = 1 << (SIGINT - 1) | 1 << (SIGTERM - 1) | 1 << (SIGCHLD - 1);
    // Blocked signals are queued even for pid 1, which the kernel otherwise shields from all it has no handler for.
    call(arch::RT_SIGPROCMASK, [SIG_BLOCK, &raw const signals as usize, 0, 8, 0]);
    if !harden() {
        end(BAD_HARDENING);
    }
    if !filter() {
        end(BAD_FILTER);
    }
    // Last: it tells the supervisor that everything above is done.
    close_from_3();
    loop {
        match call(arch::RT_SIGTIMEDWAIT, [&raw const signals as usize, 0, 0, 8, 0]) as usize {
            SIGTERM | SIGINT => end(0),
            // One signal may stand for many children.
            SIGCHLD => while call(arch::WAIT4, [usize::MAX, 0, WNOHANG, 0, 0]) > 0 {},
            // EINTR, after a stop and continue.
            _ => {}
        }
    }
}

const SIG_BLOCK: usize = 0;
const WNOHANG: usize = 1;

const PR_SET_NAME: usize = 15;
const PR_SET_SECCOMP: usize = 22;
const PR_CAPBSET_DROP: usize = 24;
const PR_SET_NO_NEW_PRIVS: usize = 38;
const PR_CAP_AMBIENT: usize = 47;
const PR_CAP_AMBIENT_CLEAR_ALL: usize = 4;

/// No new privileges, no capability in any set.
fn harden() -> bool {
    call(arch::PRCTL, [PR_SET_NAME, NAME.as_ptr() as usize, 0, 0, 0]);
    if call(arch::PRCTL, [PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0]) != 0 {
        return false;
    }
    // Refused by kernels without it, which then have none to clear.
    call(arch::PRCTL, [PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0]);
    let mut capability = 0;
    // The kernel answers EINVAL after the last one it knows; EPERM when the set is not ours to change: with no
    // capability and no new privileges nothing comes from it any more.
    while capability < 64 && call(arch::PRCTL, [PR_CAPBSET_DROP, capability, 0, 0, 0]) == 0 {
        capability += 1;
    }
    /// _LINUX_CAPABILITY_VERSION_3, ourselves.
    static HEADER: [u32; 2] = [0x2008_0522, 0];
    static NONE: [u32; 6] = [0; 6];
    call(arch::CAPSET, [HEADER.as_ptr() as usize, NONE.as_ptr() as usize, 0, 0, 0]) == 0
}

fn close_from_3() {
    if call(arch::CLOSE_RANGE, [3, u32::MAX as usize, 0, 0, 0]) == 0 {
        return;
    }
    // Before 5.9. Whoever started us left one descriptor of a low number.
    let mut fd = 3;
    while fd < 4096 {
        call(arch::CLOSE, [fd, 0, 0, 0, 0]);
        fd += 1;
    }
}

/// One instruction of classic BPF.
#[repr(C)]
struct Instruction {
    code: u16,
    if_true: u8,
    if_false: u8,
    value: u32,
}

#[repr(C)]
struct Program {
    length: u16,
    first: *const Instruction,
}

const LOAD: u16 = 0x20;
const IF_EQUAL: u16 = 0x15;
const RETURN: u16 = 0x06;
const KILL_PROCESS: u32 = 0x8000_0000;
const ALLOW: u32 = 0x7fff_0000;
/// Offsets in struct seccomp_data.
const NUMBER: u32 = 0;
const ARCH: u32 = 4;

/// Allows what `main` still needs after it, and nothing else. On x86_64 the numbers of the x32 calls have a bit set that
/// none of these has.
static FILTER: [Instruction; 10] = [
    op(LOAD, 0, 0, ARCH),
    op(IF_EQUAL, 0, 6, arch::AUDIT),
    op(LOAD, 0, 0, NUMBER),
    op(IF_EQUAL, 5, 0, arch::CLOSE_RANGE),
    op(IF_EQUAL, 4, 0, arch::CLOSE),
    op(IF_EQUAL, 3, 0, arch::RT_SIGTIMEDWAIT),
    op(IF_EQUAL, 2, 0, arch::WAIT4),
    op(IF_EQUAL, 1, 0, arch::EXIT_GROUP),
    op(RETURN, 0, 0, KILL_PROCESS),
    op(RETURN, 0, 0, ALLOW),
];

const fn op(code: u16, if_true: u8, if_false: u8, value: u32) -> Instruction {
    Instruction { code, if_true, if_false, value }
}

fn filter() -> bool {
    const SECCOMP_MODE_FILTER: usize = 2;
    let program = Program { length: FILTER.len() as u16, first: FILTER.as_ptr() };
    call(arch::PRCTL, [PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &raw const program as usize, 0, 0]) == 0
}

fn end(code: usize) -> ! {
    loop {
        call(arch::EXIT_GROUP, [code, 0, 0, 0, 0]);
    }
}

/// A system call. The answer is negative (an errno) when it did not work.
#[cfg(target_arch = "x86_64")]
fn call(number: u32, [a, b, c, d, e]: [usize; 5]) -> isize {
    let answer: isize;
    // SAFETY: every caller here passes integers, or addresses of live data of the size the call reads. The kernel
    // changes rcx and r11 only.
    unsafe {
        asm!("syscall", inlateout("rax") number as isize => answer, in("rdi") a, in("rsi") b, in("rdx") c, in("r10") d,
            in("r8") e, lateout("rcx") _, lateout("r11") _, options(nostack));
    }
    answer
}

/// A system call. The answer is negative (an errno) when it did not work.
#[cfg(target_arch = "aarch64")]
fn call(number: u32, [a, b, c, d, e]: [usize; 5]) -> isize {
    let answer: isize;
    // SAFETY: every caller here passes integers, or addresses of live data of the size the call reads.
    unsafe {
        asm!("svc #0", in("x8") number as usize, inlateout("x0") a as isize => answer, in("x1") b, in("x2") c,
            in("x3") d, in("x4") e, options(nostack));
    }
    answer
}

#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    end(PANIC)
}
