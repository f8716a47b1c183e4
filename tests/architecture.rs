//! The rules of docs/architecture.md, held against the source: arrows between rooms, where `unsafe` may stand, how long
//! a file may be, how a module begins.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

#[path = "architecture/source.rs"]
mod source;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

const LONGEST: usize = 600;
const EVERY_ROOM: &str = "every room";

/// Room to the rooms it may use.
type Table = BTreeMap<String, BTreeSet<String>>;

#[test]
fn no_arrow_that_the_table_does_not_have() {
    let table = table();
    none(
        sources()
            .iter()
            .flat_map(|(path, text)| wrong_arrows(&table, path, text)),
    );
}

#[test]
fn the_root_only_declares_rooms() {
    none(
        sources()
            .iter()
            .filter(|(path, _)| path == "src/lib.rs")
            .flat_map(|(path, text)| wrong_root(path, text)),
    );
}

#[test]
fn the_table_has_no_circle() {
    let table = table();
    for room in table
        .keys()
        .filter(|room| *room != "bin" && *room != EVERY_ROOM)
    {
        let mut reached = BTreeSet::new();
        let mut next: Vec<&str> = allowed(&table, room).unwrap();
        while let Some(other) = next.pop() {
            assert_ne!(
                other, room,
                "a circle in docs/architecture.md through `{room}`"
            );
            if reached.insert(other) {
                next.extend(allowed(&table, other).unwrap());
            }
        }
    }
}

#[test]
fn unsafe_only_where_it_is_argued() {
    none(
        sources()
            .iter()
            .flat_map(|(path, text)| wrong_unsafe(path, text)),
    );
}

/// Whoever else waits steals an exit code. The names are put together here, so that this file is none that has them.
#[test]
fn only_the_reaper_waits() {
    let calls = ["pid(", "id(", "4("].map(|end| format!("wait{end}"));
    let waits = |(_, source): &(String, String)| calls.iter().any(|call| source.contains(call));
    let found = rust_files("src").into_iter().filter(waits);
    // `sys` has the calls, for the reaper and for the guard, which is a process of its own.
    let wrong = found.filter(|(path, _)| !path.starts_with("src/sys/"));
    none(wrong.map(|(path, _)| format!("{path}: waits for children")));
}

#[test]
fn files_are_short_and_say_what_they_own() {
    let mut all = sources();
    all.extend(rust_files("tests"));
    none(all.iter().flat_map(|(path, text)| wrong_shape(path, text)));
}

#[test]
fn the_rules_find_what_they_look_for() {
    let table = table();
    let arrows = |path: &str, text: &str| wrong_arrows(&table, path, text).len();
    assert_eq!(arrows("src/network/cni.rs", "use crate::pod::Handle;"), 1);
    assert_eq!(
        arrows(
            "src/network/cni.rs",
            "use crate::process::spawn;\nuse crate::error::Error;"
        ),
        0
    );
    assert_eq!(
        arrows(
            "src/network/cni.rs",
            "use crate::{error::Error, pod::{a, b}, sys};"
        ),
        1
    );
    assert_eq!(
        arrows("src/network/cni.rs", "fn f() { crate::service::go(); }"),
        1
    );
    assert_eq!(
        arrows(
            "src/network/cni.rs",
            "// crate::pod\nlet a = \"crate::pod\"; /* crate::pod */ r#\"crate::pod\"#;"
        ),
        0
    );
    assert_eq!(
        arrows(
            "src/network/cni.rs",
            "let q = '\"'; crate::pod::x('\\''); crate::pod::y::<'a>()"
        ),
        2
    );
    assert_eq!(
        arrows(
            "src/network/cni.rs",
            "use super::super::pod;\nuse super::conf;"
        ),
        1
    );
    assert_eq!(
        arrows(
            "src/network/mod.rs",
            "use super::pod;\nmod tests { use super::*; use super::super::pod; }"
        ),
        2
    );
    assert_eq!(
        arrows(
            "src/mount.rs",
            "use super::error::Error;\nmod tests { use super::*; }"
        ),
        0
    );
    assert_eq!(
        arrows(
            "src/network/mod.rs",
            "use crate as all;\nuse crate::*;\npub(crate) fn f() {}"
        ),
        2
    );
    assert_eq!(
        arrows(
            "src/network/mod.rs",
            "use crate::Error;\nuse crate::nowhere::X;"
        ),
        2
    );
    assert_eq!(
        arrows(
            "src/network/mod.rs",
            "crate::failpoint!(x); $crate::pod::x!()"
        ),
        1
    );
    assert_eq!(
        arrows(
            "src/proto.rs",
            "set!(x, use [super::types::mount]);\nset!(y, use [super::pod]);"
        ),
        1
    );
    assert_eq!(arrows("src/error.rs", "use crate::sys::x;"), 1);
    assert_eq!(arrows("src/unknown/mod.rs", "fn f() {}"), 1);
    assert_eq!(
        arrows(
            "src/bin/podvisor.rs",
            "use podvisor::pod;\nuse podvisor::nowhere;"
        ),
        1
    );
    assert_eq!(
        arrows("src/bin/podvisor.rs", "use podvisor::cli::{podvisor, x};"),
        0
    );

    assert_eq!(
        wrong_root("src/lib.rs", "//! x\npub mod pod;\npub use pod::Handle;\n").len(),
        1
    );
    assert_eq!(
        wrong_root(
            "src/lib.rs",
            "//! use x\n#[cfg(feature = \"cli\")]\npub mod cli;\n"
        )
        .len(),
        0
    );

    assert_eq!(
        wrong_unsafe("src/pod/mod.rs", "fn f() { unsafe { x() } }").len(),
        1
    );
    assert_eq!(
        wrong_unsafe(
            "src/pod/mod.rs",
            "// unsafe\n#![deny(unsafe_code)] \"unsafe\""
        )
        .len(),
        0
    );
    assert_eq!(
        wrong_unsafe("src/sys/ns.rs", "unsafe {}").len()
            + wrong_unsafe("src/infra/program.rs", "unsafe {}").len(),
        0
    );

    assert_eq!(wrong_shape("src/pod/mod.rs", "use x;\n//! late\n").len(), 1);
    assert_eq!(
        wrong_shape(
            "src/pod/mod.rs",
            &format!("//! {}", "x\n".repeat(LONGEST + 1))
        )
        .len(),
        1
    );
    assert_eq!(
        wrong_shape("src/pod/mod.rs", &format!("//! {}", "x\n".repeat(LONGEST))).len(),
        0
    );
}

fn wrong_arrows(table: &Table, path: &str, text: &str) -> Vec<String> {
    let modules = modules(path);
    let Some(room) = modules.first().cloned() else {
        return Vec::new();
    };
    let Some(allowed) = allowed(table, &room) else {
        return vec![format!(
            "{path}: the room `{room}` is not in docs/architecture.md"
        )];
    };
    let own_crate = if room == "bin" { "podvisor" } else { "" };
    let tokens = source::tokens(&source::code_only(text));
    let mut wrong = Vec::new();
    for (line, name) in source::root_paths(&tokens, modules.len(), own_crate, &|name| {
        table.contains_key(name)
    }) {
        if name == room || allowed.contains(&name.as_str()) {
            continue;
        }
        let what = match name.as_str() {
            "self" | "*" => "names the whole crate: name the room".to_owned(),
            _ if !table.contains_key(&name) => {
                format!("`{name}` is no room: name the room it stands in")
            }
            _ => format!("`{room}` may not use `{name}`"),
        };
        wrong.push(format!("{path}:{line}: {what}"));
    }
    wrong
}

fn wrong_root(path: &str, text: &str) -> Vec<String> {
    let tokens = source::tokens(&source::code_only(text));
    let uses = tokens.iter().filter(|(_, word)| word == "use");
    uses.map(|(line, _)| {
        format!("{path}:{line}: the root only declares rooms, a re-export hides an arrow")
    })
    .collect()
}

fn wrong_unsafe(path: &str, text: &str) -> Vec<String> {
    if path.starts_with("src/sys/") || path == "src/sys.rs" || path == "src/infra/program.rs" {
        return Vec::new();
    }
    let tokens = source::tokens(&source::code_only(text));
    let found = tokens.iter().filter(|(_, word)| word == "unsafe");
    found
        .map(|(line, _)| format!("{path}:{line}: unsafe belongs into `sys`"))
        .collect()
}

fn wrong_shape(path: &str, text: &str) -> Vec<String> {
    let mut wrong = Vec::new();
    let lines = text.lines().count();
    if lines > LONGEST {
        wrong.push(format!(
            "{path}: {lines} lines, more than {LONGEST}: it holds more than one idea"
        ));
    }
    if !text.starts_with("//! ") {
        wrong.push(format!(
            "{path}: does not begin with `//!` and what it owns"
        ));
    }
    wrong
}

/// `None` for a room the table does not have. Leaves use only what their own row says.
fn allowed<'a>(table: &'a Table, room: &str) -> Option<Vec<&'a str>> {
    let row = table.get(room)?;
    let leaves = &table[EVERY_ROOM];
    let rooms = || table.keys().filter(|room| *room != EVERY_ROOM);
    let mut all: Vec<&str> = row.iter().map(String::as_str).collect();
    if row.contains("all") {
        all = rooms().map(String::as_str).collect();
    } else if !leaves.contains(room) {
        all.extend(leaves.iter().map(String::as_str));
    }
    Some(all)
}

/// The table of record in docs/architecture.md: the rows after `| room | may use |`.
fn table() -> Table {
    let text = fs::read_to_string(root().join("docs/architecture.md")).unwrap();
    let rows = text
        .lines()
        .skip_while(|line| *line != "| room | may use |")
        .skip(2)
        .take_while(|line| line.starts_with('|'));
    let names = |cell: &str| {
        cell.split(',')
            .map(|name| name.trim().trim_matches('`').to_owned())
            .filter(|name| name != "-")
            .collect()
    };
    let table: Table = rows
        .map(|row| {
            let cells: Vec<&str> = row.trim_matches('|').split('|').map(str::trim).collect();
            assert_eq!(
                cells.len(),
                2,
                "a row of docs/architecture.md has two cells: {row}"
            );
            (cells[0].trim_matches('`').to_owned(), names(cells[1]))
        })
        .collect();
    assert!(
        table.len() > 20 && table.contains_key(EVERY_ROOM),
        "the table in docs/architecture.md is cut short"
    );
    for name in table.values().flatten().filter(|name| *name != "all") {
        assert!(
            table.contains_key(name),
            "docs/architecture.md has an arrow to `{name}`, which has no row"
        );
    }
    table
}

/// `src/pod/job.rs` is the module `pod::job`, `src/pod/mod.rs` is `pod`, `src/lib.rs` the root; a binary is `bin`, a
/// root of its own.
fn modules(path: &str) -> Vec<String> {
    let path = path.trim_start_matches("src/").trim_end_matches(".rs");
    let mut modules: Vec<String> = path.split('/').map(str::to_owned).collect();
    if ["mod", "lib"].contains(&modules.last().map_or("", String::as_str)) {
        modules.pop();
    }
    modules
}

/// Where the last column of a table is `tests`, each row lists some.
#[test]
fn every_row_of_the_task_service_names_tests_that_exist() {
    let (text, seen) = rows_with_tests("docs/task.md");
    for method in METHODS {
        let cell = format!("| {method} |");
        assert!(text.contains(&cell), "no row for {method}");
    }
    assert!(seen > METHODS.len());
}

#[test]
fn every_row_of_the_kubernetes_guide_names_tests_that_exist() {
    let (_, seen) = rows_with_tests("docs/kubernetes.md");
    assert!(seen > 40, "{seen} tests are named");
}

/// The document, and how many tests its tables name; all exist.
fn rows_with_tests(document: &str) -> (String, usize) {
    let text = fs::read_to_string(root().join(document)).unwrap();
    let known: BTreeSet<String> = ["src", "tests"]
        .iter()
        .flat_map(|dir| rust_files(dir))
        .flat_map(|(_, source)| functions(&source))
        .collect();
    // Tables whose last column is called so.
    let mut named = false;
    let mut seen = 0;
    for row in text.lines() {
        if !row.starts_with('|') {
            named = false;
        } else if row.ends_with("| tests |") {
            named = true;
        } else if named && !row.starts_with("|---") {
            let last = row.trim_end_matches('|').rsplit('|').next().unwrap();
            let tests: Vec<&str> = last.split('`').skip(1).step_by(2).collect();
            assert!(!tests.is_empty(), "no test in {row}");
            for test in tests {
                assert!(known.contains(test), "no test `{test}`: {row}");
                seen += 1;
            }
        }
    }
    (text, seen)
}

/// What both versions of the Task service, the Sandbox service and the Streaming service are asked.
const METHODS: [&str; 28] = [
    "Create",
    "Start",
    "State",
    "Exec",
    "Delete",
    "Kill",
    "Wait",
    "Pids",
    "Pause",
    "Resume",
    "ResizePty",
    "CloseIO",
    "Update",
    "Stats",
    "Checkpoint",
    "Connect",
    "Shutdown",
    "CreateSandbox",
    "StartSandbox",
    "Platform",
    "StopSandbox",
    "WaitSandbox",
    "SandboxStatus",
    "UpdateSandbox",
    "PingSandbox",
    "ShutdownSandbox",
    "SandboxMetrics",
    "Stream",
];

/// Names of the functions that are tests.
fn functions(source: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut is_test = false;
    for line in source.lines().map(str::trim) {
        if line.starts_with("#[test]") || line.starts_with("#[tokio::test") {
            is_test = true;
        } else if let Some((_, rest)) = line.split_once("fn ")
            && is_test
        {
            found.extend(rest.split(['(', '<']).next().map(str::to_owned));
            is_test = false;
        }
    }
    found
}

fn none(wrong: impl Iterator<Item = String>) {
    let wrong: Vec<String> = wrong.collect();
    assert!(wrong.is_empty(), "\n{}\n", wrong.join("\n"));
}

fn sources() -> Vec<(String, String)> {
    let all = rust_files("src");
    assert!(!all.is_empty());
    all
}

/// Every Rust file below a directory of the repository, as (path from the repository's root, text).
fn rust_files(dir: &str) -> Vec<(String, String)> {
    let mut files = Vec::new();
    let mut dirs: Vec<PathBuf> = vec![root().join(dir)];
    while let Some(dir) = dirs.pop() {
        for entry in fs::read_dir(&dir).unwrap().flatten() {
            let path = entry.path();
            if path.is_dir() {
                dirs.push(path);
            } else if path.extension().is_some_and(|end| end == "rs") {
                let name = path
                    .strip_prefix(root())
                    .unwrap()
                    .to_string_lossy()
                    .into_owned();
                files.push((name, fs::read_to_string(&path).unwrap()));
            }
        }
    }
    files.sort();
    files
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}
