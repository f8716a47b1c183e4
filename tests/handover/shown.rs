//! What people see of a parked network, and how they end it.

use serde_json::{Value, json};

use crate::kit::{self, INTERVAL};
use crate::rig::{self, BOUND, alive, gone, kill};
use crate::support::{Snapshot, cni, fake, sandboxed};

fn json_of(args: &[&str]) -> Value {
    serde_json::from_str(&kit::ask(args).ok().stdout).unwrap()
}

#[test]
fn a_parked_network_is_listed_and_ended_by_name_or_id() {
    sandboxed(
        "shown::a_parked_network_is_listed_and_ended_by_name_or_id",
        || {
            kit::parking(INTERVAL, "");
            let plugin = kit::bridge();
            let before = Snapshot::take();
            for (n, end) in [["stop", "web"], ["rm", "web"], ["rm", "p2"], ["stop", "p3"]]
                .iter()
                .enumerate()
            {
                let id = format!("p{n}");
                let (_, keeper) = kit::parked(&id, &plugin);
                let table = kit::ask(&["ps", "-a"]).ok().stdout;
                let row = table.lines().find(|l| l.starts_with(&id)).unwrap();
                for word in ["web", "network parked", "10.87.1."] {
                    assert!(row.contains(word), "{word} in {row}");
                }
                assert!(!kit::ask(&["ps"]).ok().stdout.contains(&id), "with -a only");
                let shown = &json_of(&["inspect", &id])[0];
                assert_eq!(shown["status"]["state"], "network parked");
                assert_eq!(shown["network"]["parked"]["keeper"], json!(keeper));
                let networks = json_of(&["network", "ls", "--json"]);
                let listed = networks.as_array().unwrap();
                let pods = listed.iter().find(|l| l["name"] == "pods").unwrap();
                assert_eq!(pods["parked"][0]["id"], json!(id), "{pods}");
                assert_eq!(pods["owed"], json!([]));
                // Its keeper is there: nothing to collect.
                kit::ask(&["gc"]).ok();
                assert!(alive(keeper) && plugin.count("DEL") == n);
                kit::ask(end).ok();
                gone(keeper);
                assert_eq!(kit::shown(&id), "");
                kit::adds_and_dels(&plugin, n + 1);
            }
            before.assert_unchanged();
            assert_eq!((kit::records(), kit::offered()), (0, 0));
        },
    );
}

/// Without a keeper it waits for its pod until its time is over, unless somebody says otherwise.
#[test]
fn gc_undoes_a_parked_network_without_a_keeper_when_its_time_is_over() {
    sandboxed(
        "shown::gc_undoes_a_parked_network_without_a_keeper_when_its_time_is_over",
        || {
            let plugin = kit::bridge();
            let before = Snapshot::take();
            for (n, (interval, args)) in [(INTERVAL, ["gc", "--all"]), (1.0, ["gc", "--boot"])]
                .into_iter()
                .enumerate()
            {
                kit::parking(interval, "");
                let id = format!("p{n}");
                let (_, keeper) = kit::parked(&id, &plugin);
                kill(keeper);
                if interval == INTERVAL {
                    let said = kit::ask(&["gc"]).ok().stdout;
                    assert!(
                        said.contains("left alone: parked network of pod web"),
                        "{said}"
                    );
                    assert_eq!(
                        (kit::shown(&id).as_str(), plugin.count("DEL")),
                        ("network parked", n)
                    );
                } else {
                    kit::until(&id, "network pending");
                }
                kit::ask(&args).ok();
                assert_eq!(kit::shown(&id), "");
                kit::adds_and_dels(&plugin, n + 1);
            }
            before.assert_unchanged();
            assert_eq!((kit::records(), kit::offered()), (0, 0));
        },
    );
}

/// The network's own garbage collection is told of parked attachments, by the id of their ADD.
#[test]
fn a_parked_attachment_and_one_that_was_taken_over_are_no_garbage() {
    sandboxed(
        "shown::a_parked_attachment_and_one_that_was_taken_over_are_no_garbage",
        || {
            kit::parking(INTERVAL, "");
            let plugin = fake::plugin(std::path::Path::new(cni::PLUGINS), "net");
            let net = cni::network("pods", vec![json!({"type": "net"})]);
            net.version("1.1.0").write();
            let before = Snapshot::take();
            let (_, keeper) = kit::parked_as("p1", &plugin, &rig::config("web"));
            kit::ask(&["network", "gc"]).ok();
            let second = kit::create("p2");
            second.probe().start("p2", BOUND).unwrap();
            gone(keeper);
            kit::ask(&["network", "gc"]).ok();
            kit::ask(&["network", "check", "p2"]).ok();
            let calls = plugin.calls_of("GC");
            assert_eq!(calls.len(), 2);
            for call in calls {
                let given: Value = serde_json::from_str(&call.stdin).unwrap();
                let valid = &given["cni.dev/valid-attachments"];
                assert_eq!(*valid, json!([{"containerID": "p1", "ifname": "eth0"}]));
            }
            let checked = plugin.calls_of("CHECK");
            assert_eq!(checked[0].var("CNI_CONTAINERID"), "p1");
            assert_eq!(plugin.count("DEL"), 0);
            second.end();
            kit::adds_and_dels(&plugin, 1);
            before.assert_unchanged();
        },
    );
}
