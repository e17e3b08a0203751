//! `forebay warm import --dry-run` over dumps that a user could have.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "tests")]

mod common;

use std::path::Path;

use common::{folder, forebay, forebay_with};
use safetensors::Dtype;
use safetensors::tensor::TensorView;

fn save(path: &Path, tensors: &[(&str, Dtype, &[usize])]) {
    let data: Vec<Vec<u8>> = tensors
        .iter()
        .map(|(_, dtype, shape)| vec![1; shape.iter().product::<usize>() * dtype.bitsize() / 8])
        .collect();
    let views = tensors.iter().zip(&data).map(|((n, d, s), b)| (*n, TensorView::new(*d, s.to_vec(), b).unwrap()));
    safetensors::serialize_to_file(views, None, path).unwrap();
}

/// A dump of the preset `tiny`: four layers of two heads with 32 elements.
fn tiny(path: &Path, tokens: usize) {
    let names: Vec<String> = (0..4).flat_map(|l| [format!("layers.{l}.k"), format!("layers.{l}.v")]).collect();
    let shape = [tokens, 2, 32];
    let mut tensors: Vec<(&str, Dtype, &[usize])> =
        names.iter().map(|n| (n.as_str(), Dtype::BF16, shape.as_slice())).collect();
    let ids = [tokens];
    tensors.push(("token_ids", Dtype::I32, &ids));
    save(path, &tensors);
}

#[test]
fn a_dry_run_lists_what_an_import_would_take() {
    let dir = folder();
    tiny(&dir.path().join("a.safetensors"), 40);
    let prompt = dir.path().join("deep/0123abcd");
    std::fs::create_dir_all(&prompt).unwrap();
    for layer in 0..4 {
        let file = prompt.join(format!("model.layers.{layer}.self_attn.attn.safetensors"));
        save(&file, &[("kv_cache", Dtype::BF16, &[2, 32, 2, 32])]);
    }
    std::fs::write(prompt.join("token_ids.json"), format!("{:?}", (0..32).collect::<Vec<_>>())).unwrap();
    for arguments in [vec![], vec!["--verify"], vec!["--verify", "--threads"]] {
        let all = [vec!["warm", "import", ".", "--dry-run", "--model", "tiny", "--json"], arguments.clone()].concat();
        let json = forebay(dir.path(), &all).expect(0).json();
        assert_eq!((&json["tokens"], &json["bytes"], &json["failed"]), (&72.into(), &(72 * 1024).into(), &0.into()));
        let read = if arguments.is_empty() { 0 } else { 72 * 1024 };
        assert_eq!(json["bytes_read"], read);
        let dumps = json["dumps"].as_array().unwrap();
        assert_eq!(
            (&dumps[0]["form"], &dumps[0]["chunks"], &dumps[0]["dtype"]),
            (&"file".into(), &3.into(), &"bfloat16".into())
        );
        assert_eq!((&dumps[1]["form"], &dumps[1]["layers"]), (&"vllm-example".into(), &4.into()));
    }
    let text = forebay(dir.path(), &["warm", "import", ".", "--dry-run"]).expect(0).stdout;
    assert!(text.contains("2 dumps, 72 tokens, 72KiB (nothing stored); 0 skipped"), "{text}");
}

#[test]
fn bad_dumps_are_skipped_and_named() {
    let dir = folder();
    tiny(&dir.path().join("good.safetensors"), 16);
    std::fs::write(dir.path().join("short.safetensors"), [1, 2]).unwrap();
    let mut cut = std::fs::read(dir.path().join("good.safetensors")).unwrap();
    cut.truncate(cut.len() - 1);
    std::fs::write(dir.path().join("cut.safetensors"), cut).unwrap();
    let run = forebay(dir.path(), &["warm", "import", ".", "--dry-run", "--json"]).expect(3);
    let json = run.json();
    assert_eq!((&json["failed"], &json["tokens"]), (&2.into(), &16.into()));
    let text = forebay(dir.path(), &["warm", "import", ".", "--dry-run"]).expect(3).stdout;
    assert!(text.contains("cut.safetensors") && text.contains("truncated"), "{text}");
    assert!(text.contains("shorter than 8 bytes"), "{text}");
}

#[test]
fn a_dump_of_another_model_is_refused() {
    let dir = folder();
    tiny(&dir.path().join("a.safetensors"), 16);
    let run =
        forebay(dir.path(), &["warm", "import", "a.safetensors", "--dry-run", "--model", "llama-3.1-8b"]).expect(3);
    assert!(run.stdout.contains("not KV of llama-3.1-8b: 4 layers instead of 32"), "{}", run.stdout);
}

#[test]
fn nothing_to_import_is_an_error() {
    let dir = folder();
    let run = forebay(dir.path(), &["warm", "import", ".", "--dry-run"]).expect(1);
    assert!(run.stderr.contains("no dump found"), "{}", run.stderr);
    let run = forebay(dir.path(), &["warm", "import", "missing", "--dry-run"]).expect(1);
    assert!(run.stderr.starts_with("forebay: ") && run.stderr.contains("missing"), "{}", run.stderr);
}

#[test]
fn a_cache_that_does_not_open_ends_the_import_and_is_no_fault_of_the_dumps() {
    let dir = folder();
    ["a.safetensors", "b.safetensors"].iter().for_each(|name| tiny(&dir.path().join(name), 16));
    let import = ["warm", "import", ".", "--directory", "cache", "--model", "tiny"];
    std::fs::create_dir(dir.path().join("cache")).unwrap();
    std::fs::write(dir.path().join("cache/BUDGET"), [0; 4096]).unwrap();
    for more in [&[][..], &["--dry-run"]] {
        let run = forebay(dir.path(), &[&import[..], more].concat()).expect(1);
        assert!(run.stderr.contains("BUDGET") && !run.stdout.contains("skipped"), "{}{}", run.stdout, run.stderr);
    }
    std::fs::remove_dir_all(dir.path().join("cache")).unwrap();
    std::fs::write(dir.path().join("cache"), "").unwrap();
    let run = forebay(dir.path(), &import).expect(2);
    assert!(run.stderr.contains("not a directory"), "{}", run.stderr);
}

#[test]
fn an_import_is_verified_resumable_and_found_again() {
    let dir = folder();
    tiny(&dir.path().join("a.safetensors"), 40);
    let import = ["warm", "import", "a.safetensors", "--directory", "cache", "--model", "tiny", "--json"];
    std::fs::create_dir(dir.path().join("cache")).unwrap();
    let json = forebay(dir.path(), &import).expect(0).json();
    assert_eq!(
        (&json["stored_chunks"], &json["shed_chunks"], &json["bytes_read"]),
        (&3.into(), &0.into(), &40960.into())
    );
    let json = forebay(dir.path(), &import).expect(0).json();
    assert_eq!((&json["stored_chunks"], &json["bytes_read"]), (&0.into(), &0.into()), "all is there");
    assert_eq!(json["dumps"][0]["tokens_present"], 40);
    tiny(&dir.path().join("b.safetensors"), 48);
    let look = ["warm", "import", "b.safetensors", "--directory", "cache", "--model", "tiny", "--json", "--dry-run"];
    let json = forebay(dir.path(), &look).expect(0).json();
    assert_eq!((&json["dumps"][0]["tokens_present"], &json["bytes_read"]), (&32.into(), &0.into()), "a prefix of it");
    let json = forebay(dir.path(), &[&look[..], &["--verify"]].concat()).expect(0).json();
    assert_eq!((&json["dumps"][0]["tokens_present"], &json["bytes_read"]), (&32.into(), &(48 * 1024).into()));
    std::fs::create_dir(dir.path().join("empty")).unwrap();
    let empty = ["warm", "import", "b.safetensors", "--directory", "empty", "--model", "tiny", "--json", "--dry-run"];
    assert!(forebay(dir.path(), &empty).expect(0).json()["dumps"][0]["tokens_present"].is_null());
    let none = ["warm", "import", "b.safetensors", "--config", "no.yaml", "--model", "tiny", "--dry-run"];
    assert!(forebay(dir.path(), &none).expect(1).stderr.contains("no.yaml"));
    let json = forebay(dir.path(), &[&import[..], &["--verify"]].concat()).expect(0).json();
    assert_eq!(
        (&json["verified_bytes"], &json["wrong_bytes"], &json["lost_chunks"]),
        (&40960.into(), &0.into(), &0.into())
    );
    let named = ["warm", "import", "a.safetensors", "--directory", "cache", "--chunk-tokens", "8"];
    let json = forebay(dir.path(), &[&named[..], &["--model-name", "mine", "--json"]].concat()).expect(0).json();
    assert_eq!(json["stored_chunks"], 5);
    let run = forebay(dir.path(), &named).expect(2);
    assert!(run.stderr.contains("--model-name"), "{}", run.stderr);
}

#[test]
fn an_import_into_too_small_a_cache_says_so() {
    let dir = folder();
    tiny(&dir.path().join("a.safetensors"), 24 << 10);
    std::fs::create_dir(dir.path().join("cache")).unwrap();
    let import = ["warm", "import", "a.safetensors", "--directory", "cache", "--model", "tiny"];
    let small = [("FOREBAY_CAPACITY", "16MiB"), ("FOREBAY_CODEC", "none"), ("FOREBAY_MIN_FREE", "0")];
    let text = forebay_with(dir.path(), &import, &small).expect(3).stdout;
    assert!(text.contains("chunks were evicted again") && text.contains("`capacity`"), "{text}");
}

#[test]
fn an_import_codes_where_it_is_told_to() {
    let dir = folder();
    tiny(&dir.path().join("a.safetensors"), 512);
    let slots = |cache: &str, variables: &[(&str, &str)]| {
        std::fs::create_dir(dir.path().join(cache)).unwrap();
        let import = ["warm", "import", "a.safetensors", "--directory", cache, "--model", "tiny", "--verify", "--json"];
        let json =
            forebay_with(dir.path(), &[&import[..], &["--chunk-tokens", "256"]].concat(), variables).expect(0).json();
        assert_eq!((&json["stored_chunks"], &json["wrong_bytes"]), (&2.into(), &0.into()));
        let stat = forebay(dir.path(), &["stat", cache, "--json"]).expect(0).json();
        stat["drives"][0]["namespaces"][0]["shards"][0]["lanes"][0]["slot_bytes"].as_u64().unwrap()
    };
    let (raw, auto, coded) =
        (slots("raw", &[("FOREBAY_CODEC", "none")]), slots("auto", &[]), slots("coded", &[("FOREBAY_CODEC", "exp4")]));
    // `auto` is for processors that code fast.
    assert!([raw, coded].contains(&auto) && coded < raw * 7 / 8, "{raw} {auto} {coded}");
}
