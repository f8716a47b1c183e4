//! What a daemon says on standard input of `start`, and in which dialect it wants the answer.
//!
//! Three dialects: a plain address, one line of JSON, a protobuf message. A daemon that gets the wrong one takes the
//! whole text for a socket address, so each is chosen from facts about the caller and never by hope. The contract is
//! in `docs/bootstrap.md`.

use std::fs::File;
use std::io::{self, IsTerminal, Read};
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use protobuf::Message;
use protobuf::well_known_types::any::Any;

use crate::error::{Context, Error, Kind, Result};
use crate::launch::dialect::Dialect;
use crate::proto::bootstrap::bootstrap::{BootstrapParams, BootstrapResult};
use crate::spec::options;

/// Largest input read, bytes: the daemon's own limit.
pub const INPUT_MAX: usize = 10 * 1024 * 1024;

/// How long standard input may stay silent. A daemon writes it before, or right after, it starts us.
const INPUT_PATIENCE: Duration = Duration::from_secs(10);

/// Task API version we serve; 3 promises that one supervisor serves all containers of its pod.
pub const TASK_VERSION: u32 = 3;

/// What the daemon said.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Input {
    /// Runtime options, if any.
    pub options: Option<Any>,
    /// The rest, from daemons that send parameters (2.3 and newer).
    pub params: Option<Params>,
}

/// Parameters of a `BootstrapParams`, empty strings as none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Params {
    /// As in the protocol: -8 trace, -4 debug, 0 info, 4 warn, 8 error; higher is graver.
    pub log_level: i32,
    /// Version of the daemon.
    pub daemon_version: Option<String>,
    /// Where events go.
    pub ttrpc_address: Option<String>,
    /// The daemon's gRPC socket.
    pub grpc_address: Option<String>,
    /// Where our socket goes.
    pub socket_dir: Option<PathBuf>,
}

/// Reads standard input to its end. Empty for a terminal, which nobody pipes options through.
pub fn read_stdin() -> Result<Vec<u8>> {
    let stdin = io::stdin();
    if stdin.is_terminal() {
        return Ok(Vec::new());
    }
    // A descriptor of our own, because the library's buffer would hide from poll what it has read ahead.
    let mut stdin = File::from(
        stdin
            .as_fd()
            .try_clone_to_owned()
            .context(|| "read standard input")?,
    );
    let end = Instant::now() + INPUT_PATIENCE;
    let mut input = Vec::new();
    let mut chunk = [0; 8192];
    loop {
        let left = end.saturating_duration_since(Instant::now());
        let timeout = PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX);
        match poll(
            &mut [PollFd::new(stdin.as_fd(), PollFlags::POLLIN)],
            timeout,
        ) {
            Err(Errno::EINTR) => continue,
            Err(e) => return Err(Error::sys("wait for standard input", e)),
            Ok(0) => {
                let seconds = INPUT_PATIENCE.as_secs();
                let text = format!(
                    "read standard input: its end did not come within {seconds} s; close it"
                );
                return Err(Error::new(Kind::Deadline, text));
            }
            Ok(_) => {}
        }
        match stdin.read(&mut chunk).context(|| "read standard input")? {
            0 => return Ok(input),
            n => input.extend_from_slice(&chunk[..n]),
        }
        if input.len() > INPUT_MAX {
            return Err(Error::new(
                Kind::Invalid,
                format!(
                    "read standard input: it is longer than {INPUT_MAX} bytes; send runtime options only"
                ),
            ));
        }
    }
}

/// Tells the formats apart: nothing, parameters, or bare options.
///
/// A bare `Any` also decodes as parameters (its type name lands in `instance_id`), so parameters are believed only
/// when they name the same instance and namespace as the flags.
pub fn parse(input: &[u8], id: &str, namespace: &str) -> Result<Input> {
    if input.is_empty() {
        return Ok(Input::default());
    }
    if let Ok(params) = BootstrapParams::parse_from_bytes(input)
        && params.instance_id == id
        && params.namespace == namespace
    {
        return Ok(from_params(params));
    }
    match Any::parse_from_bytes(input) {
        Ok(any) if is_plausible(&any) => Ok(Input {
            options: Some(any),
            params: None,
        }),
        _ => Err(Error::new(
            Kind::Invalid,
            format!(
                "decode {} bytes of standard input: neither runtime options nor bootstrap parameters for instance {id} in namespace {namespace}; send one of them, or nothing",
                input.len()
            ),
        )),
    }
}

/// The answer of `start` in the dialect of the caller. `address` is `unix:///path`; `served` is the Task version of the
/// supervisor that answers there, which may be older than this executable.
pub fn answer(dialect: Dialect, address: &str, served: u32) -> Result<Vec<u8>> {
    match dialect {
        Dialect::Plain => Ok(address.as_bytes().to_vec()),
        // The address has been checked to need no escape, but the serialiser is the one place that knows.
        Dialect::Json(wanted) => {
            let version = wanted.min(served);
            let address = serde_json::to_string(address)
                .map_err(|e| Error::caused(Kind::Other, "write the address as JSON", e))?;
            let text =
                format!("{{\"version\":{version},\"address\":{address},\"protocol\":\"ttrpc\"}}");
            Ok(text.into_bytes())
        }
        Dialect::Protobuf => {
            let result = BootstrapResult {
                version: served as i32,
                address: address.to_owned(),
                protocol: "ttrpc".to_owned(),
                ..BootstrapResult::default()
            };
            result
                .write_to_bytes()
                .map_err(|e| Error::caused(Kind::Other, "encode the bootstrap result", e))
        }
    }
}

fn from_params(params: BootstrapParams) -> Input {
    let some = |text: String| Some(text).filter(|t| !t.is_empty());
    Input {
        // Extensions are open; what is not runtime options is not for us.
        options: params
            .extensions
            .into_iter()
            .filter_map(|e| e.value.into_option())
            .find(|any| !any.type_url.is_empty() && options::is_known(any)),
        params: Some(Params {
            log_level: params.log_level.value(),
            daemon_version: some(params.containerd_version),
            ttrpc_address: some(params.containerd_ttrpc_address),
            grpc_address: some(params.containerd_grpc_address),
            socket_dir: params.socket_dir.and_then(some).map(PathBuf::from),
        }),
    }
}

/// An `Any` a daemon could have written: a type name and nothing but the two fields.
fn is_plausible(any: &Any) -> bool {
    let known_fields_only = any.special_fields.unknown_fields().iter().next().is_none();
    let name = &any.type_url;
    known_fields_only
        && name.contains('.')
        && name
            .chars()
            .all(|c| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-' | '/'))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proto::any;
    use crate::proto::bootstrap::bootstrap::{Extension, LogLevel};

    fn params() -> BootstrapParams {
        BootstrapParams {
            instance_id: "web".into(),
            namespace: "k8s.io".into(),
            log_level: LogLevel::LOG_LEVEL_DEBUG.into(),
            containerd_version: "2.3.4".into(),
            containerd_ttrpc_address: "/run/c.sock.ttrpc".into(),
            socket_dir: Some("/run/other".into()),
            ..BootstrapParams::default()
        }
    }

    #[test]
    fn parameters_are_believed_for_their_own_instance_only() {
        let bytes = params().write_to_bytes().unwrap();
        let input = parse(&bytes, "web", "k8s.io").unwrap();
        let read = input.params.unwrap();
        assert_eq!(
            (read.log_level, read.daemon_version.as_deref()),
            (-4, Some("2.3.4"))
        );
        assert_eq!(read.socket_dir, Some(PathBuf::from("/run/other")));
        assert_eq!(input.options, None);
        for (id, namespace) in [("other", "k8s.io"), ("web", "default")] {
            let error = parse(&bytes, id, namespace).unwrap_err();
            assert_eq!(error.kind(), Kind::Invalid);
        }
    }

    #[test]
    fn options_are_picked_from_the_extensions_by_type() {
        let mut message = params();
        for any in [
            any::raw("some.Extension", vec![1]),
            any::raw(any::RUNC_OPTIONS, Vec::new()),
        ] {
            message.extensions.push(Extension {
                value: Some(any).into(),
                ..Extension::default()
            });
        }
        let input = parse(&message.write_to_bytes().unwrap(), "web", "k8s.io").unwrap();
        assert_eq!(
            input.options.map(|o| o.type_url).as_deref(),
            Some(any::RUNC_OPTIONS)
        );
    }

    #[test]
    fn bare_options_are_never_taken_for_parameters() {
        for any in [
            any::raw(any::EMPTY, Vec::new()),
            any::raw(any::RUNC_OPTIONS, vec![0x48, 1]),
            any::raw(
                "types.googleapis.com/runtimeoptions.v1.Options",
                b"\x1a\x15SystemdCgroup = true\n".to_vec(),
            ),
        ] {
            let input = parse(&any.write_to_bytes().unwrap(), "web", "k8s.io").unwrap();
            assert_eq!((input.options, input.params), (Some(any), None));
        }
    }

    #[test]
    fn nothing_is_nothing_and_garbage_is_an_error() {
        assert_eq!(parse(b"", "web", "k8s.io").unwrap(), Input::default());
        for garbage in [
            &b"hello"[..],
            b"{\"version\":3}",
            b"\x0a\xff",
            &[0; 64],
            b"\x0a\x03a b",
        ] {
            let error = parse(garbage, "web", "k8s.io").unwrap_err();
            assert!(error.to_string().contains("standard input"), "{error}");
        }
    }

    #[test]
    fn the_answer_speaks_each_dialect() {
        let address = "unix:///run/containerd/s/abc";
        assert_eq!(
            answer(Dialect::Plain, address, 3).unwrap(),
            address.as_bytes()
        );
        let json: serde_json::Value =
            serde_json::from_slice(&answer(Dialect::Json(2), address, 3).unwrap()).unwrap();
        assert_eq!(
            json,
            serde_json::json!({"version": 2, "address": address, "protocol": "ttrpc"})
        );
        let result =
            BootstrapResult::parse_from_bytes(&answer(Dialect::Protobuf, address, 3).unwrap())
                .unwrap();
        assert_eq!(
            (
                result.version,
                result.address.as_str(),
                result.protocol.as_str()
            ),
            (3, address, "ttrpc")
        );
    }
}
