//! What is done to a container that runs: execs, signals, pausing, limits, statistics, terminals, streams.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::time::Duration;

use podvisor::proto::cgroup1::metrics::Metrics;
use podvisor::proto::runc_options::oci::ProcessDetails;
use protobuf::Message;
use serde_json::json;

use super::side::{Side, both_ends, fifo, file, process, reader};
use super::transcript::Transcript;
use crate::support::eventually;
use crate::support::grpc::Answer;

fn out(side: &Side, name: &str) -> String {
    file(&side.path(name))
}

fn printed(side: &Side, name: &str) -> String {
    fs::read_to_string(side.path(name)).unwrap_or_default()
}

pub fn execs(side: &Side, t: &mut Transcript) {
    side.create(&side.request("c", "sleep 1000", |_| ()))
        .unwrap();
    t.ends(
        "exec before the start",
        side.exec("c", "early", "", &process("true")),
        &[],
    );
    t.state("early", side, "c", "early");
    let state = side.state("c", "early").unwrap();
    t.say("ids of an exec", format!("{} {}", state.id, state.exec_id));
    t.ends("delete of early", side.delete("c", "early"), &[]);
    side.start("c", "").unwrap();

    t.ends(
        "exec",
        side.exec(
            "c",
            "e",
            &out(side, "e"),
            &process("echo in; sleep 1; exit 9"),
        ),
        &[],
    );
    t.ends(
        "exec with an id in use",
        side.exec("c", "e", "", &process("true")),
        &[],
    );
    t.ends("kill before its start", side.kill("c", "e", 9, false), &[]);
    t.ends("its start", side.start("c", "e"), &[]);
    t.ends("delete while it runs", side.delete("c", "e"), &[]);
    let exec_ids: Vec<String> = side
        .pids("c")
        .unwrap()
        .processes
        .iter()
        .map(|p| {
            let details = p.info.as_ref().map(|any| {
                let details = ProcessDetails::parse_from_bytes(&any.value).unwrap();
                format!("{} {}", any.type_url, details.exec_id)
            });
            details.unwrap_or_default()
        })
        .filter(|details| !details.is_empty())
        .collect();
    t.say("pids of execs", format!("{exec_ids:?}"));
    t.say("code", side.wait("c", "e").unwrap());
    t.state("ended", side, "c", "e");
    t.ends(
        "kill when it has ended",
        side.kill("c", "e", 9, false),
        &["already finished"],
    );
    t.ends(
        "resize when it has ended",
        side.resize("c", "e", 10, 10),
        &[],
    );
    let deleted = side.delete("c", "e").unwrap();
    t.say(
        "deleted",
        format!("{} {}", deleted.exit_status, deleted.pid > 0),
    );
    t.say("output", printed(side, "e"));
    t.ends("delete again", side.delete("c", "e"), &[]);
    t.ends(
        "the id is free",
        side.exec("c", "e", "", &process("true")),
        &[],
    );
    t.ends("delete unstarted", side.delete("c", "e"), &[]);

    side.exec("c", "long", "", &process("sleep 1000")).unwrap();
    side.start("c", "long").unwrap();
    t.ends("kill of an exec", side.kill("c", "long", 15, false), &[]);
    t.say("code of the killed", side.wait("c", "long").unwrap());
    side.exec("c", "late", "", &process("true")).unwrap();
    side.kill("c", "", 9, false).unwrap();
    t.say("code of init", side.wait("c", "").unwrap());
    t.ends("start after the exit", side.start("c", "late"), &[]);
    t.ends(
        "exec after the exit",
        side.exec("c", "later", "", &process("true")),
        &[],
    );
    t.ends("delete", side.delete("c", ""), &[]);
    for event in side.events(13) {
        t.say("event", event);
    }

    // The Go shim of 2.1 counts a start that failed as an end, and dies at init's exit when that makes less than none:
    // others have to outlive init.
    side.run_edited("d", "sleep 1000", |spec| {
        let namespaces = spec["linux"]["namespaces"].as_array_mut().unwrap();
        namespaces.retain(|one| one["type"] != "pid");
    });
    for other in ["one", "two"] {
        side.exec("d", other, "", &process("sleep 1000")).unwrap();
        side.start("d", other).unwrap();
    }
    t.ends("start again", side.start("d", "one"), &[]);
    let missing = json!({"user": {"uid": 0, "gid": 0}, "args": ["/no/such"], "env": ["PATH=/bin"], "cwd": "/"});
    side.exec("d", "missing", "", &missing).unwrap();
    t.ends(
        "start of a missing program",
        side.start("d", "missing"),
        &["/no/such", "no such file or directory"],
    );
    t.state("missing", side, "d", "missing");
    t.ends("delete of missing", side.delete("d", "missing"), &[]);
    side.remove("d");
}

pub fn signals(side: &Side, t: &mut Transcript) {
    let script = "trap 'echo term; exit 5' TERM; trap 'echo usr' USR1; touch /run/ready; while :; do sleep 0.05; done";
    side.run("c", script);
    let ready = side.rootfs.path().join("run/ready");
    eventually(Duration::from_secs(20), "its traps are set", || {
        ready.exists().then_some(())
    });
    t.ends("a signal it handles", side.kill("c", "", 10, false), &[]);
    let file = side.bundle("c").join("out");
    eventually(Duration::from_secs(20), "it prints", || {
        fs::read_to_string(&file)
            .ok()
            .filter(|text| text.contains("usr"))
    });
    t.ends("a signal that is none", side.kill("c", "", 0, false), &[]);
    t.ends("a signal of real time", side.kill("c", "", 34, false), &[]);
    t.ends("a signal that ends it", side.kill("c", "", 15, false), &[]);
    t.say("ended by that", side.wait("c", "").unwrap());
    t.ends(
        "kill of a dead one",
        side.kill("c", "", 9, false),
        &["already finished"],
    );
    t.ends(
        "kill of all of a dead one",
        side.kill("c", "", 9, true),
        &["already finished"],
    );
    t.ends("pids of a dead one", side.pids("c").map(drop), &[]);
    side.delete("c", "").unwrap();

    side.run("d", "sleep 1000 & sleep 1000");
    t.ends("kill of all", side.kill("d", "", 9, true), &[]);
    t.say("code of all", side.wait("d", "").unwrap());
    side.delete("d", "").unwrap();

    side.run(
        "e",
        "trap 'exit 6' TERM; touch /run/e; while :; do sleep 0.05; done",
    );
    let ready = side.rootfs.path().join("run/e");
    eventually(Duration::from_secs(20), "its trap is set", || {
        ready.exists().then_some(())
    });
    t.ends("a polite one", side.kill("e", "", 15, false), &[]);
    t.say("code of the polite one", side.wait("e", "").unwrap());
    t.ends("delete", side.delete("e", ""), &[]);
    for event in side.events(12) {
        t.say("event", event);
    }
}

pub fn pausing(side: &Side, t: &mut Transcript) {
    side.create(&side.request("c", "sleep 1000", |_| ()))
        .unwrap();
    t.say("pause of a created one fails", side.pause("c").is_err());
    side.start("c", "").unwrap();
    side.exec("c", "e", "", &process("sleep 1000")).unwrap();
    side.start("c", "e").unwrap();
    t.say("resume of a running one fails", side.resume("c").is_err());
    t.ends("pause", side.pause("c"), &[]);
    t.state("paused", side, "c", "");
    t.state("its exec", side, "c", "e");
    t.say("pause again fails", side.pause("c").is_err());
    t.ends(
        "exec while paused",
        side.exec("c", "f", "", &process("true")),
        &[],
    );
    t.ends("delete while paused", side.delete("c", ""), &[]);
    t.say("pids while paused", side.pids("c").unwrap().processes.len());
    t.ends("resume", side.resume("c"), &[]);
    t.state("resumed", side, "c", "");
    side.pause("c").unwrap();
    t.ends("kill while paused", side.kill("c", "", 9, false), &[]);
    let _ = side.resume("c");
    t.say("code", side.wait("c", "").unwrap());
    t.say("code of the exec", side.wait("c", "e").unwrap());
    t.say("pause of an ended one fails", side.pause("c").is_err());
    t.ends("delete", side.delete("c", ""), &[]);
    for event in side
        .events(10)
        .into_iter()
        .filter(|e| !e.contains("resumed"))
    {
        t.say("event", event);
    }
}

pub fn terminals(side: &Side, t: &mut Transcript) {
    let terminal = |spec: &mut serde_json::Value| spec["process"]["terminal"] = true.into();
    let (stdin, stdout) = (fifo(&side.path("in")), fifo(&side.path("tty")));
    let mut request = side.request(
        "c",
        "stty size; read x; echo got $x; stty size; exit 3",
        terminal,
    );
    (request.stdin, request.stdout) = (stdin.clone(), stdout.clone());
    request.stderr = String::new();
    let shown = reader(&stdout);
    side.create(&request).unwrap();
    t.ends("resize before the start", side.resize("c", "", 34, 12), &[]);
    t.ends("start", side.start("c", ""), &[]);
    t.state("on a terminal", side, "c", "");
    t.ends("resize", side.resize("c", "", 100, 50), &[]);
    let mut typist = both_ends(&stdin);
    // After the first size was shown.
    std::thread::sleep(Duration::from_millis(500));
    typist.write_all(b"word\n").unwrap();
    t.say("code", side.wait("c", "").unwrap());
    t.ends("delete", side.delete("c", ""), &[]);
    let shown = shown.join().unwrap();
    t.say(
        "last lines",
        format!("{:?}", shown.split_once("word").map(|(_, rest)| rest)),
    );

    side.run("d", "sleep 1000");
    t.ends("resize of one without", side.resize("d", "", 10, 10), &[]);
    let (stdin, stdout) = (fifo(&side.path("in2")), fifo(&side.path("tty2")));
    let shown = reader(&stdout);
    let _typist = both_ends(&stdin);
    let mut shell = process("stty size; test -t 0 && echo yes");
    shell["terminal"] = true.into();
    side.exec("d", "e", &stdout, &shell).unwrap();
    t.ends(
        "resize of an exec before its start",
        side.resize("d", "e", 21, 7),
        &[],
    );
    t.ends("its start", side.start("d", "e"), &[]);
    t.say("its code", side.wait("d", "e").unwrap());
    t.state("its state", side, "d", "e");
    side.delete("d", "e").unwrap();
    t.say(
        "it showed",
        format!("{:?}", shown.join().unwrap().contains("yes")),
    );
    side.remove("d");
}

pub fn streams(side: &Side, t: &mut Transcript) {
    let (stdin, stdout, stderr) = (
        fifo(&side.path("i")),
        fifo(&side.path("o")),
        fifo(&side.path("e")),
    );
    let mut request = side.request("c", "cat; echo end >&2; exit 4", |_| ());
    (request.stdin, request.stdout, request.stderr) =
        (stdin.clone(), stdout.clone(), stderr.clone());
    let (o, e) = (reader(&stdout), reader(&stderr));
    side.create(&request).unwrap();
    side.start("c", "").unwrap();
    let mut first = both_ends(&stdin);
    first.write_all(b"one\n").unwrap();
    std::thread::sleep(Duration::from_millis(300));
    drop(first);
    // Whoever attached has left: no end of file for that.
    std::thread::sleep(Duration::from_millis(300));
    t.state("detached", side, "c", "");
    let mut second = both_ends(&stdin);
    second.write_all(b"two\n").unwrap();
    std::thread::sleep(Duration::from_millis(300));
    t.ends("close-io", side.close_stdin("c", ""), &[]);
    drop(second);
    t.say("code", side.wait("c", "").unwrap());
    t.ends("close-io when it has ended", side.close_stdin("c", ""), &[]);
    t.ends("delete", side.delete("c", ""), &[]);
    t.say("stdout", o.join().unwrap());
    t.say("stderr", e.join().unwrap());

    // A grandchild keeps the output open.
    let stdout = fifo(&side.path("held"));
    let mut request = side.request("d", "setsid sleep 1000 & echo last", |spec| {
        spec["linux"]["namespaces"]
            .as_array_mut()
            .unwrap()
            .retain(|one| one["type"] != "pid");
    });
    request.stdout = stdout.clone();
    request.stderr = fifo(&side.path("held-too"));
    let (text, errors) = (reader(&stdout), reader(&request.stderr));
    side.create(&request).unwrap();
    side.start("d", "").unwrap();
    t.say("code with the output held", side.wait("d", "").unwrap());
    t.ends("delete with the output held", side.delete("d", ""), &[]);
    t.say("text", text.join().unwrap());
    t.say("errors", errors.join().unwrap());
}

/// Messages in cgroup v1 statistics, by the numbers of their fields; everything else is a number or a list.
const MESSAGES: [&str; 12] = [
    "2", "3", "3.1", "3.2", "4", "4.33", "4.34", "4.35", "4.36", "5", "8", "9",
];

/// What has the same value whoever asks and whenever: limits, counts of processes, OOM control.
const STEADY: [&str; 9] = [
    "2.1", "2.2", "4.33.1", "4.34.1", "4.35.1", "4.36.1", "9.1", "9.2", "9.3",
];

/// Every field that has a value, by its path.
fn fields(prefix: &str, message: &Answer, into: &mut BTreeMap<String, u64>) {
    for (number, value, bytes) in message.fields() {
        let path = format!("{prefix}{number}");
        if MESSAGES.contains(&path.as_str()) {
            fields(&format!("{path}."), &Answer::of(bytes), into);
        }
        into.insert(path, value);
    }
}

pub fn statistics(side: &Side, t: &mut Transcript) {
    let limits = |spec: &mut serde_json::Value| {
        spec["linux"]["resources"]["memory"] = json!({"limit": 64 << 20});
        spec["linux"]["resources"]["pids"] = json!({"limit": 33});
    };
    let script = "x=0; while test $x -lt 20000; do x=$((x+1)); done; touch /run/worked; sleep 1000";
    side.run_edited("c", script, limits);
    let worked = side.rootfs.path().join("run/worked");
    eventually(Duration::from_secs(30), "it has worked", || {
        worked.exists().then_some(())
    });
    let settled = || {
        let answer = side.stats("c").unwrap();
        let metrics = Metrics::parse_from_bytes(&answer.stats.value).unwrap();
        // The shell has become the last of its commands, and the one before has gone.
        (metrics.pids.current == 1).then_some(answer)
    };
    let answer = eventually(Duration::from_secs(30), "one process", settled);
    t.say("type", &answer.stats.type_url);
    let mut all = BTreeMap::new();
    fields("", &Answer::of(answer.stats.value.clone()), &mut all);
    let parts: Vec<&str> = MESSAGES
        .into_iter()
        .filter(|path| all.contains_key(*path))
        .collect();
    t.say("parts", format!("{parts:?}"));
    for path in STEADY {
        t.say(path, all.get(path).copied().unwrap_or_default());
    }
    let metrics = Metrics::parse_from_bytes(&answer.stats.value).unwrap();
    let cpu = metrics.cpu.usage.total;
    t.say(
        "cpu time is counted",
        (1_000_000..60_000_000_000).contains(&cpu),
    );
    t.say("by processor", metrics.cpu.usage.per_cpu.len());
    let memory = metrics.memory.usage.usage;
    t.say("memory is counted", (4096..(64 << 20)).contains(&memory));
    side.kill("c", "", 9, false).unwrap();
    side.wait("c", "").unwrap();
    t.ends("between exit and delete", side.stats("c").map(drop), &[]);
    side.delete("c", "").unwrap();
}

pub fn updates(side: &Side, t: &mut Transcript) {
    let limit = |side: &Side| {
        let answer = side.stats("c").unwrap();
        let metrics = Metrics::parse_from_bytes(&answer.stats.value).unwrap();
        metrics.memory.usage.limit
    };
    let request = side.request("c", "sleep 1000", |spec| {
        spec["linux"]["resources"]["memory"] = json!({"limit": 64 << 20});
    });
    side.create(&request).unwrap();
    t.ends(
        "update of a created one",
        side.update("c", &json!({"memory": {"limit": 48 << 20}})),
        &[],
    );
    t.say("limit", limit(side));
    side.start("c", "").unwrap();
    t.ends(
        "update",
        side.update(
            "c",
            &json!({"memory": {"limit": 32 << 20}, "pids": {"limit": 20}}),
        ),
        &[],
    );
    t.say("limit", limit(side));
    t.ends("update with nothing", side.update("c", &json!({})), &[]);
    t.say("limit", limit(side));
    t.say(
        "update with no JSON fails",
        side.update("c", &json!("x")).is_err(),
    );
    t.say(
        "update to less than is used fails",
        side.update("c", &json!({"memory": {"limit": 1}})).is_err(),
    );
    side.pause("c").unwrap();
    t.ends(
        "update of a paused one",
        side.update("c", &json!({"memory": {"limit": 40 << 20}})),
        &[],
    );
    side.resume("c").unwrap();
    side.kill("c", "", 9, false).unwrap();
    side.wait("c", "").unwrap();
    t.say(
        "update of an ended one fails",
        side.update("c", &json!({"memory": {"limit": 32 << 20}}))
            .is_err(),
    );
    side.delete("c", "").unwrap();
}
