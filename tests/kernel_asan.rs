//! The CUDA kernels as C++ under AddressSanitizer and UndefinedBehaviorSanitizer, over random
//! geometries in allocations that end where the layout's reach ends (`tests/kernels/`).
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests fail by panicking")]

use std::path::{Path, PathBuf};
use std::process::Command;

const SANITIZERS: [&str; 2] = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"];

fn compile(source: &Path, program: &Path) -> Result<(), String> {
    let cxx = std::env::var("CXX").unwrap_or_else(|_| "g++".to_owned());
    let mut command = Command::new(cxx);
    command.args(["-std=c++17", "-O1", "-g1", "-pthread", "-ffp-contract=off", "-Wall", "-Wextra"]);
    command.arg("-Wno-unknown-pragmas").args(SANITIZERS).arg(source).arg("-o").arg(program);
    let output = command.output().map_err(|e| format!("{command:?}: {e}"))?;
    if output.status.success() { Ok(()) } else { Err(String::from_utf8_lossy(&output.stderr).into_owned()) }
}

#[test]
fn kernels_touch_only_what_the_layout_reaches_and_agree_with_plain_loops() {
    let out = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("kernel_asan");
    std::fs::create_dir_all(&out).unwrap();
    let (empty, program) = (out.join("empty.cpp"), out.join("reshape"));
    std::fs::write(&empty, "int main() {}\n").unwrap();
    if let Err(e) = compile(&empty, &out.join("empty")) {
        panic!(
            "this test needs g++ with libasan and libubsan (packages g++ and libasan of the compiler's version):\n{e}"
        );
    }
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/kernels/reshape.cpp");
    compile(&source, &program).unwrap_or_else(|e| panic!("the kernels do not compile as C++:\n{e}"));
    let run = Command::new(&program).args(["1", "120"]).output().unwrap();
    let said = [run.stdout, run.stderr].map(|b| String::from_utf8_lossy(&b).into_owned()).concat();
    assert!(run.status.success(), "{}:\n{said}", run.status);
    assert!(said.contains("120 cases"), "{said}");
}
