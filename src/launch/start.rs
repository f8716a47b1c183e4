//! `start`: one supervisor per group, and its address for the daemon.
//!
//! The order: input, group, socket, fork, cgroup and OOM score, the supervisor's word that it serves, `address` file,
//! answer. Until the answer is out the supervisor holds a pipe from here: when this process is killed, it leaves.
//! Must never start a thread before the fork, and never write to standard output before everything else is done.

use std::collections::BTreeMap;
use std::env;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use nix::fcntl::OFlag;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::unistd::{getppid, pipe2};
use serde::Deserialize;

use crate::cgroup::{Group, Layout};
use crate::config::Config;
use crate::error::{Context, Error, Kind, Result};
use crate::failpoint;
use crate::launch::bootstrap::{self, Input, Params};
use crate::launch::dialect::{self, Dialect, Signs};
use crate::launch::flags::Flags;
use crate::launch::socket::{self, Claim};
use crate::launch::{answer, daemon, joined};
use crate::spec::options::Options;
use crate::sys;

/// Annotations that name the group, first wins: the shim's own word, then the pod.
const GROUP_ANNOTATIONS: [&str; 2] = [
    "io.containerd.runc.v2.group",
    "io.kubernetes.cri.sandbox-id",
];

/// How long the supervisor may take to say that it serves.
const READY_LIMIT: Duration = Duration::from_secs(30);

/// Largest OOM score adjustment.
const OOM_MAX: i32 = 1000;

/// Launches or joins, and answers.
pub fn run(flags: &Flags) -> Result<ExitCode> {
    let config = Config::load()?;
    let bundle = env::current_dir().context(|| "find the bundle: start runs in it")?;
    let input = bootstrap::parse(&bootstrap::read_stdin()?, &flags.id, &flags.namespace)?;
    let options = Options::of_daemon(input.options.as_ref(), &config.options)?;
    let group = group(&bundle, &flags.id)?;

    let params = input.params.clone().unwrap_or_default();
    let dir = params.socket_dir.as_deref();
    socket::prepare_dir(&config.runtime_root)?;
    let path = socket::path(&config, dir, &flags.address, &flags.namespace, &group);
    let address = address_of(&path)?;
    let dialect = choose_dialect(&config, flags, &input);
    let reply = bootstrap::answer(dialect, &address, bootstrap::TASK_VERSION)?;

    failpoint::hit("start.claim.before")?;
    let listener = match socket::claim(&path)? {
        Claim::Ours(listener) => listener,
        Claim::Joined => {
            let reply = bootstrap::answer(dialect, &address, joined::served(dialect, &address))?;
            write_address(&bundle, &address)?;
            answer(&reply)?;
            return Ok(ExitCode::SUCCESS);
        }
    };
    let unlink = UnlinkOnDrop(Some(path.clone()));
    failpoint::hit("start.claim.after")?;
    if env::var_os("SCHED_CORE").is_some_and(|v| !v.is_empty()) {
        // The child inherits the cookie; the daemon gave us a process group of our own.
        sys::sched_core::create()
            .context(|| "give the pod a core scheduling cookie (SCHED_CORE is set)")?;
    }
    let (alive_read, alive_write) = pipe2(OFlag::O_CLOEXEC).context(|| "make a pipe")?;
    let (ready_read, ready_write) = pipe2(OFlag::O_CLOEXEC).context(|| "make a pipe")?;
    let launch = daemon::Launch {
        namespace: flags.namespace.clone(),
        id: flags.id.clone(),
        group,
        bundle: bundle.clone(),
        level: crate::log::level(flags.debug, input.params.as_ref().map(|p| p.log_level)),
        listener,
        socket: path,
        ttrpc_address: ttrpc_address(flags, &params),
        watchdog: alive_read,
        ready: ready_write,
        oom_score_adj: child_oom_score(),
        config,
    };
    failpoint::hit("start.fork.before")?;
    // One thread: nothing here has started another.
    let child = match sys::fork::fork().context(|| "fork the supervisor")? {
        sys::fork::Fork::Child => {
            unlink.disarm();
            drop((alive_write, ready_read));
            return Ok(daemon::run(launch));
        }
        sys::fork::Fork::Parent(pid) => KillOnDrop(Some(pid)),
    };
    // Its ends and the listener are the child's alone now.
    drop(launch);
    failpoint::hit("start.fork.after")?;

    if !options.shim_cgroup.is_empty() {
        join_cgroup(&options.shim_cgroup, child.pid())?;
    }
    wait_ready(ready_read)?;
    failpoint::hit("start.address.before")?;
    if let Some(dir) = dir {
        leave_link(&bundle, dir)?;
    }
    write_address(&bundle, &address)?;
    failpoint::hit("start.answer.before")?;
    answer(&reply)?;
    failpoint::hit("start.answer.after")?;
    // From here on the supervisor stays, whatever happens to this process.
    File::from(alive_write)
        .write_all(b"1")
        .context(|| "tell the supervisor that its address is known")?;
    failpoint::pass("start.word.after");
    child.disarm();
    unlink.disarm();
    Ok(ExitCode::SUCCESS)
}

/// The group id: an annotation of `config.json`, or the instance's own id. A bundle without `config.json` is a
/// sandbox's, made by the daemon's shim sandboxer.
fn group(bundle: &Path, id: &str) -> Result<String> {
    #[derive(Deserialize)]
    struct Head {
        #[serde(default)]
        annotations: Option<BTreeMap<String, String>>,
    }
    let path = bundle.join("config.json");
    let bytes = match fs::read(&path) {
        Ok(bytes) => bytes,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(id.to_owned()),
        Err(e) => return Err(Error::io(format!("read {}", path.display()), e)),
    };
    let head: Head = serde_json::from_slice(&bytes).map_err(|e| {
        Error::caused(
            Kind::Invalid,
            format!("read {}: it is cut off or damaged", path.display()),
            e,
        )
    })?;
    let annotations = head.annotations.unwrap_or_default();
    let named = GROUP_ANNOTATIONS
        .iter()
        .find_map(|key| annotations.get(*key))
        .filter(|group| !group.is_empty());
    match named {
        Some(group) => crate::id::check("group id", group).map(str::to_owned),
        None => Ok(id.to_owned()),
    }
}

fn choose_dialect(config: &Config, flags: &Flags, input: &Input) -> Dialect {
    let max = env::var("MAX_SHIM_VERSION").ok();
    let signs = Signs {
        params: input.params.is_some(),
        address: !flags.address.is_empty(),
        max_shim_version: max.as_deref(),
    };
    dialect::choose(signs, || {
        dialect::daemon_major(&config.runtime_root, Path::new(&flags.publish_binary))
    })
}

/// `unix://<path>`. A path that is no UTF-8 cannot be told to anybody.
fn address_of(path: &Path) -> Result<String> {
    match path.to_str() {
        Some(text) => Ok(format!("unix://{text}")),
        None => Err(Error::new(
            Kind::Invalid,
            format!("use socket path {}: it is not UTF-8", path.display()),
        )),
    }
}

/// Where events go: nowhere without a daemon, else what it says, else where it is by default.
fn ttrpc_address(flags: &Flags, params: &Params) -> Option<String> {
    if flags.address.is_empty() && params.grpc_address.is_none() {
        return None;
    }
    let told = params
        .ttrpc_address
        .clone()
        .or_else(|| env::var("TTRPC_ADDRESS").ok());
    told.filter(|address| !address.is_empty()).or_else(|| {
        let grpc = params.grpc_address.as_deref().unwrap_or(&flags.address);
        Some(format!("{grpc}.ttrpc"))
    })
}

/// One above the daemon's own, so that under memory pressure the daemon outlives its supervisors.
fn child_oom_score() -> Option<i32> {
    let text = fs::read_to_string(format!("/proc/{}/oom_score_adj", getppid())).ok()?;
    let own: i32 = text.trim().parse().ok()?;
    Some((own + 1).min(OOM_MAX))
}

fn join_cgroup(path: &str, pid: i32) -> Result<()> {
    let what = || format!("move the supervisor into cgroup {path} (shim_cgroup)");
    let group = Group::new(&Layout::detect()?, path).context(what)?;
    if !group.exists() {
        return Err(Error::new(
            Kind::NotFound,
            format!("{}: there is no such cgroup; create it first", what()),
        ));
    }
    group.add_process(pid).context(what)
}

/// Waits for the supervisor's word: one byte that it serves, or the text of its error.
fn wait_ready(pipe: OwnedFd) -> Result<()> {
    let end = Instant::now() + READY_LIMIT;
    let mut pipe = File::from(pipe);
    loop {
        let left = PollTimeout::try_from(end.saturating_duration_since(Instant::now()))
            .unwrap_or(PollTimeout::MAX);
        match poll(
            &mut [PollFd::new(
                std::os::fd::AsFd::as_fd(&pipe),
                PollFlags::POLLIN,
            )],
            left,
        ) {
            Err(nix::errno::Errno::EINTR) => {}
            Err(e) => return Err(Error::sys("wait for the supervisor", e)),
            Ok(0) => {
                let text = format!(
                    "wait for the supervisor: it did not serve within {} s",
                    READY_LIMIT.as_secs()
                );
                return Err(Error::new(Kind::Deadline, text));
            }
            Ok(_) => break,
        }
    }
    let mut first = [0];
    match pipe
        .read(&mut first)
        .context(|| "read the supervisor's word")?
    {
        0 => Err(Error::new(
            Kind::Other,
            "start the supervisor: it ended before it served; see the daemon's log",
        )),
        _ if first[0] == daemon::READY => Ok(()),
        _ => {
            let mut text = String::new();
            // The child ends after this, so the end comes.
            let _ = pipe.read_to_string(&mut text);
            Err(Error::new(
                Kind::Other,
                format!("start the supervisor: {text}"),
            ))
        }
    }
}

/// `<bundle>/address`: what daemons up to 1.7 reload from; they do not write it themselves.
fn write_address(bundle: &Path, address: &str) -> Result<()> {
    let path = bundle.join("address");
    let temp = bundle.join(format!(".address.{}", std::process::id()));
    let written = fs::write(&temp, address).and_then(|()| fs::rename(&temp, &path));
    if written.is_err() {
        let _ = fs::remove_file(&temp);
    }
    written.context(|| format!("write {}", path.display()))
}

/// `<bundle>/s`: leads `delete` to a socket directory of the daemon's choice.
fn leave_link(bundle: &Path, dir: &Path) -> Result<()> {
    match symlink(dir, bundle.join("s")) {
        Err(e) if e.kind() != io::ErrorKind::AlreadyExists => Err(Error::io(
            format!("link {} to {}", bundle.join("s").display(), dir.display()),
            e,
        )),
        _ => Ok(()),
    }
}

/// Removes the socket on every way out but the good one.
struct UnlinkOnDrop(Option<PathBuf>);

impl UnlinkOnDrop {
    fn disarm(mut self) {
        self.0 = None;
    }
}

impl Drop for UnlinkOnDrop {
    fn drop(&mut self) {
        if let Some(path) = self.0.take() {
            let _ = fs::remove_file(path);
        }
    }
}

/// Kills the supervisor on every way out but the good one. It is our child and nobody waits for it here, so the pid
/// cannot have become another's.
struct KillOnDrop(Option<i32>);

impl KillOnDrop {
    fn pid(&self) -> i32 {
        self.0.unwrap_or_default()
    }

    fn disarm(mut self) {
        self.0 = None;
    }
}

impl Drop for KillOnDrop {
    fn drop(&mut self) {
        if let Some(pid) = self.0.take() {
            let _ = sys::process::kill(pid, libc::SIGKILL);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn group_of(config: Option<&str>) -> Result<String> {
        let dir = tempfile::tempdir().unwrap();
        if let Some(text) = config {
            fs::write(dir.path().join("config.json"), text).unwrap();
        }
        group(dir.path(), "own")
    }

    #[test]
    fn the_group_is_named_by_annotation_first() {
        for (config, wanted) in [
            (None, "own"),
            (Some("{}"), "own"),
            (Some(r#"{"annotations":null}"#), "own"),
            (
                Some(r#"{"annotations":{"io.kubernetes.cri.sandbox-id":"pod"}}"#),
                "pod",
            ),
            (
                Some(
                    r#"{"annotations":{"io.kubernetes.cri.sandbox-id":"pod","io.containerd.runc.v2.group":"g"}}"#,
                ),
                "g",
            ),
        ] {
            assert_eq!(group_of(config).unwrap(), wanted, "{config:?}");
        }
    }

    #[test]
    fn a_damaged_or_hostile_config_is_an_error() {
        for config in [
            "",
            "{\"annotations\":{",
            r#"{"annotations":{"io.containerd.runc.v2.group":"../x"}}"#,
        ] {
            assert_eq!(
                group_of(Some(config)).unwrap_err().kind(),
                Kind::Invalid,
                "{config}"
            );
        }
    }

    #[test]
    fn events_go_where_the_daemon_says() {
        let flags = Flags {
            address: "/run/c.sock".into(),
            ..Flags::default()
        };
        let told = Params {
            ttrpc_address: Some("/run/t".into()),
            ..Params::default()
        };
        assert_eq!(ttrpc_address(&flags, &told).as_deref(), Some("/run/t"));
        assert_eq!(ttrpc_address(&Flags::default(), &Params::default()), None);
    }

    #[test]
    fn an_address_file_replaces_the_old_one() {
        let dir = tempfile::tempdir().unwrap();
        for address in ["unix:///a", "unix:///b"] {
            write_address(dir.path(), address).unwrap();
            assert_eq!(
                fs::read_to_string(dir.path().join("address")).unwrap(),
                address
            );
        }
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }
}
