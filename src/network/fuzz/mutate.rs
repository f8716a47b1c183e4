//! Damage by numbers: what a power cut, a half-written file or a careless program makes of a text. Reproducible from a
//! seed; used by the tests of this room and by `tests/fuzz_network.rs`.

use serde_json::{Map, Value, json};

/// Pieces that readers stumble over.
const TOKENS: [&[u8]; 30] = [
    b"{",
    b"}",
    b"[",
    b"]",
    b"\"",
    b",",
    b":",
    b"null",
    b"true",
    b"-1",
    b"1e999",
    b"18446744073709551616",
    b"0.1.0",
    b"0.2.0",
    b"0.4.0",
    b"1.1.0",
    b"\"cniVersion\"",
    b"\"ips\"",
    b"\"ip4\"",
    b"\"plugins\"",
    b"\"type\"",
    b"../",
    b"/",
    b"\\u0000",
    b"\\ud800",
    b"\0",
    b"\xff\xfe",
    b"\n",
    b"10.0.0.2/33",
    b"fd00::2/64",
];

/// xorshift64*.
#[derive(Debug)]
pub struct Rng(u64);

impl Rng {
    /// The same numbers for the same seed.
    pub fn new(seed: u64) -> Self {
        Self(seed | 1)
    }

    /// A number below `limit`; 0 where there is none.
    pub fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        let high = self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 32;
        usize::try_from(high).unwrap_or_default() % limit.max(1)
    }

    fn of<'a, T>(&mut self, all: &'a [T]) -> &'a T {
        &all[self.below(all.len())]
    }
}

/// One text of the corpus, damaged in one to four places.
pub fn mutate(rng: &mut Rng, corpus: &[Vec<u8>]) -> Vec<u8> {
    let mut text = rng.of(corpus).clone();
    for _ in 0..=rng.below(4) {
        // Half of the damage stays JSON: the rest ends in the parser.
        if rng.below(2) == 0 {
            restructure(rng, &mut text, corpus);
        } else {
            scramble(rng, &mut text, corpus);
        }
    }
    text
}

fn scramble(rng: &mut Rng, text: &mut Vec<u8>, corpus: &[Vec<u8>]) {
    let at = rng.below(text.len() + 1);
    let end = (at + 1 + rng.below(24)).min(text.len());
    match rng.below(9) {
        0 if at < text.len() => text[at] ^= 1 << rng.below(8),
        1 if at < text.len() => text[at] = u8::try_from(rng.below(256)).unwrap_or_default(),
        2 if at < end => drop(text.drain(at..end)),
        3 if at < end => {
            let again = text[at..end].to_vec();
            text.splice(at..at, again);
        }
        4 => text.truncate(at),
        5 => {
            let other = rng.of(corpus);
            let from = rng.below(other.len() + 1);
            text.truncate(at);
            text.extend(&other[from..]);
        }
        6 => {
            let opened = [b'[', b'{', b'"'][rng.below(3)];
            text.splice(at..at, vec![opened; 1 << rng.below(9)]);
        }
        7 => text.iter_mut().skip(at).take(64).for_each(|b| *b = 0),
        _ => drop(text.splice(at..at, rng.of(&TOKENS).iter().copied())),
    }
}

/// Changes one value of a JSON text; leaves what is none.
fn restructure(rng: &mut Rng, text: &mut Vec<u8>, corpus: &[Vec<u8>]) {
    let Ok(mut top) = serde_json::from_slice::<Value>(text) else {
        return;
    };
    let other = serde_json::from_slice(rng.of::<Vec<u8>>(corpus)).unwrap_or(Value::Null);
    let node = descend(rng, &mut top);
    match (rng.below(4), &mut *node) {
        (0, Value::Object(map)) => rename(rng, map),
        (1, Value::Object(map)) if !map.is_empty() => {
            let key = map.keys().nth(rng.below(map.len())).cloned();
            map.shift_remove(&key.unwrap_or_default());
        }
        (0, Value::Array(list)) if !list.is_empty() => {
            let again = rng.of(list).clone();
            list.extend(vec![again; 1 << rng.below(4)]);
        }
        (1, Value::Array(list)) => list.reverse(),
        (2, node) => *node = descend(rng, &mut other.clone()).clone(),
        (_, node) => *node = odd(rng),
    }
    *text = top.to_string().into_bytes();
}

/// A value somewhere in `value`.
fn descend<'a>(rng: &mut Rng, value: &'a mut Value) -> &'a mut Value {
    let inner = match value {
        Value::Object(map) => map.len(),
        Value::Array(list) => list.len(),
        _ => 0,
    };
    if inner == 0 || rng.below(5) == 0 {
        return value;
    }
    let n = rng.below(inner);
    match value {
        Value::Object(map) => match map.values_mut().nth(n) {
            Some(inner) => descend(rng, inner),
            None => unreachable!("one of its values"),
        },
        Value::Array(list) => descend(rng, &mut list[n]),
        _ => unreachable!("it has values"),
    }
}

fn rename(rng: &mut Rng, map: &mut Map<String, Value>) {
    let names = [
        "ips",
        "ip4",
        "ip6",
        "interfaces",
        "routes",
        "dns",
        "name",
        "type",
        "plugins",
        "cniVersion",
        "capabilities",
        "config",
        "",
    ];
    let n = rng.below(map.len());
    let Some(key) = map.keys().nth(n).cloned() else {
        return;
    };
    if let Some(value) = map.shift_remove(&key) {
        map.insert((*rng.of(&names)).to_owned(), value);
    }
}

fn odd(rng: &mut Rng) -> Value {
    let all = [
        json!(null),
        json!(true),
        json!(-1),
        json!(u64::MAX),
        json!(1.5e300),
        json!(""),
        json!("../../etc"),
        json!("a\u{0}b\n"),
        json!("0.2.0"),
        json!("1.1.0"),
        json!("9.9.9"),
        json!("::/129"),
        json!("x".repeat(300)),
        json!([]),
        json!({}),
        json!([null, {}, []]),
        json!({"ip": "10.0.0.2/24"}),
    ];
    rng.of(&all).clone()
}
