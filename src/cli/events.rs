//! `podvisor events`: what happens to pods and containers, from their records, for as long as somebody listens.
//!
//! Supervisors write down what happens and when before anybody is told; this reads it there, so that nothing is asked of them,
//! and what came to pass between two looks is told with its own time. Promises each event once. A container that is made
//! and removed between two looks (0.1 s) is not seen.

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, SystemTime};

use serde_json::{Value, json};

use crate::clock;
use crate::container::Status;
use crate::error::Result;
use crate::pod::history;
use crate::pod::record::{self, Found, Record, State};
use crate::process::Identity;

use super::failure::Failure;
use super::host::Host;
use super::output::{self, Format};
use super::{ps, select, since};

/// Between two looks.
const LOOK_AGAIN: Duration = Duration::from_millis(100);

/// Flags of `events`.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Examples:\n  podvisor events --since 1h --no-follow\n  podvisor events --no-follow --json --filter type=container web"
)]
pub struct Args {
    /// Begin with what is on record since then: a time as in 2026-11-30T13:33:12Z, or how long ago as in 10m. Without it only
    /// what happens from now on is told, with --no-follow everything on record.
    #[arg(long, value_name = "TIME", value_parser = since::since)]
    since: Option<String>,
    /// Tell what is on record and leave.
    #[arg(long)]
    no_follow: bool,
    /// Only these: type=pod, type=container, event=NAME. May be repeated: values of one key are alternatives.
    #[arg(short, long, value_name = "KEY=VALUE", value_parser = filter)]
    filter: Vec<(String, String)>,
    #[command(flatten)]
    format: Format,
    /// Only of these: names, ids, or beginnings of ids.
    #[arg(value_name = "POD")]
    pods: Vec<String>,
}

fn filter(text: &str) -> std::result::Result<(String, String), String> {
    match text.split_once('=') {
        Some((key @ ("type" | "event"), value)) if !value.is_empty() => {
            Ok((key.to_owned(), value.to_owned()))
        }
        _ => Err(format!(
            "{text:?} is no filter: write type=pod, type=container or event=NAME"
        )),
    }
}

/// One thing that happened.
#[derive(Clone, Debug, PartialEq)]
struct Event {
    /// Unix nanoseconds.
    at: u64,
    event: &'static str,
    /// Name of the container it happened to; `None`: to the pod.
    container: Option<String>,
    /// Code, stage, error, ...: what there is to be said.
    detail: BTreeMap<&'static str, Value>,
    /// What tells it from others of the pod.
    key: String,
}

/// A pod as it was seen last.
struct Seen {
    name: String,
    /// Device, inode and time of the record: another one is a new record.
    stamp: Option<(u64, u64, i64)>,
    supervisor: Option<Identity>,
    told: BTreeSet<String>,
    containers: BTreeMap<String, Status>,
    state: &'static str,
}

/// Runs the verb.
pub async fn run(host: &Host, args: &Args) -> Result<u8, Failure> {
    let mut only = BTreeSet::new();
    for target in &args.pods {
        match select::pod(host, target)? {
            Found::Record(record) => only.insert(record.id.clone()),
            Found::Broken { id, .. } => only.insert(id),
        };
    }
    let mut watch = Watch {
        host,
        args,
        only,
        seen: BTreeMap::new(),
    };
    let begin = clock::rfc3339(SystemTime::now());
    let past = match (&args.since, args.no_follow) {
        (Some(since), _) => since.clone(),
        (None, true) => String::new(),
        (None, false) => begin,
    };
    watch.first(&past)?;
    if args.no_follow {
        return Ok(0);
    }
    loop {
        tokio::time::sleep(LOOK_AGAIN).await;
        watch.look()?;
        if !watch.args.pods.is_empty() && watch.seen.is_empty() {
            return Ok(0);
        }
    }
}

struct Watch<'a> {
    host: &'a Host,
    args: &'a Args,
    /// Ids of the pods that are listened to; empty: all.
    only: BTreeSet<String>,
    seen: BTreeMap<String, Seen>,
}

impl Watch<'_> {
    /// What is on record; told from `past` on.
    fn first(&mut self, past: &str) -> Result<()> {
        let mut all = Vec::new();
        for id in self.ids() {
            let Ok(record) = record::read(&self.host.pod_dir(&id)) else {
                continue;
            };
            let events = of_record(&record);
            let seen = self.fresh(&record, &events);
            let named = events
                .into_iter()
                .map(|e| (record.id.clone(), seen.name.clone(), e));
            all.extend(named);
            self.seen.insert(id, seen);
        }
        all.sort_by_key(|(_, _, event)| event.at);
        for (id, name, event) in all {
            let at = clock::rfc3339(clock::from_unix_nanos(event.at));
            if !since::is_before(&at, past) {
                self.tell(&id, &name, &event)?;
            }
        }
        Ok(())
    }

    /// What has happened since the last look.
    fn look(&mut self) -> Result<()> {
        let ids = self.ids();
        let gone: Vec<String> = self
            .seen
            .keys()
            .filter(|id| !ids.contains(*id))
            .cloned()
            .collect();
        for id in ids {
            let dir = self.host.pod_dir(&id);
            let stamp = stamp(&dir);
            // The record of a pod whose supervisor was killed does not change.
            let same = |seen: &Seen| seen.stamp == stamp && !seen.has_died();
            if self.seen.get(&id).is_some_and(same) {
                continue;
            }
            let Ok(record) = record::read(&dir) else {
                continue;
            };
            self.compare(&record, stamp)?;
        }
        for id in gone {
            if let Some(seen) = self.seen.remove(&id) {
                self.tell(&id, &seen.name, &now("remove", None, BTreeMap::new()))?;
            }
        }
        Ok(())
    }

    fn compare(&mut self, record: &Record, stamp: Option<(u64, u64, i64)>) -> Result<()> {
        let events = of_record(record);
        let mut seen = match self.seen.remove(&record.id) {
            Some(seen) => seen,
            None => Seen {
                told: BTreeSet::new(),
                // It may have died before it was seen.
                state: "",
                ..self.fresh(record, &[])
            },
        };
        let mut new: Vec<Event> = events
            .into_iter()
            .filter(|e| !seen.told.contains(&e.key))
            .collect();
        for (id, status) in &seen.containers {
            let name = || Some(select::container_name(&record.id, id).to_owned());
            let after = record.containers.get(id).map(|c| c.status);
            let event = match (status, after) {
                (Status::Paused, Some(Status::Running)) => "unpause",
                (Status::Running, Some(Status::Paused)) => "pause",
                (_, None) => "remove",
                _ => continue,
            };
            new.push(now(event, name(), BTreeMap::new()));
        }
        let state = ps::state(record);
        if state != seen.state && state == ps::DEAD {
            new.push(now("die", None, BTreeMap::new()));
        }
        new.sort_by_key(|event| event.at);
        for event in &new {
            self.tell(&record.id, &record.name, event)?;
        }
        seen.told.extend(new.into_iter().map(|e| e.key));
        seen.stamp = stamp;
        seen.supervisor = record.supervisor;
        seen.containers = statuses(record);
        seen.state = state;
        self.seen.insert(record.id.clone(), seen);
        Ok(())
    }

    fn fresh(&self, record: &Record, events: &[Event]) -> Seen {
        Seen {
            name: record.name.clone(),
            stamp: stamp(&self.host.pod_dir(&record.id)),
            supervisor: record.supervisor,
            told: events.iter().map(|e| e.key.clone()).collect(),
            containers: statuses(record),
            state: ps::state(record),
        }
    }

    fn ids(&self) -> BTreeSet<String> {
        let all = record::ids(&self.host.config, &self.host.namespace).into_iter();
        all.filter(|id| self.only.is_empty() || self.only.contains(id))
            .collect()
    }

    fn tell(&self, id: &str, name: &str, event: &Event) -> Result<()> {
        let kind = if event.container.is_some() {
            "container"
        } else {
            "pod"
        };
        let fits = |key: &str, is: &str| {
            let mut wanted = self.args.filter.iter().filter(|(k, _)| k == key).peekable();
            wanted.peek().is_none() || wanted.any(|(_, value)| value == is)
        };
        if !fits("type", kind) || !fits("event", event.event) {
            return Ok(());
        }
        let at = clock::rfc3339(clock::from_unix_nanos(event.at));
        if self.args.format.is_json() {
            // One document a line, for who reads on and on.
            return output::json_line(&json!({
                "at": at,
                "type": kind,
                "event": event.event,
                "namespace": self.host.namespace,
                "pod_id": id,
                "pod": name,
                "container": event.container,
                "detail": event.detail,
            }));
        }
        let mut text = format!("{at} {kind} {} {name}", event.event);
        if let Some(container) = &event.container {
            text.push_str(&format!("/{container}"));
        }
        for (key, value) in &event.detail {
            text.push_str(&format!(" {key}={value}"));
        }
        output::line(output::printable(&text, false));
        Ok(())
    }
}

impl Seen {
    /// Its supervisor was alive at the last look, and is no more.
    fn has_died(&self) -> bool {
        !matches!(self.state, ps::DEAD | ps::STOPPED)
            && !self.supervisor.is_some_and(|process| process.is_alive())
    }
}

fn statuses(record: &Record) -> BTreeMap<String, Status> {
    let all = record.containers.iter();
    all.map(|(id, c)| (id.clone(), c.status)).collect()
}

fn stamp(dir: &Path) -> Option<(u64, u64, i64)> {
    let meta = std::fs::metadata(dir.join(record::FILE)).ok()?;
    Some((meta.dev(), meta.ino(), meta.mtime_nsec()))
}

fn now(
    event: &'static str,
    container: Option<String>,
    detail: BTreeMap<&'static str, Value>,
) -> Event {
    let at = clock::unix_nanos(SystemTime::now());
    Event {
        key: format!("{event} {container:?} {at}"),
        at,
        event,
        container,
        detail,
    }
}

/// Everything that a record tells with its time, oldest first.
fn of_record(record: &Record) -> Vec<Event> {
    let mut all = Vec::new();
    let mut push = |at: u64,
                    event,
                    container: Option<&str>,
                    detail: Vec<(&'static str, Value)>,
                    key: String| {
        all.push(Event {
            at,
            event,
            container: container.map(str::to_owned),
            detail: detail.into_iter().filter(|(_, v)| !v.is_null()).collect(),
            key,
        });
    };
    let key = |what: &str, at: u64| format!("{what} {at}");
    let begin = record.created_at;
    push(begin, "create", None, Vec::new(), key("create", begin));
    let after = |us: u64| begin.saturating_add(us.saturating_mul(1000));
    for stage in &record.stages {
        let Some(took) = stage.took_us else { continue };
        let (at, what) = (
            after(stage.at_us.saturating_add(took)),
            format!("stage {}", stage.name),
        );
        let detail = vec![
            ("stage", json!(stage.name)),
            ("took_us", json!(took)),
            ("error", json!(stage.error)),
        ];
        push(at, "stage", None, detail, key(&what, stage.at_us));
    }
    for moment in &record.history {
        let name = match moment.event {
            // Told by its stages' errors too, but not where it has none.
            history::Event::Undo if moment.took_us.is_none() => continue,
            history::Event::TimedOut => "timed_out",
            other => other.as_str(),
        };
        let text = |text: &str| (!text.is_empty()).then(|| text.to_owned());
        let detail = vec![
            ("detail", json!(text(&moment.detail))),
            ("error", json!(moment.error)),
            ("times", json!((moment.times > 1).then_some(moment.times))),
        ];
        let key = format!("{name} {} {} {}", moment.detail, moment.at_us, moment.times);
        push(after(moment.at_us), name, None, detail, key);
    }
    if let Some(at) = record.ready_at {
        push(
            at,
            "ready",
            None,
            vec![("ips", json!(record.network.ips))],
            key("ready", at),
        );
    }
    if let Some(at) = record.exited_at {
        let detail = vec![
            ("code", json!(record.exit_status)),
            ("reason", json!(record.reason)),
        ];
        push(at, "exit", None, detail, key("exit", at));
    }
    for (id, c) in &record.containers {
        let name = Some(select::container_name(&record.id, id));
        let key = |what: &str, at: u64| format!("{id} {what} {at}");
        if c.status != Status::Creating {
            push(
                c.created_at,
                "create",
                name,
                Vec::new(),
                key("create", c.created_at),
            );
        }
        if let Some(at) = c.started_at {
            push(at, "start", name, Vec::new(), key("start", at));
        }
        if let Some(exit) = c.exit {
            push(
                exit.at,
                "exit",
                name,
                vec![("code", json!(exit.code))],
                key("exit", exit.at),
            );
        }
        if c.oom_kills > 0 {
            let at = c
                .exit
                .map_or_else(|| clock::unix_nanos(SystemTime::now()), |e| e.at);
            push(
                at,
                "oom",
                name,
                vec![("kills", json!(c.oom_kills))],
                key("oom", c.oom_kills),
            );
        }
    }
    all.sort_by_key(|event| event.at);
    if record.state == State::Stopped {
        let last = all.last().map_or(begin, |event| event.at);
        all.push(Event {
            at: last.max(record.exited_at.unwrap_or(0)),
            event: "stop",
            container: None,
            detail: BTreeMap::new(),
            key: "stop".to_owned(),
        });
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn filters_have_two_keys() {
        assert!(filter("type=pod").is_ok() && filter("event=exit").is_ok());
        for bad in ["", "type", "type=", "name=x"] {
            assert!(filter(bad).is_err(), "{bad}");
        }
    }
}
