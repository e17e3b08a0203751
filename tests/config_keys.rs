//! Each key of the settings changes the typed field it stands for, from a file and from the
//! environment, and is in the documentation with its variable and its default.

use std::collections::BTreeMap;
use std::time::Duration;

use forebay::config::{
    Admission, Backend, Capacity, Codec, Cufile, DriveSettings, EvictionPolicy, IoEngine, Loader, MinFree, Mode, Numa,
    OnIncompatible, OnOpenFailure, Placement, Settings, StoreWhen,
};
use serde_json::Value;

const DOCUMENT: &str = include_str!("../docs/configuration.md");

/// A key, a value as text, and what it makes of the defaults.
type Case = (&'static str, &'static str, fn(&mut Settings));

const CASES: &[Case] = &[
    ("backend", "GDS", |s| s.backend = Backend::Gds),
    ("drives", "/a,/b", |s| s.drives = ["/a", "/b"].map(DriveSettings::new).to_vec()),
    ("chunk_size", "64", |s| s.chunk_size = 64),
    ("enable_async_loading", "false", |s| s.enable_async_loading = false),
    ("use_layerwise", "yes", |s| s.use_layerwise = true.into()),
    ("save_decode_cache", "1", |s| s.save_decode_cache = true),
    ("save_unfull_chunk", "on", |s| s.save_unfull_chunk = true),
    ("store_when", "finished", |s| s.store_when = StoreWhen::Finished),
    ("max_concurrent_ops", "4", |s| s.max_concurrent_ops = 4),
    ("block_size", "4MiB", |s| s.block_size = 4 << 20),
    ("codec", "exp4", |s| s.codec = Codec::Exp4),
    ("capacity", "64GiB", |s| s.capacity = Capacity::Bytes(64 << 30)),
    ("tenant_quota", "25%", |s| s.tenant_quota = Some(Capacity::Percent(25.0))),
    ("min_free", "2%", |s| s.min_free = MinFree::Percent(2.0)),
    ("staging", "1GiB", |s| s.staging = 1 << 30),
    ("store_staging", "33554432", |s| s.store_staging = 32 << 20),
    ("io_engine", "threads", |s| s.io_engine = IoEngine::Threads),
    ("cufile", "never", |s| s.cufile = Cufile::Never),
    ("gpu_staging", "128MiB", |s| s.gpu_staging = 128 << 20),
    ("pinned_staging", "32MiB", |s| s.pinned_staging = 32 << 20),
    ("kernel_ctas", "8", |s| s.kernel_ctas = 8),
    ("placement", "stripe", |s| s.placement = Placement::Stripe),
    ("io_timeout_ms", "2500", |s| s.io_timeout_ms = 2500),
    ("on_open_failure", "fail", |s| s.on_open_failure = OnOpenFailure::Fail),
    ("on_incompatible", "recreate", |s| s.on_incompatible = OnIncompatible::Recreate),
    ("mode", "ro", |s| s.mode = Mode::Ro),
    ("numa", "1", |s| s.numa = Numa::Node(1)),
    ("hugepages", "off", |s| s.hugepages = false),
    ("eviction_policy", "FIFO", |s| s.eviction_policy = EvictionPolicy::Fifo),
    ("admission", "Second_Touch", |s| s.admission = Admission::SecondTouch),
    ("admission_loss", "0.1", |s| s.admission_loss = 0.1),
    ("write_budget_dwpd", "1.5", |s| s.write_budget_dwpd = Some(1.5)),
    ("drive_bytes", "2TB", |s| s.drive_bytes = Some(2_000_000_000_000)),
    ("ttl", "12h", |s| s.ttl = Some(Duration::from_secs(12 * 3600))),
    ("reclaim_write_budget", "0.5", |s| s.reclaim_write_budget = 0.5),
    ("workers", "7", |s| s.workers = 7),
    ("lease_share", "0.125", |s| s.lease_share = 0.125),
    ("fingerprint", "w1", |s| s.fingerprint = Some("w1".into())),
    ("load_timeout_ms", "500", |s| s.load_timeout_ms = 500),
    ("min_load_tokens", "64", |s| s.min_load_tokens = 64),
    ("recompute_tokens_per_s", "1.5e4", |s| s.recompute_tokens_per_s = Some(15_000.0)),
    ("gather_patience_ms", "0", |s| s.gather_patience_ms = 0),
    ("max_sync_stall_ms", "5", |s| s.max_sync_stall_ms = 5),
    ("max_held_blocks", "0", |s| s.max_held_blocks = Some(0)),
    ("allow_any_filesystem", "true", |s| s.allow_any_filesystem = true),
    ("enable_rdma", "true", |s| s.enable_rdma = true),
    ("remote_url", "s3://b/p", |s| s.remote_url = Some("s3://b/p".into())),
    ("remote_serde", "naive", |s| s.remote_serde = Some("naive".into())),
    ("remote_timeout_ms", "700", |s| s.remote_timeout_ms = 700),
    ("remote_staging", "32MiB", |s| s.remote_staging = 32 << 20),
    ("local_cpu", "true", |s| s.local_cpu = true),
    ("max_local_cpu_size", "1.5", |s| s.max_local_cpu_size = 3 << 29),
    ("prefetch", "no", |s| s.prefetch = false),
    ("enable_blending", "true", |s| s.enable_blending = true),
    ("blend_check_layers", "1,2", |s| s.blend_check_layers = vec![1, 2]),
    ("blend_recompute_ratios", "0.15", |s| s.blend_recompute_ratios = vec![0.15]),
    ("blend_special_str", "<sep>", |s| s.blend_special_str = Some("<sep>".into())),
    ("blend_thresholds", "0.1,0.2", |s| s.blend_thresholds = vec![0.1, 0.2]),
];

#[test]
fn each_key_changes_its_typed_field_from_every_source() {
    for (key, value, change) in CASES {
        let mut expected = Settings::default();
        change(&mut expected);
        // `gds` is the only backend, so that key alone cannot differ from its default.
        assert_eq!(expected == Settings::default(), *key == "backend", "{key} must change something");
        let yaml = format!("{key}: {value}\n");
        let upper = key.to_uppercase();
        let sources = [
            Loader::bare().file("f.yaml").files(move |_| Ok(yaml.clone())),
            Loader::bare().env([(format!("FOREBAY_{upper}"), *value)]),
            Loader::bare().env([(format!("LMCACHE_{upper}"), *value)]),
            Loader::bare().set(*key, *value),
            Loader::bare().env([("FOREBAY_EXTRA_CONFIG", format!("{{\"forebay.{key}\": \"{value}\"}}"))]),
        ];
        for (i, source) in sources.into_iter().enumerate() {
            assert_eq!(source.load().unwrap().0, expected, "{key} from source {i}");
        }
    }
}

#[test]
fn no_setting_lacks_a_case() {
    let cases: Vec<&str> = CASES.iter().map(|case| case.0).collect();
    assert_eq!(cases, Settings::keys());
}

/// The rows of the document's tables whose first cell is a key: key to the other cells.
fn documented() -> BTreeMap<String, Vec<String>> {
    let rows = DOCUMENT.lines().filter_map(|line| {
        let mut cells = line.strip_prefix("| `")?.trim_end_matches(" |").split(" | ");
        let key = cells.next()?.strip_suffix('`')?;
        let is_setting = cells.clone().count() > 1;
        is_setting.then(|| (key.to_owned(), cells.map(|cell| cell.trim().to_owned()).collect()))
    });
    rows.collect()
}

#[test]
fn the_document_lists_every_setting_with_its_variable_default_unit_effect_and_errors() {
    let documented = documented();
    for (key, default) in Settings::default().to_map() {
        let Some(cells) = documented.get(&key) else {
            return assert!(documented.contains_key(&key), "docs/configuration.md does not list {key}");
        };
        assert_eq!(cells.len(), 5, "{key}: environment, default, unit, effect, errors");
        let default = match default {
            Value::Null => "none".to_owned(),
            Value::String(text) => text,
            Value::Array(items) if items.is_empty() => "none".to_owned(),
            other => other.to_string(),
        };
        assert_eq!(cells[0], format!("`FOREBAY_{}`", key.to_uppercase()));
        assert_eq!(cells[1], format!("`{default}`"), "default of {key}");
        assert!(cells.iter().all(|cell| !cell.is_empty()), "{key} has an empty cell");
    }
    for key in documented.keys() {
        assert!(Settings::keys().contains(key), "docs/configuration.md lists {key}, which is no setting");
    }
}

#[test]
fn the_example_of_the_document_loads_without_a_warning() {
    let example = DOCUMENT.split("```yaml").nth(1).unwrap().split("```").next().unwrap().to_owned();
    let (_, warnings) = Loader::bare().file("example.yaml").files(move |_| Ok(example.clone())).load().unwrap();
    assert_eq!(warnings, []);
}
