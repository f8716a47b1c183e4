//! dockerd dies and comes back, with and without live restore; containerd and the supervisors live on.

use std::time::Duration;

use super::engine::{BOUND, Engine, IMAGE};
use super::lives::Seen;
use crate::support::eventually;

/// Writes a line ten times a second.
const COUNTS: &str = "i=0; while :; do echo line $i; i=$((i+1)); sleep 0.1; done";

fn detached(engine: &Engine, runtime: &str, name: &str, options: &[&str], script: &str) {
    let mut args = vec!["run", "-d", "--runtime", runtime, "--name", name];
    args.extend(options);
    args.extend([IMAGE, "sh", "-c", script]);
    engine.docker(&args).ok();
}

/// Everything is as before, and nothing that was printed meanwhile is lost.
pub fn with_live_restore(engine: &mut Engine, runtime: &str, seen: &mut Seen) {
    detached(engine, runtime, "runs", &[], COUNTS);
    detached(engine, runtime, "paused", &[], "sleep 1000");
    engine.docker(&["pause", "paused"]).ok();
    detached(engine, runtime, "ended", &[], "exit 4");
    engine.until("ended", "{{.State.Status}}", "exited");
    detached(
        engine,
        runtime,
        "ends",
        &[],
        "while ! test -e /tmp/end; do sleep 0.1; done; echo end; exit 9",
    );
    let pids = ["runs", "paused"].map(|id| engine.inspect(id, "{{.State.Pid}}"));
    let end = engine.inspect("ends", "{{.State.Pid}}");
    engine.kill();
    std::fs::write(format!("/proc/{end}/root/tmp/end"), "").unwrap();
    let gone = format!("/proc/{end}");
    eventually(BOUND, "a container ends while nobody looks", || {
        (!std::path::Path::new(&gone).exists()).then_some(())
    });
    engine.start_again();
    engine.until("ends", "{{.State.Status}} {{.State.ExitCode}}", "exited 9");
    seen.end(
        "logs of one that ended meanwhile",
        &engine.docker(&["logs", "ends"]),
    );
    assert_eq!(
        engine.inspect("ended", "{{.State.Status}} {{.State.ExitCode}}"),
        "exited 4"
    );
    assert_eq!(engine.inspect("runs", "{{.State.Status}}"), "running");
    assert_eq!(engine.inspect("paused", "{{.State.Status}}"), "paused");
    let after = ["runs", "paused"].map(|id| engine.inspect(id, "{{.State.Pid}}"));
    assert_eq!(pids, after, "the same processes");
    engine.docker(&["unpause", "paused"]).ok();
    assert_eq!(
        engine.docker(&["exec", "runs", "echo", "in"]).ok().stdout,
        "in\n"
    );
    assert_lines_are_whole(engine);
    for id in ["runs", "paused", "ended", "ends"] {
        engine.docker(&["rm", "-f", id]).ok();
    }
}

/// Every number once and in order, those from before, during and after.
fn assert_lines_are_whole(engine: &Engine) {
    let first = engine.docker(&["logs", "runs"]).ok().stdout.lines().count();
    let more = || {
        let logs = engine.docker(&["logs", "runs"]).ok().stdout;
        (logs.lines().count() > first + 5).then_some(logs)
    };
    let logs = eventually(BOUND, "it goes on printing", more);
    for (n, line) in logs.lines().enumerate() {
        assert_eq!(line, format!("line {n}"));
    }
}

/// What ran is ended by the engine that comes back; what is to be restarted is.
pub fn without_live_restore(engine: &mut Engine, runtime: &str, seen: &mut Seen) {
    detached(
        engine,
        runtime,
        "runs",
        &[],
        "trap 'exit 0' TERM; while :; do sleep 0.1; done",
    );
    detached(
        engine,
        runtime,
        "again",
        &["--restart", "always"],
        "trap 'exit 0' TERM; while :; do sleep 0.1; done",
    );
    let before = engine.inspect("again", "{{.State.Pid}}");
    engine.kill();
    std::thread::sleep(Duration::from_millis(300));
    engine.start_again();
    engine.until("runs", "{{.State.Status}}", "exited");
    seen.say("code", engine.inspect("runs", "{{.State.ExitCode}}"));
    engine.until("again", "{{.State.Status}}", "running");
    assert_ne!(engine.inspect("again", "{{.State.Pid}}"), before);
    engine.docker(&["start", "runs"]).ok();
    assert_eq!(
        engine.docker(&["exec", "runs", "echo", "in"]).ok().stdout,
        "in\n"
    );
    for id in ["runs", "again"] {
        engine.docker(&["rm", "-f", id]).ok();
    }
}

/// The engine's containerd is killed and comes back: the containers are as they were, and dockerd is told of their ends.
pub fn with_another_containerd(engine: &mut Engine, runtime: &str, seen: &mut Seen) {
    detached(engine, runtime, "runs", &[], COUNTS);
    detached(
        engine,
        runtime,
        "ends",
        &[],
        "while ! test -e /tmp/end; do sleep 0.1; done; echo end; exit 9",
    );
    let pid = engine.inspect("runs", "{{.State.Pid}}");
    engine.containerd.kill();
    std::thread::sleep(Duration::from_millis(500));
    engine.containerd.start_again();
    assert_eq!(engine.inspect("runs", "{{.State.Status}}"), "running");
    assert_eq!(engine.inspect("runs", "{{.State.Pid}}"), pid);
    let exec = || engine.docker(&["exec", "runs", "echo", "in"]);
    let works = eventually(BOUND, "dockerd is connected again", || {
        Some(exec()).filter(|done| done.code == Some(0))
    });
    seen.end("exec", &works);
    // What ends while dockerd does not listen is lost on it; from here on it has to be told.
    engine.docker(&["exec", "ends", "touch", "/tmp/end"]).ok();
    engine.until("ends", "{{.State.Status}} {{.State.ExitCode}}", "exited 9");
    seen.end("logs of one that ended", &engine.docker(&["logs", "ends"]));
    assert_lines_are_whole(engine);
    seen.end("stop", &engine.docker(&["stop", "-t", "0", "runs"]));
    seen.say("code", engine.inspect("runs", "{{.State.ExitCode}}"));
    for id in ["runs", "ends"] {
        engine.docker(&["rm", "-f", id]).ok();
    }
}

/// The engine is asked to end, and comes back.
pub fn in_good_order(engine: &mut Engine, runtime: &str, seen: &mut Seen) {
    let script = "trap 'echo bye; exit 6' TERM; echo up; while :; do sleep 0.1; done";
    detached(engine, runtime, "runs", &[], script);
    detached(engine, runtime, "again", &["--restart", "always"], script);
    eventually(BOUND, "they are up", || {
        let up = |id: &&str| engine.docker(&["logs", *id]).ok().stdout.contains("up");
        ["runs", "again"].iter().all(up).then_some(())
    });
    engine.stop();
    engine.start_again();
    seen.say(
        "ended",
        engine.inspect("runs", "{{.State.Status}} {{.State.ExitCode}}"),
    );
    seen.end("its logs", &engine.docker(&["logs", "runs"]));
    engine.until("again", "{{.State.Status}}", "running");
    for id in ["runs", "again"] {
        engine.docker(&["rm", "-f", id]).ok();
    }
}
