//! `forebay replay`: what a request trace would have found in a cache of a given size under a given
//! policy.
//!
//! `trace` reads the requests, `chunks` has caches of single chunks, `sim` one that reclaims in
//! segments by a `policy`, `real` is the log, `ranks` several logs side by side; `tiers` reads the
//! sizes of tiers, `chart` draws the result.
//! Another cache is replayed through the same loop by implementing [`ReplayCache`]; this module
//! must not know how one works inside.

mod chart;
mod chunks;
mod policy;
mod ranks;
mod real;
mod tiers;
pub(crate) mod trace;

use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};
use comfy_table::{CellAlignment, Table, presets};
use forebay::geometry::Geometry;
use forebay::index::AdmissionPolicy;
use forebay::{Error, ErrorKind, Result};
use serde::Serialize;

use crate::cli::word;
use crate::out::{self, Context, Outcome};
use crate::progress::{self, Unit};
use crate::{size, stop};
pub(crate) use policy::PolicyKind;
use tiers::Tiers;
pub(crate) use trace::{BLOCK_TOKENS, Request, parse_trace, read_trace};

/// Share of the hits that `adaptive` may cost where nobody says otherwise.
const ADMISSION_LOSS: f64 = 0.06;
/// Bytes of a real log's files where nobody says otherwise.
const LOG_BYTES: u64 = 3 << 30;
/// Neighbours that change places where nobody says otherwise.
const WINDOW: usize = 4;
/// Seed of the ranks' orders where nobody says otherwise.
const SEED: u64 = 1;

/// Options of `forebay replay`.
#[derive(Clone, Debug, Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct ReplayArgs {
    /// Trace in Mooncake's format: one JSON object per line with timestamp, `input_length`,
    /// `output_length`, `hash_ids`.
    pub(crate) trace: PathBuf,
    /// Cache sizes in tokens, comma-separated, decimal (`3m` = 3,000,000); `unlimited` for a cache
    /// that keeps everything.
    #[arg(long, value_delimiter = ',', default_value = "3m,10m,20m", value_parser = size::parse_tokens, value_name = "N,…")]
    pub(crate) capacity_tokens: Vec<u64>,
    /// Policies, comma-separated; `prefix` is the one a cache uses without settings.
    #[arg(long, value_delimiter = ',', default_value = "prefix", value_name = "NAME,…")]
    pub(crate) policy: Vec<PolicyKind>,
    /// Model whose bytes per token turn tokens into bytes.
    #[arg(long, default_value = "llama-3.1-8b", value_name = "PRESET")]
    pub(crate) model: String,
    /// `sim` counts without payload; `real` runs the log with its files, without payload.
    #[arg(long, value_enum, default_value_t = ReplayEngine::Sim)]
    pub(crate) engine: ReplayEngine,
    /// What is stored at all, comma-separated.
    #[arg(long, value_delimiter = ',', value_enum, default_value = "all", value_name = "NAME,…")]
    pub(crate) admission: Vec<AdmissionKind>,
    /// With --admission adaptive: share of the hits that it may cost by its own estimate [default:
    /// 0.06].
    #[arg(long, value_parser = share, value_name = "SHARE")]
    pub(crate) admission_loss: Option<f64>,
    /// Tokens of a tier in memory above the drive, which keeps what was used last; for simulated
    /// caches of single chunks, and for one real log, with the engine's own tier.
    #[arg(long, default_value = "0", value_parser = size::parse_tokens, value_name = "N")]
    pub(crate) memory_tokens: u64,
    /// Sizes of the tiers in tokens, as `memory=3m,drive=20m,remote=unlimited`; one that is not
    /// named is not there. In the place of --capacity-tokens and --memory-tokens.
    #[arg(long, value_parser = tiers::parse, conflicts_with_all = ["capacity_tokens", "memory_tokens"], value_name = "TIER=N,…")]
    pub(crate) tiers: Option<Tiers>,
    /// When a block is offered to the drive, comma-separated; `evicted` with --memory-tokens.
    #[arg(long, value_delimiter = ',', value_enum, default_value = "stored", value_name = "WHEN,…")]
    pub(crate) offer: Vec<chunks::Offer>,
    /// With --engine real: where its files go, in a temporary directory that is removed [default:
    /// .].
    #[arg(long, value_name = "DIR")]
    pub(crate) directory: Option<PathBuf>,
    /// With --engine real: bytes that its files take at most, all ranks together. With few bytes,
    /// what a log needs besides its slots takes a larger part of the capacity than in service
    /// [default: 3g].
    #[arg(long, value_parser = size::parse_bytes, value_name = "SIZE")]
    pub(crate) log_bytes: Option<u64>,
    /// With --engine real: tensor-parallel ranks with a log of their own each, comma-separated. A
    /// prompt is found as far as all ranks have it.
    #[arg(long, value_delimiter = ',', default_value = "1", value_parser = clap::value_parser!(u32).range(1..=64), value_name = "N,…")]
    pub(crate) ranks: Vec<u32>,
    /// With --engine real: up to N blocks of a rank, drawn anew each time, are still on their way
    /// when the next request is looked up.
    #[arg(long, default_value = "0", value_parser = clap::value_parser!(u64).range(..=4096), value_name = "N")]
    pub(crate) behind: u64,
    /// With several ranks, or --behind: blocks are stored in the prompt's order, except that each
    /// rank stores groups of N neighbours in an order of its own [default: 4].
    #[arg(long, value_name = "N")]
    pub(crate) window: Option<usize>,
    /// With --engine real and one rank: the cache is closed and opened anew after every N requests,
    /// as servers are that get a new version.
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..), value_name = "N")]
    pub(crate) restart_every: Option<u64>,
    /// With several ranks, or --behind: seed of the ranks' orders [default: 1].
    #[arg(long, value_name = "N")]
    pub(crate) seed: Option<u64>,
    /// Draw hit ratio and write amplification over the capacity into this SVG file.
    #[arg(long, value_name = "FILE")]
    pub(crate) chart: Option<PathBuf>,
    /// Only the first N requests.
    #[arg(long, value_name = "N")]
    pub(crate) limit: Option<usize>,
}

const AFTER_HELP: &str = "\
A request's prompt is found up to the first block that is missing; hit_ratio is the tokens found over the tokens asked. \
\
With several tiers it counts what any of them has; memory_hit_ratio, drive_hit_ratio and remote_hit_ratio are their parts of it, and a token \
counts for the first that has it. The remote store gets every full chunk that the drive has stored, and evicts the oldest. Missing blocks are stored after the lookup, \
as far as --admission wants them. bytes_admitted are the bytes stored, write_amplification the bytes written \
for each of them (above 1 where a policy moves chunks to keep them): of all, of those before the cache was nine tenths full, and of those after.

Examples:
  forebay replay trace.jsonl
  forebay replay trace.jsonl --policy fifo,lru,s3fifo,2q,arc,gdsf,lirs,sieve,prefix,optimum --chart replay.svg
  forebay replay trace.jsonl --capacity-tokens 3m,10m,unlimited --policy lru,fifo,prefix --json
  forebay replay trace.jsonl --tiers memory=3m,drive=20m,remote=unlimited
  forebay replay trace.jsonl --policy prefix --admission all,second_touch,adaptive --memory-tokens 3m --capacity-tokens 5m
  forebay replay trace.jsonl --engine real --directory /mnt/nvme --policy lru,fifo
  forebay replay trace.jsonl --engine real --directory /mnt/nvme --capacity-tokens 10m --ranks 1,8";

/// A share as settings take it.
fn share(text: &str) -> Result<f64, String> {
    let share = text.parse::<f64>().map_err(|e| e.to_string())?;
    if (0.0..=1.0).contains(&share) { Ok(share) } else { Err("write a share from 0 to 1".to_owned()) }
}

/// Which blocks are stored, by the names that settings give.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "snake_case")]
pub(crate) enum AdmissionKind {
    /// All.
    All,
    /// Those that come for the second time.
    SecondTouch,
    /// All but those of kinds that seldom come back.
    Adaptive,
}

impl AdmissionKind {
    fn policy(self, loss: f64) -> AdmissionPolicy {
        match self {
            Self::All => AdmissionPolicy::All,
            Self::SecondTouch => AdmissionPolicy::SecondTouch,
            Self::Adaptive => AdmissionPolicy::Adaptive { loss },
        }
    }
}

/// What a trace is replayed against.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum ReplayEngine {
    /// A simulated cache without payload.
    Sim,
    /// The engine with its files.
    Real,
}

/// A cache under replay.
pub(crate) trait ReplayCache {
    /// Serves one request: finds its prefix, stores what is missing. Returns the tokens found.
    fn request(&mut self, request: &Request) -> Result<u64>;
    /// Tokens stored so far: asked for by requests, and written in all (moved chunks included).
    fn totals(&self) -> Totals;
}

/// What a cache has written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Totals {
    /// Tokens admitted after a miss.
    pub(crate) admitted_tokens: u64,
    /// Tokens written, those included that were moved to stay.
    pub(crate) written_tokens: u64,
    /// Tokens found in the memory above the drive.
    pub(crate) memory_tokens: u64,
    /// Tokens found in the remote store alone.
    pub(crate) remote_tokens: u64,
}

/// One line of the result.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct ReplayResult {
    /// Policy as asked for.
    pub(crate) policy: String,
    /// Ranks, each with a cache of its own.
    pub(crate) ranks: u32,
    /// What is stored at all.
    pub(crate) admission: String,
    /// Tokens of the memory above the drive.
    pub(crate) memory_tokens: u64,
    /// Tokens of the remote store below it; null for an unlimited one.
    pub(crate) remote_tokens: Option<u64>,
    /// When blocks are offered to the drive.
    pub(crate) offer: String,
    /// Capacity in tokens, of each rank; null for an unlimited cache.
    pub(crate) capacity_tokens: Option<u64>,
    /// Tokens found as a usable prefix over tokens asked.
    pub(crate) hit_ratio: f64,
    /// The part of it that the memory had.
    pub(crate) memory_hit_ratio: f64,
    /// The part that the drive had, and the memory had not.
    pub(crate) drive_hit_ratio: f64,
    /// The part that only the remote store had.
    pub(crate) remote_hit_ratio: f64,
    /// Bytes stored after misses.
    pub(crate) bytes_admitted: u64,
    /// Bytes written over bytes admitted; 1 where nothing was admitted.
    pub(crate) write_amplification: f64,
    /// The same until as much was admitted as makes the cache nine tenths full.
    pub(crate) write_amplification_filling: f64,
    /// The same from then on; null for a cache that never was.
    pub(crate) write_amplification_full: Option<f64>,
}

/// A cache counts as full at this many tenths of its capacity.
const FULL_TENTHS: u64 = 9;

/// Runs `forebay replay`.
pub(crate) fn run(args: &ReplayArgs, context: &Context) -> Result<Outcome> {
    let mut args = args.clone();
    let remote = args.tiers.map_or(0, |tiers| {
        (args.memory_tokens, args.capacity_tokens) = (tiers.memory, vec![tiers.drive]);
        tiers.remote
    });
    let args = &args;
    let geometry = Geometry::preset(&args.model)?;
    let bytes_per_token =
        (geometry.chunk_bytes(geometry.chunk_tokens as usize) / geometry.chunk_tokens as usize) as u64;
    let mut requests = read_trace(&args.trace)?;
    requests.truncate(args.limit.unwrap_or(usize::MAX));
    let asked: u64 = requests.iter().map(|r| r.input_length).sum();
    let next = chunks::next_uses(&requests);
    let runs = runs(args, remote);
    check_options(args)?;
    runs.iter().try_for_each(|run| check(args, *run))?;
    if args.chart.is_some() && runs.iter().all(|run| run.capacity == u64::MAX) {
        return Err(Error::new(
            ErrorKind::InvalidInput,
            "a chart has the capacities on its axis, and all are unlimited",
        )
        .advice("give sizes to --capacity-tokens, or leave --chart out"));
    }
    // A real log's files are removed, however this ends.
    stop::listen()?;
    let bar = progress::bar(context, "replay", (requests.len() * runs.len()) as u64, Unit::Count);
    let mut results = Vec::with_capacity(runs.len());
    let mut replay_all = || -> Result<Outcome> {
        for &run in &runs {
            let mut cache = open_cache(args, run, (bytes_per_token, &next))?;
            let mut found = 0;
            let mut filling = None;
            for request in &requests {
                if let Some(signal) = stop::signal() {
                    return Ok(Outcome::Interrupted(signal));
                }
                found += cache.request(request)?;
                let is_full = |t: &Totals| t.admitted_tokens >= run.capacity / 10 * FULL_TENTHS;
                filling = filling.or_else(|| Some(cache.totals()).filter(is_full));
                bar.inc(1);
            }
            results.push(summarise(args, run, (found, asked), (cache.totals(), filling, bytes_per_token)));
        }
        Ok(Outcome::Done)
    };
    let outcome = replay_all();
    bar.finish_and_clear();
    if !matches!(outcome, Ok(Outcome::Done)) && !results.is_empty() {
        out::tell(&format!("{} of {} replays ended; these are their figures", results.len(), runs.len()));
    }
    if matches!(outcome, Ok(Outcome::Done)) || !results.is_empty() {
        if context.json {
            out::print_json(&results)?;
        } else {
            out::print(&table(&results))?;
        }
    }
    if let Some(path) = args.chart.as_ref().filter(|_| matches!(outcome, Ok(Outcome::Done))) {
        chart::draw(path, &results)?;
    }
    outcome
}

/// One replay of the trace.
#[derive(Clone, Copy, Debug)]
struct Run {
    policy: PolicyKind,
    capacity: u64,
    ranks: u32,
    admission: AdmissionKind,
    offer: chunks::Offer,
    remote: u64,
}

/// All replays that were asked for.
fn runs(args: &ReplayArgs, remote: u64) -> Vec<Run> {
    let mut runs = Vec::new();
    for &policy in &args.policy {
        for &capacity in &args.capacity_tokens {
            for &ranks in &args.ranks {
                for &offer in &args.offer {
                    runs.extend(args.admission.iter().map(|&admission| Run {
                        policy,
                        capacity,
                        ranks,
                        admission,
                        offer,
                        remote,
                    }));
                }
            }
        }
    }
    runs
}

/// Refuses options that no replay would use: figures would be taken for what they are not.
fn check_options(args: &ReplayArgs) -> Result<()> {
    let is_real = args.engine == ReplayEngine::Real;
    let has_orders = is_real && (args.behind > 0 || args.ranks.iter().any(|&ranks| ranks > 1));
    let is_adaptive = args.admission.contains(&AdmissionKind::Adaptive);
    let orders = "--engine real, and --ranks above 1 or --behind";
    let given = [
        ("--directory", args.directory.is_some(), is_real, "--engine real"),
        ("--log-bytes", args.log_bytes.is_some(), is_real, "--engine real"),
        ("--window", args.window.is_some(), has_orders, orders),
        ("--seed", args.seed.is_some(), has_orders, orders),
        ("--admission-loss", args.admission_loss.is_some(), is_adaptive, "--admission adaptive"),
    ];
    match given.into_iter().find(|(_, is_given, is_used, _)| *is_given && !is_used) {
        None => Ok(()),
        Some((name, _, _, needed)) => Err(Error::new(ErrorKind::InvalidInput, format!("{name} needs {needed}"))
            .advice(format!("add what it needs, or leave {name} out"))),
    }
}

/// Refuses what no cache can do, before any replay begins.
fn check(args: &ReplayArgs, run: Run) -> Result<()> {
    let Run { ranks, offer, .. } = run;
    let simulated = args.engine == ReplayEngine::Sim;
    let real = args.engine == ReplayEngine::Real && ranks == 1 && args.behind == 0 && args.restart_every.is_none();
    if args.memory_tokens > 0 && !simulated && !real || offer == chunks::Offer::Evicted && !simulated {
        return Err(Error::new(
            ErrorKind::InvalidInput,
            "--memory-tokens does not work with --ranks, --behind or --restart-every, and --offer evicted not with --engine real",
        )
        .advice("leave out one of these"));
    }
    if run.remote > 0 && !simulated {
        return Err(Error::new(ErrorKind::InvalidInput, "a remote store is only simulated")
            .advice("leave --engine real out, or remote= in --tiers"));
    }
    if !simulated && run.capacity < real::LEAST_TOKENS {
        let why = format!("the engine's log needs at least {} tokens", real::LEAST_TOKENS);
        return Err(Error::new(ErrorKind::InvalidInput, why).advice("use --engine sim for fewer"));
    }
    let one = ranks == 1 && args.behind == 0;
    if args.restart_every.is_some() && !(one && args.engine == ReplayEngine::Real) {
        return Err(Error::new(
            ErrorKind::InvalidInput,
            "--restart-every works with --engine real, and without --ranks and --behind",
        )
        .advice("leave out --restart-every, or what it does not work with"));
    }
    if simulated && !one {
        return Err(Error::new(ErrorKind::InvalidInput, "--ranks and --behind need --engine real")
            .advice("add --engine real, or leave them out"));
    }
    Ok(())
}

/// The cache to replay against.
fn open_cache(
    args: &ReplayArgs,
    run: Run,
    (bytes_per_token, next): (u64, &chunks::NextUses),
) -> Result<Box<dyn ReplayCache>> {
    let Run { policy, capacity, ranks, offer, .. } = run;
    let admission = run.admission.policy(args.admission_loss.unwrap_or(ADMISSION_LOSS));
    let place = (args.directory.as_deref().unwrap_or(Path::new(".")), args.log_bytes.unwrap_or(LOG_BYTES));
    match (args.engine, ranks == 1 && args.behind == 0) {
        (ReplayEngine::Sim, _) => {
            let others =
                chunks::OtherTiers { memory_tokens: args.memory_tokens, remote_tokens: run.remote, offer, admission };
            Ok(Box::new(chunks::ChunkSim::new(policy, capacity, next, others)?))
        }
        (ReplayEngine::Real, true) => {
            let sizes = (capacity, bytes_per_token);
            let cache = real::RealCache::open(place, (policy, admission, offer), sizes)?;
            let cache = cache.with_memory(args.memory_tokens)?;
            Ok(Box::new(cache.with_restarts(args.restart_every.map(|n| usize::try_from(n).unwrap_or(usize::MAX)))))
        }
        (ReplayEngine::Real, _) => {
            let (seed, window) = (args.seed.unwrap_or(SEED), args.window.unwrap_or(WINDOW));
            let disorder = ranks::Disorder { seed, window, behind: args.behind };
            let sizes = (capacity, bytes_per_token);
            Ok(Box::new(ranks::Ranks::open(place, (policy, admission, offer), sizes, (ranks, disorder))?))
        }
    }
}

fn summarise(
    args: &ReplayArgs,
    Run { policy, capacity, ranks, admission, offer, remote }: Run,
    (found, asked): (u64, u64),
    (totals, filling, bytes_per_token): (Totals, Option<Totals>, u64),
) -> ReplayResult {
    let ratio = |a: u64, b: u64, empty: f64| if b == 0 { empty } else { a as f64 / b as f64 };
    let amplification = |from: Totals, to: Totals| {
        ratio(to.written_tokens - from.written_tokens, to.admitted_tokens - from.admitted_tokens, 1.0)
    };
    ReplayResult {
        policy: word(policy),
        ranks,
        admission: word(admission),
        memory_tokens: args.memory_tokens,
        remote_tokens: (remote != u64::MAX).then_some(remote),
        offer: word(offer),
        capacity_tokens: (capacity != u64::MAX).then_some(capacity),
        hit_ratio: ratio(found, asked, 0.0),
        memory_hit_ratio: ratio(totals.memory_tokens, asked, 0.0),
        drive_hit_ratio: ratio(found.saturating_sub(totals.memory_tokens + totals.remote_tokens), asked, 0.0),
        remote_hit_ratio: ratio(totals.remote_tokens, asked, 0.0),
        bytes_admitted: totals.admitted_tokens.saturating_mul(bytes_per_token),
        write_amplification: amplification(Totals::default(), totals),
        write_amplification_filling: amplification(Totals::default(), filling.unwrap_or(totals)),
        write_amplification_full: filling.map(|filling| amplification(filling, totals)),
    }
}

fn table(results: &[ReplayResult]) -> String {
    let mut table = Table::new();
    table.load_preset(presets::ASCII_MARKDOWN);
    table.set_header([
        "policy",
        "ranks",
        "admission",
        "offer",
        "capacity",
        "hit ratio",
        "of memory",
        "of the drive",
        "of the remote",
        "admitted",
        "write amplification",
        "filling",
        "full",
    ]);
    for r in results {
        let capacity =
            r.capacity_tokens.map_or("unlimited".to_owned(), |c| format!("{} tokens", size::show_count(c as f64)));
        table.add_row([
            r.policy.clone(),
            r.ranks.to_string(),
            r.admission.clone(),
            r.offer.clone(),
            capacity,
            format!("{:.4}", r.hit_ratio),
            format!("{:.4}", r.memory_hit_ratio),
            format!("{:.4}", r.drive_hit_ratio),
            format!("{:.4}", r.remote_hit_ratio),
            size::show_bytes(r.bytes_admitted as f64),
            format!("{:.3}", r.write_amplification),
            format!("{:.3}", r.write_amplification_filling),
            r.write_amplification_full.map_or("-".to_owned(), |full| format!("{full:.3}")),
        ]);
    }
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    format!("{table}\n")
}
