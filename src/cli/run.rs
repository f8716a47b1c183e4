//! `podvisor run`: a pod and its main container, or one more container in a pod that is there.
//!
//! Promises that in the foreground the exit code is the workload's, and that the pod ends with its main container: stopped,
//! and removed with `--rm`. A detached pod stays until `stop`. What does not start leaves nothing, and what a killed command
//! has begun is taken up by the same command, at whatever stage it is. Must never undo what another command is at.

use std::path::PathBuf;

use serde_json::json;
use sha2::{Digest, Sha256};

use crate::client::Client;
use crate::error::{Error, Kind};
use crate::pod::record::{Found, Record, State};

use super::attach::{Attach, Signals};
use super::container::{self, NotStarted, Wish, Workload};
use super::failure::Failure;
use super::host::Host;
use super::plan::Plan;
use super::select::{self, MAIN, container_id};
use super::supervisor::{self, label};
use super::{make, names, output, parse, plan, remove};

/// Seconds between SIGTERM and SIGKILL for what is left in a pod when its main container has ended.
const END_GRACE: u32 = 10;

/// Flags of `run`.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Example:\n  podvisor run --rootfs /srv/web --publish 8080:80 -d --name web -- /bin/httpd -f -p 80"
)]
pub struct Args {
    /// Directory with the container's root file system.
    #[arg(long, value_name = "DIR")]
    rootfs: PathBuf,
    /// Name of the pod, or with --sandbox of the container.
    #[arg(long, value_parser = parse::name)]
    name: Option<String>,
    /// Add the container to this pod instead of making one.
    #[arg(long, value_name = "POD", conflicts_with_all = ["net", "publish"])]
    sandbox: Option<String>,
    /// Do not wait: print the id and leave.
    #[arg(short, long)]
    detach: bool,
    /// Remove the pod (with --sandbox: the container) when the command has ended.
    #[arg(long, conflicts_with = "detach")]
    rm: bool,
    /// Pass our standard input on.
    #[arg(short, long, conflicts_with = "detach")]
    interactive: bool,
    /// Set a variable; KEY alone takes the value from here. May be repeated.
    #[arg(short, long, value_name = "KEY=VALUE", value_parser = parse::variable)]
    env: Vec<String>,
    /// Working directory in the container.
    #[arg(short, long, value_name = "DIR", default_value = "/")]
    workdir: String,
    #[command(flatten)]
    pod: plan::Args,
    /// The command and its arguments.
    #[arg(required = true, trailing_var_arg = true, value_name = "COMMAND")]
    command: Vec<String>,
}

/// Runs the verb.
pub async fn run(host: &Host, args: Args) -> Result<u8, Failure> {
    let work = workload(&args)?;
    plan::check_runtime(&host.config)?;
    let mut signals = Signals::catch()?;
    match args.sandbox {
        Some(ref target) => add(host, target, &args, &work, &mut signals).await,
        None => fresh(host, args, &work, &mut signals).await,
    }
}

async fn fresh(
    host: &Host,
    args: Args,
    work: &Workload,
    signals: &mut Signals,
) -> Result<u8, Failure> {
    let plan = Plan {
        purpose: Some(purpose(work, &args)),
        ..plan::check(host, args.name.clone(), args.pod.clone())?
    };
    let made = make::pod(host, &plan, signals).await?;
    let pod = &made.record;
    let id = container_id(&pod.id, MAIN);
    let wish = Wish {
        pod,
        id: &id,
        work,
        attach: None,
        timeout: None,
        again: &pod.name,
    };
    let code = match launch(host, &made.client, wish, &args, signals).await {
        Err(NotStarted {
            failure,
            stays: true,
        }) => return Err(failure),
        // The pod was made for this container.
        Err(NotStarted { failure, .. }) => {
            if let Err(e) = remove::unfinished(host, &pod.id, &pod.name).await {
                output::complain(format!(
                    "undo pod {}: {e}; `podvisor rm -f {0}` tries again",
                    label(pod)
                ));
            }
            return Err(failure);
        }
        Ok(code) => code,
    };
    let Some(code) = code else {
        output::line(&pod.id);
        return Ok(0);
    };
    // The workload's code is the answer, whatever becomes of the rest; but it has to be said.
    if let Err(e) = end(host, pod, args.rm).await {
        output::complain(e);
    }
    Ok(code)
}

async fn add(
    host: &Host,
    target: &str,
    args: &Args,
    work: &Workload,
    signals: &mut Signals,
) -> Result<u8, Failure> {
    let pod = select::readable(host, target)?;
    if pod.state != State::Ready {
        return Err(Failure::no_such(
            Kind::State,
            format!("add a container to pod {}: it is not ready", label(&pod)),
        ));
    }
    let client = supervisor::connect(&pod).await?;
    let name = match &args.name {
        Some(name) => name.clone(),
        None => names::random_hex(4)?,
    };
    let id = container_id(&pod.id, &name);
    let wish = Wish {
        pod: &pod,
        id: &id,
        work,
        attach: None,
        timeout: args.pod.timeout,
        again: &name,
    };
    let Some(code) = launch(host, &client, wish, args, signals).await? else {
        output::line(&id);
        return Ok(0);
    };
    if args.rm {
        container::forget(host, &client, &pod.id, &id).await?;
    }
    Ok(code)
}

/// Starts the container; in the foreground follows it and returns its exit code.
async fn launch(
    host: &Host,
    client: &Client,
    wish: Wish<'_>,
    args: &Args,
    signals: &mut Signals,
) -> Result<Option<u8>, NotStarted> {
    if args.detach {
        container::start(host, client, &wish).await?;
        return Ok(None);
    }
    let dir = host.pod_dir(&wish.pod.id);
    let attach = Attach::of(&dir, wish.id, args.interactive).map_err(|e| NotStarted {
        // Another command's.
        stays: e.kind() == Kind::Exists,
        failure: e.into(),
    })?;
    let attached = Wish {
        attach: Some(&attach),
        ..wish
    };
    container::start(host, client, &attached).await?;
    let code = attach.follow(client, wish.id, "", signals).await?;
    Ok(Some(code))
}

/// Of what the pod is made for: a retry with other words is another request.
fn purpose(work: &Workload, args: &Args) -> String {
    let text = json!([
        work.rootfs,
        work.args,
        work.env,
        work.cwd,
        args.detach,
        args.interactive
    ]);
    crate::id::hex(&Sha256::digest(text.to_string()))
}

/// A pod that was run in the foreground ends with its main container.
async fn end(host: &Host, pod: &Record, rm: bool) -> crate::error::Result<()> {
    let record = supervisor::reread(host, &pod.id).unwrap_or_else(|_| pod.clone());
    remove::stop(host, &record, END_GRACE).await?;
    if !rm {
        return Ok(());
    }
    let stopped = supervisor::reread(host, &pod.id)?;
    remove::pod(
        host,
        &Found::Record(Box::new(stopped)),
        false,
        crate::pod::Parked::Undone,
    )
    .await
}

fn workload(args: &Args) -> Result<Workload, Failure> {
    let rootfs = container::check_rootfs(&args.rootfs)?;
    if !args.workdir.starts_with('/') {
        let message = format!(
            "use working directory {:?}: give an absolute path in the container",
            args.workdir
        );
        return Err(Error::new(Kind::Invalid, message).into());
    }
    if args
        .command
        .iter()
        .chain([&args.workdir])
        .any(|a| a.contains('\0'))
        || args.command.first().is_none_or(String::is_empty)
    {
        return Err(Error::new(
            Kind::Invalid,
            "use the command given: its first word is empty, or a word holds a NUL",
        )
        .into());
    }
    Ok(Workload {
        rootfs,
        args: args.command.clone(),
        env: args.env.clone(),
        cwd: args.workdir.clone(),
    })
}
