//! The reference plugins, old and new, in one chain.

use std::fs;
use std::path::Path;

use serde_json::json;

use crate::kit::{self, pin, tool};
use crate::rig;
use crate::support::{Snapshot, cni, podvisor, rootfs, sandboxed};

fn nat() -> String {
    tool("iptables-save", &["-t", "nat"])
}

#[test]
fn a_chain_of_reference_plugins_of_each_generation_works_and_leaves_nothing() {
    sandboxed(
        "real::a_chain_of_reference_plugins_of_each_generation_works_and_leaves_nothing",
        || {
            tool("ip", &["link", "add", "pvt0", "type", "bridge"]);
            for (set, dir) in cni::plugin_sets() {
                for version in ["0.4.0", "1.0.0", "1.1.0"] {
                    // The plugins of bookworm are from before 1.1.0.
                    if version == "1.1.0" && set == "system" {
                        continue;
                    }
                    println!("plugins: {set}, configuration {version}");
                    chain(&dir, version);
                }
            }
        },
    );
}

fn chain(plugins: &Path, version: &str) {
    rig::settings(&format!(
        "[cni]\nplugin_dirs = [\"{}\"]\n",
        plugins.display()
    ));
    cni::bridge("pods", "pvt0", "10.87.1.0/24")
        .portmap()
        .plugin(json!({"type": "firewall", "backend": "iptables"}))
        .plugin(json!({"type": "tuning", "mtu": 1400}))
        .plugin(json!({"type": "bandwidth", "capabilities": {"bandwidth": true}}))
        .version(version)
        .write_in(Path::new(cni::CONFIGS));
    let rootfs = rootfs::make();
    let before = Snapshot::take();
    for _ in 0..3 {
        fs::remove_file("/var/lib/cni/networks/pods/last_reserved_ip.0").ok();
        kit::run("p", &rootfs, &["-p", "18080:80"]).ok();
        let net = format!("--net={}", pin().display());
        let link = tool("nsenter", &[&net, "ip", "addr", "show", "eth0"]);
        assert!(
            link.contains("10.87.1.2/24") && link.contains("mtu 1400"),
            "{link}"
        );
        assert!(nat().contains("18080"));
        tool(
            "nsenter",
            &[&net, "busybox", "ping", "-c1", "-W5", "10.87.1.1"],
        );
        assert!(
            podvisor(&["inspect", "p"])
                .ok()
                .stdout
                .contains("10.87.1.2")
        );
        kit::gone("p");
        assert!(!nat().contains("18080"));
    }
    before.assert_unchanged();
}
