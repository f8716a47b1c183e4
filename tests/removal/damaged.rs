//! Journals that were cut off, with their supervisor killed.

use std::fs;

use crate::rig::{self, kill};
use crate::support::{Snapshot, podvisor, rootfs, sandboxed};

/// FL-007, FL-040: shown, and removed by what can be proved.
fn removed_with_a_journal_of(name: &str, keep: fn(usize) -> Option<usize>) {
    sandboxed(name, || {
        let (plugin, rootfs) = (rig::fake_network(), rootfs::make());
        let before = Snapshot::take();
        let work = ["--rootfs", rootfs.str(), "--", "/bin/sleep", "100"];
        let run = podvisor(&[&["run", "-d", "--name", "web"], &work[..]].concat()).ok();
        let second = ["run", "-d", "--sandbox", "web", "--name", "side"];
        podvisor(&[&second[..], &work[..]].concat()).ok();
        kill(crate::daemon::supervisor());
        let journal = format!("/run/podvisor/default/{}/journal.json", run.stdout.trim());
        let text = fs::read(&journal).unwrap();
        match keep(text.len()) {
            Some(length) => fs::write(&journal, &text[..length]).unwrap(),
            None => fs::remove_file(&journal).unwrap(),
        }
        let listed = podvisor(&["ps", "-a"]).ok().stdout;
        assert!(
            listed.contains("unrecovered") && listed.contains("web"),
            "{listed}"
        );
        podvisor(&["rm", "web"])
            .code_is(1)
            .fails_with("podvisor rm -f web");
        podvisor(&["rm", "-f", "web"]).ok();
        before.assert_unchanged();
        assert_eq!((plugin.count("ADD"), plugin.count("DEL")), (1, 1));
        // The name is free again.
        let again = ["run", "--rm", "--name", "web", "--rootfs", rootfs.str()];
        podvisor(&[&again[..], &["--", "/bin/true"]].concat()).ok();
        before.assert_unchanged();
    });
}

#[test]
fn a_pod_with_an_empty_journal_is_shown_and_removed() {
    removed_with_a_journal_of(
        "damaged::a_pod_with_an_empty_journal_is_shown_and_removed",
        |_| Some(0),
    );
}

#[test]
fn a_pod_with_half_a_journal_is_shown_and_removed() {
    removed_with_a_journal_of(
        "damaged::a_pod_with_half_a_journal_is_shown_and_removed",
        |length| Some(length / 2),
    );
}

#[test]
fn a_pod_without_a_journal_is_shown_and_removed() {
    removed_with_a_journal_of(
        "damaged::a_pod_without_a_journal_is_shown_and_removed",
        |_| None,
    );
}
