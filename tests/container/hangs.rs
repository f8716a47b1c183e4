//! An OCI runtime that hangs holds up nobody but the caller who asked for that verb.

use super::*;

#[test]
fn one_container_does_not_hold_up_another() {
    sandboxed("hangs::one_container_does_not_hold_up_another", || {
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
    sandboxed(
        "hangs::queries_answer_while_the_runtimes_kill_hangs",
        || {
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
        },
    );
}

#[test]
fn a_pod_is_stopped_while_every_verb_hangs() {
    sandboxed("hangs::a_pod_is_stopped_while_every_verb_hangs", || {
        for verb in ["create", "start", "exec", "pause", "kill"] {
            supervise(async || {
                let kit = Kit::new(&wrapper(&format!("[ $verb != {verb} ] || exec sleep 1000")));
                let (containers, request) = (
                    kit.containers.clone(),
                    kit.request("c", "sleep 1000", |_| ()),
                );
                let hanging = tokio::spawn(async move {
                    containers.create(request).await?;
                    containers.start("c", "").await?;
                    let process =
                        json!({"user": {"uid": 0, "gid": 0}, "args": ["/bin/true"], "cwd": "/"})
                            .to_string();
                    containers
                        .exec("c", "e", false, "", "", "", process.as_bytes())
                        .await?;
                    containers.start("c", "e").await?;
                    containers.pause("c").await?;
                    containers.resume("c").await?;
                    containers.kill("c", "", 15, false).await
                });
                sleep(Duration::from_millis(1500)).await;
                assert!(!hanging.is_finished(), "{verb}");
                timeout(
                    BOUND,
                    kit.containers.stop_all(Duration::from_millis(200), true),
                )
                .await
                .expect(verb)
                .unwrap();
                let error = timeout(BOUND, hanging)
                    .await
                    .expect(verb)
                    .unwrap()
                    .unwrap_err();
                assert!(
                    matches!(error.kind(), Kind::Cancelled | Kind::NotFound),
                    "{verb}: {error:?}"
                );
                kit.assert_gone("c");
            });
        }
    });
}
