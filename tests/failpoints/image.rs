//! An image for pods' first container, made of busybox: an OCI layout in a tar, as `ctr images import` takes it.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::cri::Cri;
use crate::support::{Containerd, eventually, require};

/// What it is called.
pub const PAUSE: &str = "localhost/podvisor-pause:1";

/// Gives it to a daemon, and waits until CRI knows it.
pub fn import(daemon: &Containerd) {
    let dir = tempfile::tempdir().unwrap();
    let tar = pause(dir.path());
    let import = ["-n", "k8s.io", "images", "import", tar.to_str().unwrap()];
    daemon.ctr(&import).ok();
    let mut cri = Cri::of(daemon);
    eventually(Duration::from_secs(90), "CRI knows the image", || {
        cri.has_image(PAUSE).then_some(())
    });
}

/// Makes the tar in `dir`.
fn pause(dir: &Path) -> PathBuf {
    let (root, layout) = (dir.join("root"), dir.join("layout"));
    let blobs = layout.join("blobs/sha256");
    fs::create_dir_all(root.join("bin")).unwrap();
    fs::create_dir_all(&blobs).unwrap();
    let busybox = require::find("busybox").expect("busybox-static: run scripts/setup");
    fs::copy(&busybox, root.join("bin/busybox")).unwrap();
    add_links_and_users(&busybox, &root);
    let layer_file = dir.join("layer.tar");
    tar(&root, &layer_file);
    let layer = fs::read(&layer_file).unwrap();
    let layer_digest = digest(&layer);
    let add = |bytes: &[u8], kind: &str| -> Value {
        let digest = digest(bytes);
        fs::write(blobs.join(digest.trim_start_matches("sha256:")), bytes).unwrap();
        json!({"mediaType": kind, "digest": digest, "size": bytes.len()})
    };
    let architecture = match std::env::consts::ARCH {
        "aarch64" => "arm64",
        _ => "amd64",
    };
    let config = json!({
        "architecture": architecture, "os": "linux",
        "config": {"Entrypoint": ["/bin/busybox", "sleep", "100000"], "Env": ["PATH=/bin"]},
        "rootfs": {"type": "layers", "diff_ids": [layer_digest]},
    });
    let config = add(
        config.to_string().as_bytes(),
        "application/vnd.oci.image.config.v1+json",
    );
    let layer = add(&layer, "application/vnd.oci.image.layer.v1.tar");
    let kind = "application/vnd.oci.image.manifest.v1+json";
    let manifest = json!({
        "schemaVersion": 2, "mediaType": kind, "config": config, "layers": [layer],
    });
    let mut manifest = add(manifest.to_string().as_bytes(), kind);
    manifest["annotations"] = json!({"io.containerd.image.name": PAUSE});
    let index = json!({"schemaVersion": 2, "manifests": [manifest]});
    fs::write(layout.join("index.json"), index.to_string()).unwrap();
    fs::write(
        layout.join("oci-layout"),
        r#"{"imageLayoutVersion":"1.0.0"}"#,
    )
    .unwrap();
    let image = dir.join("pause.tar");
    tar(&layout, &image);
    image
}

/// busybox under all its names, and two users.
fn add_links_and_users(busybox: &Path, root: &Path) {
    let list = Command::new(busybox).arg("--list").output().unwrap();
    let names = String::from_utf8(list.stdout).unwrap();
    for name in names.lines().filter(|name| *name != "busybox") {
        symlink("busybox", root.join("bin").join(name)).unwrap();
    }
    fs::create_dir(root.join("etc")).unwrap();
    let users = "root:x:0:0:root:/:/bin/sh\nweb:x:1000:1001:web:/:/bin/sh\n";
    fs::write(root.join("etc/passwd"), users).unwrap();
    let groups = "root:x:0:\nweb:x:1001:\nlogs:x:1002:web\n";
    fs::write(root.join("etc/group"), groups).unwrap();
}

fn tar(dir: &Path, file: &Path) {
    let made = Command::new("tar")
        .arg("-cf")
        .arg(file)
        .arg("-C")
        .arg(dir)
        .args(["--owner=0", "--group=0", "."])
        .output()
        .unwrap();
    assert!(made.status.success(), "{made:?}");
}

fn digest(bytes: &[u8]) -> String {
    let hex: String = Sha256::digest(bytes)
        .iter()
        .map(|b| format!("{b:02x}"))
        .collect();
    format!("sha256:{hex}")
}
