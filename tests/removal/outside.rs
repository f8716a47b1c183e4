//! Things done to a pod behind its supervisor's back: its cgroup is killed, its supervisor stands still, its bundle cannot
//! be written to.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sys::signal::Signal;
use podvisor::client;
use podvisor::proto::task_v3::shim as task;
use serde_json::json;

use crate::daemon::signal;
use crate::rig::{self, Pod, container};
use crate::support::{Snapshot, cni, eventually, podvisor, rootfs, sandboxed};

/// FL-055, FL-086d: everything in the pod's cgroup is killed by somebody; processes that nobody knows are in it, too.
#[test]
fn a_pod_whose_cgroup_is_killed_from_outside_tells_it_and_gives_everything_back() {
    sandboxed(
        "outside::a_pod_whose_cgroup_is_killed_from_outside_tells_it_and_gives_everything_back",
        || {
            let (plugin, rootfs) = (rig::fake_network(), rootfs::make());
            let before = Snapshot::take();
            let pod = Pod::up("p1");
            let bundle = container("c1", "sleep 1000 & sleep 1000");
            pod.probe().run_task(&bundle, &rootfs);
            let record = pod.record().unwrap();
            let supervisor = record.supervisor.unwrap().pid;
            let waits = pod.aside(|probe| probe.wait("p1"));
            // As `cgroup.kill` does it, in whichever hierarchy: every process in and below the pod's cgroups.
            let infra = record.infra.unwrap().pid;
            let mut all = vec![infra];
            all.extend(
                record
                    .containers
                    .values()
                    .filter_map(|c| c.init)
                    .map(|i| i.pid),
            );
            for dir in all.clone().into_iter().flat_map(cgroup_dirs) {
                let procs = fs::read_to_string(dir.join("cgroup.procs")).unwrap_or_default();
                all.extend(procs.lines().filter_map(|p| p.parse::<i32>().ok()));
            }
            all.sort_unstable();
            all.dedup();
            assert!(all.len() >= 3 && !all.contains(&supervisor), "{all:?}");
            for pid in &all {
                let _ = nix::sys::signal::kill(nix::unistd::Pid::from_raw(*pid), Signal::SIGKILL);
            }
            assert_eq!(waits.join().unwrap().unwrap(), 137);
            eventually(rig::BOUND, "it is not ready", || {
                (pod.probe().status("p1").ok()?.0 == "SANDBOX_NOTREADY").then_some(())
            });
            eventually(rig::BOUND, "its container has ended", || {
                (pod.probe().task_state("c1").ok()? == "STOPPED").then_some(())
            });
            // A network of ours is given back without being asked for.
            rig::called(&plugin, "DEL", 1);
            pod.end();
            rig::gone(supervisor);
            before.assert_unchanged();
            assert_eq!((plugin.count("ADD"), plugin.count("DEL")), (1, 1));
        },
    );
}

fn cgroup_dirs(pid: i32) -> Vec<PathBuf> {
    let table = fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap();
    let mut found = Vec::new();
    for root in crate::support::cgroup_mounts() {
        for line in table.lines() {
            let path = line.splitn(3, ':').nth(2).unwrap().trim_start_matches('/');
            let dir = root.join(path);
            let holds = fs::read_to_string(dir.join("cgroup.procs"))
                .is_ok_and(|procs| procs.lines().any(|p| p == pid.to_string()));
            // Not those that everybody is in.
            let own = fs::read_to_string(dir.join("cgroup.procs"))
                .is_ok_and(|procs| !procs.lines().any(|p| p == std::process::id().to_string()));
            if holds && own {
                found.push(dir);
            }
        }
    }
    found
}

/// FL-073: a supervisor that stands still holds the one address there is; by force it is ended first, then the address goes.
#[test]
fn the_one_address_is_free_only_when_a_supervisor_that_stands_still_has_been_ended() {
    sandboxed(
        "outside::the_one_address_is_free_only_when_a_supervisor_that_stands_still_has_been_ended",
        || {
            // One address beside the gateway's.
            let plugin = json!({
                "type": "bridge", "bridge": "pvone0", "isGateway": true, "ipMasq": false,
                "ipam": { "type": "host-local", "ranges": [[{
                    "subnet": "10.85.0.0/24", "rangeStart": "10.85.0.2", "rangeEnd": "10.85.0.2"
                }]] }
            });
            cni::network("one", vec![plugin]).write();
            let made = std::process::Command::new("ip")
                .args(["link", "add", "pvone0", "type", "bridge"])
                .status();
            assert!(made.unwrap().success());
            let before = Snapshot::take();
            podvisor(&["create", "--name", "first"]).ok();
            let supervisor = crate::daemon::supervisor();
            signal(supervisor, Signal::SIGSTOP);
            podvisor(&["create", "--name", "second"])
                .code_is(125)
                .fails_with("10.85.0");
            podvisor(&["rm", "-f", "first"]).ok();
            assert!(!rig::alive(supervisor));
            podvisor(&["create", "--name", "second"]).ok();
            let shown = podvisor(&["ps"]).ok().stdout;
            assert!(shown.contains("10.85.0.2"), "{shown}");
            podvisor(&["rm", "-f", "second"]).ok();
            before.assert_unchanged();
        },
    );
}

/// The daemon's file system has become read-only: what is to be removed is removed.
#[test]
fn a_bundle_that_cannot_be_written_to_keeps_no_pod_from_being_removed() {
    sandboxed(
        "outside::a_bundle_that_cannot_be_written_to_keeps_no_pod_from_being_removed",
        || {
            let (plugin, rootfs) = (rig::fake_network(), rootfs::make());
            let before = Snapshot::take();
            let dir = Path::new("/run/bundles");
            let none = None::<&str>;
            for killed in [false, true] {
                fs::create_dir_all(dir).unwrap();
                mount(Some("none"), dir, Some("tmpfs"), MsFlags::empty(), none).unwrap();
                let pod = Pod::up("p1");
                let bundle = container("c1", "sleep 1000");
                let pid = pod.probe().run_task(&bundle, &rootfs).cast_signed();
                let read_only = MsFlags::MS_BIND | MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY;
                mount(none, dir, none, read_only, none).unwrap();
                // What cannot be begun says so.
                let late = task::CreateTaskRequest {
                    id: "c2".into(),
                    bundle: "/run/bundles/c2".into(),
                    ..Default::default()
                };
                let probe = pod.probe();
                let call = probe.client.task();
                let told = probe.block(call.create(rig::limit(rig::BOUND), &late));
                let told = client::from_ttrpc("create", told.unwrap_err());
                assert!(told.to_string().contains("c2"), "{told}");
                drop(probe);
                if killed {
                    pod.kill_supervisor();
                    podvisor(&["--namespace", rig::NAMESPACE, "rm", "-f", "p1"]).ok();
                } else {
                    pod.end();
                }
                rig::gone(pid);
                eventually(Duration::from_secs(30), "its directory goes", || {
                    let reason = pod.record().and_then(|r| r.reason);
                    if let Some(reason) = reason {
                        println!("{reason}");
                    }
                    (!pod.dir().exists()).then_some(())
                });
                // Its supervisor may be at its last steps.
                umount2(dir, MntFlags::MNT_DETACH).unwrap();
                before.assert_unchanged();
            }
            assert_eq!((plugin.count("ADD"), plugin.count("DEL")), (2, 2));
        },
    );
}

/// What a daemon asks for as it takes supervisors over, whatever the id is that of.
#[test]
fn connect_is_answered_for_any_id_and_what_is_no_task_is_not_found() {
    sandboxed(
        "outside::connect_is_answered_for_any_id_and_what_is_no_task_is_not_found",
        || {
            let (_plugin, rootfs) = (rig::fake_network(), rootfs::make());
            let before = Snapshot::take();
            let pod = Pod::up("p1");
            let probe = pod.probe();
            let supervisor = pod.supervisor();
            let bundles = ["created", "running", "exited"].map(|id| {
                let script = if id == "exited" {
                    "exit 4"
                } else {
                    "sleep 1000"
                };
                container(id, script)
            });
            for bundle in &bundles {
                probe.create_task(bundle, &rootfs).unwrap();
                if bundle.id != "created" {
                    probe.start_task(&bundle.id).unwrap();
                }
            }
            eventually(rig::BOUND, "it has ended", || {
                (probe.task_state("exited").unwrap() == "STOPPED").then_some(())
            });
            let call = probe.client.task();
            let limit = || rig::limit(rig::BOUND);
            for id in ["p1", "nobody", "created", "running", "exited"] {
                let request = task::ConnectRequest {
                    id: id.into(),
                    ..Default::default()
                };
                let answer = probe.block(call.connect(limit(), &request)).unwrap();
                assert_eq!(answer.shim_pid.cast_signed(), supervisor, "{id}");
                // The pod is no task, and neither is what nobody has made.
                let is_task = !["p1", "nobody"].contains(&id);
                assert_eq!(probe.task_state(id).is_ok(), is_task, "{id}");
                let pids = task::PidsRequest {
                    id: id.into(),
                    ..Default::default()
                };
                let pids = probe.block(call.pids(limit(), &pids));
                let stats = task::StatsRequest {
                    id: id.into(),
                    ..Default::default()
                };
                let stats = probe.block(call.stats(limit(), &stats));
                if !is_task {
                    for error in [pids.map(drop).unwrap_err(), stats.map(drop).unwrap_err()] {
                        let error = client::from_ttrpc("ask", error);
                        assert_eq!(
                            error.kind(),
                            podvisor::error::Kind::NotFound,
                            "{id}: {error}"
                        );
                    }
                }
            }
            pod.end();
            before.assert_unchanged();
        },
    );
}
