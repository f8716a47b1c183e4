//! Requests that wait for one creation of a container.

use std::time::{Duration, Instant};

use podvisor::container::Status;
use podvisor::error::Kind;

use crate::kit::{
    Kit, SHORT, create, create_and_hang_up, each_runtime, exec, kill, open, pids, start, with_runc,
};
use crate::rig::{self, BOUND, called, container};
use crate::support::fake::Act;
use crate::support::{eventually, podvisor};

/// crio.md 4.1 "should not clean up container after timeout", "should not be able to operate on a timed out container".
fn the_work_goes_on(kit: &Kit, hang_up: bool) {
    let gate = kit.closed("CREATE");
    let c1 = container("c1", "sleep 1000");
    if hang_up {
        create_and_hang_up(kit.pod.probe(), &kit.request(&c1), SHORT);
    } else {
        let error = kit.create(&c1, SHORT).unwrap_err();
        let (kind, text) = (error.kind(), error.to_string());
        assert_eq!(kind, Kind::Deadline, "{text}");
        let holder = format!("in supervisor {}", kit.pod.supervisor());
        for part in [
            "create container c1: still at stage runtime-create after ",
            holder.as_str(),
            "the work goes on",
        ] {
            assert!(text.contains(part), "{text}");
        }
    }
    let (asked, watcher) = (Instant::now(), kit.create_aside(&c1, SHORT * 4));
    std::thread::sleep(Duration::from_millis(300));
    open(&gate);
    kit.until("c1", Some(Status::Parked));
    nothing_can_be_done_with(kit, "c1");

    // Whoever watched does not get it, and hears so no sooner than he has to.
    let told = watcher.join().unwrap().unwrap_err();
    assert_eq!(told.kind(), Kind::Busy, "{told}");
    assert!(
        told.to_string()
            .contains("c1: it is ready, retry to take it"),
        "{told}"
    );
    assert!(asked.elapsed() > SHORT * 3, "{:?}", asked.elapsed());

    let pid = kit.create(&c1, BOUND).unwrap();
    assert_eq!(kit.runtime.count("CREATE"), 1);
    let probe = kit.pod.probe();
    assert_eq!(probe.task_state("c1").unwrap(), "CREATED");
    assert_eq!(kit.create(&c1, BOUND).unwrap(), pid, "a duplicate");
    assert_eq!(start(&probe, "c1", "", BOUND).unwrap(), pid);
    assert_eq!(kit.create(&c1, BOUND).unwrap(), pid, "of one that runs");
    assert_eq!(kit.runtime.count("CREATE"), 1);
    kill(&probe, "c1", 9).unwrap();
    crate::kit::wait(&probe, "c1").unwrap();
    let ended = kit.create(&c1, BOUND).unwrap_err();
    assert_eq!(ended.kind(), Kind::Exists, "{ended}");
    crate::kit::delete(&probe, "c1").unwrap();
    kit.with_pod.assert_unchanged();
}

fn nothing_can_be_done_with(kit: &Kit, id: &str) {
    let probe = kit.pod.probe();
    let refused = [
        probe.task_state(id).map(drop),
        start(&probe, id, "", BOUND).map(drop),
        exec(&probe, id, "e", "true"),
        kill(&probe, id, 1),
        pids(&probe, id).map(drop),
        crate::kit::wait(&probe, id).map(drop),
    ];
    for answer in refused {
        let error = answer.unwrap_err();
        assert_eq!(error.kind(), Kind::NotFound, "{error}");
        assert!(error.to_string().contains("parked"), "{error}");
    }
    let namespace = ["--namespace", rig::NAMESPACE];
    let ask = |verb: &[&str]| podvisor(&[&namespace, verb].concat()).ok().stdout;
    assert!(
        ask(&["ps", "-a"]).contains("0/1 (1 parked, "),
        "{}",
        ask(&["ps", "-a"])
    );
    let shown: serde_json::Value = serde_json::from_str(&ask(&["inspect", "p1"])).unwrap();
    let status = &shown[0]["status"];
    assert_eq!(status["parked_containers"][0]["id"], id, "{status}");
    assert!(
        status["parked_containers"][0]["age_seconds"].is_u64(),
        "{status}"
    );
    let open = &status["live"]["info"]["info"]["podvisor"]["creations"]["open"][0];
    assert_eq!(
        (&open["id"], &open["parked"]),
        (&id.into(), &true.into()),
        "{status}"
    );
}

#[test]
fn a_creation_outlives_its_callers_deadline_and_is_taken_by_a_retry() {
    each_runtime(
        "joining::a_creation_outlives_its_callers_deadline_and_is_taken_by_a_retry",
        "",
        |kit| the_work_goes_on(kit, false),
    );
}

#[test]
fn a_creation_outlives_its_callers_connection_and_is_taken_by_a_retry() {
    each_runtime(
        "joining::a_creation_outlives_its_callers_connection_and_is_taken_by_a_retry",
        "",
        |kit| the_work_goes_on(kit, true),
    );
}

/// A caller who stops waiting and says nothing (there is no such message) is taken to be there: his retry is a duplicate.
#[test]
fn a_caller_who_cancels_and_stays_connected_finds_his_container() {
    with_runc(
        "joining::a_caller_who_cancels_and_stays_connected_finds_his_container",
        "",
        |kit| {
            let gate = kit.closed("CREATE");
            let c1 = container("c1", "sleep 1000");
            let (probe, request) = (kit.pod.probe(), kit.request(&c1));
            let tasks = probe.client.task();
            let given_up = probe.block(async {
                tokio::time::timeout(SHORT, tasks.create(rig::limit(BOUND), &request)).await
            });
            assert!(given_up.is_err());
            let watcher = kit.create_aside(&c1, BOUND);
            std::thread::sleep(Duration::from_millis(300));
            open(&gate);
            let pid = watcher.join().unwrap().unwrap();
            assert_eq!(create(&probe, &request, BOUND).unwrap(), pid);
            assert_eq!(kit.runtime.count("CREATE"), 1);
            start(&probe, "c1", "", BOUND).unwrap();
            kit.remove("c1");
        },
    );
}

/// A request that is late already begins the work and does not get it, nor does a late one take it.
#[test]
fn whoever_has_no_time_left_begins_the_work_and_takes_nothing() {
    with_runc(
        "joining::whoever_has_no_time_left_begins_the_work_and_takes_nothing",
        "",
        |kit| {
            let c1 = container("c1", "sleep 1000");
            let late = || {
                let (probe, request) = (kit.pod.probe(), kit.request(&c1));
                let tasks = probe.client.task();
                let passed = ttrpc::context::with_timeout(-1);
                let _ = probe.block(async {
                    tokio::time::timeout(SHORT, tasks.create(passed, &request)).await
                });
            };
            late();
            kit.until("c1", Some(Status::Parked));
            late();
            kit.until("c1", Some(Status::Parked));
            kit.create(&c1, BOUND).unwrap();
            assert_eq!(kit.runtime.count("CREATE"), 1);
            crate::kit::delete(&kit.pod.probe(), "c1").unwrap();
        },
    );
}

#[test]
fn duplicates_get_the_live_container_when_the_first_caller_waits_to_the_end() {
    each_runtime(
        "joining::duplicates_get_the_live_container_when_the_first_caller_waits_to_the_end",
        "",
        |kit| {
            let gate = kit.closed("CREATE");
            let c1 = container("c1", "sleep 1000");
            let first = kit.create_aside(&c1, BOUND);
            called(&kit.runtime, "CREATE", 1);
            let others: Vec<_> = (0..3).map(|_| kit.create_aside(&c1, BOUND)).collect();
            std::thread::sleep(Duration::from_millis(300));
            open(&gate);
            let pid = first.join().unwrap().unwrap();
            for other in others {
                assert_eq!(other.join().unwrap().unwrap(), pid);
            }
            assert_eq!(kit.runtime.count("CREATE"), 1);
            crate::kit::delete(&kit.pod.probe(), "c1").unwrap();
            kit.with_pod.assert_unchanged();
        },
    );
}

/// crio.md 4.1 "should clean up container after timeout if request changes", for another id and for another request.
#[test]
fn another_request_for_the_same_id_is_refused_and_one_for_another_id_goes_its_own_way() {
    with_runc(
        "joining::another_request_for_the_same_id_is_refused_and_one_for_another_id_goes_its_own_way",
        "[parking]\ninterval = 3.0\n",
        |kit| {
            let gate = kit.closed("CREATE");
            let c1 = container("c1", "sleep 1000");
            kit.create(&c1, SHORT).unwrap_err();
            let mut other = kit.request(&c1);
            other.stderr = format!("file://{}", c1.dir.join("err").display());
            let refused = |what: &str| {
                let error = create(&kit.pod.probe(), &other, BOUND).unwrap_err();
                assert_eq!(error.kind(), Kind::Exists, "{what}: {error}");
                assert_eq!(error.to_string().matches("request ").count(), 2, "{error}");
            };
            refused("under way");
            open(&gate);
            kit.until("c1", Some(Status::Parked));
            refused("parked");
            let c2 = container("c2", "sleep 1000");
            kit.create(&c2, BOUND).unwrap();
            // Nobody comes back for the first.
            kit.until("c1", None);
            assert_eq!(kit.pod.probe().task_state("c2").unwrap(), "CREATED");

            // The spec counts as it was when the request came, and as the supervisor has written it.
            let spec = c1.dir.join("config.json");
            let asked = std::fs::read(&spec).unwrap();
            let pid = kit.create(&c1, BOUND).unwrap();
            std::fs::write(&spec, [asked.as_slice(), b"\n"].concat()).unwrap();
            let error = kit.create(&c1, BOUND).unwrap_err();
            assert_eq!(error.kind(), Kind::Exists, "{error}");
            std::fs::write(&spec, asked).unwrap();
            assert_eq!(kit.create(&c1, BOUND).unwrap(), pid);
            refused("live");
            for id in ["c1", "c2"] {
                crate::kit::delete(&kit.pod.probe(), id).unwrap();
            }
            kit.with_pod.assert_unchanged();
        },
    );
}

/// R6 and R8: who watches hears the cause, who comes while it is undone hears that.
#[test]
fn who_watches_a_creation_fail_is_told_the_cause_at_once() {
    each_runtime(
        "joining::who_watches_a_creation_fail_is_told_the_cause_at_once",
        "",
        |kit| {
            let gate = kit.closed("CREATE");
            let undo = std::path::PathBuf::from("/run/undo");
            let _ = std::fs::remove_file(&undo);
            kit.runtime.on("DELETE", &[Act::WaitFor(undo.clone())]);
            kit.runtime.on(
                "CREATE",
                &[
                    Act::WaitFor(gate.clone()),
                    Act::AfterReal,
                    Act::Exit(3),
                    Act::OnlyFirst(1),
                ],
            );
            let c1 = container("c1", "sleep 1000");
            kit.create(&c1, SHORT).unwrap_err();
            let watchers: Vec<_> = (0..2).map(|_| kit.create_aside(&c1, BOUND)).collect();
            std::thread::sleep(Duration::from_millis(300));
            let opened = Instant::now();
            open(&gate);
            for watcher in watchers {
                let error = watcher.join().unwrap().unwrap_err();
                assert_eq!(error.kind(), Kind::Other, "{error}");
                assert!(
                    error.to_string().contains("slow create: exit status 3"),
                    "{error}"
                );
            }
            assert!(opened.elapsed() < BOUND / 2, "held until the deadline");
            called(&kit.runtime, "DELETE", 1);
            let again = kit.create(&c1, BOUND).unwrap_err();
            assert_eq!(again.kind(), Kind::Busy, "{again}");
            let text = again.to_string();
            assert!(text.contains("rolled back (step roll-back, "), "{text}");
            open(&undo);
            let pid = eventually(BOUND, "the id is free", || match kit.create(&c1, BOUND) {
                Ok(pid) => Some(pid),
                Err(e) => {
                    assert_eq!(e.kind(), Kind::Busy, "{e}");
                    None
                }
            });
            assert_eq!(start(&kit.pod.probe(), "c1", "", BOUND).unwrap(), pid);
            kit.remove("c1");
            kit.with_pod.assert_unchanged();
        },
    );
}

/// crio.md 4.1 "emit metric when container is re-requested".
#[test]
fn requests_that_join_are_counted_by_the_stage_they_find() {
    with_runc(
        "joining::requests_that_join_are_counted_by_the_stage_they_find",
        "[parking]\nhold_waiters = false\n",
        |kit| {
            let gate = kit.closed("CREATE");
            let c1 = container("c1", "sleep 1000");
            kit.create(&c1, SHORT).unwrap_err();
            kit.create(&c1, SHORT).unwrap_err();
            let watcher = kit.create_aside(&c1, BOUND);
            std::thread::sleep(Duration::from_millis(300));
            let ask = ["--namespace", rig::NAMESPACE, "inspect", "p1"];
            let shown: serde_json::Value =
                serde_json::from_str(&podvisor(&ask).ok().stdout).unwrap();
            let creations = &shown[0]["status"]["live"]["info"]["info"]["podvisor"]["creations"];
            assert_eq!(creations["joined_at_stage"]["runtime-create"], 2, "{shown}");
            let open_ = &creations["open"][0];
            assert_eq!(open_["stage"], "runtime-create", "{creations}");
            assert_eq!(open_["watchers"], 1, "{creations}");
            let opened = Instant::now();
            open(&gate);
            let told = watcher.join().unwrap().unwrap_err();
            assert_eq!(told.kind(), Kind::Busy, "{told}");
            assert!(opened.elapsed() < BOUND / 2, "holding is switched off");
            kit.create(&c1, BOUND).unwrap();
            crate::kit::delete(&kit.pod.probe(), "c1").unwrap();
        },
    );
}
