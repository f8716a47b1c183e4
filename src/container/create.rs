//! Create: from a bundle to an init that waits to be started.
//!
//! The record is saved before the first side effect and again as soon as init is known; whatever goes wrong later, the
//! record is all that undoing it needs.

use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use super::checkpoint::Restoring;
use super::join::{self, millis};
use super::record::{ContainerRecord, Status};
use super::state::Inner;
use super::table::{Container, Fixed, Shared};
use super::{CreateRequest, PodContext, RuntimeOptions, kill, parking, pod_context, undo};
use crate::cgroup::{Group, Layout};
use crate::clock::unix_nanos;
use crate::error::{Context, Error, Kind, Result};
use crate::failpoint;
use crate::job::Job;
use crate::mount;
use crate::oci::{self, Runtime};
use crate::process::{Child, Helper, Reaper};
use crate::spec::Spec;
use crate::stdio::Io;
use crate::sys;
use tokio::runtime::Handle;

/// Parent of the runtimes' state directories when the options name none: where daemons look.
const DEFAULT_ROOT: &str = "/run/containerd/runc";
/// For a program that mounts a filesystem: it starts the filesystem's own process and ends.
const MOUNT_LIMIT: Duration = Duration::from_secs(60);
/// Where the runtime writes init's pid, in the bundle.
pub(super) const PID_FILE: &str = "init.pid";

/// Runs the creation to its end: given, parked, or undone.
pub(super) async fn work(
    shared: &Arc<Shared>,
    request: CreateRequest,
    job: Job<u32>,
    admit: impl Future<Output = Result<Option<PodContext>>>,
) {
    let id = request.id.clone();
    let made = attempt(shared, request, &job, admit).await;
    let Err((container, error)) = made else {
        return;
    };
    // A missing file is no missing container, and our own bounds are no impatience of the caller's.
    let kind = match error.kind() {
        Kind::NotFound => Kind::Invalid,
        Kind::Deadline => Kind::Other,
        kind => kind,
    };
    let error = error.as_kind(kind).within(format!("create container {id}"));
    let (step, took) = job.enter("roll-back");
    tracing::warn!(id, step, took_ms = millis(took), %error, "creation of a container failed; rolling back");
    job.fail(kind, error.to_string());
    match container {
        Some(container) => abandon(shared, &container).await,
        None => drop(shared.creations().remove(&id)),
    }
    job.end();
}

/// A failure, and what has to be undone.
type Failed = (Option<Arc<Container>>, Error);

async fn attempt(
    shared: &Arc<Shared>,
    mut request: CreateRequest,
    job: &Job<u32>,
    admit: impl Future<Output = Result<Option<PodContext>>>,
) -> std::result::Result<(), Failed> {
    let nothing = |error| (None, error);
    enter(job, &request.id, "admit");
    request.pod = admit.await.map_err(nothing)?;
    let layout = Layout::detect().map_err(nothing)?;
    let plan = Plan::make(shared, &layout, &request).map_err(nothing)?;
    let container = Arc::new(Container::new(
        plan.fixed,
        job.clone(),
        Inner::new(plan.record),
    ));
    // Never waits, the container is nobody's yet: who looked whether the pod takes containers must not be overtaken by
    // its stop before the container is in the table.
    let _turn = container.verbs.try_lock().map_err(|_| nothing(taken()))?;
    shared.insert(&container).map_err(nothing)?;
    if job.is_cancelled() {
        container.cancel();
    }
    match build(shared, &layout, &container, &request, plan.spec).await {
        Ok(pid) => {
            parking::settle(shared, &container, pid);
            Ok(())
        }
        Err(error) => Err((Some(Arc::clone(&container)), error)),
    }
}

/// One line for every stage that ends.
fn enter(job: &Job<u32>, id: &str, stage: &'static str) {
    let (step, took) = job.enter(stage);
    let took_us = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
    tracing::info!(id, step, took_us, next = stage, "stage ended");
}

/// What is known before anything was done.
struct Plan {
    fixed: Fixed,
    record: ContainerRecord,
    /// To be written back, when something was added.
    spec: Option<Spec>,
}

impl Plan {
    fn make(shared: &Shared, layout: &Layout, request: &CreateRequest) -> Result<Self> {
        let mut spec = Spec::read(&request.bundle)?;
        let joined = request
            .pod
            .as_ref()
            .is_some_and(|pod| pod_context::apply(&mut spec, pod));
        // A Go runtime raises its own soft limit to the hard one and hands that on where the spec names none.
        let (soft, hard) = sys::process::nofile_of_children();
        let changed = spec.add_missing_rlimit("RLIMIT_NOFILE", soft, hard) || joined;
        let runtime = runtime(shared, layout, &request.options)?;
        let state = runtime.state_dir(&request.id);
        if state.exists() {
            // Whose ever it is: undoing our failure would end somebody else's container.
            return Err(Error::new(
                Kind::Exists,
                format!(
                    "{} is there already; delete that container first",
                    state.display()
                ),
            ));
        }
        let fixed = Fixed {
            id: request.id.clone(),
            bundle: request.bundle.clone(),
            own_pid_namespace: spec.has_own_pid_namespace(),
            io_owner: (request.options.io_uid, request.options.io_gid),
            stop_signal: kill::stop_signal(&spec.annotations()),
            rootfs: request.rootfs.clone(),
            no_pivot_root: request.options.no_pivot_root,
            criu_work: request.options.criu_work.clone(),
            runtime,
        };
        let record = ContainerRecord {
            id: request.id.clone(),
            bundle: request.bundle.clone(),
            runtime: fixed.runtime.binary.clone(),
            root: fixed.runtime.root.clone(),
            systemd_cgroup: fixed.runtime.systemd_cgroup,
            init: None,
            cgroup: expected_cgroup(layout, &spec),
            rootfs_mounted: !request.rootfs.is_empty(),
            status: Status::Creating,
            created_at: unix_nanos(SystemTime::now()),
            parked_at: None,
            started_at: None,
            exit: None,
            oom_kills: 0,
            oom_limit: None,
            stdin: request.stdin.clone(),
            stdout: request.stdout.clone(),
            stderr: request.stderr.clone(),
            terminal: request.terminal,
            logger: None,
        };
        Ok(Self {
            fixed,
            record,
            spec: changed.then_some(spec),
        })
    }
}

fn runtime(shared: &Shared, layout: &Layout, options: &RuntimeOptions) -> Result<Runtime> {
    let binary = oci::choose(
        &options.binary,
        options.prefer_crun,
        &shared.config.runtime,
        layout.is_hybrid(),
    )?;
    let root = if options.root.is_empty() {
        DEFAULT_ROOT
    } else {
        &options.root
    };
    if !Path::new(root).is_absolute() {
        return Err(Error::new(
            Kind::Invalid,
            format!("check option root {root:?}: give an absolute path"),
        ));
    }
    Ok(Runtime {
        binary,
        root: Path::new(root).join(&shared.namespace),
        systemd_cgroup: options.systemd_cgroup,
    })
}

/// Where the container's processes will be, so that they can be found when the create is cut short. A group that has
/// processes now is somebody else's, and none of ours to kill.
fn expected_cgroup(layout: &Layout, spec: &Spec) -> Option<String> {
    let group = Group::from_spec(layout, spec.cgroups_path()?).ok()?;
    group.pids().is_empty().then(|| group.path().to_owned())
}

/// The side effects, in order.
async fn build(
    shared: &Arc<Shared>,
    layout: &Layout,
    container: &Arc<Container>,
    request: &CreateRequest,
    spec: Option<Spec>,
) -> Result<u32> {
    let (job, id) = (&container.job, &request.id);
    enter(job, id, "record");
    failpoint::reach("container.record.before").await?;
    shared.save(container)?;
    failpoint::reach("container.record.after").await?;
    if let Some(spec) = spec {
        join::also_known_as(shared, request, &spec.to_bytes()?);
        spec.write(&request.bundle)?;
    }
    enter(job, id, "rootfs");
    mount_rootfs(shared, request).await?;
    failpoint::reach("rootfs.mount.after").await?;
    enter(job, id, "stdio");
    let streams = container.inner().init.streams.clone();
    let opening = shared.open_streams(container, streams, true);
    let mut io = container.unless_cancelled(opening).await?;
    container.inner().record.logger = io.logger();
    if !request.checkpoint.is_empty() {
        return wait_for_start(shared, container, &request.checkpoint, io).await;
    }
    enter(job, id, "runtime-create");
    let child = run(shared, container, request, &mut io).await?;
    failpoint::child("container.created.process", child.pid());
    failpoint::reach("runtime-create.after").await?;
    let group = Group::of_process(layout, child.pid()).ok();
    {
        let mut inner = container.inner();
        inner.record.init = Some(child.identity);
        inner.record.status = Status::Created;
        if let Some(group) = &group {
            inner.record.cgroup = Some(group.path().to_owned());
        }
        inner.group = group;
    }
    shared.save(container)?;
    // Cancelled while the runtime ended: whoever did it waits for the undo.
    if container.is_cancelled() {
        return Err(container.is_being_stopped());
    }
    let pid = child.pid().unsigned_abs();
    container.step(|inner| inner.init.connect(child, io));
    Ok(pid)
}

/// A container from a checkpoint is restored when it is started, and has no process before.
async fn wait_for_start(
    shared: &Shared,
    container: &Container,
    checkpoint: &str,
    io: Io,
) -> Result<u32> {
    oci::check_criu(&shared.reaper).await?;
    let image = PathBuf::from(checkpoint);
    if !image.is_absolute() || !image.is_dir() {
        let text = format!("restore from {checkpoint:?}: give the absolute path of a directory");
        return Err(Error::new(Kind::Invalid, text));
    }
    {
        let mut inner = container.inner();
        inner.record.status = Status::Created;
        inner.restoring = Some(Restoring { image, io });
    }
    shared.save(container)?;
    Ok(0)
}

/// Mounts on the blocking pool: a slow disk must not hold up the other containers.
async fn mount_rootfs(shared: &Shared, request: &CreateRequest) -> Result<()> {
    if request.rootfs.is_empty() {
        return Ok(());
    }
    let (mounts, root) = (request.rootfs.clone(), request.bundle.join("rootfs"));
    // Where the undo of a creation that was cut short finds what is left mounted.
    let scratch = request.bundle.join(oci::SCRATCH);
    let (reaper, runtime) = (shared.reaper.clone(), Handle::current());
    let work = move || {
        match fs::DirBuilder::new().mode(0o711).create(&root) {
            Err(e) if e.kind() != std::io::ErrorKind::AlreadyExists => Err(e),
            _ => Ok(()),
        }
        .context(|| format!("make {}", root.display()))?;
        let run = |program: &str, args| runtime.block_on(mount_by(&reaper, program, args));
        mount::mount_all(&mounts, &root, &scratch, &run)
    };
    tokio::task::spawn_blocking(work)
        .await
        .map_err(|e| Error::caused(Kind::Other, "mount the root filesystem", e))?
}

/// Runs a program that mounts. The process of the filesystem, which it leaves, has to outlive it and us; but a program
/// that has not ended must not go on after us, and mount what nobody unmounts.
async fn mount_by(reaper: &Reaper, program: &str, args: Vec<OsString>) -> Result<()> {
    let mut helper = Helper::new(program, MOUNT_LIMIT);
    helper.args = args;
    helper.env = vec![("PATH".into(), oci::search_path())];
    helper.guard = true;
    let output = helper.run(reaper).await.map_err(|e| match e.kind() {
        Kind::NotFound => e
            .as_kind(Kind::Unsupported)
            .within("libfuse's programs are needed"),
        _ => e,
    })?;
    if output.exit.code == 0 && !output.timed_out {
        return Ok(());
    }
    let said = [output.stdout, output.stderr].concat();
    let said = String::from_utf8_lossy(&said).trim().to_owned();
    let how = match output.timed_out {
        true => format!("no end within {} s, killed", MOUNT_LIMIT.as_secs()),
        false => format!("exit code {}", output.exit.code),
    };
    Err(Error::new(
        Kind::Other,
        format!("run {program}: {how}: {said}"),
    ))
}

/// The runtime's `create`, unless it is cancelled; init becomes our child.
async fn run(
    shared: &Shared,
    container: &Container,
    request: &CreateRequest,
    io: &mut Io,
) -> Result<Child> {
    let fixed = &container.fixed;
    let pid_file = fixed.bundle.join(PID_FILE);
    remove_stale(&pid_file)?;
    failpoint::reach("runtime-create.before").await?;
    // From before the fork: init may end before its pid is read.
    let held = shared.reaper.hold_unknown();
    let console = io.console_socket();
    let create = oci::Create {
        bundle: &fixed.bundle,
        pid_file: &pid_file,
        no_pivot_root: request.options.no_pivot_root,
        no_new_keyring: request.options.no_new_keyring,
        console: console.as_deref(),
        limit: shared.config.create_timeout(&fixed.runtime.binary),
        stdio: io.take_child_stdio()?,
    };
    container
        .unless_cancelled(fixed.runtime.create(&shared.reaper, &fixed.id, create))
        .await?;
    let child = shared.reaper.adopt(read_pid(&pid_file)?);
    drop(held);
    container.unless_cancelled(io.take_terminal()).await?;
    child
}

/// A create that failed leaves nothing; what cannot be undone now stays on record for `delete`.
pub(super) async fn abandon(shared: &Shared, container: &Container) {
    failpoint::pass("container.abandon.before");
    let record = container.inner().record.clone();
    match undo::undo(&shared.config, &shared.reaper, &record).await {
        Ok(()) => {
            if let Err(error) = shared.forget(container) {
                tracing::warn!(id = record.id, %error, "record of a failed create not removed");
            }
        }
        Err(error) => {
            tracing::warn!(id = record.id, %error, "a create that was undone left something")
        }
    }
    let _ = fs::remove_file(container.fixed.bundle.join(PID_FILE));
    shared.remove(container);
}

/// A pid file of an earlier try would name a process that is not ours.
pub(super) fn remove_stale(path: &PathBuf) -> Result<()> {
    match fs::remove_file(path) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
            Err(Error::io(format!("remove {}", path.display()), e))
        }
        _ => Ok(()),
    }
}

/// The pid an OCI runtime wrote.
pub(super) fn read_pid(path: &Path) -> Result<i32> {
    let what = || format!("read {}", path.display());
    let text = fs::read_to_string(path).context(what)?;
    text.trim()
        .parse()
        .ok()
        .filter(|pid| *pid > 0)
        .ok_or_else(|| Error::new(Kind::Other, format!("{}: no pid in it", what())))
}

fn taken() -> Error {
    Error::new(Kind::Exists, "its queue is taken; try again")
}
