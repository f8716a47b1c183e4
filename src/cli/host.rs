//! This machine as the command sees it: configuration, namespace, and state directories that can be trusted.
//!
//! Promises that nothing is read from, or made in, a state directory that somebody else could have written to: a journal
//! tells us whom to signal and what to unmount. Must never change a directory it did not make.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use tokio::sync::OnceCell;

use crate::config::Config;
use crate::error::{Error, Kind, Result};
use crate::id;
use crate::process::Reaper;
use crate::sys::dir::check_private;
pub use crate::sys::dir::make_private as private_dir;

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

    /// The one reaper of this process, started when the first verb has to work without a supervisor.
    pub async fn reaper(&self) -> Result<&Reaper> {
        self.reaper
            .get_or_try_init(|| async { Reaper::start() })
            .await
    }
}

/// A directory that exists must be root's (ours) and writable by nobody else.
fn check_owner(path: &Path) -> Result<()> {
    match check_private(path) {
        Err(e) if e.is_gone() => Ok(()),
        checked => checked,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_state_directory_is_ours_or_not_there_yet() {
        let dir = tempfile::tempdir().unwrap();
        assert!(check_owner(dir.path()).is_ok());
        assert!(check_owner(&dir.path().join("absent")).is_ok());
        let file = dir.path().join("file");
        std::fs::write(&file, "").unwrap();
        assert!(check_owner(&file).is_err());
    }
}
