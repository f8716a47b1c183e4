//! The chain: ADD in order with prevResult, DEL in reverse, each within one bound for the whole chain.

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::{Map, Value};
use tokio::time::Instant;

use super::markers::Owed;
use super::plugin::{self, Call, Command};
use super::{AddResult, Attachment, NetworkConf, NetworkRecord, cache, conf, netns, result};
use crate::config::Config;
use crate::error::{Error, Kind, Result};
use crate::process::Reaper;

/// ADD of the whole chain, bounded by `config.add_timeout()` (monotonic, whole chain).
///
/// Order: everything that can be refused is refused; the record; `lo` up; the plugins; the result into the record and
/// into libcni's cache. On failure after the record nothing is undone here: the record says that a DEL is owed. Errors:
/// Deadline at the bound, State when the record owes a DEL already or a plugin is not installed (then nothing is on
/// record), Invalid for arguments; they name the plugin, how it ended, the time it took and the end of its stderr.
pub async fn add(
    config: &Config,
    reaper: &Reaper,
    record: &NetworkRecord,
    conf: &NetworkConf,
    attachment: &Attachment,
) -> Result<AddResult> {
    let what = || {
        format!(
            "add network {:?} to sandbox {:?}",
            conf.name, attachment.container_id
        )
    };
    check(conf, attachment).map_err(|e| e.within(what()))?;
    let chain = Chain::new(config, reaper, conf, attachment).map_err(|e| e.within(what()))?;
    let _locked = record.reserve()?;
    record.begin(conf, attachment)?;
    netns::raise_loopback(&attachment.netns).map_err(|e| e.within(what()))?;
    let begun = Instant::now();
    let raw = match chain.add(config.add_timeout()).await {
        Ok(raw) => raw,
        Err(Failed { error, previous }) => {
            if let Some(previous) = previous {
                // Best effort: DEL works without it, only less well.
                let kept = record.keep_partial(&previous);
                kept.unwrap_or_else(
                    |e| tracing::warn!(error = %e, "result of an unfinished chain not kept"),
                );
            }
            return Err(error.within(what()));
        }
    };
    let result = result::normalise(raw, &conf.cni_version).map_err(|e| e.within(what()))?;
    record.finish(&result)?;
    cache::write(&config.cni.cache_dir, conf, attachment, &result.raw)?;
    tracing::info!(step = "cni-add", network = conf.name, took = ?begun.elapsed(), ips = ?result.ips, "network added");
    Ok(result)
}

/// DEL of the recorded ADD: reverse order, prevResult where known, the configuration and arguments of the ADD, bounded
/// by `limit`.
///
/// Does nothing when no DEL is owed. A missing netns means an empty CNI_NETNS. Sets `network-stopped` only on success,
/// then removes libcni's cached result. An error leaves the DEL owed and is never NotFound: an undo would take that for done.
pub async fn del(
    config: &Config,
    reaper: &Reaper,
    record: &NetworkRecord,
    limit: Duration,
) -> Result<()> {
    if !record.owes_del() {
        return Ok(());
    }
    let done = del_owed(config, reaper, record, limit).await;
    done.map_err(|e| {
        if e.is_gone() {
            e.as_kind(Kind::State)
        } else {
            e
        }
    })
}

async fn del_owed(
    config: &Config,
    reaper: &Reaper,
    record: &NetworkRecord,
    limit: Duration,
) -> Result<()> {
    let _locked = record.lock()?;
    // Whoever held it before may have done the work.
    if !record.owes_del() {
        return Ok(());
    }
    let sent = send_owed(config, reaper, record, limit).await;
    if let Err(error) = &sent {
        record.note_failure(error);
    }
    sent
}

async fn send_owed(
    config: &Config,
    reaper: &Reaper,
    record: &NetworkRecord,
    limit: Duration,
) -> Result<()> {
    let begun = Instant::now();
    let owed = record.owed(config)?;
    for Owed {
        conf,
        attachment,
        previous,
    } in &owed
    {
        let what = || {
            format!(
                "delete network {:?} of sandbox {:?}",
                conf.name, attachment.container_id
            )
        };
        let chain = Chain::new(config, reaper, conf, attachment).map_err(|e| e.within(what()))?;
        chain
            .del(previous.as_ref(), begun, limit)
            .await
            .map_err(|e| e.within(what()))?;
    }
    if let Err(error) = record.set_stopped() {
        // A full disk has no room for the marker, but what says that a DEL is owed can be taken away.
        tracing::warn!(%error, "mark the network as stopped");
        record.forget_started()?;
    }
    for Owed {
        conf, attachment, ..
    } in &owed
    {
        if let Err(error) = cache::remove(&config.cni.cache_dir, &conf.name, attachment) {
            tracing::warn!(%error, "cached result left behind");
        }
        tracing::info!(step = "cni-del", network = conf.name, took = ?begun.elapsed(), "network deleted");
    }
    Ok(())
}

fn check(conf: &NetworkConf, attachment: &Attachment) -> Result<()> {
    attachment.check()?;
    if !netns::is_pinned(&attachment.netns) {
        return Err(Error::new(
            Kind::State,
            format!(
                "check netns {}: there is no network namespace at this path",
                attachment.netns.display()
            ),
        ));
    }
    // Published ports that no plugin looks at would be silently dead.
    if attachment.capability_args().contains_key("portMappings") && !conf.supports("portMappings") {
        return Err(Error::new(
            Kind::Invalid,
            format!(
                "publish ports: no plugin of the network has the capability portMappings; add {{\"type\":\"portmap\",\"capabilities\":{{\"portMappings\":true}}}} to {}",
                conf.path.display()
            ),
        ));
    }
    Ok(())
}

/// One attachment and everything its calls have in common.
struct Chain<'a> {
    config: &'a Config,
    reaper: &'a Reaper,
    conf: &'a NetworkConf,
    attachment: &'a Attachment,
    /// Executable of each plugin of `conf`.
    programs: Vec<PathBuf>,
}

struct Failed {
    error: Error,
    /// Result of the last plugin that succeeded.
    previous: Option<Value>,
}

impl<'a> Chain<'a> {
    /// Finds every plugin before one runs: half a chain is worse than none.
    fn new(
        config: &'a Config,
        reaper: &'a Reaper,
        conf: &'a NetworkConf,
        attachment: &'a Attachment,
    ) -> Result<Self> {
        let find = |p: &Value| plugin::find(type_of(p), &config.cni.plugin_dirs);
        Ok(Self {
            config,
            reaper,
            conf,
            attachment,
            programs: conf.plugins.iter().map(find).collect::<Result<_>>()?,
        })
    }

    async fn add(&self, bound: Duration) -> Result<Value, Failed> {
        let end = Instant::now() + bound;
        let mut previous = None;
        for (plugin, program) in self.conf.plugins.iter().zip(&self.programs) {
            let stdin = stdin(self.conf, plugin, self.attachment, previous.as_ref());
            let run = self.run(
                Command::Add,
                plugin,
                program,
                &self.attachment.netns,
                stdin,
                (end, bound),
            );
            let next = run.await.and_then(|raw| {
                // The next plugin reads prevResult in the version of the configuration.
                let what = || format!("read the result of CNI plugin {:?}", type_of(plugin));
                result::normalise(raw, &self.conf.cni_version).map_err(|e| e.within(what()))
            });
            match next {
                Ok(result) => previous = Some(result.raw),
                Err(error) => return Err(Failed { error, previous }),
            }
        }
        Ok(previous.unwrap_or_default())
    }

    async fn del(&self, previous: Option<&Value>, begun: Instant, bound: Duration) -> Result<()> {
        let gone = !netns::is_pinned(&self.attachment.netns);
        let netns = if gone {
            Path::new("")
        } else {
            &self.attachment.netns
        };
        let previous = previous.and_then(|raw| result::for_del(raw, &self.conf.cni_version));
        // The first failure ends a try, as the specification says; the next try runs the whole list again.
        for (plugin, program) in self.conf.plugins.iter().zip(&self.programs).rev() {
            let stdin = stdin(self.conf, plugin, self.attachment, previous.as_ref());
            self.run(
                Command::Del,
                plugin,
                program,
                netns,
                stdin,
                (begun + bound, bound),
            )
            .await?;
        }
        Ok(())
    }

    async fn run(
        &self,
        command: Command,
        plugin: &Value,
        program: &Path,
        netns: &Path,
        stdin: Map<String, Value>,
        (end, bound): (Instant, Duration),
    ) -> Result<Value> {
        let name = type_of(plugin);
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(Error::new(
                Kind::Deadline,
                format!(
                    "run CNI plugin {name:?}: the {:.1} s for the whole chain were over before it began",
                    bound.as_secs_f64()
                ),
            ));
        }
        let call = Call {
            command,
            name,
            program,
            search: &self.config.cni.plugin_dirs,
            attachment: self.attachment,
            netns,
            conf: Value::Object(stdin).to_string().into_bytes(),
            left,
            bound,
        };
        plugin::run(self.reaper, call).await
    }
}

/// The configuration as one plugin gets it: its own object, the list's name and version, prevResult, and of the
/// capability args those that it declares.
fn stdin(
    conf: &NetworkConf,
    plugin: &Value,
    attachment: &Attachment,
    previous: Option<&Value>,
) -> Map<String, Value> {
    let mut object = plugin.as_object().cloned().unwrap_or_default();
    object.insert("name".into(), conf.name.as_str().into());
    object.insert("cniVersion".into(), conf.cni_version.as_str().into());
    object.shift_remove("prevResult");
    if let Some(previous) = previous {
        object.insert("prevResult".into(), previous.clone());
    }
    let mut runtime = attachment.capability_args();
    runtime.retain(|capability, _| conf::declares(plugin, capability));
    if !runtime.is_empty() {
        object.insert("runtimeConfig".into(), Value::Object(runtime));
    }
    object
}

fn type_of(plugin: &Value) -> &str {
    plugin["type"].as_str().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::network::PortMapping;
    use serde_json::json;

    fn sample() -> (NetworkConf, Attachment) {
        let text = json!({"cniVersion": "1.0.0", "name": "pods", "plugins": [
            {"type": "bridge", "capabilities": {"ips": true}, "prevResult": {"stale": true}, "name": "other"},
            {"type": "portmap", "capabilities": {"portMappings": true, "mac": false}}]});
        let attachment = Attachment {
            container_id: "a".into(),
            netns: "/run/netns/a".into(),
            ifname: "eth0".into(),
            args: vec![("K8S_POD_NAME".into(), "web".into())],
            port_mappings: [80, 0]
                .map(|host_port| PortMapping {
                    host_port,
                    container_port: 80,
                    protocol: "tcp".into(),
                    host_ip: String::new(),
                })
                .into(),
            capabilities: [
                ("ips".to_owned(), json!(["10.0.0.9/24"])),
                ("mac".to_owned(), json!("0a:00:00:00:00:01")),
            ]
            .into_iter()
            .collect(),
        };
        (
            conf::parse(Path::new("pods.conflist"), text.to_string().into()).unwrap(),
            attachment,
        )
    }

    #[test]
    fn a_plugin_gets_only_the_capability_args_that_it_declares() {
        let (conf, attachment) = sample();
        let bridge = stdin(&conf, &conf.plugins[0], &attachment, None);
        assert_eq!(bridge["runtimeConfig"], json!({"ips": ["10.0.0.9/24"]}));
        let portmap = stdin(&conf, &conf.plugins[1], &attachment, None);
        assert_eq!(
            portmap["runtimeConfig"],
            json!({"portMappings": [{"hostPort": 80, "containerPort": 80, "protocol": "tcp"}]})
        );
        let bare = Attachment {
            port_mappings: Vec::new(),
            capabilities: Map::new(),
            ..attachment
        };
        assert!(!stdin(&conf, &conf.plugins[1], &bare, None).contains_key("runtimeConfig"));
    }

    #[test]
    fn name_version_and_prev_result_are_the_lists_not_the_files() {
        let (conf, attachment) = sample();
        let first = stdin(&conf, &conf.plugins[0], &attachment, None);
        assert_eq!(
            (&first["name"], &first["cniVersion"]),
            (&json!("pods"), &json!("1.0.0"))
        );
        assert!(!first.contains_key("prevResult"));
        let second = stdin(
            &conf,
            &conf.plugins[1],
            &attachment,
            Some(&json!({"ips": []})),
        );
        assert_eq!(second["prevResult"], json!({"ips": []}));
    }

    #[test]
    fn arguments_that_would_become_other_arguments_are_refused() {
        let (_, attachment) = sample();
        attachment.check().unwrap();
        for value in ["a;B=c", "a=b", "a\nb"] {
            let hostile = Attachment {
                args: vec![("K".into(), value.into())],
                ..attachment.clone()
            };
            assert!(hostile.check().is_err(), "{value:?}");
        }
        let hostile = Attachment {
            container_id: "../x".into(),
            ..attachment.clone()
        };
        assert!(hostile.check().is_err());
        for (protocol, host_ip) in [("TCP", ""), ("tcp", "localhost")] {
            let mut hostile = attachment.clone();
            hostile.port_mappings[0].protocol = protocol.into();
            hostile.port_mappings[0].host_ip = host_ip.into();
            assert!(hostile.check().is_err(), "{protocol} {host_ip}");
        }
        assert_eq!(
            attachment.cni_args()[0],
            ("IgnoreUnknown".into(), "1".into())
        );
    }
}
