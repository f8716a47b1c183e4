//! Drives an OCI runtime (runc, crun, youki, or anything with runc's command line): one struct, one method per verb.
//!
//! Owns the command lines, the environment and the time limit of every verb, and the text of a failure. Promises that a
//! verb ends within its limit and that the error says what the runtime said. Must never keep state of a container and
//! never decide what a failure means for it.

mod criu;
mod failure;
mod find;

use std::env;
use std::ffi::{OsStr, OsString};
use std::fs::{self, DirBuilder};
use std::io::ErrorKind;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::error::{Error, Kind, Result};
use crate::process::{Helper, Output, Reaper};

pub use criu::{Dump, Restore, check as check_criu};
pub use find::{Flavour, choose, find};

/// `start` only opens a fifo and runs the poststart hooks.
pub const START_LIMIT: Duration = Duration::from_secs(60);
/// `exec --detach` up to the moment the program runs.
pub const EXEC_LIMIT: Duration = Duration::from_secs(60);
/// `kill` is one system call and a state file.
pub const KILL_LIMIT: Duration = Duration::from_secs(10);
/// `delete` kills, removes cgroups and runs the poststop hooks.
pub const DELETE_LIMIT: Duration = Duration::from_secs(30);
/// `pause` and `resume` wait for the freezer.
pub const FREEZE_LIMIT: Duration = Duration::from_secs(30);
/// `update` writes a few files; a memory limit below what is used first waits for the kernel to make room.
pub const UPDATE_LIMIT: Duration = Duration::from_secs(30);
/// `features` prints a constant; the daemon waits for it at its start.
pub const FEATURES_LIMIT: Duration = Duration::from_secs(5);

/// Where programs are looked for when our own environment has no PATH.
const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
/// Where crun mounts the copy of itself.
const STATE_DIR: &str = "_LIBCONTAINER_STATEDIR";
/// Our cap of a verb's stdout and stderr, bytes.
const OUTPUT_CAP: usize = 256 * 1024;
/// The runtime's log in the bundle, where daemons and their tests look for it.
const LOG: &str = "log.json";
/// Directory in the bundle for what a verb needs for a moment: crun and runc mount their own executable in it. Killed in
/// the middle they leave that mount; here the undo of the container finds it, in /tmp nobody would.
pub const SCRATCH: &str = "runtime-tmp";

/// One OCI runtime with its state directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Runtime {
    /// The executable, absolute.
    pub binary: PathBuf,
    /// `--root`: the state of container `x` is the directory `x` in it.
    pub root: PathBuf,
    /// `--systemd-cgroup`.
    pub systemd_cgroup: bool,
}

/// What `create` needs beside the container's id.
#[derive(Debug)]
pub struct Create<'a> {
    /// Directory with `config.json`; the runtime's working directory too.
    pub bundle: &'a Path,
    /// Where the runtime writes the pid of init.
    pub pid_file: &'a Path,
    /// `--no-pivot`.
    pub no_pivot_root: bool,
    /// `--no-new-keyring`.
    pub no_new_keyring: bool,
    /// `--console-socket`: where the runtime sends the master of the terminal that it makes.
    pub console: Option<&'a Path>,
    /// At this bound it is killed with everything it started.
    pub limit: Duration,
    /// stdin, stdout and stderr of the container.
    pub stdio: [Stdio; 3],
}

/// What `exec` needs beside the container's id.
#[derive(Debug)]
pub struct Exec<'a> {
    /// The container's bundle.
    pub bundle: &'a Path,
    /// File with the `process` object.
    pub process: &'a Path,
    /// Where the runtime writes the pid.
    pub pid_file: &'a Path,
    /// See [`Create::console`].
    pub console: Option<&'a Path>,
    /// stdin, stdout and stderr of the process.
    pub stdio: [Stdio; 3],
}

impl Runtime {
    /// Which family it is of.
    pub fn flavour(&self) -> Flavour {
        Flavour::of(&self.binary)
    }

    /// Where the runtime keeps the state of `id`.
    pub fn state_dir(&self, id: &str) -> PathBuf {
        self.root.join(id)
    }

    /// Makes the container; its init waits for `start`.
    pub async fn create(&self, reaper: &Reaper, id: &str, create: Create<'_>) -> Result<()> {
        let mut args = args(["create", "--bundle"]);
        args.push(create.bundle.into());
        args.push("--pid-file".into());
        args.push(create.pid_file.into());
        if create.no_pivot_root {
            args.push("--no-pivot".into());
        }
        if create.no_new_keyring {
            args.push("--no-new-keyring".into());
        }
        add_console(&mut args, create.console);
        args.push(id.into());
        self.run(
            reaper,
            create.bundle,
            args,
            create.limit,
            Some(create.stdio),
        )
        .await
        .map(drop)
        .map_err(|e| match e.kind() {
            // CRI-O's words: what reads its errors finds ours.
            Kind::Deadline => e.within("create container timeout"),
            _ => e,
        })
    }

    /// Lets init run the program.
    pub async fn start(&self, reaper: &Reaper, bundle: &Path, id: &str) -> Result<()> {
        self.run(reaper, bundle, args(["start", id]), START_LIMIT, None)
            .await
            .map(drop)
    }

    /// Runs another process in the container.
    pub async fn exec(&self, reaper: &Reaper, id: &str, exec: Exec<'_>) -> Result<()> {
        let mut args = args(["exec", "--process"]);
        args.push(exec.process.into());
        args.push("--detach".into());
        args.push("--pid-file".into());
        args.push(exec.pid_file.into());
        add_console(&mut args, exec.console);
        args.push(id.into());
        self.run(reaper, exec.bundle, args, EXEC_LIMIT, Some(exec.stdio))
            .await
            .map(drop)
    }

    /// Signals init, or every process of the container.
    pub async fn kill(
        &self,
        reaper: &Reaper,
        bundle: &Path,
        id: &str,
        signal: u32,
        all: bool,
    ) -> Result<()> {
        let number = signal.to_string();
        let args = if all {
            args(["kill", "--all", id, &number])
        } else {
            args(["kill", id, &number])
        };
        self.run(reaper, bundle, args, KILL_LIMIT, None)
            .await
            .map(drop)
    }

    /// Removes the container's state; with `force` its processes too. A container the runtime does not know is done.
    pub async fn delete(
        &self,
        reaper: &Reaper,
        bundle: &Path,
        id: &str,
        force: bool,
    ) -> Result<()> {
        let args = if force {
            args(["delete", "--force", id])
        } else {
            args(["delete", id])
        };
        match self.run(reaper, bundle, args, DELETE_LIMIT, None).await {
            // Only runc says it in words; for all of them a container is its state directory.
            Err(e) if !e.is_gone() && self.state_dir(id).exists() => Err(e),
            _ => Ok(()),
        }
    }

    /// Freezes all processes of the container.
    pub async fn pause(&self, reaper: &Reaper, bundle: &Path, id: &str) -> Result<()> {
        self.run(reaper, bundle, args(["pause", id]), FREEZE_LIMIT, None)
            .await
            .map(drop)
    }

    /// Thaws them.
    pub async fn resume(&self, reaper: &Reaper, bundle: &Path, id: &str) -> Result<()> {
        self.run(reaper, bundle, args(["resume", id]), FREEZE_LIMIT, None)
            .await
            .map(drop)
    }

    /// Changes the container's limits to those in `resources`, an OCI spec's `linux.resources` as JSON.
    pub async fn update(
        &self,
        reaper: &Reaper,
        bundle: &Path,
        id: &str,
        resources: Vec<u8>,
    ) -> Result<()> {
        let args = args(["update", "--resources", "-", id]);
        self.run_fed(reaper, bundle, args, UPDATE_LIMIT, None, resources)
            .await
            .map(drop)
    }

    /// youki writes over what is in its log from the beginning, and leaves the rest as it is: each verb has a file of its
    /// own, in `scratch`.
    fn own_log(&self, scratch: &Path) -> Option<PathBuf> {
        static VERBS: AtomicU64 = AtomicU64::new(0);
        let number = VERBS.fetch_add(1, Ordering::Relaxed);
        (self.flavour() == Flavour::Youki).then(|| scratch.join(format!("log-{number}.json")))
    }

    async fn run(
        &self,
        reaper: &Reaper,
        bundle: &Path,
        verb: Vec<OsString>,
        limit: Duration,
        stdio: Option<[Stdio; 3]>,
    ) -> Result<Output> {
        self.run_fed(reaper, bundle, verb, limit, stdio, Vec::new())
            .await
    }

    /// One verb: bounded, with an environment of its own, in the bundle. `input`: its standard input, without `stdio`.
    async fn run_fed(
        &self,
        reaper: &Reaper,
        bundle: &Path,
        verb: Vec<OsString>,
        limit: Duration,
        stdio: Option<[Stdio; 3]>,
        input: Vec<u8>,
    ) -> Result<Output> {
        let name = verb
            .first()
            .map(|v| v.to_string_lossy().into_owned())
            .unwrap_or_default();
        let mut helper = Helper::new(&self.binary, limit);
        helper.env = environment();
        helper.output_cap = OUTPUT_CAP;
        helper.stdio = stdio;
        helper.stdin = input;
        helper.args = args(["--root"]);
        helper.args.push(self.root.clone().into());
        // A bundle that somebody has removed must not keep `delete` from working.
        let has_bundle = bundle.is_dir();
        let scratch = has_bundle.then(|| make_scratch(bundle)).flatten();
        let own_log = scratch.as_deref().and_then(|dir| self.own_log(dir));
        let log = own_log
            .clone()
            .or_else(|| has_bundle.then(|| bundle.join(LOG)));
        let before = log.as_deref().map_or(0, failure::length);
        if let Some(log) = &log {
            if let Some(scratch) = &scratch {
                let names = ["TMPDIR", STATE_DIR];
                helper.env.extend(names.map(|n| (n.into(), scratch.into())));
            }
            helper.args.extend(args(["--log"]));
            helper.args.push(log.into());
            helper.args.extend(args(["--log-format", "json"]));
        }
        helper.cwd = Some(if log.is_some() {
            bundle.into()
        } else {
            "/".into()
        });
        if self.systemd_cgroup {
            helper.args.push("--systemd-cgroup".into());
        }
        helper.args.extend(verb);
        let program = self.binary.display();
        let output = helper.run(reaper).await.map_err(|e| {
            // A missing program is no missing container.
            let kind = if e.is_gone() { Kind::Other } else { e.kind() };
            e.as_kind(kind).within(format!("run {program} {name}"))
        })?;
        let failed = output.timed_out || output.exit.code != 0;
        let logged = log.as_deref().filter(|_| failed);
        let logged = logged.and_then(|l| failure::last_error(l, before));
        own_log.map(fs::remove_file);
        if output.timed_out {
            return Err(Error::new(
                Kind::Deadline,
                format!(
                    "run {program} {name}: no end within {} s, killed with all it started",
                    limit.as_secs_f64()
                ),
            ));
        }
        if !failed {
            return Ok(output);
        }
        let (kind, text) = failure::explain(logged, &output);
        Err(Error::new(kind, format!("run {program} {name}: {text}")))
    }
}

/// What the runtime can do, as the JSON document it prints.
///
/// # Errors
/// Unsupported when it is too old to know the verb.
pub async fn features(reaper: &Reaper, binary: &Path) -> Result<Vec<u8>> {
    let mut helper = Helper::new(binary, FEATURES_LIMIT);
    helper.env = environment();
    helper.output_cap = OUTPUT_CAP;
    helper.args = args(["features"]);
    let output = helper.run(reaper).await?;
    let fine = output.exit.code == 0 && !output.timed_out && !output.truncated;
    if fine
        && serde_json::from_slice::<serde_json::Map<String, serde_json::Value>>(&output.stdout)
            .is_ok()
    {
        return Ok(output.stdout);
    }
    Err(Error::new(
        Kind::Unsupported,
        format!("run {} features: it printed no document", binary.display()),
    ))
}

/// None where it cannot be made: the runtime has no scratch directory then.
fn make_scratch(bundle: &Path) -> Option<PathBuf> {
    let path = bundle.join(SCRATCH);
    match DirBuilder::new().mode(0o700).create(&path) {
        Err(e) if e.kind() != ErrorKind::AlreadyExists => None,
        _ => Some(path),
    }
}

/// PATH (hooks are found by it), and no scratch directory: a NOTIFY_SOCKET or a LISTEN_FDS of our own would be taken by
/// the runtime as meant for the container. crun mounts a copy of itself for an instant where it may make a file (in /tmp,
/// if it is not told), which stays when it is killed then; where it may not, it copies itself into memory.
fn environment() -> Vec<(OsString, OsString)> {
    vec![
        ("PATH".into(), search_path()),
        (STATE_DIR.into(), "/proc".into()),
    ]
}

/// Where programs are looked for.
pub fn search_path() -> OsString {
    env::var_os("PATH")
        .filter(|p| !p.is_empty())
        .unwrap_or_else(|| DEFAULT_PATH.into())
}

fn add_console(args: &mut Vec<OsString>, socket: Option<&Path>) {
    if let Some(socket) = socket {
        args.push("--console-socket".into());
        args.push(socket.into());
    }
}

fn args<S: AsRef<OsStr>, const N: usize>(words: [S; N]) -> Vec<OsString> {
    words.iter().map(|w| w.as_ref().to_owned()).collect()
}
