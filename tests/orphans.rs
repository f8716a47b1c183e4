//! A supervisor and the guard of its plugin killed together, in the middle of an ADD: whatever is left of the plugin has
//! ended before the DEL begins, so that nothing is attached behind it.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "tests panic where they cannot go on"
)]

#[path = "owed/kit.rs"]
mod kit;
mod support;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use kit::BOUND;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use podvisor::network::kill_orphans;
use serde_json::json;
use support::bin::PODVISOR;
use support::{Snapshot, cni, eventually, podvisor, rootfs, sandboxed};

/// Where the scripted plugin keeps what it does: `there` at its point, `lease` when it has one, `dels` a line for each.
const DIR: &str = "/run/leasing";

/// What the plugin does at ADD when it has reached its point: `take` waits for the word, and takes a lease.
const POINTS: [(&str, &str); 5] = [
    ("the plugin itself", "take"),
    ("a program it waits for", "/bin/sh $dir/taker"),
    ("one it does not wait for", "/bin/sh $dir/taker & wait"),
    (
        "one whose parent has ended",
        "(/bin/sh $dir/taker & exit) & wait; sleep 600",
    ),
    ("a chain of programs without an end", "/bin/sh $dir/chain"),
];

fn install(point: &str) {
    fs::create_dir_all(DIR).unwrap();
    let take = format!(
        "dir={DIR}\ntake() {{ : >$dir/there; until [ -e $dir/go ]; do sleep 0.01; done; : >$dir/lease; }}\n"
    );
    fs::write(format!("{DIR}/taker"), format!("{take}take\n")).unwrap();
    let chain =
        format!(": >{DIR}/there; [ ! -e {DIR}/go ] || : >{DIR}/lease\nexec /bin/sh {DIR}/chain\n");
    fs::write(format!("{DIR}/chain"), chain).unwrap();
    let script = format!(
        r#"#!/bin/sh
{take}case $CNI_COMMAND in
VERSION) echo '{{"cniVersion":"1.0.0","supportedVersions":["1.0.0"]}}' ;;
ADD) {point} ;;
DEL)
    : >$dir/go
    # Whoever is left takes its lease now, or in the pause: both are after a DEL that has given everything back.
    rm -f $dir/lease; sleep 0.2; echo >>$dir/dels ;;
esac
"#
    );
    let path = Path::new(cni::PLUGINS).join("leasing");
    fs::write(&path, script).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    cni::network("pods", vec![json!({"type": "leasing"})]).write();
}

/// pids of processes by their short name.
fn named(name: &str) -> Vec<i32> {
    let pids = fs::read_dir("/proc").unwrap().flatten();
    pids.filter_map(|e| e.file_name().to_str()?.parse::<i32>().ok())
        .filter(|pid| {
            fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|n| n.trim_end() == name)
        })
        .collect()
}

fn send(pid: i32, signal: Signal) {
    kill(Pid::from_raw(pid), signal).unwrap();
}

/// Who is stopped first, so that it cannot answer to the other's death; both are killed.
#[derive(Clone, Copy)]
enum First {
    Guard,
    Supervisor,
}

fn kill_both(first: First) {
    let supervisors: Vec<i32> = kit::supervisors();
    let guards = named("podvisor-guard");
    let ([supervisor], [guard]) = (supervisors.as_slice(), guards.as_slice()) else {
        panic!("supervisors {supervisors:?}, guards {guards:?}");
    };
    let [one, other] = match first {
        First::Guard => [*guard, *supervisor],
        First::Supervisor => [*supervisor, *guard],
    };
    send(one, Signal::SIGSTOP);
    send(other, Signal::SIGKILL);
    send(one, Signal::SIGKILL);
}

fn killed_in_add(what: &str, point: &str, first: First, undo: &[&str]) {
    install(point);
    let before = Snapshot::take();
    let mut making = Command::new(PODVISOR)
        .args(["create", "--name", "web", "--net", "pods"])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let there = format!("{DIR}/there");
    eventually(BOUND, "the plugin at its point", || {
        Path::new(&there).exists().then_some(())
    });
    kill_both(first);
    // It undoes the pod itself when it sees its supervisor die: whoever comes first.
    podvisor(undo);
    making.wait().unwrap();
    podvisor(&["rm", "-f", "web"]);
    assert!(
        !Path::new(DIR).join("lease").exists(),
        "{what}: a lease is left"
    );
    assert!(Path::new(DIR).join("dels").exists(), "{what}: no DEL");
    fs::remove_dir_all(DIR).unwrap();
    before.assert_unchanged();
}

#[test]
fn nothing_of_a_plugin_works_on_when_its_supervisor_and_its_guard_are_killed() {
    sandboxed(
        "nothing_of_a_plugin_works_on_when_its_supervisor_and_its_guard_are_killed",
        || {
            for (what, point) in POINTS {
                for first in [First::Guard, First::Supervisor] {
                    killed_in_add(what, point, first, &["rm", "-f", "web"]);
                    killed_in_add(what, point, first, &["gc"]);
                }
            }
        },
    );
}

/// Where an OCI runtime mounts its own executable for a moment: what it is told, and (runc's init) its own state.
const PLACES: [&str; 3] = ["$TMPDIR", "$_LIBCONTAINER_STATEDIR", "$root/$id"];

fn install_runtime(place: &str) {
    let script = format!(
        r#"#!/bin/bash
root=$2 id=${{!#}}
for word; do verb=$word; case $word in create|delete|exec|kill|state|start) break ;; esac; done
case $verb in
create)
    mkdir -p $root/$id
    : >{place}/crun.AbCdEf
    mount --bind /bin/true {place}/crun.AbCdEf
    : >/run/leasing/there
    exec sleep 600 ;;
delete) rm -r $root/$id ;;
esac
"#
    );
    fs::create_dir_all(DIR).unwrap();
    let path = Path::new(DIR).join("crun");
    fs::write(&path, script).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    kit::configure(&format!("runtime = \"{}\"\n", path.display()));
}

/// crun and runc leave a mount behind when they are killed in the middle of a verb.
#[test]
fn a_runtime_that_is_killed_in_the_middle_of_a_create_leaves_no_mount() {
    sandboxed(
        "a_runtime_that_is_killed_in_the_middle_of_a_create_leaves_no_mount",
        || {
            let rootfs = rootfs::make();
            for place in PLACES {
                for damaged in [false, true] {
                    killed_in_create(place, damaged, rootfs.str());
                }
            }
        },
    );
}

fn killed_in_create(place: &str, damaged: bool, rootfs: &str) {
    install_runtime(place);
    let before = Snapshot::take();
    let mut making = Command::new(PODVISOR)
        .args(["run", "-d", "--name", "web", "--net", "none"])
        .args(["--rootfs", rootfs, "--", "/bin/true"])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let there = Path::new(DIR).join("there");
    eventually(BOUND, "the runtime in its create", || {
        there.exists().then_some(())
    });
    // It would undo the pod, with the journal as it is.
    making.kill().unwrap();
    making.wait().unwrap();
    let supervisors = kit::supervisors();
    assert_eq!(supervisors.len(), 1);
    let id = kit::listed()[0]["id"].as_str().unwrap().to_owned();
    kit::kill(supervisors[0]);
    if damaged {
        fs::write(kit::dir(&id).join("journal.json"), "{").unwrap();
    }
    podvisor(&["rm", "-f", &id]).ok();
    fs::remove_file(there).unwrap();
    let table = fs::read_to_string("/proc/self/mountinfo").unwrap();
    let left: Vec<&str> = table.lines().filter(|l| l.contains("crun.")).collect();
    assert_eq!(left, [""; 0], "{place}, journal damaged: {damaged}");
    before.assert_unchanged();
}

/// A process that runs one program after the other has no environment in between: a look that finds it there must not
/// take it for somebody else's.
#[test]
fn who_is_between_two_programs_is_found() {
    let dir = tempfile::tempdir().unwrap();
    let chain = dir.path().join("chain");
    let pid_file = dir.path().join("pid");
    let text = format!("exec /bin/sh {}\n", chain.display());
    fs::write(&chain, text).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    for round in 0..100 {
        let mut leader = leader(&chain, &pid_file);
        let session = i32::try_from(leader.id()).unwrap();
        leader.wait().unwrap();
        let pid: i32 = fs::read_to_string(&pid_file)
            .unwrap()
            .trim()
            .parse()
            .unwrap();
        let found = kill_orphans(
            "web",
            Path::new("/netns"),
            Some(session),
            Duration::from_secs(20),
        );
        runtime.block_on(found).unwrap();
        let left = kit::alive(pid);
        if left {
            send(pid, Signal::SIGKILL);
        }
        assert!(!left, "round {round}: it runs on");
    }
}

/// A session's first process, which leaves one that runs `chain` and dies.
fn leader(chain: &Path, pid_file: &Path) -> Child {
    let script = format!(
        "/bin/sh {} <&- >&- 2>&- & echo $! >{}; kill -KILL $$",
        chain.display(),
        pid_file.display()
    );
    Command::new("/usr/bin/setsid")
        .args(["/bin/sh", "-c", &script])
        .env("CNI_CONTAINERID", "web")
        .env("CNI_NETNS", "/netns")
        .spawn()
        .unwrap()
}
