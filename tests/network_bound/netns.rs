//! Netns that others hold, hide, replace or take away.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use serde_json::json;

use crate::kit::{self, pin, tool};
use crate::rig;
use crate::support::{Snapshot, cni, eventually, fake, podvisor, rootfs, sandboxed};

const LEASE: &str = "/var/lib/cni/networks/pods/10.87.1.2";

/// FL-036: the netns is gone, or something else is at its path: the lease is freed and stop succeeds.
#[test]
fn with_the_netns_gone_or_replaced_del_goes_without_one_and_frees_the_lease() {
    sandboxed(
        "netns::with_the_netns_gone_or_replaced_del_goes_without_one_and_frees_the_lease",
        || {
            let real = cni::real_plugins().unwrap().join("tuning");
            let seen = fake::plugin_before(Path::new(cni::PLUGINS), "seen", &real);
            // Without masquerading: `bridge` takes its rules away only while there is a netns.
            let ipam = json!({"type": "host-local", "ranges": [[{"subnet": "10.87.1.0/24"}]]});
            let bridge = json!({"type": "bridge", "bridge": "pvt0", "ipam": ipam});
            tool("ip", &["link", "add", "pvt0", "type", "bridge"]);
            cni::network("pods", vec![bridge, json!({"type": "seen"})]).write();
            let rootfs = rootfs::make();
            let before = Snapshot::take();
            let replaced: [fn(&Path); 4] = [
                |_| (),
                |path| fs::write(path, "").unwrap(),
                |path| fs::create_dir(path).unwrap(),
                |path| {
                    fs::write(path, "").unwrap();
                    tool(
                        "mount",
                        &["--bind", "/proc/self/ns/uts", path.to_str().unwrap()],
                    );
                },
            ];
            for (n, replace) in replaced.iter().enumerate() {
                fs::remove_file("/var/lib/cni/networks/pods/last_reserved_ip.0").ok();
                kit::run("p", &rootfs, &[]).ok();
                assert!(Path::new(LEASE).exists());
                let path = pin();
                tool("umount", &[path.to_str().unwrap()]);
                fs::remove_file(&path).unwrap();
                replace(&path);
                kit::gone("p");
                assert_eq!(seen.calls_of("DEL")[n].var("CNI_NETNS"), "");
                assert!(!Path::new(LEASE).exists());
                before.assert_unchanged();
            }
        },
    );
}

/// FL-044: another mount namespace holds a copy of the pin.
#[test]
fn a_netns_that_another_mount_namespace_holds_is_unpinned_and_forgotten_there() {
    sandboxed(
        "netns::a_netns_that_another_mount_namespace_holds_is_unpinned_and_forgotten_there",
        || {
            let _plugin = rig::fake_network();
            let rootfs = rootfs::make();
            let before = Snapshot::take();
            kit::run("p", &rootfs, &[]).ok();
            let mut holder = Command::new("unshare")
                .args(["-m", "--propagation", "private", "sleep", "600"])
                .spawn()
                .unwrap();
            let theirs = || {
                fs::read_to_string(format!("/proc/{}/mountinfo", holder.id())).unwrap_or_default()
            };
            eventually(Duration::from_secs(20), "the holder sleeps", || {
                let name = fs::read_to_string(format!("/proc/{}/comm", holder.id())).ok()?;
                (name.trim() == "sleep").then_some(())
            });
            assert!(theirs().contains(" - nsfs "));
            podvisor(&["stop", "-t", "1", "p"]).ok();
            podvisor(&["inspect", "p"]).ok();
            podvisor(&["rm", "p"]).ok();
            assert!(!theirs().contains(" - nsfs "));
            holder.kill().unwrap();
            holder.wait().unwrap();
            before.assert_unchanged();
        },
    );
}

/// FL-045: `ip netns add` between two pods leaves both of them, and itself, valid.
#[test]
fn ip_netns_and_pods_do_not_get_into_each_others_way() {
    sandboxed(
        "netns::ip_netns_and_pods_do_not_get_into_each_others_way",
        || {
            let _plugin = rig::fake_network();
            let rootfs = rootfs::make();
            let before = Snapshot::take();
            kit::run("a", &rootfs, &[]).ok();
            tool("ip", &["netns", "add", "x"]);
            kit::run("b", &rootfs, &[]).ok();
            let links: Vec<String> = fs::read_dir("/run/netns")
                .unwrap()
                .map(|e| e.unwrap().file_name().into_string().unwrap())
                .collect();
            assert_eq!(links.len(), 3, "{links:?}");
            let inside = |name: &str| {
                tool(
                    "ip",
                    &["netns", "exec", name, "readlink", "/proc/self/ns/net"],
                )
            };
            let mut seen: Vec<String> = links.iter().map(|name| inside(name)).collect();
            seen.sort();
            seen.dedup();
            assert_eq!(seen.len(), 3);
            kit::gone("a");
            tool("ip", &["netns", "del", "x"]);
            kit::gone("b");
            tool("umount", &["/run/netns"]);
            before.assert_unchanged();
        },
    );
}

#[test]
fn without_a_place_for_links_pods_come_and_go_all_the_same() {
    sandboxed(
        "netns::without_a_place_for_links_pods_come_and_go_all_the_same",
        || {
            let _plugin = rig::fake_network();
            let rootfs = rootfs::make();
            fs::remove_dir("/run/netns").unwrap();
            let before = Snapshot::take();
            kit::run("a", &rootfs, &[]).ok();
            assert_eq!(fs::read_dir("/run/netns").unwrap().count(), 1);
            // Read-only from now on: the link of the first cannot go, that of the second cannot come.
            tool("mount", &["--bind", "/run/netns", "/run/netns"]);
            tool("mount", &["-o", "remount,bind,ro", "/run/netns"]);
            kit::run("b", &rootfs, &[]).ok();
            kit::gone("a");
            kit::gone("b");
            tool("umount", &["/run/netns"]);
            let left: Vec<_> = fs::read_dir("/run/netns")
                .unwrap()
                .map(|e| e.unwrap().path())
                .collect();
            assert_eq!(left.len(), 1);
            fs::remove_file(&left[0]).unwrap();
            before.assert_unchanged();
        },
    );
}
