//! Runtime options of a request, in any of the forms a daemon sends them.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use protobuf::well_known_types::any::Any;
use serde::Deserialize;

use crate::error::{Context, Error, Kind, Result};
use crate::proto::any::{RUNC_OPTIONS, RUNTIME_OPTIONS, is_nothing, unpack};
use crate::proto::runc_options::oci::Options as RuncOptions;
use crate::proto::runtimeoptions::runtimeoptions::Options as TomlOptions;

/// Larger configuration files are refused.
const CONFIG_BOUND: u64 = 64 * 1024;

/// Options after decoding (runc options, runtimeoptions TOML, or none).
///
/// The TOML keys are those of containerd's table for runc (`BinaryName`, `Root`, `SystemdCgroup`, ...) and
/// `PreferCrun`, ours; keys that mean nothing to us are passed over, as the table is shared with other runtimes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "PascalCase")]
pub struct RuntimeOptions {
    /// OCI runtime: a name or an absolute path; empty: not named.
    #[serde(rename = "BinaryName")]
    pub binary: String,
    /// Parent of the runtime's state directories; empty: `/run/containerd/runc`.
    pub root: String,
    /// The runtime talks to systemd for cgroups.
    pub systemd_cgroup: bool,
    /// No pivot_root (rootfs on a ramdisk).
    pub no_pivot_root: bool,
    /// No session keyring of its own.
    pub no_new_keyring: bool,
    /// Host uid that owns the pipes of standard streams.
    pub io_uid: u32,
    /// Host gid of the same.
    pub io_gid: u32,
    /// cgroup for the supervisor itself.
    pub shim_cgroup: String,
    /// With no `binary`: the configured runtime, else crun where it runs, else runc.
    pub prefer_crun: bool,
}

impl RuntimeOptions {
    /// Opens what came as `options`: nothing, `containerd.runc.v1.Options`, or `runtimeoptions.v1.Options` with a TOML
    /// body or the path of a TOML file.
    ///
    /// # Errors
    /// Invalid for any other type, for bytes that do not fit the type, and for TOML that is none.
    pub fn decode(options: &Any) -> Result<Self> {
        let bad = |e| {
            Error::caused(
                Kind::Invalid,
                format!("decode options {}", options.type_url),
                e,
            )
        };
        if is_nothing(options) {
            return Ok(Self::default());
        }
        if let Some(runc) = unpack::<RuncOptions>(options, RUNC_OPTIONS).map_err(bad)? {
            return Ok(runc.into());
        }
        if let Some(outer) = unpack::<TomlOptions>(options, RUNTIME_OPTIONS).map_err(bad)? {
            return match (outer.config_path.as_str(), outer.config_body) {
                ("", body) => Self::from_toml(&body),
                (path, _) => Self::from_file(Path::new(path)),
            };
        }
        Err(Error::new(
            Kind::Invalid,
            format!(
                "decode options: type {:?} is none of {RUNC_OPTIONS}, {RUNTIME_OPTIONS}",
                options.type_url
            ),
        ))
    }

    /// The TOML form.
    ///
    /// # Errors
    /// Invalid.
    pub fn from_toml(text: &[u8]) -> Result<Self> {
        basic_toml::from_slice(text)
            .map_err(|e| Error::caused(Kind::Invalid, "parse runtime options as TOML", e))
    }

    fn from_file(path: &Path) -> Result<Self> {
        let what = || format!("read runtime options {}", path.display());
        if !path.is_absolute() {
            return Err(Error::new(
                Kind::Invalid,
                format!("{}: give an absolute path", what()),
            ));
        }
        let mut text = Vec::new();
        File::open(path)
            .and_then(|f| f.take(CONFIG_BOUND + 1).read_to_end(&mut text))
            .context(what)
            .map_err(|e| e.as_kind(Kind::Invalid))?;
        if text.len() as u64 > CONFIG_BOUND {
            return Err(Error::new(
                Kind::Invalid,
                format!("{}: longer than {CONFIG_BOUND} bytes", what()),
            ));
        }
        Self::from_toml(&text).context(what)
    }
}

impl From<RuncOptions> for RuntimeOptions {
    fn from(runc: RuncOptions) -> Self {
        Self {
            binary: runc.binary_name,
            root: runc.root,
            systemd_cgroup: runc.systemd_cgroup,
            no_pivot_root: runc.no_pivot_root,
            no_new_keyring: runc.no_new_keyring,
            io_uid: runc.io_uid,
            io_gid: runc.io_gid,
            shim_cgroup: runc.shim_cgroup,
            prefer_crun: false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proto::any::{pack, raw};

    #[test]
    fn nothing_has_defaults() {
        for any in [Any::default(), raw("google.protobuf.Empty", Vec::new())] {
            assert_eq!(
                RuntimeOptions::decode(&any).ok(),
                Some(RuntimeOptions::default())
            );
        }
    }

    #[test]
    fn runc_options_are_read_whatever_the_prefix() {
        let runc = RuncOptions {
            binary_name: "crun".into(),
            io_uid: 7,
            systemd_cgroup: true,
            ..Default::default()
        };
        let mut any = pack(RUNC_OPTIONS, &runc).unwrap();
        any.type_url = format!("types.googleapis.com/{RUNC_OPTIONS}");
        let got = RuntimeOptions::decode(&any).unwrap();
        assert_eq!(
            (
                got.binary.as_str(),
                got.io_uid,
                got.systemd_cgroup,
                got.prefer_crun
            ),
            ("crun", 7, true, false)
        );
    }

    #[test]
    fn a_toml_body_is_toml_and_never_a_cgroup_path() {
        let outer = TomlOptions {
            config_body: b"SystemdCgroup = true\nBinaryName = \"/bin/x\"\nRoot = \"/r\"\nPreferCrun = true\nOther = 1\n".to_vec(),
            ..Default::default()
        };
        let got = RuntimeOptions::decode(&pack(RUNTIME_OPTIONS, &outer).unwrap()).unwrap();
        let want = RuntimeOptions {
            binary: "/bin/x".into(),
            root: "/r".into(),
            systemd_cgroup: true,
            prefer_crun: true,
            ..Default::default()
        };
        assert_eq!(got, want);
    }

    #[test]
    fn a_path_is_read_with_a_bound() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("options.toml");
        let ask = |path: &Path| {
            let outer = TomlOptions {
                config_path: path.display().to_string(),
                ..Default::default()
            };
            RuntimeOptions::decode(&pack(RUNTIME_OPTIONS, &outer).unwrap())
        };
        std::fs::write(&path, "NoPivotRoot = true").unwrap();
        assert!(ask(&path).unwrap().no_pivot_root);
        std::fs::write(&path, " ".repeat(70_000)).unwrap();
        for bad in [
            path.as_path(),
            Path::new("options.toml"),
            Path::new("/nowhere/at/all"),
        ] {
            assert_eq!(ask(bad).unwrap_err().kind(), Kind::Invalid, "{bad:?}");
        }
    }

    #[test]
    fn other_types_and_damaged_ones_are_errors() {
        for any in [
            raw("some.Type", vec![1]),
            raw(RUNC_OPTIONS, vec![0xff]),
            raw(RUNTIME_OPTIONS, b"\x1a\x01=".to_vec()),
        ] {
            assert_eq!(
                RuntimeOptions::decode(&any).unwrap_err().kind(),
                Kind::Invalid,
                "{any:?}"
            );
        }
    }
}
