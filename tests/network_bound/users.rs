//! Pods in a user namespace of their own.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use podvisor::error::Kind;
use podvisor::proto::cri::sandbox_config::{
    IDMapping, LinuxPodSandboxConfig, LinuxSandboxSecurityContext, NamespaceMode, NamespaceOption,
    PodSandboxConfig, UserNamespace,
};
use podvisor::sys::netns::owner;
use protobuf::MessageField;
use serde_json::json;

use crate::daemon::Bundle;
use crate::kit::tool;
use crate::rig::{self, BOUND, Pod};
use crate::support::{Snapshot, rootfs, sandboxed};

const SYSCTL: &str = "net.ipv4.ip_default_ttl";

fn config(name: &str) -> PodSandboxConfig {
    let map = || IDMapping {
        host_id: 200_000,
        container_id: 0,
        length: 65_536,
        ..Default::default()
    };
    let user = UserNamespace {
        mode: NamespaceMode::POD.into(),
        uids: vec![map()],
        gids: vec![map()],
        ..Default::default()
    };
    let options = NamespaceOption {
        network: NamespaceMode::POD.into(),
        userns_options: MessageField::some(user),
        ..Default::default()
    };
    let security = LinuxSandboxSecurityContext {
        namespace_options: MessageField::some(options),
        ..Default::default()
    };
    let linux = LinuxPodSandboxConfig {
        security_context: MessageField::some(security),
        sysctls: [(SYSCTL.to_owned(), "99".to_owned())].into(),
        ..Default::default()
    };
    PodSandboxConfig {
        linux: MessageField::some(linux),
        ..rig::config(name)
    }
}

/// 086h, 086i: the netns belongs to the pod's user namespace, which the infra process is in, and the pod's net settings
/// are written there and nowhere else.
#[test]
fn a_pods_netns_belongs_to_its_user_namespace_and_has_its_settings() {
    sandboxed(
        "users::a_pods_netns_belongs_to_its_user_namespace_and_has_its_settings",
        || {
            let plugin = rig::fake_network();
            let before = Snapshot::take();
            let pod = Pod::launch("u1");
            pod.probe().create("u1", &config("u1")).unwrap();
            let pid = pod.probe().start("u1", BOUND).unwrap();
            let user = fs::metadata(format!("/proc/{pid}/ns/user")).unwrap().ino();
            assert_ne!(user, fs::metadata("/proc/self/ns/user").unwrap().ino());
            let netns = plugin.calls_of("ADD")[0].var("CNI_NETNS").to_owned();
            for path in [Path::new(&netns), Path::new(&format!("/proc/{pid}/ns/net"))] {
                assert_eq!(owner(path).unwrap().1, user, "{}", path.display());
            }
            let map = fs::read_to_string(format!("/proc/{pid}/uid_map")).unwrap();
            assert_eq!(
                map.split_whitespace().collect::<Vec<_>>(),
                ["0", "200000", "65536"]
            );

            let net = format!("--net={netns}");
            let setting = tool(
                "nsenter",
                &[&net, "cat", "/proc/sys/net/ipv4/ip_default_ttl"],
            );
            assert_eq!(setting.trim(), "99");
            let own = fs::read_to_string("/proc/sys/net/ipv4/ip_default_ttl").unwrap();
            assert_ne!(own.trim(), "99");
            assert!(
                tool("nsenter", &[&net, "ip", "-br", "addr", "show", "lo"]).contains("127.0.0.1/8")
            );
            // What a container of the pod has to be allowed: its own sysfs, which belongs to the netns.
            let user = format!("--user=/proc/{pid}/ns/user");
            tool(
                "nsenter",
                &[
                    &user, &net, "unshare", "-m", "mount", "-t", "sysfs", "sysfs", "/mnt",
                ],
            );

            pod.end();
            before.assert_unchanged();
        },
    );
}

/// An OCI spec with this user namespace; everything else of the pod is new.
fn spec(user: serde_json::Value) -> serde_json::Value {
    let mut namespaces: Vec<serde_json::Value> = ["pid", "mount", "ipc", "uts", "network"]
        .map(|kind| json!({"type": kind}))
        .into();
    namespaces.push(user);
    let map = json!([{"containerID": 0, "hostID": 300_000, "size": 65_536}]);
    json!({
        "ociVersion": "1.0.2",
        "root": {"path": "rootfs"},
        "linux": {"namespaces": namespaces, "uidMappings": map, "gidMappings": map},
    })
}

/// Without a pod's configuration: what counts is the spec in the bundle.
fn up_from_spec(id: &str, spec: &serde_json::Value) -> (Pod, u32) {
    let pod = Pod::in_bundle(Bundle::new(id).config(&spec.to_string()));
    let probe = pod.probe();
    probe.create_bare(id).unwrap();
    let pid = probe.start(id, BOUND).unwrap();
    (pod, pid)
}

fn inode(path: &str) -> u64 {
    fs::metadata(path).unwrap().ino()
}

/// Both forms in a spec: new with mappings, and by path. The netns belongs to it, a container of a real runtime joins,
/// and what that writes belongs to the mapped user.
#[test]
fn a_specs_user_namespace_owns_the_netns_and_is_joined_by_containers() {
    sandboxed(
        "users::a_specs_user_namespace_owns_the_netns_and_is_joined_by_containers",
        || {
            let plugin = rig::fake_network();
            let rootfs = rootfs::make();
            tool("chown", &["-R", "300000:300000", rootfs.str()]);
            tool("chmod", &["755", rootfs.str()]);
            let before = Snapshot::take();
            let (first, first_pid) = up_from_spec("u1", &spec(json!({"type": "user"})));
            let user = inode(&format!("/proc/{first_pid}/ns/user"));
            assert_ne!(user, inode("/proc/self/ns/user"));
            let map = fs::read_to_string(format!("/proc/{first_pid}/gid_map")).unwrap();
            assert_eq!(
                map.split_whitespace().collect::<Vec<_>>(),
                ["0", "300000", "65536"]
            );
            let path = format!("/proc/{first_pid}/ns/user");
            // pid and user namespace cannot both be joined by path; a new pid namespace is no join.
            let (second, second_pid) =
                up_from_spec("u2", &spec(json!({"type": "user", "path": path})));
            assert_eq!(inode(&format!("/proc/{second_pid}/ns/user")), user);
            for (call, pid) in plugin.calls_of("ADD").iter().zip([first_pid, second_pid]) {
                let netns = call.var("CNI_NETNS").to_owned();
                for path in [netns, format!("/proc/{pid}/ns/net")] {
                    assert_eq!(owner(Path::new(&path)).unwrap().1, user, "{path}");
                }
            }
            let container = container(second_pid);
            let probe = second.probe();
            let pid = probe.run_task(&container, &rootfs);
            let written = rootfs.path().join("written");
            crate::support::eventually(BOUND, "a file of the container's", || {
                written.exists().then_some(())
            });
            assert_eq!(inode(&format!("/proc/{pid}/ns/user")), user);
            assert_eq!(
                inode(&format!("/proc/{pid}/ns/net")),
                inode(&format!("/proc/{second_pid}/ns/net"))
            );
            let made = fs::metadata(&written).unwrap();
            assert_eq!((made.uid(), made.gid()), (300_000, 300_000));
            fs::remove_file(&written).unwrap();
            second.end();
            // What was given by path stays.
            assert_eq!(inode(&path), user);
            first.end();
            before.assert_unchanged();
        },
    );
}

/// Of the pod of `infra`: its user namespace by path, its netns by the pod.
fn container(infra: u32) -> Bundle {
    let user = format!("/proc/{infra}/ns/user");
    let mut spec = spec(json!({"type": "user", "path": user}));
    spec["process"] = json!({
        "user": {"uid": 0, "gid": 0}, "args": ["/bin/sh", "-c", ": >/written; sleep 600"],
        "env": ["PATH=/bin"], "cwd": "/",
    });
    // A fresh proc needs one that hides nothing; the sandbox's may.
    spec["mounts"] = json!([
        {"destination": "/proc", "type": "bind", "source": "/proc", "options": ["rbind"]},
    ]);
    spec["linux"]["namespaces"]
        .as_array_mut()
        .unwrap()
        .retain(|n| n["type"] != "pid");
    spec["linux"]["cgroupsPath"] = json!("/default/c1");
    let bundle = Bundle::new("c1").config(&spec.to_string());
    fs::create_dir_all(bundle.dir.join("rootfs")).unwrap();
    bundle
}

/// What makes no namespace is refused before anything is done, and a path that is none fails the start with its name.
#[test]
fn a_specs_user_namespace_that_cannot_be_is_refused() {
    sandboxed(
        "users::a_specs_user_namespace_that_cannot_be_is_refused",
        || {
            let _plugin = rig::fake_network();
            let before = Snapshot::take();
            let good = spec(json!({"type": "user"}));
            let edit = |change: fn(&mut serde_json::Value)| {
                let mut spec = good.clone();
                change(&mut spec);
                spec
            };
            let bad = [
                (
                    "no mappings",
                    edit(|s| s["linux"]["uidMappings"] = json!([])),
                ),
                (
                    "no root inside",
                    edit(|s| s["linux"]["gidMappings"][0]["containerID"] = json!(1)),
                ),
                (
                    "no number",
                    edit(|s| s["linux"]["gidMappings"][0]["size"] = json!("1")),
                ),
                (
                    "no namespace",
                    edit(|s| s["linux"]["namespaces"][5]["type"] = json!("mount")),
                ),
                ("relative", spec(json!({"type": "user", "path": "ns/user"}))),
            ];
            for (what, spec) in bad {
                let pod = Pod::in_bundle(Bundle::new("u1").config(&spec.to_string()));
                let error = pod.probe().create_bare("u1").unwrap_err();
                assert_eq!(error.kind(), Kind::Invalid, "{what}: {error}");
                let _ = pod.probe().shutdown("u1");
                pod.bundle.delete();
                fs::remove_dir_all(&pod.bundle.dir).unwrap();
            }
            let none = spec(json!({"type": "user", "path": "/etc/passwd"}));
            let pod = Pod::in_bundle(Bundle::new("u1").config(&none.to_string()));
            pod.probe().create_bare("u1").unwrap();
            let error = pod.probe().start("u1", BOUND).unwrap_err().to_string();
            assert!(error.contains("/etc/passwd"), "{error}");
            pod.end();
            before.assert_unchanged();
        },
    );
}

/// What a killed supervisor left of both namespaces goes with the pod.
#[test]
fn after_a_kill_both_pins_go_with_the_pod() {
    sandboxed("users::after_a_kill_both_pins_go_with_the_pod", || {
        let _plugin = rig::fake_network();
        let before = Snapshot::take();
        let pod = Pod::launch("u1");
        pod.probe().create("u1", &config("u1")).unwrap();
        pod.probe().start("u1", BOUND).unwrap();
        assert_eq!(rig::netns_mounts(), 2);
        pod.kill_supervisor();
        pod.bundle.delete();
        before.assert_unchanged();
    });
}
