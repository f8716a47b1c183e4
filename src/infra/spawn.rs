//! Making the infra process: cloned, registered, set up, and only then let go.
//!
//! Two pipes lead to it. On the go pipe it waits twice (for its parent's part of the set-up, and to run); when our end
//! closes before, it ends by itself, so a preparation that is given up or crashes leaves nothing. On the report pipe it
//! tells the step that failed, or by closing it that its program is up.

use std::ffi::CStr;
use std::fs::{self, File, OpenOptions};
use std::future::Future;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use nix::sched::CloneFlags;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::unix::pipe;
use tokio::time::timeout;
use tracing::warn;

use super::groups::Groups;
use super::label;
use super::{IdMapping, InfraSpec, Namespace, check_sysctls, sysctl};
use crate::error::{Context, Error, Kind, Result};
use crate::failpoint;
use crate::process::{Child, Identity, Reaper};
use crate::sys::clone::{self, Report, Step};
use crate::sys::fd::sealed_memory_file;
use crate::sys::thread_ns::{self, Enter};

/// The program's bytes: a static ELF file.
pub const PROGRAM: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/podvisor-infra"));

const NAME: &CStr = c"podvisor-infra";

/// For each of the two waits. Milliseconds in practice; a namespace may wait for a lock that others hold.
const LIMIT: Duration = Duration::from_secs(30);

/// A pod's infra process: cloned, known by identity, set up, not running yet (blocked before exec).
#[derive(Debug)]
pub struct Prepared {
    child: Child,
    go: pipe::Sender,
    report: pipe::Receiver,
    /// Names, and whether the label has a say in it.
    steps: Vec<(&'static str, bool)>,
    /// SELinux label that it is to run with.
    label: Option<String>,
    /// The group it has yet to be moved to by others.
    not_born_in: Option<Groups>,
}

impl Prepared {
    /// Who it is.
    pub fn identity(&self) -> Identity {
        self.child.identity
    }

    /// The process as the reaper knows it; the same that `run` returns.
    pub fn child(&self) -> &Child {
        &self.child
    }

    /// Lets it run its program; returns when that is up and has given up its privileges, or the error it met (step and
    /// errno). Dropping without `run` makes the child end by itself (its pipe closes).
    pub async fn run(mut self) -> Result<Child> {
        let done = within("run the infra process", self.start()).await;
        match done {
            Ok(()) => Ok(self.child),
            Err(e) => {
                give_up(&self.child).await;
                Err(e)
            }
        }
    }

    async fn start(&mut self) -> Result<()> {
        self.let_go().await?;
        if let Some(report) = self.read().await? {
            return Err(self.failure(report));
        }
        // The pipe is closed by its program, or by its end.
        if self.child.identity.is_alive() {
            return Ok(());
        }
        Err(self.ended("run the infra process").await)
    }

    /// It ended by itself, or was killed: how.
    async fn ended(&self, what: &str) -> Error {
        let exit = self.child.wait().await;
        let how = exit.signal.map_or_else(
            || format!("exit code {}", exit.code),
            |signal| format!("signal {signal}"),
        );
        Error::new(Kind::Other, format!("{what}: it ended by itself ({how})"))
    }

    async fn let_go(&mut self) -> Result<()> {
        let what = "let the infra process go on";
        match self.go.write_all(&[1]).await {
            Err(e) if e.kind() == io::ErrorKind::BrokenPipe => Err(self.ended(what).await),
            other => other.context(|| what),
        }
    }

    /// The next report; None when the pipe is closed.
    async fn read(&mut self) -> Result<Option<Report>> {
        let mut bytes = [0; Report::SIZE];
        match self.report.read_exact(&mut bytes).await {
            Ok(_) => Ok(Some(Report::parse(&bytes))),
            Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => Ok(None),
            Err(e) => Err(Error::io("read what the infra process reports", e)),
        }
    }

    /// Waits until it says that it has come as far as `Step::Report`, or as the second clone.
    async fn expect_report(&mut self) -> Result<Report> {
        match self.read().await? {
            Some(report) if report.errno == 0 => Ok(report),
            Some(report) => Err(self.failure(report)),
            None => Err(self.ended("set up the infra process").await),
        }
    }

    fn failure(&self, report: Report) -> Error {
        let (step, by_label) = self
            .steps
            .get(report.step as usize)
            .copied()
            .unwrap_or(("do an unknown step", false));
        let mut what = format!("make the infra process: {step}");
        if by_label {
            what = label::told(&what, self.label.as_deref(), report.errno);
        }
        // No step but a mount can find its room full.
        Error::mount(what, io::Error::from_raw_os_error(report.errno))
    }
}

/// Clones the infra process into its namespaces: cgroup joined, hostname and sysctls set, root pivoted to an empty
/// read-only tmpfs of its own (holds no host mount, cwd inside), no descriptor but 0 to 2 (all /dev/null), then blocked
/// until [`Prepared::run`].
///
/// It is registered with the reaper before it can end. On an error, or when the future is dropped, it ends and is
/// reaped. Unsupported: joining a user namespace and a pid namespace by path at once.
pub async fn prepare(reaper: &Reaper, spec: &InfraSpec) -> Result<Prepared> {
    let sysctls = check_sysctls(&spec.sysctls, spec)?;
    check(spec)?;
    let mut prepared = clone_into(reaper, spec)?;
    failpoint::child("infra.cloned.process", prepared.child.pid());
    let done = within("set up the infra process", async {
        failpoint::reach("infra.cloned").await?;
        if matches!(spec.user, Namespace::Path(_)) {
            second_clone(reaper, &mut prepared).await?;
        }
        let pid = prepared.child.pid();
        if spec.user == Namespace::New {
            write_map(pid, "gid_map", &spec.gid_mappings)?;
            write_map(pid, "uid_map", &spec.uid_mappings)?;
        }
        if let Some(groups) = prepared.not_born_in.take() {
            groups.receive(pid)?;
        }
        set_oom_score(pid, spec.oom_score_adj)?;
        prepared.let_go().await?;
        prepared.expect_report().await?;
        failpoint::reach("infra.set-up").await?;
        sysctl::write(&sysctls, pid)
    })
    .await;
    match done {
        Ok(()) => Ok(prepared),
        Err(e) => {
            give_up(&prepared.child).await;
            Err(e)
        }
    }
}

fn check(spec: &InfraSpec) -> Result<()> {
    if spec.hostname.len() > 63 || spec.hostname.contains(['\0', '\n']) {
        return Err(Error::new(
            Kind::Invalid,
            format!(
                "check hostname {:?}: use at most 63 bytes in one line",
                spec.hostname
            ),
        ));
    }
    if let (Namespace::Path(_), Namespace::Path(_)) = (&spec.user, &spec.pid) {
        return Err(Error::new(
            Kind::Unsupported,
            "join a user and a pid namespace by path: give one of them",
        ));
    }
    let maps_zero = |maps: &[IdMapping]| maps.iter().any(|m| m.container_id == 0 && m.size > 0);
    if spec.user == Namespace::New
        && !(maps_zero(&spec.uid_mappings) && maps_zero(&spec.gid_mappings))
    {
        return Err(Error::new(
            Kind::Invalid,
            "check the mappings of the user namespace: map user and group 0 inside",
        ));
    }
    Ok(())
}

/// The clone itself, and everything the child will need, made before it.
fn clone_into(reaper: &Reaper, spec: &InfraSpec) -> Result<Prepared> {
    let null = OpenOptions::new()
        .read(true)
        .write(true)
        .open("/dev/null")
        .context(|| "open /dev/null")?;
    let program =
        sealed_memory_file(NAME, PROGRAM).context(|| "make a memory file of the infra program")?;
    let label = spec.labels.as_ref().and_then(|l| l.process.clone());
    if let (Some(labels), Some(_)) = (&spec.labels, &label) {
        // A policy lets containers begin from files of this label, and seldom from memory files.
        label::set(&program, &labels.files, "give the infra program")?;
    }
    let (wait, go) = io::pipe().context(|| "make a pipe to the infra process")?;
    let (reports, tell) = io::pipe().context(|| "make a pipe from the infra process")?;
    let joined = join_files(spec)?;
    let groups = Groups::open(&spec.cgroup_dirs)?;
    let tasks = groups.tasks();
    let user = match &spec.user {
        Namespace::Path(path) => Some(open_namespace(path)?),
        Namespace::Host | Namespace::New => None,
    };

    let mut keep: Vec<i32> = [
        null.as_raw_fd(),
        program.as_raw_fd(),
        wait.as_raw_fd(),
        tell.as_raw_fd(),
    ]
    .into_iter()
    .chain(user.iter().map(AsRawFd::as_raw_fd))
    .chain(tasks.iter().copied())
    .collect();
    keep.sort_unstable();
    let new = new_namespaces(spec);
    let mut steps = vec![Step::CloseExcept(&keep)];
    let mut flags = new;
    if let Some(user) = &user {
        // Owned by the user namespace only when made by somebody inside; and inside is only a process of one thread.
        steps.extend([
            Step::Join(user.as_fd(), CloneFlags::CLONE_NEWUSER),
            Step::CloneAgain(new),
        ]);
        flags = CloneFlags::empty();
    }
    steps.extend([Step::Await(wait.as_fd()), Step::JoinCgroups(&tasks)]);
    if spec.user != Namespace::Host {
        steps.push(Step::BecomeRoot);
    }
    if spec.uts == Namespace::New && !spec.hostname.is_empty() {
        steps.push(Step::Hostname(spec.hostname.as_bytes()));
    }
    if let Some(label) = &label {
        steps.push(Step::ExecLabel(label.as_bytes()));
    }
    steps.extend([
        Step::PrivateMounts,
        Step::EmptyRoot,
        Step::NewSession,
        Step::Stdio(null.as_fd()),
        Step::Report,
        Step::Await(wait.as_fd()),
        Step::Exec(program.as_fd(), NAME),
    ]);

    let mut born_in = groups.birthplace();
    let child = reaper
        .register_with(|| {
            let spawn = |group| spawn_from(&joined, flags, group, &steps, tell.as_fd());
            if born_in.is_some()
                && let Ok(pid) = spawn(born_in)
            {
                return Ok(pid);
            }
            born_in = None;
            spawn(None)
        })
        .context(|| "make the infra process")?;
    let is_born_in = born_in.is_some();
    Ok(Prepared {
        child,
        go: pipe::Sender::from_owned_fd(OwnedFd::from(go))
            .context(|| "watch the pipe to the infra process")?,
        report: pipe::Receiver::from_owned_fd(OwnedFd::from(reports))
            .context(|| "watch the pipe from the infra process")?,
        steps: steps.iter().map(|s| (s.name(), s.takes_label())).collect(),
        label,
        not_born_in: (!is_born_in).then_some(groups),
    })
}

/// Clones from a thread that has joined `joined`, so that the child is born there; from this one when there is none.
fn spawn_from(
    joined: &[(OwnedFd, CloneFlags)],
    flags: CloneFlags,
    group: Option<BorrowedFd<'_>>,
    steps: &[Step<'_>],
    report: BorrowedFd<'_>,
) -> Result<i32> {
    let spawn = || {
        // A mount namespace is born with all its parent's mounts.
        clone::spawn_in(group, flags, steps, report)
            .map_err(|e| Error::mount(format_args!("clone into {flags:?}"), e))
    };
    if joined.is_empty() {
        return spawn();
    }
    let ways: Vec<Enter<'_>> = joined
        .iter()
        .map(|(fd, kind)| Enter::Join(fd.as_fd(), *kind))
        .collect();
    thread_ns::run(&ways, spawn)
}

fn join_files(spec: &InfraSpec) -> Result<Vec<(OwnedFd, CloneFlags)>> {
    kinds(spec)
        .into_iter()
        .filter_map(|(namespace, kind)| match namespace {
            Namespace::Path(path) => Some(open_namespace(path).map(|fd| (fd, kind))),
            Namespace::Host | Namespace::New => None,
        })
        .collect()
}

fn new_namespaces(spec: &InfraSpec) -> CloneFlags {
    let own = if spec.user == Namespace::New {
        CloneFlags::CLONE_NEWUSER
    } else {
        CloneFlags::empty()
    };
    let of_pod = kinds(spec)
        .into_iter()
        .filter(|(namespace, _)| **namespace == Namespace::New)
        .map(|(_, kind)| kind);
    of_pod.fold(own | CloneFlags::CLONE_NEWNS, |all, kind| all | kind)
}

/// All but user and mount.
fn kinds(spec: &InfraSpec) -> [(&Namespace, CloneFlags); 4] {
    [
        (&spec.network, CloneFlags::CLONE_NEWNET),
        (&spec.ipc, CloneFlags::CLONE_NEWIPC),
        (&spec.uts, CloneFlags::CLONE_NEWUTS),
        (&spec.pid, CloneFlags::CLONE_NEWPID),
    ]
}

fn open_namespace(path: &Path) -> Result<OwnedFd> {
    File::open(path)
        .map(OwnedFd::from)
        .context(|| format!("open namespace {}", path.display()))
}

/// The first clone only joined the user namespace; the second one is the infra process, and a child of ours, too.
async fn second_clone(reaper: &Reaper, prepared: &mut Prepared) -> Result<()> {
    let _held = reaper.hold_unknown();
    let report = prepared.expect_report().await?;
    prepared.child = reaper
        .adopt(report.pid)
        .context(|| "find the second clone of the infra process")?;
    Ok(())
}

fn write_map(pid: i32, name: &str, maps: &[IdMapping]) -> Result<()> {
    let lines: String = maps
        .iter()
        .map(|m| format!("{} {} {}\n", m.container_id, m.host_id, m.size))
        .collect();
    let path = format!("/proc/{pid}/{name}");
    fs::write(&path, &lines).map_err(|e| {
        Error::io(
            format_args!("write {path}: {}", lines.trim_end().replace('\n', ", ")),
            e,
        )
        .as_kind(Kind::Invalid)
    })
}

/// Lowering it needs a privilege that a nested or rootless supervisor does not have: then it is 0, to which the kernel lets
/// everybody go back whose value was raised by nobody else, or its own value stays.
fn set_oom_score(pid: i32, score: i32) -> Result<()> {
    let path = format!("/proc/{pid}/oom_score_adj");
    let denied = |e: &io::Error| e.kind() == io::ErrorKind::PermissionDenied;
    match fs::write(&path, score.to_string()) {
        Err(e) if denied(&e) && score < 0 && fs::write(&path, "0").is_ok() => Ok(()),
        Err(e) if denied(&e) => {
            warn!(pid, score, error = %e, "leave the oom score of the infra process as it is");
            Ok(())
        }
        other => other.context(|| format!("write {score} to {path}")),
    }
}

/// A child that is no longer wanted: killed, and gone before the error is told, so that nothing is in the way of a retry.
async fn give_up(child: &Child) {
    if let Err(error) = child.signal(libc::SIGKILL) {
        warn!(pid = child.pid(), %error, "kill an infra process that did not come up");
    }
    if timeout(LIMIT, child.wait()).await.is_err() {
        warn!(
            pid = child.pid(),
            "an infra process that did not come up is still there"
        );
    }
}

async fn within(what: &str, work: impl Future<Output = Result<()>>) -> Result<()> {
    match timeout(LIMIT, work).await {
        Ok(done) => done,
        Err(_) => Err(Error::new(
            Kind::Deadline,
            format!("{what}: no answer within {} s", LIMIT.as_secs()),
        )),
    }
}
