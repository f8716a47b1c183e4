//! `exec` and `wait`.

use std::process::Command;

use crate::kit::{BOUND, Background, on_a_machine, wait_for_log};
use crate::support::bin::{self, PODVISOR};
use crate::support::{eventually, podvisor};

#[test]
fn a_command_in_a_container_has_its_own_code_environment_and_streams() {
    on_a_machine(
        "exec::a_command_in_a_container_has_its_own_code_environment_and_streams",
        |kit| {
            kit.detached(
                &["--name", "web", "--net", "none", "-e", "A=1", "-e", "B=2"],
                "sleep 1000",
            );
            let sh = |script: &str| podvisor(&["exec", "web", "--", "/bin/sh", "-c", script]);
            sh("exit 9").code_is(9);
            for (signal, code) in [("INT", 130), ("KILL", 137), ("TERM", 143)] {
                sh(&format!("kill -{signal} $$")).code_is(code);
            }
            let both = sh("echo out; echo err >&2; hostname; pwd").ok();
            assert_eq!(
                (both.stdout.as_str(), both.stderr.as_str()),
                ("out\nweb\n/\n", "err\n")
            );
            // Options after the command are the command's.
            let env = podvisor(&[
                "exec",
                "-e",
                "A=changed",
                "-w",
                "/tmp",
                "web",
                "sh",
                "-c",
                "echo $A $B $PWD",
            ])
            .ok();
            assert_eq!(env.stdout, "changed 2 /tmp\n");
            let mut cat = Command::new(PODVISOR);
            cat.args(["exec", "-i", "web", "--", "cat"]);
            let input = vec![b'x'; 300_000];
            assert!(
                bin::run_with(&mut cat, Some(&input), BOUND)
                    .ok()
                    .stdout
                    .as_bytes()
                    == input
            );
            for (command, code) in [("/bin/nope", 127), ("/etc/passwd", 126)] {
                let failed = podvisor(&["exec", "web", command]).code_is(code);
                assert!(failed.stderr.contains(command), "{failed:#?}");
            }
            podvisor(&["rm", "-f", "web"]).ok();
        },
    );
}

#[test]
fn a_container_that_has_ended_takes_no_command() {
    on_a_machine("exec::a_container_that_has_ended_takes_no_command", |kit| {
        kit.run(&["--name", "once", "--net", "none"], "true").ok();
        let refused = podvisor(&["exec", "once", "true"]).code_is(1);
        assert!(refused.stderr.contains("not running"), "{refused:#?}");
        podvisor(&["exec", "nobody", "true"])
            .code_is(1)
            .fails_with("podvisor ps -a");
        podvisor(&["exec", "once/nobody", "true"])
            .code_is(1)
            .fails_with("main");
        podvisor(&["rm", "once"]).ok();
    });
}

#[test]
fn waiting_ends_with_the_container_and_prints_its_code() {
    on_a_machine(
        "exec::waiting_ends_with_the_container_and_prints_its_code",
        |kit| {
            let id = kit.detached(
                &["--name", "job", "--net", "none"],
                "echo up; until [ -e /tmp/go ]; do sleep 0.05; done; exit 6",
            );
            wait_for_log("job", "up");
            let mut waits: Vec<Background> = ["job", "job/main", &id, &id[..12]]
                .iter()
                .map(|target| Background::start(&["wait", target]))
                .collect();
            podvisor(&["exec", "job", "touch", "/tmp/go"]).ok();
            for wait in &mut waits {
                assert_eq!(
                    (wait.end(), wait.stdout().as_str()),
                    ((Some(0), None), "6\n")
                );
            }
            // Detached: the pod stays when its container has ended.
            assert_eq!(crate::kit::json(&["ps", "--json"])[0]["state"], "ready");
            assert_eq!(podvisor(&["wait", "job"]).ok().stdout, "6\n");
            podvisor(&["rm", "-f", "job"]).ok();
        },
    );
}

#[test]
fn waiting_for_a_pod_without_containers_ends_when_it_is_stopped() {
    on_a_machine(
        "exec::waiting_for_a_pod_without_containers_ends_when_it_is_stopped",
        |_| {
            podvisor(&["create", "--name", "empty", "--net", "none"]).ok();
            let mut wait = Background::start(&["wait", "empty"]);
            podvisor(&["stop", "empty"]).ok();
            assert_eq!(wait.end().0, Some(0), "{}", wait.stderr());
            let code = eventually(BOUND, "the code", || Some(wait.stdout()));
            assert!(code.trim_end().parse::<u32>().is_ok(), "{code:?}");
            assert_eq!(podvisor(&["wait", "empty"]).ok().stdout, code);
            podvisor(&["rm", "empty"]).ok();
        },
    );
}
