//! The plugins of one network for one attachment: found, fed and run in order, within one bound for the whole chain.

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::{Map, Value};
use tokio::time::Instant;

use super::plugin::{self, Call, Command};
use super::{AddResult, Attachment, NetworkConf, Timing, conf, netns, result};
use crate::config::Config;
use crate::error::{Error, Kind, Result};
use crate::failpoint;
use crate::process::Reaper;

/// One attachment and everything its calls have in common.
#[derive(Debug)]
pub(super) struct Chain<'a> {
    config: &'a Config,
    reaper: &'a Reaper,
    pub(super) conf: &'a NetworkConf,
    pub(super) attachment: &'a Attachment,
    /// Executable of each plugin of `conf`.
    programs: Vec<PathBuf>,
}

#[derive(Debug)]
pub(super) struct Failed {
    pub(super) error: Error,
    /// Result of the last plugin that succeeded.
    pub(super) previous: Option<Value>,
}

impl<'a> Chain<'a> {
    /// Finds every plugin before one runs: half a chain is worse than none.
    pub(super) fn new(
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

    /// Executable of each plugin, in the order of the list.
    pub(super) fn programs(&self) -> &[PathBuf] {
        &self.programs
    }

    pub(super) async fn add(&self, end: Instant, bound: Duration) -> Result<AddResult, Failed> {
        self.add_after(None, end, bound).await
    }

    /// The same where other plugins have run before: `before` is what the last of them gave.
    pub(super) async fn add_after(
        &self,
        before: Option<&Value>,
        end: Instant,
        bound: Duration,
    ) -> Result<AddResult, Failed> {
        let mut last: Option<AddResult> = None;
        let mut timings = Vec::new();
        for (plugin, program) in self.conf.plugins.iter().zip(&self.programs) {
            let previous = last.as_ref().map(|result| &result.raw).or(before);
            let stdin = stdin(self.conf, plugin, self.attachment, previous);
            let netns = &self.attachment.netns;
            let begun = Instant::now();
            let run = async {
                failpoint::reach("cni-add.plugin.before").await?;
                let ran = self.run(Command::Add, plugin, program, netns, stdin, (end, bound));
                let raw = ran.await?;
                failpoint::reach("cni-add.plugin.after").await.map(|()| raw)
            };
            let next = run.await.and_then(|raw| {
                // The next plugin reads prevResult in the version of the configuration.
                let what = || format!("read the result of CNI plugin {:?}", type_of(plugin));
                result::normalise(raw, &self.conf.cni_version).map_err(|e| e.within(what()))
            });
            timings.push(Timing {
                plugin: type_of(plugin).to_owned(),
                took_us: u64::try_from(begun.elapsed().as_micros()).unwrap_or(u64::MAX),
            });
            match next {
                Ok(result) => last = Some(result),
                Err(error) => {
                    let previous = last.map(|result| result.raw);
                    return Err(Failed { error, previous });
                }
            }
        }
        Ok(AddResult {
            timings,
            ..last.unwrap_or_default()
        })
    }

    /// CHECK in the order of ADD; the first failure ends it.
    pub(super) async fn check(&self, previous: &Value, bound: Duration) -> Result<()> {
        let end = Instant::now() + bound;
        for (plugin, program) in self.conf.plugins.iter().zip(&self.programs) {
            let stdin = stdin(self.conf, plugin, self.attachment, Some(previous));
            let netns = &self.attachment.netns;
            self.run(Command::Check, plugin, program, netns, stdin, (end, bound))
                .await?;
        }
        Ok(())
    }

    pub(super) async fn del(
        &self,
        previous: Option<&Value>,
        begun: Instant,
        bound: Duration,
    ) -> Result<()> {
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
            failpoint::reach("cni-del.plugin.before").await?;
            self.run(
                Command::Del,
                plugin,
                program,
                netns,
                stdin,
                (begun + bound, bound),
            )
            .await?;
            failpoint::reach("cni-del.plugin.after").await?;
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
            attachment: Some(self.attachment),
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

/// A plugin's `type`.
pub(super) fn type_of(plugin: &Value) -> &str {
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
