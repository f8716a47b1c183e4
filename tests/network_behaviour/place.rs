//! Networks of fakes, and what is on record of them.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::json;

use crate::support::cni;
use crate::support::fake::{self, Fake};

/// A network `pods` of these fakes, in this order.
pub fn fakes<const N: usize>(names: [&str; N]) -> [Fake; N] {
    let made = names.map(|name| fake::plugin(Path::new(cni::PLUGINS), name));
    cni::network(
        "pods",
        names.iter().map(|name| json!({ "type": name })).collect(),
    )
    .write();
    made
}

/// Records of networks.
pub fn records() -> Vec<PathBuf> {
    let entries = fs::read_dir("/var/lib/podvisor/networks");
    entries
        .into_iter()
        .flatten()
        .flatten()
        .map(|e| e.path())
        .filter(|path| path.is_dir())
        .collect()
}

/// The DEL of the only record is owed, or not.
pub fn owed() -> bool {
    let records = records();
    assert_eq!(records.len(), 1, "{records:?}");
    records[0].join("add-started.json").exists() && !records[0].join("network-stopped").exists()
}

/// Processes whose command line is this, without its own.
pub fn processes(line: &str) -> Vec<i32> {
    let entries = fs::read_dir("/proc").unwrap().flatten();
    let pids = entries.filter_map(|e| e.file_name().to_str()?.parse::<i32>().ok());
    pids.filter(|pid| {
        let text = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        String::from_utf8_lossy(&text).replace('\0', " ").trim_end() == line
    })
    .collect()
}

/// Kills them.
pub fn kill_all(line: &str) {
    for pid in processes(line) {
        let pid = nix::unistd::Pid::from_raw(pid);
        nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL).unwrap();
    }
}
