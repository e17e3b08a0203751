//! `forebay warm`: fills a cache ahead of time, from KV dumps or by having a server compute prompts
//! (`prompts`).
//!
//! `scan` finds dumps, `header`, `tokens` and `dump` understand them, `reader` reads them with many
//! reads in flight, `piece` cuts them into extents, `sink` says where pieces go, and `cache` is the
//! sink that stores them. The forms are described in docs/warm.md. Dumps are untrusted input: a bad
//! one is reported and skipped, and the exit status says so.

mod cache;
mod dump;
mod header;
mod piece;
mod prompts;
mod reader;
mod scan;
mod sink;
mod tokens;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use clap::{Args, Subcommand};
use comfy_table::{CellAlignment, Table, presets};
use forebay::config::{DriveSettings, Mode, Settings};
use forebay::geometry::Geometry;
use forebay::{Error, ErrorKind, Result};
use serde::Serialize;

use crate::out::{self, Context, Outcome};
use crate::progress::{self, Unit};
use crate::size::{parse_bytes, show_bytes};
use cache::{CacheSink, Model};
pub(crate) use dump::{DumpInfo, KvShape};
use reader::{Event, ReadOptions, Reader};
use sink::{DryRun, Imported, Sink};

/// Options of `forebay warm`.
#[derive(Debug, Args)]
#[command(after_help = BLEND_HELP)]
pub(crate) struct WarmArgs {
    #[command(subcommand)]
    command: WarmCommand,
}

#[derive(Debug, Subcommand)]
enum WarmCommand {
    /// Import KV dumps in safetensors form.
    Import(ImportArgs),
    /// Have a server compute prompts, whose connector stores their KV.
    Prompts(Box<prompts::PromptsArgs>),
}

/// Options of `forebay warm import`.
#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct ImportArgs {
    /// Dumps: safetensors files, folders that vLLM's example connector wrote, or folders that hold
    /// either.
    #[arg(required = true, value_name = "PATH")]
    pub(crate) paths: Vec<PathBuf>,
    /// Cache directory to fill.
    #[arg(long, visible_alias = "cache-dir", value_name = "DIR")]
    pub(crate) directory: Option<PathBuf>,
    /// Settings file of the cache to fill, as the server's; --directory and --chunk-tokens outrank
    /// it.
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// Name of a model that is no preset; its shape is taken from the first dump.
    #[arg(long, value_name = "NAME", conflicts_with = "model")]
    pub(crate) model_name: Option<String>,
    /// Model that the dumps must be of; decides geometry and chunk size.
    #[arg(long, value_name = "PRESET")]
    pub(crate) model: Option<String>,
    /// List dumps, tokens and bytes, and store nothing.
    #[arg(long)]
    pub(crate) dry_run: bool,
    /// Load and compare everything after storing; with --dry-run, read every byte of the dumps.
    #[arg(long)]
    pub(crate) verify: bool,
    /// Tokens of a chunk [default: the model's, else 256].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65536))]
    pub(crate) chunk_tokens: Option<u32>,
    /// Pieces (chunks of all layers) that are read at once.
    #[arg(long, default_value_t = 16, value_name = "N", value_parser = parse_jobs)]
    pub(crate) jobs: usize,
    /// Bytes that are read at once, whatever --jobs says.
    #[arg(long, default_value = "512m", value_parser = parse_bytes, value_name = "SIZE")]
    pub(crate) memory: u64,
    /// How K and V share vLLM's kv_cache tensors, where the shape does not tell.
    #[arg(long, value_enum, default_value_t = KvShape::Auto)]
    pub(crate) kv_shape: KvShape,
    /// Read with a pool of threads even where `io_uring` is available.
    #[arg(long)]
    pub(crate) threads: bool,
}

const BLEND_HELP: &str = "\
Segments that are reused at any position of a prompt, and blended prompts, are written by Python with a vLLM of its \
own (docs/blend.md):
  python -m forebay.vllm.blend store segments.jsonl --model MODEL --cache-dir DIR
  python -m forebay.vllm.blend blend prompts.jsonl --model MODEL --cache-dir DIR";

const AFTER_HELP: &str = "\
A dump holds token ids and the KV of every layer; docs/warm.md names the tensors. Importing is resumable: chunks that \
the cache has are neither read nor stored again. Dumps that cannot be read are skipped and make the exit status 3, as do \
chunks that were evicted again for lack of room.

Examples:
  forebay warm import dumps/ --dry-run
  forebay warm import dumps/*.safetensors --directory /mnt/nvme/forebay --model llama-3.1-8b --verify
  forebay warm import /tmp/vllm-shared-storage --directory /mnt/nvme/forebay --model tiny --kv-shape kv-last";

fn parse_jobs(text: &str) -> std::result::Result<usize, String> {
    match text.parse() {
        Ok(n @ 1..=1024) => Ok(n),
        _ => Err("not 1 to 1024".to_owned()),
    }
}

/// What became of one dump.
#[derive(Clone, Debug, Serialize)]
struct DumpReport {
    #[serde(serialize_with = "out::lossy")]
    path: PathBuf,
    #[serde(skip_serializing_if = "Option::is_none")]
    form: Option<&'static str>,
    tokens: usize,
    layers: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    dtype: Option<String>,
    bytes: u64,
    chunks: usize,
    /// Not known where no cache was named.
    #[serde(skip_serializing_if = "Option::is_none")]
    tokens_present: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

impl DumpReport {
    fn of(dump: &DumpInfo, present: Option<usize>, chunk_tokens: usize) -> Self {
        Self {
            path: dump.path.clone(),
            form: Some(dump.form),
            tokens: dump.tokens.len(),
            layers: dump.layers.len(),
            dtype: Some(dump.dtype.clone()),
            bytes: dump.bytes(),
            chunks: dump.tokens.len().div_ceil(chunk_tokens),
            tokens_present: present,
            error: None,
        }
    }

    fn failed(path: PathBuf, error: &Error) -> Self {
        let error = Some(error.to_string());
        let (tokens, layers, chunks, tokens_present) = (0, 0, 0, None);
        Self { path, form: None, tokens, layers, dtype: None, bytes: 0, chunks, tokens_present, error }
    }
}

/// The whole import.
#[derive(Clone, Debug, Default, Serialize)]
struct Summary {
    dry_run: bool,
    reader: &'static str,
    dumps: Vec<DumpReport>,
    tokens: u64,
    bytes: u64,
    bytes_read: u64,
    failed: usize,
    #[serde(flatten)]
    imported: Imported,
    elapsed_s: f64,
}

/// Runs `forebay warm`.
pub(crate) fn run(args: &WarmArgs, context: &Context) -> Result<Outcome> {
    match &args.command {
        WarmCommand::Import(args) => import(args, context),
        WarmCommand::Prompts(args) => prompts::run(args, context),
    }
}

fn import(args: &ImportArgs, context: &Context) -> Result<Outcome> {
    let geometry = args.model.as_deref().map(Geometry::preset).transpose()?;
    let paths = scan::find(&args.paths)?;
    if paths.is_empty() {
        return Err(Error::new(ErrorKind::NotFound, "no dump found").advice(
            "name .safetensors files, or folders that hold them (`forebay warm import --help` says which forms)",
        ));
    }
    let sink = open_sink(args, geometry)?;
    let options =
        ReadOptions { jobs: args.jobs, budget_bytes: args.memory, shape: args.kv_shape, threads_only: args.threads };
    let started = Instant::now();
    let mut summary = pump(paths, &sink, options, context)?;
    summary.imported = sink.finish()?;
    summary.dry_run = args.dry_run;
    summary.elapsed_s = started.elapsed().as_secs_f64();
    if context.json {
        out::print_json(&summary)?;
    } else {
        out::print(&text(&summary))?;
    }
    let problem = {
        let Imported { wrong_bytes, shed_chunks, lost_chunks, evicted_chunks, .. } = summary.imported;
        summary.failed > 0 || wrong_bytes + shed_chunks + lost_chunks + evicted_chunks > 0
    };
    Ok(if problem { Outcome::Problem } else { Outcome::Done })
}

/// Where the pieces go.
fn open_sink(args: &ImportArgs, geometry: Option<Geometry>) -> Result<Arc<dyn Sink>> {
    let model_chunk = geometry.as_ref().map(|g| g.chunk_tokens);
    if args.dry_run && args.config.is_none() && args.directory.is_none() {
        let chunk_tokens = args.chunk_tokens.or(model_chunk).unwrap_or(256) as usize;
        return Ok(Arc::new(DryRun { cache: None, geometry, chunk_tokens, read: args.verify }));
    }
    let mut settings = settings_of(args)?;
    if args.config.is_none() && settings.chunk_size == Settings::default().chunk_size {
        settings.chunk_size = model_chunk.unwrap_or(settings.chunk_size);
    }
    settings.chunk_size = args.chunk_tokens.unwrap_or(settings.chunk_size);
    let model = match (geometry, &args.model_name) {
        (Some(geometry), _) => Model::Known(Box::new(geometry)),
        (None, Some(name)) => Model::Named(name.clone()),
        (None, None) => {
            return Err(Error::new(ErrorKind::InvalidInput, "no model is named: the server would not find the chunks")
                .advice("name a preset with --model, or the server's model with --model-name"));
        }
    };
    if args.dry_run {
        let chunk_tokens = settings.chunk_size as usize;
        // A directory that is not there yet, or in which no cache has been opened, holds no chunks.
        let has_cache = |drive: &DriveSettings| drive.path.join("BUDGET").exists();
        let is_there = !settings.drives.is_empty() && settings.drives.iter().all(has_cache);
        let cache = is_there.then(|| Box::new(CacheSink::new(settings, model.clone(), false)) as Box<dyn Sink>);
        let geometry = model.geometry().cloned();
        return Ok(Arc::new(DryRun { cache, geometry, chunk_tokens, read: args.verify }));
    }
    Ok(Arc::new(CacheSink::new(settings, model, args.verify)))
}

/// The settings that a server would get from the file and the environment.
fn settings_of(args: &ImportArgs) -> Result<Settings> {
    if args.directory.is_none() && args.config.is_none() {
        return Err(Error::new(ErrorKind::InvalidInput, "no cache to fill")
            .advice("name it with --directory, or its settings with --config; --dry-run stores nothing"));
    }
    crate::settings::load((args.config.as_deref(), None), args.directory.as_slice(), args.dry_run.then_some(Mode::Ro))
}

/// Moves everything from the reader into the sink.
fn pump(paths: Vec<PathBuf>, sink: &Arc<dyn Sink>, options: ReadOptions, context: &Context) -> Result<Summary> {
    let bar = progress::bar(context, "import", paths.len() as u64, Unit::Count);
    let reader = Reader::start(paths, Arc::clone(sink), options)?;
    let mut summary = Summary { reader: reader.backend(), ..Summary::default() };
    for event in &reader {
        match event {
            Event::Begin { dump, present } => {
                summary.dumps.push(DumpReport::of(&dump, present, sink.chunk_tokens()));
                bar.inc(1);
            }
            Event::Piece(piece) => {
                summary.bytes_read += piece.bytes();
                sink.store(piece)?;
            }
            Event::Failed { path, error } => match summary.dumps.last_mut().filter(|d| d.path == path) {
                Some(begun) => begun.error = Some(error.to_string()),
                None => {
                    bar.inc(1);
                    summary.dumps.push(DumpReport::failed(path, &error));
                }
            },
        }
    }
    bar.finish_and_clear();
    let good = || summary.dumps.iter().filter(|d| d.error.is_none());
    summary.tokens = good().map(|d| d.tokens as u64).sum();
    summary.bytes = good().map(|d| d.bytes).sum();
    summary.failed = summary.dumps.len() - good().count();
    Ok(summary)
}

fn text(summary: &Summary) -> String {
    let mut table = Table::new();
    table.load_preset(presets::ASCII_MARKDOWN);
    table.set_header(["dump", "form", "tokens", "present", "layers", "dtype", "bytes"]);
    for d in summary.dumps.iter().filter(|d| d.error.is_none()) {
        table.add_row([
            d.path.display().to_string(),
            d.form.unwrap_or_default().to_owned(),
            d.tokens.to_string(),
            d.tokens_present.map_or_else(|| "-".to_owned(), |n| n.to_string()),
            d.layers.to_string(),
            d.dtype.clone().unwrap_or_default(),
            show_bytes(d.bytes as f64),
        ]);
    }
    for column in table.column_iter_mut().skip(2) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    let mut text = if summary.dumps.len() > summary.failed { format!("{table}\n") } else { String::new() };
    for d in &summary.dumps {
        if let Some(error) = &d.error {
            text.push_str(&format!("skipped: {error}\n"));
        }
    }
    text.push_str(&format!(
        "{} dumps, {} tokens, {}{}; {} skipped\n",
        summary.dumps.len() - summary.failed,
        summary.tokens,
        show_bytes(summary.bytes as f64),
        if summary.dry_run { " (nothing stored)" } else { "" },
        summary.failed,
    ));
    if summary.bytes_read > 0 {
        let rate = summary.bytes_read as f64 / summary.elapsed_s.max(1e-9);
        text.push_str(&format!(
            "read {} at {}/s with {}\n",
            show_bytes(summary.bytes_read as f64),
            show_bytes(rate),
            summary.reader
        ));
    }
    let done = &summary.imported;
    if !summary.dry_run {
        text.push_str(&format!(
            "{} chunks stored ({}), {} not taken\n",
            done.stored_chunks,
            show_bytes(done.stored_bytes as f64),
            done.shed_chunks
        ));
    }
    if !done.sheds.is_empty() {
        let causes: Vec<String> = done.sheds.iter().map(|(cause, chunks)| format!("{cause} {chunks}")).collect();
        text.push_str(&format!("not taken: {}; docs/metrics.md says what each cause means\n", causes.join(", ")));
    }
    if done.evicted_chunks > 0 {
        text.push_str(&format!(
            "{} chunks were evicted again: the dumps do not fit; raise `capacity`, or import fewer\n",
            done.evicted_chunks
        ));
    }
    if done.verified_bytes + done.lost_chunks > 0 {
        text.push_str(&format!(
            "verified {}: {} wrong bytes, {} chunks could not be loaded back\n",
            show_bytes(done.verified_bytes as f64),
            done.wrong_bytes,
            done.lost_chunks
        ));
    }
    text
}

#[cfg(test)]
mod tests;
