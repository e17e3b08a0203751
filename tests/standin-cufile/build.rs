//! Compiles the stand-in library and the interposer for NVIDIA's; their paths become constants of
//! the crate.

use std::path::Path;
use std::process::{Command, ExitCode};

fn main() -> ExitCode {
    println!("cargo::rerun-if-changed=cpp");
    let Ok(out) = std::env::var("OUT_DIR") else { return ExitCode::FAILURE };
    let compiler = std::env::var("CXX").unwrap_or_else(|_| "g++".to_owned());
    for (source, library) in [("cpp/cufile.cpp", "libcufile.so.0"), ("cpp/interpose.cpp", "libinterpose.so")] {
        let library = Path::new(&out).join(library);
        let mut command = Command::new(&compiler);
        command
            .args(["-std=c++17", "-O1", "-g", "-Wall", "-Wextra", "-shared", "-fPIC", "-o"])
            .arg(&library)
            .arg(source);
        match command.args(["-ldl", "-lpthread"]).status() {
            Ok(status) if status.success() => {}
            other => {
                println!("cargo::error=cannot compile {source} with {compiler}: {other:?}");
                return ExitCode::FAILURE;
            }
        }
    }
    ExitCode::SUCCESS
}
