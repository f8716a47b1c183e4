//! Containers for real: `Containers` over runc and crun, each test on a machine of its own.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::print_stdout,
    reason = "tests say what many rounds took"
)]

#[path = "container/execs.rs"]
mod execs;
#[path = "container/hangs.rs"]
mod hangs;
#[path = "container/kit.rs"]
mod kit;
#[path = "container/loggers.rs"]
mod loggers;
#[path = "container/memory.rs"]
mod memory;
#[path = "container/profiles.rs"]
mod profiles;
#[path = "container/races.rs"]
mod races;
#[path = "container/streams.rs"]
mod streams;
mod support;
#[path = "container/terminals.rs"]
mod terminals;
#[path = "container/undoing.rs"]
mod undoing;
#[path = "container/youki.rs"]
mod youki;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use kit::{BOUND, Kit, supervise};
use podvisor::container::{CreateRequest, PodContext, Status};
use podvisor::error::Kind;
use serde_json::json;
use support::{Scope, Snapshot, require, sandboxed, slow};
use tokio::time::{sleep, timeout};

/// Runs `body` in a sandbox with every OCI runtime that is there; when there is time, with youki too.
fn each_runtime<F: Future<Output = ()>>(name: &str, body: impl Fn(Kit) -> F) {
    sandboxed(name, || {
        let mut runtimes = vec!["runc".to_owned(), "crun".to_owned()];
        runtimes.retain(|runtime| require::tool(runtime));
        if slow() {
            let youki = require::youki();
            runtimes.extend(youki.map(|path| path.display().to_string()));
        }
        for runtime in runtimes {
            println!("--- {runtime}");
            supervise(async || body(Kit::new(&runtime)).await);
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
        // youki leaves one in its state directory for each exec, until the container goes.
        .allow("socket /run/pvtest-bundles-")
        .take()
}

/// Waits without stopping the runtime, whose reaper has work to do meanwhile.
async fn unchanged(before: &Snapshot) {
    for _ in 0..80 {
        if before.changes().is_empty() {
            return;
        }
        sleep(Duration::from_millis(100)).await;
    }
    before.assert_unchanged();
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
            unchanged(&before).await;

            kit.run("c", "exit 7").await;
            assert_eq!(kit.code("c", "").await, 7);
            kit.containers.stop_all(Duration::ZERO, true).await.unwrap();
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
fn a_container_joins_its_pod() {
    each_runtime("a_container_joins_its_pod", async |kit| {
        let mut command = std::process::Command::new("unshare");
        command.args(["-n", "-u", "-i", "sh", "-c"]);
        command.arg("echo pod >/proc/sys/kernel/hostname; exec sleep 1000");
        let holder = kit.reaper.spawn(command).unwrap();
        let ns = |kind: &str| PathBuf::from(format!("/proc/{}/ns/{kind}", holder.pid()));
        let own = |kind: &str| fs::read_link(format!("/proc/self/ns/{kind}")).unwrap();
        while ["net", "uts", "ipc"]
            .iter()
            .any(|k| fs::read_link(ns(k)).unwrap() == own(k))
        {
            sleep(Duration::from_millis(10)).await;
        }
        let hosts = kit.dir.path().join("hosts");
        fs::write(&hosts, "10.0.0.1 pod\n").unwrap();
        let script =
            "for n in net uts ipc; do readlink /proc/self/ns/$n; done; hostname; cat /etc/hosts";
        let mut request = kit.request("c", script, |s| s["hostname"] = json!("other"));
        request.pod = Some(PodContext {
            join: [
                ("network", "net"),
                ("uts", "uts"),
                ("ipc", "ipc"),
                ("mount", "mnt"),
            ]
            .map(|(kind, file)| (kind.to_owned(), ns(file)))
            .to_vec(),
            files: vec![(
                "/etc/hosts".into(),
                hosts,
                vec!["rbind".into(), "ro".into()],
            )],
        });
        kit.containers.create(request).await.unwrap();
        kit.containers.start("c", "").await.unwrap();
        assert_eq!(kit.code("c", "").await, 0);
        let links =
            ["net", "uts", "ipc"].map(|k| fs::read_link(ns(k)).unwrap().display().to_string());
        let out = fs::read_to_string(kit.bundle("c").join("out")).unwrap();
        assert_eq!(out, format!("{}\npod\n10.0.0.1 pod\n", links.join("\n")));
        kit.containers.delete("c", "").await.unwrap();
        kit.assert_gone("c");
        holder.signal(9).unwrap();
    });
}
