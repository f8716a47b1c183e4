//! Making a pod: id, name, bundle, supervisor, CreateSandbox, StartSandbox.
//!
//! Promises that a pod which does not come up leaves nothing, with one exception that is the product's first promise: when
//! only the caller's patience has ended, the work goes on, and the same command with the same name takes its result.
//! Must never undo a pod that another command has made unless its creation has failed.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::Duration;

use tokio::time::Instant;

use crate::client::{self, Client};
use crate::error::{Context, Error, Kind, Result};
use crate::failpoint;
use crate::pod::history::Activity;
use crate::pod::record::{self, Record, State};
use crate::proto::any;
use crate::proto::sandbox::sandbox::{CreateSandboxRequest, StartSandboxRequest};

use super::attach::Signals;
use super::failure::{Failure, PODVISOR_FAILED};
use super::host::{Host, private_dir};
use super::names::{self, Reserved};
use super::patience::Patience;
use super::plan::{Plan, RUN_ANNOTATION};
use super::select::{MAIN, container_id};
use super::{bundle, output, progress, remove, supervisor};

/// CreateSandbox writes files and makes no network: what takes this long hangs.
const CREATE_LIMIT: Duration = Duration::from_secs(30);

/// Between looks at a pod whose name is wanted and which is going away.
const LOOK_AGAIN: Duration = Duration::from_millis(200);

/// A pod that is up.
#[derive(Debug)]
pub struct Made {
    /// Its record, read after it became ready.
    pub record: Record,
    /// Connected to its supervisor.
    pub client: Client,
}

/// Makes the pod, or joins the making of the one that has its name. One that is just going away is waited for.
pub async fn pod(host: &Host, plan: &Plan, signals: &mut Signals) -> Result<Made, Failure> {
    let end = Instant::now() + plan.timeout;
    let mut told = false;
    loop {
        match once(host, plan, told, signals).await {
            Ok(Outcome::Up(made)) => return Ok(*made),
            Ok(Outcome::Going(error)) if Instant::now() >= end => return Err(error.into()),
            Ok(Outcome::Going(error)) if !told => {
                output::complain(format!("{error}; waiting for that"));
                told = true;
            }
            Ok(Outcome::Going(_)) => {}
            Err(failure) => return Err(failure),
        }
        tokio::select! {
            () = tokio::time::sleep(LOOK_AGAIN) => {}
            signal = signals.next_ending() => {
                let error = Error::new(Kind::Cancelled, "wait for the name: interrupted");
                return Err(Failure::new(128u8.wrapping_add(signal), error));
            }
        }
    }
}

/// What one try has come to.
enum Outcome {
    Up(Box<Made>),
    /// The pod that has the name is on its way out, and the name will be free.
    Going(Error),
}

/// `waited`: the name was one that is just going away.
async fn once(
    host: &Host,
    plan: &Plan,
    waited: bool,
    signals: &mut Signals,
) -> Result<Outcome, Failure> {
    let id = names::new_id()?;
    let dir = host.pod_dir(&id);
    private_dir(&dir)?;
    failpoint::hit("cli.name.before")?;
    let name = plan.name.clone().unwrap_or_else(|| names::invented(&id));
    match names::reserve(host, &name, &id) {
        Ok(Reserved::New) => {}
        Ok(Reserved::Taken(owner)) => {
            remove_empty(&dir);
            return join(host, plan, &name, &owner, waited, signals).await;
        }
        Err(e) => {
            remove_empty(&dir);
            return Err(e.into());
        }
    }
    let launched = async {
        failpoint::hit("cli.name.after")?;
        let bundle = make_bundle(&dir)?;
        failpoint::hit("cli.launch.before")?;
        let address = supervisor::start(host, &plan.program, &id, &bundle).await?;
        failpoint::hit("cli.launch.after")?;
        let client = Client::connect(&address).await?;
        create(host, plan, &client, &id, &name).await?;
        failpoint::hit("cli.create.after")?;
        Ok::<_, Error>(client)
    };
    let client = match launched.await {
        Ok(client) => client,
        Err(e) => return Err(give_up(host, &id, &name, e.into()).await),
    };
    let patience = Patience::first(plan.timeout);
    start(host, patience, client, &id, &name, signals).await
}

/// The name's pod is coming up, or waits to be taken: ask for the same pod by its id. The supervisor compares the requests.
async fn join(
    host: &Host,
    plan: &Plan,
    name: &str,
    owner: &str,
    waited: bool,
    signals: &mut Signals,
) -> Result<Outcome, Failure> {
    let record = match record::read(&host.pod_dir(owner)) {
        Ok(record) if record.is_supervised() => record,
        // Its journal goes first, its name last.
        Err(e) if e.is_gone() && waited => return Ok(Outcome::Going(e)),
        _ => return Err(names::taken(name, owner).into()),
    };
    if record.activity() == Activity::RollingBack {
        let what = format!("make pod {name}: an earlier try failed and is being rolled back");
        return Ok(Outcome::Going(Error::new(Kind::Busy, what)));
    }
    if !is_joinable(&record) && !is_unfinished(plan, &record) {
        return Err(names::taken(name, owner).into());
    }
    if !waited {
        output::complain(format!("pod {name} is being made already: joining"));
    }
    let asked = async {
        let client = supervisor::connect(&record).await?;
        create(host, plan, &client, owner, name).await?;
        Ok::<_, Error>(client)
    };
    let client = match asked.await {
        Ok(client) => client,
        Err(e) if is_going(&e) => return Ok(Outcome::Going(e)),
        Err(e) => return Err(e.into()),
    };
    let patience = Patience::joining(plan.timeout);
    start(host, patience, client, owner, name, signals).await
}

/// Not up yet: coming, waiting to be taken, or failed and undone, when the next request is another try.
fn is_joinable(record: &Record) -> bool {
    match record.state {
        State::Created | State::Starting | State::Parked => true,
        State::NotReady => record.ready_at.is_none(),
        State::Ready | State::Stopped | State::TaskOnly => false,
    }
}

/// It is up, and what `run` has made it for has not begun: the command that was at it may have been killed, and the same
/// command goes on. The supervisor compares the requests, and so the purposes.
fn is_unfinished(plan: &Plan, record: &Record) -> bool {
    let main = record.containers.get(&container_id(&record.id, MAIN));
    plan.purpose.is_some()
        && record.state == State::Ready
        && record.annotations.contains_key(RUN_ANNOTATION)
        && main.is_none_or(|main| !bundle::has_begun(main.status))
}

/// Refused for now, or closed in mid-sentence: the supervisor of another's pod is going.
fn is_going(error: &Error) -> bool {
    matches!(error.kind(), Kind::Busy | Kind::Gone)
}

async fn create(host: &Host, plan: &Plan, client: &Client, id: &str, name: &str) -> Result<()> {
    let config = plan.sandbox_config(&host.namespace, id, name);
    let options = any::pack(any::POD_SANDBOX_CONFIG, &config)
        .map_err(|e| Error::caused(Kind::Invalid, "encode the pod's configuration", e))?;
    let request = CreateSandboxRequest {
        sandbox_id: id.to_owned(),
        bundle_path: host.pod_dir(id).join("bundle").display().to_string(),
        options: Some(options).into(),
        ..Default::default()
    };
    client
        .sandbox()
        .create_sandbox(client::context(Some(CREATE_LIMIT)), &request)
        .await
        .map_err(|e| client::from_ttrpc(&format!("create pod {name}"), e))?;
    Ok(())
}

async fn start(
    host: &Host,
    patience: Patience,
    client: Client,
    id: &str,
    name: &str,
    signals: &mut Signals,
) -> Result<Outcome, Failure> {
    let dir = host.pod_dir(id);
    let work = progress::watch(&dir, ask(&client, id, name, patience));
    let started = tokio::select! {
        started = work => started,
        signal = signals.next_ending() => {
            let what = format!("start pod {name}: interrupted");
            // Whoever began it may be at it still.
            if patience.joins() {
                let error = Error::new(Kind::Cancelled, format!("{what}; the creation that was joined goes on"));
                return Err(Failure::new(128u8.wrapping_add(signal), error));
            }
            let error = Error::new(Kind::Cancelled, format!("{what}; it has been removed"));
            let failure = Failure::new(128u8.wrapping_add(signal), error);
            return Err(give_up(host, id, name, failure).await);
        }
    };
    match started {
        Ok(()) => {}
        Err(e) if e.kind() == Kind::Deadline => {
            let next = format!(
                "{e}; it is pod {id}: run the same command with `--name {name}` to take it, \
                 or `podvisor rm -f {name}` to remove it"
            );
            return Err(Failure::new(
                PODVISOR_FAILED,
                Error::new(Kind::Deadline, next),
            ));
        }
        // Not ours to undo, and done with in a moment.
        Err(e) if patience.joins() && is_going(&e) => return Ok(Outcome::Going(e)),
        Err(e) => return Err(give_up(host, id, name, e.into()).await),
    }
    match supervisor::reread(host, id) {
        Ok(record) => Ok(Outcome::Up(Box::new(Made { record, client }))),
        Err(e) => Err(give_up(host, id, name, e.into()).await),
    }
}

/// StartSandbox, for as long as we wait.
async fn ask(client: &Client, id: &str, name: &str, patience: Patience) -> Result<()> {
    let request = StartSandboxRequest {
        sandbox_id: id.to_owned(),
        ..Default::default()
    };
    let call = async |left| {
        let answer = client
            .sandbox()
            .start_sandbox(client::context(Some(left)), &request)
            .await;
        answer
            .map(drop)
            .map_err(|e| client::from_ttrpc(&format!("start pod {name}"), e))
    };
    patience.ask(call).await
}

/// Removes what was made and hands the reason back; what could not be removed is told at once.
async fn give_up(host: &Host, id: &str, name: &str, failure: Failure) -> Failure {
    if let Err(e) = remove::unfinished(host, id, name).await {
        output::complain(format!(
            "undo pod {name}: {e}; `podvisor rm -f {name}` tries again"
        ));
    }
    failure
}

/// `start` runs here; the supervisor's log goes to the file `log`, where containerd would have put a fifo.
fn make_bundle(dir: &Path) -> Result<std::path::PathBuf> {
    let bundle = dir.join("bundle");
    private_dir(&bundle)?;
    let log = bundle.join("log");
    OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(&log)
        .context(|| format!("make {}", log.display()))?;
    Ok(bundle)
}

/// Only what we have just made and nobody has used.
fn remove_empty(dir: &Path) {
    let _ = fs::remove_dir(dir);
}
