//! Creations that fail, and one that needs nothing which could.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use crate::joining::{closed, open, until_state};
use crate::rig::{self, BOUND, Pod, called, kill};
use crate::support::fake::Act;
use crate::support::{Snapshot, cni, eventually, podvisor, rootfs, run, sandboxed, slow};

/// FL-011: every failed creation leaves an infra process or a monitor behind.
#[test]
fn fifty_creations_whose_plugin_fails_leave_nothing() {
    sandboxed(
        "failing::fifty_creations_whose_plugin_fails_leave_nothing",
        || {
            let plugin = rig::fake_network();
            plugin.on("ADD", &[Act::Stderr("out of luck".into()), Act::Exit(1)]);
            let rootfs = rootfs::make();
            let before = Snapshot::take();
            for _ in 0..50 {
                let asked = ["run", "--rootfs", rootfs.str(), "--", "/bin/true"];
                let output = podvisor(&asked).code_is(125).fails_with("out of luck");
                assert!(output.stderr.contains("\"fake\""), "{output:?}");
            }
            before.assert_unchanged();
            assert_eq!((plugin.count("ADD"), plugin.count("DEL")), (50, 50));
        },
    );
}

/// FL-014: a plugin that hangs is killed at its bound, and the creation fails: that is no impatience of the caller's.
#[test]
fn a_plugin_killed_at_its_bound_fails_the_creation_which_leaves_nothing() {
    sandboxed(
        "failing::a_plugin_killed_at_its_bound_fails_the_creation_which_leaves_nothing",
        || {
            rig::settings("[cni]\nadd_timeout = 1.0\n");
            let plugin = rig::fake_network();
            plugin.on("ADD", &[Act::IgnoreTerm, Act::Sleep(300.0)]);
            let before = Snapshot::take();
            let output = podvisor(&["create", "--name", "web"]).code_is(125);
            for part in ["\"fake\"", "ADD", "1.0 s"] {
                assert!(output.stderr.contains(part), "{output:?}");
            }
            assert!(!output.stderr.contains("goes on"), "{output:?}");
            before.assert_unchanged();
            assert_eq!((plugin.count("ADD"), plugin.count("DEL")), (1, 1));
        },
    );
}

/// FL-023: a pod on the host's network needs no network configuration.
#[test]
fn a_pod_on_the_hosts_network_needs_no_configuration_and_calls_no_plugin() {
    sandboxed(
        "failing::a_pod_on_the_hosts_network_needs_no_configuration_and_calls_no_plugin",
        || {
            // Installed and called by nobody.
            let plugin = crate::support::fake::plugin(Path::new(cni::PLUGINS), "fake");
            let rootfs = rootfs::make();
            assert_eq!(fs::read_dir(cni::CONFIGS).unwrap().count(), 0);
            let before = Snapshot::take();
            let asked = [
                "--rootfs",
                rootfs.str(),
                "--net",
                "host",
                "--name",
                "agent",
                "-d",
            ];
            podvisor(&[&["run"], &asked[..], &["--", "/bin/sleep", "100"]].concat()).ok();
            let pid = podvisor(&["inspect", "agent"]).ok().stdout;
            assert!(pid.contains("agent"), "{pid}");
            podvisor(&["stop", "-t", "1", "agent"]).ok();
            podvisor(&["rm", "agent"]).ok();
            before.assert_unchanged();

            let pod = Pod::launch("p1");
            let probe = pod.probe();
            probe.create("p1", &rig::host_config("p1")).unwrap();
            let pid = probe.start("p1", BOUND).unwrap();
            let netns = |pid: &str| fs::read_link(format!("/proc/{pid}/ns/net")).unwrap();
            assert_eq!(netns(&pid.to_string()), netns("self"));
            pod.end();
            before.assert_unchanged();
            assert_eq!(plugin.calls().len(), 0);
        },
    );
}

/// FL-024: the netns that ADD works in hangs on no process.
#[test]
fn a_netns_is_pinned_by_its_own_mount_while_the_plugin_works() {
    sandboxed(
        "failing::a_netns_is_pinned_by_its_own_mount_while_the_plugin_works",
        || {
            let plugin = rig::fake_network();
            let before = Snapshot::take();
            let gate = closed(&plugin);
            let pod = Pod::create("p1");
            let caller = pod.start_aside(BOUND);
            called(&plugin, "ADD", 1);
            let netns = plugin.calls_of("ADD")[0].var("CNI_NETNS").to_owned();
            assert!(pod.record().unwrap().infra.is_none());
            assert_eq!(rig::netns_mounts(), 1);
            let mut enter = Command::new("nsenter");
            enter.args([&format!("--net={netns}"), "ip", "-o", "link"]);
            let links = run(&mut enter, BOUND).ok().stdout;
            assert!(links.contains("lo:") && links.contains(",UP"), "{links}");
            open(&gate);
            caller.join().unwrap().unwrap();
            pod.end();
            before.assert_unchanged();
            assert_eq!(plugin.calls_of("DEL")[0].var("CNI_NETNS"), netns);
        },
    );
}

/// FL-024: the infra process dies as soon as it is there; whoever asks is told so, and of which signal.
#[test]
fn an_infra_process_killed_while_its_pod_comes_up_is_told_with_its_signal() {
    sandboxed(
        "failing::an_infra_process_killed_while_its_pod_comes_up_is_told_with_its_signal",
        || {
            let plugin = rig::fake_network();
            let before = Snapshot::take();
            let rounds = if slow() { 100 } else { 12 };
            for round in 1..=rounds {
                let id = format!("p{round}");
                let pod = Pod::create(&id);
                let caller = pod.start_aside(BOUND);
                let infra = until_infra(&pod);
                // From at once to well after it is ready.
                std::thread::sleep(Duration::from_millis(2) * (round - 1));
                kill(infra);
                match caller.join().unwrap() {
                    Err(error) => {
                        let text = error.to_string();
                        assert!(text.contains("infra process"), "{text}");
                        assert!(
                            text.contains("signal 9") || text.contains("SIGKILL"),
                            "{text}"
                        );
                    }
                    Ok(_) => {
                        until_state(&pod, "NotReady");
                        let reason = pod.record().unwrap().reason.unwrap();
                        assert!(
                            reason.contains("the infra process ended by itself (signal 9)"),
                            "{reason}"
                        );
                        assert_eq!(pod.probe().status(&id).unwrap().0, "SANDBOX_NOTREADY");
                        assert_eq!(pod.probe().wait(&id).unwrap(), 137);
                    }
                }
                eventually(BOUND, "the network is taken down", || {
                    (plugin.count("DEL") == round as usize && rig::netns_mounts() == 0)
                        .then_some(())
                });
                pod.end();
                before.assert_unchanged();
                assert_eq!(
                    (plugin.count("ADD"), plugin.count("DEL")),
                    (round as usize, round as usize)
                );
            }
        },
    );
}

/// The infra process as soon as it is on record, which is before it may run.
fn until_infra(pod: &Pod) -> i32 {
    let end = std::time::Instant::now() + BOUND;
    loop {
        if let Some(infra) = pod.record().and_then(|record| record.infra) {
            return infra.pid;
        }
        assert!(std::time::Instant::now() < end, "no infra process");
    }
}
