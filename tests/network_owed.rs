//! A DEL that fails: who is told, who retries, what is shown, and what a crash or a damaged file makes of it.
#![allow(clippy::unwrap_used, clippy::expect_used)]

#[path = "owed/kit.rs"]
mod kit;
mod support;

use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use kit::{BOUND, alive, configure, create, kill, state};
use serde_json::{Value, json};
use support::fake::Act;
use support::{Snapshot, cni, eventually, podvisor, sandboxed};

const QUICK: &str = "[cni]\ndel_timeout = 2.0\nkeeper_time = 30.0\n";

/// FL-018: the first DEL error ends a try, the next try runs the whole list.
#[test]
fn rm_fails_while_del_fails_and_a_later_one_runs_the_whole_list() {
    sandboxed(
        "rm_fails_while_del_fails_and_a_later_one_runs_the_whole_list",
        || {
            configure(QUICK);
            let [one, two] =
                ["one", "two"].map(|n| support::fake::plugin(Path::new(cni::PLUGINS), n));
            cni::network("pods", vec![json!({"type": "one"}), json!({"type": "two"})]).write();
            let before = Snapshot::take();
            let id = create("web", "pods");
            let infra = kit::infra(&id);
            one.on("DEL", &[Act::Exit(7)]);
            podvisor(&["stop", "web"]).fails_with("network clean-up pending");
            assert!(!alive(infra), "processes are gone at once");
            podvisor(&["rm", "web"]).fails_with("network clean-up pending");
            assert!(!kit::record().join("network-stopped").exists());
            assert!(kit::journal(&id)["network"]["pending"].is_string());
            // Between two tries, which the supervisor's go on with meanwhile.
            eventually(BOUND, "every try runs the whole list", || {
                (one.count("DEL") == two.count("DEL")).then_some(())
            });
            one.on("DEL", &[]);
            podvisor(&["rm", "web"]).ok();
            assert_eq!(
                one.calls_of("DEL").last().unwrap().end.as_deref(),
                Some("0")
            );
            before.assert_unchanged();
            assert!(kit::records().is_empty());
        },
    );
}

/// FL-041: an expired token. The workload is dead at once, the product retries by itself, one log line per try.
#[test]
fn a_stopped_pods_supervisor_retries_by_itself() {
    sandboxed("a_stopped_pods_supervisor_retries_by_itself", || {
        configure(QUICK);
        let plugin = kit::fake_network("pods", "net");
        let before = Snapshot::take();
        create("web", "pods");
        plugin.on(
            "DEL",
            &[
                Act::OnlyFirst(7),
                Act::Print(r#"{"code":11,"msg":"Unauthorized"}"#.into()),
                Act::Exit(1),
            ],
        );
        podvisor(&["stop", "web"]).fails_with("Unauthorized");
        let tries = plugin.count("DEL");
        assert!(
            (2..7).contains(&tries),
            "tries with back-off, not a storm: {tries}"
        );
        let record = kit::record();
        eventually(BOUND, "a DEL that succeeds", || {
            record.join("network-stopped").exists().then_some(())
        });
        assert_eq!(plugin.count("DEL"), 8);
        eventually(BOUND, "the end of pending", || {
            (state("web") == "stopped").then_some(())
        });
        podvisor(&["rm", "web"]).ok();
        assert_eq!(plugin.count("DEL"), 8, "not repeated once it has succeeded");
        before.assert_unchanged();
    });
}

/// Decisions on removal: `rm -f` succeeds and the supervisor stays as the keeper of what is owed.
#[test]
fn rm_by_force_leaves_a_keeper_that_finishes_and_goes() {
    sandboxed("rm_by_force_leaves_a_keeper_that_finishes_and_goes", || {
        configure(QUICK);
        let plugin = kit::fake_network("pods", "net");
        let before = Snapshot::take();
        let id = create("web", "pods");
        let (supervisor, infra) = (kit::supervisor(&id), kit::infra(&id));
        let socket = kit::journal(&id)["address"]
            .as_str()
            .unwrap()
            .replace("unix://", "");
        plugin.on("DEL", &[Act::Exit(1)]);
        let out = podvisor(&["rm", "-f", "web"]).ok();
        assert!(out.stderr.contains("network clean-up pending"), "{out:?}");
        assert!(!alive(infra) && !kit::dir(&id).exists());
        assert!(alive(supervisor), "it keeps what is owed");
        assert!(UnixStream::connect(&socket).is_err() && !Path::new(&socket).exists());
        assert_eq!(state("web"), "network pending");
        let shown: Value =
            serde_json::from_str(&podvisor(&["inspect", "web"]).ok().stdout).unwrap();
        assert_eq!(shown[0]["id"], json!(id));
        assert!(
            shown[0]["network"]["pending"]["tries"].as_u64().unwrap() > 0,
            "{shown}"
        );
        plugin.on("DEL", &[]);
        eventually(BOUND, "the keeper's end", || {
            (!alive(supervisor)).then_some(())
        });
        assert_eq!(state("web"), "");
        before.assert_unchanged();
        assert!(kit::records().is_empty());
    });
}

#[test]
fn a_keeper_leaves_when_its_time_is_over_or_it_is_told_to() {
    sandboxed(
        "a_keeper_leaves_when_its_time_is_over_or_it_is_told_to",
        || {
            for (time, told) in [(1.0, false), (600.0, true)] {
                configure(&format!("[cni]\nkeeper_time = {time:.1}\n"));
                let plugin = kit::fake_network("pods", "net");
                let id = create("web", "pods");
                let supervisor = kit::supervisor(&id);
                plugin.on("DEL", &[Act::Exit(1)]);
                podvisor(&["rm", "-f", "web"]).ok();
                if told {
                    assert!(alive(supervisor));
                    let pid = nix::unistd::Pid::from_raw(supervisor);
                    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM).unwrap();
                }
                eventually(BOUND, "the keeper's end", || {
                    (!alive(supervisor)).then_some(())
                });
                assert_eq!(state("web"), "network pending", "the record stays");
                podvisor(&["gc"]).code_is(1);
                plugin.on("DEL", &[]);
                let out = podvisor(&["gc"]).ok();
                assert!(out.stdout.contains("undone: network of pod web"), "{out:?}");
                assert!(kit::records().is_empty());
            }
        },
    );
}

#[test]
fn rm_hurries_an_owed_network_by_name_and_by_id() {
    sandboxed("rm_hurries_an_owed_network_by_name_and_by_id", || {
        configure("[cni]\nkeeper_time = 600.0\n");
        let plugin = kit::fake_network("pods", "net");
        let before = Snapshot::take();
        for by_id in [false, true] {
            let id = create("web", "pods");
            plugin.on("DEL", &[Act::Exit(1)]);
            podvisor(&["rm", "-f", "web"]).ok();
            podvisor(&["rm", "web"]).fails_with("network clean-up pending");
            let out = podvisor(&["rm", "-f", "web"]).ok();
            assert!(out.stderr.contains("stays on record"), "{out:?}");
            plugin.on("DEL", &[]);
            podvisor(&["rm", if by_id { &id[..12] } else { "web" }]).ok();
            assert_eq!(state("web"), "");
            podvisor(&["rm", "web"]).code_is(1);
        }
        before.assert_unchanged();
    });
}

/// A plugin whose caller lives is no orphan, whoever else wants the same network cleaned up.
#[test]
fn a_del_at_work_is_nobody_elses_to_kill() {
    sandboxed("a_del_at_work_is_nobody_elses_to_kill", || {
        configure("[cni]\nkeeper_time = 0.1\n");
        let plugin = kit::fake_network("pods", "net");
        let before = Snapshot::take();
        create("web", "pods");
        plugin.on("DEL", &[Act::Exit(1)]);
        podvisor(&["rm", "-f", "web"]).ok();
        eventually(BOUND, "the keeper's end", || {
            kit::supervisors().is_empty().then_some(())
        });
        plugin.on("DEL", &[Act::WaitFor("/run/go".into())]);
        let earlier = plugin.count("DEL");
        let mut removing = std::process::Command::new(support::bin::PODVISOR)
            .args(["rm", "web"])
            .spawn()
            .unwrap();
        eventually(BOUND, "its DEL at work", || {
            (plugin.count("DEL") == earlier + 1).then_some(())
        });
        podvisor(&["gc"]).code_is(1);
        podvisor(&["network", "gc"]).code_is(1);
        fs::write("/run/go", "").unwrap();
        assert!(removing.wait().unwrap().success());
        assert_eq!(plugin.count("DEL"), earlier + 1);
        fs::remove_file("/run/go").unwrap();
        before.assert_unchanged();
    });
}

/// The next supervisor on the node sends what is due, in the background.
#[test]
fn the_next_supervisor_sends_what_others_owe() {
    sandboxed("the_next_supervisor_sends_what_others_owe", || {
        configure("[cni]\nkeeper_time = 0.1\n");
        let plugin = kit::fake_network("pods", "net");
        let before = Snapshot::take();
        let id = create("old", "pods");
        let keeper = kit::supervisor(&id);
        plugin.on("DEL", &[Act::Exit(1)]);
        podvisor(&["rm", "-f", "old"]).ok();
        eventually(BOUND, "the keeper's end", || (!alive(keeper)).then_some(()));
        plugin.on("DEL", &[]);
        std::thread::sleep(Duration::from_secs(2));
        create("new", "pods");
        eventually(BOUND, "the old network's end", || {
            (state("old").is_empty()).then_some(())
        });
        podvisor(&["rm", "-f", "new"]).ok();
        let ids: Vec<String> = plugin
            .calls_of("DEL")
            .iter()
            .filter(|c| c.end.as_deref() == Some("0"))
            .map(|c| c.var("CNI_CONTAINERID").to_owned())
            .collect();
        assert_eq!(ids.iter().filter(|i| **i == id).count(), 1, "{ids:?}");
        before.assert_unchanged();
    });
}

/// FL-039: a plugin that refuses an empty netns. Bounded, then visible, after a day as leaked.
#[test]
fn what_is_owed_for_a_day_without_a_netns_is_leaked_and_still_tried() {
    sandboxed(
        "what_is_owed_for_a_day_without_a_netns_is_leaked_and_still_tried",
        || {
            configure("[cni]\nkeeper_time = 0.1\n");
            let plugin = kit::fake_network("pods", "net");
            let before = Snapshot::take();
            let id = create("web", "pods");
            kill(kit::supervisor(&id));
            nix::mount::umount2(netns(&id).as_str(), nix::mount::MntFlags::MNT_DETACH).unwrap();
            fs::remove_file(netns(&id)).unwrap();
            plugin.on(
                "DEL",
                &[Act::Stderr("netns must not be empty".into()), Act::Exit(1)],
            );
            podvisor(&["rm", "web"]).fails_with("network clean-up pending");
            assert_eq!(state("web"), "network pending");
            assert_eq!(plugin.calls_of("DEL")[0].var("CNI_NETNS"), "");
            let path = kit::record().join("owed.json");
            let mut owed: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
            let now = SystemTime::now()
                .duration_since(UNIX_EPOCH)
                .unwrap()
                .as_nanos();
            owed["first_failure"] = json!(u64::try_from(now).unwrap() - 25 * 3_600_000_000_000);
            fs::write(&path, owed.to_string()).unwrap();
            assert_eq!(state("web"), "network leaked");
            podvisor(&["rm", "web"]).fails_with("network clean-up pending");
            let owed: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
            let wait = owed["next_try"].as_u64().unwrap() - u64::try_from(now).unwrap();
            assert!(
                wait > 23 * 3_600_000_000_000,
                "tried again tomorrow: {owed}"
            );
            plugin.on("DEL", &[]);
            podvisor(&["gc"]).ok();
            assert_eq!(state("web"), "");
            before.assert_unchanged();
        },
    );
}

/// FL-010: stop and rm as often as one likes; DEL once.
#[test]
fn repeated_stops_send_one_del() {
    sandboxed("repeated_stops_send_one_del", || {
        let plugin = kit::fake_network("pods", "net");
        let before = Snapshot::take();
        create("web", "pods");
        for _ in 0..3 {
            podvisor(&["stop", "web"]).ok();
        }
        podvisor(&["rm", "web"]).ok();
        for _ in 0..2 {
            podvisor(&["rm", "web"]).code_is(1);
        }
        podvisor(&["stop", "nobody"]).code_is(1);
        assert_eq!(plugin.count("DEL"), 1);
        before.assert_unchanged();
    });
}

/// FL-034: the configuration is gone. FL-035: it comes without a restart of anything.
#[test]
fn a_pod_is_removed_without_its_configuration_and_made_as_soon_as_there_is_one() {
    sandboxed(
        "a_pod_is_removed_without_its_configuration_and_made_as_soon_as_there_is_one",
        || {
            fs::remove_dir_all(cni::CONFIGS).unwrap_or_default();
            podvisor(&["create", "--name", "web", "--net", "pods"]).fails_with("find network");
            let plugin = kit::fake_network("pods", "net");
            let before = Snapshot::take();
            let id = create("web", "pods");
            for entry in fs::read_dir(cni::CONFIGS).unwrap().flatten() {
                fs::remove_file(entry.path()).unwrap();
            }
            podvisor(&["stop", "web"]).ok();
            podvisor(&["rm", "web"]).ok();
            assert_eq!(plugin.calls_of("DEL")[0].var("CNI_CONTAINERID"), id);
            before.assert_unchanged();
        },
    );
}

/// FL-036: the netns is gone; DEL has an empty CNI_NETNS and the lease goes.
#[test]
fn a_vanished_netns_does_not_keep_the_lease() {
    sandboxed("a_vanished_netns_does_not_keep_the_lease", || {
        kit::small_subnet("pods");
        let bridge = kit::before_real("bridge");
        let before = Snapshot::take();
        let id = create("web", "pods");
        assert_eq!(kit::leases("pods").len(), 1);
        nix::mount::umount2(netns(&id).as_str(), nix::mount::MntFlags::MNT_DETACH).unwrap();
        fs::remove_file(netns(&id)).unwrap();
        podvisor(&["stop", "web"]).ok();
        assert_eq!(bridge.calls_of("DEL")[0].var("CNI_NETNS"), "");
        assert!(kit::leases("pods").is_empty());
        podvisor(&["rm", "web"]).ok();
        before.assert_unchanged();
    });
}

/// FL-040: each file of ours and of libcni's cache, empty and cut in half.
#[test]
fn damaged_files_do_not_keep_a_pod() {
    sandboxed("damaged_files_do_not_keep_a_pod", || {
        let plugin = kit::fake_network("pods", "net");
        let before = Snapshot::take();
        let mut round = 0;
        for name in [
            "owner.json",
            "add-started.json",
            "result.json",
            "pod.json",
            "cache",
        ] {
            for half in [false, true] {
                round += 1;
                let id = create("web", "pods");
                let path = match name {
                    "cache" => format!("/var/lib/cni/results/pods-{id}-eth0").into(),
                    name => kit::record().join(name),
                };
                let whole = fs::read(&path).unwrap();
                fs::write(&path, &whole[..if half { whole.len() / 2 } else { 0 }]).unwrap();
                podvisor(&["stop", "web"]).ok();
                podvisor(&["rm", "web"]).ok();
                assert_eq!(plugin.count("DEL"), round, "{name}");
                assert!(kit::records().is_empty(), "{name}");
            }
        }
        before.assert_unchanged();
    });
}

/// FL-046: killed before the marker: DEL again. Killed after it: no DEL.
#[test]
fn the_marker_decides_after_a_kill_in_stop() {
    sandboxed("the_marker_decides_after_a_kill_in_stop", || {
        let plugin = kit::fake_network("pods", "net");
        let before = Snapshot::take();
        let id = create("web", "pods");
        kill(kit::supervisor(&id));
        podvisor(&["rm", "web"]).ok();
        assert_eq!(plugin.count("DEL"), 1);
        let id = create("web", "pods");
        podvisor(&["stop", "web"]).ok();
        kill(kit::supervisor(&id));
        podvisor(&["rm", "web"]).ok();
        assert_eq!(plugin.count("DEL"), 2, "the marker was there");
        // At the last moment before it: DEL has done its work, its supervisor has not heard of it.
        let id = create("web", "pods");
        let supervisor = kit::supervisor(&id);
        kit::kill_after_del("net", supervisor);
        // The command does then what its supervisor has left.
        podvisor(&["stop", "web"]).ok();
        assert!(!alive(supervisor));
        assert_eq!(plugin.count("DEL"), 4, "no marker, no DEL that counts");
        podvisor(&["rm", "web"]).ok();
        assert_eq!(plugin.count("DEL"), 4, "the stop has done it");
        // At the first moment after it, with all that follows it undone.
        let id = create("web", "pods");
        let supervisor = kit::supervisor(&id);
        let marker = kit::record().join("network-stopped");
        let mut stopping = std::process::Command::new(support::bin::PODVISOR)
            .args(["stop", "web"])
            .stderr(std::process::Stdio::null())
            .spawn()
            .unwrap();
        while !marker.exists() {
            std::hint::spin_loop();
        }
        kill(supervisor);
        stopping.wait().unwrap();
        podvisor(&["rm", "web"]).ok();
        assert_eq!(plugin.count("DEL"), 5, "it counts from its marker on");
        assert!(kit::records().is_empty());
        before.assert_unchanged();
    });
}

/// A cleaner of temporary files took the directory of a pod that runs, or all of them: it is shown, and goes by force.
#[test]
fn a_pod_that_lost_its_directory_is_shown_and_removed() {
    sandboxed("a_pod_that_lost_its_directory_is_shown_and_removed", || {
        let plugin = kit::fake_network("pods", "net");
        let before = Snapshot::take();
        for (count, all) in [(1, false), (2, true)] {
            let id = create("web", "pods");
            let supervisor = kit::supervisor(&id);
            let lost = match all {
                true => Path::new("/run/podvisor/default").to_owned(),
                false => kit::dir(&id),
            };
            detach_below(&lost);
            fs::remove_dir_all(&lost).unwrap();
            assert_eq!(state("web"), "directory lost");
            let shown: Value =
                serde_json::from_str(&podvisor(&["inspect", "web"]).ok().stdout).unwrap();
            assert_eq!(shown[0]["id"], json!(id));
            assert_eq!(shown[0]["status"]["supervised"], json!(true));
            assert!(
                podvisor(&["ps", "-a"])
                    .ok()
                    .stdout
                    .contains("directory lost")
            );
            // It lives: not without force, and not by gc.
            podvisor(&["rm", "web"]).fails_with("rm -f web");
            podvisor(&["gc"]);
            assert!(alive(supervisor));
            assert_eq!(plugin.count("DEL"), count - 1);
            podvisor(&["rm", "-f", "web"]).ok();
            assert!(!alive(supervisor));
            assert_eq!((state("web"), plugin.count("DEL")), (String::new(), count));
        }
        assert!(kit::records().is_empty());
        before.assert_unchanged();
    });
}

/// A cleaner cannot remove what is a mount point.
fn detach_below(dir: &Path) {
    let table = fs::read_to_string("/proc/self/mountinfo").unwrap();
    // The deepest first: one goes with all that is mounted below it.
    let points = table.lines().rev().filter_map(|l| l.split(' ').nth(4));
    for point in points.filter(|p| Path::new(p).starts_with(dir)) {
        nix::mount::umount2(point, nix::mount::MntFlags::MNT_DETACH).unwrap();
    }
}

/// FL-048: the killed pod's rule goes when its death is seen; the next pod with the port is reached.
#[test]
fn a_killed_pod_does_not_keep_its_port() {
    sandboxed("a_killed_pod_does_not_keep_its_port", || {
        cni::bridge("pods", "pvt0", "10.87.1.0/24")
            .portmap()
            .write();
        let rootfs = support::rootfs::make();
        fs::write(rootfs.path().join("www/index.html"), "hello").unwrap();
        let serve = |name: &str| {
            let args = [
                "run",
                "-d",
                "--name",
                name,
                "--net",
                "pods",
                "--publish",
                "8080:80",
                "--rootfs",
                rootfs.str(),
            ];
            let command = ["--", "httpd", "-f", "-p", "80", "-h", "/www"];
            podvisor(&[&args[..], &command[..]].concat())
                .ok()
                .stdout
                .trim()
                .to_owned()
        };
        let rules = || {
            let out = std::process::Command::new("iptables-save")
                .args(["-t", "nat"])
                .output()
                .unwrap();
            String::from_utf8_lossy(&out.stdout).matches("DNAT").count()
        };
        let warm = serve("warm");
        podvisor(&["rm", "-f", "warm"]).ok();
        let before = Snapshot::take();
        let none = rules();
        let id = serve("first");
        assert!(rules() > none && id != warm);
        kill(kit::infra(&id));
        eventually(BOUND, "the end of the rule", || {
            (rules() == none).then_some(())
        });
        eventually(BOUND, "the end of the DEL", || {
            (kit::journal(&id)["effects"]["cni"] == "none").then_some(())
        });
        serve("second");
        let text = eventually(BOUND, "an answer", || {
            // Not through a proxy, as a client program might.
            let mut connection = TcpStream::connect("10.87.1.1:8080").ok()?;
            connection.write_all(b"GET / HTTP/1.0\r\n\r\n").ok()?;
            let mut text = String::new();
            connection.read_to_string(&mut text).ok()?;
            Some(text)
        });
        assert!(text.ends_with("hello"), "{text}");
        for name in ["first", "second"] {
            podvisor(&["rm", "-f", name]).ok();
        }
        before.assert_unchanged();
    });
}

fn netns(id: &str) -> String {
    kit::journal(id)["network"]["netns"]
        .as_str()
        .unwrap()
        .to_owned()
}
