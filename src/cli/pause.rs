//! `podvisor pause` and `podvisor unpause`: stop all containers of pods where they are, and let them go on.
//!
//! Promises that a pod is paused whole or not at all: what was paused goes on again when another container cannot be.

use std::rc::Rc;
use std::time::Duration;

use crate::client::{self, Client};
use crate::container::Status;
use crate::error::{Kind, Result};
use crate::proto::task_v3::shim::{PauseRequest, ResumeRequest};

use super::failure::Failure;
use super::host::Host;
use super::supervisor::{self, label};
use super::{output, select};

/// The OCI runtime has to freeze a cgroup; what takes this long hangs.
const LIMIT: Duration = Duration::from_secs(60);

/// Flags of `pause`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  podvisor pause web")]
pub struct PauseArgs {
    /// Names, ids, or beginnings of ids.
    #[arg(required = true, value_name = "POD")]
    pods: Vec<String>,
}

/// Flags of `unpause`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  podvisor unpause web")]
pub struct UnpauseArgs {
    /// Names, ids, or beginnings of ids.
    #[arg(required = true, value_name = "POD")]
    pods: Vec<String>,
}

/// Runs `pause`.
pub async fn pause(host: &Rc<Host>, args: PauseArgs) -> Result<u8, Failure> {
    run(host, args.pods, Status::Running).await
}

/// Runs `unpause`.
pub async fn unpause(host: &Rc<Host>, args: UnpauseArgs) -> Result<u8, Failure> {
    run(host, args.pods, Status::Paused).await
}

async fn run(host: &Rc<Host>, pods: Vec<String>, from: Status) -> Result<u8, Failure> {
    let shared = Rc::clone(host);
    super::each::run(pods, move |target| {
        let host = Rc::clone(&shared);
        async move { one(&host, &target, from).await }
    })
    .await
}

/// `from`: the state that containers are to leave.
async fn one(host: &Host, target: &str, from: Status) -> Result<(), Failure> {
    let pod = select::readable(host, target)?;
    let has = |status: Status| {
        let all = pod
            .containers
            .iter()
            .filter(move |(_, c)| c.status == status);
        all.map(|(id, _)| id.as_str())
    };
    let pausing = from == Status::Running;
    let verb = if pausing { "pause" } else { "unpause" };
    let ids: Vec<&str> = has(from).collect();
    if ids.is_empty() {
        let there = if pausing {
            Status::Paused
        } else {
            Status::Running
        };
        if has(there).next().is_some() {
            output::line(target);
            return Ok(());
        }
        let what = format!(
            "{verb} pod {0}: no container of it is running; `podvisor inspect {0}` shows what has become of them",
            label(&pod)
        );
        return Err(Failure::no_such(Kind::State, what));
    }
    let client = supervisor::connect(&pod).await?;
    for (done, id) in ids.iter().enumerate() {
        let Err(e) = step(&client, id, pausing).await else {
            continue;
        };
        if !e.is_gone() && pausing {
            for id in ids.iter().take(done) {
                let _ = step(&client, id, false).await;
            }
        }
        // One that has ended meanwhile stands still enough.
        if !e.is_gone() {
            return Err(e.within(format!("{verb} pod {}", label(&pod))).into());
        }
    }
    output::line(target);
    Ok(())
}

async fn step(client: &Client, id: &str, pause: bool) -> Result<()> {
    let (task, context) = (client.task(), client::context(Some(LIMIT)));
    let what = format!("container {id}");
    let id = id.to_owned();
    let answer = match pause {
        true => {
            let request = PauseRequest {
                id,
                ..Default::default()
            };
            task.pause(context, &request).await
        }
        false => {
            let request = ResumeRequest {
                id,
                ..Default::default()
            };
            task.resume(context, &request).await
        }
    };
    answer.map(drop).map_err(|e| client::from_ttrpc(&what, e))
}
