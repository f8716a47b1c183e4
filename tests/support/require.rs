//! What a test needs from the machine. A missing thing fails the test in CI (environment `CI`) and skips it, with a
//! printed reason, for a person: `if !require::root() { return; }`.

use super::peers::Peer;
use std::path::PathBuf;
use std::process::Command;

/// Namespaces, mounts and cgroups need root.
pub fn root() -> bool {
    nix::unistd::geteuid().is_root() || missing("root: run the tests with scripts/test as root")
}

/// A program found in `PATH` (or in the sbin directories).
pub fn tool(name: &str) -> bool {
    find(name).is_some() || missing(&format!("{name}: run scripts/setup"))
}

/// The reference CNI plugins.
pub fn cni_plugins() -> bool {
    super::cni::real_plugins().is_some() || missing("the reference CNI plugins: run scripts/setup")
}

/// A containerd by name: `containerd-2.1`, `containerd-1.7`, or `containerd-1.6` (the system's, if it is one).
pub fn peer(name: &str) -> Option<Peer> {
    let peer = Peer::find(name);
    if peer.is_none() {
        missing(&format!("{name}: run scripts/setup --peers"));
    }
    peer
}

/// The unpacked CNI plugins of this name (`cni-1.9`).
pub fn cni_peer(name: &str) -> Option<PathBuf> {
    let dir = super::peers::peers_dir().join(name).join("bin");
    let found = dir.join("bridge").is_file();
    (found || missing(&format!("{name}: run scripts/setup --peers"))).then_some(dir)
}

/// The unpacked Docker engine's directory of executables.
pub fn docker() -> Option<PathBuf> {
    let dir = super::peers::peers_dir().join("docker-28").join("bin");
    let found = dir.join("dockerd").is_file();
    (found || missing("docker-28: run scripts/setup --peers")).then_some(dir)
}

/// youki, which scripts/test --slow builds.
pub fn youki() -> Option<PathBuf> {
    let program = super::peers::peers_dir().join("youki/bin/youki");
    let found = program.is_file();
    (found || missing("youki: run scripts/setup --youki")).then_some(program)
}

/// An emulated machine: qemu and a kernel for it.
pub fn lab() -> bool {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/scripts/lab");
    let ready = Command::new(script).arg("--ready").output();
    ready.is_ok_and(|output| output.status.success())
        || missing("qemu and a kernel for it: run scripts/setup --lab")
}

/// What makes a policy of SELinux for the emulated machine.
pub fn checkpolicy() -> bool {
    find("checkpolicy").is_some() || missing("checkpolicy: run scripts/setup --lab")
}

/// Where a program is.
pub fn find(name: &str) -> Option<PathBuf> {
    let path = std::env::var("PATH").unwrap_or_default() + ":/usr/local/sbin:/usr/sbin:/sbin";
    path.split(':')
        .map(|dir| PathBuf::from(dir).join(name))
        .find(|file| file.is_file())
}

fn missing(what: &str) -> bool {
    assert!(
        std::env::var_os("CI").is_none(),
        "needed in CI and not here: {what}"
    );
    println!("skipped, not here: {what}");
    false
}
