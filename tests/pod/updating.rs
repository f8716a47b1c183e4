//! UpdateSandbox: new annotations and resources of a pod that is there.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

use nix::sys::signal::Signal;
use podvisor::cgroup::{Group, Layout};
use podvisor::client::Client;
use podvisor::pod::record;
use podvisor::proto::any;
use podvisor::proto::cri::sandbox_config::{LinuxContainerResources, PodSandboxConfig};
use podvisor::proto::sandbox::sandbox as wire;
use protobuf::MessageField;
use protobuf::well_known_types::any::Any;
use serde_json::{Value, json};
use ttrpc::Code;

use crate::daemon::{Bundle, signal};
use crate::kit::*;
use crate::support::{Snapshot, sandboxed};

/// Where the kubelet put the pod.
const PARENT: &str = "/default/pod-of-the-kubelet";
/// The pod's record.
const RECORD: &str = "/run/podvisor/test/p";

#[test]
fn an_update_shows_wherever_the_pod_is_told_of_and_sets_no_limit() {
    sandboxed(
        "updating::an_update_shows_wherever_the_pod_is_told_of_and_sets_no_limit",
        || {
            let group = Group::new(&Layout::detect().unwrap(), PARENT).unwrap();
            group.create().unwrap();
            let before = Snapshot::take();
            let limits = limits(&group);
            on(async {
                let pod = Pod::launch("p");
                let client = pod.connect().await;
                let request = pod.request(Some(&sized()));
                create(&client, &request).await.unwrap();
                let asked = json!({"cpu_shares": 512, "memory_limit_in_bytes": 64 << 20});
                tells(&client, &asked, "old").await;

                // Before the start: what StartSandbox answers is of the update already.
                let message = LinuxContainerResources {
                    cpu_quota: 50_000,
                    cpu_period: 100_000,
                    memory_limit_in_bytes: 96 << 20,
                    ..Default::default()
                };
                let cri = any::pack(any::CRI_RESOURCES, &message).unwrap();
                update(&client, "p", Some(cri.clone()), &[("team", "new")])
                    .await
                    .unwrap();
                let started = start(&client, "p").await.unwrap();
                let spec: Value = serde_json::from_slice(&started.spec.value).unwrap();
                let notes = &spec["annotations"];
                assert_eq!(
                    (
                        &notes["team"],
                        &notes["io.kubernetes.cri.sandbox-memory"],
                        &notes["io.kubernetes.cri.sandbox-cpu-quota"],
                    ),
                    (
                        &json!("new"),
                        &json!((96 << 20).to_string()),
                        &json!("50000")
                    )
                );
                let asked = json!({"cpu_period": 100_000, "cpu_quota": 50_000, "memory_limit_in_bytes": 96 << 20});
                tells(&client, &asked, "new").await;

                // The same again, and the retry of the creation: nothing is new.
                let written = fs::read(on_disk()).unwrap();
                update(&client, "p", Some(cri), &[("team", "new")])
                    .await
                    .unwrap();
                create(&client, &request).await.unwrap();
                assert_eq!(fs::read(on_disk()).unwrap(), written);

                // Annotations alone, one of them settled and the same; then limits alone, as Task.Update takes them.
                let same = ("io.podvisor.network", "none");
                update(&client, "p", None, &[("team", "newer"), same])
                    .await
                    .unwrap();
                tells(&client, &asked, "newer").await;
                let oci = json!({"cpu": {"cpus": "0"}, "hugepageLimits": [{"pageSize": "2MB", "limit": 4 << 20}]});
                let oci = any::raw(any::OCI_RESOURCES, oci.to_string().into_bytes());
                update(&client, "p", Some(oci), &[]).await.unwrap();
                let asked = json!({
                    "cpuset_cpus": "0",
                    "hugepage_limits": [{"page_size": "2MB", "limit": 4 << 20}],
                });
                tells(&pod.connect().await, &asked, "newer").await;
                assert_eq!(limits, self::limits(&group), "the kubelet's");
                pod.shut(&client).await;
            });
            before.assert_unchanged();
        },
    );
}

#[test]
fn a_bad_update_changes_nothing() {
    sandboxed("updating::a_bad_update_changes_nothing", || {
        let group = Group::new(&Layout::detect().unwrap(), PARENT).unwrap();
        group.create().unwrap();
        let before = Snapshot::take();
        on(async {
            let faults = Path::new("/run/faults");
            fs::create_dir(faults).unwrap();
            for name in ["rules", "hits"] {
                fs::write(faults.join(name), "").unwrap();
            }
            let bundle = Bundle::new("p").env("PODVISOR_FAULT_DIR", "/run/faults");
            let pod = Pod::of(bundle);
            let client = pod.connect().await;
            let good = any::raw(any::OCI_RESOURCES, b"{}".to_vec());
            let refused = async |id: &str, resources: Option<Any>, key: &str| {
                code(update(&client, id, resources, &[(key, "changed")]).await)
            };
            // Not created yet: as unknown as any other.
            assert_eq!(
                refused("p", Some(good.clone()), "team").await.0,
                Code::NOT_FOUND
            );
            pod.up(&client, &sized()).await;
            let written = fs::read(on_disk()).unwrap();
            let told = status(&client, "p").await.unwrap().info;
            for (id, resources, key, wanted) in [
                ("q", Some(good.clone()), "team", Code::NOT_FOUND),
                ("", None, "team", Code::INVALID_ARGUMENT),
                ("../p", None, "team", Code::INVALID_ARGUMENT),
                (
                    "p",
                    Some(any::raw("runtime.v1.Nobody", vec![])),
                    "team",
                    Code::INVALID_ARGUMENT,
                ),
                (
                    "p",
                    Some(any::raw(any::CRI_RESOURCES, vec![0xff])),
                    "team",
                    Code::INVALID_ARGUMENT,
                ),
                (
                    "p",
                    Some(any::raw(any::OCI_RESOURCES, b"[".to_vec())),
                    "team",
                    Code::INVALID_ARGUMENT,
                ),
                ("p", None, "io.podvisor.network", Code::INVALID_ARGUMENT),
                (
                    "p",
                    None,
                    "io.kubernetes.cri.sandbox-uid",
                    Code::INVALID_ARGUMENT,
                ),
            ] {
                let (code, why) = refused(id, resources, key).await;
                assert_eq!(code, wanted, "{id} {key}: {why}");
            }
            // A disk that is full for a moment: told, and taken back.
            fs::write(faults.join("rules"), "journal.write.before=1*error(full)").unwrap();
            let (_, why) = refused("p", Some(good.clone()), "team").await;
            assert!(why.contains("full"), "{why}");
            assert_eq!(fs::read(on_disk()).unwrap(), written);
            let now = status(&client, "p").await.unwrap().info;
            let without_ages = |info: &HashMap<String, String>| {
                let mut info: Value = serde_json::from_str(&info["info"]).unwrap();
                info["podvisor"].take();
                info
            };
            assert_eq!(without_ages(&told), without_ages(&now));

            stop(&client, "p", 0).await.unwrap();
            let (stopped, why) = refused("p", Some(good), "team").await;
            assert_eq!(stopped, Code::FAILED_PRECONDITION, "{why}");
            pod.shut(&client).await;
        });
        before.assert_unchanged();
    });
}

#[test]
fn an_update_outlives_the_supervisor() {
    sandboxed("updating::an_update_outlives_the_supervisor", || {
        let before = Snapshot::take();
        on(async {
            let pod = Pod::launch("p");
            let client = pod.connect().await;
            pod.up(&client, &config("web")).await;
            let message = LinuxContainerResources {
                memory_limit_in_bytes: 96 << 20,
                ..Default::default()
            };
            let resources = any::pack(any::CRI_RESOURCES, &message).unwrap();
            update(&client, "p", Some(resources), &[("team", "new")])
                .await
                .unwrap();
            // Answered, so it is written: no later moment is needed.
            signal(pod.pid, Signal::SIGKILL);
            let left = record::read(Path::new(RECORD)).unwrap();
            assert_eq!(left.annotations["team"], "new");
            assert_eq!(left.resources.unwrap().memory_limit_in_bytes, 96 << 20);
            pod.bundle.delete();
        });
        before.assert_unchanged();
    });
}

/// With a cgroup of the kubelet's, limits and an overhead.
fn sized() -> PodSandboxConfig {
    let mut config = config("web");
    config.annotations.insert("team".into(), "old".into());
    let linux = config.linux.mut_or_insert_default();
    linux.cgroup_parent = PARENT.into();
    linux.resources = MessageField::some(LinuxContainerResources {
        cpu_shares: 512,
        memory_limit_in_bytes: 64 << 20,
        ..Default::default()
    });
    linux.overhead = MessageField::some(LinuxContainerResources {
        memory_limit_in_bytes: 4 << 20,
        ..Default::default()
    });
    config
}

/// Verbose status, in all its places.
async fn tells(client: &Client, resources: &Value, team: &str) {
    let info = status(client, "p").await.unwrap().info;
    let info: Value = serde_json::from_str(&info["info"]).unwrap();
    let overhead = json!({"memory_limit_in_bytes": 4 << 20});
    for place in [&info, &info["config"]["linux"]] {
        assert_eq!(
            (&place["resources"], &place["overhead"]),
            (resources, &overhead)
        );
    }
    for place in [&info["config"], &info["runtimeSpec"]] {
        assert_eq!(place["annotations"]["team"], team);
    }
    let left = record::read(Path::new(RECORD)).unwrap();
    assert_eq!(left.annotations["team"], team);
    assert_eq!(&serde_json::to_value(left.resources).unwrap(), resources);
}

async fn update(
    client: &Client,
    id: &str,
    resources: Option<Any>,
    annotations: &[(&str, &str)],
) -> ttrpc::Result<()> {
    let request = wire::UpdateSandboxRequest {
        sandbox_id: id.into(),
        resources: resources.into(),
        annotations: annotations
            .iter()
            .map(|(k, v)| ((*k).to_owned(), (*v).to_owned()))
            .collect(),
        ..Default::default()
    };
    client.sandbox().update_sandbox(soon(), &request).await?;
    Ok(())
}

fn on_disk() -> PathBuf {
    Path::new(RECORD).join(record::FILE)
}

/// Every limit of processor and memory in the cgroup, by file.
fn limits(group: &Group) -> Vec<(PathBuf, String)> {
    let names = [
        "memory.limit_in_bytes",
        "memory.max",
        "cpu.cfs_quota_us",
        "cpu.shares",
        "cpu.max",
        "cpu.weight",
        "cpuset.cpus",
    ];
    let dirs = group.dirs();
    let files = dirs.iter().flat_map(|d| names.map(|n| d.join(n)));
    let found: Vec<_> = files
        .filter_map(|f| Some((f.clone(), fs::read_to_string(&f).ok()?)))
        .collect();
    assert!(found.len() >= 3, "{found:?}");
    found
}
