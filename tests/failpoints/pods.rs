//! Through CRI, in containerd's podsandbox mode: the scenarios of its own `sandbox_run_rollback` tests, and the same with
//! other methods failing.

use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use crate::cri::Cri;
use crate::image::{self, PAUSE};
use crate::support::{Containerd, Snapshot, cni, eventually, require, sandboxed};
use crate::{RUNTIME, annotations};

/// A containerd 2.1 that runs pods with our failing shim, and its pause image.
pub fn daemon() -> Option<Containerd> {
    let peer = require::peer("containerd-2.1")?;
    cni::use_real_plugins()?;
    cni::bridge("cri", "podvcri0", "10.98.2.0/24").write();
    let plugin = "plugins.\"io.containerd.cri.v1.runtime\"";
    let handler = |name: &str, more: &str| {
        format!(
            "[{plugin}.containerd.runtimes.{name}]\nruntime_type = \"{RUNTIME}\"\n\
             pod_annotations = [\"io.containerd.runtime.v2.shim.failpoint.*\"]\n{more}\n"
        )
    };
    let config = format!(
        "{}{}[{plugin}]\nrestrict_oom_score_adj = true\n\
         [plugins.\"io.containerd.cri.v1.images\".pinned_images]\nsandbox = \"{PAUSE}\"\n",
        handler("fp", ""),
        handler("fp-shim", "sandboxer = \"shim\""),
    );
    let daemon = Containerd::builder(&peer).config(&config).start();
    image::import(&daemon);
    Some(daemon)
}

/// One pod: what fails, the text that its caller is told (none: it comes up), and whether it is kept for the removal.
struct Scenario {
    name: &'static str,
    handler: &'static str,
    failing: &'static [(&'static str, &'static str)],
    told: Option<&'static str>,
    kept: Kept,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kept {
    /// Listed, not ready, with its address.
    NotReady,
    /// Ready, and not ready after a restart of the daemon.
    UntilRestart,
    /// Ready all the time.
    Ready,
    /// Rolled back at once, or kept when the daemon saw the roll-back fail: both are its business.
    Either,
}

const SCENARIOS: [Scenario; 11] = [
    // The one that containerd's own test has.
    Scenario {
        name: "start-and-kill",
        handler: "fp",
        failing: &[
            ("Start", "1*error(no start today)"),
            ("Kill", "1*error(please retry)"),
        ],
        told: Some("no start today"),
        kept: Kept::NotReady,
    },
    Scenario {
        name: "start",
        handler: "fp",
        failing: &[("Start", "1*error(no start today)")],
        told: Some("no start today"),
        kept: Kept::Either,
    },
    Scenario {
        name: "start-and-delete",
        handler: "fp",
        failing: &[
            ("Start", "1*error(no start today)"),
            ("Delete", "1*error(no delete today)"),
        ],
        told: Some("no start today"),
        kept: Kept::Either,
    },
    Scenario {
        name: "start-and-shutdown",
        handler: "fp",
        failing: &[
            ("Start", "1*error(no start today)"),
            ("Shutdown", "1*error(no shutdown today)"),
        ],
        told: Some("no start today"),
        kept: Kept::Either,
    },
    Scenario {
        name: "create",
        handler: "fp",
        failing: &[("Create", "1*error(no create today)")],
        told: Some("no create today"),
        kept: Kept::Either,
    },
    Scenario {
        name: "create-panics",
        handler: "fp",
        failing: &[("Create", "1*panic(on purpose)")],
        told: Some("panicked"),
        kept: Kept::Either,
    },
    Scenario {
        name: "connect",
        handler: "fp",
        failing: &[("Connect", "1*error(no connect today)")],
        told: Some("no connect today"),
        kept: Kept::Either,
    },
    // The daemon asks for it as it takes the pod over: it gives the pod up and has it cleaned up.
    Scenario {
        name: "connect-late",
        handler: "fp",
        failing: &[
            ("Pids", "1*off"),
            ("Connect", "3*off->1000*error(no connect today)"),
        ],
        told: None,
        kept: Kept::UntilRestart,
    },
    Scenario {
        name: "late",
        handler: "fp",
        failing: &[("Start", "1*delay(1500)"), ("State", "1*delay(500)")],
        told: None,
        kept: Kept::Ready,
    },
    Scenario {
        name: "start-sandbox",
        handler: "fp-shim",
        failing: &[("StartSandbox", "1*error(no start today)")],
        told: Some("no start today"),
        kept: Kept::Either,
    },
    Scenario {
        name: "shutdown-sandbox",
        handler: "fp-shim",
        failing: &[
            ("StartSandbox", "1*error(no start today)"),
            ("ShutdownSandbox", "1*error(no shutdown today)"),
        ],
        told: Some("no start today"),
        kept: Kept::Either,
    },
];

/// What CRI says of the pods of this name agrees with the scenario; their ids.
fn look(cri: &mut Cri, scenario: &Scenario, restarted: bool) -> Vec<String> {
    let all = cri.list().into_iter();
    let listed: Vec<_> = all.filter(|pod| pod.name == scenario.name).collect();
    let what = format!("{} (restarted: {restarted}): {listed:?}", scenario.name);
    assert!(listed.len() <= 1, "{what}");
    for pod in &listed {
        let (status, address) = cri.status(&pod.id).unwrap();
        assert_eq!(&status, pod, "{what}");
        assert_eq!(pod.uid, format!("uid-{}", scenario.name), "{what}");
        let ready = match scenario.kept {
            Kept::Ready => true,
            Kept::UntilRestart => !restarted,
            Kept::NotReady | Kept::Either => false,
        };
        assert_eq!(pod.ready, ready, "{what}");
        if scenario.kept != Kept::Either {
            assert!(address.starts_with("10.98.2."), "{what}: {address:?}");
        }
    }
    if scenario.kept != Kept::Either {
        assert_eq!(listed.len(), 1, "{what}");
    }
    listed.into_iter().map(|pod| pod.id).collect()
}

fn played(scenarios: Vec<&Scenario>, restart: bool) {
    let Some(mut daemon) = daemon() else { return };
    let before = Snapshot::take();
    let mut cri = Cri::of(&daemon);
    for scenario in &scenarios {
        let annotations = annotations(scenario.failing);
        let ran = cri.run(scenario.name, scenario.handler, &annotations);
        match (ran, scenario.told) {
            (Ok(_), None) => {}
            (Err(status), Some(text)) => {
                assert!(
                    status.message.contains(text),
                    "{}: {status:?}",
                    scenario.name
                );
            }
            (ran, _) => panic!("{}: {ran:?}", scenario.name),
        }
        look(&mut cri, scenario, false);
    }
    if restart {
        daemon.restart();
        cri = Cri::of(&daemon);
        // How often a daemon connects before it is restarted depends on what it found time for: the calls that are let
        // through may last for one more start.
        let is_early = |cri: &mut Cri| {
            let until = |name: &str| {
                scenarios
                    .iter()
                    .any(|s| s.name == name && s.kept == Kept::UntilRestart)
            };
            cri.list().iter().any(|pod| pod.ready && until(&pod.name))
        };
        for _ in 0..2 {
            if is_early(&mut cri) {
                daemon.restart();
                cri = Cri::of(&daemon);
            }
        }
    }
    for scenario in &scenarios {
        for id in look(&mut cri, scenario, restart) {
            cri.stop(&id).unwrap();
            cri.remove(&id).unwrap();
        }
    }
    assert_eq!(cri.list(), []);
    // The name is free and its pod comes up: nothing of the failure is in the way.
    let id = cri.run(scenarios[0].name, "fp", &[]).unwrap();
    assert!(cri.status(&id).unwrap().0.ready);
    cri.remove(&id).unwrap();
    daemon.stop();
    before_is_clean(&before);
}

/// The daemon itself is gone by now: only its own process and socket may be missing.
fn before_is_clean(before: &Snapshot) {
    eventually(Duration::from_secs(15), "nothing is left", || {
        let more: Vec<String> = before
            .changes()
            .into_iter()
            .filter(|change| change.starts_with('+'))
            .collect();
        if !more.is_empty() {
            println!("still there: {more:?}");
        }
        more.is_empty().then_some(())
    });
}

#[test]
fn a_pod_whose_start_and_roll_back_fail_is_kept_and_can_be_removed() {
    sandboxed(
        "pods::a_pod_whose_start_and_roll_back_fail_is_kept_and_can_be_removed",
        || played(SCENARIOS[..1].iter().collect(), true),
    );
}

#[test]
fn pods_whose_methods_fail_can_be_removed() {
    sandboxed("pods::pods_whose_methods_fail_can_be_removed", || {
        // A daemon that made a task and then fails to connect forgets that task until it is started again.
        let others = SCENARIOS.iter().filter(|s| s.name != "connect");
        played(others.collect(), false);
    });
}

#[test]
fn pods_whose_methods_fail_can_be_removed_after_a_restart() {
    sandboxed(
        "pods::pods_whose_methods_fail_can_be_removed_after_a_restart",
        || played(SCENARIOS.iter().collect(), true),
    );
}

/// A kubelet whose deadline passes while the supervisor is at it: the daemon says ShutdownSandbox over a connection that it
/// closes in the same moment, and takes the bundle away. The creation is undone, and no file of it comes back.
#[test]
fn a_creation_whose_caller_gave_up_is_undone() {
    sandboxed("pods::a_creation_whose_caller_gave_up_is_undone", || {
        let Some(daemon) = daemon() else { return };
        let before = Snapshot::take();
        let mut cri = Cri::of(&daemon);
        for method in ["CreateSandbox", "StartSandbox"] {
            let begun = Instant::now();
            let up = cri.run("before", "fp-shim", &[]).unwrap();
            // On a busy machine, too, it is to pass in the method: of what is between two of them the daemon tells nobody.
            let deadline = Duration::from_secs(1) + 2 * begun.elapsed();
            assert_eq!(bundles(&daemon).len(), 1, "this is where they are");
            cri.remove(&up).unwrap();
            let term = format!("1*delay({})", (deadline * 2).as_millis());
            let config = Cri::config("late", &annotations(&[(method, &term)]));
            let error = cri.run_within(&config, "fp-shim", deadline).unwrap_err();
            assert_eq!(error.code, 4, "{method}: {error:?}");
            eventually(Duration::from_secs(30), "the pod is gone", || {
                for pod in cri.list() {
                    let _ = cri.remove(&pod.id);
                }
                cri.list().is_empty().then_some(())
            });
            before.assert_unchanged();
            assert_eq!(bundles(&daemon), Vec::<PathBuf>::new(), "{method}");
        }
    });
}

/// Of sandboxes and of tasks.
fn bundles(daemon: &Containerd) -> Vec<PathBuf> {
    let below = |dir: PathBuf| fs::read_dir(dir).into_iter().flatten().flatten();
    let plugins = below(daemon.state.clone()).map(|e| e.path());
    plugins
        .flat_map(|dir| below(dir.join("k8s.io")).map(|e| e.path()))
        .collect()
}

#[test]
fn bad_terms_are_told_and_leave_nothing() {
    sandboxed("pods::bad_terms_are_told_and_leave_nothing", || {
        let Some(daemon) = daemon() else { return };
        let before = Snapshot::take();
        let mut cri = Cri::of(&daemon);
        for (handler, method) in [("fp", "Start"), ("fp-shim", "StartSandbox")] {
            let bad = annotations(&[(method, "1*explode(now)")]);
            let error = cri.run("bad", handler, &bad).unwrap_err();
            assert!(
                error.message.contains("failpoint") && error.message.contains("explode"),
                "{error:?}"
            );
            for pod in cri.list() {
                cri.remove(&pod.id).unwrap();
            }
        }
        before.assert_unchanged();
    });
}
