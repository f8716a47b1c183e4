//! Pods as a kubelet makes them through containerd's CRI: the same body with containerd's own shim and with ours in both
//! sandboxer modes. Where ours are meant to differ is said here and in docs/kubernetes.md.
#![allow(clippy::unwrap_used, clippy::expect_used)]
#![allow(
    clippy::print_stdout,
    reason = "captured by the test runner, and what a failure is understood by"
)]

#[path = "cri/containers.rs"]
mod containers;
#[path = "failpoints/cri.rs"]
mod cri;
#[path = "cri/daemonset.rs"]
mod daemonset;
#[path = "cri/demo.rs"]
mod demo;
#[path = "cri/field.rs"]
mod field;
#[path = "cri/files.rs"]
mod files;
#[path = "failpoints/image.rs"]
mod image;
#[path = "cri/kubelet.rs"]
mod kubelet;
#[path = "cri/node.rs"]
mod node;
#[path = "cri/pods.rs"]
mod pods;
#[path = "cri/resources.rs"]
mod resources;
#[path = "cri/restart.rs"]
mod restart;
#[path = "cri/security.rs"]
mod security;
#[path = "cri/streams.rs"]
mod streams;
mod support;
#[path = "cri/users.rs"]
mod users;
#[path = "cri/websocket.rs"]
mod websocket;

/// The messages of CRI that a kubelet sends, generated.
#[allow(warnings, clippy::all, clippy::restriction, reason = "generated code")]
mod wire {
    include!(concat!(env!("OUT_DIR"), "/cri_client/mod.rs"));
}

use node::{HANDLERS, OnPurpose, Side};
use support::Sandbox;

/// A body of the suite: its row in the table, what it does, and where ours are meant to differ.
type Area = (&'static str, fn(&mut Side<'_>), &'static [OnPurpose]);

/// On one daemon, with these handlers: containerd's own first.
#[derive(Clone, Copy)]
struct Round {
    peer: &'static str,
    handlers: &'static [&'static str],
    /// Before the names of areas in the table.
    label: &'static str,
    /// OCI runtime of all handlers; empty: runc.
    runtime: &'static str,
}

const NOW: Round = Round {
    peer: "containerd-2.1",
    handlers: &HANDLERS,
    label: "",
    runtime: "",
};

/// Where shims are no sandbox controllers yet, and `podvisor` is its podsandbox mode.
const OLD: Round = Round {
    peer: "containerd-1.6",
    handlers: &["runc", "podvisor"],
    label: "1.x: ",
    runtime: "",
};

/// Runs bodies, each for all handlers at once, on one daemon; nothing is left after each.
fn same_for_all(name: &str, round: Round, areas: &[Area]) {
    Sandbox::new(name)
        .bound(std::time::Duration::from_secs(600))
        .run(|| {
            let Some(daemon) = node::start_over(round.peer, round.runtime, "") else {
                return;
            };
            let mut wrong = Vec::new();
            for (area, body, on_purpose) in areas {
                let area = format!("{}{area}", round.label);
                println!("--- {area}");
                let begun = std::time::Instant::now();
                let before = node::snapshot();
                let seen: Vec<_> = std::thread::scope(|scope| {
                    let of = |handler: &&'static str| {
                        let (daemon, handler) = (&daemon, *handler);
                        scope.spawn(move || {
                            let mut side = Side::of(daemon, handler);
                            body(&mut side);
                            (handler, side.seen)
                        })
                    };
                    let all: Vec<_> = round.handlers.iter().map(of).collect();
                    all.into_iter().map(|t| t.join().unwrap()).collect()
                });
                before.assert_unchanged();
                wrong.extend(node::compare(&area, &seen, on_purpose));
                println!("--- {area}: {:.1} s", begun.elapsed().as_secs_f64());
            }
            node::assert_alike(&wrong);
        });
}

const HOSTS: OnPurpose = OnPurpose {
    handler: "podvisor",
    key: "hosts",
    theirs: "the node's",
    ours: "the pod's",
    verdict: "different",
    why: "A pod is told no names of the node",
};

const LONG: OnPurpose = OnPurpose {
    handler: "podvisor",
    key: "a hostname that is too long",
    theirs: "error 2",
    ours: "62 bytes",
    verdict: "better",
    why: "a hostname that is too long is cut",
};

const fn sums(key: &'static str, ours: &'static str) -> OnPurpose {
    OnPurpose {
        handler: "podvisor",
        key,
        theirs: "null",
        ours,
        verdict: "better",
        why: "the pod's sums as they were asked for",
    }
}

const SUMS: [OnPurpose; 2] = [
    sums(
        "info resources",
        "{\"cpu_shares\":512,\"memory_limit_in_bytes\":134217728}",
    ),
    sums("info overhead", "{\"memory_limit_in_bytes\":8388608}"),
];

const USERS: OnPurpose = OnPurpose {
    handler: "podvisor",
    key: "a container of its own users",
    theirs: "refused: the OCI runtime maps no mounts",
    ours: "0 100000 65536 0 65536 0 500 65534 65534 2 user",
    verdict: "better",
    why: "the daemon refuses it",
};

#[test]
fn pods_and_containers_live_and_end_alike() {
    same_for_all(
        "pods_and_containers_live_and_end_alike",
        NOW,
        &[
            ("pod life", pods::life, &[]),
            ("container life", containers::life, &[]),
            ("exit codes and reasons", containers::ends, &[]),
            ("logs", containers::logs, &[]),
            ("idempotence", pods::again, &[]),
        ],
    );
}

#[test]
fn containers_find_the_same_around_them() {
    same_for_all(
        "containers_find_the_same_around_them",
        NOW,
        &[
            ("hostname, DNS, hosts, shm", pods::files, &[HOSTS, LONG]),
            ("sysctls", pods::sysctls, &[]),
            ("namespaces", pods::namespaces, &[]),
            ("host network", pods::host_network, &[]),
            ("user namespaces", users::without_mapped_mounts, &[USERS]),
            ("volumes and propagation", containers::volumes, &[]),
            ("security contexts", security::contexts, &[]),
        ],
    );
}

#[test]
fn volumes_of_pods_with_users_are_mapped_alike() {
    let round = Round {
        runtime: users::MAPS,
        ..NOW
    };
    let areas: &[Area] = &[("mapped volumes", users::with_mapped_mounts, &[])];
    same_for_all("volumes_of_pods_with_users_are_mapped_alike", round, areas);
}

#[test]
fn streams_and_resources_are_alike() {
    same_for_all(
        "streams_and_resources_are_alike",
        NOW,
        &[
            ("exec-sync", streams::exec_sync, &[]),
            ("exec, terminal, resize", streams::exec, &[]),
            ("attach and stdin", streams::attach, &[]),
            ("port-forward", streams::port_forward, &[]),
            ("resources and update", resources::limits, &SUMS),
            ("the pod's memory", resources::of_the_pod, &[]),
            ("stats", resources::stats, &[]),
            ("events", pods::events, &[]),
        ],
    );
}

/// Without what these daemons do not have: users of the pod's own, events, the pod's memory.
const OF_OLD: &[Area] = &[
    ("pod life", pods::life, &[]),
    ("container life", containers::life, &[]),
    ("exit codes and reasons", containers::ends, &[]),
    ("logs", containers::logs, &[]),
    ("idempotence", pods::again, &[]),
    ("hostname, DNS, hosts, shm", pods::files, &[]),
    ("sysctls", pods::sysctls, &[]),
    ("namespaces", pods::namespaces, &[]),
    ("host network", pods::host_network, &[]),
    ("volumes and propagation", containers::volumes, &[]),
    ("security contexts", security::contexts, &[]),
    ("exec-sync", streams::exec_sync, &[]),
    ("exec, terminal, resize", streams::exec, &[]),
    ("attach and stdin", streams::attach, &[]),
    ("port-forward", streams::port_forward, &[]),
    ("resources and update", resources::limits, &[]),
    ("stats", resources::stats, &[]),
];

#[test]
fn pods_of_containerd_1_6_are_alike() {
    same_for_all("pods_of_containerd_1_6_are_alike", OLD, OF_OLD);
}

#[test]
#[ignore = "slow"]
fn slow_pods_of_containerd_1_7_are_alike() {
    let round = Round {
        peer: "containerd-1.7",
        ..OLD
    };
    same_for_all("slow_pods_of_containerd_1_7_are_alike", round, OF_OLD);
}
