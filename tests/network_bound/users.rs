//! Pods in a user namespace of their own.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use podvisor::proto::cri::sandbox_config::{
    IDMapping, LinuxPodSandboxConfig, LinuxSandboxSecurityContext, NamespaceMode, NamespaceOption,
    PodSandboxConfig, UserNamespace,
};
use podvisor::sys::netns::owner;
use protobuf::MessageField;

use crate::kit::tool;
use crate::rig::{self, BOUND, Pod};
use crate::support::{Snapshot, sandboxed};

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
