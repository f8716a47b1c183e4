//! Random lives of pods: requests with and without patience, failures at every step, kills, restarts. Each ends with
//! nothing.
//!
//! A failure names its seed: `PODVISOR_SEED=<seed>` runs that life alone. `PODVISOR_HISTORIES` says how many.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use nix::sys::signal::Signal;
use podvisor::config::Config;
use podvisor::error::Error;
use podvisor::network::NetworkRecord;
use podvisor::pod::record::{self, Record};

use crate::chaos::{self, Mood};
use crate::daemon::{Bundle, signal};
use crate::rig::{self, NAMESPACE, Probe};
use crate::support::{Sandbox, Snapshot, eventually, podvisor, slow};

/// Lives side by side.
const AT_ONCE: usize = 10;

const SETTINGS: &str = "idle_timeout = 1.0\n[cni]\nadd_timeout = 2.0\ndel_timeout = 2.0\nkeeper_time = 1.0\n\
                        [parking]\ninterval = 0.3\n";

/// The same numbers for the same seed (splitmix64).
struct Dice(u64);

impl Dice {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % limit
    }

    fn mood(&mut self) -> Mood {
        match self.below(16) {
            0..6 => Mood::Well,
            14 | 15 => Mood::Slow(100 + self.below(500)),
            6 => Mood::Fails,
            7..9 => Mood::FailsOnce,
            9 => Mood::Dies,
            10 => Mood::Hangs,
            11 => Mood::FailsLate,
            12 => Mood::DiesLate,
            _ => Mood::Slow(1_200),
        }
    }
}

#[derive(Debug, Clone, Copy)]
enum Event {
    /// `start` of the shim: a supervisor, or the one that is there.
    Launch,
    Create,
    /// CreateSandbox of a pod whose infra process cannot be given its settings.
    CreateBad,
    /// StartSandbox with a deadline, in milliseconds.
    Start(u64),
    /// Two of them at the same time.
    StartTwice(u64, u64),
    /// StartSandbox, and the connection is closed after so long.
    HangUp(u64),
    Stop,
    Shutdown,
    Delete,
    Gc,
    KillSupervisor,
    Terminate,
    KillInfra,
    Add(Mood),
    Del(Mood),
    Pause(u64),
}

fn life_of(seed: u64) -> Vec<Event> {
    let mut dice = Dice(seed);
    let mut events = vec![
        Event::Add(dice.mood()),
        Event::Del(dice.mood()),
        Event::Launch,
    ];
    events.push(match dice.below(12) {
        0 => Event::CreateBad,
        _ => Event::Create,
    });
    for _ in 0..2 + dice.below(7) {
        events.push(match dice.below(24) {
            0..5 => Event::Start([50, 300, 1_000, 5_000][dice.below(4) as usize]),
            5 | 6 => Event::StartTwice(100 + dice.below(900), 100 + dice.below(2_000)),
            7 | 8 => Event::HangUp(dice.below(400)),
            9 => Event::Stop,
            10 => Event::Shutdown,
            11 => Event::Delete,
            12 => Event::Gc,
            13 | 14 => Event::KillSupervisor,
            15 => Event::Terminate,
            16 => Event::KillInfra,
            17 => Event::Add(dice.mood()),
            18 => Event::Del(dice.mood()),
            19 | 20 => Event::Pause(dice.below(900)),
            21 => Event::Launch,
            _ => Event::Create,
        });
    }
    events
}

/// What StartSandbox answered, and how often: a run in which everything works, or nothing, shows nothing.
#[derive(Default)]
struct Answers(Mutex<BTreeMap<String, usize>>);

impl Answers {
    fn count(&self, answer: &Result<u32, Error>) {
        let kind = match answer {
            Ok(_) => "ok".to_owned(),
            Err(e) => format!("{:?}", e.kind()),
        };
        *self.0.lock().unwrap().entry(kind).or_default() += 1;
    }
}

/// One pod, and the daemon's view of it.
struct Life<'a> {
    answers: &'a Answers,
    id: String,
    bundle: Bundle,
    socket: Option<std::path::PathBuf>,
}

impl Life<'_> {
    fn record(&self) -> Option<Record> {
        record::read(&self.dir()).ok()
    }

    fn dir(&self) -> std::path::PathBuf {
        Path::new("/run/podvisor").join(NAMESPACE).join(&self.id)
    }

    fn probe(&self) -> Option<Probe> {
        Probe::try_connect(self.socket.as_deref()?)
    }

    /// Errors of requests are part of life; what must hold is looked at in the end.
    fn happen(&mut self, event: Event) {
        let id = self.id.clone();
        let ms = Duration::from_millis;
        match event {
            Event::Launch => self.socket = Some(self.bundle.address()),
            Event::Create | Event::CreateBad => {
                let mut config = rig::config(&id);
                if matches!(event, Event::CreateBad) {
                    let linux = config.linux.mut_or_insert_default();
                    linux
                        .sysctls
                        .insert("net.ipv4.no_such_setting".into(), "1".into());
                }
                let _ = self.probe().map(|p| p.create(&id, &config));
            }
            Event::Start(limit) => self.start(ms(limit)),
            Event::StartTwice(one, two) => std::thread::scope(|scope| {
                for limit in [one, two] {
                    let life = &*self;
                    scope.spawn(move || life.start(ms(limit)));
                }
            }),
            Event::HangUp(after) => {
                if let Some(probe) = self.probe() {
                    probe.start_or_hang_up(&id, ms(after));
                }
            }
            Event::Stop => drop(self.probe().map(|p| p.stop(&id))),
            Event::Shutdown => drop(self.probe().map(|p| p.shutdown(&id))),
            Event::Delete => drop(self.bundle.delete()),
            Event::Gc => drop(podvisor(&["gc"])),
            Event::KillSupervisor => self.hit(|r| r.supervisor, Signal::SIGKILL),
            Event::Terminate => self.hit(|r| r.supervisor, Signal::SIGTERM),
            Event::KillInfra => self.hit(|r| r.infra, Signal::SIGKILL),
            Event::Add(mood) => chaos::mood(&id, "ADD", mood),
            Event::Del(mood) => chaos::mood(&id, "DEL", mood),
            Event::Pause(time) => std::thread::sleep(ms(time)),
        }
    }

    fn start(&self, limit: Duration) {
        if let Some(probe) = self.probe() {
            self.answers.count(&probe.start(&self.id, limit));
        }
    }

    fn hit(&self, whom: impl Fn(&Record) -> Option<podvisor::process::Identity>, with: Signal) {
        if let Some(process) = self
            .record()
            .as_ref()
            .and_then(whom)
            .filter(|p| p.is_alive())
        {
            signal(process.pid, with);
            if with == Signal::SIGKILL {
                rig::gone(process.pid);
            }
        }
    }

    /// The daemon removes it, with a plugin that works again: nothing of it is left, and nobody had to be asked twice.
    fn end(&self) {
        chaos::mood(&self.id, "ADD", Mood::Well);
        chaos::mood(&self.id, "DEL", Mood::Well);
        let record = NetworkRecord::at(&Config::default(), NAMESPACE, &self.id);
        eventually(
            Duration::from_secs(40),
            "everything of the pod is gone",
            || {
                self.bundle.delete();
                let left =
                    self.dir().exists() || record.dir().exists() || chaos::has_lease(&self.id);
                (!left).then_some(())
            },
        );
        let _ = std::fs::remove_dir_all(&self.bundle.dir);
    }
}

fn live(seed: u64, answers: &Answers) {
    let id = format!("h{seed}");
    let mut life = Life {
        answers,
        bundle: Bundle::new(&id),
        socket: None,
        id,
    };
    for event in life_of(seed) {
        life.happen(event);
    }
    life.end();
}

/// Lives `count` histories from `base` on, many at a time; then the machine is as it was.
fn histories(base: u64, count: u64) {
    rig::settings(SETTINGS);
    chaos::install();
    let before = Snapshot::take();
    let begun = Instant::now();
    let (next, failed) = (AtomicU64::new(base), Mutex::new(Vec::new()));
    let answers = Answers::default();
    println!("seeds {base} to {}", base + count - 1);
    std::thread::scope(|scope| {
        for _ in 0..AT_ONCE {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= base + count || failed.lock().unwrap().len() > 5 {
                        return;
                    }
                    if catch_unwind(AssertUnwindSafe(|| live(seed, &answers))).is_err() {
                        println!("PODVISOR_SEED={seed} fails: {:?}", life_of(seed));
                        failed.lock().unwrap().push(seed);
                    }
                }
            });
        }
    });
    let failed = failed.into_inner().unwrap();
    println!(
        "{count} histories in {:.1} s",
        begun.elapsed().as_secs_f64()
    );
    let answers = answers.0.into_inner().unwrap();
    println!("StartSandbox: {answers:?}");
    let calls = |verb| -> usize {
        let ids = (base..base + count).map(|seed| format!("h{seed}"));
        ids.map(|id| chaos::count(&id, verb)).sum()
    };
    println!("{} ADD, {} DEL", calls("ADD"), calls("DEL"));
    if count >= 100 {
        for kind in ["ok", "Deadline", "Busy", "State", "Other"] {
            assert!(answers.contains_key(kind), "no {kind} in {answers:?}");
        }
    }
    for seed in &failed {
        println!("PODVISOR_SEED={seed}: {:?}", life_of(*seed));
    }
    assert!(failed.is_empty(), "seeds {failed:?}");
    assert_eq!(chaos::wrong(), "");
    assert!(record::list(&Config::default(), None).is_empty());
    podvisor(&["gc"]).ok();
    before.assert_unchanged();
}

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

#[test]
fn three_hundred_random_histories_leave_nothing() {
    Sandbox::new("history::three_hundred_random_histories_leave_nothing")
        .bound(Duration::from_secs(560))
        .run(|| match number("PODVISOR_SEED") {
            Some(seed) => histories(seed, 1),
            None => histories(1, number("PODVISOR_HISTORIES").unwrap_or(300)),
        });
}

/// Other ones in every run.
#[test]
#[ignore = "slow: ten thousand histories"]
fn slow_ten_thousand_random_histories_leave_nothing() {
    assert!(slow(), "only with PODVISOR_SLOW");
    Sandbox::new("history::slow_ten_thousand_random_histories_leave_nothing")
        .bound(Duration::from_secs(3500))
        .run(|| {
            let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
            let count = number("PODVISOR_HISTORIES").unwrap_or(10_000);
            histories(
                number("PODVISOR_SEED").unwrap_or(now.as_secs() * 1_000),
                count,
            );
        });
}
