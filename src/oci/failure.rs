//! Why an OCI runtime failed, in its own words.
//!
//! The text is the last error in the JSON log this run wrote, else the end of its stderr. The log is written by a
//! program that ran a stranger's configuration: it is read with a bound and believed for its text only.

use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;

use crate::error::Kind;
use crate::process::Output;

/// How much of the log's end is read, bytes.
const LOG_BOUND: u64 = 64 * 1024;
/// How much of a text is passed on, characters: it ends up in an answer and in events of other systems.
const TEXT_BOUND: usize = 2000;

/// Size of the log now, so that what an earlier verb wrote is not taken for this one's.
pub(super) fn length(log: &Path) -> u64 {
    fs::symlink_metadata(log).map_or(0, |m| m.len())
}

/// The last error written to `log` behind `from`.
pub(super) fn last_error(log: &Path, from: u64) -> Option<String> {
    if !fs::symlink_metadata(log).ok()?.is_file() {
        return None;
    }
    let mut file = File::open(log).ok()?;
    let end = file.metadata().ok()?.len();
    file.seek(SeekFrom::Start(from.max(end.saturating_sub(LOG_BOUND))))
        .ok()?;
    let mut text = Vec::new();
    file.take(LOG_BOUND).read_to_end(&mut text).ok()?;
    last_error_in(&text)
}

/// Kind and text of a run that failed.
pub(super) fn explain(logged: Option<String>, output: &Output) -> (Kind, String) {
    let text = logged
        .or_else(|| last_line(&output.stderr))
        .unwrap_or_else(|| match output.exit.signal {
            Some(signal) => format!("ended by signal {signal} without a word"),
            None => format!("exit status {} without a word", output.exit.code),
        });
    (kind(&text), text)
}

/// Runtimes answer with text only; these are the sentences that mean something to a caller. A missing file *in* the
/// container must not read as a missing container, so "no such file" alone says nothing.
fn kind(text: &str) -> Kind {
    let says = |words: &[&str]| words.iter().any(|w| text.contains(w));
    if says(&[
        "container does not exist",
        "container not running",
        "process already finished",
        "no such process",
    ]) {
        Kind::NotFound
    } else if says(&[
        "container with id exists",
        "container with given ID already exists",
    ]) {
        Kind::Exists
    } else {
        Kind::Other
    }
}

fn last_error_in(text: &[u8]) -> Option<String> {
    text.split(|b| *b == b'\n').rev().find_map(|line| {
        let line: serde_json::Value = serde_json::from_slice(line).ok()?;
        let level = line.get("level")?.as_str()?;
        if !["error", "fatal", "panic"]
            .iter()
            .any(|l| level.eq_ignore_ascii_case(l))
        {
            return None;
        }
        // youki has another name for it, and up to 0.5 one level deeper.
        let text = ["/msg", "/message", "/fields/message"]
            .iter()
            .find_map(|path| line.pointer(path))?
            .as_str()?;
        Some(bounded(text))
    })
}

fn last_line(stderr: &[u8]) -> Option<String> {
    let text = String::from_utf8_lossy(stderr);
    text.lines()
        .rev()
        .map(str::trim)
        .find(|l| !l.is_empty())
        .map(bounded)
}

fn bounded(text: &str) -> String {
    text.trim().chars().take(TEXT_BOUND).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_error_counts_and_rubbish_is_passed_over() {
        let log = b"{\"level\":\"error\",\"msg\":\"first\"}\n{\"level\":\"warning\",\"msg\":\"no\"}\n\
            {\"level\":\"error\",\"msg\":\"runc create failed: x\"}\n{\"level\":\"debug\",\"msg\":\"end\"}\nrubbish {";
        assert_eq!(last_error_in(log).as_deref(), Some("runc create failed: x"));
        assert_eq!(last_error_in(b""), None);
        for line in [
            r#"{"level":"ERROR","fields":{"message":"youki's"}}"#,
            r#"{"timestamp":"t","level":"ERROR","message":"youki's","target":"youki"}"#,
        ] {
            assert_eq!(last_error_in(line.as_bytes()).as_deref(), Some("youki's"));
        }
    }

    #[test]
    fn only_what_an_own_run_wrote_is_read() {
        let Ok(dir) = tempfile::tempdir() else {
            panic!("make a directory")
        };
        let log = dir.path().join("log.json");
        let line = "{\"level\":\"error\",\"msg\":\"old\"}\n";
        assert!(fs::write(&log, line).is_ok());
        assert_eq!(last_error(&log, length(&log)), None);
        assert_eq!(last_error(&log, 0).as_deref(), Some("old"));
    }

    #[test]
    fn a_missing_program_is_no_missing_container() {
        let text = "runc create failed: unable to start container process: exec: \"x\": stat x: no such file or directory";
        assert_eq!(kind(text), Kind::Other);
        assert_eq!(kind("container does not exist"), Kind::NotFound);
    }
}
