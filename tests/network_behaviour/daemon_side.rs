//! A DEL that fails, as a daemon meets it: by the calls, and by `delete` after a kill.

use crate::place;
use crate::rig::{self, Pod};
use crate::support::bin::SHIM;
use crate::support::fake::Act;
use crate::support::{Snapshot, eventually, podvisor, sandboxed};

const BOUND: std::time::Duration = std::time::Duration::from_secs(40);

/// CRI-O's items 45 and 46: StopSandbox fails, the processes are dead all the same, the next one sends DEL again, and
/// once it has succeeded no further one does.
#[test]
fn the_next_stop_of_a_daemon_repeats_a_del_that_failed() {
    sandboxed(
        "daemon_side::the_next_stop_of_a_daemon_repeats_a_del_that_failed",
        || {
            let [plugin] = place::fakes(["fake"]);
            let before = Snapshot::take();
            let pod = Pod::up("p1");
            let infra = pod.record().unwrap().infra.unwrap().pid;
            plugin.on("DEL", &[Act::Stderr("agent is away".into()), Act::Exit(1)]);
            let error = pod.probe().stop("p1").unwrap_err().to_string();
            for word in [
                "network clean-up pending",
                "\"fake\" (DEL)",
                "agent is away",
            ] {
                assert!(error.contains(word), "{word} in {error}");
            }
            assert!(!rig::alive(infra));
            assert_eq!(pod.probe().status("p1").unwrap().0, "SANDBOX_NOTREADY");
            assert!(place::owed() && cached() == 1);
            plugin.on("DEL", &[]);
            pod.probe().stop("p1").unwrap();
            assert!(!place::owed() && cached() == 0);
            let dels = plugin.count("DEL");
            pod.end();
            assert_eq!(plugin.count("DEL"), dels);
            before.assert_unchanged();
        },
    );
}

/// `delete` answers in its time; what it could not send is owed, and sent by whoever comes next.
#[test]
fn what_delete_could_not_send_is_sent_by_gc() {
    sandboxed(
        "daemon_side::what_delete_could_not_send_is_sent_by_gc",
        || {
            let [plugin] = place::fakes(["fake"]);
            let before = Snapshot::take();
            let pod = Pod::up("p1");
            let infra = pod.record().unwrap().infra.unwrap().pid;
            plugin.on("DEL", &[Act::Exit(1)]);
            pod.kill_supervisor();
            let mut delete = pod.bundle.command(SHIM);
            delete.arg("-bundle").arg(&pod.bundle.dir).arg("delete");
            let output = delete.output().unwrap();
            println!("delete: {output:?}");
            rig::gone(infra);
            rig::called(&plugin, "DEL", 1);
            assert!(place::owed() && cached() == 1);
            plugin.on("DEL", &[]);
            // Who cleans up may still be at it, between two tries.
            eventually(BOUND, "nothing is owed", || {
                podvisor(&["gc"]);
                place::records().is_empty().then_some(())
            });
            let calls = plugin.calls_of("DEL");
            let good = calls.iter().filter(|c| c.end.as_deref() == Some("0"));
            assert_eq!(good.count(), 1, "not repeated once it has succeeded");
            before.assert_unchanged();
        },
    );
}

/// CRI-O's item 30: who waits for a turn on its network can be stopped, and nothing is called for it.
#[test]
fn a_pod_that_waits_for_its_turn_can_be_stopped() {
    sandboxed(
        "daemon_side::a_pod_that_waits_for_its_turn_can_be_stopped",
        || {
            rig::settings("[cni]\nparallel = 1\n");
            let [plugin] = place::fakes(["fake"]);
            plugin.on("ADD", &[Act::Sleep(600.0)]);
            let before = Snapshot::take();
            let first = Pod::create("p1");
            let hanging = first.start_aside(rig::BOUND);
            rig::called(&plugin, "ADD", 1);
            let second = Pod::create("p2");
            let waiting = second.start_aside(rig::BOUND);
            // Long enough to be at its turn, or called if nothing held it off.
            std::thread::sleep(std::time::Duration::from_secs(1));
            assert_eq!(plugin.count("ADD"), 1);
            second.end();
            assert!(waiting.join().unwrap().is_err());
            assert!(!hanging.is_finished(), "the other one is not touched");
            assert_eq!((plugin.count("ADD"), plugin.count("DEL")), (1, 0));
            first.end();
            assert!(hanging.join().unwrap().is_err());
            let ids = |verb| -> Vec<String> {
                let calls = plugin.calls_of(verb);
                let id = |c: &crate::support::fake::Call| c.var("CNI_CONTAINERID").to_owned();
                calls.iter().map(id).collect()
            };
            assert_eq!(
                (ids("ADD"), ids("DEL")),
                (vec!["p1".into()], vec!["p1".into()])
            );
            before.assert_unchanged();
        },
    );
}

/// Entries in libcni's cache.
fn cached() -> usize {
    std::fs::read_dir("/var/lib/cni/results").map_or(0, Iterator::count)
}
