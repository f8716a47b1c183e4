//! From what people type to one pod or one container: names, ids, unambiguous beginnings of ids.
//!
//! Promises that a full name or id always wins over a beginning, and that nothing is ever guessed: what fits twice is an
//! error that lists what it fits. A pod's name is never shortened: `rm -f web`, typed twice, must not remove `web2`.

use std::borrow::Borrow;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::error::Kind;
use crate::pod::record::{self, Found, Record};

use super::failure::Failure;
use super::host::Host;
use super::names;
use super::supervisor::{label, short};

/// Name of the container that `run` made the pod for.
pub const MAIN: &str = "main";

/// How long a pod may be without its journal before that is a fault.
const REMOVAL: Duration = Duration::from_secs(1);

/// The pod that `target` stands for, readable or not.
pub fn pod(host: &Host, target: &str) -> Result<Found, Failure> {
    // Exact name, exact id: no need to read two hundred journals.
    let exact = names::lookup(host, target).filter(|id| crate::id::check("pod id", id).is_ok());
    for id in exact.iter().map(String::as_str).chain([target]) {
        if crate::id::check("pod id", id).is_ok()
            && let Some(found) = record::look(&host.pod_dir(id), &host.namespace)
        {
            return Ok(found);
        }
    }
    let all = record::list(&host.config, Some(&host.namespace));
    let named: Vec<usize> = positions(&all, |name, _| name == target);
    let fits = match named.len() {
        0 if target.is_empty() => Vec::new(),
        0 => positions(&all, |_, id| id.starts_with(target)),
        _ => latest(&all, named),
    };
    match fits[..] {
        [] => Err(unknown(target)),
        [only] => all.into_iter().nth(only).ok_or_else(|| unknown(target)),
        _ => {
            let list: Vec<String> = fits.iter().filter_map(|&i| all.get(i)).map(show).collect();
            Err(ambiguous(target, &list))
        }
    }
}

/// What is told of a name, or the beginning of an id, that several pods have.
pub fn ambiguous<S: Borrow<str>>(target: &str, fits: &[S]) -> Failure {
    Failure::no_such(
        Kind::Invalid,
        format!(
            "find pod {target:?}: it could be {}; write more of it",
            fits.join(" or ")
        ),
    )
}

/// Of several tries of one and the same pod the one with the highest attempt, whatever the clocks said: that is what a
/// daemon means by the pod's name. Different pods of one name stay several.
fn latest(all: &[Found], named: Vec<usize>) -> Vec<usize> {
    let key = |i: usize| match all.get(i) {
        Some(Found::Record(r)) if !r.uid.is_empty() => Some((&r.pod_namespace, &r.uid)),
        _ => None,
    };
    let attempt = |i: &usize| match all.get(*i) {
        Some(Found::Record(r)) => r.attempt,
        _ => 0,
    };
    let one = named.first().and_then(|&i| key(i));
    if one.is_none() || named.iter().any(|&i| key(i) != one) {
        return named;
    }
    let newest = named.iter().map(attempt).max();
    let mut kept = named;
    kept.retain(|i| Some(attempt(i)) == newest);
    kept
}

/// The same, for verbs that need to read the record.
pub fn readable(host: &Host, target: &str) -> Result<Box<Record>, Failure> {
    match pod(host, target)? {
        Found::Record(record) => Ok(record),
        Found::Broken { id, .. } if is_being_removed(&host.pod_dir(&id)) => Err(unknown(target)),
        Found::Broken { reason, .. } => Err(Failure::no_such(
            Kind::State,
            format!("use pod {target:?}: {reason}"),
        )),
    }
}

/// The supervisor takes its journal along when it leaves, and whoever removes the pod takes the directory right after
/// that: a directory without a journal that goes within [`REMOVAL`].
fn is_being_removed(dir: &Path) -> bool {
    let end = Instant::now() + REMOVAL;
    while dir.exists() {
        if dir.join(record::FILE).exists() || Instant::now() > end {
            return false;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    true
}

/// A pod and one of its containers from `POD` or `POD/CONTAINER`.
pub fn container(host: &Host, target: &str) -> Result<(Box<Record>, String), Failure> {
    let (pod, wanted) = match target.split_once('/') {
        Some((pod, container)) => (pod, Some(container)),
        None => (target, None),
    };
    let record = readable(host, pod)?;
    let known = containers(&record, &host.pod_dir(&record.id));
    let id = choose(&record.id, &known, wanted).map_err(|why| {
        Failure::no_such(
            Kind::NotFound,
            format!("find a container of pod {}: {why}", label(&record)),
        )
    })?;
    Ok((record, id))
}

/// Id of the container called `name` in a pod. Ids are unique in a namespace because OCI runtimes keep one list for it.
pub fn container_id(pod: &str, name: &str) -> String {
    format!("{}-{name}", short(pod))
}

/// What a container is called inside its pod.
pub fn container_name<'a>(pod: &str, container: &'a str) -> &'a str {
    container
        .strip_prefix(short(pod))
        .and_then(|rest| rest.strip_prefix('-'))
        .unwrap_or(container)
}

/// Containers on record and, when the supervisor has forgotten them, those that have left a log.
fn containers(record: &Record, dir: &Path) -> Vec<String> {
    let mut known: Vec<String> = record.containers.keys().cloned().collect();
    for entry in fs::read_dir(dir.join("logs"))
        .into_iter()
        .flatten()
        .flatten()
    {
        let name = entry.file_name();
        let Some(id) = name.to_str().and_then(|n| n.strip_suffix(".log")) else {
            continue;
        };
        if crate::id::check("container id", id).is_ok() && !known.iter().any(|k| k == id) {
            known.push(id.to_owned());
        }
    }
    known
}

fn choose(pod: &str, known: &[String], wanted: Option<&str>) -> Result<String, String> {
    let has = |id: &str| known.iter().find(|k| *k == id).cloned();
    let names = || {
        known
            .iter()
            .map(|k| container_name(pod, k))
            .collect::<Vec<_>>()
            .join(", ")
    };
    let Some(wanted) = wanted else {
        return match (has(&container_id(pod, MAIN)), known) {
            (Some(main), _) => Ok(main),
            (None, [only]) => Ok(only.clone()),
            (None, []) => Err("it has none; add one with `podvisor run --sandbox`".to_owned()),
            (None, _) => Err(format!("name one of them as POD/CONTAINER: {}", names())),
        };
    };
    if let Some(id) = has(&container_id(pod, wanted)).or_else(|| has(wanted)) {
        return Ok(id);
    }
    let fits: Vec<&String> = known
        .iter()
        .filter(|k| {
            !wanted.is_empty()
                && (container_name(pod, k).starts_with(wanted) || k.starts_with(wanted))
        })
        .collect();
    match fits[..] {
        [only] => Ok(only.clone()),
        [] => Err(format!("none is called {wanted:?}; there are: {}", names())),
        _ => Err(format!("{wanted:?} fits more than one of: {}", names())),
    }
}

fn positions(all: &[Found], fits: impl Fn(&str, &str) -> bool) -> Vec<usize> {
    let parts = |found: &Found| match found {
        Found::Record(r) => fits(&r.name, &r.id),
        Found::Broken { id, .. } => fits("", id),
    };
    all.iter()
        .enumerate()
        .filter(|(_, f)| parts(f))
        .map(|(i, _)| i)
        .collect()
}

fn show(found: &Found) -> String {
    match found {
        Found::Record(r) if r.name.is_empty() => short(&r.id).to_owned(),
        Found::Record(r) => format!("{} ({})", r.name, short(&r.id)),
        Found::Broken { id, .. } => short(id).to_owned(),
    }
}

fn unknown(target: &str) -> Failure {
    let shown: String = target.chars().take(80).collect();
    Failure::no_such(
        Kind::NotFound,
        format!(
            "find pod {shown:?}: no pod has this name, nor an id that begins so; `podvisor ps -a` lists the pods there are"
        ),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    const POD: &str = "0123456789abcdef0123456789abcdef";

    fn broken(id: &str) -> Found {
        Found::Broken {
            namespace: "default".into(),
            id: id.into(),
            reason: String::new(),
        }
    }

    #[test]
    fn prefixes_are_counted_not_guessed() {
        let all = [broken("abc"), broken("abd"), broken("x")];
        assert_eq!(positions(&all, |_, id| id.starts_with("ab")), [0, 1]);
        assert_eq!(positions(&all, |_, id| id.starts_with("abd")), [1]);
        assert!(positions(&all, |name, _| name == "abc").is_empty());
    }

    #[test]
    fn the_main_container_is_meant_unless_another_is_named() {
        let known: Vec<String> = ["main", "log", "logger"]
            .iter()
            .map(|n| container_id(POD, n))
            .collect();
        assert_eq!(choose(POD, &known, None), Ok(container_id(POD, "main")));
        assert_eq!(
            choose(POD, &known, Some("log")),
            Ok(container_id(POD, "log"))
        );
        assert_eq!(
            choose(POD, &known, Some("logg")),
            Ok(container_id(POD, "logger"))
        );
        assert_eq!(
            choose(POD, &known, Some(&container_id(POD, "log"))),
            Ok(container_id(POD, "log"))
        );
        for bad in ["lo", "", "nope"] {
            assert!(choose(POD, &known, Some(bad)).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn a_pod_without_a_main_container_needs_a_name_when_there_are_two() {
        let two: Vec<String> = ["a", "b"].iter().map(|n| container_id(POD, n)).collect();
        assert!(choose(POD, &two, None).is_err());
        assert_eq!(choose(POD, &two[..1], None), Ok(container_id(POD, "a")));
        assert!(choose(POD, &[], None).is_err());
        assert_eq!(container_name(POD, &two[1]), "b");
        assert!(crate::id::check("container id", &container_id(POD, &"n".repeat(63))).is_ok());
    }
}
