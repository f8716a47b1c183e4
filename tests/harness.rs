//! The harness itself: a residue check that finds nothing proves nothing, so each kind of leak is made here once.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

mod support;

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;
use support::fake::Act;
use support::{
    Containerd, Sandbox, Sandboxes, Scope, Snapshot, cni, eventually, fake, require, rootfs, run,
    sandbox, sandboxed,
};

const BOUND: Duration = Duration::from_secs(20);

/// Makes one leak and checks that it is named, and only it; then undoes it and checks that it is gone.
fn finds(leak: &[&str], make: &str, undo: &str) {
    let before = Scope::default().within(Duration::from_secs(3)).take();
    before.assert_unchanged();
    sh(make);
    let changes = before.changes();
    for text in leak {
        assert!(
            changes.iter().any(|change| change.contains(text)),
            "`{text}` is not in {changes:#?}"
        );
    }
    assert!(
        changes
            .iter()
            .all(|change| leak.iter().any(|text| change.contains(text))),
        "more than {leak:?}: {changes:#?}"
    );
    sh(undo);
    before.assert_unchanged();
}

fn sh(script: &str) {
    let out = Command::new("bash")
        .args(["-euc", script])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .status()
        .unwrap();
    assert!(out.success(), "{script}: {out}");
}

fn finds_in_sandbox(name: &str, leak: &[&str], make: &str, undo: &str) {
    sandboxed(name, || finds(leak, make, undo));
}

#[test]
fn residue_finds_a_process() {
    sandboxed("residue_finds_a_process", || {
        let make = "sleep 1000 >/dev/null 2>&1 & echo $! >/run/pid.txt";
        finds(&["+ process"], make, "kill $(cat /run/pid.txt)");
    });
}

#[test]
fn residue_finds_a_netns() {
    let leak = ["+ netns /run/netns/left", "+ mount /run/netns"];
    let make = "mount --bind /run/netns /run/netns; ip netns add other; ip netns del other";
    sandboxed("residue_finds_a_netns", || {
        sh(make);
        finds(&leak, "ip netns add left", "ip netns del left");
    });
}

#[test]
fn residue_finds_a_mount() {
    let (make, undo) = ("mkdir /run/m && mount -t tmpfs x /run/m", "umount /run/m");
    finds_in_sandbox(
        "residue_finds_a_mount",
        &["+ mount /run/m tmpfs x"],
        make,
        undo,
    );
}

#[test]
fn residue_finds_a_cgroup() {
    let make = "for d in /sys/fs/cgroup/memory /sys/fs/cgroup; do [ -e $d/cgroup.procs ] || continue; mkdir -p $d/podvisor/x; exit; done";
    let undo = "rmdir /sys/fs/cgroup/memory/podvisor/x || rmdir /sys/fs/cgroup/podvisor/x";
    finds_in_sandbox("residue_finds_a_cgroup", &["podvisor/x"], make, undo);
}

#[test]
fn residue_finds_a_veth() {
    let (make, undo) = (
        "ip link add veth-a type veth peer name veth-b",
        "ip link del veth-a",
    );
    finds_in_sandbox(
        "residue_finds_a_veth",
        &["+ link veth-a", "+ link veth-b"],
        make,
        undo,
    );
}

#[test]
fn residue_finds_a_lease_and_a_cached_result() {
    let make = "mkdir -p /var/lib/cni/networks/n /var/lib/cni/results; cd /var/lib/cni
        touch networks/n/10.1.0.2 networks/n/last_reserved_ip.0 networks/n/lock results/n-x-eth0";
    let undo = "rm /var/lib/cni/networks/n/10.1.0.2 /var/lib/cni/results/n-x-eth0";
    let leak = [
        "+ lease /var/lib/cni/networks/n/10.1.0.2",
        "+ lease /var/lib/cni/results/n-x-eth0",
    ];
    finds_in_sandbox(
        "residue_finds_a_lease_and_a_cached_result",
        &leak,
        make,
        undo,
    );
}

#[test]
fn residue_finds_a_firewall_rule_but_not_the_plugins_fixed_chains() {
    let make = "iptables -t nat -N CNI-HOSTPORT-DNAT; iptables -t nat -A PREROUTING -j CNI-HOSTPORT-DNAT
        iptables -t nat -N CNI-DN-1234; iptables -t nat -A CNI-HOSTPORT-DNAT -j CNI-DN-1234; nft add table inet mine";
    let undo = "iptables -t nat -F CNI-HOSTPORT-DNAT; iptables -t nat -X CNI-DN-1234; nft delete table inet mine";
    let leak = [
        "nat :CNI-DN-1234",
        "nat -A CNI-HOSTPORT-DNAT -j CNI-DN-1234",
        "nft inet mine",
    ];
    finds_in_sandbox(
        "residue_finds_a_firewall_rule_but_not_the_plugins_fixed_chains",
        &leak,
        make,
        undo,
    );
}

#[test]
fn residue_finds_sockets_state_and_bundles_but_not_empty_top_directories() {
    sandboxed(
        "residue_finds_sockets_state_and_bundles_but_not_empty_top_directories",
        || {
            let before = Scope::default().within(Duration::from_secs(1)).take();
            sh(
                "mkdir -p /run/podvisor/default /run/podvisor/s /run/podvisor/netns /var/lib/podvisor/pods",
            );
            before.assert_unchanged();
            let socket = UnixListener::bind("/run/podvisor/s/abc").unwrap();
            let make = "mkdir -p /run/podvisor/default/p1 /run/c/io.containerd.runtime.v2.task/ns/id/rootfs/bin /run/runc/c1
            touch /var/lib/podvisor/pods/abc";
            sh(make);
            let expected = [
                "+ bundle /run/c/io.containerd.runtime.v2.task/ns/id",
                "+ bundle /run/runc/c1",
                "+ socket /run/podvisor/s/abc",
                "+ state /run/podvisor/default/p1",
                "+ state /var/lib/podvisor/pods/abc",
            ];
            assert_eq!(before.changes(), expected);
            drop(socket);
        },
    );
}

#[test]
fn residue_finds_descriptors() {
    sandboxed("residue_finds_descriptors", || {
        let own = i32::try_from(std::process::id()).unwrap();
        let before = Scope::default()
            .fds_of(own)
            .within(Duration::from_millis(500))
            .take();
        let files = [
            fs::File::open("/etc/passwd").unwrap(),
            fs::File::open("/etc/passwd").unwrap(),
        ];
        assert_eq!(
            before.changes(),
            [format!("+ descriptor of {own}: /etc/passwd (2 times)")]
        );
        drop(files);
        before.assert_unchanged();
    });
}

#[test]
#[should_panic(expected = "(exit code, signal)")]
fn a_leak_fails_the_test_outside() {
    if !require::root() {
        panic!("(exit code, signal): skipped");
    }
    sandboxed("a_leak_fails_the_test_outside", || {
        let before = Scope::default().within(Duration::ZERO).take();
        sh("ip link add left type bridge");
        before.assert_unchanged();
    });
}

#[test]
#[should_panic(expected = "ran no test named")]
fn a_misspelt_name_does_not_pass() {
    if !require::root() {
        panic!("ran no test named: skipped");
    }
    sandboxed("no_such_test", || {});
}

#[test]
fn everything_in_a_sandbox_ends_at_its_bound() {
    let name = "everything_in_a_sandbox_ends_at_its_bound";
    if sandbox::inside() {
        sh("setsid sleep 98765 >/dev/null 2>&1 &");
        std::thread::sleep(Duration::from_secs(60));
    } else if require::root() {
        let run = || Sandbox::new(name).bound(Duration::from_secs(2)).run(|| {});
        let panic = std::panic::catch_unwind(run).unwrap_err();
        let message = panic.downcast_ref::<String>().unwrap();
        assert!(message.contains("did not end within 2s"), "{message}");
        eventually(BOUND, "nothing of it is left", || {
            processes_named("sleep 98765").is_empty().then_some(())
        });
    }
}

fn processes_named(line: &str) -> Vec<String> {
    let cmdline = |dir: fs::DirEntry| {
        fs::read_to_string(dir.path().join("cmdline")).map(|text| text.replace('\0', " "))
    };
    let all = fs::read_dir("/proc")
        .unwrap()
        .flatten()
        .filter_map(|dir| cmdline(dir).ok());
    all.filter(|text| text.contains(line)).collect()
}

#[test]
fn a_sandbox_leaves_the_machine_untouched() {
    let name = "a_sandbox_leaves_the_machine_untouched";
    if sandbox::inside() {
        return sandboxed(name, || {
            let dirt = "mkdir -p /etc/podvisor/x /opt/cni/bin/x /run/x /var/lib/podvisor/x
                ip link add b0 type bridge; ip netns add n0; mount -t tmpfs x /mnt; hostname x 2>/dev/null || true
                for d in /sys/fs/cgroup /sys/fs/cgroup/*; do [ ! -e $d/cgroup.procs ] || mkdir -p $d/default/x; done";
            sh(dirt);
        });
    }
    let before = machine();
    sandboxed(name, || unreachable!("outside"));
    let after = machine();
    let changed: Vec<&String> = before.symmetric_difference(&after).collect();
    assert!(changed.is_empty(), "{changed:#?}");
    for root in sandbox::cgroup_roots() {
        assert!(
            !root.join(sandbox::cgroup_name(name)).exists(),
            "{}",
            root.display()
        );
    }
}

/// What the sandbox above would change, if it could.
fn machine() -> BTreeSet<String> {
    let list = |dir: &str| {
        fs::read_dir(dir)
            .into_iter()
            .flatten()
            .flatten()
            .map(|entry| entry.path().display().to_string())
            .collect::<Vec<_>>()
    };
    let mut all: BTreeSet<String> = [
        "/run",
        "/run/netns",
        "/etc",
        "/etc/podvisor",
        "/opt",
        "/var/lib",
    ]
    .iter()
    .flat_map(|dir| list(dir))
    .collect();
    all.extend(
        fs::read_to_string("/proc/self/mountinfo")
            .unwrap()
            .lines()
            .map(String::from),
    );
    all.extend(list("/sys/class/net"));
    all.insert(fs::read_to_string("/proc/sys/kernel/hostname").unwrap());
    all
}

#[test]
fn orphans_are_reaped() {
    sandboxed("orphans_are_reaped", || {
        sh("for i in 1 2 3 4 5; do (sleep 0.2 >/dev/null 2>&1 &); done");
        let alone = || {
            fs::read_dir("/proc")
                .unwrap()
                .flatten()
                .filter(|dir| dir.file_name().to_string_lossy().parse::<u32>().is_ok())
                .count()
                == 2
        };
        eventually(BOUND, "only pid 1 and the test are left", || {
            alone().then_some(())
        });
    });
}

#[test]
fn runtimes_run_in_a_sandbox() {
    sandboxed("runtimes_run_in_a_sandbox", || {
        let rootfs = rootfs::make();
        for runtime in ["runc", "crun"] {
            if !require::tool(runtime) {
                continue;
            }
            let before = Snapshot::take();
            let bundle = bundle(rootfs.path(), runtime, &["/bin/sh", "-c", "exit 7"]);
            run(
                Command::new(runtime)
                    .args(["run", "-b"])
                    .arg(bundle.path())
                    .arg("c1"),
                BOUND,
            )
            .code_is(7);
            before.assert_unchanged();
        }
    });
}

/// A bundle with the runtime's own template of a configuration.
fn bundle(rootfs: &Path, runtime: &str, args: &[&str]) -> tempfile::TempDir {
    let dir = tempfile::Builder::new()
        .prefix("pvtest-bundle-")
        .tempdir()
        .unwrap();
    run(
        Command::new(runtime).arg("spec").current_dir(dir.path()),
        BOUND,
    )
    .ok();
    let file = dir.path().join("config.json");
    let mut spec: serde_json::Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    spec["process"]["terminal"] = false.into();
    spec["process"]["args"] = args.into();
    spec["root"]["path"] = rootfs.to_str().unwrap().into();
    fs::write(&file, spec.to_string()).unwrap();
    dir
}

#[test]
fn the_fake_runtime_fails_as_told_and_passes_the_rest_on() {
    sandboxed(
        "the_fake_runtime_fails_as_told_and_passes_the_rest_on",
        || {
            let Some(real) = require::find("runc") else {
                return;
            };
            let fake = fake::runtime_before(Path::new("/run/bin"), "runc", &real);
            let call = |args: &[&str]| run(Command::new(&fake.path).args(args), BOUND);
            fake.on(
                "CREATE",
                &[
                    Act::OnlyFirst(1),
                    Act::Exit(3),
                    Act::Stderr("no luck".into()),
                ],
            );
            call(&["--root", "/run/r", "create", "--bundle", "/run/none", "c1"])
                .code_is(3)
                .fails_with("no luck");
            let real_error = call(&["--root", "/run/r", "create", "--bundle", "/run/none", "c1"]);
            assert!(real_error.stderr.contains("/run/none"), "{real_error:#?}");
            call(&["--version"]).ok();
            assert_eq!((fake.count("CREATE"), fake.count("NONE")), (2, 1));
            assert_eq!(fake.calls_of("CREATE")[0].args.last().unwrap(), "c1");
        },
    );
}

fn call_plugin(fake: &fake::Fake, command: &str, stdin: &str, bound: Duration) -> support::Output {
    let mut line = Command::new(&fake.path);
    line.env("CNI_COMMAND", command)
        .env("CNI_CONTAINERID", "c1")
        .env("CNI_IFNAME", "eth0")
        .env("CNI_NETNS", "/run/netns/x");
    support::bin::run_with(&mut line, Some(stdin.as_bytes()), bound)
}

#[test]
fn the_fake_plugin_does_what_it_is_told() {
    let dir = tempfile::tempdir().unwrap();
    let fake = fake::plugin(dir.path(), "fake");
    let config = r#"{"cniVersion": "1.0.0", "name": "n", "type": "fake"}"#;
    let call = |command: &str| call_plugin(&fake, command, config, BOUND);

    let result: serde_json::Value = serde_json::from_str(&call("ADD").ok().stdout).unwrap();
    assert_eq!(result["ips"][0]["address"], "10.99.0.2/24");
    assert_eq!(call("DEL").ok().stdout, "");

    fake.on(
        "DEL",
        &[
            Act::OnlyFirst(2),
            Act::Print(r#"{"code":11,"msg":"it's later"}"#.into()),
        ],
    );
    fake.on("ADD", &[Act::Sleep(0.2), Act::Exit(7)]);
    // The first DEL above counts as one of the first two.
    assert_eq!(
        call("DEL").code_is(1).stdout,
        r#"{"code":11,"msg":"it's later"}"#
    );
    assert!(call("ADD").code_is(7).took >= Duration::from_millis(200));
    fake.on("ADD", &[Act::Signal("KILL".into())]);
    assert_eq!(call("ADD").signal, Some(9));
    fake.on("ADD", &[Act::Grandchild(3)]);
    assert!(call("ADD").ok().held_open);
    fake.on("ADD", &[]);
    assert!(!call("ADD").ok().held_open);

    let verbs: Vec<String> = fake.calls().into_iter().map(|call| call.verb).collect();
    assert_eq!(verbs, ["ADD", "DEL", "DEL", "ADD", "ADD", "ADD", "ADD"]);
    let first = &fake.calls()[0];
    assert_eq!(
        (
            first.var("CNI_CONTAINERID"),
            first.stdin.as_str(),
            first.end.as_deref()
        ),
        ("c1", config, Some("0"))
    );
    assert_eq!(fake.calls_of("ADD")[2].end.as_deref(), Some("KILL"));
}

#[test]
fn the_fake_plugin_stands_before_a_real_one() {
    sandboxed("the_fake_plugin_stands_before_a_real_one", || {
        if !require::cni_plugins() {
            return;
        }
        let real = cni::real_plugins().unwrap().join("bridge");
        let fake = fake::plugin_before(Path::new(cni::PLUGINS), "slow-bridge", &real);
        let network = cni::bridge("testnet", "pvt0", "10.87.1.0/24").portmap();
        network.write();
        let mut config = network.json()["plugins"][0].clone();
        config["cniVersion"] = "1.0.0".into();
        config["name"] = "testnet".into();
        sh("ip netns add first; ip netns del first");
        let before = Snapshot::take();
        sh("ip netns add x");
        let path = cni::real_plugins().unwrap();
        let call = |command: &str| {
            let mut line = Command::new(&fake.path);
            line.env("CNI_COMMAND", command)
                .env("CNI_CONTAINERID", "c1")
                .env("CNI_IFNAME", "eth0");
            line.env("CNI_NETNS", "/run/netns/x").env("CNI_PATH", &path);
            support::bin::run_with(&mut line, Some(config.to_string().as_bytes()), BOUND)
        };
        let result: serde_json::Value = serde_json::from_str(&call("ADD").ok().stdout).unwrap();
        assert_eq!(result["ips"][0]["address"], "10.87.1.2/24");
        let changes = before.changes().join("\n");
        for text in [
            "+ lease /var/lib/cni/networks/testnet/10.87.1.2",
            "+ link veth",
            "nat -A CNI-",
        ] {
            assert!(changes.contains(text), "`{text}` is not in {changes}");
        }
        call("DEL").ok();
        sh("ip netns del x");
        before.assert_unchanged();
    });
}

/// Starts, answers with the CRI plugin enabled, survives a restart, ends without a trace.
fn containerd_lives(test: &str, name: &str) {
    sandboxed(test, || {
        let Some(peer) = require::peer(name) else {
            return;
        };
        let before = Snapshot::take();
        let mut daemon = Containerd::start(&peer);
        let wanted = name.trim_start_matches("containerd-");
        let version = daemon.ctr(&["version"]).ok().stdout;
        let server = version.split("Server:").nth(1).unwrap_or_default();
        assert!(
            server.contains(&format!(" {wanted}.")) || server.contains(" 2.2."),
            "{version}"
        );
        let plugins = daemon.ctr(&["plugins", "ls"]).ok().stdout;
        let cri = plugins
            .lines()
            .find(|line| line.contains("io.containerd.grpc.v1") && line.contains(" cri "))
            .unwrap();
        assert!(cri.contains(" ok"), "{cri}\n{}", daemon.log());
        let pid = daemon.pid();
        daemon.restart();
        assert_ne!(daemon.pid(), pid);
        // A shim known to be clean passes the residue check under each of them.
        let rootfs = rootfs::make();
        let idle = Snapshot::take();
        let container = ["--rootfs", rootfs.str(), "c1", "/bin/echo", "hi"];
        let run = ["run", "--rm", "--runtime", "io.containerd.runc.v2"];
        assert_eq!(
            daemon.ctr(&[&run[..], &container].concat()).ok().stdout,
            "hi\n"
        );
        idle.assert_unchanged();
        daemon.stop();
        let left: Vec<String> = before
            .changes()
            .into_iter()
            .filter(|change| change.contains("process"))
            .collect();
        assert!(left.is_empty(), "{left:?}");
    });
}

#[test]
fn containerd_1_6_lives_in_a_sandbox() {
    containerd_lives("containerd_1_6_lives_in_a_sandbox", "containerd-1.6");
}

#[test]
fn containerd_1_7_lives_in_a_sandbox() {
    containerd_lives("containerd_1_7_lives_in_a_sandbox", "containerd-1.7");
}

#[test]
fn containerd_2_1_lives_in_a_sandbox() {
    containerd_lives("containerd_2_1_lives_in_a_sandbox", "containerd-2.1");
}

/// The shim that comes with containerd has no sandbox service, so the request is followed to the shim's refusal.
#[test]
fn containerds_sandbox_services_reach_the_shim() {
    sandboxed("containerds_sandbox_services_reach_the_shim", || {
        let Some(peer) = require::peer("containerd-2.1") else {
            return;
        };
        let daemon = Containerd::start(&peer);
        let mut sandboxes = Sandboxes::of(&daemon, "default", "io.containerd.runc.v2");
        let unknown = sandboxes.start("p1").unwrap_err();
        assert!(
            unknown.message.contains("unable to find sandbox"),
            "{unknown:?}"
        );
        let spec = serde_json::json!({ "ociVersion": "1.0.2", "root": { "path": "rootfs" } });
        let refused = sandboxes.create("p1", &spec).unwrap_err();
        assert_eq!(refused.code, 12, "{refused:?}");
        assert!(
            refused
                .message
                .contains("containerd.runtime.sandbox.v1.Sandbox"),
            "{refused:?}"
        );
        sandboxes.forget("p1").unwrap();
    });
}
