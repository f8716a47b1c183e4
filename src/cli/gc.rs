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
use crate::pod::Parked;
use crate::pod::gc::{self, Left};
use crate::pod::record::Found;

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
    let mut unsettled = 0;
    for left in gc::left(&host.config) {
        let what = describe(host, &left);
        if let Some(why) = kept(&left, args.all) {
            output::line(format!("left alone: {what}: {why}"));
            continue;
        }
        if args.dry_run {
            output::line(format!("would undo: {what}"));
            continue;
        }
        match settle(host, &left).await {
            Ok(()) => output::line(format!("undone: {what}")),
            Err(e) => {
                unsettled += 1;
                output::complain(format!("not undone: {what}: {e}"));
            }
        }
    }
    for socket in dead_sockets(&host.config.runtime_root.join("s")) {
        let what = format!("socket {} of a supervisor that has died", socket.display());
        if args.dry_run {
            output::line(format!("would undo: {what}"));
        } else if let Err(e) = launch::remove_dead_socket(&socket) {
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
        Left::Network(owed) => owed::hurry(host, owed).await,
        Left::Record(record) => gc::clear(&host.config, record),
        Left::Netns { path, .. } => netns::unpin(path),
        Left::Link(path) => match fs::remove_file(path) {
            // It went with what it led to.
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
            removed => removed.context(|| format!("remove {}", path.display())),
        },
    }
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
