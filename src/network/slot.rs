//! The files of one attachment in its pod's record: written, read, and made into the DEL that they owe.
//!
//! Each file is whole or absent. What is damaged is worked around, in this order: libcni's cache, the configuration
//! directory. A DEL too many is harmless, one too few leaks.

use std::path::{Path, PathBuf};
use std::time::SystemTime;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::markers::{FIRST, OnRecord};
use super::owed::POD;
use super::{AddResult, Attachment, DAEMONS, Holder, NetworkConf, cache, conf, disk, find, netns};
use crate::clock;
use crate::config::Config;
use crate::error::{Error, Kind, Result};
use crate::failpoint;

pub(super) const OWNER: &str = "owner.json";
pub(super) const STARTED: &str = "add-started.json";
pub(super) const PARTIAL: &str = "partial.json";
pub(super) const RESULT: &str = "result.json";
pub(super) const STOPPED: &str = "network-stopped";

/// One attachment's place.
#[derive(Debug, Clone)]
pub(super) struct Slot {
    dir: PathBuf,
    ifname: String,
    namespace: String,
    sandbox_id: String,
}

/// One DEL to be sent.
#[derive(Debug)]
pub(super) struct Owed {
    pub(super) conf: NetworkConf,
    pub(super) attachment: Attachment,
    pub(super) previous: Option<Value>,
    /// Where the ADD was told to find the plugins; empty where it was not.
    pub(super) plugin_dirs: Vec<PathBuf>,
}

#[derive(Serialize, Deserialize)]
struct Owner {
    namespace: String,
    sandbox_id: String,
    network: String,
    container_id: String,
    ifname: String,
    netns: PathBuf,
    /// Among the attachments of the pod, in the order of their ADDs.
    #[serde(default)]
    place: u32,
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
    #[serde(default)]
    place: u32,
    /// CNI_PATH, where a daemon has told it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    plugin_dirs: Vec<PathBuf>,
}

#[derive(Serialize, Deserialize)]
struct StoredConf {
    path: PathBuf,
    /// The exact text of the list.
    text: String,
}

impl Slot {
    /// Touches nothing.
    pub(super) fn new(dir: PathBuf, ifname: &str, namespace: &str, sandbox_id: &str) -> Self {
        Self {
            dir,
            ifname: ifname.to_owned(),
            namespace: namespace.to_owned(),
            sandbox_id: sandbox_id.to_owned(),
        }
    }

    /// True when an ADD was begun, whatever came of it. In doubt (an I/O error) it was.
    pub(super) fn is_begun(&self) -> bool {
        self.dir.join(STARTED).try_exists().unwrap_or(true)
    }

    /// Of a daemon's pod: libcni in the daemon has a cache entry of its own, which is not ours to read or remove. And the
    /// daemon waits while we write, so only what makes a DEL owed has to outlive a power cut. Without its result a DEL is
    /// as good, where the netns is gone; one that the power cut brings back is one too many, and that is harmless.
    pub(super) fn is_daemons(&self) -> bool {
        self.namespace == DAEMONS
    }

    /// Begun, and no DEL has succeeded.
    pub(super) fn owes_del(&self) -> bool {
        // In this order: whoever removes the record takes `network-stopped` away last, and between two looks the other way
        // round a DEL that was sent would seem to be owed.
        let stopped = self.dir.join(STOPPED).try_exists().unwrap_or(false);
        !stopped && self.is_begun()
    }

    /// Its place in the order of ADDs; where that is damaged, the first interface's is first and the others' last.
    pub(super) fn place(&self) -> u32 {
        let unknown = if self.ifname == FIRST { 0 } else { u32::MAX };
        let owner = self.read::<Owner>(OWNER).map(|o| o.place);
        owner
            .or_else(|_| self.read::<Started>(STARTED).map(|s| s.place))
            .unwrap_or(unknown)
    }

    /// (namespace, sandbox id), where one of the files tells.
    pub(super) fn owner(&self) -> Option<(String, String)> {
        let started = || self.read::<Started>(STARTED).ok();
        self.read_owner()
            .map(|o| (o.namespace, o.sandbox_id))
            .or_else(|| started().map(|s| (s.namespace, s.sandbox_id)))
            .filter(|(_, id)| crate::id::check("sandbox id", id).is_ok())
    }

    /// Its pod has another sandbox now; what its plugins were told stays as it was.
    pub(super) fn set_sandbox(&self, sandbox_id: &str) -> Result<()> {
        match self.read::<Owner>(OWNER) {
            Ok(owner) if owner.sandbox_id != sandbox_id => {
                let owner = Owner {
                    sandbox_id: sandbox_id.to_owned(),
                    ..owner
                };
                self.write(OWNER, &owner)
            }
            _ => Ok(()),
        }
    }

    /// Takes away what an earlier ADD left. add-started goes first: cut short, nothing is owed that was not before.
    pub(super) fn clear(&self) -> Result<()> {
        let stale: Vec<PathBuf> = [STARTED, PARTIAL, RESULT, STOPPED]
            .map(|name| self.dir.join(name))
            .into_iter()
            .filter(|path| path.exists())
            .collect();
        if !stale.is_empty() {
            for path in &stale {
                disk::remove_file(path)?;
                failpoint::hit("record.clear.file")?;
            }
            if self.is_daemons() {
                return Ok(());
            }
            match disk::sync_dir(&self.dir) {
                // Somebody else has removed the whole record meanwhile.
                Err(e) if e.is_gone() => {}
                synced => synced?,
            }
        }
        Ok(())
    }

    /// The record of an ADD that begins now, where nothing is left of an earlier one.
    pub(super) fn begin(
        &self,
        place: u32,
        conf: &NetworkConf,
        attachment: &Attachment,
        plugin_dirs: &[PathBuf],
    ) -> Result<()> {
        disk::private_dir(&self.dir)?;
        let owner = Owner {
            namespace: self.namespace.clone(),
            sandbox_id: self.sandbox_id.clone(),
            network: conf.name.clone(),
            container_id: attachment.container_id.clone(),
            ifname: attachment.ifname.clone(),
            netns: attachment.netns.clone(),
            place,
        };
        match self.is_daemons() {
            true => self.write(OWNER, &owner)?,
            // Made durable together with add-started.
            false => disk::write_whole(&self.dir.join(OWNER), &self.text(OWNER, &owner)?)?,
        }
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
                place,
                plugin_dirs: plugin_dirs.to_vec(),
            },
        )
    }

    /// What the ADD gave.
    pub(super) fn read_result(&self) -> Option<AddResult> {
        self.read(RESULT).ok()
    }

    /// As others see it.
    pub(super) fn on_record(&self) -> OnRecord {
        let owner = self.read_owner();
        let started = self.started().ok();
        let attachment = started.as_ref().map(|(_, attachment)| attachment);
        let network = started.as_ref().map(|(conf, _)| conf.name.clone());
        OnRecord {
            network: owner
                .as_ref()
                .map(|o| o.network.clone())
                .or(network)
                .unwrap_or_default(),
            container_id: owner
                .as_ref()
                .map(|o| o.container_id.clone())
                .or_else(|| attachment.map(|a| a.container_id.clone()))
                .unwrap_or_else(|| self.made_for()),
            ifname: self.ifname.clone(),
            netns: owner
                .map(|o| o.netns)
                .or_else(|| attachment.map(|a| a.netns.clone()))
                .unwrap_or_default(),
            owes_del: self.owes_del(),
            begun_at: std::fs::metadata(self.path(STARTED))
                .and_then(|m| m.modified())
                .ok(),
            result: self.read_result(),
        }
    }

    pub(super) fn finish(&self, result: &AddResult) -> Result<()> {
        self.write(RESULT, result)
    }

    /// Keeps the last good result of a chain that failed, for its DEL.
    pub(super) fn keep_partial(&self, result: &Value) -> Result<()> {
        self.write(PARTIAL, result)
    }

    pub(super) fn set_stopped(&self) -> Result<()> {
        self.write(STOPPED, &json!({"at": clock::rfc3339(SystemTime::now())}))
    }

    /// The other way to say that the DEL succeeded; needs no space.
    pub(super) fn forget_started(&self) -> Result<()> {
        disk::remove_file(&self.path(STARTED))?;
        disk::sync_dir(&self.dir)
    }

    /// The ADD as it was begun.
    pub(super) fn started(&self) -> Result<(NetworkConf, Attachment)> {
        self.started_with()
            .map(|(conf, attachment, _)| (conf, attachment))
    }

    /// The same, and where it was told to find the plugins.
    fn started_with(&self) -> Result<(NetworkConf, Attachment, Vec<PathBuf>)> {
        let started: Started = self.read(STARTED)?;
        started.attachment.check()?;
        let conf = conf::parse(&started.conf.path, started.conf.text.into_bytes())?;
        let mut plugin_dirs = started.plugin_dirs;
        plugin_dirs.retain(|dir| dir.is_absolute());
        Ok((conf, started.attachment, plugin_dirs))
    }

    /// The result that belongs to an ADD: its own, of an unfinished chain, or libcni's.
    pub(super) fn previous(
        &self,
        config: &Config,
        conf: &NetworkConf,
        attachment: &Attachment,
    ) -> Option<Value> {
        if let Some(result) = self.read_result() {
            return Some(result.raw);
        }
        let cached = || {
            if self.is_daemons() {
                return None;
            }
            cache::read(&config.cni.cache_dir, &conf.name, attachment)
                .ok()?
                .result
        };
        self.read(PARTIAL).ok().or_else(cached)
    }

    /// The DELs to send. One, as a rule; where the record is damaged, what libcni's cache knows of the container, else
    /// what the configuration directory has under the network's name. An error (State) when nothing is known.
    pub(super) fn owed(&self, config: &Config) -> Result<Vec<Owed>> {
        let damage = match self.started_with() {
            Ok((conf, attachment, plugin_dirs)) => {
                let previous = self.previous(config, &conf, &attachment);
                return Ok(vec![Owed {
                    conf,
                    attachment,
                    previous,
                    plugin_dirs,
                }]);
            }
            Err(e) => e,
        };
        tracing::warn!(record = %self.dir.display(), error = %damage, "network record damaged; looking in libcni's cache");
        let owner = self.read_owner();
        let container_id = owner
            .as_ref()
            .map_or_else(|| self.made_for(), |o| o.container_id.clone());
        let network = owner.as_ref().map(|o| o.network.as_str());
        let wanted = |name: &str| network.is_none_or(|n| n == name);
        if container_id.is_empty() {
            return Err(damage
                .within("find out whose network it was")
                .as_kind(Kind::State));
        }
        // Of a daemon's pod the cache has the daemon's own call, which would come back to us.
        let cached = match self.is_daemons() {
            true => Vec::new(),
            false => cache::of_container(&config.cni.cache_dir, &container_id),
        };
        let mut owed: Vec<Owed> = cached
            .into_iter()
            .filter(|c| wanted(&c.conf.name) && c.attachment.ifname == self.ifname)
            .filter(|c| c.attachment.check().is_ok())
            .map(|c| Owed {
                conf: c.conf,
                attachment: c.attachment,
                previous: c.result,
                plugin_dirs: Vec::new(),
            })
            .collect();
        if owed.is_empty() {
            // ADD had not finished, or the cache is gone too. DEL is idempotent, so that without a name every network is told.
            let attachment = Attachment {
                container_id: container_id.clone(),
                netns: owner.as_ref().map_or_else(
                    || netns::in_place(config, self.record_dir()),
                    |o| o.netns.clone(),
                ),
                ifname: self.ifname.clone(),
                args: Vec::new(),
                port_mappings: Vec::new(),
                capabilities: Map::new(),
            };
            attachment.check().map_err(|e| e.as_kind(Kind::State))?;
            let confs = find::all(config).into_iter().filter(|c| wanted(&c.name));
            owed.extend(confs.map(|conf| Owed {
                conf,
                attachment: attachment.clone(),
                previous: None,
                plugin_dirs: Vec::new(),
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

    /// The directory of the whole record.
    fn record_dir(&self) -> &Path {
        match self.dir.parent() {
            Some(parent) if self.ifname != FIRST => parent,
            _ => &self.dir,
        }
    }

    /// CNI_CONTAINERID where none of the attachment's own files tells it: another sandbox may have taken the pod over.
    fn made_for(&self) -> String {
        let text = disk::read(&self.record_dir().join(POD)).unwrap_or_default();
        let holder: Holder = serde_json::from_slice(&text).unwrap_or_default();
        match crate::id::check("container id", &holder.made_for) {
            Ok(_) => holder.made_for,
            Err(_) => self.sandbox_id.clone(),
        }
    }

    /// Whose record it is, unless the file is damaged: what is in it becomes arguments of plugins and parts of paths.
    fn read_owner(&self) -> Option<Owner> {
        let owner: Owner = self.read(OWNER).ok()?;
        let good = crate::id::check("container id", &owner.container_id).is_ok()
            && crate::id::check_network(&owner.network).is_ok()
            && owner.netns.is_absolute();
        good.then_some(owner)
    }

    fn write(&self, name: &str, value: &impl Serialize) -> Result<()> {
        let (path, text) = (self.dir.join(name), self.text(name, value)?);
        match self.is_daemons() && name != STARTED {
            true => disk::write_for_the_boot(&path, &text),
            false => disk::write_durable(&path, &text),
        }
    }

    fn text(&self, name: &str, value: &impl Serialize) -> Result<Vec<u8>> {
        let what = || format!("write {}", self.path(name).display());
        serde_json::to_vec(value).map_err(|e| Error::caused(Kind::Other, what(), e))
    }

    fn read<T: DeserializeOwned>(&self, name: &str) -> Result<T> {
        let path = self.path(name);
        serde_json::from_slice(&disk::read(&path)?).map_err(|e| {
            Error::caused(
                Kind::Invalid,
                format!("read {}: cut off or damaged", path.display()),
                e,
            )
        })
    }

    fn path(&self, name: &str) -> PathBuf {
        Path::new(&self.dir).join(name)
    }
}
