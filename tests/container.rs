//! Containers for real: `Containers` over runc and crun, each test on a machine of its own.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

#[path = "container/kit.rs"]
mod kit;
mod support;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::Duration;

use kit::{BOUND, Kit, supervise};
use podvisor::container::{CreateRequest, Status};
use podvisor::error::Kind;
use serde_json::json;
use support::{Scope, Snapshot, require, sandboxed};
use tokio::time::{sleep, timeout};

/// Runs `body` in a sandbox with every OCI runtime that is there.
fn each_runtime<F: Future<Output = ()>>(name: &str, body: impl Fn(Kit) -> F) {
    sandboxed(name, || {
        for runtime in ["runc", "crun"] {
            if require::tool(runtime) {
                supervise(async || body(Kit::new(runtime)).await);
            }
        }
    });
}

/// A wrapper around runc that does `script` first (`$verb` is the verb).
fn wrapper(script: &str) -> String {
    let path = Path::new("/run/wrapper");
    let text = format!(
        "#!/bin/sh\nfor verb; do case $verb in create|start|kill|delete|exec|pause|resume) break;; esac; done\n{script}\nexec runc \"$@\"\n"
    );
    fs::write(path, text).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
    path.display().to_string()
}

fn own_fds() -> Snapshot {
    Scope::default()
        .fds_of(i32::try_from(std::process::id()).unwrap())
        .allow("cgroup")
        .take()
}

#[test]
fn fast_exits_are_all_seen() {
    each_runtime("fast_exits_are_all_seen", async |kit| {
        for round in 0..50 {
            let id = format!("c{round}");
            let pid = kit
                .containers
                .create(kit.request(&id, "exit 7", |_| ()))
                .await
                .unwrap();
            let early = {
                let (containers, id) = (kit.containers.clone(), id.clone());
                tokio::spawn(async move { containers.wait(&id, "").await })
            };
            tokio::task::yield_now().await;
            let before = std::time::SystemTime::now();
            assert_eq!(kit.containers.start(&id, "").await.unwrap(), pid);
            let (code, at) = timeout(BOUND, early).await.unwrap().unwrap().unwrap();
            assert_eq!(code, 7);
            assert!(at > before);
            assert_eq!(kit.code(&id, "").await, 7, "again, afterwards");
            let state = kit.containers.state(&id, "").unwrap();
            assert_eq!(
                (state.status, state.pid, state.exit),
                (Status::Stopped, pid, Some((7, at)))
            );
            assert_eq!(kit.book.get(&id).unwrap().exit.map(|e| e.code), Some(7));
            assert_eq!(kit.containers.delete(&id, "").await.unwrap(), (pid, 7, at));
            assert_eq!(
                kit.containers.delete(&id, "").await.unwrap_err().kind(),
                Kind::NotFound
            );
            assert_eq!(
                kit.containers.wait(&id, "").await.unwrap_err().kind(),
                Kind::NotFound
            );
            let events = [
                "create".into(),
                "start".into(),
                format!("exit {id}/{id} 7"),
                format!("delete {id} 7"),
            ];
            assert_eq!(kit.log.take(), events);
            kit.assert_gone(&id);
        }
    });
}

#[test]
fn an_exec_has_its_own_exit_and_output() {
    each_runtime("an_exec_has_its_own_exit_and_output", async |kit| {
        kit.run("c", "sleep 1000").await;
        kit.exec("c", "e", "echo hello; exit 3").await.unwrap();
        assert_eq!(
            kit.exec("c", "e", "true").await.unwrap_err().kind(),
            Kind::Exists
        );
        assert_eq!(
            kit.containers
                .kill("c", "e", 9, false)
                .await
                .unwrap_err()
                .kind(),
            Kind::State
        );
        let state = kit.containers.state("c", "e").unwrap();
        assert_eq!((state.status, state.pid), (Status::Created, 0));
        let pid = kit.containers.start("c", "e").await.unwrap();
        assert_eq!(kit.code("c", "e").await, 3);
        assert_eq!(
            kit.containers
                .kill("c", "e", 9, false)
                .await
                .unwrap_err()
                .kind(),
            Kind::NotFound
        );
        let (deleted, code, _) = kit.containers.delete("c", "e").await.unwrap();
        assert_eq!((deleted, code), (pid, 3));
        assert_eq!(kit.exec_output("c", "e"), "hello\n");
        assert_eq!(
            kit.log.take(),
            [
                "create",
                "start",
                "exec-added",
                "exec-started",
                "exit c/e 3"
            ]
        );

        // A running one: listed, killed, not deleted before.
        kit.exec("c", "long", "sleep 1000").await.unwrap();
        let pid = kit.containers.start("c", "long").await.unwrap();
        assert!(
            kit.containers
                .pids("c")
                .await
                .unwrap()
                .contains(&(pid, "long".into()))
        );
        assert_eq!(
            kit.containers.delete("c", "long").await.unwrap_err().kind(),
            Kind::State
        );
        kit.containers.kill("c", "long", 15, false).await.unwrap();
        assert_eq!(kit.code("c", "long").await, 143);
        kit.containers.stop_all(Duration::ZERO, true).await.unwrap();
        kit.assert_gone("c");
    });
}

#[test]
fn a_failed_exec_stays_created_and_leaves_nothing() {
    each_runtime(
        "a_failed_exec_stays_created_and_leaves_nothing",
        async |kit| {
            kit.run("c", "sleep 1000").await;
            let before = own_fds();
            for _ in 0..5 {
                let process =
                    json!({"user": {"uid": 0, "gid": 0}, "args": ["/no/such"], "cwd": "/"})
                        .to_string();
                kit.containers
                    .exec("c", "e", false, "", "", "", process.as_bytes())
                    .await
                    .unwrap();
                let error = kit.containers.start("c", "e").await.unwrap_err();
                assert!(error.to_string().contains("/no/such"), "{error}");
                assert_eq!(
                    kit.containers.state("c", "e").unwrap().status,
                    Status::Created
                );
                let (pid, code, _) = kit.containers.delete("c", "e").await.unwrap();
                assert_eq!((pid, code), (0, 0));
            }
            before.assert_unchanged();
            assert!(
                !kit.log
                    .take()
                    .iter()
                    .any(|e| e.starts_with("exit") || e == "exec-started")
            );
            kit.exec("c", "e", "exit 4").await.unwrap();
            kit.containers.start("c", "e").await.unwrap();
            assert_eq!(kit.code("c", "e").await, 4);
            kit.containers.stop_all(Duration::ZERO, true).await.unwrap();
        },
    );
}

#[test]
fn a_killed_container_says_137_and_then_is_not_there_to_be_killed() {
    each_runtime(
        "a_killed_container_says_137_and_then_is_not_there_to_be_killed",
        async |kit| {
            let pid = kit.run("c", "sleep 1000").await;
            assert_eq!(
                kit.containers.delete("c", "").await.unwrap_err().kind(),
                Kind::State
            );
            assert_eq!(
                kit.containers
                    .create(kit.request("c", "true", |_| ()))
                    .await
                    .unwrap_err()
                    .kind(),
                Kind::Exists
            );
            assert!(
                kit.containers
                    .pids("c")
                    .await
                    .unwrap()
                    .contains(&(pid, String::new()))
            );
            kit.containers.stats("c").unwrap();
            kit.containers.kill("c", "", 9, false).await.unwrap();
            assert_eq!(kit.code("c", "").await, 137);
            for all in [false, true] {
                assert_eq!(
                    kit.containers
                        .kill("c", "", 9, all)
                        .await
                        .unwrap_err()
                        .kind(),
                    Kind::NotFound
                );
            }
            kit.exec("c", "late", "true")
                .await
                .map_err(|e| assert_eq!(e.kind(), Kind::State))
                .unwrap_err();
            assert_eq!(
                kit.containers.pids("c").await.unwrap(),
                [(pid, String::new())],
                "until it is deleted"
            );
            assert_eq!(kit.containers.delete("c", "").await.unwrap().1, 137);
            assert_eq!(
                kit.log.take(),
                ["create", "start", "exit c/c 137", "delete c 137"]
            );
            kit.assert_gone("c");
        },
    );
}

#[test]
fn a_container_that_was_never_started_is_deletable() {
    each_runtime(
        "a_container_that_was_never_started_is_deletable",
        async |kit| {
            kit.containers
                .create(kit.request("c", "true", |_| ()))
                .await
                .unwrap();
            kit.exec("c", "e", "true").await.unwrap();
            kit.containers.delete("c", "").await.unwrap();
            assert_eq!(
                kit.log.take(),
                ["create", "exec-added", "exit c/c 137", "delete c 137"]
            );
            kit.assert_gone("c");

            // Ended between create and start (somebody else killed it): stopped, and nothing starts it.
            let pid = kit
                .containers
                .create(kit.request("d", "true", |_| ()))
                .await
                .unwrap();
            podvisor::process::Identity::of(i32::try_from(pid).unwrap())
                .unwrap()
                .signal(9)
                .unwrap();
            assert_eq!(kit.code("d", "").await, 137);
            assert_eq!(
                kit.containers.start("d", "").await.unwrap_err().kind(),
                Kind::State
            );
            kit.containers.delete("d", "").await.unwrap();
            assert_eq!(kit.log.take(), ["create", "exit d/d 137", "delete d 137"]);
        },
    );
}

#[test]
fn a_failed_create_leaves_nothing_and_the_id_is_free() {
    each_runtime(
        "a_failed_create_leaves_nothing_and_the_id_is_free",
        async |kit| {
            kit.run("other", "sleep 1000").await;
            kit.log.take();
            let before = own_fds();
            let refused = async |what: &str, request: CreateRequest| {
                let error = kit.containers.create(request).await.expect_err(what);
                assert!(
                    !matches!(error.kind(), Kind::NotFound | Kind::Exists),
                    "{what}: {error:?}"
                );
                assert_eq!(
                    kit.containers.state("c", "").unwrap_err().kind(),
                    Kind::NotFound,
                    "{what}"
                );
                assert_eq!(kit.containers.list(), ["other"], "{what}");
                kit.assert_gone("c");
                error.to_string()
            };
            let good = || kit.request("c", "exit 7", |_| ());
            let text = refused(
                "command",
                kit.request("c", "", |s| s["process"]["args"] = json!(["/no/such"])),
            )
            .await;
            assert!(text.contains("/no/such"), "{text}");
            let mut request = good();
            request.rootfs[0].source = "/no/such/rootfs".into();
            refused("rootfs", request).await;
            let mut request = good();
            request.options.binary = "no-runc".into();
            let text = refused("runtime", request).await;
            assert!(text.contains("\"no-runc\""), "{text}");
            refused(
                "terminal",
                CreateRequest {
                    terminal: true,
                    ..good()
                },
            )
            .await;
            refused(
                "checkpoint",
                CreateRequest {
                    checkpoint: "/x".into(),
                    ..good()
                },
            )
            .await;
            refused(
                "stdio",
                CreateRequest {
                    stdout: "nope:///x".into(),
                    ..good()
                },
            )
            .await;
            refused(
                "namespace",
                kit.request("c", "true", |s| {
                    s["linux"]["namespaces"][0]["path"] = json!("/no/ns")
                }),
            )
            .await;
            for id in ["..", "a/b", "-rf", "", "a\nb"] {
                refused(
                    id,
                    CreateRequest {
                        id: id.into(),
                        ..good()
                    },
                )
                .await;
            }
            let request = good();
            fs::write(kit.bundle("c").join("config.json"), "{\"process\":").unwrap();
            refused("half a spec", request.clone()).await;
            fs::remove_file(kit.bundle("c").join("config.json")).unwrap();
            refused("no spec", request).await;
            assert!(kit.log.take().is_empty(), "nothing was announced");
            before.assert_unchanged();

            kit.run("c", "exit 7").await;
            assert_eq!(kit.code("c", "").await, 7);
            kit.containers.stop_all(Duration::ZERO, true).await.unwrap();
        },
    );
}

#[test]
fn one_container_does_not_hold_up_another() {
    sandboxed("one_container_does_not_hold_up_another", || {
        supervise(async || {
            let kit = Kit::new("runc");
            let pid = kit.run("a", "sleep 1000").await;
            let mut slow = kit.request("b", "true", |_| ());
            slow.options.binary = wrapper("[ $verb != create ] || sleep 1000");
            let creating = {
                let containers = kit.containers.clone();
                tokio::spawn(async move { containers.create(slow).await })
            };
            sleep(Duration::from_millis(300)).await;
            assert_eq!(
                kit.containers.state("b", "").unwrap_err().kind(),
                Kind::NotFound
            );
            assert_eq!(kit.containers.list(), ["a", "b"]);
            assert_eq!(kit.containers.state("a", "").unwrap().pid, pid);
            kit.exec("a", "e", "exit 5").await.unwrap();
            kit.containers.start("a", "e").await.unwrap();
            assert_eq!(kit.code("a", "e").await, 5);
            // Stopping the pod does not wait for the hanging create either.
            kit.containers.stop_all(Duration::ZERO, true).await.unwrap();
            assert_eq!(
                timeout(BOUND, creating)
                    .await
                    .unwrap()
                    .unwrap()
                    .unwrap_err()
                    .kind(),
                Kind::Cancelled
            );
            kit.assert_gone("a");
            kit.assert_gone("b");
            assert!(kit.containers.list().is_empty());
        });
    });
}

#[test]
fn queries_answer_while_the_runtimes_kill_hangs() {
    sandboxed("queries_answer_while_the_runtimes_kill_hangs", || {
        supervise(async || {
            let kit = Kit::new(&wrapper("[ $verb != kill ] || sleep 1000"));
            let pid = kit.run("c", "sleep 1000").await;
            let killing = {
                let containers = kit.containers.clone();
                tokio::spawn(async move { containers.kill("c", "", 15, false).await })
            };
            sleep(Duration::from_millis(300)).await;
            let answers = async {
                assert_eq!(
                    kit.containers.state("c", "").unwrap().status,
                    Status::Running
                );
                assert!(
                    kit.containers
                        .pids("c")
                        .await
                        .unwrap()
                        .iter()
                        .any(|(p, _)| *p == pid)
                );
                kit.containers.stats("c").unwrap();
                kit.exec("c", "e", "exit 2").await.unwrap();
                kit.containers.start("c", "e").await.unwrap();
                assert_eq!(kit.code("c", "e").await, 2);
            };
            timeout(Duration::from_secs(5), answers)
                .await
                .expect("answers while kill hangs");
            assert!(!killing.is_finished());
            // Nor does it keep the container alive.
            timeout(
                BOUND,
                kit.containers.stop_all(Duration::from_millis(100), true),
            )
            .await
            .unwrap()
            .unwrap();
            assert_eq!(killing.await.unwrap().unwrap_err().kind(), Kind::NotFound);
            kit.assert_gone("c");
        });
    });
}

#[test]
fn inits_exit_is_the_last_where_the_pid_namespace_is_shared() {
    each_runtime(
        "inits_exit_is_the_last_where_the_pid_namespace_is_shared",
        async |kit| {
            let script =
                "for i in $(seq 100); do (sleep 0.1 &) ; done; sleep 1000 & sleep 2; exit 7";
            let request = kit.request("c", script, |s| {
                s["linux"]["namespaces"].as_array_mut().unwrap().remove(0);
            });
            kit.containers.create(request).await.unwrap();
            kit.containers.start("c", "").await.unwrap();
            for exec in ["e1", "e2"] {
                kit.exec("c", exec, "sleep 1000").await.unwrap();
                kit.containers.start("c", exec).await.unwrap();
            }
            assert_eq!(kit.code("c", "").await, 7);
            let events = kit.log.take();
            assert_eq!(events.last().unwrap(), "exit c/c 7", "{events:?}");
            assert_eq!(
                events.iter().filter(|e| e.starts_with("exit")).count(),
                3,
                "{events:?}"
            );
            kit.containers.delete("c", "").await.unwrap();
            kit.assert_gone("c");
            // Everything it forked is ours to reap.
            let end = std::time::Instant::now() + Duration::from_secs(2);
            while zombies() > 0 {
                assert!(std::time::Instant::now() < end, "{} zombies", zombies());
                sleep(Duration::from_millis(50)).await;
            }
        },
    );
}

fn zombies() -> usize {
    let own = std::process::id().to_string();
    let is_ours = |stat: &str| {
        let rest: Vec<&str> = stat
            .rsplit_once(") ")
            .map_or("", |(_, r)| r)
            .split(' ')
            .collect();
        rest.first() == Some(&"Z") && rest.get(1) == Some(&own.as_str())
    };
    let stats = fs::read_dir("/proc")
        .unwrap()
        .flatten()
        .map(|e| e.path().join("stat"));
    stats
        .filter_map(|p| fs::read_to_string(p).ok())
        .filter(|s| is_ours(s))
        .count()
}

#[test]
fn inits_exit_comes_after_many_execs_that_start_meanwhile() {
    each_runtime(
        "inits_exit_comes_after_many_execs_that_start_meanwhile",
        async |kit| {
            kit.run("c", "sleep 1000").await;
            let mut starts = tokio::task::JoinSet::new();
            for i in 0..60 {
                kit.exec("c", &format!("e{i}"), "sleep 1000").await.unwrap();
                let containers = kit.containers.clone();
                starts.spawn(async move { containers.start("c", &format!("e{i}")).await });
            }
            sleep(Duration::from_millis(700)).await;
            kit.containers.kill("c", "", 9, false).await.unwrap();
            assert_eq!(kit.code("c", "").await, 137);
            let _ = starts.join_all().await;
            let events = kit.log.take();
            let count = |what: &str| events.iter().filter(|e| e.starts_with(what)).count();
            assert_eq!(events.last().unwrap(), "exit c/c 137", "{events:?}");
            assert_eq!(count("exit c/e"), count("exec-started"), "{events:?}");
            assert_eq!(count("exit c/c"), 1);
            kit.containers.delete("c", "").await.unwrap();
            kit.assert_gone("c");
        },
    );
}

#[test]
fn a_paused_container_is_resumed_or_stopped() {
    each_runtime("a_paused_container_is_resumed_or_stopped", async |kit| {
        kit.run("c", "sleep 1000").await;
        assert_eq!(
            kit.containers.resume("c").await.unwrap_err().kind(),
            Kind::State
        );
        kit.containers.pause("c").await.unwrap();
        assert_eq!(
            kit.containers.state("c", "").unwrap().status,
            Status::Paused
        );
        assert_eq!(
            kit.exec("c", "e", "true").await.unwrap_err().kind(),
            Kind::State
        );
        assert_eq!(
            kit.containers.delete("c", "").await.unwrap_err().kind(),
            Kind::State
        );
        kit.containers.resume("c").await.unwrap();
        assert_eq!(
            kit.containers.state("c", "").unwrap().status,
            Status::Running
        );
        kit.containers.pause("c").await.unwrap();
        kit.containers
            .stop_all(Duration::from_secs(1), true)
            .await
            .unwrap();
        let events = kit.log.take();
        assert_eq!(events[2..5], ["paused", "resumed", "paused"]);
        assert_eq!(events.last().unwrap(), "delete c 137");
        kit.assert_gone("c");
    });
}

#[test]
fn stopping_asks_first_and_uses_the_images_signal() {
    each_runtime(
        "stopping_asks_first_and_uses_the_images_signal",
        async |kit| {
            kit.run(
                "polite",
                "trap 'exit 4' TERM; touch /run/polite; while :; do sleep 0.05; done",
            )
            .await;
            let quit = kit.request(
                "image",
                "trap 'exit 5' QUIT; touch /run/image; while :; do sleep 0.05; done",
                |s| {
                    s["annotations"] = json!({"org.opencontainers.image.stopSignal": "SIGQUIT"});
                },
            );
            kit.containers.create(quit).await.unwrap();
            kit.containers.start("image", "").await.unwrap();
            kit.run(
                "deaf",
                "trap '' TERM; touch /run/deaf; while :; do sleep 0.05; done",
            )
            .await;
            for id in ["polite", "image", "deaf"] {
                // The trap is set.
                while !kit.rootfs.path().join("run").join(id).exists() {
                    sleep(Duration::from_millis(20)).await;
                }
            }
            kit.containers
                .stop_all(Duration::from_secs(2), false)
                .await
                .unwrap();
            for (id, code) in [("polite", 4), ("image", 5), ("deaf", 137)] {
                assert_eq!(kit.code(id, "").await, code, "{id}");
            }
            kit.containers
                .stop_all(Duration::from_secs(2), true)
                .await
                .unwrap();
            assert!(kit.containers.list().is_empty());
        },
    );
}

#[test]
fn undo_ends_a_running_container_from_its_record_and_twice() {
    each_runtime(
        "undo_ends_a_running_container_from_its_record_and_twice",
        async |kit| {
            kit.run("c", "sleep 1000").await;
            kit.exec("c", "e", "sleep 1000").await.unwrap();
            kit.containers.start("c", "e").await.unwrap();
            let record = kit.book.get("c").unwrap();
            let stored = serde_json::to_string(&record).unwrap();
            let record = serde_json::from_str(&stored).unwrap();
            kit.undo(&record).await;
            kit.assert_undone("c");
            kit.undo(&record).await;
            assert_eq!(kit.code("c", "").await, 137, "who waits hears of it");

            // A runtime that is gone, and a bundle that is gone, keep nothing alive.
            kit.run("d", "sleep 1000").await;
            let mut record = kit.book.get("d").unwrap();
            record.runtime = "/no/such/runc".into();
            kit.undo(&record).await;
            kit.assert_undone("d");
            fs::remove_dir_all(kit.bundle("d")).unwrap();
            kit.undo(&record).await;
        },
    );
}

const CRASHER: &str = "a_supervisor_that_is_killed";

/// Not a test: the supervisor that the next one kills.
#[test]
#[ignore = "run by undo_ends_what_a_killed_supervisor_left"]
fn a_supervisor_that_is_killed() {
    let Some(dir) = std::env::var_os("CRASH_DIR") else {
        return;
    };
    supervise(async || {
        let runtime = std::env::var("CRASH_RUNTIME").unwrap();
        let kit = Kit::new(&runtime);
        let request = kit.request("c", "sleep 1000", |_| ());
        let watch = async {
            loop {
                if let Some(record) = kit.book.get("c") {
                    let file = Path::new(&dir).join("record");
                    let temp = Path::new(&dir).join("temp");
                    fs::write(&temp, serde_json::to_string(&record).unwrap()).unwrap();
                    fs::rename(temp, file).unwrap();
                }
                sleep(Duration::from_millis(5)).await;
            }
        };
        let work = async {
            kit.containers.create(request).await.unwrap();
            kit.containers.start("c", "").await.unwrap();
        };
        tokio::join!(work, watch);
    });
}

#[test]
fn undo_ends_what_a_killed_supervisor_left() {
    sandboxed("undo_ends_what_a_killed_supervisor_left", || {
        // Killed while it runs, and with the create in mid-flight: after runc made it, before we heard of it.
        let late = wrapper(
            "if [ $verb = create ]; then runc \"$@\"; touch /run/made; exec sleep 1000; fi",
        );
        for (runtime, wanted) in [("runc", Status::Running), (late.as_str(), Status::Creating)] {
            let before = Scope::default().allow("cgroup /sys/fs/cgroup").take();
            let dir = tempfile::tempdir_in("/run").unwrap();
            let mut child = std::process::Command::new(std::env::current_exe().unwrap())
                .args(["--exact", CRASHER, "--ignored", "--nocapture"])
                .env("CRASH_DIR", dir.path())
                .env("CRASH_RUNTIME", runtime)
                .stdout(std::process::Stdio::null())
                .spawn()
                .unwrap();
            let record = support::eventually(BOUND, "the state to kill it in", || {
                let text = fs::read_to_string(dir.path().join("record")).ok()?;
                let record: podvisor::container::ContainerRecord =
                    serde_json::from_str(&text).unwrap();
                let made = wanted != Status::Creating || Path::new("/run/made").exists();
                (record.status == wanted && made).then_some(record)
            });
            child.kill().unwrap();
            child.wait().unwrap();
            assert_eq!(record.init.is_some(), wanted == Status::Running);
            supervise(async || {
                let kit = Kit::new(runtime);
                kit.undo(&record).await;
                kit.undo(&record).await;
                assert!(!record.root.join("c").exists());
            });
            before.assert_unchanged();
            let _ = fs::remove_dir_all(record.bundle.parent().unwrap());
        }
    });
}
