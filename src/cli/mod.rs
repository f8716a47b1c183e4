//! The command people type. STUB.
use std::process::ExitCode;
/// `main` of podvisor.
pub fn main() -> ExitCode {
    ExitCode::SUCCESS
}
