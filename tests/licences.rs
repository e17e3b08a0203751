//! Every package that goes into a build has a licence that the Apache-2.0 project may ship with.

use std::process::Command;

const ALLOWED: &[&str] = &[
    "Apache-2.0",
    "MIT",
    "MIT-0",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "ISC",
    "Zlib",
    "CC0-1.0",
    "Unlicense",
    "Unicode-3.0",
    "BSL-1.0",
    // Mozilla's list of certificate authorities: data, free to pass on with its licence's text.
    "CDLA-Permissive-2.0",
    // libFuzzer's own sources (University of Illinois, permissive), which only builds of `fuzz/`
    // with libFuzzer hold.
    "NCSA",
];

#[test]
fn all_dependencies_have_a_permitted_licence() {
    let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".to_owned());
    let out = Command::new(cargo)
        .args(["metadata", "--format-version", "1", "--locked", "--all-features"])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .expect("cargo metadata runs");
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    let metadata: serde_json::Value = serde_json::from_slice(&out.stdout).expect("cargo metadata prints JSON");
    let packages = metadata["packages"].as_array().expect("packages");
    assert!(packages.len() > 50, "only {} packages: the check looks in the wrong place", packages.len());
    let mut refused = Vec::new();
    for package in packages {
        let text = package["license"].as_str().unwrap_or("none");
        let parsed = spdx::Expression::parse_mode(text, spdx::ParseMode::LAX);
        let fine =
            parsed.is_ok_and(|e| e.evaluate(|req| req.license.id().is_some_and(|id| ALLOWED.contains(&id.name))));
        if !fine {
            refused.push(format!("{} {}: {text}", package["name"], package["version"]));
        }
    }
    assert!(refused.is_empty(), "not on the list of permitted licences:\n{}", refused.join("\n"));
}
