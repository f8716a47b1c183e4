//! How the infra process comes into its cgroups without waiting for the whole machine.
//!
//! Whoever moves another process (`cgroup.procs`) waits until no processor is in the middle of a fork or an exit of
//! anybody: a grace period of RCU, 5 ms on a busy machine and 20 on an idle one. A process that moves its own only thread
//! (`0` into v1's `tasks`: cgroup_procs_write_start takes no lock for it) waits for nobody, nor does one that is born in
//! its group (CLONE_INTO_CGROUP, v2, since 5.7).

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;

use crate::error::{Context, Error, Result};

/// The groups of one infra process, open.
#[derive(Debug, Default)]
pub struct Groups {
    /// `tasks` of v1's trees.
    tasks: Vec<OwnedFd>,
    /// v2's directory.
    unified: Option<(OwnedFd, PathBuf)>,
}

impl Groups {
    /// Opens `dirs`: one for each tree of v1, or the one of v2.
    pub fn open(dirs: &[PathBuf]) -> Result<Self> {
        let mut groups = Self::default();
        for dir in dirs {
            let what = || format!("put the infra process into {}", dir.display());
            match OpenOptions::new().write(true).open(dir.join("tasks")) {
                Ok(file) => groups.tasks.push(file.into()),
                Err(e) if e.kind() == io::ErrorKind::NotFound => {
                    let mut open = File::options();
                    open.read(true)
                        .custom_flags(libc::O_PATH | libc::O_DIRECTORY);
                    let fd = open.open(dir).context(what)?;
                    groups.unified = Some((fd.into(), dir.clone()));
                }
                Err(e) => return Err(Error::io(what(), e)),
            }
        }
        Ok(groups)
    }

    /// What the process itself writes to.
    pub fn tasks(&self) -> Vec<RawFd> {
        self.tasks.iter().map(AsRawFd::as_raw_fd).collect()
    }

    /// Where it is to be born.
    pub fn birthplace(&self) -> Option<BorrowedFd<'_>> {
        self.unified.as_ref().map(|(fd, _)| fd.as_fd())
    }

    /// Moves a process there that could not be born there: by an older kernel, or below a filter that knows no clone3.
    pub fn receive(&self, pid: i32) -> Result<()> {
        let Some((_, dir)) = &self.unified else {
            return Ok(());
        };
        let file = dir.join("cgroup.procs");
        fs::write(&file, pid.to_string())
            .context(|| format!("put the infra process into {}", file.display()))
    }
}
