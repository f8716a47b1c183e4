//! Under tokio's paused clock: the times are exact.

use super::*;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

type Log = Arc<Mutex<Vec<(&'static str, u64)>>>;

#[derive(Clone, Copy)]
enum Does {
    Works,
    Fails,
    Hangs,
    Panics,
    IsGone,
}

fn patience(budget: u64) -> Patience {
    Patience {
        budget: Duration::from_secs(budget),
        first_delay: Duration::from_secs(1),
        max_delay: Duration::from_secs(4),
    }
}

/// A step that does one thing per try, and works when the list is at its end.
fn step(
    log: &Log,
    name: &'static str,
    after: &'static [&'static str],
    does: &[Does],
) -> Step<'static> {
    let mut plan: VecDeque<Does> = does.iter().copied().collect();
    let log = Arc::clone(log);
    let begun = Instant::now();
    Step {
        name,
        after,
        limit: Duration::from_secs(10),
        run: Box::new(move || {
            log.lock().unwrap().push((name, begun.elapsed().as_secs()));
            let does = plan.pop_front().unwrap_or(Does::Works);
            Box::pin(async move {
                match does {
                    Does::Works => Ok(()),
                    Does::Fails => Err(Error::new(Kind::Other, "plugin says no")),
                    Does::Hangs => std::future::pending().await,
                    Does::Panics => panic!("a fault of ours"),
                    Does::IsGone => Err(Error::new(Kind::NotFound, "no such thing")),
                }
            })
        }),
    }
}

fn owed(report: &Report) -> Vec<&'static str> {
    report.owed.iter().map(|(name, _)| *name).collect()
}

#[tokio::test(start_paused = true)]
async fn steps_run_in_the_order_given_and_gone_is_done() {
    let log = Log::default();
    let steps = vec![
        step(&log, "infra", &[], &[Does::IsGone]),
        step(&log, "cni-del", &[], &[]),
        step(&log, "netns", &["cni-del"], &[]),
    ];
    let report = unwind(steps, patience(60), &Progress::default()).await;
    assert_eq!(report.done, ["infra", "cni-del", "netns"]);
    assert!(report.owed.is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_failing_step_holds_its_dependents_and_nothing_else() {
    let log = Log::default();
    let steps = vec![
        step(&log, "cni-del", &[], &[Does::Fails; 100]),
        step(&log, "netns", &["cni-del"], &[]),
        step(&log, "key", &["netns"], &[]),
        step(&log, "files", &[], &[]),
    ];
    let report = unwind(steps, patience(9), &Progress::default()).await;
    assert_eq!(report.done, ["files"]);
    assert_eq!(owed(&report), ["cni-del", "netns", "key"]);
    assert!(report.owed[1].1.to_string().contains("waits for cni-del"));
    assert_eq!(report.owed[0].1.to_string(), "plugin says no");
    // 1, 2, 4, then 4 s again, and none at or after 9 s.
    let tries: Vec<u64> = log
        .lock()
        .unwrap()
        .iter()
        .filter(|(n, _)| *n == "cni-del")
        .map(|(_, at)| *at)
        .collect();
    assert_eq!(tries, [0, 1, 3, 7]);
    assert!(
        !log.lock()
            .unwrap()
            .iter()
            .any(|(n, _)| *n == "netns" || *n == "key")
    );
}

#[tokio::test(start_paused = true)]
async fn a_retry_that_works_frees_its_dependents() {
    let log = Log::default();
    let steps = vec![
        step(&log, "cni-del", &[], &[Does::Fails, Does::Fails]),
        step(&log, "netns", &["cni-del"], &[Does::Fails]),
    ];
    let report = unwind(steps, patience(60), &Progress::default()).await;
    assert_eq!(report.done, ["cni-del", "netns"]);
    assert_eq!(
        *log.lock().unwrap(),
        [
            ("cni-del", 0),
            ("cni-del", 1),
            ("cni-del", 3),
            ("netns", 3),
            ("netns", 4)
        ]
    );
}

#[tokio::test(start_paused = true)]
async fn a_step_that_hangs_is_bounded_and_the_others_do_not_wait_for_it() {
    let log = Log::default();
    let steps = vec![
        step(&log, "cni-del", &[], &[Does::Hangs; 9]),
        step(&log, "netns", &["cni-del"], &[]),
        step(&log, "files", &[], &[]),
        step(&log, "cgroup", &[], &[Does::Fails]),
    ];
    let report = unwind(steps, patience(5), &Progress::default()).await;
    assert_eq!(report.done, ["files", "cgroup"]);
    assert_eq!(owed(&report), ["cni-del", "netns"]);
    assert_eq!(report.owed[0].1.kind(), Kind::Deadline);
    assert_eq!(
        *log.lock().unwrap(),
        [("cni-del", 0), ("files", 1), ("cgroup", 1), ("cgroup", 2)]
    );
}

#[tokio::test(start_paused = true)]
async fn no_steps_and_no_budget_are_fine() {
    let none = unwind(Vec::new(), patience(0), &Progress::default()).await;
    assert!(none.owed.is_empty());
    let log = Log::default();
    let steps = vec![step(&log, "files", &["never there"], &[])];
    let report = unwind(steps, patience(0), &Progress::default()).await;
    assert_eq!(report.done, ["files"]);
}

/// Checklist item 22: whichever step fails last, those before it are undone newest first, each once, the key last.
#[tokio::test(start_paused = true)]
async fn crio_22_every_prefix_is_undone_in_reverse_order_once() {
    const ALL: [&str; 6] = ["files", "cgroup", "netns", "cni-del", "infra", "key"];
    for k in 0..=5 {
        let log = Log::default();
        let mut names: Vec<&'static str> = ALL[..k].to_vec();
        names.reverse();
        let mut steps: Vec<_> = names.iter().map(|n| step(&log, n, &[], &[])).collect();
        steps.push(step(
            &log,
            "key",
            &["files", "cgroup", "netns", "cni-del", "infra"],
            &[],
        ));
        let report = unwind(steps, patience(60), &Progress::default()).await;
        names.push("key");
        assert_eq!(report.done, names);
        let ran: Vec<_> = log.lock().unwrap().iter().map(|(n, _)| *n).collect();
        assert_eq!(ran, names, "each once");
    }
}

/// Items 24 and 25: whichever step fails for hours, the independent ones are done at once, its dependents only after it,
/// the key after all; the pauses double up to the cap; nothing is ever given up.
#[tokio::test(start_paused = true)]
async fn crio_24_25_each_stuck_step_holds_its_dependents_alone_and_is_tried_until_it_works() {
    const STEPS: [(&str, &[&str]); 6] = [
        ("containers", &[]),
        ("infra", &[]),
        ("cgroup", &["containers", "infra"]),
        ("cni-del", &[]),
        ("netns", &["cni-del"]),
        (
            "key",
            &["containers", "infra", "cgroup", "cni-del", "netns"],
        ),
    ];
    for (stuck, _) in STEPS {
        for how in [Does::Fails, Does::Hangs, Does::Panics] {
            let log = Log::default();
            let steps = STEPS.map(|(name, after)| {
                let does: &[Does] = if name == stuck { &[how; 200] } else { &[] };
                step(&log, name, after, does)
            });
            let for_ever = Patience {
                budget: Duration::MAX,
                first_delay: Duration::from_millis(500),
                max_delay: Duration::from_secs(60),
            };
            let begun = Instant::now();
            let report = unwind(steps.into(), for_ever, &Progress::default()).await;
            assert!(report.owed.is_empty(), "{stuck}: {report:?}");
            assert!(begun.elapsed() > Duration::from_secs(11_000), "{stuck}");
            let log = log.lock().unwrap();
            let first = |name: &str| log.iter().find(|(n, _)| *n == name).map(|(_, at)| *at);
            for (name, after) in STEPS {
                let early = first(name).unwrap() <= 3;
                assert_eq!(early, !after.contains(&stuck), "{stuck}: {name}");
            }
            let tries: Vec<u64> = log
                .iter()
                .filter(|(n, _)| *n == stuck)
                .map(|(_, at)| *at)
                .collect();
            assert_eq!(tries.len(), 201);
            let limit = if matches!(how, Does::Hangs) { 10 } else { 0 };
            let gaps: Vec<u64> = tries.windows(2).map(|w| w[1] - w[0] - limit).collect();
            assert!(gaps[..2].iter().all(|g| *g <= 1), "{gaps:?}");
            assert!(gaps[2..8].windows(2).all(|w| w[1] >= w[0]), "{gaps:?}");
            assert!(gaps[8..].iter().all(|g| *g == 60), "{gaps:?}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn it_tells_what_it_is_at_and_can_be_hurried() {
    let log = Log::default();
    let steps = vec![
        step(&log, "cni-del", &[], &[Does::Fails; 8]),
        step(&log, "netns", &["cni-del"], &[]),
    ];
    let slow = Patience {
        budget: Duration::MAX,
        first_delay: Duration::from_secs(1),
        max_delay: Duration::from_secs(600),
    };
    let progress = Progress::default();
    assert_eq!(progress.now(), None);
    let mut undo = Box::pin(unwind(steps, slow, &progress));
    assert!(
        timeout(Duration::from_secs(20), &mut undo).await.is_err(),
        "it pauses"
    );
    let now = progress.now().unwrap();
    assert_eq!((now.step, now.tries), ("cni-del", 5));
    let text = now.to_string();
    assert_eq!(
        text,
        "step cni-del, since 20.0 s, 5 tries, the last: plugin says no; the next in 11.0 s"
    );
    progress.idle().await;
    progress.hurry();
    // At once, and then after 1, 2 and 4 s.
    let report = undo.await;
    assert_eq!(report.done, ["cni-del", "netns"]);
    let times: Vec<u64> = log.lock().unwrap().iter().map(|(_, at)| *at).collect();
    assert_eq!(times, [0, 1, 3, 7, 15, 20, 21, 23, 27, 27]);
    assert_eq!(progress.now(), None);
}

#[tokio::test(start_paused = true)]
async fn one_that_was_dropped_is_at_nothing() {
    let log = Log::default();
    let progress = Progress::default();
    let steps = || vec![step(&log, "cni-del", &[], &[Does::Hangs])];
    let undo = unwind(steps(), patience(60), &progress);
    assert!(timeout(Duration::from_secs(2), undo).await.is_err());
    assert_eq!(progress.now(), None);
    progress.idle().await;
    let steps = vec![step(&log, "cni-del", &[], &[])];
    assert_eq!(
        unwind(steps, patience(60), &progress).await.done,
        ["cni-del"]
    );
}
