//! The house rules that a compiler cannot check: which module may know which, where `unsafe` and
//! CUDA may appear, how long a file may be, and that ARCHITECTURE.md leads to every file's module.
//! Each finding names the file and line to look at.
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests fail by panicking")]

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// For each module of `src`, the modules it may name. `error` and `metrics` are leaves that
/// everybody may use.
const MAY_KNOW: &[(&str, &[&str])] = &[
    ("error", &[]),
    ("metrics", &[]),
    ("config", &[]),
    ("geometry", &[]),
    ("key", &["geometry"]),
    ("format", &["key", "geometry"]),
    ("index", &["format", "key", "geometry"]),
    ("process", &[]),
    ("io", &[]),
    ("paged", &["geometry"]),
    ("device", &["io", "paged", "geometry", "config", "format"]),
    ("log", &["index", "io", "format", "key", "geometry", "config"]),
    ("tier", &["device", "io", "key"]),
    ("remote", &["log", "tier", "io", "format", "key", "geometry", "config"]),
    ("pipeline", &["log", "tier", "device", "paged", "io", "format", "key", "geometry", "config"]),
    ("objects", &["log", "device", "io", "format", "index", "key", "geometry", "config"]),
    (
        "engine",
        &["pipeline", "remote", "tier", "log", "device", "paged", "io", "format", "index", "key", "geometry", "config"],
    ),
    ("connector", &["engine", "device", "paged", "key", "geometry", "config"]),
];
const LEAVES: &[&str] = &["error", "metrics", "process", "Error", "ErrorKind", "Result"];
const MAY_BE_UNSAFE: &[&str] =
    &["src/io/", "src/device/", "src/index/", "cufile-sys/", "python/", "tests/standin-", "benches/gpu-hook/"];
const MAY_KNOW_CUDA: &[&str] =
    &["src/device/", "src/io/", "cufile-sys/", "kernels/", "tools/", "src/config/", "tests/"];
/// Longer files are looked at in reviews; this only catches what nobody looked at.
const MAX_LINES: usize = 1000;

struct Source {
    path: String,
    text: String,
}

impl Source {
    fn module(&self) -> Option<&str> {
        let rest = self.path.strip_prefix("src/")?;
        Some(rest.split('/').next()?.trim_end_matches(".rs"))
    }

    fn lines(&self) -> impl Iterator<Item = (usize, &str)> {
        self.text.lines().enumerate().map(|(i, l)| (i + 1, l)).filter(|(_, l)| !l.trim_start().starts_with("//"))
    }
}

fn sources(dirs: &[&str]) -> Vec<Source> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut found = Vec::new();
    let mut open: Vec<PathBuf> = dirs.iter().map(|d| root.join(d)).collect();
    while let Some(dir) = open.pop() {
        for entry in fs::read_dir(&dir).unwrap_or_else(|e| panic!("{}: {e}", dir.display())) {
            let path = entry.unwrap().path();
            if path.is_dir() {
                open.push(path);
            } else if path.extension().is_some_and(|e| e == "rs") {
                let text = fs::read_to_string(&path).unwrap();
                let path = path.strip_prefix(root).unwrap().to_string_lossy().into_owned();
                found.push(Source { path, text });
            }
        }
    }
    assert!(found.len() > 20, "the tidy test looks in the wrong place");
    found
}

fn everything() -> Vec<Source> {
    sources(&["src", "tools", "python", "cufile-sys", "tests", "benches"])
}

fn assert_clean(rule: &str, findings: &[String]) {
    assert!(findings.is_empty(), "{rule}:\n  {}", findings.join("\n  "));
}

/// The names that follow `crate::` on a line, also inside braces.
fn modules_named(line: &str) -> Vec<String> {
    named_after(line, "crate::")
}

/// The names that follow `prefix` on a line, also inside braces.
fn named_after(line: &str, prefix: &str) -> Vec<String> {
    let mut named = Vec::new();
    for (at, _) in line.match_indices(prefix) {
        let rest = &line[at + prefix.len()..];
        let mut depth = 0;
        let mut word = String::new();
        let mut at_name = true;
        for c in rest.chars() {
            match c {
                '{' => {
                    depth += 1;
                    at_name = depth == 1 && word.is_empty();
                }
                '}' | ';' => break,
                ',' if depth == 1 => {
                    named.push(std::mem::take(&mut word));
                    at_name = true;
                }
                c if c.is_alphanumeric() || c == '_' => {
                    if at_name {
                        word.push(c);
                    }
                }
                ' ' => {}
                _ if depth == 0 => break,
                _ => at_name = false,
            }
        }
        named.push(word);
    }
    named.retain(|w| !w.is_empty());
    named
}

#[test]
fn modules_know_only_the_modules_below_them() {
    let allowed: BTreeMap<&str, &[&str]> = MAY_KNOW.iter().copied().collect();
    let mut findings = Vec::new();
    for source in sources(&["src"]) {
        let Some(module) = source.module().map(str::to_owned) else { continue };
        if module == "lib" {
            continue;
        }
        let Some(may_know) = allowed.get(module.as_str()) else {
            findings.push(format!("{}: module {module:?} is not in the list of modules", source.path));
            continue;
        };
        for (n, line) in source.lines() {
            for named in modules_named(line) {
                let other = allowed.contains_key(named.as_str()) && named != module;
                if other && !may_know.contains(&named.as_str()) && !LEAVES.contains(&named.as_str()) {
                    findings.push(format!("{}:{n}: {module} must not know {named}", source.path));
                }
            }
        }
    }
    assert_clean("a module reaches up or sideways", &findings);
}

#[test]
fn the_module_check_sees_plain_and_braced_imports() {
    assert_eq!(modules_named("use crate::log::Log;"), ["log"]);
    assert_eq!(modules_named("use crate::{io::Buf, paged, log::{A, B}};"), ["io", "paged", "log"]);
    assert_eq!(modules_named("let x = crate::format::crc(crate::io::y());"), ["format", "io"]);
}

/// The modules of the log. Each may name those before it, and their parent.
const LOG_MODULES: &[&str] = &[
    "base", "lane", "journal", "policy", "recovery", "drive", "write", "read", "reclaim", "turn", "opening",
    "settings", "fsck", "purge",
];

/// The code of a file with every statement on one line, so that a long import is seen whole.
fn statements(source: &Source) -> Vec<String> {
    let code: Vec<&str> = source.lines().map(|(_, line)| line.trim()).collect();
    code.join(" ").split_inclusive(';').map(str::to_owned).collect()
}

/// The same with `super::` written out.
fn absolute_statements(source: &Source) -> Vec<String> {
    let path = source.path.trim_start_matches("src/").trim_end_matches(".rs").trim_end_matches("/mod");
    let modules: Vec<&str> = path.split('/').collect();
    let write_out = |statement: &String| {
        let mut text = statement.clone();
        // The longest first: a shorter one is a part of it.
        for ups in (1..modules.len()).rev() {
            let above = format!("crate::{}::", modules[..modules.len() - ups].join("::"));
            text = text.replace(&"super::".repeat(ups), &above);
        }
        text
    };
    statements(source).iter().map(write_out).collect()
}

#[test]
fn the_check_of_the_logs_modules_sees_relative_imports() {
    let written_out =
        |path: &str, text: &str| absolute_statements(&Source { path: path.to_owned(), text: text.to_owned() }).concat();
    assert_eq!(
        written_out("src/log/drive/mod.rs", "use super::{base, lane::Lane};"),
        "use crate::log::{base, lane::Lane};"
    );
    assert_eq!(written_out("src/log/turn.rs", "use super::fsck;"), "use crate::log::fsck;");
    let inner = "use super::held::Held; use super::super::drive;";
    assert_eq!(written_out("src/log/lane/io.rs", inner), "use crate::log::lane::held::Held; use crate::log::drive;");
}

#[test]
fn the_modules_of_the_log_know_only_those_before_them() {
    let mut findings = Vec::new();
    for source in sources(&["src/log"]).iter().filter(|s| !s.path.contains("/tests/")) {
        let module = source.path.split('/').nth(2).unwrap_or_default().trim_end_matches(".rs");
        let Some(place) = LOG_MODULES.iter().position(|r| *r == module) else { continue };
        for statement in absolute_statements(source) {
            for named in named_after(&statement, "crate::log::") {
                if LOG_MODULES.iter().position(|r| *r == named).is_some_and(|other| other > place) {
                    findings.push(format!("{}: {module} must not know {named}", source.path));
                }
            }
        }
    }
    assert_clean("a module of the log reaches up", &findings);
}

#[test]
fn the_files_of_a_module_of_the_log_know_each_other_in_one_direction() {
    let mut knows: BTreeMap<String, Vec<String>> = BTreeMap::new();
    let all = sources(&["src/log"]);
    for source in all.iter().filter(|s| !s.path.contains("/tests/") && !s.path.ends_with("mod.rs")) {
        let (folder, _) = source.path.rsplit_once('/').unwrap();
        let module = format!("crate::{}::", folder.trim_start_matches("src/").replace('/', "::"));
        let is_file = |name: &String| all.iter().any(|s| s.path == format!("{folder}/{name}.rs"));
        let named = absolute_statements(source).into_iter().flat_map(|line| named_after(&line, &module));
        let siblings = named.filter(is_file).map(|name| format!("{folder}/{name}.rs")).collect();
        knows.insert(source.path.clone(), siblings);
    }
    assert!(knows.values().any(|all| !all.is_empty()), "nothing was found to be imported");
    // Files that name only files already removed are removed too: what is left are circles.
    while let Some(free) =
        knows.iter().find(|(_, all)| all.iter().all(|f| !knows.contains_key(f))).map(|(f, _)| f.clone())
    {
        knows.remove(&free);
    }
    let findings: Vec<String> = knows.into_iter().map(|(file, all)| format!("{file} knows {all:?}")).collect();
    assert_clean("files of the log know each other in a circle", &findings);
}

#[test]
fn formats_and_the_index_do_no_io_of_their_own() {
    let mut findings = Vec::new();
    for source in
        sources(&["src"]).iter().filter(|s| matches!(s.module(), Some("format" | "key" | "geometry" | "paged")))
    {
        for (n, line) in source.lines() {
            if ["std::fs", "std::net", "std::process", "SystemTime", "Instant::now"].iter().any(|w| line.contains(w)) {
                findings.push(format!("{}:{n}: {}", source.path, line.trim()));
            }
        }
    }
    assert_clean("a pure module touches files, processes or the clock", &findings);
}

#[test]
fn unsafe_code_stays_in_the_modules_that_need_it_and_says_why_it_is_sound() {
    let mut findings = Vec::new();
    for source in everything() {
        let permitted = MAY_BE_UNSAFE.iter().any(|p| source.path.starts_with(p)) || source.path.starts_with("tests/");
        let lines: Vec<&str> = source.text.lines().collect();
        for (n, line) in source.lines() {
            let code = line.split("//").next().unwrap_or_default();
            if !["unsafe {", "unsafe impl", "unsafe fn", "unsafe trait", "unsafe extern"]
                .iter()
                .any(|u| code.contains(u))
                || code.contains('"')
            {
                continue;
            }
            if !permitted {
                findings.push(format!("{}:{n}: unsafe outside the modules that may have it", source.path));
            }
            let before = &lines[n.saturating_sub(8)..n];
            if !before.iter().any(|l| l.contains("SAFETY") || l.contains("# Safety")) {
                findings.push(format!("{}:{n}: unsafe without a SAFETY comment", source.path));
            }
        }
    }
    assert_clean("unsafe code", &findings);
}

#[test]
fn only_the_device_side_knows_cuda() {
    let mut findings = Vec::new();
    for source in sources(&["src"]) {
        if MAY_KNOW_CUDA.iter().any(|p| source.path.starts_with(p)) {
            continue;
        }
        for (n, line) in source.lines() {
            if ["cudarc", "cufile_sys", "cuMem", "CUdevice"].iter().any(|w| line.contains(w)) {
                findings.push(format!("{}:{n}: {}", source.path, line.trim()));
            }
        }
    }
    assert_clean("CUDA outside its modules", &findings);
}

/// Every process of a serving engine loads the extension module.
#[test]
fn what_only_the_program_needs_is_not_in_the_extension_module() {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let arguments = ["tree", "--offline", "-p", "forebay-python", "-e", "normal", "--prefix", "none"];
    let tree = std::process::Command::new(cargo).args(arguments).output().unwrap();
    let tree = String::from_utf8(tree.stdout).unwrap();
    assert!(tree.contains("forebay-cufile-sys"), "{tree}");
    for package in ["forebay-tools", "plotters", "ureq", "tokio-uring", "clap"] {
        assert!(!tree.contains(package), "{package} is in the Python extension module");
    }
}

#[test]
fn files_are_short_and_say_what_they_are_for() {
    let mut findings = Vec::new();
    for source in everything() {
        let lines = source.text.lines().count();
        if lines > MAX_LINES {
            findings.push(format!("{}: {lines} lines, at most {MAX_LINES}", source.path));
        }
        let is_test = source.path.ends_with("/tests.rs") || source.path.contains("/tests/");
        if !is_test && !source.text.starts_with("//!") && !source.text.starts_with("#!") {
            findings.push(format!("{}: does not open with its purpose (//!)", source.path));
        }
    }
    assert_clean("file length and purpose", &findings);
}

/// The type that a line declares.
fn declared(line: &str) -> Option<&str> {
    let words = line.split_whitespace().skip_while(|word| word.starts_with("pub"));
    let mut words = words.skip_while(|word| word.ends_with(')'));
    if !matches!(words.next()?, "struct" | "enum" | "trait" | "union") {
        return None;
    }
    words.next()?.split(|c: char| !c.is_alphanumeric() && c != '_').next()
}

#[test]
fn no_two_types_of_the_crate_share_a_name() {
    let mut places: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for source in sources(&["src"]) {
        // Tests have worlds of their own.
        if source.path.contains("tests") {
            continue;
        }
        let code = source.text.split("#[cfg(test)]").next().unwrap_or_default();
        for name in code.lines().filter_map(declared) {
            places.entry(name.to_owned()).or_default().push(source.path.clone());
        }
    }
    assert!(places.len() > 300, "the check does not see the types: {}", places.len());
    let shared = places.into_iter().filter(|(_, places)| places.len() > 1);
    let findings: Vec<String> = shared.map(|(name, places)| format!("{name}: {}", places.join(", "))).collect();
    assert_clean("a name means one type: call one of them something else", &findings);
}

#[test]
fn the_check_of_names_sees_every_kind_of_declaration() {
    let lines = ["pub(in crate::log) struct A {", "pub enum B<T> {", "trait C: Send {", "    pub(super) struct D(u8);"];
    assert_eq!(lines.map(declared), [Some("A"), Some("B"), Some("C"), Some("D")]);
    assert_eq!(["// struct E", "let structure = 1;", ""].map(declared), [None; 3]);
}

#[test]
fn comments_end_by_column_100() {
    let mut findings = Vec::new();
    for source in everything() {
        let mut is_code = false;
        for (n, line) in (1..).zip(source.text.lines()) {
            let comment = line.trim_start().strip_prefix("//").map(|c| c.trim_start_matches(['/', '!']).trim_start());
            is_code = comment.is_some_and(|c| c.starts_with("```") != is_code);
            if comment.is_some() && !is_code && line.chars().count() > 100 {
                findings.push(format!("{}:{n}", source.path));
            }
        }
    }
    assert_clean("comments beyond column 100", &findings);
}

#[test]
fn nothing_is_left_for_later_in_the_code() {
    let marks = [
        concat!("TO", "DO"),
        concat!("FIX", "ME"),
        concat!("XX", "X"),
        concat!("to", "do!("),
        concat!("unimpl", "emented!("),
    ];
    let mut findings = Vec::new();
    for source in everything() {
        for (n, line) in source.text.lines().enumerate() {
            if marks.iter().any(|m| line.contains(m)) {
                findings.push(format!("{}:{}: {}", source.path, n + 1, line.trim()));
            }
        }
    }
    assert_clean("unfinished", &findings);
}

/// The lists of mutants, by name; the pages that hold their results.
fn mutants() -> Vec<(String, serde_json::Value)> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/mutants");
    let paths = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    let lists = paths.filter(|path| path.extension().is_some_and(|extension| extension == "json"));
    let read = |path: PathBuf| {
        let list = serde_json::from_str(&fs::read_to_string(&path).unwrap());
        (path.file_stem().unwrap().to_string_lossy().into_owned(), list.unwrap_or_else(|e| panic!("{path:?}: {e}")))
    };
    lists.map(read).collect()
}

/// What is wrong with a mutant: [`run.py`](mutants/run.py) would call it an error of the list.
fn wrong_with(mutant: &serde_json::Value, commands: &serde_json::Value, source: &str) -> Option<String> {
    let text = |name: &str| mutant.get(name).and_then(|value| value.as_str()).unwrap_or_default();
    let found = source.matches(text("old")).count();
    if text("old").is_empty() || found != 1 {
        return Some(format!("its old text occurs {found} times in {}, not once", text("file")));
    }
    if text("old") == text("new") {
        return Some("it changes nothing".into());
    }
    commands.get(text("by")).is_none().then(|| format!("no command is called {:?}", text("by")))
}

/// They are run seldom, and would rot unseen.
#[test]
fn the_mutants_fit_the_sources_and_have_a_row_in_their_page() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let pages =
        ["tests/mutants/README.md", "kernels/README.md"].map(|page| fs::read_to_string(root.join(page)).unwrap());
    let (mut findings, mut seen) = (Vec::new(), 0);
    for (list, of_list) in mutants() {
        let mut names = std::collections::BTreeSet::new();
        for mutant in of_list["mutants"].as_array().unwrap() {
            let [name, file, why] = ["name", "file", "why"].map(|key| mutant[key].as_str().unwrap_or_default());
            let source = fs::read_to_string(root.join(file)).unwrap_or_default();
            let row = format!("| {name} | `{file}` | {why} | ");
            let has_row = pages.iter().any(|page| page.contains(&row));
            let more = [(!names.insert(name), "its name is taken"), (!has_row, "its page has no row of it")];
            let more = more.into_iter().filter(|(is_so, _)| *is_so).map(|(_, what)| what.to_owned());
            let wrong = wrong_with(mutant, &of_list["commands"], &source).into_iter().chain(more);
            findings.extend(wrong.map(|what| format!("{list}: {name}: {what}")));
            seen += 1;
        }
    }
    assert!(seen > 200, "the check does not see the mutants: {seen}");
    assert_clean("correct tests/mutants/*.json, or run tests/mutants/run.py with --update", &findings);
}

#[test]
fn the_check_of_mutants_sees_what_does_not_fit() {
    let commands = serde_json::json!({"fast": {}});
    let wrong = |old: &str, by: &str, source: &str| {
        let mutant = serde_json::json!({"file": "x.rs", "old": old, "new": "a - b", "by": by});
        wrong_with(&mutant, &commands, source)
    };
    assert_eq!(wrong("a + b", "fast", "let c = a + b;"), None);
    for (old, by, source) in
        [("a + b", "fast", "a * b"), ("a + b", "fast", "a + b, a + b"), ("a - b", "fast", "a - b"), ("", "fast", "a")]
    {
        assert!(wrong(old, by, source).is_some(), "{old:?} in {source:?}");
    }
    assert!(wrong("a + b", "slow", "a + b").is_some());
}

/// Folders directly inside `parent` that hold sources, with their names.
fn modules_in(root: &Path, parent: &str) -> Vec<String> {
    let mut modules: Vec<String> = fs::read_dir(root.join(parent))
        .unwrap()
        .filter_map(|entry| {
            let entry = entry.unwrap();
            let name = entry.file_name().into_string().unwrap();
            (entry.path().is_dir() && name != "tests").then_some(name)
        })
        .collect();
    modules.sort();
    modules
}

#[test]
fn architecture_md_names_every_module() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let text = fs::read_to_string(root.join("ARCHITECTURE.md")).unwrap();
    let modules = modules_in(root, "src").into_iter().map(|module| format!("`src/{module}/`"));
    let of_the_log = modules_in(root, "src/log").into_iter().map(|module| format!("`{module}/`"));
    let missing: Vec<String> = modules.chain(of_the_log).filter(|module| !text.contains(module)).collect();
    assert_clean("not in ARCHITECTURE.md", &missing);
}

/// Every page of the repository, but what build tools write.
fn pages(directory: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        if path.is_dir() && name != "target" && !name.starts_with('.') {
            pages(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "md") {
            found.push(path);
        }
    }
}

#[test]
fn pages_are_at_most_120_columns_wide_and_their_links_lead_somewhere() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let (mut paths, mut wide, mut broken) = (Vec::new(), Vec::new(), Vec::new());
    pages(root, &mut paths);
    assert!(paths.len() > 15, "{} pages", paths.len());
    for path in paths {
        let text = fs::read_to_string(&path).unwrap();
        let mut is_code = false;
        for (at, line) in text.lines().enumerate() {
            let place = format!("{}:{}", path.strip_prefix(root).unwrap().display(), at + 1);
            is_code ^= line.trim_start().starts_with("```");
            if !is_code && !line.trim_start().starts_with('|') && line.chars().count() > 120 {
                wide.push(place.clone());
            }
            for target in line.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
                let file = target.split('#').next().unwrap_or_default();
                let is_here = !is_code && !file.is_empty() && !file.contains("://");
                if is_here && !path.parent().unwrap().join(file).exists() {
                    broken.push(format!("{place}: {target}"));
                }
            }
        }
    }
    assert_clean("wider than 120 columns", &wide);
    assert_clean("links to files that are not there", &broken);
}
