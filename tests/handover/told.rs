//! A creation that fails while another sandbox of the pod watches it: that one is told the cause as its own watchers are.

use std::path::{Path, PathBuf};
use std::time::Duration;

use podvisor::error::Kind;
use podvisor::proto::cri::sandbox_config::PodSandboxConfig;
use serde_json::json;

use crate::kit::{self, INTERVAL};
use crate::rig::{self, BOUND, called, gone};
use crate::support::fake::{self, Act, Fake};
use crate::support::{Snapshot, cni, eventually, sandboxed};

/// What goes wrong once the first plugin is let go, and how that is told.
struct Fault {
    kind: Kind,
    says: &'static str,
    config: PodSandboxConfig,
    /// With the gate: acts of the first plugin's ADD.
    acts: Vec<Act>,
}

fn faults() -> [Fault; 3] {
    let plain = rig::config("web");
    let mut sysctl = rig::config("web");
    let linux = sysctl.linux.mut_or_insert_default();
    let name = "net.ipv4.no_such_setting".to_owned();
    linux.sysctls.insert(name, "1".into());
    let mut both = rig::config("web");
    let key = "io.podvisor.network".to_owned();
    both.annotations.insert(key, "pods,two".into());
    [
        Fault {
            kind: Kind::Other,
            says: "no address left",
            config: plain,
            acts: vec![Act::Stderr("no address left".into()), Act::Exit(1)],
        },
        // The infra process cannot be given this.
        Fault {
            kind: Kind::Invalid,
            says: "no_such_setting",
            config: sysctl,
            acts: Vec::new(),
        },
        // The second network's plugin goes away meanwhile.
        Fault {
            kind: Kind::State,
            says: "find CNI plugin",
            config: both,
            acts: Vec::new(),
        },
    ]
}

/// The network `two`, not the first one, of a plugin that is there when the pod is begun.
fn two() -> Fake {
    let plugin = fake::plugin(Path::new(cni::PLUGINS), "two");
    cni::network("two", vec![json!({"type": "two"})]).write();
    plugin
}

fn held(plugin: &Fake, fault: &Fault) -> PathBuf {
    let gate = PathBuf::from("/run/gate");
    let _ = std::fs::remove_file(&gate);
    let wait = Act::WaitFor(gate.clone());
    let acts: Vec<Act> = [wait].into_iter().chain(fault.acts.clone()).collect();
    plugin.on("ADD", &acts);
    gate
}

fn until_watched() {
    eventually(BOUND, "somebody watches", || {
        let records = std::fs::read_dir("/var/lib/podvisor/networks").ok()?;
        let mut records = records.flatten();
        records
            .any(|r| r.path().join("watched").exists())
            .then_some(())
    });
}

/// Begun, joined by its own sandbox's next request, and watched by another sandbox: all three hear the same.
#[test]
fn a_watcher_of_another_sandbox_is_told_the_cause_with_its_kind() {
    sandboxed(
        "told::a_watcher_of_another_sandbox_is_told_the_cause_with_its_kind",
        || {
            kit::parking(INTERVAL, "");
            let plugin = kit::bridge();
            let before = Snapshot::take();
            for (n, fault) in faults().into_iter().enumerate() {
                let two = two();
                let (one, other) = (format!("a{n}"), format!("b{n}"));
                let adds = plugin.count("ADD");
                let gate = held(&plugin, &fault);
                let first = kit::create_as(&one, &fault.config);
                let begun = first.start_aside(BOUND);
                called(&plugin, "ADD", adds + 1);
                let joined = first.start_aside(BOUND);
                let second = kit::create_as(&other, &fault.config);
                let watcher = second.start_aside(BOUND);
                until_watched();
                let _ = std::fs::remove_file(&two.path);
                kit::open(&gate);
                for told in [begun, joined, watcher] {
                    let error = told.join().unwrap().unwrap_err();
                    assert_eq!(error.kind(), fault.kind, "{error}");
                    assert!(error.to_string().contains(fault.says), "{error}");
                }
                plugin.on("ADD", &[]);
                first.end();
                second.end();
            }
            let _ = std::fs::remove_file("/run/gate");
            before.assert_unchanged();
            assert_eq!((kit::records(), kit::offered()), (0, 0));
        },
    );
}

/// The same when its supervisor has become a keeper, whose pod is gone.
#[test]
fn what_a_keeper_fails_with_is_told_with_its_kind() {
    sandboxed(
        "told::what_a_keeper_fails_with_is_told_with_its_kind",
        || {
            kit::parking(INTERVAL, "");
            let plugin = kit::bridge();
            let before = Snapshot::take();
            for (n, fault) in faults().into_iter().enumerate() {
                // The infra process of a pod that is gone is not made.
                if fault.kind == Kind::Invalid {
                    continue;
                }
                let two = two();
                let (one, other) = (format!("a{n}"), format!("b{n}"));
                let adds = plugin.count("ADD");
                let gate = held(&plugin, &fault);
                let first = kit::create_as(&one, &fault.config);
                let error = first.probe().start(&one, Duration::from_millis(500));
                assert_eq!(error.unwrap_err().kind(), Kind::Deadline);
                called(&plugin, "ADD", adds + 1);
                let keeper = first.supervisor();
                first.probe().shutdown(&one).unwrap();
                let second = kit::create_as(&other, &fault.config);
                let watcher = second.start_aside(BOUND);
                until_watched();
                let _ = std::fs::remove_file(&two.path);
                kit::open(&gate);
                let error = watcher.join().unwrap().unwrap_err();
                assert_eq!(error.kind(), fault.kind, "{error}");
                assert!(error.to_string().contains(fault.says), "{error}");
                gone(keeper);
                plugin.on("ADD", &[]);
                second.end();
            }
            let _ = std::fs::remove_file("/run/gate");
            before.assert_unchanged();
            assert_eq!((kit::records(), kit::offered()), (0, 0));
        },
    );
}
