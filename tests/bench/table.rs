//! Figures of one benchmark: a line for each thing measured and each who was measured, for people and as JSON.

use std::fs;
use std::io::Write;

use serde_json::json;

/// Who the others are compared with.
pub const GO: &str = "Go shim";

/// What is measured, in the order in which it came.
#[derive(Debug, Default)]
pub struct Table {
    name: &'static str,
    rows: Vec<Row>,
}

#[derive(Debug)]
struct Row {
    what: String,
    who: String,
    unit: &'static str,
    values: Vec<f64>,
}

impl Table {
    /// A table of this name.
    pub fn new(name: &'static str) -> Self {
        Self {
            name,
            rows: Vec::new(),
        }
    }

    /// One more value of `what` for `who`.
    pub fn add(&mut self, what: &str, who: &str, unit: &'static str, value: f64) {
        let found = self
            .rows
            .iter_mut()
            .find(|r| r.what == what && r.who == who);
        match found {
            Some(row) => row.values.push(value),
            None => self.rows.push(Row {
                what: what.into(),
                who: who.into(),
                unit,
                values: vec![value],
            }),
        }
    }

    /// A time, in milliseconds.
    pub fn time(&mut self, what: &str, who: &str, took: std::time::Duration) {
        self.add(what, who, "ms", took.as_secs_f64() * 1e3);
    }

    /// Prints it; and appends it, a line of JSON for each row, to the file that `PODVISOR_BENCH_JSON` names.
    pub fn print(mut self, load: &str) {
        // Rows of one thing beside each other, whoever was measured first.
        let order: Vec<String> = self.rows.iter().map(|r| r.what.clone()).collect();
        let place = |what: &str| order.iter().position(|w| w == what);
        self.rows.sort_by_key(|r| place(&r.what));
        // The runner has written the test's name and no end of line.
        println!(
            "\n| {} | who | p50 | p90 | min | n | of the Go shim's |",
            self.name
        );
        println!("|---|---|---|---|---|---|---|");
        for row in &self.rows {
            let go = self
                .rows
                .iter()
                .find(|r| r.what == row.what && r.who.starts_with(GO));
            let ratio = go.map(|go| row.at(0.5) / go.at(0.5));
            let shown = ratio.map_or_else(String::new, |r| format!("{r:.2}"));
            println!(
                "| {} | {} | {} {} | {} | {} | {} | {shown} |",
                row.what,
                row.who,
                figure(row.at(0.5)),
                row.unit,
                figure(row.at(0.9)),
                figure(row.at(0.0)),
                row.values.len()
            );
            self.keep(row, ratio, load);
        }
        println!("| load | {load} | | | | | |");
    }

    fn keep(&self, row: &Row, ratio: Option<f64>, load: &str) {
        let Some(path) = std::env::var_os("PODVISOR_BENCH_JSON") else {
            return;
        };
        let line = json!({
            "bench": self.name, "what": row.what, "who": row.who, "unit": row.unit, "p50": row.at(0.5),
            "p90": row.at(0.9), "min": row.at(0.0), "n": row.values.len(), "of_go": ratio, "load": load,
        });
        let mut file = fs::File::options()
            .create(true)
            .append(true)
            .open(path)
            .unwrap();
        writeln!(file, "{line}").unwrap();
    }
}

impl Row {
    /// The value at this part of them all, from the smallest.
    fn at(&self, part: f64) -> f64 {
        let mut sorted = self.values.clone();
        sorted.sort_by(f64::total_cmp);
        let last = (sorted.len() - 1) as f64;
        sorted[(last * part).round() as usize]
    }
}

fn figure(value: f64) -> String {
    match value.abs() {
        0.0..10.0 => format!("{value:.2}"),
        10.0..100.0 => format!("{value:.1}"),
        _ => format!("{value:.0}"),
    }
}
