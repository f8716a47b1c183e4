//! A pod on several networks, by annotation, with the reference plugins.

use std::fs;
use std::path::Path;

use podvisor::proto::cri::sandbox_config::PodSandboxConfig;
use serde_json::{Value, json};
use ttrpc::Code;

use crate::kit::*;
use crate::support::{Snapshot, cni, fake, sandboxed};

fn annotated(pairs: &[(&str, &str)]) -> PodSandboxConfig {
    let mut config = config("web");
    let pairs = pairs.iter().map(|(k, v)| ((*k).into(), (*v).into()));
    config.annotations.extend(pairs);
    config
}

/// FL-030 too: both families, in the plugin's order, in every place that tells them.
#[test]
fn a_pod_on_two_networks_tells_both_and_leaves_nothing_on_either() {
    let name = "networks::a_pod_on_two_networks_tells_both_and_leaves_nothing_on_either";
    sandboxed(name, || {
        cni::bridge("more", "pvt1", "10.87.2.0/24").write();
        let mut dual = cni::bridge("dual", "pvt0", "10.87.1.0/24").json();
        dual["plugins"][0]["ipam"]["ranges"] =
            json!([[{"subnet": "fd87::/64"}], [{"subnet": "10.87.1.0/24"}]]);
        dual["plugins"][0]["ipMasq"] = false.into();
        let file = Path::new(cni::CONFIGS).join("20-dual.conflist");
        cni::bridge("dual", "pvt0", "10.87.1.0/24").write();
        fs::write(file.with_file_name("10-dual.conflist"), dual.to_string()).unwrap();
        let before = Snapshot::take();
        on(async {
            let pod = Pod::launch("p");
            let client = pod.connect().await;
            let config = annotated(&[("io.podvisor.network", "dual,more@net1")]);
            pod.up(&client, &config).await;
            let verbose = status(&client, "p").await.unwrap();
            let info: Value = serde_json::from_str(&verbose.info["info"]).unwrap();
            let network = &info["podvisor"]["network"];
            let ips = json!(["fd87::2/64", "10.87.1.2/24"]);
            assert_eq!((&network["name"], &network["ips"]), (&json!("dual"), &ips));
            let (first, second) = (&network["attachments"][0], &network["attachments"][1]);
            assert_eq!((&first["ifname"], &first["ips"]), (&json!("eth0"), &ips));
            assert_eq!(
                (&second["name"], &second["ifname"], &second["ips"]),
                (&json!("more"), &json!("net1"), &json!(["10.87.2.2/24"]))
            );
            assert_eq!(second["addresses"][0]["gateway"], "10.87.2.1");
            assert_eq!(second["routes"][0]["dst"], "0.0.0.0/0");
            assert_eq!(second["timings"][0]["plugin"], "bridge");
            let told = &info["cniResult"]["Interfaces"];
            assert_eq!(told["eth0"]["IPConfigs"][0]["IP"], "fd87::2");
            assert_eq!(told["eth0"]["IPConfigs"][1]["IP"], "10.87.1.2");
            assert_eq!(
                told["net1"]["IPConfigs"],
                json!([{"IP": "10.87.2.2", "Gateway": "10.87.2.1"}])
            );
            for file in ["dual-p-eth0", "more-p-net1"] {
                assert!(Path::new("/var/lib/cni/results").join(file).exists());
            }
            pod.shut(&client).await;
        });
        before.assert_unchanged();
    });
}

#[test]
fn when_the_second_network_fails_the_first_is_deleted_too() {
    let name = "networks::when_the_second_network_fails_the_first_is_deleted_too";
    sandboxed(name, || {
        let [one, two] = ["one", "two"].map(|name| {
            cni::network(name, vec![json!({ "type": name })]).write();
            fake::plugin(Path::new(cni::PLUGINS), name)
        });
        two.on("ADD", &[fake::Act::Exit(1)]);
        let before = Snapshot::take();
        on(async {
            let pod = Pod::launch("p");
            let client = pod.connect().await;
            let config = annotated(&[("io.podvisor.network", "one,two")]);
            create(&client, &pod.request(Some(&config))).await.unwrap();
            let (_, text) = code(start(&client, "p").await);
            assert!(text.contains("\"two\" (ADD)"), "{text}");
            pod.shut(&client).await;
        });
        assert_eq!((one.count("ADD"), one.count("DEL")), (1, 1));
        assert_eq!((two.count("ADD"), two.count("DEL")), (1, 1));
        assert!(two.calls_of("DEL")[0].pid < one.calls_of("DEL")[0].pid);
        before.assert_unchanged();
    });
}

#[test]
fn bad_wishes_for_the_network_are_refused_with_the_request() {
    let name = "networks::bad_wishes_for_the_network_are_refused_with_the_request";
    sandboxed(name, || {
        let before = Snapshot::take();
        on(async {
            let pod = Pod::launch("p");
            let client = pod.connect().await;
            for (key, text) in [
                ("io.podvisor.network", "a,a@eth0"),
                ("io.podvisor.network", "../a"),
                ("kubernetes.io/egress-bandwidth", "lots"),
                ("io.podvisor.mac", "ff"),
            ] {
                let config = annotated(&[("io.podvisor.network", "a"), (key, text)]);
                let (status, said) = code(create(&client, &pod.request(Some(&config))).await);
                assert_eq!(status, Code::INVALID_ARGUMENT, "{said}");
                assert!(
                    said.contains(key) || said.contains("network name"),
                    "{said}"
                );
            }
            pod.shut(&client).await;
        });
        before.assert_unchanged();
    });
}
