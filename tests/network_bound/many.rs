//! Many pods at once: side by side, in turns, and again where two got into each other's way.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::time::Duration;

use podvisor::config::Config;
use podvisor::network::{self, Attachment, NetworkRecord, netns};
use podvisor::process::Reaper;
use serde_json::json;

use crate::kit;
use crate::rig;
use crate::support::fake::{self, Act};
use crate::support::{Output, Snapshot, cni, eventually, podvisor, rootfs, sandboxed};

/// `count` pods `p0..` run at once, each by a process of its own.
fn run_all(count: usize, meanwhile: impl FnOnce()) -> Vec<Output> {
    let rootfs = rootfs::make();
    std::thread::scope(|scope| {
        let rootfs = &rootfs;
        let runs: Vec<_> = (0..count)
            .map(|n| scope.spawn(move || kit::run(&format!("p{n}"), rootfs, &[])))
            .collect();
        meanwhile();
        runs.into_iter().map(|run| run.join().unwrap()).collect()
    })
}

fn all_gone(count: usize) {
    (0..count).for_each(|n| kit::gone(&format!("p{n}")));
}

/// FL-031: a slow ADD serialises nothing. All ten are at work before the first one ends.
#[test]
fn ten_slow_adds_run_side_by_side() {
    sandboxed("many::ten_slow_adds_run_side_by_side", || {
        let plugin = rig::fake_network();
        plugin.on("ADD", &[Act::WaitFor("/run/go".into())]);
        let before = Snapshot::take();
        let outputs = run_all(10, || {
            rig::called(&plugin, "ADD", 10);
            fs::write("/run/go", "").unwrap();
        });
        outputs.into_iter().for_each(|output| drop(output.ok()));
        all_gone(10);
        before.assert_unchanged();
    });
}

/// FL-022: hanging ADDs take every turn of their network; the host's network, other networks and questions go on, and
/// a pod of the full network can be removed.
#[test]
fn a_network_that_is_full_of_hanging_adds_holds_nobody_else_up() {
    sandboxed(
        "many::a_network_that_is_full_of_hanging_adds_holds_nobody_else_up",
        || {
            rig::settings("[cni]\nparallel = 2\n");
            let plugin = rig::fake_network();
            let other = fake::plugin(Path::new(cni::PLUGINS), "other");
            cni::network("zother", vec![json!({"type": "other"})]).write();
            let rootfs = rootfs::make();
            let before = Snapshot::take();
            kit::run("up", &rootfs, &[]).ok();
            plugin.on("ADD", &[Act::WaitFor("/run/go".into())]);
            let outputs = run_all(5, || {
                rig::called(&plugin, "ADD", 3);
                // All five are on their way before it is looked at again.
                eventually(Duration::from_secs(30), "five pods wait", || {
                    let listed = podvisor(&["ps", "-a"]).ok().stdout;
                    (0..5)
                        .all(|n| listed.contains(&format!("p{n}")))
                        .then_some(())
                });
                kit::run("host", &rootfs, &["--net", "host"]).ok();
                kit::run("elsewhere", &rootfs, &["--net", "zother"]).ok();
                kit::gone("host");
                kit::gone("elsewhere");
                kit::gone("up");
                assert_eq!((plugin.count("ADD"), plugin.count("DEL")), (3, 1));
                assert_eq!(other.count("DEL"), 1);
                fs::write("/run/go", "").unwrap();
            });
            outputs.into_iter().for_each(|output| drop(output.ok()));
            assert_eq!(plugin.count("ADD"), 6);
            all_gone(5);
            before.assert_unchanged();
        },
    );
}

/// FL-021: a plugin whose own lock times out gets no more calls at a time than it can bear.
#[test]
fn a_plugin_whose_own_lock_times_out_is_called_in_turns() {
    sandboxed(
        "many::a_plugin_whose_own_lock_times_out_is_called_in_turns",
        || {
            rig::settings("[cni]\nparallel = 3\n");
            locking(1.0, 0.2);
            let before = Snapshot::take();
            let outputs = run_all(12, || ());
            outputs.into_iter().for_each(|output| drop(output.ok()));
            let calls = fs::read_to_string("/run/calls").unwrap();
            println!("{} ADDs for 12 pods", calls.lines().count());
            all_gone(12);
            before.assert_unchanged();
        },
    );
}

/// FL-021 at its size.
#[test]
#[ignore = "slow: 150 pods"]
fn slow_150_pods_on_a_plugin_whose_own_lock_times_out() {
    sandboxed(
        "many::slow_150_pods_on_a_plugin_whose_own_lock_times_out",
        || {
            locking(5.0, 0.1);
            let before = Snapshot::take();
            let outputs = run_all(150, || ());
            outputs.into_iter().for_each(|output| drop(output.ok()));
            let calls = fs::read_to_string("/run/calls").unwrap();
            println!("{} ADDs for 150 pods", calls.lines().count());
            all_gone(150);
            before.assert_unchanged();
        },
    );
}

/// A plugin that holds one lock for `work` seconds, and waits for it at most `patience`.
fn locking(patience: f64, work: f64) {
    let text = format!(
        "[ $CNI_COMMAND = ADD ] || exit 0\necho $CNI_CONTAINERID >>/run/calls\nexec 9>/run/plugin.lock\n\
         flock -w {patience} 9 || {{ echo '{{\"code\":999,\"msg\":\"timed out locking the store\"}}'; exit 1; }}\nsleep {work}\n{}",
        kit::GOOD
    );
    kit::script("locks", &text);
}

/// FL-019: no second ADD without a DEL, neither ours after "try again later" nor one of the caller's.
#[test]
fn a_second_add_comes_only_after_a_del() {
    sandboxed("many::a_second_add_comes_only_after_a_del", || {
        // Makes an interface in the netns and fails; stumbles over it when it is still there.
        let text = format!(
            "echo $CNI_COMMAND >>/run/verbs\ninside() {{ nsenter --net=\"$CNI_NETNS\" \"$@\"; }}\n\
             [ $CNI_COMMAND = ADD ] || {{ inside ip link del veth9 2>/dev/null; exit 0; }}\n\
             inside ip link add veth9 type veth peer name eth0 || {{ echo '{{\"code\":999,\"msg\":\"container veth name (eth0) is taken\"}}'; exit 1; }}\n\
             n=$(cat /run/failures); [ $n = 0 ] || {{ echo $((n - 1)) >/run/failures; cat /run/failure; exit 1; }}\n{}",
            kit::GOOD
        );
        kit::script("half", &text);
        let rootfs = rootfs::make();
        let before = Snapshot::take();
        let verbs = || {
            let seen = fs::read_to_string("/run/verbs").unwrap_or_default();
            fs::write("/run/verbs", "").unwrap();
            seen.split_whitespace().collect::<Vec<_>>().join(" ")
        };
        let fail = |times: u32, object: serde_json::Value| {
            fs::write("/run/failures", times.to_string()).unwrap();
            fs::write("/run/failure", object.to_string()).unwrap();
        };
        fail(2, json!({"code": 11, "msg": "later"}));
        kit::run("p", &rootfs, &[]).ok();
        assert_eq!(verbs(), "ADD DEL ADD DEL ADD");
        kit::gone("p");
        verbs();
        // Three tries, then it is the caller's; the last DEL is the roll-back's.
        fail(3, json!({"code": 11, "msg": "later"}));
        let output = kit::run("p", &rootfs, &[]).code_is(125);
        assert!(output.stderr.contains("the last of 3 tries"), "{output:#?}");
        assert_eq!(verbs(), "ADD DEL ADD DEL ADD DEL");
        // Any other failure is not repeated by us; the caller's repetition finds a clean netns.
        fail(1, json!({"code": 7, "msg": "no"}));
        kit::run("p", &rootfs, &[]).code_is(125);
        kit::run("p", &rootfs, &[]).ok();
        assert_eq!(verbs(), "ADD DEL ADD");
        kit::gone("p");
        before.assert_unchanged();
    });
}

/// FL-020: the first pods on a bridge that is not there yet.
#[test]
fn the_first_twenty_pods_on_a_fresh_bridge_all_get_an_address() {
    sandboxed(
        "many::the_first_twenty_pods_on_a_fresh_bridge_all_get_an_address",
        || {
            for (set, dir) in cni::plugin_sets() {
                println!("plugins: {set}");
                fresh_bridge(&dir);
            }
        },
    );
}

fn fresh_bridge(plugins: &Path) {
    let network = cni::bridge("fresh", "pvt9", "10.88.0.0/24");
    network.write_in(Path::new(cni::CONFIGS));
    let mut config = Config::default();
    config.cni.plugin_dirs = vec![plugins.to_path_buf()];
    let conf = network::load_conf(&config, Some("fresh")).unwrap();
    let before = Snapshot::take();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let _inside = runtime.enter();
    let reaper = Reaper::start().unwrap();
    let pod = |n: usize| {
        let id = format!("p{n}");
        let path = netns::path(&config, "test", &id);
        netns::make(&path).unwrap();
        let attachment = Attachment {
            container_id: id.clone(),
            netns: path,
            ifname: "eth0".into(),
            args: Vec::new(),
            port_mappings: Vec::new(),
            capabilities: Default::default(),
        };
        (NetworkRecord::at(&config, "test", &id), attachment)
    };
    let pods: Vec<_> = (0..20).map(pod).collect();
    runtime.block_on(async {
        let mut adds = Vec::new();
        for (record, attachment) in pods.clone() {
            let (config, reaper, conf) = (config.clone(), reaper.clone(), conf.clone());
            adds.push(tokio::spawn(async move {
                network::add(&config, &reaper, &record, &conf, &attachment).await
            }));
        }
        let mut ips = BTreeSet::new();
        for add in adds {
            ips.extend(add.await.unwrap().unwrap().ips);
        }
        assert_eq!(ips.len(), 20, "{ips:?}");
        for (record, attachment) in &pods {
            network::del(&config, &reaper, record, Duration::from_secs(60))
                .await
                .unwrap();
            netns::unpin(&attachment.netns).unwrap();
            record.remove().unwrap();
        }
    });
    kit::tool("ip", &["link", "del", "pvt9"]);
    before.assert_unchanged();
}
