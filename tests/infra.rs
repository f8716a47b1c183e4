//! The infra process, for real. Needs root.
#![allow(
    clippy::expect_used,
    clippy::unwrap_used,
    reason = "a test may panic, also in its helpers"
)]

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::time::Duration;

use nix::sched::CloneFlags;
use podvisor::error::{Context, Kind};
use podvisor::infra::{IdMapping, InfraSpec, Namespace, PROGRAM, PodFiles, prepare};
use podvisor::process::{Child, Exit, Reaper};
use podvisor::sys::thread_ns::{Enter, run as in_namespaces};

const KINDS: [&str; 5] = ["net", "ipc", "uts", "mnt", "pid"];

fn run<F: Future>(test: F) -> F::Output {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .expect("make a runtime");
    runtime.block_on(test)
}

fn all_new() -> InfraSpec {
    InfraSpec {
        network: Namespace::New,
        ipc: Namespace::New,
        uts: Namespace::New,
        pid: Namespace::New,
        hostname: "web-1".to_owned(),
        ..InfraSpec::default()
    }
}

async fn start(reaper: &Reaper, spec: &InfraSpec) -> Child {
    prepare(reaper, spec)
        .await
        .expect("prepare")
        .run()
        .await
        .expect("run")
}

async fn end(child: &Child, signal: i32) -> Exit {
    assert!(child.signal(signal).expect("signal"));
    tokio::time::timeout(Duration::from_secs(20), child.wait())
        .await
        .expect("it ends")
}

fn namespace(pid: i32, kind: &str) -> PathBuf {
    fs::read_link(format!("/proc/{pid}/ns/{kind}")).expect("namespace")
}

fn own(kind: &str) -> PathBuf {
    fs::read_link(format!("/proc/self/ns/{kind}")).expect("own namespace")
}

fn status(pid: i32, key: &str) -> String {
    let text = fs::read_to_string(format!("/proc/{pid}/status")).expect("status");
    let line = text
        .lines()
        .find_map(|l| l.strip_prefix(key))
        .expect("a line of status");
    line.trim_start_matches(':').trim().to_owned()
}

fn descriptors(pid: i32) -> Vec<(String, PathBuf)> {
    let mut all: Vec<_> = fs::read_dir(format!("/proc/{pid}/fd"))
        .expect("list descriptors")
        .flatten()
        .map(|e| {
            (
                e.file_name().to_string_lossy().into_owned(),
                fs::read_link(e.path()).expect("descriptor"),
            )
        })
        .collect();
    all.sort();
    all
}

#[test]
fn namespaces_are_new_or_the_hosts_as_asked() {
    run(async {
        let reaper = Reaper::start().expect("start");
        let child = start(&reaper, &all_new()).await;
        for kind in KINDS {
            assert_ne!(namespace(child.pid(), kind), own(kind), "{kind}");
        }
        assert_eq!(namespace(child.pid(), "user"), own("user"));
        end(&child, libc::SIGKILL).await;

        let child = start(&reaper, &InfraSpec::default()).await;
        for kind in ["net", "ipc", "uts", "pid", "user"] {
            assert_eq!(namespace(child.pid(), kind), own(kind), "{kind}");
        }
        assert_ne!(namespace(child.pid(), "mnt"), own("mnt"));
        end(&child, libc::SIGKILL).await;
    });
}

#[test]
fn namespaces_are_joined_by_path() {
    run(async {
        let reaper = Reaper::start().expect("start");
        let first = start(&reaper, &all_new()).await;
        let path = |kind: &str| Namespace::Path(format!("/proc/{}/ns/{kind}", first.pid()).into());
        let spec = InfraSpec {
            network: path("net"),
            ipc: path("ipc"),
            uts: path("uts"),
            pid: path("pid"),
            ..InfraSpec::default()
        };
        let before = KINDS.map(own);
        let second = start(&reaper, &spec).await;
        for kind in ["net", "ipc", "uts", "pid"] {
            assert_eq!(
                namespace(second.pid(), kind),
                namespace(first.pid(), kind),
                "{kind}"
            );
        }
        assert_ne!(
            namespace(second.pid(), "mnt"),
            namespace(first.pid(), "mnt")
        );
        assert_eq!(KINDS.map(own), before, "we did not move");
        end(&second, libc::SIGTERM).await;
        end(&first, libc::SIGTERM).await;

        let gone = InfraSpec {
            network: Namespace::Path("/no/such/netns".into()),
            ..InfraSpec::default()
        };
        let error = prepare(&reaper, &gone).await.expect_err("prepare");
        assert!(error.to_string().contains("/no/such/netns"), "{error}");
        let file = InfraSpec {
            network: Namespace::Path("/etc/passwd".into()),
            ..InfraSpec::default()
        };
        assert!(prepare(&reaper, &file).await.is_err());
        let other = InfraSpec {
            network: Namespace::Path("/proc/self/ns/uts".into()),
            ..InfraSpec::default()
        };
        assert!(prepare(&reaper, &other).await.is_err());
    });
}

/// 086t, and no mount of the host.
#[test]
fn it_holds_nothing_of_the_host() {
    run(async {
        let reaper = Reaper::start().expect("start");
        let _held = File::open("/etc/passwd").expect("open");
        let child = start(&reaper, &all_new()).await;
        let null = |n: &str| (n.to_owned(), PathBuf::from("/dev/null"));
        assert_eq!(descriptors(child.pid()), [null("0"), null("1"), null("2")]);
        let link = |name: &str| fs::read_link(format!("/proc/{}/{name}", child.pid())).expect(name);
        assert_eq!(
            (link("cwd"), link("root")),
            (PathBuf::from("/"), PathBuf::from("/"))
        );
        assert!(
            link("exe")
                .to_string_lossy()
                .starts_with("/memfd:podvisor-infra")
        );
        let root = fs::read_dir(format!("/proc/{}/root/", child.pid())).expect("list its root");
        assert_eq!(root.count(), 0);

        let mounts =
            fs::read_to_string(format!("/proc/{}/mountinfo", child.pid())).expect("mounts");
        let lines: Vec<&str> = mounts.lines().collect();
        assert_eq!(lines.len(), 1, "{mounts}");
        for word in [" / / ro,nosuid,nodev,noexec", " - tmpfs podvisor ro,"] {
            assert!(lines[0].contains(word), "{mounts}");
        }
        end(&child, libc::SIGKILL).await;
    });
}

#[test]
fn it_has_no_privilege_left() {
    run(async {
        let reaper = Reaper::start().expect("start");
        let child = start(&reaper, &all_new()).await;
        let pid = child.pid();
        assert_eq!(status(pid, "Name"), "podvisor-infra");
        assert_eq!(
            (
                status(pid, "Seccomp"),
                status(pid, "NoNewPrivs"),
                status(pid, "Umask")
            ),
            ("2".into(), "1".into(), "0000".into())
        );
        for set in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
            assert_eq!(status(pid, set), "0000000000000000", "{set}");
        }
        assert_eq!(
            fs::read(format!("/proc/{pid}/cmdline")).expect("cmdline"),
            b"podvisor-infra\0"
        );
        assert_eq!(
            fs::read(format!("/proc/{pid}/environ")).expect("environ"),
            b""
        );
        end(&child, libc::SIGKILL).await;
    });
}

/// 086f, the infra process' part: each of these is an orderly end.
#[test]
fn it_ends_on_term_int_and_kill_with_and_without_being_pid_1() {
    run(async {
        let reaper = Reaper::start().expect("start");
        for spec in [all_new(), InfraSpec::default()] {
            for (signal, code) in [(libc::SIGTERM, 0), (libc::SIGINT, 0), (libc::SIGKILL, 137)] {
                // At once: a signal that comes before the program waits for it is not lost.
                let child = start(&reaper, &spec).await;
                assert_eq!(end(&child, signal).await.code, code, "signal {signal}");
            }
            let child = start(&reaper, &spec).await;
            child.signal(libc::SIGSTOP).expect("stop");
            child.signal(libc::SIGCONT).expect("continue");
            child.signal(libc::SIGCHLD).expect("signal");
            tokio::time::sleep(Duration::from_millis(50)).await;
            assert!(child.exited().is_none(), "it lives on");
            end(&child, libc::SIGTERM).await;
        }
    });
}

#[test]
fn as_pid_1_it_reaps_and_takes_everybody_with_it() {
    run(async {
        let reaper = Reaper::start().expect("start");
        let infra = start(&reaper, &all_new()).await;
        // Another infra process in its pid namespace is not its child; one that a shell there leaves behind is.
        let script = "for i in 1 2 3 4 5 6 7 8; do (sleep 0.1 &) ; done; (sleep 600 &); sleep 0.05";
        let mut command = std::process::Command::new("nsenter");
        command.args([
            "-t",
            &infra.pid().to_string(),
            "-p",
            "/bin/sh",
            "-c",
            script,
        ]);
        assert_eq!(reaper.spawn(command).expect("spawn").wait().await.code, 0);
        let children = || {
            fs::read_to_string(format!("/proc/{0}/task/{0}/children", infra.pid()))
                .expect("children")
        };
        while children().split_whitespace().count() != 1 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        let left: i32 = children().trim().parse().expect("the long sleeper");
        end(&infra, libc::SIGTERM).await;
        while fs::exists(format!("/proc/{left}")).expect("look") {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    });
}

#[test]
fn hostname_and_sysctls_are_set_inside_only() {
    run(async {
        let reaper = Reaper::start().expect("start");
        let read = |path: &str| fs::read_to_string(path).expect("read").trim().to_owned();
        let (host_name, host_shm) = (
            read("/proc/sys/kernel/hostname"),
            read("/proc/sys/kernel/shmmni"),
        );
        let mut spec = all_new();
        spec.sysctls = BTreeMap::from([
            (
                "net.ipv4.ip_unprivileged_port_start".to_owned(),
                "7".to_owned(),
            ),
            ("kernel.shmmni".to_owned(), "1234".to_owned()),
        ]);
        let prepared = prepare(&reaper, &spec).await.expect("prepare");
        // Set before it runs.
        let pid = prepared.identity().pid;
        let open = |kind: &str| File::open(format!("/proc/{pid}/ns/{kind}")).expect("open");
        let (net, ipc, uts) = (open("net"), open("ipc"), open("uts"));
        let ways = [
            Enter::Join(net.as_fd(), CloneFlags::CLONE_NEWNET),
            Enter::Join(ipc.as_fd(), CloneFlags::CLONE_NEWIPC),
            Enter::Join(uts.as_fd(), CloneFlags::CLONE_NEWUTS),
        ];
        let paths = [
            "net/ipv4/ip_unprivileged_port_start",
            "kernel/shmmni",
            "kernel/hostname",
        ];
        let seen = in_namespaces(&ways, || {
            paths
                .iter()
                .map(|p| fs::read_to_string(format!("/proc/sys/{p}")).context(|| "read"))
                .collect()
        });
        let seen: Vec<String> = seen.expect("read inside");
        assert_eq!(seen, ["7\n", "1234\n", "web-1\n"]);
        end(&prepared.run().await.expect("run"), libc::SIGKILL).await;
        assert_eq!(read("/proc/sys/kernel/hostname"), host_name);
        assert_eq!(read("/proc/sys/kernel/shmmni"), host_shm);
    });
}

#[test]
fn a_sysctl_the_kernel_refuses_is_a_clear_error_and_leaves_nothing() {
    run(async {
        let reaper = Reaper::start().expect("start");
        for (key, value) in [
            ("kernel.shmmni", "1+kernel.core_pattern=|/x"),
            ("net.no.such", "1"),
        ] {
            let mut spec = all_new();
            spec.sysctls = BTreeMap::from([(key.to_owned(), value.to_owned())]);
            let error = prepare(&reaper, &spec).await.expect_err("prepare");
            assert_eq!(error.kind(), Kind::Invalid, "{error}");
            assert!(error.to_string().contains(key), "{error}");
        }
        let mut spec = all_new();
        spec.network = Namespace::Host;
        spec.sysctls = BTreeMap::from([("net.ipv4.ip_forward".to_owned(), "1".to_owned())]);
        assert_eq!(
            prepare(&reaper, &spec)
                .await
                .map(drop)
                .map_err(|e| e.kind()),
            Err(Kind::Invalid)
        );
    });
}

#[test]
fn what_is_prepared_and_dropped_ends_by_itself() {
    run(async {
        let reaper = Reaper::start().expect("start");
        let mut gone = Vec::new();
        let count = || fs::read_dir("/proc/self/fd").expect("list").count();
        let warm = prepare(&reaper, &all_new()).await.expect("prepare");
        gone.push(warm.child().clone());
        drop(warm);
        let before = count();
        for _ in 0..200 {
            let prepared = prepare(&reaper, &all_new()).await.expect("prepare");
            gone.push(prepared.child().clone());
            drop(prepared);
        }
        for child in &gone {
            let exit = tokio::time::timeout(Duration::from_secs(20), child.wait())
                .await
                .expect("it ends by itself");
            assert_eq!(exit.code, 0);
            assert!(!child.identity.is_alive());
        }
        // Other tests of this process come and go; 200 leaked ones would show.
        assert!(
            count() < before + 100,
            "{before} descriptors became {}",
            count()
        );
    });
}

#[test]
fn a_user_namespace_is_made_and_joined() {
    run(async {
        let reaper = Reaper::start().expect("start");
        let map = || {
            vec![IdMapping {
                container_id: 0,
                host_id: 100_000,
                size: 65_536,
            }]
        };
        let spec = InfraSpec {
            user: Namespace::New,
            uid_mappings: map(),
            gid_mappings: map(),
            ..all_new()
        };
        let first = start(&reaper, &spec).await;
        assert_ne!(namespace(first.pid(), "user"), own("user"));
        assert_eq!(status(first.pid(), "Uid"), "100000\t100000\t100000\t100000");
        assert_eq!(status(first.pid(), "Groups"), "");
        assert_eq!(descriptors(first.pid()).len(), 3);

        let joined = InfraSpec {
            user: Namespace::Path(format!("/proc/{}/ns/user", first.pid()).into()),
            ..all_new()
        };
        let second = start(&reaper, &joined).await;
        for kind in KINDS {
            assert_ne!(
                namespace(second.pid(), kind),
                namespace(first.pid(), kind),
                "{kind}"
            );
            assert_ne!(namespace(second.pid(), kind), own(kind), "{kind}");
        }
        assert_eq!(
            namespace(second.pid(), "user"),
            namespace(first.pid(), "user")
        );
        assert_eq!(descriptors(second.pid()).len(), 3);
        assert_eq!(end(&second, libc::SIGTERM).await.code, 0);
        assert_eq!(end(&first, libc::SIGTERM).await.code, 0);

        let unmapped = InfraSpec {
            user: Namespace::New,
            ..all_new()
        };
        assert_eq!(
            prepare(&reaper, &unmapped)
                .await
                .map(drop)
                .map_err(|e| e.kind()),
            Err(Kind::Invalid)
        );
    });
}

#[test]
fn the_oom_score_is_set_and_a_bad_cgroup_is_an_error() {
    run(async {
        let reaper = Reaper::start().expect("start");
        let child = start(
            &reaper,
            &InfraSpec {
                oom_score_adj: 321,
                ..all_new()
            },
        )
        .await;
        assert_eq!(
            fs::read_to_string(format!("/proc/{}/oom_score_adj", child.pid())).expect("read"),
            "321\n"
        );
        end(&child, libc::SIGKILL).await;
        let spec = InfraSpec {
            cgroup_dirs: vec!["/no/such/cgroup".into()],
            ..all_new()
        };
        let error = prepare(&reaper, &spec).await.expect_err("prepare");
        assert!(error.to_string().contains("/no/such/cgroup"), "{error}");
    });
}

#[test]
fn the_program_is_tiny() {
    assert!(PROGRAM.len() < 8192, "{} bytes", PROGRAM.len());
}

#[test]
fn the_pods_shm_is_mounted_once_and_unmounted_however_often_it_was() {
    let base = tempfile::tempdir().expect("make a directory");
    let dir = base.path().join("files");
    let files = PodFiles {
        hostname: "web-1".to_owned(),
        dns: None,
        host_network: false,
        host_ipc: false,
        shm_size: 1 << 20,
        label: None,
    };
    let mounted = || {
        let table = fs::read_to_string("/proc/self/mountinfo").expect("mounts");
        let at = format!(" {} ", dir.join("shm").display());
        table
            .lines()
            .filter(|l| l.contains(&at))
            .map(str::to_owned)
            .collect::<Vec<_>>()
    };
    let paths = files.make(&dir).expect("make");
    files.make(&dir).expect("make again");
    let lines = mounted();
    assert_eq!(lines.len(), 1);
    for word in ["nosuid,nodev,noexec", "- tmpfs shm ", "size=1024k"] {
        assert!(lines[0].contains(word), "{lines:?}");
    }
    fs::write(paths.shm.join("x"), "x").expect("write");
    nix::mount::mount(
        Some("more"),
        &paths.shm,
        Some("tmpfs"),
        nix::mount::MsFlags::empty(),
        None::<&str>,
    )
    .expect("stack");
    PodFiles::remove(&dir).expect("remove");
    assert!(mounted().is_empty());
    assert!(!dir.exists());
}
