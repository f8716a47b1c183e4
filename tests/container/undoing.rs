//! Undo from the record: of a running container, and of what a killed supervisor left.

use super::*;

#[test]
fn undo_ends_a_running_container_from_its_record_and_twice() {
    each_runtime(
        "undoing::undo_ends_a_running_container_from_its_record_and_twice",
        async |kit| {
            kit.run("c", "sleep 1000").await;
            kit.exec("c", "e", "sleep 1000").await.unwrap();
            kit.containers.start("c", "e").await.unwrap();
            let record = kit.book.get("c").unwrap();
            let stored = serde_json::to_string(&record).unwrap();
            let record = serde_json::from_str(&stored).unwrap();
            kit.undo(&record).await;
            kit.assert_undone("c");
            kit.undo(&record).await;
            assert_eq!(kit.code("c", "").await, 137, "who waits hears of it");

            // A runtime that is gone, and a bundle that is gone, keep nothing alive.
            kit.run("d", "sleep 1000").await;
            let mut record = kit.book.get("d").unwrap();
            record.runtime = "/no/such/runc".into();
            kit.undo(&record).await;
            kit.assert_undone("d");
            fs::remove_dir_all(kit.bundle("d")).unwrap();
            kit.undo(&record).await;
        },
    );
}

const CRASHER: &str = "undoing::a_supervisor_that_is_killed";

/// Not a test: the supervisor that the next one kills.
#[test]
#[ignore = "run by undo_ends_what_a_killed_supervisor_left"]
fn a_supervisor_that_is_killed() {
    let Some(dir) = std::env::var_os("CRASH_DIR") else {
        return;
    };
    supervise(async || {
        let runtime = std::env::var("CRASH_RUNTIME").unwrap();
        let kit = Kit::new(&runtime);
        let request = kit.request("c", "sleep 1000", |_| ());
        let watch = async {
            loop {
                if let Some(record) = kit.book.get("c") {
                    let file = Path::new(&dir).join("record");
                    let temp = Path::new(&dir).join("temp");
                    fs::write(&temp, serde_json::to_string(&record).unwrap()).unwrap();
                    fs::rename(temp, file).unwrap();
                }
                sleep(Duration::from_millis(5)).await;
            }
        };
        let work = async {
            kit.containers.create(request).await.unwrap();
            kit.containers.start("c", "").await.unwrap();
        };
        tokio::join!(work, watch);
    });
}

#[test]
fn undo_ends_what_a_killed_supervisor_left() {
    sandboxed("undoing::undo_ends_what_a_killed_supervisor_left", || {
        // Killed while it runs, and with the create in mid-flight: after runc made it, before we heard of it.
        let late = wrapper(
            "if [ $verb = create ]; then runc \"$@\"; touch /run/made; exec sleep 1000; fi",
        );
        for (runtime, wanted) in [("runc", Status::Running), (late.as_str(), Status::Creating)] {
            let before = Scope::default().allow("cgroup /sys/fs/cgroup").take();
            let dir = tempfile::tempdir_in("/run").unwrap();
            let mut child = std::process::Command::new(std::env::current_exe().unwrap())
                .args(["--exact", CRASHER, "--ignored", "--nocapture"])
                .env("CRASH_DIR", dir.path())
                .env("CRASH_RUNTIME", runtime)
                // What it makes goes with the directory.
                .env("TMPDIR", dir.path())
                .stdout(std::process::Stdio::null())
                .spawn()
                .unwrap();
            let record = support::eventually(BOUND, "the state to kill it in", || {
                let text = fs::read_to_string(dir.path().join("record")).ok()?;
                let record: podvisor::container::ContainerRecord =
                    serde_json::from_str(&text).unwrap();
                let made = wanted != Status::Creating || Path::new("/run/made").exists();
                (record.status == wanted && made).then_some(record)
            });
            child.kill().unwrap();
            child.wait().unwrap();
            assert_eq!(record.init.is_some(), wanted == Status::Running);
            supervise(async || {
                let kit = Kit::new(runtime);
                kit.undo(&record).await;
                kit.undo(&record).await;
                assert!(!record.root.join("c").exists());
            });
            before.assert_unchanged();
            let _ = fs::remove_dir_all(record.bundle.parent().unwrap());
        }
    });
}
