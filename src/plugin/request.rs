//! What the daemon asks: CNI's environment and our part of the configuration, read and checked.

use std::env;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};

use super::VERSIONS;
use crate::clock;
use crate::config::Config;
use crate::error::{Error, Kind, Result};
use crate::network::{self, Attachment, DAEMONS, Holder, NetworkConf, PLUGIN as TYPE, PodKey};

/// After this an ADD says by itself at which stage the network is: a daemon that kills the plugin tells nobody. Kubelets
/// wait for four minutes.
const ANSWER_AFTER: Duration = Duration::from_secs(210);

/// Where the specification has the attachments that GC must leave.
const VALID: &str = "cni.dev/valid-attachments";

/// What can be asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verb {
    Add,
    Del,
    Check,
    Status,
    Gc,
    Version,
}

/// One call of the plugin.
#[derive(Debug)]
pub(super) struct Request {
    /// The network in front of which we are.
    pub(super) network: String,
    /// Version of the answer.
    pub(super) version: String,
    /// CNI_CONTAINERID.
    pub(super) id: String,
    /// CNI_NETNS; may be empty.
    pub(super) netns: PathBuf,
    /// CNI_IFNAME.
    pub(super) ifname: String,
    /// CNI_ARGS in order.
    pub(super) args: Vec<(String, String)>,
    /// The real network.
    pub(super) conf: NetworkConf,
    /// Capability args that a plugin of the real network declares.
    pub(super) capabilities: Map<String, Value>,
    /// prevResult.
    pub(super) previous: Option<Value>,
    /// Attachments that GC must leave.
    pub(super) valid: Value,
    /// When an ADD that waits answers by itself.
    pub(super) answer_after: Duration,
}

/// CNI_COMMAND.
pub(super) fn verb() -> Result<Verb> {
    match env::var("CNI_COMMAND").unwrap_or_default().as_str() {
        "ADD" => Ok(Verb::Add),
        "DEL" => Ok(Verb::Del),
        "CHECK" => Ok(Verb::Check),
        "STATUS" => Ok(Verb::Status),
        "GC" => Ok(Verb::Gc),
        "VERSION" => Ok(Verb::Version),
        other => Err(Error::new(
            Kind::Invalid,
            format!(
                "read CNI_COMMAND {other:?}: {TYPE} is a CNI plugin; a daemon runs it, with ADD, DEL, CHECK, STATUS, GC or VERSION"
            ),
        )),
    }
}

/// Version of an answer to a configuration that may be damaged.
pub(super) fn version_of(stdin: &[u8]) -> String {
    let conf: Value = serde_json::from_slice(stdin).unwrap_or_default();
    let version = conf["cniVersion"].as_str().filter(|v| VERSIONS.contains(v));
    version.unwrap_or("1.0.0").to_owned()
}

impl Request {
    /// Reads environment and configuration; the plugins' directories are the daemon's from then on. Errors: Invalid.
    pub(super) fn read(config: &mut Config, verb: Verb, stdin: &[u8]) -> Result<Self> {
        let bad = |text: String| Error::new(Kind::Invalid, text);
        let ours: Value = serde_json::from_slice(stdin)
            .map_err(|e| Error::caused(Kind::Invalid, "read the network configuration", e))?;
        let version = ours["cniVersion"].as_str().unwrap_or_default();
        if !VERSIONS.contains(&version) {
            return Err(bad(format!(
                "check cniVersion {version:?}: versions {} are spoken here",
                VERSIONS.join(", ")
            )));
        }
        let name = ours["name"].as_str().unwrap_or_default();
        crate::id::check_network(name)?;
        let search: Vec<PathBuf> = env::split_paths(&env::var_os("CNI_PATH").unwrap_or_default())
            .filter(|dir| dir.is_absolute())
            .collect();
        if !search.is_empty() {
            config.cni.plugin_dirs = search;
            config.cni.dirs_told = true;
        }
        let conf = delegate(config, &ours, name, version)?;
        let of = |key: &str| env::var(key).unwrap_or_default();
        let mut capabilities = match ours.get("runtimeConfig") {
            Some(Value::Object(all)) => all.clone(),
            _ => Map::new(),
        };
        capabilities.retain(|name, _| conf.supports(name));
        let seconds = ours["answerAfter"].as_f64();
        let seconds = seconds.and_then(|s| Duration::try_from_secs_f64(s).ok());
        let request = Self {
            network: name.to_owned(),
            version: version.to_owned(),
            id: of("CNI_CONTAINERID"),
            netns: of("CNI_NETNS").into(),
            ifname: of("CNI_IFNAME"),
            args: split_args(&of("CNI_ARGS")),
            capabilities,
            previous: ours.get("prevResult").filter(|v| !v.is_null()).cloned(),
            valid: ours.get(VALID).cloned().unwrap_or_default(),
            answer_after: seconds.unwrap_or(ANSWER_AFTER),
            conf,
        };
        if matches!(verb, Verb::Add | Verb::Del | Verb::Check) {
            crate::id::check("container id (CNI_CONTAINERID)", &request.id)?;
            crate::id::check_interface(&request.ifname)?;
        }
        Ok(request)
    }

    /// The pod, whichever attempt this is; None where the daemon does not tell.
    pub(super) fn key(&self) -> Option<PodKey> {
        let [space, name, uid] = self.pod();
        PodKey::new(DAEMONS, space, name, uid, 0).map(|key| key.of_network(&self.attached()))
    }

    /// The pod's namespace, name and uid; empty where not told.
    pub(super) fn pod(&self) -> [&str; 3] {
        ["K8S_POD_NAMESPACE", "K8S_POD_NAME", "K8S_POD_UID"].map(|key| {
            let found = self.args.iter().find(|(k, _)| k == key);
            found.map_or("", |(_, value)| value.as_str())
        })
    }

    /// For people.
    pub(super) fn pod_name(&self) -> String {
        let [space, name, uid] = self.pod();
        format!("pod {space}/{name} (uid {uid})")
    }

    /// Which of a pod's networks: "pods/eth0".
    pub(super) fn attached(&self) -> String {
        format!("{}/{}", self.network, self.ifname)
    }

    /// What is written of whoever makes or takes the network that is asked for.
    pub(super) fn holder(&self) -> Holder {
        let [space, name, uid] = self.pod();
        Holder {
            namespace: DAEMONS.to_owned(),
            sandbox_id: self.id.clone(),
            name: name.to_owned(),
            uid: uid.to_owned(),
            pod_namespace: space.to_owned(),
            boot_id: clock::boot_id(),
            begun: clock::unix_nanos(std::time::SystemTime::now()),
            digest: self.digest(),
            ifnames: vec![self.ifname.clone()],
            network: self.attached(),
            ..Holder::default()
        }
    }

    /// The same for every attempt that would get the same network now.
    fn digest(&self) -> String {
        let conf = Sha256::digest(&self.conf.bytes);
        let conf = crate::id::hex(&conf);
        let attachment = self.attachment(&self.id, Path::new("/"));
        network::asked(
            std::slice::from_ref(&self.conf),
            &[attachment],
            &json!([conf, self.version]),
        )
    }

    /// The call that the real plugins get.
    pub(super) fn attachment(&self, id: &str, netns: &Path) -> Attachment {
        Attachment {
            container_id: id.to_owned(),
            netns: netns.to_owned(),
            ifname: self.ifname.clone(),
            args: self.args.clone(),
            port_mappings: Vec::new(),
            capabilities: self.capabilities.clone(),
        }
    }
}

/// The real network: inlined, or by its name.
fn delegate(config: &Config, ours: &Value, name: &str, version: &str) -> Result<NetworkConf> {
    let conf = match (&ours["plugins"], ours["network"].as_str()) {
        (Value::Array(plugins), None) => {
            let list = json!({"cniVersion": version, "name": name, "plugins": plugins});
            network::inlined(Path::new("podvisor-cni.conflist"), &list)?
        }
        (Value::Null, Some(named)) => {
            let mut there = config.clone();
            if let Some(dir) = ours["confDir"].as_str().filter(|d| d.starts_with('/')) {
                there.cni.conf_dir = dir.into();
            }
            network::load_conf(&there, Some(named)).map_err(|e| e.as_kind(Kind::Invalid))?
        }
        _ => {
            return Err(Error::new(
                Kind::Invalid,
                format!(
                    "read the configuration of network {name:?}: plugin {TYPE} needs either \"plugins\", the real network's, or \"network\", its name"
                ),
            ));
        }
    };
    if conf.plugins.iter().any(|p| p["type"] == TYPE) {
        return Err(Error::new(
            Kind::Invalid,
            format!(
                "read the configuration of network {name:?}: plugin {TYPE} is in front of itself"
            ),
        ));
    }
    Ok(conf)
}

/// `A=b;C=d`. What is no pair is left out: no plugin could read it either.
fn split_args(text: &str) -> Vec<(String, String)> {
    let pairs = text.split(';').filter_map(|pair| pair.split_once('='));
    pairs.map(|(k, v)| (k.to_owned(), v.to_owned())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn conf(more: Value) -> Result<NetworkConf> {
        delegate(&Config::default(), &more, "pods", "1.0.0")
    }

    #[test]
    fn the_real_network_is_inlined_or_named_and_never_the_plugin_itself() {
        let inlined = conf(json!({"plugins": [{"type": "bridge"}, {"type": "portmap"}]})).unwrap();
        assert_eq!((inlined.name.as_str(), inlined.plugins.len()), ("pods", 2));
        for bad in [
            json!({}),
            json!({"plugins": [], "network": "a"}),
            json!({"plugins": [{"type": TYPE}]}),
            json!({"plugins": [{"type": "../x"}]}),
            json!({"network": "nowhere", "confDir": "/nonexistent"}),
        ] {
            let error = conf(bad.clone()).unwrap_err();
            assert_eq!(error.kind(), Kind::Invalid, "{bad}: {error}");
        }
    }

    #[test]
    fn arguments_keep_their_order_and_what_is_no_pair_is_left_out() {
        let args = split_args("IgnoreUnknown=1;K8S_POD_NAME=web;junk;A=");
        let keys: Vec<&str> = args.iter().map(|(k, _)| k.as_str()).collect();
        assert_eq!(keys, ["IgnoreUnknown", "K8S_POD_NAME", "A"]);
    }
}
