//! Compiles the kernels with the system's C++ compiler (`CXX`, else g++).
#![expect(clippy::unwrap_used, clippy::panic, reason = "a build script fails by panicking")]

use std::path::PathBuf;
use std::process::Command;

fn run(command: &mut Command) {
    match command.status() {
        Ok(status) => assert!(status.success(), "{command:?}: {status}"),
        Err(e) => panic!("the tests of the CUDA kernels need a C++ compiler: {command:?}: {e}"),
    }
}

fn main() {
    println!("cargo::rerun-if-changed=../standin-cuda/cpp/kernels.cpp");
    println!("cargo::rerun-if-changed=../standin-cuda/cpp/cpu_shim.h");
    for file in ["common.cu", "reshape.cu", "exp4.cu", "rope.cu"] {
        println!("cargo::rerun-if-changed=../../kernels/{file}");
    }
    println!("cargo::rerun-if-env-changed=CXX");
    let out = PathBuf::from(std::env::var_os("OUT_DIR").unwrap());
    let (object, library) = (out.join("kernels.o"), out.join("libforebay_kernels.a"));
    let mut compile = Command::new(std::env::var("CXX").unwrap_or_else(|_| "g++".to_owned()));
    compile.args(["-std=c++17", "-O2", "-g1", "-fPIC", "-ffp-contract=off", "-Wno-unknown-pragmas", "-c"]);
    run(compile.arg("../standin-cuda/cpp/kernels.cpp").arg("-o").arg(&object));
    let _ = std::fs::remove_file(&library);
    run(Command::new("ar").arg("rcs").arg(&library).arg(&object));
    println!("cargo::rustc-link-search=native={}", out.display());
    println!("cargo::rustc-link-lib=static=forebay_kernels");
    println!("cargo::rustc-link-lib=dylib=stdc++");
}
