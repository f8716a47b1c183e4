//! What a caller of the shim hands over, damaged at random: arguments, standard input, runtime options.
//!
//! Whatever it is, reading it ends, does not panic, and gives something sound or an error that fits on a line of a log.
//! `PODVISOR_FUZZ_SEED` repeats a run, `PODVISOR_FUZZ_SECONDS` is how long a slow one takes (600).
#![allow(clippy::print_stdout, reason = "a failure tells its seed")]

use std::env;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use protobuf::Message;
use protobuf::well_known_types::any::Any;

use super::{bootstrap, flags};
use crate::error::{Error, Kind};
use crate::network::fuzz::mutate::{Rng, mutate};
use crate::spec::options::{self, Options};

const FEW: u32 = 20_000;
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

/// Tells what it was when a round panics.
struct Round<'a>(u64, u32, &'a [u8]);

impl Drop for Round<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            println!("seed {}, round {}, input: {:?}", self.0, self.1, self.2);
        }
    }
}

fn number(name: &str) -> Option<u64> {
    env::var(name).ok()?.parse().ok()
}

/// The corpus as it is, then damaged: so many rounds, or for as long as a slow run takes (`rounds` 0).
fn each(name: &str, rounds: u32, mut read: impl FnMut(&[u8])) {
    let corpus = corpus(name);
    let slow = Duration::from_secs(number("PODVISOR_FUZZ_SECONDS").unwrap_or(600));
    let now = || SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    let seed = number("PODVISOR_FUZZ_SEED").unwrap_or_else(|| match rounds {
        0 => now().subsec_nanos().into(),
        _ => 20_240_229,
    });
    let mut rng = Rng::new(seed);
    let begun = Instant::now();
    let mut n = 0;
    while if rounds == 0 {
        begun.elapsed() < slow
    } else {
        n < rounds
    } {
        let input = match corpus.get(n as usize) {
            Some(case) => case.clone(),
            None => mutate(&mut rng, &corpus),
        };
        let _told = Round(seed, n, &input);
        let before = Instant::now();
        read(&input);
        assert!(before.elapsed() < LIMIT, "{:?}", before.elapsed());
        n += 1;
    }
    println!("{name}: seed {seed}, {n} inputs in {:?}", begun.elapsed());
}

fn is_clear(error: &Error) {
    let text = error.to_string();
    assert_eq!(error.kind(), Kind::Invalid, "{text}");
    assert!(!text.is_empty() && text.len() < 100_000, "{}", text.len());
}

fn arguments(rounds: u32) {
    each("flags", rounds, |input| {
        let args = input
            .split(|b| *b == 0)
            .map(|arg| String::from_utf8_lossy(arg).into_owned());
        match flags::parse(args) {
            // What is parsed is checked before it is used: the check must not panic either.
            Ok(flags) => drop((
                crate::id::check_namespace(&flags.namespace).is_ok(),
                crate::id::check("id", &flags.id).is_ok(),
            )),
            Err(error) => is_clear(&error),
        }
    });
}

fn input(rounds: u32) {
    each("bootstrap", rounds, |input| {
        match bootstrap::parse(input, "web", "test") {
            Ok(read) => {
                // An Any never passes for parameters: those name us.
                if read.params.is_some() {
                    assert!(input.windows(3).any(|w| w == b"web"));
                }
                if let Some(options) = read.options {
                    decode(&options);
                }
            }
            Err(error) => is_clear(&error),
        }
    });
}

fn decode(any: &Any) {
    match Options::decode(any) {
        Ok(read) => {
            assert!(options::is_known(any));
            // The other kind's field 3 is a TOML table; it must never become a cgroup.
            if any.type_url.ends_with("runtimeoptions.v1.Options") {
                assert!(!read.shim_cgroup.contains("BinaryName"));
            }
        }
        Err(error) => is_clear(&error),
    }
}

fn runtime_options(rounds: u32) {
    each("options", rounds, |input| {
        if let Ok(any) = Any::parse_from_bytes(input) {
            decode(&any);
        }
        // The table by itself: inside a message most damage ends in the message.
        if let Err(error) = Options::from_toml(input) {
            is_clear(&error);
        }
    });
}

#[test]
fn damaged_arguments_are_flags_or_an_error() {
    arguments(FEW);
}

#[test]
fn damaged_input_is_options_parameters_or_an_error() {
    input(FEW);
}

#[test]
fn damaged_options_are_options_or_an_error() {
    runtime_options(FEW);
}

#[test]
#[ignore = "ten minutes"]
fn slow_damaged_arguments() {
    arguments(0);
}

#[test]
#[ignore = "ten minutes"]
fn slow_damaged_input() {
    input(0);
}

#[test]
#[ignore = "ten minutes"]
fn slow_damaged_options() {
    runtime_options(0);
}

#[test]
fn a_table_that_is_nested_without_end_is_an_error() {
    for open in ["[", "{x=", "[{y="] {
        let text = format!("a = {}", open.repeat(20_000));
        is_clear(&Options::from_toml(text.as_bytes()).unwrap_err());
    }
}
