//! Removing pods with the real executables: again and again, after their supervisor was killed, with a damaged journal,
//! and supervisors that nobody uses.
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

#[path = "removal/at_once.rs"]
mod at_once;
#[path = "removal/cut.rs"]
mod cut;
#[path = "removal/damaged.rs"]
mod damaged;
#[path = "removal/exits.rs"]
mod exits;
#[path = "removal/idle.rs"]
mod idle;
#[path = "removal/killed.rs"]
mod killed;
#[path = "removal/outside.rs"]
mod outside;
#[path = "removal/proxy.rs"]
mod proxy;
#[path = "removal/repeated.rs"]
mod repeated;
#[path = "removal/restart.rs"]
mod restart;
#[path = "removal/stale.rs"]
mod stale;

/// Every test that docs/removal.md names exists, and every row names one or says why there is none.
#[test]
fn each_row_of_the_table_is_shown_by_tests_that_exist() {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
    let text = std::fs::read_to_string(root.join("docs/removal.md")).unwrap();
    let table = text.split("| item | what is promised | shown by |").nth(1);
    let rows: Vec<&str> = table
        .unwrap()
        .lines()
        .skip(2)
        .take_while(|l| l.starts_with('|'))
        .collect();
    let first = |row: &&str| row.split('|').nth(1).unwrap().trim().to_owned();
    let items: Vec<String> = rows.iter().map(first).collect();
    let numbers = |of: &str, all: &[std::ops::RangeInclusive<u32>]| -> Vec<String> {
        let all = all.iter().cloned().flatten();
        all.map(|n| format!("{of}{n}")).collect()
    };
    let mut wanted = numbers("CRI-O ", &[36..=57]);
    wanted.extend(numbers(
        "containerd ",
        &[19..=31, 55..=55, 63..=73, 86..=90],
    ));
    wanted.extend(numbers("FL-00", &[5..=9]));
    let field = [36..=46, 50..=58, 60..=61, 67..=67, 70..=73, 82..=83];
    wanted.extend(numbers("FL-0", &field));
    wanted.extend(["FL-086c", "FL-086d", "FL-086g", "FL-086j", "FL-086m"].map(String::from));
    assert_eq!(items, wanted);
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
    let missing: Vec<&str> = rows
        .iter()
        .flat_map(|row| row.split('`').skip(1).step_by(2))
        .filter(|name| name.contains("::") || name.contains('_'))
        .filter(|name| {
            let function = name.rsplit("::").next().unwrap();
            !code.contains(&format!("fn {function}("))
        })
        .collect();
    assert!(missing.is_empty(), "no such tests: {missing:#?}");
    for row in rows {
        assert!(row.rsplit('|').nth(1).unwrap().contains('`'), "{row}");
    }
}
