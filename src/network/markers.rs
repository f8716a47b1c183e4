//! The record of one pod's network, `<state_root>/networks/<hash>/`: what decides whether a DEL is owed.
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
use std::time::SystemTime;

use nix::fcntl::{Flock, FlockArg};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};

use super::{AddResult, Attachment, NetworkConf, cache, conf, disk, netns, owed};
use crate::clock;
use crate::config::Config;
use crate::error::{Context, Error, Kind, Result};

const OWNER: &str = "owner.json";
const STARTED: &str = "add-started.json";
const PARTIAL: &str = "partial.json";
const RESULT: &str = "result.json";
const STOPPED: &str = "network-stopped";

/// The record of one sandbox's network. Holds only where it is; every question reads the disk.
#[derive(Debug, Clone)]
pub struct NetworkRecord {
    dir: PathBuf,
    /// Empty in a record found by `list` whose files say nothing any more.
    namespace: String,
    sandbox_id: String,
}

/// One DEL to be sent.
#[derive(Debug)]
pub(super) struct Owed {
    pub(super) conf: NetworkConf,
    pub(super) attachment: Attachment,
    pub(super) previous: Option<Value>,
}

/// Holds other processes off the record while plugins run.
#[derive(Debug)]
pub(super) struct Locked {
    _dir: Flock<File>,
}

#[derive(Serialize, Deserialize)]
struct Owner {
    namespace: String,
    sandbox_id: String,
    network: String,
    container_id: String,
    ifname: String,
    netns: PathBuf,
}

#[derive(Serialize, Deserialize)]
struct Started {
    version: u32,
    namespace: String,
    sandbox_id: String,
    boot_id: String,
    at: String,
    conf: StoredConf,
    attachment: Attachment,
}

#[derive(Serialize, Deserialize)]
struct StoredConf {
    path: PathBuf,
    /// The exact text of the list.
    text: String,
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

    /// `add-started` exists and `network-stopped` does not.
    pub fn owes_del(&self) -> bool {
        // In doubt (an I/O error) it is owed: a DEL too many is harmless, one too few leaks.
        self.dir.join(STARTED).try_exists().unwrap_or(true)
            && !self.dir.join(STOPPED).try_exists().unwrap_or(false)
    }

    /// Writes `add-started` before the first plugin. State error while an earlier ADD still owes its DEL; what an
    /// earlier, finished one left is replaced.
    pub fn begin(&self, conf: &NetworkConf, attachment: &Attachment) -> Result<()> {
        if self.owes_del() {
            return Err(Error::new(
                Kind::State,
                format!(
                    "begin network {:?} of sandbox {:?}: an earlier ADD is on record and its DEL is owed first; stop or remove the pod, or run `podvisor gc`",
                    conf.name, self.sandbox_id
                ),
            ));
        }
        self.make_dir()?;
        // The old add-started goes first: between the two steps nothing is owed, as before.
        let stale: Vec<PathBuf> = [STARTED, PARTIAL, RESULT, STOPPED, owed::OWED]
            .map(|name| self.dir.join(name))
            .into_iter()
            .filter(|path| path.exists())
            .collect();
        if !stale.is_empty() {
            stale.iter().try_for_each(|path| disk::remove_file(path))?;
            disk::sync_dir(&self.dir)?;
        }
        // Made durable together with add-started.
        let owner = Owner {
            namespace: self.namespace.clone(),
            sandbox_id: self.sandbox_id.clone(),
            network: conf.name.clone(),
            container_id: attachment.container_id.clone(),
            ifname: attachment.ifname.clone(),
            netns: attachment.netns.clone(),
        };
        disk::write_whole(&self.dir.join(OWNER), &self.text(OWNER, &owner)?)?;
        self.write(
            STARTED,
            &Started {
                version: 1,
                namespace: self.namespace.clone(),
                sandbox_id: self.sandbox_id.clone(),
                boot_id: clock::boot_id(),
                at: clock::rfc3339(SystemTime::now()),
                conf: StoredConf {
                    path: conf.path.clone(),
                    text: String::from_utf8_lossy(&conf.bytes).into_owned(),
                },
                attachment: attachment.clone(),
            },
        )
    }

    /// What the ADD gave; None while there is no ADD that succeeded, or its record is damaged.
    pub fn read_result(&self) -> Option<AddResult> {
        self.read(RESULT).ok()
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
        disk::remove_file(&self.dir.join(STARTED))?;
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

    pub(super) fn finish(&self, result: &AddResult) -> Result<()> {
        self.write(RESULT, result)
    }

    /// Keeps the last good result of a chain that failed, for its DEL.
    pub(super) fn keep_partial(&self, result: &Value) -> Result<()> {
        self.write(PARTIAL, result)
    }

    /// The other way to say that the DEL succeeded; needs no space.
    pub(super) fn forget_started(&self) -> Result<()> {
        disk::remove_file(&self.dir.join(STARTED))?;
        disk::sync_dir(&self.dir)
    }

    pub(super) fn set_stopped(&self) -> Result<()> {
        self.write(STOPPED, &json!({"at": clock::rfc3339(SystemTime::now())}))
    }

    /// The DELs to send. One, as a rule; where the record is damaged, what libcni's cache knows of the container, else
    /// what the configuration directory has under the network's name. An error (State) when nothing is known.
    pub(super) fn owed(&self, config: &Config) -> Result<Vec<Owed>> {
        let damage = match self.started() {
            Ok((conf, attachment)) => {
                let previous = self.previous(config, &conf, &attachment);
                return Ok(vec![Owed {
                    conf,
                    attachment,
                    previous,
                }]);
            }
            Err(e) => e,
        };
        tracing::warn!(record = %self.dir.display(), error = %damage, "network record damaged; looking in libcni's cache");
        let owner: Option<Owner> = self.read(OWNER).ok();
        let container_id = owner.as_ref().map_or(&self.sandbox_id, |o| &o.container_id);
        let network = owner.as_ref().map(|o| o.network.as_str());
        let wanted = |name: &str| network.is_none_or(|n| n == name);
        if container_id.is_empty() {
            return Err(damage
                .within("find out whose network it was")
                .as_kind(Kind::State));
        }
        let cached = cache::of_container(&config.cni.cache_dir, container_id);
        let mut owed: Vec<Owed> = cached
            .into_iter()
            .filter(|c| wanted(&c.conf.name))
            .map(|c| Owed {
                conf: c.conf,
                attachment: c.attachment,
                previous: c.result,
            })
            .collect();
        if owed.is_empty() {
            // ADD had not finished, or the cache is gone too. DEL is idempotent, so that without a name every network is told.
            let attachment = Attachment {
                container_id: container_id.clone(),
                netns: owner.as_ref().map_or_else(
                    || netns::path(config, &self.namespace, &self.sandbox_id),
                    |o| o.netns.clone(),
                ),
                ifname: owner.as_ref().map_or("eth0", |o| &o.ifname).to_owned(),
                args: Vec::new(),
                port_mappings: Vec::new(),
                capabilities: Map::new(),
            };
            let confs = conf::all(config).into_iter().filter(|c| wanted(&c.name));
            owed.extend(confs.map(|conf| Owed {
                conf,
                attachment: attachment.clone(),
                previous: None,
            }));
            owed.dedup_by(|later, first| later.conf.name == first.conf.name);
        }
        if owed.is_empty() {
            let which =
                network.map_or_else(|| "any network".to_owned(), |n| format!("network {n:?}"));
            return Err(damage
                .within(format!(
                    "find the configuration of {which} for the DEL of {container_id:?}"
                ))
                .as_kind(Kind::State));
        }
        Ok(owed)
    }

    fn started(&self) -> Result<(NetworkConf, Attachment)> {
        let started: Started = self.read(STARTED)?;
        started.attachment.check()?;
        Ok((
            conf::parse(&started.conf.path, started.conf.text.into_bytes())?,
            started.attachment,
        ))
    }

    fn previous(
        &self,
        config: &Config,
        conf: &NetworkConf,
        attachment: &Attachment,
    ) -> Option<Value> {
        if let Some(result) = self.read_result() {
            return Some(result.raw);
        }
        let cached = || {
            cache::read(&config.cni.cache_dir, &conf.name, attachment)
                .ok()?
                .result
        };
        self.read(PARTIAL).ok().or_else(cached)
    }

    /// Each level is checked: who can write to one of them decides what is run as root.
    pub(super) fn make_dir(&self) -> Result<()> {
        let what = || format!("record the network of sandbox {:?}", self.sandbox_id);
        let root = self.dir.parent().unwrap_or(&self.dir);
        [root.parent().unwrap_or(root), root, &self.dir]
            .into_iter()
            .try_for_each(|dir| disk::private_dir(dir).context(what))
    }

    fn write(&self, name: &str, value: &impl Serialize) -> Result<()> {
        disk::write_durable(&self.dir.join(name), &self.text(name, value)?)
    }

    fn text(&self, name: &str, value: &impl Serialize) -> Result<Vec<u8>> {
        let what = || format!("write {}", self.dir.join(name).display());
        serde_json::to_vec(value).map_err(|e| Error::caused(Kind::Other, what(), e))
    }

    fn read<T: DeserializeOwned>(&self, name: &str) -> Result<T> {
        let path = self.dir.join(name);
        serde_json::from_slice(&disk::read(&path)?).map_err(|e| {
            Error::caused(
                Kind::Invalid,
                format!("read {}: cut off or damaged", path.display()),
                e,
            )
        })
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
    let owner = record
        .read::<Owner>(OWNER)
        .map(|o| (o.namespace, o.sandbox_id));
    let known = owner.or_else(|_| {
        record
            .read::<Started>(STARTED)
            .map(|s| (s.namespace, s.sandbox_id))
    });
    let known = known.or_else(|e| {
        let holder = record.holder().ok_or(e)?;
        Ok::<_, Error>((holder.namespace, holder.sandbox_id))
    });
    if let Ok((namespace, sandbox_id)) = known {
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
