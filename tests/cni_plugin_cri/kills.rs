//! SIGKILL to the daemon, the plugin and its job, at named points and in between, with the daemon's own next life after it.

use std::path::Path;
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::kit::{BOUND, Node, Setup, Times, address, config, end, scope};
use crate::points::{POINTS, arm, assert_complete, reached, release};
use crate::support::{Sandbox, Snapshot, eventually, podvisor, sandboxed};

const FAULTS: &str = "/run/faults";

/// What the daemon had made of a sandbox that it was killed over is the daemon's.
fn snapshot() -> Snapshot {
    scope()
        .allow("netns /run/netns/cni-")
        .allow("mount /run/netns/cni-")
        .allow("process")
        .allow("socket /run/containerd")
        .allow("cgroup")
        .take()
}

/// The daemon is killed while the network is made, and once more when it is there: its next life takes it all the same.
#[test]
fn a_daemon_that_is_killed_loses_no_work() {
    sandboxed("kills::a_daemon_that_is_killed_loses_no_work", || {
        let Some(mut node) = Setup::of("containerd-2.1").start() else {
            return;
        };
        // What the daemon had made of a sandbox that it was killed over is the daemon's.
        let before = scope()
            .allow("netns /run/netns/cni-")
            .allow("mount /run/netns/cni-")
            .allow("process")
            .allow("socket /run/containerd")
            .take();
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

/// A pod at this point, from its first attempt to its end; the daemon is restarted in between.
fn life(node: &mut Node, number: usize, point: &str, victim: Victim) {
    let dir = Path::new(FAULTS);
    let act = match victim {
        Victim::Itself => "die",
        _ => "hang",
    };
    arm(dir, point, act);
    let name = format!("web{number}");
    let pod = config(&name);
    let mut killed = victim == Victim::Itself;
    for _ in 0..10 {
        // Short, or one that hangs would have to be waited for.
        let deadline = if killed { 60.0 } else { 5.0 };
        let times = Times {
            limit: Duration::from_secs_f64(deadline),
            ..Times::of(deadline)
        };
        let up = std::thread::scope(|scope| {
            let shared = &*node;
            let (name, pod) = (&name, &pod);
            let client = scope.spawn(move || {
                let id = shared.come_up(name, "runc", pod, times)?;
                // Its end is part of its life.
                let mut cri = shared.cri();
                let own = address(&mut cri, &id);
                let ended = cri.stop(&id).and_then(|()| cri.remove(&id));
                println!("{point} {victim:?}: {own}, end: {ended:?}");
                ended.ok()
            });
            if !killed {
                eventually(BOUND, point, || {
                    (reached(dir, point).is_some() || client.is_finished()).then_some(())
                });
                if let Some(pid) = reached(dir, point) {
                    let _ = kill(Pid::from_raw(shared.daemon.pid()), Signal::SIGKILL);
                    if victim == Victim::Both {
                        let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
                    }
                    release(dir);
                }
            }
            // Of a client whose daemon has died nothing is expected.
            client.join().ok().flatten()
        });
        if !killed && reached(dir, point).is_some() {
            killed = true;
            node.daemon.kill();
            node.daemon.start_again();
            let mut cri = node.cri();
            for left in cri.list() {
                let ended = cri.stop(&left.id).and_then(|()| cri.remove(&left.id));
                println!("{point} {victim:?}: left: {ended:?}");
            }
            continue;
        }
        if up.is_some() && reached(dir, point).is_some() {
            return;
        }
        let mut cri = node.cri();
        for left in cri.list() {
            eventually(BOUND, "the end", || {
                cri.stop(&left.id).and_then(|()| cri.remove(&left.id)).ok()
            });
        }
        if reached(dir, point).is_some() && victim == Victim::Itself {
            return;
        }
    }
    panic!("{point} {victim:?}: no end");
}

fn lives(points: &[&'static str], victims: &[Victim]) {
    let Some(mut node) = Setup::of("containerd-2.1")
        .env("PODVISOR_FAULT_DIR", FAULTS)
        .interval(1.0)
        .start()
    else {
        return;
    };
    let before = snapshot();
    let mut number = 0;
    for victim in victims {
        for point in points {
            life(&mut node, number, point, *victim);
            number += 1;
        }
    }
    std::fs::remove_dir_all(FAULTS).unwrap();
    let mut cri = node.cri();
    for left in cri.list() {
        end(&mut cri, &left.id);
    }
    let networks = || std::fs::read_dir("/var/lib/podvisor/networks").map_or(0, Iterator::count);
    eventually(BOUND, "the collection", || {
        podvisor(&["gc"]).ok();
        (networks() == 0).then_some(())
    });
    let (adds, dels) = node.calls();
    println!("{number} lives: {adds} ADD, {dels} DEL");
    assert!(dels >= adds, "{adds} ADD, {dels} DEL");
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
