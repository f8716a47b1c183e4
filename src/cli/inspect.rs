//! `podvisor inspect`: the whole record of a pod, what its supervisor says now, and its stages with their times.

use std::time::{Duration, SystemTime};

use serde_json::{Map, Value, json};

use crate::clock;
use crate::error::{Error, Kind, Result};
use crate::pod::gc::{OwedNetwork, ParkedNetwork};
use crate::pod::history::{Event, Moment};
use crate::pod::record::{Found, Record, Stage};
use crate::undo::together;

use super::failure::Failure;
use super::host::Host;
use super::output::Format;
use super::{each, names, output, owed, parked, ps, select, supervisor};

/// Status is answered from a snapshot.
const LIMIT: Duration = Duration::from_secs(5);

/// Flags of `inspect`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  podvisor inspect web\n  podvisor inspect --stages web")]
pub struct Args {
    /// Show only the stages of the pod's life and their times, as a table.
    #[arg(long, conflicts_with_all = ["json", "format"])]
    stages: bool,
    /// Print JSON, which is what it does anyway; `--format table` is --stages.
    #[command(flatten)]
    format: Format,
    /// Names, ids, or beginnings of ids.
    #[arg(required = true, value_name = "POD")]
    pods: Vec<String>,
}

/// Runs the verb.
pub async fn run(host: &Host, args: Args) -> Result<u8, Failure> {
    let find = |target: &String| match select::pod(host, target) {
        Ok(found) => Ok(Shown::Pod(found)),
        Err(unknown) => {
            if let Some(parked) = parked::find(host, target)? {
                return Ok(Shown::Parked(Box::new(parked)));
            }
            owed::find(host, target)?
                .map(|owed| Shown::Owed(Box::new(owed)))
                .ok_or(unknown)
        }
    };
    let shown: Vec<Shown> = args.pods.iter().map(find).collect::<Result<_, _>>()?;
    if args.stages || args.format.is_table() {
        return stages(&shown);
    }
    let asked = shown.iter().map(|pod| {
        Box::pin(async move {
            match pod {
                Shown::Pod(found) => document(host, found).await,
                Shown::Owed(owed) => Ok(owed::document(owed)),
                Shown::Parked(parked) => Ok(parked::document(parked)),
            }
        })
    });
    let list = together(asked.collect(), each::AT_ONCE).await;
    let list = list.into_iter().collect::<Result<Vec<Value>>>()?;
    output::json(&list)?;
    Ok(0)
}

/// A pod that is there, or one of which only the network is.
enum Shown {
    Pod(Found),
    Owed(Box<OwedNetwork>),
    Parked(Box<ParkedNetwork>),
}

fn stages(pods: &[Shown]) -> Result<u8, Failure> {
    let mut records = Vec::new();
    for found in pods {
        match found {
            Shown::Pod(Found::Record(record)) => records.push(record),
            Shown::Pod(Found::Broken { reason, .. }) => {
                return Err(Failure::no_such(
                    Kind::State,
                    format!("show stages: {reason}"),
                ));
            }
            Shown::Owed(_) | Shown::Parked(_) => {
                let label = match found {
                    Shown::Owed(owed) => owed::label(owed),
                    Shown::Parked(parked) => parked::label(parked),
                    Shown::Pod(_) => "",
                };
                return Err(Failure::no_such(
                    Kind::State,
                    format!("show stages: pod {label} is gone but for its network"),
                ));
            }
        }
    }
    for (i, record) in records.iter().enumerate() {
        if records.len() > 1 {
            let gap = if i > 0 { "\n" } else { "" };
            output::line(format_args!("{gap}{}:", supervisor::label(record)));
        }
        table(record);
    }
    Ok(0)
}

/// Stages and what happened beside them, in the order of their beginnings.
fn table(record: &Record) {
    let took = |took: Option<u64>| took.map_or_else(|| "under way".to_owned(), output::micros);
    let stage = |s: &Stage| {
        let error = s.error.clone().unwrap_or_default();
        let cells = [
            s.name.clone(),
            output::micros(s.at_us),
            took(s.took_us),
            error,
        ];
        (s.at_us, cells.to_vec())
    };
    let moment = |m: &Moment| {
        let error = m.error.clone().unwrap_or_default();
        let lasted = match m.event {
            Event::Undo => took(m.took_us),
            _ => String::new(),
        };
        let cells = [told(m), output::micros(m.at_us), lasted, error];
        (m.at_us, cells.to_vec())
    };
    let mut rows: Vec<(u64, Vec<String>)> = record.stages.iter().map(stage).collect();
    rows.extend(record.history.iter().map(moment));
    // Stable: of the same microsecond the stage comes first.
    rows.sort_by_key(|(at, _)| *at);
    let rows: Vec<Vec<String>> = rows.into_iter().map(|(_, row)| row).collect();
    output::table(&["STAGE", "AT", "TOOK", "ERROR"], &rows);
}

/// "  joined at cni-add x3", "  undo cni-del".
fn told(moment: &Moment) -> String {
    let what = moment.event.as_str();
    let mut text = match moment.event {
        _ if moment.detail.is_empty() => format!("  {what}"),
        Event::Undo => format!("  {what} {}", moment.detail),
        _ => format!("  {what} at {}", moment.detail),
    };
    if moment.times > 1 {
        text.push_str(&format!(" x{}", moment.times));
    }
    text
}

async fn document(host: &Host, found: &Found) -> Result<Value> {
    let record = match found {
        Found::Record(record) => record,
        Found::Broken {
            namespace,
            id,
            reason,
        } => {
            return Ok(
                json!({ "id": id, "name": names::of(host, id), "namespace": namespace, "status": { "state": ps::UNRECOVERED, "reason": reason } }),
            );
        }
    };
    let mut document = to_object(record)?;
    document.insert("status".into(), status(record).await);
    Ok(Value::Object(document))
}

/// What is true now, as far as anybody can tell: the supervisor's word, else what we see.
async fn status(record: &Record) -> Value {
    let created = clock::rfc3339(clock::from_unix_nanos(record.created_at));
    let mut status = json!({ "state": ps::state(record), "supervised": record.is_supervised(), "created_at": created,
        "key": record.key(), "activity": record.activity().name(), "activity_seconds": record.activity_age().as_secs_f64() });
    let live = match ask(record).await {
        Ok(live) => live,
        Err(e) => json!({ "error": e.to_string() }),
    };
    status["live"] = live;
    let parked = ps::parked(record).map(|(id, since)| {
        let age = SystemTime::now().duration_since(since).unwrap_or_default();
        json!({ "id": id, "age_seconds": age.as_secs() })
    });
    status["parked_containers"] = parked.collect();
    if let Some(taken) = record.taken_over() {
        status["network"] = taken.into();
    }
    status
}

async fn ask(record: &Record) -> Result<Value> {
    let answer = supervisor::status(record, LIMIT).await?;
    // The values of `info` are JSON documents in strings: show them as what they are.
    let info: Map<String, Value> = answer
        .info
        .iter()
        .map(|(key, text)| {
            (
                key.clone(),
                serde_json::from_str(text).unwrap_or_else(|_| Value::from(text.as_str())),
            )
        })
        .collect();
    Ok(json!({ "state": answer.state, "pid": answer.pid, "info": info }))
}

fn to_object(record: &Record) -> Result<Map<String, Value>> {
    match serde_json::to_value(record) {
        Ok(Value::Object(map)) => Ok(map),
        Ok(_) => Ok(Map::new()),
        Err(e) => Err(Error::caused(Kind::Other, "show the record as JSON", e)),
    }
}
