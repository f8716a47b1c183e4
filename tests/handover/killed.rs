//! SIGKILL of the old supervisor, the new one, or both, at any instant of a hand-over: in the end one owner or none.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use nix::fcntl::{Flock, FlockArg};
use nix::sys::signal::Signal;

use crate::daemon::{shims, signal};
use crate::kit::{self, INTERVAL};
use crate::rig::{self, BOUND, Pod, gone, kill};
use crate::support::fake::Fake;
use crate::support::{Sandbox, Snapshot, bin, run, sandboxed};

#[test]
fn the_network_of_a_killed_keeper_goes_to_the_next_sandbox() {
    sandboxed(
        "killed::the_network_of_a_killed_keeper_goes_to_the_next_sandbox",
        || {
            kit::parking(INTERVAL, "");
            let plugin = kit::bridge();
            let before = Snapshot::take();
            let (_, keeper) = kit::parked("p1", &plugin);
            kill(keeper);
            let second = kit::create("p2");
            second.probe().start("p2", BOUND).unwrap();
            assert_eq!(second.record().unwrap().network.taken.unwrap().from, "p1");
            assert!(kit::real_ips(&second).contains(&kit::ips(&second)[0]));
            second.end();
            kit::adds_and_dels(&plugin, 1);
            before.assert_unchanged();
            assert_eq!((kit::records(), kit::offered()), (0, 0));
        },
    );
}

/// Killed while the plugin was at work: half a network is nobody's.
#[test]
fn half_a_network_of_a_killed_keeper_has_its_del_before_the_next_add() {
    sandboxed(
        "killed::half_a_network_of_a_killed_keeper_has_its_del_before_the_next_add",
        || {
            kit::parking(INTERVAL, "");
            let plugin = kit::bridge();
            let before = Snapshot::take();
            let _gate = kit::closed(&plugin);
            let first = kit::timed_out("p1", &plugin);
            let keeper = first.supervisor();
            first.probe().shutdown("p1").unwrap();
            kit::until("p1", "network starting");
            kill(keeper);
            plugin.on("ADD", &[]);
            let second = kit::create("p2");
            second.probe().start("p2", BOUND).unwrap();
            assert!(second.record().unwrap().network.taken.is_none());
            let ids = |verb| -> Vec<String> {
                let calls = plugin.calls_of(verb);
                calls
                    .iter()
                    .map(|c| c.var("CNI_CONTAINERID").to_owned())
                    .collect()
            };
            assert_eq!(
                (ids("ADD"), ids("DEL")),
                (vec!["p1".into(), "p2".into()], vec!["p1".into()])
            );
            second.end();
            kit::adds_and_dels(&plugin, 2);
            before.assert_unchanged();
            assert_eq!((kit::records(), kit::offered()), (0, 0));
        },
    );
}

/// The netns is gone, or a plain file is in its place: not whole.
#[test]
fn a_parked_network_without_its_netns_is_not_taken() {
    sandboxed(
        "killed::a_parked_network_without_its_netns_is_not_taken",
        || {
            kit::parking(INTERVAL, "");
            let plugin = kit::bridge();
            let before = Snapshot::take();
            let (_, keeper) = kit::parked("p1", &plugin);
            let pins = fs::read_dir("/run/podvisor/netns").unwrap().flatten();
            for pin in pins.map(|e| e.path()) {
                nix::mount::umount2(&pin, nix::mount::MntFlags::MNT_DETACH).unwrap();
            }
            let second = kit::create("p2");
            second.probe().start("p2", BOUND).unwrap();
            gone(keeper);
            assert!(second.record().unwrap().network.taken.is_none());
            assert_eq!((plugin.count("ADD"), plugin.count("DEL")), (2, 1));
            second.end();
            before.assert_unchanged();
            assert_eq!((kit::records(), kit::offered()), (0, 0));
        },
    );
}

/// Who has taken a network over and dies leaves it to whoever cleans up: one DEL, by the names of the ADD.
#[test]
fn a_killed_owner_of_a_network_that_was_taken_over_is_undone_from_its_record() {
    sandboxed(
        "killed::a_killed_owner_of_a_network_that_was_taken_over_is_undone_from_its_record",
        || {
            kit::parking(INTERVAL, "");
            let plugin = kit::bridge();
            let before = Snapshot::take();
            for (n, damaged) in [false, true].into_iter().enumerate() {
                let (_, keeper) = kit::parked(&format!("a{n}"), &plugin);
                let id = format!("b{n}");
                let second = kit::create(&id);
                second.probe().start(&id, BOUND).unwrap();
                gone(keeper);
                let supervisor = second.supervisor();
                if damaged {
                    // What says whose it is, and the journal.
                    let place = second.record().unwrap().network.place;
                    let dir = Path::new("/var/lib/podvisor/networks").join(place);
                    fs::write(dir.join("pod.json"), "").unwrap();
                    assert_eq!(kit::ask(&["gc", "--dry-run"]).ok().stdout, "");
                }
                kill(supervisor);
                second.bundle.delete();
                kit::adds_and_dels(&plugin, n + 1);
            }
            before.assert_unchanged();
            assert_eq!((kit::records(), kit::offered()), (0, 0));
        },
    );
}

/// Held up by a lock, each side is killed just before the network changes hands.
#[test]
fn a_claimant_that_dies_before_the_change_leaves_the_network_parked() {
    sandboxed(
        "killed::a_claimant_that_dies_before_the_change_leaves_the_network_parked",
        || {
            kit::parking(INTERVAL, "");
            let plugin = kit::bridge();
            let before = Snapshot::take();
            let (_, keeper) = kit::parked("p1", &plugin);
            let second = kit::create("p2");
            let keys = fs::File::open("/run/podvisor/.keys").unwrap();
            let held = Flock::lock(keys, FlockArg::LockExclusive).unwrap();
            let caller = second.start_aside(BOUND);
            std::thread::sleep(Duration::from_millis(500));
            let claimant = second.supervisor();
            kill(claimant);
            assert!(caller.join().unwrap().is_err());
            assert_eq!(kit::shown("p1"), "network parked");
            drop(held);
            second.bundle.delete();
            assert_eq!(kit::shown("p1"), "network parked", "it never was p2's");
            kill(keeper);
            let third = kit::create("p3");
            third.probe().start("p3", BOUND).unwrap();
            third.end();
            kit::adds_and_dels(&plugin, 1);
            before.assert_unchanged();
            assert_eq!((kit::records(), kit::offered()), (0, 0));
        },
    );
}

/// Whatever is killed when: a third sandbox of the pod comes up, everything is undone in the end, each ADD by one DEL.
#[test]
fn kills_at_random_instants_end_with_one_owner_or_none() {
    let name = "killed::kills_at_random_instants_end_with_one_owner_or_none";
    kills(name, 10, Duration::from_secs(300));
}

#[test]
#[ignore = "slow: two hundred of them"]
fn slow_two_hundred_kills_at_random_instants_end_with_one_owner_or_none() {
    let name = "killed::slow_two_hundred_kills_at_random_instants_end_with_one_owner_or_none";
    kills(name, 200, Duration::from_secs(3500));
}

fn kills(name: &str, rounds: usize, bound: Duration) {
    Sandbox::new(name).bound(bound).run(|| {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
        let seed = std::env::var("PODVISOR_SEED")
            .ok()
            .and_then(|s| s.parse().ok())
            .unwrap_or(now.as_nanos() as u64);
        println!("PODVISOR_SEED={seed}");
        let mut random = Random(seed | 1);
        kit::parking(INTERVAL, "");
        let plugin = kit::bridge();
        let before = Snapshot::take();
        for round in 0..rounds {
            one_round(round, &plugin, &mut random);
            // A fake that remembers thousands of calls takes seconds to look through them.
            plugin.forget();
        }
        before.assert_unchanged();
    });
}

fn one_round(round: usize, plugin: &Fake, random: &mut Random) {
    let [a, b, c] = ["a", "b", "c"].map(|name| format!("{name}{round}"));
    // A keeper, a whole pod that nobody has claimed, or one that is being shut down while its plugin ends.
    let kind = random.below(3);
    let first = match kind {
        0 => kit::parked(&a, plugin).0,
        kind => {
            let gate = kit::closed(plugin);
            let pod = kit::timed_out(&a, plugin);
            if kind == 1 {
                kit::open(&gate);
                kit::until(&a, "parked");
                plugin.on("ADD", &[]);
            }
            pod
        }
    };
    let old = shims();
    let second = kit::create(&b);
    let new: Vec<i32> = shims()
        .into_iter()
        .filter(|pid| !old.contains(pid))
        .collect();
    let shutdown = (kind == 2).then(|| {
        let id = a.clone();
        first.aside(move |probe| probe.shutdown(&id))
    });
    let caller = second.start_aside(Duration::from_secs(5));
    if kind == 2 {
        kit::open(Path::new("/run/gate"));
        plugin.on("ADD", &[]);
    }
    let micros = random.below(60_000);
    let victims = random.below(3);
    println!("round {round}: kind {kind}, after {micros} us, victims {victims}");
    std::thread::sleep(Duration::from_micros(micros));
    let doomed: Vec<i32> = match victims {
        0 => old,
        1 => new,
        _ => [old, new].concat(),
    };
    for pid in doomed {
        if rig::alive(pid) {
            signal(pid, Signal::SIGKILL);
            gone(pid);
        }
    }
    if let Some(shutdown) = shutdown {
        println!("round {round}: {:?}", shutdown.join().unwrap().is_ok());
    }
    println!(
        "round {round}: {:?}",
        caller.join().unwrap().map_err(|e| e.to_string())
    );
    // One of them at most is ready, and then it has the network.
    let ready = |pod: &Pod| {
        pod.record()
            .is_some_and(|r| format!("{:?}", r.state) == "Ready" && r.is_supervised())
    };
    assert!(!(ready(&first) && ready(&second)));
    let third = kit::create(&c);
    let begun = std::time::Instant::now();
    while let Err(error) = third.probe().start(&c, Duration::from_secs(5)) {
        assert!(begun.elapsed() < BOUND, "{error}");
    }
    assert!(kit::real_ips(&third).contains(&kit::ips(&third)[0]));
    if ready(&second) {
        assert_ne!(
            kit::ips(&second),
            kit::ips(&third),
            "two pods, two networks"
        );
    }
    // What the dead have left goes, and nothing of the living with it.
    first.bundle.delete();
    second.bundle.delete();
    kit::ask(&["gc"]);
    assert!(kit::real_ips(&third).contains(&kit::ips(&third)[0]));
    third.end();
    kit::ask(&["gc", "--all"]).ok();
    crate::support::eventually(BOUND, "the last supervisor leaves", || {
        shims().is_empty().then_some(())
    });
    let adds: std::collections::BTreeSet<String> = ids(plugin, "ADD");
    assert_eq!(adds, ids(plugin, "DEL"));
    assert_eq!((kit::records(), kit::offered()), (0, 0), "round {round}");
}

fn ids(plugin: &Fake, verb: &str) -> std::collections::BTreeSet<String> {
    let calls = plugin.calls_of(verb).into_iter();
    calls.map(|c| c.var("CNI_CONTAINERID").to_owned()).collect()
}

/// After a reboot nothing is taken over: the DEL is owed.
#[test]
fn a_network_that_was_parked_before_a_reboot_is_owed_its_del() {
    sandboxed(
        "killed::a_network_that_was_parked_before_a_reboot_is_owed_its_del",
        || {
            kit::parking(INTERVAL, "");
            let plugin = kit::bridge();
            let before = Snapshot::take();
            let (_, keeper) = kit::parked("p1", &plugin);
            kill(keeper);
            // Even where the runtime directory outlives the boot.
            let boot = ("PODVISOR_BOOT_ID", "00000000-0000-4000-8000-000000000001");
            let asked = |args: &[&str]| {
                let mut command = Command::new(bin::PODVISOR);
                command
                    .args(["--namespace", rig::NAMESPACE])
                    .args(args)
                    .env(boot.0, boot.1);
                run(&mut command, BOUND)
            };
            let listed = asked(&["ps", "-a"]).ok().stdout;
            assert!(listed.contains("network pending"), "{listed}");
            let bundle = crate::daemon::Bundle::new("p2").env(boot.0, boot.1);
            let second = Pod::in_bundle(bundle);
            second.probe().create("p2", &rig::config("web")).unwrap();
            second.probe().start("p2", BOUND).unwrap();
            let journal = fs::read_to_string(second.dir().join("journal.json")).unwrap();
            assert!(journal.contains("\"taken\":null"), "{journal}");
            assert_eq!(plugin.calls_of("DEL")[0].var("CNI_CONTAINERID"), "p1");
            second.end();
            asked(&["gc"]).ok();
            kit::adds_and_dels(&plugin, 2);
            before.assert_unchanged();
            assert_eq!((kit::records(), kit::offered()), (0, 0));
        },
    );
}

/// xorshift64*.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) % bound
    }
}
