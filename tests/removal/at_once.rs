//! Several removers of one pod at once, and many pods removed side by side.

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use podvisor::pod::record;

use crate::rig;
use crate::support::bin::{PODVISOR, SHIM};
use crate::support::{Sandbox, Snapshot, cni, podvisor, rootfs, slow};

/// Started at once, waited for one by one: (what, code, what it said on standard error).
fn together(commands: Vec<(String, Command)>) -> Vec<(String, i32, String)> {
    let children: Vec<(String, Child)> = commands
        .into_iter()
        .map(|(what, mut command)| {
            command.stdin(Stdio::null()).stdout(Stdio::null());
            (what, command.stderr(Stdio::piped()).spawn().unwrap())
        })
        .collect();
    let end = |(what, child): (String, Child)| {
        let output = child.wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        (what, output.status.code().unwrap_or(-1), said)
    };
    children.into_iter().map(end).collect()
}

fn command(args: &[&str]) -> (String, Command) {
    let mut command = Command::new(PODVISOR);
    command.args(args);
    (args.join(" "), command)
}

/// containerd's `delete` of a pod that the command made.
fn delete(id: &str) -> (String, Command) {
    let mut command = Command::new(SHIM);
    command.args(["-namespace", "default", "-id", id, "delete"]);
    ("delete".into(), command)
}

/// The workload's exit handler comes in between, too: its main process is killed at the same moment.
#[test]
fn eight_removers_at_once_leave_nothing_and_send_one_del() {
    let name = "at_once::eight_removers_at_once_leave_nothing_and_send_one_del";
    Sandbox::new(name).bound(Duration::from_secs(600)).run(|| {
        let plugin = rig::fake_network();
        let rootfs = rootfs::make();
        let before = Snapshot::take();
        let rounds = if slow() { 50 } else { 6 };
        for round in 0..rounds {
            let work = ["--rootfs", rootfs.str(), "--", "/bin/sleep", "1000"];
            podvisor(&[&["run", "-d", "--name", "web"], &work[..]].concat()).ok();
            let record = record::list(&podvisor::config::Config::default(), Some("default"));
            let Some(record::Found::Record(record)) = record.into_iter().next() else {
                panic!("no record");
            };
            let init = record.containers.values().find_map(|c| c.init).unwrap();
            let exit = || {
                let mut kill = Command::new("kill");
                kill.args(["-9", &init.pid.to_string()]);
                ("exit".to_owned(), kill)
            };
            let said = together(vec![
                command(&["stop", "-t", "1", "web"]),
                command(&["rm", "-f", "web"]),
                exit(),
                command(&["rm", "web"]),
                delete(&record.id),
                command(&["stop", "-t", "5", &record.id]),
                delete(&record.id),
                command(&["rm", "-f", &record.id]),
            ]);
            for (what, code, text) in &said {
                // Gone before it was looked up, or running still: a person wants to know. Nothing else fails.
                let told = ["no pod has this name", "it is running", "No such process"];
                assert!(
                    *code == 0 || told.iter().any(|t| text.contains(t)),
                    "round {round}: {what}: {code} {text}\n{said:#?}"
                );
                assert!(!text.contains("closed"), "{what}: {text}");
            }
            before.assert_unchanged();
            assert_eq!(
                (plugin.count("ADD"), plugin.count("DEL")),
                (round + 1, round + 1)
            );
        }
    });
}

/// `podvisor rm` of twenty pods, twenty commands at once.
#[test]
fn twenty_pods_removed_side_by_side_leave_nothing() {
    let name = "at_once::twenty_pods_removed_side_by_side_leave_nothing";
    Sandbox::new(name).bound(Duration::from_secs(1800)).run(|| {
        // No masquerading: rules take the kernel's global lock, and other tests have them.
        let plugin = serde_json::json!({
            "type": "bridge", "bridge": "pvr0", "isGateway": true, "ipMasq": false,
            "ipam": { "type": "host-local", "ranges": [[{ "subnet": "10.86.0.0/24" }]] }
        });
        cni::network("side", vec![plugin]).write();
        let made = Command::new("ip")
            .args(["link", "add", "pvr0", "type", "bridge"])
            .status();
        assert!(made.unwrap().success());
        let rootfs = rootfs::make();
        let before = Snapshot::take();
        for _ in 0..if slow() { 50 } else { 5 } {
            let names: Vec<String> = (0..20).map(|n| format!("pod{n}")).collect();
            // A container in every fifth: what takes the time here is not what is shown.
            let line = |(n, name): (usize, &String)| match n % 5 {
                0 => command(&[
                    "run",
                    "-d",
                    "--name",
                    name,
                    "--rootfs",
                    rootfs.str(),
                    "--",
                    "/bin/sleep",
                    "1000",
                ]),
                _ => command(&["create", "--name", name]),
            };
            for (what, code, said) in together(names.iter().enumerate().map(line).collect()) {
                assert_eq!(code, 0, "{what}: {said}");
            }
            let rm = |name: &String| command(&["rm", "-f", name]);
            for (what, code, said) in together(names.iter().map(rm).collect()) {
                assert_eq!((code, said.as_str()), (0, ""), "{what}");
            }
            before.assert_unchanged();
            let leases = fs::read_dir(Path::new("/var/lib/cni/networks/side"));
            let of_pods = |e: &fs::DirEntry| e.file_name().to_string_lossy().starts_with("10.");
            let count = leases
                .into_iter()
                .flatten()
                .flatten()
                .filter(of_pods)
                .count();
            assert_eq!(count, 0, "leases");
        }
    });
}
