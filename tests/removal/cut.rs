//! Removals over a connection that is cut at every request, before and after it and its reply: each succeeds, leaves
//! nothing, and does nothing twice that must be done once.

use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use podvisor::client;
use podvisor::pod::record::{self, Record};

use crate::proxy::{CUTS, Cut, Proxy, Rule};
use crate::rig::{self, Pod, container};
use crate::support::bin::{Output, PODVISOR};
use crate::support::fake::Fake;
use crate::support::rootfs::{self, Rootfs};
use crate::support::{Sandbox, Snapshot, run};

const BOUND: Duration = Duration::from_secs(90);

/// Removals at a time: most of what they do is waiting.
const SIDE_BY_SIDE: usize = 4;

/// More often than anybody asks.
const ALWAYS: usize = 1000;

/// What is removed, and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verb {
    Stop,
    Rm,
    RmForce,
    /// `delete` with the id of a pod, of a container in one, and of a container that is alone.
    DeletePod,
    DeleteContainer,
    DeleteLone,
}

impl Verb {
    /// What it asks for.
    fn methods(self) -> &'static [&'static str] {
        match self {
            Self::Stop => &["StopSandbox"],
            Self::Rm | Self::DeletePod => &["ShutdownSandbox"],
            Self::RmForce => &["StopSandbox", "ShutdownSandbox"],
            Self::DeleteContainer => &["Kill", "Wait", "Delete"],
            Self::DeleteLone => &["Delete", "Shutdown"],
        }
    }
}

/// What is wrong with the connection.
#[derive(Clone, Copy, Debug)]
enum Fault {
    Cut(Rule),
    /// The socket's file is gone; the supervisor knows nothing of it.
    NoSocket,
}

/// Every request of these removals, cut once in every place.
fn cut_once(verbs: &[Verb]) -> Vec<(Verb, Fault)> {
    let mut all = Vec::new();
    for verb in verbs {
        for method in verb.methods() {
            all.extend(CUTS.map(|cut| {
                let rule = Rule {
                    method,
                    cut,
                    times: 1,
                };
                (*verb, Fault::Cut(rule))
            }));
        }
    }
    all
}

/// Every connection is cut, so that nobody ever hears an answer; or there is none.
fn cut_always(verbs: &[Verb]) -> Vec<(Verb, Fault)> {
    let always = |cut| {
        Fault::Cut(Rule {
            method: "",
            cut,
            times: ALWAYS,
        })
    };
    let faults = [always(Cut::Before), always(Cut::Handled), Fault::NoSocket];
    let pairs = verbs.iter().flat_map(|verb| faults.map(|f| (*verb, f)));
    pairs.collect()
}

struct Machine {
    plugin: Fake,
    rootfs: Rootfs,
    number: AtomicUsize,
}

fn all(name: &str, cells: Vec<(Verb, Fault)>) {
    Sandbox::new(name).bound(Duration::from_secs(600)).run(|| {
        let machine = Machine {
            plugin: rig::fake_network(),
            rootfs: rootfs::make(),
            number: AtomicUsize::new(0),
        };
        let before = Snapshot::take();
        let failed = Mutex::new(Vec::new());
        let queue = Mutex::new(cells.into_iter());
        std::thread::scope(|scope| {
            for _ in 0..SIDE_BY_SIDE {
                scope.spawn(|| {
                    loop {
                        let Some((verb, fault)) = queue.lock().unwrap().next() else {
                            return;
                        };
                        let number = machine.number.fetch_add(1, Ordering::SeqCst);
                        let run = AssertUnwindSafe(|| machine.cell(number, verb, fault));
                        if catch_unwind(run).is_err() {
                            failed.lock().unwrap().push((number, verb, fault));
                        }
                    }
                });
            }
        });
        assert!(failed.lock().unwrap().is_empty(), "{failed:#?}");
        before.assert_unchanged();
    });
}

impl Machine {
    fn cell(&self, number: usize, verb: Verb, fault: Fault) {
        println!("cell {number}: {verb:?} {fault:?}");
        match verb {
            Verb::Stop | Verb::Rm | Verb::RmForce => self.by_command(number, verb, fault),
            _ => self.by_delete(number, verb, fault),
        }
    }

    fn by_command(&self, number: usize, verb: Verb, fault: Fault) {
        let namespace = format!("cell{number}");
        let podvisor = |args: &[&str]| -> Output {
            let mut command = Command::new(PODVISOR);
            run(command.args(["--namespace", &namespace]).args(args), BOUND)
        };
        let terms = self.rootfs.path().join(format!("terms-{number}"));
        let script = format!(
            "trap 'echo term >> /terms-{number}; exit 0' TERM; while :; do sleep 1000 & wait $!; done"
        );
        let work = [
            "--rootfs",
            self.rootfs.str(),
            "--",
            "/bin/sh",
            "-c",
            &script,
        ];
        podvisor(&[&["run", "-d", "--name", "web"], &work[..]].concat()).ok();
        let record = only_record(&namespace);
        if verb == Verb::Rm {
            podvisor(&["stop", "-t", "20", "web"]).ok();
        }
        let proxy = disturb(&record, fault);
        let args: &[&str] = match verb {
            Verb::Stop => &["stop", "-t", "20", "web"],
            Verb::Rm => &["rm", "web"],
            _ => &["rm", "-f", "web"],
        };
        let done = podvisor(args).ok();
        assert_eq!(done.stdout.trim(), "web", "{done:#?}");
        told_cuts(proxy.as_ref(), fault);
        if let Some(proxy) = proxy {
            proxy.end();
        }
        let state = || podvisor(&["ps", "-a", "--json"]).ok().stdout;
        if verb == Verb::Stop {
            let shown = state();
            assert!(!shown.contains("\"ready\""), "{shown}");
            self.one_del(&record.id);
            // Where nobody could be asked its supervisor was told to end, and has taken the whole pod along.
            let ended = shown.trim() == "[]";
            let asked = matches!(fault, Fault::Cut(Rule { times: 1, .. }));
            assert!(!(ended && asked), "{fault:?}");
            if !ended {
                podvisor(&["rm", "-f", "web"]).ok();
            }
        }
        let shown = state();
        assert_eq!(shown.trim(), "[]", "{verb:?} {fault:?}");
        rig::gone(record.supervisor.unwrap().pid);
        rig::gone(record.infra.unwrap().pid);
        self.one_del(&record.id);
        let told = fs::read_to_string(terms).unwrap_or_default();
        // Killed with its supervisor, or by force on a machine that is slow, it is told nothing; never twice.
        let enough = match (verb, fault) {
            (Verb::Stop | Verb::Rm, Fault::Cut(_)) => 1..=1,
            _ => 0..=1,
        };
        assert!(enough.contains(&told.lines().count()), "{told}");
    }

    fn by_delete(&self, number: usize, verb: Verb, fault: Fault) {
        let (id, first) = (format!("p{number}"), format!("c{number}a"));
        let second = format!("c{number}b");
        let lone = verb == Verb::DeleteLone;
        let pod = match lone {
            true => Pod::in_bundle(container(&id, "sleep 1000")),
            false => Pod::up(&id),
        };
        let probe = pod.probe();
        let bundles = match lone {
            true => Vec::new(),
            false => vec![
                container(&first, "sleep 1000"),
                container(&second, "sleep 1000"),
            ],
        };
        let mut pids: Vec<i32> = bundles
            .iter()
            .map(|bundle| probe.run_task(bundle, &self.rootfs).cast_signed())
            .collect();
        if lone {
            pids.push(probe.run_task(&pod.bundle, &self.rootfs).cast_signed());
        }
        drop(probe);
        let record = pod.record().unwrap();
        let proxy = disturb(&record, fault);
        let answer = match verb {
            Verb::DeleteContainer => bundles[0].delete(),
            _ => pod.bundle.delete(),
        };
        // Killed by the first of its requests that came through; never an invented 0.
        assert_eq!(answer.exit_status, 137, "{answer:?}");
        if verb == Verb::DeleteContainer || lone {
            assert_eq!(answer.pid.cast_signed(), pids[0], "{answer:?}");
        }
        let supervisor = record.supervisor.unwrap().pid;
        if verb == Verb::DeleteContainer {
            rig::gone(pids[0]);
            told_cuts(proxy.as_ref(), fault);
            if let Some(proxy) = proxy {
                proxy.end();
            }
            let probe = pod.probe();
            assert_eq!(probe.task_state(&second).unwrap(), "RUNNING");
            assert!(probe.task_state(&first).is_err());
            assert!(rig::alive(pids[1]) && rig::alive(supervisor));
            assert_eq!(self.dels(&id), 0);
            pod.end();
        } else {
            rig::gone(supervisor);
            told_cuts(proxy.as_ref(), fault);
        }
        pids.iter().for_each(|pid| rig::gone(*pid));
        crate::support::eventually(BOUND, "its directory goes", || {
            (!pod.dir().exists()).then_some(())
        });
        assert_eq!(self.dels(&id), usize::from(!lone), "{verb:?} {fault:?}");
    }

    fn dels(&self, id: &str) -> usize {
        let dels = self.plugin.calls_of("DEL");
        dels.iter()
            .filter(|c| c.var("CNI_CONTAINERID") == id)
            .count()
    }

    fn one_del(&self, id: &str) {
        assert_eq!(self.dels(id), 1, "DELs of {id}");
    }
}

fn disturb(record: &Record, fault: Fault) -> Option<Proxy> {
    let socket = PathBuf::from(client::path_of(&record.address));
    match fault {
        Fault::Cut(rule) => Some(Proxy::before(&socket, record.supervisor.unwrap().pid, rule)),
        Fault::NoSocket => {
            fs::remove_file(&socket).unwrap();
            None
        }
    }
}

/// The fault has happened; otherwise nothing was shown.
fn told_cuts(proxy: Option<&Proxy>, fault: Fault) {
    if let (Some(proxy), Fault::Cut(rule)) = (proxy, fault) {
        let asked = proxy.asked();
        let enough = match rule.times {
            1 => proxy.cuts() == 1,
            _ => proxy.cuts() > 0,
        };
        assert!(enough, "{} cuts of {asked:?}", proxy.cuts());
    }
}

fn only_record(namespace: &str) -> Record {
    let root = Path::new("/run/podvisor").join(namespace);
    let dirs = fs::read_dir(root).unwrap().flatten().map(|e| e.path());
    let pods: Vec<PathBuf> = dirs.filter(|p| !p.ends_with(".names")).collect();
    assert_eq!(pods.len(), 1, "{pods:?}");
    record::read(&pods[0]).unwrap()
}

/// FL-082, and the same for every other request of a removal.
#[test]
fn a_removal_by_the_command_survives_a_cut_at_every_request() {
    let mut cells = cut_once(&[Verb::Stop, Verb::Rm, Verb::RmForce]);
    cells.extend(cut_always(&[Verb::Stop, Verb::Rm, Verb::RmForce]));
    all(
        "cut::a_removal_by_the_command_survives_a_cut_at_every_request",
        cells,
    );
}

#[test]
fn a_delete_survives_a_cut_at_every_request() {
    let mut cells = cut_once(&[Verb::DeletePod, Verb::DeleteContainer, Verb::DeleteLone]);
    cells.extend(cut_always(&[Verb::DeletePod]));
    all("cut::a_delete_survives_a_cut_at_every_request", cells);
}
