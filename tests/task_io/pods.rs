//! containerd 2.1 with `io_type = "streaming"`: its CRI plugin has a container's streams over the supervisor's socket.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::cri::Cri;
use crate::image::{self, PAUSE};
use crate::support::grpc::Message;
use crate::support::{Containerd, cni, eventually, require, sandboxed};

const BOUND: Duration = Duration::from_secs(60);
const LOGS: &str = "/run/pod-logs";

fn daemon() -> Option<Containerd> {
    let peer = require::peer("containerd-2.1")?;
    cni::use_real_plugins()?;
    cni::bridge("cri", "podvstr0", "10.98.3.0/24").write();
    let plugin = "plugins.\"io.containerd.cri.v1.runtime\"";
    let config = format!(
        "[{plugin}.containerd.runtimes.streams]\nruntime_type = \"io.containerd.podvisor.v1\"\n\
         sandboxer = \"shim\"\nio_type = \"streaming\"\n[{plugin}]\nrestrict_oom_score_adj = true\n\
         [plugins.\"io.containerd.cri.v1.images\".pinned_images]\nsandbox = \"{PAUSE}\"\n"
    );
    let daemon = Containerd::builder(&peer).config(&config).start();
    image::import(&daemon);
    Some(daemon)
}

/// What a container is made from: `script` is run by the image's busybox.
fn container(name: &str, script: &str) -> Message {
    let image = Message::new().text(1, PAUSE);
    let command = Message::new()
        .message(1, &Message::new().text(1, name))
        .message(2, &image);
    ["/bin/busybox", "sh", "-c", script]
        .iter()
        .fold(command, |m, word| m.text(3, word))
        .text(11, &format!("{name}.log"))
}

fn log(name: &str) -> String {
    fs::read_to_string(Path::new(LOGS).join(format!("{name}.log"))).unwrap_or_default()
}

/// The container's cgroups, one of each tree.
fn groups_of(id: &str) -> Vec<PathBuf> {
    let below = |dir: PathBuf| {
        let entries = fs::read_dir(dir).into_iter().flatten().flatten();
        entries
            .map(|entry| entry.path())
            .filter(|path| path.is_dir())
    };
    let trees = crate::support::cgroup_mounts().into_iter();
    let groups = trees
        .flat_map(below)
        .flat_map(|dir| below(dir.clone()).chain([dir]));
    groups.filter(|dir| dir.ends_with(id)).collect()
}

/// The kernel has these: bytes of memory and, on v1, CPU shares (v2 has weights, which runtimes count in their own ways).
fn assert_limits(groups: &[PathBuf], memory: u64, shares: u64) {
    let read = |name: &str| -> Option<u64> {
        let text = groups
            .iter()
            .find_map(|dir| fs::read_to_string(dir.join(name)).ok())?;
        text.trim().parse().ok()
    };
    let found = read("memory.limit_in_bytes").or_else(|| read("memory.max"));
    assert_eq!(found, Some(memory), "{groups:?}");
    assert_eq!(read("cpu.shares").unwrap_or(shares), shares, "{groups:?}");
}

#[test]
fn a_pods_streams_and_limits_outlive_the_daemon() {
    const NAME: &str = "pods::a_pods_streams_and_limits_outlive_the_daemon";
    sandboxed(NAME, || {
        if !require::tool("runc") {
            return;
        }
        let Some(mut daemon) = daemon() else {
            return;
        };
        fs::create_dir_all(LOGS).unwrap();
        let mut cri = Cri::of(&daemon);
        let pod = cri.run("web", "streams", &[]).unwrap();
        let script =
            "n=0; while :; do n=$((n+1)); echo line $n; echo bad $n >&2; busybox sleep 0.2; done";
        let script = script.replace("busybox sleep", "/bin/busybox sleep");
        let id = cri
            .create_container(&pod, "web", &container("c", &script))
            .unwrap();
        cri.start_container(&id).unwrap();
        eventually(BOUND, "both outputs in the log", || {
            let text = log("c");
            (text.contains("stdout F line 2") && text.contains("stderr F bad 2")).then_some(())
        });
        let (out, err, code) = cri
            .exec_sync(
                &id,
                &["/bin/busybox", "sh", "-c", "echo out; echo err >&2; exit 9"],
            )
            .unwrap();
        assert_eq!((out.as_str(), err.as_str(), code), ("out\n", "err\n", 9));

        let mebi = 1 << 20;
        cri.update_container(&id, 48 * mebi, 512).unwrap();
        let groups = groups_of(&id);
        assert_limits(&groups, 48 * mebi, 512);

        daemon.kill();
        std::thread::sleep(Duration::from_secs(1));
        daemon.start_again();
        let mut cri = Cri::of(&daemon);
        let seen = log("c").lines().count();
        eventually(BOUND, "the log goes on", || {
            (log("c").lines().count() > seen + 10).then_some(())
        });
        let (out, _, code) = cri
            .exec_sync(&id, &["/bin/busybox", "echo", "again"])
            .unwrap();
        assert_eq!((out.as_str(), code), ("again\n", 0));
        assert_limits(&groups, 48 * mebi, 512);
        cri.update_container(&id, 56 * mebi, 256).unwrap();
        assert_limits(&groups, 56 * mebi, 256);
        cri.stop_container(&id).unwrap();
        cri.stop(&pod).unwrap();
        cri.remove(&pod).unwrap();
        assert!(cri.list().is_empty());
    });
}
