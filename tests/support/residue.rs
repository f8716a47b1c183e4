//! The check after every test: what a pod can leave on a machine, listed before and after and compared.
//!
//! Not residue, because the parts that make it keep it by design: bridges' and `portmap`'s fixed chains, host-local's
//! `last_reserved_ip*` and `lock`, the parent cgroup a daemon names (`/default`), our own empty top directories.
//! Never changes anything itself.

use super::sandbox;
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

/// What to look at, and for how long a difference may still go away.
#[derive(Debug, Clone)]
pub struct Scope {
    cgroup_prefixes: Vec<String>,
    allowed: Vec<String>,
    fds_of: Vec<i32>,
    within: Duration,
}

impl Default for Scope {
    fn default() -> Self {
        let prefixes = ["podvisor", "default", "k8s.io", "moby", "kubepods"];
        Self {
            cgroup_prefixes: prefixes.map(String::from).to_vec(),
            allowed: Vec::new(),
            fds_of: Vec::new(),
            within: Duration::from_secs(8),
        }
    }
}

impl Scope {
    /// Entries that begin with this text are no residue; the text is what a failure prints (`link cni0`).
    pub fn allow(mut self, entry: &str) -> Self {
        self.allowed.push(entry.to_owned());
        self
    }

    /// Also counts the open descriptors of a process, by kind.
    pub fn fds_of(mut self, pid: i32) -> Self {
        self.fds_of.push(pid);
        self
    }

    /// Cgroups below first-level groups that begin with this text count, on a machine that is not the test's own.
    pub fn cgroups_below(mut self, prefix: &str) -> Self {
        self.cgroup_prefixes.push(prefix.to_owned());
        self
    }

    /// How long to wait for what ends by itself.
    pub fn within(mut self, bound: Duration) -> Self {
        self.within = bound;
        self
    }

    /// Takes the listing that later ones are compared with.
    pub fn take(self) -> Snapshot {
        Snapshot {
            entries: self.list(),
            scope: self,
        }
    }

    fn list(&self) -> BTreeMap<String, usize> {
        let mut all = Vec::new();
        // Outside a sandbox other people's processes come and go.
        if sandbox::inside() {
            processes(&mut all);
        }
        mounts(&mut all);
        links(&mut all);
        rules(&mut all);
        files(&mut all);
        self.cgroups(&mut all);
        for pid in &self.fds_of {
            descriptors(*pid, &mut all);
        }
        let mut entries = BTreeMap::new();
        for entry in all {
            if !self.allowed.iter().any(|text| entry.starts_with(text)) {
                *entries.entry(entry).or_insert(0) += 1;
            }
        }
        entries
    }

    fn cgroups(&self, all: &mut Vec<String>) {
        let own = std::env::var("SANDBOX_CGROUPS").is_ok_and(|kind| kind == "private");
        for root in sandbox::cgroup_roots() {
            for top in directories(&root) {
                let name = file_name(&top);
                let named = self
                    .cgroup_prefixes
                    .iter()
                    .any(|prefix| name.starts_with(prefix.as_str()));
                if own && !named && name != "init" {
                    all.push(format!("cgroup {}", top.display()));
                }
                if own || named {
                    walk(&top, &mut |path, kind| {
                        if kind.is_dir() {
                            all.push(format!("cgroup {}", path.display()));
                        }
                    });
                }
            }
        }
    }
}

/// One listing, one line per thing.
#[derive(Debug)]
pub struct Snapshot {
    scope: Scope,
    entries: BTreeMap<String, usize>,
}

impl Snapshot {
    /// A listing with the usual scope.
    pub fn take() -> Self {
        Scope::default().take()
    }

    /// What differs now: `+` is here and was not, `-` was here and is not.
    pub fn changes(&self) -> Vec<String> {
        let now = self.scope.list();
        let mut changes = Vec::new();
        for (sign, one, other) in [('+', &now, &self.entries), ('-', &self.entries, &now)] {
            for (entry, count) in one {
                let more = count.saturating_sub(other.get(entry).copied().unwrap_or(0));
                if more > 0 {
                    changes.push(format!(
                        "{sign} {entry}{}",
                        if more > 1 {
                            format!(" ({more} times)")
                        } else {
                            String::new()
                        }
                    ));
                }
            }
        }
        changes
    }

    /// Panics with the exact differences if there still are some after the scope's bound.
    pub fn assert_unchanged(&self) {
        let end = Instant::now() + self.scope.within;
        loop {
            let changes = self.changes();
            if changes.is_empty() {
                return;
            }
            if Instant::now() >= end {
                panic!(
                    "left behind after {:?}:\n  {}",
                    self.scope.within,
                    changes.join("\n  ")
                );
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }
}

/// Every process of the pid namespace but the test itself, kernel threads and zombies that pid 1 is about to reap.
fn processes(all: &mut Vec<String>) {
    const KERNEL_THREAD: u64 = 0x0020_0000;
    let own = std::process::id().to_string();
    for dir in directories(Path::new("/proc")) {
        let pid = file_name(&dir);
        if pid == own || !pid.bytes().all(|b| b.is_ascii_digit()) {
            continue;
        }
        let Ok(stat) = fs::read_to_string(dir.join("stat")) else {
            continue;
        };
        let Some((name, rest)) = stat.rsplit_once(')') else {
            continue;
        };
        // After the name: state, ppid, pgrp, session, tty, tpgid, flags, ..., start time as the 20th.
        let fields: Vec<&str> = rest.split_ascii_whitespace().collect();
        let flags = fields
            .get(6)
            .and_then(|text| text.parse::<u64>().ok())
            .unwrap_or(0);
        let zombie = fields.first() == Some(&"Z");
        if flags & KERNEL_THREAD != 0 || (zombie && fields.get(1) == Some(&"1")) {
            continue;
        }
        let line = fs::read(dir.join("cmdline")).unwrap_or_default();
        let mut line = String::from_utf8_lossy(&line).replace(['\0', '\n'], " ");
        line.truncate(
            line.char_indices()
                .nth(160)
                .map_or(line.len(), |(at, _)| at),
        );
        let name = name.split_once('(').map_or("", |(_, name)| name);
        let state = if zombie { " (zombie)" } else { "" };
        all.push(format!(
            "process {pid} ({name}){state} started {} {line}",
            fields.get(19).unwrap_or(&"?")
        ));
    }
}

/// Every mount of the mount namespace, nsfs among them.
fn mounts(all: &mut Vec<String>) {
    for line in fs::read_to_string("/proc/self/mountinfo").unwrap().lines() {
        let Some((left, right)) = line.split_once(" - ") else {
            continue;
        };
        let point = left.split(' ').nth(4).unwrap_or_default();
        let kind: Vec<&str> = right.split(' ').take(2).collect();
        all.push(format!("mount {point} {}", kind.join(" ")));
    }
}

fn links(all: &mut Vec<String>) {
    for line in output("ip", &["-o", "link"]).lines() {
        let name = line.split(": ").nth(1).unwrap_or_default();
        all.push(format!(
            "link {}",
            name.split('@').next().unwrap_or_default()
        ));
    }
}

/// Firewall rules, chains and native nft tables.
fn rules(all: &mut Vec<String>) {
    for tool in ["iptables-save", "ip6tables-save"] {
        let mut table = String::new();
        for line in output(tool, &[]).lines() {
            if let Some(name) = line.strip_prefix('*') {
                table = name.to_owned();
            } else if (line.starts_with("-A") || line.starts_with(':')) && !kept_by_design(line) {
                all.push(format!(
                    "{tool} {table} {}",
                    line.split(" [").next().unwrap_or_default()
                ));
            }
        }
    }
    // Tables that iptables-nft made were listed above.
    let mut table = String::new();
    for line in output("nft", &["-s", "list", "ruleset"])
        .lines()
        .filter(|line| !line.is_empty())
    {
        if let Some(name) = line.strip_prefix("table ") {
            table = name.trim_end_matches(" {").to_owned();
        }
        let (family, name) = table.split_once(' ').unwrap_or_default();
        let compat = ["filter", "nat", "mangle", "raw", "security"].contains(&name)
            && ["ip", "ip6"].contains(&family);
        if !compat && !line.starts_with('#') {
            all.push(format!("nft {table}: {}", line.trim()));
        }
    }
}

/// A built-in chain, or a chain, jump or mark that the reference plugins make once and keep.
fn kept_by_design(line: &str) -> bool {
    const KEPT: [&str; 5] = [
        "CNI-HOSTPORT-DNAT",
        "CNI-HOSTPORT-SETMARK",
        "CNI-HOSTPORT-MASQ",
        "CNI-ADMIN",
        "CNI-FORWARD",
    ];
    let words: Vec<&str> = line.split(' ').collect();
    if let Some(chain) = words[0].strip_prefix(':') {
        return words.get(1).is_some_and(|policy| *policy != "-") || KEPT.contains(&chain);
    }
    let chain = words.get(1).copied().unwrap_or_default();
    let jump = words
        .iter()
        .position(|word| *word == "-j")
        .and_then(|at| words.get(at + 1))
        .copied()
        .unwrap_or_default();
    let built_in = !chain.starts_with("CNI-");
    (built_in && KEPT.contains(&jump))
        || ["CNI-HOSTPORT-SETMARK", "CNI-HOSTPORT-MASQ"].contains(&chain)
        || (chain == "CNI-FORWARD" && jump == "CNI-ADMIN")
}

/// Files: pinned netns, address leases and cached results, sockets, our state, the bundles of daemons and runtimes.
fn files(all: &mut Vec<String>) {
    walk(Path::new("/run/netns"), &mut |path, _| {
        all.push(format!("netns {}", path.display()))
    });
    walk(Path::new("/var/lib/cni"), &mut |path, kind| {
        let name = file_name(path);
        if !kind.is_dir() && !name.starts_with("last_reserved_ip") && name != "lock" {
            all.push(format!("lease {}", path.display()));
        }
    });
    for root in ["/run/podvisor", "/var/lib/podvisor"] {
        walk(Path::new(root), &mut |path, kind| {
            let top = path.parent() == Some(Path::new(root));
            // Kept for the boot on purpose: counters, what was learnt of the daemon's and the plugins' versions, the networks;
            // the file that turns on a network are counted with.
            let kept = [
                ".cni-latency",
                ".cni-log",
                ".counters",
                ".daemon-versions",
                ".plugin-versions",
                ".network-configs",
                ".turns",
            ];
            let ours = top && (kind.is_dir() || kept.contains(&file_name(path).as_str()))
                || (kind.is_dir() && is_frame(path.strip_prefix(root).unwrap_or(path)));
            // Attempts of the last hour: daemons send the same DEL again.
            let attempts = path.starts_with("/run/podvisor/cni/ids") || path.ends_with("cni/swept");
            if !ours && !attempts && !kind.is_socket() {
                all.push(format!("state {}", path.display()));
            }
        });
    }
    walk(Path::new("/run"), &mut |path, kind| {
        if kind.is_socket() {
            all.push(format!("socket {}", path.display()));
        }
        // A daemon's state: <kind>/<namespace>/<id>; a runtime's: <runtime>/<id>.
        let names: Vec<String> = path
            .iter()
            .rev()
            .take(3)
            .map(|name| name.to_string_lossy().into_owned())
            .collect();
        if kind.is_dir() && names.len() == 3 {
            let bundle = names[2].starts_with("io.containerd.runtime.v2")
                || names[2].starts_with("io.containerd.sandbox");
            let runtime = path
                .parent()
                .is_some_and(|dir| dir == Path::new("/run/runc") || dir == Path::new("/run/crun"));
            if bundle || runtime || names[2] == "runc" {
                all.push(format!("bundle {}", path.display()));
            }
        }
    });
}

/// A directory that stands as long as its namespace's, empty or not: where the names are, and the OCI runtimes' root.
fn is_frame(below: &Path) -> bool {
    let parts: Vec<_> = below.iter().map(|part| part.to_string_lossy()).collect();
    parts.len() == 2 && (parts[1] == ".names" || parts[0] == "oci")
}

/// The descriptors of a process by kind, without the numbers that differ each time.
fn descriptors(pid: i32, all: &mut Vec<String>) {
    for entry in fs::read_dir(format!("/proc/{pid}/fd"))
        .into_iter()
        .flatten()
        .flatten()
    {
        let Ok(link) = fs::read_link(entry.path()) else {
            continue;
        };
        let link = link.to_string_lossy().into_owned();
        let kind = if link.starts_with('/') {
            link.as_str()
        } else {
            link.split(":[").next().unwrap_or_default()
        };
        all.push(format!("descriptor of {pid}: {kind}"));
    }
}

/// Everything below a directory, not following links; what vanishes meanwhile is skipped.
fn walk(dir: &Path, visit: &mut impl FnMut(&Path, fs::FileType)) {
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        let (path, Ok(kind)) = (entry.path(), entry.file_type()) else {
            continue;
        };
        // A mounted root file system below a bundle is the mount's business, and may be large.
        if kind.is_dir() && path.file_name().is_some_and(|name| name != "rootfs") {
            walk(&path, visit);
        }
        visit(&path, kind);
    }
}

fn directories(dir: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    entries
        .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
        .map(|entry| entry.path())
        .collect()
}

fn file_name(path: &Path) -> String {
    path.file_name()
        .map(|name| name.to_string_lossy().into_owned())
        .unwrap_or_default()
}

fn output(program: &str, args: &[&str]) -> String {
    let found = Command::new(program).args(args).output();
    found
        .map(|out| String::from_utf8_lossy(&out.stdout).into_owned())
        .unwrap_or_default()
}
