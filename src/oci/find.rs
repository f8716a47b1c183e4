//! Which OCI runtime a container gets, and where its executable is.
//!
//! Owns the rule of choice. Promises an absolute path to an executable file or an error that names, in quotes, what was
//! looked for. Must never run anything: the rule costs two file look-ups, so nothing is remembered.

use std::env;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use crate::error::{Error, Kind, Result};

/// What a daemon's users get when they name none.
const RUNC: &str = "runc";
/// What the command prefers: it starts a container in a fraction of the time and memory.
const CRUN: &str = "crun";

/// Families of runtimes that differ in something we use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flavour {
    /// opencontainers/runc.
    Runc,
    /// containers/crun.
    Crun,
    /// youki-dev/youki.
    Youki,
    /// Anything else with runc's command line: a wrapper, a sandboxing runtime.
    Other,
}

impl Flavour {
    /// By the file's own name; a wrapper called something else is [`Flavour::Other`].
    pub fn of(binary: &Path) -> Self {
        match binary.file_name().and_then(|n| n.to_str()) {
            Some(RUNC) => Self::Runc,
            Some(CRUN) => Self::Crun,
            Some("youki") => Self::Youki,
            _ => Self::Other,
        }
    }

    /// Its `kill` is nothing but kill(2) on the pid of init, so that we may do it ourselves, at once and without a fork.
    pub fn kills_by_pid(self) -> bool {
        !matches!(self, Self::Other)
    }
}

/// The runtime of a container: the one named by the caller (`BinaryName`), else runc; where the command asks
/// (`prefer_crun`), the configured one, else crun unless the cgroup layout is hybrid, which crun refuses, else runc.
///
/// # Errors
/// When none is installed.
pub fn choose(named: &str, prefer_crun: bool, configured: &str, hybrid: bool) -> Result<PathBuf> {
    match (named, prefer_crun, configured) {
        ("", false, _) => find(RUNC),
        ("", true, "") if hybrid => find(RUNC),
        ("", true, "") => find(CRUN).or_else(|_| find(RUNC)),
        ("", true, name) | (name, ..) => find(name),
    }
}

/// The executable called `name`: an absolute path, or a name found in PATH.
///
/// # Errors
/// Other (never NotFound: that would read as "no such container") with the name in quotes.
pub fn find(name: &str) -> Result<PathBuf> {
    let path = Path::new(name);
    if path.is_absolute() {
        return if executable(path) {
            Ok(path.into())
        } else {
            Err(missing(name, "no executable file there"))
        };
    }
    if name.is_empty() || name.contains('/') {
        return Err(missing(name, "give a plain name or an absolute path"));
    }
    env::split_paths(&super::search_path())
        .filter(|dir| dir.is_absolute())
        .map(|dir| dir.join(name))
        .find(|candidate| executable(candidate))
        .ok_or_else(|| {
            missing(
                name,
                "executable file not found in $PATH; install it or name another one",
            )
        })
}

fn executable(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|m| m.is_file() && m.permissions().mode() & 0o111 != 0)
}

fn missing(name: &str, why: &str) -> Error {
    Error::new(Kind::Other, format!("find OCI runtime {name:?}: {why}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_runtime_is_named_in_quotes() {
        let error = find("no-runc").map_err(|e| (e.kind(), e.to_string()));
        assert!(matches!(error, Err((Kind::Other, text)) if text.contains("\"no-runc\"")));
        for name in ["", "./runc", "bin/runc", "/nowhere/runc"] {
            assert!(find(name).is_err(), "{name:?}");
        }
    }

    #[test]
    fn the_caller_wins_over_every_preference() {
        for prefer in [false, true] {
            assert_eq!(
                choose("/bin/sh", prefer, "/bin/true", false).ok(),
                Some("/bin/sh".into())
            );
        }
        assert_eq!(
            choose("", true, "/bin/true", true).ok(),
            Some("/bin/true".into())
        );
    }

    #[test]
    fn crun_is_no_choice_under_a_hybrid_mount_nor_for_a_daemon() {
        assert_eq!(choose("", true, "", true).ok(), find(RUNC).ok());
        assert_eq!(choose("", false, "/bin/true", false).ok(), find(RUNC).ok());
        assert_eq!(
            choose("", true, "", false).ok(),
            find(CRUN).or_else(|_| find(RUNC)).ok()
        );
    }

    #[test]
    fn flavours_are_told_by_the_exact_name() {
        assert_eq!(Flavour::of(Path::new("/usr/sbin/runc")), Flavour::Runc);
        assert_eq!(Flavour::of(Path::new("/usr/bin/crun")), Flavour::Crun);
        assert_eq!(Flavour::of(Path::new("/usr/bin/runc-fp")), Flavour::Other);
        assert!(!Flavour::Other.kills_by_pid());
    }
}
