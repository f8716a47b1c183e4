//! The third OCI runtime: one life with youki, through every verb that we use of it.

use podvisor::proto::any;

use super::*;
use crate::support::eventually;

#[test]
#[ignore = "slow: youki has to be built first"]
fn slow_a_whole_life_with_youki() {
    sandboxed("youki::slow_a_whole_life_with_youki", || {
        let Some(youki) = require::youki() else {
            return;
        };
        supervise(async || whole_life(Kit::new(youki.to_str().unwrap())).await);
    });
}

async fn whole_life(kit: Kit) {
    let containers = &kit.containers;
    let missing = kit.request("bad", "", |spec| {
        spec["process"]["args"] = json!(["/no/such"])
    });
    // It finds out at the start what runc finds out at the create.
    if containers.create(missing).await.is_ok() {
        containers.start("bad", "").await.unwrap_err();
        containers.delete("bad", "").await.unwrap();
    }
    kit.assert_gone("bad");
    kit.log.take();

    let script = "echo hello; trap 'exit 5' TERM; while :; do sleep 0.05; done";
    let pid = kit.run("c", script).await;
    let out = kit.bundle("c").join("out");
    eventually(BOUND, "it prints", || {
        fs::read_to_string(&out)
            .ok()
            .filter(|text| text == "hello\n")
    });
    kit.exec("c", "e", "echo in; exit 3").await.unwrap();
    containers.start("c", "e").await.unwrap();
    assert_eq!(kit.code("c", "e").await, 3);
    assert_eq!(kit.exec_output("c", "e"), "in\n");
    containers.delete("c", "e").await.unwrap();
    kit.exec("c", "long", "sleep 1000").await.unwrap();
    let long = containers.start("c", "long").await.unwrap();
    let pids = containers.pids("c").await.unwrap();
    assert!(pids.iter().any(|(p, _)| *p == pid), "{pids:?}");
    assert!(pids.contains(&(long, "long".into())), "{pids:?}");
    containers.stats("c").unwrap();

    containers.pause("c").await.unwrap();
    assert_eq!(containers.state("c", "").unwrap().status, Status::Paused);
    containers.resume("c").await.unwrap();
    assert_eq!(containers.state("c", "").unwrap().status, Status::Running);
    let limit = json!({"memory": {"limit": 64 << 20}}).to_string();
    let limit = any::raw(any::OCI_RESOURCES, limit.into_bytes());
    containers.update("c", &limit).await.unwrap();
    assert_eq!(memory::limit_of("pv/c"), 64 << 20);

    containers.kill("c", "", 15, false).await.unwrap();
    assert_eq!(kit.code("c", "").await, 5);
    containers.delete("c", "").await.unwrap();
    let events = kit.log.take();
    let ends: Vec<_> = events.iter().rev().take(3).collect();
    assert_eq!(
        ends,
        ["delete c 5", "exit c/c 5", "exit c/long 137"],
        "{events:?}"
    );
    kit.assert_gone("c");

    // Killed before its start, and taken away while it runs.
    containers
        .create(kit.request("d", "sleep 1000", |_| ()))
        .await
        .unwrap();
    containers.delete("d", "").await.unwrap();
    assert_eq!(kit.log.take(), ["create", "exit d/d 137", "delete d 137"]);
    kit.run("f", "sleep 1000").await;
    containers.stop_all(Duration::ZERO, true).await.unwrap();
    kit.assert_gone("d");
    kit.assert_gone("f");
}
