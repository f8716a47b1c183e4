//! What is seen of creations from outside: errors, `ps`, `inspect`, the metrics, the log.

use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use podvisor::error::Kind;
use podvisor::pod::record::State;
use serde_json::Value;

use crate::daemon::signal;
use crate::kit::{
    self, Delay, SHORT, create, create_aside, document, info, inspect, listed, log_of, metric,
    on_a_machine, says, stands_at, until, until_listed, until_waiters,
};
use crate::rig::{self, BOUND, Pod, called};
use crate::support::fake::Act;
use crate::support::{eventually, podvisor};

/// Long enough for the margin before the deadline to be a quarter of a second.
const LONG: Duration = Duration::from_secs(5);

#[test]
fn a_request_is_told_stage_ages_key_and_holder_of_the_end_of_its_wait() {
    on_a_machine(
        "seen::a_request_is_told_stage_ages_key_and_holder_of_the_end_of_its_wait",
        "",
        |machine| {
            let pod = machine.timed_out("p1", Delay::Plugin);
            let asked = Instant::now();
            let joined = pod.start_aside(LONG);
            until_waiters(&pod, 1);
            // It began to wait for the plugin; when it is answered, the creation stands at the infra process.
            machine.hold(Delay::Infra);
            machine.let_go(Delay::Plugin);
            stands_at(&pod, Delay::Infra);
            let told = joined.join().unwrap().unwrap_err();
            assert_eq!(told.kind(), Kind::Deadline);
            assert!(asked.elapsed() > LONG - Duration::from_millis(300));
            let holder = format!("in supervisor {}", pod.supervisor());
            says(
                &told,
                &[
                    "start sandbox p1 (pod apps/p1/uid-p1/0): ",
                    "still at stage infra after ",
                    &holder,
                    "s at this stage)",
                    "ask again to join it",
                ],
            );
            machine.let_go(Delay::Infra);
            until(&pod, State::Parked);
            pod.end();
        },
    );
}

#[test]
fn a_pod_without_metadata_is_told_by_its_id() {
    on_a_machine(
        "seen::a_pod_without_metadata_is_told_by_its_id",
        "",
        |machine| {
            machine.hold(Delay::Plugin);
            let pod = Pod::launch("bare");
            pod.probe().create("bare", &Default::default()).unwrap();
            let told = pod.probe().start("bare", LONG).unwrap_err();
            says(&told, &["start sandbox bare: still at stage cni-add"]);
            assert_eq!(info(&pod)["key"], "bare");
            machine.let_go(Delay::Plugin);
            until(&pod, State::Parked);
            pod.end();
        },
    );
}

#[test]
fn without_holding_a_request_is_told_at_once_that_the_result_is_ready() {
    on_a_machine(
        "seen::without_holding_a_request_is_told_at_once_that_the_result_is_ready",
        "",
        |machine| {
            rig::settings("[parking]\ninterval = 60.0\nhold_waiters = false\n");
            let pod = machine.timed_out("p1", Delay::Plugin);
            let joined = pod.start_aside(BOUND);
            until_waiters(&pod, 1);
            let opened = Instant::now();
            machine.let_go(Delay::Plugin);
            let told = joined.join().unwrap().unwrap_err();
            assert_eq!(told.kind(), Kind::Busy);
            says(&told, &["it is ready, retry to take it"]);
            assert!(opened.elapsed() < BOUND / 2, "it was held");
            pod.probe().start("p1", BOUND).unwrap();
            pod.end();
        },
    );
}

#[test]
fn the_metrics_tell_creations_parked_pods_and_roll_backs_with_their_ages() {
    on_a_machine(
        "seen::the_metrics_tell_creations_parked_pods_and_roll_backs_with_their_ages",
        "",
        |machine| {
            let gauge = |state: &str| {
                let count = metric(&format!("podvisor_pods{{state=\"{state}\"}}"));
                let age = metric(&format!(
                    "podvisor_pods_oldest_age_seconds{{state=\"{state}\"}}"
                ));
                (count.unwrap(), age.unwrap() > 0.0)
            };
            for state in ["creating", "parked", "rolling_back"] {
                assert_eq!(gauge(state), (0.0, false), "{state}");
            }
            assert_eq!(metric("podvisor_waiting_requests"), Some(0.0));

            let pod = machine.timed_out("p1", Delay::Plugin);
            let watchers: Vec<_> = (0..2).map(|_| pod.start_aside(BOUND)).collect();
            until_waiters(&pod, 2);
            assert_eq!(gauge("creating"), (1.0, true));
            assert_eq!(metric("podvisor_waiting_requests"), Some(2.0));
            machine.let_go(Delay::Plugin);
            until(&pod, State::Parked);
            assert_eq!(
                (gauge("creating"), gauge("parked")),
                ((0.0, false), (1.0, true))
            );
            pod.probe().stop("p1").unwrap();
            for watcher in watchers {
                assert_eq!(watcher.join().unwrap().unwrap_err().kind(), Kind::State);
            }
            pod.probe().shutdown("p1").unwrap();
            let count = |sample: &str| metric(sample).unwrap_or(0.0);
            assert_eq!(
                count("podvisor_creations_total{kind=\"pod\",result=\"parked\"}"),
                1.0
            );
            assert_eq!(
                count("podvisor_unparked_total{kind=\"pod\",reason=\"removed\"}"),
                1.0
            );

            // One that fails, and whose DEL takes its time.
            machine.plugin.on("ADD", &[Act::Exit(1)]);
            let undone = std::path::PathBuf::from("/run/undone");
            machine.plugin.on("DEL", &[Act::WaitFor(undone.clone())]);
            let pod = Pod::create("p2");
            pod.probe().start("p2", BOUND).unwrap_err();
            called(&machine.plugin, "DEL", 2);
            assert_eq!(gauge("rolling_back"), (1.0, true));
            let shown = podvisor(&["--namespace", rig::NAMESPACE, "ps", "-a"]).ok();
            assert!(shown.stdout.contains("rolling back "), "{shown:#?}");
            let told = pod.probe().start("p2", SHORT).unwrap_err();
            assert_eq!(told.kind(), Kind::Busy);
            says(&told, &["rolled back", "step cni-del", " s"]);
            std::fs::write(&undone, "").unwrap();
            eventually(BOUND, "it is rolled back", || {
                (gauge("rolling_back") == (0.0, false)).then_some(())
            });
            pod.end();
            assert_eq!(
                count("podvisor_creations_total{kind=\"pod\",result=\"failed\"}"),
                1.0
            );
            let chains = "podvisor_cni_chain_seconds_count{network=\"slow\",command=\"ADD\"}";
            assert_eq!(count(chains), 2.0);
        },
    );
}

#[test]
fn the_log_has_a_line_for_each_stage_and_one_from_time_to_time_while_one_lasts() {
    on_a_machine(
        "seen::the_log_has_a_line_for_each_stage_and_one_from_time_to_time_while_one_lasts",
        "[log]\nstage_interval = 0.2\n",
        |machine| {
            machine.hold(Delay::Plugin);
            let making = create_aside("5m");
            until_listed("starting");
            let id = listed()[0]["id"].as_str().unwrap().to_owned();
            let lines = |words: &[&str]| {
                let log = log_of(&id);
                let all = |line: &&str| words.iter().all(|w| line.contains(w));
                log.lines().filter(all).count()
            };
            let still = ["msg=\"still at stage\"", "stage=cni-add", "waiters=1"];
            eventually(BOUND, "three lines of a stage that lasts", || {
                (lines(&still) >= 3).then_some(())
            });
            machine.let_go(Delay::Plugin);
            let made = making.wait_with_output().unwrap();
            assert!(made.status.success(), "{made:?}");
            for stage in ["create", "netns", "cni-add", "infra", "ready"] {
                let words = [
                    "msg=\"stage begins\"",
                    &format!("stage={stage} ")[..],
                    "age_us=",
                    "waiters=",
                ];
                assert_eq!(lines(&words), 1, "{stage} in {}", log_of(&id));
            }
            let key = document_key(&id);
            assert!(
                lines(&[&format!("key={key} "), "stage=infra"]) >= 1,
                "{}",
                log_of(&id)
            );
            let before = lines(&["still at stage"]);
            std::thread::sleep(Duration::from_millis(500));
            assert_eq!(lines(&["still at stage"]), before, "it is over");
            podvisor(&["rm", "-f", "web"]).ok();
        },
    );
}

fn document_key(id: &str) -> String {
    inspect(id)["status"]["key"].as_str().unwrap().to_owned()
}

#[test]
fn inspect_tells_the_history_of_joins_parking_claim_and_undo() {
    on_a_machine(
        "seen::inspect_tells_the_history_of_joins_parking_claim_and_undo",
        "",
        |machine| {
            // A first try that fails after the real plugin has done its work.
            machine.hold_and_fail();
            let pod = Pod::create("p1");
            let first = pod.start_aside(BOUND);
            called(&machine.plugin, "ADD", 1);
            let joined = pod.start_aside(BOUND);
            until_waiters(&pod, 2);
            machine.let_go(Delay::Plugin);
            first.join().unwrap().unwrap_err();
            joined.join().unwrap().unwrap_err();
            // Another one that is parked and taken.
            eventually(BOUND, "the roll-back ends", || {
                (info(&pod)["activity"] != "rolling_back").then_some(())
            });
            machine.hold(Delay::Infra);
            assert_eq!(
                pod.probe().start("p1", SHORT).unwrap_err().kind(),
                Kind::Deadline
            );
            machine.let_go(Delay::Infra);
            until(&pod, State::Parked);
            pod.probe().start("p1", BOUND).unwrap();

            let events = kit::history(&document(&pod));
            let has =
                |event: &str, detail: &str| events.iter().any(|(e, d)| e == event && d == detail);
            for (event, detail) in [
                ("joined", "cni-add"),
                ("failed", "cni-add"),
                ("undo", "cni-del"),
                ("undo", "netns"),
                ("parked", ""),
                ("claimed", ""),
            ] {
                assert!(has(event, detail), "{event} {detail} in {events:?}");
            }
            assert_eq!(info(&pod)["history"], document(&pod)["history"]);
            let asked = ["--namespace", rig::NAMESPACE, "inspect", "--stages", "p1"];
            let table = podvisor(&asked).ok().stdout;
            for row in [
                "joined at cni-add",
                "failed at cni-add",
                "no address is free",
                "undo cni-del",
                "parked",
                "claimed",
            ] {
                assert!(table.contains(row), "{row} in {table}");
            }
            pod.end();
            machine.chains(2, 2);
        },
    );
}

#[test]
fn ps_shows_a_parked_pod_with_its_age() {
    on_a_machine("seen::ps_shows_a_parked_pod_with_its_age", "", |machine| {
        machine.hold(Delay::Plugin);
        podvisor(&create("1s")).code_is(125);
        let starting = podvisor(&["ps", "-a"]).ok().stdout;
        assert!(starting.contains("starting "), "{starting}");
        machine.let_go(Delay::Plugin);
        until_listed("parked");
        let shown = podvisor(&["ps", "-a"]).ok().stdout;
        let row = shown.lines().nth(1).unwrap();
        let state = row
            .split("  ")
            .map(str::trim)
            .find(|c| c.starts_with("parked"));
        let age = state.and_then(|s| s.strip_prefix("parked ")).unwrap();
        assert!(
            age.ends_with('s') && age[..1].parse::<u8>().is_ok(),
            "{shown}"
        );
        let pod: Value = listed()[0].clone();
        assert_eq!(pod["activity"], "parked");
        assert!(pod["activity_seconds"].as_f64().unwrap() > 0.0);
        podvisor(&["rm", "-f", "web"]).ok();
    });
}

#[test]
fn the_dump_names_key_stage_ages_and_waiters() {
    on_a_machine(
        "seen::the_dump_names_key_stage_ages_and_waiters",
        "",
        |machine| {
            machine.hold(Delay::Plugin);
            let mut making = create_aside("5m");
            until_listed("starting");
            let pod = inspect("web");
            let supervisor = pod["supervisor"]["pid"].as_i64().unwrap();
            signal(i32::try_from(supervisor).unwrap(), Signal::SIGUSR1);
            let id = pod["id"].as_str().unwrap().to_owned();
            let line = eventually(BOUND, "the dump", || {
                let log = log_of(&id);
                log.lines()
                    .find(|l| l.contains("step=dump"))
                    .map(str::to_owned)
            });
            let key = document_key(&id);
            for part in [
                &format!("key={key}")[..],
                "stage=cni-add",
                "stage_age=",
                "waiters=1",
            ] {
                assert!(line.contains(part), "{part} in {line}");
            }
            machine.let_go(Delay::Plugin);
            assert!(making.wait().unwrap().success());
            podvisor(&["rm", "-f", "web"]).ok();
        },
    );
}
