//! The part of `config.json` we read and change; everything else passes through untouched.
//!
//! Owns how an OCI runtime spec is read from and written to a bundle. Promises that unknown fields and the order of
//! all fields survive a read and a write (a typed spec would drop what it does not know), and that a reader of the
//! bundle never sees half a file. Must never decide what a pod or a container should look like.

mod edit;
pub mod options;

use std::collections::BTreeMap;
use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::error::{Context, Error, Kind, Result};

/// Name of the spec inside a bundle.
pub const FILE: &str = "config.json";

/// Largest spec read, bytes. Real ones are 10 to 100 kB; the bound keeps a wrong file out of memory.
const MAX_SIZE: u64 = 16 << 20;

/// `size` ids from `container_id` inside are those from `host_id` outside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IdRange {
    /// First id inside.
    pub container_id: u32,
    /// First id outside.
    pub host_id: u32,
    /// How many.
    pub size: u32,
}

/// `config.json` as JSON, unknown fields kept and order preserved.
#[derive(Clone, Debug)]
pub struct Spec {
    /// The whole document, always an object.
    pub json: Value,
}

impl Spec {
    /// Reads `<bundle>/config.json`.
    ///
    /// # Errors
    /// NotFound when it is missing, Invalid when it is no JSON object (for example cut in half) or no regular file.
    pub fn read(bundle: &Path) -> Result<Self> {
        Self::parse(&Self::read_bytes(bundle)?)
            .context(|| format!("read {}", bundle.join(FILE).display()))
    }

    /// The bytes of `<bundle>/config.json`.
    ///
    /// # Errors
    /// NotFound when it is missing, Invalid when it is no regular file or too long.
    pub fn read_bytes(bundle: &Path) -> Result<Vec<u8>> {
        let path = bundle.join(FILE);
        let what = || format!("read {}", path.display());
        // O_NONBLOCK: a fifo at this place must not hang us; it has no effect on a regular file.
        let file = fs::OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_NONBLOCK)
            .open(&path)
            .context(what)?;
        let meta = file.metadata().context(what)?;
        if !meta.is_file() || meta.len() > MAX_SIZE {
            let why = format!("{}: it must be a regular file of at most 16 MiB", what());
            return Err(Error::new(Kind::Invalid, why));
        }
        let mut bytes = Vec::with_capacity(usize::try_from(meta.len()).unwrap_or(0));
        (&file)
            .take(MAX_SIZE)
            .read_to_end(&mut bytes)
            .context(what)?;
        Ok(bytes)
    }

    /// The bytes that [`Spec::write`] writes.
    ///
    /// # Errors
    /// None in practice: what was JSON can be written as JSON.
    pub fn to_bytes(&self) -> Result<Vec<u8>> {
        serde_json::to_vec(&self.json)
            .map_err(|e| Error::caused(Kind::Other, "encode the OCI spec", e))
    }

    /// Parses the bytes of a `config.json`.
    ///
    /// # Errors
    /// Invalid, with the place, when the bytes are no JSON object.
    pub fn parse(bytes: &[u8]) -> Result<Self> {
        if bytes.iter().all(u8::is_ascii_whitespace) {
            let why = "parse the OCI spec: the file is empty, write the bundle again";
            return Err(Error::new(Kind::Invalid, why));
        }
        let json: Value = serde_json::from_slice(bytes).map_err(|e| {
            let what = if e.is_eof() {
                format!(
                    "parse the OCI spec: it is cut off after {} bytes, write the bundle again",
                    bytes.len()
                )
            } else {
                "parse the OCI spec".to_owned()
            };
            Error::caused(Kind::Invalid, what, e)
        })?;
        if !json.is_object() {
            return Err(Error::new(
                Kind::Invalid,
                "parse the OCI spec: it must be a JSON object",
            ));
        }
        Ok(Self { json })
    }

    /// Writes `<bundle>/config.json`: a new file beside it, then a rename, so that no reader sees a part of it.
    /// Mode and owner of a file already there are kept; a new one is 0600.
    ///
    /// # Errors
    /// Those of the file calls; the file that was there is then unchanged.
    pub fn write(&self, bundle: &Path) -> Result<()> {
        let path = bundle.join(FILE);
        let temp = bundle.join(".config.json.new");
        let what = || format!("write {}", path.display());
        let bytes = self.to_bytes().context(what)?;
        let before = fs::symlink_metadata(&path)
            .ok()
            .filter(fs::Metadata::is_file);
        // Left by a writer that was killed.
        let _ = fs::remove_file(&temp);
        let written = fs::OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&temp)
            .and_then(|mut file| {
                file.write_all(&bytes)?;
                if let Some(meta) = &before {
                    std::os::unix::fs::fchown(&file, Some(meta.uid()), Some(meta.gid()))?;
                    file.set_permissions(meta.permissions())?;
                }
                Ok(())
            })
            .and_then(|()| fs::rename(&temp, &path));
        if written.is_err() {
            let _ = fs::remove_file(&temp);
        }
        written.context(what)
    }

    /// `annotations`; values that are no strings are left out.
    pub fn annotations(&self) -> BTreeMap<String, String> {
        strings(self.at("/annotations"))
    }

    /// `hostname`, or "".
    pub fn hostname(&self) -> &str {
        self.at("/hostname")
            .and_then(Value::as_str)
            .unwrap_or_default()
    }

    /// `linux.namespaces` as (type, path or None), in order.
    pub fn namespaces(&self) -> Vec<(String, Option<PathBuf>)> {
        self.list("/linux/namespaces")
            .iter()
            .filter_map(|entry| {
                let kind = entry.get("type")?.as_str()?.to_owned();
                let path = entry
                    .get("path")
                    .and_then(Value::as_str)
                    .filter(|p| !p.is_empty());
                Some((kind, path.map(PathBuf::from)))
            })
            .collect()
    }

    /// Whether the container gets a new pid namespace, which the kernel empties when its init ends.
    pub fn has_own_pid_namespace(&self) -> bool {
        self.namespaces()
            .iter()
            .any(|(kind, path)| kind == "pid" && path.is_none())
    }

    /// `linux.uidMappings`.
    ///
    /// # Errors
    /// Invalid when one of them is no range of three numbers.
    pub fn uid_mappings(&self) -> Result<Vec<IdRange>> {
        self.mappings("/linux/uidMappings")
    }

    /// `linux.gidMappings`; the same.
    pub fn gid_mappings(&self) -> Result<Vec<IdRange>> {
        self.mappings("/linux/gidMappings")
    }

    fn mappings(&self, pointer: &str) -> Result<Vec<IdRange>> {
        let parse = |value: &Value| {
            let number = |key: &str| value.get(key)?.as_u64()?.try_into().ok();
            Some(IdRange {
                container_id: number("containerID")?,
                host_id: number("hostID")?,
                size: number("size")?,
            })
        };
        let all = self.list(pointer).iter().map(parse);
        all.collect::<Option<_>>().ok_or_else(|| {
            let why = "each entry needs containerID, hostID and size, numbers of 32 bits";
            Error::new(
                Kind::Invalid,
                format!(
                    "read {} of the OCI spec: {why}",
                    &pointer[1..].replace('/', ".")
                ),
            )
        })
    }

    /// `linux.cgroupsPath`, if it says something.
    pub fn cgroups_path(&self) -> Option<&str> {
        self.text("/linux/cgroupsPath")
    }

    /// `linux.sysctl`; values that are no strings are left out.
    pub fn sysctls(&self) -> BTreeMap<String, String> {
        strings(self.at("/linux/sysctl"))
    }

    /// `root.path` as written (relative to the bundle unless absolute).
    pub fn root_path(&self) -> Option<&str> {
        self.text("/root/path")
    }

    fn at(&self, pointer: &str) -> Option<&Value> {
        self.json.pointer(pointer)
    }

    fn text(&self, pointer: &str) -> Option<&str> {
        self.at(pointer)
            .and_then(Value::as_str)
            .filter(|s| !s.is_empty())
    }

    fn list(&self, pointer: &str) -> &[Value] {
        self.at(pointer)
            .and_then(Value::as_array)
            .map_or(&[], Vec::as_slice)
    }
}

fn strings(value: Option<&Value>) -> BTreeMap<String, String> {
    value
        .and_then(Value::as_object)
        .into_iter()
        .flatten()
        .filter_map(|(key, value)| Some((key.clone(), value.as_str()?.to_owned())))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    const TEXT: &str = r#"{"ociVersion":"1.2","zeta":{"b":1,"a":[null,2.5]},"root":{"path":"rootfs"},"hostname":"h",
        "annotations":{"k":"v","n":1},"linux":{"sysctl":{"net.a":"1"},"cgroupsPath":"/p/c","namespaces":[
        {"type":"pid"},{"type":"network","path":"/run/n"},{"type":"mount","path":""}]},"alpha":true}"#;

    #[test]
    fn reads_what_rooms_ask_for() {
        let spec = Spec::parse(TEXT.as_bytes()).unwrap();
        assert_eq!(spec.hostname(), "h");
        assert_eq!(spec.root_path(), Some("rootfs"));
        assert_eq!(spec.cgroups_path(), Some("/p/c"));
        assert_eq!(
            spec.annotations(),
            BTreeMap::from([("k".into(), "v".into())])
        );
        assert_eq!(
            spec.sysctls(),
            BTreeMap::from([("net.a".into(), "1".into())])
        );
        assert!(spec.has_own_pid_namespace());
        let kinds: Vec<_> = spec.namespaces();
        assert_eq!(kinds[1], ("network".into(), Some("/run/n".into())));
        assert_eq!(kinds[2], ("mount".into(), None));
    }

    #[test]
    fn an_empty_spec_answers_with_nothing() {
        let spec = Spec::parse(b"{}").unwrap();
        assert_eq!(
            (spec.hostname(), spec.root_path(), spec.cgroups_path()),
            ("", None, None)
        );
        assert!(spec.namespaces().is_empty() && !spec.has_own_pid_namespace());
    }

    #[test]
    fn a_spec_cut_anywhere_is_invalid_and_says_so() {
        for cut in 0..TEXT.len() {
            let error = Spec::parse(&TEXT.as_bytes()[..cut]).expect_err("cut");
            assert_eq!(error.kind(), Kind::Invalid, "{cut}");
            let text = error.to_string();
            assert!(
                text.contains("cut off") || text.contains("empty"),
                "{cut}: {text}"
            );
        }
        for bad in ["[]", "\"x\"", "{} {}", "{,}"] {
            assert_eq!(
                Spec::parse(bad.as_bytes()).unwrap_err().kind(),
                Kind::Invalid,
                "{bad}"
            );
        }
    }

    #[test]
    fn unknown_fields_order_and_mode_survive_a_rewrite() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(FILE);
        fs::write(&path, TEXT).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
        let spec = Spec::read(dir.path()).unwrap();
        spec.write(dir.path()).unwrap();
        let compact: String = TEXT.chars().filter(|c| !c.is_whitespace()).collect();
        assert_eq!(fs::read_to_string(&path).unwrap(), compact);
        assert_eq!(
            fs::metadata(&path).unwrap().permissions().mode() & 0o777,
            0o640
        );
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_missing_file_is_not_found_and_a_fifo_does_not_hang() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(Spec::read(dir.path()).unwrap_err().kind(), Kind::NotFound);
        nix::unistd::mkfifo(&dir.path().join(FILE), nix::sys::stat::Mode::S_IRWXU).unwrap();
        assert_eq!(Spec::read(dir.path()).unwrap_err().kind(), Kind::Invalid);
    }
}
