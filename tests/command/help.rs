//! Every verb's help has an example, and every example works.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use crate::kit::Kit;
use crate::support::bin;
use crate::support::{self, Sandbox, Snapshot, cni, podvisor, rootfs};

/// The words below a heading of a help text.
fn verbs(help: &str) -> Vec<String> {
    let list = help.lines().skip_while(|l| *l != "Commands:").skip(1);
    let list = list.take_while(|l| !l.is_empty());
    let names = list.filter(|l| l.starts_with("  ") && !l.starts_with("   "));
    let names = names.map(|l| l.split_whitespace().next().unwrap().to_owned());
    names.filter(|name| name != "help").collect()
}

/// Verbs with those below them: "network ls".
fn all_verbs() -> Vec<String> {
    let mut all = Vec::new();
    for verb in verbs(&podvisor(&["--help"]).ok().stdout) {
        let below = verbs(&podvisor(&[&verb, "--help"]).ok().stdout);
        all.extend(below.iter().map(|name| format!("{verb} {name}")));
        all.push(verb);
    }
    all
}

fn examples(verb: &str) -> Vec<String> {
    let mut line: Vec<&str> = verb.split(' ').collect();
    line.push("--help");
    let help = podvisor(&line).ok().stdout;
    let after = help
        .lines()
        .skip_while(|l| !l.starts_with("Example"))
        .skip(1);
    let list = after.take_while(|l| !l.is_empty());
    list.map(|l| l.trim().to_owned()).collect()
}

#[test]
fn every_verb_has_an_example_and_every_example_works() {
    let name = "help::every_verb_has_an_example_and_every_example_works";
    Sandbox::new(name).bound(Duration::from_secs(300)).run(|| {
        let kit = Kit {
            rootfs: rootfs::make(),
        };
        let (srv, here) = ("/srv", Path::new("/srv/here"));
        support::sh(&format!(
            "mount -t tmpfs tmpfs {srv}; mkdir {srv}/web {srv}/here; mount --bind {} {srv}/web",
            kit.rootfs.str()
        ));
        cni::bridge("pods", "pvt0", "10.87.1.0/24")
            .portmap()
            .write();
        let plugin = Path::new(cni::PLUGINS).join("podvisor-cni");
        std::os::unix::fs::symlink(bin::dir().join("podvisor-cni"), plugin).unwrap();
        std::fs::write(
            here.join("pod.json"),
            r#"{"metadata": {"name": "from-file"}, "hostname": "h"}"#,
        )
        .unwrap();
        std::fs::write(
            here.join("container.json"),
            r#"{"metadata": {"name": "c"}, "command": ["/bin/true"]}"#,
        )
        .unwrap();
        let before = Snapshot::take();
        let mut tried = 0;
        for verb in all_verbs() {
            let lines = examples(&verb);
            assert!(!lines.is_empty(), "`podvisor {verb} --help` has no example");
            let needs_none = ["run", "create"].contains(&verb.as_str());
            for (n, line) in lines.iter().enumerate() {
                assert!(
                    line.contains(&format!("podvisor {}", verb.split(' ').next().unwrap()))
                        || n > 0,
                    "{verb}: {line}"
                );
                if !needs_none && n == 0 {
                    pods(&kit, &verb);
                }
                run(line, here);
                tried += 1;
            }
            if verb == "network wrap" {
                podvisor(&["network", "unwrap", "pods"]).ok();
            }
            let left = podvisor(&["ps", "-aq"]).ok().stdout;
            if !left.is_empty() {
                let ids: Vec<&str> = left.split_whitespace().collect();
                podvisor(&[&["rm", "-f"][..], &ids].concat()).ok();
            }
        }
        assert!(tried > 25, "{tried}");
        before.assert_unchanged();
        support::sh(&format!("umount {srv}/web {srv}"));
    });
}

/// What examples speak of: a pod `web` that serves, and runs a container `log`; stopped, or paused, where a verb needs that.
fn pods(kit: &Kit, verb: &str) {
    let script = "trap 'exit 0' TERM; while :; do sleep 0.1; done";
    kit.detached(&["--name", "web", "-l", "app=web"], script);
    kit.run(&["-d", "--sandbox", "web", "--name", "log"], script)
        .ok();
    match verb {
        "wait" => drop(podvisor(&["kill", "web"]).ok()),
        "unpause" => drop(podvisor(&["pause", "web"]).ok()),
        "network unwrap" => drop(podvisor(&["network", "wrap", "pods"]).ok()),
        _ => {}
    }
}

/// On a terminal; where it asks for ours, somebody types `exit`.
fn run(line: &str, here: &Path) {
    let path = bin::path_with(&[bin::dir()]);
    let typed = if line.contains(" -it") {
        "sleep 1; printf 'exit\\r'; sleep 30"
    } else {
        "sleep 30"
    };
    // The keys come from a process that is ended with the terminal.
    let script = format!(
        "exec 3< <({typed}); timeout 60 script -qec {} /dev/null <&3; code=$?; kill %% $! 2>/dev/null; exit $code",
        quoted(line)
    );
    let mut bash = Command::new("bash");
    bash.args(["-c", &script])
        .current_dir(here)
        .env("PATH", path);
    let done = support::run(&mut bash, Duration::from_secs(70));
    assert_eq!(done.code, Some(0), "{line}: {done:#?}");
}

fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', "'\\''"))
}
