//! Every process killed at every step, the machine too: the pod comes up all the same, and nothing is left of it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use serde_json::Value;

use crate::kit::{self, Attempt, BOUND, bridge, settings, snapshot};
use crate::owed_kit::{self, Boot};
use crate::points::{POINTS, arm, assert_complete, reached, release};
use crate::support::fake::Fake;
use crate::support::{Sandbox, eventually, podvisor, sandboxed};

/// Attempts of a pod; the kubelet's patience is longer.
const ATTEMPTS: u32 = 6;

/// One pod at one point.
struct Life<'a> {
    list: &'a Value,
    number: usize,
    point: &'static str,
    dir: PathBuf,
}

impl<'a> Life<'a> {
    fn new(list: &'a Value, number: usize, point: &'static str, act: &str) -> Self {
        let dir = Path::new("/run/faults").join(number.to_string());
        arm(&dir, point, act);
        Self {
            list,
            number,
            point,
            dir,
        }
    }

    fn attempt(&self, n: u32) -> Attempt {
        let number = self.number;
        let mut attempt = Attempt::of(
            &format!("web{number}"),
            &format!("p{number}a{n}"),
            self.list,
        );
        let fault = (
            "PODVISOR_FAULT_DIR".to_owned(),
            self.dir.display().to_string(),
        );
        attempt.env.push(fault);
        attempt
    }

    /// As a kubelet lives it: attempts until one has the network, then its end.
    fn live(&self, from: u32) {
        let point = self.point;
        let mut up = None;
        for n in from..from + ATTEMPTS {
            let attempt = self.attempt(n);
            let said = attempt.add();
            if said.code == Some(0) {
                attempt.has(&said.ip());
                up = Some(attempt);
                break;
            }
            println!("{point}: attempt {n}: {said:?}");
            self.until_deleted(&attempt);
            attempt.forget();
        }
        let up = up.unwrap_or_else(|| panic!("{point}: no attempt came up"));
        self.until_deleted(&up);
        up.forget();
    }

    fn until_deleted(&self, attempt: &Attempt) {
        let point = self.point;
        eventually(BOUND, "DEL succeeds", || {
            let said = attempt.del();
            if said.code != Some(0) {
                println!("{point}: DEL: {said:?}");
            }
            (said.code == Some(0)).then_some(())
        });
    }

    fn assert_reached(&self) {
        let hits = fs::read_to_string(self.dir.join("hits")).unwrap();
        assert!(
            reached(&self.dir, self.point).is_some(),
            "{} was not reached: {hits}",
            self.point
        );
    }

    /// Attempts, each with its ADD and its DEL, until somebody hangs at the point; the attempt that this was in, with its
    /// caller.
    fn until_it_hangs(&self, boot: Option<&Boot>) -> (Attempt, Option<Child>) {
        for n in 0..ATTEMPTS {
            let mut attempt = self.attempt(n);
            attempt.env.extend(boot.map(Boot::variable));
            for verb in ["ADD", "DEL"] {
                let mut caller = called(&attempt, verb);
                let ended = eventually(BOUND, self.point, || {
                    let ended = caller.try_wait().unwrap().is_some();
                    (ended || reached(&self.dir, self.point).is_some()).then_some(ended)
                });
                if reached(&self.dir, self.point).is_some() {
                    return (attempt, (!ended).then_some(caller));
                }
            }
            attempt.forget();
        }
        panic!("{} was not reached", self.point);
    }
}

/// A daemon that calls the plugin, and does nothing else: killing it is that daemon's death.
fn called(attempt: &Attempt, verb: &str) -> Child {
    let script = format!("{} >/dev/null 2>&1; exit 0", kit::PLUGIN);
    let mut command = Command::new("sh");
    command.args(["-c", &script]).env_clear();
    for (name, value) in attempt.command(verb).get_envs() {
        command.env(name, value.unwrap_or_default());
    }
    let mut child = command.stdin(Stdio::piped()).spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    std::io::Write::write_all(&mut stdin, attempt.conf.to_string().as_bytes()).unwrap();
    child
}

/// What nobody came back for ends by itself, or by the collection after a crash.
fn settled(plugin: &Fake) {
    eventually(BOUND, "every job leaves", || {
        kit::jobs().is_empty().then_some(())
    });
    let gc = podvisor(&["gc"]);
    println!("gc: {}{}", gc.stdout, gc.stderr);
    assert_eq!(gc.code, Some(0), "{gc:?}");
    let (adds, dels) = (plugin.count("ADD"), plugin.count("DEL"));
    println!("{} lives: {adds} ADD, {dels} DEL", POINTS.len());
    assert!(dels >= adds, "{adds} ADD, {dels} DEL");
    fs::remove_dir_all("/run/faults").unwrap();
}

fn lives(act: &str) {
    assert_complete();
    settings(1.0);
    let (plugin, list) = bridge();
    let before = snapshot();
    for (number, point) in POINTS.iter().enumerate() {
        let life = Life::new(&list, number, point, act);
        life.live(0);
        life.assert_reached();
    }
    settled(&plugin);
    before.assert_unchanged();
}

#[test]
fn a_death_at_any_step_keeps_no_pod_down_and_leaves_nothing() {
    sandboxed(
        "faults::a_death_at_any_step_keeps_no_pod_down_and_leaves_nothing",
        || lives("die"),
    );
}

#[test]
#[ignore = "slow"]
fn slow_a_failure_at_any_step_keeps_no_pod_down_and_leaves_nothing() {
    Sandbox::new("faults::slow_a_failure_at_any_step_keeps_no_pod_down_and_leaves_nothing")
        .run(|| lives("fail(no)"));
}

/// The daemon dies while the plugin, or its job, is at this point; they go on without it. Its next life may know of the
/// attempt and delete it, or not.
#[test]
fn a_daemon_that_dies_at_any_step_keeps_no_pod_down_and_leaves_nothing() {
    sandboxed(
        "faults::a_daemon_that_dies_at_any_step_keeps_no_pod_down_and_leaves_nothing",
        || {
            settings(1.0);
            let (plugin, list) = bridge();
            let before = snapshot();
            for (number, point) in POINTS.iter().enumerate() {
                let life = Life::new(&list, number, point, "hang");
                let (attempt, caller) = life.until_it_hangs(None);
                if let Some(mut caller) = caller {
                    caller.kill().unwrap();
                    caller.wait().unwrap();
                }
                release(&life.dir);
                if number % 2 == 0 {
                    life.until_deleted(&attempt);
                }
                life.live(ATTEMPTS);
                // Sooner or later it, or whoever cleans up after it, sees the attempt.
                life.until_deleted(&attempt);
                attempt.forget();
            }
            settled(&plugin);
            before.assert_unchanged();
        },
    );
}

/// Power off and on at this point: what is left is the DEL of what was begun, and after it nothing.
#[test]
fn a_reboot_at_any_step_leaves_what_the_collection_ends() {
    sandboxed(
        "faults::a_reboot_at_any_step_leaves_what_the_collection_ends",
        || {
            settings(1.0);
            let (plugin, list) = bridge();
            let before = snapshot();
            let mut boot: Option<Boot> = None;
            for (number, point) in POINTS.iter().enumerate() {
                fs::create_dir_all("/run/netns").unwrap();
                let life = Life::new(&list, number, point, "hang");
                let (attempt, caller) = life.until_it_hangs(boot.as_ref());
                attempt.forget();
                let next = owed_kit::reboot(u32::try_from(number).unwrap() + 1);
                if let Some(mut caller) = caller {
                    caller.wait().unwrap();
                }
                let gc = next.podvisor(&["gc", "--boot"]);
                assert_eq!(gc.code, Some(0), "{point}: {gc:?}");
                let records = owed_kit::records();
                assert!(records.is_empty(), "{point}: {records:?}");
                let leases = owed_kit::leases("pods");
                assert!(leases.is_empty(), "{point}: {leases:?}");
                boot = Some(next);
            }
            let (adds, dels) = (plugin.count("ADD"), plugin.count("DEL"));
            assert!(dels >= adds, "{adds} ADD, {dels} DEL");
            fs::remove_dir_all("/run/faults").unwrap();
            for dir in ["/run/netns", "/run/podvisor", "/run/podvisor/netns"] {
                fs::create_dir_all(dir).unwrap();
            }
            before.assert_unchanged();
        },
    );
}
