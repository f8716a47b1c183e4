//! Runtime options as daemons send them: no options, `containerd.runc.v1.Options`, or a TOML table in
//! `runtimeoptions.v1.Options`.
//!
//! Promises that a message is opened only under its own type name: field 3 is TOML in one type and a cgroup path in
//! the other. Unknown TOML keys are left alone, because the table belongs to the daemon's configuration, not to us.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use protobuf::well_known_types::any::Any;
use serde_json::{Map, Value};

use crate::config;
use crate::error::{Context, Error, Kind, Result};
use crate::proto::any;
use crate::proto::runc_options::oci;
use crate::proto::runtimeoptions::runtimeoptions;

/// Most arrays and tables in an options table; ours has none.
const BRACKETS_MAX: usize = 256;
/// Largest options file read, bytes.
const FILE_MAX: u64 = 64 * 1024;

/// Decoded options. Everything empty, false and 0 when none were given.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// OCI runtime: a name or a path; empty for the default.
    pub binary: String,
    /// The OCI runtime's `--root`; empty for the default.
    pub root: String,
    /// Use the systemd cgroup driver.
    pub systemd_cgroup: bool,
    /// Pass `--no-pivot`.
    pub no_pivot_root: bool,
    /// Pass `--no-new-keyring`.
    pub no_new_keyring: bool,
    /// Host uid that owns the pipes of standard streams.
    pub io_uid: u32,
    /// Host gid that owns the pipes of standard streams.
    pub io_gid: u32,
    /// cgroup the supervisor's own process is moved into; empty for none.
    pub shim_cgroup: String,
    /// Directory in which criu works; empty for one in the bundle.
    pub criu_work: String,
    /// With no `binary`: the configured runtime, else crun where it runs, else runc. Ours alone, in TOML only.
    pub prefer_crun: bool,
}

/// True for types [`decode`] understands; the extensions of a `BootstrapParams` are picked by this.
pub fn is_known(any: &Any) -> bool {
    any::is_nothing(any) || any::is(any, any::RUNC_OPTIONS) || any::is(any, any::RUNTIME_OPTIONS)
}

impl Options {
    /// Decodes options; an empty `Any` and `google.protobuf.Empty` are no options.
    ///
    /// # Errors
    /// Invalid for another type, for bytes that do not fit the type, for TOML that does not parse or has a value of
    /// the wrong kind under a key of ours, and for a `ConfigPath` that cannot be read.
    pub fn decode(options: &Any) -> Result<Self> {
        if any::is_nothing(options) {
            return Ok(Self::default());
        }
        let bad = |e| {
            Error::caused(
                Kind::Invalid,
                format!("decode runtime options {}", options.type_url),
                e,
            )
        };
        if let Some(runc) = any::unpack::<oci::Options>(options, any::RUNC_OPTIONS).map_err(bad)? {
            return Ok(from_runc(runc));
        }
        if let Some(generic) =
            any::unpack::<runtimeoptions::Options>(options, any::RUNTIME_OPTIONS).map_err(bad)?
        {
            return from_generic(&generic);
        }
        Err(Error::new(
            Kind::Invalid,
            format!(
                "decode runtime options of type {:?}: send {} or {}",
                options.type_url,
                any::RUNC_OPTIONS,
                any::RUNTIME_OPTIONS
            ),
        ))
    }

    /// Decodes options as [`decode`](Self::decode) does (None are no options), and fills in from the configuration what
    /// they leave empty, false or 0: a message cannot tell the difference.
    ///
    /// # Errors
    /// Those of [`decode`](Self::decode).
    pub fn of_daemon(given: Option<&Any>, defaults: &config::Options) -> Result<Self> {
        let given = given.map(Self::decode).transpose()?.unwrap_or_default();
        Ok(given.or(defaults))
    }

    fn or(mut self, defaults: &config::Options) -> Self {
        // The command says all it wants.
        if self.prefer_crun {
            return self;
        }
        for (text, default) in [
            (&mut self.binary, &defaults.binary_name),
            (&mut self.root, &defaults.root),
            (&mut self.shim_cgroup, &defaults.shim_cgroup),
            (&mut self.criu_work, &defaults.criu_work_path),
        ] {
            if text.is_empty() {
                text.clone_from(default);
            }
        }
        for (number, default) in [
            (&mut self.io_uid, defaults.io_uid),
            (&mut self.io_gid, defaults.io_gid),
        ] {
            if *number == 0 {
                *number = default;
            }
        }
        self.systemd_cgroup |= defaults.systemd_cgroup;
        self.no_pivot_root |= defaults.no_pivot_root;
        self.no_new_keyring |= defaults.no_new_keyring;
        self
    }

    /// Parses an options table: the keys of containerd's runc options and `PreferCrun`, whatever their case, with or
    /// without `_`.
    ///
    /// # Errors
    /// Invalid.
    pub fn from_toml(text: &[u8]) -> Result<Self> {
        // The parser goes down by a call for each, and a stack has an end.
        let opened = text.iter().filter(|b| matches!(b, b'[' | b'{')).count();
        if opened > BRACKETS_MAX {
            let why = format!("parse runtime options as TOML: more than {BRACKETS_MAX} brackets");
            return Err(Error::new(Kind::Invalid, why));
        }
        let table: Map<String, Value> = basic_toml::from_slice(text)
            .map_err(|e| Error::caused(Kind::Invalid, "parse runtime options as TOML", e))?;
        let mut options = Self::default();
        for (key, value) in &table {
            match key.replace('_', "").to_ascii_lowercase().as_str() {
                "binaryname" => options.binary = string(key, value)?,
                "root" => options.root = string(key, value)?,
                "systemdcgroup" => options.systemd_cgroup = boolean(key, value)?,
                "nopivotroot" => options.no_pivot_root = boolean(key, value)?,
                "nonewkeyring" => options.no_new_keyring = boolean(key, value)?,
                "iouid" => options.io_uid = number(key, value)?,
                "iogid" => options.io_gid = number(key, value)?,
                "shimcgroup" => options.shim_cgroup = string(key, value)?,
                "criuworkpath" => options.criu_work = string(key, value)?,
                "prefercrun" => options.prefer_crun = boolean(key, value)?,
                _ => {}
            }
        }
        Ok(options)
    }
}

fn from_runc(runc: oci::Options) -> Options {
    Options {
        binary: runc.binary_name,
        root: runc.root,
        systemd_cgroup: runc.systemd_cgroup,
        no_pivot_root: runc.no_pivot_root,
        no_new_keyring: runc.no_new_keyring,
        io_uid: runc.io_uid,
        io_gid: runc.io_gid,
        shim_cgroup: runc.shim_cgroup,
        criu_work: runc.criu_work_path,
        prefer_crun: false,
    }
}

fn from_generic(generic: &runtimeoptions::Options) -> Result<Options> {
    if generic.config_path.is_empty() {
        return Options::from_toml(&generic.config_body);
    }
    let path = Path::new(&generic.config_path);
    let what = || format!("read runtime options from {}", path.display());
    if !path.is_absolute() {
        return Err(Error::new(
            Kind::Invalid,
            format!("{}: give an absolute path", what()),
        ));
    }
    let mut text = Vec::new();
    File::open(path)
        .and_then(|file| file.take(FILE_MAX + 1).read_to_end(&mut text))
        .context(what)
        .map_err(|e| e.as_kind(Kind::Invalid))?;
    if text.len() as u64 > FILE_MAX {
        return Err(Error::new(
            Kind::Invalid,
            format!("{}: it is longer than {FILE_MAX} bytes", what()),
        ));
    }
    Options::from_toml(&text).context(what)
}

fn string(key: &str, value: &Value) -> Result<String> {
    value
        .as_str()
        .map(str::to_owned)
        .ok_or_else(|| wrong(key, "a string"))
}

fn boolean(key: &str, value: &Value) -> Result<bool> {
    value.as_bool().ok_or_else(|| wrong(key, "true or false"))
}

fn number(key: &str, value: &Value) -> Result<u32> {
    value
        .as_u64()
        .and_then(|n| u32::try_from(n).ok())
        .ok_or_else(|| wrong(key, "a number from 0 to 4294967295"))
}

fn wrong(key: &str, wanted: &str) -> Error {
    Error::new(
        Kind::Invalid,
        format!("read runtime option {key}: give {wanted}"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn generic(path: &str, body: &str) -> Any {
        let message = runtimeoptions::Options {
            type_url: "runtimeoptions.v1.Options".into(),
            config_path: path.into(),
            config_body: body.as_bytes().to_vec(),
            ..Default::default()
        };
        any::pack(any::RUNTIME_OPTIONS, &message).unwrap()
    }

    #[test]
    fn no_options_have_three_spellings() {
        for given in [
            Any::default(),
            any::raw(any::EMPTY, Vec::new()),
            any::raw("x.y/google.protobuf.Empty", Vec::new()),
        ] {
            assert_eq!(Options::decode(&given).unwrap(), Options::default());
        }
    }

    #[test]
    fn the_table_never_becomes_a_cgroup_path() {
        let options = Options::decode(&generic("", "SystemdCgroup = true\n")).unwrap();
        assert_eq!(
            options,
            Options {
                systemd_cgroup: true,
                ..Options::default()
            }
        );
    }

    #[test]
    fn runc_options_are_read_under_any_prefix() {
        let runc = oci::Options {
            shim_cgroup: "/shims".into(),
            binary_name: "crun".into(),
            ..Default::default()
        };
        let mut packed = any::pack(any::RUNC_OPTIONS, &runc).unwrap();
        packed.type_url = format!("types.googleapis.com/{}", any::RUNC_OPTIONS);
        let options = Options::decode(&packed).unwrap();
        assert_eq!(
            (options.shim_cgroup.as_str(), options.binary.as_str()),
            ("/shims", "crun")
        );
    }

    #[test]
    fn keys_of_the_table_are_honoured_in_any_case() {
        let text = "BinaryName = \"crun\"\nroot = \"/run/x\"\nio_uid = 7\nNoPivotRoot = true\nPreferCrun = true\nOther = [1]\n";
        let options = Options::decode(&generic("", text)).unwrap();
        let wanted = Options {
            binary: "crun".into(),
            root: "/run/x".into(),
            io_uid: 7,
            no_pivot_root: true,
            prefer_crun: true,
            ..Options::default()
        };
        assert_eq!(options, wanted);
    }

    #[test]
    fn what_a_daemon_leaves_open_is_the_configurations() {
        let defaults = config::Options {
            binary_name: "crun".into(),
            root: "/run/x".into(),
            systemd_cgroup: true,
            io_uid: 7,
            io_gid: 8,
            criu_work_path: "/w".into(),
            ..config::Options::default()
        };
        let all = Options::of_daemon(None, &defaults).unwrap();
        assert_eq!((all.binary.as_str(), all.root.as_str()), ("crun", "/run/x"));
        assert_eq!((all.io_uid, all.io_gid, all.systemd_cgroup), (7, 8, true));
        assert_eq!(all.criu_work, "/w");
        let text = "BinaryName = \"runc\"\nIoUid = 9\nNoNewKeyring = true\nSystemdCgroup = false";
        let some = Options::of_daemon(Some(&generic("", text)), &defaults).unwrap();
        assert_eq!(
            (some.binary.as_str(), some.io_uid, some.io_gid),
            ("runc", 9, 8)
        );
        assert!(some.systemd_cgroup && some.no_new_keyring && !some.no_pivot_root);
        let own = generic("", "PreferCrun = true");
        let own = Options::of_daemon(Some(&own), &defaults).unwrap();
        assert_eq!((own.binary.as_str(), own.systemd_cgroup), ("", false));
    }

    #[test]
    fn a_task_services_address_is_no_business_of_ours() {
        let runc = oci::Options {
            task_api_address: "ttrpc+unix:///elsewhere".into(),
            task_api_version: 2,
            criu_path: "/old/criu".into(),
            criu_image_path: "/images".into(),
            ..Default::default()
        };
        let packed = any::pack(any::RUNC_OPTIONS, &runc).unwrap();
        assert_eq!(Options::decode(&packed).unwrap(), Options::default());
    }

    #[test]
    fn a_config_path_is_read_and_wins_over_the_body() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("options.toml");
        std::fs::write(&path, "BinaryName = \"crun\"\n").unwrap();
        let options =
            Options::decode(&generic(path.to_str().unwrap(), "BinaryName = \"runc\"")).unwrap();
        assert_eq!(options.binary, "crun");
        std::fs::write(&path, " ".repeat(70_000)).unwrap();
        for bad in [path.to_str().unwrap(), "options.toml"] {
            assert_eq!(
                Options::decode(&generic(bad, "")).unwrap_err().kind(),
                Kind::Invalid,
                "{bad}"
            );
        }
        let missing = Options::decode(&generic("/nonexistent/options.toml", "")).unwrap_err();
        assert_eq!(missing.kind(), Kind::Invalid);
        assert!(
            missing.to_string().contains("/nonexistent/options.toml"),
            "{missing}"
        );
    }

    #[test]
    fn bad_options_are_errors_that_name_the_culprit() {
        for (any, word) in [
            (generic("", "IoUid = -1"), "IoUid"),
            (generic("", "SystemdCgroup = \"yes\""), "SystemdCgroup"),
            (generic("", "= ="), "TOML"),
            (
                any::raw("some.other.Options", vec![1]),
                "some.other.Options",
            ),
            (any::raw(any::RUNC_OPTIONS, vec![0xff]), any::RUNC_OPTIONS),
        ] {
            let error = Options::decode(&any).unwrap_err();
            assert_eq!(error.kind(), Kind::Invalid);
            assert!(error.to_string().contains(word), "{error}");
        }
    }
}
