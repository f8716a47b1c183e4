//! The command `podvisor`.
fn main() -> std::process::ExitCode {
    podvisor::cli::main()
}
