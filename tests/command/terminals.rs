//! `run -it` and `exec -it`: the workload has our terminal, and we get it back.

use nix::sys::signal::Signal;

use crate::kit::{BOUND, Kit, inspect, json, on_a_machine};
use crate::support::{eventually, podvisor};
use crate::tty::Tty;

fn run<'a>(kit: &'a Kit, flags: &[&'a str], command: &[&'a str]) -> Vec<&'a str> {
    let common = ["run", "--net", "none", "--rootfs", kit.rootfs.str()];
    [&common[..], flags, &["--"], command].concat()
}

/// With both runtimes: a window, keys and their signals, the size as it changes, the end by a key and by a code.
#[test]
fn a_shell_has_the_terminal_and_gives_it_back() {
    on_a_machine(
        "terminals::a_shell_has_the_terminal_and_gives_it_back",
        |kit| {
            for runtime in ["runc", "crun"] {
                let config = format!("runtime = {runtime:?}\n");
                std::fs::write("/etc/podvisor/config.toml", config).unwrap();
                let mut tty = Tty::start(&run(kit, &["--rm", "-it"], &["/bin/sh"]));
                tty.wait_for("# ");
                tty.wait_for_raw();
                tty.press("stty size; tty\r");
                tty.wait_for("30 100\r\n");
                tty.wait_for("/dev/pts/0\r\n");
                tty.resize(120, 40);
                eventually(BOUND, "the new size", || {
                    tty.press("stty size\r");
                    std::thread::sleep(std::time::Duration::from_millis(100));
                    tty.shown().contains("40 120\r\n").then_some(())
                });
                tty.press("sleep 1000\r");
                eventually(BOUND, "the sleep", || {
                    tty.shown().contains("sleep 1000\r\n").then_some(())
                });
                // To the program in the foreground of that terminal, not to us; again until it is there.
                eventually(BOUND, "an interrupted sleep", || {
                    tty.press("\x03echo inter''rupted\r");
                    std::thread::sleep(std::time::Duration::from_millis(200));
                    tty.shown().contains("interrupted\r\n").then_some(())
                });
                tty.press("echo al''ive; exit 5\r");
                tty.wait_for("alive\r\n");
                assert_eq!(tty.end(), Some(5), "{}", tty.shown());
                let mut tty = Tty::start(&run(kit, &["--rm", "-it"], &["/bin/cat"]));
                tty.wait_for_raw();
                tty.press("line\r");
                tty.wait_for("line\r\nline\r\n");
                tty.press("\x04");
                assert_eq!(tty.end(), Some(0), "{}", tty.shown());
                assert_eq!(json(&["ps", "-a", "--json"]), serde_json::json!([]));
            }
        },
    );
}

#[test]
fn a_command_in_a_container_has_the_terminal_from_its_first_moment() {
    on_a_machine(
        "terminals::a_command_in_a_container_has_the_terminal_from_its_first_moment",
        |kit| {
            kit.detached(&["--name", "web", "--net", "none"], "sleep 1000");
            let sh = "stty size; echo $TERM; pwd; id -u; read line; echo got $line; exit 9";
            let line = [
                "exec",
                "-it",
                "-u",
                "nobody",
                "-w",
                "/tmp",
                "-e",
                "TERM=dumb",
                "web",
                "sh",
                "-c",
                sh,
            ];
            let mut tty = Tty::start(&line);
            tty.wait_for("30 100\r\ndumb\r\n/tmp\r\n65534\r\n");
            tty.wait_for_raw();
            tty.press("some text\r");
            tty.wait_for("got some text\r\n");
            assert_eq!(tty.end(), Some(9));
            // Without -i it only writes, also where we have no terminal ourselves.
            let written = podvisor(&["exec", "-t", "web", "sh", "-c", "tty; echo err >&2"]).ok();
            assert_eq!(
                (written.stdout.as_str(), written.stderr.as_str()),
                ("/dev/pts/0\r\nerr\r\n", "")
            );
            for line in [
                &["exec", "-it", "web", "true"][..],
                &run(kit, &["-it"], &["true"]),
            ] {
                podvisor(line)
                    .code_is(125)
                    .fails_with("standard input is none");
            }
            // A detached workload may have one; its output is in the log.
            kit.run(
                &["-d", "-t", "--name", "tty", "--net", "none"],
                "tty; sleep 1000",
            )
            .ok();
            crate::kit::wait_for_log("tty", "/dev/pts/0\r");
            podvisor(&["rm", "-f", "web", "tty"]).ok();
        },
    );
}

#[test]
fn a_workload_is_left_by_keys_and_when_the_terminal_or_the_command_goes() {
    on_a_machine(
        "terminals::a_workload_is_left_by_keys_and_when_the_terminal_or_the_command_goes",
        |kit| {
            let script = "trap 'echo hung up' HUP; echo up; while :; do sleep 0.1; done";
            for (name, how) in [
                ("keys", None),
                ("hup", Some(Signal::SIGHUP)),
                ("kill", Some(Signal::SIGKILL)),
            ] {
                let mut tty = Tty::start(&run(
                    kit,
                    &["-it", "--name", name],
                    &["/bin/sh", "-c", script],
                ));
                tty.wait_for("up\r\n");
                tty.wait_for_raw();
                match how {
                    None => {
                        tty.press("\x10\x11");
                        assert_eq!(tty.end(), Some(0));
                        let id = inspect(name)["id"].as_str().unwrap().to_owned();
                        tty.wait_for_end(&format!("{id}\r\n"));
                    }
                    Some(Signal::SIGHUP) => {
                        tty.signal(Signal::SIGHUP);
                        assert_eq!(tty.end(), Some(129));
                    }
                    // Nobody can give the terminal back then.
                    Some(signal) => tty.signal(signal),
                }
                let pods = json(&["ps", "--json", "--filter", &format!("name={name}")]);
                assert_eq!(
                    (&pods[0]["state"], &pods[0]["running"]),
                    (&"ready".into(), &1.into()),
                    "{pods:#}"
                );
                assert!(!podvisor(&["logs", name]).ok().stdout.contains("hung up"));
            }
            // From outside, other signals go to the workload as without a terminal.
            let script = "trap 'exit 44' TERM; echo up; while :; do sleep 0.1; done";
            let mut tty = Tty::start(&run(kit, &["--rm", "-it"], &["/bin/sh", "-c", script]));
            tty.wait_for("up\r\n");
            tty.signal(Signal::SIGTERM);
            assert_eq!(tty.end(), Some(44));
            podvisor(&["rm", "-f", "keys", "hup", "kill"]).ok();
        },
    );
}
