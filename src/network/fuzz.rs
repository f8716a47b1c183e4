//! Texts from others, damaged at random: configurations, results of plugins, libcni's cache, our own record.
//!
//! Whatever they hold, reading them ends, does not panic, and either gives what has been checked or an error that names
//! the file. `PODVISOR_FUZZ_SEED` repeats a run.
#![allow(clippy::print_stdout, reason = "a failure tells its seed")]

#[path = "fuzz/mutate.rs"]
pub(crate) mod mutate;

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde::Deserialize;
use serde_json::{Value, json};

use self::mutate::{Rng, mutate};
use super::slot::{OWNER, PARTIAL, RESULT, STARTED};
use super::version::VERSIONS;
use super::{Attachment, NetworkRecord, PortMapping, cache, conf, convert, result};
use crate::config::Config;
use crate::error::Kind;

const FEW: u32 = 5_000;
const MANY: u32 = 500_000;

/// Far above what any of them takes: for hangs only.
const LIMIT: Duration = Duration::from_secs(20);

/// Tells what it was when a round panics.
struct Round<'a>(u64, u32, &'a [u8]);

impl Drop for Round<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let text = String::from_utf8_lossy(self.2);
            println!("seed {}, round {}, input: {text:?}", self.0, self.1);
        }
    }
}

/// `rounds` damaged texts of `corpus`, one by one.
fn rounds(rounds: u32, corpus: &[Vec<u8>], mut read: impl FnMut(&mut Rng, &[u8])) {
    let fixed = std::env::var("PODVISOR_FUZZ_SEED").ok();
    let seed = match fixed.and_then(|text| text.parse().ok()) {
        Some(seed) => seed,
        // The ordinary suite is the same every time; the long one looks for what is new.
        None if rounds == FEW => 20_240_229,
        None => SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap()
            .subsec_nanos()
            .into(),
    };
    println!("seed {seed}");
    let mut rng = Rng::new(seed);
    for n in 0..rounds {
        let text = mutate(&mut rng, corpus);
        let _told = Round(seed, n, &text);
        let begun = Instant::now();
        read(&mut rng, &text);
        assert!(begun.elapsed() < LIMIT, "{:?}", begun.elapsed());
    }
}

fn is_clear(error: &crate::error::Error, word: &str) {
    let text = error.to_string();
    assert!(text.contains(word), "{word} in {text}");
    assert!(!text.chars().any(char::is_control), "{text:?}");
    assert!(!error.is_gone(), "an undo would take it for done: {text}");
}

fn confs() -> Vec<Vec<u8>> {
    let bridge = json!({"type": "bridge", "bridge": "cni0", "isGateway": true, "capabilities": {"ips": true},
        "ipam": {"type": "host-local", "ranges": [[{"subnet": "10.1.0.0/24"}], [{"subnet": "fd00::/64"}]], "routes": [{"dst": "0.0.0.0/0"}]}});
    let portmap = json!({"type": "portmap", "capabilities": {"portMappings": true}});
    [
        json!({"cniVersion": "1.0.0", "name": "pods", "plugins": [bridge, portmap]}),
        json!({"cniVersion": "1.1.0", "cniVersions": ["0.4.0", "1.1.0"], "name": "net-1", "disableCheck": true,
            "disableGC": "true", "loadOnlyInlinedPlugins": false, "plugins": [portmap]}),
        json!({"cniVersion": "0.3.1", "name": "lo", "type": "loopback"}),
        json!({"name": "old", "type": "ptp", "mtu": 1400, "dns": {"nameservers": ["10.1.0.1"]}}),
    ]
    .iter()
    .map(|v| v.to_string().into_bytes())
    .collect()
}

fn results() -> Vec<Value> {
    let interfaces = json!([{"name": "cni0", "mac": "0a:00:00:00:00:01"}, {"name": "eth0", "mac": "0a:00:00:00:00:02", "sandbox": "/run/netns/x", "mtu": 1500, "socketPath": "/s", "pciID": "0"}]);
    let routes = json!([{"dst": "0.0.0.0/0", "gw": "10.1.2.1", "mtu": 1400, "advmss": 1, "priority": 1, "table": 2, "scope": 0}, {"dst": "::/0"}]);
    let dns =
        json!({"nameservers": ["10.1.0.1"], "domain": "d", "search": ["s"], "options": ["o"]});
    VERSIONS
        .iter()
        .map(|version| match *version {
            "0.1.0" | "0.2.0" => json!({"cniVersion": version, "dns": dns,
                "ip4": {"ip": "10.1.2.3/24", "gateway": "10.1.2.1", "routes": [{"dst": "0.0.0.0/0", "gw": "10.1.2.1"}]},
                "ip6": {"ip": "fd00::3/64", "routes": [{"dst": "::/0"}]}}),
            _ => json!({"cniVersion": version, "interfaces": interfaces, "routes": routes, "dns": dns,
                "ips": [{"version": "4", "interface": 1, "address": "10.1.2.3/24", "gateway": "10.1.2.1"},
                        {"version": "6", "interface": 1, "address": "fd00::3/64"}]}),
        })
        .chain([json!({"ips": [{"address": "10.0.0.2/16"}]}), json!({})])
        .collect()
}

fn attachment() -> Attachment {
    Attachment {
        container_id: "8d0b".into(),
        netns: "/run/podvisor/netns/x".into(),
        ifname: "eth0".into(),
        args: vec![("K8S_POD_NAME".into(), "web".into())],
        port_mappings: vec![PortMapping {
            host_port: 80,
            container_port: 80,
            protocol: "tcp".into(),
            host_ip: String::new(),
        }],
        capabilities: [("ips".to_owned(), json!(["10.0.0.9/24"]))]
            .into_iter()
            .collect(),
    }
}

fn configurations(count: u32) {
    rounds(count, &confs(), |rng, text| {
        let file = ["x.conflist", "x.conf", "x.json"][rng.below(3)];
        let path = Path::new("/nonexistent").join(file);
        match conf::parse(&path, text.to_vec()) {
            Ok(conf) => {
                crate::id::check_network(&conf.name).unwrap();
                assert!(VERSIONS.contains(&conf.cni_version.as_str()));
                assert!(!conf.plugins.is_empty());
                for plugin in &conf.plugins {
                    let name = plugin["type"].as_str().unwrap();
                    assert_eq!(Path::new(name).file_name().unwrap(), name);
                }
                // What is recorded gives the same again.
                let again = conf::parse(&path, conf.bytes.clone()).unwrap();
                assert_eq!((again.plugins, again.name), (conf.plugins, conf.name));
                assert_eq!(again.cni_version, conf.cni_version);
                assert!(conf::load(&path, text.to_vec()).is_ok());
            }
            Err(error) => is_clear(&error, file),
        }
    });
}

#[test]
fn a_damaged_configuration_is_one_that_was_checked_or_an_error() {
    configurations(FEW);
}

#[test]
#[ignore = "half a million rounds"]
fn slow_damaged_configurations() {
    configurations(MANY);
}

fn plugin_results(count: u32) {
    let corpus: Vec<_> = results()
        .iter()
        .map(|v| v.to_string().into_bytes())
        .collect();
    rounds(count, &corpus, |rng, text| {
        let Ok(value) = serde_json::from_slice::<Value>(text) else {
            return;
        };
        let version = VERSIONS[rng.below(VERSIONS.len())];
        let for_del = result::for_del(&value, version);
        match result::normalise(value.clone(), version) {
            Ok(read) => {
                assert_eq!(read.raw["cniVersion"], version);
                for ip in &read.ips {
                    let (address, _) = ip.split_once('/').unwrap();
                    address.parse::<std::net::IpAddr>().unwrap();
                }
                // It is of that version now: nothing is left to convert.
                let again = result::normalise(read.raw.clone(), version).unwrap();
                assert_eq!(again.raw, read.raw);
                assert!(for_del.is_none_or(|given| given == read.raw));
            }
            Err(error) => is_clear(&error, "result"),
        }
        // Also what nobody checked before.
        if let Value::Object(raw) = value {
            let from = VERSIONS[rng.below(VERSIONS.len())];
            let _ = convert::convert(raw, from, version);
        }
    });
}

#[test]
fn a_damaged_result_is_of_the_version_that_was_asked_for_or_an_error() {
    plugin_results(FEW);
}

#[test]
#[ignore = "half a million rounds"]
fn slow_damaged_results() {
    plugin_results(MANY);
}

fn cache_texts(dir: &Path) -> Vec<Vec<u8>> {
    let texts = confs();
    let confs = texts
        .iter()
        .map(|text| conf::parse(Path::new("x.conf"), text.clone()).unwrap());
    confs
        .zip(results().into_iter().rev())
        .map(|(mut conf, result)| {
            conf.name = "pods".into();
            cache::write(dir, &conf, &attachment(), &result).unwrap();
            fs::read(dir.join("results/pods-8d0b-eth0")).unwrap()
        })
        .collect()
}

/// What an entry says it is of; as lenient as the reader about the rest.
#[derive(Deserialize)]
struct Named {
    #[serde(rename = "networkName")]
    name: String,
}

fn cache_entries(count: u32) {
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let file = dir.path().join("results/pods-8d0b-eth0");
    rounds(count, &cache_texts(dir.path()), |_, text| {
        fs::write(&file, text).unwrap();
        if let Err(error) = cache::read(dir.path(), "pods", &attachment()) {
            is_clear(&error, "pods-8d0b-eth0");
        }
        for cached in cache::of_container(dir.path(), "8d0b") {
            assert_eq!(cached.attachment.container_id, "8d0b");
        }
        // To forget an entry would make its attachment garbage; by its name it is known even when it is damaged.
        let other = serde_json::from_slice::<Named>(text).is_ok_and(|n| n.name != "pods");
        assert!(other || cache::of_network(dir.path(), "pods").len() == 1);
    });
}

#[test]
fn a_damaged_cache_entry_is_seen_and_never_believed_for_another_container() {
    cache_entries(FEW);
}

#[test]
#[ignore = "half a million rounds"]
fn slow_damaged_cache_entries() {
    cache_entries(MANY);
}

/// One file of a record is damaged, or several: the DEL stays owed, and is known as long as one source is good.
fn records(count: u32) {
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let mut config = Config {
        state_root: dir.path().join("state"),
        runtime_root: dir.path().join("run"),
        ..Config::default()
    };
    config.cni.cache_dir = dir.path().join("cache");
    config.cni.conf_dir = dir.path().join("net.d");
    fs::create_dir(&config.cni.conf_dir).unwrap();
    fs::write(config.cni.conf_dir.join("10.conflist"), &confs()[0]).unwrap();
    let conf = conf::parse(Path::new("/etc/cni/net.d/10.conflist"), confs().remove(0)).unwrap();
    let record = NetworkRecord::at(&config, "default", "8d0b");
    record.begin(&conf, &attachment()).unwrap();
    let slot = record.slot("eth0");
    let given = result::normalise(results().remove(5), "1.0.0").unwrap();
    slot.keep_partial(&given.raw).unwrap();
    slot.finish(&given).unwrap();
    cache::write(&config.cni.cache_dir, &conf, &attachment(), &given.raw).unwrap();
    let cached = config.cni.cache_dir.join("results/pods-8d0b-eth0");
    let files = [STARTED, OWNER, RESULT, PARTIAL].map(|name| record.dir().join(name));
    let whole: Vec<Vec<u8>> = files.iter().map(|file| fs::read(file).unwrap()).collect();
    let entry = fs::read(&cached).unwrap();
    rounds(count, &whole, |rng, text| {
        let which = rng.below(files.len());
        fs::write(&files[which], text).unwrap();
        let second = rng.below(3) == 0;
        if second {
            fs::write(&files[rng.below(files.len())], mutate(rng, &whole)).unwrap();
        }
        if rng.below(2) == 0 {
            fs::write(&cached, mutate(rng, std::slice::from_ref(&entry))).unwrap();
        }
        assert!(record.owes_del());
        assert_eq!(NetworkRecord::list(&config).len(), 1);
        let told = record.attachments();
        assert!(told.len() == 1 && told[0].owes_del && told[0].ifname == "eth0");
        let again = record.begin(&conf, &attachment()).unwrap_err();
        assert_eq!(again.kind(), Kind::State);
        assert_eq!(record.remove().unwrap_err().kind(), Kind::State);
        match slot.owed(&config) {
            Ok(owed) => {
                assert!(!owed.is_empty());
                for one in &owed {
                    one.attachment.check().unwrap();
                    let previous = one.previous.as_ref();
                    previous.and_then(|raw| result::for_del(raw, &one.conf.cni_version));
                }
            }
            Err(error) => {
                assert!(
                    second,
                    "one damaged file is made up for by the others: {error}"
                );
                assert_eq!(error.kind(), Kind::State, "{error}");
                is_clear(&error, "8d0b");
            }
        }
        files
            .iter()
            .zip(&whole)
            .for_each(|(file, text)| fs::write(file, text).unwrap());
        fs::write(&cached, &entry).unwrap();
    });
}

#[test]
fn a_damaged_record_still_owes_its_del() {
    records(FEW);
}

#[test]
#[ignore = "half a million rounds"]
fn slow_damaged_records() {
    records(MANY);
}
