//! Verbs, versions and several networks, with the reference plugins and with scripted ones.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "tests panic where they cannot go on"
)]

#[path = "network/pod.rs"]
#[allow(dead_code, reason = "other tests use the rest of it")]
mod pod;
mod support;

use std::fs;
use std::path::Path;

use pod::{Pod, supervised};
use podvisor::config::Config;
use podvisor::error::Kind;
use podvisor::network::{self, Asked, NetworkConf, Valid, netns};
use serde_json::{Value, json};
use support::fake::{self, Act, Fake};
use support::{Scope, cni};

const CACHED: &str = "/var/lib/cni/results";

/// A chain of fakes with a version, one per name.
fn fakes<const N: usize>(network: &str, version: &str, names: [&str; N]) -> [Fake; N] {
    let made = names.map(|name| fake::plugin(Path::new(cni::PLUGINS), name));
    for fake in &made {
        speaks(
            fake,
            &["0.1.0", "0.2.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"],
        );
    }
    let plugins = names.iter().map(|name| json!({ "type": name })).collect();
    cni::network(network, plugins).version(version).write();
    made
}

fn speaks(fake: &Fake, versions: &[&str]) {
    let answer = json!({"cniVersion": "1.0.0", "supportedVersions": versions});
    fake.on("VERSION", &[Act::Print(answer.to_string())]);
}

fn stdin_of(fake: &Fake, verb: &str) -> Value {
    serde_json::from_str(&fake.calls_of(verb).last().unwrap().stdin).unwrap()
}

fn conf(name: &str) -> NetworkConf {
    network::load_conf(&Config::default(), Some(name)).unwrap()
}

#[test]
fn check_of_real_plugins_is_good_and_names_what_is_gone() {
    let name = "check_of_real_plugins_is_good_and_names_what_is_gone";
    supervised(name, async |reaper| {
        // Not portmap: at CHECK that of 1.1 wants IPv6 rules for a pod that has no IPv6 address.
        cni::bridge("pods", "pvt0", "10.87.1.0/24")
            .plugin(json!({"type": "tuning"}))
            .write();
        let before = Scope::default().take();
        let pod = Pod::on("pods", "a");
        let add = pod.add(&reaper).await.unwrap();
        // What people ask for is all there.
        let eth0 = add
            .facts
            .interfaces
            .iter()
            .find(|i| i.name == "eth0")
            .unwrap();
        assert!(!eth0.sandbox.is_empty() && eth0.mac.len() == 17);
        assert_eq!(add.facts.addresses[0].gateway, "10.87.1.1");
        assert_eq!(add.facts.routes[0].dst, "0.0.0.0/0");
        let timed: Vec<&str> = add.timings.iter().map(|t| t.plugin.as_str()).collect();
        assert_eq!(timed, ["bridge", "tuning"]);
        assert!(add.timings.iter().all(|t| t.took_us > 0));

        let good = network::check(&pod.config, &reaper, &pod.record)
            .await
            .unwrap();
        assert_eq!(good.len(), 1);
        assert_eq!(*good[0].verdict.as_ref().unwrap(), Asked::Good);

        let link = format!(
            "podvisor-{}",
            pod.attachment.netns.file_name().unwrap().to_str().unwrap()
        );
        pod::ip(&["netns", "exec", &link, "ip", "route", "del", "default"]);
        let bad = network::check(&pod.config, &reaper, &pod.record)
            .await
            .unwrap();
        let error = bad[0].verdict.as_ref().unwrap_err().to_string();
        assert!(
            error.contains("\"bridge\" (CHECK)") && error.contains("\"pods\""),
            "{error}"
        );
        pod.gone(&reaper).await;
        before.assert_unchanged();
    });
}

#[test]
fn check_gets_the_result_of_the_add_and_is_not_asked_where_there_is_none() {
    let name = "check_gets_the_result_of_the_add_and_is_not_asked_where_there_is_none";
    supervised(name, async |reaper| {
        let [one, two] = fakes("pods", "0.4.0", ["one", "two"]);
        let pod = Pod::on("pods", "a");
        pod.add(&reaper).await.unwrap();
        network::check(&pod.config, &reaper, &pod.record)
            .await
            .unwrap();
        for fake in [&one, &two] {
            let result = &stdin_of(fake, "CHECK")["prevResult"];
            assert_eq!(result["ips"][0]["address"], "10.99.0.2/24");
            assert_eq!(
                (&result["cniVersion"], &result["ips"][0]["version"]),
                (&json!("0.4.0"), &json!("4"))
            );
        }
        pod.gone(&reaper).await;

        let [old] = fakes("old", "0.3.1", ["three"]);
        let off = json!({"name": "off", "cniVersion": "1.0.0", "disableCheck": "true", "plugins": [{"type": "three"}]});
        fs::write(
            Path::new(cni::CONFIGS).join("20-off.conflist"),
            off.to_string(),
        )
        .unwrap();
        for (network, why) in [("old", "0.3.1"), ("off", "disableCheck")] {
            let pod = Pod::on(network, "b");
            pod.add(&reaper).await.unwrap();
            let checked = network::check(&pod.config, &reaper, &pod.record)
                .await
                .unwrap();
            let Ok(Asked::NotAsked(said)) = &checked[0].verdict else {
                panic!("{checked:?}");
            };
            assert!(said.contains(why), "{said}");
            pod.gone(&reaper).await;
        }
        assert_eq!(old.count("CHECK"), 0);
    });
}

/// FL-028: a plugin that does not speak the network's version is told apart from every other failure.
#[test]
fn a_plugin_that_does_not_speak_the_version_is_named_with_what_it_speaks() {
    let name = "a_plugin_that_does_not_speak_the_version_is_named_with_what_it_speaks";
    supervised(name, async |reaper| {
        let [one, old] = fakes("pods", "1.0.0", ["one", "old"]);
        speaks(&old, &["0.1.0", "0.4.0"]);
        let pod = Pod::on("pods", "a");
        for _ in 0..2 {
            let error = pod.add(&reaper).await.unwrap_err();
            let text = error.to_string();
            assert_eq!(error.kind(), Kind::State);
            for word in ["\"old\"", "0.1.0, 0.4.0", "1.0.0", "10-pods.conflist"] {
                assert!(text.contains(word), "{word} in {text}");
            }
        }
        let status = network::status(&pod.config, &reaper, &pod.conf)
            .await
            .unwrap_err();
        assert!(status.to_string().contains("0.1.0, 0.4.0"), "{status}");
        assert!(!pod.record.owes_del());
        assert_eq!((one.count("ADD"), old.count("VERSION")), (0, 1));
        let spoken = network::versions(&pod.config, &reaper, "old")
            .await
            .unwrap();
        assert_eq!(spoken, ["0.1.0", "0.4.0"]);
        assert_eq!(
            old.count("VERSION"),
            1,
            "asked once for each state of the file"
        );

        // Another executable under the same name is asked again; one that does not answer may do its work.
        let [_one, mute] = fakes("pods", "1.0.0", ["one", "old"]);
        mute.on("VERSION", &[Act::Exit(1)]);
        pod.add(&reaper).await.unwrap();
        pod.gone(&reaper).await;
    });
}

#[test]
fn results_of_every_version_reach_the_next_plugin_in_that_of_the_network() {
    let name = "results_of_every_version_reach_the_next_plugin_in_that_of_the_network";
    supervised(name, async |reaper| {
        let pair = json!({"cniVersion": "0.2.0", "ip4": {"ip": "10.0.0.2/24", "gateway": "10.0.0.1", "routes": [{"dst": "0.0.0.0/0"}]}, "ip6": {"ip": "fd00::2/64"}});
        let list = |version: &str| {
            json!({"cniVersion": version, "interfaces": [{"name": "eth0", "sandbox": "/x", "mtu": 1400}],
            "ips": [{"version": "6", "address": "fd00::2/64", "interface": 0}, {"version": "4", "address": "10.0.0.2/24", "interface": 0}]})
        };
        let results = [
            pair,
            list("0.3.1"),
            list("0.4.0"),
            list("1.0.0"),
            list("1.1.0"),
        ];
        for version in [
            "0.1.0", "0.2.0", "0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0",
        ] {
            let [one, two] = fakes("pods", version, ["one", "two"]);
            one.on("VERSION", &[Act::Exit(1)]);
            two.on("VERSION", &[Act::Exit(1)]);
            for result in &results {
                one.on("ADD", &[Act::Print(result.to_string())]);
                two.on("ADD", &[Act::Print(result.to_string())]);
                let pod = Pod::on("pods", "a");
                let add = pod.add(&reaper).await.unwrap();
                let mut ips = add.ips.clone();
                // FL-030: both, in the order that the plugin gave.
                assert_eq!(ips[0].contains(':'), result.get("ips").is_some(), "{ips:?}");
                ips.sort();
                assert_eq!(ips, ["10.0.0.2/24", "fd00::2/64"]);
                let previous = stdin_of(&two, "ADD")["prevResult"].clone();
                assert_eq!(previous["cniVersion"], version);
                let is_old = version < "0.3.0";
                assert_eq!(previous.get("ip4").is_some(), is_old, "{previous}");
                let marked = previous["ips"][0].get("version").is_some();
                assert_eq!(marked, !is_old && version < "1.0.0", "{previous}");
                pod.gone(&reaper).await;
                assert_eq!(
                    stdin_of(&two, "DEL").get("prevResult").is_some(),
                    version >= "0.4.0"
                );
            }
        }
    });
}

/// FL-029: a cached result that nobody can convert does not stop the DEL.
#[test]
fn a_recorded_result_that_cannot_be_converted_is_left_out_at_del() {
    let name = "a_recorded_result_that_cannot_be_converted_is_left_out_at_del";
    supervised(name, async |reaper| {
        let [one] = fakes("pods", "0.4.0", ["one"]);
        let pod = Pod::on("pods", "a");
        pod.add(&reaper).await.unwrap();
        let file = pod.record.dir().join("result.json");
        let text = fs::read_to_string(&file).unwrap();
        assert!(text.contains(r#""cniVersion":"0.4.0""#));
        fs::write(
            &file,
            text.replace(r#""cniVersion":"0.4.0""#, r#""cniVersion":"0.1.0""#),
        )
        .unwrap();
        pod.gone(&reaper).await;
        assert_eq!(one.count("DEL"), 1);
        assert!(stdin_of(&one, "DEL").get("prevResult").is_none());
    });
}

#[test]
fn status_asks_every_plugin_and_tells_what_one_has() {
    let name = "status_asks_every_plugin_and_tells_what_one_has";
    supervised(name, async |reaper| {
        let config = Config::default();
        let [one, two] = fakes("pods", "1.1.0", ["one", "two"]);
        let network = conf("pods");
        assert_eq!(
            network::status(&config, &reaper, &network).await.unwrap(),
            Asked::Good
        );
        let call = &one.calls_of("STATUS")[0];
        assert_eq!(call.var("CNI_CONTAINERID"), "");
        assert_eq!(stdin_of(&two, "STATUS")["name"], "pods");
        let report = json!({"code": 50, "msg": "the agent is not there yet"});
        two.on("STATUS", &[Act::Print(report.to_string()), Act::Exit(1)]);
        let error = network::status(&config, &reaper, &network)
            .await
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("\"two\" (STATUS)") && error.contains("error 50: the agent"),
            "{error}"
        );

        let [old] = fakes("old", "1.0.0", ["three"]);
        let asked = network::status(&config, &reaper, &conf("old"))
            .await
            .unwrap();
        assert!(matches!(asked, Asked::NotAsked(why) if why.contains("1.0.0")));
        assert_eq!(old.count("STATUS"), 0);
    });
}

#[test]
fn gc_names_our_attachments_and_those_of_other_tools() {
    let name = "gc_names_our_attachments_and_those_of_other_tools";
    supervised(name, async |reaper| {
        let [one, two] = fakes("pods", "1.1.0", ["one", "two"]);
        let before = Scope::default().take();
        let (alive, lost) = (Pod::on("pods", "alive"), Pod::on("pods", "lost"));
        alive.add(&reaper).await.unwrap();
        lost.add(&reaper).await.unwrap();
        // Another tool's, as libcni writes it; and a damaged one.
        let mut theirs: Value =
            serde_json::from_slice(&fs::read(format!("{CACHED}/pods-alive-eth0")).unwrap())
                .unwrap();
        theirs["containerId"] = "theirs".into();
        theirs["netns"] = "/run/netns/gone".into();
        fs::write(format!("{CACHED}/pods-theirs-eth0"), theirs.to_string()).unwrap();
        fs::write(format!("{CACHED}/pods-broken-eth0"), "").unwrap();
        // All that is left of one of ours is libcni's entry.
        let (config, network) = (lost.config.clone(), lost.conf.clone());
        fs::remove_dir_all(lost.record.dir()).unwrap();
        netns::unpin(&lost.attachment.netns).unwrap();

        let valid = [Valid {
            container_id: "alive".into(),
            ifname: "eth0".into(),
        }];
        let stale = network::stale(&config, &network, &valid);
        assert_eq!(
            stale
                .iter()
                .map(|v| v.container_id.as_str())
                .collect::<Vec<_>>(),
            ["lost"]
        );
        assert_eq!(
            one.count("DEL") + one.count("GC"),
            0,
            "looking changes nothing"
        );

        let done = network::gc(&config, &reaper, &network, &valid)
            .await
            .unwrap();
        assert_eq!((done.deleted, done.asked), (stale, Asked::Good));
        assert_eq!(two.calls_of("DEL")[0].var("CNI_CONTAINERID"), "lost");
        for fake in [&one, &two] {
            let ids: Vec<Value> = ["alive", "broken", "theirs"]
                .map(|id| json!({"containerID": id, "ifname": "eth0"}))
                .into();
            assert_eq!(
                stdin_of(fake, "GC")["cni.dev/valid-attachments"],
                Value::Array(ids)
            );
        }
        assert!(!Path::new(&format!("{CACHED}/pods-lost-eth0")).exists());
        // Without being named, what has a record is valid all the same.
        network::gc(&config, &reaper, &network, &[]).await.unwrap();
        assert_eq!(one.count("DEL"), 1);
        // One that fails does not keep the others from being asked.
        one.on("GC", &[Act::Exit(1)]);
        network::gc(&config, &reaper, &network, &[])
            .await
            .unwrap_err();
        assert_eq!(two.count("GC"), 3);
        for id in ["theirs", "broken"] {
            fs::remove_file(format!("{CACHED}/pods-{id}-eth0")).unwrap();
        }
        alive.gone(&reaper).await;
        before.assert_unchanged();
    });
}

#[test]
fn gc_before_1_1_frees_the_lease_of_a_pod_that_only_the_cache_remembers() {
    let name = "gc_before_1_1_frees_the_lease_of_a_pod_that_only_the_cache_remembers";
    supervised(name, async |reaper| {
        cni::bridge("pods", "pvt0", "10.87.1.0/24").write();
        // Without a netns the bridge plugin of 1.1 frees the lease and stops before its own masquerading rules.
        let mut network = cni::bridge("pods", "pvt0", "10.87.1.0/24").json();
        network["plugins"][0]["ipMasq"] = false.into();
        let file = Path::new(cni::CONFIGS).join("10-pods.conflist");
        fs::write(file, network.to_string()).unwrap();
        let before = Scope::default().take();
        let pod = Pod::on("pods", "lost");
        pod.add(&reaper).await.unwrap();
        fs::remove_dir_all(pod.record.dir()).unwrap();
        netns::unpin(&pod.attachment.netns).unwrap();
        let done = network::gc(&pod.config, &reaper, &pod.conf, &[])
            .await
            .unwrap();
        assert_eq!(done.deleted.len(), 1);
        assert!(matches!(done.asked, Asked::NotAsked(_)));
        before.assert_unchanged();

        let mut off = cni::bridge("off", "pvt0", "10.87.1.0/24").json();
        off["disableGC"] = true.into();
        fs::write(
            Path::new(cni::CONFIGS).join("20-off.conflist"),
            off.to_string(),
        )
        .unwrap();
        let pod = Pod::on("off", "kept");
        pod.add(&reaper).await.unwrap();
        fs::remove_dir_all(pod.record.dir()).unwrap();
        netns::unpin(&pod.attachment.netns).unwrap();
        let done = network::gc(&pod.config, &reaper, &pod.conf, &[])
            .await
            .unwrap();
        assert!(done.deleted.is_empty());
        assert!(Path::new("/var/lib/cni/results/off-kept-eth0").exists());
    });
}

#[test]
fn a_pod_on_two_networks_has_two_records_and_each_is_deleted_on_its_own() {
    let name = "a_pod_on_two_networks_has_two_records_and_each_is_deleted_on_its_own";
    supervised(name, async |reaper| {
        cni::bridge("pods", "pvt0", "10.87.1.0/24").write();
        cni::bridge("more", "pvt1", "10.87.2.0/24")
            .plugin(json!({"type": "seen"}))
            .write();
        let tuning = cni::real_plugins().unwrap().join("tuning");
        let seen = fake::plugin_before(Path::new(cni::PLUGINS), "seen", &tuning);
        let before = Scope::default().take();
        let pod = Pod::on("pods", "a");
        let mut second = pod.attachment.clone();
        second.ifname = "net1".into();
        let more = conf("more");
        pod.add(&reaper).await.unwrap();
        let added = network::add(&pod.config, &reaper, &pod.record, &more, &second)
            .await
            .unwrap();
        assert_eq!(added.ips, ["10.87.2.2/24"]);
        let on: Vec<_> = pod
            .record
            .attachments()
            .into_iter()
            .map(|a| (a.network, a.ifname, a.owes_del))
            .collect();
        assert_eq!(
            on,
            [
                ("pods".into(), "eth0".into(), true),
                ("more".into(), "net1".into(), true)
            ]
        );
        assert!(Path::new("/var/lib/cni/results/more-a-net1").exists());
        let checked = network::check(&pod.config, &reaper, &pod.record)
            .await
            .unwrap();
        assert!(checked.iter().all(|c| c.verdict.is_ok()), "{checked:?}");

        // The second one's DEL fails: the first one's is done all the same, and is not repeated.
        seen.on("DEL", &[Act::Exit(3)]);
        let error = pod.del(&reaper).await.unwrap_err().to_string();
        assert!(
            error.contains("\"more\"") && !error.contains("\"pods\""),
            "{error}"
        );
        assert!(pod.record.owes_del());
        assert!(!Path::new("/var/lib/cni/networks/pods/10.87.1.2").exists());
        assert!(Path::new("/var/lib/cni/networks/more/10.87.2.2").exists());
        seen.on("DEL", &[]);
        pod.gone(&reaper).await;
        before.assert_unchanged();
    });
}

#[test]
fn wishes_that_no_plugin_knows_are_refused_and_real_plugins_follow_the_others() {
    let name = "wishes_that_no_plugin_knows_are_refused_and_real_plugins_follow_the_others";
    supervised(name, async |reaper| {
        let mut bridge = cni::bridge("pods", "pvt0", "10.87.1.0/24").json();
        bridge["plugins"][0]["capabilities"] = json!({"mac": true, "ips": true});
        cni::bridge("plain", "pvt0", "10.87.1.0/24").write();
        let file = Path::new(cni::CONFIGS).join("20-pods.conflist");
        fs::write(file, bridge.to_string()).unwrap();
        let before = Scope::default().take();
        let wish = [
            ("io.podvisor.mac", "0a:00:00:00:00:77"),
            ("io.podvisor.ips", "10.87.1.77"),
        ];
        let wish = wish.map(|(k, v)| (k.to_owned(), v.to_owned())).into();
        let wishes = network::wishes(&wish, &["eth0"]).unwrap().remove(0);

        let mut pod = Pod::on("plain", "a");
        pod.attachment.capabilities = wishes.clone();
        let error = pod.add(&reaper).await.unwrap_err();
        assert!(
            error.kind() == Kind::Invalid && error.to_string().contains("mac"),
            "{error}"
        );
        assert!(!pod.record.owes_del());
        pod.gone(&reaper).await;

        let mut pod = Pod::on("pods", "b");
        pod.attachment.capabilities = wishes;
        let result = pod.add(&reaper).await.unwrap();
        assert_eq!(result.ips, ["10.87.1.77/24"]);
        let eth0 = result
            .facts
            .interfaces
            .iter()
            .find(|i| i.name == "eth0")
            .unwrap();
        assert_eq!(eth0.mac, "0a:00:00:00:00:77");
        pod.gone(&reaper).await;
        before.assert_unchanged();
    });
}

/// FL-032: a writer that truncates and rewrites the file in two halves, all the time.
#[test]
fn a_network_whose_file_is_written_in_halves_stays_usable() {
    let name = "a_network_whose_file_is_written_in_halves_stays_usable";
    supervised(name, async |reaper| {
        let [one] = fakes("pods", "1.0.0", ["one"]);
        let file = Path::new(cni::CONFIGS).join("10-pods.conflist");
        let text = fs::read(&file).unwrap();
        // Left beside it by whoever writes by renaming: never a network.
        fs::write(file.with_extension("conflist.temp"), "{}").unwrap();
        Pod::on("pods", "first").gone(&reaper).await;
        for n in 0..10 {
            fs::write(&file, &text[..text.len() * n / 10]).unwrap();
            let pod = Pod::on("pods", &format!("p{n}"));
            pod.add(&reaper).await.unwrap();
            fs::write(&file, &text).unwrap();
            pod.gone(&reaper).await;
        }
        assert_eq!(one.count("ADD"), 10);
        fs::remove_file(&file).unwrap();
        let gone = network::load_conf(&Config::default(), Some("pods")).unwrap_err();
        assert_eq!(gone.kind(), Kind::NotFound);
    });
}
