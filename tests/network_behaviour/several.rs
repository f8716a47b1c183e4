//! Several networks by the command.

use std::path::Path;

use serde_json::{Value, json};

use crate::kit;
use crate::support::fake::{self, Act};
use crate::support::{Snapshot, cni, podvisor, rootfs, sandboxed};

#[test]
fn the_command_takes_several_networks_and_inspect_tells_each() {
    sandboxed(
        "several::the_command_takes_several_networks_and_inspect_tells_each",
        || {
            let [one, two] = ["one", "two"].map(|name| {
                cni::network(name, vec![json!({ "type": name })]).write();
                fake::plugin(Path::new(cni::PLUGINS), name)
            });
            let answer = json!({"cniVersion": "1.0.0", "interfaces": [{"name": "net1", "mac": "0a:00:00:00:00:01", "sandbox": "/n"}],
                "ips": [{"address": "10.98.0.2/24", "gateway": "10.98.0.1", "interface": 0}],
                "routes": [{"dst": "10.98.0.0/16", "gw": "10.98.0.1"}], "dns": {"nameservers": ["10.98.0.1"]}});
            two.on("ADD", &[Act::Print(answer.to_string())]);
            let rootfs = rootfs::make();
            let before = Snapshot::take();
            for bad in ["one,none", "one,three", "one,,two", "one,two@a/b"] {
                let output = kit::run("p", &rootfs, &["--net", bad]);
                assert_ne!(output.code, Some(0), "{bad}: {output:#?}");
            }
            assert_eq!(one.count("ADD"), 0);
            kit::run("p", &rootfs, &["--net", "one,two@net1"]).ok();
            let shown = podvisor(&["inspect", "p"]).ok().stdout;
            let shown: Value = serde_json::from_str(&shown).unwrap();
            let told = &shown[0]["network"]["attachments"];
            assert_eq!(told.as_array().map(Vec::len), Some(2), "{shown}");
            assert_eq!(told[0]["ips"], json!(["10.99.0.2/24"]));
            let text = told[1].to_string();
            for word in [
                "net1",
                "0a:00:00:00:00:01",
                "10.98.0.2/24",
                "10.98.0.1",
                "10.98.0.0/16",
                "took_us",
            ] {
                assert!(text.contains(word), "{word} in {text}");
            }
            kit::gone("p");
            for (plugin, ifname) in [(&one, "eth0"), (&two, "net1")] {
                let calls = plugin.calls_of("DEL");
                assert_eq!((calls.len(), calls[0].var("CNI_IFNAME")), (1, ifname));
            }
            before.assert_unchanged();
        },
    );
}
