//! Many pods at once on a network that is slower than their client's patience: all come up, with one ADD each.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use crate::kit::{BOUND, Setup, address, end, scope};
use crate::support::{Sandbox, eventually};

/// All pods at once; every one comes up with one ADD of its own, and goes with one DEL.
fn all_come_up(peer: &str, handler: &str, count: usize) {
    let Some(node) = Setup::of(peer).start() else {
        return;
    };
    let before = scope().take();
    let times = node.measured(handler, count);
    let begun = Instant::now();
    let ids = node.all("web", handler, count, times);
    assert_eq!(ids.len(), count);
    println!(
        "{peer} {handler}: deadline {:.1} s: {count} pods up after {:.1} s with {} ADD and {} DEL",
        times.deadline.as_secs_f64(),
        begun.elapsed().as_secs_f64(),
        node.calls().0,
        node.calls().1
    );
    assert_eq!(node.calls(), (count, 0));
    let mut cri = node.cri();
    let mut addresses = BTreeSet::new();
    for id in &ids {
        addresses.insert(address(&mut cri, id));
    }
    assert_eq!(addresses.len(), count);
    for id in &ids {
        end(&mut cri, id);
    }
    let ended = |dels| dels == node.calls().1;
    eventually(BOUND, "every DEL", || ended(count).then_some(()));
    assert_eq!(node.calls(), (count, count));
    before.assert_unchanged();
}

macro_rules! cells {
    ($($(#[$slow:meta])? $name:ident: $peer:literal, $handler:literal, $count:literal;)*) => {$(
        #[test]
        $(#[$slow])?
        fn $name() {
            Sandbox::new(concat!("converge::", stringify!($name)))
                .bound(Duration::from_secs(600))
                .run(|| all_come_up($peer, $handler, $count));
        }
    )*};
}

cells! {
    twenty_pods_of_runc_come_up_under_containerd_21: "containerd-2.1", "runc", 20;
    pods_of_podvisor_come_up_under_containerd_21: "containerd-2.1", "podvisor", 5;
    pods_of_podvisor_come_up_under_containerd_17: "containerd-1.7", "podvisor", 5;
    pods_of_runc_come_up_under_containerd_17: "containerd-1.7", "runc", 3;
    pods_of_runc_come_up_under_containerd_16: "containerd-1.6", "runc", 5;
    pods_of_podvisor_come_up_under_containerd_16: "containerd-1.6", "podvisor", 3;
    #[ignore = "slow"]
    slow_twenty_pods_of_podvisor_under_containerd_21: "containerd-2.1", "podvisor", 20;
    #[ignore = "slow"]
    slow_twenty_pods_of_runc_under_containerd_17: "containerd-1.7", "runc", 20;
    #[ignore = "slow"]
    slow_twenty_pods_of_podvisor_under_containerd_17: "containerd-1.7", "podvisor", 20;
    #[ignore = "slow"]
    slow_twenty_pods_of_runc_under_containerd_16: "containerd-1.6", "runc", 20;
    #[ignore = "slow"]
    slow_twenty_pods_of_podvisor_under_containerd_16: "containerd-1.6", "podvisor", 20;
}

/// The same load without the plugin, for the table in docs/cni-plugin.md.
#[test]
#[ignore = "slow"]
fn slow_the_daemon_alone_does_not_converge() {
    Sandbox::new("converge::slow_the_daemon_alone_does_not_converge")
        .bound(Duration::from_secs(600))
        .run(|| {
            let Some(node) = Setup::of("containerd-2.1").alone().start() else {
                return;
            };
            let mut times = node.measured("runc", 20);
            // Far more than the work of all takes.
            times.limit = times.deadline * 6;
            let begun = Instant::now();
            let up = node.all("web", "runc", 20, times).len();
            let (adds, dels) = node.calls();
            println!(
                "alone: deadline {:.1} s: {up} of 20 pods up after {:.1} s with {adds} ADD and {dels} DEL",
                times.deadline.as_secs_f64(),
                begun.elapsed().as_secs_f64()
            );
            assert_eq!(up, 0);
        });
}
