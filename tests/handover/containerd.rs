//! The same through containerd 2.1: its client's deadline passes, it sends Shutdown, and comes with another id.

use std::time::Duration;

use serde_json::{Value, json};

use crate::kit::{self, INTERVAL};
use crate::support::fake::Act;
use crate::support::{Containerd, Sandboxes, Snapshot, eventually, podvisor, require, sandboxed};

const RUNTIME: &str = "io.containerd.podvisor.v1";

fn spec() -> Value {
    json!({
        "ociVersion": "1.0.2",
        "hostname": "web",
        "annotations": {
            "io.kubernetes.cri.sandbox-name": "web",
            "io.kubernetes.cri.sandbox-namespace": "apps",
            "io.kubernetes.cri.sandbox-uid": "7f9c",
        },
        "linux": {"namespaces": [{"type": "network"}, {"type": "ipc"}, {"type": "uts"}, {"type": "mount"}]},
    })
}

fn listed() -> Vec<Value> {
    serde_json::from_str(&podvisor(&["ps", "-a", "--json"]).ok().stdout).unwrap()
}

#[test]
fn containerds_second_sandbox_has_the_network_of_the_one_real_add() {
    sandboxed(
        "containerd::containerds_second_sandbox_has_the_network_of_the_one_real_add",
        || {
            let Some(peer) = require::peer("containerd-2.1") else {
                return;
            };
            kit::parking(INTERVAL, "");
            let plugin = kit::bridge();
            plugin.on("ADD", &[Act::Sleep(6.0)]);
            let daemon = Containerd::start(&peer);
            let before = Snapshot::take();
            let mut sandboxes = Sandboxes::of(&daemon, "default", RUNTIME);
            sandboxes.create("p1", &spec()).unwrap();
            let error = sandboxes
                .start_within("p1", Duration::from_secs(3))
                .unwrap_err();
            assert_eq!(error.code, 4, "{error:?}");
            // containerd cleans up: Shutdown, `delete`, the bundle.
            eventually(Duration::from_secs(20), "the network is parked", || {
                listed()
                    .iter()
                    .any(|p| p["id"] == "p1" && p["state"] == "network parked")
                    .then_some(())
            });
            assert_eq!((plugin.count("ADD"), plugin.count("DEL")), (1, 0));
            sandboxes.create("p2", &spec()).unwrap();
            sandboxes
                .start_within("p2", Duration::from_secs(5))
                .unwrap();
            assert_eq!(sandboxes.status("p2").unwrap().0, "SANDBOX_READY");
            let lease = std::fs::read_dir("/var/lib/cni/networks/pods").unwrap();
            let leases: Vec<String> = lease
                .flatten()
                .filter_map(|e| e.file_name().into_string().ok())
                .filter(|n| n.starts_with("10.87.1."))
                .collect();
            let pods = listed();
            let pod = pods.iter().find(|p| p["id"] == "p2").unwrap();
            assert_eq!(pod["ips"], json!([format!("{}/24", leases[0])]));
            assert_eq!((leases.len(), plugin.count("ADD")), (1, 1));
            sandboxes.stop("p2", 5).unwrap();
            sandboxes.shutdown("p2").unwrap();
            for id in ["p1", "p2"] {
                sandboxes.forget(id).unwrap();
            }
            kit::adds_and_dels(&plugin, 1);
            before.assert_unchanged();
        },
    );
}
