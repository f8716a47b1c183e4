//! A JSON file in the form that `crictl` takes, read field by field.
//!
//! Promises that nothing in it is dropped in silence: a field that nobody has asked for and that says something is an error,
//! with all the others in one message; one that says what podvisor does by other means is told. Field names may be written
//! in CRI's way (`port_mappings`) or in JSON's (`portMappings`), values of enumerations as numbers or names.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use serde_json::{Map, Value};

use crate::error::{Context, Error, Kind, Result};

use super::output;

/// A file that is being read.
#[derive(Debug)]
pub struct Given {
    file: String,
    refused: RefCell<Vec<String>>,
}

/// One object of it.
#[derive(Debug)]
pub struct Object<'a> {
    given: &'a Given,
    /// Where it is in the file: "linux.security_context"; empty for the whole.
    path: String,
    fields: Map<String, Value>,
}

/// Reads the file with `read`, and complains of what that has left.
pub fn read<T>(path: &Path, read: impl FnOnce(Object<'_>) -> Result<T>) -> Result<T> {
    let what = || format!("read {}", path.display());
    let text = fs::read_to_string(path).context(what)?;
    let value: Value = serde_json::from_str(&text)
        .map_err(|e| Error::caused(Kind::Invalid, format!("{}: it is no JSON", what()), e))?;
    let given = Given {
        file: path.display().to_string(),
        refused: RefCell::default(),
    };
    let whole = match value {
        Value::Object(fields) => Object::new(&given, String::new(), fields),
        _ => return Err(given.wrong("", "the file holds no JSON object")),
    };
    let made = read(whole)?;
    let refused = given.refused.borrow();
    if refused.is_empty() {
        return Ok(made);
    }
    let list = refused.join(", ");
    let why = format!("not known or not supported: {list}; leave out what the pod does not need");
    Err(Error::new(Kind::Unsupported, format!("{}: {why}", what())))
}

impl Given {
    fn wrong(&self, path: &str, why: &str) -> Error {
        let at = if path.is_empty() { "" } else { ": " };
        Error::new(
            Kind::Invalid,
            format!("read {}{at}{path}: {why}", self.file),
        )
    }
}

impl<'a> Object<'a> {
    fn new(given: &'a Given, path: String, fields: Map<String, Value>) -> Self {
        let fields = fields.into_iter().map(|(k, v)| (snake(&k), v)).collect();
        Self {
            given,
            path,
            fields,
        }
    }

    /// A text; empty when it is not there.
    pub fn text(&mut self, name: &str) -> Result<String> {
        match self.take(name) {
            Value::Null => Ok(String::new()),
            Value::String(text) => Ok(text),
            _ => Err(self.wrong(name, "give a text")),
        }
    }

    /// A whole number, which JSON may have as a text; `None` when it is not there.
    pub fn number(&mut self, name: &str) -> Result<Option<i64>> {
        match self.take(name) {
            Value::Null => Ok(None),
            Value::Number(n) if n.is_i64() => Ok(n.as_i64()),
            Value::String(text) if text.parse::<i64>().is_ok() => Ok(text.parse().ok()),
            // CRI's Int64Value.
            Value::Object(map) => match map.get("value") {
                Some(Value::Number(n)) if n.is_i64() && map.len() == 1 => Ok(n.as_i64()),
                _ => Err(self.wrong(name, "give a whole number")),
            },
            _ => Err(self.wrong(name, "give a whole number")),
        }
    }

    /// True or false; false when it is not there.
    pub fn flag(&mut self, name: &str) -> Result<bool> {
        match self.take(name) {
            Value::Null => Ok(false),
            Value::Bool(value) => Ok(value),
            _ => Err(self.wrong(name, "give true or false")),
        }
    }

    /// Texts; none when it is not there.
    pub fn texts(&mut self, name: &str) -> Result<Vec<String>> {
        let value = self.take(name);
        let list = match value {
            Value::Null => return Ok(Vec::new()),
            Value::Array(list) => list.into_iter().map(|v| match v {
                Value::String(text) => Some(text),
                _ => None,
            }),
            _ => return Err(self.wrong(name, "give a list of texts")),
        };
        list.collect::<Option<_>>()
            .ok_or_else(|| self.wrong(name, "give a list of texts"))
    }

    /// Whole numbers; none when it is not there.
    pub fn numbers(&mut self, name: &str) -> Result<Vec<i64>> {
        match self.take(name) {
            Value::Null => Ok(Vec::new()),
            Value::Array(list) => list
                .iter()
                .map(Value::as_i64)
                .collect::<Option<_>>()
                .ok_or_else(|| self.wrong(name, "give a list of whole numbers")),
            _ => Err(self.wrong(name, "give a list of whole numbers")),
        }
    }

    /// Texts by name; their names are left as they are.
    pub fn map(&mut self, name: &str) -> Result<BTreeMap<String, String>> {
        let fields = match self.take(name) {
            Value::Null => return Ok(BTreeMap::new()),
            Value::Object(fields) => fields,
            _ => return Err(self.wrong(name, "give an object of texts")),
        };
        let text = |(key, value): (String, Value)| match value {
            Value::String(text) => Some((key, text)),
            _ => None,
        };
        let all = fields.into_iter().map(text).collect::<Option<_>>();
        all.ok_or_else(|| self.wrong(name, "give an object of texts"))
    }

    /// One of `names`, by itself or by its place; `None` when it is not there.
    pub fn choice(&mut self, name: &str, names: &[&str]) -> Result<Option<usize>> {
        let place = match self.take(name) {
            Value::Null => return Ok(None),
            Value::Number(n) => n.as_u64().and_then(|n| usize::try_from(n).ok()),
            Value::String(text) => names.iter().position(|n| n.eq_ignore_ascii_case(&text)),
            _ => None,
        };
        match place.filter(|p| *p < names.len()) {
            Some(place) => Ok(Some(place)),
            None => Err(self.wrong(name, &format!("give one of {}", names.join(", ")))),
        }
    }

    /// An object in it; one without fields when it is not there.
    pub fn object(&mut self, name: &str) -> Result<Object<'a>> {
        match self.take(name) {
            Value::Null => Ok(Object::new(self.given, self.at(name), Map::new())),
            Value::Object(fields) => Ok(Object::new(self.given, self.at(name), fields)),
            _ => Err(self.wrong(name, "give an object")),
        }
    }

    /// Objects in a list in it.
    pub fn objects(&mut self, name: &str) -> Result<Vec<Object<'a>>> {
        let list = match self.take(name) {
            Value::Null => return Ok(Vec::new()),
            Value::Array(list) => list,
            _ => return Err(self.wrong(name, "give a list of objects")),
        };
        let object = |(i, value)| match value {
            Value::Object(fields) => {
                let path = format!("{}[{i}]", self.at(name));
                Ok(Object::new(self.given, path, fields))
            }
            _ => Err(self.wrong(name, "give a list of objects")),
        };
        list.into_iter().enumerate().map(object).collect()
    }

    /// A field that is right, and that podvisor does not go by: `why` is told when it says something.
    pub fn unused(&mut self, name: &str, why: &str) {
        let value = self.take(name);
        if says_something(&value) {
            let (file, path) = (&self.given.file, self.at(name));
            output::complain(format!("{file}: {path} is not used: {why}"));
        }
    }

    /// Nothing else is asked for: what is left is refused.
    pub fn end(self) {
        for (name, value) in &self.fields {
            if says_something(value) {
                self.given.refused.borrow_mut().push(self.at(name));
            }
        }
    }

    /// What is wrong with a field.
    pub fn wrong(&self, name: &str, why: &str) -> Error {
        self.given.wrong(&self.at(name), why)
    }

    /// Refuses a field for what it says.
    pub fn refuse(&self, name: &str, what: &str) {
        let text = format!("{} = {what}", self.at(name));
        self.given.refused.borrow_mut().push(text);
    }

    fn take(&mut self, name: &str) -> Value {
        self.fields.shift_remove(name).unwrap_or_default()
    }

    fn at(&self, name: &str) -> String {
        match self.path.as_str() {
            "" => name.to_owned(),
            path => format!("{path}.{name}"),
        }
    }
}

/// Neither empty nor what a missing field means.
fn says_something(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => false,
        Value::Bool(true) => true,
        Value::Number(n) => n.as_f64() != Some(0.0),
        Value::String(text) => !text.is_empty(),
        Value::Array(list) => list.iter().any(says_something),
        Value::Object(map) => map.values().any(says_something),
    }
}

/// `portMappings` → `port_mappings`.
fn snake(name: &str) -> String {
    let mut out = String::with_capacity(name.len() + 4);
    let mut small = false;
    for c in name.chars() {
        if c.is_ascii_uppercase() && small {
            out.push('_');
        }
        small = c.is_ascii_lowercase() || c.is_ascii_digit();
        out.push(c.to_ascii_lowercase());
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(text: &str) -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), text).unwrap();
        file
    }

    #[test]
    fn everything_that_is_left_is_named_at_once() {
        let given = file(
            r#"{"known": "x", "typo": 1, "empty": {}, "in": {"cpuPeriod": "7", "other": [0, true]}, "off": false}"#,
        );
        let error = read(given.path(), |mut whole| {
            assert_eq!(whole.text("known").unwrap(), "x");
            let mut inner = whole.object("in").unwrap();
            assert_eq!(inner.number("cpu_period").unwrap(), Some(7));
            inner.end();
            whole.end();
            Ok(())
        })
        .unwrap_err();
        assert_eq!(error.kind(), Kind::Unsupported);
        assert!(error.to_string().contains("in.other, typo;"), "{error}");
    }

    #[test]
    fn values_of_another_kind_are_errors_that_say_where() {
        let given = file(r#"{"a": {"b": 1}}"#);
        let error = read(given.path(), |mut whole| whole.object("a")?.text("b")).unwrap_err();
        assert!(error.to_string().ends_with("a.b: give a text"), "{error}");
        for text in ["", "[]", "{\"a\":"] {
            assert!(read(file(text).path(), |_| Ok(())).is_err(), "{text}");
        }
        let modes = file(r#"{"a": "node", "b": 1, "c": 3}"#);
        read(modes.path(), |mut whole| {
            let names = ["POD", "CONTAINER", "NODE"];
            assert_eq!(whole.choice("a", &names)?, Some(2));
            assert_eq!(whole.choice("b", &names)?, Some(1));
            assert!(whole.choice("c", &names).is_err());
            assert_eq!(whole.choice("d", &names)?, None);
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn names_in_both_spellings() {
        for (name, made) in [
            ("portMappings", "port_mappings"),
            ("port_mappings", "port_mappings"),
            ("CDI_devices", "cdi_devices"),
            ("memoryLimitInBytes", "memory_limit_in_bytes"),
        ] {
            assert_eq!(snake(name), made);
        }
    }
}
