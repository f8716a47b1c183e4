//! The bound that nobody set, in real time.

use std::process::Command;
use std::time::{Duration, Instant};

use crate::place;
use crate::support::fake::Act;
use crate::support::{Sandbox, Snapshot, bin, rootfs};

/// FL-014: five minutes without any setting.
#[test]
#[ignore = "takes five minutes"]
fn slow_a_hanging_add_is_killed_after_five_minutes_and_deleted_once() {
    let name = "five_minutes::slow_a_hanging_add_is_killed_after_five_minutes_and_deleted_once";
    Sandbox::new(name).bound(Duration::from_secs(420)).run(|| {
        let [plugin] = place::fakes(["hangs"]);
        plugin.on("ADD", &[Act::IgnoreTerm, Act::Sleep(3000.0)]);
        let rootfs = rootfs::make();
        let before = Snapshot::take();
        let begun = Instant::now();
        let mut command = Command::new(bin::PODVISOR);
        command.args(["run", "-d", "--rootfs", rootfs.str(), "--name", "p"]);
        // Its own patience is four minutes; the creation's is what this is about.
        command.args(["--timeout", "10m", "--", "/bin/sleep", "600"]);
        let output = bin::run(&mut command, Duration::from_secs(400)).code_is(125);
        let took = begun.elapsed();
        let bound = Duration::from_secs(300);
        assert!(took >= bound, "{took:?}");
        // What is over it is the pod's making and undoing on a busy machine.
        assert!(took < bound + Duration::from_secs(30), "{took:?}");
        for word in ["\"hangs\" (ADD)", "after 300.", "300.0 s", "killed"] {
            assert!(output.stderr.contains(word), "{word} in {output:#?}");
        }
        assert_eq!((plugin.count("ADD"), plugin.count("DEL")), (1, 1));
        assert!(place::processes("sleep 3000").is_empty());
        before.assert_unchanged();
    });
}
