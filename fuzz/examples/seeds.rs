//! Writes the inputs that fuzzing starts from, `cargo run -p forebay-fuzz --example seeds`: one or
//! two of each kind, as Forebay itself writes them.

use std::path::Path;

use forebay::Result;
use forebay::connector::{BlockSpan, LoadOrder, PromptPart, SaveOrder, StepMeta, WorkerMeta};
use forebay::format::layout::SlotLayout;
use forebay::format::record::{KeyKind, Record, RecordKind};
use forebay::format::sealed::{self, RegionHeader, RegionState};
use forebay::format::slot::SlotHeader;
use forebay::format::superblock::Superblock;
use forebay::format::{PAGE_BYTES, journal, policy};
use forebay::geometry::Geometry;
use forebay::index::{ChainChunk, Prefix};
use forebay::key::ChunkKey;

fn save(target: &str, name: &str, bytes: &[u8]) -> Result<()> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(target);
    std::fs::create_dir_all(&folder)
        .and_then(|()| std::fs::write(folder.join(name), bytes))
        .map_err(|e| forebay::Error::io("cannot write a seed", e).at(&folder))
}

fn records() -> Vec<Record> {
    let kinds = [RecordKind::Put, RecordKind::Gone, RecordKind::Put];
    let record = |(i, kind)| Record {
        sequence: 1 << 40 | i as u64,
        pages: 3,
        ..Record::new(kind, KeyKind::Chain, ChunkKey([i as u8; 32]))
    };
    kinds.into_iter().enumerate().map(record).collect()
}

/// What a policy has learned: of nothing, and of some chains.
fn policies() -> Result<()> {
    let mut prefix = Prefix::new(900);
    let mut save_now = |name: &str, chains: std::ops::Range<u64>| {
        for (chain, depth) in chains.flat_map(|chain| (0..6).map(move |depth| (chain, depth))) {
            let tag = chain * 8 + u64::from(depth);
            let parent = if depth == 0 { 0 } else { tag - 1 };
            prefix.stored(&ChainChunk { tag, parent, depth, bytes: 10, partial: depth == 5 });
            prefix.used(tag / 2);
        }
        let mut saving = prefix.save(u64::MAX).unwrap_or_else(|| unreachable!("there is room for all of it"));
        while !prefix.save_more(&mut saving, 1000) {}
        let payload = prefix.saved(saving).into_bytes();
        save("policy_state", name, &policy::encode(&[1; 16], &payload))
    };
    save_now("empty", 0..0)?;
    save_now("some", 0..3)?;
    save_now("more", 3..200)
}

fn pages() -> Result<()> {
    let page = PAGE_BYTES as u64;
    let superblock = Superblock {
        features: [0; 3],
        generation: 7,
        mount_generation: 3,
        lane: [1; 16],
        drive: [2; 16],
        fingerprint: [3; 32],
        layers_digest: [4; 32],
        segment_bytes: 1 << 20,
        region_bytes: 16 * page,
        ring_offset: 2 * page,
        ring_pages: 64,
        chunk_tokens: 256,
        regions_offset: 66 * page,
        created_ms: 1_700_000_000_000,
        model: "llama-3.1-8b".to_owned(),
        shard: "pp0of1-tp0of1-cp0of1".to_owned(),
    };
    save("superblock", "one", &superblock.encode())?;
    let newer = Superblock { generation: 8, ..superblock.clone() };
    save("superblock", "two", &[superblock.encode(), newer.encode()].concat())?;
    save("journal", "empty", &journal::encode(1, &[1; 16], &[]))?;
    save("journal", "three", &journal::encode(2, &[1; 16], &records()))?;
    let header = RegionHeader {
        lane: [1; 16],
        segment: 1,
        epoch: 2,
        state: RegionState::Sealed,
        count: 3,
        min_sequence: 1 << 40,
        max_sequence: 1 << 40 | 2,
        sealed_ms: 1_700_000_000_000,
        records_sum: 0,
    };
    save("sealed_table", "three", &sealed::encode_region(&header, 0, &records()))?;
    save("sealed_table", "free", &RegionHeader { state: RegionState::Free, count: 0, ..header }.encode())?;
    let geometry = Geometry::preset("tiny")?;
    let layout = SlotLayout::of_chunk(&geometry, geometry.chunk_tokens);
    let mut slot = SlotHeader::new(KeyKind::Chain, ChunkKey([5; 32]));
    slot.layers = SlotHeader::layer_table(&layout, &vec![9; layout.extents.len()]);
    save("slot_header", "plain", &slot.encode(&layout)?.0)?;
    slot.tlvs = vec![(1, vec![1, 2, 3]), (2, Vec::new())];
    save("slot_header", "tlvs", &slot.encode(&layout)?.0)
}

fn messages() -> Result<()> {
    let mut prompt = PromptPart::default();
    prompt.tokens.extend(0..40);
    let spans = vec![BlockSpan { first: 0, ids: vec![1, 2, 3] }];
    let load = LoadOrder {
        req_id: "a".to_owned(),
        prompt: prompt.clone(),
        computed: 0,
        stop: 32,
        spans: spans.clone(),
        epoch: 0,
        asynchronous: true,
    };
    let store = SaveOrder { req_id: "b".to_owned(), prompt, start: 0, stop: 32, spans, epoch: 0, generated: Some(9) };
    let step =
        StepMeta { step: 3, loads: vec![load], saves: vec![store], held: vec!["c".to_owned()], ..StepMeta::default() };
    save("connector_meta", "step", &step.to_bytes()?)?;
    let stored = vec![[1; 32]];
    save(
        "connector_meta",
        "report",
        &WorkerMeta { rank: 1, gathered_step: 2, stored, ..WorkerMeta::default() }.to_bytes()?,
    )
}

fn texts() -> Result<()> {
    let yaml = "backend: gds\nchunk_size: 256\ngds_config:\n  cache_dir: /mnt/nvme\n  capacity: 200GiB\nstaging: 10%\neviction_policy: lru\n";
    save("config", "yaml", yaml.as_bytes())?;
    save(
        "config",
        "json",
        br#"{"backend": "gds", "gds_config": {"cache_dir": ["/a", "/b"], "min_free": "5%"}, "io_timeout_ms": 1000}"#,
    )?;
    save("config", "environment", b"CHUNK_SIZE=128\nCAPACITY=1GiB\nCACHE_DIR=/mnt\n")?;
    save("trace", "two", b"{\"timestamp\": 0, \"input_length\": 600, \"output_length\": 2, \"hash_ids\": [1, 2]}\n\n{\"timestamp\": 5, \"input_length\": 512, \"output_length\": 1, \"hash_ids\": [1]}\n")?;
    let job = "[global]\nrw=load\nsize=1g\n\n[first]\nmodel=tiny\ntokens=2k\n\n[second]\nbs=4m\niodepth=32\nrw=read\n";
    save("job_file", "two", job.as_bytes())?;
    let header = br#"{"tokens":{"dtype":"I32","shape":[2],"data_offsets":[0,8]},"layers.0.k":{"dtype":"F16","shape":[2,1,4],"data_offsets":[8,24]},"layers.0.v":{"dtype":"F16","shape":[2,1,4],"data_offsets":[24,40]}}"#;
    let mut dump = (header.len() as u64).to_le_bytes().to_vec();
    dump.extend_from_slice(header);
    dump.extend_from_slice(&[0; 40]);
    save("safetensors_import", "k_and_v", &dump)?;
    save("shared_table", "nothing", &[])?;
    save("shared_table", "changes", &[1; 48])?;
    save("shared_lane", "nothing", &[])?;
    save("shared_lane", "changes", &[2; 48])
}

/// Extents of values with few exponents, and one that has others too, behind their numbers of
/// values.
fn extents() -> Result<()> {
    for (name, values, odd) in [("few", 300u16, 0), ("escapes", 4000, 30)] {
        let value = |i: u16| if i < odd { i.wrapping_mul(2711) } else { i.wrapping_mul(517) & 0x83ff | 0x3c00 };
        let raw: Vec<u8> = (0..values).flat_map(|i| value(i).to_le_bytes()).collect();
        let coded = forebay::device::encode_exp4(&raw).unwrap_or_default();
        save("coded_extent", name, &[&(values - 1).to_le_bytes()[..], &coded].concat())?;
    }
    save("coded_extent", "segments", &[&[0x00, 0x90][..], &[0x3c; 64]].concat())
}

fn main() -> Result<()> {
    pages()?;
    extents()?;
    policies()?;
    messages()?;
    texts()
}
