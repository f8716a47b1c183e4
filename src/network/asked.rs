//! What the plugins of a pod are asked for, as one digest: two requests with the same one would get the same network.
//!
//! Left out is what names the sandbox and not the pod, and what no plugin of the network looks at.

use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};

use super::{Attachment, NetworkConf};

/// Names the sandbox, among the arguments of a plugin and among annotations.
const OF_THE_SANDBOX: [&str; 2] = ["K8S_POD_INFRA_CONTAINER_ID", "io.kubernetes.cri.sandbox-id"];

/// SHA-256 of the attachments, in order. `more`: what else has to be the same (of the netns itself).
pub fn asked(confs: &[NetworkConf], attachments: &[Attachment], more: &Value) -> String {
    let pairs = confs.iter().zip(attachments);
    let all: Vec<Value> = pairs.map(|(conf, asked)| one(conf, asked)).collect();
    let digest = Sha256::digest(json!([all, more]).to_string());
    crate::id::hex(&digest)
}

fn one(conf: &NetworkConf, asked: &Attachment) -> Value {
    let is_pods = |name: &str| !OF_THE_SANDBOX.contains(&name);
    let mut args: Vec<_> = asked.args.iter().filter(|(k, _)| is_pods(k)).collect();
    args.sort();
    let mut capabilities: Vec<(String, Value)> = asked
        .capability_args()
        .into_iter()
        .filter(|(name, _)| conf.supports(name))
        .map(|(name, value)| (name, sorted(value)))
        .collect();
    capabilities.sort_by(|a, b| a.0.cmp(&b.0));
    json!([conf.name, asked.ifname, args, capabilities])
}

/// Objects keep the order in which they were made; equal ones have to be spelt alike.
fn sorted(value: Value) -> Value {
    match value {
        Value::Object(map) => {
            let mut pairs: Vec<(String, Value)> = map
                .into_iter()
                .filter(|(name, _)| !OF_THE_SANDBOX.contains(&name.as_str()))
                .map(|(name, value)| (name, sorted(value)))
                .collect();
            pairs.sort_by(|a, b| a.0.cmp(&b.0));
            Value::Object(Map::from_iter(pairs))
        }
        Value::Array(list) => list.into_iter().map(sorted).collect(),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::network::{PortMapping, conf};
    use std::path::Path;

    fn attachment(id: &str) -> Attachment {
        Attachment {
            container_id: id.into(),
            netns: "/run/netns/a".into(),
            ifname: "eth0".into(),
            args: vec![
                ("K8S_POD_NAME".into(), "web".into()),
                ("K8S_POD_INFRA_CONTAINER_ID".into(), id.into()),
            ],
            port_mappings: vec![PortMapping {
                host_port: 80,
                container_port: 80,
                protocol: "tcp".into(),
                ..PortMapping::default()
            }],
            capabilities: Map::from_iter([("dns".to_owned(), json!({"servers": [id]}))]),
        }
    }

    #[test]
    fn the_sandbox_and_what_nobody_looks_at_make_no_difference_and_ports_do() {
        let text = r#"{"cniVersion":"1.0.0","name":"pods","plugins":[{"type":"portmap","capabilities":{"portMappings":true}}]}"#;
        let conf = [conf::parse(Path::new("a"), text.into()).unwrap()];
        let of = |a: Attachment| asked(&conf, &[a], &Value::Null);
        assert_eq!(of(attachment("p1")), of(attachment("p2")));
        let mut other = attachment("p2");
        other.port_mappings[0].host_port = 81;
        assert_ne!(of(attachment("p1")), of(other));
        let mut other = attachment("p2");
        other.ifname = "eth1".into();
        assert_ne!(of(attachment("p1")), of(other));
        let known =
            [conf::parse(Path::new("a"), text.replace("portMappings", "dns").into()).unwrap()];
        let of = |a: Attachment| asked(&known, &[a], &Value::Null);
        assert_ne!(
            of(attachment("p1")),
            of(attachment("p2")),
            "a plugin looks at the DNS"
        );
    }
}
