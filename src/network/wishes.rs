//! What a pod's annotations ask of its network, as capability args of CNI.
//!
//! | annotation | capability |
//! |---|---|
//! | `kubernetes.io/ingress-bandwidth`, `kubernetes.io/egress-bandwidth` | `bandwidth`, of every attachment |
//! | `io.podvisor.mac` | `mac` |
//! | `io.podvisor.ips` | `ips`, comma list |
//! | `io.podvisor.ip-ranges` | `ipRanges`, subnets in a comma list |
//! | `io.podvisor.aliases` | `aliases`, comma list |
//! | `io.podvisor.infiniband-guid` | `infinibandGUID` |
//! | `io.podvisor.device-id` | `deviceID` |
//!
//! Those of podvisor are the first interface's; with `.<interface>` behind they are that one's. A value that is no such
//! thing is an error before anything is done.

use std::collections::BTreeMap;
use std::net::IpAddr;

use serde_json::{Map, Value, json};

use crate::error::{Error, Kind, Result};

const INGRESS: &str = "kubernetes.io/ingress-bandwidth";
const EGRESS: &str = "kubernetes.io/egress-bandwidth";

/// What the kubelet's own reading of these annotations allows: 1 kbit/s to 1 Pbit/s.
const BANDWIDTH: std::ops::RangeInclusive<u128> = 1_000..=1_000_000_000_000_000;

/// Burst beside a rate, as containerd gives it: no bound of its own.
const BURST: u64 = u32::MAX as u64;

/// Longest list, and longest part of one; a network name's alias is a host name.
const MAX_PARTS: usize = 64;
const MAX_PART: usize = 253;

/// Reads one text into the argument of a capability.
type Reader = fn(&str) -> Option<Value>;

const OURS: [(&str, &str, Reader, &str); 6] = [
    (
        "io.podvisor.mac",
        "mac",
        mac,
        "six pairs of hex digits with ':' between them",
    ),
    (
        "io.podvisor.ips",
        "ips",
        ips,
        "IP addresses, with or without prefix length, with ',' between them",
    ),
    (
        "io.podvisor.ip-ranges",
        "ipRanges",
        ranges,
        "subnets like 10.1.0.0/24 with ',' between them",
    ),
    (
        "io.podvisor.aliases",
        "aliases",
        aliases,
        "names with ',' between them",
    ),
    (
        "io.podvisor.infiniband-guid",
        "infinibandGUID",
        guid,
        "eight pairs of hex digits with ':' between them",
    ),
    (
        "io.podvisor.device-id",
        "deviceID",
        device,
        "an id without spaces",
    ),
];

/// The capability args of each interface, in the order of `ifnames` (the first one's come from the plain annotations).
///
/// Errors (Invalid) name the annotation and what it should be.
pub fn wishes(
    annotations: &BTreeMap<String, String>,
    ifnames: &[&str],
) -> Result<Vec<Map<String, Value>>> {
    let bandwidth = bandwidth(annotations)?;
    let mut all: Vec<Map<String, Value>> = ifnames
        .iter()
        .map(|_| {
            let rate = bandwidth.clone().map(|b| ("bandwidth".to_owned(), b));
            rate.into_iter().collect()
        })
        .collect();
    for (key, text) in annotations {
        for (annotation, capability, read, shape) in OURS {
            let Some(rest) = key.strip_prefix(annotation) else {
                continue;
            };
            let index = match rest.strip_prefix('.') {
                None if rest.is_empty() => Some(0),
                None => continue,
                Some(ifname) => ifnames.iter().position(|i| *i == ifname),
            };
            let Some(wishes) = index.and_then(|i| all.get_mut(i)) else {
                return Err(invalid(
                    key,
                    text,
                    "an annotation of one of the pod's interfaces",
                ));
            };
            // Two forms of the same wish: the one with the interface's name is the more exact one.
            let exact = !rest.is_empty();
            let value = read(text.trim()).ok_or_else(|| invalid(key, text, shape))?;
            if exact || !wishes.contains_key(capability) {
                wishes.insert(capability.to_owned(), value);
            }
        }
    }
    Ok(all)
}

fn bandwidth(annotations: &BTreeMap<String, String>) -> Result<Option<Value>> {
    let mut limits = Map::new();
    for (key, rate, burst) in [
        (INGRESS, "ingressRate", "ingressBurst"),
        (EGRESS, "egressRate", "egressBurst"),
    ] {
        let Some(text) = annotations.get(key) else {
            continue;
        };
        let bits = quantity(text.trim()).filter(|bits| BANDWIDTH.contains(bits));
        let bits = bits.and_then(|bits| u64::try_from(bits).ok());
        let bits =
            bits.ok_or_else(|| invalid(key, text, "bits per second between 1k and 1P, like 10M"))?;
        limits.insert(rate.into(), bits.into());
        limits.insert(burst.into(), BURST.into());
    }
    Ok((!limits.is_empty()).then_some(Value::Object(limits)))
}

/// A quantity as Kubernetes writes it (`1.5M`, `10Mi`, `1e6`), rounded up to a whole number.
fn quantity(text: &str) -> Option<u128> {
    const SUFFIXES: [(&str, u128, u128); 16] = [
        ("Ki", 1 << 10, 1),
        ("Mi", 1 << 20, 1),
        ("Gi", 1 << 30, 1),
        ("Ti", 1 << 40, 1),
        ("Pi", 1 << 50, 1),
        ("Ei", 1 << 60, 1),
        ("n", 1, 1_000_000_000),
        ("u", 1, 1_000_000),
        ("m", 1, 1_000),
        ("k", 1_000, 1),
        ("M", 1_000_000, 1),
        ("G", 1_000_000_000, 1),
        ("T", 1_000_000_000_000, 1),
        ("P", 1_000_000_000_000_000, 1),
        ("E", 1_000_000_000_000_000_000, 1),
        ("", 1, 1),
    ];
    let end = text
        .find(|c: char| !c.is_ascii_digit() && c != '.')
        .unwrap_or(text.len());
    let (number, suffix) = text.split_at(end);
    let (factor, divisor) = match suffix.strip_prefix(['e', 'E']).filter(|e| !e.is_empty()) {
        Some(exponent) if suffix != "Ei" => {
            let exponent: i32 = exponent.parse().ok().filter(|e| (-18..=18).contains(e))?;
            let power = 10u128.checked_pow(exponent.unsigned_abs())?;
            if exponent < 0 { (1, power) } else { (power, 1) }
        }
        _ => SUFFIXES
            .iter()
            .find(|(s, ..)| *s == suffix)
            .map(|(_, f, d)| (*f, *d))?,
    };
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if number.len() > 18 || fraction.contains('.') || (whole.is_empty() && fraction.is_empty()) {
        return None;
    }
    let digits: u128 = format!("{whole}{fraction}").parse().ok()?;
    let scale = 10u128.checked_pow(u32::try_from(fraction.len()).ok()?)?;
    Some(
        digits
            .checked_mul(factor)?
            .div_ceil(scale.checked_mul(divisor)?),
    )
}

fn mac(text: &str) -> Option<Value> {
    pairs(text, 6)
}

fn guid(text: &str) -> Option<Value> {
    pairs(text, 8)
}

fn pairs(text: &str, count: usize) -> Option<Value> {
    let hex = |p: &str| p.len() == 2 && p.bytes().all(|b| b.is_ascii_hexdigit());
    let good = text.split(':').count() == count && text.split(':').all(hex);
    good.then(|| text.into())
}

fn ips(text: &str) -> Option<Value> {
    list(text, |part| {
        let bare = part.parse::<IpAddr>().is_ok();
        bare || subnet(part).is_some()
    })
}

/// One set with one range of each subnet: the pod gets an address of each.
fn ranges(text: &str) -> Option<Value> {
    let listed = list(text, |part| subnet(part).is_some())?;
    let sets = listed
        .as_array()?
        .iter()
        .map(|subnet| json!([{"subnet": subnet}]));
    Some(sets.collect())
}

fn aliases(text: &str) -> Option<Value> {
    list(text, |part| {
        part.bytes()
            .all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.'))
    })
}

fn device(text: &str) -> Option<Value> {
    let good =
        !text.is_empty() && text.len() <= MAX_PART && text.bytes().all(|b| b.is_ascii_graphic());
    good.then(|| text.into())
}

fn list(text: &str, good: fn(&str) -> bool) -> Option<Value> {
    let parts: Vec<&str> = text.split(',').map(str::trim).collect();
    let fits =
        parts.len() <= MAX_PARTS && parts.iter().all(|p| !p.is_empty() && p.len() <= MAX_PART);
    (fits && parts.iter().all(|p| good(p))).then(|| json!(parts))
}

fn subnet(text: &str) -> Option<()> {
    let (ip, prefix) = text.split_once('/')?;
    let limit = match ip.parse::<IpAddr>().ok()? {
        IpAddr::V4(_) => 32,
        IpAddr::V6(_) => 128,
    };
    prefix
        .parse::<u8>()
        .ok()
        .filter(|p| *p <= limit)
        .map(|_| ())
}

fn invalid(key: &str, text: &str, shape: &str) -> Error {
    let shown: String = text.chars().take(80).collect();
    Error::new(
        Kind::Invalid,
        format!("check annotation {key:?} = {shown:?}: give {shape}"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn annotations(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        pairs
            .iter()
            .map(|(k, v)| ((*k).to_owned(), (*v).to_owned()))
            .collect()
    }

    #[test]
    fn quantities_are_kubernetes_own() {
        for (text, bits) in [
            ("1000", Some(1_000)),
            ("10M", Some(10_000_000)),
            ("1.5k", Some(1_500)),
            ("1Ki", Some(1_024)),
            ("2e3", Some(2_000)),
            ("1E", Some(1_000_000_000_000_000_000)),
            ("1500m", Some(2)),
            ("1e-3", Some(1)),
            (".5k", Some(500)),
            ("", None),
            (".", None),
            ("M", None),
            ("1.2.3", None),
            ("-1", None),
            ("10 M", None),
            ("10MB", None),
            ("1e99", None),
            ("9999999999999999999999", None),
        ] {
            assert_eq!(quantity(text), bits, "{text}");
        }
    }

    #[test]
    fn each_wish_goes_to_its_interface() {
        let wished = annotations(&[
            (INGRESS, "1M"),
            (EGRESS, "2M"),
            ("io.podvisor.mac", "0a:00:00:00:00:01"),
            ("io.podvisor.ips.net1", "10.0.0.9, fd00::9/64"),
            ("io.podvisor.aliases", "web,db"),
            ("io.podvisor.ip-ranges.net1", "10.1.0.0/24"),
            ("io.podvisor.network", "a,b"),
        ]);
        let all = wishes(&wished, &["eth0", "net1"]).unwrap();
        let rates = json!({"ingressRate": 1_000_000, "ingressBurst": 4_294_967_295u32, "egressRate": 2_000_000, "egressBurst": 4_294_967_295u32});
        assert!(all.iter().all(|w| w["bandwidth"] == rates));
        assert_eq!(all[0]["mac"], "0a:00:00:00:00:01");
        assert_eq!(all[0]["aliases"], json!(["web", "db"]));
        assert!(!all[1].contains_key("mac") && !all[0].contains_key("ips"));
        assert_eq!(all[1]["ips"], json!(["10.0.0.9", "fd00::9/64"]));
        assert_eq!(all[1]["ipRanges"], json!([[{"subnet": "10.1.0.0/24"}]]));
    }

    #[test]
    fn what_is_no_such_thing_is_refused_by_name() {
        for (key, text) in [
            (INGRESS, "999"),
            (INGRESS, "2P"),
            (EGRESS, "fast"),
            ("io.podvisor.mac", "0a:00:00:00:00"),
            ("io.podvisor.mac", "0a:00:00:00:00:0g"),
            ("io.podvisor.ips", "10.0.0.1/33"),
            ("io.podvisor.ips", "10.0.0.1,"),
            ("io.podvisor.aliases", "a b"),
            ("io.podvisor.mac.eth7", "0a:00:00:00:00:01"),
            ("io.podvisor.device-id", ""),
        ] {
            let error = wishes(&annotations(&[(key, text)]), &["eth0"]).unwrap_err();
            assert_eq!(error.kind(), Kind::Invalid);
            assert!(error.to_string().contains(key), "{error}");
        }
    }
}
