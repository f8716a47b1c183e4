//! `podvisor run`: a pod and its main container, or one more container in a pod that is there.
//!
//! Promises that in the foreground the exit code is the workload's, and that the pod ends with its main container: stopped,
//! and removed with `--rm`. A detached pod stays until `stop`. What does not start leaves nothing, and what a killed command
//! has begun is taken up by the same command, at whatever stage it is. Must never undo what another command is at.

use std::path::PathBuf;

use serde_json::json;
use sha2::{Digest, Sha256};

use crate::client::Client;
use crate::error::Kind;
use crate::pod::record::{Found, Record, State};

use super::attach::{Attach, Followed, Signals, Streams};
use super::container::{self, NotStarted, Wish};
use super::failure::Failure;
use super::host::Host;
use super::plan::Plan;
use super::select::{self, MAIN, container_id};
use super::supervisor::{self, label};
use super::workload::{self, Workload};
use super::{given_container, make, names, output, parse, plan, remove};

/// Seconds between SIGTERM and SIGKILL for what is left in a pod when its main container has ended.
const END_GRACE: u32 = 10;

/// Exit code when our terminal has gone and the workload runs on: as if SIGHUP had ended us.
const HUNG_UP: u8 = 129;

/// Flags of `run`.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Examples:\n  podvisor run --rootfs /srv/web --publish 8080:80 -d --name web -- /bin/httpd -f -p 80\n  podvisor run --rm -it --rootfs /srv/web --memory 64m --user 1000 -- /bin/sh\n  podvisor run --rm --rootfs /srv/web --config pod.json --container container.json"
)]
pub struct Args {
    /// Directory with the container's root file system.
    #[arg(long, value_name = "DIR")]
    rootfs: PathBuf,
    /// Name of the pod, or with --sandbox of the container.
    #[arg(long, value_parser = parse::name)]
    name: Option<String>,
    /// Add the container to this pod instead of making one.
    #[arg(long, value_name = "POD", conflicts_with_all = ["net", "publish", "hostname", "dns", "dns_search", "dns_option", "label", "sysctl", "config"])]
    sandbox: Option<String>,
    /// Do not wait: print the id and leave.
    #[arg(short, long)]
    detach: bool,
    /// Remove the pod (with --sandbox: the container) when the command has ended.
    #[arg(long, conflicts_with = "detach")]
    rm: bool,
    #[command(flatten)]
    work: workload::Args,
    /// The container as JSON, in the form of `crictl create`; flags win over it.
    #[arg(long, value_name = "FILE")]
    container: Option<PathBuf>,
    #[command(flatten)]
    pod: plan::Args,
    /// The command and its arguments.
    #[arg(
        required_unless_present = "container",
        trailing_var_arg = true,
        value_name = "COMMAND"
    )]
    command: Vec<String>,
}

/// Runs the verb.
pub async fn run(host: &Host, args: Args) -> Result<u8, Failure> {
    let (name, work) = workload(&args)?;
    plan::check_runtime(&host.config)?;
    let mut signals = Signals::catch()?;
    match args.sandbox {
        Some(ref target) => add(host, target, name, &args, &work, &mut signals).await,
        None => Box::pin(fresh(host, args, &work, &mut signals)).await,
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
    let code = match code {
        Ran::Ended(code) => code,
        Ran::On => {
            output::line(&pod.id);
            return Ok(0);
        }
        Ran::HungUp => return Ok(HUNG_UP),
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
    named: Option<String>,
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
    let name = match args.name.clone().or(named) {
        Some(name) => name,
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
    let code = match launch(host, &client, wish, args, signals).await? {
        Ran::Ended(code) => code,
        Ran::On => {
            output::line(&id);
            return Ok(0);
        }
        Ran::HungUp => return Ok(HUNG_UP),
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
) -> Result<Ran, NotStarted> {
    if args.detach {
        container::start(host, client, &wish).await?;
        return Ok(Ran::On);
    }
    let dir = host.pod_dir(&wish.pod.id);
    let streams = Streams {
        stdin: wish.work.interactive,
        tty: wish.work.tty,
        leave: true,
    };
    let attach = Attach::of(&dir, wish.id, streams).map_err(|e| NotStarted {
        // Another command's.
        stays: e.kind() == Kind::Exists,
        failure: e.into(),
    })?;
    let attached = Wish {
        attach: Some(&attach),
        ..wish
    };
    container::start(host, client, &attached).await?;
    match attach.follow(client, wish.id, "", signals).await? {
        Followed::Ended(code) => Ok(Ran::Ended(code)),
        left if args.rm => {
            let again = label(wish.pod);
            output::complain(format!(
                "it runs on, and --rm is for who waits: remove it with `podvisor rm -f {again}`"
            ));
            Ok(left.into())
        }
        left => Ok(left.into()),
    }
}

/// What has become of the workload.
enum Ran {
    /// It has ended, with this exit code.
    Ended(u8),
    /// It runs, in the background.
    On,
    /// The same, and our terminal has gone.
    HungUp,
}

impl From<Followed> for Ran {
    fn from(followed: Followed) -> Self {
        match followed {
            Followed::Ended(code) => Self::Ended(code),
            Followed::Left => Self::On,
            Followed::HungUp => Self::HungUp,
        }
    }
}

/// Of what the pod is made for: a retry with other words is another request.
fn purpose(work: &Workload, args: &Args) -> String {
    let text = json!([work, args.detach]);
    crate::id::hex(&Sha256::digest(text.to_string()))
}

/// A pod that was run in the foreground ends with its main container.
async fn end(host: &Host, pod: &Record, rm: bool) -> crate::error::Result<()> {
    let record = supervisor::reread(host, &pod.id).unwrap_or_else(|_| pod.clone());
    remove::stop(host, &record, END_GRACE).await?;
    match supervisor::reread(host, &pod.id) {
        // Its supervisor was told to end, and has left what was still in use: our streams.
        Err(e) if e.is_gone() => remove::unfinished(host, &pod.id, &pod.name).await,
        Err(e) => Err(e),
        Ok(_) if !rm => Ok(()),
        Ok(stopped) => {
            let found = Found::Record(Box::new(stopped));
            remove::pod(host, &found, false, crate::pod::Parked::Undone).await
        }
    }
}

/// What the file and the flags say; with the container's name where the file has one.
fn workload(args: &Args) -> Result<(Option<String>, Workload), Failure> {
    let base = Workload::at(&args.rootfs)?;
    let (name, base) = match &args.container {
        Some(path) => given_container::read(path, base)?,
        None => (None, base),
    };
    let mut work = workload::build(base, args.work.clone(), &args.pod.annotation, &args.command)?;
    // Of a file: nobody is there to write to it.
    work.interactive &= !args.detach;
    workload::check_terminal(work.tty, work.interactive)?;
    Ok((name, work))
}
