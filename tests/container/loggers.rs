//! Logging programs (`binary://`, `binary-v2://`).

use super::*;

/// A logger in shell: writes what it is told, and what it reads, into files below `dir`.
fn logger(kit: &Kit, script: &str) -> (String, PathBuf) {
    let dir = kit.dir.path().join("logger");
    fs::create_dir_all(&dir).unwrap();
    let path = dir.join("log it");
    let text = format!("#!/bin/sh\ndir={}\n{script}\n", dir.display());
    fs::write(&path, text).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    (path.display().to_string().replace(' ', "%20"), dir)
}

const WRITES: &str =
    "echo \"$*\" >$dir/args; env | grep ^CONTAINER | sort >$dir/env; ls /proc/$$/fd >$dir/fds
cat <&3 >$dir/out & cat <&4 >$dir/err &
exec 3<&- 4<&-; printf x >&5; exec 5>&-; wait; echo done >$dir/done";

#[test]
fn a_logging_program_reads_both_outputs_to_their_end() {
    each_runtime(
        "loggers::a_logging_program_reads_both_outputs_to_their_end",
        async |kit| {
            let before = own_fds();
            for scheme in ["binary", "binary-v2"] {
                let (path, dir) = logger(&kit, WRITES);
                let mut request = kit.request("c", "seq 20000; echo bad >&2; exit 3", |_| ());
                request.stdout = format!("{scheme}://{path}?first=1&second=a%20b&first=2");
                request.stderr = request.stdout.clone();
                kit.containers.create(request).await.unwrap();
                let logger = kit.book.get("c").unwrap().logger.expect("on record");
                assert!(logger.is_alive());
                kit.containers.start("c", "").await.unwrap();
                assert_eq!(kit.code("c", "").await, 3);
                kit.containers.delete("c", "").await.unwrap();
                let read = |name: &str| fs::read_to_string(dir.join(name)).unwrap_or_default();
                assert_eq!(read("done"), "done\n", "it was not let finish");
                assert!(!logger.is_alive());
                assert_eq!(read("args"), "first 1 second a b\n");
                assert_eq!(read("env"), "CONTAINER_ID=c\nCONTAINER_NAMESPACE=test\n");
                assert_eq!(read("err"), "bad\n");
                assert!(read("out").ends_with("\n20000\n"));
                assert_eq!(read("out").lines().count(), 20000);
                // The shell itself keeps the script on 10.
                let fds: std::collections::BTreeSet<u32> =
                    read("fds").lines().filter_map(|n| n.parse().ok()).collect();
                assert!((0..6).all(|n| fds.contains(&n)), "{fds:?}");
                assert!(fds.iter().all(|n| *n < 6 || *n > 9), "{fds:?}");
                fs::remove_dir_all(&dir).unwrap();
            }
            unchanged(&before).await;
        },
    );
}

#[test]
fn a_logger_that_fails_fails_the_create_and_leaves_nothing() {
    each_runtime(
        "loggers::a_logger_that_fails_fails_the_create_and_leaves_nothing",
        async |kit| {
            let before = own_fds();
            for (scheme, script, part) in [
                ("binary-v2", "exit 1", "without saying that it is ready"),
                (
                    "binary-v2",
                    "sleep 1000 5>&- & exec 5>&-; wait",
                    "without saying",
                ),
                ("binary", "", ""),
            ] {
                let (path, _) = logger(&kit, script);
                let path = if script.is_empty() {
                    "/no/such/logger".into()
                } else {
                    path
                };
                let mut request = kit.request("c", "true", |_| ());
                request.stdout = format!("{scheme}://{path}");
                let error = kit.containers.create(request).await.unwrap_err();
                assert!(error.to_string().contains(part), "{error}");
                kit.assert_gone("c");
            }
            unchanged(&before).await;
        },
    );
}

#[test]
fn a_logger_that_dies_costs_the_program_nothing_and_one_that_stays_is_ended() {
    each_runtime(
        "loggers::a_logger_that_dies_costs_the_program_nothing_and_one_that_stays_is_ended",
        async |kit| {
            let before = own_fds();
            let (path, _) = logger(&kit, "exit 1");
            let mut request = kit.request("c", "sleep 0.3; echo x; echo y >&2; exit 6", |_| ());
            request.stdout = format!("binary://{path}");
            kit.containers.create(request).await.unwrap();
            kit.containers.start("c", "").await.unwrap();
            assert_eq!(kit.code("c", "").await, 6, "no SIGPIPE");
            kit.containers.delete("c", "").await.unwrap();

            // Reads nothing and stays: SIGTERM, which it minds.
            let (path, dir) = logger(
                &kit,
                "trap 'echo term >$dir/term; exit 0' TERM; exec 5>&-; while :; do sleep 0.1; done",
            );
            let mut request = kit.request("d", "true", |_| ());
            request.stdout = format!("binary://{path}");
            kit.containers.create(request).await.unwrap();
            let logger = kit.book.get("d").unwrap().logger.expect("on record");
            kit.containers.start("d", "").await.unwrap();
            assert_eq!(kit.code("d", "").await, 0);
            kit.containers.delete("d", "").await.unwrap();
            assert!(!logger.is_alive());
            assert_eq!(fs::read_to_string(dir.join("term")).unwrap(), "term\n");
            unchanged(&before).await;
        },
    );
}

#[test]
fn undo_of_a_dead_supervisors_container_ends_its_logger() {
    each_runtime(
        "loggers::undo_of_a_dead_supervisors_container_ends_its_logger",
        async |kit| {
            let (path, _) = logger(&kit, "trap '' TERM; exec 5>&-; while :; do sleep 0.1; done");
            let mut request = kit.request("c", "sleep 1000", |_| ());
            request.stdout = format!("binary://{path}");
            kit.containers.create(request).await.unwrap();
            kit.containers.start("c", "").await.unwrap();
            let record = kit.book.get("c").unwrap();
            let logger = record.logger.expect("on record");
            // What another process would do: it knows the record only.
            kit.undo(&record).await;
            assert!(!logger.is_alive());
            kit.assert_undone("c");
            assert_eq!(kit.code("c", "").await, 137);
            kit.containers.delete("c", "").await.unwrap();
        },
    );
}

#[test]
fn an_exec_and_a_terminal_log_through_a_program_too() {
    each_runtime(
        "loggers::an_exec_and_a_terminal_log_through_a_program_too",
        async |kit| {
            kit.run("c", "sleep 1000").await;
            let before = own_fds();
            for terminal in [false, true] {
                let (path, dir) = logger(&kit, WRITES);
                let process = json!({
                    "user": {"uid": 0, "gid": 0}, "args": ["/bin/sh", "-c", "echo one; echo two >&2"],
                    "env": ["PATH=/bin"], "cwd": "/",
                });
                let uri = format!("binary://{path}");
                kit.containers
                    .exec(
                        "c",
                        "e",
                        terminal,
                        "",
                        &uri,
                        "",
                        process.to_string().as_bytes(),
                    )
                    .await
                    .unwrap();
                kit.containers.start("c", "e").await.unwrap();
                assert_eq!(kit.code("c", "e").await, 0);
                kit.containers.delete("c", "e").await.unwrap();
                let read = |name: &str| fs::read_to_string(dir.join(name)).unwrap_or_default();
                let expected = match terminal {
                    true => ("one\r\ntwo\r\n", ""),
                    false => ("one\n", "two\n"),
                };
                assert_eq!((read("out").as_str(), read("err").as_str()), expected);
                fs::remove_dir_all(&dir).unwrap();
            }
            unchanged(&before).await;
            kit.containers.stop_all(Duration::ZERO, true).await.unwrap();
        },
    );
}
