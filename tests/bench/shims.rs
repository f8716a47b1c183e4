//! Shims alone, without a daemon: `start`, tasks, execs; the Go shim of containerd 2.1 and ours in turn, and the OCI
//! runtime without any.

use std::fs;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use podvisor::proto::any;
use podvisor::proto::runc_options::oci::Options;
use podvisor::proto::task_v3::shim::CreateTaskRequest;
use protobuf::Message;

use crate::processes;
use crate::rig::{self, clocked, floor, load, rounds, timed};
use crate::side::{self, Side, Who};
use crate::support::peers::Peer;
use crate::support::{Sandbox, eventually, require, sh};
use crate::table::{GO, Table};

const RUNTIMES: [&str; 2] = ["runc", "crun"];

fn both(round: usize) -> [(Who, &'static str); 2] {
    let mut both = [(Who::Go, GO), (Who::Podvisor, "podvisor")];
    both.rotate_left(round % 2);
    both
}

fn benched(name: &str, body: impl FnOnce(&Peer)) {
    Sandbox::new(name).bound(Duration::from_secs(3600)).run(|| {
        rig::use_released();
        if let Some(peer) = side::peer("containerd-2.1") {
            body(&peer);
        }
    });
}

#[test]
#[ignore = "a benchmark: scripts/bench start"]
fn bench_start() {
    benched("shims::bench_start", |peer| {
        let mut table = Table::new("start");
        let floor = floor();
        for round in 0..rounds(30) {
            for (who, name) in both(round) {
                let mut took = Duration::ZERO;
                let side = Side::launch_by(who, peer, |start| {
                    let (answer, time) = timed(start);
                    took = time;
                    answer
                });
                table.time("`start` to reply", name, took);
                let ((), took) = clocked(|| side.end());
                table.time("Shutdown until the socket is gone", name, took);
            }
            if let Some(floor) = &floor {
                let socket = format!("/run/floor-{round}.sock");
                let (_, took) = timed(Command::new(floor).args(["start", &socket]));
                table.time("`start` to reply", "floor (static C)", took);
                sh("pkill -KILL -f 'bench-floor start'");
            }
        }
        table.print(&load());
    });
}

#[test]
#[ignore = "a benchmark: scripts/bench task"]
fn bench_task() {
    benched("shims::bench_task", |peer| {
        let mut table = Table::new("task");
        for runtime in RUNTIMES {
            if !require::tool(runtime) {
                continue;
            }
            for round in 0..rounds(20) {
                for (who, name) in both(round) {
                    let side = Side::launch(who, peer);
                    // The first task finds page caches and counters cold in both.
                    for id in ["warm", "t"] {
                        let request =
                            with_runtime(side.request(id, "exec sleep 1000", |_| ()), runtime);
                        let (_, create) = clocked(|| side.create(&request).unwrap());
                        let (_, start) = clocked(|| side.start(id, "").unwrap());
                        side.kill(id, "", 9, false).unwrap();
                        side.wait(id, "").unwrap();
                        let (_, delete) = clocked(|| side.delete(id, "").unwrap());
                        if id == "t" {
                            table.time(&format!("Create + Start, {runtime}"), name, create + start);
                            table.time(&format!("Delete, {runtime}"), name, delete);
                        }
                    }
                    side.end();
                }
                let side = Side::launch(Who::Podvisor, peer);
                let (up, down) = bare(&side, runtime);
                table.time(&format!("Create + Start, {runtime}"), "runtime alone", up);
                table.time(&format!("Delete, {runtime}"), "runtime alone", down);
                side.end();
            }
        }
        table.print(&load());
    });
}

/// The same bundle by the runtime itself: create and start; delete.
fn bare(side: &Side, runtime: &str) -> (Duration, Duration) {
    let request = side.request("bare", "exec sleep 1000", |_| ());
    let bundle = PathBuf::from(&request.bundle);
    let root = bundle.join("rootfs");
    fs::create_dir_all(&root).unwrap();
    let source = &request.rootfs[0].source;
    let ((), mounted) = clocked(|| {
        nix::mount::mount(
            Some(source.as_str()),
            &root,
            None::<&str>,
            nix::mount::MsFlags::MS_BIND,
            None::<&str>,
        )
        .unwrap();
    });
    let run = |words: &[&str]| {
        let mut command = Command::new(runtime);
        command.args(["--root", "/run/bare"]).args(words);
        command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        let status = command.status().unwrap();
        assert!(status.success(), "{runtime} {words:?}: {status}");
    };
    let dir = bundle.to_str().unwrap();
    let ((), create) = clocked(|| {
        run(&[
            "create",
            "--bundle",
            dir,
            "--pid-file",
            "/run/bare.pid",
            "bare",
        ])
    });
    let ((), start) = clocked(|| run(&["start", "bare"]));
    // A shim is asked to delete what has ended; so is the runtime here.
    let pid: i32 = fs::read_to_string("/run/bare.pid")
        .unwrap()
        .parse()
        .unwrap();
    run(&["kill", "bare", "KILL"]);
    eventually(side::BOUND, "its end", || {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        (stat.is_empty() || stat.contains(") Z ")).then_some(())
    });
    let ((), delete) = clocked(|| run(&["delete", "bare"]));
    nix::mount::umount(&root).unwrap();
    (mounted + create + start, delete)
}

fn with_runtime(mut request: CreateTaskRequest, runtime: &str) -> CreateTaskRequest {
    let options = Options {
        binary_name: runtime.into(),
        ..Default::default()
    };
    request.options = Some(any::raw(
        any::RUNC_OPTIONS,
        options.write_to_bytes().unwrap(),
    ))
    .into();
    request
}

#[test]
#[ignore = "a benchmark: scripts/bench exec"]
fn bench_exec() {
    benched("shims::bench_exec", |peer| {
        let mut table = Table::new("exec");
        const EACH: usize = 25;
        for runtime in RUNTIMES {
            if !require::tool(runtime) {
                continue;
            }
            for round in 0..rounds(4) {
                for (who, name) in both(round) {
                    let side = Side::launch(who, peer);
                    side.create(&with_runtime(
                        side.request("t", "exec sleep 1000", |_| ()),
                        runtime,
                    ))
                    .unwrap();
                    side.start("t", "").unwrap();
                    for n in 0..EACH {
                        let ((), took) = clocked(|| exec(&side, n));
                        table.time(
                            &format!("Exec + Start + Wait + Delete of `true`, {runtime}"),
                            name,
                            took,
                        );
                    }
                    for n in 0..EACH {
                        if who == Who::Podvisor {
                            let took = bare_exec(&side, runtime, n);
                            table.time(
                                &format!("Exec + Start + Wait + Delete of `true`, {runtime}"),
                                "runtime alone",
                                took,
                            );
                        }
                    }
                    side.remove("t");
                    side.end();
                }
            }
        }
        growth(&mut table, peer);
        table.print(&load());
    });
}

fn exec(side: &Side, n: usize) {
    let id = format!("e{n}");
    side.exec("t", &id, "", &process()).unwrap();
    side.start("t", &id).unwrap();
    assert_eq!(side.wait("t", &id).unwrap(), 0);
    side.delete("t", &id).unwrap();
}

fn process() -> serde_json::Value {
    let mut process = side::process("");
    process["args"] = serde_json::json!(["/bin/true"]);
    process
}

fn bare_exec(side: &Side, runtime: &str, n: usize) -> Duration {
    let file = side.path(&format!("bare-{n}"));
    fs::write(&file, process().to_string()).unwrap();
    let mut command = Command::new(runtime);
    command
        .args(["--root", "/run/containerd/runc/test", "exec", "--process"])
        .arg(&file)
        .arg("t");
    timed(command.process_group(0)).1
}

/// What stays of many execs: `PODVISOR_BENCH_EXECS` of them (2000).
fn growth(table: &mut Table, peer: &Peer) {
    let many = std::env::var("PODVISOR_BENCH_EXECS").ok();
    let many: usize = many.map_or(2000, |n| n.parse().unwrap());
    for (who, name) in both(0) {
        eventually(side::BOUND, "the shims before it leave", || {
            processes::shims().is_empty().then_some(())
        });
        let side = Side::launch(who, peer);
        side.create(&with_runtime(
            side.request("t", "exec sleep 1000", |_| ()),
            "runc",
        ))
        .unwrap();
        side.start("t", "").unwrap();
        // The Go shim is slower and grows at once: a tenth shows it.
        let count = if who == Who::Go { many / 10 } else { many };
        for n in 0..20 {
            exec(&side, n);
        }
        let anonymous = || {
            // Of a shim that is idle: what a burst has freed is given back after it.
            std::thread::sleep(Duration::from_secs(5));
            let all = processes::shims();
            assert_eq!(all.len(), 1, "{all:?}");
            processes::memory(all[0]).anonymous
        };
        let before = anonymous();
        for n in 0..count {
            exec(&side, n);
        }
        table.add(
            &format!("growth of the shim's anonymous memory over {count} execs"),
            name,
            "kB",
            anonymous() - before,
        );
        side.remove("t");
        side.end();
    }
}
