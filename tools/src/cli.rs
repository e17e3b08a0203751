//! The command line: global options and the list of subcommands. Each subcommand's own options live
//! in its module.

use clap::{Parser, Subcommand, ValueEnum};

/// KV-cache offload for LLM servers on local NVMe: measure it, warm it, replay traces against it,
/// look into it.
#[derive(Debug, Parser)]
#[command(name = "forebay", version, max_term_width = 110, after_help = AFTER_HELP)]
pub(crate) struct Cli {
    /// Print machine-readable JSON instead of text.
    #[arg(long, global = true)]
    pub(crate) json: bool,
    /// No progress bars.
    #[arg(long, short, global = true)]
    pub(crate) quiet: bool,
    /// More log lines on standard error (-v info, -vv debug); `FOREBAY_LOG` and `RUST_LOG`
    /// override it.
    #[arg(long, short, global = true, action = clap::ArgAction::Count)]
    pub(crate) verbose: u8,
    #[command(subcommand)]
    pub(crate) command: Command,
}

const AFTER_HELP: &str = "\
Exit status: 0 done; 1 an error stopped the work; 2 wrong usage or input; 3 the work ran to its end and found a problem \
(a byte that differs, a dump that cannot be read, a damaged cache, a machine that cannot hold one); 129, 130 or 143 SIGHUP, SIGINT or SIGTERM ended a benchmark, `replay` or `sync` early.

Examples:
  forebay demo
  forebay probe /mnt/nvme/forebay
  forebay bench --rw read --bs 1m --iodepth 32 --size 4g --directory /mnt/nvme
  forebay replay trace.jsonl --capacity-tokens 3m,10m --policy lru,fifo
  forebay warm import dumps/ --dry-run
  forebay stat /mnt/nvme/forebay";

/// What to do.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Run a request trace through the real engine in a temporary directory, verify every byte,
    /// kill and reopen it.
    Demo(crate::demo::DemoArgs),
    /// Measure raw I/O or the whole engine with fio's options, output and JSON.
    Bench(Box<crate::bench::BenchArgs>),
    /// Replay a Mooncake-format request trace against cache sizes and policies.
    Replay(Box<crate::replay::ReplayArgs>),
    /// Fill a cache ahead of time.
    Warm(crate::warm::WarmArgs),
    /// Copy a cache to a remote store, or from there to a drive, ahead of time.
    #[command(subcommand)]
    Sync(crate::sync::SyncCommand),
    /// Say what would stop or slow a cache on this machine and in a directory, each with its
    /// remedy.
    Probe(crate::probe::ProbeArgs),
    /// Check a cache's files, print what its index lists, or rebuild a damaged index.
    #[command(subcommand)]
    Fsck(crate::fsck::FsckCommand),
    /// List what a cache serves.
    Ls(crate::ls::LsArgs),
    /// Show how full a cache is, and with what.
    Stat(crate::stat::StatArgs),
    /// Remove what a cache holds, also while servers use it.
    Purge(crate::purge::PurgeArgs),
}

/// The word by which the command line knows a value.
pub(crate) fn word(value: impl ValueEnum) -> String {
    value.to_possible_value().map_or_else(String::new, |known| known.get_name().to_owned())
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    #[test]
    fn the_command_line_is_consistent_and_every_subcommand_shows_examples() {
        let mut command = super::Cli::command();
        command.build();
        command.clone().debug_assert();
        fn visit(command: &clap::Command) {
            for sub in command.get_subcommands().filter(|s| s.get_name() != "help") {
                if sub.has_subcommands() {
                    visit(sub);
                } else {
                    let help = sub.get_after_help().map(ToString::to_string).unwrap_or_default();
                    assert!(help.contains("Examples:"), "`{}` has no examples", sub.get_name());
                }
            }
        }
        visit(&command);
    }
}
