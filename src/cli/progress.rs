//! The stages of a pod while it comes up, as one line on a terminal.
//!
//! Promises silence when stderr is no terminal, and a clean line when it is over. Reads the journal only; must never ask
//! the supervisor, which has better things to do.

use std::future::Future;
use std::io::{self, IsTerminal, Write};
use std::path::Path;
use std::time::Duration;

use tokio::time::{Instant, MissedTickBehavior, interval};

use crate::pod::record::{self, Stage};

/// How often the journal is read.
const INTERVAL: Duration = Duration::from_millis(50);

/// Runs `work` and shows the stages of the pod in `dir` meanwhile.
pub async fn watch<T>(dir: &Path, work: impl Future<Output = T>) -> T {
    if !io::stderr().is_terminal() {
        return work.await;
    }
    let began = Instant::now();
    let mut tick = interval(INTERVAL);
    tick.set_missed_tick_behavior(MissedTickBehavior::Skip);
    let mut shown = false;
    tokio::pin!(work);
    let result = loop {
        tokio::select! {
            result = &mut work => break result,
            _ = tick.tick() => {
                if let Ok(record) = record::read(dir) {
                    show(&line(&record.stages, began.elapsed()));
                    shown = true;
                }
            }
        }
    };
    if shown {
        show("");
    }
    result
}

/// Over the same line: carriage return, erase to the end.
fn show(text: &str) {
    let mut stderr = io::stderr();
    let _ = write!(stderr, "\r\x1b[K{text}").and_then(|()| stderr.flush());
}

/// "netns 0.8 ms, cni-add 61 ms, infra … (0.3 s)".
fn line(stages: &[Stage], elapsed: Duration) -> String {
    let mut parts: Vec<String> = Vec::new();
    for stage in stages {
        let name: String = stage.name.chars().filter(|c| !c.is_control()).collect();
        parts.push(match (stage.took_us, &stage.error) {
            (_, Some(_)) => format!("{name} failed"),
            (Some(us), None) => format!("{name} {}.{} ms", us / 1_000, us % 1_000 / 100),
            (None, None) => format!("{name} …"),
        });
    }
    format!("{} ({:.1} s)", parts.join(", "), elapsed.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_says_what_is_done_and_what_is_under_way() {
        let stage = |name: &str, took_us| Stage {
            name: name.into(),
            at_us: 0,
            took_us,
            error: None,
        };
        let text = line(
            &[stage("netns", Some(812)), stage("cni-add", None)],
            Duration::from_millis(340),
        );
        assert_eq!(text, "netns 0.8 ms, cni-add … (0.3 s)");
    }
}
