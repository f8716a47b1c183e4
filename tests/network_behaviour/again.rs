//! What is there twice: an address, a port, a plugin's try, the netns of our own threads.

use std::fs::{self, File};
use std::net::{SocketAddr, TcpStream, UdpSocket};
use std::os::fd::AsFd;
use std::time::Duration;

use nix::sched::CloneFlags;
use podvisor::error::{Context, Kind};
use podvisor::sys::thread_ns::{self, Enter};
use serde_json::{Value, json};

use crate::place;
use crate::rig::{self, Pod};
use crate::support::fake::Act;
use crate::support::{Snapshot, cni, eventually, podvisor, rootfs, sandboxed};

const BOUND: Duration = Duration::from_secs(30);

/// FL-012, and rust-notes on DEL with a deadline that is over: the caller left, the chain's bound passed, and the DEL
/// of the good ADD has a bound of its own.
#[test]
fn a_del_has_a_bound_of_its_own_after_the_callers_and_the_adds_are_over() {
    sandboxed(
        "again::a_del_has_a_bound_of_its_own_after_the_callers_and_the_adds_are_over",
        || {
            rig::settings("[cni]\nadd_timeout = 3.0\ndel_timeout = 20.0\n");
            let [good, hangs] = place::fakes(["good", "hangs"]);
            good.on("DEL", &[Act::Sleep(4.0)]);
            hangs.on("ADD", &[Act::IgnoreTerm, Act::Sleep(600.0)]);
            let before = Snapshot::take();
            let pod = Pod::create("p1");
            let error = pod.probe().start("p1", Duration::from_secs(1)).unwrap_err();
            println!("the caller left: {error}");
            eventually(BOUND, "the DEL has ended", || {
                let calls = good.calls_of("DEL");
                calls.first()?.end.clone()
            });
            let (add, del) = (good.calls_of("ADD").remove(0), good.calls_of("DEL"));
            assert_eq!((del.len(), hangs.count("DEL")), (1, 1));
            assert_eq!(del[0].end.as_deref(), Some("0"), "it was not cut short");
            for name in ["CNI_CONTAINERID", "CNI_NETNS", "CNI_IFNAME", "CNI_ARGS"] {
                assert_eq!(add.var(name), del[0].var(name), "{name}");
            }
            pod.bundle.delete();
            before.assert_unchanged();
        },
    );
}

/// CRI-O's item 29: who asked is told the cause while the roll-back is at work; the id is taken for as long.
#[test]
fn an_error_does_not_wait_for_a_slow_del_and_the_id_is_taken_meanwhile() {
    sandboxed(
        "again::an_error_does_not_wait_for_a_slow_del_and_the_id_is_taken_meanwhile",
        || {
            let [plugin] = place::fakes(["fake"]);
            plugin
                .on(
                    "ADD",
                    &[
                        Act::Stderr("no address is free".into()),
                        Act::Exit(3),
                        Act::OnlyFirst(1),
                    ],
                )
                .on("DEL", &[Act::WaitFor("/run/go".into())]);
            let before = Snapshot::take();
            let pod = Pod::create("p1");
            let error = pod.probe().start("p1", rig::BOUND).unwrap_err();
            assert!(error.to_string().contains("no address is free"), "{error}");
            rig::called(&plugin, "DEL", 1);
            assert_eq!(plugin.calls_of("DEL")[0].end, None, "it is still at it");
            let error = pod.probe().start("p1", rig::BOUND).unwrap_err();
            assert_eq!(error.kind(), Kind::Busy, "{error}");
            assert!(error.to_string().contains("rolled back"), "{error}");
            assert_eq!(plugin.count("ADD"), 1);
            fs::write("/run/go", "").unwrap();
            eventually(BOUND, "the roll-back has ended", || {
                pod.probe().start("p1", rig::BOUND).ok()
            });
            assert_eq!((plugin.count("ADD"), plugin.count("DEL")), (2, 1));
            pod.end();
            before.assert_unchanged();
        },
    );
}

/// rust-notes C.2 22, 23, 26: whatever makes netns and runs plugins, no thread of a supervisor ends up in a pod's.
#[test]
fn no_thread_of_a_supervisor_is_in_a_pods_netns() {
    sandboxed(
        "again::no_thread_of_a_supervisor_is_in_a_pods_netns",
        || {
            let [_plugin] = place::fakes(["fake"]);
            let before = Snapshot::take();
            let pod = Pod::up("p1");
            let own = fs::read_link("/proc/self/ns/net").unwrap();
            let infra = pod.record().unwrap().infra.unwrap().pid;
            assert_ne!(fs::read_link(format!("/proc/{infra}/ns/net")).unwrap(), own);
            let tasks = format!("/proc/{}/task", pod.supervisor());
            let mut seen = 0;
            for task in fs::read_dir(tasks).unwrap().flatten() {
                // One that ends meanwhile is in no netns.
                if let Ok(netns) = fs::read_link(task.path().join("ns/net")) {
                    assert_eq!(netns, own, "{task:?}");
                    seen += 1;
                }
            }
            assert!(seen > 0);
            pod.end();
            before.assert_unchanged();
        },
    );
}

/// FL-047: the same address of both families, again at once, three times.
#[test]
fn a_pod_with_the_same_addresses_is_reached_again_at_once() {
    sandboxed(
        "again::a_pod_with_the_same_addresses_is_reached_again_at_once",
        || {
            let one = |subnet: &str, ip: &str| json!([{"subnet": subnet, "rangeStart": ip, "rangeEnd": ip}]);
            let ranges = json!([
                one("10.87.1.0/24", "10.87.1.7"),
                one("fd87::/64", "fd87::7")
            ]);
            bridge(ranges);
            let rootfs = rootfs::make();
            fs::write(rootfs.path().join("www/index.html"), "hello").unwrap();
            for round in 0..4 {
                // The first one brings the bridge its addresses.
                let before = (round > 0).then(Snapshot::take);
                let fixed = ["run", "-d", "--name", "p", "--rootfs", rootfs.str()];
                let command = ["--", "httpd", "-f", "-p", "80", "-h", "/www"];
                podvisor(&[&fixed[..], &command[..]].concat()).ok();
                for to in ["10.87.1.7:80", "[fd87::7]:80"] {
                    let to: SocketAddr = to.parse().unwrap();
                    eventually(BOUND, &format!("{to} answers, round {round}"), || {
                        TcpStream::connect_timeout(&to, Duration::from_secs(1)).ok()
                    });
                }
                podvisor(&["rm", "-f", "p"]).ok();
                if let Some(before) = before {
                    before.assert_unchanged();
                }
            }
        },
    );
}

/// FL-049: somebody keeps sending, so that the kernel remembers the old pod for as long.
#[test]
fn datagrams_reach_the_next_pod_on_a_port_while_they_keep_coming() {
    sandboxed(
        "again::datagrams_reach_the_next_pod_on_a_port_while_they_keep_coming",
        || {
            bridge(json!([[{"subnet": "10.87.1.0/24"}]]));
            let create = |name: &str| {
                let made = podvisor(&["create", "--name", name, "--publish", "5353:53/udp"]).ok();
                bound(made.stdout.trim())
            };
            // One source port all the time: that is what the kernel remembers.
            let sender = UdpSocket::bind("0.0.0.0:0").unwrap();
            let arrives = |at: &UdpSocket| {
                eventually(BOUND, "a datagram", || {
                    sender.send_to(b"hello", "10.87.1.1:5353").ok();
                    at.recv(&mut [0; 16]).ok()
                });
            };
            for warm in [true, false] {
                // The first pods bring the bridge its address and the tables their chains.
                let before = (!warm).then(Snapshot::take);
                let first = create("a");
                arrives(&first);
                drop(first);
                podvisor(&["rm", "-f", "a"]).ok();
                sender.send_to(b"nobody", "10.87.1.1:5353").ok();
                let second = create("b");
                arrives(&second);
                podvisor(&["rm", "-f", "b"]).ok();
                if let Some(before) = before {
                    before.assert_unchanged();
                }
            }
        },
    );
}

/// A network `pods` on the bridge `pvt0` that publishes ports, without masquerading.
fn bridge(ranges: Value) {
    let made = std::process::Command::new("ip")
        .args(["link", "add", "pvt0", "type", "bridge"])
        .status();
    assert!(made.unwrap().success());
    let ipam = json!({"type": "host-local", "ranges": ranges});
    let plugin = json!({"type": "bridge", "bridge": "pvt0", "isGateway": true, "ipam": ipam});
    cni::network("pods", vec![plugin]).portmap().write();
}

/// A socket at port 53 of a pod.
fn bound(id: &str) -> UdpSocket {
    let journal = fs::read(format!("/run/podvisor/default/{id}/journal.json")).unwrap();
    let journal: Value = serde_json::from_slice(&journal).unwrap();
    let netns = File::open(journal["network"]["netns"].as_str().unwrap()).unwrap();
    let inside = [Enter::Join(netns.as_fd(), CloneFlags::CLONE_NEWNET)];
    let bind = || UdpSocket::bind("0.0.0.0:53").context(|| "bind port 53");
    let socket = thread_ns::run(&inside, bind).unwrap();
    socket
        .set_read_timeout(Some(Duration::from_millis(100)))
        .unwrap();
    socket
}
