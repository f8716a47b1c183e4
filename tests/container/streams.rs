//! Streams of real processes: output and its end, and who ends an input.

use std::io::{Read, Write};

use super::*;

pub fn fifo(kit: &Kit, name: &str) -> String {
    let path = kit.dir.path().join(name);
    nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
    path.display().to_string()
}

/// Reads a FIFO to its end, as a daemon's log copier does.
pub fn reader(path: &str) -> tokio::task::JoinHandle<String> {
    let path = path.to_owned();
    tokio::task::spawn_blocking(move || {
        let mut text = String::new();
        fs::File::open(path)
            .unwrap()
            .read_to_string(&mut text)
            .unwrap();
        text
    })
}

#[test]
fn a_reader_gets_everything_and_the_end() {
    each_runtime(
        "streams::a_reader_gets_everything_and_the_end",
        async |kit| {
            let (out, err) = (fifo(&kit, "init.out"), fifo(&kit, "init.err"));
            let mut request = kit.request("c", "seq 20000; echo bad >&2; exit 3", |_| ());
            (request.stdout, request.stderr) = (out.clone(), err.clone());
            let (outs, errs) = (reader(&out), reader(&err));
            kit.containers.create(request).await.unwrap();
            kit.containers.start("c", "").await.unwrap();
            assert_eq!(kit.code("c", "").await, 3);
            let text = timeout(BOUND, outs).await.expect("the end").unwrap();
            assert!(text.ends_with("\n20000\n") && text.lines().count() == 20000);
            assert_eq!(
                timeout(BOUND, errs).await.expect("the end").unwrap(),
                "bad\n"
            );
            let state = kit.containers.state("c", "").unwrap();
            assert_eq!((state.stdout, state.stderr), (out, err), "verbatim");
            kit.containers.delete("c", "").await.unwrap();
        },
    );
}

#[test]
fn an_input_ends_when_it_is_closed_not_when_the_client_leaves() {
    let name = "streams::an_input_ends_when_it_is_closed_not_when_the_client_leaves";
    each_runtime(name, async |kit| {
        kit.run("c", "sleep 1000").await;
        let (stdin, out) = (fifo(&kit, "e.in"), fifo(&kit, "e.out"));
        let process =
            json!({"user": {"uid": 0, "gid": 0}, "args": ["/bin/cat"], "env": ["PATH=/bin"], "cwd": "/"}).to_string();
        kit.containers
            .exec("c", "e", false, &stdin, &out, "", process.as_bytes())
            .await
            .unwrap();
        let read = reader(&out);
        kit.containers.start("c", "e").await.unwrap();
        for part in ["one ", "two"] {
            let stdin = stdin.clone();
            let write = move || {
                fs::OpenOptions::new()
                    .write(true)
                    .open(stdin)
                    .unwrap()
                    .write_all(part.as_bytes())
            };
            tokio::task::spawn_blocking(write).await.unwrap().unwrap();
            sleep(Duration::from_millis(200)).await;
            assert_eq!(
                kit.containers.state("c", "e").unwrap().status,
                Status::Running
            );
        }
        kit.containers.close_io("c", "e").unwrap();
        assert_eq!(kit.code("c", "e").await, 0);
        assert_eq!(
            timeout(BOUND, read).await.expect("the end").unwrap(),
            "one two"
        );

        // Closed before it was started: the end is there from the start.
        let stdin = fifo(&kit, "early.in");
        kit.containers
            .exec("c", "early", false, &stdin, "", "", process.as_bytes())
            .await
            .unwrap();
        kit.containers.close_io("c", "early").unwrap();
        kit.containers.start("c", "early").await.unwrap();
        assert_eq!(kit.code("c", "early").await, 0);
        assert_eq!(
            kit.containers.close_io("c", "none").unwrap_err().kind(),
            Kind::NotFound
        );
        kit.containers.stop_all(Duration::ZERO, true).await.unwrap();
    });
}
