//! The other verbs, the versions, and what is passed through.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::{Value, json};

use crate::kit::{Attempt, BOUND, bridge, calls, settings, snapshot};
use crate::support::fake::{self, Act, Fake};
use crate::support::{cni, eventually, sandboxed};

/// A network of a fake plugin that speaks every version.
fn faked() -> (Fake, Value) {
    let plugin = fake::plugin(Path::new(cni::PLUGINS), "net");
    let list = json!({"cniVersion": "1.1.0", "name": "pods", "plugins": [
        {"type": "net", "capabilities": {"portMappings": true, "bandwidth": true}}]});
    (plugin, list)
}

#[test]
fn check_status_version_and_gc_are_answered_for_the_real_plugins() {
    sandboxed(
        "verbs::check_status_version_and_gc_are_answered_for_the_real_plugins",
        || {
            settings(30.0);
            let (plugin, list) = faked();
            let before = snapshot();
            let one = Attempt::of("one", "a1", &list);
            let two = Attempt::of("two", "b1", &list);
            let said = one.call("VERSION").ok();
            let spoken = said.answer["supportedVersions"].as_array().unwrap().clone();
            for version in ["0.3.1", "0.4.0", "1.0.0", "1.1.0"] {
                assert!(spoken.contains(&json!(version)), "{spoken:?}");
            }
            one.call("STATUS").ok();
            assert_eq!(plugin.count("STATUS"), 1);
            plugin.on(
                "STATUS",
                &[Act::Stderr("no addresses left".into()), Act::Exit(1)],
            );
            let bad = one.call("STATUS");
            assert_eq!(bad.answer["code"], 50, "{bad:?}");
            assert!(bad.failed().contains("no addresses left"));
            plugin.on("STATUS", &[]);

            one.add().ok();
            two.add().ok();
            one.call("CHECK").ok();
            let check = &plugin.calls_of("CHECK")[0];
            assert_eq!(
                check.var("CNI_NETNS"),
                plugin.calls_of("ADD")[0].var("CNI_NETNS")
            );
            let mut conf = one.conf.clone();
            conf["cni.dev/valid-attachments"] = json!([{"containerID": "a1", "ifname": "eth0"}]);
            one.call_with("GC", &conf).ok();
            calls(&plugin, 2, 1);
            assert_eq!(plugin.calls_of("DEL")[0].var("CNI_CONTAINERID"), "b1");
            let told: Value = serde_json::from_str(&plugin.calls_of("GC")[0].stdin).unwrap();
            let valid = told["cni.dev/valid-attachments"].as_array().unwrap();
            assert!(
                valid.contains(&json!({"containerID": "a1", "ifname": "eth0"})),
                "{told}"
            );
            assert!(!told.to_string().contains("b1"), "{told}");
            let gone = two.call("CHECK").failed();
            assert!(gone.contains("does not have it"), "{gone}");
            two.end();
            one.end();
            calls(&plugin, 2, 2);
            before.assert_unchanged();
        },
    );
}

#[test]
fn every_version_gets_its_own_result_and_bad_requests_are_told() {
    sandboxed(
        "verbs::every_version_gets_its_own_result_and_bad_requests_are_told",
        || {
            settings(30.0);
            let (plugin, mut list) = faked();
            let before = snapshot();
            for (n, version) in ["0.3.1", "0.4.0", "1.0.0", "1.1.0"].iter().enumerate() {
                list["cniVersion"] = (*version).into();
                let pod = Attempt::of("web", &format!("a{n}"), &list);
                let said = pod.add().ok();
                assert_eq!(said.answer["cniVersion"], *version);
                let old = version.starts_with("0.");
                assert_eq!(
                    said.answer["ips"][0].get("version").is_some(),
                    old,
                    "{said:?}"
                );
                pod.end();
            }
            calls(&plugin, 4, 4);
            let pod = Attempt::of("web", "b", &list);
            for (conf, part) in [
                (json!({}), "cniVersion"),
                (json!({"cniVersion": "9.0.0", "name": "pods"}), "9.0.0"),
                (
                    json!({"cniVersion": "1.0.0", "name": "pods", "type": "podvisor-cni"}),
                    "needs either",
                ),
                (
                    json!({"cniVersion": "1.0.0", "name": "../x", "plugins": []}),
                    "network name",
                ),
            ] {
                let said = pod.call_with("ADD", &conf);
                assert_eq!(said.answer["code"], 7, "{said:?}");
                let text = said.failed();
                assert!(text.contains(part), "{text}");
            }
            pod.call("JUMP").failed();
            pod.forget();
            calls(&plugin, 4, 4);
            before.assert_unchanged();
        },
    );
}

#[test]
fn capability_args_and_arguments_reach_the_plugins_that_want_them() {
    sandboxed(
        "verbs::capability_args_and_arguments_reach_the_plugins_that_want_them",
        || {
            settings(30.0);
            let (plugin, list) = faked();
            let before = snapshot();
            let mut pod = Attempt::of("web", "a1", &list);
            let ports = json!([{"hostPort": 8080, "containerPort": 80, "protocol": "tcp"}]);
            pod.conf["runtimeConfig"] =
                json!({"portMappings": ports, "dns": {"servers": ["10.0.0.1"]}});
            pod.add().ok();
            pod.del().ok();
            for verb in ["ADD", "DEL"] {
                let call = &plugin.calls_of(verb)[0];
                let conf: Value = serde_json::from_str(&call.stdin).unwrap();
                assert_eq!(
                    conf["runtimeConfig"],
                    json!({"portMappings": ports}),
                    "{verb}"
                );
                assert_eq!(
                    (&conf["name"], &conf["type"]),
                    (&json!("pods"), &json!("net"))
                );
                assert_eq!(call.var("CNI_ARGS"), pod.args, "{verb}");
            }
            pod.forget();
            before.assert_unchanged();
        },
    );
}

/// Asked for this, the real plugin is called with the daemon's own netns, and nothing is kept.
fn passes(plugin: &Fake, pod: &Attempt, why: &str) {
    let (adds, dels) = (plugin.count("ADD"), plugin.count("DEL"));
    let said = pod.add().ok();
    assert!(said.stderr.contains(why), "{why}: {said:?}");
    let add = &plugin.calls_of("ADD")[adds];
    assert_eq!(Path::new(add.var("CNI_NETNS")), pod.netns, "{why}");
    assert_eq!(add.var("CNI_ARGS"), pod.args, "{why}");
    pod.del().ok();
    calls(plugin, adds + 1, dels + 1);
    let del = &plugin.calls_of("DEL")[dels];
    assert_eq!(Path::new(del.var("CNI_NETNS")), pod.netns, "{why}");
    assert!(!Path::new("/var/lib/podvisor/networks").exists(), "{why}");
}

#[test]
fn what_cannot_be_kept_is_passed_through() {
    sandboxed("verbs::what_cannot_be_kept_is_passed_through", || {
        settings(30.0);
        let (plugin, list) = faked();
        let before = snapshot();
        let mut unknown = Attempt::of("web", "a1", &list);
        unknown.args = "IgnoreUnknown=1;K8S_POD_NAME=web".into();
        passes(&plugin, &unknown, "");
        unknown.forget();

        let mut chained = Attempt::of("web", "a2", &list);
        let previous = json!({"cniVersion": "1.1.0", "ips": [{"address": "10.1.1.1/24"}]});
        chained.conf["prevResult"] = previous.clone();
        passes(&plugin, &chained, "plugins before this one");
        let seen: Value = serde_json::from_str(&plugin.calls_of("ADD")[1].stdin).unwrap();
        assert_eq!(seen["prevResult"], previous);
        chained.forget();

        let linked = Attempt::of("web", "a3", &list);
        let path: PathBuf = linked.netns.clone();
        let linked = Attempt {
            netns: "/proc/self/ns/net".into(),
            ..linked
        };
        passes(&plugin, &linked, "no bind mount");
        Attempt {
            netns: path,
            ..linked
        }
        .forget();

        let users = Attempt::of("web", "a4", &list);
        let mut inside = Command::new("unshare")
            .args(["--user", "--map-root-user", "--net", "sleep", "1000"])
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        let of = |path: &str| fs::read_link(path).unwrap_or_default();
        let theirs = format!("/proc/{}/ns/net", inside.id());
        eventually(BOUND, "the other netns", || {
            (of(&theirs) != of("/proc/self/ns/net")).then_some(())
        });
        podvisor::sys::mount::replace_bind(Path::new(&theirs), &users.netns).unwrap();
        passes(&plugin, &users, "user namespace");
        inside.kill().unwrap();
        inside.wait().unwrap();
        users.forget();
        before.assert_unchanged();
    });
}

#[test]
fn a_network_may_be_named_and_two_of_one_pod_are_two() {
    sandboxed(
        "verbs::a_network_may_be_named_and_two_of_one_pod_are_two",
        || {
            settings(30.0);
            let (plugin, list) = bridge();
            fs::write("/etc/cni/net.d/90-pods.conflist", list.to_string()).unwrap();
            let before = snapshot();
            let mut first = Attempt::of("web", "a1", &list);
            first.conf = json!({"cniVersion": "1.0.0", "name": "front", "type": "podvisor-cni", "network": "pods"});
            let one = first.add().ok();
            let path = first.netns.clone();
            let second = Attempt {
                ifname: "net1".into(),
                ..first
            };
            // The second one is passed through, to the netns that the first one has put at the daemon's path.
            let two = second.add().ok();
            let shown = second.ip(&["-o", "addr"]);
            assert!(shown.contains(&two.ip()), "{shown}");
            assert_ne!(one.ip(), two.ip());
            second.del().ok();
            let first = Attempt {
                ifname: "eth0".into(),
                netns: path,
                ..second
            };
            first.end();
            calls(&plugin, 2, 2);
            before.assert_unchanged();
        },
    );
}
