//! What is not taken over, and what becomes of a network that nobody comes for.

use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use podvisor::proto::cri::sandbox_config::{PodSandboxConfig, PortMapping};

use crate::daemon::signal;
use crate::kit::{self, INTERVAL};
use crate::rig::{self, BOUND, Pod, alive, gone};
use crate::support::{Snapshot, cni, eventually, fake, sandboxed};

#[test]
fn a_parked_network_that_nobody_comes_for_is_undone_and_its_keeper_leaves() {
    sandboxed(
        "left_alone::a_parked_network_that_nobody_comes_for_is_undone_and_its_keeper_leaves",
        || {
            let interval = 1.5;
            kit::parking(interval, "");
            let plugin = kit::bridge();
            let before = Snapshot::take();
            let (_, keeper) = kit::parked("p1", &plugin);
            let since = Instant::now();
            // Not before one interval, measured from a moment after it was parked.
            while since.elapsed() < Duration::from_secs_f64(interval - 0.5) {
                assert!(alive(keeper) && plugin.count("DEL") == 0);
                std::thread::sleep(Duration::from_millis(20));
            }
            gone(keeper);
            kit::adds_and_dels(&plugin, 1);
            before.assert_unchanged();
            assert_eq!((kit::records(), kit::offered()), (0, 0));
        },
    );
}

#[test]
fn sigterm_ends_a_keeper_and_its_network_at_once() {
    sandboxed(
        "left_alone::sigterm_ends_a_keeper_and_its_network_at_once",
        || {
            kit::parking(INTERVAL, "");
            let plugin = kit::bridge();
            let before = Snapshot::take();
            let (_, keeper) = kit::parked("p1", &plugin);
            signal(keeper, Signal::SIGTERM);
            gone(keeper);
            kit::adds_and_dels(&plugin, 1);
            // Also while the plugin is at work.
            let _gate = kit::closed(&plugin);
            let second = kit::timed_out("p2", &plugin);
            let keeper = second.supervisor();
            let child = plugin.calls_of("ADD")[1].pid;
            second.probe().shutdown("p2").unwrap();
            kit::until("p2", "network starting");
            signal(keeper, Signal::SIGTERM);
            gone(keeper);
            gone(child);
            kit::adds_and_dels(&plugin, 2);
            before.assert_unchanged();
            assert_eq!((kit::records(), kit::offered()), (0, 0));
        },
    );
}

/// Switched off, or a pod without metadata: Shutdown undoes everything.
#[test]
fn without_the_setting_or_metadata_a_shutdown_undoes_everything() {
    sandboxed(
        "left_alone::without_the_setting_or_metadata_a_shutdown_undoes_everything",
        || {
            let plugin = kit::bridge();
            let before = Snapshot::take();
            let off = ("park_network_on_shutdown = false", rig::config("web"));
            for (n, (more, config)) in [off, ("", PodSandboxConfig::default())]
                .into_iter()
                .enumerate()
            {
                kit::parking(INTERVAL, more);
                let id = format!("p{n}");
                let _gate = kit::closed(&plugin);
                let pod = kit::timed_out_as(&id, &plugin, &config);
                let (supervisor, child) = (pod.supervisor(), plugin.calls_of("ADD")[n].pid);
                pod.probe().shutdown(&id).unwrap();
                gone(child);
                gone(supervisor);
                kit::adds_and_dels(&plugin, n + 1);
            }
            before.assert_unchanged();
            assert_eq!((kit::records(), kit::offered()), (0, 0));
        },
    );
}

/// Whoever still waits for the creation owns it: a shutdown then means what it says.
#[test]
fn a_shutdown_while_the_caller_waits_undoes_everything() {
    sandboxed(
        "left_alone::a_shutdown_while_the_caller_waits_undoes_everything",
        || {
            kit::parking(INTERVAL, "");
            let plugin = kit::bridge();
            let before = Snapshot::take();
            let _gate = kit::closed(&plugin);
            let pod = kit::create("p1");
            let caller = pod.start_aside(BOUND);
            rig::called(&plugin, "ADD", 1);
            let supervisor = pod.supervisor();
            pod.probe().shutdown("p1").unwrap();
            assert!(caller.join().unwrap().is_err());
            gone(supervisor);
            kit::adds_and_dels(&plugin, 1);
            before.assert_unchanged();
            assert_eq!((kit::records(), kit::offered()), (0, 0));
        },
    );
}

/// Other ports: the parked network is undone first, and a new one is made.
#[test]
fn another_request_for_the_same_pod_undoes_the_parked_network_first() {
    sandboxed(
        "left_alone::another_request_for_the_same_pod_undoes_the_parked_network_first",
        || {
            kit::parking(INTERVAL, "");
            let bridge = kit::bridge();
            let ports = fake::plugin(std::path::Path::new(cni::PLUGINS), "ports");
            let plugin =
                serde_json::json!({"type": "ports", "capabilities": {"portMappings": true}});
            cni::network("a", vec![plugin]).write();
            let before = Snapshot::take();
            let (_, keeper) = kit::parked_as("p1", &ports, &rig::config("web"));
            let mut config = rig::config("web");
            config.port_mappings.push(PortMapping {
                container_port: 80,
                host_port: 8080,
                ..Default::default()
            });
            let second = kit::create_as("p2", &config);
            second.probe().start("p2", BOUND).unwrap();
            gone(keeper);
            assert!(second.record().unwrap().network.taken.is_none());
            let verbs: Vec<String> = ports.calls().into_iter().map(|c| c.verb).collect();
            let order: Vec<&str> = verbs
                .iter()
                .map(String::as_str)
                .filter(|v| *v != "VERSION")
                .collect();
            assert_eq!(order, ["ADD", "DEL", "ADD"]);
            assert_eq!(ports.calls_of("ADD")[1].var("CNI_CONTAINERID"), "p2");
            second.end();
            kit::adds_and_dels(&ports, 2);
            assert_eq!(bridge.count("ADD"), 0);
            before.assert_unchanged();
            assert_eq!((kit::records(), kit::offered()), (0, 0));
        },
    );
}

#[test]
fn another_attempt_is_another_pod() {
    sandboxed("left_alone::another_attempt_is_another_pod", || {
        kit::parking(2.0, "");
        let plugin = kit::bridge();
        let before = Snapshot::take();
        let (_, keeper) = kit::parked("p1", &plugin);
        let mut config = rig::config("web");
        config.metadata.as_mut().unwrap().attempt = 1;
        let second = kit::create_as("p2", &config);
        second.probe().start("p2", BOUND).unwrap();
        assert!(second.record().unwrap().network.taken.is_none());
        assert_eq!(plugin.count("ADD"), 2);
        gone(keeper);
        assert_eq!(plugin.count("DEL"), 1);
        second.end();
        kit::adds_and_dels(&plugin, 2);
        before.assert_unchanged();
    });
}

/// `delete`, of a living pod that nobody waits for and of a dead one: the network stays.
#[test]
fn the_daemons_clean_up_leaves_a_parked_network_parked() {
    sandboxed(
        "left_alone::the_daemons_clean_up_leaves_a_parked_network_parked",
        || {
            kit::parking(INTERVAL, "");
            let plugin = kit::bridge();
            let before = Snapshot::take();
            for (id, dead) in [("p1", false), ("p2", true)] {
                let gate = kit::closed(&plugin);
                let adds = plugin.count("ADD");
                let pod = kit::timed_out(id, &plugin);
                kit::open(&gate);
                kit::until(id, "parked");
                eventually(BOUND, "it is on offer", || {
                    let (_, holder) = holder_of(&pod)?;
                    holder["parked"].is_object().then_some(())
                });
                let supervisor = pod.supervisor();
                if dead {
                    rig::kill(supervisor);
                }
                pod.bundle.delete();
                eventually(BOUND, "its record goes", || {
                    pod.record().is_none().then_some(())
                });
                assert_eq!(
                    (kit::shown(id).as_str(), alive(supervisor)),
                    ("network parked", !dead)
                );
                assert_eq!(plugin.count("DEL"), adds);
                let next = format!("{id}-next");
                let pod = kit::create(&next);
                pod.probe().start(&next, BOUND).unwrap();
                assert_eq!(plugin.count("ADD"), adds + 1);
                gone(supervisor);
                pod.end();
                kit::adds_and_dels(&plugin, adds + 1);
            }
            before.assert_unchanged();
            assert_eq!((kit::records(), kit::offered()), (0, 0));
        },
    );
}

fn holder_of(pod: &Pod) -> Option<(std::path::PathBuf, serde_json::Value)> {
    let place = pod.record()?.network.place;
    let dir = std::path::Path::new("/var/lib/podvisor/networks").join(place);
    let text = std::fs::read(dir.join("pod.json")).ok()?;
    Some((dir, serde_json::from_slice(&text).ok()?))
}
