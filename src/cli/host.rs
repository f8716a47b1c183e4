//! This machine as the command sees it: configuration, namespace, and state directories that can be trusted.
//!
//! Promises that nothing is read from, or made in, a state directory that somebody else could have written to: a journal
//! tells us whom to signal and what to unmount. Must never change a directory it did not make.

use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tokio::sync::OnceCell;

use crate::config::Config;
use crate::error::{Context, Error, Kind, Result};
use crate::id;
use crate::process::Reaper;

/// See the module.
#[derive(Debug)]
pub struct Host {
    /// The configuration.
    pub config: Arc<Config>,
    /// Checked namespace.
    pub namespace: String,
    reaper: OnceCell<Reaper>,
}

impl Host {
    /// Reads the configuration, checks the namespace, that we are root, and both state roots.
    pub fn open(namespace: &str) -> Result<Self> {
        id::check_namespace(namespace)?;
        let config = Config::load()?;
        if !nix::unistd::geteuid().is_root() {
            return Err(Error::new(
                Kind::Denied,
                "check for root: podvisor makes namespaces, cgroups and networks and keeps its state in \
                 directories of root's; run it as root, for example with sudo",
            ));
        }
        for root in [&config.runtime_root, &config.state_root] {
            check_owner(root)?;
        }
        let host = Self {
            config: Arc::new(config),
            namespace: namespace.to_owned(),
            reaper: OnceCell::new(),
        };
        check_owner(&host.root())?;
        Ok(host)
    }

    /// A machine of its own below `dir`.
    #[cfg(test)]
    pub fn at(dir: &Path) -> Self {
        let config = Config {
            runtime_root: dir.join("run"),
            state_root: dir.join("lib"),
            ..Config::default()
        };
        Self {
            config: Arc::new(config),
            namespace: "default".to_owned(),
            reaper: OnceCell::new(),
        }
    }

    /// The same machine, seen from another namespace.
    pub fn of_namespace(&self, namespace: &str) -> Result<Self> {
        id::check_namespace(namespace)?;
        let host = Self {
            config: Arc::clone(&self.config),
            namespace: namespace.to_owned(),
            // One reaper for a process; Reaper is a handle.
            reaper: self.reaper.clone(),
        };
        check_owner(&host.root())?;
        Ok(host)
    }

    /// Directory of this namespace.
    pub fn root(&self) -> PathBuf {
        self.config.runtime_root.join(&self.namespace)
    }

    /// Directory of one pod; `id` must be a checked id.
    pub fn pod_dir(&self, id: &str) -> PathBuf {
        self.config.sandbox_dir(&self.namespace, id)
    }

    /// `--root` of the OCI runtime for containers the command makes; the supervisor adds the namespace.
    pub fn oci_root(&self) -> PathBuf {
        self.config.runtime_root.join("oci")
    }

    /// The one reaper of this process, started when the first verb has to work without a supervisor.
    pub async fn reaper(&self) -> Result<&Reaper> {
        self.reaper
            .get_or_try_init(|| async { Reaper::start() })
            .await
    }
}

/// Makes a directory only root can enter, and the missing ones above it.
pub fn private_dir(path: &Path) -> Result<()> {
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(path)
        .context(|| format!("make directory {}", path.display()))
}

/// A directory that exists must be root's (ours) and writable by nobody else.
fn check_owner(path: &Path) -> Result<()> {
    let found = match fs::symlink_metadata(path) {
        Ok(found) => found,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(e) => return Err(Error::io(format!("look at {}", path.display()), e)),
    };
    let own = nix::unistd::geteuid().as_raw();
    let trouble = if !found.is_dir() {
        "it is no directory".to_owned()
    } else if found.uid() != own {
        format!("it belongs to user {} and not to user {own}", found.uid())
    } else if found.mode() & 0o022 != 0 {
        format!(
            "others may write to it (mode {:04o})",
            found.mode() & 0o7777
        )
    } else {
        return Ok(());
    };
    Err(Error::new(
        Kind::Denied,
        format!(
            "trust state directory {}: {trouble}; make it root's own with mode 0700",
            path.display()
        ),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_directory_others_can_write_to_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let set = |mode| fs::set_permissions(dir.path(), fs::Permissions::from_mode(mode)).unwrap();
        set(0o700);
        assert!(check_owner(dir.path()).is_ok());
        for mode in [0o777, 0o1777, 0o720] {
            set(mode);
            assert_eq!(
                check_owner(dir.path()).map_err(|e| e.kind()),
                Err(Kind::Denied),
                "{mode:o}"
            );
        }
        set(0o700);
        let file = dir.path().join("file");
        fs::write(&file, "").unwrap();
        assert!(check_owner(&file).is_err());
        assert!(check_owner(&dir.path().join("absent")).is_ok());
    }
}
