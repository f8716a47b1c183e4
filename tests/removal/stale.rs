//! FL-070: two thousand pods that are dead and of which everything on record is still there.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use nix::sys::wait::{Id, WaitPidFlag, waitid};
use nix::unistd::Pid;
use podvisor::config::Config;
use podvisor::network::{self, Attachment, Holder, NetworkConf, NetworkRecord};
use podvisor::pod::journal;
use podvisor::pod::record::{self, State};
use podvisor::process::Identity;

use crate::rig;
use crate::support::bin::PODVISOR;
use crate::support::fake::Act;
use crate::support::{Sandbox, Snapshot, eventually, podvisor};

const DEAD: usize = 2000;

/// As many more reads as the whole of one pod's life costs would mean that it reads what is others'.
const FEW: u64 = 200;

/// A process that is not there.
fn nobody() -> Identity {
    Identity {
        pid: i32::MAX - 1,
        start_time: 1,
    }
}

/// Everything that `count` pods leave whose supervisors were killed: journals, their networks' records, the files of their
/// sockets; a DEL of `owed`, where that is given.
fn leave_dead(config: &Config, count: usize, owed: Option<&NetworkConf>) {
    let private = |dir: &Path| {
        fs::create_dir_all(dir).unwrap();
        fs::set_permissions(dir, fs::Permissions::from_mode(0o700)).unwrap();
    };
    private(&config.runtime_root);
    let sockets = config.runtime_root.join("s");
    private(&sockets);
    for n in 0..count {
        let id = format!("dead{n:04}");
        let dir = config.sandbox_dir("default", &id);
        private(dir.parent().unwrap());
        private(&dir);
        let socket = sockets.join(format!("{n:064x}"));
        drop(std::os::unix::net::UnixListener::bind(&socket).unwrap());
        let mut record = journal::blank("default", &id);
        record.supervisor = Some(nobody());
        record.address = format!("unix://{}", socket.display());
        record.state = State::Ready;
        record.network.ours = true;
        let network = NetworkRecord::at(config, "default", &id);
        record.network.place = network.place().to_owned();
        journal::write(&dir, &record).unwrap();
        let holder = Holder {
            namespace: "default".into(),
            sandbox_id: id.clone(),
            name: id.clone(),
            boot_id: record.boot_id.clone(),
            supervisor: Some(nobody()),
            ..Holder::default()
        };
        network.hold(&holder).unwrap();
        if let Some(conf) = owed {
            let attachment = Attachment {
                container_id: id,
                netns: config.runtime_root.join("netns").join(network.place()),
                ifname: "eth0".into(),
                args: Vec::new(),
                port_mappings: Vec::new(),
                capabilities: serde_json::Map::new(),
            };
            network.begin(conf, &attachment).unwrap();
        }
    }
}

/// Runs the command; how often it called read.
#[allow(
    clippy::disallowed_methods,
    reason = "WNOWAIT takes nobody's exit code, and this process has no reaper"
)]
fn reads(args: &[&str]) -> u64 {
    let mut command = Command::new(PODVISOR);
    command.args(args).stdin(Stdio::null());
    let mut child = command.stdout(Stdio::null()).spawn().unwrap();
    let pid = Pid::from_raw(child.id().cast_signed());
    // Its figures are there until it is waited for.
    waitid(Id::Pid(pid), WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT).unwrap();
    let reads = reads_of(pid.as_raw());
    assert!(child.wait().unwrap().success(), "{args:?}");
    reads
}

fn reads_of(pid: i32) -> u64 {
    let figures = fs::read_to_string(format!("/proc/{pid}/io")).unwrap();
    let line = figures.lines().find_map(|l| l.strip_prefix("syscr: "));
    line.unwrap().parse().unwrap()
}

/// Reads of the life of one pod: to make, list, stop and remove it, and of its supervisor meanwhile.
fn life() -> [u64; 5] {
    let create = reads(&["create", "--name", "web"]);
    let dir = living();
    let list = reads(&["ps"]);
    // Its supervisor looks, a second after its start, whether a DEL is owed on the node.
    std::thread::sleep(Duration::from_secs(3));
    let supervisor = record::read(&dir).unwrap().supervisor.unwrap().pid;
    let own = reads_of(supervisor);
    let stop = reads(&["stop", "web"]);
    let rm = reads(&["rm", "web"]);
    [create, list, own, stop, rm]
}

/// Directory of the one pod that lives.
fn living() -> PathBuf {
    let config = Config::default();
    let found = record::list(&config, Some("default")).into_iter();
    let mut living = found.filter_map(|f| match f {
        record::Found::Record(r) if r.is_supervised() => Some(r.id.clone()),
        _ => None,
    });
    config.sandbox_dir("default", &living.next().unwrap())
}

#[test]
fn two_thousand_dead_pods_delay_nobody_and_gc_takes_them_all() {
    let name = "stale::two_thousand_dead_pods_delay_nobody_and_gc_takes_them_all";
    Sandbox::new(name)
        .bound(Duration::from_secs(900))
        .run(|| {
            let plugin = rig::fake_network();
            let before = Snapshot::take();
            let alone = life();
            before.assert_unchanged();
            let config = Config::default();
            leave_dead(&config, DEAD, None);
            let among = life();
            println!("reads alone {alone:?}, among {DEAD} dead pods {among:?} (create, ps, supervisor, stop, rm)");
            for (n, what) in [(0, "create"), (3, "stop"), (4, "rm")] {
                assert!(among[n] <= alone[n] + FEW, "{what}: {} and {}", alone[n], among[n]);
            }
            // These look at each once: their journals, the records of their networks.
            let each = |n: usize| (among[n] - alone[n].min(among[n])) / DEAD as u64;
            assert!(each(1) <= 8 && each(2) <= 8, "{alone:?} {among:?}");
            let listed = podvisor(&["ps", "-q"]).ok();
            assert_eq!(listed.stdout.lines().count(), DEAD);
            // One of them by its id, at the price of one.
            let rm = reads(&["rm", "dead0007"]);
            assert!(rm <= alone[4] + FEW, "rm of a dead one: {rm}");
            let gc = crate::support::run(Command::new(PODVISOR).arg("gc"), Duration::from_secs(600));
            println!("gc took {:?}", gc.took);
            let gc = gc.ok();
            assert_eq!(gc.stdout.lines().filter(|l| l.contains("undone")).count(), DEAD - 1);
            eventually(Duration::from_secs(30), "nothing is left", || {
                before.changes().is_empty().then_some(())
            });
            assert_eq!((plugin.count("ADD"), plugin.count("DEL")), (2, 2));
        });
}

/// FL-070: what three hundred dead pods owe takes a plugin a fifth of a second each; a new pod does not wait for that.
#[test]
fn dels_owed_by_three_hundred_dead_pods_delay_no_new_one() {
    const OWING: usize = 300;
    let name = "stale::dels_owed_by_three_hundred_dead_pods_delay_no_new_one";
    Sandbox::new(name).bound(Duration::from_secs(600)).run(|| {
        let plugin = rig::fake_network();
        let before = Snapshot::take();
        let config = Config::default();
        let conf = network::load_conf(&config, None).unwrap();
        leave_dead(&config, OWING, Some(&conf));
        plugin.on("DEL", &[Act::Sleep(0.2)]);
        let mut gc = Command::new(PODVISOR)
            .arg("gc")
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        eventually(Duration::from_secs(60), "the first DEL", || {
            (plugin.count("DEL") > 0).then_some(())
        });
        podvisor(&["create", "--name", "web"]).ok();
        assert!(podvisor(&["ps"]).ok().stdout.contains("web"));
        podvisor(&["rm", "-f", "web"]).ok();
        let sent = plugin.count("DEL");
        assert!(gc.try_wait().unwrap().is_none() && sent < OWING, "{sent}");
        assert!(gc.wait().unwrap().success());
        eventually(Duration::from_secs(60), "nothing is left", || {
            before.changes().is_empty().then_some(())
        });
        assert_eq!((plugin.count("ADD"), plugin.count("DEL")), (1, OWING + 1));
    });
}
