//! The pod's new namespaces by path: `<files>/ns/<kind>`, kinds as in `/proc/<pid>/ns`.
//!
//! A path below `/proc/<pid>` is another process's namespace once the pid has come round; a pin is the pod's as long as it
//! is there, also when the infra process has ended. (In a pid namespace whose init is dead no process can be made, pinned
//! or not.) The pins are below the mount of the pod's files and need no unmount of their own with them.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::{InfraSpec, Namespace};
use crate::error::{Error, Result};
use crate::failpoint;
use crate::sys::dir::make_private;
use crate::sys::pin;

/// Every kind that a pod can have a pin of.
const KINDS: [&str; 5] = ["net", "ipc", "uts", "pid", "user"];

/// Kinds of the namespaces that are made with the infra process, which nothing else holds.
pub fn to_pin(spec: &InfraSpec) -> Vec<&'static str> {
    let of = [&spec.network, &spec.ipc, &spec.uts, &spec.pid, &spec.user];
    let kinds = KINDS.into_iter().zip(of);
    kinds
        .filter(|(_, namespace)| **namespace == Namespace::New)
        .map(|(kind, _)| kind)
        .collect()
}

/// Where the pins are, by the directory of the pod's files.
pub fn dir(files: &Path) -> PathBuf {
    files.join("ns")
}

/// Pins these namespaces of `pid`, a child that nobody has reaped. The intent must be on record before; what was made
/// before an error stays for [`remove`].
pub fn make(files: &Path, kinds: &[&str], pid: i32) -> Result<()> {
    let dir = dir(files);
    make_private(&dir)?;
    for kind in kinds {
        let path = dir.join(kind);
        // Of an earlier pod, whose journal somebody has taken away.
        pin::clear(&path)?;
        pin::pin(pid, kind, &path)?;
        failpoint::hit("pins.pin.after")?;
    }
    Ok(())
}

/// Takes the pins away, and their directory; absent = done.
pub fn remove(files: &Path) -> Result<()> {
    let dir = dir(files);
    for kind in KINDS {
        pin::clear(&dir.join(kind))?;
    }
    match fs::remove_dir(&dir) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => {
            Err(Error::io(format!("remove {}", dir.display()), e))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_new_is_pinned_and_what_has_a_path_or_is_the_hosts_is_not() {
        let spec = InfraSpec {
            network: Namespace::Path("/n".into()),
            ipc: Namespace::New,
            pid: Namespace::New,
            ..InfraSpec::default()
        };
        assert_eq!(to_pin(&spec), ["ipc", "pid"]);
    }

    #[test]
    fn what_a_death_left_of_the_pins_goes_and_absent_is_done() {
        let files = tempfile::tempdir().unwrap();
        remove(files.path()).unwrap();
        fs::create_dir(dir(files.path())).unwrap();
        fs::write(dir(files.path()).join("uts"), "").unwrap();
        remove(files.path()).unwrap();
        assert!(!dir(files.path()).exists());
    }
}
