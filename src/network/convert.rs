//! Results between the versions of the specification, both ways.
//!
//! Typed just enough: fields that a version has no place for go, all others stay as they came.

use serde_json::{Map, Value};

use super::version::{Shape, at_least, shape};
use crate::error::{Error, Kind, Result};

/// What 1.1 added to an interface and to a route.
const NEW_IN_INTERFACES: [&str; 3] = ["mtu", "socketPath", "pciID"];
const NEW_IN_ROUTES: [&str; 5] = ["mtu", "advmss", "priority", "table", "scope"];

/// Brings a result from version `from` to version `to` (both known), `cniVersion` included.
///
/// Errors (Other): it has nothing that `to` could hold (no address for 0.1 and 0.2), or it is not what it says it is.
pub(super) fn convert(raw: Map<String, Value>, from: &str, to: &str) -> Result<Map<String, Value>> {
    let mut result = match (shape(from), shape(to)) {
        (Shape::Pair, Shape::Pair) => raw,
        (Shape::Pair, _) => to_lists(raw, from)?,
        (_, Shape::Pair) => to_pair(&raw, to)?,
        _ => raw,
    };
    result.insert("cniVersion".into(), to.into());
    if shape(to) != Shape::Pair {
        mark_families(&mut result, shape(to) == Shape::Marked);
        if !at_least(to, "1.1.0") {
            strip(&mut result, "interfaces", &NEW_IN_INTERFACES);
            strip(&mut result, "routes", &NEW_IN_ROUTES);
        }
    }
    Ok(result)
}

/// `ip4` and `ip6` to lists, IPv4 first as in every reader of the old form.
fn to_lists(mut raw: Map<String, Value>, from: &str) -> Result<Map<String, Value>> {
    if raw.contains_key("ips") || raw.contains_key("interfaces") {
        return Err(Error::new(
            Kind::Other,
            format!("the result says it is of version {from} but has the lists of a later one"),
        ));
    }
    let (mut ips, mut routes) = (Vec::new(), Vec::new());
    for key in ["ip4", "ip6"] {
        let Some(Value::Object(ip)) = raw.shift_remove(key) else {
            continue;
        };
        let mut address = Map::new();
        if let Some(text) = ip.get("ip") {
            address.insert("address".into(), text.clone());
        }
        if let Some(gateway) = ip.get("gateway").filter(|g| !g.is_null()) {
            address.insert("gateway".into(), gateway.clone());
        }
        ips.push(Value::Object(address));
        if let Some(Value::Array(theirs)) = ip.get("routes") {
            routes.extend(theirs.iter().cloned());
        }
    }
    if !ips.is_empty() {
        raw.insert("ips".into(), ips.into());
    }
    if !routes.is_empty() {
        raw.insert("routes".into(), routes.into());
    }
    Ok(raw)
}

/// The first address of each family; the old form holds no more, and no interfaces.
fn to_pair(raw: &Map<String, Value>, to: &str) -> Result<Map<String, Value>> {
    let list = |key: &str| raw.get(key).and_then(Value::as_array).into_iter().flatten();
    let mut result = Map::new();
    for (key, six) in [("ip4", false), ("ip6", true)] {
        let Some(ip) = list("ips").find(|ip| is_six(&ip["address"]) == Some(six)) else {
            continue;
        };
        let mut pair = Map::new();
        pair.insert("ip".into(), ip["address"].clone());
        if !ip["gateway"].is_null() {
            pair.insert("gateway".into(), ip["gateway"].clone());
        }
        let routes: Vec<Value> = list("routes")
            .filter(|route| is_six(&route["dst"]) == Some(six))
            .cloned()
            .collect();
        if !routes.is_empty() {
            pair.insert("routes".into(), routes.into());
        }
        result.insert(key.into(), Value::Object(pair));
    }
    if result.is_empty() {
        return Err(Error::new(
            Kind::Other,
            format!(
                "the result has no address, and without one there is no result of version {to}"
            ),
        ));
    }
    if let Some(dns) = raw.get("dns") {
        result.insert("dns".into(), dns.clone());
    }
    strip_in(result.values_mut(), "routes", &NEW_IN_ROUTES);
    Ok(result)
}

/// 0.3 and 0.4 want `version: "4"|"6"` in each address; 1.0 dropped it.
fn mark_families(raw: &mut Map<String, Value>, wanted: bool) {
    let Some(Value::Array(ips)) = raw.get_mut("ips") else {
        return;
    };
    for ip in ips.iter_mut().filter_map(Value::as_object_mut) {
        if wanted {
            let six = ip.get("address").and_then(is_six).unwrap_or(false);
            ip.insert("version".into(), if six { "6" } else { "4" }.into());
        } else {
            ip.shift_remove("version");
        }
    }
}

fn is_six(address: &Value) -> Option<bool> {
    address.as_str().map(|text| text.contains(':'))
}

fn strip_in<'a>(objects: impl Iterator<Item = &'a mut Value>, list: &str, fields: &[&str]) {
    for object in objects.filter_map(Value::as_object_mut) {
        strip(object, list, fields);
    }
}

fn strip(raw: &mut Map<String, Value>, list: &str, fields: &[&str]) {
    let Some(Value::Array(all)) = raw.get_mut(list) else {
        return;
    };
    for object in all.iter_mut().filter_map(Value::as_object_mut) {
        object.retain(|field, _| !fields.contains(&field.as_str()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn object(value: Value) -> Map<String, Value> {
        match value {
            Value::Object(map) => map,
            other => panic!("{other}"),
        }
    }

    fn full() -> Map<String, Value> {
        object(json!({"cniVersion": "1.1.0",
            "interfaces": [{"name": "eth0", "mac": "0a:00:00:00:00:01", "mtu": 1400, "sandbox": "/run/netns/x", "socketPath": "/s", "vendor": 1}],
            "ips": [{"address": "fd00::3/64", "interface": 0}, {"address": "10.1.2.3/24", "gateway": "10.1.2.1", "interface": 0}],
            "routes": [{"dst": "0.0.0.0/0", "gw": "10.1.2.1", "mtu": 1400, "priority": 5}, {"dst": "::/0"}],
            "dns": {"nameservers": ["10.1.2.1"]}, "vendor": {"kept": true}}))
    }

    #[test]
    fn downwards_the_fields_of_1_1_go_and_unknown_ones_stay() {
        for version in ["1.0.0", "0.4.0", "0.3.0"] {
            let old = convert(full(), "1.1.0", version).unwrap();
            assert_eq!(old["cniVersion"], version);
            assert_eq!(
                old["interfaces"][0],
                json!({"name": "eth0", "mac": "0a:00:00:00:00:01", "sandbox": "/run/netns/x", "vendor": 1})
            );
            assert_eq!(
                old["routes"][0],
                json!({"dst": "0.0.0.0/0", "gw": "10.1.2.1"})
            );
            assert_eq!(old["vendor"]["kept"], true);
            let marked = old["ips"][0].get("version").and_then(Value::as_str);
            assert_eq!(marked, (version != "1.0.0").then_some("6"));
        }
        assert_eq!(convert(full(), "1.1.0", "1.1.0").unwrap(), full());
    }

    #[test]
    fn to_the_oldest_form_goes_one_address_of_each_family_with_its_routes() {
        let old = convert(full(), "1.1.0", "0.2.0").unwrap();
        assert_eq!(
            Value::Object(old),
            json!({"ip4": {"ip": "10.1.2.3/24", "gateway": "10.1.2.1", "routes": [{"dst": "0.0.0.0/0", "gw": "10.1.2.1"}]},
                "ip6": {"ip": "fd00::3/64", "routes": [{"dst": "::/0"}]},
                "dns": {"nameservers": ["10.1.2.1"]}, "cniVersion": "0.2.0"})
        );
        assert!(convert(object(json!({"interfaces": []})), "1.0.0", "0.1.0").is_err());
    }

    #[test]
    fn the_oldest_form_becomes_lists() {
        let old = object(json!({"cniVersion": "0.2.0",
            "ip4": {"ip": "10.0.0.2/16", "gateway": "10.0.0.1", "routes": [{"dst": "0.0.0.0/0"}]},
            "ip6": {"ip": "fd00::2/64"}, "dns": {"domain": "x"}}));
        let new = convert(old.clone(), "0.2.0", "0.4.0").unwrap();
        assert_eq!(
            new["ips"],
            json!([{"address": "10.0.0.2/16", "gateway": "10.0.0.1", "version": "4"}, {"address": "fd00::2/64", "version": "6"}])
        );
        assert_eq!(new["routes"], json!([{"dst": "0.0.0.0/0"}]));
        assert!(!new.contains_key("ip4") && new["dns"]["domain"] == "x");
        let back = convert(new, "0.4.0", "0.2.0").unwrap();
        assert_eq!((&back["ip4"], &back["ip6"]), (&old["ip4"], &old["ip6"]));
    }

    #[test]
    fn a_result_that_is_not_what_it_says_cannot_be_converted() {
        let lie = object(json!({"cniVersion": "0.1.0", "ips": [{"address": "10.0.0.2/24"}]}));
        assert!(convert(lie, "0.1.0", "0.4.0").is_err());
    }
}
