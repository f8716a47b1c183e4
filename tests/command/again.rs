//! `run` whose command was killed at any stage: the same command takes up what it began, another one is refused.

use std::path::{Path, PathBuf};

use nix::sys::signal::Signal;
use serde_json::json;

use crate::kit::{BOUND, Background, Kit, inspect, on_a_machine};
use crate::support::fake::{self, Act, Fake};
use crate::support::{cni, eventually, podvisor, require};

/// What holds the making of a pod `web` up, and how long.
struct Held {
    fake: Fake,
    verb: &'static str,
    gate: PathBuf,
}

impl Held {
    /// ADD of the network `waiting`.
    fn network() -> Self {
        let plugin = fake::plugin(Path::new(cni::PLUGINS), "waiting");
        cni::network("waiting", vec![json!({ "type": "waiting" })]).write();
        Self::at(plugin, "ADD")
    }

    /// `create` of the OCI runtime.
    fn runtime() -> Self {
        let real = require::find("runc").unwrap();
        let runtime = fake::runtime_before(Path::new("/run/fakes"), "slow", &real);
        std::fs::write(
            "/etc/podvisor/config.toml",
            "runtime = \"/run/fakes/slow\"\n",
        )
        .unwrap();
        Self::at(runtime, "CREATE")
    }

    fn at(fake: Fake, verb: &'static str) -> Self {
        let gate = PathBuf::from("/run/gate");
        let _ = std::fs::remove_file(&gate);
        fake.on(verb, &[Act::WaitFor(gate.clone())]);
        Self { fake, verb, gate }
    }

    fn let_go(&self) {
        std::fs::write(&self.gate, "").unwrap();
    }

    fn until_called(&self) {
        eventually(BOUND, "it is held up", || {
            (self.fake.count(self.verb) == 1).then_some(())
        });
    }

    /// A command that is killed while it is held up.
    fn killed(&self, kit: &Kit, flags: &[&str], script: &str) {
        let mut first = kit.background(flags, script);
        self.until_called();
        first.signal(Signal::SIGKILL);
        assert_eq!(first.end().1, Some(9));
    }

    /// The same command again, joined.
    fn again(&self, kit: &Kit, flags: &[&str], script: &str) -> Background {
        let second = kit.background(flags, script);
        eventually(BOUND, "a word about joining", || {
            second.stderr().contains("joining").then_some(())
        });
        second
    }

    /// Made once, whoever asked how often; and gone.
    fn once(&self) {
        assert_eq!(self.fake.count(self.verb), 1);
        podvisor(&["rm", "-f", "web"]).ok();
    }
}

/// Other words, and the pod's own verb: each another request than the one that is under way, and both are named.
fn others_are_refused(kit: &Kit, flags: &[&str], script: &str) {
    let interactive: Vec<&str> = flags.iter().copied().chain(["-e", "A=1"]).collect();
    for (flags, script) in [(flags, "sleep 2000"), (&interactive[..], script)] {
        let refused = kit.run(flags, script).code_is(125);
        for part in ["made by request ", "this is request "] {
            assert!(refused.stderr.contains(part), "{part} in {refused:#?}");
        }
    }
}

fn detached(name: &str, held: fn() -> Held, network: &str) {
    on_a_machine(name, |kit| {
        let flags = ["-d", "--name", "web", "--net", network];
        let held = held();
        held.killed(kit, &flags, "sleep 1000");
        others_are_refused(kit, &flags, "sleep 1000");
        let id = inspect("web")["id"].as_str().unwrap().to_owned();
        let mut second = held.again(kit, &flags, "sleep 1000");
        held.let_go();
        assert_eq!(second.end(), (Some(0), None), "{}", second.stderr());
        assert_eq!(second.stdout().trim(), id);
        podvisor(&["exec", "web", "/bin/true"]).ok();
        // It has what it wanted: from here on the name is taken.
        kit.run(&flags, "sleep 1000")
            .code_is(125)
            .fails_with("podvisor rm -f web");
        held.once();
    });
}

#[test]
fn a_killed_run_is_taken_up_while_its_pod_is_made() {
    let name = "again::a_killed_run_is_taken_up_while_its_pod_is_made";
    detached(name, Held::network, "waiting");
}

#[test]
fn a_killed_run_is_taken_up_while_its_container_is_made() {
    let name = "again::a_killed_run_is_taken_up_while_its_container_is_made";
    detached(name, Held::runtime, "none");
}

fn parked(name: &str, held: fn() -> Held, network: &str, shown: &'static str) {
    on_a_machine(name, |kit| {
        let flags = ["-d", "--name", "web", "--net", network];
        let held = held();
        held.killed(kit, &flags, "sleep 1000");
        held.let_go();
        eventually(BOUND, "it is parked", || {
            let list = podvisor(&["ps", "-a"]).ok().stdout;
            list.contains(shown).then_some(())
        });
        others_are_refused(kit, &flags, "sleep 1000");
        kit.run(&flags, "sleep 1000").ok();
        podvisor(&["exec", "web", "/bin/true"]).ok();
        held.once();
    });
}

#[test]
fn a_killed_run_is_taken_up_when_its_pod_is_parked() {
    let name = "again::a_killed_run_is_taken_up_when_its_pod_is_parked";
    parked(name, Held::network, "waiting", " parked ");
}

#[test]
fn a_killed_run_is_taken_up_when_its_container_is_parked() {
    let name = "again::a_killed_run_is_taken_up_when_its_container_is_parked";
    parked(name, Held::runtime, "none", "(1 parked, ");
}

/// Its output goes to the command that took it up, all of it.
fn in_the_foreground(name: &str, held: fn() -> Held, network: &str) {
    on_a_machine(name, |kit| {
        let flags = ["--rm", "--name", "web", "--net", network];
        let held = held();
        let script = "seq 1 9999; echo last >&2; exit 7";
        held.killed(kit, &flags, script);
        let mut second = held.again(kit, &flags, script);
        held.let_go();
        assert_eq!(second.end(), (Some(7), None), "{}", second.stderr());
        let out = second.stdout();
        assert!(out.starts_with("1\n2\n") && out.ends_with("9998\n9999\n"));
        assert!(second.stderr().ends_with("last\n"), "{}", second.stderr());
        assert_eq!(held.fake.count(held.verb), 1);
        assert_eq!(crate::kit::json(&["ps", "-a", "--json"]), json!([]));
    });
}

#[test]
fn a_killed_run_in_the_foreground_is_taken_up_while_its_pod_is_made() {
    let name = "again::a_killed_run_in_the_foreground_is_taken_up_while_its_pod_is_made";
    in_the_foreground(name, Held::network, "waiting");
}

#[test]
fn a_killed_run_in_the_foreground_is_taken_up_while_its_container_is_made() {
    let name = "again::a_killed_run_in_the_foreground_is_taken_up_while_its_container_is_made";
    in_the_foreground(name, Held::runtime, "none");
}

/// Nobody was killed: who waits detached gets the same pod, and a terminal that another command has is refused. Whatever
/// becomes of the second, the first has its pod.
#[test]
fn a_second_command_beside_a_living_one_does_it_no_harm() {
    on_a_machine(
        "again::a_second_command_beside_a_living_one_does_it_no_harm",
        |kit| {
            let held = Held::runtime();
            let flags = ["-d", "--name", "web", "--net", "none"];
            let mut first = kit.background(&flags, "sleep 1000");
            held.until_called();
            let mut second = held.again(kit, &flags, "sleep 1000");
            held.let_go();
            for command in [&mut first, &mut second] {
                assert_eq!(command.end(), (Some(0), None), "{}", command.stderr());
            }
            assert_eq!(first.stdout(), second.stdout());
            held.once();

            let held = Held::runtime();
            let flags = ["--rm", "--name", "web", "--net", "none"];
            let mut first = kit.background(&flags, "echo said; exit 7");
            held.until_called();
            kit.run(&flags, "echo said; exit 7")
                .code_is(125)
                .fails_with("another command is");
            held.let_go();
            assert_eq!(first.end(), (Some(7), None), "{}", first.stderr());
            assert_eq!(first.stdout(), "said\n");
        },
    );
}

/// An interrupt ends the one that has joined, and nothing else.
#[test]
fn an_interrupted_second_command_leaves_the_creation_that_it_joined() {
    on_a_machine(
        "again::an_interrupted_second_command_leaves_the_creation_that_it_joined",
        |kit| {
            let held = Held::network();
            let flags = ["-d", "--name", "web", "--net", "waiting"];
            let mut first = kit.background(&flags, "sleep 1000");
            held.until_called();
            let mut second = held.again(kit, &flags, "sleep 1000");
            second.signal(Signal::SIGINT);
            assert_eq!(second.end(), (Some(130), None), "{}", second.stderr());
            assert!(second.stderr().contains("goes on"), "{}", second.stderr());
            held.let_go();
            assert_eq!(first.end(), (Some(0), None), "{}", first.stderr());
            held.once();
        },
    );
}
