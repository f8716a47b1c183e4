//! Generates the wire messages from `protos/` and compiles the infra program.
//!
//! Both steps need nothing but cargo and rustc: the parser of the code generator is pure Rust, so no `protoc`.
//! Output goes to `OUT_DIR` only.

use std::error::Error;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

use ttrpc_codegen::{Codegen, Customize, ProtobufCustomize};

/// One directory of generated files each: two files called `shim.proto` must not meet.
const SETS: &[(&str, &[&str])] = &[
    (
        "types",
        &[
            "types/event.proto",
            "types/introspection.proto",
            "types/metrics.proto",
            "types/mount.proto",
            "types/platform.proto",
            "types/task/task.proto",
            "types/transfer.proto",
        ],
    ),
    ("sandbox", &["runtime/sandbox/sandbox.proto"]),
    ("task_v2", &["runtime/task/v2/shim.proto"]),
    ("task_v3", &["runtime/task/v3/shim.proto"]),
    ("bootstrap", &["runtime/bootstrap/bootstrap.proto"]),
    (
        "events",
        &["events/sandbox_events.proto", "events/task_events.proto"],
    ),
    ("events_ttrpc", &["services/events.proto"]),
    ("streaming", &["services/streaming.proto"]),
    ("runc_options", &["options/oci.proto"]),
    ("runtimeoptions", &["options/runtimeoptions.proto"]),
    ("cgroup1", &["cgroups/v1/metrics.proto"]),
    ("cgroup2", &["cgroups/v2/metrics.proto"]),
    ("cri", &["cri/sandbox_config.proto"]),
];

/// What only tests speak: built with the feature they build everything with.
const OF_TESTS: (&str, &[&str]) = ("cri_client", &["cri/sandbox_config.proto", "cri/api.proto"]);

const PROTOS: &str = "protos";
const INFRA_SOURCE: &str = "src/infra/program.rs";

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed={PROTOS}");
    let out = PathBuf::from(env::var_os("OUT_DIR").ok_or("find OUT_DIR: run this through cargo")?);
    let of_tests = env::var_os("CARGO_FEATURE_FAILPOINT").map(|_| &OF_TESTS);
    for (name, files) in SETS.iter().chain(of_tests) {
        messages(&out.join(name), files)
            .map_err(|e| format!("generate messages of set {name}: {e}"))?;
    }
    start_without_relocation();
    infra_program(&out)
}

/// A static podvisor-cni has a fixed address, as the plugins behind it have: else each of its two processes for a pod would
/// begin with four thousand relocations, a fifth of a millisecond. What stays for a pod's life keeps its random one.
fn start_without_relocation() {
    let features = env::var("CARGO_CFG_TARGET_FEATURE").unwrap_or_default();
    if features.split(',').any(|feature| feature == "crt-static") {
        for arg in ["-static", "-no-pie"] {
            println!("cargo:rustc-link-arg-bin=podvisor-cni={arg}");
        }
    }
}

/// Generates one set into `dir` and leaves there a `mod.rs` that `include!` accepts.
fn messages(dir: &Path, files: &[&str]) -> Result<(), Box<dyn Error>> {
    fs::create_dir_all(dir)?;
    let inputs: Vec<String> = files.iter().map(|f| format!("{PROTOS}/{f}")).collect();
    Codegen::new()
        .inputs(&inputs)
        .include(PROTOS)
        .rust_protobuf()
        .rust_protobuf_customize(
            ProtobufCustomize::default()
                .gen_mod_rs(true)
                .lite_runtime(true),
        )
        .customize(Customize {
            async_all: true,
            gen_mod: true,
            ..Customize::default()
        })
        .out_dir(dir)
        .run()?;
    // The written list opens with inner attributes, which include! refuses; only the modules are wanted.
    let list = dir.join("mod.rs");
    let modules: String = fs::read_to_string(&list)?
        .lines()
        .filter(|line| line.starts_with("pub mod"))
        .map(|line| format!("{line}\n"))
        .collect();
    fs::write(&list, modules)?;
    Ok(())
}

/// Compiles the infra program, the first process of a pod, to `podvisor-infra` in `out`.
///
/// It is a static program without a standard library, so that it shares no page with anything and costs the pod a
/// few kilobytes; plain rustc is enough and keeps it out of the dependency graph.
fn infra_program(out: &Path) -> Result<(), Box<dyn Error>> {
    println!("cargo:rerun-if-changed={INFRA_SOURCE}");
    let rustc = env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let target = env::var("TARGET").map_err(|e| format!("find TARGET: {e}"))?;
    let binary = out.join("podvisor-infra");
    let mut compile = Command::new(&rustc);
    if let Some(linker) = env::var_os("RUSTC_LINKER") {
        let mut option = OsString::from("linker=");
        option.push(linker);
        compile.arg("-C").arg(option);
    }
    let done = compile
        .args(["--edition", "2024", "--crate-type", "bin", "--crate-name", "podvisor_infra"])
        .args(["--target", &target])
        .args(["-C", "panic=abort", "-C", "opt-level=s", "-C", "strip=symbols", "-C", "debuginfo=0"])
        .args(["-C", "codegen-units=1", "-C", "relocation-model=static", "-C", "force-unwind-tables=no"])
        // No start files and no libraries: the program brings its own _start and makes system calls itself.
        .args(["-C", "link-arg=-nostdlib", "-C", "link-arg=-nostartfiles", "-C", "link-arg=-static"])
        // One small image: no build id, no table kept only for relro, sections packed without page padding.
        .args(["-C", "link-arg=-Wl,--build-id=none,-z,norelro,-z,noseparate-code,--gc-sections,--no-eh-frame-hdr"])
        .arg("-o")
        .arg(&binary)
        .arg(INFRA_SOURCE)
        .output()
        .map_err(|e| format!("run {} for {INFRA_SOURCE}: {e}", rustc.to_string_lossy()))?;
    if !done.status.success() {
        let text = String::from_utf8_lossy(&done.stderr);
        return Err(format!("compile {INFRA_SOURCE}: {}\n{text}", done.status).into());
    }
    Ok(())
}
