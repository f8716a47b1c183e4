//! What people and programs read: stdout for data, stderr for the rest, tables, ages.
//!
//! Owns every write of the command to its own streams, except the copying of a workload's output. Promises that a
//! reader that went away is no error. Must never write escape sequences found in data that others wrote.

use std::fmt::Display;
use std::io::{self, Write};
use std::time::{Duration, SystemTime};

use serde::Serialize;

use crate::error::{Error, Kind, Result};

/// One line on stdout.
pub fn line(text: impl Display) {
    // A reader that has gone has seen enough.
    let _ = writeln!(io::stdout(), "{text}");
}

/// A whole text on stdout, as it is.
pub fn text(text: &str) {
    let _ = io::stdout().write_all(text.as_bytes());
}

/// A document on stdout, indented.
pub fn json(value: &impl Serialize) -> Result<()> {
    let text = serde_json::to_string_pretty(value)
        .map_err(|e| Error::caused(Kind::Other, "write the answer as JSON", e))?;
    line(text);
    Ok(())
}

/// `podvisor: …` on stderr.
pub fn complain(text: impl Display) {
    let _ = writeln!(
        io::stderr(),
        "podvisor: {}",
        printable(&text.to_string(), true)
    );
}

/// A refusal of the command line, which has its own words and newlines.
pub fn refuse(text: impl Display) {
    let _ = write!(io::stderr(), "{}", printable(&text.to_string(), true));
}

/// Rows below a heading, columns as wide as their widest cell, two spaces between, none at the end.
pub fn table(heading: &[&str], rows: &[Vec<String>]) {
    for text in layout(heading, rows) {
        line(text);
    }
}

/// How long ago `at` was, in the two largest units: "3d4h", "12m", "45s".
pub fn age(at: SystemTime) -> String {
    // A clock that was set back makes ages negative: show none.
    span(SystemTime::now().duration_since(at).unwrap_or_default())
}

/// A time span of a stage: "1.234 ms", "12.3 s".
pub fn micros(us: u64) -> String {
    match us {
        0..1_000_000 => format!("{}.{:03} ms", us / 1_000, us % 1_000),
        _ => format!("{}.{:03} s", us / 1_000_000, us % 1_000_000 / 1_000),
    }
}

/// A time span in its two largest units.
pub fn span(age: Duration) -> String {
    let s = age.as_secs();
    let (d, h, m) = (s / 86_400, s / 3_600 % 24, s / 60 % 60);
    match (d, h, m) {
        (0, 0, 0) => format!("{s}s"),
        (0, 0, m) => format!("{m}m{}s", s % 60),
        (0, h, m) => format!("{h}h{m}m"),
        (d, h, _) => format!("{d}d{h}h"),
    }
}

fn layout(heading: &[&str], rows: &[Vec<String>]) -> Vec<String> {
    let cells: Vec<Vec<String>> =
        std::iter::once(heading.iter().map(|h| (*h).to_owned()).collect())
            .chain(
                rows.iter()
                    .map(|row| row.iter().map(|c| printable(c, false)).collect()),
            )
            .collect();
    let width = |i: usize| {
        cells
            .iter()
            .filter_map(|row: &Vec<String>| row.get(i))
            .map(|c| c.chars().count())
            .max()
    };
    let widths: Vec<usize> = (0..heading.len()).map(|i| width(i).unwrap_or(0)).collect();
    cells
        .iter()
        .map(|row| {
            let padded: Vec<String> = row
                .iter()
                .zip(&widths)
                .map(|(cell, &w)| format!("{cell:<w$}"))
                .collect();
            padded.join("  ").trim_end().to_owned()
        })
        .collect()
}

/// Control characters would let a pod's name or a plugin's message drive the terminal.
fn printable(text: &str, newlines: bool) -> String {
    text.chars()
        .map(|c| {
            if c.is_control() && !(newlines && c == '\n') {
                '\u{fffd}'
            } else {
                c
            }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up_and_control_characters_are_shown() {
        let rows = vec![
            vec!["a".to_owned(), "x".to_owned()],
            vec!["longer\x1b".to_owned(), String::new()],
        ];
        assert_eq!(
            layout(&["ID", "NAME"], &rows),
            ["ID       NAME", "a        x", "longer\u{fffd}"]
        );
    }

    #[test]
    fn spans_have_at_most_two_units() {
        for (s, text) in [
            (0, "0s"),
            (59, "59s"),
            (61, "1m1s"),
            (3_661, "1h1m"),
            (90_000, "1d1h"),
        ] {
            assert_eq!(span(Duration::from_secs(s)), text);
        }
        assert_eq!(
            (micros(1_234), micros(12_345_678)),
            ("1.234 ms".to_owned(), "12.345 s".to_owned())
        );
    }
}
