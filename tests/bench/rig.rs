//! What the benchmarks share: the released executables in the places where the tests' kits look for ours, the floor
//! program, and times that no test's own bookkeeping is in.

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::support::bin::{self, PODVISOR, SHIM};
use crate::support::sh;

/// In this test's mount namespace alone.
pub fn use_released() {
    let Some(dir) = std::env::var_os("PODVISOR_BENCH_BIN") else {
        println!(
            "these are the executables of the tests, not released ones: `scripts/bench` runs those"
        );
        return;
    };
    for program in [PODVISOR, SHIM] {
        let released = Path::new(&dir).join(Path::new(program).file_name().unwrap());
        sh(&format!("mount --bind {} {program}", released.display()));
    }
}

/// How much of each; `scripts/bench` sets it.
pub fn rounds(usual: usize) -> usize {
    match std::env::var("PODVISOR_BENCH_ROUNDS").map(|n| n.parse()) {
        Ok(Ok(n)) => n,
        _ => usual,
    }
}

/// One-minute load average, and the number of processors.
pub fn load() -> String {
    let load = fs::read_to_string("/proc/loadavg").unwrap();
    let processors = std::thread::available_parallelism().unwrap();
    format!(
        "{} on {processors} processors",
        load.split(' ').next().unwrap()
    )
}

/// The floor program, static where this machine has what that needs; None without a C compiler.
pub fn floor() -> Option<PathBuf> {
    let program = bin::dir().join("bench-floor");
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/bench/floor.c");
    let built = [&["-O2", "-static"][..], &["-O2"]].iter().any(|flags| {
        let mut cc = Command::new("cc");
        cc.args(*flags).arg("-o").arg(&program).arg(source);
        cc.output().is_ok_and(|o| o.status.success())
    });
    built.then_some(program)
}

/// What it printed, and how long it took until it had ended and closed its output, as a daemon waits for it.
pub fn timed(command: &mut Command) -> (String, Duration) {
    let begun = Instant::now();
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::inherit())
        .spawn()
        .unwrap();
    let mut printed = String::new();
    child
        .stdout
        .take()
        .unwrap()
        .read_to_string(&mut printed)
        .unwrap();
    let status = child.wait().unwrap();
    let took = begun.elapsed();
    assert!(status.success(), "{command:?}: {status}");
    (printed, took)
}

/// Runs `body`; what it gave and how long it took.
pub fn clocked<T>(body: impl FnOnce() -> T) -> (T, Duration) {
    let begun = Instant::now();
    let made = body();
    (made, begun.elapsed())
}
