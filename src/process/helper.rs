//! A short-lived helper program (an OCI runtime's verb, a CNI plugin), bounded in time and output.
//!
//! Promises: its output is drained while it runs (a full pipe never stops it), nothing of its process group is left
//! when `run` returns (unless asked to spare it) or is dropped, a pipe held by something that left the group holds nobody
//! up; under a guard nothing that it started at all is left, unless it ended well.

use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::unix::pipe::{Receiver, Sender};
use tokio::time::{Instant, sleep_until, timeout};
use tracing::warn;

use super::alone::{self, Before};
use super::child::{Child, Exit};
use super::identity::{Identity, descendants};
use super::reaper::Reaper;
use crate::error::{Context, Error, Kind, Result};
use crate::failpoint;
use crate::sys::guard;
use crate::sys::process::Status;

/// How long output is still read after the program ended, when something it left behind holds the pipe.
const DRAIN_GRACE: Duration = Duration::from_secs(1);

/// How long a program killed at its bound may take to be gone. One stuck in the kernel is left to the reaper.
const KILL_GRACE: Duration = Duration::from_secs(10);

const DEFAULT_CAP: usize = 1 << 20;

/// What to run. See [`Helper::new`] for the defaults.
#[derive(Debug)]
pub struct Helper {
    /// Absolute path, or a name that is searched in *our* PATH.
    pub program: PathBuf,
    /// Without the program itself.
    pub args: Vec<OsString>,
    /// Exactly this environment, nothing inherited.
    pub env: Vec<(OsString, OsString)>,
    /// Working directory; ours when None.
    pub cwd: Option<PathBuf>,
    /// Written while it runs; /dev/null when empty. Not used with `stdio`.
    pub stdin: Vec<u8>,
    /// Given to the helper as its own stdin/stdout/stderr instead of the capture pipes (container stdio).
    pub stdio: Option<[Stdio; 3]>,
    /// At the bound its whole process group is killed with SIGKILL, and so is what it left behind in the group and
    /// everything below it in the tree of processes.
    pub limit: Duration,
    /// Cap for each of stdout and stderr, bytes; what is over is read and dropped.
    pub output_cap: usize,
    /// Ask the kernel to SIGKILL it when the supervisor dies (pdeathsig; so call `run` on the main thread only).
    pub die_with_parent: bool,
    /// What it leaves in its process group after it ended by itself lives on: `crun exec --detach` leaves the container's
    /// process there (runc, and crun's create, start a session for theirs). At the bound, or when `run` is dropped, the
    /// group is killed all the same.
    pub spare_group: bool,
    /// Nothing that it started is left unless it exits with 0, also not what left its group or session (see
    /// [`crate::sys::guard`]); after an exit with 0 nothing is killed. With this, `die_with_parent` and `spare_group`
    /// mean nothing: all of it dies with us, and the identity that `run_with` tells is the guard's. In a process that is
    /// its programs' guard itself ([`super::guard_by_itself`]) the program has none beside it.
    pub guard: bool,
}

/// What a helper left.
#[derive(Debug)]
pub struct Output {
    /// How it ended.
    pub exit: Exit,
    /// At most the cap.
    pub stdout: Vec<u8>,
    /// At most the cap.
    pub stderr: Vec<u8>,
    /// stdout or stderr was longer than the cap.
    pub truncated: bool,
    /// It was killed at the bound.
    pub timed_out: bool,
    /// From before the spawn to the end of its output.
    pub took: Duration,
}

impl Helper {
    /// Defaults: no arguments, empty env, no stdin, cap 1 MiB, limit as given, die_with_parent true, spare_group and
    /// guard false.
    pub fn new(program: impl Into<PathBuf>, limit: Duration) -> Self {
        Self {
            program: program.into(),
            args: Vec::new(),
            env: Vec::new(),
            cwd: None,
            stdin: Vec::new(),
            stdio: None,
            limit,
            output_cap: DEFAULT_CAP,
            die_with_parent: true,
            spare_group: false,
            guard: false,
        }
    }

    /// Runs it in its own process group, with the stated limits and no descriptor but 0 to 2.
    ///
    /// An error means that it was not run; how it ended, or that it was killed at the bound, is in the output.
    /// Dropping the future kills the group.
    pub async fn run(self, reaper: &Reaper) -> Result<Output> {
        self.run_with(reaper, |_| ()).await
    }

    /// The same; `started` is called with the identity right after the spawn (for the journal).
    pub async fn run_with(self, reaper: &Reaper, started: impl FnOnce(Identity)) -> Result<Output> {
        let begun = Instant::now();
        let end = begun + self.limit;
        let shown = self.program.display().to_string();
        let (cap, spare, guard) = (self.output_cap, self.spare_group, self.guard);
        let before = self.is_alone().then(Before::now);
        let guarded = guard && before.is_none();
        let (child, mut ends) = self.spawn(reaper, before.is_some())?;
        started(child.identity);
        let spawned = if guarded {
            "helper.guard"
        } else {
            "helper.process"
        };
        failpoint::child(spawned, child.identity.pid);
        let group = Group {
            child,
            shown,
            guarded,
            before,
            live: true,
        };

        let (exit, timed_out, stdout, stderr) = {
            let Ends {
                stdin,
                stdout,
                stderr,
            } = &mut ends;
            let mut out = Capture::new(cap);
            let mut err = Capture::new(cap);
            let mut pumped = false;
            let mut seen = None;
            {
                let pump =
                    async { tokio::join!(feed(stdin.take()), out.read(stdout), err.read(stderr)) };
                tokio::pin!(pump);
                while seen.is_none() {
                    tokio::select! {
                        biased;
                        exit = group.child.wait() => seen = Some((exit, false)),
                        _ = &mut pump, if !pumped => pumped = true,
                        () = sleep_until(end) => seen = Some((group.kill_and_wait().await, true)),
                    }
                }
                if !pumped {
                    // Something it left behind may hold the pipes; what it wrote itself is there already.
                    let _ = timeout(DRAIN_GRACE, &mut pump).await;
                }
            }
            let (exit, timed_out) = seen.unwrap_or_else(|| (Exit::now(Status::Code(255)), false));
            (exit, timed_out, out, err)
        };
        let spare = if guard { exit.code == 0 } else { spare };
        group.finish(spare && !timed_out);
        Ok(Output {
            exit,
            truncated: stdout.over || stderr.over,
            stdout: stdout.bytes,
            stderr: stderr.bytes,
            timed_out,
            took: begun.elapsed(),
        })
    }

    fn holds_nul(&self) -> bool {
        let pairs = self.env.iter().flat_map(|(key, value)| [key, value]);
        let texts = self.args.iter().chain(pairs).map(OsString::as_os_str);
        let dir = self.cwd.as_deref().map(Path::as_os_str);
        let mut all = texts.chain([self.program.as_os_str()]).chain(dir);
        all.any(|text| text.as_bytes().contains(&0))
    }

    /// This process is its guard.
    fn is_alone(&self) -> bool {
        self.guard && self.stdio.is_none() && alone::is_guard()
    }

    /// `alone`: see [`Self::is_alone`].
    fn spawn(self, reaper: &Reaper, alone: bool) -> Result<(Child, Ends)> {
        let shown = self.program.display().to_string();
        // A command would put other text in its place, and tell it only where it is spawned by std.
        if self.holds_nul() {
            return Err(Error::new(
                Kind::Invalid,
                format!(
                    "run {shown}: there is a NUL in its name, its arguments or its environment"
                ),
            ));
        }
        let mut command = Command::new(&self.program);
        command
            .args(&self.args)
            .env_clear()
            .envs(self.env)
            .process_group(0);
        if let Some(cwd) = &self.cwd {
            command.current_dir(cwd);
        }
        let mut ends = Ends::default();
        if alone {
            let theirs = ends
                .open(self.stdin)
                .context(|| format!("open pipes for {shown}"))?;
            let [stdin, stdout, stderr] = &theirs;
            return Ok((reaper.spawn_alone(&command, [stdin, stdout, stderr])?, ends));
        }
        let [stdin, stdout, stderr] = match self.stdio {
            Some(stdio) => stdio,
            None => ends
                .open(self.stdin)
                .context(|| format!("open pipes for {shown}"))?
                .map(Stdio::from),
        };
        command.stdin(stdin).stdout(stdout).stderr(stderr);
        if self.guard {
            return Ok((reaper.spawn_guarded(command)?, ends));
        }
        // The command goes with the call, and our copies of the child's ends with it: or EOF would never come.
        Ok((reaper.spawn_as(command, self.die_with_parent)?, ends))
    }
}

/// Our ends of the pipes, non-blocking.
#[derive(Debug, Default)]
struct Ends {
    stdin: Option<(Sender, Vec<u8>)>,
    stdout: Option<Receiver>,
    stderr: Option<Receiver>,
}

impl Ends {
    /// The other ends.
    fn open(&mut self, input: Vec<u8>) -> io::Result<[OwnedFd; 3]> {
        let stdin = if input.is_empty() {
            OwnedFd::from(File::open("/dev/null")?)
        } else {
            let (theirs, ours) = io::pipe()?;
            self.stdin = Some((Sender::from_owned_fd(OwnedFd::from(ours))?, input));
            OwnedFd::from(theirs)
        };
        let (ours, stdout) = io::pipe()?;
        self.stdout = Some(Receiver::from_owned_fd(OwnedFd::from(ours))?);
        let (ours, stderr) = io::pipe()?;
        self.stderr = Some(Receiver::from_owned_fd(OwnedFd::from(ours))?);
        Ok([stdin, OwnedFd::from(stdout), OwnedFd::from(stderr)])
    }
}

/// Writes the input and gives EOF. A program that ends without reading it (EPIPE) is its own business.
async fn feed(stdin: Option<(Sender, Vec<u8>)>) {
    if let Some((mut pipe, input)) = stdin {
        let _ = pipe.write_all(&input).await;
    }
}

/// What came out so far.
#[derive(Debug)]
struct Capture {
    bytes: Vec<u8>,
    cap: usize,
    over: bool,
}

impl Capture {
    fn new(cap: usize) -> Self {
        Self {
            bytes: Vec::new(),
            cap,
            over: false,
        }
    }

    /// Reads to EOF. Keeps what fits: stopping to read would stop the program.
    async fn read(&mut self, pipe: &mut Option<Receiver>) {
        let Some(pipe) = pipe else { return };
        let mut chunk = vec![0; 8192];
        loop {
            match pipe.read(&mut chunk).await {
                Ok(0) | Err(_) => return,
                Ok(n) => {
                    let room = self.cap.saturating_sub(self.bytes.len()).min(n);
                    self.bytes
                        .extend_from_slice(chunk.get(..room).unwrap_or_default());
                    self.over |= room < n;
                }
            }
        }
    }
}

/// Kills what is left of the group at the end, however the end comes.
#[derive(Debug)]
struct Group {
    child: Child,
    shown: String,
    guarded: bool,
    /// Where this process is the guard itself.
    before: Option<Before>,
    live: bool,
}

impl Group {
    async fn kill_and_wait(&self) -> Exit {
        self.kill_tree();
        match timeout(KILL_GRACE, self.child.wait()).await {
            Ok(exit) => exit,
            Err(_) => {
                warn!(program = %self.shown, pid = self.child.pid(), "killed at its bound and still there: left to the reaper");
                Exit::now(Status::Signal(libc::SIGKILL))
            }
        }
    }

    fn finish(mut self, spare: bool) {
        if !spare {
            self.kill();
        }
        self.live = false;
    }

    /// The group, and what the program started and is in no group of ours any more. Only while the program lives: what
    /// has lost its parent is nobody's child to be found by.
    fn kill_tree(&self) {
        let below = match self.guarded || self.before.is_some() {
            true => Vec::new(),
            false => descendants(self.child.pid()),
        };
        self.kill();
        for process in below {
            if let Err(error) = process.signal(libc::SIGKILL) {
                warn!(program = %self.shown, %error, "kill what a helper started");
            }
        }
    }

    fn kill(&self) {
        if let Some(before) = &self.before {
            return before.kill_others();
        }
        // The guard first: a group that is empty already is no reason to forget what left it.
        let told = match self.guarded {
            true => self.child.signal(libc::SIGTERM),
            false => Ok(true),
        };
        if self.guarded && !guard::group_is_shared() {
            if let Err(error) = told {
                warn!(program = %self.shown, %error, "tell a helper's guard");
            }
            return;
        }
        let killed = self.child.signal_group(libc::SIGKILL);
        if let Err(error) = told.and(killed) {
            warn!(program = %self.shown, %error, "kill a helper's process group");
        }
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        if self.live {
            self.kill_tree();
        }
    }
}
