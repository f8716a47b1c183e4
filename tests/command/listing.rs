//! `ps` and `inspect`, and how pods are named on the command line.

use serde_json::Value;

use crate::kit::{inspect, json, on_a_machine};
use crate::support::podvisor;

fn keys(value: &Value) -> Vec<&str> {
    value
        .as_object()
        .unwrap()
        .keys()
        .map(String::as_str)
        .collect()
}

#[test]
fn pods_are_listed_while_they_run_and_with_a_when_they_have_stopped() {
    on_a_machine(
        "listing::pods_are_listed_while_they_run_and_with_a_when_they_have_stopped",
        |kit| {
            assert_eq!(
                podvisor(&["ps"]).ok().stdout,
                "POD ID  NAME  STATE  AGE  IP  PORTS  CONTAINERS\n"
            );
            assert_eq!(json(&["ps", "--json"]), serde_json::json!([]));
            let up = kit.detached(&["--name", "up"], "sleep 1000");
            kit.run(&["--name", "over", "--net", "none"], "true").ok();
            let few = podvisor(&["ps"]).ok().stdout;
            assert!(
                few.contains(&up[..12]) && few.contains("ready") && !few.contains("over"),
                "{few}"
            );
            let all = podvisor(&["ps", "-a"]).ok().stdout;
            assert!(all.lines().count() == 3 && all.contains("stopped"), "{all}");
            assert_eq!(podvisor(&["ps", "-q"]).ok().stdout, format!("{up}\n"));
            let list = json(&["ps", "-a", "--json"]);
            let wanted = [
                "activity",
                "activity_seconds",
                "containers",
                "created_at",
                "id",
                "ips",
                "labels",
                "name",
                "namespace",
                "network",
                "parked",
                "paused",
                "ports",
                "reason",
                "running",
                "state",
            ];
            for pod in list.as_array().unwrap() {
                let mut found = keys(pod);
                found.sort_unstable();
                assert_eq!(found, wanted, "{pod:#}");
            }
            // Another namespace is another list.
            assert_eq!(
                podvisor(&["--namespace", "other", "ps", "-aq"]).ok().stdout,
                ""
            );
            podvisor(&["--namespace", "other", "rm", "-f", "up"]).code_is(1);
            podvisor(&["rm", "-f", "up", "over"]).ok();
        },
    );
}

#[test]
fn a_pod_with_a_damaged_record_is_listed_with_the_same_keys_and_removed() {
    on_a_machine(
        "listing::a_pod_with_a_damaged_record_is_listed_with_the_same_keys_and_removed",
        |kit| {
            let id = kit.detached(&["--name", "web", "--net", "none"], "sleep 1000");
            let whole = json(&["ps", "--json"]);
            let journal = format!("/run/podvisor/default/{id}/journal.json");
            let text = std::fs::read(&journal).unwrap();
            for damaged in [&text[..text.len() / 2], b""] {
                std::fs::write(&journal, damaged).unwrap();
                let list = json(&["ps", "--json"]);
                assert_eq!(
                    (&list[0]["state"], &list[0]["name"]),
                    (&"unrecovered".into(), &"web".into())
                );
                assert_eq!(keys(&list[0]), keys(&whole[0]));
                assert_eq!(inspect("web")["status"]["state"], "unrecovered");
                let refused = podvisor(&["logs", "web"]).code_is(1);
                assert!(
                    refused.stderr.contains(&format!("podvisor rm -f {id}")),
                    "{refused:#?}"
                );
                podvisor(&["rm", "web"])
                    .code_is(1)
                    .fails_with("podvisor rm -f web");
            }
            podvisor(&["rm", "-f", "web"]).ok();
        },
    );
}

#[test]
fn inspect_tells_everything_and_stages_their_times() {
    on_a_machine(
        "listing::inspect_tells_everything_and_stages_their_times",
        |kit| {
            let id = kit.detached(&["--name", "web", "-p", "8080:80"], "sleep 1000");
            let other = kit.detached(&["--name", "other", "--net", "none"], "sleep 1000");
            let both = json(&["inspect", "web", &other]);
            assert_eq!(
                (&both[0]["id"], &both[1]["id"]),
                (&id.as_str().into(), &other.as_str().into())
            );
            let pod = &both[0];
            assert_eq!(pod["status"]["state"], "ready");
            assert_eq!(pod["status"]["live"]["state"], "SANDBOX_READY");
            assert_eq!(pod["network"]["name"], "testnet");
            assert_eq!(pod["hostname"], "web");
            let main = &pod["containers"][format!("{}-main", &id[..12])];
            assert_eq!(main["status"], "running");
            let table = podvisor(&["inspect", "--stages", "web"]).ok().stdout;
            for stage in ["STAGE", "netns", "cni-add", "infra", "ready"] {
                assert!(table.contains(stage), "{table}");
            }
            podvisor(&["inspect", "nobody"])
                .code_is(1)
                .fails_with("nobody");
            podvisor(&["rm", "-f", "web", "other"]).ok();
            podvisor(&["inspect", "web"]).code_is(1);
        },
    );
}

#[test]
fn pods_go_by_name_id_and_unambiguous_beginning_of_the_id() {
    on_a_machine(
        "listing::pods_go_by_name_id_and_unambiguous_beginning_of_the_id",
        |kit| {
            let web = kit.detached(&["--name", "web", "--net", "none"], "sleep 1000");
            let other = kit.detached(&["--name", "web2", "--net", "none"], "sleep 1000");
            for target in ["web", &web, &web[..12], &web[..16]] {
                assert_eq!(inspect(target)["id"], web.as_str(), "{target}");
            }
            // A name that looks like the beginning of an id wins over that id.
            let short = &other[..4];
            let named = kit.detached(&["--name", short, "--net", "none"], "sleep 1000");
            assert_eq!(inspect(short)["id"], named.as_str());
            podvisor(&["rm", "-f", short]).ok();
            // Seventeen pods and sixteen first digits: some digit fits twice, and the error lists what it fits.
            let mut ids: Vec<String> = vec![web, other];
            while ids.iter().filter(|id| id[..1] == ids[0][..1]).count() < 2 && ids.len() < 40 {
                ids.push(
                    podvisor(&["create", "--net", "none"])
                        .ok()
                        .stdout
                        .trim()
                        .to_owned(),
                );
            }
            let fits: Vec<&String> = ids.iter().filter(|id| id[..1] == ids[0][..1]).collect();
            let refused = podvisor(&["rm", "-f", &ids[0][..1]]).code_is(1);
            for id in fits {
                assert!(refused.stderr.contains(&id[..12]), "{refused:#?}");
            }
            let mut line = vec!["rm", "-f"];
            line.extend(ids.iter().map(String::as_str));
            podvisor(&line).ok();
        },
    );
}

/// A script that removes "web" twice must not remove "web2".
#[test]
fn the_beginning_of_a_name_is_no_name() {
    on_a_machine("listing::the_beginning_of_a_name_is_no_name", |kit| {
        kit.detached(&["--name", "web2", "--net", "none"], "sleep 1000");
        for verb in [
            &["rm", "-f", "web"][..],
            &["stop", "web"],
            &["inspect", "web"],
            &["rm", "-f", ""],
        ] {
            podvisor(verb).code_is(1).fails_with("podvisor ps -a");
        }
        assert_eq!(json(&["ps", "--json"])[0]["state"], "ready");
        podvisor(&["rm", "-f", "web2"]).ok();
    });
}
