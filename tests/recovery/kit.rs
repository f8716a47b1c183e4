//! A machine for many cells, and one cell: a namespace, a directory of fault rules, commands, and its removal.

use std::collections::BTreeMap;
use std::fs::{self, OpenOptions};
use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use nix::fcntl::{Flock, FlockArg};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use podvisor::pod::record::{self, Record};
use serde_json::{Value, json};

use crate::support::bin::{Output, PODVISOR};
use crate::support::rootfs::{self, Rootfs};
use crate::support::{Sandbox, Scope, cni, eventually, podvisor, run};

/// For what takes as long as a loaded machine needs; reaching it means a hang.
pub const BOUND: Duration = Duration::from_secs(90);

/// Cells at a time: most of what a cell does is waiting.
const SIDE_BY_SIDE: usize = 5;

/// A main process that ends when it is asked to.
const WORK: &str = "trap 'exit 0' TERM; sleep 1000 & wait";

/// Network, root file system and settings for all cells.
pub struct Machine {
    pub rootfs: Rootfs,
}

impl Machine {
    /// Runs `body` on a machine and looks for what is left of all of it, `podvisor gc` having had its turn.
    pub fn run(name: &str, body: impl FnOnce(&Machine)) {
        Sandbox::new(name)
            .bound(Duration::from_secs(if crate::support::slow() {
                7200
            } else {
                900
            }))
            .run(|| {
                let machine = Self::make();
                let before = Scope::default().within(Duration::from_secs(30)).take();
                body(&machine);
                let gc = podvisor(&["gc"]);
                println!("gc: {}{}", gc.stdout, gc.stderr);
                assert_eq!(gc.code, Some(0), "{gc:?}");
                before.assert_unchanged();
            });
    }

    fn make() -> Self {
        // No masquerading: rules take the kernel's global lock, and other tests have them.
        let plugin = json!({
            "type": "bridge", "bridge": "pvm0", "isGateway": true, "ipMasq": false,
            "ipam": { "type": "host-local", "ranges": [[{ "subnet": "10.87.0.0/16" }]] }
        });
        cni::network("matrix", vec![plugin]).write();
        let made = Command::new("ip")
            .args(["link", "add", "pvm0", "type", "bridge"])
            .output()
            .unwrap();
        assert!(made.status.success(), "{made:?}");
        fs::write(
            "/etc/podvisor/config.toml",
            "idle_timeout = 5.0\n[parking]\ninterval = 0.5\n",
        )
        .unwrap();
        Self {
            rootfs: rootfs::make(),
        }
    }

    /// Runs all jobs, some at a time; panics with every failure at the end. The results by name.
    pub fn all<T: Send, J: Send>(
        &self,
        jobs: Vec<(String, J)>,
        work: impl Fn(&Cell<'_>, J) -> T + Sync,
    ) -> BTreeMap<String, T> {
        let only = std::env::var("PODVISOR_ONLY").unwrap_or_default();
        let number = AtomicUsize::new(0);
        let jobs = jobs.into_iter().filter(|(name, _)| name.contains(&only));
        let queue = Mutex::new(jobs.collect::<Vec<_>>().into_iter());
        let (results, failures) = (Mutex::new(BTreeMap::new()), Mutex::new(Vec::new()));
        std::thread::scope(|scope| {
            for _ in 0..SIDE_BY_SIDE {
                scope.spawn(|| {
                    loop {
                        let Some((name, job)) = queue.lock().unwrap().next() else {
                            return;
                        };
                        let cell = Cell::new(self, number.fetch_add(1, Ordering::Relaxed));
                        match catch_unwind(AssertUnwindSafe(|| work(&cell, job))) {
                            Ok(result) => drop(results.lock().unwrap().insert(name, result)),
                            Err(panic) => {
                                let text = panic
                                    .downcast_ref::<String>()
                                    .cloned()
                                    .or_else(|| panic.downcast_ref::<&str>().map(|s| (*s).into()))
                                    .unwrap_or_default();
                                let text = format!("{name} ({}): {text}", cell.namespace);
                                println!("FAILED {text}");
                                failures.lock().unwrap().push(text);
                            }
                        }
                    }
                });
            }
        });
        let failures = failures.into_inner().unwrap();
        assert!(
            failures.is_empty(),
            "{} cells failed:\n{}",
            failures.len(),
            failures.join("\n\n")
        );
        results.into_inner().unwrap()
    }
}

/// One cell: at most one pod, called `web`, in a namespace of its own.
pub struct Cell<'a> {
    pub machine: &'a Machine,
    pub namespace: String,
    dir: tempfile::TempDir,
}

impl<'a> Cell<'a> {
    fn new(machine: &'a Machine, number: usize) -> Self {
        let dir = tempfile::Builder::new()
            .prefix("pvtest-fault-")
            .tempdir()
            .unwrap();
        for file in ["rules", "hits"] {
            fs::write(dir.path().join(file), "").unwrap();
        }
        Self {
            machine,
            namespace: format!("cell{number}"),
            dir,
        }
    }

    /// For `PODVISOR_FAULT_DIR`.
    pub fn fault_dir(&self) -> &Path {
        self.dir.path()
    }

    /// Replaces the rules, `point=terms` a line.
    pub fn rules(&self, rules: &str) {
        let file = OpenOptions::new()
            .write(true)
            .open(self.dir.path().join("rules"))
            .unwrap();
        let mut file = Flock::lock(file, FlockArg::LockExclusive).unwrap();
        file.set_len(0).unwrap();
        file.write_all(rules.as_bytes()).unwrap();
    }

    /// How often a point was reached so far.
    pub fn hits(&self, point: &str) -> usize {
        let all = fs::read_to_string(self.dir.path().join("hits")).unwrap();
        let of = |line: &&str| line.split_once(' ').is_some_and(|(_, name)| name == point);
        all.lines().filter(of).count()
    }

    /// `podvisor` in this cell, for at most [`BOUND`].
    pub fn podvisor(&self, args: &[&str]) -> Output {
        run(&mut self.command(args), BOUND)
    }

    /// The same, not started yet.
    pub fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(PODVISOR);
        command.args(["--namespace", &self.namespace]).args(args);
        self.armed(&mut command);
        command
    }

    /// Makes a program and its children obey this cell's rules.
    pub fn armed(&self, command: &mut Command) {
        command.env("PODVISOR_FAULT_DIR", self.dir.path());
    }

    /// `podvisor run FLAGS` of a pod that runs until it is stopped.
    pub fn run_line<'b>(&'b self, flags: &[&'b str]) -> Vec<&'b str> {
        let mut line = vec!["run", "--name", "web"];
        line.extend(flags);
        let rootfs = self.machine.rootfs.str();
        line.extend(["--rootfs", rootfs, "--", "/bin/sh", "-c", WORK]);
        line
    }

    /// A detached pod that is up.
    pub fn up(&self) -> Record {
        self.podvisor(&self.run_line(&["-d"])).ok();
        self.record().unwrap()
    }

    /// A command that runs meanwhile.
    pub fn aside(&self, args: &[&str]) -> Aside {
        Aside::start(&mut self.command(args))
    }

    /// The pod's journal.
    pub fn record(&self) -> Option<Record> {
        let dir = self.pod_dirs().into_iter().next()?;
        record::read(&dir).ok()
    }

    /// What there is of pods in the runtime directory.
    pub fn pod_dirs(&self) -> Vec<PathBuf> {
        let entries = fs::read_dir(Path::new("/run/podvisor").join(&self.namespace));
        let all = entries.into_iter().flatten().flatten().map(|e| e.path());
        all.filter(|p| !p.ends_with(".names")).collect()
    }

    /// As `ps -a` shows it: a state, or `gone`.
    pub fn state(&self) -> String {
        let listed = self.podvisor(&["ps", "-a", "--json"]).ok();
        let listed: Value = serde_json::from_str(&listed.stdout).unwrap();
        let states = listed.as_array().unwrap().iter();
        let states: Vec<&str> = states.filter_map(|pod| pod["state"].as_str()).collect();
        match states.as_slice() {
            [] => "gone".into(),
            states => states.join(", "),
        }
    }

    /// Processes of ours that serve this namespace.
    pub fn own_processes(&self) -> Vec<i32> {
        let wanted = format!("-namespace\0{}\0", self.namespace);
        let all = fs::read_dir("/proc").unwrap().flatten();
        let pids = all.filter_map(|e| e.file_name().to_str()?.parse().ok());
        let ours = |pid: &i32| {
            fs::read(format!("/proc/{pid}/cmdline"))
                .is_ok_and(|line| String::from_utf8_lossy(&line).contains(&wanted))
        };
        pids.filter(ours).collect()
    }

    /// Removes by `rm -f` whatever is listed, without faults; then nothing is there, and no process of ours lives.
    pub fn remove(&self) {
        self.rules("");
        // Once, unless somebody else is at an owed DEL just then.
        for _ in 0..3 {
            let listed = self.podvisor(&["ps", "-aq"]).ok();
            for id in listed.stdout.lines() {
                let removed = self.podvisor(&["rm", "-f", id]);
                // It may have been on its way out.
                assert!(
                    removed.code == Some(0) || removed.stderr.contains("no pod has this name"),
                    "{removed:#?}"
                );
            }
            if self.state() == "gone" {
                break;
            }
            std::thread::sleep(Duration::from_millis(300));
        }
        self.assert_gone();
    }

    /// Nothing is listed and nobody serves.
    pub fn assert_gone(&self) {
        let gone = || {
            let rest = (self.pod_dirs(), self.own_processes());
            (rest.0.is_empty() && rest.1.is_empty()).then_some(())
        };
        let what = format!("the end of {}", self.namespace);
        eventually(Duration::from_secs(30), &what, gone);
        assert_eq!(self.state(), "gone");
    }
}

/// A command in the background.
pub struct Aside(Child);

impl Aside {
    pub fn start(command: &mut Command) -> Self {
        command.stdin(Stdio::null()).stdout(Stdio::null());
        Self(command.stderr(Stdio::null()).spawn().unwrap())
    }

    pub fn pid(&self) -> i32 {
        self.0.id().cast_signed()
    }

    /// True when it exited with 0.
    pub fn end(&mut self) -> bool {
        let ended = eventually(BOUND, "the end of a command", || self.0.try_wait().unwrap());
        ended.success()
    }
}

impl Drop for Aside {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// SIGKILL; what is gone is no failure.
pub fn die(pid: i32) {
    let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
}
