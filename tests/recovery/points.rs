//! Every named point: the process that reaches it dies there, or what it does there fails.

use podvisor::failpoint::POINTS;

use crate::kit::{BOUND, Cell, Machine};
use crate::lives::Life;
use crate::support::eventually;

/// Points at which it is a child that dies; nothing can fail there.
fn is_childs(point: &str) -> bool {
    matches!(
        point,
        "helper.guard"
            | "helper.process"
            | "infra.process"
            | "infra.cloned.process"
            | "container.created.process"
    )
}

/// Points of the CNI plugin's own processes, which a pod of ours never meets: tests/cni_plugin goes through them.
fn is_plugins(point: &str) -> bool {
    let own = ["cni-plugin.", "cni-job.", "cni-claim."];
    own.iter().any(|prefix| point.starts_with(prefix))
}

fn every_point(name: &str, act: &str) {
    Machine::run(name, |machine| {
        let wanted = |point: &&&str| !is_plugins(point) && (act == "die" || !is_childs(point));
        let jobs = POINTS.iter().filter(wanted);
        let jobs = jobs.map(|point| ((*point).to_owned(), *point));
        // What is kept for the boot is written by the first pod, which is this one then.
        let (first, others) = jobs.partition(|(_, point)| point.starts_with("kept."));
        let live = |cell: &Cell<'_>, point: &'static str| {
            Life::of(point).live(cell, &format!("{point}=1*{act}"));
            // What goes on after an answer comes a moment later.
            let reached = || (cell.hits(point) > 0).then_some(());
            eventually(BOUND, &format!("{point} is reached"), reached);
            cell.remove();
        };
        let passed = machine.all(first, live).len() + machine.all(others, live).len();
        println!("{act}: {passed} points, each left nothing");
    });
}

#[test]
fn a_death_at_every_point_leaves_what_can_be_removed() {
    every_point(
        "points::a_death_at_every_point_leaves_what_can_be_removed",
        "die",
    );
}

#[test]
fn a_failure_at_every_point_leaves_what_can_be_removed() {
    every_point(
        "points::a_failure_at_every_point_leaves_what_can_be_removed",
        "fail(injected)",
    );
}

/// Every write of the journal and of the network's record in a whole life: half of it is done.
fn every_write(name: &str, points: &[&'static str], acts: &[&'static str]) {
    Machine::run(name, |machine| {
        let mut jobs = Vec::new();
        let counted = machine.all(vec![("whole".to_owned(), ())], |cell, ()| {
            Life::Whole.live(cell, "");
            cell.remove();
            points.iter().map(|point| cell.hits(point)).collect()
        });
        let counted: Vec<usize> = counted.into_values().next().unwrap();
        for (point, writes) in points.iter().zip(counted) {
            assert!(writes > 3, "{point}: {writes}");
            for act in acts {
                for n in 0..writes {
                    let rule = format!("{point}={n}*off->1*{act}");
                    jobs.push((rule.clone(), rule));
                }
            }
        }
        let passed = machine.all(jobs, |cell, rule| {
            Life::Whole.live(cell, &rule);
            cell.remove();
        });
        println!("{} writes x {acts:?}: each left nothing", passed.len());
    });
}

#[test]
fn a_death_in_every_write_leaves_what_can_be_removed() {
    every_write(
        "points::a_death_in_every_write_leaves_what_can_be_removed",
        &["journal.write.half", "record.write.half"],
        &["die"],
    );
}

#[test]
#[ignore = "slow: about five minutes"]
fn slow_a_death_and_a_failure_around_every_write() {
    let points = [
        "journal.write.before",
        "journal.write.half",
        "journal.write.after",
        "record.write.before",
        "record.write.half",
        "record.write.after",
    ];
    every_write(
        "points::slow_a_death_and_a_failure_around_every_write",
        &points,
        &["die", "fail(no space)"],
    );
}
