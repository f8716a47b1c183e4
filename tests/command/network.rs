//! `--net` and `--publish`: what a pod is connected to, and how it is reached.

use std::fs;
use std::process::{Child, Command};

use crate::kit::{BOUND, Kit, address, on_a_machine};
use crate::support::{eventually, podvisor, run};

/// Another machine on the wire: 192.0.2.2, where the host is 192.0.2.1.
struct Neighbour(Child);

impl Neighbour {
    fn new() -> Self {
        let child = Command::new("unshare")
            .args(["--net", "sleep", "1000"])
            .spawn()
            .unwrap();
        let pid = child.id().to_string();
        let own = fs::read_link("/proc/self/ns/net").unwrap();
        eventually(BOUND, "a network namespace of its own", || {
            let theirs = fs::read_link(format!("/proc/{pid}/ns/net")).ok()?;
            (theirs != own).then_some(())
        });
        let script = format!(
            "set -e; ip link add ext0 type veth peer name ext1 netns {pid}; ip addr add 192.0.2.1/24 dev ext0; \
             ip link set ext0 up; nsenter -t {pid} -n sh -c 'ip link set lo up; ip addr add 192.0.2.2/24 dev ext1; \
             ip link set ext1 up; ip route add default via 192.0.2.1'"
        );
        run(Command::new("sh").args(["-c", &script]), BOUND).ok();
        Self(child)
    }

    /// The page at this address, `None` when there is no answer.
    fn fetch(&self, url: &str) -> Option<String> {
        let mut command = Command::new("nsenter");
        command.args([
            "-t",
            &self.0.id().to_string(),
            "-n",
            "timeout",
            "2",
            "busybox",
            "wget",
            "-q",
            "-O-",
            url,
        ]);
        let got = run(&mut command, BOUND);
        (got.code == Some(0)).then_some(got.stdout)
    }
}

impl Drop for Neighbour {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

fn serve(kit: &Kit, flags: &[&str], text: &str) -> String {
    let script =
        format!("mkdir -p /tmp/w; echo {text} >/tmp/w/index.html; exec httpd -f -p 80 -h /tmp/w");
    kit.detached(flags, &script)
}

fn rules() -> String {
    run(&mut Command::new("iptables-save"), BOUND).ok().stdout
}

#[test]
fn a_published_port_is_reached_from_another_machine() {
    on_a_machine(
        "network::a_published_port_is_reached_from_another_machine",
        |kit| {
            let neighbour = Neighbour::new();
            serve(
                kit,
                &["--name", "web", "--publish", "8080:80", "-p", "5353:53/udp"],
                "hello",
            );
            let ip = address("web");
            for url in ["http://192.0.2.1:8080/".to_owned(), format!("http://{ip}/")] {
                let page = eventually(BOUND, &format!("a page from {url}"), || {
                    neighbour.fetch(&url)
                });
                assert_eq!(page, "hello\n", "{url}");
            }
            // From the host itself by the port, too.
            let mut own = Command::new("busybox");
            own.args(["wget", "-q", "-O-", "http://192.0.2.1:8080/"]);
            assert_eq!(run(&mut own, BOUND).ok().stdout, "hello\n");
            let udp = rules();
            let found = udp.lines().any(|rule| {
                rule.contains("-p udp")
                    && rule.contains("--dport 5353")
                    && rule.ends_with(&format!("--to-destination {ip}:53"))
            });
            assert!(found, "{udp}");
            let shown = podvisor(&["ps"]).ok().stdout;
            assert!(
                shown.contains("8080->80/tcp,5353->53/udp") && shown.contains(&ip),
                "{shown}"
            );
            podvisor(&["stop", "-t", "1", "web"]).ok();
            assert_eq!(neighbour.fetch("http://192.0.2.1:8080/"), None);
            assert!(!rules().contains(&ip), "{}", rules());
            podvisor(&["rm", "web"]).ok();
        },
    );
}

#[test]
fn a_port_that_another_pod_has_is_refused() {
    on_a_machine("network::a_port_that_another_pod_has_is_refused", |kit| {
        kit.detached(&["--name", "first", "-p", "8080:80"], "sleep 1000");
        let refused = kit
            .run(&["-d", "--name", "second", "-p", "8080:81"], "sleep 1000")
            .code_is(125);
        for part in ["8080/tcp", "first", "choose another"] {
            assert!(refused.stderr.contains(part), "{part} in {refused:#?}");
        }
        // Another protocol, another address of the host: no clash.
        kit.run(&["--rm", "-p", "8080:80/udp"], "true").ok();
        // A stopped pod has given its ports back.
        podvisor(&["stop", "-t", "1", "first"]).ok();
        kit.run(&["--rm", "-p", "8080:80"], "true").ok();
        podvisor(&["rm", "first"]).ok();
    });
}

#[test]
fn the_network_is_the_one_that_was_asked_for() {
    on_a_machine(
        "network::the_network_is_the_one_that_was_asked_for",
        |kit| {
            let links = "ls /sys/class/net; ip -4 -o addr show";
            let none = kit.run(&["--rm", "--net", "none"], links).ok().stdout;
            assert!(
                none.contains("127.0.0.1") && !none.contains("eth0"),
                "{none}"
            );
            for flags in [&["--rm"][..], &["--rm", "--net", "testnet"]] {
                let bridge = kit.run(flags, links).ok().stdout;
                assert!(
                    bridge.contains("eth0") && bridge.contains(" 10.87.1."),
                    "{bridge}"
                );
            }
            let own = fs::read_link("/proc/self/ns/net").unwrap();
            let host = kit
                .run(
                    &["--rm", "--net", "host"],
                    "readlink /proc/self/ns/net; hostname",
                )
                .ok()
                .stdout;
            assert_eq!(host, format!("{}\nsandbox\n", own.display()));
        },
    );
}

#[test]
fn networks_are_listed_with_their_pods() {
    on_a_machine("network::networks_are_listed_with_their_pods", |kit| {
        kit.detached(&["--name", "web"], "sleep 1000");
        let list = crate::kit::json(&["network", "ls", "--json"]);
        assert_eq!(
            (&list[0]["name"], &list[0]["pods"]),
            (&"testnet".into(), &1.into())
        );
        let table = podvisor(&["network", "ls"]).ok().stdout;
        assert!(
            table.starts_with("NAME     PODS  OWED  VERSION  PLUGINS")
                && table.contains("\ntestnet  1     0     1.0.0    bridge")
                && table.contains("/etc/cni/net.d/"),
            "{table}"
        );
        podvisor(&["rm", "-f", "web"]).ok();
        // How long its chains took is kept: cumulative buckets, the last without a bound.
        let latency = &crate::kit::json(&["network", "ls", "--json"])[0]["latency"];
        for command in ["ADD", "DEL"] {
            let of = &latency[command];
            assert_eq!(
                (&of["count"], &of["failed"]),
                (&1.into(), &0.into()),
                "{of}"
            );
            assert!(of["sum_us"].as_u64().is_some_and(|sum| sum > 0), "{of}");
            let buckets = of["buckets"].as_array().unwrap();
            let counts: Vec<u64> = buckets
                .iter()
                .map(|b| b["count"].as_u64().unwrap())
                .collect();
            assert!(counts.is_sorted() && counts.last() == Some(&1), "{of}");
            let bounds: Vec<Option<u64>> = buckets.iter().map(|b| b["le_ms"].as_u64()).collect();
            let (last, bounded) = bounds.split_last().unwrap();
            assert!(last.is_none() && bounded.is_sorted() && bounded.iter().all(Option::is_some));
        }
    });
}
