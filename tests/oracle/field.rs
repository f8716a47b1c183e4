//! Faults that people met with other shims, replayed on ours alone: a real supervisor, asked over its socket.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::Duration;

use podvisor::proto::any;
use podvisor::proto::runc_options::oci::Options;
use podvisor::proto::task_v3::shim as task;
use serde_json::json;

use super::side::{self, Side, Who, both_ends, fifo, file, process, reader};
use crate::support::{Sandbox, Snapshot, cost_of, eventually, require, slow};

/// Longer than any test here needs, on a machine that is busy.
const BOUND: Duration = Duration::from_secs(60);

fn ours(name: &str, body: impl FnOnce(&Side)) {
    ours_within(name, Duration::from_secs(300), body);
}

/// A supervisor of ours, with a bound for the whole test.
pub fn ours_within(name: &str, bound: Duration, body: impl FnOnce(&Side)) {
    Sandbox::new(name).bound(bound).run(|| {
        let Some(peer) = side::peer("containerd-1.6") else {
            return;
        };
        let before = Snapshot::take();
        let side = Side::launch(Who::Podvisor, &peer);
        body(&side);
        side.end();
        let _ = fs::remove_dir_all("/run/oracle");
        before.assert_unchanged();
    });
}

/// The request with a runtime that does `script` first (`$verb` is the verb) and then what runc does.
fn wrapped(mut request: task::CreateTaskRequest, script: &str) -> task::CreateTaskRequest {
    let path = "/run/wrapped-runc";
    let runc = require::find("runc").unwrap();
    let text = format!(
        "#!/bin/sh\nfor verb; do case $verb in create|start|kill|delete|exec|state) break;; esac; done\n{script}\nexec {} \"$@\"\n",
        runc.display()
    );
    fs::write(path, text).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
    let options = Options {
        binary_name: path.into(),
        ..Default::default()
    };
    request.options = Some(any::pack(any::RUNC_OPTIONS, &options).unwrap()).into();
    request
}

/// What the supervisor costs.
fn cost(side: &Side) -> (u64, u64, usize) {
    cost_of(side.task_connect("c").unwrap().shim_pid)
}

/// FL-074: what an exec leaves in the background holds its output, and neither its exit nor its delete.
#[test]
fn an_exec_ends_while_its_background_child_holds_the_output() {
    ours(
        "field::an_exec_ends_while_its_background_child_holds_the_output",
        |side| {
            side.run("c", "sleep 1000");
            let out = fifo(&side.path("out"));
            let text = reader(&out);
            side.exec("c", "e", &out, &process("sleep 300 & echo ok"))
                .unwrap();
            side.start("c", "e").unwrap();
            assert_eq!(side.wait("c", "e").unwrap(), 0);
            assert_eq!(side.delete("c", "e").unwrap().exit_status, 0);
            assert_eq!(text.join().unwrap(), "ok\n");
            assert_eq!(
                side.pids("c").unwrap().processes.len(),
                2,
                "the child lives"
            );
            side.remove("c");
        },
    );
}

/// FL-075: waiting for a held output leaves time for the runtime's delete, within the ten seconds a daemon gives.
#[test]
fn a_delete_with_a_held_output_reaches_the_runtime() {
    ours(
        "field::a_delete_with_a_held_output_reaches_the_runtime",
        |side| {
            let request = side.request("c", "setsid sleep 300 & exit 5", |spec| {
                let namespaces = spec["linux"]["namespaces"].as_array_mut().unwrap();
                namespaces.retain(|one| one["type"] != "pid");
            });
            let mut request = wrapped(request, "echo $verb >>/run/verbs");
            request.stdout = fifo(&side.path("out"));
            request.stderr = request.stdout.clone();
            // Whoever keeps the other end and never reads.
            let _held = both_ends(&request.stdout);
            side.create(&request).unwrap();
            side.start("c", "").unwrap();
            assert_eq!(side.wait("c", "").unwrap(), 5);
            assert_eq!(side.delete("c", "").unwrap().exit_status, 5);
            let verbs = fs::read_to_string("/run/verbs").unwrap();
            assert!(verbs.lines().any(|verb| verb == "delete"), "{verbs}");
        },
    );
}

/// FL-077: the last bytes of a program that prints much and ends at once.
#[test]
fn the_last_bytes_before_a_fast_exit_arrive() {
    ours("field::the_last_bytes_before_a_fast_exit_arrive", |side| {
        for round in 0..if slow() { 200 } else { 10 } {
            let id = format!("c{round}");
            let mut request = side.request(&id, "head -c 2000000 /dev/zero; printf END", |_| ());
            request.stdout = fifo(&side.path(&id).join("fifo"));
            request.stderr = fifo(&side.path(&id).join("errors"));
            let (text, errors) = (reader(&request.stdout), reader(&request.stderr));
            side.create(&request).unwrap();
            side.start(&id, "").unwrap();
            assert_eq!(side.wait(&id, "").unwrap(), 0);
            side.delete(&id, "").unwrap();
            let text = text.join().unwrap();
            assert_eq!((text.len(), text.ends_with("END")), (2_000_003, true));
            assert_eq!(errors.join().unwrap(), "");
        }
    });
}

/// FL-079: output passes through and is kept nowhere.
#[test]
fn much_output_of_an_exec_costs_no_memory() {
    ours("field::much_output_of_an_exec_costs_no_memory", |side| {
        side.run("c", "sleep 1000");
        let megabytes = if slow() { 1000 } else { 100 };
        let (before, ..) = cost(side);
        let out = fifo(&side.path("out"));
        let count = std::thread::spawn({
            let out = out.clone();
            move || std::io::copy(&mut fs::File::open(out).unwrap(), &mut std::io::sink()).unwrap()
        });
        let script = format!("head -c {megabytes}000000 /dev/zero");
        side.exec("c", "e", &out, &process(&script)).unwrap();
        side.start("c", "e").unwrap();
        assert_eq!(side.wait("c", "e").unwrap(), 0);
        side.delete("c", "e").unwrap();
        assert_eq!(count.join().unwrap(), megabytes * 1_000_000);
        let (after, ..) = cost(side);
        assert!(after < before + 4096, "{before} kB and then {after} kB");
        side.remove("c");
    });
}

/// FL-080, FL-081: execs leave nothing, those that end as little as those that cannot start; ids are free again.
#[test]
fn many_execs_leave_no_trace() {
    ours("field::many_execs_leave_no_trace", |side| {
        side.run("c", "sleep 1000");
        let missing = json!({"user": {"uid": 0, "gid": 0}, "args": ["/no/such"], "env": ["PATH=/bin"], "cwd": "/"});
        let round = |n: usize| {
            let id = format!("e{}", n % 7);
            side.exec("c", &id, &file(&side.path("out")), &process("echo x"))
                .unwrap();
            side.start("c", &id).unwrap();
            assert_eq!(side.wait("c", &id).unwrap(), 0);
            side.delete("c", &id).unwrap();
            side.exec("c", &id, "", &missing).unwrap();
            side.start("c", &id).unwrap_err();
            side.delete("c", &id).unwrap();
        };
        (0..20).for_each(round);
        let (memory, threads, descriptors) = cost(side);
        (0..if slow() { 2000 } else { 40 }).for_each(round);
        let settled = || {
            let (more, now, open) = cost(side);
            println!("{memory} kB {threads} {descriptors}, then {more} kB {now} {open}");
            (more <= memory + 1024 && now <= threads + 1 && open <= descriptors).then_some(())
        };
        eventually(BOUND, "it is as before", settled);
        side.remove("c");
    });
}

/// FL-086k: a runtime that may not signal is told as such; SIGKILL finds its way, and nothing is called ended that lives.
#[test]
fn a_kill_that_the_runtime_cannot_do_is_told() {
    ours("field::a_kill_that_the_runtime_cannot_do_is_told", |side| {
        let script = "if test $verb = kill; then echo 'unable to signal init: permission denied' >&2; exit 1; fi";
        let request = wrapped(side.request("c", "sleep 1000", |_| ()), script);
        let pid = side.create(&request).unwrap();
        side.start("c", "").unwrap();
        let refused = side.kill("c", "", 15, false).unwrap_err();
        assert!(refused.text.contains("permission denied"), "{refused:?}");
        let state = side.state("c", "").unwrap();
        let status = format!("{:?}", state.status.enum_value_or_default());
        assert_eq!((status.as_str(), state.pid), ("RUNNING", pid));
        assert!(Path::new(&format!("/proc/{pid}")).exists());
        side.kill("c", "", 9, false).unwrap();
        assert_eq!(side.wait("c", "").unwrap(), 137);
        side.delete("c", "").unwrap();
    });
}

/// FL-086r: a label that looks like where output goes is only a label.
#[test]
fn a_logger_named_by_an_annotation_is_not_executed() {
    ours(
        "field::a_logger_named_by_an_annotation_is_not_executed",
        |side| {
            let program = "/run/evil";
            fs::write(program, "#!/bin/sh\ntouch /run/executed\n").unwrap();
            fs::set_permissions(program, fs::Permissions::from_mode(0o755)).unwrap();
            let uri = format!("binary://{program}");
            let request = side.request("c", "echo said", |spec| {
            spec["annotations"] = json!({
                "nerdctl/log-uri": uri, "io.containerd.log-uri": uri, "containerd.io/stdout": uri, "stdout": uri,
                "io.kubernetes.cri.container-name": uri,
            });
        });
            side.create(&request).unwrap();
            side.start("c", "").unwrap();
            assert_eq!(side.wait("c", "").unwrap(), 0);
            side.delete("c", "").unwrap();
            assert_eq!(side.output("c"), "said\n");
            assert!(!Path::new("/run/executed").exists());
        },
    );
}

/// A reader that stands still stops the program and nothing else: it is killed, told, and deleted.
#[test]
fn an_exit_is_told_while_nobody_reads_the_output() {
    ours(
        "field::an_exit_is_told_while_nobody_reads_the_output",
        |side| {
            let mut request = side.request("c", "while :; do echo much and more; done", |_| ());
            request.stdout = fifo(&side.path("out"));
            request.stderr = fifo(&side.path("errors"));
            let _held = [both_ends(&request.stdout), both_ends(&request.stderr)];
            side.create(&request).unwrap();
            side.start("c", "").unwrap();
            // Until the FIFO and every pipe before it are full: the program has stopped using the processor.
            std::thread::sleep(Duration::from_secs(1));
            side.kill("c", "", 9, false).unwrap();
            assert_eq!(side.wait("c", "").unwrap(), 137);
            side.delete("c", "").unwrap();
            let events = side.events(4);
            assert!(events[2].contains("/tasks/exit"), "{events:?}");
        },
    );
}

/// A runtime that hangs over one container: every call for the other is answered.
#[test]
fn a_hung_runtime_of_one_holds_up_no_call_for_another() {
    ours(
        "field::a_hung_runtime_of_one_holds_up_no_call_for_another",
        |side| {
            let hang = "if test $verb = \"$(cat /run/hangs 2>/dev/null)\"; then touch /run/hung; while test -e /run/hangs; do sleep 0.05; done; fi";
            for verb in ["create", "start", "delete"] {
                let _ = fs::remove_file("/run/hung");
                let request = wrapped(side.request("slow", "exit 3", |_| ()), hang);
                let calls = side.connect();
                fs::write("/run/hangs", format!("{verb}\n")).unwrap();
                let life = std::thread::spawn(move || {
                    calls.create(&request).unwrap();
                    calls.start("slow", "").unwrap();
                    assert_eq!(calls.wait("slow", "").unwrap(), 3);
                    calls.delete("slow", "").unwrap();
                });
                eventually(BOUND, "it hangs", || {
                    Path::new("/run/hung").exists().then_some(())
                });
                everything_of_another(side);
                assert!(!life.is_finished(), "{verb} was to hang all the time");
                fs::remove_file("/run/hangs").unwrap();
                life.join().unwrap();
            }
        },
    );
}

/// All calls of a life.
fn everything_of_another(side: &Side) {
    let pid = side
        .create(&side.request("c", "sleep 1000", |_| ()))
        .unwrap();
    assert_eq!(side.start("c", "").unwrap(), pid);
    assert_eq!(side.state("c", "").unwrap().pid, pid);
    assert_eq!(side.task_connect("c").unwrap().task_pid, pid);
    side.exec("c", "e", "", &process("exit 4")).unwrap();
    side.start("c", "e").unwrap();
    assert_eq!(side.wait("c", "e").unwrap(), 4);
    side.delete("c", "e").unwrap();
    side.pids("c").unwrap();
    side.stats("c").unwrap();
    side.pause("c").unwrap();
    side.resume("c").unwrap();
    side.resize("c", "", 10, 10).unwrap();
    side.close_stdin("c", "").unwrap();
    side.shutdown("nobody").unwrap();
    side.remove("c");
}
