//! Bad input gets a clear error, and nothing is left.
#![allow(clippy::unwrap_used, clippy::expect_used)]

#[path = "bad_input/command_line.rs"]
mod command_line;
#[path = "bad_input/configuration.rs"]
mod configuration;
#[path = "bad_input/directories.rs"]
mod directories;
#[path = "bad_input/launch.rs"]
mod launch;
mod support;
#[path = "bad_input/wire.rs"]
mod wire;

use support::rootfs::{self, Rootfs};
use support::{Output, Snapshot, cni, podvisor, sandboxed};

/// Ids and names that are none.
pub fn hostile() -> Vec<String> {
    let fixed = [
        ".",
        "..",
        "a/b",
        "/etc",
        "-rf",
        "a\nb",
        "a b",
        "a..b",
        "é",
        "a\u{1b}[2J",
    ];
    let mut all: Vec<String> = fixed.map(String::from).to_vec();
    all.push("a".repeat(300));
    all.push(String::new());
    all
}

/// Runs `body` on a machine with a root file system and a network, and checks that nothing is left.
pub fn nothing_left(name: &str, body: impl FnOnce(&Rootfs)) {
    sandboxed(name, || {
        let rootfs = rootfs::make();
        cni::bridge("testnet", "pvt0", "10.87.1.0/24").write();
        let before = Snapshot::take();
        body(&rootfs);
        before.assert_unchanged();
    });
}

/// `podvisor run --rm FLAGS -- true`.
pub fn run(flags: &[&str]) -> Output {
    let mut line = vec!["run", "--rm"];
    line.extend(flags);
    line.extend(["--", "true"]);
    podvisor(&line)
}

/// Exit code 125, nothing on stdout, no control characters, and every one of these words on stderr.
#[track_caller]
pub fn refused(output: &Output, parts: &[&str]) {
    assert_eq!(
        (output.code, output.stdout.as_str()),
        (Some(125), ""),
        "{output:#?}"
    );
    for part in parts {
        assert!(
            output.stderr.contains(part),
            "wanted {part:?} in {output:#?}"
        );
    }
    let plain = output.stderr.chars().all(|c| c == '\n' || !c.is_control());
    assert!(plain, "{output:#?}");
}
