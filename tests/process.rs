//! The process room, for real: exits, signals, orphans, helpers. Each test drives the one wait table of this process.
#![allow(
    clippy::expect_used,
    clippy::unwrap_used,
    reason = "a test may panic, also in its helpers"
)]

use std::fs;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use podvisor::process::{Helper, Identity, Reaper};

const LIMIT: Duration = Duration::from_secs(20);

fn run<F: Future>(test: F) -> F::Output {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .expect("make a runtime");
    runtime.block_on(test)
}

fn shell(script: &str) -> Command {
    let mut command = Command::new("/bin/sh");
    command.args(["-c", script]).stdin(Stdio::null());
    command
}

fn helper(script: &str, limit: Duration) -> Helper {
    let mut helper = Helper::new("/bin/sh", limit);
    helper.args = vec!["-c".into(), script.into()];
    helper.env = vec![("PATH".into(), "/usr/bin:/bin".into())];
    helper
}

fn number(text: &[u8]) -> i32 {
    String::from_utf8_lossy(text)
        .trim()
        .parse()
        .expect("a number")
}

#[test]
fn exit_codes_and_signals_are_told_apart() {
    run(async {
        let reaper = Reaper::start().expect("start");
        let seven = reaper.spawn(shell("exit 7")).expect("spawn").wait().await;
        assert_eq!((seven.code, seven.signal), (7, None));
        let killed = reaper
            .spawn(shell("kill -9 $$"))
            .expect("spawn")
            .wait()
            .await;
        assert_eq!((killed.code, killed.signal), (137, Some(9)));
        // A real-time signal has no name everywhere, and is an end like any other.
        let child = reaper.spawn(shell("exec sleep 60")).expect("spawn");
        assert!(child.signal(libc::SIGRTMIN() + 2).expect("signal"));
        assert_eq!(child.wait().await.signal, Some(libc::SIGRTMIN() + 2));
    });
}

#[test]
fn many_children_at_once_are_all_seen() {
    run(async {
        let reaper = Reaper::start().expect("start");
        let children: Vec<_> = (0..300)
            .map(|n| {
                reaper
                    .spawn(shell(&format!("exit {}", n % 100)))
                    .expect("spawn")
            })
            .collect();
        for (n, child) in children.iter().enumerate() {
            assert_eq!(child.wait().await.code as usize, n % 100);
        }
    });
}

#[test]
fn a_reaped_child_is_not_signalled() {
    run(async {
        let reaper = Reaper::start().expect("start");
        let child = reaper.spawn(shell("exit 0")).expect("spawn");
        child.wait().await;
        assert!(!child.signal(libc::SIGKILL).expect("signal"));
        assert!(!child.identity.is_alive());
        assert!(!child.identity.signal(libc::SIGKILL).expect("signal"));
        assert!(child.identity.wait_gone(LIMIT).await);
    });
}

#[test]
fn a_missing_program_is_an_error_and_the_loop_goes_on() {
    run(async {
        let reaper = Reaper::start().expect("start");
        let error = reaper
            .spawn(Command::new("/no/such/program"))
            .expect_err("spawn");
        assert!(error.to_string().contains("/no/such/program"), "{error}");
        assert!(error.is_gone());
        assert_eq!(
            reaper
                .spawn(shell("exit 3"))
                .expect("spawn")
                .wait()
                .await
                .code,
            3
        );
    });
}

/// FL-064: a stopped child is no event.
#[test]
fn a_stopped_child_costs_no_time() {
    run(async {
        let reaper = Reaper::start().expect("start");
        let child = reaper.spawn(shell("exec sleep 60")).expect("spawn");
        child.signal(libc::SIGSTOP).expect("stop");
        let state = || fs::read_to_string(format!("/proc/{}/stat", child.pid())).expect("stat");
        while !state().contains(") T ") {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        // The runtime has one thread: a spinning loop would keep this timer from ever firing in this test.
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert!(child.exited().is_none());
        child.signal(libc::SIGKILL).expect("kill");
        assert_eq!(child.wait().await.signal, Some(9));
    });
}

/// FL-065: a SIGTERM is not the end of reaping.
#[test]
fn children_are_reaped_after_a_sigterm() {
    run(async {
        let reaper = Reaper::start().expect("start");
        let kind = tokio::signal::unix::SignalKind::terminate();
        let mut terminate = tokio::signal::unix::signal(kind).expect("listen");
        let own = Identity::own().expect("own identity");
        assert!(own.signal(libc::SIGTERM).expect("signal ourselves"));
        terminate.recv().await.expect("it comes");
        assert_eq!(
            reaper
                .spawn(shell("exit 9"))
                .expect("spawn")
                .wait()
                .await
                .code,
            9
        );
    });
}

#[test]
fn an_orphan_that_is_adopted_tells_its_exit() {
    run(async {
        let reaper = Reaper::start().expect("start");
        // Alive when adopted, and not our child before its parent has gone.
        let done = helper(
            "setsid sh -c 'echo $$; exec >/dev/null 2>&1; sleep 0.3; exit 5' &",
            LIMIT,
        )
        .run(&reaper)
        .await;
        let pid = number(&done.expect("run").stdout);
        let orphan = reaper.adopt(pid).expect("adopt");
        assert_eq!(
            reaper.adopt(pid).expect("adopt again").identity,
            orphan.identity
        );
        assert_eq!(orphan.wait().await.code, 5);
        assert!(!orphan.signal(libc::SIGKILL).expect("signal"));
    });
}

#[test]
fn an_orphan_that_died_before_it_was_adopted_tells_its_exit_while_held() {
    run(async {
        let reaper = Reaper::start().expect("start");
        let held = reaper.hold_unknown();
        let script = "setsid sh -c 'echo $$; exit 6' &";
        let pid = number(
            &helper(script, LIMIT)
                .run(&reaper)
                .await
                .expect("run")
                .stdout,
        );
        while fs::exists(format!("/proc/{pid}")).expect("look") {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        assert_eq!(reaper.adopt(pid).expect("adopt").wait().await.code, 6);
        drop(held);
        assert!(
            reaper
                .adopt(pid)
                .expect_err("adopt a pid that is gone")
                .is_gone()
        );
    });
}

#[test]
fn a_helper_gets_exactly_its_environment_and_three_descriptors() {
    run(async {
        let reaper = Reaper::start().expect("start");
        let _held = fs::File::open("/dev/null").expect("open");
        let mut ls = helper(
            "pwd; env | grep -v -e ^PWD -e ^_ -e ^SHLVL -e ^OLDPWD; exec ls /proc/self/fd",
            LIMIT,
        );
        ls.cwd = Some("/usr".into());
        let output = ls.run(&reaper).await.expect("run");
        // 3 is the directory that ls itself reads.
        assert_eq!(
            String::from_utf8_lossy(&output.stdout),
            "/usr\nPATH=/usr/bin:/bin\n0\n1\n2\n3\n"
        );
    });
}

#[test]
fn a_helper_takes_more_input_and_gives_more_output_than_a_pipe_holds() {
    run(async {
        let reaper = Reaper::start().expect("start");
        let mut cat = helper("cat; echo over >&2", LIMIT);
        cat.stdin = vec![b'x'; 300_000];
        cat.output_cap = 200_000;
        let output = cat.run(&reaper).await.expect("run");
        assert_eq!(
            (output.exit.code, output.stdout.len(), output.truncated),
            (0, 200_000, true)
        );
        assert_eq!(output.stderr, b"over\n");
        // One that does not read its input is no error.
        let mut deaf = helper("exit 4", LIMIT);
        deaf.stdin = vec![b'x'; 300_000];
        assert_eq!(deaf.run(&reaper).await.expect("run").exit.code, 4);
    });
}

#[test]
fn at_its_bound_a_helpers_whole_group_is_killed() {
    run(async {
        let reaper = Reaper::start().expect("start");
        let output = helper("sleep 61 & echo $!; sleep 62", Duration::from_millis(300))
            .run(&reaper)
            .await
            .expect("run");
        assert!(output.timed_out);
        assert_eq!(output.exit.signal, Some(9));
        assert_gone(number(&output.stdout)).await;
    });
}

#[test]
fn what_a_helper_leaves_in_its_group_is_killed_and_holds_nobody_up() {
    run(async {
        let reaper = Reaper::start().expect("start");
        let begun = Instant::now();
        let output = helper("sleep 63 & echo $!", Duration::from_secs(60))
            .run(&reaper)
            .await
            .expect("run");
        assert_eq!((output.exit.code, output.timed_out), (0, false));
        assert!(
            begun.elapsed() < Duration::from_secs(50),
            "it waited for the pipe of its grandchild"
        );
        assert_gone(number(&output.stdout)).await;
    });
}

#[test]
fn what_a_helper_leaves_in_its_group_lives_on_when_asked() {
    run(async {
        let reaper = Reaper::start().expect("start");
        let mut exec = helper("sleep 66 >/dev/null 2>&1 & echo $!", LIMIT);
        exec.spare_group = true;
        let pid = number(&exec.run(&reaper).await.expect("run").stdout);
        let left = reaper.adopt(pid).expect("adopt");
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert!(left.signal(libc::SIGTERM).expect("signal"));
        assert_eq!(left.wait().await.signal, Some(libc::SIGTERM));
    });
}

#[test]
fn dropping_a_running_helper_kills_its_group() {
    run(async {
        let reaper = Reaper::start().expect("start");
        let mut seen = None;
        let job = helper("sleep 64 & sleep 65", LIMIT)
            .run_with(&reaper, |identity| seen = Some(identity));
        assert!(
            tokio::time::timeout(Duration::from_millis(300), job)
                .await
                .is_err()
        );
        let identity: Identity = seen.expect("started was called");
        assert!(identity.wait_gone(LIMIT).await);
        let left = || {
            fs::read_dir("/proc")
                .expect("list")
                .flatten()
                .any(|entry| in_group(&entry.path(), identity.pid))
        };
        while left() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    });
}

/// 086b: what the supervisor was started with is not what a workload gets.
#[test]
fn children_get_the_stated_limit_of_open_files() {
    run(async {
        let reaper = Reaper::start().expect("start");
        let output = helper("ulimit -Sn; ulimit -Hn", LIMIT)
            .run(&reaper)
            .await
            .expect("run");
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let limits: Vec<u64> = text
            .lines()
            .map(|l| l.parse().expect("a finite limit"))
            .collect();
        assert!(limits[0] <= 1024 && limits[1] <= 1_048_576, "{limits:?}");
    });
}

async fn assert_gone(pid: i32) {
    while Identity::of(pid).is_ok_and(|identity| identity.is_alive()) {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

fn in_group(proc: &std::path::Path, group: i32) -> bool {
    let stat = fs::read_to_string(proc.join("stat")).unwrap_or_default();
    let fields: Vec<&str> = stat
        .rsplit(')')
        .next()
        .unwrap_or_default()
        .split_ascii_whitespace()
        .collect();
    fields.get(2).is_some_and(|g| *g == group.to_string()) && fields.first() != Some(&"Z")
}
