//! Root filesystems as snapshotters hand them over: a file, layers with other owners, many at once; and that nothing of
//! them is left.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use podvisor::proto::task_v3::mount::Mount;
use podvisor::proto::task_v3::shim as task;
use serde_json::json;

use crate::daemon::{all_gone, shims, signal, supervisor};
use crate::kit::{Shim, block_on, delete, limit, run, wait};
use crate::support::rootfs;
use crate::support::{Snapshot, eventually, require, sandboxed, sh};

fn mount(kind: &str, source: &str, target: &str, options: &[&str]) -> Mount {
    Mount {
        type_: kind.into(),
        source: source.into(),
        target: target.into(),
        options: options.iter().map(|o| (*o).to_owned()).collect(),
        ..Default::default()
    }
}

/// Loop devices over files below `dir`.
fn devices(dir: &str) -> usize {
    let all = fs::read_dir("/sys/block").unwrap().flatten();
    all.filter(|d| {
        let file = fs::read_to_string(d.path().join("loop/backing_file"));
        file.is_ok_and(|f| f.starts_with(dir))
    })
    .count()
}

#[test]
fn a_file_is_a_root_and_its_device_goes_with_it() {
    const NAME: &str = "loops::a_file_is_a_root_and_its_device_goes_with_it";
    sandboxed(NAME, || {
        if !require::tool("runc") || !require::root() {
            return;
        }
        assert!(Path::new("/dev/loop-control").exists(), "the loop driver");
        let dir = tempfile::Builder::new()
            .prefix("pvtest-loop-")
            .tempdir()
            .unwrap();
        let (dir, image) = (dir.path().display(), dir.path().join("image"));
        let size = 16 << 20;
        fs::File::create(&image).unwrap().set_len(size).unwrap();
        let mut make = Command::new("busybox");
        make.args(["mke2fs", "-F"]).arg(&image);
        crate::support::run(&mut make, Duration::from_secs(60)).ok();
        let rootfs = rootfs::make();
        // Filled through our own mount, writable.
        let fill = mount("ext2", &image.display().to_string(), "", &["loop"]);
        let fill = podvisor::mount::Mount {
            kind: fill.type_,
            source: fill.source,
            target: fill.target,
            options: fill.options,
        };
        fs::create_dir("/run/filled").unwrap();
        let (to, scratch) = (Path::new("/run/filled"), Path::new("/run/scratch"));
        podvisor::mount::mount_all(&[fill], to, scratch, &|_, _| Ok(())).unwrap();
        assert_eq!(devices(&dir.to_string()), 1);
        sh(&format!("cp -a {}/. /run/filled/", rootfs.str()));
        podvisor::mount::unmount_tree(Path::new("/run/filled")).unwrap();
        fs::remove_dir("/run/filled").unwrap();
        let freed = || {
            eventually(Duration::from_secs(20), "the device is freed", || {
                (devices(&dir.to_string()) == 0).then_some(())
            })
        };
        freed();

        let before = Snapshot::take();
        let shim = Shim::launch("touch /f; grep ' / ' /proc/mounts", |b| b);
        let out = shim.bundle.dir.join("out");
        block_on(async {
            let client = shim.client().await;
            // One that fails late leaves no device either.
            let request = task::CreateTaskRequest {
                rootfs: vec![
                    mount("ext4", &image.display().to_string(), "", &["loop", "ro"]),
                    mount("nosuchfs", "x", "tmp", &[]),
                ],
                ..shim.request()
            };
            let error = client.task().create(limit(), &request).await.unwrap_err();
            assert!(
                error.to_string().contains("mount 2 of 2 (nosuchfs)"),
                "{error}"
            );
            freed();
            let request = task::CreateTaskRequest {
                rootfs: vec![
                    mount("ext4", &image.display().to_string(), "", &["loop", "ro"]),
                    mount("tmpfs", "tmpfs", "tmp", &["size=1m"]),
                ],
                stdout: format!("file://{}", out.display()),
                ..shim.request()
            };
            run(&client, &request).await;
            wait(&client, "").await;
            delete(&client, "").await;
            drop(client);
            shim.end().await;
        });
        freed();
        let told = fs::read_to_string(out).unwrap();
        assert!(told.contains("ext4 ro"), "{told}");
        let _ = fs::remove_dir_all("/run/bundles");
        before.assert_unchanged();
    });
}

#[test]
fn a_root_with_mapped_layers_belongs_to_the_containers_root() {
    const NAME: &str = "loops::a_root_with_mapped_layers_belongs_to_the_containers_root";
    sandboxed(NAME, || {
        if !require::tool("runc") {
            return;
        }
        let before = Snapshot::take();
        let script = "stat -c %u:%g /bin/busybox; touch /new && stat -c %u:%g /new; id -u";
        let shim = Shim::launch(script, |b| b);
        shim.edit(
            |spec| {
                let map = json!([{"containerID": 0, "hostID": 100_000, "size": 65536}]);
                spec["linux"]["uidMappings"] = map.clone();
                spec["linux"]["gidMappings"] = map;
                let namespaces = spec["linux"]["namespaces"].as_array_mut().unwrap();
                namespaces.push(json!({"type": "user"}));
            },
            script,
        );
        // Snapshotters chown the upper directory and map the layers.
        let top = tempfile::Builder::new()
            .prefix("pvtest-upper-")
            .tempdir()
            .unwrap();
        let dir = |name: &str| {
            let path = top.path().join(name);
            fs::create_dir(&path).unwrap();
            std::os::unix::fs::chown(&path, Some(100_000), Some(100_000)).unwrap();
            path.display().to_string()
        };
        for path in [top.path(), Path::new("/run/bundles"), &shim.bundle.dir] {
            fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
        }
        let out = shim.bundle.dir.join("out");
        block_on(async {
            let client = shim.client().await;
            let request = task::CreateTaskRequest {
                rootfs: vec![mount(
                    "overlay",
                    "overlay",
                    "",
                    &[
                        &format!("workdir={}", dir("work")),
                        &format!("upperdir={}", dir("upper")),
                        &format!("lowerdir={}", shim.rootfs.str()),
                        "uidmap=0:100000:65536",
                        "gidmap=0:100000:65536",
                    ],
                )],
                stdout: format!("file://{}", out.display()),
                ..shim.request()
            };
            match client.task().create(limit(), &request).await {
                Ok(_) => {
                    crate::kit::start(&client, "").await;
                    assert_eq!(wait(&client, "").await, 0);
                    let told = fs::read_to_string(&out).unwrap();
                    assert_eq!(told, "0:0\n0:0\n0\n");
                    assert!(!shim.bundle.dir.join("runtime-tmp/layers").exists());
                    delete(&client, "").await;
                }
                // Of a filesystem that this kernel cannot map.
                Err(e) => assert!(e.to_string().contains("cannot map the ids"), "{e}"),
            }
            drop(client);
            shim.end().await;
        });
        let _ = fs::remove_dir_all("/run/bundles");
        before.assert_unchanged();
    });
}

/// Layers that fuse-overlayfs puts together, as its snapshotter names them; the upper one is `<top>/upper`.
fn fuse(kind: &str, top: &Path, lower: &str) -> Mount {
    let dir = |name: &str| {
        let path = top.join(name);
        fs::create_dir_all(&path).unwrap();
        path.display().to_string()
    };
    let options = [
        format!("workdir={}", dir("work")),
        format!("upperdir={}", dir("upper")),
        format!("lowerdir={lower}"),
    ];
    mount(kind, "overlay", "", &options.each_ref().map(String::as_str))
}

/// Processes of fuse-overlayfs; zombies are none of them.
fn servers() -> usize {
    let processes = fs::read_dir("/proc").unwrap().flatten();
    let line = |dir: &Path| fs::read(dir.join("cmdline")).unwrap_or_default();
    processes
        .filter(|p| line(&p.path()).starts_with(b"fuse-overlayfs"))
        .count()
}

#[test]
fn a_root_of_fuse_is_mounted_by_its_program_and_that_goes_with_it() {
    const NAME: &str = "loops::a_root_of_fuse_is_mounted_by_its_program_and_that_goes_with_it";
    sandboxed(NAME, || {
        let needed = ["runc", "fuse-overlayfs", "mount.fuse3", "mount.fuse"];
        if !needed.iter().all(|tool| require::tool(tool)) {
            return;
        }
        let top = tempfile::Builder::new()
            .prefix("pvtest-fuse-")
            .tempdir()
            .unwrap();
        let no_server = |why: &str| {
            eventually(Duration::from_secs(20), why, || {
                (servers() == 0).then_some(())
            });
        };
        let before = Snapshot::take();
        let shim = Shim::launch("grep ' / ' /proc/mounts; echo new >/new; sleep 1000", |b| b);
        let (out, lower) = (shim.bundle.dir.join("out"), shim.rootfs.str().to_owned());
        let request = |rootfs: Vec<Mount>| task::CreateTaskRequest {
            rootfs,
            stdout: format!("file://{}", out.display()),
            ..shim.request()
        };
        block_on(async {
            let client = shim.client().await;
            let root = |kind: &str| fuse(kind, top.path(), &lower);
            let fails = async |rootfs, words: [&str; 2]| {
                let error = client.task().create(limit(), &request(rootfs)).await;
                let text = error.unwrap_err().to_string();
                assert!(words.iter().all(|word| text.contains(word)), "{text}");
                no_server("nothing is left of a create that failed");
            };
            let missing = mount("fuse3.no-such-fs", "x", "", &[]);
            fails(
                vec![missing],
                ["mount 1 of 1 (fuse3.no-such-fs)", "exit code"],
            )
            .await;
            let late = mount("nosuchfs", "x", "tmp", &[]);
            let words = ["mount 2 of 2 (nosuchfs)", "No such device"];
            fails(vec![root("fuse3.fuse-overlayfs"), late], words).await;

            run(&client, &request(vec![root("fuse3.fuse-overlayfs")])).await;
            let new = top.path().join("upper/new");
            eventually(Duration::from_secs(20), "it writes", || {
                fs::read_to_string(&new).ok().filter(|text| text == "new\n")
            });
            assert_eq!(servers(), 1);
            crate::kit::kill(&client).await;
            assert_eq!(wait(&client, "").await, 137);
            delete(&client, "").await;
            no_server("the filesystem ends with its mount");
            let told = fs::read_to_string(&out).unwrap();
            assert!(told.contains("fuse.fuse-overlayfs"), "{told}");
            fs::remove_file(&out).unwrap();

            // It outlives a supervisor that is killed, and goes with what `delete` cleans up.
            run(&client, &request(vec![root("fuse.fuse-overlayfs")])).await;
            let told = || {
                fs::read_to_string(&out)
                    .ok()
                    .filter(|text| text.contains("fuse"))
            };
            eventually(Duration::from_secs(20), "it runs again", told);
            drop(client);
        });
        signal(supervisor(), nix::sys::signal::Signal::SIGKILL);
        eventually(Duration::from_secs(20), "it dies", || {
            shims().is_empty().then_some(())
        });
        assert_eq!(servers(), 1);
        shim.bundle.delete();
        no_server("delete unmounts");
        all_gone();
        drop(shim);
        let _ = fs::remove_dir_all("/run/bundles");
        before.assert_unchanged();
    });
}

#[test]
fn a_program_that_mounts_does_not_go_on_when_its_supervisor_is_killed() {
    const NAME: &str = "loops::a_program_that_mounts_does_not_go_on_when_its_supervisor_is_killed";
    sandboxed(NAME, || {
        if !["runc", "mount.fuse3"]
            .iter()
            .all(|tool| require::tool(tool))
        {
            return;
        }
        let before = Snapshot::take();
        fs::create_dir("/run/slowly").unwrap();
        let slowly = "#!/bin/sh\necho $$ >/run/slowly/pid.new\nmv /run/slowly/pid.new /run/slowly/pid\n\
                      sleep 4 & wait\nmount -t tmpfs late \"$2\"\n";
        fs::write("/run/slowly/mount.fuse3", slowly).unwrap();
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        fs::set_permissions("/run/slowly/mount.fuse3", mode).unwrap();
        let path = format!("/run/slowly:{}", std::env::var("PATH").unwrap());
        let shim = Shim::launch("true", |bundle| bundle.env("PATH", &path));
        let pid = block_on(async {
            let client = shim.client().await;
            let request = task::CreateTaskRequest {
                rootfs: vec![mount("fuse3.slow-fs", "x", "", &[])],
                ..shim.request()
            };
            let creating = tokio::spawn(async move {
                let task = client.task();
                let _ = task.create(limit(), &request).await;
            });
            let pid = loop {
                match fs::read_to_string("/run/slowly/pid") {
                    Ok(pid) => break pid,
                    Err(_) => tokio::time::sleep(Duration::from_millis(20)).await,
                }
            };
            signal(supervisor(), nix::sys::signal::Signal::SIGKILL);
            let _ = creating.await;
            pid
        });
        shim.bundle.delete();
        let program = Path::new("/proc").join(pid.trim());
        eventually(Duration::from_secs(20), "the program ends", || {
            (!program.exists()).then_some(())
        });
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
        assert!(!mounts.contains(" late "), "{mounts}");
        all_gone();
        drop(shim);
        fs::remove_dir_all("/run/slowly").unwrap();
        let _ = fs::remove_dir_all("/run/bundles");
        before.assert_unchanged();
    });
}
