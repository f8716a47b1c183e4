//! What can be wrong with the words of the command line.

use std::process::Command;
use std::time::Duration;

use crate::support::bin::PODVISOR;
use crate::support::{self, podvisor};
use crate::{hostile, nothing_left, refused, run};

#[test]
fn a_rootfs_that_is_none_is_named() {
    nothing_left("command_line::a_rootfs_that_is_none_is_named", |rootfs| {
        let file = rootfs.path().join("etc/passwd");
        for (path, why) in [
            ("/nowhere/at/all", "not there"),
            (file.to_str().unwrap(), "no directory"),
            ("", "--rootfs"),
        ] {
            refused(
                &run(&["--rootfs", path]),
                &["rootfs", path, why, "--rootfs"],
            );
        }
        refused(&run(&[]), &["--rootfs <DIR>"]);
    });
}

#[test]
fn names_that_could_be_paths_or_flags_are_refused() {
    nothing_left(
        "command_line::names_that_could_be_paths_or_flags_are_refused",
        |rootfs| {
            for name in hostile() {
                let name = format!("--name={name}");
                refused(
                    &run(&["--net", "none", &name, "--rootfs", rootfs.str()]),
                    &["--name"],
                );
                refused(&podvisor(&["create", "--net", "none", &name]), &["--name"]);
            }
            let id = "0123456789abcdef0123456789abcdef";
            refused(
                &run(&["--net", "none", "--name", id, "--rootfs", rootfs.str()]),
                &["looks like a pod's id"],
            );
        },
    );
}

#[test]
fn no_verb_takes_a_hostile_pod_or_namespace() {
    nothing_left(
        "command_line::no_verb_takes_a_hostile_pod_or_namespace",
        |rootfs| {
            for target in hostile() {
                let verbs: [&[&str]; 13] = [
                    &["inspect", "--"],
                    &["exec", "--"],
                    &["logs", "--"],
                    &["stop", "--"],
                    &["rm", "-f", "--"],
                    &["wait", "--"],
                    &["inspect", "--stages", "--"],
                    &["logs", "-f", "--"],
                    &["kill", "--"],
                    &["pause", "--"],
                    &["unpause", "--"],
                    &["stats", "--"],
                    &["events", "--"],
                ];
                for verb in verbs {
                    let mut line = verb.to_vec();
                    line.push(&target);
                    if verb[0] == "exec" {
                        line.push("true");
                    }
                    let output = podvisor(&line);
                    assert_eq!(
                        (output.code, output.stdout.as_str()),
                        (Some(1), ""),
                        "{output:#?}"
                    );
                    assert!(output.stderr.contains("podvisor ps -a"), "{output:#?}");
                    assert_eq!(output.stderr.lines().count(), 1, "{output:#?}");
                }
                let sandbox = format!("--sandbox={target}");
                let output = run(&[&sandbox, "--rootfs", rootfs.str()]);
                assert_eq!(output.code, Some(1), "{output:#?}");
                let namespace = format!("--namespace={target}");
                refused(&podvisor(&[&namespace, "ps"]), &["namespace"]);
            }
            for reserved in ["s", "netns"] {
                refused(
                    &podvisor(&["--namespace", reserved, "ps"]),
                    &["choose another"],
                );
            }
        },
    );
}

#[test]
fn ports_are_numbers_given_once_on_a_network_that_can_publish_them() {
    nothing_left(
        "command_line::ports_are_numbers_given_once_on_a_network_that_can_publish_them",
        |rootfs| {
            let tail = ["--rootfs", rootfs.str()];
            for port in [
                "0:80",
                "80:0",
                "65536:80",
                "80:70000",
                "x:80",
                "80",
                "80:80/icmp",
                "-1:80",
                "1.2.3:80:80",
            ] {
                let flag = format!("--publish={port}");
                refused(
                    &run(&[&[flag.as_str()][..], &tail].concat()),
                    &["--publish", port],
                );
            }
            refused(
                &run(&[&["-p", "80:80", "-p", "80:81"][..], &tail].concat()),
                &["80/tcp", "twice"],
            );
            refused(
                &run(&[&["-p", "80:80"][..], &tail].concat()),
                &["testnet", "add the portmap plugin"],
            );
            refused(
                &run(&[&["-p", "80:80", "--net", "none"][..], &tail].concat()),
                &["--net"],
            );
            refused(
                &run(&[&["-p", "80:80", "--net", "host"][..], &tail].concat()),
                &["leave --publish out"],
            );
        },
    );
}

#[test]
fn other_values_are_checked_before_anything_is_made() {
    nothing_left(
        "command_line::other_values_are_checked_before_anything_is_made",
        |rootfs| {
            let tail = ["--net", "none", "--rootfs", rootfs.str()];
            for (flags, words) in [
                (["--timeout", "0"], "--timeout"),
                (["--timeout", "soon"], "30s"),
                (["--env", "=x"], "KEY=VALUE"),
                (["--workdir", "tmp"], "absolute"),
                (["--sandbox", "x"], "--sandbox"),
            ] {
                refused(&run(&[&flags[..], &tail].concat()), &[words]);
            }
            refused(&run(&[&["-d"][..], &tail].concat()), &["--rm"]);
            refused(
                &podvisor(&["run", "--rootfs", rootfs.str(), "--net", "none", "--", ""]),
                &["empty"],
            );
            refused(&podvisor(&["run", "--rootfs", rootfs.str()]), &["COMMAND"]);
            refused(&podvisor(&["stop", "-t", "0", "x"]), &["--time"]);
            refused(&podvisor(&["frobnicate"]), &["frobnicate"]);
            // A flag behind the double dash is the workload's: the rootfs has no such program.
            let line = [&["run", "--rm"][..], &tail, &["--", "--net"]].concat();
            assert_eq!(podvisor(&line).code, Some(127));
        },
    );
}

#[test]
fn every_verb_tells_who_is_not_root_what_is_missing() {
    nothing_left(
        "command_line::every_verb_tells_who_is_not_root_what_is_missing",
        |rootfs| {
            let verbs: [&[&str]; 15] = [
                &["run", "--rootfs", rootfs.str(), "--", "true"],
                &["create"],
                &["ps"],
                &["inspect", "x"],
                &["exec", "x", "true"],
                &["logs", "x"],
                &["stop", "x"],
                &["rm", "-f", "x"],
                &["wait", "x"],
                &["network", "ls"],
                &["stats"],
                &["events"],
                &["kill", "x"],
                &["pause", "x"],
                &["unpause", "x"],
            ];
            // Whoever is not root may not be allowed to look below the build directory either.
            let program = "/run/podvisor-copy";
            std::fs::copy(PODVISOR, program).unwrap();
            for verb in verbs {
                let mut command = Command::new("setpriv");
                command
                    .args([
                        "--reuid",
                        "65534",
                        "--regid",
                        "65534",
                        "--clear-groups",
                        program,
                    ])
                    .args(verb);
                refused(
                    &support::run(&mut command, Duration::from_secs(60)),
                    &["root", "sudo"],
                );
            }
            let mut version = Command::new("setpriv");
            version.args([
                "--reuid",
                "65534",
                "--regid",
                "65534",
                "--clear-groups",
                program,
                "version",
            ]);
            support::run(&mut version, Duration::from_secs(60)).ok();
            std::fs::remove_file(program).unwrap();
        },
    );
}
