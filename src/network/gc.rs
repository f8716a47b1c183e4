//! GC: telling a network's plugins which attachments there are, so that they free everything else.
//!
//! Valid is what the caller says, what a record of ours still owes a DEL for, and every entry in libcni's cache that is
//! not ours: the attachments of other tools. Must never free what another tool added, nor what is being added now.

use std::collections::{BTreeSet, HashSet};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::{Map, json};
use tokio::time::Instant;

use super::cache::{self, Cached};
use super::chain::Chain;
use super::plugin::Command;
use super::verbs::{Asked, ask, before, programs};
use super::version::{self, at_least};
use super::{NetworkConf, NetworkRecord, markers, netns};
use crate::config::Config;
use crate::error::{Error, Result};
use crate::process::Reaper;

/// Where the specification has the list.
const VALID: &str = "cni.dev/valid-attachments";

/// Bound of the whole: pods wait for it.
const LIMIT: Duration = Duration::from_secs(120);

/// How long pods that are being added may hold it off.
const LOCK_LIMIT: Duration = Duration::from_secs(10);

/// One attachment, in the words of the specification.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Valid {
    /// CNI_CONTAINERID.
    #[serde(rename = "containerID")]
    pub container_id: String,
    /// CNI_IFNAME.
    pub ifname: String,
}

/// What a collection did.
#[derive(Debug)]
pub struct Collected {
    /// Attachments of ours, known only to libcni's cache, that were given their DEL.
    pub deleted: Vec<Valid>,
    /// Whether the plugins were asked to collect.
    pub asked: Asked,
}

/// Collects one network's garbage: a DEL for each attachment of ours that only libcni's cache remembers and whose pod is
/// gone, then GC of every plugin where the version has it. `valid`: the attachments of pods that are there.
///
/// A failure of one step does not stop the others; the first is the error. Busy while pods are being added.
pub async fn gc(
    config: &Config,
    reaper: &Reaper,
    conf: &NetworkConf,
    valid: &[Valid],
) -> Result<Collected> {
    let what = |e: Error| e.within(format!("collect garbage of network {:?}", conf.name));
    if conf.disable_gc {
        let why = format!("disableGC is set in {}", conf.path.display());
        return Ok(Collected {
            deleted: Vec::new(),
            asked: Asked::NotAsked(why),
        });
    }
    let _alone = markers::lock_all(config, true, LOCK_LIMIT)
        .await
        .map_err(what)?;
    let begun = Instant::now();
    let sorted = sort(config, conf, valid);
    let mut failed = None;
    let mut deleted = Vec::new();
    for (attachment, cached) in sorted.stale {
        match delete(config, reaper, &cached, begun).await {
            Ok(()) => deleted.push(attachment),
            Err(error) => drop(failed.get_or_insert(error)),
        }
    }
    let asked = if at_least(&conf.cni_version, version::STATUS_AND_GC) {
        let programs = programs(config, conf).map_err(what)?;
        let mut more = Map::new();
        more.insert(VALID.into(), json!(sorted.valid));
        for (plugin, program) in conf.plugins.iter().zip(&programs) {
            let end = begun + LIMIT;
            let told = ask(
                config,
                reaper,
                Command::Gc,
                conf,
                plugin,
                program,
                more.clone(),
                end,
            );
            if let Err(error) = told.await {
                failed.get_or_insert(error);
            }
        }
        Asked::Good
    } else {
        Asked::NotAsked(before(conf, "GC", version::STATUS_AND_GC))
    };
    match failed {
        Some(error) => Err(what(error)),
        None => Ok(Collected { deleted, asked }),
    }
}

/// What [`gc`] would send a DEL for. Looks only.
pub fn stale(config: &Config, conf: &NetworkConf, valid: &[Valid]) -> Vec<Valid> {
    let stale = sort(config, conf, valid).stale;
    stale
        .into_iter()
        .map(|(attachment, _)| attachment)
        .collect()
}

struct Sorted {
    valid: BTreeSet<Valid>,
    stale: Vec<(Valid, Cached)>,
}

fn sort(config: &Config, conf: &NetworkConf, valid: &[Valid]) -> Sorted {
    let mut known = HashSet::new();
    let mut all: BTreeSet<Valid> = valid.iter().cloned().collect();
    for (_, _, record) in NetworkRecord::list(config) {
        for on in record.attachments() {
            let attachment = Valid {
                container_id: on.container_id,
                ifname: on.ifname,
            };
            // Of a record whose network cannot be read it counts for every one.
            if on.owes_del && (on.network == conf.name || on.network.is_empty()) {
                all.insert(attachment.clone());
            }
            known.insert(attachment);
        }
    }
    let pins = config.runtime_root.join("netns");
    let mut stale = Vec::new();
    for seen in cache::of_network(&config.cni.cache_dir, &conf.name) {
        let attachment = Valid {
            container_id: seen.container_id,
            ifname: seen.ifname,
        };
        if all.contains(&attachment) {
            continue;
        }
        let gone = seen.cached.filter(|cached| {
            let path = &cached.attachment.netns;
            let ours = known.contains(&attachment) || path.starts_with(&pins);
            ours && !netns::is_pinned(path)
        });
        match gone {
            Some(cached) => stale.push((attachment, cached)),
            None => drop(all.insert(attachment)),
        }
    }
    Sorted { valid: all, stale }
}

async fn delete(config: &Config, reaper: &Reaper, cached: &Cached, begun: Instant) -> Result<()> {
    let Cached {
        conf,
        attachment,
        result,
    } = cached;
    attachment.check()?;
    let chain = Chain::new(config, reaper, conf, attachment)?;
    chain.del(result.as_ref(), begun, LIMIT).await?;
    cache::remove(&config.cni.cache_dir, &conf.name, attachment)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::network::{Attachment, conf};
    use serde_json::Value;
    use std::path::Path;

    #[test]
    fn others_attachments_are_valid_and_only_ours_that_are_gone_are_stale() {
        let dir = tempfile::tempdir().unwrap();
        let mut config = Config {
            state_root: dir.path().join("state"),
            runtime_root: dir.path().join("run"),
            ..Config::default()
        };
        config.cni.cache_dir = dir.path().join("cache");
        let text = r#"{"cniVersion":"1.1.0","name":"pods","plugins":[{"type":"bridge"}]}"#;
        let conf = conf::parse(Path::new("pods.conflist"), text.into()).unwrap();
        let on = |id: &str, netns: &Path| Attachment {
            container_id: id.into(),
            netns: netns.to_owned(),
            ifname: "eth0".into(),
            args: Vec::new(),
            port_mappings: Vec::new(),
            capabilities: Map::new(),
        };
        let pin = config.runtime_root.join("netns/x");
        for (id, netns) in [
            ("alive", pin.as_path()),
            ("owed", &pin),
            ("gone", &pin),
            ("theirs", Path::new("/run/netns/y")),
        ] {
            cache::write(&config.cni.cache_dir, &conf, &on(id, netns), &Value::Null).unwrap();
        }
        let record = NetworkRecord::at(&config, "default", "owed");
        record.begin(&conf, &on("owed", &pin)).unwrap();
        let valid = |id: &str| Valid {
            container_id: id.into(),
            ifname: "eth0".into(),
        };
        let sorted = sort(&config, &conf, &[valid("alive")]);
        assert_eq!(sorted.valid, ["alive", "owed", "theirs"].map(valid).into());
        assert_eq!(stale(&config, &conf, &[valid("alive")]), [valid("gone")]);
        assert_eq!(
            json!(valid("a")),
            json!({"containerID": "a", "ifname": "eth0"})
        );
    }
}
