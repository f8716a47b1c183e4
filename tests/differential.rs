//! What `ctr` shows under a real containerd is the same with `io.containerd.runc.v2` and with podvisor: output, exit
//! codes, states, what is refused, and the events in their order.
#![allow(clippy::unwrap_used, clippy::expect_used)]
#![allow(clippy::print_stdout, reason = "captured by the test runner")]

mod support;

use std::fs;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use serde_json::Value;
use support::rootfs::{self, Rootfs};
use support::{Containerd, Output, Snapshot, eventually, require, sandboxed};

const RUNC: &str = "io.containerd.runc.v2";
const PODVISOR: &str = "io.containerd.podvisor.v1";
const BOUND: Duration = Duration::from_secs(60);

/// One runtime under one daemon, and what was seen of it.
struct Body<'a> {
    daemon: &'a Containerd,
    rootfs: Rootfs,
    runtime: &'a str,
    seen: Vec<String>,
}

fn compared(name: &str, peer: &str) {
    let peer = peer.to_owned();
    sandboxed(name, move || {
        let Some(peer) = require::peer(&peer) else {
            return;
        };
        let daemon = Containerd::start(&peer);
        let [theirs, ours] = [RUNC, PODVISOR].map(|runtime| {
            println!("--- {} {runtime}", peer.name);
            let before = Snapshot::take();
            let mut body = Body {
                daemon: &daemon,
                rootfs: rootfs::make(),
                runtime,
                seen: Vec::new(),
            };
            let events = Events::watch(&daemon);
            body.runs();
            body.long_life();
            body.what_fails();
            body.compare_events(events.end());
            before.assert_unchanged();
            body.seen
        });
        assert_eq!(theirs.len(), ours.len(), "{theirs:#?}\n{ours:#?}");
        let pairs = theirs.iter().zip(&ours).filter(|(a, b)| a != b);
        let differences: Vec<_> = pairs.map(|(a, b)| format!("{a}\n    {b}")).collect();
        assert!(differences.is_empty(), "{}", differences.join("\n"));
    });
}

impl Body<'_> {
    fn say(&mut self, what: &str, seen: String) {
        println!("  {what}: {seen}");
        self.seen.push(format!("{what}: {seen}"));
    }

    /// Exit code, output, and which of the words are in the error.
    fn end(&mut self, what: &str, output: &Output, words: &[&str]) {
        let text = output.stderr.to_lowercase();
        let words: Vec<_> = words.iter().filter(|word| text.contains(**word)).collect();
        if output.code != Some(0) {
            println!("    {}", output.stderr.trim_end());
        }
        self.say(
            what,
            format!("{:?} {:?} {words:?}", output.code, output.stdout),
        );
    }

    fn ctr(&self, args: &[&str]) -> Output {
        self.daemon.ctr(args)
    }

    /// `ctr run` of a shell script.
    fn run(&self, options: &[&str], id: &str, script: &str) -> Output {
        let mut args = vec!["run", "--runtime", self.runtime];
        args.extend(options);
        args.extend(["--rootfs", self.rootfs.str(), id, "/bin/sh", "-c", script]);
        self.ctr(&args)
    }

    /// `STATUS` of `ctr task ls`, or nothing.
    fn status(&self, id: &str) -> String {
        let list = self.ctr(&["task", "ls"]).ok().stdout;
        let line = list
            .lines()
            .find(|line| line.starts_with(&format!("{id} ")));
        line.map_or_else(String::new, |line| {
            line.split_ascii_whitespace().last().unwrap().to_owned()
        })
    }

    /// Without those of deletes: the Go shim of 2.1 may leave before its last one is out. Ours are all there.
    fn compare_events(&mut self, events: Vec<String>) {
        let (deletes, others): (Vec<_>, Vec<_>) = events
            .into_iter()
            .partition(|event| event.starts_with("event delete"));
        let creates = others.iter().filter(|e| e.starts_with("event create"));
        if self.runtime == PODVISOR {
            assert_eq!(deletes.len(), creates.count(), "{deletes:#?}");
        }
        self.seen.extend(others);
    }

    fn runs(&mut self) {
        let output = self.run(&["--rm"], "r1", "echo out; echo err >&2; exit 7");
        self.end("run", &output, &["err"]);
        let output = self.run(
            &["--rm", "--cwd", "/tmp", "--env", "A=b"],
            "r2",
            "pwd; echo $A",
        );
        self.end("run with a directory", &output, &[]);
        let output = self.run(
            &["--rm", "--memory-limit", "67108864"],
            "r3",
            "echo limited",
        );
        self.end("run with a limit", &output, &[]);
        let script = "i=0; while test $i -lt 3000; do echo line $i of many that are printed fast; i=$((i+1)); done";
        let output = self.run(&["--rm"], "r4", script);
        self.say(
            "much output",
            format!("{:?} {}", output.code, output.stdout.lines().count()),
        );
        let log = format!("file:///run/log-{}", self.runtime);
        let output = self.run(&["-d", "--log-uri", &log], "r5", "echo logged; exit 3");
        self.end("run into a file", &output, &[]);
        eventually(BOUND, "r5 ends", || {
            (self.status("r5") == "STOPPED").then_some(())
        });
        let output = self.ctr(&["task", "rm", "r5"]);
        self.end("rm", &output, &[]);
        self.ctr(&["container", "rm", "r5"]).ok();
        self.say(
            "file",
            fs::read_to_string(format!("/run/log-{}", self.runtime)).unwrap(),
        );
        let line = format!(
            "{:?} --address {} run --rm -t --runtime {} --rootfs {} r6 /bin/sh -c 'tty; test -t 1 && echo yes; exit 4'",
            self.daemon.ctr_command().get_program(),
            self.daemon.address.display(),
            self.runtime,
            self.rootfs.str()
        );
        let typed = support::run(
            Command::new("script").args(["-qec", &line, "/dev/null"]),
            BOUND,
        );
        self.say(
            "terminal",
            format!("{:?} {}", typed.code, typed.stdout.contains("yes")),
        );
    }

    fn long_life(&mut self) {
        let script =
            "trap 'exit 5' TERM; trap 'echo usr' USR1; touch /tmp/up; while :; do sleep 0.05; done";
        let output = self.run(&["-d"], "l1", script);
        self.end("run -d", &output, &[]);
        let up = self.rootfs.path().join("tmp/up");
        eventually(BOUND, "its traps are set", || up.exists().then_some(()));
        self.say("status", self.status("l1"));
        let output = self.ctr(&[
            "task",
            "exec",
            "--exec-id",
            "e1",
            "l1",
            "/bin/sh",
            "-c",
            "echo in; exit 6",
        ]);
        self.end("exec", &output, &[]);
        let output = self.ctr(&["task", "exec", "--exec-id", "e2", "l1", "/no/such"]);
        self.end(
            "exec of nothing",
            &output,
            &["/no/such", "no such file or directory"],
        );
        let output = self.ctr(&[
            "task",
            "exec",
            "-d",
            "--exec-id",
            "e3",
            "l1",
            "/bin/sleep",
            "1000",
        ]);
        self.end("exec -d", &output, &[]);
        let output = self.ctr(&[
            "task",
            "exec",
            "-d",
            "--exec-id",
            "e3",
            "l1",
            "/bin/sleep",
            "1000",
        ]);
        self.end("exec with an id in use", &output, &["already exists"]);
        let listed = self.ctr(&["task", "ps", "l1"]).ok().stdout;
        self.say("execs in ps", listed.matches("e3").count().to_string());
        let metrics = self.ctr(&["task", "metrics", "l1"]).ok().stdout;
        let names: Vec<&str> = metrics
            .lines()
            .filter_map(|l| l.split_ascii_whitespace().next())
            .collect();
        self.say("metrics", format!("{names:?}"));
        let output = self.ctr(&["task", "pause", "l1"]);
        self.end("pause", &output, &[]);
        self.say("status", self.status("l1"));
        let output = self.ctr(&["task", "exec", "--exec-id", "e4", "l1", "/bin/true"]);
        self.say(
            "exec while paused fails",
            (output.code != Some(0)).to_string(),
        );
        let output = self.ctr(&["task", "resume", "l1"]);
        self.end("resume", &output, &[]);
        self.say("status", self.status("l1"));
        let output = self.ctr(&["task", "start", "l1"]);
        self.say("start again fails", (output.code != Some(0)).to_string());
        let output = self.ctr(&["task", "rm", "l1"]);
        self.say(
            "rm while it runs fails",
            (output.code != Some(0)).to_string(),
        );
        let output = self.ctr(&["container", "rm", "l1"]);
        self.say(
            "rm of its container fails",
            (output.code != Some(0)).to_string(),
        );
        let output = self.ctr(&["task", "kill", "-s", "SIGUSR1", "l1"]);
        self.end("a signal", &output, &[]);
        let output = self.ctr(&["task", "kill", "--exec-id", "e3", "-s", "SIGKILL", "l1"]);
        self.end("kill of an exec", &output, &[]);
        let output = self.ctr(&["task", "kill", "l1"]);
        self.end("kill", &output, &[]);
        eventually(BOUND, "l1 ends", || {
            (self.status("l1") == "STOPPED").then_some(())
        });
        let output = self.ctr(&["task", "kill", "l1"]);
        self.end(
            "kill again",
            &output,
            &["process already finished", "not found"],
        );
        let output = self.ctr(&["task", "rm", "l1"]);
        self.end("rm", &output, &[]);
        let output = self.ctr(&["task", "rm", "l1"]);
        self.end("rm again", &output, &["not found"]);
        self.ctr(&["container", "rm", "l1"]).ok();
    }

    fn what_fails(&mut self) {
        let rootfs = self.rootfs.str().to_owned();
        let output = self.ctr(&[
            "run",
            "--runtime",
            self.runtime,
            "--rootfs",
            &rootfs,
            "f1",
            "/no/such",
        ]);
        self.end(
            "no program",
            &output,
            &["/no/such", "no such file or directory"],
        );
        let _ = self.ctr(&["container", "rm", "f1"]);
        let output = self.ctr(&[
            "run",
            "--runtime",
            self.runtime,
            "--rootfs",
            "/no/rootfs",
            "f2",
            "/bin/true",
        ]);
        self.say("no rootfs fails", (output.code != Some(0)).to_string());
        let _ = self.ctr(&["container", "rm", "f2"]);
        for args in [
            ["task", "kill", "nobody"],
            ["task", "rm", "nobody"],
            ["task", "ps", "nobody"],
            ["task", "pause", "nobody"],
            ["task", "metrics", "nobody"],
        ] {
            let output = self.ctr(&args);
            self.end(&args.join(" "), &output, &["not found"]);
        }
        let output = self.run(&["--rm"], "f1", "echo the id is free");
        self.end("the id again", &output, &[]);
    }
}

/// `ctr events`, as it goes.
struct Events {
    child: Child,
    file: &'static str,
}

impl Events {
    fn watch(daemon: &Containerd) -> Self {
        let file = "/run/events";
        let out = fs::File::create(file).unwrap();
        let mut command = daemon.ctr_command();
        command
            .arg("events")
            .stdin(Stdio::null())
            .stdout(out)
            .stderr(Stdio::null());
        let child = command.spawn().unwrap();
        // Until it listens: an event of another namespace's making is seen.
        eventually(BOUND, "events are seen", || {
            daemon.ctr(&["namespaces", "create", "probe"]).ok();
            daemon.ctr(&["namespaces", "rm", "probe"]).ok();
            let text = fs::read_to_string(file).unwrap();
            text.contains("/namespaces/").then_some(())
        });
        Self { child, file }
    }

    /// Those of tasks: topic and fields, without pids, times and what has the runtime's name in it.
    fn end(mut self) -> Vec<String> {
        std::thread::sleep(Duration::from_millis(500));
        self.child.kill().unwrap();
        self.child.wait().unwrap();
        let text = fs::read_to_string(self.file).unwrap();
        let tasks = text.lines().filter_map(|line| {
            let (_, from_topic) = line.split_once(" /tasks/")?;
            let (topic, fields) = from_topic.split_once(' ')?;
            let mut fields: Value = serde_json::from_str(fields).unwrap();
            let fields = fields.as_object_mut().unwrap();
            for name in ["pid", "exited_at", "bundle", "io", "rootfs"] {
                let there = fields.remove(name).is_some();
                fields.insert(name.into(), there.into());
            }
            Some(format!("event {topic} {}", Value::from(fields.clone())))
        });
        tasks.collect()
    }
}

#[test]
fn ctr_sees_the_same_under_1_6() {
    compared("ctr_sees_the_same_under_1_6", "containerd-1.6");
}

#[test]
fn ctr_sees_the_same_under_1_7() {
    compared("ctr_sees_the_same_under_1_7", "containerd-1.7");
}

#[test]
fn ctr_sees_the_same_under_2_1() {
    compared("ctr_sees_the_same_under_2_1", "containerd-2.1");
}
