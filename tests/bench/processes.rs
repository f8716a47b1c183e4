//! What processes of a pod cost, as the kernel tells it.

use std::collections::BTreeMap;
use std::fs;

/// Of one process or the sum of several, in kB.
#[derive(Clone, Copy, Debug, Default)]
pub struct Memory {
    pub pss: f64,
    pub anonymous: f64,
}

/// Pids of all processes and their command lines.
pub fn all() -> BTreeMap<i32, String> {
    let pids = fs::read_dir("/proc").unwrap().flatten();
    let pids = pids.filter_map(|e| e.file_name().to_str()?.parse().ok());
    pids.filter_map(|pid: i32| {
        let line = fs::read(format!("/proc/{pid}/cmdline")).ok()?;
        let line = String::from_utf8_lossy(&line).replace('\0', " ");
        (!line.is_empty()).then(|| (pid, line.trim().to_owned()))
    })
    .collect()
}

/// Whether this is a command line of a shim, whoever's.
pub fn is_shim(line: &str) -> bool {
    let program = line.split(' ').next().unwrap_or_default();
    program
        .rsplit('/')
        .next()
        .unwrap_or_default()
        .starts_with("containerd-shim-")
}

/// Living shims.
pub fn shims() -> Vec<i32> {
    all()
        .into_iter()
        .filter(|(_, line)| is_shim(line))
        .map(|(pid, _)| pid)
        .collect()
}

/// From smaps_rollup.
pub fn memory(pid: i32) -> Memory {
    let text = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap_or_default();
    let of = |name: &str| number(&text, name);
    Memory {
        pss: of("Pss:"),
        anonymous: of("Pss_Anon:"),
    }
}

/// Threads, descriptors, and how often it was switched to so far.
pub fn threads_descriptors_switches(pid: i32) -> [f64; 3] {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let fds = fs::read_dir(format!("/proc/{pid}/fd")).map_or(0, Iterator::count);
    let mut switches = 0.0;
    for task in fs::read_dir(format!("/proc/{pid}/task"))
        .into_iter()
        .flatten()
        .flatten()
    {
        let status = fs::read_to_string(task.path().join("status")).unwrap_or_default();
        switches += number(&status, "voluntary_ctxt_switches:");
    }
    [number(&status, "Threads:"), fds as f64, switches]
}

/// MemAvailable in kB.
pub fn available() -> f64 {
    number(
        &fs::read_to_string("/proc/meminfo").unwrap(),
        "MemAvailable:",
    )
}

fn number(text: &str, name: &str) -> f64 {
    let line = text.lines().find_map(|l| l.strip_prefix(name));
    let word = line.and_then(|l| l.split_ascii_whitespace().next());
    word.and_then(|w| w.parse().ok()).unwrap_or(0.0)
}
