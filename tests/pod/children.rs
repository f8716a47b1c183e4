//! The supervisor as a parent: it sleeps while nothing happens, and reaps whatever is given to it.

use std::fs;
use std::path::Path;
use std::time::Duration;

use nix::sys::signal::Signal;
use nix::sys::stat::Mode;
use ttrpc::Code;

use crate::daemon::signal;
use crate::kit::*;
use crate::support::fake::{self, Act};
use crate::support::{Snapshot, eventually, require, sandboxed, slow};

/// FL-064: a stopped child must not keep the supervisor awake.
#[test]
fn an_idle_pod_with_a_stopped_child_sleeps() {
    sandboxed("children::an_idle_pod_with_a_stopped_child_sleeps", || {
        let before = Snapshot::take();
        on(async {
            let pod = Pod::launch("idle");
            let client = pod.connect().await;
            pod.up(&client, &config("idle")).await;
            let container = Container::new("c", "exec sleep 1000", |_| ());
            let child = container.run(&client).await;
            signal(child, Signal::SIGSTOP);
            // Threads that ran the runtime and the mounts go back to sleep.
            tokio::time::sleep(Duration::from_millis(700)).await;
            let (ticks, wakes) = (cpu_ticks(pod.pid), wake_ups(pod.pid));
            tokio::time::sleep(Duration::from_secs(if slow() { 30 } else { 3 })).await;
            let (ticks, wakes) = (cpu_ticks(pod.pid) - ticks, wake_ups(pod.pid) - wakes);
            // A spinning loop takes all of the time and wakes thousands of times.
            assert!(ticks <= 5, "{ticks} ticks of processor time");
            assert!(wakes <= 20, "{wakes} wake-ups");
            container.remove(&client).await;
            pod.shut(&client).await;
        });
        before.assert_unchanged();
    });
}

/// FL-065: nobody waits for a standard input whose writer does not close it.
#[test]
fn a_stdin_whose_writer_stays_open_does_not_keep_the_supervisor() {
    sandboxed(
        "children::a_stdin_whose_writer_stays_open_does_not_keep_the_supervisor",
        || {
            let before = Snapshot::take();
            on(async {
                let pod = Pod::launch("c");
                let client = pod.connect().await;
                let container = Container::new("c", "exec sleep 1000", |_| ());
                container.run(&client).await;
                let fifo = container.dir.join("in");
                nix::unistd::mkfifo(&fifo, Mode::S_IRWXU).unwrap();
                container
                    .exec(&client, "e", "exec cat", fifo.to_str().unwrap())
                    .await;
                // For reading, too: opening does not wait for the other side.
                let writer = fs::File::options()
                    .read(true)
                    .write(true)
                    .open(&fifo)
                    .unwrap();
                container.start(&client, "e").await;
                std::io::Write::write_all(&mut &writer, b"hello\n").unwrap();
                eventually(BOUND, "cat prints", || {
                    (container.printed("e") == "hello\n").then_some(())
                });
                container.kill(&client, 9).await;
                assert_eq!(container.wait(&client, "").await.unwrap(), 137);
                assert_eq!(container.wait(&client, "e").await.unwrap(), 137);
                container.delete(&client, "e").await.unwrap();
                container.delete(&client, "").await.unwrap();
                shutdown_task(&client, "c").await.unwrap();
                pod.left();
                drop(writer);
            });
            before.assert_unchanged();
        },
    );
}

/// FL-065: while the pod is stopped after SIGTERM its children are reaped and their exits are told.
#[test]
fn children_that_end_after_a_sigterm_are_reaped_and_told() {
    sandboxed(
        "children::children_that_end_after_a_sigterm_are_reaped_and_told",
        || {
            let before = Snapshot::take();
            on(async {
                let pod = Pod::launch("c");
                let client = pod.connect().await;
                let script = "trap 'sleep 1; exit 7' TERM; echo ready; while :; do sleep 0.1; done";
                let container = Container::new("c", script, |_| ());
                container.run(&client).await;
                container.says("ready");
                container.exec(&client, "e", "sleep 0.5; exit 5", "").await;
                container.start(&client, "e").await;
                signal(pod.pid, Signal::SIGTERM);
                let (init, exec) =
                    tokio::join!(container.wait(&client, ""), container.wait(&client, "e"));
                assert_eq!((init.unwrap(), exec.unwrap()), (7, 5));
                pod.left();
            });
            before.assert_unchanged();
        },
    );
}

/// FL-068: after a create that fails late there is no task, and the supervisor can be dismissed.
#[test]
fn a_create_that_fails_late_leaves_a_supervisor_that_answers_and_leaves() {
    sandboxed(
        "children::a_create_that_fails_late_leaves_a_supervisor_that_answers_and_leaves",
        || {
            let runc = require::find("runc").unwrap();
            let fake = fake::runtime_before(Path::new("/run/fake"), "late", &runc);
            let before = Snapshot::take();
            on(async {
                let pod = Pod::launch("c");
                let client = pod.connect().await;
                let container = Container::new("c", "exec sleep 1000", |_| ());
                let go = Path::new("/run/go");
                fake.on(
                    "CREATE",
                    &[Act::WaitFor(go.into()), Act::AfterReal, Act::Exit(1)],
                );
                let creating = {
                    let (client, request) = (client.clone(), container.request_of(&fake.path));
                    tokio::spawn(async move { client.task().create(soon(), &request).await })
                };
                while fake.count("CREATE") == 0 {
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
                // While it is being created, and after it failed.
                assert_eq!(code(container.state(&client).await).0, Code::NOT_FOUND);
                fs::write(go, "").unwrap();
                let (_, text) = code(creating.await.unwrap());
                assert!(text.contains("create container c"), "{text}");
                assert_eq!(code(container.state(&client).await).0, Code::NOT_FOUND);
                assert_eq!(code(container.delete(&client, "").await).0, Code::NOT_FOUND);
                shutdown_task(&client, "c").await.unwrap();
                pod.left();
            });
            fs::remove_file("/run/go").unwrap();
            before.assert_unchanged();
        },
    );
}

/// FL-068: the same for a pod whose container could not be made.
#[test]
fn a_pod_whose_container_fails_late_stops_and_shuts_down() {
    sandboxed(
        "children::a_pod_whose_container_fails_late_stops_and_shuts_down",
        || {
            let runc = require::find("runc").unwrap();
            let fake = fake::runtime_before(Path::new("/run/fake"), "late", &runc);
            fake.on("CREATE", &[Act::AfterReal, Act::Exit(1)]);
            let before = Snapshot::take();
            on(async {
                let pod = Pod::launch("p");
                let client = pod.connect().await;
                pod.up(&client, &config("p")).await;
                let container = Container::new("c", "exec sleep 1000", |_| ());
                let request = container.request_of(&fake.path);
                client.task().create(soon(), &request).await.unwrap_err();
                assert_eq!(code(container.state(&client).await).0, Code::NOT_FOUND);
                assert_eq!(
                    status(&client, "p").await.unwrap().state,
                    "SANDBOX_READY",
                    "the pod is as it was"
                );
                stop(&client, "p", 0).await.unwrap();
                pod.shut(&client).await;
            });
            before.assert_unchanged();
        },
    );
}

/// FL-069: what a workload in a shared pid namespace abandons is the supervisor's, and is reaped.
#[test]
fn a_hundred_adopted_orphans_leave_no_zombie() {
    sandboxed(
        "children::a_hundred_adopted_orphans_leave_no_zombie",
        || {
            let before = Snapshot::take();
            on(async {
                let pod = Pod::launch("c");
                let client = pod.connect().await;
                let script =
                    "for i in $(seq 100); do (sleep 1 &); done; echo forked; exec sleep 1000";
                let container = Container::new("c", script, without(&["pid"]));
                let init = container.run(&client).await;
                container.says("forked");
                let adopted = || {
                    children(pod.pid)
                        .into_iter()
                        .filter(|(pid, _)| *pid != init)
                        .collect::<Vec<_>>()
                };
                eventually(BOUND, "they are adopted", || {
                    (!adopted().is_empty()).then_some(())
                });
                eventually(BOUND, "they are reaped", || {
                    adopted().is_empty().then_some(())
                });
                assert!(Path::new(&format!("/proc/{init}")).exists());
                container.remove(&client).await;
                shutdown_task(&client, "c").await.unwrap();
                pod.left();
            });
            before.assert_unchanged();
        },
    );
}

/// Pid and state of the children of `parent`.
fn children(parent: i32) -> Vec<(i32, char)> {
    let pids = fs::read_dir("/proc")
        .unwrap()
        .flatten()
        .filter_map(|e| e.file_name().to_str()?.parse::<i32>().ok());
    pids.filter_map(|pid| {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        let mut fields = stat.rsplit(')').next()?.split_whitespace();
        let state = fields.next()?.chars().next()?;
        (fields.next()? == parent.to_string()).then_some((pid, state))
    })
    .collect()
}

/// Times that any of its threads went to sleep of its own will.
fn wake_ups(pid: i32) -> u64 {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).unwrap().flatten();
    threads
        .filter_map(|t| {
            let status = fs::read_to_string(t.path().join("status")).ok()?;
            let line = status
                .lines()
                .find_map(|l| l.strip_prefix("voluntary_ctxt_switches:"))?;
            line.trim().parse::<u64>().ok()
        })
        .sum()
}
