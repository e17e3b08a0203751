//! Dumps of both forms, written with the crate `safetensors`, read back through both backends.

use std::collections::BTreeMap;
use std::collections::HashMap;
use std::ops::Range;
use std::path::Path;

use parking_lot::Mutex;
use safetensors::Dtype;
use safetensors::tensor::TensorView;

use super::piece::Piece;
use super::sink::Imported;
use super::*;

/// Tensors by name: type, shape, bytes.
type Tensors = BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>;

fn write(path: &Path, tensors: &Tensors, metadata: &[(&str, &str)]) {
    let views = tensors.iter().map(|(n, (d, s, b))| (n.clone(), TensorView::new(*d, s.clone(), b).unwrap()));
    let metadata: HashMap<_, _> = metadata.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
    safetensors::serialize_to_file(views, Some(metadata), path).unwrap();
}

fn ids(n: usize) -> (Dtype, Vec<usize>, Vec<u8>) {
    (Dtype::I64, vec![n], (0..n as i64).flat_map(|t| (t * 7).to_le_bytes()).collect())
}

/// The byte of a plane's token, head and position: a function of its place.
fn byte(layer: usize, plane: usize, token: usize, at: usize) -> u8 {
    (layer * 101 + plane * 53 + token * 17 + at * 3) as u8
}

fn rows(layer: usize, plane: usize, tokens: usize, row: usize) -> Vec<u8> {
    (0..tokens).flat_map(|t| (0..row).map(move |at| byte(layer, plane, t, at))).collect()
}

/// `layers` of K and V with two heads of four elements in bf16: 16 bytes per token and plane.
fn kv_file(path: &Path, tokens: usize, layers: usize) {
    let mut tensors = Tensors::from([("token_ids".to_owned(), ids(tokens))]);
    for l in 0..layers {
        for (p, part) in ["k", "v"].into_iter().enumerate() {
            tensors.insert(format!("layers.{l}.{part}"), (Dtype::BF16, vec![tokens, 2, 4], rows(l, p, tokens, 16)));
        }
    }
    write(path, &tensors, &[]);
}

#[derive(Default)]
struct Collect {
    chunk: usize,
    skip: Vec<Range<usize>>,
    pieces: Mutex<Vec<Piece>>,
}

impl Sink for Collect {
    fn chunk_tokens(&self) -> usize {
        self.chunk
    }

    fn missing(&self, dump: &DumpInfo) -> Result<Vec<Range<usize>>> {
        let (mut at, mut missing) = (0, Vec::new());
        for skip in &self.skip {
            missing.push(at..skip.start);
            at = skip.end;
        }
        missing.push(at..dump.tokens.len());
        Ok(missing)
    }

    fn store(&self, piece: Piece) -> Result<()> {
        self.pieces.lock().push(piece);
        Ok(())
    }

    fn finish(&self) -> Result<Imported> {
        Ok(Imported::default())
    }
}

fn collect(paths: Vec<PathBuf>, sink: Collect, options: ReadOptions) -> (Summary, Vec<Piece>) {
    let sink = Arc::new(sink);
    let as_dyn: Arc<dyn Sink> = sink.clone();
    let quiet = Context { json: true, quiet: true };
    let summary = pump(paths, &as_dyn, options, &quiet).unwrap();
    let pieces = std::mem::take(&mut *sink.pieces.lock());
    (summary, pieces)
}

fn options(threads_only: bool) -> ReadOptions {
    ReadOptions { jobs: 4, budget_bytes: 4096, shape: KvShape::Auto, threads_only }
}

/// Whether every piece holds K and V rows of 16 bytes as [`byte`] gives them.
fn assert_kv(pieces: &[Piece], layers: usize) {
    for piece in pieces {
        assert_eq!(piece.layers.len(), layers);
        for (l, extent) in piece.layers.iter().enumerate() {
            let want: Vec<u8> = (0..2)
                .flat_map(|p| piece.tokens.clone().flat_map(move |t| (0..16).map(move |at| byte(l, p, t, at))))
                .collect();
            assert_eq!(extent, &want, "layer {l} of {:?}", piece.tokens);
        }
    }
}

#[test]
fn pieces_of_many_dumps_come_in_order_with_the_right_bytes() {
    let dir = tempfile::tempdir().unwrap();
    let paths: Vec<_> = (0..5).map(|i| dir.path().join(format!("{i}.safetensors"))).collect();
    for (i, path) in paths.iter().enumerate() {
        kv_file(path, 20 + i, 3);
    }
    for threads_only in [false, true] {
        let sink = Collect { chunk: 8, ..Collect::default() };
        let (summary, pieces) = collect(paths.clone(), sink, options(threads_only));
        assert_eq!((summary.dumps.len(), summary.failed, summary.tokens), (5, 0, 110));
        assert_eq!(summary.bytes_read, 110 * 3 * 32);
        let got: Vec<_> = pieces.iter().map(|p| (p.dump.path.clone(), p.tokens.clone())).collect();
        let want: Vec<_> =
            paths.iter().enumerate().flat_map(|(i, p)| [0..8, 8..16, 16..20 + i].map(|r| (p.clone(), r))).collect();
        assert_eq!(got, want);
        assert_kv(&pieces, 3);
        assert_eq!(pieces[0].dump.tokens[3], 21);
    }
}

#[test]
fn what_the_cache_has_is_not_read() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.safetensors");
    kv_file(&path, 32, 2);
    let skip = std::iter::once(8..16).collect();
    let (summary, pieces) = collect(vec![path], Collect { chunk: 8, skip, ..Collect::default() }, options(false));
    assert_eq!(pieces.iter().map(|p| p.tokens.clone()).collect::<Vec<_>>(), [0..8, 16..24, 24..32]);
    assert_eq!(summary.dumps[0].tokens_present, Some(8));
    assert_kv(&pieces, 2);
}

#[test]
fn every_arrangement_of_the_example_connector_gives_the_same_extents() {
    let n = 12;
    // K and V rows of two heads of eight bytes.
    let half = |l: usize, p: usize, t: usize, h: usize| (0..8).map(move |at| byte(l, p, t, h * 8 + at));
    for (shape, name) in [
        (vec![2, n, 2, 4], "kv-first"),
        (vec![2, n, 8], "kv-first flat"),
        (vec![n, 2, 2, 4], "kv-second"),
        (vec![n, 2, 8], "kv-last"),
    ] {
        let dir = tempfile::tempdir().unwrap();
        for l in 0..2 {
            let data: Vec<u8> = match name {
                "kv-second" => {
                    (0..n).flat_map(|t| (0..2).flat_map(move |p| (0..2).flat_map(move |h| half(l, p, t, h)))).collect()
                }
                "kv-last" => {
                    (0..n).flat_map(|t| (0..2).flat_map(move |h| (0..2).flat_map(move |p| half(l, p, t, h)))).collect()
                }
                _ => [rows(l, 0, n, 16), rows(l, 1, n, 16)].concat(),
            };
            let tensors = Tensors::from([("kv_cache".to_owned(), (Dtype::F16, shape.clone(), data))]);
            write(&dir.path().join(format!("model.layers.{l}.self_attn.attn.safetensors")), &tensors, &[]);
        }
        std::fs::write(dir.path().join("token_ids.json"), serde_json::to_string(&(0..n).collect::<Vec<_>>()).unwrap())
            .unwrap();
        let sink = Collect { chunk: 5, ..Collect::default() };
        let (summary, pieces) = collect(vec![dir.path().to_path_buf()], sink, options(false));
        assert_eq!(summary.failed, 0, "{name}: {:?}", summary.dumps);
        assert_eq!(summary.dumps[0].dtype.as_deref(), Some("float16"));
        assert_eq!(pieces.len(), 3);
        assert_kv(&pieces, 2);
    }
}

#[test]
fn mla_rows_with_an_indexer_are_two_planes() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("mla.safetensors");
    let tensors = Tensors::from([
        ("token_ids".to_owned(), ids(6)),
        ("layers.0.kv".to_owned(), (Dtype::U8, vec![6, 576], rows(0, 0, 6, 576))),
        ("layers.0.index".to_owned(), (Dtype::U8, vec![6, 132], rows(0, 1, 6, 132))),
    ]);
    write(&path, &tensors, &[("kv_dtype", "fp8_e4m3")]);
    let (summary, pieces) = collect(vec![path], Collect { chunk: 4, ..Collect::default() }, options(false));
    assert_eq!(summary.dumps[0].dtype.as_deref(), Some("fp8_e4m3"));
    assert_eq!(pieces[1].layers[0].len(), 2 * 708);
    let planes = &pieces[0].dump.layers[0].spec.planes;
    assert_eq!(planes.iter().map(|p| p.token_bytes()).collect::<Vec<_>>(), [576, 132]);
}

#[test]
fn a_dump_that_shrinks_fails_alone_and_once() {
    let dir = tempfile::tempdir().unwrap();
    let paths: Vec<_> = ["a", "b"].iter().map(|n| dir.path().join(format!("{n}.safetensors"))).collect();
    for path in &paths {
        kv_file(path, 64, 1);
    }

    struct Shrink(PathBuf, Collect);
    impl Sink for Shrink {
        fn chunk_tokens(&self) -> usize {
            self.1.chunk_tokens()
        }
        fn missing(&self, dump: &DumpInfo) -> Result<Vec<Range<usize>>> {
            if dump.path == self.0 {
                std::fs::File::options().write(true).open(&self.0).unwrap().set_len(600).unwrap();
            }
            self.1.missing(dump)
        }
        fn store(&self, piece: Piece) -> Result<()> {
            self.1.store(piece)
        }
        fn finish(&self) -> Result<Imported> {
            Ok(Imported::default())
        }
    }
    for threads_only in [false, true] {
        kv_file(&paths[0], 64, 1);
        let sink: Arc<dyn Sink> = Arc::new(Shrink(paths[0].clone(), Collect { chunk: 8, ..Collect::default() }));
        let quiet = Context { json: true, quiet: true };
        let summary = pump(paths.clone(), &sink, options(threads_only), &quiet).unwrap();
        assert_eq!((summary.dumps.len(), summary.failed), (2, 1));
        assert!(summary.dumps[0].error.as_ref().unwrap().contains("shorter than its header says"));
        assert_eq!(summary.dumps[1].error, None);
    }
}

fn refusal(name: &str, tensors: Tensors) -> String {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(name);
    write(&path, &tensors, &[]);
    DumpInfo::open(&path, KvShape::Auto).unwrap_err().to_string()
}

#[test]
fn tensors_that_do_not_fit_are_named() {
    let zeros = |shape: &[usize], dtype: Dtype| {
        (dtype, shape.to_vec(), vec![0; shape.iter().product::<usize>() * dtype.bitsize() / 8])
    };
    let dump = |extra: &[(&str, &[usize], Dtype)]| {
        let mut tensors = Tensors::from([("token_ids".to_owned(), ids(4))]);
        for (name, shape, dtype) in extra {
            tensors.insert((*name).to_owned(), zeros(shape, *dtype));
        }
        tensors
    };
    let bf = Dtype::BF16;
    for (tensors, want) in [
        (Tensors::from([("layers.0.k".to_owned(), zeros(&[4, 1, 1], bf))]), "no tensor \"token_ids\""),
        (dump(&[]), "no layer"),
        (dump(&[("weights", &[4], bf)]), "unknown tensor \"weights\""),
        (dump(&[("layers.0.k", &[4, 1, 8], bf)]), "layers.0 has [\"k\"]"),
        (dump(&[("layers.0.k", &[5, 1, 8], bf), ("layers.0.v", &[4, 1, 8], bf)]), "layers.0.k has shape [5, 1, 8]"),
        (dump(&[("layers.0.k", &[4, 0, 8], bf), ("layers.0.v", &[4, 0, 8], bf)]), "layers.0.k has shape"),
        (dump(&[("layers.0.kv", &[4, 8], bf), ("layers.2.kv", &[4, 8], bf)]), "layer 1 is missing"),
        (dump(&[("layers.0.kv", &[4, 8], bf), ("layers.1.kv", &[4, 8], Dtype::F32)]), "beside layers of type bfloat16"),
        (dump(&[("layers.0.kv", &[4, 8], Dtype::I16)]), "KV of type I16"),
    ] {
        let got = refusal("a.safetensors", tensors);
        assert!(got.contains(want), "{got:?} lacks {want:?}");
    }
    let mut negative = dump(&[("layers.0.kv", &[4, 8], bf)]);
    negative.insert(
        "token_ids".to_owned(),
        (Dtype::I32, vec![4], [1i32, 2, -3, 4].iter().flat_map(|t| t.to_le_bytes()).collect()),
    );
    assert!(refusal("a.safetensors", negative).contains("token_ids[2] is not a token id"));
}

#[test]
fn an_ambiguous_arrangement_must_be_named() {
    let dir = tempfile::tempdir().unwrap();
    let tensors = Tensors::from([("kv_cache".to_owned(), (Dtype::F16, vec![2, 2, 8], vec![0; 64]))]);
    write(&dir.path().join("model.layers.0.attn.safetensors"), &tensors, &[]);
    assert!(DumpInfo::open(dir.path(), KvShape::Auto).unwrap_err().to_string().contains("add token_ids"));
    std::fs::write(dir.path().join("token_ids.json"), "{\"token_ids\": [5, 6]}").unwrap();
    assert!(DumpInfo::open(dir.path(), KvShape::Auto).unwrap_err().to_string().contains("--kv-shape"));
    let dump = DumpInfo::open(dir.path(), KvShape::KvLast).unwrap();
    assert_eq!(dump.layers[0].spec.planes[0].heads, 2);
    assert_eq!(dump.tokens, [5, 6]);
    std::fs::write(dir.path().join("token_ids.json"), "[1, -2]").unwrap();
    assert!(DumpInfo::open(dir.path(), KvShape::KvLast).unwrap_err().to_string().contains("token_ids.json"));
}

#[test]
fn one_row_per_token_may_be_latent_or_of_one_head() {
    let dir = tempfile::tempdir().unwrap();
    let write_row = |elements: usize| {
        let tensor = (Dtype::F16, vec![3, 1, elements], vec![0; 3 * 2 * elements]);
        let tensors = Tensors::from([("kv_cache".to_owned(), tensor)]);
        write(&dir.path().join("model.layers.0.attn.safetensors"), &tensors, &[]);
    };
    std::fs::write(dir.path().join("token_ids.json"), "[5, 6, 7]").unwrap();
    write_row(8);
    assert!(DumpInfo::open(dir.path(), KvShape::Auto).unwrap_err().to_string().contains("--kv-shape"));
    assert_eq!(DumpInfo::open(dir.path(), KvShape::Mla).unwrap().layers[0].spec.planes.len(), 1);
    assert_eq!(DumpInfo::open(dir.path(), KvShape::KvLast).unwrap().layers[0].spec.planes.len(), 2);
    write_row(7);
    assert_eq!(DumpInfo::open(dir.path(), KvShape::Auto).unwrap().layers[0].spec.planes.len(), 1);
}
