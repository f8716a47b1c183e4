//! `config.json` and ttrpc frames, damaged at random. What the shim reads itself is in `src/launch/fuzz.rs`.
//!
//! `PODVISOR_FUZZ_SEED` repeats a run, `PODVISOR_FUZZ_SECONDS` is how long a slow one takes (600).
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::print_stdout,
    reason = "tests panic where they cannot go on"
)]

#[path = "../src/network/fuzz/mutate.rs"]
mod mutate;

use std::env;
use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use mutate::{Rng, mutate};
use podvisor::client::{self, Client};
use podvisor::config::Config;
use podvisor::container::Events;
use podvisor::error::Kind;
use podvisor::pod::{Pod, PodOptions};
use podvisor::process::Reaper;
use podvisor::proto::task_v3::shim::StateRequest;
use podvisor::service;
use podvisor::spec::Spec;
use protobuf::well_known_types::any::Any;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::sync::watch;
use ttrpc::asynchronous::Server;

/// For hangs only.
const LIMIT: Duration = Duration::from_secs(20);

/// The cases of a directory of `tests/data/fuzz`.
fn corpus(name: &str) -> Vec<Vec<u8>> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/data/fuzz")
        .join(name);
    let mut files: Vec<_> = fs::read_dir(dir).unwrap().flatten().collect();
    files.sort_by_key(|f| f.file_name());
    let all: Vec<_> = files.iter().map(|f| fs::read(f.path()).unwrap()).collect();
    assert!(all.len() > 3, "{name}");
    all
}

fn number(name: &str) -> Option<u64> {
    env::var(name).ok()?.parse().ok()
}

/// The inputs of one run: the corpus as it is, then damaged; `rounds` 0: for as long as a slow run takes.
struct Inputs {
    corpus: Vec<Vec<u8>>,
    rng: Rng,
    seed: u64,
    rounds: usize,
    done: usize,
    begun: Instant,
}

impl Inputs {
    fn new(name: &str, rounds: usize) -> Self {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
        let seed = number("PODVISOR_FUZZ_SEED").unwrap_or_else(|| match rounds {
            0 => now.subsec_nanos().into(),
            _ => 20_240_229,
        });
        Self {
            corpus: corpus(name),
            rng: Rng::new(seed),
            seed,
            rounds,
            done: 0,
            begun: Instant::now(),
        }
    }

    fn told(&self, input: &[u8]) -> String {
        format!("seed {}, round {}, input: {input:?}", self.seed, self.done)
    }
}

impl Iterator for Inputs {
    type Item = Vec<u8>;

    fn next(&mut self) -> Option<Vec<u8>> {
        let slow = Duration::from_secs(number("PODVISOR_FUZZ_SECONDS").unwrap_or(600));
        let over = match self.rounds {
            0 => self.begun.elapsed() >= slow,
            rounds => self.done >= rounds,
        };
        if over {
            let took = self.begun.elapsed();
            println!("seed {}, {} inputs in {took:?}", self.seed, self.done);
            return None;
        }
        let input = match self.corpus.get(self.done) {
            Some(case) => case.clone(),
            None => mutate(&mut self.rng, &self.corpus),
        };
        self.done += 1;
        Some(input)
    }
}

fn specs(rounds: usize) {
    let mut inputs = Inputs::new("config", rounds);
    while let Some(input) = inputs.next() {
        let told = || inputs.told(&input);
        let begun = Instant::now();
        match Spec::parse(&input) {
            Ok(mut spec) => {
                let _ = (
                    spec.annotations(),
                    spec.hostname(),
                    spec.has_own_pid_namespace(),
                );
                let _ = (spec.cgroups_path(), spec.sysctls(), spec.root_path());
                for mappings in [spec.uid_mappings(), spec.gid_mappings()] {
                    let kind = mappings.map(drop).map_err(|e| e.kind());
                    assert!(matches!(kind, Ok(()) | Err(Kind::Invalid)), "{}", told());
                }
                for (kind, _) in spec.namespaces() {
                    spec.set_namespace_path(&kind, Path::new("/pod/ns"));
                    spec.remove_namespace("network");
                }
                let shm = Path::new("/dev/shm");
                let _ = spec.find_mount(shm);
                spec.replace_mount(shm, Path::new("/pod/shm"), "bind", &["rbind".into()]);
                spec.add_missing_rlimit("RLIMIT_NOFILE", 1, 2);
                spec.set_cgroups_path("/pod/c");
                spec.set_annotation("a", "b");
                // What is written is a document again, with what was added.
                let again = Spec::parse(&spec.to_bytes().unwrap()).unwrap();
                assert!(again.find_mount(shm).is_some(), "{}", told());
                assert_eq!(again.cgroups_path(), Some("/pod/c"), "{}", told());
            }
            Err(error) => assert_eq!(error.kind(), Kind::Invalid, "{error} {}", told()),
        }
        assert!(begun.elapsed() < LIMIT, "{}", told());
    }
}

struct Nobody;

impl Events for Nobody {
    fn publish(&self, _: &'static str, _: Any) {}
}

static PANICS: AtomicUsize = AtomicUsize::new(0);

/// A supervisor's services in this process, and a client that sends what it likes. Nothing of the corpus can do anything:
/// no request names a container or a bundle that is there.
fn frames(rounds: usize) {
    let usual = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        PANICS.fetch_add(1, Ordering::Relaxed);
        usual(info);
    }));
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let socket = dir.path().join("s");
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(async {
        let address = format!("unix://{}", socket.display());
        let options = PodOptions {
            config: Arc::new(Config {
                runtime_root: dir.path().join("run"),
                state_root: dir.path().join("lib"),
                ..Config::default()
            }),
            namespace: "test".into(),
            group: "c".into(),
            bundle: dir.path().join("bundle"),
            address: address.clone(),
        };
        let pod = Pod::new(options, Reaper::start().unwrap(), Arc::new(Nobody)).unwrap();
        let (_count, connections) = watch::channel(0);
        let mut server = Server::new()
            .bind(&address)
            .unwrap()
            .register_service(service::all(pod, connections));
        server.start().await.unwrap();
        let mut inputs = Inputs::new("frames", rounds);
        while let Some(input) = inputs.next() {
            let told = || inputs.told(&input);
            let mut stream = UnixStream::connect(&socket).await.unwrap();
            // It may hang up in the middle.
            let _ = stream.write_all(&input).await;
            let _ = stream.shutdown().await;
            let mut answer = Vec::new();
            let reading = tokio::time::timeout(LIMIT, stream.read_to_end(&mut answer));
            let _ = reading
                .await
                .unwrap_or_else(|_| panic!("no end: {}", told()));
            assert_eq!(PANICS.load(Ordering::Relaxed), 0, "{}", told());
            if inputs.done.is_multiple_of(64) {
                let client = Client::connect(&address).await.unwrap();
                let request = StateRequest {
                    id: "c".into(),
                    ..Default::default()
                };
                let limit = client::context(Some(LIMIT));
                let error = client.task().state(limit, &request).await.unwrap_err();
                let error = client::from_ttrpc("state", error);
                assert_eq!(error.kind(), Kind::NotFound, "{error}: {}", told());
            }
        }
    });
}

#[test]
fn a_damaged_config_json_is_a_spec_or_an_error() {
    specs(20_000);
}

#[test]
fn damaged_frames_hurt_nobody_else() {
    frames(2_000);
}

#[test]
#[ignore = "ten minutes"]
fn slow_damaged_config_json() {
    specs(0);
}

#[test]
#[ignore = "ten minutes"]
fn slow_damaged_frames() {
    frames(0);
}
