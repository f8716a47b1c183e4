//! Networks are found by reading the directory at use, so that one which arrives later, or changes, needs no restart.
//!
//! A file that is broken is skipped and warned about once for each state of it; it never hides the good ones. One that
//! is not even JSON, perhaps because somebody is writing it at this moment, is used as it was when it last was good.

use std::collections::{BTreeMap, HashSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::SystemTime;

use super::conf::{self, Bad, NetworkConf};
use super::disk;
use super::remembered::Memory;
use crate::config::Config;
use crate::error::{Error, Kind, Result};

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

/// (path, why) of every file that is skipped because it is bad.
pub fn bad_confs(config: &Config) -> Vec<(PathBuf, String)> {
    let broken = scan(config).broken.into_iter();
    broken.map(|b| (b.path, b.error.to_string())).collect()
}

/// Every good configuration, by file name.
pub(super) fn all(config: &Config) -> Vec<NetworkConf> {
    scan(config).good
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
    let mut memory = Memory::open(config);
    memory.forget_all_but(&config.cni.conf_dir, &paths);
    let mut found = Found::default();
    for path in paths {
        let bytes = match disk::read(&path) {
            Ok(bytes) => bytes,
            // Gone between the listing and the read: it was never there.
            Err(e) if e.is_gone() => continue,
            Err(error) => {
                let bad = Bad {
                    error,
                    unfinished: true,
                };
                found.take_bad(path, Vec::new(), bad, &memory);
                continue;
            }
        };
        match conf::load(&path, bytes.clone()) {
            Ok(conf) => {
                memory.remember(&path, &conf.bytes);
                found.good.push(conf);
            }
            Err(bad) => found.take_bad(path, bytes, bad, &memory),
        }
    }
    memory.save(config);
    found
}

impl Found {
    fn take_bad(&mut self, path: PathBuf, text: Vec<u8>, bad: Bad, memory: &Memory) {
        if bad.unfinished {
            let last = memory.last_good(&path);
            if let Some(conf) = last.and_then(|bytes| conf::parse(&path, bytes.to_vec()).ok()) {
                warn_once(
                    &path,
                    &bad.error,
                    "network configuration cannot be read; its last good text stays in use",
                );
                self.good.push(conf);
                return;
            }
        }
        warn_once(&path, &bad.error, "network configuration skipped");
        self.broken.push(Broken {
            path,
            text,
            error: bad.error,
        });
    }
}

/// Once for each state of the file.
fn warn_once(path: &Path, error: &Error, what: &str) {
    static WARNED: Mutex<BTreeMap<PathBuf, Option<SystemTime>>> = Mutex::new(BTreeMap::new());
    let changed = fs::metadata(path).and_then(|m| m.modified()).ok();
    let mut warned = WARNED.lock().unwrap_or_else(PoisonError::into_inner);
    if warned.insert(path.to_owned(), changed) != Some(changed) {
        tracing::warn!(path = %path.display(), %error, "{what}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::network::conf::parse;
    use std::os::unix::fs::PermissionsExt;

    const GOOD: &str = r#"{"cniVersion":"1.0.0","name":"NAME","plugins":[{"type":"bridge"},{"type":"portmap","capabilities":{"portMappings":true,"mac":false}}]}"#;

    fn dir(files: &[(&str, &str)]) -> (tempfile::TempDir, Config) {
        let dir = tempfile::tempdir().unwrap();
        for (name, text) in files {
            fs::write(dir.path().join(name), text).unwrap();
        }
        let mut config = Config::default();
        config.cni.conf_dir = dir.path().to_owned();
        config.runtime_root = dir.path().join("run");
        fs::create_dir(&config.runtime_root).unwrap();
        fs::set_permissions(&config.runtime_root, fs::Permissions::from_mode(0o700)).unwrap();
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
    fn a_file_that_is_being_written_is_used_as_it_was_and_one_that_is_gone_is_gone() {
        let (dir, config) = dir(&[("10-a.conflist", &GOOD.replace("NAME", "a"))]);
        let path = dir.path().join("10-a.conflist");
        load_conf(&config, None).unwrap();
        for half in ["", &GOOD[..40]] {
            fs::write(&path, half).unwrap();
            assert_eq!(
                load_conf(&config, Some("a")).unwrap().plugins.len(),
                2,
                "{half}"
            );
            assert_eq!(list_confs(&config).len(), 1);
        }
        // Whole, and senseless: somebody meant it.
        fs::write(&path, r#"{"name":"a"}"#).unwrap();
        assert_eq!(
            load_conf(&config, Some("a")).unwrap_err().kind(),
            Kind::Invalid
        );
        fs::write(&path, GOOD.replace("NAME", "a").replace("bridge", "ptp")).unwrap();
        assert_eq!(load_conf(&config, None).unwrap().plugins[0]["type"], "ptp");
        fs::remove_file(&path).unwrap();
        assert_eq!(load_conf(&config, None).unwrap_err().kind(), Kind::NotFound);
        // Whoever comes back half written has no past.
        fs::write(&path, &GOOD[..40]).unwrap();
        assert_eq!(load_conf(&config, None).unwrap_err().kind(), Kind::Invalid);
    }
}
