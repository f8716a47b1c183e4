//! What goes in and out of containers while they run.

use std::time::{Duration, Instant};

use serde_json::Value;

use crate::kubelet::{Pod, container, log, sleeper};
use crate::node::Side;
use crate::support::eventually;
use crate::websocket::Socket;
use crate::wire::api::*;

fn pod_and(side: &mut Side<'_>, name: &str, config: &ContainerConfig) -> (Pod, String) {
    let pod = side.config(name, |_, _| {});
    let pod = side.kubelet.run(&pod, 1).unwrap();
    let id = side.kubelet.launch(&pod, config).unwrap();
    (pod, id)
}

pub fn exec_sync(side: &mut Side<'_>) {
    let (pod, id) = pod_and(side, "exec-sync", &sleeper("a"));
    for (key, script) in [
        ("both outputs", "echo out; echo err >&2; exit 9"),
        (
            "much",
            "head -c 300000 /dev/zero | tr '\\0' z | md5sum; head -c 300000 /dev/zero | tr '\\0' z",
        ),
        ("killed", "kill -9 $$"),
        ("nothing", "true"),
    ] {
        let done = side.kubelet.exec(&id, script, 30).unwrap();
        let (out, err) = (done.stdout, done.stderr);
        let shown = format!(
            "{} bytes {:?} {:?} exit {}",
            out.len(),
            String::from_utf8_lossy(&out[..out.len().min(40)]),
            String::from_utf8_lossy(&err),
            done.exit_code
        );
        side.say(key, shown);
    }
    let begun = Instant::now();
    let late = side.kubelet.exec(&id, "echo begun; sleep 30", 1);
    side.say("timeout", late.unwrap_err().code);
    side.say("timeout in time", begun.elapsed() < Duration::from_secs(15));
    side.sees(
        "nothing of it is left",
        &id,
        "sleep 0.2; ps | grep -c '[s]leep 30'",
    );
    // What is in the background holds the output; the daemon is told to wait two seconds for it.
    let done = side.kubelet.exec(&id, "(sleep 5 &); echo done", 60);
    let done = done.map(|d| d.exit_code).map_err(|s| s.code);
    side.say("a child in the background", format!("{done:?}"));
    let request = ExecSyncRequest {
        container_id: id.clone(),
        cmd: vec!["/no/such".into()],
        timeout: 5,
        ..Default::default()
    };
    let missing = side
        .kubelet
        .ask::<_, ExecSyncResponse>("ExecSync", &request);
    side.say("no such program", missing.unwrap_err().code);
    side.kubelet.end(&pod.id);
}

fn request(id: &str, script: &str, stdin: bool, tty: bool) -> ExecRequest {
    ExecRequest {
        container_id: id.into(),
        cmd: ["sh", "-c", script].map(str::to_owned).to_vec(),
        stdin,
        tty,
        stdout: true,
        stderr: !tty,
        ..Default::default()
    }
}

/// A script that waits until its terminal has this size, and prints it.
fn sized(size: &str) -> String {
    format!("until stty size 2>/dev/null | grep -q '{size}'; do sleep 0.1; done; stty size")
}

/// How an exec ended, as the last channel tells it.
fn ending(text: &str) -> String {
    let status: Value = serde_json::from_str(text).unwrap_or_default();
    let code = status.pointer("/details/causes/0/message");
    format!("{} {}", status["status"], code.unwrap_or(&Value::Null))
}

pub fn exec(side: &mut Side<'_>) {
    let (pod, id) = pod_and(side, "exec", &sleeper("a"));
    let url = side.kubelet.url(
        "Exec",
        &request(&id, "echo out; echo err >&2; exit 7", false, false),
    );
    let [_, out, err, end] = Socket::open(&url).rest();
    side.say(
        "outputs and exit code",
        format!("{out:?} {err:?} {}", ending(&end)),
    );
    let url = side.kubelet.url(
        "Exec",
        &request(&id, "read a; echo got $a; read b; echo and $b", true, false),
    );
    let mut socket = Socket::open(&url);
    socket.send(0, b"first\n");
    let first = socket.until(1, "\n");
    socket.send(0, b"second\n");
    let [_, out, err, end] = socket.rest();
    side.say(
        "stdin",
        format!("{first:?} {out:?} {err:?} {}", ending(&end)),
    );
    let script = format!("tty; {}; read x; exit 4", sized("33 91"));
    let url = side.kubelet.url("Exec", &request(&id, &script, true, true));
    let mut socket = Socket::open(&url);
    let first = socket.until(1, "\n");
    socket.send(4, br#"{"Width":91,"Height":33}"#);
    let size = socket.until(1, "33 91\r\n");
    socket.send(0, b"\n");
    let [_, _, err, end] = socket.rest();
    side.say(
        "terminal",
        format!("{first:?} {size:?} {err:?} {}", ending(&end)),
    );
    let big = "head -c 2000000 /dev/zero | tr '\\0' q";
    let url = side.kubelet.url("Exec", &request(&id, big, false, false));
    let [_, out, _, end] = Socket::open(&url).rest();
    side.say("much output", format!("{} {}", out.len(), ending(&end)));
    side.kubelet.end(&pod.id);
}

pub fn attach(side: &mut Side<'_>) {
    let mut config = container(
        "a",
        "while read line; do echo heard $line; done; echo end of input",
    );
    config.stdin = true;
    let (pod, id) = pod_and(side, "attach", &config);
    let request = |id: &str, tty: bool| AttachRequest {
        container_id: id.into(),
        stdin: true,
        stdout: true,
        stderr: !tty,
        tty,
        ..Default::default()
    };
    for n in 1..3 {
        let url = side.kubelet.url("Attach", &request(&id, false));
        let mut socket = Socket::open(&url);
        socket.send(0, format!("word {n}\n").as_bytes());
        let heard = socket.until(1, "\n");
        side.say(&format!("attached, time {n}"), format!("{heard:?}"));
    }
    let whole = eventually(Duration::from_secs(20), "both lines in the log", || {
        let seen = log(&pod, "a");
        (seen.lines().count() == 2).then_some(seen)
    });
    side.say("the log has it too", whole);
    let mut once = container("once", "cat; echo end of input");
    once.stdin = true;
    once.stdin_once = true;
    let id = side.kubelet.launch(&pod, &once).unwrap();
    let url = side.kubelet.url("Attach", &request(&id, false));
    let mut socket = Socket::open(&url);
    socket.send(0, b"only once\n");
    socket.until(1, "\n");
    drop(socket);
    let status = side.kubelet.ended(&id);
    side.say(
        "input once",
        format!("{} {}", status.exit_code, log(&pod, "once")),
    );
    let script = format!("{}; read x; echo bye $x", sized("22 77"));
    let mut terminal = container("tty", &script);
    terminal.stdin = true;
    terminal.tty = true;
    let id = side.kubelet.launch(&pod, &terminal).unwrap();
    let url = side.kubelet.url("Attach", &request(&id, true));
    let mut socket = Socket::open(&url);
    socket.send(4, br#"{"Width":77,"Height":22}"#);
    let size = socket.until(1, "22 77\r\n");
    socket.send(0, b"now\n");
    let [_, out, ..] = socket.rest();
    side.say("terminal", format!("{size:?} {:?}", out.lines().last()));
    side.kubelet.ended(&id);
    side.kubelet.end(&pod.id);
}

pub fn port_forward(side: &mut Side<'_>) {
    let server = container(
        "a",
        "while :; do nc -l -p 8080 -e sh -c 'read x; echo you said $x'; done",
    );
    let (pod, _) = pod_and(side, "forward", &server);
    let request = PortForwardRequest {
        pod_sandbox_id: pod.id.clone(),
        port: vec![8080],
        ..Default::default()
    };
    let answer = eventually(Duration::from_secs(20), "the server", || {
        let url = side.kubelet.url("PortForward", &request);
        let mut socket = Socket::open(&url);
        socket.send(0, b"hello\n");
        let [data, ..] = socket.rest();
        // The port's number comes first, two bytes.
        let text = data
            .rsplit_once('\0')
            .map_or(data.as_str(), |(_, text)| text);
        text.contains("you said").then(|| {
            text.trim_start_matches(|c: char| !c.is_ascii_alphabetic())
                .to_owned()
        })
    });
    side.say("a port of the pod's", format!("{answer:?}"));
    side.kubelet.end(&pod.id);
}
