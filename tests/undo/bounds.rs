//! Bounds of ours that pass: they end in an undo, and in nothing else.

use std::time::Duration;

use podvisor::error::Kind;
use podvisor::pod::record::State;

use crate::rig::{self, BOUND, Pod, called};
use crate::support::fake::{self, Act};
use crate::support::{Sandbox, Snapshot, eventually, podvisor, rootfs, sandboxed};

/// Item 31: a bound that passes inside the work looks like a deadline; it is a failure all the same, is never parked,
/// and leaves nothing, whether its caller is there or has left.
#[test]
fn crio_31_a_bound_that_passes_is_undone_and_never_parked() {
    sandboxed(
        "bounds::crio_31_a_bound_that_passes_is_undone_and_never_parked",
        || {
            rig::settings("[cni]\nadd_timeout = 2.0\n[parking]\ninterval = 600.0\n");
            let plugin = rig::fake_network();
            plugin.on("ADD", &[Act::IgnoreTerm, Act::Sleep(300.0)]);
            let before = Snapshot::take();
            for (id, limit) in [("there", BOUND), ("left", Duration::from_millis(500))] {
                let dels = plugin.count("DEL");
                let pod = Pod::create(id);
                let told = pod.probe().start(id, limit).unwrap_err();
                assert_eq!(told.kind() == Kind::Deadline, id == "left", "{told}");
                called(&plugin, "DEL", dels + 1);
                eventually(BOUND, "it is rolled back", || {
                    let record = pod.record()?;
                    assert!(!matches!(record.state, State::Parked | State::Ready));
                    (record.state == State::NotReady && !record.effects.owe_creation())
                        .then_some(())
                });
                pod.bundle.delete();
            }
            assert_eq!((plugin.count("ADD"), plugin.count("DEL")), (2, 2));
            before.assert_unchanged();
        },
    );
}

/// Item 30: nobody on the host's network waits for a network to be configured; on ours that is a failure at once, not a
/// wait that could hang on cancel or shutdown.
#[test]
fn crio_30_no_network_configuration_is_told_at_once_and_is_no_matter_to_the_hosts() {
    sandboxed(
        "bounds::crio_30_no_network_configuration_is_told_at_once_and_is_no_matter_to_the_hosts",
        || {
            let before = Snapshot::take();
            let pod = Pod::create("p1");
            let error = pod.probe().start("p1", BOUND).unwrap_err();
            println!("{error}");
            assert!(
                !matches!(error.kind(), Kind::Deadline | Kind::Busy),
                "{error}"
            );
            pod.bundle.delete();
            let pod = Pod::launch("p2");
            pod.probe().create("p2", &rig::host_config("p2")).unwrap();
            pod.probe().start("p2", BOUND).unwrap();
            pod.end();
            before.assert_unchanged();
        },
    );
}

/// Item 35: an OCI runtime that hangs in create is killed at its bound; the container is deleted, the pod is undone.
#[test]
#[ignore = "slow: the bound is four minutes"]
fn slow_crio_35_a_runtime_create_that_passes_its_bound_leaves_nothing() {
    Sandbox::new("bounds::slow_crio_35_a_runtime_create_that_passes_its_bound_leaves_nothing")
        .bound(Duration::from_secs(420))
        .run(|| {
            let real = std::path::Path::new("/usr/bin/runc");
            let real = if real.exists() {
                real
            } else {
                std::path::Path::new("/usr/sbin/runc")
            };
            let runtime = fake::runtime_before(std::path::Path::new("/run/front"), "runc", real);
            runtime.on("CREATE", &[Act::IgnoreTerm, Act::Sleep(600.0)]);
            rig::settings("runtime = \"/run/front/runc\"\n");
            let rootfs = rootfs::make();
            let before = Snapshot::take();
            let asked = [
                "run",
                "--rootfs",
                rootfs.str(),
                "--net",
                "host",
                "--",
                "/bin/true",
            ];
            let mut command = std::process::Command::new(crate::support::bin::PODVISOR);
            let output = crate::support::run(command.args(asked), Duration::from_secs(300));
            println!("{output:?}");
            let output = output.code_is(125);
            assert!(output.stderr.contains("240"), "{output:?}");
            assert!(podvisor(&["ps", "-a", "-q"]).ok().stdout.trim().is_empty());
            assert_eq!(runtime.count("CREATE"), 1);
            before.assert_unchanged();
        });
}
