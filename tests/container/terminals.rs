//! Terminals of real processes: what is typed, what is shown, the window, and that nothing of them stays open.

use std::io::{Read, Write};
use std::os::unix::fs::OpenOptionsExt;

use super::streams::{fifo, reader};
use super::*;

/// Descriptors of this process that are masters of terminals.
fn masters() -> usize {
    fs::read_dir("/proc/self/fd")
        .unwrap()
        .flatten()
        .filter(|fd| fs::read_link(fd.path()).is_ok_and(|to| to.ends_with("ptmx")))
        .count()
}

/// A request with a terminal on two FIFOs: (request, what is typed goes here, what is shown comes from here).
fn on_terminal(kit: &Kit, id: &str, script: &str) -> (CreateRequest, String, String) {
    let (stdin, out) = (
        fifo(kit, &format!("{id}.in")),
        fifo(kit, &format!("{id}.out")),
    );
    let mut request = kit.request(id, script, |spec| spec["process"]["terminal"] = true.into());
    (request.stdin, request.stdout) = (stdin.clone(), out.clone());
    request.terminal = true;
    (request, stdin, out)
}

/// Types without waiting for a reader: the supervisor is one.
fn typist(stdin: &str) -> fs::File {
    fs::OpenOptions::new()
        .write(true)
        .custom_flags(nix::libc::O_NONBLOCK)
        .open(stdin)
        .unwrap()
}

fn exec_process(script: &str) -> Vec<u8> {
    json!({
        "user": {"uid": 0, "gid": 0}, "args": ["/bin/sh", "-c", script], "env": ["PATH=/bin"],
        "cwd": "/", "terminal": true,
    })
    .to_string()
    .into_bytes()
}

#[test]
fn what_is_typed_comes_in_and_what_is_shown_comes_out() {
    let name = "terminals::what_is_typed_comes_in_and_what_is_shown_comes_out";
    each_runtime(name, async |kit| {
        let before = masters();
        let script = "tty; stty size; read line; echo got $line; exit 5";
        let (request, stdin, out) = on_terminal(&kit, "c", script);
        let shown = reader(&out);
        kit.containers.create(request).await.unwrap();
        // Before its start: the program must find this size.
        kit.containers.resize("c", "", 132, 43).unwrap();
        kit.containers.start("c", "").await.unwrap();
        typist(&stdin).write_all(b"hello\r").unwrap();
        assert_eq!(kit.code("c", "").await, 5);
        let text = timeout(BOUND, shown);
        kit.containers.delete("c", "").await.unwrap();
        let text = text.await.expect("the end").unwrap();
        assert!(text.contains("/dev/"), "{text:?}");
        assert!(text.contains("43 132\r\n"), "{text:?}");
        assert!(text.contains("got hello\r\n"), "{text:?}");
        assert_eq!(masters(), before, "a terminal is still open");
        assert!(sockets().is_empty(), "{:?}", sockets());
    });
}

/// Console sockets that are left.
fn sockets() -> Vec<String> {
    fs::read_dir("/run/podvisor/s")
        .into_iter()
        .flatten()
        .flatten()
        .map(|e| e.file_name().to_string_lossy().into_owned())
        .collect()
}

#[test]
fn a_window_that_changes_is_told_to_the_program_and_to_an_exec_not_started_yet() {
    let name =
        "terminals::a_window_that_changes_is_told_to_the_program_and_to_an_exec_not_started_yet";
    each_runtime(name, async |kit| {
        kit.run("c", "sleep 1000").await;
        let (stdin, out) = (fifo(&kit, "e.in"), fifo(&kit, "e.out"));
        let script =
            "stty size; trap 'stty size; exit 3' WINCH; echo ready; while :; do read x; done";
        kit.containers
            .exec("c", "e", true, &stdin, &out, "", &exec_process(script))
            .await
            .unwrap();
        // Only runc takes the size of an exec from us: with the others it is there a moment later.
        let is_told = kit.runs_with("runc");
        if is_told {
            kit.containers.resize("c", "e", 100, 30).unwrap();
        }
        let (told, mut news) = tokio::sync::mpsc::channel::<String>(64);
        let path = out.clone();
        let shown = tokio::task::spawn_blocking(move || {
            let (mut file, mut text) = (fs::File::open(path).unwrap(), String::new());
            let mut buffer = [0; 256];
            loop {
                let n = file.read(&mut buffer).unwrap();
                if n == 0 {
                    return text;
                }
                text.push_str(&String::from_utf8_lossy(&buffer[..n]));
                let _ = told.blocking_send(text.clone());
            }
        });
        kit.containers.start("c", "e").await.unwrap();
        let ready = async {
            while let Some(text) = news.recv().await {
                if text.contains("ready") {
                    return;
                }
            }
        };
        timeout(BOUND, ready)
            .await
            .expect("the program's first line");
        kit.containers.resize("c", "e", 70, 20).unwrap();
        // A trap of a shell that reads is run when a line has come.
        typist(&stdin).write_all(b"\r").unwrap();
        assert_eq!(kit.code("c", "e").await, 3);
        kit.containers.delete("c", "e").await.unwrap();
        let text = timeout(BOUND, shown).await.expect("the end").unwrap();
        assert!(!is_told || text.starts_with("30 100\r\n"), "{text:?}");
        // What was typed may be echoed before or after.
        assert!(text.trim_end().ends_with("20 70"), "{text:?}");
        let script = "while test \"$(stty size)\" != '30 100'; do sleep 0.05; done; exit 4";
        kit.containers
            .exec("c", "f", true, "", "", "", &exec_process(script))
            .await
            .unwrap();
        kit.containers.resize("c", "f", 100, 30).unwrap();
        kit.containers.start("c", "f").await.unwrap();
        assert_eq!(kit.code("c", "f").await, 4);
        kit.containers.resize("c", "", 1, 1).unwrap(); // no terminal: nothing to resize
        let absent = kit.containers.resize("c", "no", 1, 1).unwrap_err();
        assert_eq!(absent.kind(), Kind::NotFound);
        kit.containers.stop_all(Duration::ZERO, true).await.unwrap();
    });
}

#[test]
fn seven_megabytes_pass_a_terminal_whole() {
    let name = "terminals::seven_megabytes_pass_a_terminal_whole";
    each_runtime(name, async |kit| {
        kit.run("c", "sleep 1000").await;
        let before = own_fds();
        for round in 0..3 {
            let exec = format!("e{round}");
            let out = fifo(&kit, &format!("{exec}.out"));
            let shown = reader(&out);
            // Each line is 7 characters, and the terminal makes "\n" two.
            let script = "stty -opost; seq 100000 999999";
            kit.containers
                .exec("c", &exec, true, "", &out, "", &exec_process(script))
                .await
                .unwrap();
            kit.containers.start("c", &exec).await.unwrap();
            assert_eq!(kit.code("c", &exec).await, 0);
            kit.containers.delete("c", &exec).await.unwrap();
            let text = timeout(BOUND, shown).await.expect("the end").unwrap();
            assert_eq!(text.len(), 900_000 * 7);
            assert!(text.ends_with("999998\n999999\n"));
        }
        unchanged(&before).await;
        kit.containers.stop_all(Duration::ZERO, true).await.unwrap();
    });
}

#[test]
fn a_terminal_without_streams_does_not_stop_its_program() {
    let name = "terminals::a_terminal_without_streams_does_not_stop_its_program";
    each_runtime(name, async |kit| {
        let mut request = kit.request("c", "seq 200000; exit 4", |spec| {
            spec["process"]["terminal"] = true.into();
        });
        (request.stdout, request.terminal) = (String::new(), true);
        kit.containers.create(request).await.unwrap();
        kit.containers.start("c", "").await.unwrap();
        assert_eq!(kit.code("c", "").await, 4);
        kit.containers.delete("c", "").await.unwrap();
        // To a file, made when missing.
        let mut request = kit.request("f", "echo to a file", |spec| {
            spec["process"]["terminal"] = true.into();
        });
        request.terminal = true;
        let out = request.stdout.strip_prefix("file://").unwrap().to_owned();
        kit.containers.create(request).await.unwrap();
        kit.containers.start("f", "").await.unwrap();
        assert_eq!(kit.code("f", "").await, 0);
        kit.containers.delete("f", "").await.unwrap();
        assert_eq!(fs::read_to_string(out).unwrap(), "to a file\r\n");
    });
}

#[test]
fn a_runtime_that_fails_or_sends_no_terminal_leaves_none() {
    sandboxed(
        "terminals::a_runtime_that_fails_or_sends_no_terminal_leaves_none",
        || {
            if !require::tool("runc") {
                return;
            }
            supervise(async || {
                let before = own_fds();
                let kit = Kit::new(&wrapper("[ $verb = create ] && exit 9"));
                let (request, _, _) = on_terminal(&kit, "c", "true");
                assert!(kit.containers.create(request).await.is_err());
                kit.assert_gone("c");
                assert!(sockets().is_empty(), "{:?}", sockets());
                drop(kit);

                // It connects, and sends text.
                let kit = Kit::new(&wrapper(concat!(
                    "if [ $verb = create ]; then ",
                    "for a; do [ \"$last\" = --console-socket ] && socket=$a; last=$a; done; ",
                    "python3 -c 'import socket,sys; s=socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); s.send(b\"x\")' $socket; fi",
                )));
                let (request, _, _) = on_terminal(&kit, "d", "sleep 1000");
                let error = kit.containers.create(request).await.unwrap_err();
                assert!(error.to_string().contains("terminal"), "{error}");
                kit.assert_gone("d");
                assert!(sockets().is_empty(), "{:?}", sockets());
                drop(kit);
                unchanged(&before).await;
            });
        },
    );
}
