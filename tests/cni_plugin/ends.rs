//! Ends: ADDs and DELs that fail or hang, callers that die, reboots.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::kit::{self, Attempt, BOUND, bridge, calls, settings, snapshot, until};
use crate::owed_kit;
use crate::support::fake::{self, Act};
use crate::support::{Scope, bin, eventually, podvisor, sandboxed};

const SOON: Duration = Duration::from_millis(700);

/// FL-019: the first ADD had made the interface before it failed.
#[test]
fn a_failure_is_told_at_once_and_undone() {
    sandboxed("ends::a_failure_is_told_at_once_and_undone", || {
        settings(30.0);
        let (plugin, list) = bridge();
        plugin.on(
            "ADD",
            &[
                Act::Stderr("no room left in this net".into()),
                Act::AfterReal,
                Act::Exit(3),
            ],
        );
        let before = snapshot();
        let first = Attempt::of("web", "a1", &list);
        let text = first.add().failed();
        for part in [
            "pod apps/web",
            "\"bridge\" (ADD)",
            "exited with 3",
            "no room left",
        ] {
            assert!(text.contains(part), "{text}");
        }
        first.end();
        calls(&plugin, 1, 1);
        plugin.on("ADD", &[]);
        let second = Attempt::of("web", "a2", &list);
        second.add().ok();
        second.end();
        calls(&plugin, 2, 2);
        before.assert_unchanged();
    });
}

#[test]
fn a_del_that_fails_is_told_and_goes_on_until_it_works() {
    sandboxed(
        "ends::a_del_that_fails_is_told_and_goes_on_until_it_works",
        || {
            settings(30.0);
            let (plugin, list) = bridge();
            let before = snapshot();
            let pod = Attempt::of("web", "a1", &list);
            pod.add().ok();
            plugin.on("DEL", &[Act::Stderr("not today".into()), Act::Exit(1)]);
            let text = pod.del().failed();
            assert!(
                text.contains("clean-up pending") && text.contains("not today"),
                "{text}"
            );
            until("web", "network ending");
            // The daemon asks again, and is told again.
            assert!(pod.del().failed().contains("not today"));
            plugin.on("DEL", &[]);
            eventually(BOUND, "the DEL", || {
                (pod.del().code == Some(0)).then_some(())
            });
            pod.forget();
            until("web", "");
            before.assert_unchanged();
        },
    );
}

#[test]
fn killing_a_del_does_not_stop_it_and_the_next_one_joins() {
    sandboxed(
        "ends::killing_a_del_does_not_stop_it_and_the_next_one_joins",
        || {
            settings(30.0);
            let (plugin, list) = bridge();
            let before = snapshot();
            let pod = Attempt::of("web", "a1", &list);
            pod.add().ok();
            plugin.on("DEL", &[Act::Sleep(3.0)]);
            pod.give_up_at("DEL", SOON);
            pod.del().ok();
            calls(&plugin, 1, 1);
            pod.end();
            calls(&plugin, 1, 1);
            before.assert_unchanged();
        },
    );
}

#[test]
fn a_job_whose_adds_hang_is_ended_by_hand() {
    sandboxed("ends::a_job_whose_adds_hang_is_ended_by_hand", || {
        settings(30.0);
        let (plugin, list) = bridge();
        plugin.on("ADD", &[Act::Sleep(1000.0)]);
        let before = snapshot();
        let first = Attempt::of("web", "a1", &list);
        first.give_up(SOON);
        first.end();
        until("web", "network starting");
        let shown = podvisor(&["inspect", "web"]).ok().stdout;
        assert!(shown.contains("stage cni-add"), "{shown}");
        podvisor(&["rm", "-f", "web"]).ok();
        calls(&plugin, 1, 1);
        before.assert_unchanged();
    });
}

/// FL-012: the plugin's caller is gone when the result is there.
#[test]
fn a_result_that_nobody_can_be_told_is_for_the_next_attempt() {
    sandboxed(
        "ends::a_result_that_nobody_can_be_told_is_for_the_next_attempt",
        || {
            settings(30.0);
            let (plugin, list) = bridge();
            plugin.on("ADD", &[Act::Sleep(1.0)]);
            let before = snapshot();
            let first = Attempt::of("web", "a1", &list);
            let mut child = first
                .command("ADD")
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .stderr(Stdio::null())
                .spawn()
                .unwrap();
            use std::io::Write;
            let mut stdin = child.stdin.take().unwrap();
            stdin.write_all(first.conf.to_string().as_bytes()).unwrap();
            drop((stdin, child.stdout.take()));
            assert!(!child.wait().unwrap().success());
            first.end();
            until("web", "network parked");
            let second = Attempt::of("web", "a2", &list);
            let said = second.add().ok();
            second.has(&said.ip());
            second.end();
            calls(&plugin, 1, 1);
            before.assert_unchanged();
        },
    );
}

/// ADD by a caller that ends with it, as a daemon that is killed does.
fn add_by_the_dead(pod: &Attempt) {
    let mut command = Command::new("sh");
    command.args(["-c", &format!("{} >/dev/null; exit 0", kit::PLUGIN)]);
    let plain = pod.command("ADD");
    command.env_clear();
    for (name, value) in plain.get_envs() {
        command.env(name, value.unwrap_or_default());
    }
    bin::run_with(&mut command, Some(pod.conf.to_string().as_bytes()), BOUND).ok();
}

/// The daemon was killed between the ADD and the sandbox: its next life knows nothing of it and makes another attempt.
#[test]
fn a_network_whose_daemon_died_with_the_attempt_is_the_next_ones() {
    sandboxed(
        "ends::a_network_whose_daemon_died_with_the_attempt_is_the_next_ones",
        || {
            settings(30.0);
            let (plugin, list) = bridge();
            let before = snapshot();
            let first = Attempt::of("web", "a1", &list);
            add_by_the_dead(&first);
            let second = Attempt::of("web", "a2", &list);
            let said = second.add().ok();
            second.has(&said.ip());
            calls(&plugin, 1, 0);
            // Late, and of one that has it no more.
            first.end();
            calls(&plugin, 1, 0);
            second.has(&said.ip());
            second.end();
            calls(&plugin, 1, 1);
            before.assert_unchanged();
        },
    );
}

#[test]
fn a_network_with_a_process_in_it_stays_whose_it_is() {
    sandboxed(
        "ends::a_network_with_a_process_in_it_stays_whose_it_is",
        || {
            settings(30.0);
            let (plugin, list) = bridge();
            let before = snapshot();
            let first = Attempt::of("web", "a1", &list);
            add_by_the_dead(&first);
            let mut process = Command::new("nsenter")
                .arg(format!("--net={}", first.netns.display()))
                .args(["sleep", "1000"])
                .spawn()
                .unwrap();
            let inside = format!("/proc/{}/ns/net", process.id());
            eventually(BOUND, "the process is inside", || {
                use std::os::unix::fs::MetadataExt;
                let of = |path: &str| std::fs::metadata(path).map(|m| m.ino()).ok();
                (of(&inside) == of(first.netns.to_str().unwrap())).then_some(())
            });
            let second = Attempt::of("web", "a2", &list);
            let said = second.add().ok();
            calls(&plugin, 2, 0);
            first.has("10.97.1.");
            second.has(&said.ip());
            process.kill().unwrap();
            process.wait().unwrap();
            first.end();
            second.end();
            calls(&plugin, 2, 2);
            before.assert_unchanged();
        },
    );
}

#[test]
fn a_reboot_leaves_a_del_that_gc_sends() {
    sandboxed("ends::a_reboot_leaves_a_del_that_gc_sends", || {
        settings(30.0);
        let (plugin, list) = bridge();
        let before = snapshot();
        let pod = Attempt::of("web", "a1", &list);
        pod.add().ok();
        plugin.on("ADD", &[Act::Sleep(1.0)]);
        let waits = Attempt::of("other", "b1", &list);
        waits.give_up(SOON);
        waits.end();
        until("other", "network parked");
        nix::mount::umount2(&pod.netns, nix::mount::MntFlags::MNT_DETACH).unwrap();
        let boot = owed_kit::reboot(1);
        let shown = boot.podvisor(&["ps", "-a"]).ok().stdout;
        assert_eq!(shown.matches("network pending").count(), 2, "{shown}");
        boot.podvisor(&["gc", "--boot"]).ok();
        calls(&plugin, 2, 2);
        for del in plugin.calls_of("DEL") {
            assert_eq!(del.var("CNI_NETNS"), "");
        }
        std::fs::create_dir_all("/run/netns").unwrap();
        std::fs::create_dir_all("/run/podvisor").unwrap();
        std::fs::create_dir_all("/run/podvisor/netns").unwrap();
        before.assert_unchanged();
    });
}

#[test]
fn after_a_reboot_the_daemons_del_finds_the_network() {
    sandboxed(
        "ends::after_a_reboot_the_daemons_del_finds_the_network",
        || {
            settings(30.0);
            let (plugin, list) = bridge();
            plugin.on("ADD", &[Act::Sleep(1.0)]);
            let before = snapshot();
            let first = Attempt::of("web", "a1", &list);
            first.give_up(SOON);
            first.end();
            until("web", "network parked");
            let mut second = Attempt::of("web", "a2", &list);
            second.add().ok();
            nix::mount::umount2(&second.netns, nix::mount::MntFlags::MNT_DETACH).unwrap();
            let boot = owed_kit::reboot(1);
            second.netns = "".into();
            second.env.push(boot.variable());
            second.del().ok();
            calls(&plugin, 1, 1);
            let del = &plugin.calls_of("DEL")[0];
            assert_eq!(
                (del.var("CNI_CONTAINERID"), del.var("CNI_NETNS")),
                ("a1", "")
            );
            std::fs::create_dir_all("/run/netns").unwrap();
            std::fs::create_dir_all("/run/podvisor/netns").unwrap();
            before.assert_unchanged();
        },
    );
}

/// What was told at the ADD is on record; a daemon that has moved its plugins meanwhile is heard first.
#[test]
fn a_del_finds_the_plugins_where_the_add_found_them_or_where_they_are_today() {
    sandboxed(
        "ends::a_del_finds_the_plugins_where_the_add_found_them_or_where_they_are_today",
        || {
            settings(30.0);
            let (then, today) = (Path::new("/run/plugins-then"), Path::new("/run/plugins"));
            std::fs::create_dir(then).unwrap();
            let plugin = fake::plugin(then, "net");
            let list = serde_json::json!({"cniVersion": "1.0.0", "name": "pods", "plugins": [{"type": "net"}]});
            let before = snapshot();
            let add = |name: &str, id: &str| {
                let mut pod = Attempt::of(name, id, &list);
                pod.env
                    .push(("CNI_PATH".into(), then.display().to_string()));
                pod.add().ok();
                pod
            };
            let pod = add("web", "a1");
            let mut moved = add("other", "b1");
            nix::mount::umount2(&pod.netns, nix::mount::MntFlags::MNT_DETACH).unwrap();
            std::fs::rename(then, today).unwrap();
            moved.env = vec![("CNI_PATH".into(), today.display().to_string())];
            moved.end();
            calls(&plugin, 2, 1);
            std::fs::rename(today, then).unwrap();
            let boot = owed_kit::reboot(1);
            boot.podvisor(&["gc", "--boot"]).ok();
            calls(&plugin, 2, 2);
            assert_eq!(plugin.calls_of("DEL")[1].var("CNI_CONTAINERID"), "a1");
            std::fs::remove_dir_all(then).unwrap();
            std::fs::create_dir_all("/run/netns").unwrap();
            std::fs::create_dir_all("/run/podvisor/netns").unwrap();
            before.assert_unchanged();
        },
    );
}

/// FL-040: files cut to nothing or to half.
#[test]
fn damaged_records_stop_no_del() {
    sandboxed("ends::damaged_records_stop_no_del", || {
        settings(30.0);
        let (plugin, list) = bridge();
        // What the DEL is made of when the record has lost it: the configuration, in which the plugin may stand.
        let wrapped = serde_json::json!({"cniVersion": "1.0.0", "name": "pods", "plugins": [
            {"type": "podvisor-cni", "plugins": list["plugins"]}]});
        std::fs::write("/etc/cni/net.d/10-pods.conflist", wrapped.to_string()).unwrap();
        // Which pod's key it had went with pod.json: a link that leads nowhere is found by nobody, and goes with the boot.
        let before = Scope::default()
            .within(Duration::from_secs(20))
            .allow("state /run/podvisor/.keys/")
            .take();
        let mut lives = 0;
        for name in ["pod.json", "add-started.json", "result.json", "owner.json"] {
            for half in [false, true] {
                let pod = Attempt::of(&format!("web{lives}"), &format!("a{lives}"), &list);
                pod.add().ok();
                let records = std::fs::read_dir("/var/lib/podvisor/networks").unwrap();
                let record = records.flatten().next().unwrap().path();
                let file = record.join(name);
                let whole = std::fs::read(&file).unwrap();
                let length = if half { whole.len() / 2 } else { 0 };
                std::fs::write(&file, &whole[..length]).unwrap();
                lives += 1;
                pod.end();
                calls(&plugin, lives, lives);
                let left: Vec<_> = std::fs::read_dir("/var/lib/podvisor/networks")
                    .unwrap()
                    .collect();
                assert!(left.is_empty(), "{name} {half}: {left:?}");
            }
        }
        before.assert_unchanged();
    });
}

/// FL-036: somebody took the pod's netns away, the daemon's and ours.
#[test]
fn a_netns_that_was_taken_away_stops_no_del() {
    sandboxed("ends::a_netns_that_was_taken_away_stops_no_del", || {
        settings(30.0);
        let (plugin, list) = bridge();
        let before = snapshot();
        let mut pod = Attempt::of("web", "a1", &list);
        pod.add().ok();
        let own = plugin.calls_of("ADD")[0].var("CNI_NETNS").to_owned();
        for path in [pod.netns.to_str().unwrap(), &own] {
            nix::mount::umount2(path, nix::mount::MntFlags::MNT_DETACH).unwrap();
            std::fs::remove_file(path).unwrap();
        }
        pod.netns = "".into();
        pod.del().ok();
        calls(&plugin, 1, 1);
        assert_eq!(plugin.calls_of("DEL")[0].var("CNI_NETNS"), "");
        before.assert_unchanged();
    });
}

/// FL-045: `ip netns add` makes /run/netns a mount of itself, over what the daemon has there.
#[test]
fn a_directory_of_netns_that_was_mounted_over_changes_nothing_for_the_pods() {
    sandboxed(
        "ends::a_directory_of_netns_that_was_mounted_over_changes_nothing_for_the_pods",
        || {
            settings(30.0);
            let (plugin, list) = bridge();
            let before = snapshot();
            let first = Attempt::of("web", "a1", &list);
            let one = first.add().ok();
            crate::support::sh("ip netns add other");
            let second = Attempt::of("web2", "a2", &list);
            let two = second.add().ok();
            first.has(&one.ip());
            second.has(&two.ip());
            first.del().ok();
            second.del().ok();
            calls(&plugin, 2, 2);
            second.forget();
            // The daemon cannot remove what it made before, as without us; whoever mounted there can let it.
            crate::support::sh("ip netns del other; umount -l /run/netns");
            first.forget();
            before.assert_unchanged();
        },
    );
}
