//! `podvisor gc` and `podvisor network`: what is left is undone, what lives is left alone.
#![allow(clippy::unwrap_used, clippy::expect_used)]

#[path = "owed/kit.rs"]
mod kit;
mod support;

use std::fs;
use std::path::Path;
use std::time::{Duration, SystemTime};

use kit::{alive, configure, create, kill, state};
use serde_json::Value;
use support::fake::Act;
use support::{Snapshot, cni, podvisor, sandboxed};

/// A directory that has been there for long.
fn age(dir: &Path) {
    let old = SystemTime::now() - Duration::from_secs(3600);
    fs::File::open(dir).unwrap().set_modified(old).unwrap();
}

#[test]
fn gc_undoes_what_nobody_looks_after_and_a_dry_run_changes_nothing() {
    sandboxed(
        "gc_undoes_what_nobody_looks_after_and_a_dry_run_changes_nothing",
        || {
            let plugin = kit::fake_network("pods", "net");
            let before = Snapshot::take();
            let id = create("dead", "pods");
            let infra = kit::infra(&id);
            kill(kit::supervisor(&id));
            let broken = kit::dir("broken");
            fs::create_dir(&broken).unwrap();
            age(&broken);
            fs::write("/run/podvisor/netns/0123", "").unwrap();
            std::os::unix::fs::symlink(
                "/run/podvisor/netns/nowhere",
                "/run/netns/podvisor-nowhere",
            )
            .unwrap();
            let socket = "/run/podvisor/s/dead";
            drop(std::os::unix::net::UnixListener::bind(socket).unwrap());
            let full = Snapshot::take();
            let dry = podvisor(&["gc", "--dry-run"]).ok();
            let things = [
                "pod dead ",
                "pod broken ",
                "netns/0123",
                "podvisor-nowhere",
                "s/dead",
            ];
            for thing in things {
                assert!(
                    dry.stdout
                        .lines()
                        .any(|l| l.starts_with("would undo") && l.contains(thing)),
                    "{thing}: {dry:?}"
                );
            }
            full.assert_unchanged();
            let done = podvisor(&["gc"]).ok();
            for thing in things {
                assert!(
                    done.stdout
                        .lines()
                        .any(|l| l.starts_with("undone") && l.contains(thing)),
                    "{thing}: {done:?}"
                );
            }
            assert!(!alive(infra));
            assert_eq!(plugin.count("DEL"), 1);
            before.assert_unchanged();
            assert_eq!(podvisor(&["gc"]).ok().stdout, "");
        },
    );
}

/// FL-072: the files of a running pod are swept away.
#[test]
fn gc_leaves_a_living_pod_alone_without_its_journal_and_rm_by_force_ends_it() {
    sandboxed(
        "gc_leaves_a_living_pod_alone_without_its_journal_and_rm_by_force_ends_it",
        || {
            let plugin = kit::fake_network("pods", "net");
            let before = Snapshot::take();
            let id = create("web", "pods");
            let (supervisor, infra) = (kit::supervisor(&id), kit::infra(&id));
            fs::remove_file(kit::dir(&id).join("journal.json")).unwrap();
            age(&kit::dir(&id));
            let out = podvisor(&["gc"]).ok();
            assert!(
                out.stdout.contains("left alone") && out.stdout.contains("lives"),
                "{out:?}"
            );
            assert!(alive(supervisor) && alive(infra));
            assert_eq!(plugin.count("DEL"), 0);
            podvisor(&["rm", "-f", "web"]).ok();
            assert!(!alive(supervisor) && !alive(infra));
            assert_eq!(plugin.count("DEL"), 1);
            before.assert_unchanged();
            assert!(kit::records().is_empty());
        },
    );
}

#[test]
fn network_verbs_show_problems_and_ask_plugins() {
    sandboxed("network_verbs_show_problems_and_ask_plugins", || {
        configure("[cni]\nkeeper_time = 0.1\n");
        let plugin = support::fake::plugin(Path::new(cni::PLUGINS), "net");
        let only =
            |name: &str, kind: &str| cni::network(name, vec![serde_json::json!({ "type": kind })]);
        only("pods", "net").version("1.1.0").write();
        only("zz-missing", "no-such-plugin").write();
        fs::write(
            Path::new(cni::CONFIGS).join("99-bad.conflist"),
            r#"{"name":"bad"}"#,
        )
        .unwrap();
        create("web", "pods");
        let list = |index: usize| -> Value {
            let out = podvisor(&["network", "ls", "--json"]).ok().stdout;
            serde_json::from_str::<Value>(&out).unwrap()[index].clone()
        };
        assert_eq!(
            (
                list(0)["pods"].as_u64(),
                list(0)["owed"].as_array().map(Vec::len)
            ),
            (Some(1), Some(0))
        );
        assert!(
            list(0)["plugins"][0]["versions"]
                .to_string()
                .contains("1.1.0"),
            "{}",
            list(0)
        );
        assert!(
            list(1)["problems"].to_string().contains("no-such-plugin"),
            "{}",
            list(1)
        );
        assert!(
            list(2)["path"].to_string().contains("99-bad"),
            "{}",
            list(2)
        );
        let table = podvisor(&["network", "ls"]).ok();
        assert!(
            table.stderr.contains("99-bad.conflist: not used"),
            "{table:?}"
        );

        assert!(
            podvisor(&["network", "check", "web"])
                .ok()
                .stdout
                .contains("pods eth0: ok")
        );
        plugin.on(
            "CHECK",
            &[Act::Stderr("route is gone".into()), Act::Exit(1)],
        );
        podvisor(&["network", "check", "web"])
            .code_is(1)
            .fails_with("route is gone");
        assert!(
            podvisor(&["network", "status", "pods"])
                .ok()
                .stdout
                .contains("pods: ok")
        );
        plugin.on("STATUS", &[Act::Exit(1)]);
        podvisor(&["network", "status", "pods"]).code_is(1);
        podvisor(&["network", "status", "zz-missing"]).fails_with("no-such-plugin");

        plugin.on("DEL", &[Act::Exit(1)]);
        podvisor(&["rm", "-f", "web"]).ok();
        assert_eq!(
            (
                list(0)["pods"].as_u64(),
                list(0)["owed"][0]["name"].as_str()
            ),
            (Some(0), Some("web"))
        );
        let dry = podvisor(&["network", "gc", "--dry-run"]).ok();
        assert!(
            dry.stdout.contains("would undo: network of pod web"),
            "{dry:?}"
        );
        plugin.on("DEL", &[]);
        fs::remove_file(Path::new(cni::CONFIGS).join("10-zz-missing.conflist")).unwrap();
        let out = podvisor(&["network", "gc"]).ok();
        assert!(
            out.stdout.contains("undone: network of pod web") && out.stdout.contains("pods: ok"),
            "{out:?}"
        );
        assert_eq!(plugin.count("GC"), 1);
        assert_eq!(state("web"), "");
    });
}
