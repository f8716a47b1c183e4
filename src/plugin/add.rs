//! ADD: wait for the pod's network, take it, and answer.

use std::cell::LazyCell;
use std::time::{Duration, Instant, SystemTime};

use nix::unistd::Pid;
use serde_json::Value;

use super::door::{PAUSE, Wait, Word};
use super::job::{self, MAX_DEATHS, Task};
use super::request::Request;
use super::{note, passing, print, seen};
use crate::clock;
use crate::config::Config;
use crate::error::{Error, Kind, Result};
use crate::failpoint;
use crate::network::{
    self, Claim, DAEMONS, Holder, NetworkRecord, Taken, Taking, Through, converted, netns, stage_at,
};
use crate::pod::gc;
use crate::process::Identity;
use crate::sys;

/// When the daemon's log is first told that one waits; doubled from line to line.
const FIRST_LINE: Duration = Duration::from_secs(1);

/// Jobs that one attempt may begin.
const MAX_JOBS: u32 = 8;

/// One attempt, as its job knows it, too.
#[derive(Debug)]
pub(super) struct Attempt<'a> {
    pub(super) request: &'a Request,
    /// What is at the path that the daemon gave, as long as nothing is bound over it.
    given: Option<(u64, u64)>,
    /// The plugin's process.
    plugin: Pid,
    /// Who has started that.
    caller: Pid,
}

/// Runs the verb and prints the result.
pub(super) fn run(config: &Config, request: &Request) -> Result<()> {
    if let Some(why) = passing::why(config, request) {
        if request.key().is_some() && config.parking.enabled {
            note(&format!("passed through, not kept: {why}"));
        }
        let result = passing::through(config, request, Through::Add)?;
        return print(&converted(result, &request.version)?);
    }
    let attempt = Attempt {
        request,
        // No pin of ours, that was looked at: a netns that is there at the end and is this one is none still.
        given: passing::identity(&request.netns),
        plugin: nix::unistd::getpid(),
        caller: nix::unistd::getppid(),
    };
    seen::note(config, request, "")?;
    failpoint::hit("cni-plugin.add.before")?;
    let (taken, made) = get(config, &attempt).map_err(|e| {
        e.within(format!(
            "add network {} to {}",
            request.attached(),
            request.pod_name()
        ))
    })?;
    answer(config, request, &taken, made)
}

/// Waits until the network is this attempt's. With the answer, where there was time to make it.
fn get(config: &Config, attempt: &Attempt<'_>) -> Result<(Taken, Option<Value>)> {
    let request = attempt.request;
    let key = request
        .key()
        .ok_or_else(|| Error::new(Kind::Invalid, "the daemon tells no pod"))?;
    let wanted = LazyCell::new(|| attempt.wanted());
    let mut patience = Patience::new(config, request);
    let (mut deaths, mut begun) = (0, 0);
    loop {
        if nix::unistd::getppid() != attempt.caller {
            // Whoever has it now could tell nobody.
            return Err(Error::new(Kind::Gone, "who asked for it has died"));
        }
        let taking = network::take(
            config,
            &key,
            || &wanted,
            is_abandoned,
            |record| seen::give(config, request, record.place()),
            |before| attempt.bind(before),
        )?;
        let waiting = match taking {
            Taking::Taken(taken) => return Ok((*taken, None)),
            Taking::Working(record) => {
                let place = record.place().to_owned();
                Wait::at(config, &place).map(|wait| (wait, place))
            }
            Taking::Changing => None,
            Taking::Nothing => {
                begun += 1;
                if begun > MAX_JOBS {
                    return Err(Error::new(
                        Kind::Busy,
                        format!(
                            "{MAX_JOBS} networks were made and none of them was there to be taken: attempts of this pod ask for different ones; try again"
                        ),
                    ));
                }
                let wait = job::start(config, &request.pod_name(), &Task::Make(attempt))?;
                Some((wait, String::new()))
            }
        };
        let Some((mut wait, place)) = waiting else {
            patience.check("")?;
            std::thread::sleep(PAUSE);
            continue;
        };
        let mut made = None;
        let word = loop {
            match wait.word(patience.next()) {
                Ok(Some(Word::Made { place })) => {
                    let record = NetworkRecord::in_place(config, &place, DAEMONS, &request.id);
                    let taken = Taken {
                        netns: netns::of_record(config, &record),
                        record,
                        keeper: None,
                    };
                    let answer = seen_from(&taken, request).ok();
                    made = Some((taken, answer));
                }
                Ok(Some(word)) => break word,
                Ok(None) => {
                    // Whoever started it learns of its place by looking.
                    let found = key
                        .look(config)
                        .map(|(record, _)| record.place().to_owned());
                    patience.check(found.as_deref().unwrap_or(&place))?;
                }
                Err(_) if deaths < MAX_DEATHS => {
                    deaths += 1;
                    break Word::Look;
                }
                Err(error) => return Err(error),
            }
        };
        match word {
            Word::Given => match made {
                Some(made) => return Ok(made),
                None => std::thread::sleep(PAUSE),
            },
            // A job that keeps it while somebody else is at it just now.
            Word::Look if !place.is_empty() => std::thread::sleep(PAUSE),
            Word::Look => {}
            // Of a network that another attempt did not want.
            Word::Done | Word::Made { .. } => std::thread::sleep(PAUSE),
            Word::Failed(text) => return Err(Error::new(Kind::Other, text)),
            Word::Late(text) => return Err(Error::new(Kind::Deadline, text)),
        }
    }
}

/// Prints the result; who cannot be told has not got the network.
fn answer(config: &Config, request: &Request, taken: &Taken, made: Option<Value>) -> Result<()> {
    if let Some(keeper) = taken.keeper {
        // It sees that by itself, a second later.
        let _ = keeper.signal(libc::SIGUSR1);
    }
    failpoint::hit("cni-plugin.answer.before")?;
    let made = made.map_or_else(|| seen_from(taken, request), Ok);
    let told = made.and_then(|result| print(&result));
    if let Err(error) = told {
        passing::take_back(&request.netns, &taken.netns).unwrap_or_else(|e| note(&e.to_string()));
        if network::release(config, &taken.record, config.parking_interval(), true)? {
            let task = Task::Keep(taken.record.clone());
            job::start(config, &request.pod_name(), &task)?;
        }
        return Err(error);
    }
    failpoint::hit("cni-plugin.answer.after")?;
    network::deliver(config, &taken.record).unwrap_or_else(|error| note(&error.to_string()));
    Ok(())
}

/// The result in the daemon's words and version: it knows its netns by the path that it gave.
fn seen_from(taken: &Taken, request: &Request) -> Result<Value> {
    let result = taken.record.read_result();
    let mut result = result.map(|r| r.raw).unwrap_or_default();
    let own = taken.netns.to_string_lossy();
    let interfaces = result.get_mut("interfaces").and_then(Value::as_array_mut);
    for interface in interfaces.into_iter().flatten() {
        if interface["sandbox"] == *own {
            interface["sandbox"] = request.netns.to_string_lossy().into();
        }
    }
    converted(result, &request.version)
}

/// Its daemon has died, and no process is in its netns: the sandbox that it was for did not come to be.
fn is_abandoned(holder: &Holder) -> bool {
    let caller = holder.claim.as_ref().and_then(|claim| claim.caller);
    caller.is_none_or(|caller| !caller.is_alive()) && gc::user_of(&holder.netns).is_none()
}

impl Attempt<'_> {
    /// What is written of the attempt when it has the network.
    pub(super) fn wanted(&self) -> Holder {
        Holder {
            claim: Some(Claim {
                netns: self.request.netns.clone(),
                plugin: Identity::of(self.plugin.as_raw()).ok(),
                caller: Identity::of(self.caller.as_raw()).ok(),
                at: clock::unix_nanos(SystemTime::now()),
                delivered: false,
                ending: false,
            }),
            ..self.request.holder()
        }
    }

    /// Puts the netns where the daemon looks for the attempt's.
    pub(super) fn bind(&self, before: &Holder) -> Result<()> {
        let (pin, path) = (before.netns.as_path(), self.request.netns.as_path());
        let shown = passing::identity(path);
        if shown.is_some() && shown == passing::identity(pin) {
            // By a job that died before it could say so.
            return Ok(());
        }
        if let Some(other) = &before.claim {
            passing::take_back(&other.netns, pin)?;
        }
        let what = || format!("bind {} over {}", pin.display(), path.display());
        if shown != self.given {
            return Err(Error::new(
                Kind::State,
                format!(
                    "{}: another network of this pod was put there meanwhile; wrap one of a pod's networks only",
                    what()
                ),
            ));
        }
        sys::mount::replace_bind(pin, path).map_err(|e| Error::mount(what(), e))
    }
}

/// How long one waits, and what is said meanwhile.
struct Patience<'a> {
    config: &'a Config,
    request: &'a Request,
    begun: Instant,
    line: Duration,
}

impl<'a> Patience<'a> {
    fn new(config: &'a Config, request: &'a Request) -> Self {
        Self {
            config,
            request,
            begun: Instant::now(),
            line: FIRST_LINE,
        }
    }

    /// Until there is something to say.
    fn next(&self) -> Duration {
        let next = self.line.min(self.request.answer_after);
        next.saturating_sub(self.begun.elapsed())
    }

    /// Says what is due; Deadline when one has waited long enough.
    fn check(&mut self, place: &str) -> Result<()> {
        let waited = self.begun.elapsed();
        let over = waited >= self.request.answer_after;
        if !over && waited < self.line {
            return Ok(());
        }
        let age = |nanos| clock::from_unix_nanos(nanos).elapsed().unwrap_or_default();
        let stage = stage_at(self.config, place).unwrap_or_default();
        let name = if stage.name.is_empty() {
            "begin"
        } else {
            &stage.name
        };
        let since = if stage.since == 0 {
            waited
        } else {
            age(stage.since)
        };
        let at = format!(
            "still at stage {name} after {:.1} s in job {}, waited for {:.1} s; the work goes on, ask again to take it",
            since.as_secs_f64(),
            stage.pid,
            waited.as_secs_f64()
        );
        if over {
            return Err(Error::new(Kind::Deadline, at));
        }
        note(&format!("{}: {at}", self.request.pod_name()));
        self.line = self.line.saturating_mul(2);
        Ok(())
    }
}
