//! What people and programs read: stdout for data, stderr for the rest, tables, ages.
//!
//! Owns every write of the command to its own streams, except the copying of a workload's output. Promises that a
//! reader that went away is no error. Must never write escape sequences found in data that others wrote.

use std::fmt::Display;
use std::io::{self, Write};
use std::time::{Duration, SystemTime};

use serde::Serialize;

use crate::error::{Error, Kind, Result};

/// How a verb that lists prints.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Form {
    /// Columns, for people.
    #[default]
    Table,
    /// A document, for programs; see docs/schema.
    Json,
}

/// The flags that choose it.
#[derive(Clone, Copy, Debug, Default, clap::Args)]
#[group(skip)]
pub struct Format {
    /// How to print.
    #[arg(long, value_name = "FORM", value_enum, conflicts_with = "json")]
    format: Option<Form>,
    /// The same as --format json.
    #[arg(long)]
    json: bool,
}

impl Format {
    /// The form that was asked for.
    pub fn is_json(self) -> bool {
        self.json || self.format == Some(Form::Json)
    }

    /// A table was asked for, and not left to the verb.
    pub fn is_table(self) -> bool {
        self.format == Some(Form::Table)
    }
}

/// A document on stdout in one line.
pub fn json_line(value: &impl Serialize) -> Result<()> {
    let text = serde_json::to_string(value).map_err(not_json)?;
    line(text);
    Ok(())
}

fn not_json(e: serde_json::Error) -> Error {
    Error::caused(Kind::Other, "write the answer as JSON", e)
}

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
    let text = serde_json::to_string_pretty(value).map_err(not_json)?;
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

/// Bytes as people read them: "512B", "1.5M".
pub fn bytes(count: u64) -> String {
    const UNITS: [&str; 6] = ["B", "K", "M", "G", "T", "P"];
    let (mut value, mut unit) = (count as f64, 0);
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    let digits = usize::from(unit > 0 && value < 100.0);
    format!("{value:.digits$}{}", UNITS.get(unit).unwrap_or(&""))
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
pub fn printable(text: &str, newlines: bool) -> String {
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
    fn bytes_have_a_unit_and_few_digits() {
        for (count, text) in [
            (0, "0B"),
            (1023, "1023B"),
            (1536, "1.5K"),
            (64 << 20, "64.0M"),
            (500 << 30, "500G"),
        ] {
            assert_eq!(bytes(count), text);
        }
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
