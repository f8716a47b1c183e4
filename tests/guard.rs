//! Helpers under a guard: what they started, wherever it went, ends with them unless they ended well.
#![allow(
    clippy::expect_used,
    clippy::unwrap_used,
    reason = "a test may panic, also in its helpers"
)]

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use podvisor::process::{Helper, Output, Reaper, guard_by_itself};

const LIMIT: Duration = Duration::from_secs(20);

/// Set where the test's process is its programs' guard itself.
const ALONE: &str = "PODVISOR_TEST_ALONE";

fn is_alone() -> bool {
    std::env::var_os(ALONE).is_some()
}

fn run<F: Future>(test: F) -> F::Output {
    if is_alone() {
        guard_by_itself();
    }
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .expect("make a runtime");
    runtime.block_on(test)
}

fn guarded(script: &str, limit: Duration) -> Helper {
    let mut helper = Helper::new("/bin/bash", limit);
    helper.args = vec!["-c".into(), script.into()];
    helper.env = vec![("PATH".into(), "/usr/bin:/bin".into())];
    helper.guard = true;
    helper
}

/// Leaves three processes behind, each of which writes its pid: one in the group, one in a session of its own, and one
/// forked twice with an empty environment.
fn scatter(dir: &Path, then: &str) -> String {
    let leave = dir.join("leave");
    let dir = dir.display();
    let text = format!("echo $$ >{dir}/.$1; mv {dir}/.$1 {dir}/$1; exec /bin/sleep 600\n");
    fs::write(&leave, format!("PATH=/usr/bin:/bin\n{text}")).unwrap();
    let leave = format!("/bin/sh {}", leave.display());
    format!(
        "{leave} 1 <&- >&- 2>&- &\nsetsid {leave} 2 <&- >&- 2>&- &\n\
         env -i /bin/sh -c '/usr/bin/setsid {leave} 3 & exit' <&- >&- 2>&-\n\
         until [ -e {dir}/1 ] && [ -e {dir}/2 ] && [ -e {dir}/3 ]; do sleep 0.01; done\n{then}"
    )
}

/// Of the three, those that are alive.
fn alive(dir: &Path) -> usize {
    (1..=3)
        .filter(|n: &u32| {
            let pid = fs::read_to_string(dir.join(n.to_string())).unwrap_or_default();
            let stat = fs::read_to_string(format!("/proc/{}/stat", pid.trim())).unwrap_or_default();
            // Of a sleep, or of a shell that is about to be one.
            !pid.is_empty() && !stat.is_empty() && !stat.contains(") Z ")
        })
        .count()
}

/// Kills them.
fn end(dir: &Path) {
    for n in 1..=3 {
        let pid = fs::read_to_string(dir.join(n.to_string())).unwrap();
        nix::sys::signal::kill(
            nix::unistd::Pid::from_raw(pid.trim().parse().unwrap()),
            nix::sys::signal::Signal::SIGKILL,
        )
        .unwrap();
    }
}

async fn scattered(then: &str, limit: Duration) -> (Output, usize, tempfile::TempDir) {
    let dir = tempfile::tempdir().unwrap();
    let reaper = Reaper::start().unwrap();
    let output = guarded(&scatter(dir.path(), then), limit)
        .run(&reaper)
        .await
        .unwrap();
    assert!(
        dir.path().join("3").exists(),
        "all were started: {output:?}"
    );
    let left = alive(dir.path());
    (output, left, dir)
}

/// A process that runs one program at a time gives the same promises, with no guard beside it.
#[test]
fn the_same_holds_where_the_process_is_the_guard_itself() {
    for test in [
        "at_the_bound_nothing_is_left_wherever_it_went",
        "after_a_crash_or_a_failure_nothing_is_left_and_the_end_is_the_programs",
        "what_a_program_that_ended_well_left_lives_on",
        "given_up_in_the_middle_nothing_is_left",
        "a_program_under_a_guard_reads_writes_and_has_no_descriptor_but_three",
        "what_an_earlier_program_left_on_purpose_is_spared",
    ] {
        let own = std::env::current_exe().unwrap();
        let mut again = Command::new(own);
        let again = again.args(["--exact", test]).env(ALONE, "1");
        let output = again.output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{test}: {said}");
        assert!(said.contains("1 passed"), "{test}: {said}");
    }
}

#[test]
fn what_an_earlier_program_left_on_purpose_is_spared() {
    run(async {
        let (first, left, dir) = scattered("exit 0", LIMIT).await;
        assert_eq!((first.exit.code, left), (0, 3));
        let (second, left, _dir) = scattered("exit 3", LIMIT).await;
        assert_eq!((second.exit.code, left), (3, 0));
        assert_eq!(alive(dir.path()), 3);
        end(dir.path());
    });
}

#[test]
fn at_the_bound_nothing_is_left_wherever_it_went() {
    run(async {
        let (output, left, _dir) =
            scattered("trap '' TERM; sleep 600", Duration::from_secs(3)).await;
        assert!(output.timed_out);
        assert_eq!((output.exit.signal, left), (Some(9), 0));
    });
}

#[test]
fn after_a_crash_or_a_failure_nothing_is_left_and_the_end_is_the_programs() {
    run(async {
        let (output, left, _dir) = scattered("exit 7", LIMIT).await;
        assert_eq!((output.exit.code, output.exit.signal, left), (7, None, 0));
        let (output, left, _dir) = scattered("kill -SEGV $$", LIMIT).await;
        assert_eq!((output.exit.signal, left), (Some(11), 0));
        let (output, left, _dir) = scattered("kill -KILL $$", LIMIT).await;
        assert_eq!((output.exit.signal, left), (Some(9), 0));
    });
}

#[test]
fn what_a_program_that_ended_well_left_lives_on() {
    run(async {
        let (output, left, dir) = scattered("exit 0", LIMIT).await;
        assert_eq!((output.exit.code, left), (0, 3));
        end(dir.path());
    });
}

#[test]
fn given_up_in_the_middle_nothing_is_left() {
    run(async {
        let dir = tempfile::tempdir().unwrap();
        let reaper = Reaper::start().unwrap();
        let work = guarded(&scatter(dir.path(), "sleep 600"), LIMIT).run(&reaper);
        let end = Instant::now() + LIMIT;
        tokio::select! {
            _ = work => panic!("it ended"),
            () = async { while alive(dir.path()) < 3 { tokio::time::sleep(Duration::from_millis(10)).await } } => {}
        }
        while alive(dir.path()) > 0 {
            assert!(Instant::now() < end, "{} left", alive(dir.path()));
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    });
}

#[test]
fn a_program_under_a_guard_reads_writes_and_has_no_descriptor_but_three() {
    run(async {
        let reaper = Reaper::start().unwrap();
        let mut helper = guarded(
            "cat; fds=(/proc/$$/fd/*); echo ${#fds[@]} >&2; tr -d '\\0' </proc/$PPID/cmdline >&2",
            LIMIT,
        );
        helper.stdin = vec![b'x'; 300_000];
        let output = helper.run(&reaper).await.unwrap();
        assert_eq!((output.exit.code, output.stdout.len()), (0, 300_000));
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        // The fourth is the directory they are listed from.
        match said.strip_prefix("4\n") {
            Some("podvisor-guard") => assert!(!is_alone()),
            Some(us) => assert!(is_alone() && us.contains("guard"), "{us}"),
            None => panic!("{said}"),
        }
        let mut missing = Helper::new("/no/such/program", LIMIT);
        missing.guard = true;
        assert!(missing.run(&reaper).await.unwrap_err().is_gone());
        let mut unspeakable = Helper::new("/bin/true", LIMIT);
        unspeakable.args = vec!["a\0b".into()];
        unspeakable.guard = true;
        let refused = unspeakable.run(&reaper).await.unwrap_err();
        assert!(
            refused.to_string().starts_with("run /bin/true: "),
            "{refused}"
        );
    });
}

/// Prints what a guard costs; no bound is set on it.
#[test]
#[ignore = "slow: measures"]
fn slow_the_price_of_a_guard() {
    run(async {
        let reaper = Reaper::start().unwrap();
        for guard in [false, true, false, true] {
            let mut took: Vec<Duration> = Vec::new();
            for _ in 0..300 {
                let mut helper = Helper::new("/bin/true", LIMIT);
                helper.guard = guard;
                let begun = Instant::now();
                helper.run(&reaper).await.unwrap();
                took.push(begun.elapsed());
            }
            took.sort();
            println!(
                "guard {guard}: median {:?}, p10 {:?}, p90 {:?}",
                took[150], took[30], took[270]
            );
        }
    });
}
