//! Races between a container's verbs and its end, over the socket of a real supervisor: thirty rounds, a thousand when
//! there is time. Those beneath the service are in `tests/container/races.rs`.

use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use podvisor::client::{self, Client};
use podvisor::proto::task_v3::shim as task;
use tokio::task::JoinSet;

use super::field::ours_within;
use super::side::{BOUND, Side, process};

/// FL-056: more than can start before init dies.
const EXECS: usize = 500;

fn rounds(name: &str, times: u32, body: fn(&Side, u32)) {
    let bound = Duration::from_secs(if times > 100 { 3500 } else { 300 });
    ours_within(name, bound, |side| {
        let begun = Instant::now();
        (0..times).for_each(|round| body(side, round));
        println!("{name}: {times} rounds in {:.1?}", begun.elapsed());
    });
}

/// What is told of a life of `c`, in short: `exit c 0`.
fn life(side: &Side) -> Vec<String> {
    let events = side.take_events_to("/tasks/delete");
    let short = |event: &String| {
        let words: Vec<&str> = event.split_ascii_whitespace().collect();
        let code = words.iter().position(|word| *word == "code");
        let code = code.map_or("", |at| words[at + 1]);
        let what = words[0].trim_start_matches("/tasks/");
        let process = words[2].rsplit('/').next().unwrap_or_default();
        format!("{what} {process} {code}").trim_end().to_owned()
    };
    events.iter().map(short).collect()
}

fn only_true(side: &Side, _: u32) {
    side.run_edited("c", "", |s| {
        s["process"]["args"] = serde_json::json!(["/bin/true"])
    });
    assert_eq!(side.wait("c", "").unwrap(), 0);
    assert_eq!(side.delete("c", "").unwrap().exit_status, 0);
    let told = life(side);
    let verbs: Vec<_> = told
        .iter()
        .map(|event| event.split(' ').next().unwrap())
        .collect();
    assert_eq!(verbs, ["create", "start", "exit", "delete"], "{told:?}");
    assert!(told[2].ends_with(" 0"), "{told:?}");
}

fn killed_at_its_start(side: &Side, round: u32) {
    let pid = side
        .create(&side.request("c", "sleep 1000", |_| ()))
        .unwrap();
    let other = side.connect();
    let start = std::thread::spawn(move || other.start("c", ""));
    std::thread::sleep(Duration::from_millis(u64::from(round * 7 % 60)));
    kill(Pid::from_raw(pid.cast_signed()), Signal::SIGKILL).unwrap();
    assert_eq!(side.wait("c", "").unwrap(), 137);
    let started = start.join().unwrap();
    let state = side.state("c", "").unwrap();
    assert_eq!((state.pid, state.exit_status), (pid, 137));
    assert_eq!(side.delete("c", "").unwrap().exit_status, 137);
    let told = life(side);
    let verbs: Vec<_> = told
        .iter()
        .map(|event| event.split(' ').next().unwrap())
        .collect();
    match started {
        Ok(_) => assert_eq!(verbs, ["create", "start", "exit", "delete"], "{told:?}"),
        Err(_) => assert_eq!(verbs, ["create", "exit", "delete"], "{told:?}"),
    }
}

fn storm(side: &Side, round: u32) {
    side.run("c", "sleep 1000");
    for n in 0..EXECS {
        side.exec("c", &format!("e{n}"), "", &process("sleep 1000"))
            .unwrap();
    }
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let started = runtime.block_on(async {
        let client = Client::connect(&side.address()).await.unwrap();
        let mut starts = JoinSet::new();
        for n in 0..EXECS {
            let task = client.task();
            let request = task::StartRequest {
                id: "c".into(),
                exec_id: format!("e{n}"),
                ..Default::default()
            };
            starts.spawn(async move {
                task.start(client::context(Some(BOUND)), &request)
                    .await
                    .is_ok()
            });
        }
        tokio::time::sleep(Duration::from_millis(u64::from(round % 10) * 50)).await;
        let request = task::KillRequest {
            id: "c".into(),
            signal: 9,
            ..Default::default()
        };
        let task = client.task();
        let killed = task.kill(client::context(Some(BOUND)), &request);
        killed.await.unwrap();
        let started = starts.join_all().await;
        started.iter().filter(|ok| **ok).count()
    });
    assert_eq!(side.wait("c", "").unwrap(), 137);
    assert_eq!(side.delete("c", "").unwrap().exit_status, 137);
    let told = life(side);
    let count = |what: &str| told.iter().filter(|event| event.starts_with(what)).count();
    assert_eq!(count("exec-added"), EXECS);
    assert_eq!((count("exec-started"), count("exit e")), (started, started));
    let ends = &told[told.len() - 2..];
    assert!(
        ends[0].starts_with("exit c") && ends[1].starts_with("delete"),
        "{ends:?}"
    );
    assert_eq!(count("exit c"), 1);
}

#[test]
fn thirty_true_and_their_events_over_the_socket() {
    let name = "races::thirty_true_and_their_events_over_the_socket";
    rounds(name, 30, only_true);
}

#[test]
#[ignore = "slow: a thousand containers"]
fn slow_a_thousand_true_and_their_events_over_the_socket() {
    let name = "races::slow_a_thousand_true_and_their_events_over_the_socket";
    rounds(name, 1000, only_true);
}

#[test]
fn thirty_kills_at_a_start_over_the_socket() {
    let name = "races::thirty_kills_at_a_start_over_the_socket";
    rounds(name, 30, killed_at_its_start);
}

#[test]
#[ignore = "slow: a thousand containers"]
fn slow_a_thousand_kills_at_a_start_over_the_socket() {
    let name = "races::slow_a_thousand_kills_at_a_start_over_the_socket";
    rounds(name, 1000, killed_at_its_start);
}

#[test]
fn ten_storms_of_execs_over_the_socket() {
    rounds("races::ten_storms_of_execs_over_the_socket", 10, storm);
}

#[test]
#[ignore = "slow: a thousand storms of execs"]
fn slow_a_thousand_storms_of_execs_over_the_socket() {
    let name = "races::slow_a_thousand_storms_of_execs_over_the_socket";
    rounds(name, 1000, storm);
}
