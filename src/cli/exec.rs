//! `podvisor exec`: one more process in a container that runs; its exit code is ours.

use std::path::Path;
use std::time::Duration;

use serde_json::Value;

use crate::client;
use crate::error::{Context, Error, Kind};
use crate::pod::record::Record;
use crate::proto::any;
use crate::proto::task_v3::shim::ExecProcessRequest;

use super::attach::{Attach, Followed, Signals, Streams};
use super::failure::{Failure, PODVISOR_FAILED};
use super::host::Host;
use super::{container, names, parse, select, spec, supervisor, user, workload};

/// Exec only takes the request down; Start does the work.
const EXEC_LIMIT: Duration = Duration::from_secs(30);

/// Flags of `exec`.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Example:\n  podvisor exec web -- ps\n  podvisor exec -it -w /tmp web sh\n  echo text | podvisor exec -i web/log -- tee /tmp/x"
)]
pub struct Args {
    /// Set a variable; KEY alone takes the value from here. May be repeated.
    #[arg(short, long, value_name = "KEY=VALUE", value_parser = parse::variable)]
    env: Vec<String>,
    /// Pass our standard input on.
    #[arg(short, long)]
    interactive: bool,
    /// Give the command a terminal; with -i it is ours.
    #[arg(short, long)]
    tty: bool,
    /// Run as this user of the container's; the container's own when not given.
    #[arg(short, long, value_name = "USER[:GROUP]")]
    user: Option<String>,
    /// Working directory; the container's when not given.
    #[arg(short, long, value_name = "DIR")]
    workdir: Option<String>,
    /// The pod (its main container), or POD/CONTAINER.
    #[arg(value_name = "POD[/CONTAINER]")]
    target: String,
    /// The command and its arguments.
    #[arg(required = true, trailing_var_arg = true, value_name = "COMMAND")]
    command: Vec<String>,
}

/// Runs the verb.
pub async fn run(host: &Host, args: Args) -> Result<u8, Failure> {
    workload::check_terminal(args.tty, args.interactive)?;
    if let Some(cwd) = &args.workdir {
        workload::check_cwd(cwd)?;
    }
    let (pod, id) = select::container(host, &args.target)?;
    let dir = host.pod_dir(&pod.id);
    let process = process(&dir.join("bundles").join(&id).join("config.json"), &args)?;
    let command = args.command.first().map_or("", String::as_str);
    let client = supervisor::connect(&pod).await?;
    let mut signals = Signals::catch()?;
    let streams = Streams {
        stdin: args.interactive,
        tty: args.tty,
        leave: false,
    };
    let attach = Attach::make(&dir, streams)?;
    let exec_id = format!("exec-{}", names::random_hex(4)?);
    let request = ExecProcessRequest {
        id: id.clone(),
        exec_id: exec_id.clone(),
        terminal: args.tty,
        stdin: attach.stdin_path(),
        stdout: attach.stdout_path(),
        stderr: attach.stderr_path(),
        spec: Some(any::raw(any::OCI_PROCESS, process)).into(),
        ..Default::default()
    };
    client
        .task()
        .exec(client::context(Some(EXEC_LIMIT)), &request)
        .await
        .map_err(|e| {
            not_started(
                &pod,
                &id,
                command,
                client::from_ttrpc("start the command", e),
            )
        })?;
    attach.resize(&client, &id, &exec_id).await;
    let code = match container::start_process(&client, &id, &exec_id, command).await {
        Ok(()) => match attach.follow(&client, &id, &exec_id, &mut signals).await {
            Ok(Followed::Ended(code)) => Ok(code),
            // Commands are not left.
            Ok(Followed::Left | Followed::HungUp) => Err(Failure::silent(PODVISOR_FAILED)),
            Err(e) => Err(e.into()),
        },
        Err(failure) => Err(failure),
    };
    // It is forgotten with its container otherwise; the code is what was asked for.
    let _ = container::delete(&client, &id, &exec_id).await;
    code
}

/// A container that has ended is the caller's mistake, anything else is ours or the command's.
fn not_started(pod: &Record, id: &str, command: &str, error: Error) -> Failure {
    if !matches!(error.kind(), Kind::State | Kind::NotFound) {
        return Failure::of_start(command, error);
    }
    let (pod, name) = (supervisor::label(pod), select::container_name(&pod.id, id));
    Failure::no_such(
        Kind::State,
        format!(
            "start a command in container {name} of pod {pod}: it is not running; `podvisor logs {pod}/{name}` shows what it has written"
        ),
    )
}

/// The container's own process with our command, as JSON.
fn process(path: &Path, args: &Args) -> Result<Vec<u8>, Failure> {
    let text = std::fs::read(path).context(|| format!("read {}", path.display()))?;
    let invalid = || {
        Error::new(
            Kind::Invalid,
            format!(
                "read {}: it holds no process to take the settings from",
                path.display()
            ),
        )
    };
    let config: Value = serde_json::from_slice(&text).map_err(|_| invalid())?;
    let user = match (
        &args.user,
        config.pointer("/root/path").and_then(Value::as_str),
    ) {
        (Some(user), Some(rootfs)) => Some(user::find(Path::new(rootfs), user)?),
        (Some(_), None) => return Err(invalid().into()),
        (None, _) => None,
    };
    let exec = spec::Exec {
        args: &args.command,
        env: &args.env,
        cwd: args.workdir.as_deref(),
        user: user.as_ref(),
        tty: args.tty,
    };
    let process = spec::exec_process(&config, &exec).ok_or_else(invalid)?;
    serde_json::to_vec(&process)
        .map_err(|e| Error::caused(Kind::Other, "write the process as JSON", e).into())
}
