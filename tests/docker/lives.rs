//! What people do with `docker`, step by step; the lines are compared between two runtimes.

use std::fmt::Display;
use std::io::{BufRead, BufReader};
use std::process::Stdio;
use std::time::Duration;

use super::engine::{BOUND, Engine, IMAGE};
use crate::support::{Output, eventually};

/// What was seen with one runtime.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Seen(Vec<String>);

impl Seen {
    pub fn say(&mut self, what: &str, seen: impl Display) {
        println!("  {what}: {seen}");
        self.0.push(format!("{what}: {seen}"));
    }

    /// Exit code and output.
    pub fn end(&mut self, what: &str, output: &Output) {
        let (code, out) = (output.code, output.stdout.trim_end());
        self.say(what, format!("{code:?} {out:?}"));
    }

    /// Lines that are not in the other, each with its place.
    pub fn differences(&self, other: &Self) -> Vec<String> {
        let pairs = self.0.iter().zip(&other.0).filter(|(a, b)| a != b);
        let mut all: Vec<String> = pairs.map(|(a, b)| format!("{a}\n    {b}")).collect();
        if self.0.len() != other.0.len() {
            all.push(format!("{} and {} lines", self.0.len(), other.0.len()));
        }
        all
    }
}

/// `docker run` with this runtime.
pub fn run(engine: &Engine, runtime: &str, options: &[&str], command: &[&str]) -> Output {
    let mut args = vec!["run", "--runtime", runtime];
    args.extend(options);
    args.push(IMAGE);
    args.extend(command);
    engine.docker(&args)
}

pub fn shell(engine: &Engine, runtime: &str, options: &[&str], script: &str) -> Output {
    run(engine, runtime, options, &["sh", "-c", script])
}

/// `docker` with these words of a shell, on a terminal of 33 rows and 99 columns at which `keys` are typed.
pub fn typed(engine: &Engine, words: &str, keys: &[u8]) -> Output {
    let docker = engine.command();
    let line = format!("stty rows 33 cols 99; {:?} {words}", docker.get_program());
    // `script` is the terminal of the one who types.
    let mut typing = std::process::Command::new("script");
    typing.args(["-qec", &line, "/dev/null"]);
    for (name, value) in docker.get_envs() {
        typing.env(name, value.unwrap());
    }
    crate::support::bin::run_with(&mut typing, Some(keys), BOUND)
}

/// run, exec, logs, stop, restart, pause, top, cp, kill, rm -f.
pub fn every_day(engine: &Engine, runtime: &str, seen: &mut Seen) {
    let once = |script: &str| shell(engine, runtime, &["--rm"], script);
    seen.end("run", &once("echo hi; echo err >&2; exit 7"));
    seen.end(
        "no such program",
        &run(engine, runtime, &["--rm"], &["/no/such"]),
    );
    seen.end(
        "no program",
        &run(engine, runtime, &["--rm"], &["/etc/passwd"]),
    );
    let script = "trap 'echo bye; exit 3' TERM; echo up $(hostname); while :; do sleep 0.1; done";
    shell(
        engine,
        runtime,
        &["-d", "--name", "web", "--hostname", "web", "-m", "64m"],
        script,
    )
    .ok();
    seen.end(
        "exec",
        &engine.docker(&["exec", "web", "sh", "-c", "echo in; exit 5"]),
    );
    let nothing = engine.docker(&["exec", "web", "/no/such"]);
    let told = nothing
        .stdout
        .contains("exec: \"/no/such\": stat /no/such: no such file or directory");
    seen.say("exec of nothing", format!("{:?} {told}", nothing.code));
    seen.end(
        "exec -i",
        &engine.docker_with(&["exec", "-i", "web", "cat"], b"typed"),
    );
    seen.end(
        "exec -w -e",
        &engine.docker(&[
            "exec",
            "-w",
            "/tmp",
            "-e",
            "A=b",
            "web",
            "sh",
            "-c",
            "pwd; echo $A",
        ]),
    );
    seen.end(
        "exec -u",
        &engine.docker(&["exec", "-u", "nobody", "web", "id", "-u"]),
    );
    let top = engine.docker(&["top", "web"]).ok().stdout;
    seen.say("top shows the shell", top.contains("sh -c"));
    let stats = engine.docker(&[
        "stats",
        "--no-stream",
        "--format",
        "{{.Name}} {{.MemUsage}} {{.PIDs}}",
        "web",
    ]);
    let stats = stats.ok().stdout;
    let memory_limit = stats.contains("/ 64MiB");
    seen.say(
        "stats",
        format!("{} {memory_limit}", stats.starts_with("web ")),
    );
    // On cgroup v1 runc gives up ("unable to freeze") where processes come and go on a busy machine: try again.
    let paused = || Some(engine.docker(&["pause", "web"])).filter(|done| done.code == Some(0));
    seen.end("pause", &eventually(BOUND, "it is paused", paused));
    seen.say("paused", engine.inspect("web", "{{.State.Status}}"));
    seen.end(
        "exec while paused",
        &engine.docker(&["exec", "web", "true"]),
    );
    seen.end("unpause", &engine.docker(&["unpause", "web"]));
    seen.say("unpaused", engine.inspect("web", "{{.State.Status}}"));
    engine
        .docker(&["cp", "web:/etc/passwd", "/run/docker-test/passwd"])
        .ok();
    engine
        .docker(&["cp", "/run/docker-test/passwd", "web:/tmp/copied"])
        .ok();
    seen.end(
        "copied",
        &engine.docker(&["exec", "web", "wc", "-l", "/tmp/copied"]),
    );
    seen.end("stop", &engine.docker(&["stop", "-t", "30", "web"]));
    seen.say(
        "stopped",
        engine.inspect(
            "web",
            "{{.State.Status}} {{.State.ExitCode}} {{.State.OOMKilled}}",
        ),
    );
    seen.end(
        "exec when stopped",
        &engine.docker(&["exec", "web", "true"]),
    );
    seen.end("logs", &engine.docker(&["logs", "web"]));
    seen.end("start", &engine.docker(&["start", "web"]));
    seen.end("restart", &engine.docker(&["restart", "-t", "30", "web"]));
    seen.say("restarted", engine.inspect("web", "{{.State.Status}}"));
    let up = || {
        (engine
            .docker(&["logs", "web"])
            .stdout
            .matches("up web")
            .count()
            == 3)
            .then_some(())
    };
    eventually(BOUND, "it is up for the third time", up);
    seen.end("kill -s", &engine.docker(&["kill", "-s", "TERM", "web"]));
    engine.until("web", "{{.State.Status}}", "exited");
    seen.end("logs of three lives", &engine.docker(&["logs", "web"]));
    seen.say("killed", engine.inspect("web", "{{.State.ExitCode}}"));
    seen.end("kill when it has ended", &engine.docker(&["kill", "web"]));
    seen.end("start again", &engine.docker(&["start", "web"]));
    seen.end("rm while it runs", &engine.docker(&["rm", "web"]));
    seen.end("rm -f", &engine.docker(&["rm", "-f", "web"]));
    seen.end("kill -9", &{
        shell(engine, runtime, &["-d", "--name", "kk"], "sleep 1000").ok();
        engine.docker(&["kill", "kk"])
    });
    engine.until("kk", "{{.State.Status}}", "exited");
    seen.say("code", engine.inspect("kk", "{{.State.ExitCode}}"));
    seen.end("wait", &engine.docker(&["wait", "kk"]));
    seen.end("rm", &engine.docker(&["rm", "kk"]));
}

/// -i, -t, attach, --init, --pid=host, volumes, users, a port.
pub fn ways_to_run(engine: &Engine, runtime: &str, seen: &mut Seen) {
    let input = "x".repeat(300_000);
    let args = ["run", "--rm", "-i", "--runtime", runtime, IMAGE, "wc", "-c"];
    seen.end("-i", &engine.docker_with(&args, input.as_bytes()));
    seen.end(
        "-t",
        &shell(
            engine,
            runtime,
            &["--rm", "-t"],
            "test -t 1 && echo terminal; exit 4",
        ),
    );
    let line = format!(
        "run --rm -it --runtime {runtime} {IMAGE} sh -c 'sleep 1; stty size; read x; echo got $x'"
    );
    let typed = typed(engine, &line, b"word\n");
    seen.say(
        "-it",
        format!(
            "{:?} {} {}",
            typed.code,
            typed.stdout.contains("got word"),
            typed.stdout.contains("33 99")
        ),
    );
    seen.end(
        "--init",
        &run(
            engine,
            runtime,
            &["--rm", "--init"],
            &["sh", "-c", "cat /proc/1/comm; exit 6"],
        ),
    );
    let shared = shell(
        engine,
        runtime,
        &["--rm", "--pid", "host"],
        "test $(ls -d /proc/[0-9]* | wc -l) -gt 4 && echo many; exit 2",
    );
    seen.end("--pid=host", &shared);
    seen.end(
        "--user",
        &shell(
            engine,
            runtime,
            &["--rm", "--user", "65534"],
            "id -u; touch /x || echo no",
        ),
    );
    seen.end(
        "--read-only",
        &shell(
            engine,
            runtime,
            &["--rm", "--read-only"],
            "touch /x || echo no",
        ),
    );
    seen.end(
        "-v",
        &shell(
            engine,
            runtime,
            &["--rm", "-v", "/run/docker-test:/x:ro"],
            "test -e /x/log && echo there",
        ),
    );
    seen.end(
        "--network none",
        &shell(
            engine,
            runtime,
            &["--rm", "--network", "none"],
            "ip -o link | wc -l",
        ),
    );
    seen.end(
        "its address",
        &shell(
            engine,
            runtime,
            &["--rm"],
            "ip -o -4 addr show eth0 | grep -c 10.77.3.",
        ),
    );
    seen.end(
        "--ulimit",
        &shell(
            engine,
            runtime,
            &["--rm", "--ulimit", "nofile=77:88"],
            "ulimit -n; ulimit -Hn",
        ),
    );

    seen.say("attach", attached(engine, runtime));
    engine.docker(&["rm", "aa"]).ok();
    // Who attaches and leaves does not end it.
    engine
        .docker(&[
            "run",
            "-d",
            "-i",
            "--name",
            "bb",
            "--runtime",
            runtime,
            IMAGE,
            "sh",
            "-c",
            "read x; echo got $x; exit 3",
        ])
        .ok();
    let mut attached = engine.command();
    attached
        .args(["attach", "--sig-proxy=false", "bb"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped());
    let mut attached = attached.spawn().unwrap();
    std::thread::sleep(Duration::from_millis(700));
    attached.kill().unwrap();
    attached.wait().unwrap();
    seen.say(
        "after an attach that was killed",
        engine.inspect("bb", "{{.State.Status}}"),
    );
    seen.end(
        "attach with input",
        &engine.docker_with(&["attach", "bb"], b"through\n"),
    );
    engine.docker(&["rm", "-f", "bb"]).ok();
}

/// Who attaches to a container that prints sees what it prints, to its end, and its exit code.
fn attached(engine: &Engine, runtime: &str) -> String {
    let script = "while ! test -e /tmp/go; do echo tick; sleep 0.1; done; echo late; exit 8";
    shell(engine, runtime, &["-d", "--name", "aa"], script).ok();
    let mut attach = engine.command();
    attach
        .args(["attach", "--no-stdin", "aa"])
        .stdout(Stdio::piped());
    let mut attach = attach.spawn().unwrap();
    let mut lines = BufReader::new(attach.stdout.take().unwrap()).lines();
    let first = lines.next().unwrap().unwrap();
    engine.docker(&["exec", "aa", "touch", "/tmp/go"]).ok();
    let last = lines.last().unwrap().unwrap();
    let code = attach.wait().unwrap().code();
    format!("{first} {last} {code:?}")
}

/// A health check that passes and one that does not; memory that runs out; limits that change.
pub fn watched(engine: &Engine, runtime: &str, seen: &mut Seen) {
    let check = [
        "--health-cmd",
        "test -e /tmp/well",
        "--health-interval",
        "1s",
        "--health-retries",
        "1",
    ];
    let mut options = vec!["-d", "--name", "hh"];
    options.extend(check);
    shell(engine, runtime, &options, "touch /tmp/well; sleep 1000").ok();
    engine.until("hh", "{{.State.Health.Status}}", "healthy");
    engine.docker(&["exec", "hh", "rm", "/tmp/well"]).ok();
    engine.until("hh", "{{.State.Health.Status}}", "unhealthy");
    seen.say("health", "followed");
    let limit = "cat /sys/fs/cgroup/memory/memory.limit_in_bytes 2>/dev/null || cat /sys/fs/cgroup/memory.max";
    seen.end(
        "update",
        &engine.docker(&["update", "--memory", "48m", "--memory-swap", "48m", "hh"]),
    );
    seen.end("limit", &engine.docker(&["exec", "hh", "sh", "-c", limit]));
    let more = ["update", "--cpu-shares", "512", "--pids-limit", "50", "hh"];
    seen.end("update of others", &engine.docker(&more));
    let limits = "cd /sys/fs/cgroup; cat cpu/cpu.shares 2>/dev/null || cat cpu.weight; cat pids/pids.max 2>/dev/null || cat pids.max";
    seen.end(
        "limits",
        &engine.docker(&["exec", "hh", "sh", "-c", limits]),
    );
    // One that is paused, and one that runs again: the limits are those that were given last.
    engine.docker(&["pause", "hh"]).ok();
    let paused = ["update", "--memory", "56m", "--memory-swap", "56m", "hh"];
    seen.end("update while paused", &engine.docker(&paused));
    engine.docker(&["unpause", "hh"]).ok();
    seen.end(
        "limit then",
        &engine.docker(&["exec", "hh", "sh", "-c", limit]),
    );
    engine.docker(&["restart", "-t", "0", "hh"]).ok();
    seen.end(
        "limit after a restart",
        &engine.docker(&["exec", "hh", "sh", "-c", limit]),
    );
    engine.docker(&["rm", "-f", "hh"]).ok();

    let eat = "x=; while :; do x=\"$x$(head -c 1000000 /dev/zero | tr '\\0' x)\"; done";
    let options = ["-d", "--name", "oo", "-m", "16m", "--memory-swap", "16m"];
    shell(engine, runtime, &options, eat).ok();
    engine.until("oo", "{{.State.Status}}", "exited");
    // The notice of it may come after the exit.
    std::thread::sleep(Duration::from_millis(500));
    seen.say(
        "out of memory",
        engine.inspect("oo", "{{.State.ExitCode}} {{.State.OOMKilled}}"),
    );
    engine.docker(&["rm", "oo"]).ok();
}
