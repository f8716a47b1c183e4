//! The next supervisor of a pod takes its network over: docs/retry.md, "Across supervisors".

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Duration;

use podvisor::error::Kind;

use crate::kit::{self, INTERVAL};
use crate::rig::{self, BOUND, Pod, alive, gone};
use crate::support::fake::Act;
use crate::support::{Snapshot, cni, eventually, fake, sandboxed};

#[test]
fn a_network_that_was_being_made_at_shutdown_goes_to_the_next_sandbox_of_the_pod() {
    sandboxed(
        "taken::a_network_that_was_being_made_at_shutdown_goes_to_the_next_sandbox_of_the_pod",
        || {
            kit::parking(INTERVAL, "");
            let plugin = kit::bridge();
            let before = Snapshot::take();
            let gate = kit::closed(&plugin);
            let first = kit::timed_out("p1", &plugin);
            let keeper = first.supervisor();
            first.probe().shutdown("p1").unwrap();
            eventually(BOUND, "the socket goes", || {
                (!first.socket.exists()).then_some(())
            });
            assert!(alive(keeper) && first.record().is_none(), "it is a keeper");
            assert_eq!(kit::shown("p1"), "network starting");
            // The daemon's clean-up leaves it alone.
            first.bundle.delete();
            let second = kit::create("p2");
            let error = second
                .probe()
                .start("p2", Duration::from_secs(1))
                .unwrap_err();
            let text = error.to_string();
            assert_eq!(error.kind(), Kind::Deadline, "{text}");
            for part in [
                "pod apps/web (attempt 0) is being made as sandbox p1",
                "still at stage cni-add after ",
                &format!("in supervisor {keeper}"),
            ] {
                assert!(text.contains(part), "{part} in {text}");
            }
            // The plugin is not the daemon's: it was neither killed nor called again.
            assert_eq!((plugin.count("ADD"), plugin.count("DEL")), (1, 0));
            kit::open(&gate);
            kit::until("p1", "network parked");
            second.probe().start("p2", BOUND).unwrap();
            gone(keeper);
            assert_eq!(kit::shown("p1"), "");
            let bare = kit::ips(&second)[0].clone();
            assert!(kit::real_ips(&second).contains(&bare), "{bare}");
            let taken = second.record().unwrap();
            assert_eq!(taken.network.taken.unwrap().from, "p1");
            // Only the network is p1's: the other namespaces are made, and pinned, with p2.
            let (pins, infra) = (taken.pins.unwrap(), taken.infra.unwrap().pid);
            assert!(pins.starts_with(second.dir()), "{}", pins.display());
            for kind in ["ipc", "uts", "pid"] {
                let number = |path: &Path| fs::metadata(path).unwrap().ino();
                let its = format!("/proc/{infra}/ns/{kind}");
                assert_eq!(number(&pins.join(kind)), number(Path::new(&its)), "{kind}");
            }
            let shown = kit::ask(&["inspect", "p2"]).ok().stdout;
            assert!(
                shown.contains("network taken over from p1, ADD ran "),
                "{shown}"
            );
            assert_eq!(kit::offered(), 0, "it is somebody's");
            second.end();
            kit::adds_and_dels(&plugin, 1);
            assert_eq!(plugin.calls_of("DEL")[0].var("CNI_CONTAINERID"), "p1");
            before.assert_unchanged();
            assert_eq!(kit::records(), 0);
        },
    );
}

#[test]
fn who_watches_when_it_becomes_ready_is_told_so_and_the_next_request_has_it() {
    sandboxed(
        "taken::who_watches_when_it_becomes_ready_is_told_so_and_the_next_request_has_it",
        || {
            kit::parking(0.5, "");
            let plugin = kit::bridge();
            let before = Snapshot::take();
            let gate = kit::closed(&plugin);
            let first = kit::timed_out("p1", &plugin);
            first.probe().shutdown("p1").unwrap();
            let second = kit::create("p2");
            // Longer than two intervals: its watching keeps the network.
            let watcher = second.start_aside(Duration::from_secs(4));
            std::thread::sleep(Duration::from_millis(300));
            kit::open(&gate);
            let error = watcher.join().unwrap().unwrap_err();
            assert_eq!(error.kind(), Kind::Busy, "{error}");
            assert!(error.to_string().contains("ready"), "{error}");
            second.probe().start("p2", BOUND).unwrap();
            second.end();
            kit::adds_and_dels(&plugin, 1);
            before.assert_unchanged();
        },
    );
}

#[test]
fn the_network_of_a_parked_pod_goes_to_another_sandbox_and_the_rest_is_undone() {
    sandboxed(
        "taken::the_network_of_a_parked_pod_goes_to_another_sandbox_and_the_rest_is_undone",
        || {
            kit::parking(INTERVAL, "");
            let plugin = kit::bridge();
            let before = Snapshot::take();
            let gate = kit::closed(&plugin);
            let first = kit::timed_out("p1", &plugin);
            let supervisor = first.supervisor();
            let second = kit::create("p2");
            let error = second
                .probe()
                .start("p2", Duration::from_secs(1))
                .unwrap_err();
            assert_eq!(error.kind(), Kind::Deadline, "{error}");
            kit::open(&gate);
            kit::until("p1", "parked");
            eventually(BOUND, "no waiter is left", || {
                second.probe().start("p2", BOUND).ok()
            });
            gone(supervisor);
            assert!(first.record().is_none() && !first.socket.exists());
            assert!(kit::real_ips(&second).contains(&kit::ips(&second)[0]));
            first.bundle.delete();
            assert_eq!(plugin.count("DEL"), 0);
            second.end();
            kit::adds_and_dels(&plugin, 1);
            before.assert_unchanged();
        },
    );
}

#[test]
fn a_parked_pod_that_its_own_caller_takes_is_not_another_sandboxs() {
    sandboxed(
        "taken::a_parked_pod_that_its_own_caller_takes_is_not_another_sandboxs",
        || {
            kit::parking(INTERVAL, "");
            let plugin = kit::bridge();
            let before = Snapshot::take();
            let gate = kit::closed(&plugin);
            let first = kit::timed_out("p1", &plugin);
            kit::open(&gate);
            kit::until("p1", "parked");
            first.probe().start("p1", BOUND).unwrap();
            assert_eq!(kit::offered(), 0);
            let second = kit::create("p2");
            second.probe().start("p2", BOUND).unwrap();
            assert_ne!(kit::ips(&first), kit::ips(&second));
            first.end();
            second.end();
            kit::adds_and_dels(&plugin, 2);
            before.assert_unchanged();
        },
    );
}

#[test]
fn two_networks_go_over_together() {
    sandboxed("taken::two_networks_go_over_together", || {
        kit::parking(INTERVAL, "");
        let one = kit::bridge();
        let two = fake::plugin(std::path::Path::new(cni::PLUGINS), "two");
        cni::network("more", vec![serde_json::json!({"type": "two"})]).write();
        let before = Snapshot::take();
        let mut config = rig::config("web");
        let key = "io.podvisor.network".to_owned();
        config.annotations.insert(key, "pods,more".into());
        let (_, keeper) = kit::parked_as("p1", &one, &config);
        let second = kit::create_as("p2", &config);
        second.probe().start("p2", BOUND).unwrap();
        gone(keeper);
        let record = second.record().unwrap();
        let on: Vec<_> = record
            .network
            .attachments
            .iter()
            .map(|a| &a.ifname)
            .collect();
        assert_eq!(on, ["eth0", "eth1"]);
        second.end();
        kit::adds_and_dels(&one, 1);
        kit::adds_and_dels(&two, 1);
        before.assert_unchanged();
    });
}

/// One that fails after the shutdown is told to who waits, and leaves nothing.
#[test]
fn an_add_that_fails_after_the_shutdown_is_told_to_who_waits() {
    sandboxed(
        "taken::an_add_that_fails_after_the_shutdown_is_told_to_who_waits",
        || {
            kit::parking(INTERVAL, "");
            let plugin = kit::bridge();
            let before = Snapshot::take();
            let gate = std::path::PathBuf::from("/run/gate");
            let fail = [
                Act::WaitFor(gate.clone()),
                Act::Stderr("no address left".into()),
                Act::Exit(1),
            ];
            plugin.on("ADD", &fail);
            let first = kit::timed_out("p1", &plugin);
            let keeper = first.supervisor();
            first.probe().shutdown("p1").unwrap();
            let second = kit::create("p2");
            let watcher = second.start_aside(BOUND);
            std::thread::sleep(Duration::from_millis(500));
            kit::open(&gate);
            let error = watcher.join().unwrap().unwrap_err();
            assert!(error.to_string().contains("no address left"), "{error}");
            gone(keeper);
            plugin.on("ADD", &[]);
            second.probe().start("p2", BOUND).unwrap();
            second.end();
            kit::adds_and_dels(&plugin, 2);
            before.assert_unchanged();
        },
    );
}

/// Of many that come at once exactly one is the owner.
#[test]
fn of_eight_sandboxes_that_come_at_once_one_has_the_network() {
    sandboxed(
        "taken::of_eight_sandboxes_that_come_at_once_one_has_the_network",
        || {
            kit::parking(INTERVAL, "");
            let plugin = kit::bridge();
            let before = Snapshot::take();
            let (_, keeper) = kit::parked("p0", &plugin);
            let pods: Vec<Pod> = (1..=8).map(|n| kit::create(&format!("p{n}"))).collect();
            let asked: Vec<_> = pods.iter().map(|p| p.start_aside(BOUND)).collect();
            let answers: Vec<_> = asked.into_iter().map(|a| a.join().unwrap()).collect();
            gone(keeper);
            let with = |pod: &&Pod| pod.record().unwrap().network.taken.is_some();
            assert_eq!(pods.iter().filter(with).count(), 1);
            // Who came when it was somebody's already has a network of its own; who came second is refused.
            let good = answers.iter().filter(|a| a.is_ok()).count();
            assert_eq!(plugin.count("ADD"), good, "{answers:?}");
            for error in answers.iter().filter_map(|a| a.as_ref().err()) {
                assert!(matches!(error.kind(), Kind::Exists | Kind::Busy), "{error}");
            }
            pods.iter().for_each(Pod::end);
            kit::adds_and_dels(&plugin, good);
            before.assert_unchanged();
            assert_eq!((kit::records(), kit::offered()), (0, 0));
        },
    );
}

/// The first id again, for another pod, while its network is another sandbox's.
#[test]
fn an_id_whose_network_was_taken_over_can_be_used_again() {
    sandboxed(
        "taken::an_id_whose_network_was_taken_over_can_be_used_again",
        || {
            kit::parking(INTERVAL, "");
            let plugin = kit::bridge();
            let before = Snapshot::take();
            let (first, keeper) = kit::parked("p1", &plugin);
            let second = kit::create("p2");
            second.probe().start("p2", BOUND).unwrap();
            gone(keeper);
            let again = Pod::in_bundle(first.bundle);
            again.probe().create("p1", &rig::config("other")).unwrap();
            // Plugins know an attachment by its container id: two of one id would have one address, and one DEL.
            again.probe().start("p1", BOUND).unwrap();
            assert_ne!(kit::ips(&again), kit::ips(&second));
            assert!(kit::real_ips(&second).contains(&kit::ips(&second)[0]));
            rig::kill(again.supervisor());
            again.bundle.delete();
            assert_eq!(second.probe().status("p2").unwrap().0, "SANDBOX_READY");
            second.end();
            kit::adds_and_dels(&plugin, 2);
            before.assert_unchanged();
            assert_eq!((kit::records(), kit::offered()), (0, 0));
        },
    );
}
