//! `podvisor network wrap` and `unwrap`.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use serde_json::Value;

use crate::kit::{self, Attempt, bridge, calls, settings, snapshot};
use crate::support::{cni, podvisor, sandboxed};

#[test]
fn a_wrapped_network_works_for_daemons_and_for_pods_of_our_own_and_comes_off_again() {
    sandboxed(
        "wrapped::a_wrapped_network_works_for_daemons_and_for_pods_of_our_own_and_comes_off_again",
        || {
            settings(30.0);
            let (plugin, list) = bridge();
            let file = Path::new("/etc/cni/net.d/10-pods.conflist");
            fs::write(file, list.to_string()).unwrap();
            let read = || -> Value { serde_json::from_slice(&fs::read(file).unwrap()).unwrap() };
            podvisor(&["network", "wrap", "pods"]).fails_with("podvisor-cni");
            assert_eq!(read(), list, "not before the plugin is there");
            symlink(kit::PLUGIN, Path::new(cni::PLUGINS).join("podvisor-cni")).unwrap();
            let before = snapshot();
            let done = podvisor(&["network", "wrap", "pods"]).ok();
            assert!(done.stdout.starts_with("pods: wrapped"), "{done:?}");
            let wrapped = read();
            assert_eq!(wrapped["plugins"][0]["type"], "podvisor-cni");
            assert_eq!(wrapped["plugins"][0]["plugins"], list["plugins"]);
            let again = podvisor(&["network", "wrap", "pods"]).ok();
            assert!(again.stdout.contains("already"), "{again:?}");

            let mut conf = wrapped["plugins"][0].clone();
            conf["name"] = "pods".into();
            conf["cniVersion"] = list["cniVersion"].clone();
            let mut pod = Attempt::of("web", "a1", &list);
            pod.conf = conf;
            let said = pod.add().ok();
            pod.has(&said.ip());
            pod.end();
            calls(&plugin, 1, 1);

            podvisor(&["network", "status", "pods"]).ok();
            podvisor(&["create", "--name", "own", "--net", "pods"]).ok();
            podvisor(&["network", "gc"]).ok();
            podvisor(&["rm", "-f", "own"]).ok();
            calls(&plugin, 2, 2);
            podvisor(&["network", "unwrap", "pods"]).ok();
            assert_eq!(read(), list);
            fs::remove_file(Path::new(cni::PLUGINS).join("bridge")).unwrap();
            before.assert_unchanged();
        },
    );
}
