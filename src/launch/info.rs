//! `-v` and `-info`: what this shim is and what the OCI runtime below it can do.
//!
//! Both work without a namespace, outside a bundle and without root. Must never fail because the OCI runtime does not
//! answer: without features the daemon only knows less.

use std::process::ExitCode;
use std::time::Duration;

use protobuf::Message;
use protobuf::well_known_types::any::Any;

use crate::config::Config;
use crate::error::{Error, Kind, Result};
use crate::launch::{NAME, answer, bootstrap, probe};
use crate::proto::any;
use crate::proto::types::introspection::{RuntimeInfo, RuntimeVersion};
use crate::spec::options::Options;

/// What daemons expect below a shim that names nothing else.
const DEFAULT_RUNTIME: &str = "runc";

/// How long the OCI runtime may take to list its features; a daemon waits for the first task of a runtime.
const FEATURES_LIMIT: Duration = Duration::from_secs(5);

/// Prints the version for people.
pub fn version() -> Result<ExitCode> {
    let text = format!(
        "containerd-shim-podvisor-v1:\n  Version:  {}\n  Runtime:  {NAME}\n",
        env!("CARGO_PKG_VERSION")
    );
    answer(text.as_bytes())?;
    Ok(ExitCode::SUCCESS)
}

/// Reads options from standard input and prints a `RuntimeInfo`.
pub fn info() -> Result<ExitCode> {
    let given = match bootstrap::read_stdin()? {
        input if input.is_empty() => None,
        input => Some(Any::parse_from_bytes(&input).map_err(|e| {
            Error::caused(
                Kind::Invalid,
                "decode standard input as runtime options; send them, or nothing",
                e,
            )
        })?),
    };
    let options = Options::of_daemon(given.as_ref(), &Config::load()?.options)?;
    let runtime = if options.binary.is_empty() {
        DEFAULT_RUNTIME
    } else {
        &options.binary
    };
    let bytes = describe(given, features(runtime))
        .write_to_bytes()
        .map_err(|e| Error::caused(Kind::Other, "encode the runtime's description", e))?;
    answer(&bytes)?;
    Ok(ExitCode::SUCCESS)
}

fn describe(options: Option<Any>, features: Option<Vec<u8>>) -> RuntimeInfo {
    let version = RuntimeVersion {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        ..RuntimeVersion::default()
    };
    RuntimeInfo {
        name: NAME.to_owned(),
        version: Some(version).into(),
        options: options.into(),
        features: features
            .map(|json| any::raw(any::OCI_FEATURES, json))
            .into(),
        ..RuntimeInfo::default()
    }
}

/// The features document, when the runtime knows the verb and answers JSON.
fn features(runtime: &str) -> Option<Vec<u8>> {
    let json = probe::ask(runtime.as_ref(), &["features"], FEATURES_LIMIT).ok()?;
    let _: serde::de::IgnoredAny = serde_json::from_slice(&json).ok()?;
    Some(json)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_come_back_and_features_are_named() {
        let given = any::raw(any::RUNC_OPTIONS, vec![0x48, 1]);
        let info = describe(Some(given.clone()), Some(b"{}".to_vec()));
        assert_eq!(info.options.as_ref(), Some(&given));
        assert_eq!(
            info.features.type_url,
            "types.containerd.io/opencontainers/runtime-spec/1/features/Features"
        );
        assert!(describe(None, None).features.is_none());
    }

    #[test]
    fn a_runtime_without_features_is_no_error() {
        assert_eq!(features("/nonexistent/runtime"), None);
        assert_eq!(features("echo"), None);
    }
}
