//! What a plugin prints after ADD, in the versions there are: checked, brought to the configuration's version, addresses read.

use std::net::IpAddr;

use serde_json::{Map, Value};

use super::convert::convert;
use super::facts::{AddResult, Facts};
use super::version::{self, PREV_RESULT_ON_DEL, VERSIONS};
use crate::error::{Error, Kind, Result};

/// Most characters of a foreign value that go into an error.
const SHOWN: usize = 200;

/// Checks a result and brings it to `version`. A result without `cniVersion` is read as one of the version the plugin
/// was called with, as libcni does.
pub(super) fn normalise(raw: Value, version: &str) -> Result<AddResult> {
    let Value::Object(raw) = raw else {
        return Err(Error::new(Kind::Other, "the result is not a JSON object"));
    };
    let stated = stated(&raw, version)?;
    let ips = addresses(&raw)?;
    // Read in the newest form first: an older configuration has no place for all of it.
    let newest = convert(raw.clone(), &stated, "1.1.0")?;
    let converted = convert(raw, &stated, version)?;
    // An address of the host's side may have become the only one of its family.
    addresses(&converted)?;
    Ok(AddResult {
        ips,
        facts: Facts::read(&Value::Object(newest)),
        raw: Value::Object(converted),
        timings: Vec::new(),
    })
}

/// A result in another version of the specification. Errors: it cannot be told in that one.
pub fn converted(raw: Value, version: &str) -> Result<Value> {
    normalise(raw, version).map(|result| result.raw)
}

/// prevResult of a DEL: None when it cannot be given in `version`, which must not stop the DEL.
pub(super) fn for_del(raw: &Value, version: &str) -> Option<Value> {
    if !version::at_least(version, PREV_RESULT_ON_DEL) {
        return None;
    }
    normalise(raw.clone(), version).ok().map(|r| r.raw)
}

fn stated(raw: &Map<String, Value>, version: &str) -> Result<String> {
    match raw.get("cniVersion") {
        None | Some(Value::Null) => Ok(version.to_owned()),
        Some(Value::String(s)) if s.is_empty() => Ok(version.to_owned()),
        Some(Value::String(s)) if version::is_known(s) => Ok(s.clone()),
        Some(other) => Err(Error::new(
            Kind::Other,
            format!(
                "the result has cniVersion {}; versions {} are read here",
                shown(other),
                VERSIONS.join(", ")
            ),
        )),
    }
}

fn addresses(raw: &Map<String, Value>) -> Result<Vec<String>> {
    let interfaces = raw.get("interfaces").and_then(Value::as_array);
    let in_sandbox = |ip: &Value| {
        let index = ip["interface"]
            .as_u64()
            .and_then(|i| usize::try_from(i).ok());
        match (index, interfaces) {
            // Without a reference to an interface the address is the attachment's own.
            (None, _) | (_, None) => true,
            (Some(i), Some(all)) => all
                .get(i)
                .is_none_or(|f| f["sandbox"].as_str().is_some_and(|s| !s.is_empty())),
        }
    };
    let listed = raw
        .get("ips")
        .and_then(Value::as_array)
        .into_iter()
        .flatten();
    let listed = listed.filter(|ip| in_sandbox(ip)).map(|ip| &ip["address"]);
    let legacy = ["ip4", "ip6"]
        .into_iter()
        .filter_map(|key| raw.get(key))
        .map(|ip| &ip["ip"]);
    listed.chain(legacy).map(address).collect()
}

/// An address with its prefix length. It is checked because it ends up in the pod's hosts file.
fn address(value: &Value) -> Result<String> {
    let text = value.as_str().unwrap_or_default();
    let good = text.split_once('/').is_some_and(|(ip, prefix)| {
        let limit = match ip.parse::<IpAddr>() {
            Ok(IpAddr::V4(_)) => 32,
            Ok(IpAddr::V6(_)) => 128,
            Err(_) => return false,
        };
        prefix.parse::<u8>().is_ok_and(|p| p <= limit)
    });
    if good {
        return Ok(text.to_owned());
    }
    Err(Error::new(
        Kind::Other,
        format!(
            "the result has {} where an address with prefix length belongs",
            shown(value)
        ),
    ))
}

/// A foreign value, short and without control characters (JSON escapes some of them only).
fn shown(value: &Value) -> String {
    let text = value.to_string();
    let shown = text.chars().take(SHOWN);
    shown
        .map(|c| if c.is_control() { ' ' } else { c })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn bridge(version: &str) -> Value {
        json!({"cniVersion": version,
            "interfaces": [{"name": "cni0", "mac": "0a:00:00:00:00:01"}, {"name": "eth0", "sandbox": "/run/netns/x"}],
            "ips": [{"version": "4", "interface": 1, "address": "10.1.2.3/24", "gateway": "10.1.2.1"},
                    {"version": "6", "interface": 1, "address": "fd00::3/64"},
                    {"version": "4", "interface": 0, "address": "10.1.2.1/24"}]})
    }

    #[test]
    fn addresses_in_the_sandbox_keep_their_order_in_every_version() {
        for version in ["0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"] {
            let result = normalise(bridge(version), version).unwrap();
            assert_eq!(result.ips, ["10.1.2.3/24", "fd00::3/64"], "{version}");
        }
        let old = json!({"ip4": {"ip": "10.0.0.2/16"}, "ip6": {"ip": "fd00::2/64"}, "dns": {}});
        assert_eq!(
            normalise(old, "0.2.0").unwrap().ips,
            ["10.0.0.2/16", "fd00::2/64"]
        );
    }

    #[test]
    fn a_result_without_a_version_is_read_as_the_configurations() {
        let raw = json!({"ips": [{"address": "10.0.0.2/16"}]});
        let result = normalise(raw, "0.3.1").unwrap();
        assert_eq!(result.raw["cniVersion"], "0.3.1");
        assert_eq!(result.raw["ips"][0]["version"], "4");
    }

    #[test]
    fn a_result_is_brought_to_the_version_of_the_configuration() {
        let up = normalise(bridge("0.4.0"), "1.0.0").unwrap().raw;
        assert_eq!(
            (up["cniVersion"].as_str(), up["ips"][0].get("version")),
            (Some("1.0.0"), None)
        );
        let down = normalise(bridge("1.0.0"), "0.4.0").unwrap().raw;
        assert_eq!(
            (
                down["cniVersion"].as_str(),
                down["ips"][1]["version"].as_str()
            ),
            (Some("0.4.0"), Some("6"))
        );
    }

    #[test]
    fn what_is_not_a_result_is_refused() {
        for raw in [
            json!([]),
            json!({"cniVersion": "3.0.0"}),
            json!({"cniVersion": 1}),
            json!({"ips": [{"address": "10.0.0.2"}]}),
            json!({"ips": [{"address": "10.0.0.2/33"}]}),
            json!({"ips": [{"address": "10.0.0.2/24\nevil"}]}),
            json!({"ips": [{}]}),
        ] {
            assert!(normalise(raw.clone(), "1.0.0").is_err(), "{raw}");
        }
    }

    #[test]
    fn del_goes_without_a_result_it_cannot_be_given() {
        assert!(for_del(&bridge("1.0.0"), "0.3.1").is_none());
        // FL-029: it says it is old, and is not.
        let lie = json!({"cniVersion": "0.1.0", "ips": [{"address": "10.0.0.2/16"}]});
        assert!(for_del(&lie, "0.4.0").is_none());
        let old = json!({"cniVersion": "0.1.0", "ip4": {"ip": "10.0.0.2/16"}});
        assert_eq!(for_del(&old, "0.4.0").unwrap()["ips"][0]["version"], "4");
        assert!(for_del(&json!("damaged"), "1.0.0").is_none());
        assert_eq!(
            for_del(&bridge("0.4.0"), "1.0.0").unwrap()["cniVersion"],
            "1.0.0"
        );
    }
}
