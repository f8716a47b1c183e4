//! A pod in a user namespace: its netns belongs to that, so the two change hands together or not at all.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use podvisor::proto::cri::sandbox_config::{
    IDMapping, LinuxPodSandboxConfig, LinuxSandboxSecurityContext, NamespaceMode, NamespaceOption,
    PodSandboxConfig, UserNamespace,
};
use podvisor::sys::netns::owner;
use protobuf::MessageField;
use serde_json::json;

use crate::daemon::Bundle;
use crate::kit::{self, INTERVAL};
use crate::rig::{self, BOUND, Pod, called, gone};
use crate::support::{Snapshot, sandboxed};

/// The pod `web`, root of which is this user of the machine.
fn config(root: u32) -> PodSandboxConfig {
    let map = || IDMapping {
        host_id: root,
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
    PodSandboxConfig {
        linux: MessageField::some(LinuxPodSandboxConfig {
            security_context: MessageField::some(security),
            ..Default::default()
        }),
        ..rig::config("web")
    }
}

fn inode(path: &str) -> u64 {
    fs::metadata(path).unwrap().ino()
}

/// The infra process is in the user namespace that its netns belongs to; gives both.
fn is_at_home(pod: &Pod) -> (u64, u64) {
    let pid = pod.record().unwrap().infra.unwrap().pid;
    let user = inode(&format!("/proc/{pid}/ns/user"));
    assert_ne!(user, inode("/proc/self/ns/user"));
    let net = format!("/proc/{pid}/ns/net");
    assert_eq!(owner(Path::new(&net)).unwrap().1, user);
    (user, inode(&net))
}

/// Where the netns that is parked under sandbox `id` is pinned.
fn pinned() -> Vec<(String, u64)> {
    let pins = fs::read_dir("/run/podvisor/netns").unwrap().flatten();
    let mut pins: Vec<(String, u64)> = pins
        .map(|pin| pin.path().display().to_string())
        .map(|path| (path.clone(), inode(&path)))
        .collect();
    pins.sort();
    pins
}

/// From a keeper, from a pod that nobody has claimed, and from a supervisor that was killed: netns and user namespace
/// are the first's, the infra process joins them, and each ADD has one DEL.
#[test]
fn a_pods_user_namespace_goes_over_with_its_netns() {
    sandboxed(
        "users::a_pods_user_namespace_goes_over_with_its_netns",
        || {
            kit::parking(INTERVAL, "");
            let plugin = kit::bridge();
            let before = Snapshot::take();
            for (n, killed) in [false, true].into_iter().enumerate() {
                let (_, keeper) = kit::parked_as(&format!("a{n}"), &plugin, &config(200_000));
                if killed {
                    rig::kill(keeper);
                }
                let pins = pinned();
                assert_eq!(pins.len(), 2, "a netns and its owner: {pins:?}");
                let id = format!("b{n}");
                let second = kit::create_as(&id, &config(200_000));
                second.probe().start(&id, BOUND).unwrap();
                gone(keeper);
                assert!(second.record().unwrap().network.taken.is_some());
                let (user, net) = is_at_home(&second);
                let inodes: Vec<u64> = pins.iter().map(|(_, inode)| *inode).collect();
                assert!(inodes.contains(&user) && inodes.contains(&net));
                assert!(kit::real_ips(&second).contains(&kit::ips(&second)[0]));
                second.end();
                kit::adds_and_dels(&plugin, n + 1);
            }
            before.assert_unchanged();
            assert_eq!((kit::records(), kit::offered()), (0, 0));
        },
    );
}

/// Another mapping, none, or no user namespace at the pin any more: undone first, and made anew.
#[test]
fn another_user_namespace_is_another_network() {
    sandboxed("users::another_user_namespace_is_another_network", || {
        kit::parking(INTERVAL, "");
        let plugin = kit::bridge();
        let before = Snapshot::take();
        let wanted = [
            (config(300_000), false),
            (rig::config("web"), false),
            (config(200_000), true),
        ];
        for (n, (wanted, unpinned)) in wanted.into_iter().enumerate() {
            let (_, keeper) = kit::parked_as(&format!("a{n}"), &plugin, &config(200_000));
            let user = pinned()
                .into_iter()
                .find(|(path, _)| path.ends_with(".user"));
            let (path, of_the_first) = user.unwrap();
            if unpinned {
                nix::mount::umount2(path.as_str(), nix::mount::MntFlags::MNT_DETACH).unwrap();
            }
            let id = format!("b{n}");
            let second = kit::create_as(&id, &wanted);
            second.probe().start(&id, BOUND).unwrap();
            gone(keeper);
            assert!(second.record().unwrap().network.taken.is_none());
            assert_eq!(plugin.count("DEL"), n * 2 + 1, "the first's");
            if n != 1 {
                assert_ne!(is_at_home(&second).0, of_the_first);
            }
            second.end();
            kit::adds_and_dels(&plugin, (n + 1) * 2);
        }
        before.assert_unchanged();
        assert_eq!((kit::records(), kit::offered()), (0, 0));
    });
}

/// A sandbox of the pod `web` whose spec names a user namespace by path.
fn of_spec(id: &str, user: &str) -> Pod {
    let mut namespaces: Vec<serde_json::Value> = ["pid", "mount", "ipc", "uts", "network"]
        .map(|kind| json!({"type": kind}))
        .into();
    namespaces.push(json!({"type": "user", "path": user}));
    let spec = json!({
        "ociVersion": "1.0.2",
        "root": {"path": "rootfs"},
        "annotations": {
            "io.kubernetes.cri.sandbox-name": "web",
            "io.kubernetes.cri.sandbox-namespace": "apps",
            "io.kubernetes.cri.sandbox-uid": "uid-web",
        },
        "linux": {"namespaces": namespaces},
    });
    let pod = Pod::in_bundle(Bundle::new(id).config(&spec.to_string()));
    pod.probe().create_bare(id).unwrap();
    pod
}

/// One that the caller gave by path is the caller's: the network goes over only to a sandbox that was given the same one,
/// whatever its path is.
#[test]
fn a_given_user_namespace_has_to_be_the_same_one() {
    sandboxed(
        "users::a_given_user_namespace_has_to_be_the_same_one",
        || {
            kit::parking(INTERVAL, "");
            let plugin = kit::bridge();
            let before = Snapshot::take();
            let owners = ["o1", "o2"].map(|id| {
                let mut config = config(200_000);
                config.metadata = MessageField::some(rig::config(id).metadata.unwrap());
                let pod = kit::create_as(id, &config);
                let pid = pod.probe().start(id, BOUND).unwrap();
                (pod, format!("/proc/{pid}/ns/user"))
            });
            let [(one, its), (two, others)] = &owners;
            // The same namespace by another path.
            let alias = "/run/alias";
            fs::write(alias, "").unwrap();
            let none: Option<&str> = None;
            let bind = nix::mount::MsFlags::MS_BIND;
            nix::mount::mount(Some(its.as_str()), alias, none, bind, none).unwrap();
            for (n, (given, taken)) in [(alias, true), (others.as_str(), false)]
                .into_iter()
                .enumerate()
            {
                let (a, b) = (format!("a{n}"), format!("b{n}"));
                let (adds, dels) = (plugin.count("ADD"), plugin.count("DEL"));
                let gate = kit::closed(&plugin);
                let first = of_spec(&a, its);
                let told = first
                    .probe()
                    .start(&a, std::time::Duration::from_millis(500));
                assert!(told.is_err());
                called(&plugin, "ADD", adds + 1);
                let keeper = first.supervisor();
                first.probe().shutdown(&a).unwrap();
                kit::open(&gate);
                kit::until(&a, "network parked");
                plugin.on("ADD", &[]);
                let second = of_spec(&b, given);
                second.probe().start(&b, BOUND).unwrap();
                gone(keeper);
                assert_eq!(second.record().unwrap().network.taken.is_some(), taken);
                let anew = usize::from(!taken);
                assert_eq!(plugin.count("ADD"), adds + 1 + anew);
                assert_eq!(plugin.count("DEL"), dels + anew);
                assert_eq!(is_at_home(&second).0, inode(given));
                second.end();
            }
            nix::mount::umount2(alias, nix::mount::MntFlags::MNT_DETACH).unwrap();
            fs::remove_file(alias).unwrap();
            // What was given stays.
            assert_eq!(inode(its), is_at_home(one).0);
            one.end();
            two.end();
            before.assert_unchanged();
            assert_eq!((kit::records(), kit::offered()), (0, 0));
        },
    );
}
