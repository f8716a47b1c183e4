//! `start` with ids, input and bundles that a daemon would never send.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::support::Output;
use crate::support::bin::{SHIM, run_with};
use crate::{hostile, nothing_left};

/// A bundle without a `config.json`.
pub fn bundle(id: &str) -> PathBuf {
    let dir = Path::new("/run/bundles").join(id);
    fs::create_dir_all(&dir).unwrap();
    fs::write(dir.join("log"), "").unwrap();
    dir
}

/// `start` without a daemon's address.
pub fn start(bundle: &Path, id: &str, input: &[u8]) -> Output {
    let mut command = Command::new(SHIM);
    command
        .current_dir(bundle)
        .args(["-namespace", "default", "-id", id, "start"]);
    run_with(&mut command, Some(input), Duration::from_secs(60))
}

#[test]
fn start_refuses_hostile_ids_and_namespaces() {
    nothing_left("launch::start_refuses_hostile_ids_and_namespaces", |_| {
        let dir = bundle("p1");
        for id in hostile() {
            start(&dir, &id, b"").code_is(1).fails_with("id");
            let mut command = Command::new(SHIM);
            command
                .current_dir(&dir)
                .args(["-namespace", &id, "-id", "p1", "start"]);
            run_with(&mut command, Some(b""), Duration::from_secs(60))
                .code_is(1)
                .fails_with("namespace");
            let mut command = Command::new(SHIM);
            command.current_dir(&dir).args([
                "-namespace",
                "default",
                "-id",
                &id,
                "-bundle",
                "/run/bundles/p1",
                "delete",
            ]);
            run_with(&mut command, Some(b""), Duration::from_secs(60)).code_is(1);
        }
        assert_eq!(fs::read_dir(&dir).unwrap().count(), 1);
        fs::remove_dir_all("/run/bundles").unwrap();
    });
}

#[test]
fn garbage_on_the_standard_input_of_start_is_refused() {
    nothing_left(
        "launch::garbage_on_the_standard_input_of_start_is_refused",
        |_| {
            let dir = bundle("p1");
            let long = vec![0xff; 20 * 1024 * 1024];
            for input in [
                &b"garbage"[..],
                b"\xff\xff\xff\xff\xff",
                b"{\"json\":1}",
                b"\0",
                &long,
            ] {
                start(&dir, "p1", input)
                    .code_is(1)
                    .fails_with("standard input");
            }
            fs::write(dir.join("config.json"), "{\"annotations\":{").unwrap();
            start(&dir, "p1", b"").code_is(1).fails_with("config.json");
            fs::write(
                dir.join("config.json"),
                r#"{"annotations":{"io.kubernetes.cri.sandbox-id":"../../x"}}"#,
            )
            .unwrap();
            start(&dir, "p1", b"").code_is(1).fails_with("../../x");
            fs::remove_dir_all("/run/bundles").unwrap();
        },
    );
}
