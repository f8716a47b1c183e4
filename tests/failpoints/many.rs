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
