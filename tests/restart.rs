//! containerd is killed and comes back: created, running, paused and ended containers, an exec and a terminal are as
//! before, nothing that was printed is lost, and what was under way ends well.
#![allow(clippy::unwrap_used, clippy::expect_used)]
#![allow(clippy::print_stdout, reason = "captured by the test runner")]

mod support;
#[path = "restart/tasks.rs"]
mod tasks;

use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::Path;
use std::time::Duration;

use support::rootfs::{self, Rootfs};
use support::{Containerd, Snapshot, eventually, require, sandboxed};
use tasks::{
    BOUND, CREATED, NOT_FOUND, PAUSED, RUNNING, STOPPED, Streams, Tasks, container, forget,
};

const RUNTIME: &str = "io.containerd.podvisor.v1";
const DIR: &str = "/run/streams";

/// A daemon, a root file system, and the check that nothing is left.
fn under(name: &str, peer: &str, body: impl FnOnce(&mut Containerd, &Rootfs)) {
    under_with(name, peer, None, body);
}

/// With this script in front of `runc`.
fn under_with(
    name: &str,
    peer: &str,
    before_runc: Option<&str>,
    body: impl FnOnce(&mut Containerd, &Rootfs),
) {
    let (peer, before_runc) = (peer.to_owned(), before_runc.map(str::to_owned));
    sandboxed(name, move || {
        let Some(peer) = require::peer(&peer) else {
            return;
        };
        fs::create_dir_all(DIR).unwrap();
        // What nobody was given is undone within two of these.
        fs::write("/etc/podvisor/config.toml", "[parking]\ninterval = 2.0\n").unwrap();
        let mut builder = Containerd::builder(&peer);
        if let Some(script) = before_runc {
            let path = format!(
                "/run/wrapped:{}",
                support::bin::path_with(&[support::bin::dir(), &peer.bin])
            );
            wrap_runc(&script);
            builder = builder.env("PATH", &path);
        }
        let mut daemon = builder.start();
        let rootfs = rootfs::make();
        // The first container makes what all share: the parent of their cgroups.
        daemon
            .run_once(RUNTIME, &rootfs, "warm", &["/bin/true"])
            .ok();
        let before = Snapshot::take();
        body(&mut daemon, &rootfs);
        let changes = || {
            let mut changes = before.changes();
            changes.retain(|line| !line.contains("(containerd)"));
            changes
        };
        eventually(BOUND, "nothing is left", || {
            let changes = changes();
            println!("{changes:?}");
            changes.is_empty().then_some(())
        });
    });
}

/// `/run/wrapped/runc`: `$verb` is the verb, `exec runc` follows.
fn wrap_runc(script: &str) {
    let runc = require::find("runc").unwrap();
    fs::create_dir_all("/run/wrapped").unwrap();
    let text = format!(
        "#!/bin/sh\nfor verb; do case $verb in create|start|kill|delete|exec) break;; esac; done\n{script}\nexec {} \"$@\"\n",
        runc.display()
    );
    fs::write("/run/wrapped/runc", text).unwrap();
    fs::set_permissions("/run/wrapped/runc", fs::Permissions::from_mode(0o755)).unwrap();
}

/// A FIFO, held open both ways so that nobody waits for its other end.
fn fifo(name: &str) -> (String, fs::File) {
    let path = Path::new(DIR).join(name);
    nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
    let file = open(&path.display().to_string());
    (path.display().to_string(), file)
}

fn open(path: &str) -> fs::File {
    fs::OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(nix::libc::O_NONBLOCK)
        .open(path)
        .unwrap()
}

/// What has come, until it has this text.
fn read_until(file: &mut fs::File, so_far: &mut String, text: &str) {
    eventually(BOUND, &format!("{text:?} is printed"), || {
        let mut buffer = [0; 65536];
        while let Ok(n @ 1..) = file.read(&mut buffer) {
            so_far.push_str(&String::from_utf8_lossy(&buffer[..n]));
        }
        so_far.contains(text).then_some(())
    });
}

/// Every number from 0 on, once and in order.
fn assert_counts(text: &str) {
    for (n, line) in text.lines().enumerate() {
        assert_eq!(line, format!("n{n}"), "of {text:?}");
    }
}

const COUNTING: &str = "i=0; while :; do echo n$i; i=$((i+1)); sleep 0.05; done";

/// The whole list at once.
fn everything_is_as_before(daemon: &mut Containerd, rootfs: &Rootfs) {
    let make = |daemon: &Containerd, id: &str, script: &str| {
        container(daemon, RUNTIME, rootfs.str(), id, script, id == "tty");
    };
    for (id, script) in [
        ("created", "exit 3"),
        ("counts", COUNTING),
        ("paused", "sleep 1000"),
        ("ended", "exit 4"),
        (
            "ends",
            "while ! test -e /tmp/end; do sleep 0.05; done; echo last; exit 7",
        ),
        ("tty", "while read x; do echo got $x; stty size; done"),
        ("execs", "sleep 1000"),
    ] {
        make(daemon, id, script);
    }
    let (counted, mut counter) = fifo("counts");
    let (held, mut hold) = fifo("held");
    let (typed, mut typist) = fifo("typed");
    let (shown, mut screen) = fifo("shown");
    let (printed, mut printer) = fifo("exec");
    let file = |path: &str| Streams {
        stdout: path.into(),
        stderr: path.into(),
        ..Streams::default()
    };
    let terminal = Streams {
        stdin: typed,
        stdout: shown,
        stderr: String::new(),
        terminal: true,
    };
    let mut tasks = Tasks::of(daemon);
    let none = Streams::default();
    tasks.create("created", &none).unwrap();
    for (id, streams) in [
        ("counts", &file(&counted)),
        ("paused", &none),
        ("ended", &none),
        ("ends", &file(&held)),
        ("tty", &terminal),
        ("execs", &none),
    ] {
        tasks.create(id, streams).unwrap();
        tasks.start(id, "").unwrap();
    }
    assert_eq!(tasks.wait("ended", "").unwrap(), 4);
    tasks.pause("paused").unwrap();
    let script =
        "i=0; while ! test -e /tmp/stop; do echo n$i; i=$((i+1)); sleep 0.05; done; exit 9";
    tasks.exec("execs", "e", &file(&printed), script).unwrap();
    tasks.start("execs", "e").unwrap();
    tasks.exec("execs", "later", &none, "exit 6").unwrap();
    typist.write_all(b"one\n").unwrap();
    let (mut screen_text, mut count_text, mut exec_text) =
        (String::new(), String::new(), String::new());
    read_until(&mut screen, &mut screen_text, "got one");
    read_until(&mut counter, &mut count_text, "n5\n");
    read_until(&mut printer, &mut exec_text, "n5\n");
    let ids = ["created", "counts", "paused", "ended", "tty", "execs"];
    let before = ids.map(|id| tasks.state(id, "").unwrap());

    daemon.kill();
    // Who read for the daemon is gone with it: what is printed now waits.
    drop((counter, printer, screen));
    fs::write(rootfs.path().join("tmp/end"), "").unwrap();
    std::thread::sleep(Duration::from_millis(500));
    daemon.start_again();

    let mut tasks = Tasks::of(daemon);
    assert_eq!(ids.map(|id| tasks.state(id, "").unwrap()), before);
    let statuses = before.map(|(status, ..)| status);
    assert_eq!(
        statuses,
        [CREATED, RUNNING, PAUSED, STOPPED, RUNNING, RUNNING]
    );
    assert_eq!(tasks.state("execs", "e").unwrap().0, RUNNING);
    // It ended while nobody looked.
    assert_eq!(tasks.wait("ends", "").unwrap(), 7);
    let (status, _, code) = tasks.state("ends", "").unwrap();
    assert_eq!((status, code), (STOPPED, 7));
    read_until(&mut hold, &mut String::new(), "last");

    let more = format!("n{}\n", count_text.lines().count() + 20);
    let (mut counter, mut printer, mut screen) =
        (open(&counted), open(&printed), open(&terminal.stdout));
    read_until(&mut counter, &mut count_text, &more);
    assert_counts(&count_text);
    fs::write(rootfs.path().join("tmp/stop"), "").unwrap();
    assert_eq!(tasks.wait("execs", "e").unwrap(), 9);
    let mut buffer = Vec::new();
    let _ = printer.read_to_end(&mut buffer);
    exec_text.push_str(&String::from_utf8_lossy(&buffer));
    assert_counts(&exec_text);
    tasks.start("execs", "later").unwrap();
    assert_eq!(tasks.wait("execs", "later").unwrap(), 6);
    tasks.resize("tty", 77, 44).unwrap();
    typist.write_all(b"two\n").unwrap();
    read_until(&mut screen, &mut screen_text, "44 77");
    assert!(screen_text.contains("got two"), "{screen_text:?}");
    tasks.resume("paused").unwrap();
    assert_eq!(tasks.state("paused", "").unwrap().0, RUNNING);
    tasks.start("created", "").unwrap();
    assert_eq!(tasks.wait("created", "").unwrap(), 3);
    assert_eq!(tasks.delete("ended").unwrap(), 4);
    for id in ["created", "counts", "paused", "ends", "tty", "execs"] {
        tasks.remove(id);
    }
    for id in [
        "created", "counts", "paused", "ended", "ends", "tty", "execs",
    ] {
        forget(daemon, id);
    }
}

#[test]
fn all_is_as_before_under_1_6() {
    under(
        "all_is_as_before_under_1_6",
        "containerd-1.6",
        everything_is_as_before,
    );
}

#[test]
fn all_is_as_before_under_2_1() {
    under(
        "all_is_as_before_under_2_1",
        "containerd-2.1",
        everything_is_as_before,
    );
}

/// Waits in the verb named by /run/verb until /run/gate is there.
const GATE: &str = "if test \"$(cat /run/verb 2>/dev/null)\" = $verb; then touch /run/reached; while ! test -e /run/gate; do sleep 0.05; done; fi";

/// The daemon is killed while the runtime is in this verb.
fn killed_in(daemon: &mut Containerd, verb: &str, ask: impl FnOnce(&mut Tasks) + Send) {
    for file in ["/run/gate", "/run/reached"] {
        let _ = fs::remove_file(file);
    }
    fs::write("/run/verb", format!("{verb}\n")).unwrap();
    let mut tasks = Tasks::of(daemon);
    std::thread::scope(|scope| {
        let asked = scope.spawn(move || ask(&mut tasks));
        eventually(BOUND, "the runtime is asked", || {
            Path::new("/run/reached").exists().then_some(())
        });
        daemon.kill();
        asked.join().unwrap();
    });
    fs::remove_file("/run/verb").unwrap();
}

fn killed_in_create_and_delete(daemon: &mut Containerd, rootfs: &Rootfs) {
    // With the work done before the daemon is back, and with it still under way then.
    for (n, first) in ["before", "after"].into_iter().enumerate() {
        let id = format!("c{n}");
        container(daemon, RUNTIME, rootfs.str(), &id, "exit 5", false);
        killed_in(daemon, "create", |tasks| {
            tasks.create(&id, &Streams::default()).unwrap_err();
        });
        let open = || fs::write("/run/gate", "").unwrap();
        if first == "before" {
            open();
            std::thread::sleep(Duration::from_millis(700));
        }
        daemon.start_again();
        open();
        // Either the daemon has the task, or it is gone and can be made again: in both cases it runs.
        let mut tasks = Tasks::of(daemon);
        let known = eventually(BOUND, "a task, or room for one", || {
            match tasks.state(&id, "") {
                Ok((CREATED, ..)) => Some(true),
                Ok(other) => panic!("{other:?}"),
                Err(_) => tasks
                    .create(&id, &Streams::default())
                    .is_ok()
                    .then_some(false),
            }
        });
        println!("killed in create, opened {first} the restart: the daemon has it: {known}");
        tasks.start(&id, "").unwrap();
        assert_eq!(tasks.wait(&id, "").unwrap(), 5);

        killed_in(daemon, "delete", |tasks| {
            tasks.delete(&id).unwrap_err();
        });
        if first == "before" {
            open();
            std::thread::sleep(Duration::from_millis(700));
        }
        daemon.start_again();
        open();
        let mut tasks = Tasks::of(daemon);
        let gone = eventually(BOUND, "it is deleted", || match tasks.delete(&id) {
            Ok(code) => Some(Some(code)),
            Err(status) if status.code == NOT_FOUND => Some(None),
            Err(_) => None,
        });
        assert!(gone.is_none_or(|code| code == 5), "{gone:?}");
        println!("killed in delete, opened {first} the restart: deleted again: {gone:?}");
        assert_eq!(tasks.state(&id, "").unwrap_err().code, NOT_FOUND);
        forget(daemon, &id);
    }
}

#[test]
fn killed_in_the_middle_under_1_6() {
    let (name, peer) = ("killed_in_the_middle_under_1_6", "containerd-1.6");
    under_with(name, peer, Some(GATE), killed_in_create_and_delete);
}

#[test]
fn killed_in_the_middle_under_2_1() {
    let (name, peer) = ("killed_in_the_middle_under_2_1", "containerd-2.1");
    under_with(name, peer, Some(GATE), killed_in_create_and_delete);
}
