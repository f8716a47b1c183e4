//! The same over the command.

use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::kit::{open, runtime};
use crate::rig::{self, BOUND, called};
use crate::support::fake::{Act, Fake};
use crate::support::{Output, Snapshot, eventually, podvisor, require, rootfs, sandboxed};

struct Web {
    runtime: Fake,
    rootfs: rootfs::Rootfs,
    gate: PathBuf,
}

/// A pod `web` whose containers are made by a runtime that waits.
fn on_web(name: &str, settings: &str, body: impl FnOnce(&Web)) {
    sandboxed(name, || {
        rig::settings(&format!("runtime = \"/run/fakes/slow\"\n{settings}"));
        let web = Web {
            runtime: runtime(&require::find("runc").unwrap()),
            rootfs: rootfs::make(),
            gate: "/run/gate".into(),
        };
        let before = Snapshot::take();
        podvisor(&["create", "--name", "web", "--net", "none"]).ok();
        web.runtime.on("CREATE", &[Act::WaitFor(web.gate.clone())]);
        body(&web);
        podvisor(&["rm", "-f", "web"]).ok();
        before.assert_unchanged();
    });
}

impl Web {
    fn add(&self, name: &str, timeout: &str, script: &str) -> Output {
        podvisor(&[
            "run",
            "--sandbox",
            "web",
            "--name",
            name,
            "-d",
            "--timeout",
            timeout,
            "--rootfs",
            self.rootfs.str(),
            "--",
            "/bin/sh",
            "-c",
            script,
        ])
    }
}

fn listed(text: &str) -> bool {
    podvisor(&["ps", "-a"]).ok().stdout.contains(text)
}

#[test]
fn the_same_command_takes_the_container_that_it_began() {
    on_web(
        "command::the_same_command_takes_the_container_that_it_began",
        "",
        |web| {
            let told = web.add("c1", "1s", "sleep 1000").code_is(125);
            for part in ["still at stage runtime-create", "--name c1"] {
                assert!(told.stderr.contains(part), "{told:?}");
            }
            // Still under way: the second joins, and is told the same.
            let again = web.add("c1", "1s", "sleep 1000");
            assert!(again.stderr.contains("joining"), "{again:?}");
            again.fails_with("still at stage runtime-create");
            web.add("c1", "1s", "sleep 2000")
                .fails_with("choose another");
            open(&web.gate);
            eventually(BOUND, "it is parked", || {
                listed("(1 parked, ").then_some(())
            });
            podvisor(&["exec", "web/c1", "/bin/true"]).code_is(1);
            web.add("c1", "1s", "sleep 2000")
                .fails_with("choose another");
            web.add("c1", "4m", "sleep 1000").ok();
            assert!(!listed("parked"));
            assert!(listed("1/1"));
            podvisor(&["exec", "web/c1", "/bin/true"]).ok();
            web.add("c1", "4m", "sleep 1000")
                .fails_with("choose another");
            assert_eq!(web.runtime.count("CREATE"), 1);
        },
    );
}

#[test]
fn a_command_that_joins_has_the_container_as_soon_as_it_is_there() {
    on_web(
        "command::a_command_that_joins_has_the_container_as_soon_as_it_is_there",
        "",
        |web| {
            web.add("c1", "1s", "sleep 1000").code_is(125);
            let gate = web.gate.clone();
            let opener = std::thread::spawn(move || {
                std::thread::sleep(Duration::from_millis(1500));
                open(&gate);
            });
            web.add("c1", "4m", "sleep 1000").ok();
            opener.join().unwrap();
            assert_eq!(web.runtime.count("CREATE"), 1);
            assert!(listed("1/1"));
        },
    );
}

#[test]
fn a_container_nobody_comes_back_for_is_undone_and_the_command_begins_anew() {
    on_web(
        "command::a_container_nobody_comes_back_for_is_undone_and_the_command_begins_anew",
        "[parking]\ninterval = 1.0\n",
        |web| {
            web.add("c1", "1s", "sleep 1000").code_is(125);
            open(&web.gate);
            eventually(BOUND, "it is parked", || {
                listed("(1 parked, ").then_some(())
            });
            eventually(BOUND, "it is undone", || listed("0/0").then_some(()));
            web.add("c1", "4m", "sleep 1000").ok();
            called(&web.runtime, "CREATE", 2);
            // Another command of this name, where one was undone.
            std::fs::remove_file(&web.gate).unwrap();
            web.add("c2", "1s", "sleep 1000").code_is(125);
            open(&web.gate);
            eventually(BOUND, "it is undone", || listed("1/1").then_some(()));
            web.add("c2", "4m", "sleep 2000").ok();
            assert!(listed("2/2"));
        },
    );
}

/// A foreground command takes its streams with it: what it began is no use to anybody.
#[test]
fn a_command_in_the_foreground_leaves_nothing_when_its_time_is_over() {
    on_web(
        "command::a_command_in_the_foreground_leaves_nothing_when_its_time_is_over",
        "",
        |web| {
            let asked = [
                "run",
                "--sandbox",
                "web",
                "--name",
                "c1",
                "--timeout",
                "1s",
                "--rootfs",
                web.rootfs.str(),
                "--",
                "/bin/true",
            ];
            podvisor(&asked).code_is(125);
            let call = &web.runtime.calls_of("CREATE")[0];
            rig::gone(call.pid);
            assert!(listed("0/0"));
            assert!(!Path::new("/run/podvisor/default").join("bundles").exists());
            open(&web.gate);
            podvisor(&asked).ok();
        },
    );
}
