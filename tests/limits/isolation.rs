//! FL-086n, t and y: what others can reach, what a pod's processes hold, and what is the caller's.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use podvisor::proto::cri::sandbox_config::{NamespaceMode, NamespaceOption};

use crate::daemon::Bundle;
use crate::kit::*;
use crate::support::{Snapshot, cni, fake, podvisor, rootfs, sandboxed};

/// Not a test: what another user's process does.
#[test]
#[ignore = "run by another test, as another user"]
fn connects_as_another_user() {
    let Some(path) = std::env::var_os("SOCKET") else {
        return;
    };
    match UnixStream::connect(path) {
        Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::PermissionDenied),
        Ok(mut stream) => {
            // Let in by the directory's mode, it is refused: the other side closes without a word.
            use std::io::{Read, Write};
            stream.set_read_timeout(Some(BOUND)).unwrap();
            let _ = stream.write_all(&[0; 64]);
            let read = stream.read(&mut [0; 16]);
            assert!(
                matches!(&read, Ok(0))
                    || read
                        .as_ref()
                        .is_err_and(|e| e.kind() == std::io::ErrorKind::ConnectionReset),
                "{read:?}"
            );
        }
    }
}

fn as_another_user(socket: &Path) {
    // The test's own executable may be where others cannot go.
    let copy = Path::new("/run/other-user");
    fs::copy(std::env::current_exe().unwrap(), copy).unwrap();
    fs::set_permissions(copy, fs::Permissions::from_mode(0o755)).unwrap();
    let output = Command::new(copy)
        .args([
            "--exact",
            "isolation::connects_as_another_user",
            "--ignored",
            "--nocapture",
        ])
        .env("SOCKET", socket)
        .current_dir("/")
        .uid(65534)
        .gid(65534)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        output.status.success() && said.contains("1 passed"),
        "{output:?}"
    );
    fs::remove_file(copy).unwrap();
}

/// FL-086n: a socket is a file that only its owner reaches, whatever its caller's directory allows.
#[test]
fn nobody_else_reaches_a_supervisor() {
    sandboxed("isolation::nobody_else_reaches_a_supervisor", || {
        let before = Snapshot::take();
        on(async {
            for bundle in [Bundle::new("p"), Bundle::new("q").without_address()] {
                let pod = Pod::of(bundle);
                let client = pod.connect().await;
                let options = NamespaceOption {
                    network: NamespaceMode::NODE.into(),
                    ..Default::default()
                };
                let mut config = config_with("p", options, &[]);
                config.annotations.clear();
                pod.up(&client, &config).await;
                let modes = (
                    fs::metadata(&pod.socket).unwrap().mode() & 0o7777,
                    fs::metadata(pod.socket.parent().unwrap()).unwrap().mode() & 0o7777,
                );
                assert_eq!(modes, (0o600, 0o700));
                let unix = fs::read_to_string("/proc/net/unix").unwrap();
                let abstracts: Vec<&str> = unix
                    .lines()
                    .filter(|l| {
                        l.split_whitespace()
                            .nth(7)
                            .is_some_and(|p| p.starts_with('@'))
                    })
                    .collect();
                assert!(abstracts.is_empty(), "{abstracts:?}");
                as_another_user(&pod.socket);
                // Somebody loosens the modes: who connects is still looked at.
                fs::set_permissions(&pod.socket, fs::Permissions::from_mode(0o666)).unwrap();
                for dir in pod
                    .socket
                    .ancestors()
                    .skip(1)
                    .take_while(|d| *d != Path::new("/"))
                {
                    fs::set_permissions(dir, fs::Permissions::from_mode(0o755)).unwrap();
                }
                as_another_user(&pod.socket);
                assert_eq!(
                    status(&client, &pod.id).await.unwrap().state,
                    "SANDBOX_READY"
                );
                // From a container on the host's network there is no way to it either.
                let netless = Container::new(
                    &format!("c-{}", pod.id),
                    "grep -c @ /proc/net/unix; ls /run; exit 0",
                    crate::kit::without(&["network"]),
                );
                netless.run(&client).await;
                netless.wait(&client, "").await.unwrap();
                assert_eq!(netless.printed(""), "0\n");
                netless.delete(&client, "").await.unwrap();
                pod.shut(&client).await;
            }
        });
        before.assert_unchanged();
    });
}

/// FL-086t: no process of a pod holds anything of the host.
#[test]
fn processes_of_a_pod_hold_three_descriptors_and_are_inside() {
    sandboxed(
        "isolation::processes_of_a_pod_hold_three_descriptors_and_are_inside",
        || {
            let before = Snapshot::take();
            on(async {
                let pod = Pod::launch("p");
                let client = pod.connect().await;
                let infra = pod.up(&client, &config("p")).await;
                let script =
                    "ls /proc/self/fd | wc -l; readlink /proc/self/cwd; echo said; exec sleep 1000";
                let container = Container::new("c", script, |_| ());
                let init = container.run(&client).await;
                container.says("said");
                // `ls` has the directory it reads open.
                assert_eq!(container.printed(""), "4\n/\nsaid\n");
                container.exec(&client, "e", script, "").await;
                let exec = container.start(&client, "e").await;
                crate::support::eventually(BOUND, "the exec speaks", || {
                    container.printed("e").contains("said").then_some(())
                });
                assert_eq!(container.printed("e"), "4\n/\nsaid\n");
                for pid in [infra, init, exec] {
                    let link = |name: &str| fs::read_link(format!("/proc/{pid}/{name}")).unwrap();
                    let mut open: Vec<(String, PathBuf)> = fs::read_dir(format!("/proc/{pid}/fd"))
                        .unwrap()
                        .flatten()
                        .map(|e| {
                            (
                                e.file_name().into_string().unwrap(),
                                fs::read_link(e.path()).unwrap(),
                            )
                        })
                        .collect();
                    open.sort();
                    let numbers: Vec<&str> = open.iter().map(|(n, _)| n.as_str()).collect();
                    assert_eq!(numbers, ["0", "1", "2"], "{open:?}");
                    assert_eq!(link("cwd"), Path::new("/"), "{pid}");
                    // Its root is not the host's, so that its cwd is inside.
                    let of = |path: &str| {
                        let meta = fs::metadata(path).unwrap();
                        (meta.dev(), meta.ino())
                    };
                    assert_ne!(of(&format!("/proc/{pid}/root/.")), of("/"));
                    assert_eq!(
                        of(&format!("/proc/{pid}/cwd/.")),
                        of(&format!("/proc/{pid}/root/."))
                    );
                }
                container.remove(&client).await;
                pod.shut(&client).await;
            });
            before.assert_unchanged();
        },
    );
}

/// FL-086y, law 6: with a netns given, CNI is the caller's, and the netns stays.
#[test]
fn a_netns_of_the_callers_is_left_alone() {
    sandboxed("isolation::a_netns_of_the_callers_is_left_alone", || {
        cni::network("net", vec![serde_json::json!({"type": "fake"})]).write();
        let net = fake::plugin(Path::new(cni::PLUGINS), "fake");
        let ip = |args: &[&str]| assert!(Command::new("ip").args(args).status().unwrap().success());
        ip(&["netns", "add", "callers"]);
        let before = Snapshot::take();
        let netns = Path::new("/run/netns/callers");
        on(async {
            let id_of = |path: &Path| {
                let meta = fs::metadata(path).unwrap();
                (meta.dev(), meta.ino())
            };
            let callers = id_of(netns);
            for how in ["stop and shutdown", "shutdown", "kill and delete"] {
                let pod = Pod::launch(&format!("p-{}", how.replace(' ', "-")));
                let client = pod.connect().await;
                let mut config = config("p");
                config.annotations.clear();
                let mut request = pod.request(Some(&config));
                request.netns_path = netns.display().to_string();
                create(&client, &request).await.unwrap();
                let infra = start(&client, &pod.id).await.unwrap().pid;
                assert_eq!(id_of(Path::new(&format!("/proc/{infra}/ns/net"))), callers);
                match how {
                    "stop and shutdown" => {
                        stop(&client, &pod.id, 0).await.unwrap();
                        assert_eq!(id_of(netns), callers);
                        pod.shut(&client).await;
                    }
                    "shutdown" => pod.shut(&client).await,
                    _ => {
                        crate::daemon::signal(pod.pid, nix::sys::signal::Signal::SIGKILL);
                        pod.bundle.delete();
                        assert!(!Path::new(&format!("/proc/{infra}")).exists());
                    }
                }
                assert_eq!(id_of(netns), callers, "{how}");
                assert!(net.calls().is_empty(), "{how}: {:?}", net.calls());
            }
        });
        before.assert_unchanged();
        ip(&["netns", "del", "callers"]);
    });
}

/// The same through the command: a pod without a network calls no plugin.
#[test]
fn a_pod_without_a_network_calls_no_plugin() {
    sandboxed("isolation::a_pod_without_a_network_calls_no_plugin", || {
        cni::network("net", vec![serde_json::json!({"type": "fake"})]).write();
        let net = fake::plugin(Path::new(cni::PLUGINS), "fake");
        let rootfs = rootfs::make();
        let run = |kind: &str| {
            podvisor(&[
                "run",
                "--rm",
                "--net",
                kind,
                "--rootfs",
                rootfs.str(),
                "--",
                "/bin/true",
            ])
            .ok()
        };
        // The first one makes directories that stay.
        run("none");
        let before = Snapshot::take();
        run("none");
        run("host");
        assert!(net.calls().is_empty(), "{:?}", net.calls());
        before.assert_unchanged();
    });
}
