//! The `forebay` program: benchmarks, cache warming, trace replay and inspection of a Forebay
//! cache.
//!
//! A library, so that the Python package carries the program too: [`run`] parses the command line,
//! sets up logging and turns the outcome into an exit code; each subcommand lives in its own
//! module. Results go to standard output, everything else (progress, warnings, errors) to standard
//! error, so that output can be piped.

// These macros panic where standard error cannot be written to; `out::tell` does not.
#![cfg_attr(not(test), deny(clippy::print_stderr))]

mod bench;
mod cli;
mod demo;
mod fsck;
#[doc(hidden)]
pub mod fuzzing;
mod ls;
mod out;
mod probe;
mod progress;
mod purge;
mod random;
mod remote;
mod replay;
mod report;
mod scratch;
mod settings;
mod size;
mod stat;
mod stop;
mod sync;
mod warm;

use std::ffi::OsString;
use std::io::Write as _;

use clap::Parser as _;
use forebay::ErrorKind;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::LevelFilter;

use crate::cli::{Cli, Command};
use crate::out::{Context, Outcome};

/// Runs the program with the arguments `args`, the program's name first, and gives its exit code.
/// To be called once in a process: it sets up logging.
#[must_use]
pub fn run(args: impl IntoIterator<Item = OsString>) -> u8 {
    let code = match Cli::try_parse_from(args) {
        Ok(cli) => {
            init_logging(cli.verbose);
            let context = Context { json: cli.json, quiet: cli.quiet };
            code_of(dispatch(cli.command, &context))
        }
        Err(e) => {
            // Help asked for is no error, and goes to standard output.
            let _ = e.print();
            u8::try_from(e.exit_code()).unwrap_or(out::EXIT_USAGE)
        }
    };
    // The Python package runs this in its own process, which does not flush it at its end.
    let _ = std::io::stdout().flush();
    code
}

fn code_of(outcome: forebay::Result<Outcome>) -> u8 {
    match outcome {
        Ok(outcome) => outcome.exit_code(),
        Err(e) => {
            out::tell(&e.to_string());
            match e.kind() {
                ErrorKind::InvalidInput | ErrorKind::Config => out::EXIT_USAGE,
                _ => out::EXIT_FAILED,
            }
        }
    }
}

fn dispatch(command: Command, context: &Context) -> forebay::Result<Outcome> {
    match command {
        Command::Demo(args) => demo::run(&args, context),
        Command::Bench(args) => bench::run(&args, context),
        Command::Replay(args) => replay::run(&args, context),
        Command::Warm(args) => warm::run(&args, context),
        Command::Probe(args) => probe::run(&args, context),
        Command::Fsck(command) => fsck::run(&command, context).map_err(advised),
        Command::Ls(args) => ls::run(&args, context).map_err(advised),
        Command::Stat(args) => stat::run(&args, context).map_err(advised),
        Command::Sync(command) => sync::run(&command, context).map_err(advised),
        Command::Purge(args) => purge::run(&args, context).map_err(advised),
    }
}

/// An error of work on a server's cache, whose files are the server's user's alone.
fn advised(error: forebay::Error) -> forebay::Error {
    if error.kind() == ErrorKind::Permission && error.advice_text().is_none() {
        return error.advice("run this as the servers' user");
    }
    error
}

/// What the variable says of logging; `None` where it is empty, or says nothing of it.
fn filter_of(variable: &str) -> Option<EnvFilter> {
    let value = std::env::var(variable).ok().filter(|value| !value.trim().is_empty())?;
    // Any other word is taken for the name of a module, and all others would be silent.
    let is_level = |word: &str| !word.is_empty() && word.parse::<LevelFilter>().is_ok();
    let has_level = value.split([',', '=']).any(|word| is_level(word.trim()));
    let filter = EnvFilter::try_new(&value).ok().filter(|_| has_level);
    if filter.is_none() {
        let levels = "off, error, warn, info, debug or trace";
        out::tell(&format!("warning: {variable}={value} names no level, and is passed over; write {levels}"));
    }
    filter
}

/// Logs to standard error: `FOREBAY_LOG` decides, then `RUST_LOG`, then `-v`.
fn init_logging(verbose: u8) {
    use std::io::IsTerminal as _;
    let default = match verbose {
        0 => "warn",
        1 => "info",
        2 => "debug",
        _ => "trace",
    };
    let filter = ["FOREBAY_LOG", "RUST_LOG"].into_iter().find_map(filter_of);
    let filter = filter.unwrap_or_else(|| EnvFilter::new(default));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .with_target(false)
        // It would say by a panic that standard error cannot be written to.
        .log_internal_errors(false)
        .init();
}
