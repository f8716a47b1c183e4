//! What the engine tells of containers: names, events, logs as they are written; and terminals that are left by a key.

use std::io::{BufRead, BufReader};
use std::process::Stdio;

use super::engine::{BOUND, Engine, IMAGE};
use super::lives::{Seen, run, shell, typed};
use crate::support::eventually;

/// Containers are renamed, restarted by their policy, followed; what happened is in the engine's events.
pub fn names_and_events(engine: &Engine, runtime: &str, seen: &mut Seen) {
    let since = now();
    let script = "trap 'exit 3' TERM; echo up; while ! test -e /tmp/more; do sleep 0.1; done; echo more; while :; do sleep 0.1; done";
    shell(engine, runtime, &["-d", "--name", "old"], script).ok();
    seen.end("rename", &engine.docker(&["rename", "old", "new"]));
    seen.say(
        "renamed",
        engine.inspect("new", "{{.Name}} {{.State.Status}}"),
    );
    seen.say(
        "the old name",
        engine.docker(&["inspect", "old"]).code == Some(0),
    );
    seen.end(
        "exec by the new name",
        &engine.docker(&["exec", "new", "echo", "in"]),
    );
    seen.end(
        "rename to its own",
        &engine.docker(&["rename", "new", "new"]),
    );

    let mut follow = engine.command();
    follow.args(["logs", "-f", "new"]).stdout(Stdio::piped());
    let mut follow = follow.spawn().unwrap();
    let mut lines = BufReader::new(follow.stdout.take().unwrap()).lines();
    seen.say("first line", lines.next().unwrap().unwrap());
    engine
        .docker(&["exec", "-d", "new", "touch", "/tmp/more"])
        .ok();
    seen.say(
        "a line while it is followed",
        lines.next().unwrap().unwrap(),
    );
    engine.docker(&["pause", "new"]).ok();
    engine.docker(&["unpause", "new"]).ok();
    seen.end("stop", &engine.docker(&["stop", "-t", "30", "new"]));
    seen.say("lines after the end", lines.count());
    seen.say(
        "logs -f ends",
        format!("{:?}", follow.wait().unwrap().code()),
    );
    seen.end(
        "rename when it has ended",
        &engine.docker(&["rename", "new", "newest"]),
    );
    seen.end("start", &engine.docker(&["start", "newest"]));
    seen.end("kill", &engine.docker(&["kill", "newest"]));
    engine.until("newest", "{{.State.Status}}", "exited");
    seen.end("rm", &engine.docker(&["rm", "newest"]));

    let policy = ["-d", "--name", "again", "--restart", "on-failure:2"];
    shell(engine, runtime, &policy, "exit 3").ok();
    engine.until("again", "{{.State.Status}} {{.RestartCount}}", "exited 2");
    seen.say("code", engine.inspect("again", "{{.State.ExitCode}}"));
    engine.docker(&["rm", "again"]).ok();

    let format =
        "{{.Action}} {{index .Actor.Attributes \"name\"}} {{index .Actor.Attributes \"exitCode\"}}";
    let events = [
        "events",
        "--since",
        &since,
        "--until",
        &now(),
        "--filter",
        "type=container",
        "--format",
        format,
    ];
    let events = engine.docker(&events).ok().stdout;
    assert!(events.lines().count() > 20, "{events}");
    for event in events.lines() {
        seen.say("event", event);
    }
}

/// Seconds and nanoseconds, as `docker events` takes them.
fn now() -> String {
    let now = std::time::SystemTime::now();
    let since = now.duration_since(std::time::UNIX_EPOCH).unwrap();
    format!("{}.{:09}", since.as_secs(), since.subsec_nanos())
}

/// A terminal is left by its keys; the program goes on, and is attached to again.
pub fn keys(engine: &Engine, runtime: &str, seen: &mut Seen) {
    let line = format!(
        "run -it --name kk --detach-keys ctrl-x,x --runtime {runtime} {IMAGE} sh -c 'echo ready; read x; echo got $x; exit 4'"
    );
    let left = typed(engine, &line, b"\x18x");
    seen.say(
        "left by keys",
        format!("{:?} {}", left.code, left.stdout.contains("got")),
    );
    seen.say("it runs on", engine.inspect("kk", "{{.State.Status}}"));
    let again = typed(engine, "attach --detach-keys ctrl-x,x kk", b"\x18x");
    seen.say("attached and left", format!("{:?}", again.code));
    seen.say("it still runs", engine.inspect("kk", "{{.State.Status}}"));
    let last = typed(engine, "attach kk", b"word\n");
    seen.say(
        "attached to the end",
        format!("{:?} {}", last.code, last.stdout.contains("got word")),
    );
    seen.say(
        "code",
        engine.inspect("kk", "{{.State.Status}} {{.State.ExitCode}}"),
    );
    seen.say(
        "logs",
        engine
            .docker(&["logs", "kk"])
            .ok()
            .stdout
            .contains("got word"),
    );
    engine.docker(&["rm", "-f", "kk"]).ok();

    shell(engine, runtime, &["-d", "--name", "ee"], "sleep 1000").ok();
    let line = "exec -it --detach-keys ctrl-x,x ee sh -c 'while ! test -e /tmp/end; do sleep 0.1; done; touch /tmp/ended'";
    let left = typed(engine, line, b"\x18x");
    seen.say("an exec left by keys", format!("{:?}", left.code));
    engine.docker(&["exec", "ee", "touch", "/tmp/end"]).ok();
    let ended = || {
        engine
            .docker(&["exec", "ee", "test", "-e", "/tmp/ended"])
            .code
    };
    eventually(BOUND, "the exec goes on", || {
        (ended() == Some(0)).then_some(())
    });
    let host = ["--rm", "--pid", "container:ee"];
    seen.end(
        "--pid=container",
        &run(
            engine,
            runtime,
            &host,
            &["sh", "-c", "cat /proc/1/comm; exit 2"],
        ),
    );
    engine.docker(&["rm", "-f", "ee"]).ok();
}
