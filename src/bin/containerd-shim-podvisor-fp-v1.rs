//! The supervisor for tests: its methods fail as the pod's annotations say.
fn main() -> std::process::ExitCode {
    podvisor::failpoint::obey_annotations();
    podvisor::launch::main()
}
