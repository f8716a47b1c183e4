//! What is logged of a DEL that fails.

use std::fs;
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;

use crate::rig::{self, BOUND, Pod};
use crate::support::fake::Act;
use crate::support::{Snapshot, eventually, sandboxed};

/// FL-041: one line for each try, whoever makes it: the stop, then the supervisor by itself.
#[test]
fn each_try_of_a_del_that_fails_is_one_line() {
    sandboxed("lines::each_try_of_a_del_that_fails_is_one_line", || {
        rig::settings("[cni]\ndel_timeout = 2.0\n");
        let plugin = rig::fake_network();
        let before = Snapshot::take();
        let pod = Pod::up("l1");
        let failing = 6;
        plugin.on(
            "DEL",
            &[
                Act::OnlyFirst(failing),
                Act::Print(r#"{"code":11,"msg":"Unauthorized"}"#.into()),
                Act::Exit(1),
            ],
        );
        pod.probe().stop("l1").unwrap_err();
        let tries = usize::try_from(failing).unwrap();
        eventually(BOUND, "the DEL that succeeds", || {
            pod.record()
                .is_some_and(|r| plugin.count("DEL") == tries + 1 && r.network.pending.is_none())
                .then_some(())
        });
        let log = log(&pod);
        // That a request was answered with it, and a stage ended so, is told at level info beside.
        let lines: Vec<&str> = log
            .lines()
            .filter(|l| l.contains("Unauthorized") && !l.contains("level=info"))
            .collect();
        assert_eq!(lines.len(), tries, "{}", lines.join("\n"));
        assert!(
            lines.iter().all(|l| l.contains("step=cni-del")),
            "{}",
            lines.join("\n")
        );
        pod.probe().shutdown("l1").unwrap();
        before.assert_unchanged();
    });
}

/// What the supervisor wrote; a pipe holds it until it is read.
fn log(pod: &Pod) -> String {
    let mut file = fs::File::options()
        .read(true)
        .custom_flags(libc::O_NONBLOCK)
        .open(pod.bundle.dir.join("log"))
        .unwrap();
    let mut bytes = vec![0; 1 << 20];
    let n = file.read(&mut bytes).unwrap();
    String::from_utf8_lossy(&bytes[..n]).into_owned()
}
