//! Races between a container's verbs and its end, often: thirty rounds, a thousand when there is time.

use std::time::Instant;

use podvisor::process::Identity;

use super::*;
use crate::support::Sandbox;

/// Of the many rounds, with what they took.
fn rounds<F: Future<Output = ()>>(name: &str, times: u32, body: impl Fn(Kit, u32) -> F) {
    let bound = Duration::from_secs(if times > 100 { 3500 } else { 600 });
    Sandbox::new(name).bound(bound).run(|| {
        if require::tool("runc") {
            let begun = Instant::now();
            supervise(async || body(Kit::new("runc"), times).await);
            println!("{name}: {times} rounds in {:.1?}", begun.elapsed());
        }
    });
}

/// FL-056: more execs than can start in that time, and init dies meanwhile.
async fn storms(kit: Kit, times: u32) {
    const EXECS: usize = 500;
    let (mut started, mut slowest) = (0, Duration::ZERO);
    for round in 0..times {
        kit.run("c", "sleep 1000").await;
        let mut starts = tokio::task::JoinSet::new();
        for i in 0..EXECS {
            kit.exec("c", &format!("e{i}"), "sleep 1000").await.unwrap();
            let containers = kit.containers.clone();
            starts.spawn(async move { containers.start("c", &format!("e{i}")).await });
        }
        sleep(Duration::from_millis(u64::from(round % 10) * 50)).await;
        kit.containers.kill("c", "", 9, false).await.unwrap();
        let killed = Instant::now();
        assert_eq!(kit.code("c", "").await, 137);
        slowest = slowest.max(killed.elapsed());
        let results = starts.join_all().await;
        for error in results.iter().filter_map(|r| r.as_ref().err()) {
            // What was under way says what the runtime says, what came later that there is no init.
            assert!(matches!(error.kind(), Kind::State | Kind::Other), "{error}");
        }
        started += results.iter().filter(|r| r.is_ok()).count();
        assert_eq!(
            kit.containers.state("c", "").unwrap().status,
            Status::Stopped
        );
        let events = kit.log.take();
        let count = |what: &str| events.iter().filter(|e| e.starts_with(what)).count();
        assert_eq!(events.last().unwrap(), "exit c/c 137", "{events:?}");
        assert_eq!(count("exit c/e"), count("exec-started"), "{events:?}");
        assert_eq!(count("exec-added"), EXECS);
        assert_eq!(count("exit c/c"), 1);
        kit.containers.delete("c", "").await.unwrap();
        assert_eq!(kit.log.take(), ["delete c 137"]);
        kit.assert_gone("c");
    }
    println!(
        "{started} execs started; the exit of init was told {slowest:.1?} after the kill at most"
    );
}

#[test]
fn inits_exit_is_last_in_thirty_storms_of_execs() {
    rounds(
        "races::inits_exit_is_last_in_thirty_storms_of_execs",
        30,
        storms,
    );
}

#[test]
#[ignore = "slow: a thousand storms of execs"]
fn slow_inits_exit_is_last_in_a_thousand_storms_of_execs() {
    rounds(
        "races::slow_inits_exit_is_last_in_a_thousand_storms_of_execs",
        1000,
        storms,
    );
}

/// Killed by a stranger, a little earlier or later: before the start, while it works, after it.
async fn between_create_and_start(kit: Kit, times: u32) {
    let mut started = 0;
    for round in 0..times {
        let request = kit.request("c", "sleep 1000", |_| ());
        let pid = kit.containers.create(request).await.unwrap();
        let init = Identity::of(pid.cast_signed()).unwrap();
        let waiting = {
            let containers = kit.containers.clone();
            tokio::spawn(async move { containers.wait("c", "").await })
        };
        let starting = {
            let containers = kit.containers.clone();
            tokio::spawn(async move { containers.start("c", "").await })
        };
        sleep(Duration::from_millis(u64::from(round * 7 % 60))).await;
        init.signal(9).unwrap();
        let exit = timeout(BOUND, waiting)
            .await
            .expect("an exit")
            .unwrap()
            .unwrap();
        assert_eq!(exit.0, 137);
        let start = starting.await.unwrap();
        let state = kit.containers.state("c", "").unwrap();
        assert_eq!((state.status, state.pid), (Status::Stopped, pid));
        kit.containers.delete("c", "").await.unwrap();
        let mut wanted = vec!["create", "start", "exit c/c 137", "delete c 137"];
        match start {
            Ok(_) => started += 1,
            Err(_) => drop(wanted.remove(1)),
        }
        assert_eq!(kit.log.take(), wanted, "round {round}");
        kit.assert_gone("c");
    }
    println!("{started} of {times} were started before they died");
}

#[test]
fn thirty_inits_killed_between_create_and_start_are_seen() {
    rounds(
        "races::thirty_inits_killed_between_create_and_start_are_seen",
        30,
        between_create_and_start,
    );
}

#[test]
#[ignore = "slow: a thousand containers"]
fn slow_a_thousand_inits_killed_between_create_and_start_are_seen() {
    rounds(
        "races::slow_a_thousand_inits_killed_between_create_and_start_are_seen",
        1000,
        between_create_and_start,
    );
}

/// FL-059: nothing happens between the start and the end.
async fn trues(kit: Kit, times: u32) {
    for _ in 0..times {
        let request = kit.request("c", "", |s| s["process"]["args"] = json!(["/bin/true"]));
        let pid = kit.containers.create(request).await.unwrap();
        let early = {
            let containers = kit.containers.clone();
            tokio::spawn(async move { containers.wait("c", "").await })
        };
        assert_eq!(kit.containers.start("c", "").await.unwrap(), pid);
        assert_eq!(early.await.unwrap().unwrap().0, 0);
        assert_eq!(kit.code("c", "").await, 0);
        let state = kit.containers.state("c", "").unwrap();
        assert_eq!((state.status, state.pid), (Status::Stopped, pid));
        kit.containers.delete("c", "").await.unwrap();
        assert_eq!(
            kit.log.take(),
            ["create", "start", "exit c/c 0", "delete c 0"]
        );
    }
    kit.assert_gone("c");
}

#[test]
fn thirty_inits_that_only_end_have_their_events_in_order() {
    rounds(
        "races::thirty_inits_that_only_end_have_their_events_in_order",
        30,
        trues,
    );
}

#[test]
#[ignore = "slow: a thousand containers"]
fn slow_a_thousand_inits_that_only_end_have_their_events_in_order() {
    rounds(
        "races::slow_a_thousand_inits_that_only_end_have_their_events_in_order",
        1000,
        trues,
    );
}
