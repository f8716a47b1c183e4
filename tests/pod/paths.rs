//! A pod's namespaces by path, as StartSandbox answers them.

use std::fs;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use nix::mount::{MntFlags, umount2};
use nix::sched::CloneFlags;
use nix::sys::signal::{Signal, kill};
use podvisor::proto::any;
use podvisor::sys::thread_ns::{self, Enter};
use podvisor::sys::{dir, mountinfo, netns};
use serde_json::{Value, json};

use crate::kit::*;
use crate::support::{Snapshot, sandboxed};

/// What a daemon does that goes by the answer of StartSandbox, and by no process: it takes every namespace's path and the
/// mounts of the pod's files from there. Nothing of that is bound a second time.
#[test]
fn a_container_is_made_of_the_paths_that_start_has_answered() {
    sandboxed(
        "paths::a_container_is_made_of_the_paths_that_start_has_answered",
        || {
            let before = Snapshot::take();
            on(async {
                let pod = Pod::launch("p");
                let client = pod.connect().await;
                let request = pod.request(Some(&config("web-0")));
                create(&client, &request).await.unwrap();
                let answer = start(&client, "p").await.unwrap().spec;
                assert!(any::is(&answer, any::OCI_SPEC), "{}", answer.type_url);
                let answer: Value = serde_json::from_slice(&answer.value).unwrap();
                assert_eq!(
                    answer["annotations"]["io.kubernetes.cri.container-type"],
                    "sandbox"
                );
                are_pinned(&answer, &["network", "ipc", "uts", "pid"]);
                let of_pod = |spec: &mut Value| {
                    let linux = &answer["linux"];
                    spec["linux"]["namespaces"] = linux["namespaces"].clone();
                    // A private one: only a pod that shares its processes gives its own.
                    let own = spec["linux"]["namespaces"].as_array_mut().unwrap();
                    own.retain(|n| n["type"] != "pid");
                    own.push(json!({"type": "pid"}));
                    spec.as_object_mut().unwrap().remove("hostname");
                    let files = answer["mounts"].as_array().unwrap();
                    assert_eq!(files.len(), 4);
                    let mounts = spec["mounts"].as_array_mut().unwrap();
                    mounts.retain(|m| files.iter().all(|f| f["destination"] != m["destination"]));
                    mounts.extend(files.iter().cloned());
                };
                let script = "hostname; cat /etc/hostname; echo by-path >/dev/shm/x; \
                    grep -cE ' /etc/(hosts|hostname|resolv.conf) | /dev/shm ' /proc/mounts";
                let one = Container::new("one", script, of_pod);
                one.run(&client).await;
                assert_eq!(one.wait(&client, "").await.unwrap(), 0);
                assert_eq!(one.printed(""), "web-0\nweb-0\n4\n");
                one.delete(&client, "").await.unwrap();
                let two = Container::new("two", "cat /dev/shm/x", |_| ());
                two.run(&client).await;
                assert_eq!(two.wait(&client, "").await.unwrap(), 0);
                assert_eq!(two.printed(""), "by-path\n");
                two.delete(&client, "").await.unwrap();
                pod.shut(&client).await;
            });
            before.assert_unchanged();
        },
    );
}

/// What has these paths needs no process of the pod: they lead to its namespaces, and no pid that has come round can lead
/// them elsewhere.
#[test]
fn the_paths_that_start_has_answered_outlive_the_infra_process() {
    sandboxed(
        "paths::the_paths_that_start_has_answered_outlive_the_infra_process",
        || {
            let before = Snapshot::take();
            on(async {
                let theirs = Path::new("/run/theirs");
                netns::Fresh::begin().unwrap().pin(theirs).unwrap();
                let pod = Pod::launch("p");
                let client = pod.connect().await;
                let mut request = pod.request(Some(&config("web-0")));
                request.netns_path = theirs.display().to_string();
                create(&client, &request).await.unwrap();
                let answer = start(&client, "p").await.unwrap();
                let infra = i32::try_from(answer.pid).unwrap();
                let spec: Value = serde_json::from_slice(&answer.spec.value).unwrap();
                are_pinned(&spec, &["ipc", "uts", "pid"]);
                let all = paths(&spec);
                let own = all.iter().map(|(_, path)| number(path));
                let own: Vec<_> = own.collect();
                let pid = nix::unistd::Pid::from_raw(infra);
                kill(pid, Signal::SIGKILL).unwrap();
                wait(&client, "p").await.unwrap();
                // As a daemon does that has been restarted.
                let client = pod.connect().await;
                let shown = status(&client, "p").await.unwrap();
                let info: Value = serde_json::from_str(&shown.info["info"]).unwrap();
                assert_eq!(info["podvisor"]["state"], "not_ready");
                assert_eq!(paths(&info["runtimeSpec"]), all);
                let now: Vec<_> = all.iter().map(|(_, path)| number(path)).collect();
                assert_eq!(now, own);
                for (kind, flag) in [
                    ("ipc", CloneFlags::CLONE_NEWIPC),
                    ("uts", CloneFlags::CLONE_NEWUTS),
                ] {
                    let (_, path) = all.iter().find(|(k, _)| k == kind).unwrap();
                    let file = fs::File::open(path).unwrap();
                    let look = || {
                        let at = number(&format!("/proc/thread-self/ns/{kind}"));
                        Ok((at, nix::unistd::gethostname().unwrap()))
                    };
                    let (at, host) =
                        thread_ns::run(&[Enter::Join(file.as_fd(), flag)], look).unwrap();
                    assert_eq!(at, number(path), "{kind}");
                    assert_eq!(host == "web-0", kind == "uts", "{kind}: {host:?}");
                }
                stop(&client, "p", 0).await.unwrap();
                for (kind, path) in &all {
                    assert!(!Path::new(path).exists() || kind == "network", "{path}");
                }
                let shown = status(&client, "p").await.unwrap();
                let info: Value = serde_json::from_str(&shown.info["info"]).unwrap();
                let listed = info["runtimeSpec"]["linux"]["namespaces"].to_string();
                assert!(!listed.contains("/proc/"), "{listed}");
                pod.shut(&client).await;
                umount2(theirs, MntFlags::MNT_DETACH).unwrap();
                fs::remove_file(theirs).unwrap();
            });
            before.assert_unchanged();
        },
    );
}

/// Kind and path of each namespace of a spec that has one.
pub fn paths(spec: &Value) -> Vec<(String, String)> {
    let listed = spec["linux"]["namespaces"].as_array().unwrap();
    let text = |value: &Value| value.as_str().map(str::to_owned);
    let pair = |n: &Value| Some((text(&n["type"])?, text(&n["path"])?));
    listed.iter().filter_map(pair).collect()
}

/// Device and inode: those of the namespace itself.
pub fn number(path: &str) -> (u64, u64) {
    let meta = fs::metadata(path).unwrap_or_else(|e| panic!("{path}: {e}"));
    (meta.dev(), meta.ino())
}

/// The paths of these kinds are mounts of nsfs below our own root, in directories that are ours alone.
fn are_pinned(spec: &Value, kinds: &[&str]) {
    let table = mountinfo::read().unwrap();
    let paths = paths(spec);
    for kind in kinds {
        let (_, path) = paths.iter().find(|(k, _)| k == kind).expect(kind);
        let path = Path::new(path);
        assert!(path.starts_with("/run/podvisor"), "{kind}: {path:?}");
        let mounts: Vec<_> = table.iter().filter(|e| e.point == path).collect();
        assert_eq!(mounts.len(), 1, "{kind}: {mounts:?}");
        assert_eq!(mounts[0].kind, "nsfs");
        let all = path.ancestors().skip(1);
        for above in all.take_while(|above| *above != Path::new("/run")) {
            dir::check_private(above).unwrap();
        }
        let mode = fs::metadata(path.parent().unwrap()).unwrap().mode();
        assert_eq!(mode & 0o777, 0o700, "{path:?}");
    }
}
