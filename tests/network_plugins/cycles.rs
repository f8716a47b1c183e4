//! Many pods, one after the other and side by side: nothing grows, also when things are killed at any moment.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::json;

use crate::daemon::{Bundle, shims};
use crate::kit::{self, BOUND};
use crate::place::{Set, bridge, each_set, host_local, network, portmap, tool};
use crate::support::bin::PODVISOR;
use crate::support::rootfs::{self, Rootfs};
use crate::support::{Snapshot, eventually, podvisor};

fn run_rm(worker: usize, cycle: usize, rootfs: &Rootfs) {
    let name = format!("p{worker}-{cycle}");
    let port = format!("{}:80", 8000 + worker);
    let begin = [
        "run",
        "--name",
        &name,
        "-p",
        &port,
        "--rootfs",
        rootfs.str(),
    ];
    // Half of the pods are removed by `--rm`, half by `rm`, of these half while they run.
    let (flags, command): (&[&str], _) = match cycle % 4 {
        0 | 2 => (&["--rm"], "true"),
        1 => (&[], "true"),
        _ => (&["-d"], "trap exit TERM; sleep 600 & wait"),
    };
    let end = ["--", "/bin/sh", "-c", command];
    podvisor(&[&begin[..], flags, &end[..]].concat()).ok();
    if flags != ["--rm"] {
        podvisor(&["rm", "-f", &name]).ok();
    }
}

/// Four at a time, on a network of the whole chain.
fn many(each: usize) -> impl Fn(&Set) {
    move |_| {
        let firewall = json!({"type": "firewall", "backend": "iptables"});
        let tuning = json!({"type": "tuning", "sysctl": {"net.core.somaxconn": "500"}});
        let subnets = ["10.87.1.0/26", "fd87::/64"];
        network("pods", vec![bridge(&subnets), portmap(), firewall, tuning]);
        let rootfs = rootfs::make();
        // What the plugins make once and keep.
        run_rm(0, 0, &rootfs);
        let before = Snapshot::take();
        let rules = rules();
        std::thread::scope(|scope| {
            for worker in 0..4 {
                let rootfs = &rootfs;
                scope.spawn(move || (0..each).for_each(|cycle| run_rm(worker, cycle, rootfs)));
            }
        });
        before.assert_unchanged();
        // Also what is kept by design does not grow.
        assert_eq!(self::rules(), rules);
        assert_eq!(leases("pods"), [""; 0]);
    }
}

fn rules() -> Vec<String> {
    let all = tool("iptables-save", &[]) + &tool("ip6tables-save", &[]);
    let mut rules: Vec<String> = all
        .lines()
        .filter(|l| l.starts_with("-A"))
        .map(str::to_owned)
        .collect();
    rules.sort_unstable();
    rules
}

/// FL-013, FL-041: a hundred pods in all.
#[test]
fn rules_leases_and_links_are_flat_after_a_hundred_pods() {
    each_set(
        "cycles::rules_leases_and_links_are_flat_after_a_hundred_pods",
        || {},
        |set| many(if set.is_old() { 13 } else { 12 })(set),
    );
}

#[test]
#[ignore = "slow: four hundred pods"]
fn rules_leases_and_links_are_flat_after_four_hundred_pods_slow() {
    each_set(
        "cycles::rules_leases_and_links_are_flat_after_four_hundred_pods_slow",
        || {},
        many(50),
    );
}

/// Addresses taken on a network.
fn leases(network: &str) -> Vec<String> {
    let dir = Path::new("/var/lib/cni/networks").join(network);
    let names = fs::read_dir(dir).into_iter().flatten().flatten();
    names
        .map(|e| e.file_name().into_string().unwrap())
        .filter(|name| name != "lock" && !name.starts_with("last_reserved_ip"))
        .collect()
}

/// Whom a cycle kills.
#[derive(Debug, Clone, Copy)]
enum Victim {
    Supervisor,
    Infra,
    Plugin,
}

/// Processes of this kind that run now.
fn victims(kind: Victim, plugins: &Path) -> Vec<i32> {
    if matches!(kind, Victim::Supervisor) {
        // Not the guards of plugins, which are forks of the supervisor: they end the plugins of one that was killed.
        let guard = |pid: &i32| {
            fs::read_to_string(format!("/proc/{pid}/comm"))
                .is_ok_and(|n| n.trim() == "podvisor-guard")
        };
        return shims().into_iter().filter(|pid| !guard(pid)).collect();
    }
    let pids = fs::read_dir("/proc").unwrap().flatten();
    pids.filter_map(|e| e.file_name().to_str()?.parse::<i32>().ok())
        .filter(|pid| {
            let proc = PathBuf::from(format!("/proc/{pid}"));
            match kind {
                Victim::Infra => fs::read_to_string(proc.join("comm"))
                    .is_ok_and(|name| name.trim_end() == "podvisor-infra"),
                _ => fs::read_link(proc.join("exe")).is_ok_and(|exe| exe.starts_with(plugins)),
            }
        })
        .collect()
}

/// Kills after a pause; for a plugin, which is there for a moment only, the first that is seen from then on.
fn strike(kind: Victim, plugins: &Path, pause: Duration) {
    std::thread::sleep(pause);
    for _ in 0..200 {
        let found = victims(kind, plugins);
        for pid in &found {
            let _ = kill(Pid::from_raw(*pid), Signal::SIGKILL);
        }
        if !found.is_empty() || !matches!(kind, Victim::Plugin) {
            return;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// The same moments in every run.
struct Moments(u64);

impl Moments {
    fn next(&mut self, below: u64) -> u64 {
        let Self(seed) = self;
        *seed = seed
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (*seed >> 33) % below
    }
}

/// FL-042: five addresses for pods, and things are killed while pods are made and removed.
fn kills(set: &Set, cycles: u64) {
    let plugins = &set.dir;
    // Without masquerading: the bridge plugin forgets its rules when it is killed half way.
    let ipam = host_local(&["10.87.1.0/29"]);
    let bridge = json!({"type": "bridge", "bridge": "pvt0", "isGateway": true, "ipam": ipam});
    let firewall = json!({"type": "firewall", "backend": "iptables"});
    network("pods", vec![bridge, portmap(), firewall]);
    let rootfs = rootfs::make();
    // What the plugins make once and keep.
    run_rm(0, 0, &rootfs);
    let before = Snapshot::take();
    let mut moments = Moments(0x0bad_5eed + u64::from(set.is_old()));
    let mut up = 0;
    for cycle in 0..cycles {
        let kind = [Victim::Supervisor, Victim::Infra, Victim::Plugin][moments.next(3) as usize];
        let pause = Duration::from_millis(moments.next(150));
        let what = format!("cycle {cycle}, {kind:?} after {pause:?}");
        if moments.next(3) == 0 {
            up += u64::from(by_daemon(
                &format!("{}{cycle}", set.name),
                kind,
                plugins,
                pause,
            ));
        } else {
            let again = Duration::from_millis(moments.next(150));
            let (name, pauses) = (format!("p{cycle}"), [pause, again]);
            up += u64::from(by_command(&name, &rootfs, kind, plugins, pauses));
        }
        eventually(BOUND, &format!("{what}: no lease is left"), || {
            let left = leases("pods");
            for name in &left {
                let text = fs::read_to_string(Path::new("/var/lib/cni/networks/pods").join(name));
                println!("{what}: {name} has {text:?}");
            }
            left.is_empty().then_some(())
        });
    }
    // Neither all nor none: then the moments would be no test.
    println!("{up} of {cycles} pods came up");
    assert!(up > 0 && up < cycles, "{up} of {cycles} pods came up");
    eventually(BOUND, "the end of all supervisors", || {
        shims().is_empty().then_some(())
    });
    before.assert_unchanged();
}

/// Struck while it is made, struck while it is removed, removed. Whether it came up.
fn by_command(
    name: &str,
    rootfs: &Rootfs,
    kind: Victim,
    plugins: &Path,
    pauses: [Duration; 2],
) -> bool {
    let mut up = None;
    let run = ["run", "-d", "--name", name, "-p", "8080:80", "--rootfs"];
    // It ends when it is asked to.
    let script = "trap exit TERM; sleep 600 & wait";
    let sleep = [rootfs.str(), "--", "/bin/sh", "-c", script];
    let remove = ["rm", "-f", name];
    let lines = [[&run[..], &sleep[..]].concat(), remove.to_vec()];
    for (line, pause) in lines.iter().zip(pauses) {
        let mut child = Command::new(PODVISOR)
            .args(line)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        strike(kind, plugins, pause);
        let status = eventually(BOUND, &format!("the end of {line:?}"), || {
            child.try_wait().unwrap()
        });
        let _ = *up.get_or_insert_with(|| status.success());
    }
    podvisor(&remove);
    up == Some(true)
}

/// As a daemon does it: `start`, the two calls, struck, and `delete` when the supervisor is gone. Whether it came up.
fn by_daemon(id: &str, kind: Victim, plugins: &Path, pause: Duration) -> bool {
    let bundle = Bundle::new(id);
    let pod = kit::Pod::of(bundle);
    let up = std::thread::scope(|scope| {
        let making = scope.spawn(|| {
            kit::on(async {
                let client = pod.connect().await;
                let mut config = kit::config(id);
                config
                    .annotations
                    .insert("io.podvisor.network".into(), "pods".into());
                let request = pod.request(Some(&config));
                // Whatever comes of it.
                kit::create(&client, &request).await.is_ok()
                    && kit::start(&client, id).await.is_ok()
            })
        });
        strike(kind, plugins, pause);
        making.join().unwrap()
    });
    let _ = kill(Pid::from_raw(pod.pid), Signal::SIGKILL);
    eventually(BOUND, "the end of the supervisor", || {
        (!shims().contains(&pod.pid)).then_some(())
    });
    pod.bundle.delete();
    up
}

#[test]
fn a_small_subnet_is_never_exhausted_in_sixty_cycles_with_kills() {
    each_set(
        "cycles::a_small_subnet_is_never_exhausted_in_sixty_cycles_with_kills",
        || {},
        |set| kills(set, 30),
    );
}

#[test]
#[ignore = "slow: five hundred cycles of each generation"]
fn a_small_subnet_is_never_exhausted_in_a_thousand_cycles_with_kills_slow() {
    each_set(
        "cycles::a_small_subnet_is_never_exhausted_in_a_thousand_cycles_with_kills_slow",
        || {},
        |set| kills(set, 500),
    );
}
