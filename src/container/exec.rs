//! Execs: registering one, and starting it through the runtime.

use std::fs::{self, OpenOptions};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::{Map, Value};

use super::create::{read_pid, remove_stale};
use super::exit;
use super::state::{Exec, Phase, Process, Streams};
use super::table::{Container, Shared};
use crate::error::{Context, Error, Kind, Result};
use crate::failpoint;
use crate::oci;
use crate::process::Child;
use crate::stdio::{self, Io};

/// See [`super::Containers::exec`].
pub(super) fn add(
    shared: &Shared,
    container: &Container,
    exec_id: &str,
    streams: Streams,
    process_json: &[u8],
) -> Result<()> {
    crate::id::check("exec id", exec_id)?;
    if streams.terminal {
        return Err(Error::new(
            Kind::Unsupported,
            format!("exec {exec_id}: terminals are not built yet"),
        ));
    }
    let json = process_object(exec_id, process_json)?;
    let mut inner = container.inner();
    inner.may_exec()?;
    if inner.execs.contains_key(exec_id) {
        let id = &container.fixed.id;
        return Err(Error::new(
            Kind::Exists,
            format!("exec {exec_id} in container {id}: there is one of this id"),
        ));
    }
    inner.execs.insert(
        exec_id.to_owned(),
        Exec {
            process: Process::new(streams),
            json: Arc::new(json),
        },
    );
    shared.announcer(container).exec_added(exec_id);
    Ok(())
}

/// Starts an exec. One that fails is as it was before and may be tried again.
pub(super) async fn start(
    shared: &Arc<Shared>,
    container: &Arc<Container>,
    exec_id: &str,
) -> Result<u32> {
    let begin = || container.step(|inner| inner.begin_exec(exec_id));
    // Looked at before the queue too: what cannot work is refused at once.
    container.inner().may_exec()?;
    let Ok(_slot) = container.exec_slots.acquire().await else {
        return Err(Error::new(Kind::Gone, "the supervisor is leaving"));
    };
    failpoint::reach("exec.before").await?;
    let (json, streams) = begin()?;
    let launched = launch(shared, container, exec_id, &json, streams).await;
    failpoint::pass("exec.after");
    let started = container.step(|inner| {
        let too_late = inner
            .init
            .has_exited()
            .then(|| inner.refusal("exec in", "its init process is not running"));
        let process = inner.process(exec_id)?;
        let (child, io) = match (launched, too_late) {
            (Ok(made), None) => made,
            (Ok((child, io)), Some(error)) => {
                // Init's exit, the last event of a container, is out.
                let _ = child.signal(libc::SIGKILL);
                io.close();
                process.phase = Phase::Created;
                return Err(error);
            }
            (Err(error), _) => {
                process.phase = Phase::Created;
                return Err(error);
            }
        };
        process.connect(child.clone(), io);
        process.phase = Phase::Running;
        let pid = process.pid();
        shared.announcer(container).exec_started(exec_id, pid);
        Ok((pid, child))
    });
    let (pid, child) = started.map_err(|e| {
        let kind = if e.is_gone() { Kind::Other } else { e.kind() };
        e.as_kind(kind).within(format!(
            "start exec {exec_id} of container {}",
            container.fixed.id
        ))
    })?;
    exit::watch_exec(shared, container, exec_id.to_owned(), child);
    Ok(pid)
}

async fn launch(
    shared: &Shared,
    container: &Container,
    exec_id: &str,
    json: &[u8],
    streams: Streams,
) -> Result<(Child, Io)> {
    let fixed = &container.fixed;
    let mut io = Io::open(&stdio::Request {
        stdin: streams.stdin,
        stdout: streams.stdout,
        stderr: streams.stderr,
        terminal: false,
        uid: fixed.io_owner.0,
        gid: fixed.io_owner.1,
        direct: false,
    })
    .await?;
    let files = Files::write(&fixed.bundle, exec_id, json)?;
    // From before the fork: the process may end before its pid is read.
    let held = shared.reaper.hold_unknown();
    let exec = oci::Exec {
        bundle: &fixed.bundle,
        process: &files.process,
        pid_file: &files.pid,
        stdio: io.take_child_stdio()?,
    };
    container
        .unless_cancelled(fixed.runtime.exec(&shared.reaper, &fixed.id, exec))
        .await?;
    let child = shared.reaper.adopt(read_pid(&files.pid)?)?;
    drop(held);
    Ok((child, io))
}

/// What the runtime is handed and hands back, in the bundle; removed when dropped.
struct Files {
    process: PathBuf,
    pid: PathBuf,
}

impl Files {
    fn write(bundle: &Path, exec_id: &str, json: &[u8]) -> Result<Self> {
        let files = Self {
            process: bundle.join(format!("{exec_id}.process.json")),
            pid: bundle.join(format!("{exec_id}.pid")),
        };
        remove_stale(&files.process)?;
        remove_stale(&files.pid)?;
        // 0600: the environment in it may hold secrets.
        OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&files.process)
            .and_then(|mut f| f.write_all(json))
            .context(|| format!("write {}", files.process.display()))?;
        Ok(files)
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.process);
        let _ = fs::remove_file(&self.pid);
    }
}

/// The `process` object with `terminal` as the request has it (false: terminals were refused before).
fn process_object(exec_id: &str, json: &[u8]) -> Result<Vec<u8>> {
    let what = || format!("read the process of exec {exec_id}");
    let mut object: Map<String, Value> =
        serde_json::from_slice(json).map_err(|e| Error::caused(Kind::Invalid, what(), e))?;
    if object
        .get("args")
        .and_then(Value::as_array)
        .is_none_or(Vec::is_empty)
    {
        return Err(Error::new(
            Kind::Invalid,
            format!("{}: args is empty", what()),
        ));
    }
    object.insert("terminal".into(), Value::Bool(false));
    serde_json::to_vec(&object).map_err(|e| Error::caused(Kind::Invalid, what(), e))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_needs_arguments_and_keeps_what_we_do_not_know() {
        for bad in ["", "[]", "{}", "{\"args\":[]}", "{\"args\":[\"x\"]"] {
            assert_eq!(
                process_object("e", bad.as_bytes()).map_err(|e| e.kind()),
                Err(Kind::Invalid),
                "{bad}"
            );
        }
        let got = process_object("e", br#"{"terminal":true,"args":["x"],"vendor":1.50}"#).unwrap();
        assert_eq!(
            String::from_utf8_lossy(&got),
            r#"{"terminal":false,"args":["x"],"vendor":1.5}"#
        );
    }
}
