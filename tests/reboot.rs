//! Reboots, wiped runtime directories and random kills: what is owed is sent, once, and no address is lost.
#![allow(clippy::unwrap_used, clippy::expect_used)]

#[path = "owed/kit.rs"]
mod kit;
mod support;

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use kit::{BOUND, configure, create, kill, reboot, state};
use serde_json::json;
use support::fake::{self, Act};
use support::{Snapshot, cni, eventually, podvisor, sandboxed};

/// FL-037: one DEL for each pod of the boot before, with an empty netns.
#[test]
fn after_a_reboot_gc_sends_each_del_once_without_a_netns() {
    sandboxed(
        "after_a_reboot_gc_sends_each_del_once_without_a_netns",
        || {
            let plugin = kit::fake_network("pods", "net");
            let before = Snapshot::take();
            let mut ids = ["a", "b", "c"].map(|name| create(name, "pods"));
            let boot = reboot(1);
            let dry = boot.podvisor(&["gc", "--dry-run"]).ok();
            assert_eq!(
                dry.stdout.matches("would undo: network of pod").count(),
                3,
                "{dry:?}"
            );
            assert_eq!(plugin.count("DEL"), 0);
            boot.podvisor(&["gc", "--boot"]).ok();
            boot.podvisor(&["gc", "--boot"]).ok();
            let calls = plugin.calls_of("DEL");
            let mut told: Vec<&str> = calls.iter().map(|c| c.var("CNI_CONTAINERID")).collect();
            told.sort_unstable();
            ids.sort_unstable();
            assert_eq!(told, ids);
            assert!(calls.iter().all(|c| c.var("CNI_NETNS").is_empty()));
            assert!(kit::records().is_empty());
            before.assert_unchanged();
        },
    );
}

/// FL-038: a DEL that fails after the reboot stops nothing.
#[test]
fn a_del_that_fails_after_a_reboot_is_listed_and_stops_no_pod() {
    sandboxed(
        "a_del_that_fails_after_a_reboot_is_listed_and_stops_no_pod",
        || {
            let plugin = kit::fake_network("pods", "net");
            let before = Snapshot::take();
            create("old", "pods");
            let boot = reboot(1);
            plugin.on(
                "DEL",
                &[
                    Act::Stderr("cannot open netns: no such file".into()),
                    Act::Exit(1),
                ],
            );
            let out = boot.podvisor(&["gc", "--boot"]).ok();
            assert!(
                out.stderr.contains("not undone: network of pod old"),
                "{out:?}"
            );
            boot.podvisor(&["gc"]).code_is(1);
            boot.podvisor(&["create", "--name", "new", "--net", "pods"])
                .ok();
            let listed = boot.podvisor(&["ps", "-a"]).ok().stdout;
            assert!(
                listed.contains("network pending") && listed.contains("ready"),
                "{listed}"
            );
            plugin.on("DEL", &[]);
            boot.podvisor(&["rm", "old"]).ok();
            boot.podvisor(&["rm", "-f", "new"]).ok();
            before.assert_unchanged();
        },
    );
}

/// The next supervisor does it where no unit is installed.
#[test]
fn without_gc_the_first_pod_after_a_reboot_sends_what_is_owed() {
    sandboxed(
        "without_gc_the_first_pod_after_a_reboot_sends_what_is_owed",
        || {
            let plugin = kit::fake_network("pods", "net");
            let before = Snapshot::take();
            create("old", "pods");
            let boot = reboot(1);
            boot.podvisor(&["create", "--name", "new", "--net", "pods"])
                .ok();
            eventually(BOUND, "the old pod's DEL", || {
                (plugin.count("DEL") == 1).then_some(())
            });
            boot.podvisor(&["rm", "-f", "new"]).ok();
            before.assert_unchanged();
        },
    );
}

/// FL-037: a /29 has five addresses for pods.
#[test]
fn a_small_subnet_survives_ten_reboots_with_pods_running() {
    sandboxed(
        "a_small_subnet_survives_ten_reboots_with_pods_running",
        || {
            kit::small_subnet("pods");
            let before = Snapshot::take();
            let mut boot = reboot(0);
            for count in 1..=10 {
                for name in ["a", "b", "c"] {
                    boot.podvisor(&["create", "--name", name, "--net", "pods"])
                        .ok();
                }
                assert_eq!(kit::leases("pods").len(), 3);
                boot = reboot(count);
                boot.podvisor(&["gc", "--boot"]).ok();
                assert!(
                    kit::leases("pods").is_empty(),
                    "boot {count}: {:?}",
                    kit::leases("pods")
                );
            }
            before.assert_unchanged();
        },
    );
}

/// FL-042: leases in use are pods alive, whenever a supervisor is killed.
fn random_kills(cycles: u32) {
    configure("[cni]\nkeeper_time = 5.0\n");
    kit::small_subnet("pods");
    let before = Snapshot::take();
    // The same moments in every run.
    let mut seed: u64 = 0x5eed;
    let mut next = || {
        seed = seed
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        seed >> 33
    };
    for cycle in 0..cycles {
        let name = format!("p{cycle}");
        let mut making = Command::new(support::bin::PODVISOR)
            .args(["create", "--name", &name, "--net", "pods"])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        std::thread::sleep(Duration::from_millis(next() % 250));
        for pid in kit::supervisors() {
            kill(pid);
        }
        if next() % 2 == 0 {
            let _ = making.kill();
        }
        making.wait().unwrap();
        let mut args = vec!["rm", "-f", &name];
        if next() % 2 == 0 {
            args = vec!["gc"];
        }
        podvisor(&args);
        podvisor(&["rm", "-f", &name]);
        assert!(
            kit::leases("pods").is_empty(),
            "cycle {cycle} {args:?}: {:?}",
            kit::leases("pods")
        );
    }
    eventually(BOUND, "the end of all supervisors", || {
        kit::supervisors().is_empty().then_some(())
    });
    before.assert_unchanged();
}

#[test]
fn a_small_subnet_survives_sixty_random_kills() {
    sandboxed("a_small_subnet_survives_sixty_random_kills", || {
        random_kills(60)
    });
}

#[test]
#[ignore = "slow: five hundred cycles"]
fn a_small_subnet_survives_five_hundred_random_kills_slow() {
    sandboxed(
        "a_small_subnet_survives_five_hundred_random_kills_slow",
        || random_kills(500),
    );
}

/// Where a supervisor is killed, how, and which DELs are owed then.
struct Kill {
    what: &'static str,
    /// Which plugin of the chain kills, at which command, and whether before or after its work.
    at: (&'static str, &'static str, bool),
    owed: usize,
}

/// The marker exists before what it describes, whatever is wiped: exactly what is owed is sent.
#[test]
fn a_kill_at_any_moment_and_a_wiped_directory_leave_exactly_the_owed_del() {
    sandboxed(
        "a_kill_at_any_moment_and_a_wiped_directory_leave_exactly_the_owed_del",
        || {
            let moments = [
                Kill {
                    // Versions are asked for when the netns is pinned and nothing is on record but whose it is.
                    what: "before add-started",
                    at: ("two", "VERSION", true),
                    owed: 0,
                },
                Kill {
                    what: "in the first plugin, before its work",
                    at: ("one", "ADD", false),
                    owed: 1,
                },
                Kill {
                    what: "between the plugins",
                    at: ("one", "ADD", true),
                    owed: 1,
                },
                Kill {
                    what: "after the last, before the result",
                    at: ("two", "ADD", true),
                    owed: 1,
                },
            ];
            for moment in moments {
                for by_rm in [false, true] {
                    kill_at(&moment, by_rm);
                }
            }
        },
    );
}

fn kill_at(moment: &Kill, by_rm: bool) {
    let [one, two] = ["one", "two"].map(|n| fake::plugin(Path::new(cni::PLUGINS), n));
    cni::network("pods", vec![json!({"type": "one"}), json!({"type": "two"})]).write();
    let before = Snapshot::take();
    let (plugin, command, after) = moment.at;
    kill_parent(plugin, command, after);
    let made = podvisor(&["create", "--name", "web", "--net", "pods"]);
    assert_ne!(made.code, Some(0), "{}: {made:?}", moment.what);
    for pid in kit::supervisors() {
        kill(pid);
    }
    // What the command had undone by itself on its failure counts as sent.
    if !kit::records().is_empty() {
        let _ = fs::remove_dir_all("/run/podvisor/default");
        if by_rm && state("web") == "network pending" {
            podvisor(&["rm", "web"]).ok();
        }
    }
    podvisor(&["gc"]).ok();
    podvisor(&["gc"]).ok();
    for (name, plugin) in [("one", &one), ("two", &two)] {
        let sent = plugin.count("DEL");
        assert_eq!(
            sent, moment.owed,
            "{} (by rm: {by_rm}): DELs of {name}",
            moment.what
        );
    }
    assert!(kit::records().is_empty(), "{}", moment.what);
    before.assert_unchanged();
}

/// Puts a plugin in front of a fake that kills its supervisor at a command, before or after the fake's work.
fn kill_parent(plugin: &str, command: &str, after: bool) {
    let path = Path::new(cni::PLUGINS).join(plugin);
    let fake = Path::new(cni::PLUGINS).join(format!(".fake-{plugin}"));
    fs::rename(&path, &fake).unwrap();
    let kill = format!(
        r#"[ "$CNI_COMMAND" != {command} ] || kill -KILL $(pgrep -f containerd-shim-podvisor)"#
    );
    let run = format!("{} </dev/stdin", fake.display());
    let script = match after {
        true => format!(
            "#!/bin/bash\nout=$({run}); code=$?\n{kill}\nprintf '%s' \"$out\"; exit $code\n"
        ),
        false => format!("#!/bin/bash\n{kill}\nexec {run}\n"),
    };
    fs::write(&path, script).unwrap();
    fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
}
