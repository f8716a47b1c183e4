//! `podvisor wait`: waits for the end of a container, or of a pod that has none, and prints the exit code.

use crate::client::{self, Client};
use crate::error::{Error, Kind, Result};
use crate::pod::record::Record;
use crate::proto::sandbox::sandbox::WaitSandboxRequest;
use crate::proto::task_v3::shim::WaitRequest;

use super::failure::Failure;
use super::host::Host;
use super::supervisor::{self, label};
use super::{output, select};

/// Flags of `wait`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  podvisor wait web")]
pub struct Args {
    /// The pod (its main container), or POD/CONTAINER.
    #[arg(value_name = "POD[/CONTAINER]")]
    target: String,
}

/// Runs the verb.
pub async fn run(host: &Host, args: Args) -> Result<u8, Failure> {
    let (pod, container) = match args.target.contains('/') {
        true => select::container(host, &args.target).map(|(pod, id)| (pod, Some(id)))?,
        false => {
            let pod = select::readable(host, &args.target)?;
            let chosen = select::container(host, &pod.id).ok().map(|(_, id)| id);
            (pod, chosen)
        }
    };
    let code = match container {
        Some(id) => of_container(host, &pod, &id).await?,
        None => of_pod(&pod).await?,
    };
    output::line(code);
    Ok(0)
}

async fn of_container(host: &Host, pod: &Record, id: &str) -> Result<u32, Failure> {
    let asked = match supervisor::connect(pod).await {
        Ok(client) => ask(&client, id).await,
        Err(e) => Err(e),
    };
    let error = match asked {
        Ok(code) => return Ok(code),
        Err(e) => e,
    };
    // The task is deleted, or the supervisor has gone: what it wrote down counts.
    let record = supervisor::reread(host, &pod.id).ok();
    let exit = record
        .as_ref()
        .unwrap_or(pod)
        .containers
        .get(id)
        .and_then(|c| c.exit);
    match exit {
        Some(exit) => Ok(exit.code),
        None if matches!(error.kind(), Kind::NotFound | Kind::Gone) => {
            let message = format!(
                "wait for container {id} of pod {}: it has ended and its exit code is not known",
                label(pod)
            );
            Err(Failure::no_such(Kind::Gone, message))
        }
        None => Err(error.into()),
    }
}

async fn ask(client: &Client, id: &str) -> Result<u32> {
    let request = WaitRequest {
        id: id.to_owned(),
        ..Default::default()
    };
    let answer = client.task().wait(client::context(None), &request).await;
    answer
        .map(|a| a.exit_status)
        .map_err(|e| client::from_ttrpc(&format!("wait for container {id}"), e))
}

async fn of_pod(pod: &Record) -> Result<u32, Error> {
    if let (false, Some(status)) = (pod.is_supervised(), pod.exit_status) {
        return Ok(status);
    }
    let client = supervisor::connect(pod).await?;
    let request = WaitSandboxRequest {
        sandbox_id: pod.id.clone(),
        ..Default::default()
    };
    let answer = client
        .sandbox()
        .wait_sandbox(client::context(None), &request)
        .await;
    answer
        .map(|a| a.exit_status)
        .map_err(|e| client::from_ttrpc(&format!("wait for pod {}", label(pod)), e))
}
