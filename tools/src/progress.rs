//! Progress bars on standard error; hidden with `--json`, `--quiet` or when standard error is no
//! terminal.

use std::borrow::Cow;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::out::Context;

/// What a bar counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unit {
    /// Bytes, shown with binary prefixes and a rate.
    Bytes,
    /// Things, shown as a plain count.
    Count,
    /// Nothing: the time that has passed.
    Time,
}

/// A bar over `total` units with a label; `total` 0 shows a counter without an end.
pub(crate) fn bar(context: &Context, label: impl Into<Cow<'static, str>>, total: u64, unit: Unit) -> ProgressBar {
    let hidden = context.json || context.quiet;
    let target = if hidden { ProgressDrawTarget::hidden() } else { ProgressDrawTarget::stderr() };
    let length = if total == 0 { None } else { Some(total) };
    let template = match (unit, length) {
        (Unit::Bytes, Some(_)) => "{msg} [{bar:30}] {bytes}/{total_bytes} {binary_bytes_per_sec} {eta}",
        (Unit::Bytes, None) => "{msg} {spinner} {bytes} {binary_bytes_per_sec}",
        (Unit::Count, Some(_)) => "{msg} [{bar:30}] {pos}/{len} {eta}",
        (Unit::Count, None) => "{msg} {spinner} {pos}",
        (Unit::Time, _) => "{msg} {spinner} {elapsed}",
    };
    let bar = ProgressBar::with_draw_target(length, target).with_message(label);
    match ProgressStyle::with_template(template) {
        Ok(style) => bar.with_style(style.progress_chars("=> ")),
        Err(_) => bar,
    }
}
