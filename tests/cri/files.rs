//! What contrib/kubernetes gives to the owner of a node: the daemon's configuration and the installer.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::support::{require, run};

const SHIM: &str = "containerd-shim-podvisor-v1";

fn contrib(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("contrib/kubernetes")
        .join(name)
}

/// The runtimes a daemon knows with this configuration, each with its sandboxer.
fn runtimes(peer: &str, config: &str) -> Option<Vec<String>> {
    let peer = require::peer(peer)?;
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("config.toml");
    fs::write(&file, config).unwrap();
    let mut command = Command::new(peer.bin.join("containerd"));
    command.arg("--config").arg(&file).args(["config", "dump"]);
    let dump = run(&mut command, Duration::from_secs(60)).ok().stdout;
    let mut known = Vec::new();
    for line in dump.lines().map(str::trim) {
        if let Some((_, name)) = line
            .trim_end_matches(']')
            .split_once(".containerd.runtimes.")
        {
            if !name.contains('.') {
                known.push(name.to_owned());
            }
        } else if let (Some(mode), Some(last)) =
            (line.strip_prefix("sandboxer = "), known.last_mut())
        {
            *last += &format!(" {}", mode.trim_matches(['\'', '"']));
        }
    }
    known.sort();
    Some(known)
}

#[test]
fn a_daemon_reads_the_drop_in_and_keeps_its_own_runtime() {
    let drop_in = contrib("containerd.toml");
    let config = format!("version = 3\nimports = [{drop_in:?}]\n");
    if let Some(known) = runtimes("containerd-2.1", &config) {
        assert_eq!(
            known,
            [
                "podvisor shim",
                "podvisor-pod podsandbox",
                "runc podsandbox"
            ]
        );
    }
    let config = fs::read_to_string(contrib("containerd-1.toml")).unwrap();
    for peer in ["containerd-1.6", "containerd-1.7"] {
        if let Some(known) = runtimes(peer, &config) {
            let names = known.iter().map(|k| k.split(' ').next().unwrap());
            assert_eq!(names.collect::<Vec<_>>(), ["podvisor", "runc"], "{peer}");
        }
    }
}

#[test]
fn the_installer_renames_into_place_and_goes_back() {
    let dir = tempfile::tempdir().unwrap();
    let (one, two, to) = (
        dir.path().join("1"),
        dir.path().join("2"),
        dir.path().join("bin"),
    );
    for (from, text) in [(&one, "first"), (&two, "second")] {
        fs::create_dir(from).unwrap();
        fs::write(from.join(SHIM), text).unwrap();
    }
    let install = |from: &Path| {
        let mut command = Command::new(contrib("install"));
        run(command.arg(from).arg(&to), Duration::from_secs(60)).ok();
    };
    let text = || fs::read_to_string(to.join(SHIM)).unwrap_or_default();
    let names = || {
        let entries = fs::read_dir(&to).unwrap().flatten();
        let mut names: Vec<_> = entries
            .map(|e| e.file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    };
    let inode = || fs::metadata(to.join(SHIM)).unwrap().ino();
    install(&one);
    assert_eq!((text().as_str(), names().len()), ("first", 2));
    let first = inode();
    install(&one);
    assert_eq!(inode(), first, "what is there already stays");
    // Whoever has the old one open, as a supervisor has, goes on with it.
    let running = fs::File::open(to.join(SHIM)).unwrap();
    install(&two);
    assert_eq!(text(), "second");
    assert_ne!(inode(), first);
    assert_eq!(std::io::read_to_string(running).unwrap(), "first");
    assert_eq!(names(), [SHIM.to_owned(), format!("{SHIM}.before")]);
    for _ in 0..2 {
        install(Path::new("--back"));
        assert_eq!((text().as_str(), inode()), ("first", first));
        assert_eq!(names(), [SHIM]);
    }
    fs::remove_dir_all(&to).unwrap();
    install(&one);
    for _ in 0..2 {
        install(Path::new("--back"));
        assert!(names().is_empty(), "{:?}", names());
    }
}
