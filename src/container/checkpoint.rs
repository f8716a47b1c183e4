//! Checkpoint of a container, and the start of one that is restored from a checkpoint.
//!
//! A container that is created from a checkpoint has no process before its start: who restores unpacks the difference of
//! the root filesystem between the two. Its streams are opened by the create and wait here.

use std::fs::{self, DirBuilder};
use std::io::ErrorKind;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use super::create::{PID_FILE, read_pid, remove_stale};
use super::state::Phase;
use super::table::{Container, Shared};
use crate::error::{Context, Error, Kind, Result};
use crate::oci::{self, Dump};
use crate::process::Child;
use crate::stdio::Io;

/// criu's directory where the options name none; removed when it is done.
const WORK: &str = "criu-work";
/// criu's own log of a dump, in its directory, and what its copy in the bundle is called.
const DUMP_LOG: &str = "dump.log";
const DUMP_LOG_COPY: &str = "criu-dump.log";

/// What a created container will be restored from, and its streams.
#[derive(Debug)]
pub(super) struct Restoring {
    pub image: PathBuf,
    pub io: Io,
}

/// What is asked for.
#[derive(Clone, Debug, Default)]
pub struct CheckpointRequest {
    /// Directory for the dump; made when it is missing.
    pub image: PathBuf,
    /// Directory in which criu works; empty: that of the options, else one in the bundle.
    pub work: PathBuf,
    /// What is dumped, and how.
    pub dump: Dump,
}

/// See [`super::Containers::checkpoint`].
pub(super) async fn checkpoint(
    shared: &Shared,
    container: &Container,
    request: &CheckpointRequest,
) -> Result<()> {
    let fixed = &container.fixed;
    let what = || format!("checkpoint container {}", fixed.id);
    if !request.image.is_absolute() {
        let text = format!("{}: give an absolute path for the image", what());
        return Err(Error::new(Kind::Invalid, text));
    }
    let _turn = container.verbs.lock().await;
    {
        let inner = container.inner();
        if inner.init.phase != Phase::Running || inner.ending {
            return Err(inner.refusal("checkpoint", "it is not running"));
        }
    }
    oci::check_criu(&shared.reaper).await.context(what)?;
    make(&request.image).context(what)?;
    let work = Work::new(container, &request.work).context(what)?;
    let done = container
        .unless_cancelled(fixed.runtime.checkpoint(
            &shared.reaper,
            &fixed.bundle,
            &fixed.id,
            &request.image,
            &work.path,
            &request.dump,
        ))
        .await;
    done.map_err(|e| {
        let copy = fixed.bundle.join(DUMP_LOG_COPY);
        let log = match fs::copy(work.path.join(DUMP_LOG), &copy) {
            Ok(_) => format!(" (criu's log is {})", copy.display()),
            Err(_) => String::new(),
        };
        e.within(format!("{}{log}", what()))
    })
}

/// Restores; init runs when this returns. That criu can do it was seen when the container was created.
pub(super) async fn restore(
    shared: &Shared,
    container: &Container,
    restoring: Restoring,
) -> Result<(Child, Io)> {
    let Restoring { image, mut io } = restoring;
    let fixed = &container.fixed;
    let work = Work::new(container, Path::new(""))?;
    let pid_file = fixed.bundle.join(PID_FILE);
    remove_stale(&pid_file)?;
    // From before the fork: init may end before its pid is read.
    let held = shared.reaper.hold_unknown();
    let console = io.console_socket();
    let restore = oci::Restore {
        bundle: &fixed.bundle,
        image: &image,
        work: &work.path,
        pid_file: &pid_file,
        no_pivot_root: fixed.no_pivot_root,
        console: console.as_deref(),
        stdio: io.take_child_stdio()?,
    };
    fixed
        .runtime
        .restore(&shared.reaper, &fixed.id, restore)
        .await?;
    let child = shared.reaper.adopt(read_pid(&pid_file)?);
    drop(held);
    io.take_terminal().await?;
    Ok((child?, io))
}

/// criu's directory, removed afterwards unless somebody named it.
struct Work {
    path: PathBuf,
    own: bool,
}

impl Work {
    fn new(container: &Container, asked: &Path) -> Result<Self> {
        let fixed = &container.fixed;
        let named = [asked, Path::new(&fixed.criu_work)];
        let named = named.into_iter().find(|p| !p.as_os_str().is_empty());
        let work = match named {
            Some(path) if !path.is_absolute() => {
                let text = format!(
                    "use {} as criu's directory: give an absolute path",
                    path.display()
                );
                return Err(Error::new(Kind::Invalid, text));
            }
            Some(path) => Self {
                path: path.to_owned(),
                own: false,
            },
            None => Self {
                path: fixed.bundle.join(WORK),
                own: true,
            },
        };
        make(&work.path)?;
        Ok(work)
    }
}

impl Drop for Work {
    fn drop(&mut self) {
        if self.own
            && let Err(error) = fs::remove_dir_all(&self.path)
            && error.kind() != ErrorKind::NotFound
        {
            tracing::warn!(path = %self.path.display(), %error, "criu's directory not removed");
        }
    }
}

fn make(dir: &Path) -> Result<()> {
    // 0700: a dump is all memory of the workload.
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(dir)
        .context(|| format!("make {}", dir.display()))
}
