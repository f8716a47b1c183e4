//! Twenty pods at once through CRI, in containerd's shim mode: no removal ever meets a supervisor that has closed.

use std::time::Duration;

use crate::cri::Cri;
use crate::pods::daemon;
use crate::support::{Containerd, Sandbox, Snapshot, slow};

const PODS: usize = 20;

/// `work` of every pod at once, each over a connection of its own.
fn at_once<T: Send>(daemon: &Containerd, work: impl Fn(&mut Cri, usize) -> T + Sync) -> Vec<T> {
    std::thread::scope(|scope| {
        let start = |n| {
            let work = &work;
            scope.spawn(move || work(&mut Cri::of(daemon), n))
        };
        let threads: Vec<_> = (0..PODS).map(start).collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    })
}

/// A kubelet's way, and that of who removes a running pod at once: RemovePodSandbox stops it.
#[test]
fn twenty_pods_removed_at_once_in_shim_mode_never_meet_a_closed_connection() {
    Sandbox::new("many::twenty_pods_removed_at_once_in_shim_mode_never_meet_a_closed_connection")
        .bound(Duration::from_secs(3600))
        .run(|| {
            let Some(daemon) = daemon() else { return };
            let before = Snapshot::take();
            let rounds = if slow() { 50 } else { 5 };
            for round in 0..rounds {
                let made = at_once(&daemon, |cri, n| {
                    cri.run(&format!("pod{round}-{n}"), "fp-shim", &[]).unwrap()
                });
                let removed = at_once(&daemon, |cri, n| {
                    let stopped = match n % 2 {
                        0 => cri.stop(&made[n]),
                        _ => Ok(()),
                    };
                    stopped.and_then(|()| cri.remove(&made[n]))
                });
                for (n, removed) in removed.into_iter().enumerate() {
                    removed.unwrap_or_else(|e| panic!("round {round}, pod {n}: {e:?}"));
                }
                assert_eq!(Cri::of(&daemon).list(), []);
                before.assert_unchanged();
            }
            let log = daemon.log();
            let closed: Vec<&str> = log
                .lines()
                .filter(|l| l.contains("ttrpc: closed"))
                .collect();
            assert!(closed.is_empty(), "{closed:#?}");
            println!("{} pods made and removed, {PODS} at once", rounds * PODS);
        });
}

/// The daemon is killed and comes back: every pod is there, ready, with its address, and can be removed.
#[test]
fn a_hundred_pods_are_found_again_by_a_daemon_that_was_killed() {
    Sandbox::new("many::a_hundred_pods_are_found_again_by_a_daemon_that_was_killed")
        .bound(Duration::from_secs(580))
        .run(|| {
            let Some(mut daemon) = daemon() else { return };
            // What is left is looked for without the daemon, which is another process in the end.
            daemon.stop();
            let before = Snapshot::take();
            daemon.start_again();
            let mut made = Vec::new();
            for round in 0..5 {
                made.extend(at_once(&daemon, |cri, n| {
                    let id = cri.run(&format!("pod{round}-{n}"), "fp-shim", &[]);
                    let id = id.unwrap();
                    let (_, address) = cri.status(&id).unwrap();
                    (id, address)
                }));
            }
            daemon.kill();
            daemon.start_again();
            let mut cri = Cri::of(&daemon);
            let listed = cri.list();
            assert_eq!(listed.len(), made.len(), "{listed:#?}");
            for (id, address) in &made {
                let (pod, now) = cri.status(id).unwrap();
                assert!(pod.ready, "{pod:?}");
                assert_eq!(&now, address, "{pod:?}");
            }
            for some in made.chunks(PODS) {
                let removed = at_once(&daemon, |cri, n| cri.remove(&some[n].0));
                for removed in removed {
                    removed.unwrap();
                }
            }
            assert_eq!(cri.list(), []);
            daemon.stop();
            before.assert_unchanged();
        });
}
