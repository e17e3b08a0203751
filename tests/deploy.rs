//! The examples in `deploy/`: dashboard and alerts ask only for series that are exposed, files
//! parse, and the settings in them are accepted.
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests fail by panicking")]

mod engine_world;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use engine_world::{CHUNK, World, prompt, slots, store};
use forebay::config::{Capacity, Loader, MinFree, Settings};
use forebay::connector::{Counter, SchedulerStats, WorkerStats};
use forebay::objects::ObjectStore;
use serde_json::Value;

/// Counters of vLLM itself that the dashboard shows beside ours.
const OF_VLLM: [&str; 2] = ["vllm:external_prefix_cache_hits_total", "vllm:external_prefix_cache_queries_total"];
/// Labels that vLLM, Prometheus and its histograms add.
const ADDED: [&str; 5] = ["job", "instance", "model_name", "engine", "le"];

fn read(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy").join(name);
    std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

fn yaml(name: &str) -> Vec<Value> {
    serde_saphyr::from_multiple(&read(name)).unwrap_or_else(|e| panic!("{name}: {e}"))
}

/// The values of each label of each exposed name.
type Exposed = BTreeMap<String, BTreeMap<String, BTreeSet<String>>>;

fn expose(text: &str, exposed: &mut Exposed) {
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let (series, _) = line.rsplit_once(' ').unwrap();
        let (name, labels) = series.split_once('{').unwrap_or((series, "}"));
        let of_name = exposed.entry(name.to_owned()).or_default();
        for (key, value) in labels.trim_end_matches('}').split("\",").filter_map(|pair| pair.split_once("=\"")) {
            of_name.entry(key.to_owned()).or_default().insert(value.trim_end_matches('"').to_owned());
        }
    }
}

/// What an engine, an object store and the vLLM connector expose.
fn exposed() -> Exposed {
    let mut exposed = Exposed::new();
    let w = World::plain();
    let engine = w.open();
    let kv = w.kv().filled(1);
    store(&engine, &prompt(&engine, CHUNK, 1), &kv, slots(CHUNK, 1));
    expose(&engine.metrics_text().unwrap(), &mut exposed);
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let mut settings = Settings::at(dir.path());
    (settings.capacity, settings.min_free) = (Capacity::Bytes(128 << 20), MinFree::Bytes(0));
    let objects = ObjectStore::open(&settings, "deploy").unwrap();
    expose(&objects.metrics().unwrap(), &mut exposed);
    // vLLM's Python client appends `_total` (python/forebay/vllm/stats.py has the prefix).
    for (prefix, counters) in
        [("", WorkerStats::default().counters()), ("scheduler_", SchedulerStats::default().counters())]
    {
        for Counter { name, cause, .. } in counters {
            let labels = exposed.entry(format!("vllm:forebay_{prefix}{name}_total")).or_default();
            cause.map(|cause| labels.entry("cause".to_owned()).or_default().insert(cause.to_owned()));
        }
    }
    let of_vllm =
        WorkerStats::GAUGES.iter().map(|name| format!("vllm:forebay_{name}")).chain(OF_VLLM.map(str::to_owned));
    exposed.extend(of_vllm.map(|name| (name, BTreeMap::new())));
    exposed
}

/// The selectors of a PromQL expression: a metric's name and the text in the braces behind it.
fn selectors(expr: &str) -> Vec<(&str, &str)> {
    let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == ':';
    let mut found = Vec::new();
    let mut rest = expr;
    while let Some(start) = rest.find(|c: char| is_name(c) || c == '"') {
        rest = &rest[start..];
        if let Some(quoted) = rest.strip_prefix('"') {
            rest = &quoted[quoted.find('"').unwrap() + 1..];
            continue;
        }
        let end = rest.find(|c: char| !is_name(c)).unwrap_or(rest.len());
        let (name, behind) = rest.split_at(end);
        rest = behind;
        if name.starts_with("forebay_") || name.starts_with("vllm:") {
            let braces = behind.strip_prefix('{').and_then(|b| b.split_once('}')).map_or("", |(inside, _)| inside);
            found.push((name, braces));
        }
    }
    found
}

/// What is wrong with an expression: names, labels and label values that nobody exposes.
fn wrong(expr: &str, exposed: &Exposed) -> Vec<String> {
    let mut wrong = Vec::new();
    for (name, braces) in selectors(expr) {
        let Some(labels) = exposed.get(name) else {
            wrong.push(format!("nobody exposes {name}"));
            continue;
        };
        for matcher in braces.split(',').map(str::trim).filter(|m| !m.is_empty()) {
            let (key, value) = matcher.split_once(['=', '!']).unwrap();
            let values = value.trim_start_matches(['=', '~']).trim_matches('"');
            match labels.get(key) {
                _ if ADDED.contains(&key) => {}
                None => wrong.push(format!("{name} has no label {key}")),
                Some(known) => {
                    let unknown = values.split('|').filter(|v| !known.contains(*v));
                    wrong.extend(unknown.map(|v| format!("{name} has no {key} {v:?}, only {known:?}")));
                }
            }
        }
    }
    wrong
}

#[test]
fn dashboard_and_alerts_ask_for_what_is_exposed() {
    let exposed = exposed();
    let mut expressions = Vec::new();
    let dashboard: Value = serde_json::from_str(&read("grafana/forebay.json")).unwrap();
    for panel in dashboard["panels"].as_array().unwrap() {
        let targets = panel["targets"].as_array().into_iter().flatten();
        expressions.extend(targets.map(|t| t["expr"].as_str().unwrap().to_owned()));
    }
    for group in yaml("prometheus/alerts.yml")[0]["groups"].as_array().unwrap() {
        expressions.extend(group["rules"].as_array().unwrap().iter().map(|r| r["expr"].as_str().unwrap().to_owned()));
    }
    assert!(expressions.len() > 50, "{} expressions", expressions.len());
    for expr in &expressions {
        assert!(!selectors(expr).is_empty(), "{expr:?} asks for nothing of ours");
        assert_eq!(wrong(expr, &exposed), [""; 0], "{expr}");
    }
    // The check itself sees each kind of mistake.
    for bad in ["forebay_upp", "rate(forebay_up{colour=\"red\"}[1m])", "forebay_missed_chunks_total{cause=~\"io|iO\"}"]
    {
        assert_eq!(wrong(bad, &exposed).len(), 1, "{bad}");
    }
}

#[test]
fn no_panel_of_the_dashboard_hides_another() {
    let dashboard: Value = serde_json::from_str(&read("grafana/forebay.json")).unwrap();
    let panels = dashboard["panels"].as_array().unwrap();
    let (mut ids, mut cells) = (BTreeSet::new(), BTreeSet::new());
    for panel in panels {
        assert!(ids.insert(panel["id"].as_u64().unwrap()), "two panels have the id {}", panel["id"]);
        let at = |key: &str| panel["gridPos"][key].as_u64().unwrap();
        assert!(at("x") + at("w") <= 24, "{}", panel["title"]);
        for cell in (at("x")..at("x") + at("w")).flat_map(|x| (at("y")..at("y") + at("h")).map(move |y| (x, y))) {
            assert!(cells.insert(cell), "{} lies over another panel", panel["title"]);
        }
    }
}

/// What a map of settings gives; the files that it names are those of `deploy/`.
fn load(of: &str, map: Value) -> Settings {
    let Value::Object(map) = map else { panic!("{of}: no settings") };
    let (settings, warnings) = Loader::bare().code_name(of).map(map).load().unwrap_or_else(|e| panic!("{of}: {e}"));
    assert!(warnings.is_empty(), "{of}: {warnings:?}");
    assert!(!settings.drives.is_empty(), "{of} names no cache directory");
    settings
}

/// The settings in the value of vLLM's `--kv-transfer-config`.
fn of_vllm(of: &str, text: &str) -> Settings {
    let config: Value = serde_json::from_str(text).unwrap_or_else(|e| panic!("{of}: {e}"));
    let mut extra = config["kv_connector_extra_config"].clone();
    match config["kv_connector"].as_str() {
        Some("ForebayConnector") => {}
        Some("OffloadingConnector") => {
            extra = extra["secondary_tiers"][0].clone();
            assert_eq!(extra.as_object_mut().unwrap().remove("type"), Some("forebay".into()));
        }
        other => panic!("{of}: {other:?}"),
    }
    load(of, extra)
}

#[test]
fn the_settings_of_each_stack_are_accepted() {
    let nvme = [PathBuf::from("/mnt/nvme/forebay")];
    let dirs = |s: &Settings| s.cache_dirs().map(Path::to_path_buf).collect::<Vec<_>>();
    assert_eq!(dirs(&of_vllm("vllm.json", &read("settings/vllm.json"))), nvme);
    assert_eq!(dirs(&of_vllm("vllm-tier.json", &read("settings/vllm-tier.json"))), nvme);
    let adapter: Value = serde_json::from_str(&read("settings/lmcache.json")).unwrap();
    let mut params = adapter["adapter_params"].clone();
    // LMCache's own.
    assert!(params.as_object_mut().unwrap().remove("namespace").is_some());
    assert_eq!(dirs(&load("lmcache.json", params)), nvme);
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy/settings/forebay.yaml");
    let (settings, warnings) = Loader::bare().file(file).load().unwrap();
    assert!(warnings.is_empty(), "{warnings:?}");
    assert_eq!(settings.drives.len(), 2);
}

/// The value behind `--kv-transfer-config` in a list of arguments.
fn transfer_config(arguments: &Value) -> &str {
    let list: Vec<&str> = arguments.as_array().unwrap().iter().map(|a| a.as_str().unwrap()).collect();
    list[list.iter().position(|a| *a == "--kv-transfer-config").unwrap() + 1]
}

/// Whether `path` lies on one of the mounts.
fn is_mounted(mounts: &Value, key: &str, path: &Path) -> bool {
    mounts.as_array().unwrap().iter().filter_map(|m| m[key].as_str()).any(|mount| path.starts_with(mount))
}

#[test]
fn the_examples_of_containers_mount_the_drive_that_their_settings_name() {
    let compose = yaml("docker/compose.yaml").remove(0);
    let service = &compose["services"]["vllm"];
    let settings = of_vllm("compose.yaml", transfer_config(&service["command"]));
    assert!(is_mounted(&service["volumes"], "target", &settings.drives[0].path));
    assert_eq!(service["ulimits"]["memlock"], -1);
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let context = root.join("deploy/docker").join(service["build"]["context"].as_str().unwrap());
    assert_eq!(context.canonicalize().unwrap(), root.canonicalize().unwrap());
    assert!(context.join(service["build"]["dockerfile"].as_str().unwrap()).is_file());

    let all = yaml("kubernetes/vllm.yaml");
    let kinds: Vec<&str> = all.iter().map(|d| d["kind"].as_str().unwrap()).collect();
    assert_eq!(kinds, ["StorageClass", "PersistentVolume", "PersistentVolumeClaim", "Deployment", "Service"]);
    let pod = &all[3]["spec"]["template"]["spec"];
    let server = &pod["containers"][0];
    let settings = of_vllm("vllm.yaml", transfer_config(&server["args"]));
    assert!(is_mounted(&server["volumeMounts"], "mountPath", &settings.drives[0].path));
    let probe = pod["initContainers"][0]["command"][2].as_str().unwrap();
    assert!(probe.ends_with(&format!("forebay probe {}", settings.drives[0].path.display())));
    assert_eq!(pod["enableServiceLinks"], false, "VLLM_PORT would be the Service's URL");
    for container in [server, &pod["initContainers"][0]] {
        assert_eq!(container["securityContext"]["seccompProfile"]["type"], "Unconfined");
        assert_eq!(container["securityContext"]["capabilities"]["add"][0], "IPC_LOCK");
        let volumes: Vec<_> = pod["volumes"].as_array().unwrap().iter().map(|v| &v["name"]).collect();
        assert!(container["volumeMounts"].as_array().unwrap().iter().all(|m| volumes.contains(&&m["name"])));
    }
}

#[test]
fn the_unit_of_systemd_names_settings_that_there_are() {
    let unit = read("systemd/vllm-forebay.service");
    let line = |key: &str| unit.lines().find_map(|l| l.strip_prefix(key)).unwrap_or_else(|| panic!("no {key}"));
    let variables = line("Environment=").replace("%%", "%");
    let variables = variables.split(' ').map(|v| v.split_once('=').unwrap());
    let (settings, warnings) = Loader::bare().env(variables).load().unwrap();
    assert!(warnings.is_empty(), "{warnings:?}");
    assert!(settings.drives[0].path.starts_with(line("RequiresMountsFor=")));
    assert_eq!(line("KillMode="), "mixed", "vLLM's workers end at once at SIGTERM");
    assert!(read("systemd/mnt-nvme.mount").contains(&format!("Where={}\n", line("RequiresMountsFor="))));
}
