//! `kill`, `pause`, `unpause`, `stats`, `events`, `completion`.

use std::process::Command;

use serde_json::Value;

use crate::kit::{BOUND, Background, inspect, json, kill_supervisor, on_a_machine, wait_for_log};
use crate::support::{self, eventually, podvisor};

#[test]
fn signals_go_to_the_containers_that_were_named() {
    on_a_machine(
        "verbs::signals_go_to_the_containers_that_were_named",
        |kit| {
            let script = "trap 'echo got HUP' HUP; trap 'echo got USR1' USR1; echo up; while :; do sleep 0.1; done";
            kit.detached(&["--name", "web", "--net", "none"], script);
            kit.run(&["-d", "--sandbox", "web", "--name", "side"], script)
                .ok();
            wait_for_log("web", "up");
            wait_for_log("web/side", "up");
            podvisor(&["kill", "-s", "HUP", "web"]).ok();
            wait_for_log("web", "got HUP");
            podvisor(&["kill", "--signal", "sigusr1", "web/side"]).ok();
            wait_for_log("web/side", "got USR1");
            assert!(!podvisor(&["logs", "web/side"]).ok().stdout.contains("HUP"));
            assert!(!podvisor(&["logs", "web"]).ok().stdout.contains("USR1"));
            podvisor(&["kill", "-s", "1", "--all", "web"]).ok();
            wait_for_log("web/side", "got HUP");
            // KILL when nothing else is said; both have ended then.
            podvisor(&["kill", "--all", "web"]).ok();
            for target in ["web", "web/side"] {
                assert_eq!(podvisor(&["wait", target]).ok().stdout, "137\n");
                let refused = podvisor(&["kill", target]).code_is(1);
                assert!(
                    refused.stderr.contains("nothing of it is running"),
                    "{refused:#?}"
                );
            }
            podvisor(&["kill", "-s", "NOPE", "web"])
                .code_is(125)
                .fails_with("no signal");
            podvisor(&["kill", "nobody"])
                .code_is(1)
                .fails_with("podvisor ps -a");
            podvisor(&["rm", "-f", "web"]).ok();
        },
    );
}

#[test]
fn a_pod_stands_still_whole_and_goes_on() {
    on_a_machine("verbs::a_pod_stands_still_whole_and_goes_on", |kit| {
        let script = "while :; do echo tick; sleep 0.05; done";
        kit.detached(&["--name", "web", "--net", "none"], script);
        kit.run(&["-d", "--sandbox", "web", "--name", "side"], script)
            .ok();
        let ticks = |target: &str| podvisor(&["logs", target]).ok().stdout.lines().count();
        for target in ["web", "web/side"] {
            eventually(BOUND, "ticks", || (ticks(target) > 2).then_some(()));
        }
        assert_eq!(podvisor(&["pause", "web"]).ok().stdout, "web\n");
        let frozen = ["web", "web/side"].map(ticks);
        let pod = &json(&["ps", "--json"])[0];
        assert_eq!((&pod["paused"], &pod["running"]), (&2.into(), &2.into()));
        assert!(podvisor(&["ps"]).ok().stdout.contains("2/2 (2 paused)"));
        std::thread::sleep(std::time::Duration::from_millis(300));
        assert_eq!(["web", "web/side"].map(ticks), frozen);
        podvisor(&["exec", "web", "true"])
            .code_is(1)
            .fails_with("not running");
        // Again is the same.
        podvisor(&["pause", "web"]).ok();
        podvisor(&["unpause", "web"]).ok();
        podvisor(&["unpause", "web"]).ok();
        for (target, before) in ["web", "web/side"].iter().zip(frozen) {
            eventually(BOUND, "ticks again", || {
                (ticks(target) > before).then_some(())
            });
        }
        podvisor(&["create", "--name", "empty", "--net", "none"]).ok();
        for verb in ["pause", "unpause"] {
            podvisor(&[verb, "empty"])
                .code_is(1)
                .fails_with("no container of it is running");
        }
        // What is paused can be removed.
        podvisor(&["pause", "web"]).ok();
        podvisor(&["rm", "-f", "web", "empty"]).ok();
    });
}

#[test]
fn what_containers_use_is_shown_once_or_again_and_again() {
    on_a_machine(
        "verbs::what_containers_use_is_shown_once_or_again_and_again",
        |kit| {
            assert_eq!(
                json(&["stats", "--no-stream", "--json"]),
                serde_json::json!([])
            );
            kit.detached(
                &["--name", "busy", "--net", "none", "-m", "64m"],
                "while :; do :; done",
            );
            kit.detached(&["--name", "idle", "--net", "none"], "sleep 1000");
            let all = json(&["stats", "--no-stream", "--json"]);
            let of = |name: &str| -> Value {
                let list = all.as_array().unwrap();
                list.iter().find(|s| s["pod"] == name).unwrap().clone()
            };
            let (busy, idle) = (of("busy"), of("idle"));
            assert!(
                busy["cpu_percent"].as_f64() > Some(2.0)
                    && busy["cpu_percent"].as_f64() < Some(150.0),
                "{busy:#}"
            );
            assert!(
                idle["cpu_percent"].as_f64() < busy["cpu_percent"].as_f64(),
                "{idle:#}"
            );
            assert_eq!(
                (&busy["container"], &busy["memory_limit_bytes"]),
                (&"main".into(), &(64 << 20).into())
            );
            assert_eq!(idle["memory_limit_bytes"], Value::Null);
            assert!(
                busy["memory_bytes"].as_u64() > Some(4096) && busy["pids"] == 1,
                "{busy:#}"
            );
            let table = podvisor(&["stats", "--no-stream", "busy"]).ok().stdout;
            assert!(
                table.starts_with("POD ID") && table.contains("64.0M") && !table.contains("idle"),
                "{table}"
            );
            let mut stream = Background::start(&["stats", "--interval", "200ms", "--json", "busy"]);
            eventually(BOUND, "three looks", || {
                (stream.stdout().lines().count() >= 3).then_some(())
            });
            for line in stream.stdout().lines().take(3) {
                let look: Value = serde_json::from_str(line).unwrap();
                assert_eq!(look[0]["pod"], "busy", "{look}");
                crate::schema::fits("stats", &look);
            }
            podvisor(&["rm", "-f", "busy", "idle"]).ok();
            // Nothing is left of what was asked for.
            assert_eq!(stream.end().0, Some(0), "{}", stream.stderr());
            podvisor(&["stats", "busy"])
                .code_is(1)
                .fails_with("podvisor ps -a");
        },
    );
}

#[test]
fn events_tell_a_life_in_its_order_and_each_thing_once() {
    on_a_machine(
        "verbs::events_tell_a_life_in_its_order_and_each_thing_once",
        |kit| {
            kit.run(&["--rm", "--name", "before", "--net", "none"], "true")
                .ok();
            let mut all = Background::start(&["events", "--json"]);
            std::thread::sleep(std::time::Duration::from_millis(500));
            let begin = podvisor(&["ps"]).ok();
            assert_eq!(begin.stdout.lines().count(), 1);
            let id = kit.detached(
                &["--name", "web"],
                "until [ -e /tmp/go ]; do sleep 0.05; done; exit 6",
            );
            let look = || {
                let text = all.stdout();
                let whole = text.rsplit_once('\n').map(|(lines, _)| lines.to_owned());
                let lines = whole.unwrap_or_default();
                lines
                    .lines()
                    .map(|l| serde_json::from_str::<Value>(l).unwrap())
                    .collect::<Vec<_>>()
            };
            let told = |kind: &str, event: &str| {
                look()
                    .into_iter()
                    .filter(|e| e["type"] == kind && e["event"] == event)
                    .collect::<Vec<_>>()
            };
            let wait_for = |kind: &str, event: &str| {
                eventually(BOUND, &format!("{event} of a {kind}"), || {
                    told(kind, event).into_iter().next()
                })
            };
            wait_for("container", "start");
            podvisor(&["pause", "web"]).ok();
            wait_for("container", "pause");
            podvisor(&["unpause", "web"]).ok();
            wait_for("container", "unpause");
            podvisor(&["exec", "web", "touch", "/tmp/go"]).ok();
            assert_eq!(wait_for("container", "exit")["detail"]["code"], 6);
            podvisor(&["stop", "web"]).ok();
            wait_for("pod", "stop");
            podvisor(&["rm", "web"]).ok();
            wait_for("pod", "remove");
            let events = look();
            let names: Vec<String> = events
                .iter()
                .map(|e| {
                    let stage = e["detail"]["stage"].as_str().unwrap_or_default();
                    format!(
                        "{} {} {stage}",
                        e["type"].as_str().unwrap(),
                        e["event"].as_str().unwrap()
                    )
                    .trim_end()
                    .to_owned()
                })
                .collect();
            let place = |what: &str| {
                names
                    .iter()
                    .position(|n| n == what)
                    .unwrap_or_else(|| panic!("{what} in {names:#?}"))
            };
            for pair in [
                ["pod create", "pod stage cni-add"],
                ["pod stage cni-add", "pod stage infra"],
                ["pod stage infra", "pod ready"],
                ["pod ready", "container create"],
                ["container create", "container start"],
                ["container start", "container pause"],
                ["container pause", "container unpause"],
                ["container unpause", "container exit"],
                ["container exit", "pod stop"],
                ["pod stop", "pod remove"],
            ] {
                assert!(place(pair[0]) < place(pair[1]), "{pair:?} in {names:#?}");
            }
            for once in [
                "pod create",
                "pod ready",
                "container start",
                "container exit",
                "pod stop",
                "pod remove",
            ] {
                assert_eq!(
                    names.iter().filter(|n| *n == once).count(),
                    1,
                    "{once} in {names:#?}"
                );
            }
            for event in &events {
                crate::schema::fits("events", event);
                assert_eq!(
                    (&event["pod_id"], &event["pod"]),
                    (&id.as_str().into(), &"web".into())
                );
            }
            // A supervisor that is killed is told of too; and what is on record can be had later.
            kit.detached(&["--name", "dead", "--net", "none"], "sleep 1000");
            kill_supervisor("dead");
            wait_for("pod", "die");
            all.signal(nix::sys::signal::Signal::SIGTERM);
            assert_eq!(all.end().1, Some(15));
            let past = |flags: &[&str]| {
                let line = [&["events", "--no-follow"][..], flags].concat();
                podvisor(&line).ok().stdout
            };
            let start = past(&["--filter", "event=start", "dead"]);
            assert!(
                start.contains(" container start dead/main") && start.lines().count() == 1,
                "{start}"
            );
            assert!(past(&["--filter", "type=pod"]).contains(" pod ready dead"));
            assert_eq!(past(&["--since", "2999-01-01"]), "");
            assert!(!past(&["--since", "10m"]).is_empty());
            podvisor(&["rm", "-f", "dead"]).ok();
        },
    );
}

#[test]
fn shells_are_told_every_verb() {
    for shell in ["bash", "zsh", "fish"] {
        let words = podvisor(&["completion", shell]).ok().stdout;
        for verb in [
            "run",
            "exec",
            "stats",
            "unpause",
            "--cap-add",
            "--no-stream",
        ] {
            let bare = verb.trim_start_matches('-');
            assert!(words.contains(bare), "{verb} in what {shell} is told");
        }
    }
    podvisor(&["completion", "tcsh"])
        .code_is(125)
        .fails_with("bash, zsh, fish");
    let words = podvisor(&["completion", "bash"]).ok().stdout;
    let script = format!(
        "{words}\nCOMP_WORDS=(podvisor unp); COMP_CWORD=1; _podvisor podvisor unp podvisor; echo \"${{COMPREPLY[*]}}\""
    );
    let mut bash = Command::new("bash");
    bash.args(["-c", &script]);
    assert_eq!(support::run(&mut bash, BOUND).ok().stdout, "unpause\n");
}

/// FL-086e: SIGTERM and SIGINT to the supervisor, as when the node goes down: the pod is stopped in its grace, with or without
/// somebody who follows it, and nothing is left.
#[test]
fn a_supervisor_that_is_told_to_end_stops_its_pod_and_leaves_nothing() {
    use nix::sys::signal::{Signal, kill};
    on_a_machine(
        "verbs::a_supervisor_that_is_told_to_end_stops_its_pod_and_leaves_nothing",
        |kit| {
            let script = "trap 'exit 7' TERM; echo up; while :; do sleep 0.1; done";
            for (signal, attached) in [
                (Signal::SIGTERM, true),
                (Signal::SIGINT, true),
                (Signal::SIGTERM, false),
            ] {
                let run = attached.then(|| kit.background(&["--name", "web"], script));
                match &run {
                    Some(run) => run.wait_for("up"),
                    None => drop(kit.detached(&["--name", "web"], script)),
                }
                wait_for_log("web", "up");
                let pid = inspect("web")["supervisor"]["pid"].as_i64().unwrap();
                let begin = std::time::Instant::now();
                kill(
                    nix::unistd::Pid::from_raw(i32::try_from(pid).unwrap()),
                    signal,
                )
                .unwrap();
                if let Some(mut run) = run {
                    assert_eq!(run.end().0, Some(7), "{}", run.stderr());
                }
                eventually(BOUND, "the end of the pod", || {
                    podvisor(&["ps", "-aq"])
                        .ok()
                        .stdout
                        .is_empty()
                        .then_some(())
                });
                assert!(begin.elapsed() < std::time::Duration::from_secs(30));
            }
            // The name is free.
            kit.run(&["--rm", "--name", "web", "--net", "none"], "true")
                .ok();
        },
    );
}
