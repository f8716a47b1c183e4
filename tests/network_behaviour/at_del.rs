//! DEL: what counts as success, and what stays owed.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use serde_json::{Value, json};

use crate::kit;
use crate::place;
use crate::support::fake::Act;
use crate::support::{Snapshot, cni, podvisor, rootfs, sandboxed};

/// Only the exit counts: DEL has no result.
#[test]
fn what_a_plugin_prints_at_del_does_not_matter() {
    sandboxed(
        "at_del::what_a_plugin_prints_at_del_does_not_matter",
        || {
            let [plugin] = place::fakes(["talks"]);
            let rootfs = rootfs::make();
            let before = Snapshot::take();
            let prints = [
                " ".to_owned(),
                "level=info msg=deleting\nlevel=info msg=deleted".into(),
                r#"{"cniVersion":"1.0.0"} trailing"#.into(),
                r#"{"cniVersion":"9.9.9"}"#.into(),
            ];
            for (n, print) in prints.into_iter().enumerate() {
                plugin.on("DEL", &[Act::Stderr("noise".into()), Act::Print(print)]);
                kit::run("p", &rootfs, &[]).ok();
                kit::gone("p");
                assert_eq!(plugin.count("DEL"), n + 1);
            }
            before.assert_unchanged();
            let much = "head -c 3000000 /dev/zero";
            let text = format!(
                "if [ $CNI_COMMAND = ADD ]; then {}; else {much}; fi",
                kit::GOOD
            );
            kit::script("floods", &text);
            kit::run("p", &rootfs, &["--net", "floods"]).ok();
            kit::gone("p");
            before.assert_unchanged();
        },
    );
}

#[test]
fn a_slow_del_is_waited_for() {
    sandboxed("at_del::a_slow_del_is_waited_for", || {
        let [plugin] = place::fakes(["slow"]);
        plugin
            .on("ADD", &[Act::Sleep(1.5)])
            .on("DEL", &[Act::Sleep(1.5)]);
        let rootfs = rootfs::make();
        let before = Snapshot::take();
        kit::run("p", &rootfs, &[]).ok();
        podvisor(&["stop", "-t", "1", "p"]).ok();
        assert!(!place::owed());
        podvisor(&["rm", "p"]).ok();
        let calls = plugin.calls_of("DEL");
        assert_eq!((calls.len(), calls[0].end.as_deref()), (1, Some("0")));
        before.assert_unchanged();
    });
}

/// FL-026.
#[test]
fn a_crash_at_del_is_told_and_stays_owed() {
    sandboxed("at_del::a_crash_at_del_is_told_and_stays_owed", || {
        let acts = [Act::Stderr("oops".into()), Act::Signal("SEGV".into())];
        stays_owed(&[(&acts, &["signal 11 (SIGSEGV)", "oops"])]);
    });
}

/// FL-041 too.
#[test]
fn an_error_at_del_is_told_and_stays_owed() {
    sandboxed("at_del::an_error_at_del_is_told_and_stays_owed", || {
        let object = json!({"code": 11, "msg": "Unauthorized"}).to_string();
        stays_owed(&[
            (&[Act::Exit(3)], &["exited with 3"]),
            (
                &[Act::Print(object), Act::Exit(1)],
                &["error 11: Unauthorized"],
            ),
        ]);
    });
}

/// The processes are dead at once, whatever becomes of the network; the result of the ADD is kept.
fn stays_owed(cases: &[(&[Act], &[&str])]) {
    let [plugin] = place::fakes(["falls"]);
    let rootfs = rootfs::make();
    let before = Snapshot::take();
    for (acts, words) in cases {
        plugin.on("DEL", acts);
        kit::run("p", &rootfs, &[]).ok();
        let output = podvisor(&["stop", "-t", "1", "p"]);
        assert_ne!(output.code, Some(0), "{output:#?}");
        for word in words
            .iter()
            .chain(&["\"falls\" (DEL)", "network clean-up pending"])
        {
            assert!(output.stderr.contains(word), "{word} in {output:#?}");
        }
        assert!(place::owed());
        assert!(place::processes("/bin/sleep 600").is_empty());
        let cached = fs::read_dir("/var/lib/cni/results").unwrap().count();
        assert_eq!(cached, 1, "a failed DEL does not forget the result");
        plugin.on("DEL", &[]);
        kit::gone("p");
    }
    before.assert_unchanged();
}

/// FL-034: the plugin is gone, or lost its mode, while the pod ran.
#[test]
fn without_its_executable_a_del_stays_owed_until_it_is_back() {
    sandboxed(
        "at_del::without_its_executable_a_del_stays_owed_until_it_is_back",
        || {
            let [one, two] = place::fakes(["one", "two"]);
            let rootfs = rootfs::make();
            let before = Snapshot::take();
            let away = one.path.with_extension("away");
            for missing in [true, false] {
                kit::run("p", &rootfs, &[]).ok();
                let mode = |mode| fs::set_permissions(&one.path, fs::Permissions::from_mode(mode));
                let dels = two.count("DEL");
                if missing {
                    fs::rename(&one.path, &away).unwrap();
                } else {
                    mode(0o644).unwrap();
                }
                let output = podvisor(&["stop", "-t", "1", "p"]);
                assert_ne!(output.code, Some(0), "{output:#?}");
                for word in ["find CNI plugin \"one\"", cni::PLUGINS] {
                    assert!(output.stderr.contains(word), "{word} in {output:#?}");
                }
                assert!(place::owed());
                assert_eq!(two.count("DEL"), dels, "all are found before one runs");
                if missing {
                    fs::rename(&away, &one.path).unwrap();
                } else {
                    mode(0o755).unwrap();
                }
                kit::gone("p");
            }
            before.assert_unchanged();
        },
    );
}

/// FL-033: configuration, arguments and result are those of the ADD, whatever stands in the directory by now and
/// whoever sends it.
#[test]
fn del_goes_to_the_plugins_of_its_add_after_the_configuration_was_swapped() {
    sandboxed(
        "at_del::del_goes_to_the_plugins_of_its_add_after_the_configuration_was_swapped",
        || {
            let [one] = place::fakes(["one"]);
            let rootfs = rootfs::make();
            let before = Snapshot::take();
            for killed in [false, true] {
                cni::network("pods", vec![json!({"type": "one", "pool": "a"})]).write();
                let id = kit::run("p", &rootfs, &[]).ok().stdout.trim().to_owned();
                let add = one.calls_of("ADD").pop().unwrap();
                let other = crate::support::fake::plugin(Path::new(cni::PLUGINS), "other");
                cni::network("pods", vec![json!({"type": "other", "pool": "b"})]).write();
                if killed {
                    let journal = fs::read(format!("/run/podvisor/default/{id}/journal.json"));
                    let journal: Value = serde_json::from_slice(&journal.unwrap()).unwrap();
                    let pid = journal["supervisor"]["pid"].as_i64().unwrap();
                    let pid = nix::unistd::Pid::from_raw(i32::try_from(pid).unwrap());
                    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL).unwrap();
                    podvisor(&["rm", "-f", "p"]).ok();
                } else {
                    kit::gone("p");
                }
                let del = one.calls_of("DEL").pop().unwrap();
                assert_eq!(other.count("ADD") + other.count("DEL"), 0);
                for name in ["CNI_CONTAINERID", "CNI_NETNS", "CNI_IFNAME", "CNI_ARGS"] {
                    assert_eq!(add.var(name), del.var(name), "{name}");
                }
                let given: Value = serde_json::from_str(&del.stdin).unwrap();
                assert_eq!(given["pool"], "a");
                assert_eq!(given["prevResult"]["ips"][0]["address"], "10.99.0.2/24");
            }
            assert_eq!((one.count("ADD"), one.count("DEL")), (2, 2));
            before.assert_unchanged();
        },
    );
}
