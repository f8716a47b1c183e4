//! A machine of its own for one test: mount, network, pid, ipc, uts and cgroup namespaces, empty state directories.
//!
//! The test re-executes its own binary inside and waits, so it works under `cargo test` and nextest alike, side by
//! side with other tests. Must never leave anything on the machine: all that is not a namespace is one cgroup
//! subtree `pvtest-<pid>-<test>`, removed afterwards.

use super::require;
use std::ffi::OsStr;
use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

const INSIDE: &str = "PODVISOR_TEST_SANDBOX";
const DONE: &str = "PODVISOR_TEST_SANDBOX_DONE";

/// Runs `body` in a sandbox. `name` is the test's full name (`module::function`), as the runner prints it.
pub fn sandboxed(name: &str, body: impl FnOnce()) {
    Sandbox::new(name).run(body);
}

/// Whether the caller runs inside a sandbox.
pub fn inside() -> bool {
    std::env::var_os(INSIDE).is_some()
}

/// A sandbox that needs other than the usual settings.
#[derive(Debug)]
pub struct Sandbox<'a> {
    name: &'a str,
    bound: Duration,
    keep_unified: bool,
}

impl<'a> Sandbox<'a> {
    /// The settings of [`sandboxed`]: five minutes, no v2 half of a hybrid cgroup layout.
    pub fn new(name: &'a str) -> Self {
        Self {
            name,
            bound: Duration::from_secs(300),
            keep_unified: false,
        }
    }

    /// Everything in the sandbox is killed after this time.
    pub fn bound(mut self, bound: Duration) -> Self {
        self.bound = bound;
        self
    }

    /// Leaves the v2 half of a hybrid cgroup layout mounted.
    pub fn keep_unified(mut self) -> Self {
        self.keep_unified = true;
        self
    }

    /// Runs `body` inside. Panics, with what was printed there, when it panicked or did not end in time.
    pub fn run(self, body: impl FnOnce()) {
        if std::env::var_os(INSIDE).as_deref() == Some(OsStr::new(self.name)) {
            body();
            fs::write(std::env::var_os(DONE).unwrap(), "").unwrap();
            return;
        }
        if !require::root() {
            return;
        }
        let dir = tempfile::Builder::new()
            .prefix("pvtest-")
            .tempdir()
            .unwrap();
        let group = cgroup_name(self.name);
        let status = self.run_inside(dir.path(), &group);
        println!(
            "{}",
            String::from_utf8_lossy(&fs::read(dir.path().join("out")).unwrap_or_default())
        );
        remove_cgroups(&group);
        assert!(
            status.is_some(),
            "the sandbox did not end within {:?} and was killed",
            self.bound
        );
        assert_eq!(
            status,
            Some((Some(0), None)),
            "(exit code, signal) of the sandbox of {}",
            self.name
        );
        assert!(
            dir.path().join("done").exists(),
            "the sandbox ran no test named {}",
            self.name
        );
    }

    /// Exit code and signal, `None` when it had to be killed.
    fn run_inside(&self, dir: &Path, group: &str) -> Option<(Option<i32>, Option<i32>)> {
        let out = fs::File::create(dir.join("out")).unwrap();
        let mut command = Command::new("setpriv");
        // The whole tree ends with this thread, whatever ends it.
        command.args([
            "--pdeathsig",
            "KILL",
            "bash",
            "-c",
            include_str!("outer.sh"),
            "outer",
            group,
        ]);
        command.args(["bash", "-c", include_str!("init.sh"), "init"]);
        command.arg(std::env::current_exe().unwrap());
        command.args([
            "--exact",
            self.name,
            "--nocapture",
            "--include-ignored",
            "--test-threads",
            "1",
        ]);
        command.env(INSIDE, self.name).env(DONE, dir.join("done"));
        command.env(
            "PATH",
            std::env::var("PATH").unwrap_or_default() + ":/usr/sbin:/sbin",
        );
        if self.keep_unified {
            command.env("SANDBOX_KEEP_UNIFIED", "1");
        }
        command
            .stdin(Stdio::null())
            .stderr(out.try_clone().unwrap())
            .stdout(out);
        let mut child = command.spawn().unwrap();
        let end = Instant::now() + self.bound;
        while Instant::now() < end {
            if let Some(status) = child.try_wait().unwrap() {
                return Some((status.code(), status.signal()));
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        child.kill().unwrap();
        child.wait().unwrap();
        None
    }
}

/// The cgroup subtree of a test of this process.
pub fn cgroup_name(test: &str) -> String {
    let test: String = test
        .chars()
        .map(|c| if c.is_ascii_alphanumeric() { c } else { '_' })
        .take(100)
        .collect();
    format!("pvtest-{}-{test}", std::process::id())
}

/// Removes the subtree in every hierarchy. Its processes were killed with their pid namespace, but the kernel takes
/// them out of the cgroup a moment later.
fn remove_cgroups(group: &str) {
    let end = Instant::now() + Duration::from_secs(5);
    loop {
        let left: Vec<PathBuf> = cgroup_roots()
            .iter()
            .map(|root| root.join(group))
            .filter(|dir| dir.exists())
            .collect();
        if left.is_empty() {
            return;
        }
        for dir in &left {
            remove_tree(dir);
        }
        assert!(
            Instant::now() < end,
            "cannot remove the cgroups of the sandbox: {left:?}"
        );
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn remove_tree(dir: &Path) {
    // What a test has frozen does not die before it is thawed.
    for (file, word) in [("freezer.state", "THAWED"), ("cgroup.freeze", "0")] {
        if dir.join(file).exists() {
            let _ = fs::write(dir.join(file), word);
        }
    }
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            remove_tree(&entry.path());
        }
    }
    let _ = fs::remove_dir(dir);
}

/// Where the cgroup hierarchies are mounted, v1 and v2.
pub fn cgroup_roots() -> Vec<PathBuf> {
    let mountinfo = fs::read_to_string("/proc/self/mountinfo").unwrap();
    let root = |line: &str| {
        let (left, right) = line.split_once(" - ")?;
        right
            .starts_with("cgroup")
            .then(|| PathBuf::from(left.split(' ').nth(4).unwrap_or_default()))
    };
    mountinfo.lines().filter_map(root).collect()
}
