//! Every bad value of a setting has its own error, which names the key, where it was set, and what
//! to write instead.
#![expect(clippy::unwrap_used, reason = "tests")]

use forebay::config::{Capacity, Loader, Mode, Settings};
use forebay::{Error, ErrorKind};
use serde_json::{Value, json};

fn error_of(key: &str, value: &Value) -> Error {
    let loaded = Loader::bare().set(key, value.clone()).load();
    loaded.map_or_else(|e| e, |_| Error::new(ErrorKind::Internal, format!("{key} took {value}")))
}

fn in_file(text: &str) -> Error {
    let text = text.to_owned();
    Loader::bare().file("f.yaml").files(move |_| Ok(text.clone())).load().unwrap_err()
}

/// A key, a bad value of it as JSON, and what the error must say.
const CASES: &[(&str, &str, &str)] = &[
    ("backend", r#""cpu""#, "use `gds`"),
    ("backend", r#"7"#, "use `gds`"),
    ("drives", r#"7"#, "write a path"),
    ("drives", r#"[{"drain": true}]"#, "missing field `path`"),
    ("drives", r#"[{"path": "/a", "drian": true}]"#, "unknown field `drian`"),
    ("drives", r#""relative/dir""#, "write the whole path"),
    ("drives", r#""/a,,/b""#, "not an absolute path"),
    ("drives", r#""/a/../b""#, "without .."),
    ("drives", r#"["/a", "/a"]"#, "its own directory"),
    ("drives", r#"["/a/b", "/a"]"#, "its own directory"),
    ("drives", r#""/""#, "its own directory"),
    ("drives", r#"[{"path": "/a", "drain": true}]"#, "every drive drains"),
    ("chunk_size", r#"0"#, "use 1 to 65536 tokens"),
    ("chunk_size", r#"-1"#, "write one from 0"),
    ("chunk_size", r#""many""#, "is not a whole number"),
    ("chunk_size", r#"1.5"#, "is not a whole number"),
    ("enable_async_loading", r#""maybe""#, "write true or false"),
    ("use_layerwise", r#"2"#, "write true or false, or auto"),
    ("save_decode_cache", r#"[]"#, "write true or false"),
    ("save_unfull_chunk", r#""si""#, "write true or false"),
    ("max_concurrent_ops", r#"0"#, "use 1 to 4096"),
    ("block_size", r#"1000"#, "multiple of 4096"),
    ("block_size", r#""4KiB""#, "from 64KiB to 64MiB"),
    ("block_size", r#""128MiB""#, "from 64KiB to 64MiB"),
    ("block_size", r#""1 parsec""#, "is not a size"),
    ("codec", r#""zstd""#, "use one of `auto`, `none`, `exp4`"),
    ("capacity", r#""1MiB""#, "at least 16MiB"),
    ("capacity", r#""120%""#, "0% to 100%"),
    ("capacity", r#""0%""#, "use 1 to 100%"),
    ("capacity", r#""lots""#, "is not a size"),
    ("min_free", r#""95%""#, "at most 90%"),
    ("min_free", r#""30%""#, "lower one of the two"),
    ("min_free", r#""-1GiB""#, "is not a size"),
    ("min_free", r#"20"#, "use at least 16MiB, or 0; a size without a unit is in bytes"),
    ("staging", r#""64KiB""#, "at least 1MiB"),
    ("store_staging", r#"0"#, "at least 1MiB"),
    ("io_engine", r#""spdk""#, "use one of `auto`,"),
    ("cufile", r#""maybe""#, "use one of `auto`,"),
    ("gpu_staging", r#""64KiB""#, "at least 1MiB"),
    ("pinned_staging", r#""64KiB""#, "twice block_size"),
    ("kernel_ctas", r#""few""#, "is not a whole number"),
    ("store_when", r#""sometimes""#, "use `computed` or `finished`"),
    ("placement", r#""raid0""#, "use `chain` or `stripe`"),
    ("io_timeout_ms", r#"1"#, "use 10 to 3600000 ms"),
    ("io_timeout_ms", r#""10s""#, "is not a whole number"),
    ("on_open_failure", r#""ignore""#, "use `disable` or `fail`"),
    ("on_incompatible", r#""delete""#, "use `refuse` or `recreate`"),
    ("mode", r#""read""#, "use `rw` or `ro`"),
    ("numa", r#""left""#, "use auto, off or the number of a node"),
    ("numa", r#"5000"#, "use 0 to 1023"),
    ("hugepages", r#""2MiB""#, "write true or false"),
    ("eviction_policy", r#""random""#, "use one of `prefix`,"),
    ("tenant_quota", r#""1MiB""#, "at least 16MiB"),
    ("tenant_quota", r#""0%""#, "use 0.1 to 100%"),
    ("tenant_quota", r#""a lot""#, "is not a size"),
    ("ttl", r#""soon""#, "write seconds"),
    ("ttl", r#""100y""#, "write seconds"),
    ("ttl", r#""9999w""#, "at most 20 years"),
    ("admission", r#""some""#, "use one of `all`, `second_touch`, `adaptive`"),
    ("admission_loss", r#"2"#, "use 0 to 1"),
    ("write_budget_dwpd", r#"0"#, "above 0 and up to 1000"),
    ("write_budget_dwpd", r#"-1"#, "above 0 and up to 1000"),
    ("write_budget_dwpd", r#""1 per day""#, "is not a number"),
    ("drive_bytes", r#""1KiB""#, "16MiB at least"),
    ("drive_bytes", r#""big""#, "is not a size"),
    ("reclaim_write_budget", r#"1.5"#, "use 0 to 1"),
    ("reclaim_write_budget", r#""NaN""#, "is not a number"),
    ("workers", r#"1000"#, "use 0 to 256"),
    ("workers", r#""few""#, "is not a whole number"),
    ("lease_share", r#"0.5"#, "use 0.01 to 0.25"),
    ("lease_share", r#"0"#, "use 0.01 to 0.25"),
    ("fingerprint", r#"7"#, "is not text"),
    ("load_timeout_ms", r#"3600001"#, "use 0 to 3600000 ms"),
    ("min_load_tokens", r#"-1"#, "is not a whole number"),
    ("recompute_tokens_per_s", r#"0"#, "above 0, or leave it out"),
    ("recompute_tokens_per_s", r#""fast""#, "is not a number"),
    ("gather_patience_ms", r#"60001"#, "use 0 to 60000 ms"),
    ("max_sync_stall_ms", r#""20ms""#, "is not a whole number"),
    ("max_held_blocks", r#""5%""#, "is not a whole number"),
    ("allow_any_filesystem", r#""nfs""#, "write true or false"),
    ("enable_rdma", r#""rdma""#, "write true or false"),
    ("remote_url", r#"7"#, "is not text"),
    ("remote_url", r#""redis://h:6379""#, "there is no remote tier over redis://; use an object store"),
    ("remote_url", r#""lm://h:65432""#, "there is no remote tier over lm://; use an object store"),
    ("remote_url", r#""bucket""#, "no address: it has no scheme"),
    ("remote_url", r#""http://h/kv""#, "there is no remote tier over http://; use an object store"),
    ("remote_url", r#""https://me:secret@h/kv""#, "holds a user or a password; give credentials by the environment"),
    ("remote_url", r#""https://h/dav?x=1""#, "the address has a ? or #"),
    ("remote_url", r#""https://h/dav#x""#, "in a name write %3F for ? and %23 for #"),
    ("remote_url", r#""s3://b/p?region=r""#, "what is behind it would be ignored"),
    ("remote_url", r#""file:///mnt/kv#2""#, "end it with the path"),
    ("remote_serde", r#"[]"#, "is not text"),
    ("remote_serde", r#""cachegen""#, "\"cachegen\" is not there"),
    ("remote_timeout_ms", r#"5"#, "use 10 to 600000 ms"),
    ("remote_staging", r#""1MiB""#, "use at least 16MiB"),
    ("local_cpu", r#""cpu""#, "write true or false"),
    ("prefetch", r#""soon""#, "write true or false"),
    ("max_local_cpu_size", r#""60 gallons""#, "is not a size; write GiB"),
    ("max_local_cpu_size", r#"5368709120"#, "a plain number is GiB"),
    ("enable_blending", r#""x""#, "write true or false"),
    ("blend_check_layers", r#"[-1]"#, "is not a whole number"),
    ("blend_recompute_ratios", r#""x""#, "is not a number"),
    ("blend_special_str", r#"7"#, "is not text"),
    ("blend_special_str", r#""""#, "is empty"),
    ("blend_thresholds", r#"{}"#, "is not a number"),
];

#[test]
fn every_bad_value_says_what_to_write() {
    for (key, value, part) in CASES {
        let e = error_of(key, &serde_json::from_str(value).unwrap());
        let text = e.to_string();
        assert_eq!(e.kind(), ErrorKind::Config, "{text}");
        assert!(text.contains(part), "{text:?} lacks {part:?}");
        assert!(text.contains(key), "{text:?} does not name {key}");
        assert!(text.contains("set in code"), "{text:?} does not say where");
        assert!(e.advice_text().is_some_and(|advice| !advice.is_empty()), "{text:?} has no advice");
    }
    for key in Settings::keys() {
        assert!(CASES.iter().any(|case| case.0 == key), "{key} has no bad value here");
    }
}

#[test]
fn an_error_names_the_variable_or_the_file_and_the_key_as_written() {
    let e = Loader::bare().env([("LMCACHE_GDS_PATH", "nvme")]).load().unwrap_err();
    assert!(e.to_string().contains("gds_path (in the environment variable LMCACHE_GDS_PATH)"), "{e}");
    let e = in_file("gds_config: {block_size: 100}");
    assert!(e.to_string().contains("gds_config.block_size (in f.yaml)"), "{e}");
    let e = in_file("gds_config: {block_size: soft}");
    assert!(e.to_string().contains("gds_config.block_size (in f.yaml)"), "{e}");
}

#[test]
fn unknown_keys_of_our_own_files_and_code_are_errors_with_a_suggestion() {
    for (text, part) in [
        ("chunk_sise: 1", "unknown setting chunk_sise in f.yaml; did you mean chunk_size?"),
        ("gds_config: {blocksize: 1}", "did you mean gds_config.block_size?"),
        ("extra_config: {forebay.capacty: 1}", "did you mean capacity?"),
        ("extra_config: {forebay: {capacty: 1}}", "did you mean capacity?"),
        ("teapot: 1", "docs/configuration.md lists"),
    ] {
        let e = in_file(text);
        assert_eq!(e.kind(), ErrorKind::Config);
        assert!(e.to_string().contains(part), "{e}");
    }
    assert!(error_of("chunksize", &json!(1)).to_string().contains("did you mean chunk_size?"));
}

#[test]
fn our_own_misspelt_key_inside_extra_config_is_an_error_even_in_an_lmcache_file() {
    let e = Loader::bare()
        .env([("LMCACHE_CONFIG_FILE", "l.yaml")])
        .files(|_| Ok("extra_config: {forebay.modes: ro}".into()))
        .load()
        .unwrap_err();
    assert!(e.to_string().contains("did you mean mode?"), "{e}");
}

#[test]
fn one_setting_given_twice_in_one_layer_must_agree() {
    let e = in_file("gds_path: /a\ngds_config: {cache_dir: /b}");
    let text = e.to_string();
    assert!(text.contains("gds_path") && text.contains("gds_config.cache_dir") && text.contains("keep one"), "{text}");
    let same = "gds_path: /a\ngds_config: {cache_dir: /a}".to_owned();
    assert!(Loader::bare().file("f").files(move |_| Ok(same.clone())).load().is_ok());
    assert!(in_file("extra_config: {forebay.mode: ro}\nmode: rw").to_string().contains("differ"));
}

#[test]
fn a_file_that_is_none_is_told_apart() {
    for (name, text, part) in [
        ("f.yaml", "a: [1", "not valid YAML"),
        ("f.json", "{\"a\": ", "not valid JSON"),
        ("f.yaml", "just words", "holds no keys"),
        ("f.json", "[1]", "holds no keys"),
        ("f.yaml", "mode: rw\nmode: ro\n", "duplicate mapping key: mode: f.yaml; correct that line"),
        ("f.json", r#"{"mode": "rw", "mode": "ro"}"#, "duplicate mapping key: mode"),
        ("f.yaml", "gds_config: 5\n", "write gds_config as a mapping"),
        ("f.yaml", "extra_config: [a]\n", "write extra_config as a mapping"),
    ] {
        let text = text.to_owned();
        let e = Loader::bare().file(name).files(move |_| Ok(text.clone())).load().unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Config, "{e}");
        assert!(e.to_string().contains(part) && e.to_string().contains(name), "{e}");
        assert!(!e.to_string().contains('\n') && e.advice_text().is_some(), "one line, and what to do: {e}");
    }
    let e = Loader::bare().env([("FOREBAY_GDS_CONFIG", "{cache_dir: [")]).load().unwrap_err();
    assert!(e.to_string().contains("FOREBAY_GDS_CONFIG") && e.to_string().contains("quote it"), "{e}");
    // Another program's variable may hold anything.
    let (_, warnings) =
        Loader::bare().env([("LMCACHE_PULL_URL", "{host}:8300"), ("FOREBAY_PORT_9", "[::1]:9")]).load().unwrap();
    assert_eq!(warnings.len(), 2, "{warnings:?}");
}

#[test]
fn a_settings_file_that_cannot_be_read_says_why() {
    let top = tempfile::tempdir().unwrap();
    let huge = top.path().join("huge.yaml");
    std::fs::write(&huge, "# padding\n".repeat(200_000)).unwrap();
    let binary = top.path().join("binary.yaml");
    std::fs::write(&binary, [0xff, 0xfe, 0x00]).unwrap();
    for (path, part) in [(huge.as_path(), "larger than 1 MiB"), (binary.as_path(), "UTF-8"), (top.path(), "directory")]
    {
        let e = Loader::bare().file(path).load().unwrap_err();
        assert!(e.to_string().contains(part) && e.advice_text().is_some(), "{e}");
    }
}

#[test]
fn settings_built_in_code_are_validated_too() {
    let mut settings = Settings::at("/a");
    settings.validate().unwrap();
    settings.capacity = Capacity::Bytes(1);
    let e = settings.validate().unwrap_err();
    assert!(e.to_string().starts_with("capacity: "), "{e}");
    let mut settings = Settings::at("/a");
    settings.drives[0].drain = true;
    assert!(settings.validate().is_err());
    settings.mode = Mode::Ro;
    settings.validate().unwrap();
}

#[test]
fn any_value_for_any_key_gives_settings_or_an_error() {
    let values = [
        json!(null),
        json!(true),
        json!(0),
        json!(-1),
        json!(u64::MAX),
        json!(1e300),
        json!(""),
        json!("%"),
        json!("∞GiB"),
        json!("é"),
        json!([]),
        json!([[]]),
        json!({}),
        json!({"": ""}),
        json!("\u{0}"),
    ];
    for key in Settings::keys().iter().map(String::as_str).chain(["gds_config", "extra_config", "", "."]) {
        for value in &values {
            if let Ok((settings, _)) = Loader::bare().set(key, value.clone()).load() {
                settings.validate().unwrap();
            }
        }
    }
}
