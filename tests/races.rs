//! Races and broken surroundings of one pod: requests that cross, a roll-back under way, files that are not there.
//!
//! The pod runs inside the test's own process, so that what crosses is decided by the test and not by luck.
#![allow(clippy::unwrap_used, clippy::expect_used)]

#[path = "races/kit.rs"]
mod kit;
mod support;

use std::fs;
use std::process::Command;
use std::time::Duration;

use kit::{Kit, POD, on_its_own, on_the_host, request};
use podvisor::error::Kind;
use podvisor::pod::record::{self, State};
use podvisor::process::Identity;
use support::fake::Act;
use tokio::time::{sleep, timeout};

const BOUND: Duration = Duration::from_secs(20);

#[test]
fn a_start_that_slips_in_before_a_stop_builds_nothing_after_it() {
    on_its_own(
        "a_start_that_slips_in_before_a_stop_builds_nothing_after_it",
        async |kit: &Kit| {
            kit.plugin.on("ADD", &[Act::Exit(1)]);
            kit.plugin.on("DEL", &[Act::Sleep(0.5)]);
            let pod = kit.pod("default");
            pod.create(request("fake")).await.unwrap();
            pod.start(POD, None).await.unwrap_err();
            let stop = tokio::spawn({
                let pod = pod.clone();
                async move { pod.stop(POD, None).await }
            });
            let tries = async {
                while let Err(e) = pod.start(POD, Some(Duration::from_secs(5))).await {
                    if e.kind() == Kind::State {
                        return;
                    }
                    tokio::task::yield_now().await;
                }
            };
            timeout(BOUND, tries).await.unwrap();
            timeout(BOUND, stop).await.unwrap().unwrap().unwrap();
            sleep(Duration::from_millis(300)).await;
            assert_eq!(
                kit.plugin.count("ADD"),
                1,
                "a creation began after the stop"
            );
            pod.shutdown(POD).await.unwrap();
        },
    );
}

#[test]
fn a_stop_ends_a_plugin_at_work_and_undoes_it_once() {
    on_its_own(
        "a_stop_ends_a_plugin_at_work_and_undoes_it_once",
        async |kit: &Kit| {
            kit.plugin.on("ADD", &[Act::Sleep(600.0)]);
            let pod = kit.pod("default");
            pod.create(request("fake")).await.unwrap();
            let start = tokio::spawn({
                let pod = pod.clone();
                async move { pod.start(POD, None).await }
            });
            kit.until(|| kit.plugin.count("ADD") == 1).await;
            timeout(BOUND, pod.stop(POD, None)).await.unwrap().unwrap();
            assert_eq!(start.await.unwrap().unwrap_err().kind(), Kind::Cancelled);
            assert_eq!(kit.plugin.count("DEL"), 1);
            assert!(Identity::of(kit.plugin.calls_of("ADD")[0].pid).is_err());
            assert_eq!(pod.record().network.pending, None);
            // Nobody waits for an infra process that never was.
            timeout(BOUND, pod.shutdown(POD)).await.unwrap().unwrap();
        },
    );
}

#[test]
fn the_same_create_again_does_not_wait_for_the_creation() {
    on_its_own(
        "the_same_create_again_does_not_wait_for_the_creation",
        async |kit: &Kit| {
            let gate = kit.dir.path().join("gate");
            kit.plugin.on("ADD", &[Act::WaitFor(gate.clone())]);
            let pod = kit.pod("default");
            pod.create(request("fake")).await.unwrap();
            let start = tokio::spawn({
                let pod = pod.clone();
                async move { pod.start(POD, None).await }
            });
            kit.until(|| kit.plugin.count("ADD") == 1).await;
            let again = timeout(Duration::from_secs(3), pod.create(request("fake"))).await;
            let other = timeout(Duration::from_secs(3), pod.create(request("none"))).await;
            fs::write(&gate, "").unwrap();
            start.await.unwrap().unwrap();
            again.expect("joins at once").unwrap();
            assert_eq!(
                other.expect("refused at once").unwrap_err().kind(),
                Kind::Exists
            );
            pod.shutdown(POD).await.unwrap();
        },
    );
}

#[test]
fn a_refused_create_leaves_nothing_and_the_next_one_is_on_record() {
    on_its_own(
        "a_refused_create_leaves_nothing_and_the_next_one_is_on_record",
        async |kit: &Kit| {
            let pod = kit.pod("default");
            let mut bad = request("none");
            let config = bad.config.get_or_insert_default();
            config.dns_config.mut_or_insert_default().servers = vec!["a b".into()];
            assert_eq!(pod.create(bad).await.unwrap_err().kind(), Kind::Invalid);
            assert!(!kit.state("default").exists());
            pod.create(request("none")).await.unwrap();
            let on_disk = record::read(&kit.state("default")).unwrap();
            assert_eq!(on_disk.state, State::Created);
            pod.shutdown(POD).await.unwrap();
        },
    );
}

#[test]
fn a_supervisor_that_has_nothing_leaves_the_journal_of_another_alone() {
    on_its_own(
        "a_supervisor_that_has_nothing_leaves_the_journal_of_another_alone",
        async |kit: &Kit| {
            let pod = kit.pod("default");
            pod.create(request("none")).await.unwrap();
            for number in 0..2 {
                let twin = kit.pod("default");
                match number {
                    0 => twin.shutdown(POD).await.unwrap(),
                    _ => twin.shutdown_task(POD).await.unwrap(),
                }
                timeout(BOUND, twin.ended()).await.unwrap();
                record::read(&kit.state("default")).unwrap();
            }
            pod.shutdown(POD).await.unwrap();
        },
    );
}

#[test]
fn what_a_cut_off_journal_belonged_to_is_undone_before_the_id_is_used_again() {
    on_its_own(
        "what_a_cut_off_journal_belonged_to_is_undone_before_the_id_is_used_again",
        async |kit: &Kit| {
            let old = kit.pod("default");
            // On the host's network: the old pod lives on in this process and would clean up a network of its own, too.
            old.create(on_the_host()).await.unwrap();
            let pid = old.start(POD, None).await.unwrap().pid;
            let infra = Identity::of(i32::try_from(pid).unwrap()).unwrap();
            fs::write(kit.state("default").join(record::FILE), "{").unwrap();
            let new = kit.pod("default");
            new.create(on_the_host()).await.unwrap();
            assert!(!infra.is_alive(), "the old infra process lives on");
            new.start(POD, None).await.unwrap();
            new.shutdown(POD).await.unwrap();
        },
    );
}

/// FL-072.
#[test]
fn a_pod_whose_state_directory_was_wiped_is_stopped_and_removed() {
    on_its_own(
        "a_pod_whose_state_directory_was_wiped_is_stopped_and_removed",
        async |kit: &Kit| {
            let pod = kit.pod("default");
            pod.create(request("fake")).await.unwrap();
            let pid = pod.start(POD, None).await.unwrap().pid;
            let infra = Identity::of(i32::try_from(pid).unwrap()).unwrap();
            podvisor::infra::PodFiles::remove(&kit.state("default").join("files")).unwrap();
            fs::remove_dir_all(kit.state("default")).unwrap();
            pod.stop(POD, None).await.unwrap();
            assert!(!infra.is_alive());
            assert_eq!(kit.plugin.count("DEL"), 1);
            pod.shutdown(POD).await.unwrap();
        },
    );
}

#[test]
fn a_full_disk_does_not_keep_a_network_owed_for_ever() {
    on_its_own(
        "a_full_disk_does_not_keep_a_network_owed_for_ever",
        async |kit: &Kit| {
            let pod = kit.pod("default");
            pod.create(request("fake")).await.unwrap();
            pod.start(POD, None).await.unwrap();
            // The temporary file of the marker cannot be made; removing files works, as on a full disk.
            let network = fs::read_dir(kit.dir.path().join("state/networks"))
                .unwrap()
                .flatten()
                .next()
                .unwrap()
                .path();
            fs::create_dir_all(network.join(".network-stopped.tmp/x")).unwrap();
            pod.stop(POD, None).await.unwrap();
            assert_eq!(kit.plugin.count("DEL"), 1);
            pod.shutdown(POD).await.unwrap();
        },
    );
}

#[test]
fn two_namespaces_may_use_one_id() {
    on_its_own("two_namespaces_may_use_one_id", async |kit: &Kit| {
        let (a, b) = (kit.pod("a"), kit.pod("b"));
        for pod in [&a, &b] {
            pod.create(request("none")).await.unwrap();
            pod.start(POD, None).await.unwrap();
        }
        a.shutdown(POD).await.unwrap();
        let left = b.record().infra.unwrap();
        assert!(left.is_alive(), "the other namespace's pod was killed");
        b.shutdown(POD).await.unwrap();
    });
}

#[test]
fn a_cgroup_that_holds_others_is_refused_and_left_alone() {
    on_its_own(
        "a_cgroup_that_holds_others_is_refused_and_left_alone",
        async |kit: &Kit| {
            let layout = podvisor::cgroup::Layout::detect().unwrap();
            let group = podvisor::cgroup::Group::new(&layout, "/pvtest-foreign").unwrap();
            group.create().unwrap();
            let mut sleeper = Command::new("sleep");
            sleeper.arg("600");
            let sleeper = kit.reaper.spawn(sleeper).unwrap();
            group.add_process(sleeper.pid()).unwrap();
            let pod = kit.pod("default");
            let mut spec = request("none");
            spec.spec = Some(kit.spec("/pvtest-foreign"));
            pod.create(spec).await.unwrap();
            let error = pod.start(POD, None).await.unwrap_err();
            assert!(error.to_string().contains("pvtest-foreign"), "{error}");
            pod.stop(POD, None).await.unwrap();
            pod.shutdown(POD).await.unwrap();
            assert!(
                sleeper.identity.is_alive(),
                "somebody else's process was killed"
            );
            sleeper.signal(9).unwrap();
            sleeper.wait().await;
            group.remove(BOUND).await.unwrap();
        },
    );
}

#[test]
fn a_parked_pod_whose_infra_process_died_is_still_undone() {
    on_its_own(
        "a_parked_pod_whose_infra_process_died_is_still_undone",
        async |kit: &Kit| {
            let pod = kit.pod("default");
            kit.plugin.on("ADD", &[Act::Sleep(0.3)]);
            pod.create(request("fake")).await.unwrap();
            let gave_up = pod.start(POD, Some(Duration::from_millis(50))).await;
            assert_eq!(gave_up.unwrap_err().kind(), Kind::Deadline);
            kit.until(|| pod.record().state == State::Parked).await;
            pod.record().infra.unwrap().signal(9).unwrap();
            timeout(BOUND, pod.ended()).await.unwrap();
            assert_eq!(kit.plugin.count("DEL"), 1);
        },
    );
}

#[test]
fn a_supervisor_leaves_even_when_its_journal_cannot_be_removed() {
    on_its_own(
        "a_supervisor_leaves_even_when_its_journal_cannot_be_removed",
        async |kit: &Kit| {
            let pod = kit.pod("default");
            let none = podvisor::container::CreateRequest {
                id: "c".into(),
                bundle: "/nonexistent".into(),
                ..Default::default()
            };
            pod.create_container(none, None).await.unwrap_err();
            let journal = kit.state("default").join(record::FILE);
            fs::remove_file(&journal).unwrap();
            fs::create_dir(&journal).unwrap();
            let _ = pod.shutdown_task("c").await;
            timeout(BOUND, pod.ended()).await.unwrap();
            fs::remove_dir_all(kit.state("default")).unwrap();
        },
    );
}

#[test]
fn a_request_held_on_a_parked_pod_is_answered_when_that_is_undone() {
    on_its_own(
        "a_request_held_on_a_parked_pod_is_answered_when_that_is_undone",
        async |kit: &Kit| {
            let pod = kit.pod("default");
            kit.plugin.on("ADD", &[Act::Sleep(0.5)]);
            pod.create(request("fake")).await.unwrap();
            let gave_up = pod.start(POD, Some(Duration::from_millis(50))).await;
            assert_eq!(gave_up.unwrap_err().kind(), Kind::Deadline);
            let held = tokio::spawn({
                let pod = pod.clone();
                async move { pod.start(POD, Some(Duration::from_secs(600))).await }
            });
            kit.until(|| pod.record().state == State::Parked).await;
            // It holds the pod for as long as it waits.
            sleep(Duration::from_secs(1)).await;
            assert!(!held.is_finished());
            pod.shutdown(POD).await.unwrap();
            let answer = timeout(BOUND, held).await.unwrap().unwrap();
            assert_eq!(answer.unwrap_err().kind(), Kind::State);
        },
    );
}
