//! Create: from a bundle to an init that waits to be started.
//!
//! The record is saved before the first side effect and again as soon as init is known; whatever goes wrong later, the
//! record is all that undoing it needs.

use std::fs;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use super::record::{ContainerRecord, Status};
use super::state::Inner;
use super::table::{Container, Fixed, Shared};
use super::{CreateRequest, RuntimeOptions, exit, kill, pod_context, undo};
use crate::cgroup::{Group, Layout};
use crate::clock::unix_nanos;
use crate::error::{Context, Error, Kind, Result};
use crate::failpoint;
use crate::mount;
use crate::oci::{self, Runtime};
use crate::process::Child;
use crate::spec::Spec;
use crate::stdio::{self, Io};
use crate::sys;

/// Parent of the runtimes' state directories when the options name none: where daemons look.
const DEFAULT_ROOT: &str = "/run/containerd/runc";
/// Where the runtime writes init's pid, in the bundle.
const PID_FILE: &str = "init.pid";

/// See [`super::Containers::create`].
pub(super) async fn create(shared: &Arc<Shared>, request: CreateRequest) -> Result<u32> {
    let id = request.id.clone();
    attempt(shared, request).await.map_err(|e| {
        // A missing file is no missing container.
        let kind = if e.is_gone() { Kind::Invalid } else { e.kind() };
        e.as_kind(kind).within(format!("create container {id}"))
    })
}

async fn attempt(shared: &Arc<Shared>, request: CreateRequest) -> Result<u32> {
    crate::id::check("container id", &request.id)?;
    shared.is_free(&request.id)?;
    if request.terminal {
        return Err(unsupported("terminals are not built yet"));
    }
    if !request.checkpoint.is_empty() {
        return Err(unsupported("restoring from a checkpoint is not built yet"));
    }
    let layout = Layout::detect()?;
    let plan = Plan::make(shared, &layout, &request)?;
    let container = Arc::new(Container::new(plan.fixed, Inner::new(plan.record)));
    // Never waits, the container is nobody's yet: who looked whether the pod takes containers must not be overtaken by
    // its stop before the container is in the table.
    let _turn = container.verbs.try_lock().map_err(|_| taken())?;
    shared.insert(&container)?;
    match build(shared, &layout, &container, &request, plan.spec).await {
        Ok(pid) => Ok(pid),
        Err(error) => {
            abandon(shared, &container).await;
            Err(error)
        }
    }
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
            started_at: None,
            exit: None,
            stdin: request.stdin.clone(),
            stdout: request.stdout.clone(),
            stderr: request.stderr.clone(),
            terminal: request.terminal,
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
    failpoint::reach("container.record.before").await?;
    shared.save(container)?;
    failpoint::reach("container.record.after").await?;
    if let Some(spec) = spec {
        spec.write(&request.bundle)?;
    }
    mount_rootfs(request).await?;
    failpoint::reach("rootfs.mount.after").await?;
    let mut io = Io::open(&stdio::Request {
        stdin: request.stdin.clone(),
        stdout: request.stdout.clone(),
        stderr: request.stderr.clone(),
        terminal: false,
        uid: request.options.io_uid,
        gid: request.options.io_gid,
        direct: true,
    })
    .await?;
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
    let pid = child.pid().unsigned_abs();
    container.step(|inner| {
        inner.init.connect(child.clone(), io);
        inner.creating = false;
        let bundle = request.bundle.to_string_lossy();
        shared
            .announcer(container)
            .created(&bundle, &request.rootfs, &inner.init.streams, pid);
    });
    exit::watch_init(shared, container, child);
    Ok(pid)
}

/// Mounts on the blocking pool: a slow disk must not hold up the other containers.
async fn mount_rootfs(request: &CreateRequest) -> Result<()> {
    if request.rootfs.is_empty() {
        return Ok(());
    }
    let (mounts, root) = (request.rootfs.clone(), request.bundle.join("rootfs"));
    let work = move || {
        match fs::DirBuilder::new().mode(0o711).create(&root) {
            Err(e) if e.kind() != std::io::ErrorKind::AlreadyExists => Err(e),
            _ => Ok(()),
        }
        .context(|| format!("make {}", root.display()))?;
        mount::mount_all(&mounts, &root)
    };
    tokio::task::spawn_blocking(work)
        .await
        .map_err(|e| Error::caused(Kind::Other, "mount the root filesystem", e))?
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
    let create = oci::Create {
        bundle: &fixed.bundle,
        pid_file: &pid_file,
        no_pivot_root: request.options.no_pivot_root,
        no_new_keyring: request.options.no_new_keyring,
        stdio: io.take_child_stdio()?,
    };
    container
        .unless_cancelled(fixed.runtime.create(&shared.reaper, &fixed.id, create))
        .await?;
    let child = shared.reaper.adopt(read_pid(&pid_file)?);
    drop(held);
    child
}

/// A create that failed leaves nothing; what cannot be undone now stays on record for `delete`.
async fn abandon(shared: &Shared, container: &Container) {
    failpoint::pass("container.abandon.before");
    let record = container.inner().record.clone();
    match undo::undo(&shared.config, &shared.reaper, &record).await {
        Ok(()) => {
            if let Err(error) = shared.forget(container) {
                tracing::warn!(id = record.id, %error, "record of a failed create not removed");
            }
        }
        Err(error) => tracing::warn!(id = record.id, %error, "a failed create left something"),
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

fn unsupported(why: &str) -> Error {
    Error::new(Kind::Unsupported, why)
}
