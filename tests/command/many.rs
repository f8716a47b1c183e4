//! Many pods, one after another and at once.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use crate::support::{Sandbox, Snapshot, cni, podvisor, rootfs};

use crate::kit::Kit;

#[test]
fn two_hundred_pods_run_and_removed_leave_nothing() {
    let name = "many::two_hundred_pods_run_and_removed_leave_nothing";
    Sandbox::new(name).bound(Duration::from_secs(500)).run(|| {
        let kit = Kit {
            rootfs: rootfs::make(),
        };
        cni::bridge("testnet", "pvt0", "10.87.1.0/24")
            .portmap()
            .write();
        let before = Snapshot::take();
        let next = AtomicU32::new(0);
        std::thread::scope(|scope| {
            for worker in 0..4 {
                let (kit, next) = (&kit, &next);
                scope.spawn(move || {
                    while next.fetch_add(1, Ordering::Relaxed) < 200 {
                        let name = format!("worker-{worker}");
                        let ended = kit
                            .run(&["--rm", "--name", &name], "hostname; exit 7")
                            .code_is(7);
                        assert_eq!(ended.stdout, format!("{name}\n"), "{ended:#?}");
                        assert_eq!(ended.stderr, "");
                    }
                });
            }
        });
        before.assert_unchanged();
    });
}

/// The first pods of a network make its bridge, all at the same time.
#[test]
fn twenty_pods_at_once_on_a_new_bridge_have_twenty_addresses() {
    let name = "many::twenty_pods_at_once_on_a_new_bridge_have_twenty_addresses";
    Sandbox::new(name).run(|| {
        let kit = Kit {
            rootfs: rootfs::make(),
        };
        cni::bridge("fresh", "pvfresh0", "10.87.2.0/24")
            .write_in(std::path::Path::new(cni::CONFIGS));
        let before = crate::support::Scope::default()
            .allow("link pvfresh0")
            .take();
        std::thread::scope(|scope| {
            for n in 0..20 {
                let kit = &kit;
                scope.spawn(move || kit.detached(&["--name", &format!("pod-n{n}")], "sleep 1000"));
            }
        });
        let pods = crate::kit::json(&["ps", "--json"]);
        let addresses: BTreeSet<&str> = pods
            .as_array()
            .unwrap()
            .iter()
            .map(|pod| pod["ips"][0].as_str().unwrap())
            .collect();
        assert_eq!(addresses.len(), 20, "{pods:#}");
        // The last can talk to the first.
        let first = crate::kit::address("pod-n0");
        podvisor(&["exec", "pod-n19", "ping", "-c", "1", "-W", "5", &first]).ok();
        let names: Vec<String> = (0..20).map(|n| format!("pod-n{n}")).collect();
        let mut line = vec!["rm", "-f"];
        line.extend(names.iter().map(String::as_str));
        let removed = podvisor(&line).ok();
        assert_eq!(removed.stdout.lines().count(), 20);
        before.assert_unchanged();
    });
}

/// FL-052: pods of a second, 200 in a minute; each is stopped about when it ends by itself.
#[test]
fn fl_052_short_lives_that_are_stopped_as_they_end_leave_no_supervisor() {
    let name = "many::fl_052_short_lives_that_are_stopped_as_they_end_leave_no_supervisor";
    let pods: u32 = if crate::support::slow() { 1000 } else { 40 };
    Sandbox::new(name).bound(Duration::from_secs(900)).run(|| {
        let kit = Kit {
            rootfs: rootfs::make(),
        };
        cni::bridge("testnet", "pvt0", "10.87.1.0/24")
            .portmap()
            .write();
        let before = Snapshot::take();
        let begun = Instant::now();
        std::thread::scope(|scope| {
            for n in 0..pods {
                let kit = &kit;
                std::thread::sleep((begun + EVERY * n).saturating_duration_since(Instant::now()));
                scope.spawn(move || short_life(kit, n));
            }
        });
        println!("{pods} short lives in {:?}", begun.elapsed());
        before.assert_unchanged();
    });
}

/// Of 200 in a minute.
const EVERY: Duration = Duration::from_millis(300);

/// A pod that removes itself when its second is over, or one that is kept until it is removed; stopped at that moment.
fn short_life(kit: &Kit, n: u32) {
    let name = format!("cron-{n}");
    // From a tenth of a second before the end to a tenth after it.
    let until_stop = Duration::from_millis(900 + u64::from(n * 7 % 200));
    let script = "echo up; sleep 1";
    if n.is_multiple_of(2) {
        kit.detached(&["--name", &name], script);
        std::thread::sleep(until_stop);
        podvisor(&["stop", &name]).ok();
        podvisor(&["rm", &name]).ok();
    } else {
        let mut running = kit.background(&["--rm", "--name", &name], script);
        running.wait_for("up");
        std::thread::sleep(until_stop);
        let stopped = podvisor(&["stop", &name]);
        assert!(
            stopped.code == Some(0) || stopped.stderr.contains("no pod"),
            "{stopped:#?}"
        );
        let (code, signal) = running.end();
        // 143: the stop came first. 0: the second was over.
        assert!(
            matches!(code, Some(0 | 137 | 143)) && signal.is_none(),
            "{code:?} {signal:?} {}",
            running.stderr()
        );
    }
}
