//! Lives of a pod that together pass every named point.

use std::fs;
use std::process::Command;
use std::time::Duration;

use podvisor::pod::record::{FILE, State};

use crate::kit::{BOUND, Cell, die};
use crate::support::bin::{SHIM, run};
use crate::support::eventually;

/// Ways for a pod to live and to go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Life {
    /// run, exec, stop, rm.
    Whole,
    /// In the foreground, ended by a signal to the command.
    Foreground,
    /// The network's ADD fails once.
    NoNetwork,
    /// The infra process is made and does not come to run.
    NoInfra,
    /// The container's create fails once.
    NoContainer,
    /// Its caller has no patience.
    Parked,
    /// The supervisor is killed, `rm` comes.
    Killed,
    /// The supervisor is killed, its journal is cut, `rm -f` comes.
    Damaged,
    /// The supervisor is killed, the daemon's `delete` comes.
    Deleted,
    /// The supervisor lives, the daemon's `delete` comes.
    Dismissed,
    /// DEL fails until `rm -f` is over.
    Owed,
}

impl Life {
    /// The one that passes this point.
    pub fn of(point: &str) -> Self {
        match point {
            "delete.leaving" => Self::Dismissed,
            "roll-back.before" => Self::NoNetwork,
            "container.abandon.before" => Self::NoContainer,
            "container.kill.before" => Self::Foreground,
            "park.after" => Self::Parked,
            _ if point.starts_with("pins.remove.") => Self::NoInfra,
            _ if point.starts_with("delete.") => Self::Deleted,
            _ if point.starts_with("rescue.") => Self::Killed,
            _ if point.starts_with("salvage.") => Self::Damaged,
            _ if point.starts_with("keeper.") || point.starts_with("gc.") => Self::Owed,
            _ => Self::Whole,
        }
    }

    /// Lives it with `rule` in force; commands may fail, none may hang.
    pub fn live(self, cell: &Cell<'_>, rule: &str) {
        let more = match self {
            Self::NoNetwork => "cni-add.plugin.before=1*fail(no network)\n",
            Self::NoInfra => "infra.run.before=1*fail(no infra process)\n",
            Self::NoContainer => "runtime-create.after=1*fail(no container)\n",
            Self::Parked => "cni-add.plugin.before=1*delay(1500)\n",
            Self::Owed => "cni-del.plugin.before=fail(no DEL)\n",
            _ => "",
        };
        let rules = format!("{more}{rule}\n");
        match self {
            Self::Whole => whole(cell, &rules),
            Self::Foreground => foreground(cell, &rules),
            Self::NoNetwork | Self::NoInfra | Self::NoContainer => {
                cell.rules(&rules);
                let failed = cell.podvisor(&cell.run_line(&["-d"]));
                assert_ne!(failed.code, Some(0));
            }
            Self::Parked => {
                cell.rules(&rules);
                let late = cell.podvisor(&cell.run_line(&["-d", "--timeout", "1s"]));
                assert_ne!(late.code, Some(0), "{late:?}");
                let parked = || (cell.hits("park.after") > 0).then_some(());
                eventually(BOUND, "it is parked", parked);
            }
            Self::Killed | Self::Damaged => {
                let dir = killed(cell);
                if self == Self::Damaged {
                    fs::write(dir.join(FILE), "{").unwrap();
                }
                cell.rules(&rules);
                cell.podvisor(&["rm", "-f", "web"]);
            }
            Self::Deleted => {
                killed(cell);
                cell.rules(&rules);
                delete(cell);
            }
            Self::Dismissed => {
                cell.up();
                cell.rules(&rules);
                delete(cell);
            }
            Self::Owed => {
                cell.up();
                cell.rules(&rules);
                cell.podvisor(&["rm", "-f", "web"]);
                // From here on DEL would work.
                let kept = || (cell.hits("keeper.begin") > 0).then_some(());
                eventually(BOUND, "a keeper stays", kept);
                cell.rules(rule);
                if !rule.starts_with("keeper.") {
                    cell.podvisor(&["rm", "web"]);
                }
            }
        }
    }
}

fn whole(cell: &Cell<'_>, rules: &str) {
    cell.rules(rules);
    cell.podvisor(&cell.run_line(&["-d"]));
    cell.podvisor(&["exec", "web", "--", "/bin/true"]);
    cell.podvisor(&["stop", "-t", "1", "web"]);
    cell.podvisor(&["rm", "web"]);
}

fn foreground(cell: &Cell<'_>, rules: &str) {
    cell.rules(rules);
    let mut command = cell.aside(&cell.run_line(&[]));
    let runs = || {
        let record = cell.record()?;
        let started = record.containers.values().any(|c| c.started_at.is_some());
        (record.state == State::Ready && started).then_some(())
    };
    eventually(BOUND, "it runs", runs);
    let pid = nix::unistd::Pid::from_raw(command.pid());
    let told = || {
        // Until it listens: the first may come before it does.
        nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM).unwrap();
        std::thread::sleep(Duration::from_millis(100));
        (cell.hits("container.kill.before") > 0).then_some(())
    };
    eventually(BOUND, "the signal is passed on", told);
    cell.rules("");
    let _ = nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM);
    die(command.pid());
    command.end();
}

/// A pod without a supervisor; its directory.
fn killed(cell: &Cell<'_>) -> std::path::PathBuf {
    let record = cell.up();
    let supervisor = record.supervisor.unwrap();
    die(supervisor.pid);
    let dead = || (!supervisor.is_alive()).then_some(());
    eventually(BOUND, "the supervisor dies", dead);
    cell.pod_dirs().remove(0)
}

/// As a daemon calls it after the supervisor's connection has closed.
pub fn delete(cell: &Cell<'_>) -> Option<i32> {
    let id = cell.pod_dirs()[0].file_name().unwrap().to_owned();
    let mut command = Command::new(SHIM);
    command
        .args(["-namespace", &cell.namespace, "-id"])
        .arg(&id);
    command.args(["-bundle", "/nonexistent", "delete"]);
    cell.armed(&mut command);
    run(&mut command, BOUND).code
}
