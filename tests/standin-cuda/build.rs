//! Compiles the stand-in with the system's C++ compiler (`CXX`, else g++).
#![expect(clippy::unwrap_used, clippy::panic, reason = "a build script fails by panicking")]

use std::path::{Path, PathBuf};
use std::process::Command;

fn run(command: &mut Command) {
    let status = command.status().unwrap_or_else(|e| panic!("{command:?}: {e}"));
    assert!(status.success(), "{command:?}: {status}");
}

fn main() {
    let out = PathBuf::from(std::env::var_os("OUT_DIR").unwrap());
    let cxx = std::env::var("CXX").unwrap_or_else(|_| "g++".to_owned());
    let cpp = Path::new("cpp");
    println!("cargo::rerun-if-changed=cpp");
    println!("cargo::rerun-if-changed=../../kernels");
    println!("cargo::rerun-if-env-changed=CXX");
    let mut objects = Vec::new();
    for name in ["streams.cpp", "memory.cpp", "device.cpp", "control.cpp", "kernels.cpp", "stubs.c"] {
        let source = cpp.join(name);
        if !source.exists() {
            continue;
        }
        let object = out.join(name).with_extension("o");
        let mut compile = Command::new(&cxx);
        compile.args(["-O2", "-g1", "-fPIC", "-fvisibility=hidden", "-pthread", "-Wall", "-I../../kernels", "-c"]);
        let language: &[&str] = if name.ends_with(".c") { &["-x", "c"] } else { &["-std=c++17"] };
        run(compile.args(language).arg(&source).arg("-o").arg(&object));
        objects.push(object);
    }
    let library = out.join("libcuda.so.1");
    let mut link = Command::new(&cxx);
    run(link.args(["-shared", "-pthread", "-Wl,-soname,libcuda.so.1", "-o"]).arg(&library).args(&objects));
    // cudarc looks for `libcuda.so` first: an empty library that loads the other one.
    let mut alias = Command::new(&cxx);
    alias.args(["-shared", "-Wl,-soname,libcuda.so", "-Wl,--no-as-needed", "-Wl,-rpath,$ORIGIN", "-o"]);
    run(alias.arg(out.join("libcuda.so")).arg(&library));
    std::fs::create_dir_all(out.join("empty")).unwrap();
    let mut empty = Command::new(&cxx);
    run(empty.args(["-shared", "-Wl,-soname,libcuda.so.1", "-o"]).arg(out.join("empty/libcuda.so.1")));
    println!("cargo::rustc-env=STANDIN_CUDA_DIR={}", out.display());
}
