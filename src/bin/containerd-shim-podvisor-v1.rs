//! The supervisor and its launch helper, as containerd starts it.
fn main() -> std::process::ExitCode {
    podvisor::launch::main()
}
