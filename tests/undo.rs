//! Undo that always finishes: creations that fail in every step, undos that are stuck, journals as a crash leaves them.
//! The rows 22 to 35 of docs/retry.md name these tests; docs/journal.md's table is what `journals` drives.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::print_stdout,
    reason = "tests panic where they cannot go on"
)]

#[path = "launch/daemon.rs"]
mod daemon;
#[path = "races/kit.rs"]
#[allow(dead_code, reason = "shared with the tests of races")]
mod kit;
#[path = "network_behaviour/place.rs"]
#[allow(dead_code, reason = "shared with the tests of plugins")]
mod place;
#[path = "creation/rig.rs"]
#[allow(dead_code, reason = "shared with the tests of creation")]
mod rig;
mod support;

#[path = "undo/bounds.rs"]
mod bounds;
#[path = "undo/inside.rs"]
mod inside;
#[path = "undo/journals.rs"]
mod journals;
#[path = "undo/mounts.rs"]
mod mounts;
#[path = "undo/stuck.rs"]
mod stuck;
#[path = "undo/trace.rs"]
mod trace;

/// Every test that docs/retry.md names for an undo exists.
#[test]
fn each_row_of_the_undo_table_is_shown_by_tests_that_exist() {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
    let text = std::fs::read_to_string(root.join("docs/retry.md")).unwrap();
    let table = text.split("\n## Undo\n").nth(1);
    let table = table.and_then(|t| t.split("| item | what is promised | shown by |").nth(1));
    let rows: Vec<&str> = table
        .unwrap()
        .lines()
        .skip(2)
        .take_while(|l| l.starts_with('|'))
        .collect();
    assert_eq!(rows.len(), 14, "rows 22 to 35: {rows:#?}");
    let mut code = String::new();
    let mut dirs = vec![root.join("tests"), root.join("src")];
    while let Some(dir) = dirs.pop() {
        for path in std::fs::read_dir(dir).unwrap().flatten().map(|e| e.path()) {
            match path.extension() {
                _ if path.is_dir() => dirs.push(path),
                Some(end) if end == "rs" => code += &std::fs::read_to_string(path).unwrap(),
                _ => (),
            }
        }
    }
    for row in rows {
        let shown = row.trim_end_matches('|').rsplit('|').next().unwrap();
        let names: Vec<&str> = shown.split('`').skip(1).step_by(2).collect();
        assert!(!names.is_empty(), "{row}");
        for name in names {
            let function = name.rsplit("::").next().unwrap();
            assert!(code.contains(&format!("fn {function}(")), "{name}");
        }
    }
}
