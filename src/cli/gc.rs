//! `podvisor gc`: undoes what supervisors that have died, and reboots, have left on the node.
//!
//! Promises a line for each thing, whether done, failed or left alone, and that one thing's failure does not keep the
//! others from their turn. With `--dry-run` nothing is changed.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::client;
use crate::error::{Context, Result};
use crate::launch;
use crate::network::netns;
use crate::plugin;
use crate::pod::Parked;
use crate::pod::gc::{self, Left};
use crate::pod::record::Found;
use crate::undo::together;

use super::failure::{Failure, NO_SUCH};
use super::host::Host;
use super::supervisor::label;
use super::{names, output, owed, parked, remove};

/// Flags of `gc`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  podvisor gc --dry-run\n\n\
    Exit codes: 0 nothing is left, 1 something is still owed or could not be undone.")]
pub struct Args {
    /// Print what would be done.
    #[arg(long)]
    dry_run: bool,
    /// Undo also networks that are parked for their pods and have no keeper any more, before their time is over.
    #[arg(long)]
    all: bool,
    /// For a unit that runs at boot: each thing once, and success also when something is still owed.
    #[arg(long)]
    boot: bool,
}

/// Runs the verb.
pub async fn run(host: &Host, args: &Args) -> Result<u8, Failure> {
    let (slow, quick): (Vec<_>, Vec<_>) = gc::left(&host.config).into_iter().partition(|left| {
        matches!(
            left,
            Left::Pod(_) | Left::Directory { .. } | Left::Network(_)
        )
    });
    // Side by side: a plugin that hangs for one pod is no other pod's business.
    let each = slow.iter().map(|left| Box::pin(one(host, args, left)));
    let mut settled = together(each.collect(), gc::AT_ONCE).await;
    for left in &quick {
        settled.push(one(host, args, left).await);
    }
    let mut unsettled = settled.iter().filter(|settled| !**settled).count();
    for namespace in namespaces(&host.config.runtime_root) {
        let Ok(host) = host.of_namespace(&namespace) else {
            continue;
        };
        for (name, id) in names::stale(&host) {
            let what = format!("name {name} of namespace {namespace}, whose pod is gone");
            if args.dry_run {
                output::line(format!("would undo: {what}"));
            } else if let Err(e) = names::forget_stale(&host, &name, &id) {
                unsettled += 1;
                output::complain(format!("not undone: {what}: {e}"));
            } else {
                output::line(format!("undone: {what}"));
            }
        }
    }
    let sockets = dead_sockets(&host.config.runtime_root.join("s"));
    let sockets = sockets.into_iter();
    let half = half_written(&host.config.runtime_root).into_iter();
    let doors = plugin::dead_doors(&host.config).into_iter();
    let socket: Removal = ("socket", launch::remove_dead_socket);
    let file: Removal = ("half-written file", remove_file);
    let door: Removal = ("directory", remove_dir);
    let sockets = sockets.map(|path| (path, socket));
    let files = half.map(|path| (path, file));
    let doors = doors.map(|path| (path, door));
    let group: Removal = ("cgroup", plugin::remove_dead_group);
    let groups = plugin::dead_groups(&host.config).into_iter();
    let groups = groups.map(|path| (path, group));
    for (path, (kind, remove)) in sockets.chain(files).chain(doors).chain(groups) {
        let what = format!("{kind} {} of a process that has died", path.display());
        if args.dry_run {
            output::line(format!("would undo: {what}"));
        } else if let Err(e) = remove(&path) {
            unsettled += 1;
            output::complain(format!("not undone: {what}: {e}"));
        } else {
            output::line(format!("undone: {what}"));
        }
    }
    if unsettled > 0 && !args.boot {
        return Err(Failure::silent(NO_SUCH));
    }
    Ok(0)
}

/// One thing's turn, with its line; false when it is still there.
async fn one(host: &Host, args: &Args, left: &Left) -> bool {
    let what = describe(host, left);
    if let Some(why) = kept(left, args.all) {
        output::line(format!("left alone: {what}: {why}"));
        return true;
    }
    if args.dry_run {
        output::line(format!("would undo: {what}"));
        return true;
    }
    match settle(host, left).await {
        Ok(()) => {
            output::line(format!("undone: {what}"));
            true
        }
        Err(e) => {
            output::complain(format!("not undone: {what}: {e}"));
            false
        }
    }
}

fn describe(host: &Host, left: &Left) -> String {
    match left {
        Left::Pod(record) => format!(
            "pod {} of namespace {}, whose supervisor has died",
            label(record),
            record.namespace
        ),
        Left::Directory { namespace, id, .. } => {
            let name = host
                .of_namespace(namespace)
                .ok()
                .and_then(|h| names::of(&h, id));
            format!(
                "pod {} of namespace {namespace}, whose record cannot be read",
                name.as_deref().unwrap_or(id)
            )
        }
        Left::Network(owed) => format!(
            "network of pod {} of namespace {}, which is gone",
            owed::label(owed),
            owed.namespace
        ),
        Left::Parked(parked) => format!(
            "parked network of pod {} of namespace {}, which is gone",
            parked::label(parked),
            parked.holder.namespace
        ),
        Left::Record(record) => format!("record {}, which owes nothing", record.dir().display()),
        Left::Netns { path, .. } => format!("netns {}, which is no pod's", path.display()),
        Left::Link(path) => format!("link {}, which leads nowhere", path.display()),
    }
}

fn kept(left: &Left, all: bool) -> Option<String> {
    match left {
        Left::Parked(parked) if !all => Some(format!(
            "{}; `podvisor rm {}` undoes it now",
            parked::reason(parked),
            parked::label(parked)
        )),
        Left::Directory { kept, .. } => kept.clone(),
        Left::Netns {
            user: Some(pid), ..
        } => Some(format!("process {pid} is in it")),
        _ => None,
    }
}

async fn settle(host: &Host, left: &Left) -> Result<()> {
    match left {
        Left::Pod(record) => {
            let host = host.of_namespace(&record.namespace)?;
            remove::pod(&host, &Found::Record(record.clone()), false, Parked::Stays).await
        }
        Left::Directory { namespace, id, .. } => {
            let found = Found::Broken {
                namespace: namespace.clone(),
                id: id.clone(),
                reason: String::new(),
            };
            remove::pod(&host.of_namespace(namespace)?, &found, false, Parked::Stays).await
        }
        Left::Parked(parked) => parked::undo(host, parked).await,
        Left::Network(owed) => owed::try_once(host, owed).await,
        Left::Record(record) => gc::clear(&host.config, record),
        Left::Netns { path, .. } => netns::unpin(path),
        // It may have gone with what it led to.
        Left::Link(path) => remove_file(path),
    }
}

/// What it is called, and how it is removed.
type Removal = (&'static str, fn(&Path) -> Result<()>);

fn remove_dir(path: &Path) -> Result<()> {
    match fs::remove_dir_all(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed.context(|| format!("remove {}", path.display())),
    }
}

fn remove_file(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed.context(|| format!("remove {}", path.display())),
    }
}

/// Files that are kept for the boot are written as `.<name>.<pid>` first: those of processes that are gone.
fn half_written(root: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(root).into_iter().flatten().flatten();
    let dead = |path: &PathBuf| {
        let name = path
            .file_name()
            .and_then(|n| n.to_str())
            .unwrap_or_default();
        let pid = name.strip_prefix('.').and_then(|n| n.rsplit_once('.'));
        pid.is_some_and(|(_, pid)| {
            pid.parse::<u32>().is_ok() && !Path::new("/proc").join(pid).exists()
        })
    };
    entries.map(|e| e.path()).filter(dead).collect()
}

/// Namespaces that names were given in.
fn namespaces(root: &Path) -> Vec<String> {
    let entries = fs::read_dir(root).into_iter().flatten().flatten();
    let named = entries.filter(|e| e.path().join(names::DIRECTORY).is_dir());
    let mut all: Vec<String> = named
        .filter_map(|e| e.file_name().into_string().ok())
        .collect();
    all.sort();
    all
}

/// Sockets of ours that nobody listens on.
fn dead_sockets(dir: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let mut dead: Vec<PathBuf> = entries
        .map(|e| e.path())
        .filter(|p| !client::is_live(p))
        .collect();
    dead.sort();
    dead
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_files_of_processes_that_are_gone_are_half_written() {
        let dir = tempfile::tempdir().unwrap();
        let own = format!(".cni-latency.{}", std::process::id());
        for name in [&own, ".cni-latency.99999999", ".cni-latency", "x.99999999"] {
            fs::write(dir.path().join(name), "").unwrap();
        }
        let found = half_written(dir.path());
        assert_eq!(found, [dir.path().join(".cni-latency.99999999")]);
    }
}
