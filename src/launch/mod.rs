//! Being started by a daemon. STUB of the public surface; bodies to be written.
#![allow(missing_docs, unused_variables, clippy::todo)]
use std::process::ExitCode;

/// `main` of containerd-shim-podvisor-v1.
pub fn main() -> ExitCode {
    todo!()
}
