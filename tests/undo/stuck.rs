//! Undos that are stuck: what goes on beside them, what waits, who is told what, and what gets them going.

use std::time::{Duration, Instant};

use podvisor::error::Kind;
use podvisor::pod::record::{Effect, State};

use crate::kit::{Kit, POD, on_its_own, request};
use crate::mounts;
use crate::place;
use crate::rig::{self, BOUND, Pod, called};
use crate::support::fake::Act;
use crate::support::{Snapshot, cgroup_mounts, eventually, podvisor, sandboxed, sh};

/// What holds one kind of undo, or lets go of it.
fn hold(kit: &Kit, kind: &str, held: bool) {
    match kind {
        "files" => {
            let hostname = kit.state("default").join("files/hostname");
            match held {
                true => {
                    std::fs::remove_file(&hostname).unwrap();
                    std::fs::create_dir(&hostname).unwrap();
                }
                false => std::fs::remove_dir(&hostname).unwrap(),
            }
        }
        "cgroup" => mounts::writable(&cgroup_mounts().pop().unwrap(), !held),
        "netns" => mounts::writable(&kit.config.runtime_root.join("netns"), !held),
        _ => {
            let fails = [Act::Stderr("agent is away".into()), Act::Exit(1)];
            kit.plugin.on("DEL", if held { &fails } else { &[] });
        }
    }
}

/// Items 24 and 25: each kind of undo is stuck in turn. All that does not depend on it is done; who asks is told which step
/// it is; once it can work it does, by itself, without another request.
#[test]
fn crio_24_a_stuck_undo_of_each_kind_stops_no_other_and_finishes_by_itself() {
    on_its_own(
        "stuck::crio_24_a_stuck_undo_of_each_kind_stops_no_other_and_finishes_by_itself",
        async |kit: &Kit| {
            let pins = kit.config.runtime_root.join("netns");
            mounts::tmpfs(&pins, "size=1m");
            for kind in ["files", "cgroup", "netns", "cni-del"] {
                let pod = kit.pod("default");
                pod.create(request("fake")).await.unwrap();
                pod.start(POD, None).await.unwrap();
                let infra = pod.record().infra.unwrap();
                hold(kit, kind, true);
                let told = pod.stop(POD, None).await.unwrap_err();
                println!("{}: {told}", kind);
                assert!(told.to_string().contains(&format!("{}: ", kind)), "{told}");
                assert!(!infra.is_alive(), "{}", kind);
                let record = pod.record();
                let done = |e: Effect| e == Effect::None;
                let e = record.effects;
                assert_eq!(done(e.files), kind != "files", "{}", kind);
                assert_eq!(done(e.cgroup), kind != "cgroup", "{}", kind);
                assert_eq!(done(e.cni), kind != "cni-del", "{}", kind);
                // The only dependent of them.
                let netns = !["netns", "cni-del"].contains(&kind);
                assert_eq!(done(e.netns), netns, "{}", kind);
                assert!(kit.state("default").exists(), "the key is held");
                hold(kit, kind, false);
                kit.until(|| {
                    let e = pod.record().effects;
                    [e.files, e.cgroup, e.netns, e.cni, e.infra, e.pins] == [Effect::None; 6]
                })
                .await;
                pod.stop(POD, None).await.unwrap();
                pod.shutdown(POD).await.unwrap();
            }
            mounts::uncover(&pins);
        },
    );
}

/// Items 25 and 29, and what the removal of a pod can do: a roll-back that fails goes on, whoever asks for the pod
/// meanwhile is told the step, its age and its tries, and the request that is left makes the pod once it is over.
#[test]
fn crio_25_29_a_roll_back_is_told_with_its_step_and_goes_on_until_it_is_done() {
    sandboxed(
        "stuck::crio_25_29_a_roll_back_is_told_with_its_step_and_goes_on_until_it_is_done",
        || {
            let plugin = rig::fake_network();
            plugin
                .on("ADD", &[Act::Exit(1), Act::OnlyFirst(1)])
                .on("DEL", &[Act::Stderr("agent is away".into()), Act::Exit(1)]);
            let before = Snapshot::take();
            let pod = Pod::create("p1");
            let error = pod.probe().start("p1", BOUND).unwrap_err();
            assert_ne!(error.kind(), Kind::Busy, "the cause, at once: {error}");
            called(&plugin, "DEL", 4);
            let told = pod.probe().start("p1", BOUND).unwrap_err();
            assert_eq!(told.kind(), Kind::Busy, "{told}");
            for part in [
                "is being rolled back (step cni-del, since ",
                " tries, the last: ",
                "agent is away",
            ] {
                assert!(told.to_string().contains(part), "{told}");
            }
            assert_eq!(plugin.count("ADD"), 1, "no second one on top");
            assert_eq!(pod.record().unwrap().state, State::NotReady);
            plugin.on("DEL", &[]);
            eventually(BOUND, "the roll-back has ended", || {
                pod.probe().start("p1", BOUND).ok()
            });
            assert_eq!(plugin.count("ADD"), 2);
            pod.end();
            before.assert_unchanged();
        },
    );
}

/// Item 25: a removal ends the pause of a roll-back, whatever is left of it.
#[test]
fn crio_25_rm_hurries_a_roll_back() {
    sandboxed("stuck::crio_25_rm_hurries_a_roll_back", || {
        let plugin = rig::fake_network();
        plugin.on("ADD", &[Act::Exit(1)]).on("DEL", &[Act::Exit(1)]);
        let before = Snapshot::take();
        let pod = Pod::create("p1");
        pod.probe().start("p1", BOUND).unwrap_err();
        // After the sixth try it pauses for sixteen seconds.
        called(&plugin, "DEL", 6);
        eventually(BOUND, "the sixth try has ended", || {
            plugin.calls_of("DEL").get(5)?.end.clone()
        });
        plugin.on("DEL", &[]);
        let begun = Instant::now();
        podvisor(&["--namespace", rig::NAMESPACE, "rm", "p1"]).ok();
        println!("removed within {:?}", begun.elapsed());
        assert_eq!(plugin.count("DEL"), 7, "the try that the removal made");
        before.assert_unchanged();
    });
}

/// The same of a removal that was answered while its undo was stuck: the supervisor stays, tells why, and finishes when
/// somebody asks again.
#[test]
fn crio_25_rm_hurries_a_removal_that_is_stuck() {
    sandboxed("stuck::crio_25_rm_hurries_a_removal_that_is_stuck", || {
        let plugin = rig::fake_network();
        let before = Snapshot::take();
        let pod = Pod::up("p1");
        let hostname = pod.dir().join("files/hostname").display().to_string();
        // No file any more: it cannot be removed as one.
        sh(&format!("rm {hostname} && mkdir {hostname}"));
        // Answered after four seconds, and finished detached.
        pod.probe().shutdown("p1").unwrap();
        let record = pod.record().expect("it is on record");
        let reason = record.reason.unwrap_or_default();
        assert!(reason.contains("being removed, files fails"), "{reason}");
        assert!(rig::alive(pod.supervisor()), "it goes on");
        assert_eq!(plugin.count("DEL"), 1, "nothing else waited");
        assert_eq!(rig::netns_mounts(), 0);
        let supervisor = pod.supervisor();
        sh(&format!("rmdir {hostname}"));
        podvisor(&["--namespace", rig::NAMESPACE, "rm", "-f", "p1"]).ok();
        rig::gone(supervisor);
        before.assert_unchanged();
    });
}

/// Item 21 for a node: the plugin of one pod hangs at DEL, and the others' are sent all the same, by `podvisor gc` and by
/// the next supervisor.
#[test]
fn crio_21_one_stuck_pod_delays_no_other() {
    sandboxed("stuck::crio_21_one_stuck_pod_delays_no_other", || {
        rig::settings("[cni]\nkeeper_time = 0.1\n");
        let [plugin] = place::fakes(["fake"]);
        for by_gc in [true, false] {
            let before = Snapshot::take();
            let pods = ["a", "b", "c"].map(Pod::up);
            plugin.on("DEL", &[Act::Exit(1)]);
            let supervisors = pods.each_ref().map(Pod::supervisor);
            for pod in &pods {
                pod.probe().shutdown(&pod.id).unwrap();
            }
            supervisors.into_iter().for_each(rig::gone);
            assert_eq!(place::records().len(), 3);
            // The first of them in the order of the directory hangs.
            let gate = format!("/run/gate-{by_gc}");
            let script = format!(
                "#!/bin/bash\ncat >/dev/null\n[ $CNI_COMMAND = DEL ] || exit 0\n\
                 if mkdir /run/first-{by_gc} 2>/dev/null; then until [ -e {gate} ]; do sleep 0.05; done; fi\n"
            );
            let path = &plugin.path;
            let kept = std::fs::read(path).unwrap();
            std::fs::write("/run/hanging", script).unwrap();
            sh(&format!(
                "chmod 755 /run/hanging; mv /run/hanging {}",
                path.display()
            ));
            let gc = by_gc.then(|| {
                std::process::Command::new(crate::support::bin::PODVISOR)
                    .arg("gc")
                    .spawn()
                    .unwrap()
            });
            let next = (!by_gc).then(|| {
                rig::settings("[cni]\nkeeper_time = 0.1\n");
                Pod::launch("next")
            });
            eventually(Duration::from_secs(50), "the two others are done", || {
                (place::records().len() == 1).then_some(())
            });
            std::fs::write(&gate, "").unwrap();
            eventually(Duration::from_secs(50), "the first one, too", || {
                place::records().is_empty().then_some(())
            });
            if let Some(mut gc) = gc {
                assert!(gc.wait().unwrap().success());
            }
            if let Some(pod) = next {
                pod.probe().shutdown("next").unwrap();
            }
            std::fs::write("/run/hanging", kept).unwrap();
            sh(&format!(
                "chmod 755 /run/hanging; mv /run/hanging {}",
                path.display()
            ));
            plugin.on("DEL", &[]);
            std::fs::remove_dir_all("/run/bundles").unwrap();
            before.assert_unchanged();
        }
    });
}
