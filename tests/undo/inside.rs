//! Failures inside a step, after its side effect and before its end: by a disk that is full at any moment, trees that are
//! read-only, programs that do their work and fail.

use std::collections::BTreeSet;
use std::path::Path;

use podvisor::pod::record::State;
use serde_json::json;

use crate::kit::{Kit, POD, on_its_own, request};
use crate::mounts;
use crate::place;
use crate::rig::{self, Pod};
use crate::support::fake::{self, Act};
use crate::support::{Snapshot, cgroup_mounts, cni, eventually, sandboxed, sh};
use crate::trace::with_a_setting_that_is_none;

/// One life on a disk that takes so much and no more; the stage at which it ended, if it failed.
async fn life(kit: &Kit, dir: &Path, limit: &str) -> Option<String> {
    mounts::tmpfs(dir, limit);
    let (adds, dels) = (kit.plugin.count("ADD"), kit.plugin.count("DEL"));
    let pod = kit.pod("default");
    let made = match pod.create(request("fake")).await {
        Ok(()) => pod.start(POD, None).await.map(drop),
        Err(error) => Err(error),
    };
    let stage = pod.record().stages.last().map(|s| s.name.clone());
    let stage = made
        .as_ref()
        .err()
        .map(|e| format!("{} ({e})", stage.unwrap_or_else(|| "create".into())));
    let ended = pod.shutdown(POD).await;
    assert!(ended.is_ok(), "{limit}: {stage:?}, then {ended:?}");
    let left: Vec<_> = std::fs::read_dir(dir)
        .unwrap()
        .flatten()
        .map(|e| e.path())
        .filter(|p| p.is_file())
        .filter(|p| {
            !p.file_name()
                .is_some_and(|n| n.to_string_lossy().starts_with('.'))
        })
        .collect();
    assert!(left.is_empty(), "{limit}: {stage:?}: {left:?}");
    assert!(!kit.state("default").exists(), "{limit}: {stage:?}");
    let (adds, dels) = (
        kit.plugin.count("ADD") - adds,
        kit.plugin.count("DEL") - dels,
    );
    assert_eq!(adds, dels, "{limit}: {stage:?}");
    mounts::uncover(dir);
    stage
}

/// Item 23: the disk fills up at every single write of a creation; nothing is left, and no undo needs space.
async fn full_at_every_write(kit: &Kit, dir: &Path, least: usize) {
    for what in ["nr_inodes", "nr_blocks"] {
        let mut stages = BTreeSet::new();
        let mut whole = 0;
        for n in 2..90 {
            match life(kit, dir, &format!("{what}={n}")).await {
                Some(stage) => {
                    println!("{what}={n}: fails at {stage}");
                    whole = 0;
                    stages.insert(stage.split(' ').next().unwrap().to_owned());
                }
                None => whole += 1,
            }
            if whole == 3 {
                break;
            }
        }
        assert!(whole == 3, "it never came up: {stages:?}");
        println!("{what}: failed at {stages:?}");
        assert!(stages.len() >= least, "{what}: {stages:?}");
    }
}

#[test]
fn crio_23_a_runtime_directory_that_is_full_at_any_write_leaves_nothing() {
    on_its_own(
        "inside::crio_23_a_runtime_directory_that_is_full_at_any_write_leaves_nothing",
        async |kit: &Kit| {
            let dir = kit.config.runtime_root.clone();
            full_at_every_write(kit, &dir, 2).await;
        },
    );
}

#[test]
fn crio_23_a_state_directory_that_is_full_at_any_write_leaves_nothing() {
    on_its_own(
        "inside::crio_23_a_state_directory_that_is_full_at_any_write_leaves_nothing",
        async |kit: &Kit| {
            let dir = kit.config.state_root.clone();
            full_at_every_write(kit, &dir, 1).await;
        },
    );
}

/// Item 23: made in some of the trees, refused in another (on v2: refused); and an infra process that is there and is
/// refused its settings.
#[test]
fn crio_23_half_a_cgroup_and_half_an_infra_process_leave_nothing() {
    on_its_own(
        "inside::crio_23_half_a_cgroup_and_half_an_infra_process_leave_nothing",
        async |kit: &Kit| {
            let mut trees: Vec<_> = cgroup_mounts().into_iter().map(Some).collect();
            trees.push(None);
            for tree in trees {
                let wanted = match &tree {
                    Some(dir) => {
                        mounts::writable(dir, false);
                        request("fake")
                    }
                    None => with_a_setting_that_is_none(),
                };
                let pod = kit.pod("default");
                pod.create(wanted).await.unwrap();
                let started = pod.start(POD, None).await;
                println!("{tree:?}: {started:?}");
                // It cannot be undone where nothing can be written, but nothing is there either.
                pod.stop(POD, None).await.unwrap();
                assert_eq!(pod.record().state, State::Stopped);
                if let Some(dir) = &tree {
                    mounts::writable(dir, true);
                }
                pod.shutdown(POD).await.unwrap();
                assert_eq!(kit.plugin.count("ADD"), kit.plugin.count("DEL"));
            }
        },
    );
}

/// Items 23 and 28: a plugin that has done all of its work and then fails, dies, or prints nonsense: DEL follows, and the
/// address is free again.
#[test]
fn crio_28_del_follows_an_add_that_worked_and_failed_or_printed_nonsense() {
    sandboxed(
        "inside::crio_28_del_follows_an_add_that_worked_and_failed_or_printed_nonsense",
        || {
            let Some(dir) = cni::real_plugins() else {
                panic!("no reference plugins: run scripts/setup");
            };
            let real = ["bridge", "host-local"].map(|n| dir.join(n));
            let plugin = fake::plugin_before(Path::new("/run/front"), "bridge", &real[0]);
            rig::settings(
                "[cni]\nplugin_dirs = [\"/run/front\", \"/opt/cni/bin\", \"/usr/lib/cni\", \"/usr/libexec/cni\"]\n",
            );
            sh("ip link add pvt0 type bridge");
            let ipam = json!({"type": "host-local", "ranges": [[{"subnet": "10.87.1.0/29"}]]});
            let bridge =
                json!({"type": "bridge", "bridge": "pvt0", "isGateway": true, "ipam": ipam});
            cni::network("pods", vec![bridge]).write();
            let before = Snapshot::take();
            for (n, acts) in [
                &[Act::AfterReal, Act::Stderr("late".into()), Act::Exit(1)][..],
                &[
                    Act::AfterReal,
                    Act::Print("no result {".into()),
                    Act::Exit(0),
                ],
                &[Act::AfterReal, Act::Print(String::new()), Act::Exit(0)],
                &[Act::AfterReal, Act::Signal("KILL".into())],
            ]
            .iter()
            .enumerate()
            {
                plugin.on("ADD", acts);
                let pod = Pod::create("p1");
                let error = pod.probe().start("p1", rig::BOUND).unwrap_err();
                println!("{acts:?}: {error}");
                rig::called(&plugin, "DEL", n + 1);
                eventually(rig::BOUND, "the roll-back has ended", || {
                    (!place::owed()).then_some(())
                });
                let leases = std::fs::read_dir("/var/lib/cni/networks/pods");
                let leases = leases.into_iter().flatten().flatten();
                let leases: Vec<_> = leases
                    .map(|e| e.file_name().to_string_lossy().into_owned())
                    .filter(|n| n.starts_with("10."))
                    .collect();
                assert!(leases.is_empty(), "{leases:?}");
                pod.bundle.delete();
                std::fs::remove_dir_all("/run/bundles/p1").unwrap();
            }
            assert_eq!((plugin.count("ADD"), plugin.count("DEL")), (4, 4));
            before.assert_unchanged();
        },
    );
}
