//! State directories that somebody else could have written to, and state files that are damaged.

use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::Path;

use crate::support::bin::PODVISOR;
use crate::support::{podvisor, shim};
use crate::{nothing_left, refused, run};

/// Every way in which a directory is not ours alone, one after the other.
fn each_fault(dir: &Path, mut check: impl FnMut()) {
    let mode = fs::metadata(dir).unwrap().permissions().mode();
    for bad in [0o777, 0o1777, 0o720] {
        fs::set_permissions(dir, Permissions::from_mode(bad)).unwrap();
        check();
    }
    fs::set_permissions(dir, Permissions::from_mode(mode)).unwrap();
    chown(dir, Some(65534), Some(65534)).unwrap();
    check();
    chown(dir, Some(0), Some(0)).unwrap();
}

#[test]
fn state_directories_that_are_not_roots_alone_are_refused() {
    nothing_left(
        "directories::state_directories_that_are_not_roots_alone_are_refused",
        |rootfs| {
            let flags = ["--net", "none", "--rootfs", rootfs.str()];
            run(&flags).ok();
            for dir in [
                "/run/podvisor",
                "/var/lib/podvisor",
                "/run/podvisor/default",
            ] {
                each_fault(Path::new(dir), || {
                    refused(&run(&flags), &[dir]);
                    refused(&podvisor(&["ps"]), &[dir]);
                    refused(&podvisor(&["rm", "-f", "x"]), &[dir]);
                });
                run(&flags).ok();
            }
            // The directory of sockets is found out by the supervisor's launch.
            let sockets = Path::new("/run/podvisor/s");
            each_fault(sockets, || refused(&run(&flags), &["/run/podvisor/s"]));
            run(&flags).ok();
            // A link is no directory, whoever owns what it points to.
            fs::rename("/run/podvisor", "/run/elsewhere").unwrap();
            std::os::unix::fs::symlink("/run/elsewhere", "/run/podvisor").unwrap();
            refused(&run(&flags), &["/run/podvisor", "no directory"]);
            fs::remove_file("/run/podvisor").unwrap();
            fs::rename("/run/elsewhere", "/run/podvisor").unwrap();
        },
    );
}

#[test]
fn a_pods_directory_that_is_not_roots_alone_is_not_believed() {
    nothing_left(
        "directories::a_pods_directory_that_is_not_roots_alone_is_not_believed",
        |rootfs| {
            let line = [
                "run",
                "-d",
                "--net",
                "none",
                "--name",
                "web",
                "--rootfs",
                rootfs.str(),
                "--",
                "sleep",
                "1000",
            ];
            let id = podvisor(&line).ok().stdout.trim().to_owned();
            let dir = format!("/run/podvisor/default/{id}");
            each_fault(Path::new(&dir), || {
                for verb in [
                    &["logs", "web"][..],
                    &["stop", "web"],
                    &["exec", "web", "true"],
                ] {
                    podvisor(verb).code_is(1).fails_with(&dir);
                }
                let list = podvisor(&["ps", "--json"]).ok().stdout;
                assert!(
                    list.contains("unrecovered") && list.contains(&dir),
                    "{list}"
                );
            });
            podvisor(&["exec", "web", "true"]).ok();
            podvisor(&["rm", "-f", "web"]).ok();
        },
    );
}

#[test]
fn the_shim_starts_in_no_directory_that_others_can_write_to() {
    nothing_left(
        "directories::the_shim_starts_in_no_directory_that_others_can_write_to",
        |_| {
            let bundle = crate::launch::bundle("p1");
            for dir in ["/run/podvisor", "/run/podvisor/s"] {
                fs::create_dir_all(dir).unwrap();
                for made in ["/run/podvisor", "/run/podvisor/s"] {
                    if Path::new(made).exists() {
                        fs::set_permissions(made, Permissions::from_mode(0o700)).unwrap();
                    }
                }
                each_fault(Path::new(dir), || {
                    crate::launch::start(&bundle, "p1", b"")
                        .code_is(1)
                        .fails_with(dir);
                });
            }
            fs::remove_dir_all("/run/podvisor").unwrap();
            shim(&["-v"]).ok();
        },
    );
}

/// FL-084: a state file cut in half by a crash is a pod that can be seen and removed.
#[test]
fn a_truncated_state_file_does_not_keep_a_pod_from_being_removed() {
    nothing_left(
        "directories::a_truncated_state_file_does_not_keep_a_pod_from_being_removed",
        |rootfs| {
            for killed in [false, true] {
                let line = [
                    "run",
                    "-d",
                    "--name",
                    "web",
                    "--rootfs",
                    rootfs.str(),
                    "--",
                    "sleep",
                    "1000",
                ];
                let id = podvisor(&line).ok().stdout.trim().to_owned();
                let journal = format!("/run/podvisor/default/{id}/journal.json");
                let text = fs::read_to_string(&journal).unwrap();
                if killed {
                    let record: serde_json::Value = serde_json::from_str(&text).unwrap();
                    let pid = i32::try_from(record["supervisor"]["pid"].as_i64().unwrap()).unwrap();
                    nix::sys::signal::kill(
                        nix::unistd::Pid::from_raw(pid),
                        nix::sys::signal::Signal::SIGKILL,
                    )
                    .unwrap();
                }
                fs::write(&journal, &text[..text.len() / 3]).unwrap();
                assert!(podvisor(&["ps"]).ok().stdout.contains("unrecovered"));
                let told = podvisor(&["logs", "web"]).code_is(1);
                assert!(
                    told.stderr.contains(&format!("podvisor rm -f {id}")),
                    "{told:#?}"
                );
                podvisor(&["rm", "-f", "web"]).ok();
                assert_eq!(podvisor(&["ps", "-aq"]).ok().stdout, "");
            }
            assert!(Path::new(PODVISOR).exists());
        },
    );
}
