//! contrib/kubernetes/daemonset.yaml without a cluster: its own commands, in the image that it describes, on a node of one
//! directory.

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::Duration;

use crate::support::rootfs::{self, Rootfs};
use crate::support::{Snapshot, eventually, require, run, sandboxed, sh};

const YAML: &str = include_str!("../../contrib/kubernetes/daemonset.yaml");
const NAMES: [&str; 3] = ["containerd-shim-podvisor-v1", "podvisor", "podvisor-cni"];
const BOUND: Duration = Duration::from_secs(60);

/// What a test needs to know of one DaemonSet.
#[derive(Debug)]
struct DaemonSet {
    label: String,
    /// Of the init container.
    command: Vec<String>,
    /// Where the init container has the node's directory.
    mounted: String,
    host_path: String,
    stays: Vec<String>,
}

#[test]
fn the_daemonset_installs_by_rename_and_goes_back() {
    sandboxed(
        "daemonset::the_daemonset_installs_by_rename_and_goes_back",
        || {
            if !require::tool("setpriv") {
                return;
            }
            let before = Snapshot::take();
            let [install, back] = daemon_sets();
            assert_eq!([&install.label, &back.label], ["install", "back"]);
            assert_eq!(install.host_path, back.host_path);
            assert!(Path::new(&install.host_path).is_absolute());
            let node = tempfile::tempdir().unwrap();
            let shim = node.path().join(NAMES[0]);
            let inode = |path: &Path| fs::metadata(path).unwrap().ino();

            // An image, twice: a pod that is started again changes nothing.
            let first = Image::new("one");
            first.init(&install, node.path());
            let old = inode(&shim);
            first.init(&install, node.path());
            assert_eq!((inode(&shim), version(&shim)), (old, "one".into()));
            assert_eq!(names(node.path()), NAMES);

            // A new image, while what the old one has brought runs: a file written in place would be busy, or change under it.
            let mut running = Command::new(&shim).arg("1000").spawn().unwrap();
            let second = Image::new("two");
            second.init(&install, node.path());
            assert_eq!(version(&shim), "two");
            let program = PathBuf::from(format!("/proc/{}/exe", running.id()));
            assert_eq!(inode(&program), old);
            assert_eq!(version(&program), "one");
            assert!(running.try_wait().unwrap().is_none());
            end(&mut running);

            // Back, from any image, twice; and once more forward.
            for _ in 0..2 {
                second.init(&back, node.path());
                assert_eq!((inode(&shim), version(&shim)), (old, "one".into()));
                assert_eq!(names(node.path()), NAMES);
            }
            second.init(&install, node.path());
            assert_eq!(version(&shim), "two");
            first.init(&back, node.path());
            assert_eq!(version(&shim), "one");

            // On a node that had nothing, nothing is left.
            let bare = tempfile::tempdir().unwrap();
            first.init(&install, bare.path());
            first.init(&back, bare.path());
            assert_eq!(names(bare.path()), Vec::<String>::new());

            for set in [&install, &back] {
                let mut staying = first.command(&set.stays, "65534").spawn().unwrap();
                let wanted = set.stays.join("\0") + "\0";
                eventually(BOUND, "it is the program that stays", || {
                    let line = fs::read(format!("/proc/{}/cmdline", staying.id())).unwrap();
                    (line == wanted.as_bytes()).then_some(())
                });
                end(&mut staying);
            }
            drop((first, second, node, bare));
            before.assert_unchanged();
        },
    );
}

/// The image of the file's first lines: a busybox, the executables, the installer.
struct Image {
    root: Rootfs,
}

impl Image {
    /// Its executables sleep, and end with the name of their version.
    fn new(version: &str) -> Self {
        let root = rootfs::make();
        let installer = concat!(env!("CARGO_MANIFEST_DIR"), "/contrib/kubernetes/install");
        fs::copy(installer, root.path().join("install")).unwrap();
        fs::create_dir(root.path().join("podvisor")).unwrap();
        for name in NAMES {
            let to = root.path().join("podvisor").join(name);
            fs::copy(require::find("sleep").unwrap(), &to).unwrap();
            let mut file = File::options().append(true).open(&to).unwrap();
            file.write_all(version.as_bytes()).unwrap();
        }
        Self { root }
    }

    /// The init container of a pod of this set, as its security context says: a root that is read-only.
    fn init(&self, set: &DaemonSet, node: &Path) {
        let root = self.root.str();
        let bin = format!("{root}{}", set.mounted);
        fs::create_dir_all(&bin).unwrap();
        sh(&format!(
            "touch {root}/dev/null; mount --bind {root} {root}; mount --bind /dev/null {root}/dev/null; \
             mount --bind {} {bin}; mount -o remount,bind,ro {root}",
            node.display()
        ));
        let mut command = self.command(&set.command, "0");
        let done = run(&mut command, BOUND);
        sh(&format!(
            "umount {bin}; umount {root}/dev/null; umount {root}"
        ));
        assert_eq!((done.code, done.stderr.as_str()), (Some(0), ""), "{set:?}");
    }

    fn command(&self, words: &[String], user: &str) -> Command {
        let mut command = Command::new("setpriv");
        command.args(["--no-new-privs", "chroot", "--userspec"]);
        command.arg(format!("{user}:{user}"));
        command.arg(self.root.path()).args(words);
        command.env_clear().env("PATH", "/bin:/usr/sbin:/usr/bin");
        command
    }
}

/// Both, in the order of the file.
fn daemon_sets() -> [DaemonSet; 2] {
    let all: Vec<DaemonSet> = YAML
        .split("\n---\n")
        .map(|text| {
            let (init, stay) = text.split_once("\n      containers:").unwrap();
            let label = value(init, "nodeSelector: {podvisor: ", "}");
            assert!(init.contains("securityContext: {runAsUser: 0, readOnlyRootFilesystem: true"));
            assert!(
                stay.contains("securityContext: {runAsUser: 65534, readOnlyRootFilesystem: true")
            );
            DaemonSet {
                label,
                command: words(init),
                mounted: value(init, "volumeMounts: [{name: bin, mountPath: ", "}"),
                host_path: value(stay, "{name: bin, hostPath: {path: ", ","),
                stays: words(stay),
            }
        })
        .collect();
    all.try_into().unwrap()
}

/// The one `command: [a, "b"]` of this part.
fn words(text: &str) -> Vec<String> {
    let list = value(text, "command: [", "]");
    let word = |word: &str| word.trim().trim_matches('"').to_owned();
    list.split(',').map(word).collect()
}

fn value(text: &str, before: &str, after: &str) -> String {
    let parts: Vec<&str> = text.split(before).collect();
    assert_eq!(parts.len(), 2, "once: {before}");
    let end = parts[1].find(after).unwrap();
    parts[1][..end].trim_end_matches('}').to_owned()
}

/// What an executable of an image ends with.
fn version(path: &Path) -> String {
    let all = fs::read(path).unwrap();
    String::from_utf8_lossy(&all[all.len() - 3..]).into_owned()
}

/// What a daemon could find there; the copies of before aside.
fn names(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).unwrap().flatten();
    let mut names: Vec<String> = entries
        .map(|e| e.file_name().into_string().unwrap())
        .filter(|name| !name.starts_with('.') && !name.ends_with(".before"))
        .collect();
    names.sort();
    names
}

fn end(child: &mut Child) {
    child.kill().unwrap();
    child.wait().unwrap();
}
