//! Mounts made and changed by system calls: a process that reaps its own children must not run `mount`.

use std::path::Path;

use nix::mount::{MntFlags, MsFlags, mount, umount2};

const NONE: Option<&str> = None;

/// What is mounted at `dir` can be written to, or not.
pub fn writable(dir: &Path, yes: bool) {
    let mut flags = MsFlags::MS_REMOUNT | MsFlags::MS_BIND;
    flags.set(MsFlags::MS_RDONLY, !yes);
    mount(NONE, dir, NONE, flags, NONE).unwrap_or_else(|e| panic!("{}: {e}", dir.display()));
}

/// A file system over `dir`.
pub fn tmpfs(dir: &Path, options: &str) {
    std::fs::create_dir_all(dir).unwrap();
    let options = format!("mode=0700,{options}");
    mount(
        Some("small"),
        dir,
        Some("tmpfs"),
        MsFlags::empty(),
        Some(options.as_str()),
    )
    .unwrap_or_else(|e| panic!("{} {options}: {e}", dir.display()));
}

pub fn uncover(path: &Path) {
    umount2(path, MntFlags::empty()).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
}
