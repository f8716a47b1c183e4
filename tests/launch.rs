//! `start`, `delete`, `-info` and `-v` of the real executable, called as daemons call it.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::print_stdout,
    reason = "tests panic where they cannot go on"
)]

#[path = "launch/daemon.rs"]
mod daemon;
mod support;

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use nix::sys::signal::Signal;
use podvisor::proto::any;
use podvisor::proto::bootstrap::bootstrap::{BootstrapParams, BootstrapResult, Extension};
use podvisor::proto::runc_options::oci::Options as RuncOptions;
use podvisor::proto::runtimeoptions::runtimeoptions::Options as TomlOptions;
use podvisor::proto::types::introspection::RuntimeInfo;
use protobuf::Message;
use support::bin::SHIM;
use support::{eventually, sandboxed, shim};

use daemon::{Bundle, all_gone, end_all, full_pipe, path_of, raw, shims, signal, supervisor};

#[test]
fn start_answers_in_the_dialect_of_its_caller() {
    sandboxed("start_answers_in_the_dialect_of_its_caller", || {
        // 1.6, and a daemon that is no containerd whatever its environment says.
        for bundle in [
            Bundle::new("plain"),
            Bundle::new("other").daemon("v2.1.9").without_address(),
        ] {
            let path = bundle.address();
            UnixStream::connect(&path).unwrap();
            assert_eq!(
                path_of(&fs::read_to_string(bundle.dir.join("address")).unwrap()),
                path
            );
        }
        for (version, number) in [("1.7.24~ds1", 2), ("v2.0.5", 3), ("v2.2.7", 3)] {
            let output = Bundle::new(version.trim_end_matches("~ds1"))
                .daemon(version)
                .start()
                .ok();
            let answer: serde_json::Value = serde_json::from_str(&output.stdout).unwrap();
            assert_eq!(
                (&answer["version"], &answer["protocol"]),
                (&number.into(), &"ttrpc".into()),
                "{version}"
            );
            UnixStream::connect(path_of(answer["address"].as_str().unwrap())).unwrap();
            assert_eq!((output.stderr.as_str(), output.held_open), ("", false));
        }
        end_all();
    });
}

#[test]
fn start_with_parameters_answers_a_message_and_uses_their_directory() {
    sandboxed(
        "start_with_parameters_answers_a_message_and_uses_their_directory",
        || {
            let options = any::pack(
                any::RUNC_OPTIONS,
                &RuncOptions {
                    systemd_cgroup: true,
                    ..Default::default()
                },
            )
            .unwrap();
            let params = BootstrapParams {
                instance_id: "web".into(),
                namespace: "test".into(),
                containerd_version: "2.3.4".into(),
                socket_dir: Some("/run/wished".into()),
                extensions: vec![Extension {
                    value: Some(options).into(),
                    ..Default::default()
                }],
                ..Default::default()
            };
            let bundle = Bundle::new("web");
            let answer = raw(
                bundle.command(SHIM).arg("start"),
                &params.write_to_bytes().unwrap(),
            );
            let result = BootstrapResult::parse_from_bytes(&answer).unwrap();
            assert_eq!((result.version, result.protocol.as_str()), (3, "ttrpc"));
            let path = path_of(&result.address);
            assert_eq!(path.parent(), Some(Path::new("/run/wished")));
            UnixStream::connect(&path).unwrap();
            // SIGKILL: the socket stays; `delete` finds it by the link in the bundle.
            signal(supervisor(), Signal::SIGKILL);
            bundle.delete();
            eventually(Duration::from_secs(10), "the socket goes", || {
                (!path.exists()).then_some(())
            });
        },
    );
}

#[test]
fn a_group_has_one_supervisor() {
    sandboxed("a_group_has_one_supervisor", || {
        let pod = Bundle::new("pod");
        let path = pod.address();
        assert_eq!(
            (
                fs::metadata(&path).unwrap().mode() & 0o777,
                fs::metadata(path.parent().unwrap()).unwrap().mode() & 0o777
            ),
            (0o600, 0o700)
        );
        let by_pod = r#"{"annotations":{"io.kubernetes.cri.sandbox-id":"pod"}}"#;
        let by_group = r#"{"annotations":{"io.kubernetes.cri.sandbox-id":"x","io.containerd.runc.v2.group":"pod"}}"#;
        for (id, config) in [("c1", by_pod), ("c2", by_group)] {
            let member = Bundle::new(id).config(config);
            assert_eq!(member.address(), path);
            assert_eq!(
                path_of(&fs::read_to_string(member.dir.join("address")).unwrap()),
                path
            );
        }
        supervisor();
        end_all();
    });
}

#[test]
fn a_dead_supervisors_socket_is_replaced() {
    sandboxed("a_dead_supervisors_socket_is_replaced", || {
        let bundle = Bundle::new("web");
        let path = bundle.address();
        let first = supervisor();
        signal(first, Signal::SIGKILL);
        eventually(Duration::from_secs(10), "it dies", || {
            shims().is_empty().then_some(())
        });
        assert!(path.exists());
        assert_eq!(bundle.address(), path);
        assert_ne!(supervisor(), first);
        end_all();
    });
}

#[test]
fn starts_at_the_same_time_give_one_supervisor() {
    sandboxed("starts_at_the_same_time_give_one_supervisor", || {
        let bundle = Bundle::new("web");
        for _ in 0..5 {
            let helpers: Vec<_> = (0..8).map(|_| bundle.spawn(Stdio::piped())).collect();
            let answers: Vec<String> = helpers
                .into_iter()
                .map(|helper| {
                    let output = helper.wait_with_output().unwrap();
                    assert!(output.status.success());
                    String::from_utf8(output.stdout).unwrap()
                })
                .collect();
            assert!(answers.iter().all(|a| *a == answers[0]), "{answers:?}");
            supervisor();
            end_all();
        }
    });
}

#[test]
fn a_helper_killed_before_its_answer_leaves_no_supervisor() {
    sandboxed(
        "a_helper_killed_before_its_answer_leaves_no_supervisor",
        || {
            let bundle = Bundle::new("web");
            let (_read, write) = full_pipe();
            let mut helper = bundle.spawn(write.into());
            // It stands before a pipe that takes nothing: all is done but the answer.
            eventually(Duration::from_secs(20), "two processes", || {
                (shims().len() == 2 && bundle.dir.join("address").exists()).then_some(())
            });
            std::thread::sleep(Duration::from_millis(100));
            helper.kill().unwrap();
            helper.wait().unwrap();
            all_gone();
        },
    );
}

#[test]
fn bad_circumstances_are_told_in_one_line_and_leave_nothing() {
    sandboxed(
        "bad_circumstances_are_told_in_one_line_and_leave_nothing",
        || {
            let long = format!("socket_dir = \"/run/{}\"", "d".repeat(90));
            let cases = [
                (Bundle::new("a").settings(&long), &b""[..], "limit is 107"),
                (
                    Bundle::new("b").settings("socket_dir = \"/run/open\""),
                    b"",
                    "others can write to it (mode 1777)",
                ),
                (
                    Bundle::new("c").settings("socket_dir = \"/run/foreign\""),
                    b"",
                    "belongs to uid 65534",
                ),
                (Bundle::new("d").settings("nonsense = 1"), b"", "nonsense"),
                (
                    Bundle::new("e").config("{\"annotations\":"),
                    b"",
                    "cut off or damaged",
                ),
                (
                    Bundle::new("f"),
                    b"garbage on standard input",
                    "standard input",
                ),
                (
                    Bundle::new("g")
                        .config(r#"{"annotations":{"io.containerd.runc.v2.group":"../g"}}"#),
                    b"",
                    "group id",
                ),
            ];
            fs::create_dir("/run/open").unwrap();
            fs::set_permissions("/run/open", fs::Permissions::from_mode(0o1777)).unwrap();
            fs::create_dir("/run/foreign").unwrap();
            std::os::unix::fs::chown("/run/foreign", Some(65534), None).unwrap();
            for (bundle, input, text) in cases {
                let output = bundle.start_with(input).fails_with(text);
                assert_eq!(
                    (output.stdout.as_str(), output.stderr.lines().count()),
                    ("", 1),
                    "{output:?}"
                );
                assert!(!bundle.dir.join("address").exists());
            }
            assert_eq!(shims(), [0_i32; 0]);
            assert!(fs::read_dir("/run/open").unwrap().next().is_none());
            for id in ["", "..", "a/b", "-rf", "a\nb", &"i".repeat(300)] {
                shim(&["-namespace", "test", "-id", id, "start"]).fails_with("id");
            }
            shim(&["-id", "x", "start"]).fails_with("-namespace");
            shim(&["-namespace", "test", "-id", "x", "-nope", "start"]).fails_with("usage:");
            let copy = Path::new("/run/shim");
            fs::copy(SHIM, copy).unwrap();
            let output = Command::new(copy)
                .args(["-namespace", "test", "-id", "x", "start"])
                .uid(65534)
                .output()
                .unwrap();
            assert!(
                !output.status.success()
                    && String::from_utf8_lossy(&output.stderr).contains("root"),
                "{output:?}"
            );
            all_gone();
        },
    );
}

#[test]
fn a_shim_cgroup_is_joined_or_refused() {
    sandboxed("a_shim_cgroup_is_joined_or_refused", || {
        let start = |bundle: &Bundle, group: &str| {
            let options = RuncOptions {
                shim_cgroup: group.into(),
                ..Default::default()
            };
            let options = any::pack(any::RUNC_OPTIONS, &options).unwrap();
            bundle.start_with(&options.write_to_bytes().unwrap())
        };
        let bundle = Bundle::new("web");
        start(&bundle, "/no/such/group").fails_with("/no/such/group");
        all_gone();

        let layout = podvisor::cgroup::Layout::detect().unwrap();
        let name = format!(
            "/{}/shims",
            support::sandbox::cgroup_name("a_shim_cgroup_is_joined_or_refused")
        );
        let group = podvisor::cgroup::Group::new(&layout, &name).unwrap();
        group.create().unwrap();
        start(&bundle, &name).ok();
        assert!(group.pids().contains(&supervisor()), "{:?}", group.pids());
        end_all();

        // The same bytes under the other type are TOML and never a cgroup.
        let options = TomlOptions {
            config_body: b"SystemdCgroup = false\n".to_vec(),
            ..Default::default()
        };
        let options = any::pack(any::RUNTIME_OPTIONS, &options).unwrap();
        bundle.start_with(&options.write_to_bytes().unwrap()).ok();
        end_all();
    });
}

#[test]
fn the_supervisor_is_clean_of_what_the_helper_inherited() {
    sandboxed(
        "the_supervisor_is_clean_of_what_the_helper_inherited",
        || {
            let bundle = Bundle::new("web");
            let script = format!(
                "exec 9</etc/hostname; ulimit -n 1000000; exec {SHIM} -namespace test -id web -address {} -publish-binary /bin/true start",
                daemon::ADDRESS
            );
            let mut command = Command::new("sh");
            command.args(["-c", &script]).current_dir(&bundle.dir);
            support::run(&mut command, Duration::from_secs(60)).ok();
            let pid = supervisor();
            let open: Vec<_> = fs::read_dir(format!("/proc/{pid}/fd"))
                .unwrap()
                .flatten()
                .collect();
            for entry in &open {
                let target = fs::read_link(entry.path()).unwrap_or_default();
                assert_ne!(target, Path::new("/etc/hostname"));
            }
            let streams: Vec<_> = (0..3)
                .map(|n| fs::read_link(format!("/proc/{pid}/fd/{n}")).unwrap())
                .collect();
            assert_eq!(
                streams,
                [
                    Path::new("/dev/null"),
                    Path::new("/dev/null"),
                    &bundle.dir.join("log")
                ]
            );
            let limits = fs::read_to_string(format!("/proc/{pid}/limits")).unwrap();
            let files = limits
                .lines()
                .find(|l| l.starts_with("Max open files"))
                .unwrap()
                .split_whitespace()
                .nth(3)
                .unwrap();
            assert!(files.parse::<u64>().unwrap() <= 65_536, "{files}");
            let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
            let fields: Vec<_> = stat
                .rsplit(')')
                .next()
                .unwrap()
                .split_whitespace()
                .collect();
            // Own process group and session.
            assert_eq!(
                (fields[2], fields[3]),
                (pid.to_string().as_str(), pid.to_string().as_str())
            );
            let own: i32 = fs::read_to_string("/proc/self/oom_score_adj")
                .unwrap()
                .trim()
                .parse()
                .unwrap();
            let adj: i32 = fs::read_to_string(format!("/proc/{pid}/oom_score_adj"))
                .unwrap()
                .trim()
                .parse()
                .unwrap();
            assert_eq!(adj, (own + 1).min(1000));
            end_all();
        },
    );
}

#[test]
fn a_log_that_nobody_reads_holds_nobody_up() {
    sandboxed("a_log_that_nobody_reads_holds_nobody_up", || {
        let bundle = Bundle::new("web");
        bundle.address();
        let pid = supervisor();
        // Each dump is some lines; the fifo holds 64 KiB and nobody reads it.
        for _ in 0..2000 {
            signal(pid, Signal::SIGUSR1);
            std::thread::sleep(Duration::from_micros(200));
        }
        let log = fs::File::options()
            .read(true)
            .custom_flags(libc::O_NONBLOCK)
            .open(bundle.dir.join("log"))
            .unwrap();
        use std::io::Read;
        use std::os::unix::fs::OpenOptionsExt;
        let mut bytes = vec![0; 1 << 20];
        let n = (&log).read(&mut bytes).unwrap();
        let text = String::from_utf8_lossy(&bytes[..n]).into_owned();
        assert!(
            text.contains("step=dump") && text.lines().all(|l| l.starts_with("time=")),
            "{text}"
        );
        end_all();
    });
}

#[test]
fn a_supervisor_that_is_given_nothing_leaves() {
    sandboxed("a_supervisor_that_is_given_nothing_leaves", || {
        let bundle = Bundle::new("web").settings("idle_timeout = 0.5");
        let path = bundle.address();
        // A connection keeps it.
        let connection = UnixStream::connect(&path).unwrap();
        std::thread::sleep(Duration::from_millis(1500));
        supervisor();
        drop(connection);
        all_gone();
    });
}

#[test]
fn delete_answers_when_nothing_is_left_and_dismisses_who_was_never_used() {
    sandboxed(
        "delete_answers_when_nothing_is_left_and_dismisses_who_was_never_used",
        || {
            let bundle = Bundle::new("web");
            for _ in 0..2 {
                assert!(bundle.delete().exited_at.seconds > 1_600_000_000);
            }
            bundle.address();
            bundle.delete();
            all_gone();
            // The daemon may have unlinked the bundle before it calls.
            let script = format!(
                "rmdir {0} && exec {SHIM} -namespace test -id gone -bundle {0} delete | wc -c",
                "/run/bundles/gone"
            );
            fs::create_dir("/run/bundles/gone").unwrap();
            let output = Command::new("sh")
                .args(["-c", &script])
                .current_dir("/run/bundles/gone")
                .output()
                .unwrap();
            assert!(
                output.status.success() && output.stdout != b"0\n",
                "{output:?}"
            );
        },
    );
}

#[test]
fn queries_need_no_namespace_and_no_bundle() {
    sandboxed("queries_need_no_namespace_and_no_bundle", || {
        for flag in ["-v", "-version", "--v"] {
            assert!(
                shim(&[flag])
                    .ok()
                    .stdout
                    .contains(env!("CARGO_PKG_VERSION"))
            );
        }
        let given = any::pack(
            any::RUNC_OPTIONS,
            &RuncOptions {
                binary_name: "runc".into(),
                ..Default::default()
            },
        )
        .unwrap();
        let toml = any::pack(
            any::RUNTIME_OPTIONS,
            &TomlOptions {
                config_body: b"BinaryName = \"runc\"\n".to_vec(),
                ..Default::default()
            },
        )
        .unwrap();
        for (input, options) in [
            (None, None),
            (Some(given.clone()), Some(given)),
            (Some(toml.clone()), Some(toml)),
        ] {
            let bytes = input
                .map(|any| any.write_to_bytes().unwrap())
                .unwrap_or_default();
            let answer = raw(Command::new(SHIM).arg("-info"), &bytes);
            let info = RuntimeInfo::parse_from_bytes(&answer).unwrap();
            assert_eq!(info.name, "io.containerd.podvisor.v1");
            assert_eq!(info.options.into_option(), options);
            let features: serde_json::Value = serde_json::from_slice(&info.features.value).unwrap();
            assert!(features["ociVersionMin"].is_string(), "{features}");
        }
        let mut command = Command::new(SHIM);
        support::bin::run_with(command.arg("-info"), Some(b"\xff"), Duration::from_secs(60))
            .fails_with("standard input");
    });
}
