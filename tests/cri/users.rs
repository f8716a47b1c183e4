//! Pods with users of their own, and their volumes.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::Path;

use podvisor::sys::netns;
use protobuf::MessageField;
use serde_json::Value;

use crate::kubelet::{Pod, mode, sleeper};
use crate::node::Side;
use crate::support::require;
use crate::wire::api::*;
use crate::wire::sandbox_config::*;

/// Every id of the pod is one of the node's from here on.
const FIRST: u32 = 100_000;
/// What a kubelet sets without asking anybody.
const PORT: &str = "net.ipv4.ip_unprivileged_port_start";

/// An OCI runtime that maps mounts and says so.
pub const MAPS: &str = "/run/crun-maps";

/// Puts [`MAPS`] there. False: there is no crun.
///
/// crun of bookworm maps mounts, but has no verb yet by which a daemon could learn it, and refuses specs of a version above
/// 1.1, however little is new in them. This one answers in a newer crun's words, writes the version it knows, and leaves all
/// else to crun.
pub fn install_maps() -> bool {
    let Some(crun) = require::tool("crun").then(|| require::find("crun")) else {
        return false;
    };
    let crun = crun.unwrap();
    let script = include_str!("crun-maps.sh").replace("CRUN", crun.to_str().unwrap());
    fs::write(MAPS, script).unwrap();
    fs::set_permissions(MAPS, fs::Permissions::from_mode(0o755)).unwrap();
    true
}

/// A pod with ids of its own, where the OCI runtime maps no mounts.
pub fn without_mapped_mounts(side: &mut Side<'_>) {
    if let Some(pod) = pod(side) {
        match side.kubelet.launch(&pod, &sleeper("a")) {
            Err(status) => side.say("a container of its own users", refusal(&status.message)),
            Ok(id) => inside(side, "a container of its own users", &id),
        }
        let volume = Volume::new(side);
        let mut with = sleeper("b");
        with.mounts = vec![volume.mount("/mapped", true)];
        let refused = side.kubelet.launch(&pod, &with).unwrap_err();
        side.say(
            "a container with a mapped volume",
            refusal(&refused.message),
        );
        // The next one, as a kubelet tries it.
        with.metadata.as_mut().unwrap().attempt = 1;
        let again = side.kubelet.launch(&pod, &with).unwrap_err();
        side.say("and again", refusal(&again.message));
        side.kubelet.end(&pod.id);
    }
    ranges(side);
}

/// The same where it can.
pub fn with_mapped_mounts(side: &mut Side<'_>) {
    let pod = pod(side).unwrap();
    let volume = Volume::new(side);
    let mut config = sleeper("a");
    config.mounts = vec![
        volume.mount("/mapped", true),
        volume.mount("/plain", false),
        Mount {
            readonly: true,
            ..volume.mount("/mapped-ro", true)
        },
    ];
    let id = side.kubelet.launch(&pod, &config).unwrap();
    inside(side, "a container of its own users", &id);
    side.sees(
        "owners in a mapped volume",
        &id,
        "cd /mapped; stat -c '%n %u %g' of-root of-web; cat of-root",
    );
    side.sees(
        "owners in one that is not",
        &id,
        "cd /plain; stat -c '%n %u %g' of-root of-web; echo x > of-root; touch plain",
    );
    side.sees(
        "writing",
        &id,
        "cd /mapped; echo x > new; chown 7:8 new; echo y >> of-web; touch root; echo x > /mapped-ro/x",
    );
    side.say("owners on the node", volume.owners());
    let mut config = sleeper("web");
    config.mounts = vec![volume.mount("/mapped", true)];
    let security = config.linux.mut_or_insert_default();
    let security = security.security_context.mut_or_insert_default();
    for id in [&mut security.run_as_user, &mut security.run_as_group] {
        *id = MessageField::some(Int64Value {
            value: 1000,
            ..Default::default()
        });
    }
    let id = side.kubelet.launch(&pod, &config).unwrap();
    side.sees(
        "another user",
        &id,
        "cd /mapped; touch web; echo z >> of-web; echo z >> of-root; stat -c '%n %u %g' web",
    );
    side.say("owners on the node then", volume.owners());
    side.kubelet.stop(&id, 5).unwrap();
    side.kubelet.end(&pod.id);
}

/// Up, unless the daemon refuses it.
fn pod(side: &mut Side<'_>) -> Option<Pod> {
    // FL-086h, FL-086i: a setting of the network is that of the pod's netns, which its own user namespace owns.
    let mut config = side.config("user", with(users()));
    let linux = config.linux.as_mut().unwrap();
    linux.sysctls.insert(PORT.into(), "500".into());
    let pod = match side.kubelet.run(&config, 1) {
        Ok(pod) => pod,
        Err(status) => {
            side.say("a pod of its own users", format!("error {}", status.code));
            return None;
        }
    };
    let info = side.kubelet.pod_status(&pod.id).unwrap().info;
    let info: Value = serde_json::from_str(&info["info"]).unwrap();
    let of = |kind: &str| format!("/proc/{}/ns/{kind}", info["pid"]);
    let owner = netns::owner(Path::new(&of("net"))).unwrap();
    let [own, nodes] = [&of("user"), "/proc/self/ns/user"].map(|path| {
        let meta = fs::metadata(path).unwrap();
        (meta.dev(), meta.ino()) == owner
    });
    side.say(
        "its users own the netns",
        format!("{own}, the node's {nodes}"),
    );
    let path = format!("/proc/sys/{}", PORT.replace('.', "/"));
    let of_node = fs::read_to_string(path).unwrap();
    side.say("the node's setting", of_node.trim());
    Some(pod)
}

fn inside(side: &mut Side<'_>, key: &str, id: &str) {
    side.sees(
        key,
        id,
        "{ cat /proc/self/uid_map; id -u; cat /sys/class/net/lo/mtu; touch /dev/shm/x && stat -c %u /dev/shm/x; \
         cat /proc/sys/net/ipv4/ip_unprivileged_port_start /proc/sys/net/ipv4/ping_group_range; grep -c nameserver /etc/resolv.conf; hostname; } 2>&1 | xargs",
    );
}

/// Ranges that are none.
fn ranges(side: &mut Side<'_>) {
    let two = UserNamespace {
        uids: vec![range(), range()],
        ..users()
    };
    let config = side.config("two", with(two));
    let made = side.kubelet.run(&config, 1);
    side.say("two ranges", made.is_ok());
    let node = UserNamespace {
        mode: mode(NamespaceMode::NODE),
        ..users()
    };
    let config = side.config("node", with(node));
    let made = side.kubelet.run(&config, 1);
    side.say("ranges without a namespace", made.is_ok());
}

/// A directory of the node's with files of root and of user 1000.
struct Volume(String);

impl Volume {
    fn new(side: &Side<'_>) -> Self {
        let dir = format!("/run/volume-{}", side.kubelet.handler);
        fs::create_dir_all(&dir).unwrap();
        fs::set_permissions(&dir, fs::Permissions::from_mode(0o777)).unwrap();
        for (name, id) in [("of-root", 0), ("of-web", 1000)] {
            let file = format!("{dir}/{name}");
            fs::write(&file, name).unwrap();
            chown(&file, Some(id), Some(id)).unwrap();
        }
        Self(dir)
    }

    fn mount(&self, to: &str, mapped: bool) -> Mount {
        let map = || mapped.then(range).into_iter().collect::<Vec<_>>();
        Mount {
            host_path: self.0.clone(),
            container_path: to.into(),
            uidMappings: map(),
            gidMappings: map(),
            ..Default::default()
        }
    }

    /// As the node sees them.
    fn owners(&self) -> String {
        let entries = fs::read_dir(&self.0).unwrap().flatten();
        let mut all: Vec<String> = entries
            .map(|entry| {
                let meta = entry.metadata().unwrap();
                let name = entry.file_name().to_string_lossy().into_owned();
                format!("{name} {}:{}", meta.uid(), meta.gid())
            })
            .collect();
        all.sort();
        all.join(", ")
    }
}

fn range() -> IDMapping {
    IDMapping {
        host_id: FIRST,
        container_id: 0,
        length: 65_536,
        ..Default::default()
    }
}

fn users() -> UserNamespace {
    UserNamespace {
        mode: mode(NamespaceMode::POD),
        uids: vec![range()],
        gids: vec![range()],
        ..Default::default()
    }
}

fn with(user: UserNamespace) -> impl FnOnce(&mut NamespaceOption, &mut LinuxPodSandboxConfig) {
    move |options, _| options.userns_options = MessageField::some(user)
}

/// What is refused and why, in words that do not change from daemon to daemon.
fn refusal(message: &str) -> &str {
    match message.contains("idmap mounts not supported") {
        true => "refused: the OCI runtime maps no mounts",
        false => message,
    }
}
