//! ADD: what is a result, what is none, and what follows.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use serde_json::{Value, json};

use crate::kit;
use crate::place;
use crate::support::fake::Act;
use crate::support::{Snapshot, cni, podvisor, rootfs, sandboxed};

/// FL-027: no version is that of the network, an older one is converted, one that nobody knows is refused.
#[test]
fn a_result_of_an_unknown_version_is_refused_and_of_another_one_converted() {
    sandboxed(
        "at_add::a_result_of_an_unknown_version_is_refused_and_of_another_one_converted",
        || {
            let [plugin] = place::fakes(["odd"]);
            let rootfs = rootfs::make();
            let before = Snapshot::take();
            let unknown = json!({"cniVersion": "9.9.9", "ips": [{"address": "10.99.0.7/24"}]});
            plugin.on("ADD", &[Act::Print(unknown.to_string())]);
            let output = kit::run("p", &rootfs, &[]).code_is(125);
            for word in ["\"odd\"", "cniVersion \"9.9.9\"", "0.3.1"] {
                assert!(output.stderr.contains(word), "{word} in {output:#?}");
            }
            assert_eq!((plugin.count("ADD"), plugin.count("DEL")), (1, 1));
            for good in [
                json!({"ips": [{"address": "10.99.0.7/24"}]}),
                json!({"cniVersion": "0.2.0", "ip4": {"ip": "10.99.0.7/24"}}),
                json!({"cniVersion": "0.4.0", "ips": [{"version": "4", "address": "10.99.0.7/24"}]}),
                json!({"cniVersion": "1.1.0", "ips": [{"address": "10.99.0.7/24"}]}),
            ] {
                plugin.on("ADD", &[Act::Print(good.to_string())]);
                kit::run("p", &rootfs, &[]).ok();
                let shown = podvisor(&["inspect", "p"]).ok().stdout;
                assert!(shown.contains("10.99.0.7"), "{shown}");
                kit::gone("p");
                let last = plugin.calls_of("DEL").pop().unwrap();
                let given: Value = serde_json::from_str(&last.stdin).unwrap();
                assert_eq!(given["prevResult"]["cniVersion"], "1.0.0", "{given}");
                assert_eq!(given["prevResult"]["ips"][0]["address"], "10.99.0.7/24");
            }
            before.assert_unchanged();
        },
    );
}

/// FL-028: told as what it is, before any plugin runs.
#[test]
fn a_plugin_that_does_not_speak_the_version_is_refused_and_nothing_is_owed() {
    sandboxed(
        "at_add::a_plugin_that_does_not_speak_the_version_is_refused_and_nothing_is_owed",
        || {
            let [first, old] = place::fakes(["first", "old"]);
            let speaks = json!({"cniVersion": "0.4.0", "supportedVersions": ["0.3.1", "0.4.0"]});
            old.on("VERSION", &[Act::Print(speaks.to_string())]);
            let rootfs = rootfs::make();
            let before = Snapshot::take();
            let output = kit::run("p", &rootfs, &[]).code_is(125);
            for word in ["\"old\"", "1.0.0", "0.4.0"] {
                assert!(output.stderr.contains(word), "{word} in {output:#?}");
            }
            let calls = |verb| first.count(verb) + old.count(verb);
            assert_eq!((calls("ADD"), calls("DEL")), (0, 0));
            before.assert_unchanged();
        },
    );
}

#[test]
fn more_than_a_result_can_be_is_no_result_and_does_not_stop_the_plugin() {
    sandboxed(
        "at_add::more_than_a_result_can_be_is_no_result_and_does_not_stop_the_plugin",
        || {
            // JSON all the same: only its size is wrong.
            let much = "head -c 3000000 /dev/zero | tr '\\0' ' '";
            kit::script(
                "floods",
                &format!("echo $CNI_COMMAND >>/run/verbs; {much}; {}", kit::GOOD),
            );
            let rootfs = rootfs::make();
            let before = Snapshot::take();
            let output = kit::run("p", &rootfs, &[]).code_is(125);
            for word in ["\"floods\" (ADD)", "printed more than 1048576 bytes"] {
                assert!(output.stderr.contains(word), "{word} in {output:#?}");
            }
            assert_eq!(fs::read_to_string("/run/verbs").unwrap(), "ADD\nDEL\n");
            before.assert_unchanged();
        },
    );
}

/// A configuration larger than a pipe holds, given to somebody who never looks.
#[test]
fn a_plugin_that_does_not_read_its_configuration_is_not_waited_for() {
    sandboxed(
        "at_add::a_plugin_that_does_not_read_its_configuration_is_not_waited_for",
        || {
            kit::script("deaf", &format!("[ $CNI_COMMAND != ADD ] || {}", kit::GOOD));
            let filler = "x".repeat(300_000);
            cni::network("deaf", vec![json!({"type": "deaf", "filler": filler})]).write();
            let rootfs = rootfs::make();
            let before = Snapshot::take();
            kit::run("p", &rootfs, &[]).ok();
            kit::gone("p");
            before.assert_unchanged();
        },
    );
}

/// Something it left has its stdout: a reader of that pipe would wait for as long as it lives.
#[test]
fn who_keeps_the_plugins_stdout_open_holds_nobody_up() {
    sandboxed(
        "at_add::who_keeps_the_plugins_stdout_open_holds_nobody_up",
        || {
            let [plugin] = place::fakes(["leaves"]);
            plugin
                .on("ADD", &[Act::Grandchild(3131)])
                .on("DEL", &[Act::Grandchild(3131)]);
            let rootfs = rootfs::make();
            let before = Snapshot::take();
            kit::run("p", &rootfs, &[]).ok();
            assert_eq!(place::processes("sleep 3131").len(), 1, "left on purpose");
            kit::gone("p");
            assert_eq!(plugin.count("DEL"), 1);
            assert_eq!(place::processes("sleep 3131").len(), 2);
            place::kill_all("sleep 3131");
            before.assert_unchanged();
        },
    );
}

#[test]
fn an_error_object_is_told_whatever_the_exit_code_and_what_is_shown_is_one_line() {
    sandboxed(
        "at_add::an_error_object_is_told_whatever_the_exit_code_and_what_is_shown_is_one_line",
        || {
            let [plugin] = place::fakes(["sorry"]);
            let rootfs = rootfs::make();
            let before = Snapshot::take();
            let error = json!({"cniVersion": "1.0.0", "code": 107, "msg": "no\taddress\nleft", "details": "pool \u{1b}[31mred"});
            for code in [0, 1] {
                plugin.on("ADD", &[Act::Print(error.to_string()), Act::Exit(code)]);
                let output = kit::run("p", &rootfs, &[]).code_is(125);
                for word in ["\"sorry\" (ADD)", "error 107", "no address left", "[31mred"] {
                    assert!(output.stderr.contains(word), "{word} in {output:#?}");
                }
                assert!(!output.stderr.contains('\u{1b}'), "{output:#?}");
            }
            assert_eq!((plugin.count("ADD"), plugin.count("DEL")), (2, 2));
            before.assert_unchanged();
        },
    );
}

#[test]
fn a_plugin_that_is_missing_or_may_not_be_executed_is_named_before_any_runs() {
    sandboxed(
        "at_add::a_plugin_that_is_missing_or_may_not_be_executed_is_named_before_any_runs",
        || {
            let [first, second] = place::fakes(["first", "second"]);
            let rootfs = rootfs::make();
            let before = Snapshot::take();
            let refused = || {
                let output = kit::run("p", &rootfs, &[]).code_is(125);
                for word in ["\"second\"", cni::PLUGINS] {
                    assert!(output.stderr.contains(word), "{word} in {output:#?}");
                }
            };
            let mode = |mode| fs::set_permissions(&second.path, fs::Permissions::from_mode(mode));
            mode(0o644).unwrap();
            refused();
            mode(0o755).unwrap();
            let away = second.path.with_extension("away");
            fs::rename(&second.path, &away).unwrap();
            refused();
            fs::create_dir(&second.path).unwrap();
            refused();
            fs::remove_dir(&second.path).unwrap();
            fs::rename(&away, &second.path).unwrap();
            assert_eq!(first.count("ADD") + first.count("DEL"), 0);
            before.assert_unchanged();
        },
    );
}

/// The kernel refuses to run it: an empty file, or one for another machine.
#[test]
fn a_plugin_that_is_no_program_is_an_error_with_its_name() {
    sandboxed(
        "at_add::a_plugin_that_is_no_program_is_an_error_with_its_name",
        || {
            let [first, second] = place::fakes(["first", "second"]);
            let good = fs::read(&second.path).unwrap();
            let rootfs = rootfs::make();
            let before = Snapshot::take();
            fs::write(&second.path, b"\x7fELF").unwrap();
            let output = kit::run("p", &rootfs, &[]).code_is(125);
            assert!(output.stderr.contains("\"second\""), "{output:#?}");
            if first.count("ADD") > 0 {
                // Its DEL cannot be run either.
                assert!(place::owed());
            }
            fs::write(&second.path, good).unwrap();
            podvisor(&["rm", "-f", "p"]);
            podvisor(&["gc"]);
            assert!(place::records().is_empty());
            before.assert_unchanged();
        },
    );
}

/// FL-017, FL-018: the roll-back fails too. It is owed, is repeated from the whole list, and has the result so far.
#[test]
fn a_chain_that_fails_half_way_and_cannot_be_undone_stays_owed_until_it_is() {
    sandboxed(
        "at_add::a_chain_that_fails_half_way_and_cannot_be_undone_stays_owed_until_it_is",
        || {
            let [one, two, three] = place::fakes(["one", "two", "three"]);
            two.on("ADD", &[Act::Stderr("table is full".into()), Act::Exit(1)]);
            one.on("DEL", &[Act::Stderr("agent is away".into()), Act::Exit(1)]);
            let rootfs = rootfs::make();
            let before = Snapshot::take();
            let output = kit::run("p", &rootfs, &[]).code_is(125);
            assert!(output.stderr.contains("table is full"), "{output:#?}");
            assert!(place::owed());
            let tries = one.count("DEL");
            assert!(tries >= 1 && two.count("DEL") >= tries && three.count("DEL") >= tries);
            assert_eq!(three.count("ADD"), 0);
            assert_eq!((one.count("ADD"), two.count("ADD")), (1, 1));
            for plugin in [&one, &two, &three] {
                let call = plugin.calls_of("DEL").remove(0);
                let given: Value = serde_json::from_str(&call.stdin).unwrap();
                assert_eq!(
                    given["prevResult"]["ips"][0]["address"], "10.99.0.2/24",
                    "{given}"
                );
            }
            one.on("DEL", &[]);
            podvisor(&["rm", "-f", "p"]);
            podvisor(&["gc"]);
            assert!(place::records().is_empty());
            assert_eq!(
                one.calls_of("DEL").last().unwrap().end.as_deref(),
                Some("0")
            );
            assert!(!Path::new("/var/lib/cni/results").exists_with_entries());
            before.assert_unchanged();
        },
    );
}

trait Entries {
    fn exists_with_entries(&self) -> bool;
}

impl Entries for Path {
    fn exists_with_entries(&self) -> bool {
        fs::read_dir(self).is_ok_and(|mut entries| entries.next().is_some())
    }
}
