//! One network's configuration: a list of plugins, parsed and every name in it checked.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};

use super::{disk, version, wrap};
use crate::error::{Error, Kind, Result};

/// A loaded configuration list. The bytes are kept, so that DEL uses the configuration of its ADD; a single-plugin
/// file (`.conf`) is held as the list of one that it means.
#[derive(Clone, Debug)]
pub struct NetworkConf {
    /// Name of the network.
    pub name: String,
    /// File it came from.
    pub path: PathBuf,
    /// Version every plugin of the list is called with.
    pub cni_version: String,
    /// The list, JSON.
    pub bytes: Vec<u8>,
    /// The plugins in the order of ADD, each an object with a `type`.
    pub plugins: Vec<Value>,
    /// `disableCheck`.
    pub disable_check: bool,
    /// `disableGC`.
    pub disable_gc: bool,
}

/// Why a file is no configuration.
#[derive(Debug)]
pub(super) struct Bad {
    pub(super) error: Error,
    /// It is not even JSON: somebody may be writing it at this moment.
    pub(super) unfinished: bool,
}

impl NetworkConf {
    /// True when a plugin of the list declares `capability`.
    pub fn supports(&self, capability: &str) -> bool {
        self.plugins.iter().any(|p| declares(p, capability))
    }
}

/// True when `plugin` declares `capability`.
pub(super) fn declares(plugin: &Value, capability: &str) -> bool {
    plugin["capabilities"][capability] == Value::Bool(true)
}

/// Parses the text of a list, or of a single configuration, and checks every name in it.
pub(super) fn parse(path: &Path, bytes: Vec<u8>) -> Result<NetworkConf> {
    let top = object(path, &bytes).map_err(|bad| bad.error)?;
    build(path, bytes, top).map_err(|e| e.within(at(path)))
}

/// A list that is no file of its own: `from` says in errors where it came from.
pub fn inlined(from: &Path, list: &Value) -> Result<NetworkConf> {
    parse(from, list.to_string().into_bytes())
}

/// The same for a file in the configuration directory: plugins of `<directory>/<network>/*.conf` come after those in
/// the list, unless it says `loadOnlyInlinedPlugins` (CNI 1.1). The bytes hold them all then.
pub(super) fn load(path: &Path, mut bytes: Vec<u8>) -> Result<NetworkConf, Bad> {
    let mut top = object(path, &bytes)?;
    let is_list = top.contains_key("plugins") || is_conflist(path);
    let inlined_only = flag(&top, "loadOnlyInlinedPlugins");
    let name = top.get("name").and_then(Value::as_str).unwrap_or_default();
    if is_list && !inlined_only && crate::id::check_network(name).is_ok() {
        let more = beside(&path.with_file_name(name))?;
        if !more.is_empty() {
            let plugins = top.entry("plugins").or_insert_with(|| json!([]));
            if let Value::Array(plugins) = plugins {
                plugins.extend(more);
            }
            // Whoever reads these bytes later must not add them again.
            top.insert("loadOnlyInlinedPlugins".into(), true.into());
            bytes = Value::Object(top.clone()).to_string().into_bytes();
        }
    }
    // A pod of ours keeps its network itself and needs nobody in front of it.
    if wrap::expand(&mut top) {
        bytes = Value::Object(top.clone()).to_string().into_bytes();
    }
    build(path, bytes, top).map_err(|e| Bad {
        error: e.within(at(path)),
        unfinished: false,
    })
}

/// The plugins in a network's own directory, by file name.
fn beside(dir: &Path) -> Result<Vec<Value>, Bad> {
    let mut paths: Vec<PathBuf> = fs::read_dir(dir)
        .map(|entries| entries.flatten().map(|e| e.path()).collect())
        .unwrap_or_default();
    paths.retain(|p| p.extension().is_some_and(|e| e == "conf"));
    paths.sort();
    let read = |path: &PathBuf| match disk::read(path) {
        Ok(bytes) => object(path, &bytes).map(|top| Some(Value::Object(top))),
        Err(e) if e.is_gone() => Ok(None),
        Err(error) => Err(Bad {
            error,
            unfinished: true,
        }),
    };
    let read: Result<Vec<_>, _> = paths.iter().map(read).collect();
    Ok(read?.into_iter().flatten().collect())
}

fn object(path: &Path, bytes: &[u8]) -> Result<Map<String, Value>, Bad> {
    match serde_json::from_slice(bytes) {
        Ok(Value::Object(top)) => Ok(top),
        Ok(_) => Err(Bad {
            error: Error::new(
                Kind::Invalid,
                format!("{}: it is not a JSON object", at(path)),
            ),
            unfinished: false,
        }),
        Err(e) => Err(Bad {
            error: Error::caused(Kind::Invalid, at(path), e),
            unfinished: true,
        }),
    }
}

fn at(path: &Path) -> String {
    format!("read network configuration {}", path.display())
}

fn is_conflist(path: &Path) -> bool {
    path.extension().is_some_and(|e| e == "conflist")
}

/// A boolean that some writers put into quotes.
fn flag(top: &Map<String, Value>, key: &str) -> bool {
    match top.get(key) {
        Some(Value::Bool(on)) => *on,
        Some(Value::String(text)) => {
            matches!(text.as_str(), "true" | "True" | "TRUE" | "t" | "T" | "1")
        }
        _ => false,
    }
}

fn build(path: &Path, bytes: Vec<u8>, top: Map<String, Value>) -> Result<NetworkConf> {
    let name = string(&top, "name")?
        .ok_or_else(|| Error::new(Kind::Invalid, "the field \"name\" is missing"))?;
    crate::id::check_network(&name)?;
    let cni_version = version(&top)?;
    let disable_check = flag(&top, "disableCheck");
    let disable_gc = flag(&top, "disableGC");
    let (plugins, bytes) = match top.get("plugins") {
        Some(Value::Array(plugins)) if !plugins.is_empty() => (plugins.clone(), bytes),
        Some(_) => {
            return Err(Error::new(
                Kind::Invalid,
                "\"plugins\" must be a list with at least one plugin",
            ));
        }
        None if is_conflist(path) => {
            return Err(Error::new(
                Kind::Invalid,
                "the field \"plugins\" is missing; a single plugin goes into a .conf file",
            ));
        }
        None => {
            let list = json!({"cniVersion": cni_version, "name": name, "plugins": [top]});
            (vec![Value::Object(top)], list.to_string().into_bytes())
        }
    };
    for plugin in &plugins {
        check_type(plugin["type"].as_str().unwrap_or_default())?;
    }
    Ok(NetworkConf {
        name,
        path: path.to_owned(),
        cni_version,
        bytes,
        plugins,
        disable_check,
        disable_gc,
    })
}

/// `cniVersion`, or the newest of `cniVersions` (CNI 1.1) that we speak; 0.1.0 where there is neither, as the
/// specification says.
fn version(top: &Map<String, Value>) -> Result<String> {
    let stated = string(top, "cniVersion")?.filter(|v| !v.is_empty());
    let offered = top.get("cniVersions").and_then(Value::as_array);
    let offered = offered.into_iter().flatten().filter_map(Value::as_str);
    if let Some(best) = version::newest(offered.chain(stated.as_deref())) {
        return Ok(best.to_owned());
    }
    let Some(stated) = stated else {
        return Ok(version::UNSTATED.to_owned());
    };
    Err(Error::new(
        Kind::Invalid,
        format!(
            "check cniVersion {stated:?}: versions {} are spoken here",
            version::VERSIONS.join(", ")
        ),
    ))
}

/// A plugin's type becomes a file name in the plugin directories.
fn check_type(name: &str) -> Result<()> {
    let bad = name.is_empty()
        || name.len() > 255
        || name.starts_with('.')
        || name.contains(['/', '\0'])
        || name.chars().any(char::is_control);
    if bad {
        return Err(Error::new(
            Kind::Invalid,
            format!("check plugin type {name:?}: it must be a file name without '/'"),
        ));
    }
    Ok(())
}

fn string(top: &Map<String, Value>, key: &str) -> Result<Option<String>> {
    match top.get(key) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(s)) => Ok(Some(s.clone())),
        Some(_) => Err(Error::new(
            Kind::Invalid,
            format!("the field {key:?} is not a string"),
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = r#"{"cniVersion":"1.0.0","name":"NAME","plugins":[{"type":"bridge"},{"type":"portmap","capabilities":{"portMappings":true,"mac":false}}]}"#;

    #[test]
    fn hostile_or_senseless_configurations_are_refused() {
        for text in [
            r#"{"name":"../x","plugins":[{"type":"a"}]}"#,
            r#"{"name":"x","plugins":[{"type":"../a"}]}"#,
            r#"{"name":"x","plugins":[{"type":""}]}"#,
            r#"{"name":"x","plugins":["a"]}"#,
            r#"{"name":"x","plugins":[]}"#,
            r#"{"name":"x","type":"a"}"#,
            r#"{"name":"x","cniVersion":"9.0.0","plugins":[{"type":"a"}]}"#,
            r#"{"plugins":[{"type":"a"}]}"#,
            r#"[]"#,
            "",
        ] {
            assert!(
                parse(Path::new("x.conflist"), text.into()).is_err(),
                "{text}"
            );
        }
    }

    #[test]
    fn the_newest_common_version_is_taken_from_the_list_of_versions() {
        let text = r#"{"name":"x","cniVersion":"0.4.0","cniVersions":["0.3.1","1.0.0","7.0.0"],"plugins":[{"type":"a"}]}"#;
        assert_eq!(
            parse(Path::new("x.conflist"), text.into())
                .unwrap()
                .cni_version,
            "1.0.0"
        );
        let none = r#"{"name":"x","plugins":[{"type":"a"}]}"#;
        assert_eq!(
            parse(Path::new("x.conflist"), none.into())
                .unwrap()
                .cni_version,
            "0.1.0"
        );
    }

    #[test]
    fn a_capability_counts_only_when_it_is_true() {
        let conf = parse(Path::new("x.conflist"), GOOD.replace("NAME", "x").into()).unwrap();
        assert!(conf.supports("portMappings"));
        assert!(!conf.supports("mac") && !conf.supports("dns"));
    }

    #[test]
    fn switches_are_read_as_booleans_and_as_text() {
        for (value, on) in [
            ("true", true),
            ("\"true\"", true),
            ("\"1\"", true),
            ("false", false),
            ("\"no\"", false),
            ("1", false),
        ] {
            let text = format!(
                r#"{{"name":"x","disableCheck":{value},"disableGC":{value},"plugins":[{{"type":"a"}}]}}"#
            );
            let conf = parse(Path::new("x.conflist"), text.into()).unwrap();
            assert_eq!((conf.disable_check, conf.disable_gc), (on, on), "{value}");
        }
    }

    #[test]
    fn plugins_of_the_networks_own_directory_come_after_those_in_the_list() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("x")).unwrap();
        for (file, kind) in [("20.conf", "c"), ("10.conf", "b"), ("30.json", "never")] {
            fs::write(
                dir.path().join("x").join(file),
                format!(r#"{{"type":"{kind}"}}"#),
            )
            .unwrap();
        }
        let path = dir.path().join("10-x.conflist");
        let types = |text: &str| -> Result<Vec<String>, Bad> {
            let conf = load(&path, text.into())?;
            // What is recorded stands alone.
            assert_eq!(parse(&path, conf.bytes).unwrap().plugins, conf.plugins);
            Ok(conf
                .plugins
                .iter()
                .map(|p| p["type"].as_str().unwrap().to_owned())
                .collect())
        };
        assert_eq!(
            types(r#"{"name":"x","plugins":[{"type":"a"}]}"#).unwrap(),
            ["a", "b", "c"]
        );
        assert_eq!(types(r#"{"name":"x"}"#).unwrap(), ["b", "c"]);
        assert_eq!(
            types(r#"{"name":"x","loadOnlyInlinedPlugins":true,"plugins":[{"type":"a"}]}"#)
                .unwrap(),
            ["a"]
        );
        assert_eq!(
            types(r#"{"name":"y","plugins":[{"type":"a"}]}"#).unwrap(),
            ["a"]
        );
        assert!(
            !types(r#"{"name":"x","loadOnlyInlinedPlugins":true}"#)
                .unwrap_err()
                .unfinished
        );
        fs::write(dir.path().join("x/10.conf"), r#"{"type":"#).unwrap();
        assert!(
            types(r#"{"name":"x","plugins":[{"type":"a"}]}"#)
                .unwrap_err()
                .unfinished
        );
    }
}
