//! Lives of containers: made, started, asked, waited for, deleted; and those that end at an odd moment.

use std::fs;
use std::time::Duration;

use serde_json::json;

use super::side::{Side, fifo, process};
use super::transcript::Transcript;
use crate::support::eventually;

/// The files that stand in a bundle.
fn files(side: &Side, id: &str) -> String {
    let mut names: Vec<String> = fs::read_dir(side.bundle(id))
        .unwrap()
        .flatten()
        .map(|e| e.file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    names.join(" ")
}

pub fn whole_life(side: &Side, t: &mut Transcript) {
    let request = side.request("c", "echo out; read x </run/go; exit 7", |_| ());
    nix::unistd::mkfifo(
        &side.rootfs.path().join("run/go"),
        nix::sys::stat::Mode::S_IRWXU,
    )
    .unwrap();
    t.ends("state before create", side.state("c", ""), &[]);
    let pid = side.create(&request).unwrap();
    t.say("created pid lives", pid > 0);
    t.state("created", side, "c", "");
    let waiter = side.connect();
    let early = std::thread::spawn(move || waiter.wait("c", ""));
    t.ends(
        "delete of an exec that is not there",
        side.delete("c", "no"),
        &[],
    );
    t.say("bundle when created", files(side, "c"));
    t.ends("start", side.start("c", ""), &[]);
    t.ends("start again", side.start("c", ""), &[]);
    t.state("running", side, "c", "");
    t.ends("delete while it runs", side.delete("c", ""), &[]);
    let connected = side.task_connect("c").unwrap();
    t.say(
        "connect",
        format!("{} {}", connected.shim_pid > 0, connected.task_pid == pid),
    );
    let twice = side.create(&side.request("c", "true", |_| ()));
    t.say("create of an id in use fails", twice.is_err());
    fs::write(side.rootfs.path().join("run/go"), "go\n").unwrap();
    t.ends("wait", side.wait("c", ""), &[]);
    t.say("code of the early waiter", early.join().unwrap().unwrap());
    t.say("code again", side.wait("c", "").unwrap());
    t.state("ended", side, "c", "");
    t.ends("start when it has ended", side.start("c", ""), &[]);
    let deleted = side.delete("c", "").unwrap();
    let same = deleted.pid == pid && deleted.exited_at.seconds > 0;
    t.say("deleted", format!("{} {same}", deleted.exit_status));
    // Not stderr as well: into a file, the Go shim of 2.1 may lose it.
    t.say("output", side.output("c"));
    t.say("bundle when deleted", files(side, "c"));
    t.ends("delete again", side.delete("c", ""), &[]);
    t.ends("state when deleted", side.state("c", ""), &[]);
    t.ends("wait when deleted", side.wait("c", ""), &[]);
    for event in side.events(4) {
        t.say("event", event);
    }
}

pub fn unknown_ids(side: &Side, t: &mut Transcript) {
    side.create(&side.request("c", "sleep 1000", |_| ()))
        .unwrap();
    let words = &[];
    t.ends("state of nobody", side.state("no", ""), words);
    t.ends("start of nobody", side.start("no", ""), words);
    t.ends("delete of nobody", side.delete("no", ""), words);
    t.ends("kill of nobody", side.kill("no", "", 9, false), words);
    t.ends("wait for nobody", side.wait("no", ""), words);
    t.ends("pids of nobody", side.pids("no"), words);
    t.ends("stats of nobody", side.stats("no"), words);
    t.ends("pause of nobody", side.pause("no"), words);
    t.ends("resume of nobody", side.resume("no"), words);
    t.ends(
        "exec in nobody",
        side.exec("no", "e", "", &process("true")),
        words,
    );
    t.ends("resize of nobody", side.resize("no", "", 1, 1), words);
    t.ends("close-io of nobody", side.close_stdin("no", ""), words);
    t.ends("update of nobody", side.update("no", &json!({})), words);
    let connected = side.task_connect("no").map(|a| a.shim_pid > 0);
    t.say("connect to nobody", connected.is_ok());
    t.ends("state of no exec", side.state("c", "no"), words);
    t.ends("start of no exec", side.start("c", "no"), words);
    t.ends("kill of no exec", side.kill("c", "no", 9, false), words);
    t.ends("wait for no exec", side.wait("c", "no"), words);
    t.ends("resize of no exec", side.resize("c", "no", 1, 1), words);
    t.ends("close-io of no exec", side.close_stdin("c", "no"), words);
    t.ends("delete of a created one", side.delete("c", ""), &[]);
    // In no order: the Go shim of 2.1 has none here. That of ours is held by what deletes an unstarted one elsewhere.
    let mut events = side.events(3);
    events.sort();
    for event in events {
        t.say("event", event);
    }
}

pub fn failed_creates(side: &Side, t: &mut Transcript) {
    let gone = |t: &mut Transcript, id: &str| {
        t.ends(&format!("{id}: state"), side.state(id, ""), &[]);
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
        let left = mounts.contains(side.bundle(id).to_str().unwrap());
        t.say(&format!("{id}: mounted"), left);
    };
    let none = &["no such file or directory"];
    let mut request = side.request("rootfs", "true", |_| ());
    request.rootfs[0].source = "/no/such/rootfs".into();
    t.ends("no rootfs", side.create(&request), none);
    gone(t, "rootfs");

    let missing = |s: &mut serde_json::Value| s["process"]["args"] = json!(["/no/such"]);
    let request = side.request("program", "", missing);
    t.ends("no program", side.create(&request), &["/no/such", none[0]]);
    gone(t, "program");

    let mut request = side.request("runtime", "true", |_| ());
    let options = podvisor::proto::runc_options::oci::Options {
        binary_name: "no-runc".into(),
        ..Default::default()
    };
    let pack = podvisor::proto::any::pack(podvisor::proto::any::RUNC_OPTIONS, &options).unwrap();
    request.options = Some(pack).into();
    let words = &["\"no-runc\"", "executable file not found in $path"];
    t.ends("no runtime", side.create(&request), words);
    gone(t, "runtime");

    let request = side.request("spec", "true", |_| ());
    fs::write(side.bundle("spec").join("config.json"), "{\"process\":").unwrap();
    t.ends("half a spec", side.create(&request), &["eof"]);
    gone(t, "spec");

    let mut request = side.request("streams", "true", |_| ());
    request.stdout = "nope:///x".into();
    t.ends("streams of no kind", side.create(&request), &["nope"]);
    gone(t, "streams");

    // Of the same id: the Go shim leaves its runtime's state behind where the streams fail.
    let request = side.request("program", "exit 3", |_| ());
    t.ends("the same id afterwards", side.create(&request), &[]);
    t.ends("its start", side.start("program", ""), &[]);
    t.say("its code", side.wait("program", "").unwrap());
    t.ends("its delete", side.delete("program", ""), &[]);
    for event in side.events(4) {
        t.say("event", event);
    }
}

pub fn odd_exits(side: &Side, t: &mut Transcript) {
    // Killed by somebody else between create and start.
    let pid = side.create(&side.request("c", "true", |_| ())).unwrap();
    let pid = nix::unistd::Pid::from_raw(i32::try_from(pid).unwrap());
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL).unwrap();
    t.say("code of one that never ran", side.wait("c", "").unwrap());
    t.state("never ran", side, "c", "");
    t.say("its start fails", side.start("c", "").is_err());
    t.ends("its delete", side.delete("c", ""), &[]);

    // Killed by Kill instead.
    side.create(&side.request("d", "true", |_| ())).unwrap();
    t.ends("kill of a created one", side.kill("d", "", 9, false), &[]);
    t.say("its code too", side.wait("d", "").unwrap());
    t.ends("its delete too", side.delete("d", ""), &[]);

    // Everything in the machine's pid namespace ends with init.
    let shared = |spec: &mut serde_json::Value| {
        let namespaces = spec["linux"]["namespaces"].as_array_mut().unwrap();
        namespaces.retain(|one| one["type"] != "pid");
    };
    let script = "sleep 1000 & echo $! >/run/child; while :; do test -e /run/end && exit 4; sleep 0.05; done";
    side.run_edited("e", script, shared);
    let file = side.rootfs.path().join("run/child");
    let child = eventually(Duration::from_secs(20), "a child", || {
        fs::read_to_string(&file).ok()?.trim().parse::<i32>().ok()
    });
    side.exec("e", "x", "", &process("sleep 1000")).unwrap();
    t.ends("an exec beside it", side.start("e", "x"), &[]);
    fs::write(side.rootfs.path().join("run/end"), "").unwrap();
    t.say("code with a child left", side.wait("e", "").unwrap());
    t.say("code of the exec", side.wait("e", "x").unwrap());
    t.ends("delete with a child", side.delete("e", ""), &[]);
    let path = format!("/proc/{child}/stat");
    let ended = || {
        let stat = fs::read_to_string(&path).unwrap_or_default();
        (stat.is_empty() || stat.contains(") Z ")).then_some(())
    };
    eventually(Duration::from_secs(20), "the child ends", ended);
    for event in side.events(13) {
        t.say("event", event);
    }
}

/// Nobody reads the FIFO that is to take the output.
pub fn missing_readers(side: &Side, t: &mut Transcript) {
    let mut request = side.request("c", "echo hi", |_| ());
    request.stdout = side.path("not-there").display().to_string();
    request.stderr = request.stdout.clone();
    t.say(
        "a FIFO that is not there fails",
        side.create(&request).is_err(),
    );
    t.ends("its state", side.state("c", ""), &[]);
    let state = "/run/containerd/runc/test";
    t.say(
        "it is left with the runtime",
        std::path::Path::new(state).join("c").exists(),
    );
    // Nobody else removes it.
    let runc = ["--root", state, "delete", "--force", "c"];
    crate::support::run(
        std::process::Command::new("runc").args(runc),
        super::side::BOUND,
    );
    let out = fifo(&side.path("out"));
    let mut request = side.request("d", "echo hi; exit 2", |_| ());
    request.stdout = out.clone();
    request.stderr = fifo(&side.path("err"));
    let errors = super::side::reader(&request.stderr);
    let calls = side.connect();
    let create = std::thread::spawn(move || calls.create(&request));
    std::thread::sleep(Duration::from_millis(300));
    let text = super::side::reader(&out);
    t.ends("a reader that comes late", create.join().unwrap(), &[]);
    t.ends("its start", side.start("d", ""), &[]);
    t.say("its code", side.wait("d", "").unwrap());
    t.ends("its delete", side.delete("d", ""), &[]);
    t.say("its text", text.join().unwrap());
    t.say("its errors", errors.join().unwrap());
}

pub fn shut_down(side: &Side, t: &mut Transcript) {
    side.run("c", "sleep 1000");
    t.ends("shutdown with a task", side.shutdown("c"), &[]);
    t.ends("shutdown for nobody with a task", side.shutdown("no"), &[]);
    std::thread::sleep(Duration::from_millis(300));
    t.say("listens", side.listens());
    t.state("and runs", side, "c", "");
    side.remove("c");
    std::thread::sleep(Duration::from_millis(300));
    t.say("listens without a task", side.listens());
    t.ends("shutdown", side.shutdown("c"), &[]);
    eventually(Duration::from_secs(20), "the shim leaves", || {
        (!side.listens()).then_some(())
    });
    for event in side.events(4) {
        t.say("event", event);
    }
}
