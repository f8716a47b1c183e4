//! docs/retry.md is the list of what is promised: every test that its tables name exists, and no item is left out.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

/// Second column's heading of the tables that name tests.
const HEADINGS: [&str; 3] = ["ours", "shown by", "replayed by"];

/// Cases of CRI-O's two suites, by the words that their rows begin with.
const CASES: [&str; 14] = [
    "should not clean up pod after timeout",
    "emit metric when sandbox is re-requested",
    "should clean up pod after timeout if request changes",
    "should clean up pod after timeout if not re-requested",
    "should not wait for actual duplicate pod request",
    "should not be able to operate on a timed out pod",
    "should not clean up container after timeout",
    "should clean up container after timeout if request changes",
    "should clean up container after timeout if not re-requested",
    "emit metric when container is re-requested",
    "should not be able to operate on a timed out container",
    "should not wait for actual duplicate container request",
    "default, custom, minimum, handlers of their own",
    "actual enforcement",
];

/// Faults from the field that belong here.
const FAULTS: [u32; 13] = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 53, 82];

/// What one row promises, and the tests it names.
struct Row {
    item: String,
    names: Vec<String>,
}

fn rows() -> Vec<Row> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let text = fs::read_to_string(root.join("docs/retry.md")).unwrap();
    let mut rows = Vec::new();
    let mut inside = false;
    for line in text.lines() {
        let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
        let last = *cells.last().unwrap();
        if !line.starts_with('|') {
            inside = false;
        } else if HEADINGS.contains(&last) {
            inside = true;
        } else if inside && !last.starts_with("---") {
            let names = last.split('`').skip(1).step_by(2);
            rows.push(Row {
                item: cells[0].to_owned(),
                names: names.map(str::to_owned).collect(),
            });
        }
    }
    rows
}

/// All functions of tests, and of sources.
fn functions() -> BTreeSet<String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut dirs = vec![root.join("tests"), root.join("src")];
    let mut found = BTreeSet::new();
    while let Some(dir) = dirs.pop() {
        for path in fs::read_dir(dir).unwrap().flatten().map(|e| e.path()) {
            if path.is_dir() {
                dirs.push(path);
            } else if path.extension().is_some_and(|end| end == "rs") {
                let text = fs::read_to_string(path).unwrap();
                let defined = text
                    .split("fn ")
                    .skip(1)
                    .filter_map(|t| t.split('(').next());
                found.extend(defined.map(str::to_owned));
                // What a macro makes is there as a word only.
                let words = text.split(|c: char| !c.is_alphanumeric() && c != '_');
                let made = words.filter(|w| w.contains('_') && text.contains("macro_rules!"));
                found.extend(made.map(str::to_owned));
            }
        }
    }
    found
}

#[test]
fn every_test_that_the_page_names_exists() {
    let known = functions();
    for row in rows() {
        assert!(!row.names.is_empty(), "{} names no test", row.item);
        for name in row.names {
            // A file or a room in front, or in place, of a test's name says where to look.
            if name.contains('/') || name.contains(".rs") {
                let root = Path::new(env!("CARGO_MANIFEST_DIR"));
                assert!(root.join(&name).exists(), "{name}");
                continue;
            }
            let function = name.rsplit("::").next().unwrap();
            let exists = match function.strip_suffix('*') {
                Some(begin) => known.iter().any(|k| k.starts_with(begin)),
                None => known.contains(function),
            };
            assert!(exists, "{}: {name}", row.item);
        }
    }
}

#[test]
fn no_item_is_left_out() {
    let items: BTreeSet<String> = rows().into_iter().map(|row| row.item).collect();
    for number in (1..=35).chain(42..=44) {
        assert!(items.contains(&number.to_string()), "item {number}");
    }
    for case in CASES {
        assert!(items.contains(case), "{case}");
    }
    for fault in FAULTS {
        let begin = format!("FL-{fault:03} ");
        assert!(items.iter().any(|i| i.starts_with(&begin)), "{begin}");
    }
}
