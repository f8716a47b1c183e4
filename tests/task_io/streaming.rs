//! Standard streams that are had from the supervisor's own socket.

use podvisor::proto::any;
use podvisor::proto::task_v3::shim as task;
use podvisor::proto::types::transfer::Data;
use ttrpc::Code;

use crate::daemon::supervisor;
use crate::kit::{
    BOUND, Shim, Stream, block_on, close_stdin, delete, kill, limit, process, run, start, wait,
};
use crate::support::{Snapshot, cost_of, require, sandboxed, slow};

fn with_shim<F: Future<Output = ()>>(name: &str, script: &str, body: impl FnOnce(Shim) -> F) {
    sandboxed(name, || {
        if !require::tool("runc") {
            return;
        }
        let before = Snapshot::take();
        let shim = Shim::launch(script, |bundle| bundle);
        block_on(body(shim));
        before.assert_unchanged();
    });
}

fn code(error: &ttrpc::Error) -> Code {
    match error {
        ttrpc::Error::RpcStatus(status) => status.code(),
        other => panic!("{other:?}"),
    }
}

async fn exec(client: &podvisor::client::Client, request: task::ExecProcessRequest, script: &str) {
    let spec = any::raw(any::OCI_PROCESS, process(script).to_string().into_bytes());
    let request = task::ExecProcessRequest {
        id: "c".into(),
        spec: Some(spec).into(),
        ..request
    };
    client.task().exec(limit(), &request).await.unwrap();
}

#[test]
fn three_streams_go_over_the_supervisors_socket_to_their_ends() {
    const NAME: &str = "streaming::three_streams_go_over_the_supervisors_socket_to_their_ends";
    with_shim(NAME, "cat; echo bad >&2; seq 60000; exit 3", async |shim| {
        // Before the container, as containerd does.
        let mut stdin = Stream::open(&shim.address, "c-stdin").await;
        let mut stdout = Stream::open(&shim.address, "c-stdout").await;
        let mut stderr = Stream::open(&shim.address, "c-stderr").await;
        let client = shim.client().await;
        let request = task::CreateTaskRequest {
            stdin: shim.stream("c-stdin"),
            stdout: shim.stream("c-stdout"),
            stderr: shim.stream("c-stderr"),
            ..shim.request()
        };
        run(&client, &request).await;
        let state = task::StateRequest {
            id: "c".into(),
            ..Default::default()
        };
        let state = client.task().state(limit(), &state).await.unwrap();
        assert_eq!(
            (&state.stdin, &state.stdout, &state.stderr),
            (&request.stdin, &request.stdout, &request.stderr),
            "verbatim"
        );
        // More than may be sent ahead: the program takes it and more is allowed.
        let text = "0123456789abcde\n".repeat(8 * 1024);
        let reading = tokio::spawn(async move { stdout.read_all().await });
        let mut rest = text.as_bytes();
        while !rest.is_empty() {
            let (now, later) = rest.split_at(rest.len().min(stdin.allowed().await));
            stdin.send(now).await;
            rest = later;
        }
        // CloseIO may overtake what was sent before it: nothing of it is lost.
        close_stdin(&client, "").await;
        stdin.close().await;
        let all = String::from_utf8(reading.await.unwrap()).unwrap();
        assert!(all.starts_with(&text), "{} bytes", all.len());
        assert!(all.ends_with("\n59999\n60000\n") && all.lines().count() == 8 * 1024 + 60000);
        assert_eq!(stderr.read_all().await, b"bad\n");
        assert_eq!(wait(&client, "").await, 3);
        assert_eq!(delete(&client, "").await.exit_status, 3);
        drop((client, stdin, stderr));
        shim.end().await;
    });
}

#[test]
fn a_client_that_comes_back_finds_everything_in_order() {
    const NAME: &str = "streaming::a_client_that_comes_back_finds_everything_in_order";
    with_shim(NAME, "seq 100000; cat >/dev/null", async |shim| {
        let client = shim.client().await;
        let request = task::CreateTaskRequest {
            stdin: shim.stream("c-stdin"),
            stdout: shim.stream("c-stdout"),
            ..shim.request()
        };
        // Nobody is there: what is written waits.
        run(&client, &request).await;
        let mut all = Vec::new();
        for _ in 0..3 {
            let mut stdout = Stream::open(&shim.address, "c-stdout").await;
            let mut left = 64 << 10;
            while left > 0 {
                let bytes = stdout.next().await.unwrap();
                left -= bytes.len();
                all.extend(bytes);
            }
            // Gone without a word, like a daemon that was killed.
        }
        let mut first = Stream::open(&shim.address, "c-stdout").await;
        // A newer client takes the stream over; the older one is told at once.
        let mut stdout = Stream::open(&shim.address, "c-stdout").await;
        while let Some(bytes) = first.next().await {
            all.extend(bytes);
        }
        let stdin = Stream::open(&shim.address, "c-stdin").await;
        close_stdin(&client, "").await;
        // Its client leaves without closing: the end of the input comes all the same.
        drop(stdin);
        all.extend(stdout.read_all().await);
        let text = String::from_utf8(all).unwrap();
        let wanted: String = (1..=100_000).map(|n| format!("{n}\n")).collect();
        assert_eq!(text.len(), wanted.len());
        assert!(text == wanted);
        assert_eq!(wait(&client, "").await, 0);
        delete(&client, "").await;
        drop((client, first, stdout));
        shim.end().await;
    });
}

/// FL-080: who attaches and leaves again and again costs the supervisor nothing.
#[test]
fn many_clients_that_come_and_leave_leave_no_trace() {
    const NAME: &str = "streaming::many_clients_that_come_and_leave_leave_no_trace";
    let script = "while :; do echo tick; sleep 0.01; done";
    with_shim(NAME, script, async |shim| {
        let client = shim.client().await;
        let request = task::CreateTaskRequest {
            stdin: shim.stream("c-stdin"),
            stdout: shim.stream("c-stdout"),
            ..shim.request()
        };
        run(&client, &request).await;
        let supervisor = u32::try_from(supervisor()).unwrap();
        let round = async || {
            let stdin = Stream::open(&shim.address, "c-stdin").await;
            let mut stdout = Stream::open(&shim.address, "c-stdout").await;
            assert!(!stdout.next().await.unwrap().is_empty());
            drop((stdin, stdout));
        };
        // A stream is looked after for some seconds when its client has left: first as many as there are at one time.
        let (first, more) = if slow() { (300, 500) } else { (20, 30) };
        for _ in 0..first {
            round().await;
        }
        let (memory, threads, descriptors) = cost_of(supervisor);
        for _ in 0..more {
            round().await;
        }
        // The last connections close behind us.
        let end = std::time::Instant::now() + BOUND;
        loop {
            let (more, now, open) = cost_of(supervisor);
            println!("{memory} kB {threads} {descriptors}, then {more} kB {now} {open}");
            if more <= memory + 1024 && now <= threads + 1 && open <= descriptors {
                break;
            }
            assert!(std::time::Instant::now() < end, "it is not as before");
            tokio::time::sleep(std::time::Duration::from_millis(100)).await;
        }
        kill(&client).await;
        wait(&client, "").await;
        delete(&client, "").await;
        drop(client);
        shim.end().await;
    });
}

#[test]
fn a_terminal_and_an_exec_have_streams_too() {
    const NAME: &str = "streaming::a_terminal_and_an_exec_have_streams_too";
    with_shim(
        NAME,
        "read line; echo \"got $line\"; stty size; exit 5",
        async |shim| {
            shim.edit(
                |spec| spec["process"]["terminal"] = true.into(),
                "read line; echo \"got $line\"; stty size; exit 5",
            );
            let client = shim.client().await;
            let request = task::CreateTaskRequest {
                terminal: true,
                stdin: shim.stream("c-stdin"),
                stdout: shim.stream("c-stdout"),
                ..shim.request()
            };
            client.task().create(limit(), &request).await.unwrap();
            let resize = task::ResizePtyRequest {
                id: "c".into(),
                width: 77,
                height: 33,
                ..Default::default()
            };
            client.task().resize_pty(limit(), &resize).await.unwrap();
            let mut stdin = Stream::open(&shim.address, "c-stdin").await;
            let mut stdout = Stream::open(&shim.address, "c-stdout").await;
            start(&client, "").await;

            let process = task::ExecProcessRequest {
                exec_id: "e".into(),
                stdin: shim.stream("e-stdin"),
                stdout: shim.stream("e-stdout"),
                ..Default::default()
            };
            exec(&client, process, "cat; exit 4").await;
            let mut exec_in = Stream::open(&shim.address, "e-stdin").await;
            let mut exec_out = Stream::open(&shim.address, "e-stdout").await;
            start(&client, "e").await;
            exec_in.allowed().await;
            exec_in.send(b"to the exec").await;
            exec_in.close().await;
            close_stdin(&client, "e").await;
            assert_eq!(exec_out.read_all().await, b"to the exec");
            assert_eq!(wait(&client, "e").await, 4);
            delete(&client, "e").await;

            stdin.allowed().await;
            stdin.send(b"typed\n").await;
            let shown = String::from_utf8(stdout.read_all().await).unwrap();
            assert!(shown.contains("got typed\r\n33 77\r\n"), "{shown:?}");
            assert_eq!(wait(&client, "").await, 5);
            delete(&client, "").await;
            drop((client, stdin, stdout, exec_in, exec_out));
            shim.end().await;
        },
    );
}

#[test]
fn what_is_no_stream_of_ours_is_refused() {
    const NAME: &str = "streaming::what_is_no_stream_of_ours_is_refused";
    with_shim(NAME, "sleep 1000", async |shim| {
        let client = shim.client().await;
        for (stdout, wanted) in [
            ("grpc+unix:///s?streaming_id=x", Code::UNIMPLEMENTED),
            ("ttrpc+vsock://3:4?streaming_id=x", Code::UNIMPLEMENTED),
            ("ttrpc+unix:///s", Code::INVALID_ARGUMENT),
            ("carrier-pigeon://x", Code::INVALID_ARGUMENT),
        ] {
            let request = task::CreateTaskRequest {
                stdout: stdout.into(),
                ..shim.request()
            };
            let error = client.task().create(limit(), &request).await.unwrap_err();
            assert_eq!(code(&error), wanted, "{stdout}: {error}");
        }
        let request = task::CreateTaskRequest {
            stdout: shim.stream("one"),
            ..shim.request()
        };
        run(&client, &request).await;
        let process = task::ExecProcessRequest {
            exec_id: "e".into(),
            stdout: shim.stream("one"),
            ..Default::default()
        };
        exec(&client, process, "true").await;
        let again = task::StartRequest {
            id: "c".into(),
            exec_id: "e".into(),
            ..Default::default()
        };
        let error = client.task().start(limit(), &again).await.unwrap_err();
        assert_eq!(code(&error), Code::ALREADY_EXISTS, "{error}");

        for first in [
            any::raw(any::STREAM_DATA, vec![1]),
            any::raw(any::STREAM_INIT, Vec::new()),
        ] {
            let (_, answer) = Stream::begin(&shim.address, &first).await;
            assert_eq!(code(&answer.unwrap_err()), Code::INVALID_ARGUMENT);
        }
        // One that sends what it was never allowed loses its stream, and nobody else anything.
        let rude = Stream::open(&shim.address, "one").await;
        rude.send(b"an output takes no input").await;
        let ended = async {
            let mut rude = rude;
            while let Some(bytes) = rude.next_or_end().await {
                assert_eq!(bytes, b"");
            }
        };
        tokio::time::timeout(BOUND, ended).await.unwrap();
        kill(&client).await;
        assert_eq!(wait(&client, "").await, 137);
        // Nobody reads: the delete waits for a moment and goes on.
        delete(&client, "").await;
        drop(client);
        shim.end().await;
    });
}

impl Stream {
    /// As [`next`](Self::next), and the end of one that was refused.
    async fn next_or_end(&mut self) -> Option<Vec<u8>> {
        let any = self.receive().await.ok()?;
        let data: Option<Data> = any::unpack(&any, any::STREAM_DATA).unwrap();
        data.map(|d| d.data)
    }
}
