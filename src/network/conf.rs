//! Network configurations: found by reading the directory at use, so that one which arrives later, or changes, needs no restart.
//!
//! A file that is broken, perhaps because somebody is writing it at this moment, is skipped and warned about once; it
//! never hides the good ones.

use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock, PoisonError};

use serde_json::{Map, Value, json};

use super::{disk, result};
use crate::config::Config;
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

/// Loads by network name, or (None) the first good file by name order; .conflist, .conf, .json. Bad files are warned
/// about and skipped, unless the named network is among the broken ones: then the error names the file (Invalid).
/// NotFound lists the names there are.
pub fn load_conf(config: &Config, name: Option<&str>) -> Result<NetworkConf> {
    if let Some(name) = name {
        crate::id::check_network(name)?;
    }
    let found = scan(config);
    let mut names = Vec::new();
    for conf in found.good {
        if name.is_none_or(|n| n == conf.name) {
            return Ok(conf);
        }
        names.push(conf.name);
    }
    let dir = config.cni.conf_dir.display();
    let what = name.map_or_else(
        || format!("find a network in {dir}"),
        |n| format!("find network {n:?} in {dir}"),
    );
    // A file that cannot be parsed may still be the one that was asked for.
    let suspect = found
        .broken
        .into_iter()
        .find(|b| name.is_none_or(|n| b.mentions(n)));
    if let Some(broken) = suspect {
        return Err(broken
            .error
            .as_kind(Kind::Invalid)
            .within(format!("{what} (correct the file or take it away)")));
    }
    let there = if names.is_empty() {
        "no network is configured there; put a .conflist there, or choose no network or the host's"
            .to_owned()
    } else {
        format!(
            "there is none of this name; there are: {}",
            names.join(", ")
        )
    };
    Err(Error::new(Kind::NotFound, format!("{what}: {there}")))
}

/// (name, path) of every network configured, by file name; a name that comes twice counts where it comes first.
pub fn list_confs(config: &Config) -> Vec<(String, PathBuf)> {
    let mut seen = HashSet::new();
    scan(config)
        .good
        .into_iter()
        .filter(|c| seen.insert(c.name.clone()))
        .map(|c| (c.name, c.path))
        .collect()
}

/// Every good configuration, by file name.
pub(super) fn all(config: &Config) -> Vec<NetworkConf> {
    scan(config).good
}

/// Parses the text of a list, or of a single configuration, and checks every name in it.
pub(super) fn parse(path: &Path, bytes: Vec<u8>) -> Result<NetworkConf> {
    let at = || format!("read network configuration {}", path.display());
    let text: Value =
        serde_json::from_slice(&bytes).map_err(|e| Error::caused(Kind::Invalid, at(), e))?;
    let Value::Object(top) = text else {
        return Err(Error::new(
            Kind::Invalid,
            format!("{}: it is not a JSON object", at()),
        ));
    };
    build(path, bytes, top).map_err(|e| e.within(at()))
}

fn build(path: &Path, bytes: Vec<u8>, top: Map<String, Value>) -> Result<NetworkConf> {
    let name = string(&top, "name")?
        .ok_or_else(|| Error::new(Kind::Invalid, "the field \"name\" is missing"))?;
    crate::id::check_network(&name)?;
    let cni_version = version(&top)?;
    let disable_check = matches!(top.get("disableCheck"), Some(Value::Bool(true)))
        || top.get("disableCheck").and_then(Value::as_str) == Some("true");
    let (plugins, bytes) = match top.get("plugins") {
        Some(Value::Array(plugins)) if !plugins.is_empty() => (plugins.clone(), bytes),
        Some(_) => {
            return Err(Error::new(
                Kind::Invalid,
                "\"plugins\" must be a list with at least one plugin",
            ));
        }
        None if path.extension().is_some_and(|e| e == "conflist") => {
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
    })
}

/// `cniVersion`, or the newest of `cniVersions` (CNI 1.1) that we speak; 0.1.0 where there is neither, as the
/// specification says.
fn version(top: &Map<String, Value>) -> Result<String> {
    let stated = string(top, "cniVersion")?.filter(|v| !v.is_empty());
    let offered = top.get("cniVersions").and_then(Value::as_array);
    let best = result::VERSIONS
        .iter()
        .rev()
        .find(|v| offered.is_some_and(|o| o.iter().any(|x| x.as_str() == Some(v))));
    if let Some(best) = best {
        return Ok((*best).to_owned());
    }
    let stated = stated.unwrap_or_else(|| "0.1.0".into());
    if result::VERSIONS.contains(&stated.as_str()) {
        return Ok(stated);
    }
    Err(Error::new(
        Kind::Invalid,
        format!(
            "check cniVersion {stated:?}: versions {} are spoken here",
            result::VERSIONS.join(", ")
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

struct Broken {
    path: PathBuf,
    text: Vec<u8>,
    error: Error,
}

impl Broken {
    /// True when this could be the file of network `name`: the name stands in it in quotes, or in its file name.
    fn mentions(&self, name: &str) -> bool {
        let quoted = format!("\"{name}\"");
        self.text
            .windows(quoted.len())
            .any(|w| w == quoted.as_bytes())
            || self
                .path
                .file_stem()
                .is_some_and(|s| s.to_string_lossy().contains(name))
    }
}

#[derive(Default)]
struct Found {
    good: Vec<NetworkConf>,
    broken: Vec<Broken>,
}

fn scan(config: &Config) -> Found {
    let mut paths: Vec<PathBuf> = fs::read_dir(&config.cni.conf_dir)
        .map(|entries| entries.flatten().map(|e| e.path()).collect())
        .unwrap_or_default();
    paths.retain(|p| {
        p.extension()
            .is_some_and(|e| e == "conflist" || e == "conf" || e == "json")
    });
    paths.sort();
    let mut found = Found::default();
    for path in paths {
        let bytes = match disk::read(&path) {
            Ok(bytes) => bytes,
            // Gone between the listing and the read: it was never there.
            Err(e) if e.is_gone() => continue,
            Err(error) => {
                warn_once(&path, &error);
                found.broken.push(Broken {
                    path,
                    text: Vec::new(),
                    error,
                });
                continue;
            }
        };
        match parse(&path, bytes.clone()) {
            Ok(conf) => found.good.push(conf),
            Err(error) => {
                warn_once(&path, &error);
                found.broken.push(Broken {
                    path,
                    text: bytes,
                    error,
                });
            }
        }
    }
    found
}

fn warn_once(path: &Path, error: &Error) {
    static WARNED: OnceLock<Mutex<HashSet<PathBuf>>> = OnceLock::new();
    let mut warned = WARNED
        .get_or_init(Mutex::default)
        .lock()
        .unwrap_or_else(PoisonError::into_inner);
    if warned.insert(path.to_owned()) {
        tracing::warn!(path = %path.display(), %error, "network configuration skipped");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = r#"{"cniVersion":"1.0.0","name":"NAME","plugins":[{"type":"bridge"},{"type":"portmap","capabilities":{"portMappings":true,"mac":false}}]}"#;

    fn dir(files: &[(&str, &str)]) -> (tempfile::TempDir, Config) {
        let dir = tempfile::tempdir().unwrap();
        for (name, text) in files {
            fs::write(dir.path().join(name), text).unwrap();
        }
        let mut config = Config::default();
        config.cni.conf_dir = dir.path().to_owned();
        (dir, config)
    }

    #[test]
    fn the_first_good_file_by_name_is_the_default_and_unknown_suffixes_are_ignored() {
        let (_dir, config) = dir(&[
            ("00-half.conflist", &GOOD[..40]),
            ("10-a.conflist", &GOOD.replace("NAME", "a")),
            ("05-b.conflist.temp", &GOOD.replace("NAME", "b")),
            (
                "20-c.conf",
                r#"{"cniVersion":"0.4.0","name":"c","type":"ptp"}"#,
            ),
            ("30-a.conflist", &GOOD.replace("NAME", "a")),
        ]);
        assert_eq!(load_conf(&config, None).unwrap().name, "a");
        let names: Vec<String> = list_confs(&config).into_iter().map(|(n, _)| n).collect();
        assert_eq!(names, ["a", "c"]);
        let c = load_conf(&config, Some("c")).unwrap();
        assert_eq!((c.plugins.len(), c.cni_version.as_str()), (1, "0.4.0"));
        // The bytes are a list, whatever the file was: another reader of the cache can use them.
        assert_eq!(
            parse(&c.path.with_extension("conflist"), c.bytes)
                .unwrap()
                .plugins,
            c.plugins
        );
    }

    #[test]
    fn the_error_lists_the_names_there_are_or_names_the_broken_file() {
        let (_dir, config) = dir(&[
            ("10-a.conflist", &GOOD.replace("NAME", "a")),
            ("20.conflist", r#"{"name":"web","plugins":["#),
        ]);
        let missing = load_conf(&config, Some("nope")).unwrap_err();
        assert_eq!(missing.kind(), Kind::NotFound);
        assert!(missing.to_string().contains("there are: a"), "{missing}");
        let broken = load_conf(&config, Some("web")).unwrap_err();
        assert_eq!(broken.kind(), Kind::Invalid);
        assert!(broken.to_string().contains("20.conflist"), "{broken}");
        let (_dir, empty) = dir(&[]);
        assert!(
            load_conf(&empty, None)
                .unwrap_err()
                .to_string()
                .contains("no network is configured")
        );
    }

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
}
