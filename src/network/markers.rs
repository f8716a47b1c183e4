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
use std::time::{Duration, SystemTime};

use nix::fcntl::{Flock, FlockArg};
use sha2::{Digest, Sha256};
use tokio::time::Instant;

use super::slot::Slot;
use super::{AddResult, Attachment, Holder, NetworkConf, disk, owed};
use crate::config::Config;
use crate::error::{Context, Error, Kind, Result};
use crate::failpoint;
use crate::process::Identity;

/// Between two looks at a lock that somebody holds.
const LOCK_PAUSE: Duration = Duration::from_millis(20);

/// The interface whose files stand in the record's own directory.
pub(super) const FIRST: &str = "eth0";

/// Before the interface's name in the directory of another attachment.
const BESIDE: &str = "if-";

/// Networks that one sandbox id may have begun and others taken over.
const MAX_PLACES: u32 = 1000;

/// The record of one network, as one sandbox sees it. Holds only where it is and whose eyes look at it; every question
/// reads the disk. What another sandbox has taken over owes this one nothing.
#[derive(Debug, Clone)]
pub struct NetworkRecord {
    dir: PathBuf,
    /// Empty in a record found by `list` whose files say nothing any more.
    namespace: String,
    sandbox_id: String,
    /// The supervisor that looks, or whose work is undone; None: any of this sandbox.
    by: Option<Identity>,
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
    /// When its ADD began.
    pub begun_at: Option<SystemTime>,
    /// What its ADD gave; None while it has not succeeded, or when that is damaged.
    pub result: Option<AddResult>,
}

/// Holds other processes off the record while plugins run.
#[derive(Debug)]
pub(super) struct Locked {
    _dir: Flock<File>,
}

impl Locked {
    pub(super) fn of(dir: Flock<File>) -> Self {
        Self { _dir: dir }
    }
}

/// Name of everything that is kept per sandbox: 32 hex digits. Ids may be 76 characters and a socket or link name may not.
pub(super) fn hash(namespace: &str, sandbox_id: &str) -> String {
    let digest = Sha256::digest(format!("{namespace}\0{sandbox_id}"));
    crate::id::hex(&digest[..16])
}

impl NetworkRecord {
    /// The place where this sandbox's network begins, as a rule (see [`NetworkRecord::find`]); touches nothing.
    pub fn at(config: &Config, namespace: &str, sandbox_id: &str) -> Self {
        Self::in_place(config, &hash(namespace, sandbox_id), namespace, sandbox_id)
    }

    /// The record in the directory `place`, as this sandbox sees it.
    pub fn in_place(config: &Config, place: &str, namespace: &str, sandbox_id: &str) -> Self {
        Self {
            dir: root(config).join(place),
            namespace: namespace.to_owned(),
            sandbox_id: sandbox_id.to_owned(),
            by: None,
        }
    }

    /// The same for another sandbox, or for one supervisor of it.
    pub fn as_of(&self, sandbox_id: &str, by: Option<Identity>) -> Self {
        Self {
            sandbox_id: sandbox_id.to_owned(),
            by,
            ..self.clone()
        }
    }

    /// The network of this sandbox where its journal does not tell: in the usual place, or in that of the one it has
    /// taken over. The usual place when there is none.
    pub fn find(config: &Config, namespace: &str, sandbox_id: &str) -> Self {
        let usual = Self::at(config, namespace, sandbox_id);
        if usual.dir.exists() && usual.is_mine() {
            return usual;
        }
        let mut all = Self::list(config).into_iter();
        all.find(|(space, id, _)| space == namespace && id == sandbox_id)
            .map_or(usual, |(_, _, record)| record)
    }

    /// A place for a new network of this sandbox: the usual one, unless another sandbox has what was begun there.
    pub fn free(config: &Config, namespace: &str, sandbox_id: &str) -> Self {
        let usual = Self::at(config, namespace, sandbox_id);
        let free = |record: &Self| !record.dir.exists() || record.is_mine();
        if free(&usual) {
            return usual;
        }
        // No id holds a NUL.
        let numbered = |n| hash(namespace, &format!("{sandbox_id}\0{n}"));
        (1..MAX_PLACES)
            .map(|n: u32| Self::in_place(config, &numbered(n), namespace, sandbox_id))
            .find(free)
            .unwrap_or(usual)
    }

    /// A place for a new network that a daemon's pod is to have beside others: one with nothing in it; and whether an
    /// earlier one of this id may be there still, whose plugins know it by that.
    pub fn free_for(
        config: &Config,
        namespace: &str,
        sandbox_id: &str,
        network: &str,
    ) -> (Self, bool) {
        let numbered = |n: u32| hash(namespace, &format!("{sandbox_id}\0{network}\0{n}"));
        let place = |n| Self::in_place(config, &numbered(n), namespace, sandbox_id);
        let mut places = 0..MAX_PLACES;
        let free = places.find(|n| !place(*n).dir.exists());
        let number = free.unwrap_or(MAX_PLACES);
        (place(number), number > 0)
    }

    /// Nobody else's: not taken over by another sandbox, nor held by another living supervisor of this one. In doubt
    /// (no `pod.json`, or a damaged one) it is.
    pub fn is_mine(&self) -> bool {
        self.holder().is_none_or(|holder| self.is_mine_by(&holder))
    }

    /// The same by what its `pod.json` says.
    pub(super) fn is_mine_by(&self, holder: &Holder) -> bool {
        if self.sandbox_id.is_empty() {
            return true;
        }
        if self.by.is_some() && holder.is_used() {
            return false;
        }
        let same = holder.namespace == self.namespace && holder.sandbox_id == self.sandbox_id;
        same && (self.by.is_none() || holder.supervisor == self.by || !holder.is_alive())
    }

    /// The containerd namespace of its sandbox; empty when nothing tells it any more.
    pub fn namespace(&self) -> &str {
        &self.namespace
    }

    /// Name of its directory, which its netns has, too.
    pub fn place(&self) -> &str {
        let name = self.dir.file_name();
        name.and_then(|name| name.to_str()).unwrap_or_default()
    }

    /// `<state_root>/networks/<hash>`.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// For one of the attachments `add-started` exists and `network-stopped` does not, and it is still this sandbox's.
    pub fn owes_del(&self) -> bool {
        self.slots().iter().any(Slot::owes_del) && self.is_mine()
    }

    /// Writes `add-started` of this attachment before its first plugin. State error while an earlier ADD of the same
    /// interface still owes its DEL; what earlier, finished ones left is replaced.
    pub fn begin(&self, conf: &NetworkConf, attachment: &Attachment) -> Result<()> {
        self.begin_with(conf, attachment, &[])
    }

    /// The same where a daemon has told in which directories the plugins are: the DEL needs them.
    pub(super) fn begin_with(
        &self,
        conf: &NetworkConf,
        attachment: &Attachment,
        plugin_dirs: &[PathBuf],
    ) -> Result<()> {
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
        let owed = slots.iter().filter(|s| s.owes_del()).map(Slot::place);
        let place = match owed.max() {
            Some(last) => {
                slot.clear()?;
                last.saturating_add(1)
            }
            None => {
                // The attachments of an earlier life say nothing about this one.
                slots.iter().try_for_each(Slot::clear)?;
                disk::remove_file(&self.dir.join(owed::OWED))?;
                0
            }
        };
        slot.begin(place, conf, attachment, plugin_dirs)
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
    /// DEL is owed: the record is all that remembers it. Another sandbox's is left alone.
    pub fn remove(&self) -> Result<()> {
        if !self.is_mine() {
            return Ok(());
        }
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
            // See `Slot::is_daemons`.
            Ok(()) if self.is_daemons() => Ok(()),
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

    /// Another process is at it just now.
    pub fn is_busy(&self) -> bool {
        self.lock().is_err_and(|e| e.kind() == Kind::Busy)
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
        by: None,
    };
    // Who has it, before who began it.
    let held = record.holder().map(|h| (h.namespace, h.sandbox_id));
    let held = held.filter(|(_, id)| crate::id::check("sandbox id", id).is_ok());
    let known = held.or_else(|| record.slots().iter().find_map(Slot::owner));
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
