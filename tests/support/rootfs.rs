//! A root file system made of the static busybox.

use super::require;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;

/// A directory with a root file system; removed with this value.
#[derive(Debug)]
pub struct Rootfs(tempfile::TempDir);

impl Rootfs {
    /// Where it is.
    pub fn path(&self) -> &Path {
        self.0.path()
    }

    /// Where it is, for argument lists.
    pub fn str(&self) -> &str {
        self.path().to_str().unwrap()
    }
}

/// A new root file system: busybox with all its applets, the usual directories, users root and nobody.
pub fn make() -> Rootfs {
    let root = tempfile::Builder::new()
        .prefix("pvtest-rootfs-")
        .tempdir()
        .unwrap();
    let busybox = require::find("busybox").expect("busybox-static: run scripts/setup");
    for dir in [
        "bin", "sbin", "dev", "etc", "proc", "root", "run", "sys", "tmp", "var", "www", "usr/bin",
    ] {
        fs::create_dir_all(root.path().join(dir)).unwrap();
    }
    fs::copy(&busybox, root.path().join("bin/busybox")).unwrap();
    let list = Command::new(&busybox).arg("--list").output().unwrap();
    for applet in String::from_utf8(list.stdout)
        .unwrap()
        .lines()
        .filter(|name| *name != "busybox")
    {
        symlink("busybox", root.path().join("bin").join(applet)).unwrap();
    }
    fs::write(
        root.path().join("etc/passwd"),
        "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n",
    )
    .unwrap();
    fs::write(
        root.path().join("etc/group"),
        "root:x:0:\nnogroup:x:65534:\n",
    )
    .unwrap();
    set_mode(root.path(), 0o755);
    set_mode(&root.path().join("tmp"), 0o1777);
    Rootfs(root)
}

fn set_mode(path: &Path, mode: u32) {
    fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(mode)).unwrap();
}
