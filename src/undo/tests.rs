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
    let report = unwind(steps, patience(60)).await;
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
    let report = unwind(steps, patience(9)).await;
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
    let report = unwind(steps, patience(60)).await;
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
async fn a_step_that_hangs_is_bounded_and_the_others_have_their_try_past_the_budget() {
    let log = Log::default();
    let steps = vec![
        step(&log, "cni-del", &[], &[Does::Hangs; 9]),
        step(&log, "files", &[], &[]),
        step(&log, "cgroup", &[], &[Does::Fails]),
    ];
    let report = unwind(steps, patience(5)).await;
    assert_eq!(report.done, ["files"]);
    assert_eq!(owed(&report), ["cni-del", "cgroup"]);
    assert_eq!(report.owed[0].1.kind(), Kind::Deadline);
    assert_eq!(
        *log.lock().unwrap(),
        [("cni-del", 0), ("files", 10), ("cgroup", 10)]
    );
}

#[tokio::test(start_paused = true)]
async fn no_steps_and_no_budget_are_fine() {
    assert!(unwind(Vec::new(), patience(0)).await.owed.is_empty());
    let log = Log::default();
    let report = unwind(
        vec![step(&log, "files", &["never there"], &[])],
        patience(0),
    )
    .await;
    assert_eq!(report.done, ["files"]);
}
