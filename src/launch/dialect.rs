//! Which answer the caller of `start` understands.
//!
//! | caller | sign | answer |
//! |---|---|---|
//! | containerd 2.3 and newer | parameters on standard input | protobuf |
//! | no containerd | no `-address` | plain address |
//! | containerd 1.6 | no `MAX_SHIM_VERSION` | plain address |
//! | containerd 1.7, 2.0 to 2.2 | `MAX_SHIM_VERSION`, 2 in all of them | JSON, version 2 for 1.7 and 3 for 2.x |
//!
//! The last two differ only by `<publish-binary> --version`, which takes 20 to 90 ms: the answer is remembered by the
//! file's device, inode, size and times, so that a machine pays it once per installed daemon.

use std::ffi::OsStr;
use std::fs;
use std::io::Write;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::launch::probe;

/// File name of the memory, in the runtime root.
const MEMORY: &str = ".daemon-versions";

/// Entries kept; one is needed per daemon executable on the machine.
const MEMORY_MAX: usize = 16;

/// How long a daemon may take to say its version.
const VERSION_LIMIT: Duration = Duration::from_secs(5);

/// How to answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dialect {
    /// The address and nothing else.
    Plain,
    /// One JSON object with this version.
    Json(u32),
    /// A `BootstrapResult`.
    Protobuf,
}

/// Signs of the caller.
#[derive(Clone, Copy, Debug, Default)]
pub struct Signs<'a> {
    /// Standard input held bootstrap parameters.
    pub params: bool,
    /// `-address` was given.
    pub address: bool,
    /// `$MAX_SHIM_VERSION`.
    pub max_shim_version: Option<&'a str>,
}

/// Chooses; `daemon_major` is asked only when the signs leave it open, and gives `None` when it cannot be known.
pub fn choose(signs: Signs<'_>, daemon_major: impl FnOnce() -> Option<u32>) -> Dialect {
    if signs.params {
        return Dialect::Protobuf;
    }
    let Some(max) = signs.max_shim_version.filter(|_| signs.address) else {
        return Dialect::Plain;
    };
    if max.trim().parse().is_ok_and(|max: u32| max >= 3) {
        return Dialect::Json(3);
    }
    // Version 2 is understood by all of them; 3 is refused by 1.7.
    match daemon_major() {
        Some(major) if major >= 2 => Dialect::Json(3),
        _ => Dialect::Json(2),
    }
}

/// The major version of the daemon executable, from memory in `runtime_root` or by asking it.
pub fn daemon_major(runtime_root: &Path, executable: &Path) -> Option<u32> {
    if !executable.is_absolute() {
        return None;
    }
    let file = fs::metadata(executable).ok()?;
    let key = format!(
        "{}:{}:{}:{}.{}:{}",
        file.dev(),
        file.ino(),
        file.size(),
        file.mtime(),
        file.mtime_nsec(),
        file.ctime()
    );
    let memory = runtime_root.join(MEMORY);
    let text = fs::read_to_string(&memory).unwrap_or_default();
    if let Some(known) = recall(&text, &key) {
        return Some(known);
    }
    let answer = probe::ask(executable.as_os_str(), &["--version"], VERSION_LIMIT).ok()?;
    let major = parse_major(&String::from_utf8_lossy(&answer))?;
    // Forgetting costs time, not truth: nothing is lost when this cannot be written.
    let _ = remember(&memory, &text, &key, major);
    Some(major)
}

/// `containerd github.com/containerd/containerd v2.1.9 <revision>` and `… 1.6.20~ds1 …`.
fn parse_major(text: &str) -> Option<u32> {
    let mut words = text.split_whitespace();
    if words.next() != Some("containerd") {
        return None;
    }
    let version = words.nth(1)?;
    let (major, _) = version
        .strip_prefix('v')
        .unwrap_or(version)
        .split_once('.')?;
    major.parse().ok()
}

fn recall(text: &str, key: &str) -> Option<u32> {
    text.lines()
        .find_map(|line| line.strip_prefix(key)?.strip_prefix(' ')?.parse().ok())
}

fn remember(memory: &Path, old: &str, key: &str, major: u32) -> std::io::Result<()> {
    let mut lines = vec![format!("{key} {major}")];
    lines.extend(old.lines().take(MEMORY_MAX - 1).map(str::to_owned));
    let mut temp = memory.as_os_str().to_owned();
    temp.push(OsStr::new(&format!(".{}", std::process::id())));
    let temp = PathBuf::from(temp);
    let mut file = fs::OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&temp)?;
    let written = file
        .write_all(format!("{}\n", lines.join("\n")).as_bytes())
        .and_then(|()| fs::rename(&temp, memory));
    if written.is_err() {
        let _ = fs::remove_file(&temp);
    }
    written
}

#[cfg(test)]
mod tests {
    use super::*;

    fn never() -> Option<u32> {
        panic!("asked without need")
    }

    #[test]
    fn each_caller_gets_its_dialect() {
        let legacy = Signs {
            params: false,
            address: true,
            max_shim_version: Some("2"),
        };
        assert_eq!(
            choose(
                Signs {
                    params: true,
                    ..legacy
                },
                never
            ),
            Dialect::Protobuf
        );
        assert_eq!(
            choose(
                Signs {
                    address: false,
                    ..legacy
                },
                never
            ),
            Dialect::Plain
        );
        assert_eq!(
            choose(
                Signs {
                    max_shim_version: None,
                    ..legacy
                },
                never
            ),
            Dialect::Plain
        );
        assert_eq!(
            choose(
                Signs {
                    max_shim_version: Some("3"),
                    ..legacy
                },
                never
            ),
            Dialect::Json(3)
        );
        for (major, version) in [(Some(1), 2), (Some(2), 3), (Some(3), 3), (None, 2)] {
            assert_eq!(
                choose(legacy, || major),
                Dialect::Json(version),
                "{major:?}"
            );
        }
    }

    #[test]
    fn versions_of_real_daemons_are_read() {
        for (text, major) in [
            (
                "containerd github.com/containerd/containerd 1.6.20~ds1 1.6.20~ds1-1+deb12u1\n",
                Some(1),
            ),
            (
                "containerd github.com/containerd/containerd 1.7.24~ds1 1.7.24~ds1-6\n",
                Some(1),
            ),
            (
                "containerd github.com/containerd/containerd/v2 v2.1.9 abcdef\n",
                Some(2),
            ),
            (
                "containerd github.com/k3s-io/containerd v2.0.4-k3s2 \n",
                Some(2),
            ),
            ("Docker version 28.5\n", None),
            ("containerd", None),
            ("", None),
        ] {
            assert_eq!(parse_major(text), major, "{text}");
        }
    }

    #[test]
    fn a_daemon_is_asked_once() {
        let dir = tempfile::tempdir().unwrap();
        let daemon = dir.path().join("containerd");
        let log = dir.path().join("asked");
        let script = format!(
            "#!/bin/sh\necho x >> {}\necho containerd github.com/x/x v2.1.9 r\n",
            log.display()
        );
        fs::write(&daemon, script).unwrap();
        fs::set_permissions(&daemon, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
        for _ in 0..3 {
            assert_eq!(daemon_major(dir.path(), &daemon), Some(2));
        }
        assert_eq!(fs::read_to_string(&log).unwrap(), "x\n");
        assert_eq!(daemon_major(dir.path(), Path::new("containerd")), None);
    }
}
