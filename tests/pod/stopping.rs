//! Stop: whatever state a process is in, however many there are, whoever else asks.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use podvisor::cgroup::{Group, Layout};
use serde_json::{Value, json};
use ttrpc::Code;

use crate::daemon::signal;
use crate::kit::*;
use crate::support::{Snapshot, cni, eventually, fake, podvisor, sandbox, sandboxed};

/// Where what freezes a group is, of this group.
fn freezer(path: &str) -> PathBuf {
    let roots = sandbox::cgroup_roots();
    let is_freezer =
        |root: &&PathBuf| root.join("cgroup.freeze").exists() || root.ends_with("freezer");
    let root = roots.iter().find(is_freezer).or_else(|| roots.first());
    root.unwrap().join(path)
}

fn freeze(dir: &Path, on: bool) {
    let (file, words) = match dir.join("freezer.state").exists() {
        true => ("freezer.state", ["THAWED", "FROZEN"]),
        false => ("cgroup.freeze", ["0", "1"]),
    };
    fs::write(dir.join(file), words[usize::from(on)]).unwrap();
}

fn is_there(pid: i32) -> bool {
    Path::new(&format!("/proc/{pid}")).exists()
}

/// The kernel's own state of a process.
fn state_of(pid: i32) -> char {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    stat.rsplit(") ").next().unwrap().chars().next().unwrap()
}

/// What the pod says of itself: state and reason.
async fn told(client: &podvisor::client::Client, id: &str) -> (String, String) {
    let status = status(client, id).await.unwrap();
    let info: Value = serde_json::from_str(&status.info["info"]).unwrap();
    let reason = info["podvisor"]["reason"].as_str().unwrap_or_default();
    (
        info["podvisor"]["state"].as_str().unwrap().to_owned(),
        reason.to_owned(),
    )
}

/// A process that the kernel lets nobody kill: the group above its container's is frozen, which on v1 is state D. The
/// stop answers with who it is, the pod stays as one that is not ready, and ends by itself as soon as it can.
#[test]
fn a_process_in_the_kernel_does_not_hang_a_stop_which_ends_by_itself_later() {
    sandboxed(
        "stopping::a_process_in_the_kernel_does_not_hang_a_stop_which_ends_by_itself_later",
        || {
            let before = Snapshot::take();
            on(async {
                let pod = Pod::launch("p");
                let client = pod.connect().await;
                pod.up(&client, &config("p")).await;
                let stuck = Container::new("stuck", "exec sleep 1000", |spec| {
                    spec["linux"]["cgroupsPath"] = json!("/above/stuck");
                });
                let other = Container::new("other", "exec sleep 1000", |_| ());
                let (init, neighbour) = (stuck.run(&client).await, other.run(&client).await);
                freeze(&freezer("above"), true);
                if freezer("above").join("freezer.state").exists() {
                    eventually(BOUND, "it is in state D", || {
                        (state_of(init) == 'D').then_some(())
                    });
                    let begun = Instant::now();
                    let (kind, text) = code(stop(&client, "p", 1).await);
                    assert!(begun.elapsed() < BOUND, "{:?}", begun.elapsed());
                    assert_eq!(kind, Code::DEADLINE_EXCEEDED, "{text}");
                    let who = format!("{init} (sleep, state D");
                    assert!(
                        text.contains("container stuck") && text.contains(&who),
                        "{text}"
                    );
                    assert!(is_there(init) && !is_there(neighbour));
                    assert_eq!(
                        status(&client, "p").await.unwrap().state,
                        "SANDBOX_NOTREADY"
                    );
                    let (state, reason) = told(&client, "p").await;
                    assert_eq!(state, "not_ready");
                    assert!(reason.contains(&who), "{reason}");
                    // Questions are answered meanwhile; and the stop can be asked for again.
                    stuck.state(&client).await.unwrap();
                    assert_eq!(code(stop(&client, "p", 1).await).0, Code::DEADLINE_EXCEEDED);
                }
                freeze(&freezer("above"), false);
                // Nobody asks again.
                assert_eq!(stuck.wait(&client, "").await.unwrap(), 137);
                let end = Instant::now() + BOUND;
                while told(&client, "p").await != ("stopped".into(), String::new()) {
                    assert!(Instant::now() < end, "{:?}", told(&client, "p").await);
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
                stop(&client, "p", 1).await.unwrap();
                pod.shut(&client).await;
            });
            remove_group("/above");
            before.assert_unchanged();
        },
    );
}

/// The same for a shutdown, which answers in time and goes on alone for as long as it takes.
#[test]
fn a_shutdown_goes_on_until_a_process_in_the_kernel_can_be_killed() {
    sandboxed(
        "stopping::a_shutdown_goes_on_until_a_process_in_the_kernel_can_be_killed",
        || {
            let before = Snapshot::take();
            on(async {
                let pod = Pod::launch("p");
                let client = pod.connect().await;
                pod.up(&client, &config("p")).await;
                let stuck = Container::new("stuck", "exec sleep 1000", |spec| {
                    spec["linux"]["cgroupsPath"] = json!("/above/stuck");
                });
                let init = stuck.run(&client).await;
                freeze(&freezer("above"), true);
                shutdown(&client, "p").await.unwrap();
                if freezer("above").join("freezer.state").exists() {
                    // Long enough for the containers' stop to give up.
                    tokio::time::sleep(Duration::from_secs(14)).await;
                    assert!(is_there(init) && is_there(pod.pid));
                }
                freeze(&freezer("above"), false);
                eventually(BOUND * 3, "the supervisor leaves", || {
                    (!is_there(pod.pid)).then_some(())
                });
            });
            remove_group("/above");
            before.assert_unchanged();
        },
    );
}

/// What the test's container had its group in is the test's.
fn remove_group(path: &str) {
    for root in sandbox::cgroup_roots() {
        let _ = fs::remove_dir(root.join(path.trim_start_matches('/')));
    }
}

/// Frozen by somebody else, as a whole or only a group in it; stopped by a signal: killed all the same.
#[test]
fn frozen_and_stopped_processes_are_stopped_like_others() {
    sandboxed(
        "stopping::frozen_and_stopped_processes_are_stopped_like_others",
        || {
            let before = Snapshot::take();
            on(async {
                let pod = Pod::launch("p");
                let client = pod.connect().await;
                pod.up(&client, &config("p")).await;
                let container =
                    |id: &str| Container::new(id, "sleep 1000 & exec sleep 1000", |_| ());
                let all = ["frozen", "inner", "halted"].map(container);
                let mut inits = Vec::new();
                for one in &all {
                    inits.push(one.run(&client).await);
                }
                freeze(&freezer("default/frozen"), true);
                let inner = freezer("default/inner/made-by-the-workload");
                fs::create_dir(&inner).unwrap();
                if inner.join("freezer.state").exists() {
                    fs::write(inner.join("cgroup.procs"), inits[1].to_string()).unwrap();
                    freeze(&inner, true);
                }
                signal(inits[2], Signal::SIGSTOP);
                let begun = Instant::now();
                stop(&client, "p", 1).await.unwrap();
                assert!(begun.elapsed() < BOUND, "{:?}", begun.elapsed());
                for (one, init) in all.iter().zip(&inits) {
                    assert!(!is_there(*init));
                    assert_eq!(one.wait(&client, "").await.unwrap(), 137);
                    assert_eq!(
                        Group::new(&Layout::detect().unwrap(), &format!("/default/{}", one.id))
                            .unwrap()
                            .pids(),
                        [0; 0]
                    );
                }
                pod.shut(&client).await;
            });
            before.assert_unchanged();
        },
    );
}

/// With a pid namespace of its own the kernel ends it; without one the sweep has to catch what forks while it looks.
#[test]
fn a_fork_bomb_dies_with_its_container() {
    sandboxed("stopping::a_fork_bomb_dies_with_its_container", || {
        let before = Snapshot::take();
        on(async {
            let pod = Pod::launch("p");
            let client = pod.connect().await;
            pod.up(&client, &config("p")).await;
            // Each process forks until it is refused, which would end its shell: that begins anew then.
            let script = r#"
                export BOMB='trap "exec /bin/sh -c \"\$BOMB\"" EXIT; while :; do /bin/sh -c "$BOMB" & done'
                trap '' TERM
                /bin/sh -c "$BOMB" 2>/dev/null &
                exec sleep 1000"#;
            let limited = |spec: &mut Value| {
                spec["linux"]["resources"] = json!({"pids": {"limit": 60}});
            };
            let own = Container::new("own", script, limited);
            let shared = Container::new("shared", script, |spec| {
                limited(spec);
                without(&["pid"])(spec);
            });
            for bomb in [&own, &shared] {
                bomb.run(&client).await;
                let group =
                    Group::new(&Layout::detect().unwrap(), &format!("/default/{}", bomb.id))
                        .unwrap();
                eventually(BOUND, "it forks", || {
                    (group.pids().len() > 20).then_some(())
                });
            }
            let begun = Instant::now();
            stop(&client, "p", 1).await.unwrap();
            println!("two fork bombs stopped in {:?}", begun.elapsed());
            for bomb in [&own, &shared] {
                let group =
                    Group::new(&Layout::detect().unwrap(), &format!("/default/{}", bomb.id))
                        .unwrap();
                assert_eq!(group.pids(), [0; 0]);
                assert_eq!(bomb.wait(&client, "").await.unwrap(), 137);
            }
            pod.shut(&client).await;
        });
        before.assert_unchanged();
    });
}

const TRAPS: &str =
    "trap 'echo asked; sleep 2; echo done; exit 7' TERM; echo ready; while :; do sleep 0.1; done";

/// Waits for a line without stopping what else is at work here.
async fn said(container: &Container, line: &str) {
    let end = Instant::now() + BOUND;
    while !container.printed("").lines().any(|l| l == line) {
        assert!(Instant::now() < end, "not said: {line}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Once is as good as twice; and who comes meanwhile is refused.
#[test]
fn a_second_sigterm_changes_nothing_and_nobody_new_is_served() {
    sandboxed(
        "stopping::a_second_sigterm_changes_nothing_and_nobody_new_is_served",
        || {
            cni::network("net", vec![json!({"type": "fake"})]).write();
            let net = fake::plugin(Path::new(cni::PLUGINS), "fake");
            let before = Snapshot::take();
            on(async {
                let pod = Pod::launch("p");
                let client = pod.connect().await;
                create(&client, &pod.request(None)).await.unwrap();
                start(&client, "p").await.unwrap();
                let container = Container::new("c", TRAPS, |_| ());
                let late = Container::new("late", "exec sleep 1000", |_| ());
                container.run(&client).await;
                container.says("ready");
                let ended = {
                    let (client, request) = (client.clone(), container.wait_request());
                    tokio::spawn(async move { client.task().wait(soon(), &request).await })
                };
                tokio::time::sleep(Duration::from_millis(100)).await;
                signal(pod.pid, Signal::SIGTERM);
                said(&container, "asked").await;
                signal(pod.pid, Signal::SIGTERM);
                let answer = client.task().create(soon(), &late.request()).await;
                assert!(answer.is_err(), "{answer:?}");
                assert!(start(&client, "p").await.is_err());
                signal(pod.pid, Signal::SIGTERM);
                let code = ended.await.unwrap().unwrap().exit_status;
                assert_eq!(code, 7, "its grace was whole");
                assert!(container.printed("").ends_with("done\n"));
                pod.left();
                assert_eq!((net.count("ADD"), net.count("DEL")), (1, 1));
            });
            before.assert_unchanged();
        },
    );
}

/// A container with all the time in the world, and somebody in a hurry.
#[test]
fn a_kill_or_a_shutdown_shortens_a_stop_under_way() {
    sandboxed(
        "stopping::a_kill_or_a_shutdown_shortens_a_stop_under_way",
        || {
            let before = Snapshot::take();
            on(async {
                for hurry in ["kill", "shutdown", "stop"] {
                    let pod = Pod::launch(&format!("p-{hurry}"));
                    let client = pod.connect().await;
                    pod.up(&client, &config(hurry)).await;
                    let script = "trap 'echo asked' TERM; echo ready; while :; do sleep 0.1; done";
                    let container = Container::new(hurry, script, |_| ());
                    container.run(&client).await;
                    container.says("ready");
                    let begun = Instant::now();
                    let stopping = {
                        let (client, id) = (pod.connect().await, pod.id.clone());
                        tokio::spawn(async move { stop(&client, &id, 600).await })
                    };
                    said(&container, "asked").await;
                    match hurry {
                        "kill" => container.kill(&client, 9).await,
                        "shutdown" => shutdown(&client, &pod.id).await.unwrap(),
                        _ => stop(&client, &pod.id, 1).await.unwrap(),
                    }
                    stopping.await.unwrap().unwrap();
                    assert!(begun.elapsed() < BOUND, "{hurry}: {:?}", begun.elapsed());
                    if hurry != "shutdown" {
                        pod.shut(&client).await;
                    }
                    pod.left();
                }
            });
            before.assert_unchanged();
        },
    );
}

/// FL-055: somebody kills all that is in the pod's group, behind the supervisor's back.
#[test]
fn a_pod_whose_processes_were_all_killed_from_outside_is_taken_down() {
    sandboxed(
        "stopping::a_pod_whose_processes_were_all_killed_from_outside_is_taken_down",
        || {
            cni::network("net", vec![json!({"type": "fake"})]).write();
            let net = fake::plugin(Path::new(cni::PLUGINS), "fake");
            let before = Snapshot::take();
            on(async {
                let pod = Pod::launch("p");
                let client = pod.connect().await;
                create(&client, &pod.request(None)).await.unwrap();
                let infra = start(&client, "p").await.unwrap().pid.cast_signed();
                let layout = Layout::detect().unwrap();
                let above = Group::of_process(&layout, infra).unwrap();
                let above = above.path().rsplit_once('/').unwrap().0.to_owned();
                let container = Container::new("c", "sleep 1000 & exec sleep 1000", |spec| {
                    spec["linux"]["cgroupsPath"] = json!(format!("{above}/c"));
                });
                container.run(&client).await;
                let waiting = {
                    let client = pod.connect().await;
                    tokio::spawn(async move { wait(&client, "p").await })
                };
                tokio::time::sleep(Duration::from_millis(100)).await;
                let begun = Instant::now();
                let group = Group::new(&layout, &above).unwrap();
                assert!(group.pids().contains(&infra) && group.pids().len() >= 3);
                group.kill_all(BOUND).await.unwrap();
                assert_eq!(waiting.await.unwrap().unwrap().exit_status, 137);
                println!(
                    "WaitSandbox answers {:?} after the kill began",
                    begun.elapsed()
                );
                assert_eq!(
                    status(&client, "p").await.unwrap().state,
                    "SANDBOX_NOTREADY"
                );
                assert_eq!(container.wait(&client, "").await.unwrap(), 137);
                eventually(BOUND, "its network is given back", || {
                    (net.count("DEL") == 1).then_some(())
                });
                stop(&client, "p", 1).await.unwrap();
                pod.shut(&client).await;
                assert_eq!((net.count("ADD"), net.count("DEL")), (1, 1));
            });
            before.assert_unchanged();
        },
    );
}

/// The first one's supervisor is dead, so a second sandbox of the pod is made: both are there, each with its own end.
#[test]
fn two_records_of_one_pod_key_are_listed_and_removed_one_by_one() {
    sandboxed(
        "stopping::two_records_of_one_pod_key_are_listed_and_removed_one_by_one",
        || {
            cni::network("net", vec![json!({"type": "fake"})]).write();
            let net = fake::plugin(Path::new(cni::PLUGINS), "fake");
            let before = Snapshot::take();
            on(async {
                let mut of_both = config("web");
                of_both.annotations.clear();
                let first = Pod::launch("p1");
                let client = first.connect().await;
                let old = first.up(&client, &of_both).await;
                signal(first.pid, Signal::SIGKILL);
                let second = Pod::launch("p2");
                let client = second.connect().await;
                second.up(&client, &of_both).await;
                let command = |args: &[&str]| podvisor(&[&["--namespace", "test"], args].concat());
                let listed = command(&["ps", "-a"]).ok().stdout;
                let of = |state: &str| {
                    listed
                        .lines()
                        .filter(|l| l.contains("web") && l.contains(state))
                        .count()
                };
                assert_eq!((of("dead"), of("ready")), (1, 1), "{listed}");
                // By the name alone nobody knows which.
                command(&["inspect", "web"]).fails_with("p1");
                command(&["rm", "-f", "p1"]).ok();
                assert!(!is_there(old));
                assert_eq!(status(&client, "p2").await.unwrap().state, "SANDBOX_READY");
                command(&["inspect", "web"]).ok();
                stop(&client, "p2", 1).await.unwrap();
                second.shut(&client).await;
                assert_eq!(net.count("ADD"), net.count("DEL"));
            });
            before.assert_unchanged();
        },
    );
}
