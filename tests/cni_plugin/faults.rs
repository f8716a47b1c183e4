//! Every process killed at every step: the pod comes up all the same, and nothing is left of it.

use std::fs;
use std::path::Path;

use crate::kit::{self, Attempt, BOUND, bridge, settings, snapshot};
use crate::support::{Sandbox, eventually, podvisor, sandboxed};

/// Of the plugin's own process and of its jobs, in the order in which a pod's life meets them.
const POINTS: &[&str] = &[
    "cni-plugin.add.before",
    "cni-job.fork.before",
    "cni-job.fork.after",
    "cni-job.begin",
    "cni-job.own.before",
    "cni-job.own.after",
    "netns.pin.before",
    "netns.pin.after",
    "record.write.half",
    "cni-add.record.before",
    "cni-add.record.after",
    "cni-add.plugin.before",
    "cni-add.plugin.after",
    "cni-add.result.before",
    "cni-add.result.after",
    "cni-job.failed",
    "cni-job.park.before",
    "cni-job.park.after",
    "cni-claim.before",
    "cni-claim.bind.before",
    "cni-claim.after",
    "cni-plugin.answer.before",
    "cni-plugin.answer.after",
    "cni-plugin.release.after",
    "cni-plugin.del.before",
    "cni-job.end.after",
    "gc.settle.before",
    "cni-del.plugin.before",
    "cni-del.plugin.after",
    "cni-del.stopped.before",
    "cni-del.stopped.after",
    "gc.record.before",
    "netns.link.after",
    "record.remove.before",
    "record.remove.half",
    "cni-job.done.before",
];

/// A pod's life as a kubelet lives it: attempts until one has the network, then its end. `point` has `act`.
fn life(list: &serde_json::Value, number: usize, point: &str, act: &str) {
    let dir = Path::new("/run/faults").join(number.to_string());
    fs::create_dir_all(&dir).unwrap();
    fs::write(dir.join("hits"), "").unwrap();
    // A claim that was not heard of comes before its release, and a failure before its end.
    let more = match point {
        "cni-plugin.release.after" => "cni-plugin.answer.before=1*die\n",
        "cni-job.failed" => "cni-add.plugin.before=1*fail(no)\n",
        _ => "",
    };
    fs::write(dir.join("rules"), format!("{more}{point}=1*{act}\n")).unwrap();
    let name = format!("web{number}");
    let mut up = None;
    for n in 0..6 {
        let mut attempt = Attempt::of(&name, &format!("p{number}a{n}"), list);
        let fault = ("PODVISOR_FAULT_DIR".to_owned(), dir.display().to_string());
        attempt.env.push(fault);
        let said = attempt.add();
        if said.code == Some(0) {
            attempt.has(&said.ip());
            up = Some(attempt);
            break;
        }
        println!("{point}: attempt {n}: {said:?}");
        until_deleted(&attempt, point);
        attempt.forget();
    }
    let up = up.unwrap_or_else(|| panic!("{point}={act}: no attempt came up"));
    until_deleted(&up, point);
    up.forget();
    let hits = fs::read_to_string(dir.join("hits")).unwrap();
    assert!(
        hits.contains(&format!(" {point}\n")),
        "{point} was not reached: {hits}"
    );
}

fn until_deleted(attempt: &Attempt, point: &str) {
    eventually(BOUND, "DEL succeeds", || {
        let said = attempt.del();
        if said.code != Some(0) {
            println!("{point}: DEL: {said:?}");
        }
        (said.code == Some(0)).then_some(())
    });
}

fn lives(act: &str) {
    let own = ["cni-plugin.", "cni-job.", "cni-claim."];
    for point in podvisor::failpoint::POINTS {
        let ours = own.iter().any(|prefix| point.starts_with(prefix));
        assert!(
            !ours || POINTS.contains(point),
            "{point} is not gone through"
        );
    }
    settings(1.0);
    let (plugin, list) = bridge();
    let before = snapshot();
    for (number, point) in POINTS.iter().enumerate() {
        life(&list, number, point, act);
    }
    // What nobody came back for ends by itself, or by the collection after a crash.
    eventually(BOUND, "every job leaves", || {
        kit::jobs().is_empty().then_some(())
    });
    let gc = podvisor(&["gc"]);
    println!("gc: {}{}", gc.stdout, gc.stderr);
    assert_eq!(gc.code, Some(0), "{gc:?}");
    let (adds, dels) = (plugin.count("ADD"), plugin.count("DEL"));
    println!("{} lives: {adds} ADD, {dels} DEL", POINTS.len());
    assert!(dels >= adds, "{adds} ADD, {dels} DEL");
    fs::remove_dir_all("/run/faults").unwrap();
    before.assert_unchanged();
}

#[test]
fn a_death_at_any_step_keeps_no_pod_down_and_leaves_nothing() {
    sandboxed(
        "faults::a_death_at_any_step_keeps_no_pod_down_and_leaves_nothing",
        || lives("die"),
    );
}

#[test]
#[ignore = "slow"]
fn slow_a_failure_at_any_step_keeps_no_pod_down_and_leaves_nothing() {
    Sandbox::new("faults::slow_a_failure_at_any_step_keeps_no_pod_down_and_leaves_nothing")
        .run(|| lives("fail(no)"));
}
