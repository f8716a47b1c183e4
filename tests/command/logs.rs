//! `logs`: what a container has written, whatever has become of it.

use crate::kit::{Background, kill_supervisor, on_a_machine, wait_for_log};
use crate::support::podvisor;

#[test]
fn logs_keep_both_streams_in_order_and_the_last_line_without_a_newline() {
    on_a_machine(
        "logs::logs_keep_both_streams_in_order_and_the_last_line_without_a_newline",
        |kit| {
            let script =
                "echo one; sleep 0.1; echo two >&2; sleep 0.1; echo three; sleep 0.1; printf four";
            kit.run(&["--name", "job", "--net", "none"], script).ok();
            let logs = podvisor(&["logs", "job"]).ok();
            assert_eq!(
                (logs.stdout.as_str(), logs.stderr.as_str()),
                ("one\nthree\nfour\n", "two\n")
            );
            // Into one file they come in the order they were written in.
            let mut both = std::process::Command::new("sh");
            both.args([
                "-c",
                "exec \"$0\" logs job 2>&1",
                crate::support::bin::PODVISOR,
            ]);
            let both = crate::support::run(&mut both, crate::kit::BOUND).ok();
            assert_eq!(both.stdout, "one\ntwo\nthree\nfour\n");
            let times = podvisor(&["logs", "-t", "job/main"]).ok();
            for line in times.stdout.lines() {
                assert!(
                    line.starts_with("20") && line.as_bytes()[10] == b'T',
                    "{line}"
                );
            }
            podvisor(&["rm", "job"]).ok();
            podvisor(&["logs", "job"]).code_is(1);
        },
    );
}

#[test]
fn logs_hold_what_the_foreground_showed_byte_for_byte() {
    on_a_machine(
        "logs::logs_hold_what_the_foreground_showed_byte_for_byte",
        |kit| {
            // What is shown is the workload's own; the log closes its last line. Lines longer than any buffer, empty lines, and bytes that are no text.
            let script = "seq 1 60000; echo; head -c 100000 /dev/zero | tr '\\0' y; echo; printf 'end\\377\\001'";
            let shown = kit.run(&["--name", "big", "--net", "none"], script).ok();
            let logs = podvisor(&["logs", "big"]).ok();
            assert!(
                format!("{}\n", shown.stdout) == logs.stdout,
                "{} and {} bytes",
                shown.stdout.len(),
                logs.stdout.len()
            );
            podvisor(&["rm", "big"]).ok();
        },
    );
}

#[test]
fn logs_are_there_while_it_runs_and_when_its_supervisor_was_killed() {
    on_a_machine(
        "logs::logs_are_there_while_it_runs_and_when_its_supervisor_was_killed",
        |kit| {
            kit.detached(&["--name", "web"], "echo kept; sleep 1000");
            wait_for_log("web", "kept");
            kill_supervisor("web");
            assert_eq!(podvisor(&["logs", "web"]).ok().stdout, "kept\n");
            podvisor(&["exec", "web", "true"]).fails_with("podvisor rm web");
            podvisor(&["stop", "web"]).ok();
            podvisor(&["rm", "web"]).ok();
        },
    );
}

#[test]
fn logs_are_followed_to_the_end_from_where_they_were_asked_for() {
    on_a_machine(
        "logs::logs_are_followed_to_the_end_from_where_they_were_asked_for",
        |kit| {
            let script = "seq 1 1000; until [ -e /tmp/go ]; do sleep 0.05; done; seq 1001 60000; echo err >&2; printf last";
            kit.detached(&["--name", "job", "--net", "none"], script);
            wait_for_log("job", "1000");
            let tail = |count: &str| podvisor(&["logs", "--tail", count, "job"]).ok().stdout;
            assert_eq!(tail("2"), "999\n1000\n");
            assert_eq!(
                (tail("0").as_str(), tail("5000").lines().count()),
                ("", 1000)
            );
            assert_eq!(
                podvisor(&["logs", "--since", "1h", "job"])
                    .ok()
                    .stdout
                    .lines()
                    .count(),
                1000
            );
            assert_eq!(
                podvisor(&["logs", "--since", "2999-01-01T00:00:00Z", "job"])
                    .ok()
                    .stdout,
                ""
            );
            podvisor(&["logs", "--since", "soon", "job"])
                .code_is(125)
                .fails_with("10m");
            let mut whole = Background::start(&["logs", "-f", "job"]);
            let mut end = Background::start(&["logs", "--follow", "--tail", "1", "job"]);
            whole.wait_for("1000");
            end.wait_for("1000");
            podvisor(&["exec", "job", "touch", "/tmp/go"]).ok();
            for (follower, from) in [(&mut whole, 1), (&mut end, 1000)] {
                assert_eq!(follower.end(), (Some(0), None), "{}", follower.stderr());
                let numbers: String = (from..=60_000).map(|n| format!("{n}\n")).collect();
                let shown = follower.stdout();
                assert!(
                    shown == numbers + "last\n",
                    "{} bytes from {from}",
                    shown.len()
                );
                assert_eq!(follower.stderr(), "err\n");
            }
            // One that has ended, and one whose supervisor has died, are not waited for.
            podvisor(&["logs", "-f", "--tail", "1", "job"]).ok();
            kit.detached(
                &["--name", "dead", "--net", "none"],
                "echo kept; sleep 1000",
            );
            wait_for_log("dead", "kept");
            let mut follower = Background::start(&["logs", "-f", "dead"]);
            follower.wait_for("kept");
            kill_supervisor("dead");
            assert_eq!(follower.end(), (Some(0), None));
            podvisor(&["rm", "-f", "job", "dead"]).ok();
        },
    );
}
