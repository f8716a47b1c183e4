//! Attempts of one pod: who gets the network, and how often the real plugins are asked.

use std::fs;
use std::time::Duration;

use serde_json::json;

use crate::kit::{self, Attempt, BOUND, bridge, calls, settings, snapshot, until};
use crate::owed_kit::kill;
use crate::support::fake::Act;
use crate::support::{eventually, podvisor, sandboxed};

const SOON: Duration = Duration::from_millis(500);

#[test]
fn a_quick_network_is_the_attempts_own_and_goes_with_it() {
    sandboxed(
        "attempts::a_quick_network_is_the_attempts_own_and_goes_with_it",
        || {
            settings(30.0);
            let (plugin, list) = bridge();
            let before = snapshot();
            let pod = Attempt::of("web", "a1", &list);
            let given = fs::metadata(&pod.netns).unwrap();
            let said = pod.add().ok();
            pod.has(&said.ip());
            use std::os::unix::fs::MetadataExt;
            assert_ne!(fs::metadata(&pod.netns).unwrap().ino(), given.ino());
            let sandbox = &said.answer["interfaces"][2]["sandbox"];
            assert_eq!(sandbox, &json!(pod.netns), "{:?}", said.answer);
            // One mount at the daemon's path, as it made it.
            let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
            let at = pod.netns.to_str().unwrap();
            assert_eq!(mounts.matches(&format!(" {at} ")).count(), 1, "{mounts}");
            let add = &plugin.calls_of("ADD")[0];
            assert_eq!(add.var("CNI_CONTAINERID"), "a1");
            assert!(add.var("CNI_NETNS").starts_with("/run/podvisor/netns/"));
            assert_eq!(add.var("CNI_ARGS"), pod.args);
            until("web", "");
            eventually(BOUND, "the job has left", || {
                kit::jobs().is_empty().then_some(())
            });
            // It is in use: nothing of it is anybody's to clean up.
            let gc = podvisor(&["gc"]).ok();
            assert_eq!(gc.stdout, "", "{gc:?}");
            pod.call("CHECK").ok();
            pod.del().ok();
            calls(&plugin, 1, 1);
            pod.del().ok();
            let unknown = Attempt {
                netns: "".into(),
                ..Attempt::of("web", "a2", &list)
            };
            pod.forget();
            calls(&plugin, 1, 1);
            unknown.del().ok();
            Attempt {
                netns: "/run/netns/cni-a2".into(),
                ..unknown
            }
            .forget();
            before.assert_unchanged();
        },
    );
}

/// FL-001.
#[test]
fn the_second_attempt_joins_the_work_of_the_first() {
    sandboxed(
        "attempts::the_second_attempt_joins_the_work_of_the_first",
        || {
            settings(30.0);
            let (plugin, list) = bridge();
            plugin.on("ADD", &[Act::Sleep(4.0)]);
            let before = snapshot();
            let first = Attempt::of("web", "a1", &list);
            let told = first.give_up(Duration::from_millis(1500));
            assert!(
                told.contains("pod apps/web (uid uid-web)") && told.contains("stage cni-add"),
                "{told}"
            );
            let parked = first.del().ok();
            assert!(parked.took < Duration::from_secs(2), "{parked:?}");
            first.forget();
            until("web", "network starting");
            let second = Attempt::of("web", "a2", &list);
            let said = second.add().ok();
            second.has(&said.ip());
            calls(&plugin, 1, 0);
            second.end();
            calls(&plugin, 1, 1);
            let del = &plugin.calls_of("DEL")[0];
            let add = &plugin.calls_of("ADD")[0];
            for name in ["CNI_CONTAINERID", "CNI_NETNS", "CNI_ARGS"] {
                assert_eq!(del.var(name), add.var(name), "{name}");
            }
            before.assert_unchanged();
        },
    );
}

/// FL-002, FL-013.
#[test]
fn what_is_ready_when_nobody_is_there_waits_for_the_next_attempt() {
    sandboxed(
        "attempts::what_is_ready_when_nobody_is_there_waits_for_the_next_attempt",
        || {
            settings(30.0);
            let (plugin, list) = bridge();
            plugin.on("ADD", &[Act::Sleep(1.0)]);
            let before = snapshot();
            let first = Attempt::of("web", "a1", &list);
            first.give_up(SOON);
            first.end();
            until("web", "network parked");
            let shown = podvisor(&["inspect", "web"]).ok().stdout;
            assert!(shown.contains("network parked"), "{shown}");
            let second = Attempt::of("web", "a2", &list);
            let said = second.add().ok();
            assert!(said.took < Duration::from_secs(3), "{said:?}");
            second.has(&said.ip());
            second.end();
            calls(&plugin, 1, 1);
            before.assert_unchanged();
        },
    );
}

#[test]
fn what_nobody_comes_for_is_undone() {
    sandboxed("attempts::what_nobody_comes_for_is_undone", || {
        settings(0.5);
        let (plugin, list) = bridge();
        plugin.on("ADD", &[Act::Sleep(1.0)]);
        let before = snapshot();
        let first = Attempt::of("web", "a1", &list);
        first.give_up(SOON);
        first.end();
        calls(&plugin, 1, 1);
        before.assert_unchanged();
    });
}

#[test]
fn another_configuration_is_begun_anew() {
    sandboxed("attempts::another_configuration_is_begun_anew", || {
        settings(30.0);
        let (plugin, list) = bridge();
        plugin.on("ADD", &[Act::Sleep(1.0)]);
        let before = snapshot();
        let first = Attempt::of("web", "a1", &list);
        first.give_up(SOON);
        first.end();
        until("web", "network parked");
        let mut other = list.clone();
        other["plugins"][0]["mtu"] = 1400.into();
        let second = Attempt::of("web", "a2", &other);
        let said = second.add().ok();
        second.has(&said.ip());
        assert!(second.ip(&["link", "show", "eth0"]).contains("mtu 1400"));
        calls(&plugin, 2, 1);
        second.end();
        calls(&plugin, 2, 2);
        before.assert_unchanged();
    });
}

#[test]
fn an_attempt_that_has_waited_long_enough_is_told_the_stage() {
    sandboxed(
        "attempts::an_attempt_that_has_waited_long_enough_is_told_the_stage",
        || {
            settings(30.0);
            let (plugin, list) = bridge();
            plugin.on("ADD", &[Act::Sleep(3.0)]);
            let before = snapshot();
            let mut first = Attempt::of("web", "a1", &list);
            first.conf["answerAfter"] = 1.0.into();
            let said = first.add();
            assert_eq!(said.answer["code"], 11, "{said:?}");
            let text = said.failed();
            for part in ["pod apps/web (uid uid-web)", "stage cni-add", "ask again"] {
                assert!(text.contains(part), "{text}");
            }
            first.end();
            let second = Attempt::of("web", "a2", &list);
            second.add().ok();
            second.end();
            calls(&plugin, 1, 1);
            before.assert_unchanged();
        },
    );
}

#[test]
fn a_slow_job_leaves_the_daemons_cgroup() {
    sandboxed("attempts::a_slow_job_leaves_the_daemons_cgroup", || {
        settings(0.5);
        let (plugin, list) = bridge();
        plugin.on("ADD", &[Act::Sleep(4.0)]);
        let before = snapshot();
        let first = Attempt::of("web", "a1", &list);
        first.give_up(Duration::from_millis(1500));
        let jobs = kit::jobs();
        assert_eq!(jobs.len(), 1, "{jobs:?}");
        eventually(BOUND, "another cgroup", || {
            let groups = fs::read_to_string(format!("/proc/{}/cgroup", jobs[0])).unwrap();
            groups.contains("/podvisor/cni-").then_some(())
        });
        let plugin_pid = plugin.calls_of("ADD")[0].pid;
        let groups = fs::read_to_string(format!("/proc/{plugin_pid}/cgroup")).unwrap();
        assert!(groups.contains("/podvisor/cni-"), "{groups}");
        first.end();
        calls(&plugin, 1, 1);
        // Of a job that is killed the group is left, until the next collection.
        let killed = Attempt::of("other", "b1", &list);
        killed.give_up(Duration::from_millis(1500));
        kill(kit::jobs()[0]);
        podvisor(&["gc"]).ok();
        killed.end();
        before.assert_unchanged();
    });
}
