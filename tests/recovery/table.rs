//! Who dies when, what is seen then, and how the pod is removed: the table of docs/recovery.md.
//!
//! A cell holds the pod at a moment (a point hangs), kills one process there, lets the rest go on, and writes down what the
//! command said, how the pod is listed, and by what it was removed. `PODVISOR_WRITE_DOCS=1` writes the table anew.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::daemon;
use crate::kit::{BOUND, Cell, Machine, die};
use crate::lives::delete;
use crate::support::{eventually, slow};

/// Who dies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Victim {
    Supervisor,
    Infra,
    Workload,
    Runtime,
    Plugin,
    Command,
}

const VICTIMS: [(Victim, &str); 6] = [
    (Victim::Supervisor, "supervisor"),
    (Victim::Infra, "infra process"),
    (Victim::Workload, "workload's init"),
    (Victim::Runtime, "OCI runtime"),
    (Victim::Plugin, "CNI plugin"),
    (Victim::Command, "command, `delete`"),
];

/// What is going on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Run,
    Nothing,
    Exec,
    Stop,
    Remove,
    Delete,
}

/// A moment: its name, the step, where that is held, and the first victim's rule where it is no process that could be
/// looked up.
struct Moment {
    name: &'static str,
    step: Step,
    point: &'static str,
    victims: &'static [Victim],
}

use Victim::{Command, Infra, Plugin, Runtime, Supervisor, Workload};

const MOMENTS: [Moment; 13] = [
    Moment {
        name: "`start`",
        step: Step::Run,
        point: "start.address.before",
        victims: &[Supervisor, Command],
    },
    Moment {
        name: "CreateSandbox",
        step: Step::Run,
        point: "files.make.after",
        victims: &[Supervisor, Command],
    },
    Moment {
        name: "StartSandbox, netns made",
        step: Step::Run,
        point: "netns.make.after",
        victims: &[Supervisor, Command],
    },
    Moment {
        name: "StartSandbox, CNI ADD",
        step: Step::Run,
        point: "cni-add.plugin.before",
        victims: &[Supervisor, Plugin, Command],
    },
    Moment {
        name: "StartSandbox, infra process",
        step: Step::Run,
        point: "infra.run.before",
        victims: &[Supervisor, Infra, Command],
    },
    Moment {
        name: "container's create",
        step: Step::Run,
        point: "runtime-create.after",
        victims: &[Supervisor, Infra, Workload, Runtime, Command],
    },
    Moment {
        name: "container's start",
        step: Step::Run,
        point: "runtime-start.before",
        victims: &[Supervisor, Infra, Workload, Runtime, Command],
    },
    Moment {
        name: "running",
        step: Step::Nothing,
        point: "",
        victims: &[Supervisor, Infra, Workload],
    },
    Moment {
        name: "exec",
        step: Step::Exec,
        point: "exec.before",
        victims: &[Supervisor, Infra, Workload, Runtime, Command],
    },
    Moment {
        name: "stop, containers",
        step: Step::Stop,
        point: "stop.containers.before",
        victims: &[Supervisor, Infra, Workload, Command],
    },
    Moment {
        name: "stop, CNI DEL",
        step: Step::Stop,
        point: "cni-del.plugin.before",
        victims: &[Supervisor, Plugin, Command],
    },
    Moment {
        name: "remove",
        step: Step::Remove,
        point: "shutdown.containers.before",
        victims: &[Supervisor, Infra, Runtime, Plugin, Command],
    },
    Moment {
        name: "`delete`",
        step: Step::Delete,
        point: "delete.rescue.before",
        victims: &[Infra, Workload, Runtime, Plugin, Command],
    },
];

fn live(cell: &Cell<'_>, moment: &Moment, victim: Victim) -> String {
    let ready = !matches!(moment.step, Step::Run);
    let pids = ready.then(|| cell.up());
    if moment.step == Step::Delete {
        let supervisor = pids.as_ref().unwrap().supervisor.unwrap();
        die(supervisor.pid);
        eventually(BOUND, "the supervisor dies", || {
            (!supervisor.is_alive()).then_some(())
        });
    }
    // Programs that live for milliseconds die as they begin.
    let own_rule = match victim {
        Victim::Runtime if moment.name == "container's start" => "helper.process=1*off->1*die\n",
        Victim::Runtime => "helper.process=1*die\n",
        Victim::Plugin => "helper.guard=1*die\n",
        _ => "",
    };
    let held = own_rule.is_empty() && !moment.point.is_empty();
    match held {
        true => cell.rules(&format!("{}=1*hang\n", moment.point)),
        false => cell.rules(own_rule),
    }
    let seen = match moment.step {
        Step::Nothing => {
            kill(cell, victim, 0);
            "-"
        }
        Step::Delete => delete_aside(cell, moment, victim, held),
        _ => {
            let run = cell.run_line(&["-d"]);
            let line = match moment.step {
                Step::Run => run,
                Step::Exec => vec!["exec", "web", "--", "/bin/true"],
                Step::Stop => vec!["stop", "-t", "1", "web"],
                _ => vec!["rm", "-f", "web"],
            };
            let mut command = cell.aside(&line);
            if held {
                wait_for(cell, moment.point);
                kill(cell, victim, command.pid());
                if victim == Victim::Command && moment.name == "StartSandbox, infra process" {
                    // The last thing to do: a supervisor that has not seen its caller go would think the pod given.
                    caller_has_left(cell);
                }
                cell.rules("");
            }
            match (victim, command.end()) {
                (Victim::Command, _) => "killed",
                (_, true) => "succeeds",
                (_, false) => "fails",
            }
        }
    };
    // What a command has created goes without it; what a daemon has created waits for the daemon.
    let state = settled(cell, &["starting", "parked", "created"]);
    let way = remove(cell, &state, moment.step);
    let said = if seen == "-" {
        String::new()
    } else {
        format!("{seen}, ")
    };
    format!("{said}{state}{way}")
}

/// `delete` is both the step and the one that is killed: its child, which does the work.
fn delete_aside(cell: &Cell<'_>, moment: &Moment, victim: Victim, held: bool) -> &'static str {
    std::thread::scope(|scope| {
        let deleting = scope.spawn(|| delete(cell));
        if held {
            wait_for(cell, moment.point);
            match victim {
                Victim::Command => cell.own_processes().into_iter().for_each(die),
                other => kill(cell, other, 0),
            }
            cell.rules("");
        }
        match (victim, deleting.join().unwrap()) {
            (Victim::Command, _) => "killed",
            (_, Some(0)) => "succeeds",
            _ => "fails",
        }
    })
}

fn caller_has_left(cell: &Cell<'_>) {
    eventually(BOUND, "the caller's end is seen", || {
        let shown = cell.podvisor(&["inspect", "web"]).stdout;
        let pods: serde_json::Value = serde_json::from_str(&shown).ok()?;
        let waiters = &pods[0]["status"]["live"]["info"]["info"]["podvisor"]["waiters"];
        (waiters.as_u64() == Some(0)).then_some(())
    });
}

fn wait_for(cell: &Cell<'_>, point: &str) {
    eventually(BOUND, point, || (cell.hits(point) > 0).then_some(()));
}

fn kill(cell: &Cell<'_>, victim: Victim, command: i32) {
    let record = || cell.record().expect("a journal");
    let infra = || record().infra.expect("an infra process on record").pid;
    let init = || {
        let containers = record().containers;
        containers.values().find_map(|c| c.init).map(|i| i.pid)
    };
    match victim {
        // By its name where it has no record yet; its helper is not meant.
        Victim::Supervisor => match cell.record().and_then(|r| r.supervisor) {
            Some(supervisor) => die(supervisor.pid),
            None => cell.own_processes().into_iter().max().map_or((), die),
        },
        Victim::Infra => die(infra()),
        Victim::Workload => die(init().unwrap_or_else(|| init_by_pid_file(cell))),
        Victim::Command => die(command),
        Victim::Runtime | Victim::Plugin => unreachable!("they die by a rule"),
    }
}

/// Made, and not on record yet.
fn init_by_pid_file(cell: &Cell<'_>) -> i32 {
    let bundles = cell.pod_dirs()[0].join("bundles");
    let files = fs::read_dir(bundles).unwrap().flatten();
    let texts = files.filter_map(|e| fs::read_to_string(e.path().join("init.pid")).ok());
    let mut pids = texts.filter_map(|text| text.trim().parse().ok());
    pids.next().expect("a pid file")
}

/// How the pod is listed when nothing moves any more; `going`: states that end by themselves here.
pub fn settled(cell: &Cell<'_>, going: &[&str]) -> String {
    let end = Instant::now() + BOUND;
    let mut last = (cell.state(), Instant::now());
    loop {
        std::thread::sleep(Duration::from_millis(150));
        let now = cell.state();
        if now != last.0 {
            last = (now, Instant::now());
        }
        // A stop goes on without the command that asked for it, and the pod is listed as it was until that is done.
        let at_work = cell.record().is_some_and(|record| {
            let stage = record.stages.last();
            record.is_supervised() && stage.is_some_and(|stage| stage.took_us.is_none())
        });
        let moving = at_work || going.contains(&last.0.as_str());
        if !moving && last.1.elapsed() > Duration::from_millis(600) {
            let journal = |dir: &std::path::PathBuf| dir.join("journal.json").exists();
            return match last.0.as_str() {
                // What the command keeps beside the journal is all that is left.
                "unrecovered" if !cell.pod_dirs().iter().any(journal) => "files left".into(),
                state => state.into(),
            };
        }
        assert!(Instant::now() < end, "still {}", last.0);
    }
}

fn remove(cell: &Cell<'_>, state: &str, step: Step) -> &'static str {
    let way = match (state, step) {
        ("gone", _) => "",
        ("dead", Step::Delete) => {
            cell.rules("");
            assert_eq!(delete(cell), Some(0));
            eventually(Duration::from_secs(30), "delete has done its work", || {
                cell.pod_dirs()
                    .iter()
                    .all(|dir| !dir.join("journal.json").exists())
                    .then_some(())
            });
            "; `delete`"
        }
        // Nothing has to be forced on a pod whose supervisor is dead.
        ("dead", _) => {
            cell.podvisor(&["rm", "web"]).ok();
            "; `rm`"
        }
        _ => "; `rm -f`",
    };
    cell.remove();
    way
}

fn repeated(name: &str, times: usize) -> BTreeMap<String, BTreeSet<String>> {
    let mut found: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    let mut count = 0;
    Machine::run(name, |machine| {
        // What is asked once for each boot (versions of plugins, the runtime) is asked here.
        machine.all(vec![("first".to_owned(), ())], |cell, ()| {
            cell.up();
            cell.remove();
        });
        for n in 0..times {
            let all = MOMENTS.iter().flat_map(|moment| {
                let victims = VICTIMS.iter().filter(|(v, _)| moment.victims.contains(v));
                victims.map(move |(victim, title)| (key(moment, title), (moment, *victim)))
            });
            let done = machine.all(all.collect(), |cell, (moment, victim)| {
                live(cell, moment, victim)
            });
            count += done.len();
            for (key, outcome) in done {
                if n > 0 && !found.get(&key).is_some_and(|f| f.contains(&outcome)) {
                    println!("also seen: {key}: {outcome}");
                }
                found.entry(key).or_default().insert(outcome);
            }
            let under = machine.all(vec![("containerd".to_owned(), ())], |cell, ()| {
                daemon::outcomes(cell)
            });
            for (moment, outcome) in under.into_values().flatten() {
                count += 1;
                let key = format!("{moment} × {DAEMON}");
                found.entry(key).or_default().insert(outcome);
            }
        }
        println!("{count} cells of the matrix ({times} times each), each removed, nothing left");
    });
    found
}

fn key(moment: &Moment, title: &str) -> String {
    format!("{} × {title}", moment.name)
}

/// The column of the daemon, whose cells are played one after the other.
const DAEMON: &str = "containerd";

const BEGIN: &str =
    "<!-- made by tests/recovery_matrix.rs; PODVISOR_WRITE_DOCS=1 writes it anew -->\n";
const END: &str = "<!-- end of what is made -->\n";

#[test]
fn the_matrix_is_as_documented() {
    let name = "table::the_matrix_is_as_documented";
    let found = repeated(name, 1);
    if !crate::support::sandbox::inside() || std::env::var_os("PODVISOR_ONLY").is_some() {
        return;
    }
    let mut table = String::from("| when |");
    VICTIMS
        .iter()
        .for_each(|(_, title)| table.push_str(&format!(" {title} |")));
    table.push_str(&format!(" {DAEMON} |\n|---|---|---|---|---|---|---|---|\n"));
    for moment in &MOMENTS {
        table.push_str(&format!("| {} |", moment.name));
        let titles = VICTIMS.iter().map(|(_, title)| *title);
        for title in titles.chain([DAEMON]) {
            let cell = found.get(&key(moment, title));
            let text = cell.and_then(|all| all.first()).map_or("–", String::as_str);
            table.push_str(&format!(" {text} |"));
        }
        table.push('\n');
    }
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/recovery.md");
    let text = fs::read_to_string(&path).unwrap();
    let (head, rest) = text
        .split_once(BEGIN)
        .expect("the mark in docs/recovery.md");
    let (old, tail) = rest.split_once(END).expect("the end mark");
    if std::env::var_os("PODVISOR_WRITE_DOCS").is_some() {
        fs::write(&path, format!("{head}{BEGIN}{table}{END}{tail}")).unwrap();
        return;
    }
    assert_eq!(old, table, "docs/recovery.md is not what is seen");
}

#[test]
#[ignore = "slow: about fifteen minutes"]
fn slow_the_matrix_twenty_times() {
    assert!(slow() || crate::support::sandbox::inside());
    repeated("table::slow_the_matrix_twenty_times", 20);
}
