//! Whole pods: through containerd's CRI, and by a client of ours.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use podvisor::client::Client;
use podvisor::proto::cri::sandbox_config::PodSandboxConfig;
use serde_json::json;

use crate::cri::Cri;
use crate::daemon;
use crate::node::{self, HOST, NETWORKED, Network, Way};
use crate::pod::{self, Pod};
use crate::processes::{self, Memory};
use crate::rig::{self, clocked, load, rounds};
use crate::support::{Containerd, Sandbox, cni, eventually};
use crate::table::Table;

const BOUND: Duration = Duration::from_secs(120);

pub fn benched(name: &str, body: impl FnOnce()) {
    Sandbox::new(name)
        .bound(Duration::from_secs(3600))
        .run(body);
}

#[test]
#[ignore = "a benchmark: scripts/bench pod"]
fn bench_pod_under_cri() {
    benched("pods::bench_pod_under_cri", || {
        let Some(daemon) = node::start(Network::Bridge) else {
            return;
        };
        let mut cri = Cri::of(&daemon);
        let mut table = Table::new("pod, through CRI");
        for group in [&HOST[..], &NETWORKED] {
            let net = if group[0].host_network {
                "host network"
            } else {
                "bridge"
            };
            for round in 0..rounds(15) + 1 {
                let mut ways = group.to_vec();
                ways.rotate_left(round % group.len());
                for way in ways {
                    let name = format!("p{round}");
                    let (id, run) = clocked(|| node::run(&mut cri, &way, &name));
                    let ((), up) = clocked(|| node::container(&mut cri, &id, &name));
                    let ((), down) = clocked(|| {
                        cri.stop(&id).unwrap();
                        cri.remove(&id).unwrap();
                    });
                    // The first of each finds nothing warm.
                    if round > 0 {
                        table.time(&format!("RunPodSandbox, {net}"), way.name, run);
                        table.time(
                            &format!("CreateContainer + StartContainer, {net}"),
                            way.name,
                            up,
                        );
                        table.time(
                            &format!("Stop + RemovePodSandbox with a container, {net}"),
                            way.name,
                            down,
                        );
                    }
                }
            }
        }
        table.print(&load());
    });
}

#[test]
#[ignore = "a benchmark: scripts/bench pod"]
fn bench_pod_of_our_own() {
    benched("pods::bench_pod_of_our_own", || {
        rig::use_released();
        let mut table = Table::new("pod, by a client of ours");
        pod::on(async {
            for round in 0..rounds(30) + 1 {
                let pod = Pod::launch(&format!("p{round}"));
                let client = pod.connect().await;
                let took = up(&pod, &client, &pod::config("web")).await;
                let begun = Instant::now();
                pod::shutdown(&client, &pod.id).await.unwrap();
                let shut = begun.elapsed();
                drop(client);
                pod.left();
                settle();
                if round > 0 {
                    table.time("CreateSandbox, no network", "podvisor", took[0]);
                    table.time("StartSandbox, no network", "podvisor", took[1]);
                    table.time("ShutdownSandbox, no network", "podvisor", shut);
                }
            }
            chain(&mut table).await;
        });
        daemon::all_gone();
        table.print(&load());
    });
}

/// The kernel takes a netns apart in the background and holds the lock that the next one needs meanwhile.
pub fn settle() {
    std::thread::sleep(Duration::from_millis(200));
}

async fn up(pod: &Pod, client: &Client, config: &PodSandboxConfig) -> [Duration; 2] {
    let begun = Instant::now();
    pod::create(client, &pod.request(Some(config)))
        .await
        .unwrap();
    let created = begun.elapsed();
    pod::start(client, &pod.id).await.unwrap();
    [created, begun.elapsed() - created]
}

/// StartSandbox on networks of one and of five plugins that do nothing: four plugins' worth of starts, one after another,
/// is what the difference may take.
async fn chain(table: &mut Table) {
    let Some(floor) = rig::floor() else {
        return;
    };
    std::fs::create_dir_all(cni::PLUGINS).unwrap();
    std::fs::copy(&floor, std::path::Path::new(cni::PLUGINS).join("nothing")).unwrap();
    let of = |n: usize| vec![json!({"type": "nothing"}); n];
    for round in 0..rounds(30) + 1 {
        for plugins in [1, 5] {
            cni::network("bench", of(plugins)).write();
            let pod = Pod::launch(&format!("n{plugins}-{round}"));
            let client = pod.connect().await;
            let mut config = pod::config("web");
            config.annotations.clear();
            let took = up(&pod, &client, &config).await;
            pod::shutdown(&client, &pod.id).await.unwrap();
            drop(client);
            pod.left();
            settle();
            let mut bare = Duration::ZERO;
            for _ in 0..plugins {
                let mut plugin = std::process::Command::new(&floor);
                bare += rig::timed(plugin.env("CNI_COMMAND", "ADD")).1;
            }
            if round > 0 {
                let what =
                    format!("StartSandbox with a network of {plugins} plugins that do nothing");
                table.time(&what, "podvisor", took[1]);
                table.time(&what, "the plugins alone", bare);
            }
        }
    }
}

#[test]
#[ignore = "a benchmark: scripts/bench memory"]
fn bench_memory() {
    benched("pods::bench_memory", || {
        let Some(daemon) = node::start(Network::Nothing) else {
            return;
        };
        let mut table = Table::new("memory");
        let count = rounds(100);
        for way in NETWORKED {
            memory(&mut table, &daemon, &way, count);
        }
        table.print(&load());
    });
}

/// `count` pods of one way, idle; then each with a container. Per pod.
fn memory(table: &mut Table, daemon: &Containerd, way: &Way, count: usize) {
    let mut cri = Cri::of(daemon);
    let before = processes::all();
    let available = processes::available();
    let ids: Vec<String> = (0..count)
        .map(|n| node::run(&mut cri, way, &format!("m{n}")))
        .collect();
    figures(table, way, "", &before, available, count);
    for (n, id) in ids.iter().enumerate() {
        node::container(&mut cri, id, &format!("m{n}"));
    }
    figures(table, way, ", with a container", &before, available, count);
    for id in &ids {
        cri.stop(id).unwrap();
        cri.remove(id).unwrap();
    }
    eventually(BOUND, "all shims leave", || {
        processes::shims().is_empty().then_some(())
    });
}

fn figures(
    table: &mut Table,
    way: &Way,
    with: &str,
    before: &std::collections::BTreeMap<i32, String>,
    available: f64,
    count: usize,
) {
    // What was needed to make them is given back first.
    std::thread::sleep(Duration::from_secs(10));
    let new: Vec<(i32, String)> = processes::all()
        .into_iter()
        .filter(|(pid, _)| !before.contains_key(pid))
        .collect();
    let workload = format!(" {}", node::WORKLOAD);
    let (mut supervisors, mut infra) = (Memory::default(), Memory::default());
    let mut shims = Vec::new();
    for (pid, line) in &new {
        let m = processes::memory(*pid);
        if processes::is_shim(line) {
            supervisors.pss += m.pss;
            supervisors.anonymous += m.anonymous;
            shims.push(*pid);
        } else if !line.ends_with(&workload) {
            infra.pss += m.pss;
            infra.anonymous += m.anonymous;
        }
    }
    let each = |sum: f64| sum / count as f64;
    let mut add =
        |what: &str, unit, value| table.add(&format!("{what}{with}"), way.name, unit, value);
    add(
        "anonymous memory per pod, shim and infra process",
        "kB",
        each(supervisors.anonymous + infra.anonymous),
    );
    add(
        "anonymous memory per pod, shim",
        "kB",
        each(supervisors.anonymous),
    );
    add(
        "Pss per pod, shim and infra process",
        "kB",
        each(supervisors.pss + infra.pss),
    );
    add(
        "fall of MemAvailable per pod",
        "kB",
        each(available - processes::available()),
    );
    let all = || -> [f64; 3] {
        shims
            .iter()
            .map(|pid| processes::threads_descriptors_switches(*pid))
            .fold([0.0; 3], |sum, one| {
                [sum[0] + one[0], sum[1] + one[1], sum[2] + one[2]]
            })
    };
    let first = all();
    std::thread::sleep(Duration::from_secs(20));
    let later = all();
    add("threads of a shim", "", later[0] / shims.len() as f64);
    add("descriptors of a shim", "", later[1] / shims.len() as f64);
    add(
        "wake-ups of an idle shim in 20 s",
        "",
        (later[2] - first[2]) / shims.len() as f64,
    );
}

#[test]
#[ignore = "a benchmark: scripts/bench scale"]
fn bench_scale() {
    benched("pods::bench_scale", || {
        let Some(daemon) = node::start(Network::Nothing) else {
            return;
        };
        let mut table = Table::new("scale");
        let count = rounds(200);
        for way in NETWORKED {
            at_once(&mut table, &daemon, &way, 20);
            many(&mut table, &daemon, &way, count);
        }
        table.print(&load());
    });
}

/// All in the same moment.
fn at_once(table: &mut Table, daemon: &Containerd, way: &Way, count: usize) {
    let (ids, took) = clocked(|| made(daemon, way, "o", count, count));
    table.time(&format!("{count} pods at once, all up"), way.name, took);
    let ((), took) = clocked(|| {
        removed(
            daemon,
            &ids.iter().map(|(id, _)| id.clone()).collect::<Vec<_>>(),
            count,
        )
    });
    table.time(&format!("{count} pods at once, all gone"), way.name, took);
}

/// Four at a time.
fn many(table: &mut Table, daemon: &Containerd, way: &Way, count: usize) {
    let mut ids = Vec::new();
    for half in ["first", "second"] {
        let (some, took) = clocked(|| made(daemon, way, half, count / 2, 4));
        table.add(
            &format!("pods per second, 4 at a time, {half} {}", count / 2),
            way.name,
            "/s",
            some.len() as f64 / took.as_secs_f64(),
        );
        for (id, took) in some {
            table.time(
                &format!("RunPodSandbox, 4 at a time, {half} {}", count / 2),
                way.name,
                took,
            );
            ids.push(id);
        }
    }
    let mut cri = Cri::of(daemon);
    for _ in 0..10 {
        let (listed, took) = clocked(|| cri.list());
        assert_eq!(listed.len(), count);
        table.time(&format!("ListPodSandbox with {count} pods"), way.name, took);
    }
    let ((), took) = clocked(|| removed(daemon, &ids, 4));
    table.time(
        &format!("stop and removal of {count} pods, 4 at a time"),
        way.name,
        took,
    );
}

/// RunPodSandbox of `count` pods by so many workers, with the time of each.
pub fn made(
    daemon: &Containerd,
    way: &Way,
    prefix: &str,
    count: usize,
    workers: usize,
) -> Vec<(String, Duration)> {
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        let work = || {
            let mut cri = Cri::of(daemon);
            let mut ids = Vec::new();
            loop {
                let n = next.fetch_add(1, Ordering::Relaxed);
                if n >= count {
                    return ids;
                }
                ids.push(clocked(|| {
                    node::run(&mut cri, way, &format!("{prefix}{n}"))
                }));
            }
        };
        let all: Vec<_> = (0..workers).map(|_| scope.spawn(work)).collect();
        all.into_iter().flat_map(|t| t.join().unwrap()).collect()
    })
}

/// Stop and removal by so many workers.
pub fn removed(daemon: &Containerd, ids: &[String], workers: usize) {
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..workers {
            scope.spawn(|| {
                let mut cri = Cri::of(daemon);
                while let Some(id) = ids.get(next.fetch_add(1, Ordering::Relaxed)) {
                    cri.stop(id).unwrap();
                    cri.remove(id).unwrap();
                }
            });
        }
    });
}
