//! More pods at once than the network can make within their callers' patience.

use std::fmt::Write as _;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use crate::chaos::{self, Mood};
use crate::rig::{self, Pod};
use crate::support::{Sandbox, Snapshot, slow};

const PODS: usize = 60;
/// Chains of one network at a time, and how long each takes.
const PARALLEL: usize = 4;
const ADD_MS: u64 = 2_000;
const PATIENCE: Duration = Duration::from_secs(3);
const BETWEEN: Duration = Duration::from_secs(1);

/// How one load went.
struct Load {
    /// Seconds from the first request until each pod was ready, ascending; those that never were are missing.
    up: Vec<f64>,
    adds: Vec<usize>,
    dels: usize,
}

impl Load {
    fn last(&self) -> f64 {
        self.up.last().copied().unwrap_or(f64::INFINITY)
    }
}

/// All pods are asked for at the same moment; each caller repeats his request for at most `limit`.
fn load(name: &str, settings: &str, patience: Duration, limit: Duration) -> Load {
    rig::settings(&format!("[cni]\nparallel = {PARALLEL}\n{settings}"));
    chaos::mood_of_all("ADD", Mood::Slow(ADD_MS));
    let before = Snapshot::take();
    let start = Barrier::new(PODS);
    let ids: Vec<String> = (0..PODS).map(|n| format!("{name}{n}")).collect();
    // Sixty programs that are started at once on two processors are another test.
    let pods = ids.iter().map(|id| {
        chaos::mood(id, "ADD", Mood::Well);
        Pod::launch(id)
    });
    let pods: Vec<Pod> = pods.collect();
    let lives = std::thread::scope(|scope| {
        let callers = pods.into_iter().map(|pod| {
            let start = &start;
            scope.spawn(move || {
                let id = pod.id.as_str();
                start.wait();
                let begun = Instant::now();
                pod.probe().create(id, &rig::config(id)).unwrap();
                let up = loop {
                    if pod.probe().start(id, patience).is_ok() {
                        break Some(begun.elapsed().as_secs_f64());
                    }
                    if begun.elapsed() > limit {
                        break None;
                    }
                    std::thread::sleep(BETWEEN);
                };
                (pod, up)
            })
        });
        let callers: Vec<_> = callers.collect();
        let lives = callers.into_iter().map(|c| c.join().unwrap());
        lives.collect::<Vec<_>>()
    });
    let mut up: Vec<f64> = lives.iter().filter_map(|(_, up)| *up).collect();
    up.sort_by(f64::total_cmp);
    chaos::mood_of_all("ADD", Mood::Well);
    let adds = ids.iter().map(|id| chaos::count(id, "ADD")).collect();
    let dels = ids.iter().map(|id| chaos::count(id, "DEL")).sum();
    for (pod, _) in &lives {
        pod.bundle.delete();
        std::fs::remove_dir_all(&pod.bundle.dir).unwrap();
    }
    before.assert_unchanged();
    assert_eq!(chaos::wrong(), "");
    let load = Load { up, adds, dels };
    println!(
        "{name}: {} of {PODS} pods up, the last after {:.1} s; {} ADD, {} DEL",
        load.up.len(),
        load.last(),
        load.adds.iter().sum::<usize>(),
        load.dels
    );
    load
}

fn retried() -> Load {
    load("retried", "", PATIENCE, Duration::from_secs(200))
}

/// Every pod comes up, and no work is done twice.
#[test]
fn sixty_impatient_callers_all_get_their_pods_with_one_add_each() {
    Sandbox::new("overload::sixty_impatient_callers_all_get_their_pods_with_one_add_each").run(
        || {
            chaos::install();
            let load = retried();
            assert_eq!(load.up.len(), PODS);
            assert!(load.adds.iter().all(|adds| *adds == 1), "{:?}", load.adds);
            assert_eq!(load.dels, 0);
        },
    );
}

/// The same beside callers that wait as long as it takes, and beside a supervisor that gives up with its caller.
#[test]
#[ignore = "slow: three loads, for figures"]
fn slow_overload_takes_as_long_as_without_deadlines() {
    Sandbox::new("overload::slow_overload_takes_as_long_as_without_deadlines")
        .bound(Duration::from_secs(900))
        .run(|| {
            chaos::install();
            let ample = Duration::from_secs(300);
            let patient = load("patient", "", ample, ample);
            let retried = retried();
            let off = "[parking]\nenabled = false\n";
            let given_up = load("given-up", off, PATIENCE, Duration::from_secs(240));
            println!(
                "{}",
                chart(&[
                    ("patient", &patient),
                    ("retried", &retried),
                    ("given up", &given_up)
                ])
            );
            let ratio = retried.last() / patient.last();
            println!("with retries: {ratio:.2} of the time without deadlines");
            assert_eq!((patient.up.len(), retried.up.len()), (PODS, PODS));
            assert!(retried.adds.iter().all(|adds| *adds == 1));
            if slow() {
                assert!(ratio <= 1.3, "{ratio}");
            }
        });
}

/// Pods up over time.
fn chart(loads: &[(&str, &Load)]) -> String {
    const STEP: f64 = 8.0;
    let end = loads.iter().map(|(_, l)| l.last()).fold(0.0, f64::max);
    let mut text = String::from("pods up after\n");
    let mut at = 0.0;
    while at < end {
        at += STEP;
        let _ = write!(text, "{at:>5.0} s");
        for (n, (name, load)) in loads.iter().enumerate() {
            let up = load.up.iter().filter(|up| **up <= at).count();
            let bar = ["#", "=", "-"][n % 3].repeat(up.div_ceil(3));
            let _ = write!(text, "  {bar:<20} {up:>2} {name}");
        }
        text.push('\n');
    }
    text
}
