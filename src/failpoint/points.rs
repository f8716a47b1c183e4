//! All points, so that a test can go through them. A test here holds the table against the source.

/// Every point that the source has, in alphabetical order.
pub const POINTS: &[&str] = &[
    "cgroup.make.after",
    "cgroup.make.before",
    "cgroup.remove.after",
    "cgroup.remove.before",
    "cli.bundle.after",
    "cli.bundle.before",
    "cli.create.after",
    "cli.directory.before",
    "cli.launch.after",
    "cli.launch.before",
    "cli.name-release.before",
    "cli.name.after",
    "cli.name.before",
    "cli.shutdown.after",
    "cli.shutdown.before",
    "cli.socket.before",
    "cni-add.cache.after",
    "cni-add.plugin.after",
    "cni-add.plugin.before",
    "cni-add.record.after",
    "cni-add.record.before",
    "cni-add.result.after",
    "cni-add.result.before",
    "cni-claim.after",
    "cni-claim.before",
    "cni-claim.bind.before",
    "cni-del.plugin.after",
    "cni-del.plugin.before",
    "cni-del.stopped.after",
    "cni-del.stopped.before",
    "cni-job.begin",
    "cni-job.done.before",
    "cni-job.end.after",
    "cni-job.failed",
    "cni-job.fork.after",
    "cni-job.fork.before",
    "cni-job.own.after",
    "cni-job.own.before",
    "cni-job.park.after",
    "cni-job.park.before",
    "cni-plugin.add.before",
    "cni-plugin.answer.after",
    "cni-plugin.answer.before",
    "cni-plugin.del.before",
    "cni-plugin.release.after",
    "commit.after",
    "commit.before",
    "container.abandon.before",
    "container.created.process",
    "container.exit.after",
    "container.exit.before",
    "container.forget.after",
    "container.forget.before",
    "container.kill.before",
    "container.record.after",
    "container.record.before",
    "delete.answer.after",
    "delete.answer.before",
    "delete.ask.before",
    "delete.finish.before",
    "delete.fork.after",
    "delete.fork.before",
    "delete.leaving",
    "delete.rescue.before",
    "delete.sockets.before",
    "end.socket.after",
    "end.socket.before",
    "exec.after",
    "exec.before",
    "files.bind.before",
    "files.make.after",
    "files.make.before",
    "files.remove.after",
    "files.remove.before",
    "files.remove.half",
    "files.shm.after",
    "files.shm.before",
    "gc.record.before",
    "gc.settle.before",
    "helper.guard",
    "helper.process",
    "infra.clone.after",
    "infra.clone.before",
    "infra.cloned",
    "infra.cloned.process",
    "infra.kill.after",
    "infra.kill.before",
    "infra.process",
    "infra.run.after",
    "infra.run.before",
    "infra.set-up",
    "journal.remove.after",
    "journal.remove.before",
    "journal.write.after",
    "journal.write.before",
    "journal.write.half",
    "keeper.begin",
    "keeper.try.before",
    "kept.write.half",
    "netns.link.after",
    "netns.make.after",
    "netns.make.before",
    "netns.pin.after",
    "netns.pin.before",
    "netns.unpin.after",
    "netns.unpin.before",
    "network.hold.after",
    "network.hold.before",
    "park.after",
    "pins.make.after",
    "pins.make.before",
    "pins.pin.after",
    "pins.remove.after",
    "pins.remove.before",
    "pod.take.after",
    "pod.take.before",
    "record.clear.file",
    "record.remove.before",
    "record.remove.half",
    "record.write.after",
    "record.write.before",
    "record.write.half",
    "rescue.close.before",
    "rescue.lock.after",
    "rescue.network.before",
    "rescue.socket.before",
    "roll-back.before",
    "rootfs.mount.after",
    "rootfs.unmount.after",
    "rootfs.unmount.before",
    "runtime-create.after",
    "runtime-create.before",
    "runtime-delete.before",
    "runtime-start.after",
    "runtime-start.before",
    "salvage.before",
    "salvage.close.before",
    "salvage.network.before",
    "shutdown.after",
    "shutdown.close.before",
    "shutdown.containers.before",
    "shutdown.network.before",
    "start.address.before",
    "start.answer.after",
    "start.answer.before",
    "start.claim.after",
    "start.claim.before",
    "start.fork.after",
    "start.fork.before",
    "start.word.after",
    "stop.containers.after",
    "stop.containers.before",
    "stop.record.after",
    "stop.record.before",
    "strays.kill.before",
    "supervisor.begin",
    "supervisor.ready.after",
    "supervisor.ready.before",
];

#[cfg(test)]
mod tests {
    use super::*;

    use std::collections::BTreeSet;
    use std::fs;
    use std::path::Path;

    /// What stands between the quotes behind `failpoint::`, and the two names that `process::helper` chooses from.
    fn in_the_source(dir: &Path, found: &mut BTreeSet<String>) {
        for entry in fs::read_dir(dir).unwrap().flatten() {
            let path = entry.path();
            if path.is_dir() {
                in_the_source(&path, found);
                continue;
            }
            let text = fs::read_to_string(&path).unwrap();
            for rest in text.split("failpoint::").skip(1) {
                let call = ["hit(", "pass(", "reach(", "child("];
                let Some(name) = call.iter().find_map(|c| rest.strip_prefix(c)) else {
                    continue;
                };
                if let Some(name) = name.trim_start().strip_prefix('"') {
                    let name = name.split('"').next().unwrap_or_default();
                    found.insert(name.to_owned());
                }
            }
        }
    }

    #[test]
    fn the_table_has_every_point_of_the_source_and_no_other() {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
        let mut found = BTreeSet::from(["helper.guard", "helper.process"].map(str::to_owned));
        in_the_source(&source, &mut found);
        let found: Vec<&str> = found.iter().map(String::as_str).collect();
        assert_eq!(found, POINTS);
    }
}
