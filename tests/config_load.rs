//! Settings from files, environment and code: fixtures as users write them, precedence, aliases,
//! warnings.

use std::path::Path;
use std::time::Duration;

use forebay::config::{
    Backend, Capacity, DriveSettings, Feature, Loader, MinFree, Origin, Placement, Settings, Warning, WarningKind,
};
use forebay::{ErrorKind, Result};
use serde_json::json;

const NESTED: &str = include_str!("fixtures/config/nested.yaml");
const FLAT: &str = include_str!("fixtures/config/flat.yaml");
const LMCACHE: &str = include_str!("fixtures/config/lmcache.yaml");
const JSON: &str = include_str!("fixtures/config/settings.json");

/// Loads with `text` as the content of every file and the given environment.
fn load(text: &str, env: &[(&str, &str)]) -> Result<(Settings, Vec<Warning>)> {
    let text = text.to_owned();
    Loader::bare().env(env.iter().copied()).files(move |_| Ok(text.clone())).load()
}

fn not_active(warnings: &[Warning]) -> Vec<(&str, Feature)> {
    let features = warnings.iter().filter_map(|w| match w.kind {
        WarningKind::NotActive(feature) => Some((w.key.as_str(), feature)),
        _ => None,
    });
    features.collect()
}

fn unknown(warnings: &[Warning]) -> Vec<&str> {
    warnings.iter().filter(|w| w.kind == WarningKind::UnknownKey).map(|w| w.key.as_str()).collect()
}

#[test]
fn the_nested_file_loads_as_users_write_it() {
    for variable in ["FOREBAY_CONFIG_FILE", "LMCACHE_CONFIG_FILE"] {
        let (settings, warnings) = load(NESTED, &[(variable, "settings.yaml")]).unwrap();
        let mut expected = Settings::at("/mnt/nvme");
        expected.backend = Backend::Gds;
        expected.max_concurrent_ops = 4;
        expected.block_size = 1 << 20;
        expected.use_layerwise = true.into();
        expected.save_unfull_chunk = true;
        expected.enable_rdma = true;
        expected.remote_url = Some("s3://cache-server-5000/kv".into());
        expected.remote_serde = Some("naive".into());
        expected.max_local_cpu_size = 64 << 30;
        assert_eq!(settings, expected);
        assert_eq!(
            not_active(&warnings),
            [("gds_config.enable_rdma", Feature::Rdma), ("local_config.cache_size_gb", Feature::HostTier),]
        );
        assert_eq!(warnings.len(), 2, "{warnings:?}");
        assert!(warnings.iter().all(|w| w.to_string().contains("in settings.yaml")));
        assert!(warnings.iter().all(|w| !w.to_string().contains("5000")), "a remote address may hold a password");
    }
}

#[test]
fn the_flat_file_loads_as_users_write_it() {
    let (settings, warnings) = load(FLAT, &[("FOREBAY_CONFIG_FILE", "f.yaml")]).unwrap();
    assert_eq!(settings.chunk_size, 64);
    assert!(settings.local_cpu);
    assert_eq!(settings.max_local_cpu_size, 60 << 30);
    assert_eq!(warnings, []);
    let e = settings.require_drives().unwrap_err();
    assert_eq!(e.kind(), ErrorKind::Config);
    assert!(e.to_string().contains("set cache_dir"), "{e}");
}

#[test]
fn a_full_lmcache_file_loads_and_its_own_keys_are_warnings() {
    let (settings, warnings) = load(LMCACHE, &[("LMCACHE_CONFIG_FILE", "l.yaml")]).unwrap();
    assert_eq!(settings.drives, [DriveSettings::new("/mnt/nvme0"), DriveSettings::new("/mnt/nvme1")]);
    assert_eq!(settings.capacity, Capacity::Bytes(1 << 40));
    assert_eq!(settings.placement, Placement::Stripe);
    assert_eq!(settings.blend_check_layers, [1]);
    assert_eq!(settings.blend_recompute_ratios, [0.15]);
    assert_eq!(settings.blend_special_str.as_deref(), Some(" # # "), "its spaces are part of it");
    assert_eq!(settings.blend_thresholds, [0.1, 0.2]);
    assert_eq!(unknown(&warnings), ["cache_policy", "controller_pull_url", "extra_config.lookup_backoff_time"]);
    assert!(warnings[0].to_string().contains("did you mean eviction_policy?"), "{}", warnings[0]);
    let features: Vec<&str> = not_active(&warnings).iter().map(|(key, _)| *key).collect();
    assert!(features.is_empty(), "local_cpu: False asks for nothing, and blending is on: {features:?}");
    let e = load(LMCACHE, &[("FOREBAY_CONFIG_FILE", "l.yaml")]).unwrap_err();
    assert!(e.to_string().contains("unknown setting cache_policy in l.yaml; did you mean eviction_policy?"), "{e}");
}

#[test]
fn what_goes_with_blending_warns_where_blending_is_not_on() {
    let warned = |on: Option<bool>| {
        let mut loader = Loader::bare().set("blend_recompute_ratios", vec![0.2]);
        if let Some(on) = on {
            loader = loader.set("enable_blending", on);
        }
        let (_, warnings) = loader.load().unwrap();
        warnings.iter().map(ToString::to_string).collect::<Vec<_>>()
    };
    let [slip] = warned(None).try_into().unwrap();
    assert!(slip.contains("blending is off") && slip.contains("set enable_blending: true"), "{slip}");
    assert_eq!((warned(Some(true)), warned(Some(false))), (vec![], vec![]));
}

#[test]
fn variables_of_lmcache_that_a_user_would_miss_say_what_to_use() {
    let others = [
        ("LMCACHE_FORCE_SKIP_SAVE", "true"),
        ("LMCACHE_LOG_LEVEL", "DEBUG"),
        ("LMCACHE_COORDINATOR_URL", "http://c:1"),
    ];
    let (_, warnings) = Loader::bare().env(others).load().unwrap();
    assert_eq!(unknown(&warnings), ["force_skip_save", "log_level"]);
    assert!(warnings[0].to_string().contains("mode: ro"), "{}", warnings[0]);
    let (settings, _) = Loader::bare().set("local_cpu", true).load().unwrap();
    assert!(settings.require_drives().unwrap_err().to_string().contains("a drive has too"));
}

#[test]
fn a_json_file_loads() {
    let (settings, warnings) = load(JSON, &[("FOREBAY_CONFIG_FILE", "s.json")]).unwrap();
    assert_eq!(settings.drives[1], DriveSettings { path: "/mnt/nvme1".into(), drain: true });
    assert_eq!(settings.min_free, MinFree::Bytes(20 << 30));
    assert_eq!(settings.ttl, Some(Duration::from_secs(7 * 86_400)));
    assert_eq!(settings.block_size, 4 << 20);
    assert!(warnings.is_empty());
}

#[test]
fn code_outranks_forebays_environment_then_lmcaches_then_the_file() {
    let file = "gds_config: {block_size: 65536}\nchunk_size: 16\ncapacity: 1GiB\nstaging: 1MiB\nuse_layerwise: true\n";
    let env = [
        ("FOREBAY_CONFIG_FILE", "f.yaml"),
        ("LMCACHE_CONFIG_FILE", "not-read.yaml"),
        ("LMCACHE_CHUNK_SIZE", "32"),
        ("LMCACHE_CAPACITY", "2GiB"),
        ("LMCACHE_STAGING", "2MiB"),
        ("FOREBAY_CAPACITY", "3GiB"),
        ("FOREBAY_STAGING", "3MiB"),
    ];
    let (settings, warnings) = Loader::bare()
        .env(env)
        .files(move |path| {
            assert_eq!(path, Path::new("f.yaml"), "only one file is read");
            Ok(file.to_owned())
        })
        .set("staging", "4MiB")
        .load()
        .unwrap();
    assert!(warnings.is_empty(), "{warnings:?}");
    assert_eq!(settings.block_size, 65_536, "file");
    assert_eq!(settings.chunk_size, 32, "LMCACHE_ over the file");
    assert_eq!(settings.capacity, Capacity::Bytes(3 << 30), "FOREBAY_ over LMCACHE_");
    assert_eq!(settings.staging, 4 << 20, "code over everything");
    assert!(settings.use_layerwise.is_on());
}

#[test]
fn a_higher_layer_replaces_drives_under_any_of_their_names() {
    let env = [("FOREBAY_CONFIG_FILE", "f"), ("FOREBAY_GDS_PATH", "/b, /c")];
    let (settings, _) = load("gds_config: {cache_dir: /a}", &env).unwrap();
    assert_eq!(settings.cache_dirs().collect::<Vec<_>>(), [Path::new("/b"), Path::new("/c")]);
}

#[test]
fn the_environment_takes_mappings_lists_and_quotes() {
    let env = [
        ("FOREBAY_GDS_CONFIG", r#"{"cache_dir": ["/a", "/b"], "block_size": "2MiB"}"#),
        ("LMCACHE_EXTRA_CONFIG", r#"{"forebay.workers": 3}"#),
        ("LMCACHE_REMOTE_SERDE", "'naive'"),
        ("LMCACHE_BLEND_CHECK_LAYERS", "1,2"),
        ("FOREBAY_USE_LAYERWISE", "True"),
        ("FOREBAY_TTL", ""),
    ];
    let (settings, _) = load("", &env).unwrap();
    assert_eq!(settings.drives.len(), 2);
    assert_eq!(settings.block_size, 2 << 20);
    assert_eq!(settings.workers, 3);
    assert_eq!(settings.remote_serde.as_deref(), Some("naive"));
    assert_eq!(settings.blend_check_layers, [1, 2]);
    assert!(settings.use_layerwise.is_on());
    assert_eq!(settings.ttl, None, "an empty variable is not set");
}

#[test]
fn variables_of_other_programs_do_not_stop_a_server() {
    let env = [
        ("FOREBAY_SERVICE_HOST", "10.0.0.1"),
        ("FOREBAY_CHUNK_SIZ", "1"),
        ("LMCACHE_LOG_LEVEL", "INFO"),
        ("PATH", "/bin"),
        ("FOREBAY_", "x"),
        // These three are Forebay's own, and no settings.
        ("FOREBAY_LOG", "debug"),
        ("FOREBAY_PROGRAM", "/opt/forebay"),
        ("FOREBAY_CUFILE_PATH", "/opt/libcufile.so"),
    ];
    let (settings, warnings) = load("", &env).unwrap();
    assert_eq!(settings, Settings::default());
    assert_eq!(unknown(&warnings), ["log_level", "service_host", "chunk_siz"]);
    assert!(warnings[2].to_string().contains("did you mean chunk_size?"));
    assert_eq!(warnings[2].origin, Some(Origin::Env("FOREBAY_CHUNK_SIZ".into())));
}

#[test]
fn an_empty_file_and_no_file_give_the_defaults() {
    assert_eq!(load("", &[]).unwrap(), (Settings::default(), vec![]));
    for text in ["", "# only a comment\n", "---\n", "{}", "gds_config:\nttl: ~\n"] {
        assert_eq!(load(text, &[("FOREBAY_CONFIG_FILE", "f.yaml")]).unwrap().0, Settings::default(), "{text:?}");
    }
}

#[test]
fn a_map_of_code_takes_nested_keys_and_the_dump_reads_back() {
    let map = json!({"gds_config": {"cache_dir": "/a"}, "capacity": "50%", "numa": 1, "ttl": 60});
    let (settings, _) = Loader::bare().map(map.as_object().unwrap().clone()).load().unwrap();
    assert_eq!(settings.capacity, Capacity::Percent(50.0));
    let (again, _) = Loader::bare().map(settings.to_map()).load().unwrap();
    assert_eq!(again, settings);
    let (defaults, warnings) = Loader::bare().map(Settings::default().to_map()).load().unwrap();
    assert_eq!((defaults, warnings), (Settings::default(), vec![]));
}

#[test]
fn limits_follow_the_file_system_and_the_number_of_drives() {
    let (mut settings, _) = Loader::bare().set("cache_dir", json!(["/a", "/b"])).load().unwrap();
    assert_eq!(settings.drive_capacity_bytes(1000), 800, "80 % of each drive");
    assert_eq!(settings.min_free_bytes(100 << 30), 5 << 30, "5 %");
    assert_eq!(settings.min_free_bytes(4 << 40), 10 << 30, "at most 10 GiB");
    settings.capacity = Capacity::Bytes(1 << 40);
    assert_eq!(settings.drive_capacity_bytes(1000), 1 << 39, "an equal share");
    settings.min_free = MinFree::Percent(1.0);
    assert_eq!(settings.min_free_bytes(1000), 10);
}

#[test]
fn the_process_itself_can_be_the_source() {
    let file = tempfile::NamedTempFile::with_suffix(".yaml").unwrap();
    std::fs::write(file.path(), NESTED).unwrap();
    let (settings, _) = Loader::bare().file(file.path()).load().unwrap();
    assert_eq!(settings.max_concurrent_ops, 4);
    let e = Loader::bare().file("/nonexistent/settings.yaml").load().unwrap_err();
    assert_eq!(e.kind(), ErrorKind::NotFound);
    assert!(e.to_string().contains("/nonexistent/settings.yaml") && e.advice_text().is_some(), "{e}");
}

#[test]
fn missing_huge_pages_are_told_only_to_who_asks_for_them() {
    let machine = |transparent: &'static str, reserved: &'static str| {
        move |path: &Path| match path.file_name().and_then(|name| name.to_str()) {
            Some("enabled") => Ok(transparent.to_owned()),
            _ => Ok(reserved.to_owned()),
        }
    };
    let warns = |loader: Loader| loader.load().unwrap().1.iter().any(|w| w.kind == WarningKind::NoHugePages);
    let asked = || Loader::bare().set("hugepages", true);
    assert!(!warns(Loader::bare().files(machine("always madvise [never]", "0\n"))), "the default is quiet");
    assert!(warns(asked().files(machine("always madvise [never]", "0\n"))));
    assert!(!warns(asked().files(machine("always [madvise] never", "0\n"))));
    assert!(!warns(asked().files(machine("always madvise [never]", "64\n"))));
    assert!(!warns(Loader::bare().set("hugepages", false).files(machine("always madvise [never]", "0"))));
}

#[test]
fn code_may_name_the_file_below_its_own_keys_and_the_environment() {
    let read = |path: &std::path::Path| {
        assert_eq!(path, std::path::Path::new("/etc/f.yaml"), "the file that code names, and no other");
        Ok("chunk_size: 64\nload_timeout_ms: 1\nmin_load_tokens: 2\n".to_owned())
    };
    let env = [("FOREBAY_CONFIG_FILE", "/etc/other.yaml"), ("FOREBAY_MIN_LOAD_TOKENS", "3")];
    let loader = || Loader::bare().env(env).files(read).set("load_timeout_ms", 5);
    let (settings, _) = loader().set("config_file", "/etc/f.yaml").load().unwrap();
    assert_eq!((settings.chunk_size, settings.load_timeout_ms, settings.min_load_tokens), (64, 5, 3));
    let wrong = |e: forebay::Error, part: &str| assert!(e.to_string().contains(part), "{e}");
    wrong(loader().set("config_file", 7).load().unwrap_err(), "config_file (set in code): 7 is not a path");
    wrong(loader().set("config_file", "").load().unwrap_err(), "is not a path");
    let two = loader().file("/etc/g.yaml").set("config_file", "/etc/f.yaml");
    wrong(two.load().unwrap_err(), "names another file");
    let missing = Loader::bare().set("config_file", "/nowhere/f.yaml").load().unwrap_err();
    assert!(missing.advice_text().is_some_and(|advice| advice.contains("config_file")), "{missing}");
    // A file does not name another one.
    let nested = Loader::bare().file("f.yaml").files(|_| Ok("config_file: /etc/g.yaml".to_owned()));
    wrong(nested.load().unwrap_err(), "unknown setting config_file");
}

#[test]
fn none_is_how_a_setting_without_a_value_is_written() {
    let (settings, _) = Loader::bare()
        .env([("FOREBAY_MAX_HELD_BLOCKS", "7"), ("FOREBAY_RECOMPUTE_TOKENS_PER_S", "1")])
        .set("max_held_blocks", "none")
        .set("recompute_tokens_per_s", "None")
        .load()
        .unwrap();
    assert_eq!((settings.max_held_blocks, settings.recompute_tokens_per_s), (None, None));
    let texts = ["fingerprint", "remote_url", "remote_serde", "blend_special_str"];
    let lists = ["blend_check_layers", "blend_recompute_ratios", "blend_thresholds"];
    let none = texts.iter().chain(&lists).fold(Loader::bare(), |loader, key| loader.set(*key, "none"));
    let (settings, _) = none.env([("FOREBAY_FINGERPRINT", "of the weights")]).load().unwrap();
    assert_eq!((settings.fingerprint, settings.remote_url, settings.blend_special_str), (None, None, None));
    assert!(settings.blend_check_layers.is_empty() && settings.blend_thresholds.is_empty());
}

#[test]
fn texts_from_the_environment_are_taken_as_they_are() {
    for (written, meant) in [(" # # ", " # # "), ("\" # # \"", " # # "), ("[SEP]", "[SEP]"), ("{x}", "{x}")] {
        let (settings, _) = Loader::bare().env([("FOREBAY_BLEND_SPECIAL_STR", written)]).load().unwrap();
        assert_eq!(settings.blend_special_str.as_deref(), Some(meant), "{written:?}");
    }
    let (settings, _) = Loader::bare().env([("FOREBAY_FINGERPRINT", "[7]\n")]).load().unwrap();
    assert_eq!(settings.fingerprint.as_deref(), Some("[7]"));
}
