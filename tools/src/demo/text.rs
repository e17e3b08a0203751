//! The demo's result for people.

use super::Summary;
use super::drive::DriveSpeed;
use crate::size::{show_bytes, show_bytes_decimal, show_count};

/// Lines that a reader understands without a manual.
pub(super) fn render(s: &Summary) -> String {
    let (served, after) = (&s.served, &s.after_kill);
    let bytes = |n: u64| show_bytes(n as f64);
    let tokens = |n: u64| show_count(n as f64);
    let rows = [
        ("trace", s.trace.clone()),
        ("requests", format!("{} with {} tokens", served.requests, tokens(served.asked_tokens))),
        ("hit ratio", format!("{:.1} % of the tokens ({})", s.hit_ratio * 100.0, tokens(served.hit_tokens))),
        (
            "cache",
            format!(
                "{}: {} chunks stored, {} reclaimed, {} shed",
                bytes(s.capacity_bytes),
                served.stored_chunks,
                served.evicted_chunks,
                served.shed_chunks
            ),
        ),
        ("drive alone", drive_alone(&s.drive)),
        (
            "loads",
            format!(
                "{} at {}, {:.0} % of the drive's own speed ({} loads)",
                bytes(served.loaded_bytes),
                rate(s.load_bps),
                s.load_share_of_drive * 100.0,
                served.loads
            ),
        ),
        (
            "of 4 chunks up",
            format!(
                "{} at {}, {:.0} % of the drive's own speed ({} loads)",
                bytes(served.long_bytes),
                rate(s.long_load_bps),
                s.long_load_share_of_drive * 100.0,
                served.overlapped_loads
            ),
        ),
        ("stores", format!("{} at {}", bytes(served.stored_bytes), rate(s.store_bps))),
        (
            "overlap",
            format!(
                "{:.2} of the best possible, computing as long as loading ({} loads)",
                s.overlap_efficiency, served.overlapped_loads
            ),
        ),
        (
            "after kill -9",
            format!(
                "reopened in {:.0} ms; {} of {} tokens still hit; {} loaded again",
                after.reopen_ms,
                tokens(after.held_tokens),
                tokens(served.held_tokens),
                bytes(after.verified_bytes)
            ),
        ),
        ("verified", format!("{}, wrong bytes: {}", bytes(s.verified_bytes), s.wrong_bytes)),
        ("time", format!("{:.0} s", s.elapsed_s)),
    ];
    let mut text = String::new();
    for (name, value) in rows {
        text.push_str(&format!("{name:>14}  {value}\n"));
    }
    text + "\n" + &result(s)
}

/// What it means, for somebody who sees it for the first time.
fn result(s: &Summary) -> String {
    let right = match s.wrong_bytes {
        0 => format!(
            "All {} that were loaded were compared, and every byte was right.",
            show_bytes(s.verified_bytes as f64)
        ),
        wrong => format!("{wrong} bytes that were loaded were WRONG: please report this."),
    };
    let kept = if s.after_kill.held_tokens < s.served.held_tokens {
        "lost what it had flushed"
    } else {
        "kept all that it had flushed"
    };
    format!(
        "Result: {:.0} % of the prompts' tokens were on the drive, and were loaded at {} instead of being computed again.\n\
         {right}\nKilled with its cache open, Forebay {kept}, and was open again after {:.0} ms.\n",
        s.hit_ratio * 100.0,
        rate(s.load_bps),
        s.after_kill.reopen_ms
    )
}

fn rate(bps: f64) -> String {
    format!("{}/s", show_bytes_decimal(bps))
}

fn drive_alone(drive: &DriveSpeed) -> String {
    format!(
        "read {} (median of {} between the requests, {} to {}), write {} ({}, {})",
        rate(drive.read_bps),
        drive.reads,
        rate(drive.read_range_bps.0),
        rate(drive.read_range_bps.1),
        rate(drive.write_bps),
        drive.path,
        if drive.direct { "O_DIRECT" } else { "buffered" }
    )
}
