//! A daemon that is killed and comes back between any two steps, many pods at once, and supervisors that are killed.

use std::fs;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use podvisor::client::{self, Client};
use podvisor::pod::record;
use podvisor::proto::any;
use podvisor::proto::cri::sandbox_config::LinuxContainerResources;
use podvisor::proto::sandbox::sandbox::UpdateSandboxRequest;
use serde_json::{Value, json};

use crate::kubelet::{BOUND, Kubelet, Pod, container, log, pod, sleeper};
use crate::node::{self, HANDLERS, OnPurpose, Seen, Side, snapshot, supervisors};
use crate::pods;
use crate::support::fake::{self, Act};
use crate::support::{Containerd, Sandbox, cni, eventually};

/// What is seen of one pod by one handler.
#[derive(Default)]
struct One {
    pod: Option<Pod>,
    ids: Vec<String>,
    seen: Seen,
}

impl One {
    fn say(&mut self, key: &str, seen: String) {
        assert!(self.seen.insert(key.into(), seen).is_none(), "{key} twice");
    }

    /// Pod and containers as they are told of.
    fn shown(&mut self, kubelet: &mut Kubelet, key: &str) {
        let id = self.pod.as_ref().unwrap().id.clone();
        let state = kubelet.pod_status(&id).unwrap().status.unwrap_or_default();
        let mut text = format!(
            "{:?} {}",
            state.state.enum_value_or_default(),
            state.network.ip.starts_with("10.98.7.")
        );
        for id in &self.ids {
            let status = kubelet.status(id).unwrap();
            let state = status.state.enum_value_or_default();
            text += &format!(", {state:?} {} {:?}", status.exit_code, status.reason);
        }
        println!("{key} {}: {text}", kubelet.handler);
        self.say(key, text);
    }
}

type Step = (&'static str, fn(&mut One, &mut Kubelet));

const STEPS: [Step; 6] = [
    ("the pod is up", |one, kubelet| {
        one.pod = Some(kubelet.pod(&format!("restart-{}", kubelet.handler)));
    }),
    ("containers run and one is created", |one, kubelet| {
        let pod = one.pod.clone().unwrap();
        let tick = container(
            "tick",
            "n=0; while :; do n=$((n+1)); echo $n; sleep 0.2; done",
        );
        one.ids.push(kubelet.launch(&pod, &tick).unwrap());
        one.ids
            .push(kubelet.launch(&pod, &sleeper("sleeper")).unwrap());
        one.ids.push(
            kubelet
                .launch(&pod, &container("ends", "sleep 2; exit 5"))
                .unwrap(),
        );
        one.ids
            .push(kubelet.create(&pod, &sleeper("late")).unwrap());
    }),
    ("one has ended meanwhile, one is started", |one, kubelet| {
        kubelet.ended(&one.ids[2]);
        kubelet.of_container("StartContainer", &one.ids[3]).unwrap();
        let seen = kubelet.sh(
            &one.ids[0],
            "echo again; cat /etc/hostname /etc/resolv.conf | wc -l",
        );
        one.say("exec", seen);
        let pod = one.pod.clone().unwrap();
        let lines = log(&pod, "tick").lines().count();
        eventually(BOUND, "the log goes on", || {
            (log(&pod, "tick").lines().count() > lines + 3).then_some(())
        });
        let numbers: Vec<u32> = log(&pod, "tick")
            .lines()
            .filter_map(|l| l.rsplit(' ').next()?.parse().ok())
            .collect();
        let whole = numbers.iter().zip(1..).all(|(seen, n)| *seen == n);
        one.say("no line of the log is lost", whole.to_string());
        one.say(
            "shm",
            kubelet.sh(&one.ids[1], "echo x > /dev/shm/x")
                + &kubelet.sh(&one.ids[3], "cat /dev/shm/x"),
        );
    }),
    ("one is stopped", |one, kubelet| {
        kubelet.stop(&one.ids[1], 10).unwrap()
    }),
    ("the pod is stopped", |one, kubelet| {
        kubelet
            .of_pod("StopPodSandbox", &one.pod.as_ref().unwrap().id)
            .unwrap();
    }),
    ("one is removed", |one, kubelet| {
        kubelet
            .of_container("RemoveContainer", &one.ids.remove(0))
            .unwrap();
    }),
];

#[test]
fn a_daemon_that_comes_back_finds_all_as_it_was() {
    Sandbox::new("restart::a_daemon_that_comes_back_finds_all_as_it_was")
        .bound(Duration::from_secs(600))
        .run(|| {
            let Some(mut daemon) = node::start("containerd-2.1", "") else {
                return;
            };
            // The daemon itself comes and goes.
            daemon.stop();
            let before = snapshot();
            daemon.start_again();
            let mut all = HANDLERS.map(|handler| (handler, One::default()));
            for (key, step) in STEPS {
                for (handler, one) in &mut all {
                    let mut kubelet = Kubelet::of(&daemon, handler);
                    step(one, &mut kubelet);
                    one.shown(&mut kubelet, key);
                }
                daemon.kill();
                daemon.start_again();
                for (handler, one) in &mut all {
                    let mut kubelet = Kubelet::of(&daemon, handler);
                    one.shown(&mut kubelet, &format!("{key}, the daemon came back"));
                }
            }
            for (handler, one) in &mut all {
                Kubelet::of(&daemon, handler).end(&one.pod.as_ref().unwrap().id);
            }
            assert!(Kubelet::of(&daemon, HANDLERS[0]).pods().is_empty());
            daemon.stop();
            before.assert_unchanged();
            let seen = all.map(|(handler, one)| (handler, one.seen));
            node::assert_alike(&node::compare("restart of the daemon", &seen, &[]));
        });
}

/// No daemon sends it yet: said to the supervisor itself, told by the daemon.
#[test]
fn an_update_of_a_pod_is_told_by_the_daemon_that_comes_back() {
    Sandbox::new("restart::an_update_of_a_pod_is_told_by_the_daemon_that_comes_back").run(|| {
        let Some(mut daemon) = node::start("containerd-2.1", "") else {
            return;
        };
        daemon.stop();
        let before = snapshot();
        daemon.start_again();
        let mut kubelet = Kubelet::of(&daemon, "podvisor");
        let pod = kubelet.pod("updated");
        update(&pod.id);
        for daemon_is_new in [false, true] {
            if daemon_is_new {
                daemon.kill();
                daemon.start_again();
                kubelet = Kubelet::of(&daemon, "podvisor");
            }
            let info = kubelet.pod_status(&pod.id).unwrap().info;
            let info: Value = serde_json::from_str(&info["info"]).unwrap();
            assert_eq!(info["resources"], json!({"cpu_shares": 1024}));
            assert_eq!(info["config"]["annotations"], json!({"team": "new"}));
        }
        kubelet.end(&pod.id);
        daemon.stop();
        before.assert_unchanged();
    });
}

/// UpdateSandbox over the socket of the pod's supervisor.
fn update(id: &str) {
    let dir = Path::new("/run/podvisor/k8s.io").join(id);
    let address = record::read(&dir).unwrap().address;
    let resources = LinuxContainerResources {
        cpu_shares: 1024,
        ..Default::default()
    };
    let request = UpdateSandboxRequest {
        sandbox_id: id.into(),
        resources: Some(any::pack(any::CRI_RESOURCES, &resources).unwrap()).into(),
        annotations: [("team".to_owned(), "new".to_owned())].into(),
        ..Default::default()
    };
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    let runtime = runtime.enable_all().build().unwrap();
    runtime.block_on(async {
        let supervisor = Client::connect(&address).await.unwrap();
        let context = client::context(Some(BOUND));
        let sandbox = supervisor.sandbox();
        sandbox.update_sandbox(context, &request).await.unwrap();
    });
}

/// A pod with one container each, all at once; then all go at once.
fn many(daemon: &Containerd, handler: &str, count: usize) -> Seen {
    let fifos = fifos(daemon);
    let begun = Instant::now();
    let each = |work: &(dyn Fn(usize) -> Option<Pod> + Sync)| -> Vec<Pod> {
        std::thread::scope(|scope| {
            let all: Vec<_> = (0..count).map(|n| scope.spawn(move || work(n))).collect();
            all.into_iter().filter_map(|t| t.join().unwrap()).collect()
        })
    };
    let pods = each(&|n| {
        let mut kubelet = Kubelet::of(daemon, handler);
        let pod = kubelet.run(&pod(&format!("many-{handler}-{n}")), 3).ok()?;
        let id = kubelet.launch(&pod, &sleeper("a")).ok()?;
        (kubelet.sh(&id, "hostname") == pod.config.hostname).then_some(pod)
    });
    let up = begun.elapsed();
    let gone = each(&|n| {
        let pod = pods.get(n)?.clone();
        Kubelet::of(daemon, handler).end(&pod.id);
        Some(pod)
    });
    println!(
        "{handler}: {} of {count} pods up after {:.1} s, gone after {:.1} s more",
        pods.len(),
        up.as_secs_f64(),
        (begun.elapsed() - up).as_secs_f64()
    );
    eventually(BOUND, "the daemon closes the pods' pipes", || {
        (self::fifos(daemon) <= fifos).then_some(())
    });
    let text = format!("{} up, {} gone", pods.len() == count, gone.len() == count);
    [("pods".to_owned(), text)].into()
}

/// Pipes, with names and without, that the daemon has open.
fn fifos(daemon: &Containerd) -> usize {
    let all = fs::read_dir(format!("/proc/{}/fd", daemon.pid())).unwrap();
    all.flatten()
        .filter_map(|entry| fs::metadata(entry.path()).ok())
        .filter(|meta| meta.file_type().is_fifo())
        .count()
}

fn all_at_once(name: &str, count: usize) {
    Sandbox::new(name).bound(Duration::from_secs(900)).run(|| {
        let Some(daemon) = node::start("containerd-2.1", "") else {
            return;
        };
        let before = snapshot();
        let seen = HANDLERS.map(|handler| (handler, many(&daemon, handler, count)));
        before.assert_unchanged();
        node::assert_alike(&node::compare("many pods at once", &seen, &[]));
    });
}

#[test]
fn twenty_pods_at_once() {
    all_at_once("restart::twenty_pods_at_once", 20);
}

#[test]
#[ignore = "slow"]
fn slow_fifty_pods_at_once() {
    all_at_once("restart::slow_fifty_pods_at_once", 50);
}

/// Processes of containers that still run, by a word of their command line.
fn running(word: &str) -> usize {
    let processes = fs::read_dir("/proc").unwrap().flatten();
    let lines = processes.filter_map(|entry| fs::read(entry.path().join("cmdline")).ok());
    lines
        .filter(|line| String::from_utf8_lossy(line).contains(word))
        .count()
}

/// What a kubelet does about a pod whose supervisor was killed with SIGKILL leaves nothing with ours; with containerd's own
/// shim the containers of the pod run on, known to nobody.
#[test]
fn a_killed_supervisor_leaves_nothing_once_the_pod_is_removed() {
    Sandbox::new("restart::a_killed_supervisor_leaves_nothing_once_the_pod_is_removed").run(|| {
        let Some(daemon) = node::start("containerd-2.1", "") else {
            return;
        };
        for handler in ["podvisor", "podvisor-pod", "runc"] {
            let before = snapshot();
            let mut kubelet = Kubelet::of(&daemon, handler);
            let pod = kubelet.pod(&format!("crash-{handler}"));
            let word = format!("left-by-{handler}");
            for name in ["a", "b"] {
                let script = format!("while :; do sleep 0.1; done; echo {word}");
                kubelet.launch(&pod, &container(name, &script)).unwrap();
            }
            assert_eq!(running(&word), 2);
            kill(supervisors(&pod.id)[0], Signal::SIGKILL).unwrap();
            kubelet.end(&pod.id);
            assert!(kubelet.pods().is_empty());
            if handler == "runc" {
                println!("runc: {} containers run on", running(&word));
                let left = before.changes();
                println!("runc leaves {left:#?}");
                assert!(
                    running(&word) > 0 || !left.is_empty(),
                    "nothing is left by containerd's own shim either"
                );
                continue;
            }
            eventually(BOUND, "the containers end", || {
                (running(&word) == 0).then_some(())
            });
            before.assert_unchanged();
        }
    });
}

/// A pod whose own process is killed while a container runs, and its next attempt. containerd's pod controller forgets the
/// shim of such a pod (containerd#10421); ours leaves by itself once it has nothing any more.
#[test]
fn a_pod_whose_own_process_was_killed_leaves_nothing() {
    Sandbox::new("restart::a_pod_whose_own_process_was_killed_leaves_nothing").run(|| {
        // A daemon that stays connected gets ten times this.
        fs::write("/etc/podvisor/config.toml", "idle_timeout = 0.5\n").unwrap();
        let Some(daemon) = node::start("containerd-2.1", "") else {
            return;
        };
        let mut seen: Vec<_> = ["podvisor-pod", "podvisor", "runc"]
            .map(|handler| {
                let before = snapshot();
                let mut side = Side::of(&daemon, handler);
                pods::killed(&mut side);
                let own = handler != "runc";
                if own {
                    before.assert_unchanged();
                }
                let left = before.changes().iter().any(|line| line.contains("process"));
                side.say(
                    "what is left in the end",
                    if left { "a shim" } else { "nothing" },
                );
                (handler, side.seen)
            })
            .into();
        seen.reverse();
        let forgotten = OnPurpose {
            handler: "*",
            key: "what is left in the end",
            theirs: "a shim",
            ours: "nothing",
            verdict: "better",
            why: "forgets the shim of such a pod",
        };
        node::assert_alike(&node::compare(
            "a pod whose process is killed",
            &seen,
            &[forgotten],
        ));
    });
}

/// A first attempt that meets a network which fails, or is slower than the caller waits: the next one comes up, and nothing
/// is left of either.
#[test]
fn the_next_attempt_of_a_pod_comes_up() {
    Sandbox::new("restart::the_next_attempt_of_a_pod_comes_up").run(|| {
        let Some(mut daemon) = node::start("containerd-2.1", "") else {
            return;
        };
        let plugins = Path::new(cni::PLUGINS);
        let bridge = cni::real_plugins().unwrap().join("bridge");
        let fake = fake::plugin_before(plugins, "flaky", &bridge);
        node::network()
            .typed("flaky")
            .write_in(Path::new(cni::CONFIGS));
        daemon.restart();
        for handler in ["podvisor", "podvisor-pod"] {
            let before = snapshot();
            let mut kubelet = Kubelet::of(&daemon, handler);
            fake.forget();
            fake.on("ADD", &[Act::Exit(1), Act::OnlyFirst(1)]);
            let second = kubelet.run(&pod(&format!("fails-{handler}")), 3).unwrap();
            assert_eq!((second.config.metadata.attempt, fake.count("ADD")), (1, 2));
            fake.on("ADD", &[Act::Sleep(4.0)]);
            let mut config = pod(&format!("slow-{handler}"));
            kubelet.patience = Duration::from_secs(1);
            assert_eq!(kubelet.run(&config, 1).unwrap_err().code, 4);
            fake.on("ADD", &[]);
            kubelet.patience = BOUND;
            // The daemon holds the first attempt's name until it has given up on it, too.
            kubelet.clean(&config.metadata.name);
            config.metadata.as_mut().unwrap().attempt = 1;
            let slow = kubelet.run(&config, 2).unwrap();
            let id = kubelet.launch(&slow, &sleeper("a")).unwrap();
            assert_eq!(kubelet.sh(&id, "hostname"), slow.config.hostname);
            for pod in [second, slow] {
                kubelet.end(&pod.id);
            }
            kubelet.clean(&config.metadata.name);
            before.assert_unchanged();
        }
    });
}
