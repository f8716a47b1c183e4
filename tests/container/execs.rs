//! Execs, and the order of exits.

use super::*;

#[test]
fn an_exec_has_its_own_exit_and_output() {
    each_runtime("execs::an_exec_has_its_own_exit_and_output", async |kit| {
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
        "execs::a_failed_exec_stays_created_and_leaves_nothing",
        async |kit| {
            kit.run("c", "sleep 1000").await;
            let before = own_fds();
            for _ in 0..5 {
                let process =
                    json!({"user": {"uid": 0, "gid": 0}, "args": ["/no/such"], "env": ["PATH=/bin"], "cwd": "/"})
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
            unchanged(&before).await;
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
fn inits_exit_is_the_last_where_the_pid_namespace_is_shared() {
    each_runtime(
        "execs::inits_exit_is_the_last_where_the_pid_namespace_is_shared",
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
        "execs::inits_exit_comes_after_many_execs_that_start_meanwhile",
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
