//! FL-086o and p: kernel settings of a pod are the pod's, and never the host's.

use std::fs;
use std::process::Command;

use podvisor::proto::cri::sandbox_config::{NamespaceMode, NamespaceOption};
use ttrpc::Code;

use crate::kit::*;
use crate::support::bin::run_with;
use crate::support::{Snapshot, podvisor, rootfs, sandboxed};

/// What must not change outside.
const HOST: [&str; 7] = [
    "kernel/core_pattern",
    "kernel/panic",
    "kernel/shmmni",
    "kernel/hostname",
    "net/ipv4/ip_forward",
    "net/ipv4/ip_unprivileged_port_start",
    "vm/swappiness",
];

fn host() -> Vec<String> {
    HOST.map(|key| fs::read_to_string(format!("/proc/sys/{key}")).unwrap_or_default())
        .to_vec()
}

/// Keys and values that reach for the host.
const EVIL: [(&str, &str); 14] = [
    ("kernel.core_pattern", "|/bin/evil"),
    ("kernel/core_pattern", "|/bin/evil"),
    ("kernel.panic", "9"),
    ("vm.swappiness", "9"),
    ("fs.file-max", "9"),
    ("kernel.shmmni", "1+kernel.core_pattern=|/bin/evil"),
    ("kernel.shmmni", "1\nkernel.core_pattern = |/bin/evil"),
    ("kernel.shmmni", "1 -w kernel.core_pattern=|/bin/evil"),
    ("net.ipv4.ip_forward", "1+kernel.core_pattern=|/bin/evil"),
    ("net.ipv4.ip_forward", "1\n"),
    ("net/../kernel/core_pattern", "|/bin/evil"),
    ("net.....kernel.core_pattern", "|/bin/evil"),
    ("net.ipv4/../../kernel/core_pattern", "|/bin/evil"),
    ("net.ipv4.ip_forward=1+kernel.core_pattern", "|/bin/evil"),
];

#[test]
fn settings_of_the_host_cannot_be_reached_from_a_pod() {
    sandboxed(
        "sysctls::settings_of_the_host_cannot_be_reached_from_a_pod",
        || {
            let before = Snapshot::take();
            let untouched = host();
            on(async {
                for (n, (key, value)) in EVIL.into_iter().enumerate() {
                    let pod = Pod::launch(&format!("p{n}"));
                    let client = pod.connect().await;
                    let config = config_with("p", NamespaceOption::default(), &[(key, value)]);
                    // By the check before anything is done, or by the kernel, which takes no such number.
                    let refused = match create(&client, &pod.request(Some(&config))).await {
                        Err(error) => Err(error),
                        Ok(()) => start(&client, &pod.id).await.map(drop),
                    };
                    let (code, text) = code(refused);
                    assert_eq!(code, Code::INVALID_ARGUMENT, "{key} = {value:?}: {text}");
                    assert!(text.contains("sysctl") && !text.contains('\n'), "{text}");
                    assert_eq!(host(), untouched, "{key} = {value:?}");
                    pod.shut(&client).await;
                }
            });
            before.assert_unchanged();
        },
    );
}

#[test]
fn a_setting_of_a_namespace_is_set_in_the_pod_only() {
    sandboxed(
        "sysctls::a_setting_of_a_namespace_is_set_in_the_pod_only",
        || {
            let before = Snapshot::take();
            let untouched = host();
            on(async {
                let pod = Pod::launch("p");
                let client = pod.connect().await;
                let sysctls = [
                    ("net.ipv4.ip_forward", "1"),
                    ("net.ipv4.ping_group_range", "0\t5"),
                    ("kernel.shmmni", "1234"),
                ];
                let config = config_with("p", NamespaceOption::default(), &sysctls);
                let infra = pod.up(&client, &config).await;
                let script = "cat /proc/sys/net/ipv4/ip_forward /proc/sys/net/ipv4/ping_group_range \
                          /proc/sys/kernel/shmmni /proc/sys/net/ipv4/ip_unprivileged_port_start";
                let mut command = Command::new("nsenter");
                command.args([
                    "-t",
                    &infra.to_string(),
                    "-n",
                    "-i",
                    "--",
                    "/bin/sh",
                    "-c",
                    script,
                ]);
                let seen = run_with(&mut command, None, BOUND).ok().stdout;
                assert_eq!(seen, "1\n0\t5\n1234\n0\n");
                // The same to a container of the pod.
                let container = Container::new("c", script, |_| ());
                container.run(&client).await;
                assert_eq!(container.wait(&client, "").await.unwrap(), 0);
                assert_eq!(container.printed(""), seen);
                container.delete(&client, "").await.unwrap();
                assert_eq!(host(), untouched);
                pod.shut(&client).await;
            });
            assert_eq!(host(), untouched);
            before.assert_unchanged();
        },
    );
}

/// FL-086p.
#[test]
fn a_pod_on_the_hosts_namespaces_may_not_set_what_is_theirs() {
    sandboxed(
        "sysctls::a_pod_on_the_hosts_namespaces_may_not_set_what_is_theirs",
        || {
            let before = Snapshot::take();
            let untouched = host();
            on(async {
                for (n, (key, value)) in [
                    ("net.ipv4.ip_forward", "1"),
                    ("net.core.somaxconn", "9"),
                    ("kernel.shmmni", "1234"),
                    ("fs.mqueue.msg_max", "9"),
                ]
                .into_iter()
                .enumerate()
                {
                    let pod = Pod::launch(&format!("p{n}"));
                    let client = pod.connect().await;
                    let options = NamespaceOption {
                        network: NamespaceMode::NODE.into(),
                        ipc: NamespaceMode::NODE.into(),
                        ..Default::default()
                    };
                    let mut config = config_with("p", options, &[(key, value)]);
                    config.annotations.clear();
                    let (code, text) = code(create(&client, &pod.request(Some(&config))).await);
                    assert_eq!(code, Code::INVALID_ARGUMENT, "{text}");
                    assert!(text.contains(key) && text.contains("host"), "{text}");
                    assert_eq!(host(), untouched);
                    pod.shut(&client).await;
                }
            });
            before.assert_unchanged();
        },
    );
}

/// A pod on the host's network leaves the host's settings alone, the default of the port range among them.
#[test]
fn a_host_network_pod_changes_nothing_by_itself() {
    sandboxed(
        "sysctls::a_host_network_pod_changes_nothing_by_itself",
        || {
            let rootfs = rootfs::make();
            let run = [
                "run",
                "--rm",
                "--net",
                "host",
                "--rootfs",
                rootfs.str(),
                "--",
                "/bin/true",
            ];
            let untouched = host();
            // The first one makes directories that stay.
            podvisor(&run).ok();
            let before = Snapshot::take();
            podvisor(&run).ok();
            assert_eq!(host(), untouched);
            before.assert_unchanged();
        },
    );
}
