//! Every named point: the process that reaches it dies there, or what it does there fails.

use podvisor::failpoint::POINTS;

use crate::kit::{BOUND, Machine};
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

fn every_point(name: &str, act: &str) {
    Machine::run(name, |machine| {
        let wanted = |point: &&&str| act == "die" || !is_childs(point);
        let jobs = POINTS.iter().filter(wanted);
        let jobs = jobs.map(|point| ((*point).to_owned(), *point)).collect();
        let passed = machine.all(jobs, |cell, point| {
            Life::of(point).live(cell, &format!("{point}=1*{act}"));
            // What goes on after an answer comes a moment later.
            let reached = || (cell.hits(point) > 0).then_some(());
            eventually(BOUND, &format!("{point} is reached"), reached);
            cell.remove();
        });
        println!("{}: {} points, each left nothing", act, passed.len());
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
