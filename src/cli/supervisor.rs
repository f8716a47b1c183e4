//! Launching a supervisor, the way containerd does it, without containerd.
//!
//! Owns where the executable is looked for and how its `start` is run. Promises an address or an error that holds what the
//! helper has said. Must never pass `-address`: without it the helper answers the plain address.

use std::env;
use std::ffi::OsStr;
use std::fs;
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::client::{self, Client};
use crate::error::{Context, Error, Kind, Result};
use crate::pod::record::{self, Record};
use crate::proto::sandbox::sandbox::{SandboxStatusRequest, SandboxStatusResponse};

use super::host::Host;

/// Name of the supervisor's executable.
pub const PROGRAM: &str = "containerd-shim-podvisor-v1";

/// `start` does milliseconds of work; what takes this long hangs.
const START_LIMIT: Duration = Duration::from_secs(30);

/// Most of what a helper says that goes into an error.
const ANSWER_CAP: u64 = 16 * 1024;

/// Finds the executable: beside our own, in PATH, then `$PODVISOR_SHIM`.
pub fn find() -> Result<PathBuf> {
    let beside = env::current_exe()
        .ok()
        .and_then(|own| Some(own.parent()?.join(PROGRAM)));
    let named = env::var_os("PODVISOR_SHIM")
        .filter(|p| !p.is_empty())
        .map(PathBuf::from);
    beside
        .filter(|p| is_executable(p))
        .or_else(|| in_path(PROGRAM))
        .or_else(|| named.filter(|p| is_executable(p)))
        .ok_or_else(|| {
            Error::new(
                Kind::NotFound,
                format!("find {PROGRAM}: it is neither beside podvisor nor in PATH; install it, or name it in $PODVISOR_SHIM"),
            )
        })
}

/// First executable called `name` in PATH.
pub fn in_path(name: &str) -> Option<PathBuf> {
    env::split_paths(&env::var_os("PATH")?)
        .map(|dir| dir.join(name))
        .find(|p| is_executable(p))
}

/// True for a regular file somebody may execute.
pub fn is_executable(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|m| m.is_file() && m.permissions().mode() & 0o111 != 0)
}

/// Runs `start` in `bundle` and returns the supervisor's address.
pub async fn start(host: &Host, program: &Path, id: &str, bundle: &Path) -> Result<String> {
    let what = format!(
        "start the supervisor of pod {id} with {}",
        program.display()
    );
    // One pipe for both, read to its end, as containerd does: the answer has ended when the helper has.
    let (mut answer, writer) = std::io::pipe().context(|| what.clone())?;
    let second = writer.try_clone().context(|| what.clone())?;
    let mut command = Command::new(program);
    command
        .args([
            OsStr::new("-namespace"),
            host.namespace.as_ref(),
            "-id".as_ref(),
            id.as_ref(),
            "start".as_ref(),
        ])
        .current_dir(bundle)
        .stdin(Stdio::null())
        .stdout(writer)
        .stderr(second);
    let mut child = command.spawn().context(|| what.clone())?;
    // The command holds the write ends until it is dropped.
    drop(command);
    let reader = tokio::task::spawn_blocking(move || {
        let mut text = Vec::new();
        // Read on after the cap, or the helper would wait for us.
        let read = answer.by_ref().take(ANSWER_CAP).read_to_end(&mut text);
        read.and_then(|_| std::io::copy(&mut answer, &mut std::io::sink()))
            .map(|_| text)
    });
    let text = match tokio::time::timeout(START_LIMIT, reader).await {
        Ok(Ok(read)) => read.context(|| what.clone())?,
        Ok(Err(e)) => return Err(Error::caused(Kind::Other, what, e)),
        Err(_) => {
            // Only the helper: a supervisor that it has made ends by itself when its helper dies before the answer.
            let _ = child.kill();
            let _ = child.wait();
            return Err(Error::new(
                Kind::Deadline,
                format!("{what}: no answer within {} s", START_LIMIT.as_secs()),
            ));
        }
    };
    let status = child.wait().context(|| what.clone())?;
    let text = String::from_utf8_lossy(&text).trim().to_owned();
    if !status.success() {
        let said = if text.is_empty() {
            "it said nothing"
        } else {
            text.as_str()
        };
        return Err(Error::new(Kind::Other, format!("{what}: {status}: {said}")));
    }
    if !text.starts_with("unix://") || text.lines().count() != 1 {
        return Err(Error::new(
            Kind::Other,
            format!("{what}: its answer is no address: {text:?}"),
        ));
    }
    Ok(text)
}

/// Connects to the supervisor that wrote `record`.
pub async fn connect(record: &Record) -> Result<Client> {
    if record.address.is_empty() || !record.is_supervised() {
        return Err(Error::new(
            Kind::Gone,
            format!(
                "reach the supervisor of pod {0}: it has died; remove the pod with `podvisor rm {0}`",
                label(record)
            ),
        ));
    }
    Client::connect(&record.address)
        .await
        .map_err(|e| e.within(format!("reach the supervisor of pod {}", label(record))))
}

/// What the pod's supervisor says of it, with everything it knows.
pub async fn status(record: &Record, limit: Duration) -> Result<SandboxStatusResponse> {
    let request = SandboxStatusRequest {
        sandbox_id: record.id.clone(),
        verbose: true,
        ..Default::default()
    };
    connect(record)
        .await?
        .sandbox()
        .sandbox_status(client::context(Some(limit)), &request)
        .await
        .map_err(|e| client::from_ttrpc("ask for the pod's status", e))
}

/// How a pod is called in messages: its name, else the short id.
pub fn label(record: &Record) -> &str {
    if record.name.is_empty() {
        short(&record.id)
    } else {
        &record.name
    }
}

/// First twelve characters of an id.
pub fn short(id: &str) -> &str {
    id.get(..12).unwrap_or(id)
}

/// Reads the record of a pod from its directory.
pub fn reread(host: &Host, id: &str) -> Result<Record> {
    record::read(&host.pod_dir(id))
}
