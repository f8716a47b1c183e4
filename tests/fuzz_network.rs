//! The configuration directory and what is kept for the boot, damaged at random. What is inside the room (results,
//! libcni's cache, the record) is in `src/network/fuzz.rs`.
//!
//! `PODVISOR_FUZZ_SEED` repeats a run.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::print_stdout,
    reason = "tests panic where they cannot go on"
)]

#[path = "../src/network/fuzz/mutate.rs"]
mod mutate;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use mutate::{Rng, mutate};
use podvisor::config::Config;
use podvisor::error::Kind;
use podvisor::network;
use serde_json::json;

const FEW: u32 = 5_000;
const MANY: u32 = 500_000;

/// For hangs only.
const LIMIT: Duration = Duration::from_secs(20);

/// A damaged file beside a good one: the good one is found under its name, the damaged one is what it says or is named in
/// the error, whatever the files kept for the boot hold.
fn directories(rounds: u32) {
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let mut config = Config {
        runtime_root: dir.path().join("run"),
        ..Config::default()
    };
    config.cni.conf_dir = dir.path().join("net.d");
    fs::create_dir_all(config.cni.conf_dir.join("pods")).unwrap();
    fs::create_dir(&config.runtime_root).unwrap();
    fs::set_permissions(&config.runtime_root, fs::Permissions::from_mode(0o700)).unwrap();
    let good = json!({"cniVersion": "1.0.0", "name": "good", "plugins": [{"type": "bridge"}]});
    let texts: Vec<Vec<u8>> = [
        json!({"cniVersion": "1.1.0", "cniVersions": ["1.0.0", "1.1.0"], "name": "pods", "disableGC": "true",
            "plugins": [{"type": "bridge", "ipam": {"type": "host-local"}}, {"type": "portmap", "capabilities": {"portMappings": true}}]}),
        json!({"cniVersion": "0.3.1", "name": "pods", "type": "ptp", "mtu": 1400}),
        json!({"name": "pods", "loadOnlyInlinedPlugins": false}),
    ]
    .iter()
    .map(|text| text.to_string().into_bytes())
    .collect();
    let damaged =
        ["10-x.conflist", "10-x.conf", "pods/10.conf"].map(|name| config.cni.conf_dir.join(name));
    let kept = config.runtime_root.join(".network-configs");
    fs::write(
        config.cni.conf_dir.join("20-good.conflist"),
        good.to_string(),
    )
    .unwrap();
    let fixed = std::env::var("PODVISOR_FUZZ_SEED").ok();
    let seed: u64 = match fixed.and_then(|text| text.parse().ok()) {
        Some(seed) => seed,
        None if rounds == FEW => 20_240_229,
        None => SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap()
            .subsec_nanos()
            .into(),
    };
    println!("seed {seed}");
    let mut rng = Rng::new(seed);
    for round in 0..rounds {
        let text = mutate(&mut rng, &texts);
        let path = &damaged[rng.below(damaged.len())];
        let told = || format!("round {round}, {}: {text:?}", path.display());
        fs::write(path, &text).unwrap();
        if let (Ok(old), 0) = (fs::read(&kept), rng.below(4)) {
            fs::write(&kept, mutate(&mut rng, &[old])).unwrap();
        }
        let begun = Instant::now();
        assert!(
            network::load_conf(&config, Some("good")).is_ok(),
            "{}",
            told()
        );
        let first = network::load_conf(&config, None).unwrap();
        assert!(!first.plugins.is_empty());
        for (name, file) in network::list_confs(&config) {
            assert!(file.starts_with(&config.cni.conf_dir), "{}", told());
            podvisor::id::check_network(&name).unwrap();
        }
        if let Err(error) = network::load_conf(&config, Some("pods")) {
            let message = error.to_string();
            let known = matches!(error.kind(), Kind::Invalid | Kind::NotFound);
            assert!(
                known && message.contains("\"pods\""),
                "{message} {}",
                told()
            );
            assert!(!message.chars().any(char::is_control), "{message:?}");
        }
        assert!(begun.elapsed() < LIMIT, "{:?} {}", begun.elapsed(), told());
        fs::remove_file(path).unwrap();
    }
}

#[test]
fn a_damaged_configuration_never_hides_a_good_one() {
    directories(FEW);
}

#[test]
#[ignore = "half a million rounds"]
fn slow_damaged_configuration_directories() {
    directories(MANY);
}
