//! Compares cufile-sys with NVIDIA's header and library, of every version that `make cufile` has
//! unpacked.
//!
//! A C program with the real `cufile.h`, and a small `cuda.h`, prints every error, size and offset
//! that stands here; it does not compile where a function has another type or a name is missing.
//! Without wheels or gcc the check is skipped and says so, unless `FOREBAY_CHECK_ABI=required`.
#![expect(clippy::unwrap_used, clippy::panic, reason = "a test's helpers; clippy exempts only the test itself")]

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::mem::offset_of;
use std::path::{Path, PathBuf};
use std::process::Command;

use cufile_sys::sys::{FUNCTIONS, Function};
use cufile_sys::types::{HANDLE_TYPE_OPAQUE_FD, LAYOUTS};
use cufile_sys::{Version, name_of, stats};

/// The few types of CUDA that `cufile.h` uses.
const CUDA_H: &str =
    "#include <stdint.h>\n#include <sys/types.h>\ntypedef int CUresult;\ntypedef struct CUstream_st *CUstream;\n";

/// Versions that a full check needs, 1.x: the oldest and newest, and those that changed something.
const VERSIONS: [i32; 8] = [11, 13, 14, 15, 16, 17, 19, 20];

/// Before 1.15 the list of errors ended at this number.
const OLD_END: i32 = 5039;

struct Wheel {
    version: Version,
    include: PathBuf,
    library: PathBuf,
}

impl Wheel {
    fn in_folder(folder: &Path) -> Option<Self> {
        let name = folder.file_name()?.to_str()?;
        let mut numbers = name.strip_prefix("nvidia_cufile")?.split('-').nth(1)?.split('.').map(str::parse);
        let version = Version { major: numbers.next()?.ok()?, minor: numbers.next()?.ok()? };
        let parts = std::fs::read_dir(folder.join("nvidia")).ok()?.flatten();
        let root = parts.map(|part| part.path()).find(|part| part.join("include/cufile.h").is_file())?;
        Some(Self { version, include: root.join("include"), library: root.join("lib/libcufile.so.0") })
    }
}

fn wheels() -> Vec<Wheel> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/cufile");
    let folders = std::fs::read_dir(root).into_iter().flatten().flatten();
    folders.filter_map(|folder| Wheel::in_folder(&folder.path())).collect()
}

/// A type of Rust in C, for the types in [`FUNCTIONS`].
fn in_c(rust: &str) -> String {
    if let Some(to) = rust.strip_prefix("*mut ") {
        return format!("{} *", in_c(to));
    }
    if let Some(to) = rust.strip_prefix("*const ") {
        return format!("const {} *", in_c(to));
    }
    let name = match rust {
        "c_int" => "int",
        "c_void" => "void",
        "i64" => "off_t",
        "isize" => "ssize_t",
        "usize" => "size_t",
        "Buffer" => "CUfileStatsLevel3_t",
        "CuFileError" => "CUfileError_t",
        "Descr" => "CUfileDescr_t",
        "Handle" => "CUfileHandle_t",
        other => panic!("what is {other} in C?"),
    };
    name.to_owned()
}

/// `unsafe extern "C" fn(a: T, …) -> R` as a pointer to a function in C.
fn signature_in_c(function: &Function) -> String {
    let text = function.signature.split_whitespace().collect::<Vec<_>>().join(" ");
    let (arguments, result) = text.split_once('(').unwrap().1.rsplit_once(')').unwrap();
    let types = arguments.split(',').map(str::trim).filter(|a| !a.is_empty());
    let types: Vec<_> = types.map(|a| in_c(a.split_once(": ").unwrap().1)).collect();
    let result = result.strip_prefix(" -> ").map_or("void".to_owned(), in_c);
    format!("{result} (*)({})", if types.is_empty() { "void".to_owned() } else { types.join(", ") })
}

/// The lines that the program is to print, and the program.
fn program(version: Version) -> (BTreeMap<String, i64>, String) {
    let mut expected = BTreeMap::new();
    let mut body = String::new();
    let mut ask = |what: String, c: String, value: i64| {
        writeln!(body, "  printf(\"{what}=%lld\\n\", (long long)({c}));").unwrap();
        expected.insert(what, value);
    };
    let fd = "CU_FILE_HANDLE_TYPE_OPAQUE_FD".to_owned();
    ask(fd.clone(), fd, HANDLE_TYPE_OPAQUE_FD.into());
    for layout in LAYOUTS.iter().filter(|l| l.since <= version) {
        ask(format!("sizeof {}", layout.name), format!("sizeof({})", layout.name), layout.size as i64);
        for (field, at) in layout.fields {
            ask(format!("{}.{field}", layout.name), format!("offsetof({}, {field})", layout.name), *at as i64);
        }
    }
    if version >= (Version { major: 1, minor: 15 }) {
        let at = stats::gpus_at(version);
        for (field, at) in [("num_gpus", at), ("per_gpu_stats", at + offset_of!(stats::AllGpus, per_gpu_stats))] {
            ask(field.to_owned(), format!("offsetof(CUfileStatsLevel3_t, {field})"), at as i64);
        }
        let size = at + size_of::<stats::AllGpus>();
        ask("sizeof level 3".to_owned(), "sizeof(CUfileStatsLevel3_t)".to_owned(), size as i64);
    }
    let mut text = "#define _GNU_SOURCE\n#include <stddef.h>\n#include <stdio.h>\n#include <cufile.h>\n".to_owned();
    for function in FUNCTIONS.iter().filter(|f| f.since <= version) {
        let (name, signature) = (function.name, signature_in_c(function));
        writeln!(text, "_Static_assert(__builtin_types_compatible_p(__typeof__(&{name}), {signature}), \"{name}\");")
            .unwrap();
    }
    text.push_str("#define CUFILE_OP(code, name, string) printf(\"error \" #name \"=%d\\n\", (int)(code));\n");
    writeln!(text, "int main(void) {{\n{body}  CUFILEOP_STATUS_ENTRIES\n  return 0;\n}}").unwrap();
    let is_old = version < (Version { major: 1, minor: 15 });
    for err in (0..=6000).filter(|e| *e == 0 || *e >= 5000) {
        let name = match err {
            OLD_END if is_old => Some("CU_FILE_IO_MAX_ERROR"),
            _ if is_old && err > OLD_END => None,
            _ => name_of(err),
        };
        if let Some(name) = name {
            expected.insert(format!("error {name}"), i64::from(err));
        }
    }
    (expected, text)
}

fn output(command: &mut Command) -> String {
    let done = command.output().unwrap();
    assert!(done.status.success(), "{command:?}\n{}", String::from_utf8_lossy(&done.stderr));
    String::from_utf8(done.stdout).unwrap()
}

fn gcc(wheel: &Wheel, dir: &Path) -> Command {
    let mut gcc = Command::new("gcc");
    gcc.arg("-isystem").arg(&wheel.include).arg("-I").arg(dir).current_dir(dir);
    gcc
}

fn check_header(wheel: &Wheel, dir: &Path, findings: &mut Vec<String>) {
    let version = wheel.version;
    let (mut expected, text) = program(version);
    std::fs::write(dir.join("abi.c"), text).unwrap();
    output(gcc(wheel, dir).args(["-Wall", "-Werror", "-o", "abi", "abi.c"]));
    for line in output(&mut Command::new(dir.join("abi"))).lines() {
        let (what, value) = line.split_once('=').unwrap();
        let ours = expected.remove(what);
        if ours != Some(value.parse().unwrap()) {
            findings.push(format!("{version}: {what} is {value}, here {ours:?}"));
        }
    }
    findings.extend(expected.keys().map(|what| format!("{version}: the header has no {what}")));
}

fn check_library(wheel: &Wheel, findings: &mut Vec<String>) {
    let exported = output(Command::new("nm").args(["-D", "--defined-only"]).arg(&wheel.library));
    let exported: BTreeSet<_> = exported.lines().filter_map(|line| line.split_whitespace().last()).collect();
    for function in FUNCTIONS {
        // Symbols may carry a version, as `name@@VERSION`.
        let has = exported.iter().any(|symbol| symbol.split('@').next() == Some(function.name));
        if has != (function.since <= wheel.version) {
            findings
                .push(format!("{}: {} exported: {has}, here since {}", wheel.version, function.name, function.since));
        }
    }
}

#[test]
fn errors_layouts_and_functions_are_those_of_the_headers_and_libraries() {
    let required = std::env::var("FOREBAY_CHECK_ABI").is_ok_and(|v| v == "required");
    let have_tools = ["gcc", "nm"].iter().all(|tool| Command::new(tool).arg("--version").output().is_ok());
    let wheels = if have_tools { wheels() } else { Vec::new() };
    let missing: Vec<_> = VERSIONS.iter().filter(|minor| !wheels.iter().any(|w| w.version.minor == **minor)).collect();
    if !missing.is_empty() {
        let why = if have_tools { "no wheel there; run `make cufile`" } else { "gcc and nm are not installed" };
        eprintln!("SKIPPED for libcufile 1.x, x of {missing:?}: {why}");
        assert!(!required, "not checked for every version: {why}");
    }
    let mut findings = Vec::new();
    for wheel in wheels {
        let dir =
            PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("abi-{}-{}", wheel.version, std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        std::fs::write(dir.join("cuda.h"), CUDA_H).unwrap();
        check_header(&wheel, &dir, &mut findings);
        check_library(&wheel, &mut findings);
        std::fs::remove_dir_all(&dir).unwrap();
        eprintln!("compared with libcufile {}", wheel.version);
    }
    assert!(findings.is_empty(), "{}", findings.join("\n"));
}
