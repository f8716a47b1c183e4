//! Checkpoint and restore for real, on a kernel where criu works: that of the lab, where `PODVISOR_CRIU` says that it has to.

use std::fs;
use std::process::Command;

use podvisor::client;
use podvisor::proto::any;
use podvisor::proto::runc_options::oci::CheckpointOptions;
use podvisor::proto::task_v3::shim as task;

use crate::kit::{BOUND, Shim, block_on, delete, kill, limit, run, start, wait};
use crate::support::{Snapshot, eventually, require, sandboxed};

const IMAGE: &str = "/run/image";

/// Whether it works here. How it is told where it does not is in `tests/task_io/checkpoint.rs`.
fn criu_works() -> bool {
    let Some(criu) = require::find("criu") else {
        return false;
    };
    Command::new(criu)
        .arg("check")
        .output()
        .is_ok_and(|o| o.status.success())
}

#[test]
fn a_program_goes_on_where_its_dump_was_taken() {
    const NAME: &str = "criu::a_program_goes_on_where_its_dump_was_taken";
    if !criu_works() {
        assert!(
            std::env::var_os("PODVISOR_CRIU").is_none(),
            "criu was to work here"
        );
        println!("criu does not work here: the lab has a kernel where it does");
        return;
    }
    sandboxed(NAME, || {
        let before = Snapshot::take();
        let counting = "n=0; while :; do n=$((n+1)); echo $n >/counter; sleep 0.1; done";
        let shim = Shim::launch(counting, |b| b);
        let counter = || -> u64 {
            let text = fs::read_to_string(shim.rootfs.path().join("counter")).unwrap_or_default();
            text.trim().parse().unwrap_or(0)
        };
        let after = |n: u64| {
            eventually(BOUND, "the program counts", || {
                (counter() > n).then(&counter)
            })
        };
        block_on(async {
            let client = shim.client().await;
            run(&client, &shim.request()).await;
            let seen = after(10);
            let end = CheckpointOptions {
                exit: true,
                ..Default::default()
            };
            let dump = task::CheckpointTaskRequest {
                id: "c".into(),
                path: IMAGE.into(),
                options: Some(any::pack(any::CHECKPOINT_OPTIONS, &end).unwrap()).into(),
                ..Default::default()
            };
            let answer = client.task().checkpoint(limit(), &dump).await;
            answer
                .map_err(|e| client::from_ttrpc("checkpoint", e))
                .unwrap();
            wait(&client, "").await;
            delete(&client, "").await;
            let dumped = counter();
            assert!(dumped >= seen);
            let restore = task::CreateTaskRequest {
                checkpoint: IMAGE.into(),
                ..shim.request()
            };
            client.task().create(limit(), &restore).await.unwrap();
            start(&client, "").await;
            // It counts on from where it was; one that begins anew would show a smaller number first.
            let next = eventually(BOUND, "the program counts", || {
                let now = counter();
                (now != 0 && now != dumped).then_some(now)
            });
            assert!(next > dumped, "{next} after {dumped}");
            kill(&client).await;
            wait(&client, "").await;
            delete(&client, "").await;
            drop(client);
            shim.end().await;
        });
        let _ = fs::remove_dir_all("/run/bundles");
        before.assert_unchanged();
    });
}
