//! Points in the source: what the environment says of them happens.
//!
//! A fault is taken under a lock of the rules' file, so that `1*die` is one death among all processes of a test. Must
//! never be used between fork and exec: it allocates.

use std::env;
use std::fs::{self, File, OpenOptions};
use std::io::{Read, Seek, Write};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::thread;
use std::time::Duration;

use nix::fcntl::{Flock, FlockArg};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::term::{Act, Terms};
use crate::error::{Error, Kind, Result};

/// Rules of this process alone.
const OWN: &str = "PODVISOR_FAULT";
/// The directory of rules for all processes.
const SHARED: &str = "PODVISOR_FAULT_DIR";

/// Between two looks whether what hangs may go on.
const LOOK: Duration = Duration::from_millis(10);

/// A point in plain code: may fail, and blocks the thread while it is delayed or hangs.
pub fn hit(point: &'static str) -> Result<()> {
    match fault(point) {
        Some(Act::Delay(time)) => {
            thread::sleep(time);
            Ok(())
        }
        Some(Act::Hang) => {
            while !is_released(point) {
                thread::sleep(LOOK);
            }
            Ok(())
        }
        other => act(point, other),
    }
}

/// A point where nobody could be told of a failure.
pub fn pass(point: &'static str) {
    // Only whether it goes on.
    let _ = hit(point);
}

/// A point in asynchronous code: others go on while it is delayed or hangs.
pub async fn reach(point: &'static str) -> Result<()> {
    match fault(point) {
        Some(Act::Delay(time)) => {
            tokio::time::sleep(time).await;
            Ok(())
        }
        Some(Act::Hang) => {
            while !is_released(point) {
                tokio::time::sleep(LOOK).await;
            }
            Ok(())
        }
        other => act(point, other),
    }
}

/// A point at which it is a child of ours that dies.
pub fn child(point: &'static str, pid: i32) {
    match fault(point) {
        Some(Act::Die) => drop(kill(Pid::from_raw(pid), Signal::SIGKILL)),
        Some(Act::Delay(time)) => thread::sleep(time),
        _ => {}
    }
}

fn act(point: &str, act: Option<Act>) -> Result<()> {
    match act {
        Some(Act::Error(text)) => Err(Error::new(Kind::Other, format!("{text} (fault {point})"))),
        Some(Act::Panic(text)) => panic!("{text}"),
        Some(Act::Die) => {
            let _ = kill(Pid::this(), Signal::SIGKILL);
            loop {
                thread::park();
            }
        }
        _ => Ok(()),
    }
}

/// What hangs goes on when the shared rules name its point no more; by a rule of its own process it hangs for ever.
fn is_released(point: &str) -> bool {
    let Some(dir) = shared() else { return false };
    let text = fs::read_to_string(dir.join("rules"));
    text.is_ok_and(|text| rules(&text, '\n').iter().all(|(name, _)| name != point))
}

fn fault(point: &str) -> Option<Act> {
    of_process(point).or_else(|| of_all(point))
}

fn of_process(point: &str) -> Option<Act> {
    static RULES: OnceLock<Mutex<Vec<(String, Terms)>>> = OnceLock::new();
    let rules = RULES.get_or_init(|| Mutex::new(rules(&env::var(OWN).unwrap_or_default(), ';')));
    let mut rules = rules.lock().unwrap_or_else(PoisonError::into_inner);
    take(&mut rules, point)
}

fn shared() -> Option<&'static Path> {
    static DIR: OnceLock<Option<PathBuf>> = OnceLock::new();
    DIR.get_or_init(|| env::var_os(SHARED).map(PathBuf::from))
        .as_deref()
}

fn of_all(point: &str) -> Option<Act> {
    let dir = shared()?;
    note(dir, point);
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .open(dir.join("rules"))
        .ok()?;
    // Shared by whoever shares the pod; held for microseconds.
    let mut file = Flock::lock(file, FlockArg::LockExclusive).ok()?;
    let mut text = String::new();
    file.read_to_string(&mut text).ok()?;
    let mut all = rules(&text, '\n');
    let taken = take(&mut all, point)?;
    rewrite(&mut file, &all).ok()?;
    Some(taken)
}

fn rules(text: &str, between: char) -> Vec<(String, Terms)> {
    text.split(between)
        .filter(|rule| !rule.trim().is_empty())
        .filter_map(|rule| {
            let (point, terms) = rule.trim().split_once('=')?;
            match Terms::parse_of_point(terms) {
                Ok(terms) => Some((point.to_owned(), terms)),
                Err(error) => panic!("{OWN}, {SHARED}: {error}"),
            }
        })
        .collect()
}

fn take(rules: &mut [(String, Terms)], point: &str) -> Option<Act> {
    let (_, terms) = rules.iter_mut().find(|(name, _)| name == point)?;
    terms.take()
}

fn rewrite(file: &mut File, rules: &[(String, Terms)]) -> std::io::Result<()> {
    let text: String = rules
        .iter()
        .map(|(point, terms)| format!("{point}={terms}\n"))
        .collect();
    file.rewind()?;
    file.set_len(0)?;
    file.write_all(text.as_bytes())
}

/// A short line in one write: those of several processes do not mix.
fn note(dir: &Path, point: &str) {
    let line = format!("{} {point}\n", std::process::id());
    let file = OpenOptions::new().append(true).open(dir.join("hits"));
    let _ = file.and_then(|mut file| file.write_all(line.as_bytes()));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_are_counted_down_by_name() {
        let mut all = rules("a=1*die\n\nb=fail(x)\n", '\n');
        assert_eq!(take(&mut all, "a"), Some(Act::Die));
        assert_eq!(take(&mut all, "a"), None);
        for _ in 0..3 {
            assert_eq!(take(&mut all, "b"), Some(Act::Error("x".into())));
        }
        assert_eq!(take(&mut all, "c"), None);
    }

    #[test]
    fn without_rules_every_point_is_passed() {
        assert!(hit("nowhere").is_ok());
        pass("nowhere");
    }
}
