//! `run` and `create`: what each flag does to the pod and to its container.

use std::path::Path;

use serde_json::{Value, json};

use crate::kit::{Kit, inspect, on_a_machine};
use crate::support::podvisor;

/// What the workload prints.
fn seen(kit: &Kit, flags: &[&str], script: &str) -> String {
    let common = ["--rm", "--net", "none"];
    kit.run(&[&common[..], flags].concat(), script).ok().stdout
}

/// With both runtimes.
fn with_each_runtime(body: impl Fn()) {
    for runtime in ["runc", "crun"] {
        let config = format!("runtime = {runtime:?}\n");
        std::fs::write("/etc/podvisor/config.toml", config).unwrap();
        body();
    }
}

#[test]
fn the_user_is_the_containers_own() {
    on_a_machine("flags::the_user_is_the_containers_own", |kit| {
        let etc = kit.rootfs.path().join("etc");
        std::fs::write(
            etc.join("passwd"),
            "root:x:0:0::/root:/bin/sh\nweb:x:33:34::/:/bin/sh\n",
        )
        .unwrap();
        std::fs::write(etc.join("group"), "root:x:0:\nweb:x:34:\nlog:x:40:web\n").unwrap();
        with_each_runtime(|| {
            for (user, ids) in [
                ("web", "33 34 34 40\n"),
                ("33", "33 34 34 40\n"),
                ("web:log", "33 40 40\n"),
                ("1000:1001", "1000 1001 1001\n"),
            ] {
                let found = seen(kit, &["--user", user], "echo $(id -u) $(id -g) $(id -G)");
                assert_eq!(found, ids, "{user}");
            }
        });
        kit.run(&["--user", "nobody-here"], "true")
            .code_is(125)
            .fails_with("/etc/passwd");
        kit.detached(&["--name", "web", "--net", "none"], "sleep 1000");
        let exec = podvisor(&[
            "exec",
            "--user",
            "web",
            "--workdir",
            "/tmp",
            "web",
            "sh",
            "-c",
            "id -u; pwd",
        ])
        .ok();
        assert_eq!(exec.stdout, "33\n/tmp\n");
        podvisor(&["exec", "--user", "x", "web", "true"])
            .code_is(125)
            .fails_with("\"x\"");
        podvisor(&["exec", "--workdir", "tmp", "web", "true"])
            .code_is(125)
            .fails_with("absolute");
        podvisor(&["rm", "-f", "web"]).ok();
    });
}

#[test]
fn limits_are_the_kernels() {
    on_a_machine("flags::limits_are_the_kernels", |kit| {
        with_each_runtime(|| {
            let flags = [
                "--name",
                "small",
                "--net",
                "none",
                "--memory",
                "64m",
                "--cpus",
                "0.5",
                "--pids-limit",
                "50",
            ];
            kit.detached(&flags, "sleep 1000");
            let stats: Value = crate::kit::json(&["stats", "--no-stream", "--json", "small"]);
            let one = &stats[0];
            assert_eq!(
                (&one["memory_limit_bytes"], &one["pids_limit"]),
                (&json!(64 << 20), &json!(50)),
                "{stats:#}"
            );
            let pod = inspect("small");
            let container = pod["containers"]
                .as_object()
                .unwrap()
                .values()
                .next()
                .unwrap();
            let cgroup = container["cgroup"].as_str().unwrap();
            let quota = crate::support::cgroup_mounts()
                .into_iter()
                .find_map(|mount| {
                    let dir = mount.join(cgroup.trim_start_matches('/'));
                    let v1 = std::fs::read_to_string(dir.join("cpu.cfs_quota_us"));
                    v1.or_else(|_| std::fs::read_to_string(dir.join("cpu.max")))
                        .ok()
                });
            assert_eq!(
                quota
                    .as_deref()
                    .map(|q| q.split_whitespace().next().unwrap().to_owned())
                    .as_deref(),
                Some("50000")
            );
            podvisor(&["rm", "-f", "small"]).ok();
        });
        // Beyond the limit the workload is killed.
        let script = "head -c 200000000 /dev/zero | tail -c 200000000 >/dev/null; exit $?";
        kit.run(&["--rm", "--net", "none", "--memory", "32m"], script)
            .code_is(137);
    });
}

#[test]
fn mounts_root_and_capabilities_are_as_asked_for() {
    on_a_machine(
        "flags::mounts_root_and_capabilities_are_as_asked_for",
        |kit| {
            let dir = tempfile::Builder::new()
                .prefix("pvtest-mount-")
                .tempdir()
                .unwrap();
            std::fs::write(dir.path().join("file"), "text\n").unwrap();
            let host = dir.path().to_str().unwrap();
            let (mount, volume) = (
                format!("type=bind,src={host},dst=/data,ro"),
                format!("{host}:/mnt/more"),
            );
            with_each_runtime(|| {
                let flags = [
                    "--mount",
                    &mount,
                    "-v",
                    &volume,
                    "--mount",
                    "type=tmpfs,dst=/scratch,size=1m",
                ];
                let script = "cat /data/file; touch /data/x 2>/dev/null || echo read-only; echo new >/mnt/more/new; df -k /scratch | tail -n1 | awk '{print $2}'";
                assert_eq!(seen(kit, &flags, script), "text\nread-only\n1024\n");
                let new = dir.path().join("new");
                assert_eq!(std::fs::read_to_string(&new).unwrap(), "new\n");
                std::fs::remove_file(new).unwrap();
                let script = "touch /x 2>/dev/null || echo read-only; touch /dev/shm/x && echo shm";
                assert_eq!(seen(kit, &["--read-only"], script), "read-only\nshm\n");
                let bits = |flags: &[&str]| {
                    let text = seen(kit, flags, "grep CapEff /proc/self/status");
                    u64::from_str_radix(text.split_whitespace().nth(1).unwrap(), 16).unwrap()
                };
                let usual = bits(&[]);
                assert_eq!(usual.count_ones(), 14);
                // 12: CAP_NET_ADMIN, 0: CAP_CHOWN, 5: CAP_KILL.
                assert_eq!(
                    bits(&["--cap-add", "net_admin", "--cap-drop", "CAP_CHOWN"]),
                    (usual | 1 << 12) & !1
                );
                assert_eq!(bits(&["--cap-drop", "ALL", "--cap-add", "KILL"]), 1 << 5);
            });
            for (flags, why) in [
                (["-v", "/nowhere/at/all:/x"], "it is not there"),
                (["--mount", "type=bind,src=/,dst=x"], "absolute"),
                (["--mount", "type=what,dst=/x"], "no type"),
                (["--cap-add", "NOPE"], "no capability"),
                (["--memory", "lots"], "64m"),
                (["--cpus", "0"], "0.01"),
                (["--user", ":"], "USER"),
            ] {
                kit.run(&flags, "true").code_is(125).fails_with(why);
            }
        },
    );
}

#[test]
fn a_pods_names_servers_settings_labels_and_annotations() {
    on_a_machine(
        "flags::a_pods_names_servers_settings_labels_and_annotations",
        |kit| {
            let pod = [
                "--name",
                "web",
                "--net",
                "none",
                "--hostname",
                "www.example",
                "--dns",
                "192.0.2.1",
                "--dns",
                "2001:db8::1",
                "--dns-search",
                "a.example",
                "--dns-option",
                "ndots:2",
                "--label",
                "app=web",
                "-l",
                "tier=front",
                "--annotation",
                "x.example/Note=some text",
                "--sysctl",
                "net.ipv4.ip_default_ttl=99",
            ];
            let id = kit.detached(&pod, "sleep 1000");
            let seen = podvisor(&[
                "exec",
                "web",
                "sh",
                "-c",
                "hostname; cat /etc/resolv.conf /proc/sys/net/ipv4/ip_default_ttl",
            ])
            .ok();
            assert_eq!(
                seen.stdout,
                "www.example\nsearch a.example\nnameserver 192.0.2.1\nnameserver 2001:db8::1\noptions ndots:2\n99\n"
            );
            let record = inspect("web");
            assert_eq!(record["labels"], json!({"app": "web", "tier": "front"}));
            assert_eq!(record["annotations"]["x.example/Note"], "some text");
            let of_container = |name: &str| {
                let path = format!(
                    "/run/podvisor/default/{id}/bundles/{}-{name}/config.json",
                    &id[..12]
                );
                let text = std::fs::read(Path::new(&path)).unwrap();
                serde_json::from_slice::<Value>(&text).unwrap()["annotations"].clone()
            };
            assert_eq!(of_container("main")["x.example/Note"], "some text");
            let flags = [
                "-d",
                "--sandbox",
                "web",
                "--name",
                "side",
                "--annotation",
                "y=z",
            ];
            kit.run(&flags, "sleep 1000").ok();
            assert_eq!(
                (
                    &of_container("side")["y"],
                    &of_container("side")["x.example/Note"]
                ),
                (&"z".into(), &Value::Null)
            );
            podvisor(&[
                "create",
                "--name",
                "empty",
                "--net",
                "none",
                "--hostname",
                "h",
                "--label",
                "app=db",
            ])
            .ok();
            let found = |filters: &[&str]| {
                let mut line = vec!["ps", "-q"];
                line.extend(filters.iter().flat_map(|f| ["--filter", f]));
                podvisor(&line).ok().stdout
            };
            let other = inspect("empty")["id"].as_str().unwrap().to_owned();
            let (one, two) = (format!("{id}\n"), format!("{other}\n"));
            assert_eq!(found(&["label=app=web"]), one);
            assert_eq!(found(&["label=app"]), format!("{one}{two}"));
            assert_eq!(found(&["label=tier", "name=we*"]), one);
            assert_eq!(found(&["name=empty", "name=nobody"]), two);
            assert_eq!(found(&["state=ready", &format!("id={}", &other[..6])]), two);
            assert_eq!(found(&["network=testnet"]), "");
            podvisor(&["stop", "-t", "1", "empty"]).ok();
            assert_eq!(found(&["state=stopped"]), two);
            podvisor(&["ps", "--filter", "colour=red"])
                .code_is(125)
                .fails_with("no filter");
            for (flags, why) in [
                (&["--hostname", "A_b"][..], "no hostname"),
                (
                    &["--net", "host", "--hostname", "x"],
                    "leave --hostname out",
                ),
                (&["--dns", "x"], "--dns"),
                (&["--label", "x"], "KEY=VALUE"),
                (&["--annotation", "io.podvisor.network=x"], "--net"),
                (&["--sandbox", "web", "--label", "a=b"], "--label"),
                (&["--sandbox", "web", "--hostname", "a"], "--hostname"),
            ] {
                kit.run(flags, "true").code_is(125).fails_with(why);
            }
            podvisor(&["rm", "-f", "web", "empty"]).ok();
        },
    );
}

/// The same JSON as `crictl runp` and `crictl create` take.
#[test]
fn pods_and_containers_come_from_files_too() {
    on_a_machine("flags::pods_and_containers_come_from_files_too", |kit| {
        let dir = tempfile::Builder::new()
            .prefix("pvtest-files-")
            .tempdir()
            .unwrap();
        let file = |name: &str, value: &Value| {
            let path = dir.path().join(name);
            std::fs::write(&path, value.to_string()).unwrap();
            path.to_str().unwrap().to_owned()
        };
        let pod = file(
            "pod.json",
            &json!({
            "metadata": {"name": "nginx-sandbox", "namespace": "default", "attempt": 1, "uid": "hdishd83djaidwnduwk28bcsb"},
            "hostname": "from-file", "log_directory": "/tmp", "labels": {"a": "b"},
            "annotations": {"io.podvisor.network": "none"},
            "dns_config": {"servers": ["192.0.2.7"]},
            "linux": {"sysctls": {"net.ipv4.ip_default_ttl": "77"}, "security_context": {"namespace_options": {"ipc": 2}}}}),
        );
        let container = file(
            "container.json",
            &json!({
            "metadata": {"name": "busybox"}, "image": {"image": "busybox"},
            "command": ["/bin/sh"], "args": ["-c", "hostname; id -u; echo $A; pwd; cat /proc/sys/net/ipv4/ip_default_ttl; readlink /proc/self/ns/ipc; cat /host/file; exit 3"],
            "working_dir": "/tmp", "envs": [{"key": "A", "value": "b c"}], "log_path": "busybox.log",
            "mounts": [{"host_path": dir.path(), "container_path": "/host", "readonly": true}],
            "linux": {"resources": {"memory_limit_in_bytes": 67_108_864}, "security_context": {"run_as_user": {"value": 65534}, "readonly_rootfs": true}}}),
        );
        std::fs::write(dir.path().join("file"), "bound\n").unwrap();
        let root = kit.rootfs.str();
        let ran = podvisor(&[
            "run",
            "--rootfs",
            root,
            "--config",
            &pod,
            "--container",
            &container,
        ])
        .code_is(3);
        let ipc = std::fs::read_link("/proc/self/ns/ipc").unwrap();
        let ipc = ipc.to_str().unwrap();
        assert_eq!(
            ran.stdout,
            format!("from-file\n65534\nb c\n/tmp\n77\n{ipc}\nbound\n")
        );
        for told in [
            "image is not used",
            "log_path is not used",
            "log_directory is not used",
        ] {
            assert!(ran.stderr.contains(told), "{told} in {ran:#?}");
        }
        let record = inspect("nginx-sandbox");
        assert_eq!(
            (&record["uid"], &record["attempt"]),
            (&"hdishd83djaidwnduwk28bcsb".into(), &1.into())
        );
        podvisor(&["rm", "nginx-sandbox"]).ok();
        // Flags win, and a container of a pod has the file's name.
        podvisor(&[
            "create",
            "--config",
            &pod,
            "--name",
            "other",
            "--hostname",
            "flag",
        ])
        .ok();
        let line = [
            "run",
            "--rootfs",
            root,
            "--sandbox",
            "other",
            "--container",
            &container,
            "-e",
            "A=flag",
            "--",
            "sh",
            "-c",
            "hostname; echo $A",
        ];
        assert_eq!(podvisor(&line).ok().stdout, "flag\nflag\n");
        assert_eq!(
            podvisor(&["logs", "other/busybox"]).ok().stdout,
            "flag\nflag\n"
        );
        podvisor(&["rm", "-f", "other"]).ok();
        for (name, value, part) in [
            (
                "typo",
                json!({"hostnam": "x", "linux": {"security_context": {"privileged": true}}}),
                "linux.security_context.privileged, hostnam",
            ),
            ("kind", json!({"hostname": 7}), "hostname: give a text"),
            ("list", json!([]), "no JSON object"),
        ] {
            let path = file(name, &value);
            podvisor(&["create", "--config", &path])
                .code_is(125)
                .fails_with(part);
        }
        podvisor(&["create", "--config", "/nowhere"])
            .code_is(125)
            .fails_with("/nowhere");
        let bad = file("bad.json", &json!({"devices": [{"host_path": "/dev/x"}]}));
        podvisor(&["run", "--rootfs", root, "--container", &bad])
            .code_is(125)
            .fails_with("devices");
    });
}
