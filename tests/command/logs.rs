//! `logs`: what a container has written, whatever has become of it.

use crate::kit::{inspect, on_a_machine, wait_for_log};
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
            let pid = inspect("web")["supervisor"]["pid"].as_i64().unwrap();
            let pid = nix::unistd::Pid::from_raw(i32::try_from(pid).unwrap());
            nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL).unwrap();
            crate::support::eventually(crate::kit::BOUND, "a dead pod in the list", || {
                podvisor(&["ps"]).ok().stdout.contains("dead").then_some(())
            });
            assert_eq!(podvisor(&["logs", "web"]).ok().stdout, "kept\n");
            podvisor(&["exec", "web", "true"]).fails_with("podvisor rm web");
            podvisor(&["stop", "web"]).ok();
            podvisor(&["rm", "web"]).ok();
        },
    );
}
