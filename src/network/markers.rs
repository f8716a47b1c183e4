//! The record of one pod's network, `<state_root>/networks/<hash>/`: what decides whether a DEL is owed.
//!
//! The attachment `eth0` has its files there, each other one in a directory `if-<interface>` below (`slot`):
//!
//! | file | says |
//! |---|---|
//! | `owner.json` | whose record it is; written first, so that a damaged `add-started.json` can still be acted on |
//! | `add-started.json` | configuration, attachment, boot id: the first plugin may have run |
//! | `partial.json` | result of the last plugin that succeeded in a chain that failed |
//! | `result.json` | the ADD succeeded |
//! | `network-stopped` | a DEL succeeded after it |
//!
//! Promises: each file is whole or absent, also after a power cut. The presence of `add-started.json` counts, not its
//! content: cut to nothing, it still means that a DEL is owed.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::fcntl::{Flock, FlockArg};
use sha2::{Digest, Sha256};
use tokio::time::Instant;

use super::slot::Slot;
use super::{AddResult, Attachment, NetworkConf, disk, owed};
use crate::config::Config;
use crate::error::{Context, Error, Kind, Result};
use crate::failpoint;

/// Between two looks at a lock that somebody holds.
const LOCK_PAUSE: Duration = Duration::from_millis(20);

/// The interface whose files stand in the record's own directory.
pub(super) const FIRST: &str = "eth0";

/// Before the interface's name in the directory of another attachment.
const BESIDE: &str = "if-";

/// The record of one sandbox's network. Holds only where it is; every question reads the disk.
#[derive(Debug, Clone)]
pub struct NetworkRecord {
    dir: PathBuf,
    /// Empty in a record found by `list` whose files say nothing any more.
    namespace: String,
    sandbox_id: String,
}

/// One attachment on record.
#[derive(Debug, Clone)]
pub struct OnRecord {
    /// Name of the network.
    pub network: String,
    /// CNI_CONTAINERID.
    pub container_id: String,
    /// CNI_IFNAME.
    pub ifname: String,
    /// Where its netns is or was.
    pub netns: PathBuf,
    /// Its DEL is owed.
    pub owes_del: bool,
    /// What its ADD gave; None while it has not succeeded, or when that is damaged.
    pub result: Option<AddResult>,
}

/// Holds other processes off the record while plugins run.
#[derive(Debug)]
pub(super) struct Locked {
    _dir: Flock<File>,
}

/// Name of everything that is kept per sandbox: 32 hex digits. Ids may be 76 characters and a socket or link name may not.
pub(super) fn hash(namespace: &str, sandbox_id: &str) -> String {
    let digest = Sha256::digest(format!("{namespace}\0{sandbox_id}"));
    digest[..16].iter().map(|b| format!("{b:02x}")).collect()
}

impl NetworkRecord {
    /// The record's place for this sandbox; touches nothing.
    pub fn at(config: &Config, namespace: &str, sandbox_id: &str) -> Self {
        Self {
            dir: root(config).join(hash(namespace, sandbox_id)),
            namespace: namespace.to_owned(),
            sandbox_id: sandbox_id.to_owned(),
        }
    }

    /// `<state_root>/networks/<hash>`.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// For one of the attachments `add-started` exists and `network-stopped` does not.
    pub fn owes_del(&self) -> bool {
        self.slots().iter().any(Slot::owes_del)
    }

    /// Writes `add-started` of this attachment before its first plugin. State error while an earlier ADD of the same
    /// interface still owes its DEL; what earlier, finished ones left is replaced.
    pub fn begin(&self, conf: &NetworkConf, attachment: &Attachment) -> Result<()> {
        let slot = self.slot(&attachment.ifname);
        if slot.owes_del() {
            return Err(Error::new(
                Kind::State,
                format!(
                    "begin network {:?} of sandbox {:?}: an earlier ADD of {} is on record and its DEL is owed first; stop or remove the pod, or run `podvisor gc`",
                    conf.name, self.sandbox_id, attachment.ifname
                ),
            ));
        }
        self.make_dir()?;
        let slots = self.slots();
        if !slots.iter().any(Slot::owes_del) {
            // The attachments of an earlier life say nothing about this one.
            slots.iter().try_for_each(Slot::clear)?;
            disk::remove_file(&self.dir.join(owed::OWED))?;
        }
        let place = slots.iter().filter(|s| s.owes_del()).map(Slot::place);
        let place = place.max().map_or(0, |last| last.saturating_add(1));
        slot.begin(place, conf, attachment)
    }

    /// What the ADD of the first attachment gave; None while there is none that succeeded, or its record is damaged.
    pub fn read_result(&self) -> Option<AddResult> {
        self.slots().iter().find_map(Slot::read_result)
    }

    /// Every attachment that was begun, in the order of their ADDs. Those whose files cannot be read are there with
    /// what their place tells.
    pub fn attachments(&self) -> Vec<OnRecord> {
        let begun = self.slots().into_iter().filter(Slot::is_begun);
        begun.map(|slot| slot.on_record()).collect()
    }

    /// Removes the whole record (after DEL succeeded and the sandbox is forgotten); absent = done. State error while a
    /// DEL is owed: the record is all that remembers it.
    pub fn remove(&self) -> Result<()> {
        if self.owes_del() {
            return Err(Error::new(
                Kind::State,
                format!(
                    "remove network record {}: its DEL is still owed",
                    self.dir.display()
                ),
            ));
        }
        // add-started before network-stopped: cut short in between, the record must not claim a DEL again.
        failpoint::hit("record.remove.before")?;
        self.slots().iter().try_for_each(Slot::clear)?;
        failpoint::hit("record.remove.half")?;
        match fs::remove_dir_all(&self.dir) {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(()),
            Err(e) => Err(Error::io(
                format!("remove network record {}", self.dir.display()),
                e,
            )),
            Ok(()) => self.dir.parent().map_or(Ok(()), disk::sync_dir),
        }
    }

    /// Every record below the state root: (namespace, sandbox id, record). Of a record none of whose files can be read
    /// the namespace is empty and the id is the directory's name.
    pub fn list(config: &Config) -> Vec<(String, String, NetworkRecord)> {
        let Ok(entries) = fs::read_dir(root(config)) else {
            return Vec::new();
        };
        let mut dirs: Vec<PathBuf> = entries
            .flatten()
            .map(|e| e.path())
            .filter(|p| p.is_dir())
            .collect();
        dirs.sort();
        dirs.into_iter().map(open).collect()
    }

    /// Makes the place of the record and excludes other processes, before [`NetworkRecord::begin`]: between a record and
    /// its lock somebody else could send the DEL ahead of the ADD.
    pub(super) fn reserve(&self) -> Result<Locked> {
        self.make_dir()?;
        self.lock()
    }

    /// Excludes other processes (a supervisor and `podvisor gc`) until dropped; Busy when one is at it. The kernel
    /// frees it with the process, so nothing can stay locked.
    pub(super) fn lock(&self) -> Result<Locked> {
        let dir = File::open(&self.dir)
            .context(|| format!("lock network record {}", self.dir.display()))?;
        match Flock::lock(dir, FlockArg::LockExclusiveNonblock) {
            Ok(dir) => Ok(Locked { _dir: dir }),
            Err((_, nix::errno::Errno::EWOULDBLOCK)) => Err(Error::new(
                Kind::Busy,
                format!(
                    "lock network record {}: another process is at this network; retry",
                    self.dir.display()
                ),
            )),
            Err((_, e)) => Err(Error::sys(
                format!("lock network record {}", self.dir.display()),
                e,
            )),
        }
    }

    /// The files of one attachment; touches nothing.
    pub(super) fn slot(&self, ifname: &str) -> Slot {
        let dir = if ifname == FIRST {
            self.dir.clone()
        } else {
            self.dir.join(format!("{BESIDE}{ifname}"))
        };
        Slot::new(dir, ifname, &self.namespace, &self.sandbox_id)
    }

    /// All attachments that have a place, in the order of their ADDs.
    pub(super) fn slots(&self) -> Vec<Slot> {
        let mut names: Vec<String> = fs::read_dir(&self.dir)
            .map(|entries| {
                let names = entries
                    .flatten()
                    .filter_map(|e| e.file_name().into_string().ok());
                names
                    .filter_map(|n| n.strip_prefix(BESIDE).map(str::to_owned))
                    .collect()
            })
            .unwrap_or_default();
        names.sort();
        let mut slots = vec![self.slot(FIRST)];
        slots.extend(names.iter().map(|name| self.slot(name)));
        slots.sort_by_key(Slot::place);
        slots
    }

    /// Each level is checked: who can write to one of them decides what is run as root.
    pub(super) fn make_dir(&self) -> Result<()> {
        let what = || format!("record the network of sandbox {:?}", self.sandbox_id);
        let root = self.dir.parent().unwrap_or(&self.dir);
        [root.parent().unwrap_or(root), root, &self.dir]
            .into_iter()
            .try_for_each(|dir| disk::private_dir(dir).context(what))
    }
}

/// Holds off (exclusive) or is held off by (shared) the collection of garbage on this machine: what is being added must
/// not be taken for garbage. Busy when it cannot be had within `limit`.
pub(super) async fn lock_all(config: &Config, exclusive: bool, limit: Duration) -> Result<Locked> {
    let root = root(config);
    let what = || format!("lock {}", root.display());
    [&config.state_root, &root]
        .into_iter()
        .try_for_each(|dir| disk::private_dir(dir).context(what))?;
    let how = if exclusive {
        FlockArg::LockExclusiveNonblock
    } else {
        FlockArg::LockSharedNonblock
    };
    let end = Instant::now() + limit;
    let mut dir = File::open(&root).context(what)?;
    loop {
        match Flock::lock(dir, how) {
            Ok(dir) => return Ok(Locked { _dir: dir }),
            Err((back, nix::errno::Errno::EWOULDBLOCK)) if Instant::now() < end => dir = back,
            Err((_, nix::errno::Errno::EWOULDBLOCK)) => {
                return Err(Error::new(
                    Kind::Busy,
                    format!("{}: networks are being added or collected; retry", what()),
                ));
            }
            Err((_, e)) => return Err(Error::sys(what(), e)),
        }
        tokio::time::sleep(LOCK_PAUSE).await;
    }
}

fn root(config: &Config) -> PathBuf {
    config.state_root.join("networks")
}

fn open(dir: PathBuf) -> (String, String, NetworkRecord) {
    let mut record = NetworkRecord {
        dir,
        namespace: String::new(),
        sandbox_id: String::new(),
    };
    let known = record.slots().iter().find_map(Slot::owner);
    let known = known.or_else(|| record.holder().map(|h| (h.namespace, h.sandbox_id)));
    if let Some((namespace, sandbox_id)) = known {
        record.namespace = namespace;
        record.sandbox_id = sandbox_id;
        return (record.namespace.clone(), record.sandbox_id.clone(), record);
    }
    let name = record
        .dir
        .file_name()
        .unwrap_or_default()
        .to_string_lossy()
        .into_owned();
    (String::new(), name, record)
}

#[cfg(test)]
mod tests;
