//! `--timeout`: only the caller's patience ends; the work goes on and is taken by whoever asks with the same name.

use std::path::Path;

use serde_json::json;

use crate::kit::{BOUND, Background, Kit, on_a_machine};
use crate::support::fake::{self, Act, Fake};
use crate::support::{cni, eventually, podvisor};

/// A network whose ADD waits for the file `go`.
fn waiting(kit: &Kit) -> (Fake, std::path::PathBuf) {
    let plugin = fake::plugin(Path::new(cni::PLUGINS), "waiting");
    let go = kit.rootfs.path().join("go");
    plugin.on("ADD", &[Act::WaitFor(go.clone())]);
    cni::network("waiting", vec![json!({ "type": "waiting" })]).write();
    (plugin, go)
}

#[test]
fn a_creation_that_timed_out_is_joined_by_its_name() {
    on_a_machine(
        "timeout::a_creation_that_timed_out_is_joined_by_its_name",
        |kit| {
            let (plugin, go) = waiting(kit);
            let flags = ["-d", "--name", "slow", "--net", "waiting", "--timeout"];
            let line = |limit: &'static str| [&flags[..], &[limit]].concat();
            let told = kit.run(&line("1"), "sleep 1000").code_is(125);
            for part in ["cni-add", "--name slow", "podvisor rm -f slow"] {
                assert!(told.stderr.contains(part), "{part} in {told:#?}");
            }
            assert_eq!(crate::kit::json(&["ps", "--json"])[0]["state"], "starting");
            let mut second = kit.background(&line("1m"), "sleep 1000");
            eventually(BOUND, "a word about joining", || {
                second.stderr().contains("joining").then_some(())
            });
            std::fs::write(&go, "").unwrap();
            assert_eq!(second.end(), (Some(0), None), "{}", second.stderr());
            let pods = crate::kit::json(&["ps", "--json"]);
            assert_eq!(
                (&pods[0]["name"], &pods[0]["running"]),
                (&"slow".into(), &1.into())
            );
            assert_eq!(plugin.count("ADD"), 1);
            podvisor(&["rm", "-f", "slow"]).ok();
            assert_eq!(plugin.count("DEL"), 1);
        },
    );
}

#[test]
fn a_finished_creation_is_taken_by_the_same_command() {
    on_a_machine(
        "timeout::a_finished_creation_is_taken_by_the_same_command",
        |kit| {
            let (plugin, go) = waiting(kit);
            let create = [
                "create",
                "--name",
                "slow",
                "--net",
                "waiting",
                "--timeout",
                "500ms",
            ];
            podvisor(&create).code_is(125);
            // Another request is another pod: refused, and the first goes on.
            podvisor(&["create", "--name", "slow", "--net", "none"])
                .code_is(125)
                .fails_with("slow");
            std::fs::write(&go, "").unwrap();
            eventually(BOUND, "the end of the creation", || {
                (crate::kit::json(&["ps", "--json"])[0]["state"] == "parked").then_some(())
            });
            podvisor(&create).ok();
            assert_eq!(crate::kit::json(&["ps", "--json"])[0]["state"], "ready");
            assert_eq!(plugin.count("ADD"), 1);
            podvisor(&["rm", "-f", "slow"]).ok();
            assert_eq!(plugin.count("DEL"), 1);
        },
    );
}

#[test]
fn a_pod_that_is_being_made_can_be_removed() {
    on_a_machine("timeout::a_pod_that_is_being_made_can_be_removed", |kit| {
        let (_plugin, go) = waiting(kit);
        let mut making = Background::start(&["create", "--name", "slow", "--net", "waiting"]);
        eventually(BOUND, "a pod that is starting", || {
            (crate::kit::json(&["ps", "--json"])[0]["state"] == "starting").then_some(())
        });
        podvisor(&["rm", "slow"])
            .code_is(1)
            .fails_with("being made");
        let mut removing = Background::start(&["rm", "-f", "slow"]);
        std::fs::write(&go, "").unwrap();
        assert_eq!(removing.end(), (Some(0), None), "{}", removing.stderr());
        let (code, _) = making.end();
        assert_eq!(code, Some(125), "{}", making.stderr());
        assert!(!making.stderr().is_empty());
    });
}
