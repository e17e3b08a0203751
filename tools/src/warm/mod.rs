//! placeholder

use crate::out::{Context, Outcome};

#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:")]
pub(crate) struct WarmArgs {}

pub(crate) fn run(_: &WarmArgs, _: &Context) -> forebay::Result<Outcome> {
    Ok(Outcome::Done)
}
