//! FL-086: limits, names, sockets, kernel settings and descriptors of a real pod.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::print_stdout,
    reason = "tests panic where they cannot go on"
)]

#[path = "launch/daemon.rs"]
mod daemon;
#[path = "pod/kit.rs"]
#[allow(dead_code, reason = "other tests use the rest of it")]
mod kit;
mod support;

#[path = "limits/isolation.rs"]
mod isolation;
#[path = "limits/sysctls.rs"]
mod sysctls;

use std::path::Path;
use std::process::Command;

use nix::sys::signal::Signal;
use ttrpc::Code;

use crate::daemon::{Bundle, path_of, shims, signal};
use crate::kit::*;
use crate::support::bin::{SHIM, run_with};
use crate::support::{Snapshot, cni, eventually, fake, sandboxed};

/// FL-086a: a hostname has 63 characters, wherever the cut falls.
#[test]
fn a_pod_with_a_long_name_gets_a_hostname_that_fits() {
    sandboxed("a_pod_with_a_long_name_gets_a_hostname_that_fits", || {
        let before = Snapshot::take();
        on(async {
            let names = [
                "a".repeat(63),
                "b".repeat(65),
                "c".repeat(128),
                // The cut falls behind, on, and before what may not be the end.
                format!("{}-{}", "d".repeat(62), "x".repeat(65)),
                format!("{}---{}", "e".repeat(60), "x".repeat(20)),
                format!("{}.-.{}", "f".repeat(60), "x".repeat(20)),
                format!("{}-{}", "g".repeat(63), "x".repeat(64)),
            ];
            for (n, name) in names.iter().enumerate() {
                let pod = Pod::launch(&format!("p{n}"));
                let client = pod.connect().await;
                let infra = pod.up(&client, &config(name)).await;
                let uts = format!("--uts=/proc/{infra}/ns/uts");
                let told = run_with(
                    Command::new("nsenter").args([&uts, "hostname"]),
                    None,
                    BOUND,
                )
                .ok();
                let hostname = told.stdout.trim();
                assert!(!hostname.is_empty() && hostname.len() <= 63, "{hostname}");
                assert!(name.starts_with(hostname), "{hostname}");
                assert!(
                    hostname.ends_with(|c: char| c.is_ascii_alphanumeric()),
                    "{hostname}"
                );
                assert!(
                    hostname.len() >= 60,
                    "no more is cut than must be: {hostname}"
                );
                pod.shut(&client).await;
            }
        });
        before.assert_unchanged();
    });
}

/// FL-086b: the workload's limit of open files is its spec's, or ours; never what the supervisor was started with.
#[test]
fn a_workload_does_not_inherit_the_limit_of_open_files() {
    sandboxed(
        "a_workload_does_not_inherit_the_limit_of_open_files",
        || {
            let before = Snapshot::take();
            on(async {
                let bundle = Bundle::new("p");
                // As high as this machine allows.
                let script = format!(
                    "for n in 1000000000 1073741816 $(cat /proc/sys/fs/nr_open) 1048576 $(ulimit -Hn); do \
                 ulimit -n $n 2>/dev/null && break; done; ulimit -Hn >/run/highest; exec {SHIM} -namespace test \
                 -id p -address {} -publish-binary /bin/true start",
                    daemon::ADDRESS
                );
                let mut command = Command::new("bash");
                command.args(["-c", &script]).current_dir(&bundle.dir);
                let socket = path_of(&run_with(&mut command, None, BOUND).ok().stdout);
                let highest = std::fs::read_to_string("/run/highest").unwrap();
                println!("started with {highest}");
                let pod = Pod {
                    id: "p".into(),
                    bundle,
                    socket,
                    pid: daemon::supervisor(),
                };
                let client = pod.connect().await;
                pod.up(&client, &config("p")).await;
                let script = "ulimit -Sn; ulimit -Hn; echo said; exec sleep 1000";
                let of_spec = Container::new("of-spec", script, |spec| {
                    spec["process"]["rlimits"] =
                        serde_json::json!([{"type": "RLIMIT_NOFILE", "soft": 2000, "hard": 3000}]);
                });
                let of_none = Container::new("of-none", script, |_| ());
                for (container, soft, hard) in [(&of_spec, 2000, 3000), (&of_none, 1024, 1_048_576)]
                {
                    container.run(&client).await;
                    container.says("said");
                    let said = container.printed("");
                    let limits: Vec<u64> =
                        said.lines().take(2).map(|l| l.parse().unwrap()).collect();
                    assert_eq!(limits[0], soft, "{said}");
                    assert_eq!(
                        limits[1],
                        hard.min(highest.trim().parse().unwrap_or(hard)),
                        "{said}"
                    );
                    container.remove(&client).await;
                }
                pod.shut(&client).await;
            });
            std::fs::remove_file("/run/highest").unwrap();
            before.assert_unchanged();
        },
    );
}

/// FL-086f, checklist 70: however the infra process ends, the pod is not ready and its network is given back.
#[test]
fn the_end_of_the_infra_process_is_the_same_whatever_ended_it() {
    sandboxed(
        "the_end_of_the_infra_process_is_the_same_whatever_ended_it",
        || {
            cni::network("net", vec![serde_json::json!({"type": "fake"})]).write();
            let net = fake::plugin(Path::new(cni::PLUGINS), "fake");
            let before = Snapshot::take();
            on(async {
                let mut quickest = BOUND;
                // TERM and INT are asked of the program, which then exits 0.
                for (n, (how, exit)) in [
                    (Signal::SIGTERM, 0),
                    (Signal::SIGKILL, 137),
                    (Signal::SIGINT, 0),
                ]
                .into_iter()
                .enumerate()
                {
                    let pod = Pod::launch(&format!("p{n}"));
                    let client = pod.connect().await;
                    create(&client, &pod.request(None)).await.unwrap();
                    let infra = start(&client, &pod.id).await.unwrap().pid.cast_signed();
                    let container = Container::new(&format!("c{n}"), "exec sleep 1000", |_| ());
                    container.run(&client).await;
                    let waiting = {
                        let (client, id) = (pod.connect().await, pod.id.clone());
                        tokio::spawn(async move { wait(&client, &id).await })
                    };
                    tokio::time::sleep(std::time::Duration::from_millis(100)).await;
                    let ended = std::time::Instant::now();
                    signal(infra, how);
                    let exited = waiting.await.unwrap().unwrap();
                    assert_eq!(exited.exit_status, exit, "{how}");
                    let told = status(&client, &pod.id).await.unwrap();
                    assert_eq!(told.state, "SANDBOX_NOTREADY", "{how}");
                    quickest = quickest.min(ended.elapsed());
                    assert_eq!(told.exited_at, exited.exited_at);
                    let info = &told.info["info"];
                    assert!(info.contains("ended by itself"), "{info}");
                    // The clean-up is the pod's own; nobody asked.
                    assert_eq!(container.wait(&client, "").await.unwrap(), 137);
                    eventually(BOUND, "the network is given back", || {
                        (net.count("DEL") == n + 1 && pinned().is_empty()).then_some(())
                    });
                    assert_eq!(
                        code(start(&client, &pod.id).await).0,
                        Code::FAILED_PRECONDITION
                    );
                    stop(&client, &pod.id, 0).await.unwrap();
                    pod.shut(&client).await;
                    assert_eq!(
                        (net.count("ADD"), net.count("DEL")),
                        (n + 1, n + 1),
                        "{how}"
                    );
                }
                // Told by the kernel, not found by looking: the quickest of them shows it on a machine that is busy as well.
                println!("not ready {quickest:?} after the end of the infra process");
                assert!(quickest < std::time::Duration::from_secs(1), "{quickest:?}");
                assert_eq!(shims(), [0_i32; 0]);
            });
            before.assert_unchanged();
        },
    );
}

/// Checklist 70: with a netns of the caller's the containers live on, and the pod can be removed.
#[test]
fn containers_outlive_the_infra_process_of_a_pod_whose_network_is_the_callers() {
    sandboxed(
        "containers_outlive_the_infra_process_of_a_pod_whose_network_is_the_callers",
        || {
            let ip = |args: &[&str]| run_with(Command::new("ip").args(args), None, BOUND).ok();
            ip(&["netns", "add", "callers"]);
            let before = Snapshot::take();
            on(async {
                for (n, how) in [Signal::SIGTERM, Signal::SIGKILL].into_iter().enumerate() {
                    let pod = Pod::launch(&format!("p{n}"));
                    let client = pod.connect().await;
                    let mut request = pod.request(Some(&config("p")));
                    request.netns_path = "/run/netns/callers".into();
                    create(&client, &request).await.unwrap();
                    let infra = start(&client, &pod.id).await.unwrap().pid.cast_signed();
                    let container = Container::new(&format!("c{n}"), "exec sleep 1000", |_| ());
                    let init = container.run(&client).await;
                    signal(infra, how);
                    wait(&client, &pod.id).await.unwrap();
                    let told = status(&client, &pod.id).await.unwrap();
                    assert_eq!(told.state, "SANDBOX_NOTREADY");
                    assert_eq!(told.pid, infra.cast_unsigned(), "kept after its end");
                    container.exec(&client, "e", "exit 4", "").await;
                    container.start(&client, "e").await;
                    assert_eq!(container.wait(&client, "e").await.unwrap(), 4);
                    assert!(Path::new(&format!("/proc/{init}")).exists());
                    stop(&client, &pod.id, 1).await.unwrap();
                    assert!(!Path::new(&format!("/proc/{init}")).exists());
                    pod.shut(&client).await;
                }
            });
            before.assert_unchanged();
            ip(&["netns", "del", "callers"]);
        },
    );
}

/// Netns that are pinned.
fn pinned() -> Vec<std::fs::DirEntry> {
    let entries = std::fs::read_dir("/run/podvisor/netns")
        .into_iter()
        .flatten();
    entries.flatten().collect()
}
