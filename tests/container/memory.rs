//! Limits: changed while a container lives, and what is told when the memory of one is used up.

use std::fs;
use std::path::PathBuf;

use podvisor::container::OomLimit;
use podvisor::process::Identity;
use podvisor::proto::any;
use protobuf::well_known_types::any::Any;

use super::*;
use crate::support::eventually;

const MIB: u64 = 1 << 20;
/// Needs 100 MiB for a moment; busybox writes what it has read into its one buffer.
const HOG: &str = "dd if=/dev/zero of=/dev/null bs=100M count=1 2>/dev/null";

fn resources(text: &str) -> Any {
    any::raw(any::OCI_RESOURCES, text.as_bytes().to_vec())
}

fn limited(bytes: u64) -> impl FnOnce(&mut serde_json::Value) {
    move |spec| {
        spec["linux"]["resources"] = json!({"memory": {"limit": bytes, "swap": bytes}});
    }
}

/// A directory below one of the trees of this machine.
fn group(controller: &str, path: &str) -> PathBuf {
    let roots = support::sandbox::cgroup_roots();
    let tree = |root: &&PathBuf| root.file_name().is_some_and(|name| name == controller);
    let root = roots.iter().find(tree).or_else(|| roots.first()).unwrap();
    root.join(path)
}

fn is_v1() -> bool {
    group("memory", "").join("memory.limit_in_bytes").exists()
}

pub fn limit_of(path: &str) -> u64 {
    let dir = group("memory", path);
    let read = |file: &str| fs::read_to_string(dir.join(file));
    let text = read("memory.limit_in_bytes").or_else(|_| read("memory.max"));
    text.unwrap().trim().parse().unwrap()
}

async fn created(kit: &Kit, id: &str, script: &str, edit: impl FnOnce(&mut serde_json::Value)) {
    let request = kit.request(id, script, edit);
    kit.containers.create(request).await.unwrap();
}

#[test]
fn an_init_that_uses_up_its_memory_is_told_of_before_its_exit() {
    each_runtime(
        "memory::an_init_that_uses_up_its_memory_is_told_of_before_its_exit",
        async |kit| {
            created(&kit, "c", &format!("exec {HOG}"), limited(32 * MIB)).await;
            kit.containers.start("c", "").await.unwrap();
            assert_eq!(kit.code("c", "").await, 137);
            assert_eq!(kit.log.take(), ["create", "start", "oom c", "exit c/c 137"]);
            let record = kit.book.get("c").unwrap();
            let told = (record.oom_kills, record.oom_limit);
            assert_eq!(told, (1, Some(OomLimit::Container)), "on record");
            kit.containers.stats("c").unwrap();
            kit.containers.delete("c", "").await.unwrap();
            kit.assert_gone("c");
        },
    );
}

#[test]
fn a_child_or_an_exec_that_uses_up_the_memory_is_told_of_at_once() {
    each_runtime(
        "memory::a_child_or_an_exec_that_uses_up_the_memory_is_told_of_at_once",
        async |kit| {
            let script = format!("({HOG}); echo survived; exec sleep 1000");
            created(&kit, "c", &script, limited(32 * MIB)).await;
            kit.containers.start("c", "").await.unwrap();
            let told = async {
                let mut events = Vec::new();
                while !events.contains(&"oom c".to_owned()) {
                    sleep(Duration::from_millis(20)).await;
                    events.extend(kit.log.take());
                }
                events
            };
            let events = timeout(BOUND, told).await.expect("word of the kill");
            assert_eq!(events, ["create", "start", "oom c"]);
            assert_eq!(
                kit.containers.state("c", "").unwrap().status,
                Status::Running
            );
            kit.exec("c", "e", &format!("exec {HOG}")).await.unwrap();
            kit.containers.start("c", "e").await.unwrap();
            assert_eq!(kit.code("c", "e").await, 137);
            assert_eq!(
                kit.log.take(),
                ["exec-added", "exec-started", "oom c", "exit c/e 137"]
            );
            kit.containers.kill("c", "", 9, false).await.unwrap();
            assert_eq!(kit.code("c", "").await, 137);
            assert_eq!(
                kit.log.take(),
                ["exit c/c 137"],
                "a kill of ours is none of the kernel's"
            );
            kit.containers.delete("c", "").await.unwrap();
        },
    );
}

/// FL-062: the limit is the pod's.
#[test]
fn a_limit_of_the_pods_is_told_of_the_container_that_lost_a_process() {
    each_runtime(
        "memory::a_limit_of_the_pods_is_told_of_the_container_that_lost_a_process",
        async |kit| {
            let hog = format!("while [ ! -e /go ]; do sleep 0.1; done; {HOG}; exit 5");
            created(&kit, "a", &hog, |_| ()).await;
            created(&kit, "b", "exec sleep 1000", |_| ()).await;
            for id in ["a", "b"] {
                kit.containers.start(id, "").await.unwrap();
            }
            let pod = group("memory", "pv");
            let file = ["memory.limit_in_bytes", "memory.max"]
                .map(|f| pod.join(f))
                .into_iter()
                .find(|f| f.exists())
                .unwrap();
            fs::write(file, (48 * MIB).to_string()).unwrap();
            fs::write(kit.rootfs.path().join("go"), "").unwrap();
            assert_eq!(kit.code("a", "").await, 5);
            // What watches the neighbour has had word, too, and found nothing.
            sleep(Duration::from_millis(300)).await;
            let events = kit.log.take();
            assert_eq!(events[4..], ["oom a", "exit a/a 5"], "{events:?}");
            let limit = kit.book.get("a").unwrap().oom_limit;
            assert_eq!(limit, Some(OomLimit::Above));
            kit.containers.stop_all(Duration::ZERO, true).await.unwrap();
            kit.assert_gone("a");
            kit.assert_gone("b");
        },
    );
}

/// A group that the workload has made in its own has counters of its own on v1.
#[test]
fn a_limit_of_a_group_in_the_containers_is_told_of_before_the_exit() {
    each_runtime(
        "memory::a_limit_of_a_group_in_the_containers_is_told_of_before_the_exit",
        async |kit| {
            if !is_v1() {
                return;
            }
            let script = format!(
                "sh -c 'while [ ! -e /go ]; do sleep 0.1; done; exec {HOG}' & wait $!; exit 6"
            );
            created(&kit, "c", &script, |_| ()).await;
            let init = kit.containers.start("c", "").await.unwrap();
            let nested = group("memory", "pv/c/inner");
            fs::create_dir(&nested).unwrap();
            fs::write(nested.join("memory.limit_in_bytes"), (32 * MIB).to_string()).unwrap();
            let hog = eventually(BOUND, "the child", || {
                let pids = fs::read_to_string(group("memory", "pv/c/cgroup.procs")).unwrap();
                let line = |pid: &str| {
                    fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default()
                };
                let own = init.to_string();
                let child = |pid: &&str| *pid != own && line(pid).contains("bs=100M");
                pids.lines().find(child).map(str::to_owned)
            });
            fs::write(nested.join("cgroup.procs"), &hog).unwrap();
            // FL-054: it is still the container's.
            let pids = kit.containers.pids("c").await.unwrap();
            assert!(
                pids.iter().any(|(pid, _)| pid.to_string() == hog),
                "{pids:?}"
            );
            fs::write(kit.rootfs.path().join("go"), "").unwrap();
            assert_eq!(kit.code("c", "").await, 6);
            assert_eq!(kit.log.take(), ["create", "start", "oom c", "exit c/c 6"]);
            kit.containers.delete("c", "").await.unwrap();
            kit.assert_gone("c");
        },
    );
}

#[test]
fn limits_are_changed_while_a_container_lives_and_not_after() {
    each_runtime(
        "memory::limits_are_changed_while_a_container_lives_and_not_after",
        async |kit| {
            let to = |bytes: u64| resources(&json!({"memory": {"limit": bytes}}).to_string());
            created(&kit, "c", "exec sleep 1000", |_| ()).await;
            kit.containers.update("c", &to(64 * MIB)).await.unwrap();
            assert_eq!(limit_of("pv/c"), 64 * MIB);
            kit.containers.start("c", "").await.unwrap();
            kit.containers.update("c", &to(48 * MIB)).await.unwrap();
            assert_eq!(limit_of("pv/c"), 48 * MIB);
            kit.containers.pause("c").await.unwrap();
            kit.containers.update("c", &to(56 * MIB)).await.unwrap();
            assert_eq!(limit_of("pv/c"), 56 * MIB);
            assert_eq!(
                kit.containers.state("c", "").unwrap().status,
                Status::Paused
            );
            kit.containers.resume("c").await.unwrap();

            // What the runtime cannot set, in its words.
            let cpus = resources(r#"{"cpu": {"cpus": "4000"}}"#);
            let error = kit.containers.update("c", &cpus).await.unwrap_err();
            assert!(error.to_string().contains("update container c"), "{error}");
            assert!(error.to_string().contains("cpuset"), "{error}");
            for bad in [resources("[]"), resources("{"), Any::default()] {
                let error = kit.containers.update("c", &bad).await.unwrap_err();
                assert_eq!(error.kind(), Kind::Invalid, "{error}");
            }
            let error = kit.containers.update("x", &to(MIB)).await.unwrap_err();
            assert_eq!(error.kind(), Kind::NotFound);
            assert_eq!(limit_of("pv/c"), 56 * MIB);

            kit.containers.kill("c", "", 9, false).await.unwrap();
            assert_eq!(kit.code("c", "").await, 137);
            let error = kit.containers.update("c", &to(MIB)).await.unwrap_err();
            assert_eq!(error.kind(), Kind::State, "{error}");
            kit.containers.delete("c", "").await.unwrap();
            kit.assert_gone("c");
        },
    );
}

/// FL-067: between the death of init and its reaping it is in no group of its own any more.
#[test]
fn a_container_whose_dead_init_was_not_reaped_is_not_updated() {
    each_runtime(
        "memory::a_container_whose_dead_init_was_not_reaped_is_not_updated",
        async |kit| {
            let pid = kit.run("c", "sleep 1000").await;
            let roots = || [group("memory", ""), group("memory", "pv")].map(|d| limits_in(&d));
            let before = roots();
            let init = Identity::of(pid.cast_signed()).unwrap();
            init.signal(9).unwrap();
            // Nothing is awaited meanwhile: the reaper, on this same thread, has not run.
            let end = std::time::Instant::now() + BOUND;
            while init.is_alive() {
                assert!(std::time::Instant::now() < end);
                std::thread::sleep(Duration::from_millis(1));
            }
            let to =
                resources(&json!({"memory": {"limit": 8 * MIB}, "pids": {"limit": 3}}).to_string());
            let error = kit.containers.update("c", &to).await.unwrap_err();
            assert_eq!(error.kind(), Kind::State, "{error}");
            assert_eq!(
                roots(),
                before,
                "nothing is written outside the container's group"
            );
            assert_eq!(kit.code("c", "").await, 137);
            kit.containers.delete("c", "").await.unwrap();
        },
    );
}

fn limits_in(dir: &std::path::Path) -> String {
    let read = |file: &str| fs::read_to_string(dir.join(file)).unwrap_or_default();
    read("memory.limit_in_bytes") + &read("memory.max")
}
