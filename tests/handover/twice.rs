//! Two sandboxes of one pod key, the first of which is somebody's: two pods with nothing in common.

use crate::kit::{self, INTERVAL};
use crate::rig::{self, BOUND, Pod};
use crate::support::{Snapshot, sandboxed};

/// The first is ready when the second comes.
fn both_up(round: usize) -> [(String, Pod); 2] {
    ["a", "b"].map(|name| {
        let id = format!("{name}{round}");
        let pod = kit::create(&id);
        pod.probe().start(&id, BOUND).unwrap();
        (id, pod)
    })
}

fn works(pod: &Pod) {
    assert_eq!(pod.probe().status(&pod.id).unwrap().0, "SANDBOX_READY");
    let bare = kit::ips(pod)[0].clone();
    assert!(kit::real_ips(pod).contains(&bare), "{bare}");
}

/// Each has a network of its own, both are listed, neither is meant by their name alone, and each goes without the other,
/// by whoever removes it and in whatever order.
#[test]
fn a_second_sandbox_of_a_ready_pod_is_a_pod_of_its_own() {
    sandboxed(
        "twice::a_second_sandbox_of_a_ready_pod_is_a_pod_of_its_own",
        || {
            kit::parking(INTERVAL, "");
            let plugin = kit::bridge();
            let before = Snapshot::take();
            let removals: [fn(&Pod); 4] = [
                |pod| drop(kit::ask(&["rm", "-f", &pod.id]).ok()),
                Pod::end,
                |pod| drop(pod.bundle.delete()),
                |pod| {
                    pod.kill_supervisor();
                    pod.bundle.delete();
                },
            ];
            for (round, remove) in removals.into_iter().enumerate() {
                let both = both_up(round);
                let [(one, first), (two, second)] = &both;
                let of = |pod: &Pod| {
                    let network = pod.record().unwrap().network;
                    assert!(network.taken.is_none());
                    (network.place, network.netns, network.ips)
                };
                let (its, others) = (of(first), of(second));
                assert!(its.0 != others.0 && its.1 != others.1 && its.2 != others.2);
                assert_eq!((kit::shown(one), kit::shown(two)), ready_twice());
                let meant = kit::ask(&["inspect", "web"]).code_is(1);
                for part in ["it could be", one.as_str(), two.as_str()] {
                    assert!(meant.stderr.contains(part), "{part} in {meant:?}");
                }
                // Which goes first is turned round from time to time.
                let (gone, left) = match round % 2 {
                    0 => (first, second),
                    _ => (second, first),
                };
                remove(gone);
                kit::until(&gone.id, "");
                kit::ask(&["gc"]).ok();
                works(left);
                // What is left is meant by the name again.
                let meant = kit::ask(&["inspect", "web"]).ok().stdout;
                assert!(meant.contains(&left.id), "{meant}");
                remove(left);
                kit::until(&left.id, "");
                kit::adds_and_dels(&plugin, (round + 1) * 2);
            }
            before.assert_unchanged();
            assert_eq!((kit::records(), kit::offered()), (0, 0));
        },
    );
}

fn ready_twice() -> (String, String) {
    ("ready".into(), "ready".into())
}

/// Neither is offered to a third; one that is parked beside them is, and leaves them alone.
#[test]
fn a_third_sandbox_takes_what_is_parked_and_not_what_is_somebodys() {
    sandboxed(
        "twice::a_third_sandbox_takes_what_is_parked_and_not_what_is_somebodys",
        || {
            kit::parking(INTERVAL, "");
            let plugin = kit::bridge();
            let before = Snapshot::take();
            let first = kit::create("a");
            first.probe().start("a", BOUND).unwrap();
            let (_, keeper) = kit::parked("b", &plugin);
            let third = kit::create("c");
            third.probe().start("c", BOUND).unwrap();
            rig::gone(keeper);
            assert_eq!(third.record().unwrap().network.taken.unwrap().from, "b");
            works(&first);
            works(&third);
            assert_eq!(plugin.count("ADD"), 2);
            first.end();
            works(&third);
            third.end();
            kit::adds_and_dels(&plugin, 2);
            before.assert_unchanged();
            assert_eq!((kit::records(), kit::offered()), (0, 0));
        },
    );
}
