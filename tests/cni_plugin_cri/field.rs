//! Faults reported from the field, replayed through CRI with the plugin in front of the network.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::mount::{MntFlags, umount2};
use serde_json::json;

use crate::kit::{
    BOUND, Node, SUBNET, Setup, Times, address, bridge, config, end, scope, without_the_daemons,
};
use crate::owed_kit::{leases, records};
use crate::support::fake::{self, Act};
use crate::support::{cni, eventually, podvisor, require, sandboxed, sh};

/// The client of all replays gives up as early as the reports say it does.
const SECOND: Duration = Duration::from_secs(1);

/// The state in which `podvisor ps -a` shows the pod's network.
fn until_state(name: &str, state: &str) {
    eventually(BOUND, &format!("{name} is {state:?}"), || {
        (crate::owed_kit::state(name) == state).then_some(())
    });
}

/// An attempt that fails, and what a kubelet does with its remains.
fn failed_attempt(node: &Node, name: &str, deadline: Duration) {
    let mut cri = node.cri();
    let failed = cri.run_within(&config(name), "runc", deadline);
    println!("{name}: {:?}", failed.unwrap_err());
    for left in cri.list().into_iter().filter(|p| p.name == name) {
        let _ = cri.stop(&left.id);
        let _ = cri.remove(&left.id);
    }
}

/// FL-001: the creation hangs, and every retry was told that its name is reserved. FL-002: what is ready when its caller
/// has gone was thrown away. FL-013: an ADD that succeeds after the caller gave up.
#[test]
fn retries_join_what_is_made_and_take_what_is_ready() {
    sandboxed(
        "field::retries_join_what_is_made_and_take_what_is_ready",
        || {
            let Some(node) = Setup::of("containerd-2.1").start() else {
                return;
            };
            let before = scope().take();
            let go = PathBuf::from("/run/go");
            node.bridge
                .on("ADD", &[Act::IgnoreTerm, Act::WaitFor(go.clone())]);
            failed_attempt(&node, "web", SECOND);
            until_state("web", "network starting");
            failed_attempt(&node, "web", 3 * SECOND);
            // The daemon's error is the last that the plugin has said.
            let told = "pod apps/web (uid uid-web): still at stage cni-add";
            eventually(BOUND, told, || {
                let is_told = node.daemon.log().contains(told);
                // On a loaded machine three seconds may be over before the plugin has waited for one.
                if !is_told {
                    failed_attempt(&node, "web", 3 * SECOND);
                }
                is_told.then_some(())
            });
            fs::write(&go, "").unwrap();
            until_state("web", "network parked");
            let begun = Instant::now();
            let id = node
                .come_up("web", "runc", &config("web"), Times::of(60.0))
                .unwrap();
            println!("taken within {:?}", begun.elapsed());
            assert_eq!(node.calls(), (1, 0));
            let mut cri = node.cri();
            let own = address(&mut cri, &id);
            assert_eq!(leases("pods"), [own]);
            end(&mut cri, &id);
            node.until(1, 1);
            before.assert_unchanged();
        },
    );
}

/// FL-013 with our own bound: the plugin does not end, ignores SIGTERM and would take an address afterwards.
#[test]
fn an_add_past_its_bound_is_undone_and_the_next_attempt_begins_anew() {
    sandboxed(
        "field::an_add_past_its_bound_is_undone_and_the_next_attempt_begins_anew",
        || {
            let Some(node) = Setup::of("containerd-2.1").start() else {
                return;
            };
            let before = scope().take();
            let settings = "/etc/podvisor/config.toml";
            let usual = fs::read_to_string(settings).unwrap();
            fs::write(settings, usual.replace("[cni]", "[cni]\nadd_timeout = 2.0")).unwrap();
            node.bridge.on("ADD", &[Act::IgnoreTerm, Act::Sleep(4.0)]);
            failed_attempt(&node, "web", SECOND);
            node.until(1, 1);
            fs::write(settings, usual).unwrap();
            node.bridge.on("ADD", &[]);
            until_state("web", "");
            assert!(leases("pods").is_empty());
            let id = node
                .come_up("web", "runc", &config("web"), Times::of(60.0))
                .unwrap();
            let mut cri = node.cri();
            assert_eq!(leases("pods"), [address(&mut cri, &id)]);
            end(&mut cri, &id);
            node.until(2, 2);
            before.assert_unchanged();
        },
    );
}

/// FL-012, rust-notes C.2 19: the ADD went well, the creation hangs behind it.
#[test]
fn a_creation_that_hangs_behind_a_good_add_has_one_del() {
    sandboxed(
        "field::a_creation_that_hangs_behind_a_good_add_has_one_del",
        || {
            let Some(runc) = require::find("runc") else {
                return;
            };
            let runtime = fake::runtime_before(Path::new("/run"), "slow-runc", &runc);
            let options = "[plugins.\"io.containerd.cri.v1.runtime\".containerd.runtimes.runc.options]\n\
             BinaryName = \"/run/slow-runc\"\n";
            let Some(node) = Setup::of("containerd-2.1").config(options).start() else {
                return;
            };
            let before = scope().take();
            let go = PathBuf::from("/run/go");
            runtime.on("CREATE", &[Act::WaitFor(go.clone()), Act::Exit(1)]);
            let mut cri = node.cri();
            cri.run_within(&config("web"), "runc", 3 * SECOND)
                .unwrap_err();
            eventually(BOUND, "the daemon's clean-up", || {
                fs::write(&go, "").unwrap();
                (node.calls() == (1, 1)).then_some(())
            });
            let (add, del) = (
                &node.bridge.calls_of("ADD")[0],
                &node.bridge.calls_of("DEL")[0],
            );
            for name in ["CNI_CONTAINERID", "CNI_NETNS", "CNI_IFNAME", "CNI_ARGS"] {
                assert_eq!(add.var(name), del.var(name), "{name}");
            }
            runtime.on("CREATE", &[]);
            let id = node
                .come_up("web", "runc", &config("web"), Times::of(60.0))
                .unwrap();
            assert_eq!(leases("pods"), [address(&mut cri, &id)]);
            end(&mut cri, &id);
            node.until(2, 2);
            fs::remove_file(go).unwrap();
            before.assert_unchanged();
        },
    );
}

/// FL-019: the first ADD has made the interface before it failed; also in a chain of which the second plugin fails.
#[test]
fn what_a_failed_add_has_made_is_in_no_later_ones_way() {
    sandboxed(
        "field::what_a_failed_add_has_made_is_in_no_later_ones_way",
        || {
            let last = fake::plugin(Path::new(cni::PLUGINS), "last");
            let network = cni::network("pods", vec![bridge("slow", &[&format!("{SUBNET}0/24")])])
                .plugin(json!({"type": "last"}));
            let Some(node) = Setup::of("containerd-2.1").network(network).start() else {
                return;
            };
            // The fake's answer is the chain's: what is looked at is the real plugin in front of it.
            let before = scope().take();
            node.bridge
                .on("ADD", &[Act::AfterReal, Act::Exit(3), Act::OnlyFirst(1)]);
            last.on("ADD", &[Act::Exit(3), Act::OnlyFirst(1)]);
            for _ in 0..2 {
                failed_attempt(&node, "web", BOUND);
            }
            let id = node
                .come_up("web", "runc", &config("web"), Times::of(60.0))
                .unwrap();
            assert_eq!(node.bridge.count("ADD"), 3);
            assert_eq!(leases("pods").len(), 1);
            end(&mut node.cri(), &id);
            node.until(3, 3);
            assert!(leases("pods").is_empty());
            before.assert_unchanged();
        },
    );
}

/// FL-036: the netns is gone before the end. FL-040: a file of ours is empty, or half, after a power cut.
#[test]
fn pods_whose_netns_or_records_are_damaged_can_be_removed() {
    sandboxed(
        "field::pods_whose_netns_or_records_are_damaged_can_be_removed",
        || {
            let Some(node) = Setup::of("containerd-2.1").start() else {
                return;
            };
            // Which pod's key it had went with pod.json: a link that leads nowhere goes with the boot.
            let before = scope().allow("state /run/podvisor/.keys/").take();
            let mut cri = node.cri();
            let mut lives = 0;
            let mut up = |name: &str| {
                let id = node
                    .come_up(name, "runc", &config(name), Times::of(60.0))
                    .unwrap();
                lives += 1;
                id
            };
            let id = up("gone");
            let own = node.bridge.calls_of("ADD")[0].var("CNI_NETNS").to_owned();
            let given = fs::read_dir("/run/netns").unwrap().flatten();
            let given: Vec<PathBuf> = given
                .map(|e| e.path())
                .filter(|p| !p.is_symlink())
                .collect();
            for path in given.iter().map(PathBuf::as_path).chain([Path::new(&own)]) {
                umount2(path, MntFlags::MNT_DETACH).unwrap();
                fs::remove_file(path).unwrap();
            }
            end(&mut cri, &id);
            assert_eq!(node.bridge.calls_of("DEL")[0].var("CNI_NETNS"), "");
            assert!(leases("pods").is_empty());
            for name in ["pod.json", "add-started.json", "result.json", "owner.json"] {
                for half in [0, 2] {
                    let id = up(&format!("cut-{half}-{}", name.replace('.', "-")));
                    let file = records()[0].join(name);
                    let whole = fs::read(&file).unwrap();
                    let length = whole.len().checked_div(half).unwrap_or(0);
                    fs::write(&file, &whole[..length]).unwrap();
                    end(&mut cri, &id);
                    assert!(leases("pods").is_empty(), "{name} {half}");
                    assert!(records().is_empty(), "{name} {half}");
                }
            }
            node.until(lives, lives);
            before.assert_unchanged();
        },
    );
}

/// FL-042: pods that fail in a loop, on five addresses; the daemon is killed at another moment each time.
fn in_a_loop(cycles: u32) {
    let network = cni::network("pods", vec![bridge("slow", &[&format!("{SUBNET}0/29")])]);
    let Some(mut node) = Setup::of("containerd-2.1").network(network).start() else {
        return;
    };
    let before = without_the_daemons().take();
    for cycle in 0..cycles {
        let moment = Duration::from_millis(50 + u64::from(cycle * 131 % 600));
        let mut cri = node.cri();
        let _ = cri.run_within(&config("web"), "runc", moment);
        node.daemon.kill();
        node.daemon.start_again();
        let id = node
            .come_up("web", "runc", &config("web"), Times::of(60.0))
            .unwrap();
        let mut cri = node.cri();
        let own = address(&mut cri, &id);
        eventually(BOUND, "as many addresses as pods", || {
            (leases("pods") == [own.as_str()]).then_some(())
        });
        for pod in cri.list() {
            end(&mut cri, &pod.id);
        }
        eventually(BOUND, "no address", || {
            leases("pods").is_empty().then_some(())
        });
    }
    let (adds, dels) = node.calls();
    println!("{cycles} cycles: {adds} ADD, {dels} DEL");
    assert!(dels >= adds);
    podvisor(&["gc"]).ok();
    before.assert_unchanged();
}

#[test]
fn pods_that_fail_in_a_loop_eat_no_addresses() {
    sandboxed("field::pods_that_fail_in_a_loop_eat_no_addresses", || {
        in_a_loop(6);
    });
}

#[test]
#[ignore = "slow"]
fn slow_pods_that_fail_in_a_loop_eat_no_addresses() {
    crate::support::Sandbox::new("field::slow_pods_that_fail_in_a_loop_eat_no_addresses")
        .bound(Duration::from_secs(600))
        .run(|| in_a_loop(50));
}

/// FL-045: `ip netns add` between two pods makes /run/netns a mount of itself.
#[test]
fn pods_from_before_and_after_ip_netns_add_both_work() {
    sandboxed(
        "field::pods_from_before_and_after_ip_netns_add_both_work",
        || {
            let Some(node) = Setup::of("containerd-2.1").start() else {
                return;
            };
            let before = scope().take();
            let up = |name: &str| {
                node.come_up(name, "runc", &config(name), Times::of(60.0))
                    .unwrap()
            };
            let mut cri = node.cri();
            let one = up("one");
            sh("ip netns add other");
            let two = up("two");
            for id in [&one, &two] {
                let own = address(&mut cri, id);
                let exec = ["-n", "k8s.io", "tasks", "exec", "--exec-id", "x", id];
                let ip = ["/bin/busybox", "ip", "addr"];
                let shown = node.daemon.ctr(&[&exec[..], &ip[..]].concat()).ok().stdout;
                assert!(shown.contains(&own), "{shown}");
            }
            end(&mut cri, &two);
            sh("ip netns del other");
            // The daemon's removal of what it made before is "busy" while that mount is there, as without us.
            let stopped = cri.stop(&one);
            println!("stop: {stopped:?}");
            sh("umount -l /run/netns");
            end(&mut cri, &one);
            node.until(2, 2);
            before.assert_unchanged();
        },
    );
}
