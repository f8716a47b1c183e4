//! One container: its bundle, Task.Create and Task.Start.
//!
//! Owns what is asked for and where its log is. Promises that a container which does not start leaves no
//! task and no bundle. The log stays: it may hold why.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::sys::resource::{Resource, getrlimit};
use protobuf::well_known_types::any::Any;
use serde_json::{Value, json};

use crate::client::{self, Client};
use crate::container::Status;
use crate::error::{Context, Error, Kind, Result};
use crate::failpoint;
use crate::pod::record::Record;
use crate::proto::any;
use crate::proto::runtimeoptions::runtimeoptions::Options;
use crate::proto::task_v3::shim::{CreateTaskRequest, DeleteRequest, StartRequest};

use super::attach::Attach;
use super::bundle::{self, Found, Writing};
use super::failure::Failure;
use super::host::{Host, private_dir};
use super::patience::Patience;
use super::spec::{self, HostNamespaces};
use super::supervisor::{self, label};
use super::workload::Workload;
use super::{output, select};

/// The answer needs a moment more than the OCI runtime's own bound.
const MARGIN: Duration = Duration::from_secs(10);

/// Task.Start: the runtime has a minute.
const START_LIMIT: Duration = Duration::from_secs(120);

/// Delete of a task that has ended, or never started.
const DELETE_LIMIT: Duration = Duration::from_secs(60);

/// Open files a workload may ask for, where our own limit allows that.
const FILES: u64 = 1_048_576;

/// Where a container's output is kept.
pub fn log_path(dir: &Path, id: &str) -> PathBuf {
    dir.join("logs").join(format!("{id}.log"))
}

/// A container that is to run in a pod.
#[derive(Debug)]
pub struct Wish<'a> {
    /// The pod it is for.
    pub pod: &'a Record,
    /// Its id.
    pub id: &'a str,
    /// What it is to do.
    pub work: &'a Workload,
    /// Who follows it.
    pub attach: Option<&'a Attach>,
    /// How long to wait for it; `None`: as long as the OCI runtime may take.
    pub timeout: Option<Duration>,
    /// The `--name` by which the same command takes what it began.
    pub again: &'a str,
}

/// Why a container does not run.
#[derive(Debug)]
pub struct NotStarted {
    /// What to say.
    pub failure: Failure,
    /// It is another command's, or its creation goes on: nothing of it may be undone.
    pub stays: bool,
}

impl From<NotStarted> for Failure {
    fn from(not: NotStarted) -> Self {
        not.failure
    }
}

impl From<Error> for NotStarted {
    fn from(error: Error) -> Self {
        Self::undone(error.into())
    }
}

impl NotStarted {
    fn undone(failure: Failure) -> Self {
        Self {
            failure,
            stays: false,
        }
    }

    fn stays(error: Error) -> Self {
        Self {
            failure: error.into(),
            stays: true,
        }
    }
}

/// Creates and starts the container. One that the same command began before is joined, or its result taken.
pub async fn start(host: &Host, client: &Client, wish: &Wish<'_>) -> Result<(), NotStarted> {
    let (pod, id) = (wish.pod, wish.id);
    let dir = host.pod_dir(&pod.id);
    let place = Place {
        bundle: dir.join("bundles").join(id),
        log: log_path(&dir, id),
    };
    let config = config(host, pod, id, wish.work);
    let writing = begin(host, wish, &place, &config)?;
    let joins = writing.is_none();
    let bound = host.config.longest_create_timeout() + MARGIN;
    let patience = match joins {
        true => Patience::joining(wish.timeout.unwrap_or(bound)),
        false => Patience::first(wish.timeout.unwrap_or(bound)),
    };
    let command = wish.work.args.first().map_or("", String::as_str);
    let root = host.config.oci_root();
    let created = create(client, &root, wish, &place, patience).await;
    drop(writing);
    if let Err(e) = created {
        let detached = wish.attach.is_none();
        return Err(match e.kind() {
            Kind::Deadline if detached => NotStarted::stays(go_on(e, wish.again)),
            // Made by another command meanwhile, or going just now, which is nobody's fault.
            Kind::Exists | Kind::Busy if joins => NotStarted::stays(e),
            _ => {
                give_up(client, id, &place.bundle).await;
                NotStarted::undone(Failure::of_start(command, e))
            }
        });
    }
    if let Some(attach) = wish.attach {
        attach.resize(client, id, "").await;
    }
    match call_start(client, id, "").await {
        Ok(()) => Ok(()),
        // Whoever else asked for it has started it a moment before.
        Err(e) if joins && e.kind() == Kind::State && runs(host, wish) => match wish.attach {
            None => Ok(()),
            Some(_) => Err(NotStarted::stays(e)),
        },
        Err(e) => {
            give_up(client, id, &place.bundle).await;
            Err(NotStarted::undone(Failure::of_start(command, e)))
        }
    }
}

/// Where a container's files are.
struct Place {
    bundle: PathBuf,
    log: PathBuf,
}

/// The bundle, just written. None: the same command has written it before, and what it began is to be joined.
fn begin(
    host: &Host,
    wish: &Wish<'_>,
    place: &Place,
    config: &Value,
) -> Result<Option<Writing>, NotStarted> {
    let (pod, id) = (wish.pod, wish.id);
    let (name, label) = (select::container_name(&pod.id, id), label(pod));
    loop {
        match bundle::find(status(host, wish), &place.bundle, config) {
            Found::Nothing => {}
            Found::Ours => {
                output::complain(format!("container {name} is being made already: joining"));
                return Ok(None);
            }
            Found::Other => {
                return Err(NotStarted::stays(Error::new(
                    Kind::Exists,
                    format!(
                        "add container {name:?} to pod {label}: it has one with this name; choose another"
                    ),
                )));
            }
        }
        failpoint::hit("cli.bundle.before")?;
        if let Some(logs) = place.log.parent() {
            private_dir(logs)?;
        }
        private_dir(&host.config.oci_root())?;
        if let Some(writing) = bundle::write(&place.bundle, config)? {
            if let Err(e) = failpoint::hit("cli.bundle.after") {
                let _ = fs::remove_dir_all(&place.bundle);
                return Err(e.into());
            }
            return Ok(Some(writing));
        }
    }
}

fn go_on(error: Error, name: &str) -> Error {
    let next = format!("run the same command with `--name {name}` to take it");
    Error::new(Kind::Deadline, format!("{error}; {next}"))
}

/// As the supervisor has it on record now.
fn status(host: &Host, wish: &Wish<'_>) -> Option<Status> {
    let record = supervisor::reread(host, &wish.pod.id).ok()?;
    record.containers.get(wish.id).map(|c| c.status)
}

fn runs(host: &Host, wish: &Wish<'_>) -> bool {
    status(host, wish).is_some_and(bundle::has_begun)
}

/// Never there, or never used: a refusal here changes nothing about the failure that is reported.
async fn give_up(client: &Client, id: &str, bundle: &Path) {
    let _ = delete(client, id, "").await;
    let _ = fs::remove_dir_all(bundle);
}

/// Task.Delete of a container (`exec_id` empty) or of an exec.
pub async fn delete(client: &Client, id: &str, exec_id: &str) -> Result<()> {
    let request = DeleteRequest {
        id: id.to_owned(),
        exec_id: exec_id.to_owned(),
        ..Default::default()
    };
    let answer = client
        .task()
        .delete(client::context(Some(DELETE_LIMIT)), &request)
        .await;
    answer
        .map(drop)
        .map_err(|e| client::from_ttrpc(&format!("delete container {id}"), e))
}

/// Task.Start of a container (`exec_id` empty) or of an exec, and in its failure the exit code that it means.
pub async fn start_process(
    client: &Client,
    id: &str,
    exec_id: &str,
    command: &str,
) -> Result<(), Failure> {
    let started = call_start(client, id, exec_id).await;
    started.map_err(|e| Failure::of_start(command, e))
}

async fn call_start(client: &Client, id: &str, exec_id: &str) -> Result<()> {
    let request = StartRequest {
        id: id.to_owned(),
        exec_id: exec_id.to_owned(),
        ..Default::default()
    };
    let answer = client
        .task()
        .start(client::context(Some(START_LIMIT)), &request)
        .await;
    answer
        .map(drop)
        .map_err(|e| client::from_ttrpc("start the workload", e))
}

/// Removes a container that has ended: task, bundle, log.
pub async fn forget(host: &Host, client: &Client, pod: &str, id: &str) -> Result<()> {
    match delete(client, id, "").await {
        Err(e) if !e.is_gone() => return Err(e),
        _ => {}
    }
    let dir = host.pod_dir(pod);
    let bundle = dir.join("bundles").join(id);
    match fs::remove_dir_all(&bundle) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
            return Err(Error::io(format!("remove {}", bundle.display()), e));
        }
        _ => {}
    }
    for log in log_files(&dir, id) {
        fs::remove_file(&log).context(|| format!("remove {}", log.display()))?;
    }
    Ok(())
}

/// The log files of a container that are there, oldest first: the one that was rotated away comes before the present one.
pub fn log_files(dir: &Path, id: &str) -> Vec<PathBuf> {
    let log = log_path(dir, id);
    let rotated = PathBuf::from(format!("{}.1", log.display()));
    [rotated, log].into_iter().filter(|p| p.is_file()).collect()
}

/// Task.Create, for as long as we wait.
async fn create(
    client: &Client,
    root: &Path,
    wish: &Wish<'_>,
    place: &Place,
    patience: Patience,
) -> Result<()> {
    let options = runtime_options(root)?;
    let (attach, terminal) = (wish.attach, wish.work.tty);
    let streams = log_uri(&place.log, attach);
    let request = CreateTaskRequest {
        id: wish.id.to_owned(),
        bundle: place.bundle.display().to_string(),
        terminal,
        stdin: attach.map(Attach::stdin_path).unwrap_or_default(),
        stdout: streams.clone(),
        // A terminal is one stream.
        stderr: if terminal { String::new() } else { streams },
        options: Some(options).into(),
        ..Default::default()
    };
    let call = async |left| {
        let answer = client
            .task()
            .create(client::context(Some(left)), &request)
            .await;
        answer
            .map(drop)
            .map_err(|e| client::from_ttrpc("start the workload", e))
    };
    patience.ask(call).await
}

/// Ours, as TOML: only there can be said that the configured runtime is wanted, else crun where it runs.
fn runtime_options(root: &Path) -> Result<Any> {
    const WHAT: &str = "encode the runtime's options";
    let table = json!({ "PreferCrun": true, "Root": root });
    let body = basic_toml::to_string(&table).map_err(|e| Error::caused(Kind::Invalid, WHAT, e))?;
    let options = Options {
        config_body: body.into_bytes(),
        ..Default::default()
    };
    any::pack(any::RUNTIME_OPTIONS, &options).map_err(|e| Error::caused(Kind::Invalid, WHAT, e))
}

/// The log always; whoever is attached gets a copy through fifos.
fn log_uri(log: &Path, attach: Option<&Attach>) -> String {
    let log = encoded(&log.display().to_string());
    match attach {
        None => format!("podvisor-log://{log}"),
        Some(a) => {
            let out = encoded(&a.stdout_path());
            let uri = format!("podvisor-log://{log}?attach-stdout={out}");
            match a.stderr_path().as_str() {
                "" => uri,
                err => format!("{uri}&attach-stderr={}", encoded(err)),
            }
        }
    }
}

/// %-encodes what has a meaning in an URI; the roots of our paths are the configuration's and may hold anything.
fn encoded(path: &str) -> String {
    let plain = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'/' | b'-' | b'_' | b'.' | b'~');
    path.bytes()
        .map(|b| {
            if plain(b) {
                char::from(b).to_string()
            } else {
                format!("%{b:02X}")
            }
        })
        .collect()
}

fn config(host: &Host, pod: &Record, id: &str, work: &Workload) -> Value {
    // A supervisor that did not say where the pod's cgroup is gets the place the configuration names.
    let parent = pod.cgroup.clone().unwrap_or_else(|| {
        format!(
            "{}/{}+{}",
            host.config.cgroup_parent.trim_end_matches('/'),
            pod.namespace,
            pod.id
        )
    });
    spec::config(&spec::Wish {
        work,
        hostname: &pod.hostname,
        sandbox: &pod.id,
        cgroups_path: &format!("{}/{id}", parent.trim_end_matches('/')),
        host: HostNamespaces {
            network: pod.network.host,
            ipc: pod.has_host_ipc(),
            pid: pod.has_host_pids(),
        },
        files: getrlimit(Resource::RLIMIT_NOFILE).map_or(FILES, |(_, hard)| hard.min(FILES)),
        cgroup_v2: Path::new("/sys/fs/cgroup/cgroup.controllers").exists(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_configured_runtime_is_asked_for_and_odd_paths_are_kept() {
        for root in ["/run/podvisor/oci", "/a \"b\"\\/c"] {
            let sent = runtime_options(Path::new(root)).unwrap();
            let read = crate::spec::options::Options::decode(&sent).unwrap();
            assert!(read.prefer_crun && read.binary.is_empty());
            assert_eq!(read.root, root);
        }
    }

    #[test]
    fn the_log_is_kept_with_and_without_an_audience() {
        assert_eq!(
            log_uri(Path::new("/r/p/logs/c.log"), None),
            "podvisor-log:///r/p/logs/c.log"
        );
        assert_eq!(
            log_uri(Path::new("/a b/c?&%.log"), None),
            "podvisor-log:///a%20b/c%3F%26%25.log"
        );
    }
}
