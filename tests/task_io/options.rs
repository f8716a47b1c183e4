//! Runtime options, in each of the forms they come in, each with what the OCI runtime was told.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use podvisor::proto::any;
use podvisor::proto::runc_options::oci::Options as RuncOptions;
use podvisor::proto::runtimeoptions::runtimeoptions::Options as TomlOptions;
use podvisor::proto::task_v3::shim as task;
use protobuf::well_known_types::any::Any;

use crate::kit::{Shim, block_on, delete, limit, recorder, run, start, wait};
use crate::support::fake::{Call, Fake};
use crate::support::{Containerd, Snapshot, require, rootfs, sandboxed};

const RUNTIME: &str = "io.containerd.podvisor.v1";

fn runc(options: RuncOptions) -> Option<Any> {
    Some(any::pack(any::RUNC_OPTIONS, &options).unwrap())
}

fn toml(path: &str, body: &str) -> Option<Any> {
    let options = TomlOptions {
        config_path: path.into(),
        config_body: body.into(),
        ..Default::default()
    };
    Some(any::pack(any::RUNTIME_OPTIONS, &options).unwrap())
}

fn has(call: &Call, words: &[&str]) -> bool {
    call.args.windows(words.len()).any(|w| w == words)
}

/// The one call of a verb.
fn the(fake: &Fake, verb: &str) -> Call {
    let mut calls = fake.calls_of(verb);
    assert_eq!(calls.len(), 1, "{calls:?}");
    calls.remove(0)
}

#[test]
fn each_option_reaches_the_runtime_in_each_form() {
    const NAME: &str = "options::each_option_reaches_the_runtime_in_each_form";
    sandboxed(NAME, || {
        if !require::tool("runc") {
            return;
        }
        let fake = recorder("recorder");
        // What the runtime is handed: it gives the streams to the container's user itself.
        let binary = "/run/fakes/owner".to_owned();
        let script = format!(
            "#!/bin/sh\nexec 3>&1\nfor word; do [ $word != create ] || stat -L -c %u:%g /proc/self/fd/3 >/run/its-owner; done\n\
             exec {} \"$@\" 3>&-\n",
            fake.path.display()
        );
        fs::write(&binary, script).unwrap();
        fs::set_permissions(&binary, fs::Permissions::from_mode(0o755)).unwrap();
        let text = format!(
            "BinaryName = \"{binary}\"\nRoot = \"/run/its-root\"\nNoPivotRoot = true\nNoNewKeyring = true\n\
             IoUid = 1234\nIoGid = 2345\nSomethingElse = [1]\n"
        );
        fs::write("/run/its-options.toml", &text).unwrap();
        let settings = format!(
            "[options]\nbinary_name = \"{binary}\"\nroot = \"/run/its-root\"\nno_pivot_root = true\n\
             no_new_keyring = true\nio_uid = 1234\nio_gid = 2345\n"
        );
        let packed = RuncOptions {
            binary_name: binary.clone(),
            root: "/run/its-root".into(),
            no_pivot_root: true,
            no_new_keyring: true,
            io_uid: 1234,
            io_gid: 2345,
            // Of another's business.
            task_api_address: "ttrpc+unix:///nowhere".into(),
            task_api_version: 3,
            criu_image_path: "/nowhere".into(),
            ..Default::default()
        };
        let forms = [
            ("runc", runc(packed), ""),
            ("body", toml("", &text), ""),
            (
                "path",
                toml("/run/its-options.toml", "BinaryName = \"none\""),
                "",
            ),
            ("file", None, settings.as_str()),
            (
                "empty",
                Some(any::raw(any::EMPTY, Vec::new())),
                settings.as_str(),
            ),
        ];
        for (form, options, settings) in forms {
            println!("--- {form}");
            let before = Snapshot::take();
            fake.forget();
            let shim = Shim::launch("echo done", |b| match settings {
                "" => b,
                toml => b.settings(toml),
            });
            let out = "/run/its-output";
            nix::unistd::mkfifo(out, nix::sys::stat::Mode::S_IRWXU).unwrap();
            block_on(async {
                let client = shim.client().await;
                let reading = tokio::task::spawn_blocking(move || fs::read_to_string(out).unwrap());
                let request = task::CreateTaskRequest {
                    options: options.into(),
                    stdout: out.into(),
                    ..shim.request()
                };
                client.task().create(limit(), &request).await.unwrap();
                assert!(Path::new("/run/its-root/test/c").is_dir());
                start(&client, "").await;
                assert_eq!(wait(&client, "").await, 0);
                assert_eq!(reading.await.unwrap(), "done\n", "{form}");
                delete(&client, "").await;
                drop(client);
                shim.end().await;
            });
            let create = the(&fake, "CREATE");
            assert!(
                has(&create, &["--root", "/run/its-root/test"]),
                "{create:?}"
            );
            assert!(has(&create, &["--no-pivot"]) && has(&create, &["--no-new-keyring"]));
            assert!(!has(&create, &["--systemd-cgroup"]));
            assert_eq!(create.var("NOTIFY_SOCKET"), "");
            for verb in ["START", "DELETE"] {
                assert!(has(&the(&fake, verb), &["--root", "/run/its-root/test"]));
            }
            let owner = fs::read_to_string("/run/its-owner").unwrap();
            assert_eq!(owner, "1234:2345\n", "{form}");
            fs::remove_file(out).unwrap();
            let _ = fs::remove_dir_all("/run/bundles");
            before.assert_unchanged();
        }
    });
}

#[test]
fn the_systemd_driver_without_systemd_is_the_runtimes_own_error() {
    const NAME: &str = "options::the_systemd_driver_without_systemd_is_the_runtimes_own_error";
    sandboxed(NAME, || {
        if !require::tool("runc") {
            return;
        }
        let fake = recorder("recorder");
        let before = Snapshot::take();
        let shim = Shim::launch("true", |b| b);
        shim.edit(
            |spec| spec["linux"]["cgroupsPath"] = "system.slice:podvisor:c".into(),
            "true",
        );
        block_on(async {
            let client = shim.client().await;
            let request = task::CreateTaskRequest {
                options: runc(RuncOptions {
                    binary_name: fake.path.display().to_string(),
                    systemd_cgroup: true,
                    ..Default::default()
                })
                .into(),
                ..shim.request()
            };
            let error = client.task().create(limit(), &request).await.unwrap_err();
            assert!(error.to_string().contains("systemd"), "{error}");
            assert!(has(&the(&fake, "CREATE"), &["--systemd-cgroup"]));
            // Options that name nothing that is there are told with the name, in quotes.
            for (options, told) in [
                (toml("", "BinaryName = \"no-runc\""), "\"no-runc\""),
                (toml("/nowhere.toml", ""), "/nowhere.toml"),
                (toml("", "Root = \"relative\""), "\"relative\""),
                (toml("", "IoUid = \"me\""), "IoUid"),
                (
                    Some(any::raw("some.other.Options", vec![1])),
                    "some.other.Options",
                ),
            ] {
                let request = task::CreateTaskRequest {
                    options: options.into(),
                    ..shim.request()
                };
                let error = client.task().create(limit(), &request).await.unwrap_err();
                let error = podvisor::client::from_ttrpc("create", error).to_string();
                assert!(error.contains(told), "{told}: {error}");
            }
            drop(client);
            shim.end().await;
        });
        let _ = fs::remove_dir_all("/run/bundles");
        before.assert_unchanged();
    });
}

/// A containerd whose type names lead to our executable: its own name, and that of the Go shim, for which the daemon sends
/// options of the runc family.
fn daemon_with_options(peer: &str, name: &'static str) {
    let peer = peer.to_owned();
    sandboxed(name, move || {
        let Some(peer) = require::peer(&peer) else {
            return;
        };
        let shims = Path::new("/run/shims");
        fs::create_dir(shims).unwrap();
        for as_name in ["containerd-shim-podvisor-v1", "containerd-shim-runc-v2"] {
            fs::copy(crate::support::bin::SHIM, shims.join(as_name)).unwrap();
        }
        let daemon = Containerd::builder(&peer).shims(shims).start();
        let rootfs = rootfs::make();
        let fake = recorder("recorder");
        let before = Snapshot::take();
        let binary = fake.path.display().to_string();
        let by_flags = ["--runc-binary", &binary, "--runc-root", "/run/its-root"];
        let by_flags = [&["--runtime", "io.containerd.runc.v2"], &by_flags[..]].concat();
        fs::write(
            "/run/its-options.toml",
            format!("BinaryName = \"{binary}\"\nRoot = \"/run/its-root\"\n"),
        )
        .unwrap();
        let by_file = [
            "--runtime",
            RUNTIME,
            "--runtime-config-path",
            "/run/its-options.toml",
        ];
        for (id, flags) in [("flags", by_flags), ("file", by_file.to_vec())] {
            fake.forget();
            let rest = ["--rootfs", rootfs.str(), id, "/bin/echo", "hi"];
            let args = [&["run", "--rm"], flags.as_slice(), &rest].concat();
            assert_eq!(daemon.ctr(&args).ok().stdout, "hi\n");
            let create = the(&fake, "CREATE");
            assert!(
                has(&create, &["--root", "/run/its-root/default"]),
                "{create:?}"
            );
        }
        let bad = [
            "run",
            "--rm",
            "--runtime",
            "io.containerd.runc.v2",
            "--runc-binary",
            "no-runc",
        ];
        let args = [&bad[..], &["--rootfs", rootfs.str(), "bad", "true"]].concat();
        daemon.ctr(&args).fails_with("\"no-runc\"");
        let container = ["containers", "rm", "bad"];
        let _ = daemon.ctr(&container);
        before.assert_unchanged();
    });
}

#[test]
fn containerd_1_6_hands_its_options_on() {
    daemon_with_options(
        "containerd-1.6",
        "options::containerd_1_6_hands_its_options_on",
    );
}

#[test]
fn containerd_2_1_hands_its_options_on() {
    daemon_with_options(
        "containerd-2.1",
        "options::containerd_2_1_hands_its_options_on",
    );
}

#[test]
fn a_configured_runtime_serves_a_daemon_that_names_none() {
    const NAME: &str = "options::a_configured_runtime_serves_a_daemon_that_names_none";
    sandboxed(NAME, || {
        if !require::tool("runc") {
            return;
        }
        let fake = recorder("recorder");
        let settings = format!("[options]\nbinary_name = \"{}\"\n", fake.path.display());
        let shim = Shim::launch("exit 6", |b| b.settings(&settings));
        block_on(async {
            let client = shim.client().await;
            run(&client, &shim.request()).await;
            assert_eq!(wait(&client, "").await, 6);
            assert_eq!(the(&fake, "CREATE").verb, "CREATE");
            delete(&client, "").await;
            drop(client);
            shim.end().await;
        });
    });
}
