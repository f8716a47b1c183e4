//! SIGKILL to the daemon, the plugin and its job, at named points and in between, with the daemon's own next life after it.

use std::path::Path;
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::kit::{BOUND, Node, Setup, Times, address, config, end, without_the_daemons};
use crate::owed_kit::{leases, processes};
use crate::points::{POINTS, arm, assert_complete, reached, release};
use crate::support::{Sandbox, eventually, podvisor, sandboxed};

const FAULTS: &str = "/run/faults";

/// The daemon is killed while the network is made, and once more when it is there: its next life takes it all the same.
#[test]
fn a_daemon_that_is_killed_loses_no_work() {
    sandboxed("kills::a_daemon_that_is_killed_loses_no_work", || {
        let Some(mut node) = Setup::of("containerd-2.1").start() else {
            return;
        };
        let before = without_the_daemons().take();
        let times = node.measured("runc", 1);
        let mut cri = node.cri();
        cri.run_within(&config("web"), "runc", Duration::from_secs(2))
            .unwrap_err();
        node.daemon.kill();
        node.daemon.start_again();
        let id = node.come_up("web", "runc", &config("web"), times).unwrap();
        assert_eq!(node.calls(), (1, 0));
        node.daemon.restart();
        let mut cri = node.cri();
        address(&mut cri, &id);
        // A pod deleted while its network is parked.
        cri.run_within(&config("other"), "runc", Duration::from_secs(2))
            .unwrap_err();
        node.daemon.kill();
        node.daemon.start_again();
        let mut cri = node.cri();
        for left in cri.list() {
            end(&mut cri, &left.id);
        }
        eventually(BOUND, "both DELs", || {
            (node.calls() == (2, 2)).then_some(())
        });
        before.assert_unchanged();
    });
}

/// Who dies at a point.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Victim {
    /// Whoever comes to the point: the plugin or its job.
    Itself,
    /// The daemon; the other goes on.
    Daemon,
    /// Both.
    Both,
}

/// A pod whose life comes to the point, where somebody dies, and its next life.
fn life(node: &mut Node, name: &str, point: &str, victim: Victim) {
    let dir = Path::new(FAULTS);
    let act = match victim {
        Victim::Itself => "die",
        _ => "hang",
    };
    arm(dir, point, act);
    let met = (0..10).any(|_| {
        tried(node, name, point, victim);
        reached(dir, point).is_some()
    });
    assert!(met, "{point} was not reached");
    if victim != Victim::Itself {
        node.daemon.kill();
        node.daemon.start_again();
    }
    clear(node);
    let id = node.come_up(name, "runc", &config(name), Times::of(60.0));
    let own = address(&mut node.cri(), &id.unwrap());
    println!("{point} {victim:?}: {own}");
    clear(node);
}

/// A pod from its first attempt to its end, as far as it comes.
fn tried(node: &Node, name: &str, point: &str, victim: Victim) {
    let dir = Path::new(FAULTS);
    // Short where one hangs that would have to be waited for.
    let deadline = match victim {
        Victim::Itself => 60.0,
        _ => 5.0,
    };
    let times = Times {
        limit: Duration::from_secs_f64(deadline),
        ..Times::of(deadline)
    };
    std::thread::scope(|scope| {
        let client = scope.spawn(move || {
            let id = node.come_up(name, "runc", &config(name), times)?;
            let mut cri = node.cri();
            cri.stop(&id).and_then(|()| cri.remove(&id)).ok()
        });
        if victim != Victim::Itself {
            eventually(BOUND, point, || {
                (reached(dir, point).is_some() || client.is_finished()).then_some(())
            });
            if let Some(pid) = reached(dir, point) {
                let _ = kill(Pid::from_raw(node.daemon.pid()), Signal::SIGKILL);
                if victim == Victim::Both {
                    let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
                }
                release(dir);
            }
        }
        // A client whose daemon has died panics.
        let _ = client.join();
    });
}

/// What the daemon has goes, as a kubelet does it: again until it works.
fn clear(node: &Node) {
    let mut cri = node.cri();
    for left in cri.list() {
        eventually(BOUND, "the end", || {
            let ended = cri.stop(&left.id).and_then(|()| cri.remove(&left.id));
            ended
                .map_err(|error| println!("{}: {error:?}", left.name))
                .ok()
        });
    }
}

fn lives(points: &[&'static str], victims: &[Victim]) {
    let Some(mut node) = Setup::of("containerd-2.1")
        .env("PODVISOR_FAULT_DIR", FAULTS)
        .interval(1.0)
        .start()
    else {
        return;
    };
    let before = without_the_daemons().take();
    let mut number = 0;
    for victim in victims {
        for point in points {
            life(&mut node, &format!("web{number}"), point, *victim);
            number += 1;
        }
    }
    std::fs::remove_dir_all(FAULTS).unwrap();
    let networks = || std::fs::read_dir("/var/lib/podvisor/networks").map_or(0, Iterator::count);
    eventually(BOUND, "the collection", || {
        podvisor(&["gc"]).ok();
        (networks() == 0).then_some(())
    });
    let (adds, dels) = node.calls();
    println!("{number} lives: {adds} ADD, {dels} DEL");
    assert!(dels >= adds, "{adds} ADD, {dels} DEL");
    assert!(leases("pods").is_empty());
    eventually(BOUND, "every process of ours has left", || {
        processes(|line| line.contains("podvisor-cni"))
            .is_empty()
            .then_some(())
    });
    before.assert_unchanged();
}

/// One point of each kind; all of them in the slow tests.
const SOME: [&str; 4] = [
    "cni-add.plugin.after",
    "cni-claim.after",
    "cni-plugin.answer.before",
    "cni-del.plugin.after",
];

#[test]
fn a_death_at_some_steps_keeps_no_pod_down() {
    sandboxed("kills::a_death_at_some_steps_keeps_no_pod_down", || {
        lives(&SOME, &[Victim::Itself, Victim::Daemon]);
    });
}

macro_rules! all_points {
    ($($name:ident: $victim:expr;)*) => {$(
        #[test]
        #[ignore = "slow"]
        fn $name() {
            assert_complete();
            Sandbox::new(concat!("kills::", stringify!($name)))
                .bound(Duration::from_secs(900))
                .run(|| lives(POINTS, &[$victim]));
        }
    )*};
}

all_points! {
    slow_a_death_at_any_step_keeps_no_pod_down: Victim::Itself;
    slow_a_daemon_that_dies_at_any_step_keeps_no_pod_down: Victim::Daemon;
    slow_a_death_of_both_at_any_step_keeps_no_pod_down: Victim::Both;
}
