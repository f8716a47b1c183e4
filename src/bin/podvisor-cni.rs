//! The CNI plugin, as a daemon runs it.
fn main() -> std::process::ExitCode {
    podvisor::plugin::main()
}
