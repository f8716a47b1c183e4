//! What podvisor does with each way a plugin can behave, with the real executables: the rows of the table in
//! docs/network.md that no other test file shows.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::print_stdout,
    reason = "tests panic where they cannot go on"
)]

#[path = "launch/daemon.rs"]
mod daemon;
#[path = "creation/rig.rs"]
#[allow(dead_code, reason = "shared with the tests of creation")]
mod rig;
mod support;

#[path = "network_behaviour/again.rs"]
mod again;
#[path = "network_behaviour/at_add.rs"]
mod at_add;
#[path = "network_behaviour/at_del.rs"]
mod at_del;
#[path = "network_behaviour/daemon_side.rs"]
mod daemon_side;
#[path = "network_behaviour/five_minutes.rs"]
mod five_minutes;
#[path = "network_bound/kit.rs"]
#[allow(dead_code, reason = "shared with the tests of the bound")]
mod kit;
#[path = "network_behaviour/place.rs"]
mod place;
#[path = "network_behaviour/several.rs"]
mod several;

/// Every test that the table in docs/network.md names exists, and every row names one.
#[test]
fn each_row_of_the_table_is_shown_by_a_test() {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
    let text = std::fs::read_to_string(root.join("docs/network.md")).unwrap();
    let table = text.split("| shown by |").nth(1).unwrap();
    let rows: Vec<&str> = table
        .lines()
        .skip(2)
        .take_while(|l| l.starts_with('|'))
        .collect();
    assert!(rows.len() >= 18, "{rows:?}");
    let mut tests = String::new();
    let mut dirs = vec![root.join("tests")];
    while let Some(dir) = dirs.pop() {
        for path in std::fs::read_dir(dir).unwrap().flatten().map(|e| e.path()) {
            match path.extension() {
                _ if path.is_dir() => dirs.push(path),
                Some(end) if end == "rs" => tests += &std::fs::read_to_string(path).unwrap(),
                _ => (),
            }
        }
    }
    for row in rows {
        let shown = row.trim_end_matches('|').rsplit('|').next().unwrap();
        assert!(shown.contains('`') || shown.contains("the same"), "{row}");
        for name in shown.split('`').skip(1).step_by(2) {
            assert!(tests.contains(&format!("fn {name}()")), "{name}");
        }
    }
}
