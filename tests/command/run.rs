//! `run`: the workload's exit code, its streams, and what the flags do.

use crate::kit::{id_of, inspect, json, on_a_machine};
use crate::support::podvisor;

#[test]
fn the_exit_code_is_the_workloads() {
    on_a_machine("run::the_exit_code_is_the_workloads", |kit| {
        for code in [0, 7, 255] {
            let ended = kit.run(&["--rm"], &format!("exit {code}")).code_is(code);
            assert_eq!((ended.stdout.as_str(), ended.stderr.as_str()), ("", ""));
        }
    });
}

/// A first process of a pid namespace only dies of SIGKILL from outside; the other two are what a shell makes of its own end.
#[test]
fn an_end_by_a_signal_is_128_and_its_number() {
    on_a_machine("run::an_end_by_a_signal_is_128_and_its_number", |kit| {
        let mut run = kit.background(
            &["--rm", "--net", "none", "--name", "killed"],
            "echo up; sleep 1000",
        );
        run.wait_for("up");
        let pod = inspect("killed");
        let container = pod["containers"]
            .as_object()
            .unwrap()
            .values()
            .next()
            .unwrap();
        let pid = container["init"]["pid"].as_i64().unwrap();
        nix::sys::signal::kill(
            nix::unistd::Pid::from_raw(i32::try_from(pid).unwrap()),
            nix::sys::signal::Signal::SIGKILL,
        )
        .unwrap();
        assert_eq!(run.end(), (Some(137), None));
        for (signal, code) in [("INT", 130), ("TERM", 143)] {
            let script = format!("sh -c 'kill -{signal} $$'; exit $?");
            kit.run(&["--rm", "--net", "none"], &script).code_is(code);
        }
    });
}

#[test]
fn stdout_and_stderr_stay_apart_and_whole() {
    on_a_machine("run::stdout_and_stderr_stay_apart_and_whole", |kit| {
        let flags = ["--rm", "--net", "none"];
        let few = kit
            .run(&flags, "echo out; echo err >&2; printf 'no newline'")
            .ok();
        assert_eq!(few.stdout, "out\nno newline");
        assert_eq!(few.stderr, "err\n");
        let script = "seq 1 300000 & seq 500001 600000 >&2; wait";
        let many = kit.run(&flags, script).ok();
        let numbers =
            |from: u32, to: u32| -> String { (from..=to).map(|n| format!("{n}\n")).collect() };
        assert!(
            many.stdout == numbers(1, 300_000),
            "{} bytes",
            many.stdout.len()
        );
        assert!(
            many.stderr == numbers(500_001, 600_000),
            "{} bytes",
            many.stderr.len()
        );
    });
}

#[test]
fn standard_input_is_passed_on_only_when_asked_for() {
    on_a_machine(
        "run::standard_input_is_passed_on_only_when_asked_for",
        |kit| {
            let input: Vec<u8> = (0..2 * 1024 * 1024_u32)
                .map(|n| b'a' + u8::try_from(n % 23).unwrap())
                .collect();
            let echo = kit
                .run_with(&["--rm", "--net", "none", "-i"], "cat", &input)
                .ok();
            assert!(
                echo.stdout.as_bytes() == input,
                "{} bytes",
                echo.stdout.len()
            );
            let part = kit
                .run_with(&["--rm", "--net", "none", "-i"], "head -c 5", &input)
                .ok();
            assert_eq!(part.stdout.as_bytes(), &input[..5]);
            let none = kit
                .run_with(&["--rm", "--net", "none"], "cat; echo end", b"text")
                .ok();
            assert_eq!(none.stdout, "end\n");
        },
    );
}

#[test]
fn a_command_that_cannot_start_is_127_or_126_and_leaves_nothing() {
    on_a_machine(
        "run::a_command_that_cannot_start_is_127_or_126_and_leaves_nothing",
        |kit| {
            let plain = kit.rootfs.path().join("etc/plain");
            std::fs::write(&plain, "text").unwrap();
            for runtime in ["runc", "crun"] {
                let config = format!("runtime = {runtime:?}\n");
                std::fs::write("/etc/podvisor/config.toml", config).unwrap();
                for (command, code, why) in [
                    ("/bin/nope", 127, "no such command"),
                    ("nope", 127, "no such command"),
                    ("/etc/plain", 126, "cannot be executed"),
                    ("/etc", 126, "cannot be executed"),
                ] {
                    let root = kit.rootfs.str();
                    let line = ["run", "--net", "none", "--rootfs", root, "--", command];
                    let failed = podvisor(&line).code_is(code);
                    for part in [command, why, runtime] {
                        assert!(failed.stderr.contains(part), "{part} in {failed:#?}");
                    }
                    assert_eq!(failed.stdout, "");
                }
            }
            assert_eq!(json(&["ps", "-a", "--json"]), serde_json::json!([]));
        },
    );
}

#[test]
fn a_detached_pod_prints_its_id_and_stays() {
    on_a_machine("run::a_detached_pod_prints_its_id_and_stays", |kit| {
        let made = kit.run(&["-d", "--name", "web"], "sleep 1000").ok();
        let id = id_of(&made);
        assert_eq!((made.stderr.as_str(), made.held_open), ("", false));
        let pods = json(&["ps", "--json"]);
        assert_eq!(
            (&pods[0]["id"], &pods[0]["name"]),
            (&id.into(), &"web".into())
        );
        assert_eq!(
            (&pods[0]["state"], &pods[0]["running"]),
            (&"ready".into(), &1.into())
        );
        podvisor(&["rm", "-f", "web"]).ok();
    });
}

#[test]
fn a_name_is_given_once() {
    on_a_machine("run::a_name_is_given_once", |kit| {
        let id = kit.detached(&["--name", "web", "--net", "none"], "sleep 1000");
        for verb in ["run", "create"] {
            let mut line = vec![verb, "--name", "web", "--net", "none"];
            if verb == "run" {
                line.extend(["--rootfs", kit.rootfs.str(), "--", "true"]);
            }
            let refused = podvisor(&line).code_is(125);
            for part in ["\"web\"", &id[..12], "podvisor rm -f web"] {
                assert!(refused.stderr.contains(part), "{part} in {refused:#?}");
            }
        }
        assert_eq!(json(&["ps", "-a", "--json"]).as_array().unwrap().len(), 1);
        // Free again, and in another namespace free anyway.
        podvisor(&["rm", "-f", "web"]).ok();
        kit.run(&["--rm", "--name", "web", "--net", "none"], "true")
            .ok();
    });
}

#[test]
fn without_rm_a_pod_stays_stopped_with_its_output() {
    on_a_machine(
        "run::without_rm_a_pod_stays_stopped_with_its_output",
        |kit| {
            kit.run(&["--name", "once"], "echo said; exit 3").code_is(3);
            let pods = json(&["ps", "-a", "--json"]);
            assert_eq!(pods[0]["state"], "stopped");
            assert_eq!(json(&["ps", "--json"]), serde_json::json!([]));
            assert_eq!(podvisor(&["logs", "once"]).ok().stdout, "said\n");
            assert_eq!(podvisor(&["wait", "once"]).ok().stdout, "3\n");
            podvisor(&["rm", "once"]).ok();
        },
    );
}

#[test]
fn the_environment_is_what_was_said() {
    on_a_machine("run::the_environment_is_what_was_said", |kit| {
        let mut command = std::process::Command::new(crate::support::bin::PODVISOR);
        command.env("FROM_HERE", "passed on").env("SECRET", "kept");
        command.args([
            "run",
            "--rm",
            "--net",
            "none",
            "--name",
            "my_pod",
            "--rootfs",
            kit.rootfs.str(),
        ]);
        command.args([
            "--env",
            "A=one two",
            "-e",
            "FROM_HERE",
            "-e",
            "B=",
            "-e",
            "A=last",
        ]);
        command.args([
            "--workdir",
            "/tmp",
            "--",
            "/bin/sh",
            "-c",
            "env | sort; pwd; hostname; id -u",
        ]);
        let ended = crate::support::run(&mut command, crate::kit::BOUND).ok();
        for line in [
            "A=last",
            "B=",
            "FROM_HERE=passed on",
            "HOSTNAME=my-pod",
            "/tmp",
            "my-pod",
            "0",
        ] {
            assert!(
                ended.stdout.lines().any(|l| l == line),
                "{line} in {ended:#?}"
            );
        }
        assert!(ended.stdout.contains("PATH=/usr/local/sbin:"), "{ended:#?}");
        assert!(!ended.stdout.contains("SECRET"), "{ended:#?}");
    });
}

/// Names `script` is from util-linux: it gives the command a terminal.
#[test]
fn progress_is_for_terminals_only() {
    on_a_machine("run::progress_is_for_terminals_only", |kit| {
        let dir = std::path::Path::new(crate::support::cni::PLUGINS);
        let plugin = crate::support::fake::plugin(dir, "slow");
        plugin.on("ADD", &[crate::support::fake::Act::Sleep(0.6)]);
        crate::support::cni::network("slow", vec![serde_json::json!({ "type": "slow" })]).write();
        let quiet = kit.run(&["--rm", "--net", "slow"], "echo done").ok();
        assert_eq!(
            (quiet.stdout.as_str(), quiet.stderr.as_str()),
            ("done\n", "")
        );
        let line = format!(
            "{} run --rm --net slow --rootfs {} -- echo done",
            crate::support::bin::PODVISOR,
            kit.rootfs.str()
        );
        let mut script = std::process::Command::new("script");
        script.args(["-qec", &line, "/dev/null"]);
        let shown = crate::support::run(&mut script, crate::kit::BOUND).ok();
        assert!(shown.stdout.contains("cni-add …"), "{shown:#?}");
        // The line is taken away before the workload's first word.
        assert!(shown.stdout.ends_with("\r\u{1b}[Kdone\r\n"), "{shown:#?}");
    });
}

#[test]
fn version_needs_nothing() {
    let version = podvisor(&["version"]).ok();
    assert!(
        version
            .stdout
            .starts_with(concat!("podvisor ", env!("CARGO_PKG_VERSION"), "\n"))
    );
    let version = json(&["version", "--json"]);
    assert_eq!(version["version"], env!("CARGO_PKG_VERSION"));
    assert_eq!(version["supervisor"], crate::support::bin::SHIM);
}

/// The configured runtime; without one crun where it runs.
#[test]
fn the_runtime_is_the_configured_one() {
    on_a_machine("run::the_runtime_is_the_configured_one", |kit| {
        let used = |name: &str| {
            kit.run(&["--name", name, "--net", "none"], "true").ok();
            let pod = inspect(name);
            let container = pod["containers"].as_object().unwrap().values().next();
            let runtime = container.unwrap()["runtime"].as_str().unwrap().to_owned();
            podvisor(&["rm", name]).ok();
            runtime.rsplit('/').next().unwrap().to_owned()
        };
        assert_eq!(used("default"), "crun");
        for runtime in ["runc", "crun"] {
            let config = format!("runtime = {runtime:?}\n");
            std::fs::write("/etc/podvisor/config.toml", config).unwrap();
            assert_eq!(used(runtime), runtime);
        }
    });
}
