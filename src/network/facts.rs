//! What is told of an attachment: addresses, interfaces, routes, DNS, and the time each plugin took.

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// What ADD gave.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct AddResult {
    /// Addresses of interfaces in the sandbox, "10.1.2.3/24", order kept.
    pub ips: Vec<String>,
    /// The whole result of the last plugin, in the version of the configuration.
    pub raw: Value,
    /// Everything in it that people ask for.
    #[serde(default)]
    pub facts: Facts,
    /// Time of each plugin, in the order they ran.
    #[serde(default)]
    pub timings: Vec<Timing>,
}

/// A result in the words of CNI 1.1, whatever version it came in.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Facts {
    /// Interfaces that were made, also those on the host's side.
    #[serde(default)]
    pub interfaces: Vec<Interface>,
    /// Addresses in order.
    #[serde(default)]
    pub addresses: Vec<Address>,
    /// Routes in the sandbox.
    #[serde(default)]
    pub routes: Vec<Route>,
    /// What the network says of name servers.
    #[serde(default)]
    pub dns: Dns,
}

/// One interface.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Interface {
    /// Its name.
    pub name: String,
    /// Hardware address; empty where it is not known.
    pub mac: String,
    /// Netns it is in; empty: the host's.
    pub sandbox: String,
    /// Since 1.1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mtu: Option<u32>,
}

/// One address.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Address {
    /// With prefix length.
    pub address: String,
    /// Gateway of its subnet; empty where there is none.
    pub gateway: String,
    /// Index into the interfaces.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub interface: Option<usize>,
}

/// One route.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Route {
    /// Destination with prefix length.
    pub dst: String,
    /// Next hop; absent: on the link, or the gateway of the address.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gw: Option<String>,
    /// Since 1.1, as are those below.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mtu: Option<u32>,
    /// Maximum segment size that is advertised.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub advmss: Option<u32>,
    /// Lower wins.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub priority: Option<u32>,
}

/// Name servers.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Dns {
    /// Addresses of name servers.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub nameservers: Vec<String>,
    /// Local domain.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub domain: String,
    /// Search list.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub search: Vec<String>,
    /// Options of the resolver.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub options: Vec<String>,
}

/// How long one plugin took.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Timing {
    /// Type of the plugin.
    pub plugin: String,
    /// Microseconds.
    pub took_us: u64,
}

impl Facts {
    /// Reads them from a result of 0.3 or later. What is not as the specification has it is left out: it is told to
    /// people, nothing is decided by it. (Addresses of the sandbox have been checked by then.)
    pub(super) fn read(result: &Value) -> Self {
        Self {
            interfaces: list(&result["interfaces"]),
            addresses: list(&result["ips"]),
            routes: list(&result["routes"]),
            dns: serde_json::from_value(result["dns"].clone()).unwrap_or_default(),
        }
    }
}

/// An index must stay what it points at, so that an element that cannot be read stands there empty.
fn list<T: serde::de::DeserializeOwned + Default>(value: &Value) -> Vec<T> {
    let read = |element: &Value| serde_json::from_value(element.clone()).unwrap_or_default();
    value.as_array().into_iter().flatten().map(read).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn what_cannot_be_read_is_left_out_and_the_rest_is_told() {
        let facts = Facts::read(&json!({
            "interfaces": [7, {"name": "eth0", "mac": "0a:00:00:00:00:01", "sandbox": "/n", "mtu": 1400}],
            "ips": [{"address": "10.0.0.2/24", "gateway": "10.0.0.1", "interface": 1}],
            "routes": [{"dst": "0.0.0.0/0", "gw": null, "priority": 9}], "dns": "none"}));
        assert_eq!(facts.interfaces[1].name, "eth0");
        assert_eq!(facts.interfaces[0], Interface::default());
        assert_eq!(facts.addresses[0].gateway, "10.0.0.1");
        assert_eq!(facts.routes[0].priority, Some(9));
        assert_eq!(facts.dns, Dns::default());
        assert_eq!(Facts::read(&json!(null)), Facts::default());
    }
}
