//! CHECK and STATUS: questions about an attachment and about a network. They change nothing.

use std::time::Duration;

use serde_json::{Map, Value};
use tokio::time::Instant;

use super::chain::{Chain, type_of};
use super::plugin::{self, Call, Command};
use super::version::{self, at_least};
use super::{NetworkConf, NetworkRecord, netns, result, versions};
use crate::config::Config;
use crate::error::{Error, Kind, Result};
use crate::process::Reaper;
use std::path::{Path, PathBuf};

/// Bound of one question to a whole chain.
const LIMIT: Duration = Duration::from_secs(60);

/// An answer that is no failure.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Asked {
    /// Every plugin says that it is well.
    Good,
    /// Nobody was asked; why.
    NotAsked(String),
}

/// What CHECK said of one attachment.
#[derive(Debug)]
pub struct Checked {
    /// Name of the network.
    pub network: String,
    /// Interface in the pod.
    pub ifname: String,
    /// The failure names the plugin and what it found.
    pub verdict: Result<Asked>,
}

/// CHECK of every attachment of the pod, in the order of their ADDs, with the recorded configuration and result.
///
/// Errors only when nothing could be asked (Busy while the network is being added or deleted).
pub async fn check(
    config: &Config,
    reaper: &Reaper,
    record: &NetworkRecord,
) -> Result<Vec<Checked>> {
    if !record.dir().exists() {
        return Ok(Vec::new());
    }
    let _locked = record.lock()?;
    let mut all = Vec::new();
    for slot in record.slots().into_iter().filter(|s| s.owes_del()) {
        let what = slot.on_record();
        let verdict = match slot.started() {
            Ok((conf, attachment)) => {
                let within = |e: Error| {
                    e.within(format!(
                        "check network {:?} of sandbox {:?}",
                        conf.name, attachment.container_id
                    ))
                };
                if let Some(why) = no_check(&conf) {
                    Ok(Asked::NotAsked(why))
                } else if !netns::is_pinned(&attachment.netns) {
                    Err(within(Error::new(
                        Kind::State,
                        format!("its netns {} is gone", attachment.netns.display()),
                    )))
                } else {
                    match slot.previous(config, &conf, &attachment) {
                        None => Err(within(Error::new(
                            Kind::State,
                            "its ADD left no result that could be checked",
                        ))),
                        Some(previous) => {
                            let asked = async {
                                let chain = Chain::new(config, reaper, &conf, &attachment)?;
                                let previous = result::normalise(previous, &conf.cni_version)?;
                                chain.check(&previous.raw, LIMIT).await
                            };
                            asked.await.map(|()| Asked::Good).map_err(within)
                        }
                    }
                }
            }
            Err(error) => Err(error),
        };
        all.push(Checked {
            network: what.network,
            ifname: what.ifname,
            verdict,
        });
    }
    Ok(all)
}

/// STATUS of a network: can it take pods? Also what can be known without asking: every plugin is there and speaks the
/// configuration's version. Before 1.1 there is nothing more to ask.
pub async fn status(config: &Config, reaper: &Reaper, conf: &NetworkConf) -> Result<Asked> {
    let what = |e: Error| e.within(format!("ask for the status of network {:?}", conf.name));
    let programs = programs(config, conf).map_err(what)?;
    versions::require(config, reaper, conf, &programs)
        .await
        .map_err(what)?;
    if !at_least(&conf.cni_version, version::STATUS_AND_GC) {
        return Ok(Asked::NotAsked(before(
            conf,
            "STATUS",
            version::STATUS_AND_GC,
        )));
    }
    let end = Instant::now() + LIMIT;
    for (plugin, program) in conf.plugins.iter().zip(&programs) {
        ask(
            config,
            reaper,
            Command::Status,
            conf,
            plugin,
            program,
            Map::new(),
            end,
        )
        .await
        .map_err(what)?;
    }
    Ok(Asked::Good)
}

/// Asks one plugin something that is not about an attachment; `more` is put into its configuration.
#[allow(
    clippy::too_many_arguments,
    reason = "one call of one plugin, said once"
)]
pub(super) async fn ask(
    config: &Config,
    reaper: &Reaper,
    command: Command,
    conf: &NetworkConf,
    plugin: &Value,
    program: &Path,
    more: Map<String, Value>,
    end: Instant,
) -> Result<()> {
    let mut object = plugin.as_object().cloned().unwrap_or_default();
    object.insert("name".into(), conf.name.as_str().into());
    object.insert("cniVersion".into(), conf.cni_version.as_str().into());
    object.shift_remove("prevResult");
    object.extend(more);
    let call = Call {
        command,
        name: type_of(plugin),
        program,
        search: &config.cni.plugin_dirs,
        attachment: None,
        netns: Path::new(""),
        conf: Value::Object(object).to_string().into_bytes(),
        left: end.saturating_duration_since(Instant::now()),
        bound: LIMIT,
    };
    plugin::run(reaper, call).await.map(|_| ())
}

/// Executables of all plugins.
pub(super) fn programs(config: &Config, conf: &NetworkConf) -> Result<Vec<PathBuf>> {
    let find = |p: &Value| plugin::find(type_of(p), &config.cni.plugin_dirs);
    conf.plugins.iter().map(find).collect()
}

/// Why a verb is not there.
pub(super) fn before(conf: &NetworkConf, verb: &str, since: &str) -> String {
    format!(
        "{verb} is there since {since} and the network's cniVersion is {}",
        conf.cni_version
    )
}

fn no_check(conf: &NetworkConf) -> Option<String> {
    if !at_least(&conf.cni_version, version::CHECK) {
        return Some(before(conf, "CHECK", version::CHECK));
    }
    conf.disable_check
        .then(|| format!("disableCheck is set in {}", conf.path.display()))
}
