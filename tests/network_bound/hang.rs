//! Plugins that do not end, and what they started.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::kit::{self, GOOD};
use crate::rig::{self, BOUND, Pod};
use crate::support::fake::Act;
use crate::support::{Snapshot, eventually, podvisor, rootfs, sandboxed};

/// Leaves a daemon that no group, session or environment ties to it, then does `then`. Its pid is in `/run/daemon`.
fn fleeing(then: &str) -> String {
    format!(
        "echo \"$CNI_COMMAND\" >>/run/verbs\n[ \"$CNI_COMMAND\" = ADD ] || exit 0\n\
         env -i /bin/sh -c '/usr/bin/setsid /bin/sh -c \"echo \\$\\$ >/run/.daemon; /bin/mv /run/.daemon /run/daemon; exec /bin/sleep 300\" & exit' <&- >&- 2>&-\n\
         until [ -e /run/daemon ]; do sleep 0.01; done\n{then}"
    )
}

fn daemon() -> i32 {
    let text = eventually(
        Duration::from_secs(20),
        "the plugin leaves a daemon",
        || fs::read_to_string("/run/daemon").ok(),
    );
    text.trim().parse().unwrap()
}

fn verbs() -> String {
    fs::read_to_string("/run/verbs")
        .unwrap_or_default()
        .replace('\n', " ")
}

/// FL-013, FL-014: at the bound everything the plugin started is killed, DEL follows, and a lease that it would have
/// written late is never written; other networks do not notice.
#[test]
fn at_the_bound_nothing_of_a_plugin_is_left_and_other_pods_are_made_meanwhile() {
    sandboxed(
        "hang::at_the_bound_nothing_of_a_plugin_is_left_and_other_pods_are_made_meanwhile",
        || {
            rig::settings("[cni]\nadd_timeout = 4.0\n");
            kit::script("quick", &format!("[ $CNI_COMMAND != ADD ] || {GOOD}"));
            let late = "trap '' TERM; echo waiting for the agent >&2; sleep 20 & wait; touch /run/lease; sleep 300";
            kit::script("hangs", &fleeing(&format!("{late}; {GOOD}")));
            let rootfs = rootfs::make();
            let before = Snapshot::take();
            std::thread::scope(|scope| {
                let hanging = scope.spawn(|| kit::run("h", &rootfs, &["--net", "hangs"]));
                daemon();
                kit::run("q", &rootfs, &["--net", "quick"]).ok();
                assert_eq!(verbs(), "ADD ", "the other one still hangs");
                let output = hanging.join().unwrap().code_is(125);
                for word in [
                    "\"hangs\" (ADD)",
                    "4.0 s",
                    "killed",
                    "waiting for the agent",
                ] {
                    assert!(output.stderr.contains(word), "{word} in {output:#?}");
                }
            });
            assert!(!rig::alive(daemon()), "the daemon is gone with it");
            assert_eq!(verbs(), "ADD DEL ");
            kit::gone("q");
            fs::remove_file("/run/daemon").unwrap();
            before.assert_unchanged();
            assert!(!Path::new("/run/lease").exists());
        },
    );
}

/// The supervisor itself is killed while a plugin hangs: its plugins die with it, wherever they went.
#[test]
fn with_a_killed_supervisor_everything_its_plugin_started_dies() {
    sandboxed(
        "hang::with_a_killed_supervisor_everything_its_plugin_started_dies",
        || {
            kit::script("hangs", &fleeing("trap '' TERM; sleep 300"));
            let before = Snapshot::take();
            let pod = Pod::create("p1");
            let started = pod.start_aside(BOUND);
            let pid = daemon();
            pod.kill_supervisor();
            assert!(started.join().unwrap().is_err());
            rig::gone(pid);
            pod.bundle.delete();
            before.assert_unchanged();
            assert_eq!(verbs(), "ADD DEL ");
        },
    );
}

#[test]
fn a_crash_takes_what_was_started_along_and_a_success_leaves_it() {
    sandboxed(
        "hang::a_crash_takes_what_was_started_along_and_a_success_leaves_it",
        || {
            let rootfs = rootfs::make();
            kit::script("flees", &fleeing("kill -SEGV $$"));
            let output = kit::run("p", &rootfs, &[]).code_is(125);
            assert!(output.stderr.contains("signal 11 (SIGSEGV)"), "{output:#?}");
            rig::gone(daemon());
            fs::remove_file("/run/daemon").unwrap();
            kit::script("flees", &fleeing(GOOD));
            kit::run("p", &rootfs, &[]).ok();
            kit::gone("p");
            assert!(rig::alive(daemon()), "it was left on purpose");
            rig::kill(daemon());
        },
    );
}

/// FL-015: questions are answered while a plugin hangs.
#[test]
fn questions_are_answered_while_a_plugin_hangs() {
    sandboxed("hang::questions_are_answered_while_a_plugin_hangs", || {
        let plugin = rig::fake_network();
        plugin.on("ADD", &[Act::Sleep(300.0)]);
        let before = Snapshot::take();
        let pod = Pod::create("p1");
        let started = pod.start_aside(BOUND);
        rig::called(&plugin, "ADD", 1);
        let begun = Instant::now();
        for _ in 0..5 {
            assert_eq!(pod.probe().status("p1").unwrap().0, "SANDBOX_NOTREADY");
            podvisor(&["--namespace", "test", "ps", "-a"]).ok();
            podvisor(&["--namespace", "test", "inspect", "p1"]).ok();
        }
        assert!(
            begun.elapsed() < Duration::from_secs(30),
            "{:?}",
            begun.elapsed()
        );
        assert!(!started.is_finished());
        pod.end();
        assert!(started.join().unwrap().is_err());
        before.assert_unchanged();
    });
}

/// FL-016: both bounds can be set, and what is told has plugin, command, duration and limit.
#[test]
fn the_bound_of_del_is_a_setting_and_what_passed_it_is_named() {
    sandboxed(
        "hang::the_bound_of_del_is_a_setting_and_what_passed_it_is_named",
        || {
            rig::settings("[cni]\nadd_timeout = 30.0\ndel_timeout = 1.0\n");
            let plugin = rig::fake_network();
            plugin
                .on("ADD", &[Act::Sleep(1.5)])
                .on("DEL", &[Act::Sleep(5.0)]);
            let rootfs = rootfs::make();
            let before = Snapshot::take();
            kit::run("p", &rootfs, &[]).ok();
            let output = podvisor(&["stop", "-t", "1", "p"]);
            assert_ne!(output.code, Some(0));
            for word in [
                "network clean-up pending",
                "\"fake\" (DEL)",
                "after 1.",
                "1.0 s",
            ] {
                assert!(output.stderr.contains(word), "{word} in {output:#?}");
            }
            plugin.on("DEL", &[]);
            kit::gone("p");
            before.assert_unchanged();
        },
    );
}

/// Law 9: a plugin gets three descriptors and CNI's variables, of a supervisor that has many of both.
#[test]
fn a_plugin_inherits_neither_descriptors_nor_environment() {
    sandboxed(
        "hang::a_plugin_inherits_neither_descriptors_nor_environment",
        || {
            let see = "[ $CNI_COMMAND != ADD ] || { ls /proc/$$/fd >/run/fds; tr '\\0' '\\n' </proc/$$/environ | cut -d= -f1 | sort >/run/names; cat /proc/$$/cwd/proc/self/comm >/run/cwd; }\n";
            kit::script("sees", &format!("{see}[ $CNI_COMMAND != ADD ] || {GOOD}"));
            let rootfs = rootfs::make();
            kit::run("p", &rootfs, &[]).ok();
            kit::gone("p");
            let words = |file: &str| {
                fs::read_to_string(file)
                    .unwrap()
                    .split_whitespace()
                    .collect::<Vec<_>>()
                    .join(" ")
            };
            // 255 is the script itself, which bash opened.
            assert_eq!(words("/run/fds"), "0 1 2 255");
            assert_eq!(
                words("/run/names"),
                "CNI_ARGS CNI_COMMAND CNI_CONTAINERID CNI_IFNAME CNI_NETNS CNI_PATH PATH"
            );
            assert_eq!(
                words("/run/cwd"),
                "cat",
                "its working directory is the root"
            );
        },
    );
}

/// FL-025, FL-026: what a plugin says instead of a result is told, with its name, and its DEL is called.
#[test]
fn noise_silence_and_crashes_are_told_with_the_plugins_name() {
    sandboxed(
        "hang::noise_silence_and_crashes_are_told_with_the_plugins_name",
        || {
            let plugin = rig::fake_network();
            let rootfs = rootfs::make();
            let before = Snapshot::take();
            let result = r#"{"cniVersion":"1.0.0","ips":[{"address":"10.99.0.2/24"}]}"#;
            let noise = format!("level=info msg=one\nlevel=info msg=two\n{result}");
            let endless = "x".repeat(3000);
            let cases: [(&[Act], &[&str]); 6] = [
                (
                    &[Act::Print(noise)],
                    &["not one result in JSON", "level=info msg=one"],
                ),
                (
                    &[Act::Print(format!("{result} trailing"))],
                    &["not one result in JSON"],
                ),
                (
                    &[
                        Act::Stderr("about to fall".into()),
                        Act::Signal("SEGV".into()),
                    ],
                    &["signal 11 (SIGSEGV)", "about to fall"],
                ),
                (&[Act::Exit(1)], &["exited with 1"]),
                (
                    &[Act::Stderr(endless), Act::Exit(4)],
                    &["exited with 4", "… xxx"],
                ),
                (&[Act::Print(" ".into())], &["printed no result"]),
            ];
            for (n, (acts, words)) in cases.iter().enumerate() {
                plugin.on("ADD", acts);
                let output = kit::run("p", &rootfs, &[]).code_is(125);
                for word in words.iter().chain(&["\"fake\" (ADD)"]) {
                    assert!(output.stderr.contains(word), "{word} in {output:#?}");
                }
                assert!(output.stderr.len() < 2500, "{output:#?}");
                assert_eq!((plugin.count("ADD"), plugin.count("DEL")), (n + 1, n + 1));
            }
            before.assert_unchanged();
        },
    );
}
