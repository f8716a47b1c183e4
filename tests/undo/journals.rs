//! Every state in which a crash can leave a pod's journal, and what the code does with it: docs/journal.md's table is read
//! and driven, row by row, with hand-made journals and real things of theirs.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::chown;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, SystemTime};

use podvisor::cgroup::{Group, Layout};
use podvisor::error::{Kind, Result};
use podvisor::infra::pins;
use podvisor::network::{Holder, NetworkRecord, netns};
use podvisor::pod::gc::{self, Left};
use podvisor::pod::record::{self, Effect, FILE, Record, State};
use podvisor::pod::{Deleted, Parked, journal, rescue};
use podvisor::process::Identity;
use podvisor::sys::mount::bind_to_itself;

use crate::kit::{Kit, POD, on_its_own, request};
use crate::mounts;

const SPACE: &str = "default";
const ALL: [&str; 6] = ["files", "cgroup", "netns", "cni", "infra", "pins"];

/// A pod that a crash has left, made by hand.
struct Remains<'a> {
    kit: &'a Kit,
    dir: PathBuf,
    record: Record,
    network: NetworkRecord,
    infra: Option<Identity>,
}

/// A process that stands for a supervisor or an infra process; whoever reaps in this process reaps it.
fn process() -> Identity {
    let mut command = Command::new("sleep");
    command.arg("1000").stdin(Stdio::null());
    Identity::of(command.spawn().unwrap().id().cast_signed()).unwrap()
}

impl<'a> Remains<'a> {
    fn new(kit: &'a Kit) -> Self {
        let dir = kit.config.sandbox_dir(SPACE, POD);
        let mut record = journal::blank(SPACE, POD);
        record.supervisor = Some(Identity {
            pid: i32::MAX - 1,
            start_time: 1,
        });
        record.state = State::Starting;
        record.network.ours = true;
        record.network.netns = Some(netns::path(&kit.config, SPACE, POD));
        let group = format!("/podvisor/{SPACE}+{POD}");
        record.infra_cgroup = Some(format!("{group}/infra"));
        record.cgroup = Some(group);
        record.cgroup_ours = true;
        Self {
            kit,
            dir,
            record,
            network: NetworkRecord::at(&kit.config, SPACE, POD),
            infra: None,
        }
    }

    /// What the effect leaves on the machine.
    fn make(&mut self, effect: &str) {
        match effect {
            "files" => {
                let files = journal::files_dir(&self.dir);
                fs::create_dir_all(files.join("shm")).unwrap();
                fs::write(files.join("hostname"), "p1").unwrap();
                bind_to_itself(&files).unwrap();
                mounts::tmpfs(&files.join("shm"), "size=64k");
            }
            "cgroup" => self.group().create().unwrap(),
            "netns" => netns::make(&netns::path(&self.kit.config, SPACE, POD)).unwrap(),
            "cni" => self.owe(None),
            "pins" => {
                let own = std::process::id().cast_signed();
                pins::make(&journal::files_dir(&self.dir), &["ipc", "uts"], own).unwrap();
            }
            _ => {
                let infra = process();
                self.record.infra = Some(infra);
                self.infra = Some(infra);
            }
        }
    }

    fn owe(&self, supervisor: Option<Identity>) {
        let holder = Holder {
            namespace: SPACE.into(),
            sandbox_id: POD.into(),
            boot_id: podvisor::clock::boot_id(),
            netns: netns::path(&self.kit.config, SPACE, POD),
            supervisor,
            ..Holder::default()
        };
        self.network.hold(&holder).unwrap();
        fs::write(self.network.dir().join("add-started.json"), "").unwrap();
    }

    fn effect(&mut self, name: &str) -> &mut Effect {
        let e = &mut self.record.effects;
        match name {
            "files" => &mut e.files,
            "cgroup" => &mut e.cgroup,
            "netns" => &mut e.netns,
            "cni" => &mut e.cni,
            "pins" => &mut e.pins,
            _ => &mut e.infra,
        }
    }

    fn done(&mut self, effects: &[&str]) {
        for name in effects {
            self.make(name);
            *self.effect(name) = Effect::Done;
        }
    }

    fn group(&self) -> Group {
        let path = self.record.infra_cgroup.clone().unwrap();
        Group::from_spec(&Layout::detect().unwrap(), &path).unwrap()
    }

    fn mkdir(&self) {
        journal::make_dir(&self.kit.config.runtime_root, &self.dir).unwrap();
    }

    fn write(&self) {
        self.mkdir();
        journal::write(&self.dir, &self.record).unwrap();
    }

    fn cut(&self, length: usize) {
        self.write();
        let path = self.dir.join(FILE);
        let whole = fs::read(&path).unwrap();
        fs::write(path, &whole[..length.min(whole.len() - 1)]).unwrap();
    }

    fn age(&self) {
        let old = SystemTime::now() - Duration::from_secs(600);
        let dir = fs::File::open(&self.dir).unwrap();
        dir.set_modified(old).unwrap();
    }

    /// Nothing of it is there any more.
    fn assert_gone(&self, what: &str) {
        assert!(!self.dir.exists(), "{what}: {}", self.dir.display());
        let pin = netns::path(&self.kit.config, SPACE, POD);
        assert!(fs::symlink_metadata(&pin).is_err(), "{what}: the pin");
        assert!(!self.network.dir().exists(), "{what}: the network's record");
        assert!(!self.group().exists(), "{what}: the cgroup");
        let table = fs::read_to_string("/proc/self/mountinfo").unwrap();
        let dir = self.dir.display().to_string();
        assert!(!table.contains(&dir), "{what}: a mount below {dir}");
    }
}

/// The row's journal and its things; the process that must be dead in the end, or alive.
fn set_up(row: &str, left: &mut Remains<'_>) -> Option<(Identity, bool)> {
    let me = || Identity::of(std::os::unix::process::parent_id().cast_signed()).unwrap();
    match row {
        "nothing" => {}
        "network alone" => left.owe(None),
        "network of a living supervisor" => {
            let supervisor = process();
            left.owe(Some(supervisor));
            return Some((supervisor, false));
        }
        "directory, new" => left.mkdir(),
        "directory, old" => {
            left.mkdir();
            left.age();
        }
        "directory, cgroup" => {
            left.mkdir();
            left.make("cgroup");
            left.age();
        }
        "directory, pins" => {
            left.make("files");
            left.make("pins");
            left.age();
        }
        "empty" => {
            left.done(&["files", "cgroup", "netns", "cni", "pins"]);
            left.cut(0);
        }
        "cut" => {
            left.done(&["files", "cgroup", "netns", "cni", "pins"]);
            left.cut(700);
        }
        "between two writes" => {
            left.done(&["files", "cgroup"]);
            left.write();
            fs::write(left.dir.join(".journal.tmp"), "{\"version\":1,\"na").unwrap();
        }
        "supervised" => {
            left.done(&["files"]);
            left.record.supervisor = Some(me());
            left.write();
            return Some((me(), true));
        }
        "pid of another" => {
            left.done(&["files", "netns"]);
            let mut other = me();
            other.start_time += 1;
            left.record.supervisor = Some(other);
            left.write();
            return Some((me(), true));
        }
        "other boot" => {
            left.done(&["cni"]);
            let other = process();
            left.record.supervisor = Some(me());
            // The numbers are somebody else's by now.
            left.record.infra = Some(other);
            left.record.effects.infra = Effect::Done;
            left.record.boot_id = "11111111-2222-3333-4444-555555555555".into();
            left.write();
            return Some((other, true));
        }
        "created" => {
            left.done(&["files"]);
            left.record.state = State::Created;
            left.write();
        }
        "netns intended" => {
            left.done(&["files"]);
            left.record.effects.netns = Effect::Intent;
            left.write();
        }
        "no home for the marker" => {
            left.done(&["files", "netns"]);
            left.record.effects.cni = Effect::Intent;
            left.write();
        }
        "marker, no effect" => {
            left.done(&["files", "netns"]);
            left.owe(None);
            left.write();
        }
        "infra not on record" => {
            left.done(&["files", "netns", "cni", "cgroup"]);
            left.record.effects.infra = Effect::Intent;
            left.write();
        }
        "ready" | "parked" | "not ready" => {
            left.done(&ALL);
            left.record.state = match row {
                "ready" => State::Ready,
                "parked" => State::Parked,
                _ => State::NotReady,
            };
            left.write();
            return left.infra.map(|infra| (infra, false));
        }
        "stopped" | "containers alone" => {
            left.record.state = match row {
                "stopped" => State::Stopped,
                _ => State::TaskOnly,
            };
            left.write();
        }
        "of another user" => {
            left.write();
            chown(&left.dir, Some(1), None).unwrap();
        }
        other => panic!("docs/journal.md has a row {other:?} that this test cannot make"),
    }
    None
}

/// What `delete` does where there is nobody to ask.
async fn from_the_journal(kit: &Kit) -> Result<Deleted> {
    let (limit, parked) = (Duration::from_secs(5), Parked::Stays);
    rescue(&kit.config, &kit.reaper, SPACE, POD, limit, parked).await
}

/// `delete` and `rm -f`: what they come down to without the supervisor.
async fn by_delete(kit: &Kit) -> &'static str {
    let there = kit.config.sandbox_dir(SPACE, POD).exists() || owes(kit);
    match from_the_journal(kit).await {
        Ok(_) if there => "undone",
        Ok(_) => "nothing",
        Err(e) if matches!(e.kind(), Kind::Busy | Kind::Denied) => "refused",
        Err(e) => panic!("{e}"),
    }
}

fn owes(kit: &Kit) -> bool {
    NetworkRecord::at(&kit.config, SPACE, POD).owes_del()
}

/// `podvisor gc`: what it takes for left, and does about it.
async fn by_gc(kit: &Kit) -> &'static str {
    let mut did = "nothing";
    for left in gc::left(&kit.config) {
        match left {
            Left::Pod(_) | Left::Directory { kept: None, .. } => {
                did = "undone";
                from_the_journal(kit).await.unwrap();
            }
            Left::Directory { kept: Some(_), .. } | Left::Parked(_) => did = "left alone",
            Left::Network(owed) => {
                did = "undone";
                gc::settle(&kit.config, &kit.reaper, &owed.record)
                    .await
                    .unwrap();
            }
            // What belongs to a directory that is left alone, or went with it.
            Left::Record(_) | Left::Netns { .. } | Left::Link(_) => {}
        }
    }
    did
}

/// CreateSandbox and StartSandbox of the same id in a new supervisor.
async fn by_the_next(kit: &Kit) -> &'static str {
    let there = kit.config.sandbox_dir(SPACE, POD).join(FILE).exists() || owes(kit);
    let pod = kit.pod(SPACE);
    match pod.create(request("fake")).await {
        Err(e) if matches!(e.kind(), Kind::Exists | Kind::Denied) => return "refused",
        made => made.unwrap(),
    }
    pod.start(POD, None).await.unwrap();
    pod.shutdown(POD).await.unwrap();
    if there { "undone" } else { "nothing" }
}

/// Rows of the table: the state's name, and what each of the three does.
fn table() -> Vec<(String, [String; 3])> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/journal.md");
    let text = fs::read_to_string(path).unwrap();
    let head = "| state | what is found | supervisor | boot | `delete`, `rm -f` | `podvisor gc` | next supervisor |";
    let rows = text.lines().skip_while(|l| *l != head).skip(2);
    let rows = rows.take_while(|l| l.starts_with('|')).map(|row| {
        let cells: Vec<&str> = row.trim_matches('|').split('|').map(str::trim).collect();
        assert_eq!(cells.len(), 7, "{row}");
        let name = cells[0].trim_matches('`').to_owned();
        let does = [cells[4], cells[5], cells[6]].map(|c| c.trim_matches('`').to_owned());
        (name, does)
    });
    let rows: Vec<_> = rows.collect();
    assert!(rows.len() > 20, "the table of docs/journal.md is cut short");
    let names: BTreeSet<_> = rows.iter().map(|(name, _)| name).collect();
    assert_eq!(names.len(), rows.len(), "a state has one row");
    rows
}

#[test]
fn every_row_of_the_journals_table_is_what_the_code_does() {
    on_its_own(
        "journals::every_row_of_the_journals_table_is_what_the_code_does",
        async |kit: &Kit| {
            let mut wrong = Vec::new();
            for (row, does) in table() {
                for (n, said) in does.iter().enumerate() {
                    if said == "-" {
                        continue;
                    }
                    let mut left = Remains::new(kit);
                    let process = set_up(&row, &mut left);
                    let (adds, dels) = (kit.plugin.count("ADD"), kit.plugin.count("DEL"));
                    let owed = usize::from(owes(kit));
                    let did = match n {
                        0 => by_delete(kit).await,
                        1 => by_gc(kit).await,
                        _ => by_the_next(kit).await,
                    };
                    let who = ["delete", "gc", "the next supervisor"][n];
                    println!("{row}: {who}: {did}");
                    if did != said {
                        wrong.push(format!("{row}: {who}: {did}, not {said}"));
                    }
                    if matches!(did, "undone" | "nothing") && (did == "undone" || n != 1) {
                        let added = kit.plugin.count("ADD") - adds;
                        let sent = kit.plugin.count("DEL") - dels;
                        assert_eq!(sent, owed + added, "{row}: {who}: one DEL for each");
                        if let Some((process, alive)) = process {
                            kit.until(|| process.is_alive() == alive).await;
                        }
                        left.assert_gone(&format!("{row}: {who}"));
                    }
                    clean(&left, process).await;
                }
            }
            assert!(
                wrong.is_empty(),
                "docs/journal.md says otherwise: {wrong:#?}"
            );
        },
    );
}

/// Takes away what the row's answer left, as it should.
async fn clean(left: &Remains<'_>, process: Option<(Identity, bool)>) {
    let me = std::os::unix::process::parent_id().cast_signed();
    for process in [process.map(|(p, _)| p), left.infra].into_iter().flatten() {
        if process.pid != me {
            process.signal(libc::SIGKILL).unwrap();
        }
    }
    if left.dir.exists() {
        chown(&left.dir, Some(0), None).unwrap();
        if let Ok(mut record) = record::read(&left.dir) {
            record.supervisor = None;
            journal::write(&left.dir, &record).unwrap();
        }
    }
    let kit = left.kit;
    from_the_journal(kit).await.unwrap();
}

/// All 243 mixtures of the first five effects, with each state of one of them each of the pins'; intents with and without
/// what they intend, in this boot and in another.
#[test]
fn every_mixture_of_effects_is_undone_in_this_boot_and_in_another() {
    on_its_own(
        "journals::every_mixture_of_effects_is_undone_in_this_boot_and_in_another",
        async |kit: &Kit| {
            for n in 0..2 * 3_u32.pow(5) {
                let mut left = Remains::new(kit);
                let other_boot = n % 2 == 1;
                let (mut digits, mut sum) = (n / 2, 0);
                let mut text = String::new();
                for (at, name) in ALL.iter().enumerate() {
                    let digit = match *name {
                        "pins" => sum,
                        _ => digits,
                    };
                    let stands = [Effect::None, Effect::Intent, Effect::Done][(digit % 3) as usize];
                    sum += digits % 3;
                    digits /= 3;
                    *left.effect(name) = stands;
                    // An intent may have happened, or not. What the kernel holds does not outlive a boot.
                    let there = match stands {
                        Effect::None => false,
                        Effect::Intent => (n as usize / 2 + at).is_multiple_of(2),
                        Effect::Done => true,
                    };
                    if there && (!other_boot || *name == "cni") {
                        left.make(name);
                    }
                    text += &format!("{name} {stands:?} ({there}), ");
                }
                if other_boot {
                    left.record.boot_id = "11111111-2222-3333-4444-555555555555".into();
                }
                left.write();
                let dels = kit.plugin.count("DEL");
                let owed = usize::from(owes(kit));
                from_the_journal(kit)
                    .await
                    .unwrap_or_else(|e| panic!("{text}: {e}"));
                assert_eq!(kit.plugin.count("DEL") - dels, owed, "{text}");
                if let Some(infra) = left.infra {
                    if *left.effect("infra") == Effect::None {
                        infra.signal(libc::SIGKILL).unwrap();
                    }
                    kit.until(|| !infra.is_alive()).await;
                }
                left.assert_gone(&text);
                if n % 64 == 0 {
                    // The fake looks through all of its calls at each.
                    kit.plugin.forget();
                }
            }
        },
    );
}

/// A journal cut at every length is told as damaged, with what to do; whatever it belonged to is undone by name.
#[test]
fn a_journal_cut_at_every_length_is_told_and_undone() {
    on_its_own(
        "journals::a_journal_cut_at_every_length_is_told_and_undone",
        async |kit: &Kit| {
            let mut left = Remains::new(kit);
            left.record.hostname = "p1".into();
            left.write();
            let whole = fs::read(left.dir.join(FILE)).unwrap();
            for length in 0..whole.len() {
                let left = Remains::new(kit);
                left.mkdir();
                fs::write(left.dir.join(FILE), &whole[..length]).unwrap();
                let error = record::read(&left.dir).unwrap_err();
                assert_eq!(error.kind(), Kind::Invalid, "{length}: {error}");
                assert!(error.to_string().contains("podvisor rm -f p1"), "{error}");
                if length % 8 == 0 {
                    let mut left = left;
                    left.make("files");
                    left.make("pins");
                    left.make("cgroup");
                    left.make("netns");
                    from_the_journal(kit).await.unwrap();
                    left.assert_gone(&format!("cut at {length}"));
                }
            }
            println!("{} lengths", whole.len());
            from_the_journal(kit).await.unwrap();
        },
    );
}
