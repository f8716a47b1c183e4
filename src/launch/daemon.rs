//! The child of `start`: from a fork of the helper to a supervisor that serves.
//!
//! Promises a clean process: own session, standard streams on /dev/null and the log, no inherited descriptor, stated
//! limits. The helper learns whether it serves, once. Must never touch the helper's standard output: the daemon waits
//! for the end of that pipe.

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::signal::SigSet;
use nix::sys::stat::{Mode, umask};
use tracing::level_filters::LevelFilter;
use tracing::{error, info, warn};

use crate::config::Config;
use crate::error::{Context, Result};
use crate::failpoint;
use crate::process::detach;
use crate::serve;
use crate::sys;

/// First byte on the helper's pipe when all is well; anything else is the first byte of an error's text.
pub const READY: u8 = b'\x06';

/// Our own soft limit of open files: some descriptors per container, and scans of "all" numbers stay short.
const NOFILE_OWN: u64 = 65_536;

/// What the helper found out.
#[derive(Debug)]
pub struct Launch {
    /// Settings.
    pub config: Config,
    /// containerd namespace.
    pub namespace: String,
    /// `-id`.
    pub id: String,
    /// Group id.
    pub group: String,
    /// Directory `start` ran in.
    pub bundle: PathBuf,
    /// How much to log.
    pub level: LevelFilter,
    /// Bound and listening.
    pub listener: OwnedFd,
    /// Its path.
    pub socket: PathBuf,
    /// Where events go.
    pub ttrpc_address: Option<String>,
    /// Read end; the helper writes a byte after its answer.
    pub watchdog: OwnedFd,
    /// Write end; the helper waits for our word.
    pub ready: OwnedFd,
    /// For ourselves, where the daemon's own could be read.
    pub oom_score_adj: Option<i32>,
}

/// Becomes the supervisor; returns when the pod is over.
pub fn run(launch: Launch) -> ExitCode {
    let word = Word::new(launch.ready);
    let socket = launch.socket.clone();
    let prepared = become_daemon(&launch.bundle, &[&launch.listener, &launch.watchdog], &word);
    #[cfg(feature = "failpoint")]
    let prepared = prepared.and_then(|()| arm_failpoints(&launch.bundle));
    if let Err(e) = prepared {
        word.failed(&e.to_string());
        let _ = fs::remove_file(&socket);
        return ExitCode::FAILURE;
    }
    crate::log::init(launch.level, &launch.group);
    std::panic::set_hook(Box::new(|panic| error!(step = "panic", "{panic}")));
    adjust_oom_score(launch.oom_score_adj);
    info!(
        step = "serve",
        id = launch.id,
        namespace = launch.namespace,
        "supervisor starts"
    );

    let ready = {
        let word = word.clone();
        Box::new(move || {
            failpoint::pass("supervisor.ready.before");
            word.ready();
            failpoint::pass("supervisor.ready.after");
        })
    };
    let served = serve::run(serve::Options {
        config: launch.config,
        namespace: launch.namespace,
        id: launch.id,
        group: launch.group,
        bundle: launch.bundle,
        debug: launch.level >= LevelFilter::DEBUG,
        listener: launch.listener,
        socket: launch.socket,
        ttrpc_address: launch.ttrpc_address,
        watchdog: Some(launch.watchdog),
        ready: Some(ready),
    });
    match served {
        Ok(()) => {
            info!(step = "serve", "supervisor ends");
            ExitCode::SUCCESS
        }
        Err(e) => {
            error!(step = "serve", "supervisor ends: {e}");
            word.failed(&e.to_string());
            let _ = fs::remove_file(&socket);
            ExitCode::FAILURE
        }
    }
}

fn become_daemon(bundle: &Path, keep: &[&OwnedFd], word: &Word) -> Result<()> {
    failpoint::hit("supervisor.begin")?;
    let mut numbers: Vec<i32> = keep.iter().map(|fd| fd.as_raw_fd()).collect();
    numbers.extend(word.number());
    // Whatever the daemon leaked into the helper ends here, before we open anything ourselves.
    detach(&numbers, || open_log(bundle))?;
    SigSet::empty()
        .thread_set_mask()
        .context(|| "unblock signals")?;
    umask(Mode::from_bits_truncate(0o022));
    limit_files();
    sys::memory::one_arena();
    sys::memory::huge_pages_off();
    Ok(())
}

/// The log of the bundle: a fifo the daemon reads, or a regular file. None: nobody wants one.
///
/// The fifo is opened for reading too: without a reader it neither refuses nor signals, lines just wait in it until it
/// is full, and a daemon that comes back finds them. Non-blocking, so that a daemon that hangs holds nobody up.
fn open_log(bundle: &Path) -> Option<File> {
    use std::os::unix::fs::FileTypeExt;
    let path = bundle.join("log");
    let kind = fs::symlink_metadata(&path).ok()?.file_type();
    let mut options = OpenOptions::new();
    options.custom_flags(libc::O_NONBLOCK | libc::O_NOFOLLOW | libc::O_NOCTTY);
    if kind.is_fifo() {
        options.read(true).write(true).open(path).ok()
    } else if kind.is_file() {
        options.append(true).open(path).ok()
    } else {
        None
    }
}

/// What the annotations of the bundle's `config.json` say; a sandbox' own come with its request.
#[cfg(feature = "failpoint")]
fn arm_failpoints(bundle: &Path) -> Result<()> {
    match crate::spec::Spec::read(bundle) {
        Ok(spec) => failpoint::arm(&spec.annotations()),
        Err(e) if e.is_gone() => Ok(()),
        Err(e) => Err(e),
    }
}

fn limit_files() {
    // Children get their own stated limit (`sys::process`); the hard one stays, it is not ours to lower.
    if let Ok((_, hard)) = getrlimit(Resource::RLIMIT_NOFILE) {
        let _ = setrlimit(Resource::RLIMIT_NOFILE, hard.min(NOFILE_OWN), hard);
    }
}

fn adjust_oom_score(score: Option<i32>) {
    let Some(score) = score else { return };
    if let Err(e) = fs::write("/proc/self/oom_score_adj", score.to_string()) {
        // Lowering it needs CAP_SYS_RESOURCE; a pod without the adjustment is better than none.
        warn!(
            step = "oom-score",
            "write {score} to /proc/self/oom_score_adj: {e}"
        );
    }
}

/// The pipe to the helper, used once.
#[derive(Clone)]
struct Word(Arc<Mutex<Option<OwnedFd>>>);

impl Word {
    fn new(pipe: OwnedFd) -> Self {
        Self(Arc::new(Mutex::new(Some(pipe))))
    }

    fn number(&self) -> Option<i32> {
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .as_ref()
            .map(AsRawFd::as_raw_fd)
    }

    fn ready(&self) {
        self.send(&[READY]);
    }

    fn failed(&self, text: &str) {
        self.send(format!("!{text}").as_bytes());
    }

    fn send(&self, bytes: &[u8]) {
        let pipe = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(pipe) = pipe {
            // The helper may have been killed; the watchdog sees that.
            let _ = File::from(pipe).write_all(bytes);
        }
    }
}
