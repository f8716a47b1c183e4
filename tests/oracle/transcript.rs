//! What a body saw on one side, line by line, and the comparison of two sides.

use std::fmt::Display;

use podvisor::proto::events::task_events as wire;
use podvisor::proto::types::event::Envelope;
use protobuf::Message;

use crate::side::{Answer, Failure, Side};

/// Where the two sides are meant to differ: (step, what the Go shim says, what we say, the words by which
/// docs/task.md explains it).
pub type OnPurpose = (&'static str, &'static str, &'static str, &'static str);

/// Codes that are meant to differ wherever the rest is the same: (the Go shim's, ours, the words in docs/task.md).
const CODES: [(&str, &str, &str); 2] = [
    ("error 2 ", "error 9 ", "`FAILED_PRECONDITION`"),
    ("error 2 ", "error 3 ", "`INVALID_ARGUMENT`"),
];

/// The lines of one side.
#[derive(Debug, Default)]
pub struct Transcript(Vec<(String, String)>);

impl Transcript {
    /// One thing that was seen.
    pub fn say(&mut self, step: &str, seen: impl Display) {
        let seen = seen.to_string();
        println!("  {step}: {seen}");
        self.0.push((step.to_owned(), seen));
    }

    /// Success, or the code of the failure; `words` are looked for in the text of the failure.
    pub fn ends<T>(&mut self, step: &str, answer: Answer<T>, words: &[&str]) {
        match answer {
            Ok(_) => self.say(step, "ok"),
            Err(Failure { code, text }) => {
                let has: Vec<&str> = words
                    .iter()
                    .copied()
                    .filter(|word| text.to_lowercase().contains(*word))
                    .collect();
                self.say(step, format!("error {code} {has:?}"));
            }
        }
    }

    /// Status, exit code and strings of State; pid and times only by whether they are there.
    pub fn state(&mut self, step: &str, side: &Side, id: &str, exec_id: &str) {
        match side.state(id, exec_id) {
            Err(failure) => self.ends::<()>(step, Err(failure), &[]),
            Ok(state) => {
                let dir = side.path("").display().to_string();
                let below = |text: &str| text.replace(&dir, "DIR/");
                let seen = format!(
                    "{:?} code {} exited {} pid {} in {} terminal {} io {:?} {:?} {:?}",
                    state.status.enum_value_or_default(),
                    state.exit_status,
                    state.exited_at.seconds > 0,
                    state.pid > 0,
                    below(&state.bundle),
                    state.terminal,
                    below(&state.stdin),
                    below(&state.stdout),
                    below(&state.stderr),
                );
                self.say(step, seen);
            }
        }
    }
}

/// The differences that nobody means. `used` collects the entries of `on_purpose` that are differences indeed.
pub fn compare(
    go: &Transcript,
    ours: &Transcript,
    on_purpose: &'static [OnPurpose],
    used: &mut Vec<OnPurpose>,
) -> Vec<String> {
    let mut wrong = Vec::new();
    for line in 0..go.0.len().max(ours.0.len()) {
        let (Some((step, theirs)), Some((our_step, ours))) = (go.0.get(line), ours.0.get(line))
        else {
            let (theirs, ours) = (go.0.get(line), ours.0.get(line));
            wrong.push(format!("{theirs:?} against {ours:?}"));
            break;
        };
        if theirs == ours && step == our_step {
            continue;
        }
        let meant = on_purpose.iter().find(|(name, their_meant, our_meant, _)| {
            name == step && theirs == their_meant && ours == our_meant
        });
        used.extend(meant);
        if step != our_step || (meant.is_none() && !is_meant_code(theirs, ours)) {
            wrong.push(format!(
                "{step} ({our_step})\n    Go:  {theirs}\n    we:  {ours}"
            ));
        }
    }
    wrong
}

fn is_meant_code(theirs: &str, ours: &str) -> bool {
    CODES.iter().any(|(their_code, our_code, _)| {
        let (theirs, ours) = (theirs.strip_prefix(their_code), ours.strip_prefix(our_code));
        theirs.is_some() && theirs == ours
    })
}

/// Everything that is meant is explained.
pub fn explained(on_purpose: &[OnPurpose]) -> Vec<&'static str> {
    let document = include_str!("../../docs/task.md");
    let words = on_purpose.iter().map(|(.., why)| *why);
    let words = words.chain(CODES.iter().map(|(.., why)| *why));
    words.filter(|why| !document.contains(why)).collect()
}

/// An event without pids and times.
pub fn event(envelope: &Envelope) -> String {
    let (topic, value) = (&envelope.topic, &envelope.event.value);
    assert!(envelope.timestamp.seconds > 0, "{envelope:?}");
    assert_eq!(envelope.namespace, "test", "{envelope:?}");
    let kind = envelope
        .event
        .type_url
        .rsplit('/')
        .next()
        .unwrap_or_default();
    let what = match topic.as_str() {
        "/tasks/create" => {
            let e = wire::TaskCreate::parse_from_bytes(value).unwrap();
            let mounts: Vec<_> = e.rootfs.iter().map(|m| (&m.type_, &m.options)).collect();
            format!(
                "{} pid {} {mounts:?} terminal {} checkpoint {:?} bundle {} out {}",
                e.container_id,
                e.pid > 0,
                e.io.terminal,
                e.checkpoint,
                e.bundle.rsplit('/').next().unwrap_or_default(),
                e.io.stdout.rsplit('/').next().unwrap_or_default(),
            )
        }
        "/tasks/start" => {
            let e = wire::TaskStart::parse_from_bytes(value).unwrap();
            format!("{} pid {}", e.container_id, e.pid > 0)
        }
        "/tasks/exit" => {
            let e = wire::TaskExit::parse_from_bytes(value).unwrap();
            let at = e.exited_at.seconds > 0;
            format!(
                "{}/{} pid {} code {} at {at}",
                e.container_id,
                e.id,
                e.pid > 0,
                e.exit_status
            )
        }
        "/tasks/delete" => {
            let e = wire::TaskDelete::parse_from_bytes(value).unwrap();
            let at = e.exited_at.seconds > 0;
            format!(
                "{}/{} pid {} code {} at {at}",
                e.container_id,
                e.id,
                e.pid > 0,
                e.exit_status
            )
        }
        "/tasks/exec-added" => {
            let e = wire::TaskExecAdded::parse_from_bytes(value).unwrap();
            format!("{}/{}", e.container_id, e.exec_id)
        }
        "/tasks/exec-started" => {
            let e = wire::TaskExecStarted::parse_from_bytes(value).unwrap();
            format!("{}/{} pid {}", e.container_id, e.exec_id, e.pid > 0)
        }
        "/tasks/oom" => wire::TaskOOM::parse_from_bytes(value).unwrap().container_id,
        "/tasks/paused" => {
            wire::TaskPaused::parse_from_bytes(value)
                .unwrap()
                .container_id
        }
        "/tasks/resumed" => {
            wire::TaskResumed::parse_from_bytes(value)
                .unwrap()
                .container_id
        }
        _ => String::new(),
    };
    format!("{topic} {kind} {what}")
}
