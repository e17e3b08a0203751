//! placeholder

use crate::out::{Context, Outcome};

#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:")]
pub(crate) struct ProbeArgs {}

pub(crate) fn run(_: &ProbeArgs, _: &Context) -> forebay::Result<Outcome> {
    Ok(Outcome::Done)
}
