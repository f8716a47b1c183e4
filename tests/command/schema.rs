//! The JSON of every verb against the schemas in docs/schema.
//!
//! The checker knows the few words those schemas use, and fails on any other: a schema cannot promise what nobody checks.

use serde_json::{Value, json};

use crate::kit::{json as output, on_a_machine};
use crate::support::podvisor;

/// The verb's output fits its schema.
#[track_caller]
pub fn fits(schema: &str, value: &Value) {
    let path = format!("{}/docs/schema/{schema}.json", env!("CARGO_MANIFEST_DIR"));
    let whole: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    let mut wrong = Vec::new();
    check(&whole, &whole, value, schema, &mut wrong);
    assert!(wrong.is_empty(), "{wrong:#?}\nin {value:#}");
}

fn check(whole: &Value, schema: &Value, value: &Value, at: &str, wrong: &mut Vec<String>) {
    let mut say = |what: String| wrong.push(format!("{at}: {what}, not {value}"));
    let rules = schema.as_object().unwrap();
    let mut deeper: Vec<(&Value, &Value, String)> = Vec::new();
    for (word, rule) in rules {
        match word.as_str() {
            "$schema" | "$defs" | "title" | "description" => {}
            "$ref" => {
                let place = rule.as_str().unwrap().strip_prefix('#').unwrap();
                deeper.push((whole.pointer(place).unwrap(), value, at.to_owned()));
            }
            "type" => {
                let kinds = rule
                    .as_array()
                    .cloned()
                    .unwrap_or_else(|| vec![rule.clone()]);
                if !kinds.iter().any(|kind| is(kind.as_str().unwrap(), value)) {
                    say(format!("wanted {rule}"));
                }
            }
            "enum" => {
                if !rule.as_array().unwrap().contains(value) {
                    say(format!("wanted one of {rule}"));
                }
            }
            "minimum" => {
                if value.as_f64().is_some_and(|n| n < rule.as_f64().unwrap()) {
                    say(format!("wanted at least {rule}"));
                }
            }
            "format" => {
                assert_eq!(rule, "date-time");
                let time = |t: &str| t.len() == 30 && t.ends_with('Z') && t.as_bytes()[10] == b'T';
                if value.as_str().is_some_and(|t| !time(t)) {
                    say("wanted a time".to_owned());
                }
            }
            "anyOf" => {
                let fits = |one: &Value| {
                    let mut none = Vec::new();
                    check(whole, one, value, at, &mut none);
                    none.is_empty()
                };
                if !rule.as_array().unwrap().iter().any(fits) {
                    say("fits none of anyOf".to_owned());
                }
            }
            "items" => {
                let items = value.as_array().into_iter().flatten().enumerate();
                deeper.extend(items.map(|(i, item)| (rule, item, format!("{at}[{i}]"))));
            }
            "required" => {
                for name in rule.as_array().unwrap() {
                    if value.is_object() && value.get(name.as_str().unwrap()).is_none() {
                        say(format!("{name} is missing"));
                    }
                }
            }
            "properties" => {
                let known = rule.as_object().unwrap().iter();
                let there = known.filter_map(|(name, rule)| {
                    Some((rule, value.get(name)?, format!("{at}.{name}")))
                });
                deeper.extend(there);
            }
            "additionalProperties" => {
                let named = |name: &str| {
                    rules
                        .get("properties")
                        .is_some_and(|p| p.get(name).is_some())
                };
                let fields = value.as_object().into_iter().flatten();
                for (name, field) in fields.filter(|(name, _)| !named(name)) {
                    match rule {
                        Value::Bool(true) => {}
                        Value::Bool(false) => say(format!("{name} is not in the schema")),
                        rule => deeper.push((rule, field, format!("{at}.{name}"))),
                    }
                }
            }
            other => panic!("{at}: the checker does not know {other:?}"),
        }
    }
    for (rule, part, at) in deeper {
        check(whole, rule, part, &at, wrong);
    }
}

fn is(kind: &str, value: &Value) -> bool {
    match kind {
        "null" => value.is_null(),
        "boolean" => value.is_boolean(),
        "string" => value.is_string(),
        "integer" => value.is_i64() || value.is_u64(),
        "number" => value.is_number(),
        "array" => value.is_array(),
        "object" => value.is_object(),
        other => panic!("{other:?} is no type"),
    }
}

#[test]
fn the_checker_sees_what_does_not_fit() {
    let schema = json!({"type": "object", "properties": {"a": {"type": ["integer", "null"], "minimum": 0}, "t": {"format": "date-time"}},
        "required": ["a"], "additionalProperties": false});
    for (value, good) in [
        (json!({"a": 1}), true),
        (
            json!({"a": null, "t": "2026-11-30T13:33:12.000000001Z"}),
            true,
        ),
        (json!({"a": -1}), false),
        (json!({"a": "1"}), false),
        (json!({}), false),
        (json!({"a": 1, "b": 1}), false),
        (json!({"a": 1, "t": "now"}), false),
        (json!([]), false),
    ] {
        let mut wrong = Vec::new();
        check(&schema, &schema, &value, "", &mut wrong);
        assert_eq!(wrong.is_empty(), good, "{value}: {wrong:?}");
    }
}

/// Pods in every state that a person meets, and both spellings of the flag.
#[test]
fn every_json_is_the_one_described() {
    on_a_machine("schema::every_json_is_the_one_described", |kit| {
        let web = kit.detached(
            &["--name", "web", "-p", "127.0.0.1:8080:80", "-l", "a=b"],
            "sleep 1000",
        );
        kit.detached(&["--name", "log", "--net", "none", "-t"], "sleep 1000");
        kit.run(&["--name", "over", "--net", "host"], "exit 3")
            .code_is(3);
        let damaged = podvisor(&["create", "--name", "damaged", "--net", "none"]).ok();
        kit.detached(&["--name", "dead", "--net", "none"], "sleep 1000");
        crate::kit::kill_supervisor("dead");
        let journal = format!(
            "/run/podvisor/default/{}/journal.json",
            damaged.stdout.trim()
        );
        let whole = std::fs::read(&journal).unwrap();
        for verb in [
            &["ps", "-a"][..],
            &["inspect", "web", "log", "over", "damaged", "dead"],
            &["network", "ls"],
            &["stats", "--no-stream"],
            &["version"],
        ] {
            let schema = verb
                .iter()
                .take_while(|w| !w.starts_with('-') && (verb[0] == "network" || **w == verb[0]));
            let schema: Vec<&str> = schema.copied().collect();
            let long = output(&[verb, &["--format", "json"]].concat());
            fits(&schema.join("-"), &long);
            fits(&schema.join("-"), &output(&[verb, &["--json"]].concat()));
            if verb[0] == "ps" {
                assert_eq!(long.as_array().unwrap().len(), 5);
                std::fs::write(&journal, "").unwrap();
                fits("ps", &output(&["ps", "--json"]));
                fits("inspect", &output(&["inspect", "damaged"]));
                std::fs::write(&journal, &whole).unwrap();
            }
        }
        podvisor(&["pause", "log"]).ok();
        fits("ps", &output(&["ps", "--json"]));
        for line in podvisor(&["events", "--no-follow", "--json"])
            .ok()
            .stdout
            .lines()
        {
            fits("events", &serde_json::from_str(line).unwrap());
        }
        // A table is the other form, and the one that people get.
        let table = podvisor(&["ps", "--format", "table"]).ok().stdout;
        assert!(
            table.starts_with("POD ID") && table.contains(&web[..12]),
            "{table}"
        );
        assert!(
            podvisor(&["inspect", "--format", "table", "web"])
                .ok()
                .stdout
                .starts_with("STAGE")
        );
        podvisor(&["ps", "--format", "xml"])
            .code_is(125)
            .fails_with("table, json");
        podvisor(&["rm", "-f", "web", "log", "over", "damaged", "dead"]).ok();
    });
}
