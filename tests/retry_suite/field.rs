//! Faults reported from the field that have to do with creating, retrying and removing pods, each replayed. FL-002, 010
//! and 011 are replayed in `creation::joining`, `network_owed`, `removal::repeated` and `creation::failing`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use podvisor::error::Kind;
use podvisor::pod::record::State;
use serde_json::Value;

use crate::daemon::{Bundle, supervisor};
use crate::kit::{
    self, Delay, create, create_aside, inspect, listed, log_of, metric, on_a_machine, says, until,
    until_listed,
};
use crate::rig::{self, BOUND, Pod, called, config, gone, kill};
use crate::support::bin::PODVISOR;
use crate::support::fake::Act;
use crate::support::{eventually, podvisor};

/// The creation times out, and every retry is told where it is until one gets it: one ADD.
#[test]
fn fl_001_retries_of_a_creation_that_times_out_join_it() {
    on_a_machine(
        "field::fl_001_retries_of_a_creation_that_times_out_join_it",
        "",
        |machine| {
            let pod = machine.timed_out("p1", Delay::Plugin);
            for _ in 0..2 {
                let told = kit::retry(&pod.probe(), "p1", &config("p1"), Duration::from_secs(4))
                    .unwrap_err();
                assert_eq!(told.kind(), Kind::Deadline);
                says(
                    &told,
                    &["cni-add", "apps/p1/uid-p1/0", "after ", "ask again"],
                );
                assert!(!told.to_string().contains("reserved"), "{told}");
            }
            machine.let_go(Delay::Plugin);
            until(&pod, State::Parked);
            kit::retry(&pod.probe(), "p1", &config("p1"), BOUND).unwrap();
            machine.chains(1, 0);
            pod.end();
        },
    );
}

/// A creation that finishes after its client has gone is given to the retry: same id, same address.
#[test]
fn fl_002_finished_work_is_not_thrown_away() {
    on_a_machine(
        "field::fl_002_finished_work_is_not_thrown_away",
        "",
        |machine| {
            machine.hold(Delay::Plugin);
            podvisor(&create("1s")).code_is(125);
            machine.let_go(Delay::Plugin);
            until_listed("parked");
            let before = listed()[0].clone();
            podvisor(&create("1m")).ok();
            let after = listed()[0].clone();
            assert_eq!(
                (&after["id"], &after["ips"]),
                (&before["id"], &before["ips"])
            );
            assert_eq!(after["ips"].as_array().unwrap().len(), 1);
            podvisor(&["rm", "-f", "web"]).ok();
            machine.chains(1, 1);
        },
    );
}

/// Wherever a creation stands, error, log and metric name the stage and the age, and never only "reserved".
#[test]
fn fl_003_what_a_creation_waits_for_is_seen() {
    on_a_machine(
        "field::fl_003_what_a_creation_waits_for_is_seen",
        "",
        |machine| {
            for at in [Delay::Plugin, Delay::Infra] {
                machine.hold(at);
                let gave_up = podvisor(&create(at.patience())).code_is(125);
                let list = listed();
                let id = list[0]["id"].as_str();
                let id = id.unwrap_or_else(|| panic!("no pod after {gave_up:#?}"));
                let told = podvisor(&create("2s")).code_is(125).stderr;
                let stage = format!("still at stage {} after ", at.stage());
                assert!(
                    told.contains(&stage) && !told.contains("reserved"),
                    "{told}"
                );
                let log = log_of(id);
                let line = log.lines().find(|l| l.contains("a request joins")).unwrap();
                for part in [
                    &format!("stage={}", at.stage())[..],
                    "age_us=",
                    "key=",
                    "waiters=",
                ] {
                    assert!(line.contains(part), "{part} in {line}");
                }
                let sample = format!(
                    "podvisor_stalled_at_stage_total{{kind=\"pod\",stage=\"{}\"}}",
                    at.stage()
                );
                assert!(metric(&sample) >= Some(1.0));
                machine.let_go(at);
                podvisor(&["rm", "-f", "web"]).ok();
                machine.plugin.on("ADD", &[]);
            }
        },
    );
}

/// A creation that hangs says so from time to time; removal by force frees its name, whatever becomes of what hung.
#[test]
fn fl_004_a_creation_that_hangs_is_told_and_can_be_removed() {
    on_a_machine(
        "field::fl_004_a_creation_that_hangs_is_told_and_can_be_removed",
        "[log]\nstage_interval = 0.3\n",
        |machine| {
            let acts = [Act::IgnoreTerm, Act::Sleep(300.0)];
            machine.plugin.on("ADD", &acts);
            let mut hanging = create_aside("5m");
            called(&machine.plugin, "ADD", 1);
            let id = listed()[0]["id"].as_str().unwrap().to_owned();
            eventually(BOUND, "two lines of a stage that lasts", || {
                let log = log_of(&id);
                let lines = log.lines().filter(|l| l.contains("still at stage"));
                (lines.filter(|l| l.contains("stage=cni-add")).count() >= 2).then_some(())
            });
            podvisor(&["rm", "-f", "web"]).ok();
            assert!(!hanging.wait().unwrap().success());
            machine.plugin.on("ADD", &[]);
            let anew = podvisor(&create("1m")).ok();
            assert_ne!(anew.stdout.trim(), id);
            podvisor(&["rm", "-f", "web"]).ok();
        },
    );
}

/// The supervisor is killed at any moment of a creation; what is left is shown, and removed with a DEL.
#[test]
fn fl_005_a_kill_at_any_moment_of_a_creation_leaves_what_can_be_removed() {
    killed_at_any_moment(
        "field::fl_005_a_kill_at_any_moment_of_a_creation_leaves_what_can_be_removed",
        10,
        Duration::from_secs(300),
    );
}

#[test]
#[ignore = "slow: two hundred of them"]
fn slow_fl_005_two_hundred_kills_of_a_creation_leave_what_can_be_removed() {
    killed_at_any_moment(
        "field::slow_fl_005_two_hundred_kills_of_a_creation_leave_what_can_be_removed",
        200,
        Duration::from_secs(3500),
    );
}

fn killed_at_any_moment(name: &str, rounds: u64, bound: Duration) {
    kit::on_a_machine_for(bound, name, "", |machine| {
        for round in 0..rounds {
            let mut making = create_aside("1m");
            // From the launch to well after it is ready, and in no order.
            std::thread::sleep(Duration::from_millis(round * 37 % 250));
            let shims = crate::daemon::shims();
            let too_early = shims.is_empty();
            // By its number: the helper may be among them, too.
            shims.iter().for_each(|pid| {
                let _ = nix::sys::signal::kill(
                    nix::unistd::Pid::from_raw(*pid),
                    nix::sys::signal::Signal::SIGKILL,
                );
            });
            shims.into_iter().for_each(gone);
            making.wait().unwrap();
            if let Some(pod) = listed().as_array().unwrap().first() {
                assert!(too_early || pod["state"] != "ready", "{pod}");
                podvisor(&["rm", "-f", pod["id"].as_str().unwrap()]).ok();
            }
            machine.is_clean();
            assert_eq!(kit::leases(), 0);
            // A fake that remembers thousands of calls takes seconds to look through them.
            machine.plugin.forget();
        }
        // A directory with only what is made first.
        fs::create_dir_all("/run/podvisor/default/0123456789abcdef0123456789abcdef/bundle")
            .unwrap();
        assert_eq!(listed()[0]["state"], "unrecovered");
        podvisor(&create("1m")).ok();
        podvisor(&["rm", "-f", "web", "0123456789abcdef0123456789abcdef"]).ok();
    });
}

/// The supervisor dies when it has just made the infra process: the name is free, and nothing is left.
#[test]
fn fl_006_a_supervisor_killed_at_its_infra_process_leaves_the_name_free() {
    on_a_machine(
        "field::fl_006_a_supervisor_killed_at_its_infra_process_leaves_the_name_free",
        "",
        |machine| {
            machine.hold(Delay::Infra);
            let making = create_aside("1m");
            let at_infra = || {
                let pod = listed()[0]["id"].as_str()?.to_owned();
                let stages = inspect(&pod)["stages"].clone();
                let last = stages.as_array()?.last()?["name"].clone();
                (last == "infra").then_some(())
            };
            eventually(BOUND, "it makes the infra process", at_infra);
            // A moment later, as it was reported.
            std::thread::sleep(Duration::from_millis(50));
            let supervisor = inspect("web")["supervisor"]["pid"].as_i64().unwrap();
            kill(i32::try_from(supervisor).unwrap());
            machine.let_go(Delay::Infra);
            let made = making.wait_with_output().unwrap();
            assert!(!made.status.success(), "{made:?}");
            machine.is_clean();
            podvisor(&create("1m")).ok();
            podvisor(&["rm", "-f", "web"]).ok();
            machine.chains(2, 2);
        },
    );
}

/// Records that cannot be read are named with their reason, hide no other, and can be cleared.
#[test]
fn fl_007_records_that_cannot_be_read_are_named_and_cleared() {
    on_a_machine(
        "field::fl_007_records_that_cannot_be_read_are_named_and_cleared",
        "",
        |_| {
            let ids: Vec<String> = ["a", "b", "c"]
                .iter()
                .map(|name| {
                    let made = podvisor(&["create", "--net", "none", "--name", name]).ok();
                    made.stdout.trim().to_owned()
                })
                .collect();
            crate::daemon::shims().into_iter().for_each(kill);
            let dir = |id: &str| PathBuf::from("/run/podvisor/default").join(id);
            fs::write(dir(&ids[0]).join("journal.json"), "{nonsense").unwrap();
            // For root no mode forbids reading; one that lets others write is not believed.
            let open = std::os::unix::fs::PermissionsExt::from_mode(0o777);
            fs::set_permissions(dir(&ids[1]), open).unwrap();
            let all = listed();
            for (id, reason) in [(&ids[0], "damaged"), (&ids[1], "others can write")] {
                let pods = all.as_array().unwrap();
                let pod = pods.iter().find(|p| p["id"] == id.as_str()).unwrap();
                assert_eq!(pod["state"], "unrecovered");
                assert!(pod["reason"].as_str().unwrap().contains(reason), "{pod}");
            }
            assert_eq!(all.as_array().unwrap().len(), 3);
            let closed = std::os::unix::fs::PermissionsExt::from_mode(0o700);
            fs::set_permissions(dir(&ids[1]), closed).unwrap();
            podvisor(&["rm", "-f", "a", "b", "c"]).ok();
        },
    );
}

/// A library that shifts what the supervisor takes for the wall clock by the seconds in a file.
fn shifted_clock(seconds: &str) -> (PathBuf, PathBuf) {
    let dir = Path::new("/run/clock");
    fs::create_dir_all(dir).unwrap();
    let (source, library, offset) = (
        dir.join("clock.c"),
        dir.join("clock.so"),
        dir.join("offset"),
    );
    fs::write(&offset, seconds).unwrap();
    let text = r#"
        #define _GNU_SOURCE
        #include <errno.h>
        #include <fcntl.h>
        #include <stdlib.h>
        #include <sys/syscall.h>
        #include <time.h>
        #include <unistd.h>
        int clock_gettime(clockid_t id, struct timespec *at) {
            int result = syscall(SYS_clock_gettime, id, at), saved = errno;
            if (result == 0 && id == CLOCK_REALTIME) {
                char text[32] = {0};
                int file = open("/run/clock/offset", O_RDONLY | O_CLOEXEC);
                if (file >= 0) { if (read(file, text, sizeof text - 1) > 0) at->tv_sec += atol(text); close(file); }
            }
            errno = saved;
            return result;
        }
    "#;
    fs::write(&source, text).unwrap();
    let mut compile = Command::new("cc");
    compile
        .args(["-shared", "-fPIC", "-O1", "-o"])
        .arg(&library)
        .arg(&source);
    crate::support::run(&mut compile, BOUND).ok();
    (library, offset)
}

/// The wall clock steps a minute back and ten minutes forward while a pod is made and while it is parked: no deadline
/// and no expiry comes early or late.
#[test]
fn fl_008_steps_of_the_wall_clock_move_no_deadline_and_no_expiry() {
    on_a_machine(
        "field::fl_008_steps_of_the_wall_clock_move_no_deadline_and_no_expiry",
        "",
        |machine| {
            let (library, offset) = shifted_clock("0");
            machine.hold(Delay::Plugin);
            let bundle = Bundle::new("p1").env("LD_PRELOAD", library.to_str().unwrap());
            let pod = Pod::in_bundle(bundle);
            pod.probe().create("p1", &config("p1")).unwrap();
            let first = pod.start_aside(BOUND);
            called(&machine.plugin, "ADD", 1);
            let asked = std::time::Instant::now();
            let short = pod.start_aside(Duration::from_secs(4));
            fs::write(&offset, "-60").unwrap();
            let told = short.join().unwrap().unwrap_err();
            assert_eq!(told.kind(), Kind::Deadline);
            assert!(asked.elapsed() >= Duration::from_secs(3), "early");
            fs::write(&offset, "600").unwrap();
            let joined = pod.start_aside(BOUND);
            kit::until_waiters(&pod, 2);
            machine.let_go(Delay::Plugin);
            let pid = first.join().unwrap().unwrap();
            assert_eq!(
                joined.join().unwrap().unwrap(),
                pid,
                "ten minutes are no deadline"
            );
            // The time that people read did follow.
            let record = pod.record().unwrap();
            let ready = record.ready_at.unwrap() - record.created_at;
            assert!(ready > 500_000_000_000, "{ready}");
            pod.end();

            let parked = machine.parked("p2", Delay::Plugin);
            fs::write(&offset, "-3600").unwrap();
            gone(parked.supervisor());
            fs::remove_dir_all("/run/clock").unwrap();
        },
    );
}

/// A pod that was made by a clock in the future does not win over the real one, and nothing below 1970 crashes.
#[test]
fn fl_009_the_latest_pod_is_that_of_the_highest_attempt() {
    on_a_machine(
        "field::fl_009_the_latest_pod_is_that_of_the_highest_attempt",
        "",
        |_| {
            let mut pods = Vec::new();
            // 2036, the right time, and before 1970.
            for (attempt, seconds) in [(1, "300000000"), (2, "0"), (0, "-4000000000")] {
                let (library, _) = shifted_clock(seconds);
                let id = format!("p{attempt}");
                let bundle = Bundle::new(&id).env("LD_PRELOAD", library.to_str().unwrap());
                let pod = Pod::in_bundle(bundle);
                let mut wanted = config("web");
                wanted.metadata.mut_or_insert_default().attempt = attempt;
                pod.probe().create(&id, &wanted).unwrap();
                pods.push(pod);
            }
            let ask = |args: &[&str]| {
                podvisor(&[&["--namespace", rig::NAMESPACE], args].concat())
                    .ok()
                    .stdout
            };
            let shown: Value = serde_json::from_str(&ask(&["inspect", "web"])).unwrap();
            assert_eq!(
                (&shown[0]["id"], &shown[0]["attempt"]),
                (&"p2".into(), &2.into())
            );
            let table = ask(&["ps", "-a"]);
            assert_eq!(table.lines().count(), 4, "{table}");
            let list = ask(&["ps", "-a", "--json"]);
            assert!(list.contains("\"1970-01-01T00:00:00"), "{list}");
            pods.iter().for_each(Pod::end);
            fs::remove_dir_all("/run/clock").unwrap();
        },
    );
}

/// A removal whose caller lost patience is finished, and can be asked for again.
#[test]
fn fl_053_a_delete_that_took_too_long_ends_clean_without_anybody() {
    on_a_machine(
        "field::fl_053_a_delete_that_took_too_long_ends_clean_without_anybody",
        kit::UNDO_ON_SHUTDOWN,
        |machine| {
            let gate = PathBuf::from("/run/del-gate");
            machine.plugin.on("DEL", &[Act::WaitFor(gate.clone())]);
            let pod = machine.parked("p1", Delay::Plugin);
            pod.kill_supervisor();
            // Answered although the plugin hangs; the work goes on behind it.
            pod.bundle.delete();
            called(&machine.plugin, "DEL", 1);
            pod.bundle.delete();
            fs::write(&gate, "").unwrap();
            machine.is_clean();
            assert_eq!(kit::leases(), 0);
        },
    );
}

/// The supervisor goes away in the middle of a removal: no loop on a closed connection, the rest is done without it.
#[test]
fn fl_082_a_supervisor_that_goes_away_during_a_removal_is_no_loop() {
    on_a_machine(
        "field::fl_082_a_supervisor_that_goes_away_during_a_removal_is_no_loop",
        "",
        |machine| {
            machine
                .plugin
                .on("DEL", &[Act::Sleep(300.0), Act::OnlyFirst(1)]);
            podvisor(&create("1m")).ok();
            let mut removing = Command::new(PODVISOR)
                .args(["rm", "-f", "web"])
                .spawn()
                .unwrap();
            called(&machine.plugin, "DEL", 1);
            machine.plugin.on("DEL", &[]);
            kill(supervisor());
            assert!(removing.wait().unwrap().success());
            machine.is_clean();
            // Once more is no harm, and says what is so.
            podvisor(&["rm", "-f", "web"]).code_is(1);
        },
    );
}
