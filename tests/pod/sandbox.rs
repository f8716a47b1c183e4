//! The sandbox service: its methods, three kinds of request, every state.

use std::fs;
use std::path::Path;
use std::time::{Duration, SystemTime};

use podvisor::cgroup::{Group, Layout};
use podvisor::client::Client;
use podvisor::proto::any;
use podvisor::proto::cgroup1::metrics::Metrics as MetricsV1;
use podvisor::proto::cgroup2::metrics::Metrics as MetricsV2;
use podvisor::proto::sandbox::sandbox as wire;
use podvisor::proto::time::system_time;
use serde_json::{Value, json};
use ttrpc::Code;

use crate::daemon::Bundle;
use crate::kit::*;
use crate::paths::{number, paths};
use crate::support::{Snapshot, cni, eventually, fake, sandboxed};

/// Checklist 63 to 68 and 75, with a `PodSandboxConfig`.
#[test]
fn a_pod_lives_through_all_its_states() {
    sandboxed("sandbox::a_pod_lives_through_all_its_states", || {
        let before = Snapshot::take();
        on(async {
            let pod = Pod::launch("p");
            let client = pod.connect().await;
            let config = config("web");
            create(&client, &pod.request(Some(&config))).await.unwrap();
            let created = status(&client, "p").await.unwrap();
            assert_eq!(
                (
                    created.sandbox_id.as_str(),
                    created.state.as_str(),
                    created.pid
                ),
                ("p", "SANDBOX_NOTREADY", 0)
            );
            let started = start(&client, "p").await.unwrap();
            let ready = status(&client, "p").await.unwrap();
            assert_eq!(
                (ready.sandbox_id.as_str(), ready.state.as_str(), ready.pid),
                ("p", "SANDBOX_READY", started.pid)
            );
            assert!(ready.exited_at.is_none());
            assert_eq!(started.created_at, ready.created_at);
            assert_eq!(created.created_at, ready.created_at);
            check_info(&ready.info["info"], started.pid);
            let spec: Value = serde_json::from_slice(&started.spec.value).unwrap();
            assert_eq!(started.spec.type_url, any::OCI_SPEC);
            check_spec(&spec, started.pid);
            // Not asked to be verbose: nothing but the state.
            let brief = wire::SandboxStatusRequest {
                sandbox_id: "p".into(),
                ..Default::default()
            };
            let brief = client
                .sandbox()
                .sandbox_status(soon(), &brief)
                .await
                .unwrap();
            assert!(brief.info.is_empty() && brief.pid == started.pid);
            check_platform_and_ping(&client, "p").await;
            check_metrics(&client, "p").await;

            // Waiters of before, on several connections, and after.
            let mut waiters = Vec::new();
            for _ in 0..5 {
                let client = pod.connect().await;
                waiters.push(tokio::spawn(async move { wait(&client, "p").await }));
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
            assert!(waiters.iter().all(|w| !w.is_finished()));
            stop(&client, "p", 0).await.unwrap();
            assert!(!Path::new(&format!("/proc/{}", started.pid)).exists());
            let after = wait(&client, "p").await.unwrap();
            for waiter in waiters {
                assert_eq!(waiter.await.unwrap().unwrap(), after);
            }
            assert_eq!(after.exit_status, 137);
            let stopped = status(&client, "p").await.unwrap();
            assert_eq!(
                (
                    stopped.sandbox_id.as_str(),
                    stopped.state.as_str(),
                    stopped.pid
                ),
                ("p", "SANDBOX_NOTREADY", started.pid)
            );
            assert_eq!(
                (stopped.created_at, stopped.exited_at),
                (ready.created_at, after.exited_at)
            );
            stop(&client, "p", 3).await.unwrap();
            assert_eq!(code(start(&client, "p").await).0, Code::FAILED_PRECONDITION);
            pod.shut(&client).await;
        });
        before.assert_unchanged();
    });
}

/// Checklist 63: the same request again is fine, another one is not.
#[test]
fn an_id_belongs_to_one_request_and_unknown_ids_are_not_found() {
    sandboxed(
        "sandbox::an_id_belongs_to_one_request_and_unknown_ids_are_not_found",
        || {
            let before = Snapshot::take();
            on(async {
                let pod = Pod::launch("p");
                let client = pod.connect().await;
                // Before there is one, the pod's own id is as unknown as any other.
                unknown_without_a_sandbox(&client, "p").await;
                unknown_everywhere(&client, "other").await;
                let infra = pod.up(&client, &config("p")).await;
                create(&client, &pod.request(Some(&config("p"))))
                    .await
                    .unwrap();
                let other = code(create(&client, &pod.request(Some(&config("q")))).await);
                assert_eq!(other.0, Code::ALREADY_EXISTS, "{}", other.1);
                assert_eq!(
                    start(&client, "p").await.unwrap().pid,
                    infra.cast_unsigned()
                );
                unknown_everywhere(&client, "other").await;
                let mut request = pod.request(Some(&config("p")));
                request.sandbox_id = "other".into();
                assert_eq!(code(create(&client, &request).await).0, Code::NOT_FOUND);
                assert_eq!(code(shutdown(&client, "other").await).0, Code::NOT_FOUND);
                for id in ["", "..", "a/b", "-rf", "a\nb"] {
                    request.sandbox_id = id.into();
                    assert_eq!(
                        code(create(&client, &request).await).0,
                        Code::INVALID_ARGUMENT
                    );
                    assert_eq!(code(status(&client, id).await).0, Code::INVALID_ARGUMENT);
                    assert_eq!(code(shutdown(&client, id).await).0, Code::INVALID_ARGUMENT);
                }
                pod.shut(&client).await;
            });
            before.assert_unchanged();
        },
    );
}

/// Checklist 65: what containerd's sandbox API sends.
#[test]
fn a_pod_is_made_of_the_spec_in_its_bundle() {
    sandboxed("sandbox::a_pod_is_made_of_the_spec_in_its_bundle", || {
        let net = with_network();
        let before = Snapshot::take();
        on(async {
            let spec = json!({
                "ociVersion": "1.0.2",
                "hostname": "of-the-spec",
                "annotations": {"who": "me"},
                "linux": {
                    "namespaces": [{"type": "network"}, {"type": "uts"}, {"type": "mount"}],
                    "sysctl": {"net.ipv4.ip_forward": "1"},
                },
            });
            let pod = Pod::of(Bundle::new("p").config(&spec.to_string()));
            let client = pod.connect().await;
            let mut request = pod.request(None);
            request.options = Some(protobuf::well_known_types::any::Any {
                type_url: any::EMPTY.into(),
                ..Default::default()
            })
            .into();
            create(&client, &request).await.unwrap();
            let infra = start(&client, "p").await.unwrap().pid;
            assert_eq!(
                namespaces(infra),
                [("net", true), ("uts", true), ("ipc", false), ("pid", false)]
            );
            let info: Value =
                serde_json::from_str(&status(&client, "p").await.unwrap().info["info"]).unwrap();
            assert_eq!(info["runtimeSpec"]["hostname"], "of-the-spec");
            assert_eq!(info["runtimeSpec"]["annotations"]["who"], "me");
            assert_eq!(
                info["cniResult"]["Interfaces"]["eth0"]["IPConfigs"][0]["IP"],
                "10.99.0.2"
            );
            assert_eq!(net.count("ADD"), 1);
            check_metrics(&client, "p").await;
            pod.shut(&client).await;
            assert_eq!(net.count("DEL"), 1);
        });
        before.assert_unchanged();
    });
}

/// Checklist 64: neither options nor a spec.
#[test]
fn a_pod_is_made_of_nothing_but_an_id() {
    sandboxed("sandbox::a_pod_is_made_of_nothing_but_an_id", || {
        let net = with_network();
        let before = Snapshot::take();
        on(async {
            let pod = Pod::launch("p");
            let client = pod.connect().await;
            create(&client, &pod.request(None)).await.unwrap();
            let infra = start(&client, "p").await.unwrap().pid;
            assert_eq!(
                namespaces(infra),
                [("net", true), ("uts", true), ("ipc", true), ("pid", true)]
            );
            let ready = status(&client, "p").await.unwrap();
            check_info(&ready.info["info"], infra);
            check_metrics(&client, "p").await;
            stop(&client, "p", 0).await.unwrap();
            assert_eq!((net.count("ADD"), net.count("DEL")), (1, 1));
            assert_eq!(wait(&client, "p").await.unwrap().exit_status, 137);
            pod.shut(&client).await;
            assert_eq!(net.count("DEL"), 1);
        });
        before.assert_unchanged();
    });
}

/// Checklist 69: on return nothing runs any more; the time is the caller's.
#[test]
fn a_stop_ends_the_containers_too() {
    sandboxed("sandbox::a_stop_ends_the_containers_too", || {
        let before = Snapshot::take();
        on(async {
            let pod = Pod::launch("p");
            let client = pod.connect().await;
            pod.up(&client, &config("p")).await;
            let polite = Container::new(
                "polite",
                "trap 'exit 3' TERM; echo ready; while :; do sleep 0.05; done",
                |_| (),
            );
            let deaf = Container::new(
                "deaf",
                "trap '' TERM; echo ready; while :; do sleep 0.05; done",
                |_| (),
            );
            let pids = [polite.run(&client).await, deaf.run(&client).await];
            polite.says("ready");
            deaf.says("ready");
            stop(&client, "p", 1).await.unwrap();
            for pid in pids {
                assert!(!Path::new(&format!("/proc/{pid}")).exists());
            }
            assert_eq!(polite.wait(&client, "").await.unwrap(), 3);
            assert_eq!(deaf.wait(&client, "").await.unwrap(), 137);
            polite.delete(&client, "").await.unwrap();
            let late = Container::new("late", "true", |_| ());
            let refused = client.task().create(soon(), &late.request()).await;
            assert_eq!(code(refused).0, Code::FAILED_PRECONDITION);
            pod.shut(&client).await;
        });
        before.assert_unchanged();
    });
}

/// A pod's containers are in its namespaces, and have its files.
#[test]
fn containers_share_the_pod() {
    sandboxed("sandbox::containers_share_the_pod", || {
        let before = Snapshot::take();
        on(async {
            let pod = Pod::launch("p");
            let client = pod.connect().await;
            pod.up(&client, &config("web-0")).await;
            let one = Container::new(
                "one",
                "hostname; cat /etc/hostname; echo shared >/dev/shm/x; ip link; echo ready; exec sleep 1000",
                |_| (),
            );
            one.run(&client).await;
            one.says("ready");
            let said = one.printed("");
            assert!(said.starts_with("web-0\nweb-0\n"), "{said}");
            assert!(said.contains("lo:") && !said.contains("eth0"), "{said}");
            let two = Container::new("two", "cat /dev/shm/x", |_| ());
            two.run(&client).await;
            assert_eq!(two.wait(&client, "").await.unwrap(), 0);
            assert_eq!(two.printed(""), "shared\n");
            two.delete(&client, "").await.unwrap();
            one.remove(&client).await;
            pod.shut(&client).await;
        });
        before.assert_unchanged();
    });
}

/// Checklist 75 and 78: the pod's cgroup is its parent, which the caller has made and keeps; a path, or a slice of systemd's.
#[test]
fn a_pods_cgroup_is_the_callers_and_is_measured() {
    sandboxed(
        "sandbox::a_pods_cgroup_is_the_callers_and_is_measured",
        || {
            in_a_cgroup("p", "/default/pod-of-the-kubelet", "p");
            in_a_cgroup(
                "q",
                "/kubepods.slice/kubepods-pod7.slice",
                "cri-containerd-q.scope",
            );
        },
    );
}

/// `own` is the infra process' below `parent`.
fn in_a_cgroup(id: &str, parent: &str, own: &str) {
    let layout = Layout::detect().unwrap();
    let below = |name: &str| Group::new(&layout, &format!("{parent}/{name}")).unwrap();
    let group = Group::new(&layout, parent).unwrap();
    group.create().unwrap();
    let before = Snapshot::take();
    on(async {
        let pod = Pod::launch(id);
        let client = pod.connect().await;
        let mut config = config(id);
        config.linux.mut_or_insert_default().cgroup_parent = parent.into();
        let infra = pod.up(&client, &config).await;
        assert_eq!(below(own).pids(), [infra]);
        let alone = check_metrics(&client, id).await;
        let name = format!("container-of-{id}");
        let container = Container::new(&name, "sleep 1000 & sleep 1000 & wait", |spec| {
            spec["linux"]["cgroupsPath"] = format!("{parent}/{name}").into();
        });
        container.run(&client).await;
        eventually(BOUND, "three processes of the container", || {
            (below(&name).pids().len() == 3).then_some(())
        });
        assert_eq!(check_metrics(&client, id).await, alone + 3);
        container.remove(&client).await;
        pod.shut(&client).await;
    });
    before.assert_unchanged();
    assert!(group.exists(), "it is the caller's");
}

/// Checklist 71: a daemon removes the bundle before it shuts down what is in it.
#[test]
fn a_bundle_that_is_gone_stays_gone() {
    sandboxed("sandbox::a_bundle_that_is_gone_stays_gone", || {
        let before = Snapshot::take();
        on(async {
            let pod = Pod::launch("p");
            let client = pod.connect().await;
            pod.up(&client, &config("p")).await;
            fs::remove_dir_all(&pod.bundle.dir).unwrap();
            stop(&client, "p", 0).await.unwrap();
            assert_eq!(wait(&client, "p").await.unwrap().exit_status, 137);
            pod.shut(&client).await;
            assert!(!pod.bundle.dir.exists());
        });
        before.assert_unchanged();
    });
}

/// A network whose only plugin is a fake.
fn with_network() -> fake::Fake {
    cni::network("net", vec![json!({"type": "fake"})]).write();
    fake::plugin(Path::new(cni::PLUGINS), "fake")
}

/// The shape that CRI decodes: a wrong type makes PodSandboxStatus fail.
fn check_info(text: &str, pid: u32) {
    let info: Value = serde_json::from_str(text).unwrap();
    assert_eq!(
        (&info["pid"], &info["processStatus"]),
        (&pid.into(), &"running".into())
    );
    assert_eq!(info["netNamespaceClosed"], false);
    assert_eq!(info["runtimeType"], "io.containerd.podvisor.v1");
    assert!(info["config"]["metadata"]["name"].is_string());
    assert!(info["config"]["metadata"]["attempt"].is_u64());
    assert!(info["config"]["port_mappings"].is_array());
    assert!(info["cniResult"].is_object() || info["cniResult"].is_null());
    check_spec(&info["runtimeSpec"], pid);
}

fn check_spec(spec: &Value, pid: u32) {
    let listed = paths(spec);
    for (kind, file) in [
        ("network", "net"),
        ("ipc", "ipc"),
        ("uts", "uts"),
        ("pid", "pid"),
    ] {
        let (_, path) = listed.iter().find(|(k, _)| k == kind).expect(kind);
        assert_eq!(
            number(path),
            number(&format!("/proc/{pid}/ns/{file}")),
            "{kind}"
        );
    }
    assert!(spec["linux"]["cgroupsPath"].is_string());
}

async fn check_platform_and_ping(client: &Client, id: &str) {
    let platform = client
        .sandbox()
        .platform(soon(), &platform_of(id))
        .await
        .unwrap();
    let go = match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    };
    assert_eq!(
        (
            platform.platform.os.as_str(),
            platform.platform.architecture.as_str()
        ),
        ("linux", go)
    );
    client
        .sandbox()
        .ping_sandbox(soon(), &ping_of(id))
        .await
        .unwrap();
}

/// The pod's own cgroup, read now: the memory of its processes shows there.
async fn check_metrics(client: &Client, id: &str) -> u64 {
    let began = SystemTime::now();
    let request = wire::SandboxMetricsRequest {
        sandbox_id: id.into(),
        ..Default::default()
    };
    let metric = client
        .sandbox()
        .sandbox_metrics(soon(), &request)
        .await
        .unwrap()
        .metrics
        .unwrap();
    assert_eq!(metric.id, id);
    assert!(system_time(&metric.timestamp).unwrap() + Duration::from_secs(1) >= began);
    let data = &metric.data;
    let pids = match data.type_url.as_str() {
        any::CGROUP1_METRICS => {
            let of: MetricsV1 = any::unpack(data, any::CGROUP1_METRICS).unwrap().unwrap();
            of.memory
                .usage
                .is_some()
                .then_some(of.pids.current)
                .unwrap()
        }
        any::CGROUP2_METRICS => {
            let of: MetricsV2 = any::unpack(data, any::CGROUP2_METRICS).unwrap().unwrap();
            of.memory.is_some().then_some(of.pids.current).unwrap()
        }
        other => panic!("{other}"),
    };
    assert!(pids >= 1, "the infra process is in it");
    pids
}

async fn unknown_everywhere(client: &Client, id: &str) {
    unknown_without_a_sandbox(client, id).await;
    // The supervisor's own pod has these two before it is created.
    for answer in [
        client
            .sandbox()
            .platform(soon(), &platform_of(id))
            .await
            .map(drop),
        client
            .sandbox()
            .ping_sandbox(soon(), &ping_of(id))
            .await
            .map(drop),
    ] {
        assert_eq!(code(answer).0, Code::NOT_FOUND, "{id}");
    }
}

async fn unknown_without_a_sandbox(client: &Client, id: &str) {
    for answer in [
        start(client, id).await.map(drop),
        stop(client, id, 0).await,
        wait(client, id).await.map(drop),
        status(client, id).await.map(drop),
        metrics(client, id).await,
    ] {
        assert_eq!(code(answer).0, Code::NOT_FOUND, "{id}");
    }
}

async fn metrics(client: &Client, id: &str) -> ttrpc::Result<()> {
    let request = wire::SandboxMetricsRequest {
        sandbox_id: id.into(),
        ..Default::default()
    };
    client
        .sandbox()
        .sandbox_metrics(soon(), &request)
        .await
        .map(drop)
}

fn platform_of(id: &str) -> wire::PlatformRequest {
    wire::PlatformRequest {
        sandbox_id: id.into(),
        ..Default::default()
    }
}

fn ping_of(id: &str) -> wire::PingRequest {
    wire::PingRequest {
        sandbox_id: id.into(),
        ..Default::default()
    }
}

/// Which namespaces of this process are not ours.
fn namespaces(pid: u32) -> [(&'static str, bool); 4] {
    ["net", "uts", "ipc", "pid"].map(|kind| {
        let of = |who: &str| fs::read_link(format!("/proc/{who}/ns/{kind}")).unwrap();
        (kind, of(&pid.to_string()) != of("self"))
    })
}
