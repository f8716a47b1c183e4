//! Plugins as scripts, and the command with a pod that sleeps.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use serde_json::json;

use crate::support::rootfs::Rootfs;
use crate::support::{Output, cni, podvisor};

/// Installs a plugin `name` that is this bash script, and a network of the same name.
pub fn script(name: &str, text: &str) {
    let path = Path::new(cni::PLUGINS).join(name);
    fs::create_dir_all(cni::PLUGINS).unwrap();
    // Asked once for its versions, and what is said then is remembered by the file's inode and time.
    let version = r#"[ "$CNI_COMMAND" != VERSION ] || { echo '{"cniVersion":"1.0.0","supportedVersions":["0.4.0","1.0.0"]}'; exit 0; }"#;
    fs::write(&path, format!("#!/bin/bash\n{version}\n{text}\n")).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    cni::network(name, vec![json!({"type": name})]).write();
}

/// What a plugin prints after a good ADD.
pub const GOOD: &str = r#"echo '{"cniVersion":"1.0.0","ips":[{"address":"10.98.0.2/24"}]}'"#;

/// `podvisor run -d` of a pod that sleeps, with more arguments before the command.
pub fn run(name: &str, rootfs: &Rootfs, more: &[&str]) -> Output {
    let fixed = ["run", "-d", "--rootfs", rootfs.str(), "--name", name];
    podvisor(&[&fixed, more, &["--", "/bin/sleep", "600"]].concat())
}

/// Stops and removes it; both have to work.
pub fn gone(name: &str) {
    podvisor(&["stop", "-t", "1", name]).ok();
    podvisor(&["rm", name]).ok();
}

/// What a program prints; it has to succeed.
pub fn tool(program: &str, args: &[&str]) -> String {
    let output = Command::new(program).args(args).output().unwrap();
    assert!(output.status.success(), "{program} {args:?}: {output:?}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// The one pinned netns there is.
pub fn pin() -> std::path::PathBuf {
    let pins: Vec<_> = fs::read_dir("/run/podvisor/netns")
        .unwrap()
        .map(|e| e.unwrap().path())
        .filter(|path| path.extension().is_none())
        .collect();
    assert_eq!(pins.len(), 1, "{pins:?}");
    pins[0].clone()
}
