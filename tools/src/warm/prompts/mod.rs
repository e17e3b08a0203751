//! `forebay warm prompts`: fills a cache by having a server compute prompts ahead of their users.
//!
//! `source` reads the prompts, `server` sends each as a one-token request, `journal` remembers
//! which are done; `launch` starts a server where none is running. The server does the storing,
//! with its connector; this program only reads what the cache lists, so it may run beside it.

mod journal;
mod launch;
mod server;
mod source;

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::Args;
use forebay::geometry::Geometry;
use forebay::key::ChunkKey;
use forebay::log::fsck::live;
use forebay::{Error, ErrorKind, Result};
use parking_lot::Mutex;
use serde::Serialize;

use crate::ls;
use crate::out::{self, Context, Outcome};
use crate::progress::{self, Unit};
use crate::replay::trace;
use crate::size::show_bytes;
use journal::Journal;
use launch::{Launch, Running};
use server::{Server, Usage};
use source::Prompt;

/// Characters of a token, for estimates where nothing is known of the tokenizer.
const CHARACTERS_PER_TOKEN: usize = 4;
/// Failures that are printed one by one.
const SHOWN_FAILURES: usize = 20;
/// Seconds that anything is waited for at most: a week.
const MAX_S: u64 = 7 * 24 * 3600;

/// Options of `forebay warm prompts`.
#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct PromptsArgs {
    /// Prompts: JSON lines with `prompt`, `prompt_token_ids` or `messages`; with --trace a request
    /// trace.
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// The file is a request trace in Mooncake's format; its token ids are made up.
    #[arg(long)]
    trace: bool,
    /// Vocabulary of the model, for the token ids of a trace.
    #[arg(long, default_value_t = 32_000, requires = "trace", value_name = "N", value_parser = clap::value_parser!(u32).range(64..))]
    vocab_size: u32,
    /// Running OpenAI-compatible server whose connector stores what it computes.
    #[arg(long, value_name = "URL", required_unless_present_any = ["launch", "dry_run"], conflicts_with = "launch")]
    server: Option<String>,
    /// Name of the model at the server [default: the first that it serves].
    #[arg(long, value_name = "NAME")]
    model: Option<String>,
    /// Key that the server wants; also from `OPENAI_API_KEY`.
    #[arg(long, value_name = "KEY")]
    api_key: Option<String>,
    /// Start a vLLM with this model, and stop it when all prompts are done.
    #[arg(long, value_name = "MODEL", requires = "directory")]
    launch: Option<String>,
    /// Cache directory that the started vLLM fills.
    #[arg(long, visible_alias = "cache-dir", value_name = "DIR", requires = "launch", conflicts_with = "server")]
    directory: Option<PathBuf>,
    /// Python that vllm and forebay are installed in.
    #[arg(long, default_value = "python3", requires = "launch", conflicts_with = "server", value_name = "PATH")]
    python: PathBuf,
    /// Seconds that the started vLLM may take to come up.
    #[arg(long, default_value_t = 900, requires = "launch", conflicts_with = "server", value_name = "S", value_parser = clap::value_parser!(u64).range(1..=MAX_S))]
    start_timeout: u64,
    /// Requests under way at once.
    #[arg(long, default_value_t = 8, value_name = "N", value_parser = super::parse_jobs)]
    jobs: usize,
    /// Seconds until a request counts as failed.
    #[arg(long, default_value_t = 600, value_name = "S", value_parser = clap::value_parser!(u64).range(1..=MAX_S))]
    timeout: u64,
    /// How often a request is tried again that the server could not take.
    #[arg(long, default_value_t = 6, value_name = "N")]
    retries: u32,
    /// File that records finished prompts; run the command again with it to continue.
    #[arg(long, value_name = "FILE")]
    journal: Option<PathBuf>,
    /// Count prompts and tokens, and send nothing.
    #[arg(long)]
    dry_run: bool,
    /// Model preset whose bytes per token the dry run counts with.
    #[arg(long, requires = "dry_run", value_name = "PRESET")]
    preset: Option<String>,
    /// Prompt tokens per second that the dry run reckons with.
    #[arg(long, requires = "dry_run", value_name = "N", value_parser = parse_rate)]
    prefill_rate: Option<f64>,
    /// Further arguments of the started vLLM.
    #[arg(last = true, value_name = "ARGS", requires = "launch", conflicts_with = "server")]
    vllm_args: Vec<String>,
}

fn parse_rate(text: &str) -> std::result::Result<f64, String> {
    let rate = text.parse().ok().filter(|rate: &f64| rate.is_finite() && *rate > 0.0);
    rate.ok_or_else(|| "not a number above 0".to_owned())
}

const AFTER_HELP: &str = "\
Every prompt is sent with max_tokens 1: the server computes its KV and its connector stores it. Prompts that the cache has already cost \
a load and one token. Exit status 3: a prompt failed, or a vLLM that was started has stored nothing.

Examples:
  forebay warm prompts system-prompts.jsonl --server http://localhost:8000 --journal warmed
  forebay warm prompts prompts.jsonl --launch meta-llama/Llama-3.1-8B --cache-dir /mnt/nvme/forebay
  forebay warm prompts trace.jsonl --trace --dry-run --preset llama-3.1-8b --prefill-rate 20000";

/// What became of the prompts.
#[derive(Clone, Debug, Default, Serialize)]
struct Summary {
    dry_run: bool,
    prompts: usize,
    /// Done by an earlier run.
    skipped: usize,
    done: usize,
    failed: usize,
    prompt_tokens: u64,
    /// Tokens that the server had already; without those of answers that do not say.
    cached_tokens: u64,
    /// Tokens that the server computed, of answers that say how many it had.
    computed_tokens: u64,
    /// Answers that do not say how many tokens the server had.
    answers_without_cached_tokens: usize,
    /// Tokens are estimated from characters for so many prompts (dry run).
    estimated_prompts: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    estimated_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    estimated_s: Option<f64>,
    failures: Vec<Failure>,
    /// Chunks that the cache directory of a launched server lists and did not list before.
    #[serde(skip_serializing_if = "Option::is_none")]
    stored_chunks: Option<usize>,
    elapsed_s: f64,
}

#[derive(Clone, Debug, Serialize)]
struct Failure {
    line: usize,
    error: String,
}

/// Runs `forebay warm prompts`.
pub(crate) fn run(args: &PromptsArgs, context: &Context) -> Result<Outcome> {
    let prompts = read(args)?;
    let journal =
        args.journal.as_deref().map(|path| Journal::open(path, !args.dry_run)).transpose()?.unwrap_or_default();
    let total = prompts.len();
    let left: Vec<Prompt> = prompts.into_iter().filter(|p| !journal.contains(&p.digest())).collect();
    let mut summary =
        Summary { dry_run: args.dry_run, prompts: total, skipped: total - left.len(), ..Summary::default() };
    if args.dry_run {
        estimate(args, &left, &mut summary)?;
    } else if !left.is_empty() {
        let before = listed(args)?;
        let running = launch(args)?;
        let address = running.as_ref().map(|r| r.address.clone()).or_else(|| args.server.clone()).unwrap_or_default();
        let key = args.api_key.clone().or_else(|| std::env::var("OPENAI_API_KEY").ok());
        let server = Server::new(&address, key, (Duration::from_secs(args.timeout), args.retries))?;
        let model = args.model.clone().map_or_else(|| server.model(), Ok)?;
        let started = Instant::now();
        send(&left, (&server, &model, args.jobs), &journal, &mut summary, context)?;
        summary.elapsed_s = started.elapsed().as_secs_f64();
        // It finishes its stores when it is stopped.
        drop(running);
        let after = listed(args).unwrap_or_else(|e| {
            tracing::warn!(error = %e, "what was stored cannot be counted");
            None
        });
        summary.stored_chunks = before.zip(after).map(|(before, after)| after.difference(&before).count());
    }
    if context.json {
        out::print_json(&summary)?;
    } else {
        out::print(&text(&summary))?;
    }
    Ok(if summary.failed > 0 || summary.stored_nothing() { Outcome::Problem } else { Outcome::Done })
}

/// Keys that the cache directory of a server to launch lists, each with its shard's place.
fn listed(args: &PromptsArgs) -> Result<Option<HashSet<(PathBuf, ChunkKey)>>> {
    let (Some(_), Some(directory)) = (&args.launch, &args.directory) else { return Ok(None) };
    // The server makes a cache of a directory that is none yet.
    if !directory.join("BUDGET").exists() {
        return Ok(Some(HashSet::new()));
    }
    let (shards, _) = ls::shards(directory)?;
    let keys = shards.iter().flat_map(|(files, lanes)| {
        let place = files.first().map_or_else(PathBuf::new, |f| Path::new(&f.namespace).join(&f.shard));
        live(lanes, ls::now_s()).into_iter().map(move |(_, record)| (place.clone(), record.key))
    });
    Ok(Some(keys.collect()))
}

fn read(args: &PromptsArgs) -> Result<Vec<Prompt>> {
    let prompts = if args.trace {
        source::of_trace(&trace::read_trace(&args.file)?, args.vocab_size)
    } else {
        source::read_prompts(&args.file)?
    };
    if prompts.is_empty() {
        return Err(Error::new(ErrorKind::InvalidInput, "no prompt in the file")
            .at(&args.file)
            .advice("write a JSON object in each line, with `prompt`, `text`, `prompt_token_ids` or `messages`"));
    }
    Ok(prompts)
}

fn launch(args: &PromptsArgs) -> Result<Option<Running>> {
    let (Some(model), Some(directory)) = (&args.launch, &args.directory) else { return Ok(None) };
    let cache_dir = std::path::absolute(directory).map_err(|e| Error::io("no such path", e).at(directory))?;
    let launch = Launch {
        python: Path::new(&args.python),
        model,
        cache_dir: &cache_dir,
        args: &args.vllm_args,
        patience: Duration::from_secs(args.start_timeout),
    };
    launch.start().map(Some)
}

fn estimate(args: &PromptsArgs, prompts: &[Prompt], summary: &mut Summary) -> Result<()> {
    for prompt in prompts {
        let tokens = prompt.tokens().unwrap_or_else(|| {
            summary.estimated_prompts += 1;
            prompt.characters().div_ceil(CHARACTERS_PER_TOKEN)
        });
        summary.prompt_tokens += tokens as u64;
    }
    if let Some(preset) = &args.preset {
        let per_token = Geometry::preset(preset)?.chunk_bytes(1) as u64;
        summary.estimated_bytes = Some(per_token.saturating_mul(summary.prompt_tokens));
    }
    summary.estimated_s = args.prefill_rate.map(|rate| summary.prompt_tokens as f64 / rate);
    Ok(())
}

/// Sends all prompts from several threads; an error ends it: the server is gone, or the journal
/// cannot be written.
fn send(
    prompts: &[Prompt],
    (server, model, jobs): (&Server, &str, usize),
    journal: &Journal,
    summary: &mut Summary,
    context: &Context,
) -> Result<()> {
    let bar = progress::bar(context, "warm", prompts.len() as u64, Unit::Count);
    let next = Mutex::new(prompts.iter());
    let shared = Mutex::new((summary, None));
    std::thread::scope(|scope| {
        for _ in 0..jobs.min(prompts.len()) {
            scope.spawn(|| {
                loop {
                    let Some(prompt) = next.lock().next().filter(|_| shared.lock().1.is_none()) else { return };
                    let answer = server.warm(prompt, model);
                    let noted = match &answer {
                        Ok(_) => journal.add(&prompt.digest()),
                        Err(why) if !server.is_up() => Err(gone(why)),
                        Err(_) => Ok(()),
                    };
                    let mut shared = shared.lock();
                    shared.0.count(prompt, answer);
                    if let Err(e) = noted {
                        shared.1 = Some(e);
                    }
                    bar.inc(1);
                }
            });
        }
    });
    bar.finish_and_clear();
    shared.into_inner().1.map_or(Ok(()), Err)
}

fn gone(why: &str) -> Error {
    Error::new(ErrorKind::Io, format!("the server does not answer any more: {why}"))
        .advice("its own messages say why; with --journal the same command goes on where this one has ended")
}

impl Summary {
    /// A launched server has computed all prompts, and the cache has got nothing of it.
    fn stored_nothing(&self) -> bool {
        self.stored_chunks == Some(0) && self.done > 0 && self.cached_tokens == 0
    }

    fn count(&mut self, prompt: &Prompt, answer: std::result::Result<Usage, String>) {
        match answer {
            Ok(usage) => {
                self.done += 1;
                self.prompt_tokens += usage.prompt_tokens;
                match usage.cached_tokens {
                    Some(cached) => {
                        self.cached_tokens += cached;
                        self.computed_tokens += usage.prompt_tokens.saturating_sub(cached);
                    }
                    None => self.answers_without_cached_tokens += 1,
                }
            }
            Err(error) => {
                self.failed += 1;
                self.failures.push(Failure { line: prompt.line, error });
            }
        }
    }
}

fn text(summary: &Summary) -> String {
    let mut text = String::new();
    for failure in summary.failures.iter().take(SHOWN_FAILURES) {
        text.push_str(&format!("line {}: {}\n", failure.line, failure.error));
    }
    if summary.failures.len() > SHOWN_FAILURES {
        text.push_str(&format!("… and {} more\n", summary.failures.len() - SHOWN_FAILURES));
    }
    text.push_str(&format!("{} prompts, {} of them done before\n", summary.prompts, summary.skipped));
    if summary.dry_run {
        let about = if summary.estimated_prompts > 0 { "about " } else { "" };
        text.push_str(&format!("{about}{} tokens to compute at most (nothing sent)\n", summary.prompt_tokens));
        if let Some(bytes) = summary.estimated_bytes {
            text.push_str(&format!(
                "{about}{} of KV at most; shared prefixes are stored once\n",
                show_bytes(bytes as f64)
            ));
        }
        if let Some(seconds) = summary.estimated_s {
            text.push_str(&format!("{about}{seconds:.0} s of prefill\n"));
        }
        return text;
    }
    let rate = summary.prompt_tokens as f64 / summary.elapsed_s.max(1e-9);
    text.push_str(&format!(
        "{} sent in {:.1} s, {} failed; {} prompt tokens ({rate:.0}/s)\n",
        summary.done, summary.elapsed_s, summary.failed, summary.prompt_tokens
    ));
    text.push_str(&format!(
        "the server had {} tokens already and computed {}\n",
        summary.cached_tokens, summary.computed_tokens
    ));
    if summary.answers_without_cached_tokens > 0 {
        text.push_str(&format!(
            "{} answers did not say how many (start vLLM with --enable-prompt-tokens-details)\n",
            summary.answers_without_cached_tokens
        ));
    }
    if let Some(chunks) = summary.stored_chunks {
        text.push_str(&format!("{chunks} chunks are new in the cache directory\n"));
    }
    if summary.stored_nothing() {
        text.push_str(
            "nothing was stored: `forebay probe DIR` tells whether the drive has room; vLLM's messages are above, and \
             prompts shorter than a chunk (256 tokens) are not stored. A journal counts these prompts as done: delete \
             it before the next run\n",
        );
    }
    text
}

#[cfg(test)]
mod tests;
